"""Every algorithm in every way to train: in the loop, from games that call over HTTP, as a launch file in one process
and on Ray.

Games are tiny, runs are bounded by their steps, and each has to get clearly better than chance.
"""

import threading
import time
from typing import Any, NamedTuple

import numpy as np
import pytest
import yaml

import bray
from bray.errors import ConfigError
from bray.launch.build import build
from bray.launch.graph import load
from bray.launch.modules import check_modules
from tests import ways_for_tests as games
from tests.ray_for_tests import RAY

LIMIT_S = 300.0
"""Only a way out: no result depends on it."""
SMALL = {"fcnet_hiddens": [32]}


class Case(NamedTuple):
    algorithm: str
    game: Any
    steps: int
    chance: float
    """The mean return of random actions, with room."""
    good: float
    rows: int
    """Of an update, where there are rollouts."""
    settings: dict[str, Any]
    model: dict[str, Any] = SMALL

    @property
    def env(self):
        return f"tests.ways_for_tests:{self.game.__name__}"


PPO = {"lr": 5e-3, "gamma": 0.5, "rollout_length": 32, "minibatches": 4, "epochs": 4}
DQN = {
    "lr": 3e-3,
    "gamma": 0.5,
    "learning_starts": 200,
    "train_every": 4,
    "batch_size": 32,
    "target_period": 50,
    "epsilon": {"kind": "linear", "start": 1.0, "end": 0.05, "steps": 1500},
}
CASES = {
    "ppo": Case("PPO", games.Signs, 4000, 3.6, 6.5, 128, PPO),
    "memory": Case(
        "PPO",
        games.Recall,
        6000,
        3.6,
        4.6,
        128,
        {**PPO, "lr": 1e-2, "gamma": 0.9},
        {**SMALL, "use_lstm": True, "lstm_cell_size": 16, "max_seq_len": 16},
    ),
    "a2c": Case("A2C", games.Signs, 5000, 3.6, 6.0, 32, {"lr": 1e-2, "gamma": 0.5, "rollout_length": 8}),
    "impala": Case("IMPALA", games.Signs, 5000, 3.6, 6.0, 32, {"lr": 1e-2, "gamma": 0.5, "rollout_length": 8}),
    "impala-memory": Case(
        "IMPALA",
        games.Recall,
        12000,
        3.6,
        4.6,
        128,
        {"lr": 1e-2, "gamma": 0.9, "rollout_length": 16},
        {**SMALL, "use_lstm": True, "lstm_cell_size": 16},
    ),
    "appo": Case("APPO", games.Signs, 4000, 3.6, 6.5, 128, {**PPO, "epochs": 2}),
    "dqn": Case("DQN", games.Signs, 3000, 3.6, 6.5, 0, DQN),
    "prioritized": Case("DQN", games.Signs, 3000, 3.6, 6.5, 0, {**DQN, "prioritized": True}),
    "apex": Case("Ape-X", games.Signs, 3000, 3.6, 6.5, 0, DQN),
    "sac": Case(
        "SAC",
        games.Follow,
        2500,
        -4.0,
        -1.5,
        0,
        {
            "lr": 3e-3,
            "critic_lr": 3e-3,
            "gamma": 0.1,
            "tau": 0.05,
            "learning_starts": 200,
            "train_every": 2,
            "batch_size": 64,
        },
    ),
}
NEW = {"impala", "impala-memory", "appo", "apex"}  # the others show each way
every_case = pytest.mark.parametrize(
    "case", [pytest.param(CASES[k], id=k, marks=pytest.mark.slow if k in NEW else ()) for k in CASES]
)


def rose(returns, case):
    """From chance to good, by the means of the first and the last forty episodes."""
    assert len(returns) > 150
    first, last = np.mean(returns[:20]), np.mean(returns[-40:])
    print(f"{case.algorithm} on {case.game.__name__}: {first:.2f} -> {last:.2f} in {len(returns)} episodes")
    assert first < case.chance
    assert last > case.good


@every_case
def test_in_the_loop(case, tmp_path):
    experiment = bray.Experiment(
        run=case.algorithm, env=case.env, num_envs=4, seed=0, path=tmp_path / "run", **case.settings, **case.model
    )
    rows = list(experiment.train(stop={"env_steps_total": case.steps}))
    last = rows[-1]
    assert case.steps <= last["env_steps_total"] < 1.5 * case.steps
    assert last["episode_return_mean"] > case.good
    experiment.close()


LONG = {"memory", "a2c", *NEW}  # from live games
live_cases = [pytest.param(CASES[k], id=k, marks=pytest.mark.slow if k in LONG else ()) for k in CASES]


@pytest.mark.parametrize("case", live_cases)
def test_from_live_games(case, tmp_path):
    more = {"rows": case.rows} if case.rows else {}
    experiment = bray.Experiment(
        run=case.algorithm, live=True, env=case.env, port=0, wait_s=5.0, seed=0, path=tmp_path / "run", **more,
        **case.settings, **case.model,
    )  # fmt: skip
    training = experiment.training
    training.source.open()
    limit = threading.Timer(LIMIT_S, training.stop)
    limit.start()
    played = games.Games(case.game, training.source.port, 2 * case.steps)
    try:
        for _ in experiment.train(stop={"env_steps_total": case.steps}):
            assert not played.trouble
    finally:
        limit.cancel()
        played.close()
        experiment.close()
    assert not played.trouble
    assert training.totals.dropped == 0
    assert case.steps <= training.env_steps <= played.made
    rose(played.returns, case)


COMPONENTS = """
model1: {kind: model, algo: algo1, local_mode: true}
buffer1: {kind: buffer, size: 2, batch_size: 32, num_workers: 1}
agent1:
  kind: agent
  module: bray.remote.actor.policy_agent
  class: PolicyAgent
  algo: algo1
  model: model1
  buffer: buffer1
  wait_s: 5.0
actor1:
  kind: actor
  port: 0
  num_workers: 1
  actors_per_worker: 16
  agents: [agent1]
  episode_length: 16
  serialize: json
trainer1: {kind: trainer, algo: algo1, model: model1, buffers: [buffer1]}
"""


def launch_file(case, path):
    """All components of a training, as a user writes them down."""
    file = path / "game.yaml"
    settings = {
        "project": str(path / "runs"),
        "trial": "v0",
        "algo1": {
            "kind": "config",
            "algorithm": case.algorithm,
            "env": case.env,
            "settings": case.settings,
            "model": case.model,
        },
    }
    graph = settings | yaml.safe_load(COMPONENTS)
    if case.rows and case.model.get("use_lstm"):
        graph["buffer1"]["batch_size"] = case.rows // 16  # sequences
    elif case.rows:
        graph["buffer1"]["batch_size"] = case.rows
    file.write_text(yaml.safe_dump(graph, sort_keys=False))
    return file


def trained_by_launch(case, tmp_path, kind, **kwargs):
    graph = load(launch_file(case, tmp_path))
    check_modules(graph)
    session = bray.init(graph.settings.project, graph.settings.trial, cluster=kind, **kwargs)
    try:
        run = build(graph, session)
        played = games.Games(case.game, run.actors["actor1"].port, case.steps)
        try:
            assert played.over.wait(LIMIT_S)
        finally:
            played.close()
        for promise in run.ends.values():
            if promise.done():
                promise.result()
        assert not played.trouble
        model, end = run.models["model1"], time.monotonic() + 30
        while model.env_steps < 0.8 * played.made and time.monotonic() < end:
            time.sleep(0.05)
        assert 0.8 * played.made <= model.env_steps <= played.made  # each counted once; some under way
        assert model.step > 0
    finally:
        bray.shutdown()
    rose(played.returns, case)


@every_case
def test_by_a_launch_file_in_one_process(case, tmp_path):
    trained_by_launch(case, tmp_path, "local")


@pytest.mark.slow
@every_case
def test_by_a_launch_file_on_ray(case, tmp_path):
    trained_by_launch(case, tmp_path, "ray", **RAY)


# --- what cannot work -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["dqn", "sac"])
def test_a_memory_that_single_steps_cannot_train_is_refused_before_anything_starts(name, tmp_path):
    case = CASES[name]._replace(model={**SMALL, "use_lstm": True})
    with pytest.raises(ConfigError, match=f"algo1.*: {case.algorithm} replays single steps and cannot train a memory"):
        check_modules(load(launch_file(case, tmp_path)))
    experiment = bray.Experiment(
        run=case.algorithm, live=True, env=case.env, port=0, path=tmp_path / "run", **case.settings, **case.model
    )
    with pytest.raises(
        ConfigError, match=r"replays single steps and cannot train a memory|has no memory: use_lstm must"
    ):
        _ = experiment.training


@pytest.mark.parametrize("store", ["uniform", "prioritized"])
@pytest.mark.parametrize("user", ["agent1", "trainer1"])
def test_a_buffer_that_replays_is_refused_before_there_is_a_component(store, user, tmp_path):
    file = launch_file(CASES["dqn"], tmp_path)
    graph = yaml.safe_load(file.read_text())
    graph["buffer1"]["store"] = store
    if user == "agent1":  # a trainer of the user's own, over rows of agents with an algorithm
        graph["trainer1"] |= {"module": "tests.trainer_for_tests", "class": "Regression"}
        del graph["trainer1"]["algo"]
    file.write_text(yaml.safe_dump(graph, sort_keys=False))
    session = bray.init(str(tmp_path / "runs"), "v0", cluster="local")
    started = []
    try:
        with pytest.raises(
            ConfigError,
            match=r"buffer1.store .*: it is gone, a buffer is a queue: .*An algorithm keeps its own replay.*prior",
        ):
            build(load(file), session, started.append)
        assert started == []
    finally:
        bray.shutdown()
