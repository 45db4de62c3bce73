"""Several learners: processes that learn the same weights together. What their updates are is looked at in
tests/remote/test_remote_trainer_ranks.py."""

import logging
import os
import signal

import gymnasium as gym
import numpy as np
import pytest

import bray
from bray.errors import BrayError, CheckpointError, ConfigError, EnvError

SMALL = {"num_learners": 2, "num_envs": 2, "fcnet_hiddens": [8], "device": "cpu", "export_graph_after_s": None}
CASES = {
    "PPO": {"rollout_length": 16, "minibatches": 2},
    "DQN": {"learning_starts": 40, "train_every": 8, "batch_size": 8, "iteration_steps": 100},
    "IMPALA": {"rollout_length": 8, "num_workers": 1},
}


class Fragile(gym.Env):
    """An environment that breaks, but only in the process that plays with another seed."""

    observation_space, action_space = gym.spaces.Box(-1, 1, (2,)), gym.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.bad = getattr(self, "bad", False) or os.environ.get("BRAY_TEST_FIRST") != str(os.getpid())
        return np.zeros(2, np.float32), {}

    def step(self, action):
        if self.bad:
            raise RuntimeError("this game is broken")
        return np.zeros(2, np.float32), 0.0, False, False, {}


def experiment(run, env="CartPole-v1", **more):
    return bray.Experiment(run, env, use_preset=False, seed=3, config=SMALL | CASES.get(run, {}), **more)


@pytest.mark.parametrize("run", ["PPO", "DQN", pytest.param("IMPALA", marks=pytest.mark.slow)])
def test_all_have_the_same_weights_and_steps_are_those_of_all(run, caplog, monkeypatch):
    monkeypatch.setattr("bray.train.learners.cores", lambda: 1)
    with experiment(run) as exp:
        rows = list(exp.train(stop={"env_steps_total": 200}))
        training = exp.training
        assert training.agree
        assert training.learner.is_recorded
        assert rows[-1]["env_steps_total"] == training.totals.env_steps >= 200
        assert rows[-1]["episodes_total"] * rows[-1]["episode_length_mean"] > 100  # one of two plays half of them
        assert rows[-1]["learner_steps_total"] == training.learner.steps > 0
    assert not [r for r in caplog.records if "weights of the learners differ" in r.message]
    assert any("num_learners=2 and 1 cores" in r.message for r in caplog.records)


def test_one_that_is_killed_is_replaced_and_the_run_goes_on(caplog):
    with experiment("PPO") as exp:
        rows = exp.train(stop={"training_iteration": 4})
        next(rows)
        before = exp.training.learner.steps
        with caplog.at_level(logging.WARNING, "bray"):
            for child in exp.training.process_ids:
                os.kill(child, signal.SIGKILL)
            last = list(rows)[-1]
        assert last["training_iteration"] == 4
        assert exp.training.learner.steps == 4 * before
        assert exp.training.agree
    assert any("died" in r.message and "begin this iteration again" in r.message for r in caplog.records)


def test_an_error_in_another_one_is_raised_here(monkeypatch):
    monkeypatch.setenv("BRAY_TEST_FIRST", str(os.getpid()))
    with experiment("PPO", Fragile) as exp, pytest.raises(EnvError, match="this game is broken"):
        next(iter(exp.train(stop={"env_steps_total": 100})))


def test_a_resume_has_as_many_learners(tmp_path):
    with experiment("PPO", path=tmp_path / "run") as exp:
        exp.fit({"training_iteration": 2}, progress=False)
        steps, weights = exp.training.learner.steps, exp.training.weights()
    with (
        pytest.raises(CheckpointError, match=r"of 2 learners and run.num_learners is 1.*Go on with num_learners=2"),
        bray.Experiment.resume(tmp_path / "run", num_learners=1) as exp,
    ):
        exp.training.iterate()
    with bray.Experiment.resume(tmp_path / "run") as exp:
        assert all(np.array_equal(x, weights[k]) for k, x in exp.training.weights().items())
        assert not exp.exact
        exp.fit({"training_iteration": 3}, progress=False)
        assert exp.training.learner.steps == steps * 3 // 2
        assert exp.training.agree


@pytest.mark.parametrize(
    "more",
    [{"run": "PPO", "env": "bray.envs.agent_games:Nim"}, {"run": "DQN", "config": {"output": "there"}}],
)
def test_what_it_is_not_for(more):
    config = {"num_learners": 2, "device": "cpu"} | more.pop("config", {})
    with pytest.raises(ConfigError, match="leave it out"):
        bray.Experiment(**{"env": "CartPole-v1", "use_preset": False} | more, config=config).training.iterate()


def test_functions_for_environments_are_refused():
    with (
        experiment("PPO") as exp,
        pytest.raises(BrayError, match=r"foreach_env reaches the environments of one learner"),
    ):
        exp.foreach_env(lambda env: None)
