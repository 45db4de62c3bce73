"""What lies behind the end of an episode, for algorithms that replay: reward 1 at every step, episodes of ten.

Cut by a time limit that cannot be seen, the future goes on: Q = 1 + gamma Q. Ended for good, Q falls with every step,
which is shown, to 1 at the last.
"""

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces

from bray.data import Replay
from bray.experiment import Experiment

LENGTH = 10


class Forever(gym.Env):
    """Pays 1 for each of `LENGTH` steps, whatever is done."""

    observation_space = spaces.Box(-1.0, 1.0, (1,), np.float32)

    def __init__(self, ends=False, discrete=True):
        self.ends, self.t = ends, 0
        self.action_space = spaces.Discrete(2) if discrete else spaces.Box(-1.0, 1.0, (1,), np.float32)

    def _obs(self):
        return np.array([self.t / LENGTH if self.ends else 1.0], np.float32)

    def reset(self, *, seed=None, options=None):
        self.t = 0
        return self._obs(), {}

    def step(self, action):
        self.t += 1
        over = self.t == LENGTH
        return self._obs(), 1.0, over and self.ends, over and not self.ends, {}


ON_TARGET = {"lr": 1e-2, "target_period": 10}
DISTRIBUTION = {"v_min": 0.0, "v_max": 120.0, "num_atoms": 61}
ACTOR = {"lr": 1e-4, "critic_lr": 3e-3}
TEMPERATURE = {"adapt_alpha": False, "initial_alpha": 1e-6}
"""Without the worth of entropy, which would be part of the values."""
ALGOS = {
    "DQN": ON_TARGET,
    "C51": {**ON_TARGET, **DISTRIBUTION},
    "QR-DQN": {**ON_TARGET, "num_quantiles": 8},
    "IQN": {**ON_TARGET, "lr": 3e-3},
    "Rainbow": {**ON_TARGET, **DISTRIBUTION, "n_step": 3},
    "SAC": {**ACTOR, **TEMPERATURE, "tau": 0.1},
    "SAC-Discrete": {**ACTOR, **TEMPERATURE, "tau": 0.1},
    "CrossQ": {**ACTOR, **TEMPERATURE, "critic_hiddens": [32, 32]},
    "TD3": {**ACTOR, "tau": 0.2},
    "DDPG": {**ACTOR, "tau": 0.1},
}


def learnt(name, ends, gamma=0.99, updates=5000):
    """Q of the actions that the policy takes along an episode `[LENGTH]`."""
    discrete = name not in ("SAC", "CrossQ", "TD3", "DDPG")
    config = {"gamma": gamma, "num_envs": 4, "learning_starts": 200, "train_every": 1, "batch_size": 64}
    config |= {"fcnet_hiddens": [32, 32], "fcnet_activation": "relu", "replay_size": 1000, "max_grad_norm": None}
    config |= {"env_config": {"ends": ends, "discrete": discrete}, **ALGOS[name]}
    exp = Experiment(name, Forever, config=config, seed=0, use_preset=False)
    learner = exp.training.learner
    while learner.steps < updates:
        exp.training.iterate()
    obs = torch.arange(LENGTH)[:, None] / LENGTH if ends else torch.ones(LENGTH, 1)
    with torch.no_grad():
        outputs = learner.model(obs)
        if "q" in outputs:
            q = outputs["q"].amax(-1)
        elif discrete:
            q = learner.critic(obs).mean(0).amax(-1)
        else:
            action = outputs["mu"] if "mu" in outputs else outputs["dist"].chunk(2, 1)[0].tanh()
            q = learner.critic(obs, action).mean(0)
    exp.close()
    return q.numpy()


def until_the_end(gamma):
    return [(1.0 - gamma ** (LENGTH - t)) / (1.0 - gamma) for t in range(LENGTH)]


def test_at_a_smaller_gamma(monkeypatch):
    monkeypatch.setattr(Replay, "iteration_steps", 100)
    np.testing.assert_allclose(learnt("DQN", False, 0.8, 500), 5.0, rtol=0.05)
    np.testing.assert_allclose(learnt("DQN", True, 0.8, 1000), until_the_end(0.8), rtol=0.15)


@pytest.mark.slow
@pytest.mark.parametrize("name", ALGOS)
def test_a_future_that_is_cut_off_counts(name):
    np.testing.assert_allclose(learnt(name, ends=False), 100.0, rtol=0.05)


@pytest.mark.slow
@pytest.mark.parametrize("name", ALGOS)
def test_an_episode_that_ended_has_no_future(name):
    np.testing.assert_allclose(learnt(name, ends=True), until_the_end(0.99), rtol=0.15)
