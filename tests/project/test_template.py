"""The template project and examples/atari: the games, what they are made of, and (slow) that they learn."""

import argparse
import asyncio
import contextlib
import itertools
import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch

import bray
from bray import tree
from bray.cli.main import main
from bray.config import load_yaml
from bray.data.files import EpisodeReader, write_episodes
from bray.envs.check import check_env
from bray.envs.config import EnvConfig
from bray.errors import UnknownName
from bray.inference.host import ModelHost
from bray.inference.torch_engine import TorchEngine
from bray.launch.build import build
from bray.launch.graph import load
from bray.league import IN_RUN, ResultLog, read_league
from bray.remote.actor.policy_agent import PolicyAgent
from bray.remote.algo import algo_setup
from bray.serving.agent import AgentActor
from bray.serving.background import BackgroundServer
from bray.serving.config import ServiceConfig
from bray.serving.episodes import pack_state, read_episode, write_episode
from examples.atari import (
    actor as atari_actor,
    gamecore as atari_games,
    launch as atari_launch,
    trainer as atari_trainer,
)
from examples.atari.model import AtariModel
from template import gamecore, matches
from template.games import make_game
from template.games.grid import DOOR, SIZE, WALL, GridEnv
from template.models.model1 import Model1
from template.renders import render1
from template.tests.test_project import demonstration
from tests.ray_for_tests import opened

ROOT = Path(__file__).parents[2]
TEMPLATE = ROOT / "template"


@pytest.fixture
def quiet(monkeypatch):
    """Numbers go nowhere: there is no session."""
    monkeypatch.setattr(bray, "merge", lambda *a, **k: None)  # first: bray finds its own in the others
    for place in ("bray.remote.master.merge", "bray.remote.master.handle.merge"):
        monkeypatch.setattr(place, lambda *a, **k: None)


class Pushed:
    def __init__(self):
        self.samples = []

    def push(self, *samples, drop=True):
        self.samples += samples

    def push_batch(self, batch, drop=True):
        self.push(*tree.split(batch))
        taken = asyncio.get_running_loop().create_future()
        taken.set_result(None)
        return taken  # unlike a coroutine, nobody has to wait for it


# --- the grid game ----------------------------------------------------------------------------------------------------


def test_the_grid_game_is_a_sound_environment():
    assert check_env(EnvConfig(id="template.games.grid:GridEnv")) == []


def test_the_mean_of_the_best_returns_is_what_the_game_says():
    """Over all places that the agent, the key and the goal can have, each as likely as the others."""
    left = list(itertools.product(range(SIZE), range(WALL)))
    right = list(itertools.product(range(SIZE), range(WALL + 1, SIZE)))

    def apart(a, b):
        return abs(a[0] - b[0]) + abs(a[1] - b[1])

    to_key = np.mean([apart(a, k) + apart(k, DOOR) for a, k in itertools.permutations(left, 2)])
    to_goal = np.mean([apart(DOOR, g) for g in right])
    mean = 1.0 - 0.01 * (to_key + to_goal)
    assert f"{mean:.3f}" in sys.modules[GridEnv.__module__].__doc__
    env = GridEnv()
    seen = []
    for seed in range(2000):
        env.reset(seed=seed)
        seen.append(env.best_return())
    assert np.mean(seen) == pytest.approx(mean, abs=0.003)


def test_moves_at_random_are_bad():
    env, rng, returns = GridEnv(), np.random.default_rng(0), []
    for seed in range(100):
        env.reset(seed=seed)
        total, over = 0.0, False
        while not over:
            _, reward, terminated, truncated, _ = env.step(int(rng.integers(4)))
            total, over = total + reward, terminated or truncated
        returns.append(total)
    assert np.mean(returns) < -0.3


def test_a_seed_is_a_game():
    env, again = GridEnv(), GridEnv()
    a, b = ([g.reset(seed=5)[0], *(g.step(i % 4)[0] for i in range(20))] for g in (env, again))
    assert all(np.array_equal(x, y) for x, y in zip(a, b, strict=True))
    assert not np.array_equal(env.reset(seed=5)[0], env.reset(seed=6)[0])


def test_an_unknown_game_is_told():
    with pytest.raises(ValueError, match="unknown game 'chess': grid, atari or atari:NAME"):
        make_game("chess")


# --- the files --------------------------------------------------------------------------------------------------------

SEED_KEYS = {  # of the original's launch file
    "model": "checkpoint_interval checkpoint max_batch_size num_workers cpus_per_worker gpus_per_worker "
    "memory_per_worker "
    "use_onnx local_mode override_model tensorboard_graph tensorboard_step module kind",
    "source": "kind enable module func num_workers epoch",
    "buffer": "kind enable size batch_size num_workers density",
    "agent": "kind module class",
    "actor": "kind port num_workers actors_per_worker cpus_per_worker memory_per_worker use_tcp use_gateway agents "
    "episode_length episode_save_interval serialize tick_input_proto tick_output_proto",
    "render": "kind module func",
    "trainer": "kind enable module class model buffers buffer_weights eval use_gpu num_workers cpus_per_worker "
    "batch_size "
    "batch_kind prefetch_size max_reuse learning_rate clip_grad_max_norm weights_publish_interval num_steps",
    "config": "kind",
}


@pytest.mark.parametrize("name", ["rl", "sl", "sl_rl"])
def test_launch_files_show_every_key_and_say_what_it_is(name):
    file = TEMPLATE / f"{name}.yaml"
    values = load_yaml(file).values
    for component in values.values():
        if isinstance(component, dict):
            assert set(SEED_KEYS[component["kind"]].split()) <= set(component)
    commented: set[str] = set()
    for line in file.read_text().splitlines():
        key, colon, rest = line.strip().partition(":")
        if colon and "#" in rest:
            commented.add(key)
    used = {k for c in values.values() if isinstance(c, dict) for k in c}
    assert used - commented <= {"kind", "message", "sources", "agents", "class", "gamma", "settings", "enable"}
    assert "class" in commented


def test_the_commands_of_the_readme_are_understood(capsys):
    """Launch files and their overrides load, and the game takes its flags."""
    text = (TEMPLATE / "README.md").read_text().replace("\\\n", " ")
    commands = [
        shlex.split(line, comments=True) for line in text.splitlines() if line.startswith(("bray launch", "python -m"))
    ]
    assert len(commands) >= 7
    for command in commands:
        if command[:4] == ["bray", "launch", "--config", "template/league.yaml"]:
            assert main(["train", "-f", str(TEMPLATE / "league.yaml"), "--print-config"]) == 0
        elif command[0] == "bray":
            parser = argparse.ArgumentParser()
            parser.add_argument("--config")
            parser.add_argument("--trial")
            parser.add_argument("--mode")
            parser.add_argument("keys", nargs="*")
            a = parser.parse_intermixed_args(command[2:])
            graph = load(ROOT / a.config, a.keys, a.mode, a.trial)
            if "pong" in command:
                setup = algo_setup(graph.config["ppo"])
                assert list(setup.spec.observation.shape) == graph.config["network"]["state_space"]
                assert setup.spec.num_actions == graph.config["network"]["action_space"]
        else:
            program = {"template.gamecore": gamecore, "template.matches": matches}[command[2]]
            with pytest.raises(SystemExit) as ended:
                program.main([*command[3:], "--help"])
            assert ended.value.code == 0
    capsys.readouterr()


def test_a_copy_of_the_template_passes_its_own_test(tmp_path):
    env = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    bin = Path(sys.executable).parent
    made = subprocess.run([bin / "bray", "new", "mygame"], cwd=tmp_path, env=env, capture_output=True, text=True)
    assert made.returncode == 0, made.stderr
    tested = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "mygame/tests"],
        cwd=tmp_path, env=env, capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    assert tested.returncode == 0, tested.stdout[-3000:]
    assert " passed" in tested.stdout
    assert "skipped" not in tested.stdout


def test_saved_episodes_can_be_drawn(tmp_path, quiet):
    """What agents leave in a State survives the episode file, and is all that renders need."""
    algo = {"algorithm": "PPO", "env": "template.games.grid:GridEnv"}
    host = ModelHost("m", TorchEngine(Model1([5, 7, 7], 4)))
    config = {"ppo": algo, "agent1": {"algo": "ppo", "model": host, "buffer": Pushed()}}
    states = []

    class Watches(PolicyAgent):
        async def on_episode(self, episode, done):
            states.extend(episode)

    async def play():
        actor = AgentActor({"agent1": Watches}, config, serialize="json")
        await actor.start("g", b"")
        env = GridEnv()
        obs, _ = env.reset(seed=3)
        for _ in range(6):
            reply = await actor.tick(json.dumps({"obs": gamecore.array(obs), "reward": 0.0}).encode())
            obs, *_ = env.step(json.loads(reply)["action"])
        await actor.end(b"")

    asyncio.run(play())
    file = write_episode(tmp_path, "g", 0, [pack_state(s) for s in states], keep=1)
    read = read_episode(file)
    for i in range(6):
        np.testing.assert_array_equal(render1.render(read, i), render1.render(states, i))
        np.testing.assert_array_equal(render1.action_distribution(read, i), render1.action_distribution(states, i))


# --- games over the network -------------------------------------------------------------------------------------------


def play_for(games, number, enough, seconds=120.0):
    """Let games be played until it is enough."""
    threads = [threading.Thread(target=games.play, args=(i,), daemon=True) for i in range(number)]
    for thread in threads:
        thread.start()
    end = time.monotonic() + seconds
    while not enough() and time.monotonic() < end:
        time.sleep(0.05)
    games.over.set()
    for thread in threads:
        thread.join(20)
    assert enough(), f"{games.ticks} ticks in {seconds} s; {games.trouble}"


@pytest.mark.parametrize(("game", "shape", "actions"), [("grid", [5, 7, 7], 4), ("atari", [4, 42, 42], 6)])
def test_the_gamecore_plays_with_a_policy_agent(game, shape, actions, quiet):
    if game == "atari":
        pytest.importorskip("ale_py")
    env = {"grid": "template.games.grid:GridEnv", "atari": "template.games.atari:AtariEnv"}[game]
    buffer = Pushed()
    host = ModelHost("m", TorchEngine(Model1(shape, actions)))
    config = {"ppo": {"algorithm": "PPO", "env": env}, "agent1": {"algo": "ppo", "model": host, "buffer": buffer}}
    service = ServiceConfig(port=0, admin_port=0)

    def make_actor():
        return AgentActor({"agent1": PolicyAgent}, config, episode_length=8, serialize="json")

    with BackgroundServer(make_actor, service) as server:
        games = gamecore.Games(game, "127.0.0.1", server.port)
        play_for(games, 3, lambda: games.ticks >= (150 if game == "atari" else 500))
    assert not games.trouble
    assert len(buffer.samples) >= 100
    assert all(list(s["obs"].shape) == shape for s in buffer.samples)
    assert {int(s["action"]) for s in buffer.samples} == set(range(actions))
    if game == "grid":
        assert games.episodes == len(games.returns) > 0


@pytest.mark.parametrize("arguments", [["--games", "0"], ["--processes", "0"]])
def test_no_games_at_all_are_refused(arguments, capsys):
    with pytest.raises(SystemExit):
        gamecore.main(arguments)
    assert "expected at least one game and one process" in capsys.readouterr().err


def test_games_wait_for_a_service_that_is_not_there_yet():
    with BackgroundServer(lambda: None, ServiceConfig(port=0, admin_port=0)) as server:
        port = server.port
    games = gamecore.Games("grid", "127.0.0.1", port)
    play_for(games, 1, lambda: "connect_failed" in games.trouble)
    assert games.ticks == 0


# --- examples/atari ---------------------------------------------------------------------------------------------------


def test_the_examples_advantages_by_hand():
    rewards, values, after = [1.0, -2.0, 0.5], [0.3, 1.1, -0.4], 2.0
    rows = [
        {"obs": np.zeros(1), "action": i, "logp": 0.0, "value": np.float32(v), "reward": r}
        for i, (r, v) in enumerate(zip(rewards, values, strict=True))
    ]
    follow = [*values[1:], after]
    deltas = [r + 0.99 * f - v for r, f, v in zip(rewards, follow, values, strict=True)]
    want = [sum((0.99 * 0.95) ** k * d for k, d in enumerate(deltas[t:])) for t in range(3)]
    got = atari_actor.samples(rows, after)
    np.testing.assert_allclose([s["advantage"] for s in got], want, rtol=1e-6)
    np.testing.assert_allclose([s["target"] for s in got], np.array(want) + values, rtol=1e-6)
    assert [s["action"] for s in got] == [0, 1, 2]


class Answers:
    """In place of a RemoteModel: values by the first byte of the observation."""

    async def forward(self, obs):
        return np.float32(obs.flat[0]), np.array([0.0, 5.0, 0.0, 0.0], np.float32)


def make_actor(learns=True):
    made = atari_actor.AtariActor.__new__(atari_actor.AtariActor)
    made.model, made.buffer, made.shape = Answers(), Pushed() if learns else None, (5, 7, 7)
    made.rng = np.random.default_rng(0)
    return made


def picture(value):
    return np.full((5, 7, 7), value, np.uint8)


def test_the_examples_actor_bootstraps_a_cut_game_and_not_one_that_is_over(quiet):
    async def play(terminated):
        actor = make_actor()
        actor.start("g", b"")
        for value in (1, 2):
            await actor.tick(atari_games.pack(picture(value), 0.5))
        await actor.end(atari_games.pack(picture(9), 0.5, terminated, not terminated))
        return actor.buffer.samples

    over, cut = asyncio.run(play(True)), asyncio.run(play(False))
    assert len(over) == len(cut) == 2
    assert float(over[1]["target"]) == pytest.approx(0.5)
    assert float(cut[1]["target"]) == pytest.approx(0.5 + 0.99 * 9)


def test_the_examples_actor_plays_its_best_without_a_buffer_and_survives_a_game_that_breaks_off(quiet):
    async def play():
        actor = make_actor(learns=False)
        actor.start("g", b"")
        replies = [await actor.tick(atari_games.pack(picture(1), 0.0)) for _ in range(300)]
        await actor.end(b"")
        return replies

    assert set(asyncio.run(play())) == {b"1"}


def test_the_examples_train_step_follows_its_loss(quiet):
    torch.manual_seed(0)
    model = AtariModel((5, 7, 7), 4)
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    rng = np.random.default_rng(0)
    rows = {
        "obs": rng.integers(0, 255, (64, 5, 7, 7), np.uint8),
        "action": np.arange(64) % 4,
        "logp": np.full(64, np.log(0.25), np.float32),
        "advantage": np.where(np.arange(64) % 4 == 3, 1.0, -1.0).astype(np.float32),
        "target": np.ones(64, np.float32),
    }
    replay = tree.map(torch.from_numpy, rows)
    for _ in range(8):
        atari_trainer.train_step(model, optimizer, replay)
    value, logits = model(replay["obs"])
    assert set(logits.argmax(-1).tolist()) == {3}
    assert value.mean().item() > 0.2


@pytest.mark.parametrize("game", ["grid", pytest.param("Pong", marks=pytest.mark.slow)])
def test_the_example_trains_and_what_it_learnt_is_served(game, tmp_path, monkeypatch):
    """launch.py and deploy.py in this process, with games over HTTP."""
    if game != "grid":
        pytest.importorskip("ale_py")
    ports, tests = [], []

    class Actor(bray.RemoteActor):
        def serve(self, *args, **kwargs):
            super().serve(*args, **kwargs)
            ports.append(self.port)

    def until(poll=None):
        """In place of waiting for Ctrl-C."""
        try:
            tests.pop()(poll)
        finally:
            bray.shutdown()

    def train(poll):
        games = atari_games.Games(game, "127.0.0.1", ports[-1])
        play_for(games, 6, poll)
        assert bray.RemoteModel("atari_model").step >= 2

    def deploy(poll):
        games = atari_games.Games(game, "127.0.0.1", ports[-1])
        play_for(games, 2, lambda: games.ticks >= 20)
        assert bray.RemoteModel("atari_model").step >= 2
        with contextlib.suppress(UnknownName):
            assert bray.query("train/loss") is None  # nobody trains

    monkeypatch.setattr(bray, "RemoteActor", Actor)
    monkeypatch.setattr(bray, "run_until_asked_to_stop", until)
    flags = ["--game", game, "--cluster", "local", "--port", "0", "--project", str(tmp_path), "--trial", "t"]
    tests.append(train)
    atari_launch.main([*flags, "--num-steps", "8"])
    from examples.atari import deploy as atari_deploy

    tests.append(deploy)
    atari_deploy.main(flags)
    assert not tests


def push_rows(count):
    rng = np.random.default_rng(0)
    buffer = bray.RemoteBuffer("atari_buffer")
    for _ in range(count):
        buffer.push(
            {
                "obs": rng.integers(0, 255, (5, 7, 7), np.uint8),
                "action": np.int64(rng.integers(4)),
                "logp": np.float32(np.log(0.25)),
                "advantage": np.float32(rng.normal()),
                "target": np.float32(1.0),
            },
            drop=False,
        )


@pytest.mark.slow
def test_the_example_trains_on_two_ranks_of_ray(tmp_path):
    with opened(tmp_path):
        model = bray.RemoteModel(
            "atari_model", AtariModel((5, 7, 7), 4), (np.zeros((5, 7, 7), np.uint8),), local_mode=True
        )
        bray.RemoteBuffer("atari_buffer", size=16, batch_size=16, num_workers=1)
        before, _ = model.get_weights()
        trainer = bray.RemoteTrainer(use_gpu=False, num_workers=2, cpus_per_worker=1)
        trained = trainer.train(
            train=atari_trainer.train_atari, model="atari_model", buffer="atari_buffer",
            batch_size=1, weights_publish_interval=4, num_steps=8,
        )  # fmt: skip
        push_rows(16 * 8)
        assert trained.result(timeout=240) is not None
        after, step = model.get_weights()
        assert step == 2
        assert any(not np.array_equal(before[k], after[k]) for k in before)


# --- launching --------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def launched(tmp_path, name, *keys):
    """`bray launch` of a template file in one process, with demonstrations and a free port; ended by force if need
    be."""
    write_episodes(tmp_path / "demonstrations" / "episodes", [demonstration(seed) for seed in range(40)])
    words = [sys.executable, "-m", "bray", "launch", "--config", str(TEMPLATE / f"{name}.yaml"), "--cluster", "local"]
    words += ["--project", str(tmp_path), "actor1.port=0", "trainer1.num_steps=1000000", *keys]
    if name != "rl":
        words.append(f"demonstrations.path={tmp_path / 'demonstrations'}")
    process = subprocess.Popen(
        words, cwd=tmp_path, env=ENVIRONMENT, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


ENVIRONMENT = {
    **os.environ,
    "PYTHONPATH": str(ROOT),
    "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
    "COLUMNS": "400",
}


def play(command, seconds):
    """Type a hint of `bray launch`, for so many seconds; what it says."""
    own, outside = command.rstrip(")"), ")" if command.endswith(")") else ""
    typed = f"{own} --seconds {seconds}{outside}"
    done = subprocess.run(typed, shell=True, env=ENVIRONMENT, text=True, capture_output=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("name", ["rl", "sl", "sl_rl"])
def test_a_template_is_launched_played_as_its_hint_says_and_stopped_by_ctrl_c(name, tmp_path):
    with launched(tmp_path, name) as process:
        hint = next(line.partition("try: ")[2].strip() for line in process.stdout if "try: " in line)
        said = play(hint, 3)
        assert "ticks/s" in said
        assert "They try again" not in said
        port = hint.partition("--port ")[2].split()[0]
        fake = f"bray fake gamecore --port {port} --config {TEMPLATE / name}.yaml"
        assert "no errors" in play(fake, 1)
        process.send_signal(signal.SIGINT)
        out, _ = process.communicate(timeout=120)
        assert process.returncode == 0, out
    weights = tmp_path / load(TEMPLATE / f"{name}.yaml").settings.trial / "models" / "model1"
    assert max(int(file.stem) for file in weights.glob("*.safetensors")) > 0  # it has trained


# --- learning ---------------------------------------------------------------------------------------------------------


def launch(tmp_path, name, ticks, *changes, seconds=500.0):
    """Train with a launch file and 32 games until so many ticks; the mean return of the last games."""
    graph = load(TEMPLATE / f"{name}.yaml", ["actor1.port=0", *changes], project=str(tmp_path), trial=name)
    session = bray.init(graph.settings.project, graph.settings.trial, cluster="local")
    try:
        run = build(graph, session)
        games = gamecore.Games("grid", "127.0.0.1", run.actors["actor1"].port)
        play_for(games, 32, lambda: games.ticks >= ticks, seconds)
        assert not games.trouble
        print(f"{name}: {games.ticks} ticks, step {run.models['model1'].step}, return {np.mean(games.returns):.3f}")
        return float(np.mean(games.returns)), run.models["model1"].step
    finally:
        bray.shutdown()


@pytest.mark.slow
def test_reinforcement_learns_over_the_network(tmp_path):
    result, step = launch(tmp_path, "rl", 70_000)
    assert result > 0.8
    assert step > 500


@pytest.mark.slow
def test_demonstrations_beat_plain_reinforcement_at_equal_steps(tmp_path, monkeypatch):
    """The demonstrations are those of the README: an expert trained in one process, and `bray collect`."""
    monkeypatch.chdir(tmp_path)
    assert main(["train", "-f", str(TEMPLATE / "expert.yaml"), "--project", "runs", "--trial", "expert"]) == 0
    assert main(["collect", "runs/expert", "--episodes", "500"]) == 0
    path = Path("runs/expert/trajectories").absolute()
    returns = [float(e["reward"].sum()) for e in EpisodeReader(path)]
    assert np.mean(returns) > 0.88
    alone, _ = launch(tmp_path / "a", "rl", 25_000)
    both, _ = launch(tmp_path / "b", "sl_rl", 25_000, f"demonstrations.path={path}")
    assert both > alone + 0.15


@pytest.mark.slow
def test_imitation_plays_like_its_demonstrations(tmp_path):
    write_episodes(tmp_path / "demonstrations" / "episodes", [demonstration(seed) for seed in range(500)])
    changes = [f"demonstrations.path={tmp_path / 'demonstrations'}", "trainer1.num_steps=2000"]
    graph = load(TEMPLATE / "sl.yaml", [*changes, "actor1.port=0"], project=str(tmp_path), trial="sl")
    session = bray.init(graph.settings.project, graph.settings.trial, cluster="local")
    try:
        run = build(graph, session)
        run.ends["trainer1"].result(timeout=500)
        assert bray.query("eval/accuracy") > 0.5
        games = gamecore.Games("grid", "127.0.0.1", run.actors["actor1"].port)
        play_for(games, 8, lambda: games.episodes >= 100)
        assert np.mean(games.returns) > 0.7
    finally:
        bray.shutdown()


# --- the league -------------------------------------------------------------------------------------------------------


def free_port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


@pytest.mark.parametrize(
    "command",
    [
        ["launch", "--config", "template/league.yaml"],
        ["train", "-f", "template/league.yaml", "--trial", "league"],
    ],
)
def test_the_league_learns_from_its_matches(tmp_path, capsys, monkeypatch, command):
    monkeypatch.chdir(ROOT)
    port, path = free_port(), tmp_path / "league"
    keys = [f"live.port={port}", "live.rows=64", "stop.env_steps_total=400", "iteration_steps=100", "save_figure=false"]
    words = [*command, *keys, "--project", str(tmp_path)]
    played = matches.Matches("127.0.0.1", port)
    threads = [threading.Thread(target=played.play, daemon=True) for _ in range(4)]
    for thread in threads:
        thread.start()
    try:
        assert main(words) == 0
        if command[0] == "launch":  # the same again goes on
            assert main([*words, "stop.env_steps_total=600"]) == 0
    finally:
        played.over.set()
        for thread in threads:
            thread.join(60.0)
    found = read_league(path / IN_RUN)
    assert {ref.side for ref in found.refs} == {"main", "second", "hunter"}
    counted = sum(event.id is not None for event in ResultLog(path / IN_RUN).read())
    assert counted >= played.told["count"] > 10
    capsys.readouterr()
    assert main(["league", str(path)]) == 0
    assert "hunter@0" in capsys.readouterr().out


@pytest.mark.parametrize("words", [["--check"], ["--mode", "deploy"], ["--graph", "x.svg"]])
def test_what_is_for_components_says_what_to_write_for_a_league(capsys, monkeypatch, words):
    monkeypatch.chdir(ROOT)
    assert main(["launch", "--config", "template/league.yaml", *words]) == 2
    assert "bray serve runs/league serves it" in capsys.readouterr().err.replace("\n", " ")
