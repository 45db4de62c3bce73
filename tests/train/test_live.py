"""`bray train --live`: games of any language call, one process answers and learns, and `bray serve` then answers the
same games."""

import asyncio
import contextlib
import copy
import dataclasses
import gc
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from pathlib import Path

import numpy as np
import pytest
import torch

from bray import tree
from bray.cli.main import main
from bray.client import Client, ClientError
from bray.data.files import write_episodes
from bray.errors import ConfigError
from bray.experiment import Experiment
from bray.figures import read_results
from bray.rundir import RunDir
from bray.spec import EnvSpec, parse_space
from bray.train import driver
from bray.train.agent import TickBatcher
from tests import forked
from tests.rl.test_rl import slow_gae
from tests.serving_for_tests import Wire

ROOT = Path(__file__).parents[2]
LONG = 240.0  # seconds; the only limit of time: a training that hangs fails its test
TINY = {"rollout_length": 16, "minibatches": 1, "epochs": 1, "rows": 64}
TINY_WORDS = [f"{k}={v}" for k, v in TINY.items()]


# --- games ------------------------------------------------------------------------------------------------------------


class Sign:
    """Eight ticks of a number each; saying its sign (1 above 0) is worth 1. What it sent and got is kept."""

    length = 8

    def __init__(self, port, seed=0, mask=None, pause=0.0):
        self.port, self.mask, self.pause = port, mask, pause
        self.rng = np.random.default_rng(seed)
        self.error, self.versions, self.actions, self.returns = None, [], [], []
        self.over = threading.Event()
        self.broken = None

    def obs(self):
        return [float(self.rng.choice([-1.0, 1.0])), 1.0]

    def tick(self, client, obs, reward, terminated=False, truncated=False):
        body = {"obs": obs, "reward": reward, "terminated": terminated, "truncated": truncated}
        if self.mask is not None:
            body["action_mask"] = self.mask(obs)
        reply = client.tick(body)
        self.versions.append(reply["version"])
        if self.mask is not None:
            assert body["action_mask"][reply["action"]], "an illegal choice"
        return reply["action"]

    def episode(self, client):
        obs, reward, total = self.obs(), 0.0, 0.0
        for _ in range(self.length):
            action = self.tick(client, obs, reward)
            self.actions.append((obs, action))
            reward = float((action == 1) == (obs[0] > 0))
            total += reward
            obs = self.obs()
            time.sleep(self.pause)
        self.tick(client, obs, reward, terminated=True)
        self.returns.append(total)

    def play(self, episodes=1_000_000):
        """Until it is over or the service refuses."""
        try:
            with Client("127.0.0.1", self.port, retries=0) as client:
                client.start()
                while episodes and not self.over.is_set():
                    self.episode(client)
                    episodes -= 1
        except ClientError as e:
            self.error = e
        except BaseException as e:  # of the game itself
            self.error = self.broken = e
            raise


@contextlib.contextmanager
def playing(*games):
    """Games in threads; afterwards they are ended and joined."""
    threads = [threading.Thread(target=g.play, daemon=True) for g in games]
    for thread in threads:
        thread.start()
    try:
        yield games
    finally:
        for g in games:
            g.over.set()
        for thread in threads:
            thread.join(LONG)
            assert not thread.is_alive()
    assert not [g.broken for g in games if g.broken]


def train(exp, games=(), **stop):
    """The rows of a training, which ends early where a game breaks or when it takes too long."""
    over = threading.Event()

    def watch():
        end = time.monotonic() + LONG
        while not over.wait(0.2):
            if time.monotonic() > end or any(g.broken for g in games):
                exp.request_stop()

    threading.Thread(target=watch, daemon=True).start()
    try:
        return list(exp.train(stop=stop))
    finally:
        over.set()


@contextlib.contextmanager
def experiment(path, obs="float32[2]", actions=2, **settings):
    """A live experiment in this process, closed in the end."""
    settings = {"run": "PPO", "obs": obs, "actions": actions, "save_figure": False, **TINY, **settings}
    exp = Experiment(live=True, port=0, path=path, **settings)
    try:
        yield exp
    finally:
        exp.close()


def port_of(exp):
    return exp.training.source.port


def page(exp_or_port):
    port = exp_or_port if isinstance(exp_or_port, int) else exp_or_port.training.source.admin_port
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/training", timeout=LONG) as reply:
        return json.load(reply)


def until(holds, what):
    end = time.monotonic() + LONG
    while not holds():
        assert time.monotonic() < end, what
        time.sleep(0.02)


# --- the command ------------------------------------------------------------------------------------------------------


class Command:
    """A `bray` command in a process of its own, its output read as it comes."""

    def __init__(self, folder, *words):
        environment = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1", "COLUMNS": "200"}
        self.process = forked.Popen(
            [sys.executable, "-m", "bray", *map(str, words)],
            cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip
        self.lines = []
        self._reading = threading.Thread(target=self._read, daemon=True)
        self._reading.start()

    def _read(self):
        for line in self.process.stdout:
            self.lines.append(line)

    @property
    def out(self):
        return "".join(self.lines)

    def find(self, pattern):
        """The first group, when it has been printed."""
        until(lambda: re.search(pattern, self.out) or self.process.poll() is not None, f"{pattern} in {self.out}")
        found = re.search(pattern, self.out)
        assert found, self.out
        return found[1]

    @property
    def port(self):
        return int(self.find(r"POST http://127\.0\.0\.1:(\d+)/step"))

    @property
    def admin_port(self):
        return int(self.find(r"http://127\.0\.0\.1:(\d+)/training"))

    def wait(self):
        code = self.process.wait(LONG)
        self._reading.join(LONG)
        return code

    def end(self):
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()


@contextlib.contextmanager
def bray(folder, *words):
    command = Command(folder, *words)
    try:
        yield command
    finally:
        command.end()


def live_words(obs="float32[2]", actions="2", *more):
    words = ["train", "--run", "PPO", "--live", "--port", "0", "--obs", obs, "--actions", actions]
    return [*words, "--project", ".", "--trial", "t", "iteration_steps=0", *more]


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


@contextlib.contextmanager
def served(folder, run):
    port = free_port()
    with bray(folder, "serve", run, "--port", port, "--admin-port", free_port()) as command:

        def answers():
            assert command.process.poll() is None, command.out
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1.0):
                return True
            return False

        until(answers, command.out)
        yield port


@pytest.mark.slow
def test_the_templates_games_train_a_run_that_serves_them(tmp_path):
    """--stop by steps ends it while 4 games play; the same games then play against `bray serve`."""
    from template.gamecore import Games

    words = live_words("uint8[5,7,7]", "4", "--stop", '{"env_steps_total": 1500}', "wait_s=5", *TINY_WORDS)
    with bray(tmp_path, *words) as command:
        port = command.port
        run = tmp_path / "t"
        until(lambda: (run / "checkpoints").exists() and RunDir.open(run).steps() == [0], command.out)
        assert page(command.admin_port)["env_steps_total"] == 0  # it is there before the first game is
        games = Games("grid", "127.0.0.1", port)
        threads = [threading.Thread(target=games.play, args=(i,), daemon=True) for i in range(4)]
        for thread in threads:
            thread.start()
        assert command.wait() == 0, command.out
        games.over.set()
        for thread in threads:
            thread.join(LONG)
        assert "Traceback" not in command.out
        assert "Traceback" not in (run / "bray.log").read_text()
        assert "reached env_steps_total" in command.out
        assert "bray serve" in command.out
        assert "bray eval" not in command.out
    rows = read_results(run)
    assert 1500 <= rows[-1]["env_steps_total"] < 3000
    assert rows[-1]["learner_steps_total"] >= 10
    assert (run / "figures" / "learning_curve.png").exists()
    with served(tmp_path, run) as port:
        again = Games("grid", "127.0.0.1", port)
        with Client("127.0.0.1", port) as client:
            from template.games import make_game

            client.start()
            again.episode(client, make_game("grid"), 0)
        assert again.episodes == 1


@pytest.fixture(scope="module")
def corridor(tmp_path_factory):
    """A game in C++."""
    compiler = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("no C++ compiler")
    program = tmp_path_factory.mktemp("cpp") / "corridor"
    source = [f"-I{ROOT / 'clients' / 'cpp'}", str(ROOT / "tests" / "live_corridor.cpp")]
    subprocess.run([compiler, "-std=c++17", "-O0", "-pthread", *source, "-o", str(program)], check=True, timeout=LONG)
    return program


def test_a_game_in_cpp_is_learnt_and_served(tmp_path, corridor):
    """--stop by return ends it while the games are connected; they get an error that says so, not silence."""
    stop = '{"episode_return_mean": 0.85, "env_steps_total": 60000}'
    words = live_words("float32[5]", "2", "--stop", stop, "lr=3e-3", "rows=256", "rollout_length=32", "wait_s=5")
    words += ["epochs=4", "minibatches=4"]
    with bray(tmp_path, *words) as command:
        port = command.port
        games = [
            subprocess.Popen(
                [str(corridor), str(port), "1000000"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
            )
            for _ in range(4)
        ]
        try:
            assert command.wait() == 0, command.out
            for game in games:
                _, err = game.communicate(timeout=LONG)
                assert game.returncode == 1
                assert re.match(r"failed: (503 draining|504 tick_timeout|connect_failed|connection_lost):", err), err
        finally:
            for game in games:
                game.kill()
                game.wait()
        assert "Traceback" not in command.out
    rows = read_results(tmp_path / "t")
    returns = [r["episode_return_mean"] for r in rows if r.get("episode_return_mean") is not None]
    assert returns[-1] >= 0.85, returns[-1]  # the best is 0.95 on average, chance is about 0.3
    assert returns[0] < 0.75
    with served(tmp_path, tmp_path / "t") as port:
        played = subprocess.run([str(corridor), str(port), "30"], capture_output=True, text=True, timeout=LONG)
    assert played.returncode == 0, played.stderr
    assert min(map(float, played.stdout.split())) >= 0.89  # greedy goes straight there: three steps at most


def test_sigterm_saves_and_resume_goes_on_and_kill_leaves_a_run_to_resume(tmp_path):
    stop = '{"env_steps_total": 1000000}'
    with bray(tmp_path, *live_words("float32[2]", "2", "--stop", stop, *TINY_WORDS)) as command:
        with playing(Sign(command.port), Sign(command.port, 1)):
            until(lambda: page(command.admin_port)["learner_steps_total"] >= 3, command.out)
            command.process.send_signal(signal.SIGTERM)
            assert command.wait() == 128 + signal.SIGTERM, command.out  # as of `bray train`: the goal was not reached
        assert "Traceback" not in command.out
    run = tmp_path / "t"
    last = read_results(run)[-1]
    steps = RunDir.open(run).steps()[-1]
    assert steps == last["learner_steps_total"] >= 3
    weights = RunDir.open(run).load_checkpoint("latest").weights
    with bray(tmp_path, "train", "--resume", run, "--port", "0", "checkpoint_freq=1") as command:
        port = command.port
        assert page(command.admin_port)["env_steps_total"] == last["env_steps_total"]
        game = Sign(port)
        with playing(game):
            until(lambda: RunDir.open(run).pointer("latest") > steps, command.out)
            command.process.kill()  # nothing is saved now, or a checkpoint that `latest` does not name yet
            command.wait()
        assert game.versions[0] == steps  # not 0
        assert game.versions == sorted(game.versions)
    rows = read_results(run)
    assert [r["training_iteration"] for r in rows] == list(range(1, len(rows) + 1))
    assert rows[-1]["env_steps_total"] > last["env_steps_total"]
    exp = Experiment.resume(run)
    try:
        assert exp.training.steps == RunDir.open(run).pointer("latest")
        assert exp.training.source.host.step == exp.training.steps
        now = RunDir.open(run).load_checkpoint("latest").weights
        for name, value in exp.training.weights().items():
            np.testing.assert_array_equal(value, now[name])
        for name, value in exp.training.source.host.get_weights()[0].items():
            np.testing.assert_array_equal(value, now[name])
        assert any(not np.array_equal(now[k], weights[k]) for k in now)
    finally:
        exp.close()


def test_sigterm_without_a_game_leaves_the_run_of_its_first_second(tmp_path):
    with bray(tmp_path, *live_words()) as command:
        until(lambda: (tmp_path / "t" / "checkpoints" / "latest").exists() or not command.process, command.out)
        command.port  # noqa: B018 - it listens
        command.process.send_signal(signal.SIGTERM)
        assert command.wait() == 0, command.out  # it had no goal
        assert "Traceback" not in command.out
    assert RunDir.open(tmp_path / "t").steps() == [0]
    assert read_results(tmp_path / "t") == [] or not (tmp_path / "t" / "result.jsonl").read_text()


# --- what the command refuses -----------------------------------------------------------------------------------------

LIVE = ["train", "--run", "PPO", "--live"]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["train", "--run", "PPO", "--obs", "float32[6]", "--actions", "3"], "--obs is for live games: add --live"),
        ([*LIVE, "--env", "CartPole-v1", "--obs", "float32[4]", "--actions", "2"], "in one way"),
        (LIVE, "--obs 'float32[6]' --actions 3"),
        ([*LIVE, "--obs", "float32[6]"], "both are needed"),
        ([*LIVE, "--obs", "float[6", "--actions", "3"], "expected a space like float32[6], 'float32[2] -1..1'"),
        ([*LIVE, "--obs", "text[6]", "--actions", "3"], "expected a space like float32[6]"),
        ([*LIVE, "--obs", "float32[0]", "--actions", "3"], "expected a space like float32[6]"),
        ([*LIVE, "--obs", "float32[6]", "--actions", "0"], "3 (three choices)"),
        ([*LIVE, "--obs", "float32[6]", "--actions", "float32[2] 1..-1"], "expected a space like"),
        ([*LIVE, "--obs", '{"a": }', "--actions", "3"], "expected a JSON object of spaces"),
        ([*LIVE, "--obs", '{"obs": "float32[2]"}', "--actions", "3"], "cannot be named 'obs'"),
        ([*LIVE, "--spec", "nothing.json"], "--spec nothing.json: expected a JSON file"),
        ([*LIVE, "--obs", "float32[6]", "--actions", "3", "--eval-freq", "5"], "live games cannot be evaluated in"),
        ([*LIVE, "--obs", "float32[6]", "--actions", "3", "--render"], "cannot be filmed"),
        (["train", "--run", "DQN", "--live", "--obs", "float32[6]", "--actions", "float32[2]"], "Discrete"),
        (["train", "--run", "DQN", "--live", "--obs", "float32[6]", "--actions", "3", "use_lstm=true"],
         "use_lstm=false"),
    ],
)  # fmt: skip
def test_what_is_refused(words, says, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(words) == 2
    assert says in " ".join(capsys.readouterr().err.split())
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("quiet", [[], ["--quiet"]])
def test_a_port_that_is_taken_is_told_before_anything_is_written(quiet, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        s.listen()
        words = [*LIVE, "--obs", "float32[6]", "--actions", "3", "--port", str(s.getsockname()[1]), *quiet]
        assert main(words) == 2
    assert "cannot listen on 127.0.0.1:" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_print_config(capsys, tmp_path):
    spec = tmp_path / "spec.json"
    spec.write_text('{"obs": {"a": "float32[3]", "b": "uint8[2,2]"}, "actions": "3,2"}')
    assert main([*LIVE, "--spec", str(spec), "--port", "9000", "wait_s=2", "--print-config"]) == 0
    out = {line.split()[0]: line.split()[1:] for line in capsys.readouterr().out.splitlines() if line.strip()}
    assert out["live.port"][0] == "9000"
    assert float(out["live.wait_s"][0]) == 2.0
    assert out["live.max_games"][0] == "1000"
    with experiment(None, obs=None, actions=None, spec=str(spec)) as exp:
        names = exp.training.spec.observation.names
        assert names == ("obs", "action_mask")
        assert exp.training.spec.observation.parts[0].names == ("a", "b")
        assert exp.training.spec.action.n == (3, 2)


def test_a_run_of_an_environment_does_not_become_live(tmp_path, capsys):
    exp = Experiment(run="PPO", env="CartPole-v1", path=tmp_path / "run", rollout_length=16, num_envs=2, epochs=1)
    train(exp, training_iteration=1)
    exp.close()
    for more in (["--port", "0"], ["--live"]):
        assert main(["train", "--resume", str(tmp_path / "run"), *more]) == 2
        assert "learnt in an environment, not from live games" in capsys.readouterr().err


def test_eval_and_collect_say_what_a_live_run_has_not(tmp_path, capsys):
    with experiment(tmp_path / "run") as exp:
        exp.save()
    for command in ("eval", "collect"):
        assert main([command, str(tmp_path / "run")]) == 2
        assert "`bray serve RUN_DIR` answers its games" in capsys.readouterr().err
    assert not (tmp_path / "run" / "trajectories").exists()


def test_a_live_run_with_an_environments_spaces_can_be_evaluated(tmp_path):
    with experiment(tmp_path / "run", obs=None, actions=None, env="CartPole-v1") as exp:
        assert exp.training.spec.observation.shape == (4,)
        exp.save()
    exp = Experiment.load(tmp_path / "run")
    assert exp.evaluate(2)["eval/return_mean"] > 0
    exp.close()


# --- in one process ---------------------------------------------------------------------------------------------------


def test_python_games_in_threads_learn_and_versions_grow(tmp_path):
    with experiment(tmp_path / "run", lr=5e-3, epochs=4, minibatches=2, rows=256, wait_s=5) as exp:
        game, other = Sign(port_of(exp)), Sign(port_of(exp), 1)
        with playing(game, other) as games:
            rows = train(exp, games, episode_return_mean=7.0, env_steps_total=40_000)
            assert rows[-1]["episode_return_mean"] >= 7.0  # of 8; chance is 4
            said = page(exp)
            assert said["env_steps_total"] >= rows[-1]["env_steps_total"]
            assert said["learner_steps_total"] == rows[-1]["learner_steps_total"]
            assert said["rows_dropped"] == 0
            assert said["waiting"] is None
            exp.close()
        assert game.versions == sorted(game.versions)
        assert game.versions[0] == 0
        assert game.versions[-1] > 20
        assert isinstance(game.error, ClientError)  # it was connected when all ended
        assert game.error.status in (0, 503, 504)
        assert [r["env_steps_total"] for r in rows] == sorted({r["env_steps_total"] for r in rows})
        episodes = sum(r["episodes_this_iter"] for r in rows)
        assert episodes == rows[-1]["episodes_total"]


def test_games_play_with_the_weights_that_a_run_starts_with_from_the_first_tick(tmp_path):
    with experiment(tmp_path / "old", seed=1) as old:
        old.save()
        wanted = old.training.weights()
    for more, name in (({"init_from": str(tmp_path / "old")}, "new"), ({}, "later")):
        with experiment(tmp_path / name, seed=2, **more) as exp:
            host = exp.training.source.host
            if not more:
                assert any(not np.array_equal(host.get_weights()[0][k], wanted[k]) for k in wanted)
                exp.init_from(tmp_path / "old")
            held, step = host.get_weights()
            assert step == 0
            assert held.keys() == wanted.keys()
            assert not [k for k in wanted if not np.array_equal(held[k], wanted[k])]


def test_asking_for_the_page_takes_nothing_from_the_rows(tmp_path):
    with experiment(tmp_path / "run", wait_s=5) as exp:
        asked = []
        with playing(Sign(port_of(exp))):
            for row in exp.train(stop={"training_iteration": 6}):
                asked.append(row["episodes_this_iter"])
                page(exp)
        assert sum(asked) == row["episodes_total"] > 0


def test_serve_answers_the_same_bodies_greedily(tmp_path):
    with experiment(tmp_path / "run", wait_s=5) as exp:
        with playing(Sign(port_of(exp))) as games:
            train(exp, games, training_iteration=3)
    exp = Experiment.load(tmp_path / "run")
    with exp.serve(port=0, block=False, admin_port=0) as server:
        game = Sign(server.port)
        game.play(episodes=3)
        assert game.error is None
        assert set(game.versions) == {exp.loaded[1]}
        for obs, action in game.actions:
            assert action == exp.policy(obs)
        game.mask = lambda obs: [1, 0]
        game.actions.clear()
        game.play(episodes=1)
        assert game.error is None
        assert {a for _, a in game.actions} == {0}
        assert exp.policy({"obs": [1.0, 1.0], "action_mask": [1, 0]}) == 0
        assert exp.policy({"obs": [1.0, 1.0], "action_mask": [0, 1]}) == 1
    exp.close()


def recorded(exp):
    """What the learner gets, and a copy of the model as it was before the first update."""
    learner, batches = exp.training.learner, []
    prepare = learner.prepare

    def keep(data):
        batches.append((data, prepare(data)))
        return batches[-1][1]

    learner.prepare = keep
    return batches, copy.deepcopy(exp.training.model)


@pytest.mark.parametrize("masked", [True, False])
def test_a_mask_is_respected_and_learnt_from(tmp_path, masked):
    def mask(obs):
        return [1, 0, 1] if obs[0] > 0 else [1, 1, 0]

    with experiment(tmp_path / "run", actions=3, wait_s=5) as exp:
        batches, model = recorded(exp)
        with playing(Sign(port_of(exp), mask=mask if masked else None)) as games:
            train(exp, games, training_iteration=2)
    _, rows = batches[0]
    legal = rows["mask"] > 0
    real = rows["weight"] > 0
    want = np.array([mask(x) for x in rows["obs"]["obs"].tolist()]) if masked else np.ones((len(real), 3))
    np.testing.assert_array_equal(legal[real], want[real] > 0)
    with torch.no_grad():
        dist = model({k: torch.from_numpy(v) for k, v in rows["obs"].items()})["dist"].numpy()
    logits = np.where(legal, dist, -np.inf)[real]
    logp = (
        logits
        - np.log(np.exp(logits - logits.max(-1, keepdims=True)).sum(-1, keepdims=True))
        - logits.max(-1, keepdims=True)
    )
    chosen = np.take_along_axis(logp, rows["action"][real, None], -1)[:, 0]
    np.testing.assert_allclose(rows["logp"][real], chosen, rtol=1e-4, atol=1e-5)
    assert np.isfinite(chosen).all()


def test_rows_are_those_of_the_game(tmp_path):
    """Observations, rewards and ends, in their order; the reward belongs to the action before it."""
    with experiment(tmp_path / "run", wait_s=5) as exp:
        batches, _ = recorded(exp)
        with playing(Sign(port_of(exp))) as games:
            train(exp, games, training_iteration=2)
    for piece, _ in batches:
        right = (piece.action == 1) == (piece.obs["obs"][:-1, ..., 0] > 0)
        np.testing.assert_array_equal(piece.reward[piece.valid], right[piece.valid].astype(np.float32))
        assert piece.terminated.any()
        assert not (piece.terminated & ~piece.valid).any()


# --- ticks that are wrong ---------------------------------------------------------------------------------------------

GOOD = {"obs": [1.0, 1.0], "reward": 0.5, "terminated": False, "truncated": False}


@pytest.mark.parametrize(
    ("tick", "says"),
    [
        ({k: v for k, v in GOOD.items() if k != "reward"}, "expected the reward of the previous action"),
        ({**GOOD, "reward": None}, "expected the reward of the previous action"),
        ({**GOOD, "reward": "much"}, "expected reward to be a finite number"),
        ({**GOOD, "reward": "1.0"}, "expected reward to be a finite number"),
        ({**GOOD, "reward": True}, "expected reward to be a finite number"),
        ({**GOOD, "reward": [1.0]}, "expected reward to be a finite number"),
        ({**GOOD, "terminated": []}, "expected terminated to be true or false, got []"),
        ({**GOOD, "truncated": "false"}, "expected truncated to be true or false, got 'false'"),
        (json.dumps(GOOD).replace("0.5", "NaN").encode(), "malformed"),
        (json.dumps(GOOD).replace("0.5", "1e400").encode(), "malformed"),
        ({**GOOD, "reward": 1e39}, "expected reward to be a finite number (of float32)"),
        ({**GOOD, "reward": 10**400}, "malformed"),
        ({**GOOD, "reward": 1e20}, "expected reward to be a number from -1e+06 to 1e+06, got 1e+20"),
        ({**GOOD, "reward": -1000001}, "reward_range is the bound"),
        ({**GOOD, "obs": [1.0]}, "obs: expected shape [2], got [1]"),
        ({**GOOD, "obs": [[1.0, 1.0]]}, "expected shape [2], got [1, 2]"),
        ({**GOOD, "obs": ["a", "b"]}, "expected numbers of shape [2]"),
        ({**GOOD, "obs": [1e39, 0.0]}, "expected finite numbers"),
        ({**GOOD, "obs": [1.0, -1e30]}, "obs: expected numbers up to 1e+09 in size (obs_range), got -1"),
        ({**GOOD, "obs": None}, "obs"),
        ({**GOOD, "obs": {"base64": "AAAA", "dtype": "float32"}}, "base64"),
        ({k: v for k, v in GOOD.items() if k != "obs"}, 'expected {"obs"'),
        ({**GOOD, "terminate": True}, "Did you mean 'terminated'"),
        ({**GOOD, "terminated": "false"}, "expected terminated to be true or false, got 'false'"),
        ({**GOOD, "truncated": 2}, "expected truncated to be true or false"),
        ({**GOOD, "action_mask": [1]}, "action_mask"),
        ({**GOOD, "action_mask": [0, 0]}, "expected at least one legal action"),
        ({**GOOD, "action_mask": [1, "x"]}, "action_mask"),
        (b"", "malformed"),
        (b"[1, 2]", "malformed"),
        (b"{" * 3000, "malformed"),
    ],
)  # fmt: skip
def test_a_malformed_tick_is_refused_with_what_was_expected(service, tick, says):
    with Client("127.0.0.1", service.training.source.port, retries=0) as client:
        client.start()
        assert client.tick(GOOD)["action"] in (0, 1)
        with pytest.raises(ClientError) as e:
            client.tick(tick)
        assert (e.value.status, e.value.code) == (400, "malformed")
        assert says in str(e.value)
        assert client.tick(GOOD)["action"] in (0, 1)  # the session goes on


@pytest.fixture(scope="module")
def service(tmp_path_factory):
    """A live training that answers, and is never asked to learn."""
    with experiment(tmp_path_factory.mktemp("service") / "run") as exp:
        yield exp


def test_whole_numbers_are_not_cut_to_fit(tmp_path):
    with experiment(tmp_path / "run", obs="uint8[2]") as exp, Client("127.0.0.1", port_of(exp), retries=0) as client:
        client.start()
        client.tick({**GOOD, "obs": [255, 0]})
        for obs in ([256, 0], [-1, 0], [0.5, 0], [1 << 70, 0]):
            with pytest.raises(ClientError, match=r"400 malformed: .*obs: expected"):
                client.tick({**GOOD, "obs": obs})


def test_a_malformed_tick_loses_nothing_that_was_learnt(tmp_path):
    """Rows before and behind it are learnt from; the one across it is nobody's."""
    with experiment(tmp_path / "run", wait_s=5) as exp:
        batches, _ = recorded(exp)

        class Clumsy(Sign):
            def tick(self, client, obs, reward, terminated=False, truncated=False):
                if len(self.versions) % 20 == 10:
                    with pytest.raises(ClientError, match="malformed"):
                        client.tick({"obs": obs[:1], "reward": reward})
                return super().tick(client, obs, reward, terminated, truncated)

        with playing(Clumsy(port_of(exp))) as games:
            rows = train(exp, games, training_iteration=4)
        assert rows[-1]["learner_steps_total"] == 4
    for piece, _ in batches:
        right = (piece.action == 1) == (piece.obs["obs"][:-1, ..., 0] > 0)
        np.testing.assert_array_equal(piece.reward[piece.valid], right[piece.valid].astype(np.float32))


# --- games that come and go -------------------------------------------------------------------------------------------


def test_games_of_different_speed_and_games_that_vanish(tmp_path):
    """Sessions that nobody ends make room after a while, and what they brought is learnt from; they may come back."""
    with experiment(tmp_path / "run", wait_s=5, max_games=4, idle_timeout_s=1.0) as exp:
        port = port_of(exp)

        class Vanishes(Sign):
            def play(self, episodes=1_000_000):
                while not self.over.is_set():
                    client = Client("127.0.0.1", self.port, retries=0)
                    try:
                        client.start()
                        for _ in range(20):
                            self.tick(client, self.obs(), 0.0)
                    except ClientError as e:
                        if e.status not in (0, 429):  # 429: those that vanished still have their places
                            raise
                        time.sleep(0.1)
                    client.close()

        slow, fast, gone = Sign(port, pause=0.02), Sign(port, 1), Vanishes(port, 2)
        with playing(slow, fast, gone) as games:
            train(exp, games, training_iteration=12)
            until(lambda: len(gone.versions) > 100, "a game that vanished finds no place any more")
            train(exp, games, training_iteration=20)
        assert slow.returns
        assert len(fast.returns) > len(slow.returns)


def test_rows_are_dropped_and_counted_where_games_do_not_wait(tmp_path):
    for wait_s in (0.0, 6.0):
        with experiment(tmp_path / f"run{wait_s}", wait_s=wait_s) as exp:
            update = exp.training.learner.update

            def slow(*args, update=update):
                time.sleep(0.5)
                return update(*args)

            exp.training.learner.update = slow
            with playing(*[Sign(port_of(exp), i) for i in range(4)]) as games:
                train(exp, games, training_iteration=5)
                dropped = page(exp)["rows_dropped"]
                exp.close()  # games that wait for the learner are let go
            assert (dropped > 0) == (wait_s == 0.0), dropped
            assert exp.training.totals.dropped == dropped or wait_s == 0.0


def test_a_tick_that_is_too_large_is_refused_before_its_body_is_sent(tmp_path):
    with experiment(tmp_path / "run") as exp, Wire(port_of(exp)) as wire:
        wire.send(b"POST /step HTTP/1.1\r\nstep_kind: tick\r\nsession: g\r\nContent-Length: 2000000\r\n\r\n")
        assert wire.response()[0] == 413


def alive(cls):
    gc.collect()
    return sum(type(x) is cls for x in gc.get_objects())


def test_sessions_leave_nothing_behind(tmp_path):
    with experiment(tmp_path / "run") as exp:
        port = port_of(exp)
        Sign(port, 30).play(episodes=1)
        before = alive(TickBatcher)
        for i in range(30):
            Sign(port, i).play(episodes=1)
        server = exp.training.source.server.server
        until(lambda: not server.sessions.sessions, "sessions are still there")
        assert server.sessions.actors_made <= 2
        assert alive(TickBatcher) == before


def test_why_nothing_is_learnt(tmp_path, monkeypatch, caplog):
    """In the log and on the page, and as it is now: not as it was when the log said it."""
    monkeypatch.setattr(driver, "SAY_AFTER", 0.3)
    with experiment(tmp_path / "run") as exp:
        port = port_of(exp)
        training = threading.Thread(target=lambda: list(exp.train()), daemon=True)
        training.start()
        until(lambda: page(exp)["waiting"], "the page says nothing")
        assert page(exp)["waiting"] == (
            f"no game is connected: they call POST http://127.0.0.1:{port}/step; no game has sent a row to learn from "
            "yet"
        )
        until(lambda: "no batch for" in caplog.text, "the log says nothing")
        assert f"127.0.0.1:{port}/step" in caplog.text
        with Client("127.0.0.1", port) as client:
            client.start()
            assert page(exp)["waiting"].startswith("1 game is connected; ")
            for _ in range(33):
                client.tick(GOOD)
            until(lambda: "of 64 rows of the next rollout have come" in page(exp)["waiting"], page(exp))
        with playing(Sign(port)):
            until(lambda: page(exp)["learner_steps_total"] > 0, "nothing is learnt")
            until(lambda: page(exp)["waiting"] is None, page(exp))
            exp.request_stop()
            training.join(LONG)
            assert not training.is_alive()


def test_the_first_answer_comes_at_once(tmp_path):
    """Code is loaded and forwards are recorded before games can call."""
    with experiment(tmp_path / "run") as exp, Client("127.0.0.1", port_of(exp)) as client:
        client.start()
        start = time.perf_counter()
        client.tick(GOOD)
        assert time.perf_counter() - start < 1.0  # it was ten seconds on this machine


# --- memory -----------------------------------------------------------------------------------------------------------


def test_a_memory_is_reset_at_the_end_of_an_episode_in_training_and_serving(tmp_path):
    settings = {"use_lstm": True, "lstm_cell_size": 8, "max_seq_len": 8, "wait_s": 5}
    with experiment(tmp_path / "run", **settings) as exp:
        batches, _ = recorded(exp)
        seen = []
        port = port_of(exp)
        player = exp.training.source.acting
        decide = player.decide
        player.decide = lambda asked: seen.extend(state.memory for state in asked) or decide(asked)
        with playing(Sign(port)) as games:
            train(exp, games, training_iteration=3)
        fresh = [not any(np.any(x) for x in tree.leaves(memory)) for memory in seen]
        assert [i for i, f in enumerate(fresh) if f][:4] == [0, 9, 18, 27]  # eight ticks and the final one
    assert all(np.isfinite(rows["logp"]).all() for _, rows in batches)
    exp = Experiment.load(tmp_path / "run")

    class Same(Sign):
        def obs(self):
            self.n = getattr(self, "n", -1) + 1
            return [float((self.n % 9) % 3 - 1), 1.0]  # the same numbers in every episode

    with exp.serve(port=0, block=False, admin_port=0) as server:
        game = Same(server.port)
        game.play(episodes=4)
        assert game.error is None
        actions = [a for _, a in game.actions]
        assert actions[:8] == actions[8:16] == actions[16:24]
        state = None
        for obs, action in game.actions[:8]:
            mine, state = exp.policy(obs, state)
            assert mine == action
    exp.close()


def test_advantages_of_a_memory_go_through_whole_pieces_of_a_game(tmp_path):
    """As those of the loop go through a whole rollout: by the definition, in float64, until the piece or the batch
    ends."""
    settings = {"use_lstm": True, "lstm_cell_size": 8, "max_seq_len": 4, "wait_s": 5, "normalize_advantage": False}
    pieces = []
    with experiment(tmp_path / "run", gamma=0.9, lambda_=0.8, **settings) as exp:
        batches, _ = recorded(exp)
        add = exp.training.experience.add
        exp.training.experience.add = lambda piece: pieces.append(piece) or add(piece)
        with playing(Sign(port_of(exp))) as games:
            train(exp, games, training_iteration=4)
    at = [(i, t) for i, piece in enumerate(pieces) for t in range(0, piece.length, 4)]  # sequences in order
    longest = 0
    for n, (_, rows) in enumerate(batches):
        assert rows["advantage"].shape == (4, 16)
        here = at[16 * n : 16 * (n + 1)]
        for i in {i for i, _ in here}:
            ticks = [t for j, t in here if j == i]
            piece, start, end = pieces[i], ticks[0], min(ticks[-1] + 4, pieces[i].length)
            names = ("reward", "terminated", "truncated", "valid")
            columns = [getattr(piece, k)[start:end].astype(np.float64) for k in names]
            expected = slow_gae(piece.outputs["value"][start : end + 1], *columns, 0.9, 0.8)
            got = rows["advantage"][:, [here.index((i, t)) for t in ticks]].T.reshape(-1)[: end - start]
            np.testing.assert_allclose(got, expected[:, 0], rtol=1e-4, atol=1e-5)
            longest = max(longest, len(ticks))
    assert longest > 2  # several sequences of one piece in a batch


# --- other algorithms and spaces --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("run", "actions", "more"),
    [
        ("A2C", 2, {"rollout_length": 16, "rows": 64}),
        ("DQN", 2, {"learning_starts": 50, "batch_size": 16, "replay_size": 1000}),
        ("DQN", 2, {"learning_starts": 50, "batch_size": 16, "replay_size": 1000,
                    "model": {"layers": [{"layer_type": "noisy_linear", "layer_dim": 16}]}}),
        ("SAC", "float32[1] -1..1", {"learning_starts": 50, "batch_size": 16, "replay_size": 1000}),
        ("PPO", "float32[2] -1..1", TINY),
        ("PPO", "2,3", TINY),
    ],
)  # fmt: skip
def test_every_algorithm_with_a_policy_and_a_learner(tmp_path, run, actions, more):
    exp = Experiment(run=run, live=True, port=0, obs="float32[2]", actions=actions, path=tmp_path / "run", **more)

    class Any(Sign):
        def tick(self, *args, **kwargs):
            action = super().tick(*args, **kwargs)
            return action[0] > 0 if isinstance(action, list) else action

    try:
        with playing(Any(port_of(exp)), Any(port_of(exp), 1)) as games:
            train(exp, games, learner_steps_total=20)
        assert exp.training.learner.steps >= 20
        assert games[0].versions == sorted(games[0].versions)
    finally:
        exp.close()


@pytest.mark.parametrize(
    ("run", "more"),
    [
        ("DQN", {"learning_starts": 50, "batch_size": 16, "replay_size": 1000, "pretrain": 5}),
        ("GAIL", {"rollout_length": 16, "minibatches": 1, "rows": 64}),
    ],
)
@pytest.mark.parametrize("masked", [True, False])
def test_files_are_learnt_from_beside_live_games(tmp_path, run, more, masked):
    """Also those that do not say what was legal."""
    obs = np.random.default_rng(0).standard_normal((41, 2)).astype(np.float32)
    mask = {"action_mask": np.tile(np.int8([0, 1]), (41, 1))} if masked else {}
    ends = {"terminated": np.arange(40) == 39, "truncated": np.zeros(40, bool)}
    shown = {"obs": {"obs": obs, **mask} if masked else obs, "action": np.ones(40, int), "reward": np.ones(40), **ends}
    write_episodes(tmp_path / "files" / "episodes", [shown])
    exp = Experiment(
        run=run,
        live=True,
        config={"live": {"port": 0, "obs": "float32[2]", "actions": 2}, "share": 0.5, **more},
        data=tmp_path / "files",
        path=tmp_path / "run",
    )
    seen, learner = [], exp.training.learner
    learn = learner.update

    def update(batch, clock):
        if run == "DQN":
            seen.append(tree.map(lambda x: x[batch["demo"] == 1], batch["obs"]))
        else:
            seen.append(batch.demos["obs"])
        return learn(batch, clock)

    learner.update = update
    try:
        with playing(Sign(port_of(exp))) as games:
            train(exp, games, learner_steps_total=12)
    finally:
        exp.close()
    assert len(seen) > 1
    if run == "DQN":
        assert [len(x["obs"]) for x in seen[:6]] == [16] * 5 + [8]
    files = {tuple(row) for row in obs.tolist()}
    assert {tuple(row) for x in seen for row in x["obs"].tolist()} <= files
    assert all((x["action_mask"] == ([0, 1] if masked else [1, 1])).all() for x in seen)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({}, "say which share of a batch is of files, --data-share 0.5"),
        ({"share": 0.5}, r"use DQN, SAC, GAIL or the like \(not PPO\)"),
    ],
)
def test_files_beside_live_games_are_refused_where_they_cannot_be(tmp_path, more, message):
    write_episodes(tmp_path / "files" / "episodes", [])
    given = {"run": "PPO", "live": True, "data": tmp_path / "files", "path": tmp_path / "run"} | more
    with pytest.raises(ConfigError, match=message):
        _ = Experiment(**given, config={"live": {"obs": "float32[2]", "actions": 2}}).training


def test_dict_observations_and_masks_inside_them(tmp_path):
    obs = '{"a": "float32[2]", "b": "uint8[3]"}'
    with experiment(tmp_path / "run", obs=obs, actions=3, wait_s=5) as exp:
        port = port_of(exp)
        with Client("127.0.0.1", port) as client:
            client.start()
            both = {"a": [0.5, 1.0], "b": [1, 2, 3]}
            for _ in range(10):
                assert client.tick({"obs": both, "reward": 0, "action_mask": [0, 1, 0]})["action"] == 1
            assert client.tick({"obs": both, "reward": 0})["action"] in (0, 1, 2)
            with pytest.raises(ClientError, match=r"keys \['a', 'b'\]"):
                client.tick({"obs": {"a": [0.5, 1.0]}, "reward": 0})
    with experiment(tmp_path / "run2", obs={"a": "float32[2]", "action_mask": "int8[3] 0..1"}, actions=3) as exp:
        with Client("127.0.0.1", port_of(exp)) as client:
            client.start()
            for _ in range(10):
                tick = {"obs": {"a": [0.5, 1.0], "action_mask": [0, 0, 1]}, "reward": 0}
                assert client.tick(tick)["action"] == 2


@pytest.mark.parametrize("by_file", [False, True])
def test_a_mask_of_another_length_is_refused_before_games_connect(tmp_path, by_file):
    obs = {"a": "float32[2]", "action_mask": "int8[2] 0..1"}
    said = {"obs": obs, "actions": 3}
    if by_file:
        spec = EnvSpec("live", parse_space(obs), parse_space(3)).to_json()
        (tmp_path / "spec.json").write_text(json.dumps(spec))
        said = {"obs": None, "actions": None, "spec": str(tmp_path / "spec.json")}
    expected = "action_mask has 2 entries, the action space has 3 choices: one entry per choice"
    with experiment(tmp_path / "run", **said) as exp, pytest.raises(ConfigError, match=expected):
        port_of(exp)


def test_closing_does_not_wait_for_games_that_wait(tmp_path):
    """Games that may wait 6 s for the learner are let go at once when there is none any more."""
    with experiment(tmp_path / "run", wait_s=6) as exp:
        with playing(*[Sign(port_of(exp), i) for i in range(8)]):
            until(lambda: exp.training.source.waiting_rows > 100, "games bring nothing")
            time.sleep(0.5)
            start = time.perf_counter()
            exp.close()
            assert time.perf_counter() - start < 5.0


def test_reconnecting_with_the_same_name(tmp_path):
    with experiment(tmp_path / "run") as exp:
        port = port_of(exp)
        for _ in range(2):
            with Client("127.0.0.1", port, session="game-1", retries=0) as client:
                client.start()
                client.tick({"obs": [0.0, 1.0]})  # the first tick has no reward: it is a new episode
                client.tick(GOOD)
        first = Client("127.0.0.1", port, session="game-2", retries=0)
        first.start()
        first.close()  # without an end
        with (
            Client("127.0.0.1", port, session="game-2", retries=0) as again,
            pytest.raises(ClientError, match="session_exists"),
        ):
            again.start()


def test_push_and_gather_from_two_threads_lose_nothing(tmp_path):
    """Counts of dropped pieces go on with the next one."""
    from types import SimpleNamespace

    from bray.data.experience import Counts

    with experiment(tmp_path / "run") as exp:
        source = exp.training.source
        done = threading.Event()
        total, rows = 0, 0

        def push():
            async def all_of_them():
                for _ in range(3000):
                    piece = SimpleNamespace(length=32, stream=[7], start=99, reward=np.ones((32, 1), np.float32))
                    await source.push(piece, Counts(32, ((1.0, 4),)))

            asyncio.run(all_of_them())
            done.set()

        thread = threading.Thread(target=push)
        thread.start()
        dropped = episodes = 0
        while True:
            last = done.is_set()
            pieces, counts = source.gather(0.01)
            rows += sum(p.length for p in pieces)
            total, dropped, episodes = (
                total + counts.env_steps,
                dropped + counts.dropped,
                episodes + len(counts.episodes),
            )
            if last and not pieces:
                break
        thread.join()
        assert total == 3000 * 32
        assert episodes == 3000
        assert rows + dropped == total
        assert source.waiting_rows == 0


def test_options_of_a_service_hold_for_live_games(tmp_path):
    """Those that `bray serve` has, by the same names."""
    settings = {"check_obs": "refuse", "max_wait_s": 0.3, "max_requests_per_address": 1000.0}
    with experiment(tmp_path / "run", obs="float32[2] -1..1", **settings) as exp:
        with Client("127.0.0.1", port_of(exp), retries=0) as client:
            client.start()
            start = time.perf_counter()
            assert client.tick(GOOD)["action"] in (0, 1)
            assert time.perf_counter() - start >= 0.3  # for a fuller batch
            with pytest.raises(ClientError, match=r"400 malformed: .*obs: 3 is not from -1 to 1"):
                client.tick({**GOOD, "obs": [3.0, 0.0]})
            assert client.tick(GOOD)["action"] in (0, 1)
        assert exp.training.source.server.server.config.max_requests_per_address == 1000.0


def test_observations_outside_their_space_are_counted(tmp_path):
    with experiment(tmp_path / "run", obs="float32[2] -1..1") as exp:
        with Client("127.0.0.1", port_of(exp)) as client:
            client.start()
            for obs in ([0.5, 0.5], [3.0, 0.0], [0.0, -9.0]):
                client.tick({**GOOD, "obs": obs})
        url = f"http://127.0.0.1:{exp.training.source.admin_port}/metrics"
        with urllib.request.urlopen(url, timeout=LONG) as reply:
            assert 'bray_model_outside_total{model="live"} 2' in reply.read().decode()


@pytest.mark.parametrize("use_tcp", [False, True])
def test_a_late_tick_of_a_live_game_is_answered_with_the_fallback(tmp_path, use_tcp):
    with experiment(tmp_path / "run", tick_timeout_s=1.0, fallback="last", use_tcp=use_tcp) as exp:
        port, acting = port_of(exp), exp.training.source.acting
        with Client("127.0.0.1", port, retries=0, tcp=use_tcp) as client:
            client.start()
            first = client.tick(GOOD)
            ask, acting.ask = acting.ask, lambda agent, state: asyncio.get_running_loop().create_future()
            assert client.tick(GOOD) == {**first, "fallback": True}
            acting.ask = ask
            assert "fallback" not in client.tick(GOOD)
            client.end()
        until(lambda: exp.training.source.waiting_rows == 0, "rows across a tick that nobody decided on")


def test_options_of_a_service_are_flags_and_keys_of_live_training(capsys):
    words = ["--obs", "float32[2]", "--actions", "2", "--check-obs", "refuse", "--tick-timeout", "2", "max_queue=9"]
    assert main([*LIVE, *words, "--config", '{"live": {"max_wait_s": 0.5}}', "--print-config"]) == 0
    out = {line.split()[0]: line.split()[1] for line in capsys.readouterr().out.splitlines() if line.strip()}
    assert (out["live.check_obs"], float(out["live.tick_timeout_s"])) == ("refuse", 2.0)
    assert (out["live.max_queue"], float(out["live.max_wait_s"])) == ("9", 0.5)


def test_live_config_is_checked():
    with pytest.raises(ConfigError, match="normalize_rewards"):
        Experiment(run="PPO", live=True, obs="float32[2]", actions=2, normalize_rewards=True).training  # noqa: B018
    with pytest.raises(ConfigError, match="wait_s"):
        Experiment(run="PPO", live=True, obs="float32[2]", actions=2, wait_s=7)


# --- pieces that wait for room ----------------------------------------------------------------------------------------


@contextlib.contextmanager
def full_source(path, wait_s=1e6):
    """A source whose queue has no room for another piece of game 7, and a function that pushes one."""
    from types import SimpleNamespace

    from bray.data.experience import Counts

    piece = SimpleNamespace(length=32, stream=[7], start=99, reward=np.ones((32, 1), np.float32))
    with experiment(path) as exp:
        source = exp.training.source
        source.live = dataclasses.replace(source.live, wait_s=wait_s)
        push = lambda: source.push(piece, Counts(32))  # noqa: E731
        asyncio.run(push())
        while not source.is_full(7, 32):
            asyncio.run(push())
        yield source, push


async def begun(push):
    """A push as a task that has come as far as it can."""
    task = asyncio.create_task(push())
    for _ in range(10):
        await asyncio.sleep(0)
    return task


def test_a_push_that_waits_for_room_goes_on_when_the_learner_takes_pieces(tmp_path):
    async def fill(source, push):
        waits = await begun(push)
        assert not waits.done()
        before = source.queue.waiting
        pieces, _ = source.gather()
        assert source.queue.waiting == before + 32 - sum(p.length for p in pieces), "it is there for the next batch"
        await asyncio.wait_for(waits, LONG)

    with full_source(tmp_path / "run") as (source, push):
        asyncio.run(fill(source, push))


def test_room_that_is_made_while_a_push_looks_is_not_missed(tmp_path):
    """The learner takes all there is, in its thread, as soon as the push has seen that there is no room."""

    async def fill(source, push):
        full, began = source.is_full, threading.Event()

        def take():
            began.set()
            source.gather()

        learner = threading.Thread(target=take)

        def look(key, length):
            found = full(key, length)
            if found and not began.is_set():
                learner.start()
                began.wait(LONG)
            return found

        source.is_full = look
        await asyncio.wait_for(push(), LONG)
        learner.join(LONG)

    with full_source(tmp_path / "run") as (source, push):
        asyncio.run(fill(source, push))


def test_a_push_goes_on_when_the_learner_makes_room_without_taking_pieces(tmp_path):
    async def fill(source, push):
        source.experience.room = lambda: False
        source.queue.take = list
        waits = await begun(push)
        source.gather()
        assert not (await begun(asyncio.Event().wait)).done()
        assert not waits.done()
        source.is_full = lambda key, length: False
        source.gather()
        await asyncio.wait_for(waits, LONG)

    with full_source(tmp_path / "run") as (source, push):
        asyncio.run(fill(source, push))


@pytest.mark.parametrize("how", ["cancelled", "too late", "closed"])
def test_a_push_that_waits_ends_otherwise(tmp_path, how):
    """Cancelled, its piece is gone; too late or where the service ends, it is queued, and the oldest one drops out."""

    async def fill(source, push):
        before, waits = source.queue.waiting, await begun(push)
        if how == "cancelled":
            waits.cancel()
        elif how == "closed":
            source.close()
        await asyncio.wait([waits], timeout=LONG)
        assert waits.done()
        assert not source.held
        assert source.queue.waiting == before
        _, counts = source.gather()
        assert counts.dropped == (0 if how == "cancelled" else 32)

    with full_source(tmp_path / "run", wait_s=0.05 if how == "too late" else 1e6) as (source, push):
        asyncio.run(fill(source, push))


def test_a_signal_may_come_at_any_moment_of_a_pause(tmp_path, monkeypatch):
    """Its handler interrupts the thread that waits, wherever that is: what it calls must not need what that holds."""
    monkeypatch.setattr(driver, "WAIT_S", 0.001)

    def interrupt(training, line):
        def count(frame, event, arg):
            nonlocal line
            if event == "line" and (line := line - 1) == 0:
                training.stop()
            return count

        return count

    def all_lines(training):
        for line in range(1, 60):
            training.start()
            sys.settrace(interrupt(training, line))
            try:
                training.wait(LONG)
            finally:
                sys.settrace(None)
        over.set()

    over = threading.Event()
    with experiment(tmp_path / "run") as exp:
        threading.Thread(target=all_lines, args=(exp.training,), daemon=True).start()
        assert over.wait(LONG)
