"""Noisy layers in a launched graph: agents that explore draw noise, those that play greedily do not, and training
changes its size."""

import numpy as np
import pytest
import yaml

import bray
from bray.client import Client
from bray.launch.build import build
from bray.launch.graph import load
from bray.launch.modules import check_modules
from tests import ways_for_tests as games

AGENT = {
    "kind": "agent",
    "module": "bray.remote.actor.policy_agent",
    "class": "PolicyAgent",
    "algo": "algo1",
    "model": "model1",
    "buffer": "buffer1",
    "wait_s": 5.0,
}
ACTOR = {
    "kind": "actor",
    "port": 0,
    "num_workers": 1,
    "actors_per_worker": 8,
    "episode_length": 16,
    "serialize": "json",
}
GRAPH = {
    "trial": "v0",
    "model1": {"kind": "model", "algo": "algo1", "local_mode": True},
    "buffer1": {"kind": "buffer", "size": 2, "batch_size": 32, "num_workers": 1},
    "explorer": AGENT,
    "player": {**AGENT, "explore": False},
    "actor1": {**ACTOR, "agents": ["explorer"]},
    "actor2": {**ACTOR, "agents": ["player"]},
    "trainer1": {"kind": "trainer", "algo": "algo1", "model": "model1", "buffers": ["buffer1"]},
    "algo1": {
        "kind": "config",
        "algorithm": "DQN",
        "env": "tests.ways_for_tests:Signs",
        "settings": {"epsilon": 0.0, "learning_starts": 100, "train_every": 2, "lr": 3e-3, "gamma": 0.5},
        "model": {"layers": [{"layer_type": "noisy_linear", "layer_dim": 16, "activation": "tanh"}]},
    },
}
OBS = [1.0, 0.0, 0.0, 0.0]


@pytest.fixture
def run(tmp_path):
    file = tmp_path / "noisy.yaml"
    file.write_text(yaml.safe_dump({"project": str(tmp_path / "runs"), **GRAPH}, sort_keys=False))
    graph = load(file)
    check_modules(graph)
    session = bray.init(graph.settings.project, graph.settings.trial, cluster="local")
    yield build(graph, session)
    bray.shutdown()


def actions(port, ticks=60):
    """What one game is told to do when it shows the same thing again and again."""
    with Client("127.0.0.1", port) as client:
        client.start()
        tick = {"obs": OBS, "reward": 0.0, "terminated": False, "truncated": False}
        return [client.tick(tick)["action"] for _ in range(ticks)]


def sigmas(model):
    weights, _ = model.get_weights()
    return {k: np.array(v) for k, v in weights.items() if k.endswith("_sigma")}


def test_agents_explore_by_noise_that_is_trained_and_greedy_ones_have_none(run):
    model = run.models["model1"]
    first = sigmas(model)
    assert first
    explored = actions(run.actors["actor1"].port)
    assert len(set(explored)) > 1  # epsilon is 0: only noise makes them differ
    assert len(set(actions(run.actors["actor2"].port, 5))) == 1  # weights do not change in between: 100 rows come first
    obs = np.array(OBS, np.float32)
    np.testing.assert_array_equal(model(obs)["q"], model(obs)["q"])
    played = games.Games(games.Signs, run.actors["actor1"].port, 700)
    assert played.over.wait(300)
    played.close()
    assert not played.trouble
    now = sigmas(model)
    assert model.step > 50
    assert any(np.abs(now[k] - first[k]).max() > 1e-3 for k in first)
