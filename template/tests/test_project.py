"""What must hold before anything is launched, and a launch of everything in one process. `pytest template/tests`"""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections import deque
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import bray
from bray import tree
from bray.client import Client
from bray.data.files import write_episodes
from bray.inference.host import ModelHost
from bray.inference.torch_engine import TorchEngine
from bray.launch.build import build
from bray.launch.graph import load
from bray.launch.modules import check_modules
from bray.remote.master import numbers as said
from bray.serving.agent import AgentActor
from template.agents.agent1 import Agent1
from template.agents.metrics_agent import MetricsAgent
from template.gamecore import Games, array
from template.games.grid import MOVES, GridEnv
from template.models.model1 import build_model
from template.renders import render1
from template.sources import source1
from template.trainers import sl_rl_trainer, sl_trainer

HERE = Path(__file__).parent.parent
torch.set_num_threads(1)  # networks this small are slower on more
FILES = ("rl", "sl", "sl_rl")


def best_move(env: GridEnv) -> int:
    """The first move of a shortest way to the next thing to reach, found by search."""
    target = env.goal if env.has_key else env.key
    first: dict[tuple[int, int], int] = {env.agent: -1}
    queue = deque([env.agent])
    while queue:
        at = queue.popleft()
        if at == target:
            return first[at]
        for move, (down, right) in enumerate(MOVES):
            there = (at[0] + down, at[1] + right)
            if there not in first and env.is_free(*there):
                first[there] = move if first[at] < 0 else first[at]
                queue.append(there)
    raise AssertionError("there is no way")


def demonstration(seed: int) -> dict[str, np.ndarray]:
    env = GridEnv()
    obs = [env.reset(seed=seed)[0]]
    best, rows = env.best_return(), []
    while not rows or not rows[-1][2]:
        action = best_move(env)
        after, reward, terminated, _, _ = env.step(action)
        obs.append(after)
        rows.append((action, reward, terminated))
    assert sum(r for _, r, _ in rows) == pytest.approx(best)
    action, reward, terminated = (np.array(x) for x in zip(*rows, strict=True))
    return {
        "obs": np.stack(obs),
        "action": action,
        "reward": reward.astype(np.float32),
        "terminated": terminated,
        "truncated": np.zeros(len(rows), bool),
    }


@pytest.fixture(scope="module")
def demonstrations(tmp_path_factory: pytest.TempPathFactory) -> str:
    directory = tmp_path_factory.mktemp("demonstrations")
    write_episodes(directory / "episodes", [demonstration(seed) for seed in range(40)])
    return str(directory)


@pytest.fixture
def numbers(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[float]]:
    """What is merged, without a session to merge it in."""
    seen: dict[str, list[float]] = {}

    def merge(name: str, value: Any, desc: Any = None, **labels: Any) -> None:
        seen.setdefault(name, []).append(float(torch.as_tensor(value).detach()))

    monkeypatch.setattr(bray, "merge", merge)
    monkeypatch.setattr("bray.remote.master.merge", merge)
    monkeypatch.setattr("bray.remote.master.handle.merge", merge)
    monkeypatch.setattr(bray.Metric, "merge", lambda self, value, **labels: merge(self.name, value))
    return seen


def config_of(name: str, **changes: Any) -> dict[str, Any]:
    return load(HERE / f"{name}.yaml").config | changes


# --- the game ---------------------------------------------------------------------------------------------------------


def test_the_best_return_is_that_of_the_shortest_way():
    for seed in range(30):
        demonstration(seed)


def test_a_door_is_a_wall_without_the_key_and_time_runs_out():
    env = GridEnv()
    env.reset(seed=0)
    env.agent, env.key = (3, 2), (0, 0)
    for _ in range(100):
        obs, _, terminated, truncated, _ = env.step(3)
    assert env.agent == (3, 2)
    assert (terminated, truncated) == (False, True)
    assert obs.shape == (5, 7, 7)
    env.agent = (0, 1)
    _, reward, *_ = env.step(2)
    assert reward == pytest.approx(0.49)
    env.agent = (3, 2)
    env.step(3)
    assert env.agent == (3, 3)


# --- parts ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("pictures", "actions"), [([5, 7, 7], 4), ([4, 42, 42], 6)])
def test_the_model_answers_each_picture_with_a_logit_per_action_and_a_value(pictures: list[int], actions: int):
    model, args = build_model("model1", {"network": {"state_space": pictures, "action_space": actions}})
    out = model(torch.from_numpy(args[0]).expand(3, -1, -1, -1))
    assert {k: tuple(v.shape) for k, v in out.items()} == {"dist": (3, actions), "value": (3,)}


class Pushed(list):
    def push_batch(self, batch: Any, drop: bool = True) -> Any:
        self.extend(tree.split(batch))
        taken = asyncio.get_running_loop().create_future()
        taken.set_result(None)
        return taken  # unlike a coroutine, nobody has to wait for it


def play(config: dict[str, Any], ticks: list[bytes], **options: Any) -> tuple[list[bytes], list[bray.State]]:
    """A session of both agents; the answers, and the states."""
    model, _ = build_model("model1", config)
    config["agent1"] = {**config["agent1"], "model": ModelHost("model1", TorchEngine(model))}
    states: list[bray.State] = []

    class Watches(MetricsAgent):
        async def on_episode(self, episode: list[bray.State], done: bool) -> None:
            states.extend(episode)
            await super().on_episode(episode, done)

    async def session() -> list[bytes]:
        actor = AgentActor({"metrics_agent": Watches, "agent1": Agent1}, config, **options)
        await actor.start("game", b"")
        answers = [await actor.tick(tick) for tick in ticks]
        await actor.end(b"")
        return answers

    return asyncio.run(session()), states


def moves(count: int) -> list[dict[str, Any]]:
    env = GridEnv()
    obs, reward = env.reset(seed=1)[0], 0.0
    out = []
    for _ in range(count):
        out.append({"obs": obs, "reward": reward, "terminated": False, "truncated": False})
        obs, reward, *_ = env.step(0)
    return out


def test_agents_answer_in_json_and_push_a_sample_for_every_move(numbers: dict[str, list[float]]):
    buffer = Pushed()
    config = config_of("rl")
    config["agent1"] = {**config["agent1"], "buffer": buffer}
    ticks = [json.dumps({**m, "obs": array(m["obs"])}).encode() for m in moves(10)]
    answers, states = play(config, ticks, serialize="json", episode_length=4)
    assert [set(json.loads(a)) for a in answers] == [{"action", "version"}] * 10
    assert sum(s["valid"] for s in buffer) == 9  # the last move's result has not come
    assert [int(s["steps"]) for s in buffer if s["joint"]] == [3, 7, 9]  # the moves so far, behind each piece
    assert len(states) == len(numbers["agent/entropy"]) == len(numbers["agent/value"]) == 10
    assert numbers["agent/entropy"][0] == pytest.approx(np.log(4), abs=0.01)


def test_agents_answer_in_protobuf(numbers: dict[str, list[float]]):
    pytest.importorskip("grpc_tools")
    from bray.serving.messages import message_class

    kinds = [message_class({"file": str(HERE / "tick.proto"), "message": m}, m) for m in ("TickInput", "TickOutput")]
    ticks = [kinds[0](**{**m, "obs": m["obs"].tobytes()}).SerializeToString() for m in moves(5)]
    answers, states = play(
        config_of("sl"), ticks, serialize="proto", tick_input_proto=kinds[0], tick_output_proto=kinds[1]
    )
    assert [kinds[1].FromString(a).action for a in answers] == [s.action for s in states]
    np.testing.assert_array_equal(states[3].obs, moves(4)[3]["obs"])


def test_renders_draw_every_tick(numbers: dict[str, list[float]]):
    _, states = play(
        config_of("sl"), [json.dumps({**m, "obs": array(m["obs"])}).encode() for m in moves(3)], serialize="json"
    )
    picture = render1.render(states, 0)
    assert (picture.shape, picture.dtype) == ((224, 224, 3), np.uint8)
    row, column = np.argwhere(states[0].obs[1])[0]
    assert tuple(picture[row * 32 + 16, column * 32 + 16]) == render1.COLOURS["agent"]
    bars = render1.action_distribution(states, 1)
    taken = bars[-1, states[1].action * 40 + 20]
    assert tuple(taken) == render1.COLOURS["agent"]
    atari = bray.State()
    atari.obs = np.full((4, 42, 42), 7, np.uint8)
    assert render1.render([atari], 0).shape == (336, 336, 3)


def test_sources_give_every_demonstrated_move_once_and_keep_some_for_evaluation(demonstrations: str):
    config = config_of("sl", demonstrations={"path": demonstrations})
    train = [list(source) for source in source1.build_source("train_source", config)]
    evaluation = [list(source) for source in source1.build_eval_source("eval_source", config)]
    total = sum(len(e["action"]) for e in bray.EpisodeReader(demonstrations))
    assert len(train) == 2
    assert sum(map(len, train)) + sum(map(len, evaluation)) == total
    assert 0.05 < len(evaluation[0]) / total < 0.15
    assert train[0][0]["obs"].shape == (5, 7, 7)
    again = list(source1.build_source("train_source", config)[0])
    assert len(again) == len(train[0])


def test_imitation_makes_the_demonstrated_moves_likely(demonstrations: str, numbers: dict[str, list[float]]):
    torch.manual_seed(0)
    config = config_of("sl")
    model, _ = build_model("model1", config)
    trainer = sl_trainer.Trainer1("trainer1", config, model)
    rows = bray.EpisodeReader(demonstrations).transitions()
    replay = trainer.handle({k: torch.from_numpy(rows[k]) for k in ("obs", "action", "reward")})
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)
    for _ in range(60):
        optimizer.zero_grad()
        trainer.loss(replay).backward()
        optimizer.step()
    trainer.eval(replay)
    assert numbers["loss/imitation"][0] == pytest.approx(np.log(4), abs=0.05)
    assert numbers["eval/accuracy"][-1] > 0.8


def test_reinforcement_makes_good_moves_likely_and_ignores_rows_without_weight(numbers: dict[str, list[float]]):
    torch.manual_seed(0)
    config = config_of("sl_rl")
    model, _ = build_model("model1", config)
    trainer = sl_rl_trainer.Trainer1("trainer1", config, model)
    rng = np.random.default_rng(0)
    obs = rng.integers(0, 255, (64, 5, 7, 7), np.uint8)
    action = np.arange(64) % 4
    weight = (np.arange(64) < 60).astype(np.float32)
    advantage = np.where(weight == 0, 1e6, np.where(action == 2, 1.0, -1.0)).astype(np.float32)
    replay: dict[str, Any] = {
        "obs": obs,
        "action": action,
        "advantage": advantage,
        "target": np.ones(64, np.float32),
        "logp": np.full(64, np.log(0.25), np.float32),
        "weight": weight,
    }
    replay = trainer.handle({k: torch.from_numpy(v) for k, v in replay.items()})
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    for _ in range(5):
        optimizer.zero_grad()
        trainer.loss(replay, 0).backward()
        optimizer.step()
    assert set(model(replay["obs"])["dist"].argmax(-1).tolist()) == {2}
    assert numbers["loss/value"][-1] < numbers["loss/value"][0]


def test_demonstrations_lose_their_weight_as_training_goes_on(numbers: dict[str, list[float]]):
    torch.manual_seed(0)
    config = config_of("sl_rl", demonstrations={"fade_steps": 100})
    model, _ = build_model("model1", config)
    obs = np.random.default_rng(0).integers(0, 255, (8, 5, 7, 7), np.uint8)
    trainer = sl_rl_trainer.Trainer1("trainer1", config, model)
    replay = trainer.handle({"obs": torch.from_numpy(obs), "action": torch.arange(8) % 4})
    whole, part, none = (float(trainer.loss(replay, step).detach()) for step in (0, 75, 200))
    assert (part, none) == (pytest.approx(0.25 * whole), 0.0)
    assert numbers["loss/imitation_weight"] == [1.0, 0.25, 0.0]


# --- the whole --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("mode", ["train", "deploy"])
def test_launch_files_are_right(name: str, mode: str):
    graph = load(HERE / f"{name}.yaml", mode=mode)
    check_modules(graph)
    assert ("trainer1" in graph.components) == (mode == "train")
    assert "actor1" in graph.components


def test_everything_runs_in_one_process(tmp_path: Path, demonstrations: str):
    """Both kinds of batches, games over HTTP, new weights: until the model has made some steps."""
    changes = [
        f"demonstrations.path={demonstrations}",
        "actor1.port=0",
        "actor1.episode_length=8",
        "model1.use_onnx=null",
    ]
    changes += ["buffer1.batch_size=16", "train_buffer.batch_size=16"]
    graph = load(HERE / "sl_rl.yaml", changes, project=str(tmp_path), trial="t")
    session = bray.init(graph.settings.project, graph.settings.trial, cluster="local")
    try:
        run = build(graph, session)
        games = Games("grid", "127.0.0.1", run.actors["actor1"].port)
        threads = [threading.Thread(target=games.play, args=(i,), daemon=True) for i in range(4)]
        for thread in threads:
            thread.start()
        end = time.monotonic() + 60
        while run.models["model1"].step < 20 and time.monotonic() < end:
            time.sleep(0.1)
        games.over.set()
        for thread in threads:
            thread.join(10)
        assert run.models["model1"].step >= 20
        assert games.ticks > 0
        assert not games.trouble
    finally:
        bray.shutdown()


def test_games_go_on_with_a_model_that_has_no_value(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    """A Q network has neither value nor distribution: the agent that watches has nothing to say, and does not fail."""
    changes = ["actor1.port=0", "model1.module=null", "model1.algo=ppo", "model1.use_onnx=null"]
    changes += ["ppo.algorithm=DQN", "ppo.settings=null"]
    graph = load(HERE / "rl.yaml", changes, mode="deploy", project=str(tmp_path), trial="t")
    session = bray.init(graph.settings.project, graph.settings.trial, cluster="local")
    try:
        run = build(graph, session)
        games = Games("grid", "127.0.0.1", run.actors["actor1"].port)
        with Client("127.0.0.1", run.actors["actor1"].port) as client:
            client.start()
            games.episode(client, GridEnv(), seed=1)
            client.end()
        assert games.episodes == 1
        assert "agent/value" not in said()
        assert "metrics_agent" not in caplog.text
    finally:
        bray.shutdown()
