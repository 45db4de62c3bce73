"""A launched training begins with the settings of `bray train`, and writes its rows as that does."""

import json

import numpy as np
import pytest
import torch

import bray
from bray.algos import ALGORITHMS
from bray.config.runfile import presets
from bray.figures import read_results
from bray.remote import master
from bray.remote.algo import algo_setup
from bray.remote.trainer import drive
from bray.remote.trainer.worker import trainer_path
from tests.ray_for_tests import opened
from tests.trainer_for_tests import Given, MemoryModel, Regression, learner_drive, setup_of, transitions

CONTINUOUS = ("SAC", "CrossQ", "DDPG", "TD3", "TD3+BC", "CQL", "SQIL")
WITHOUT_PRESET = (
    "BC",
    "MARWIL",
    "TD3+BC",
    "IQL",
    "CQL",
    "CQL-Discrete",
    "DQfD",
    "SQIL",
    "SQIL-Discrete",
    "GAIL",
    "DAgger",
    "DT",
)
"""They learn from files or an expert, for which there are none."""
SPREAD = "pettingzoo:mpe2.simple_spread_v3"
TEAMS = dict.fromkeys(("QMIX", "VDN"), "bray.envs.agent_games:TwoStep")
TEAMS |= dict.fromkeys(("MADDPG", "COMA", "ATOC"), SPREAD)
GAMES = {"MAPPO": SPREAD, "NFSP": "openspiel:kuhn_poker", "AlphaZero": "openspiel:tic_tac_toe"}
MEMBERS = {SPREAD: ["agent_0", "agent_1", "agent_2"], "bray.envs.agent_games:TwoStep": ["a", "b"]}


@pytest.mark.parametrize("name", ALGORITHMS)
def test_an_algorithm_is_launched_with_the_settings_of_bray_train(name):
    env = "Pendulum-v1" if name in CONTINUOUS else TEAMS.get(name, GAMES.get(name, "CartPole-v1"))
    if env == SPREAD:
        pytest.importorskip("mpe2")
    told = {"id": env, **({"teams": {"team": MEMBERS[env]}} if name in TEAMS else {})}
    launched, local = algo_setup({"algorithm": name, "env": told}).resolved, bray.Experiment(run=name, env=env).config
    for section in ("algo", "model"):
        assert vars(launched[section]) == vars(local[section]), section
    has_one = any((a, e) == (name, env) for a, e, _ in presets())
    assert has_one == (name not in WITHOUT_PRESET), "a preset, so that this test can fail"


def test_what_a_section_says_comes_before_the_preset():
    section = {"algorithm": "PPO", "env": "CartPole-v1", "settings": {"lr": 0.5}, "model": {"fcnet_hiddens": [3]}}
    config = algo_setup(section, "ppo").resolved
    assert config["algo"].lr == 0.5
    assert config["model"].fcnet_hiddens == (3,)
    assert config["algo"].epochs == bray.Experiment("PPO", "CartPole-v1").config["algo"].epochs
    assert config.provenance["algo.lr"] == "section ppo"
    assert config.provenance["algo.epochs"].startswith("preset cartpole_ppo")
    assert not config["run"].stop  # the file says when to end


def test_a_trial_from_before_keeps_its_settings(tmp_path):
    section = {"algorithm": "PPO", "env": "CartPole-v1"}
    plain = bray.Experiment("PPO", "CartPole-v1", use_preset=False).config["algo"]
    with opened(tmp_path, "local") as session:
        assert algo_setup(section).config != plain
        trainer_path(session.path, "trainer1")
        assert algo_setup(section).config != plain
        (session.path / "trainer.json").write_text(json.dumps({"name": "trainer1"}))  # as it was before
        assert algo_setup(section).config == plain


def test_rows_of_a_launched_training_are_those_of_its_run(tmp_path, monkeypatch):
    """One for each iteration, with what agents report beside it, and none of the master's own."""
    monkeypatch.setattr(drive, "ROW_S", 0.0)
    with opened(tmp_path, "local") as session:
        net = bray.RemoteModel("m", torch.nn.Linear(3, 2), (np.zeros((1, 3), np.float32),))
        buffer = bray.RemoteBuffer("b", size=64)
        batch = {"x": np.ones((4, 3), np.float32), "y": np.zeros((4, 2), np.float32)}
        buffer.push(*[batch] * 12)
        master.merge("goals", 4.0, agent="a1")
        master.merge("episode_return", 7.0, agent="a1")
        master.flush()
        bray.RemoteTrainer("t1").train(trainer=Regression, model=net, buffers=[buffer], num_steps=6).result(60)
        path = session.path
    rows = read_results(path)
    assert [row["training_iteration"] for row in rows] == list(range(1, 7))
    assert [row["learner_steps_total"] for row in rows] == list(range(1, 7))
    assert all(row["goals{agent=a1}"] == 4.0 and row["episode_return_mean"] == 7.0 for row in rows)
    assert all({"loss/loss", "loss/grad_norm", "perf/learn", "time_total_s"} <= row.keys() for row in rows)


def test_rows_go_on_after_a_resume(tmp_path, monkeypatch):
    monkeypatch.setattr(drive, "ROW_S", 0.0)
    setup = setup_of("DQN", "CartPole-v1")
    remote = MemoryModel(setup.make_model())
    for steps in (3, 5):
        learner_drive(setup, remote, Given(transitions), num_steps=steps, path=tmp_path / "t").train()
    assert [row["training_iteration"] for row in read_results(tmp_path / "t")] == [1, 2, 3, 4, 5]
