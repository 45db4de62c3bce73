"""Where values come from behind the last step: reward 1 for ever, cut after 10 steps, is worth 1 / (1 - gamma); ended
after 10 steps it is not.

The observation is always the same, so an algorithm has one value to learn, and its fixed point is known. An algorithm
that bootstraps has a line in CASES; ES and ARS know returns of whole episodes only.
"""

from dataclasses import dataclass, field
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces

from bray.experiment import Experiment
from tests.rl.test_rl import slow_gae

GAMMA = 0.99
LENGTH = 10


class Ones(gym.Env):
    """Reward 1 at every step, one observation; after 10 steps the episode is truncated, or terminated."""

    observation_space = spaces.Box(0.0, 1.0, (1,), np.float32)

    def __init__(self, terminates: bool = False, continuous: bool = False):
        self.terminates, self.at = terminates, 0
        self.action_space = spaces.Box(-1.0, 1.0, (1,), np.float32) if continuous else spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[np.ndarray, dict]:
        super().reset(seed=seed)
        self.at = 0
        return np.ones(1, np.float32), {}

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict]:
        self.at += 1
        last = self.at == LENGTH
        return np.ones(1, np.float32), 1.0, last and self.terminates, last and not self.terminates, {}


@dataclass(frozen=True)
class Case:
    steps: int
    """Env steps to learn for."""
    lambda_: float
    """Of its targets: 0 for one step and a bootstrap, 1 for all rewards to the end."""
    config: dict[str, Any] = field(default_factory=dict)
    slow: bool = False
    continuous: bool = False


SMALL = {"num_envs": 10, "fcnet_hiddens": [8], "max_grad_norm": None, "check": False}
ROLLOUTS = {**SMALL, "rollout_length": 11}
CASES = {
    "PPO": Case(7_000, 0.95, {**ROLLOUTS, "lr": 5e-2, "epochs": 10, "minibatches": 1}),
    "A2C": Case(40_000, 0.95, {**ROLLOUTS, "lr": 5e-2}, slow=True),
    "PG": Case(40_000, 1.0, {**SMALL, "batch_size": 100, "lr": 1e-1}, slow=True),
    "PQN": Case(40_000, 0.65, {**ROLLOUTS, "lr": 5e-2, "epochs": 10, "minibatches": 1, "epsilon": 0.5}, slow=True),
}


def fixed_point(lambda_: float, terminates: bool) -> float:
    """The V whose lambda-returns, averaged over the steps of an episode, are V itself: they are linear in V, so two
    values tell it."""
    ended = np.zeros((LENGTH, 1), bool)
    ended[-1] = True
    flags = (ended, ~ended & False, ~ended | True) if terminates else (~ended & False, ended, ~ended | True)

    def excess(v: float) -> float:
        value, reward = np.full((LENGTH + 1, 1), v), np.ones((LENGTH, 1))
        return float(slow_gae(value, reward, *flags, GAMMA, lambda_).mean())

    at_0, at_1 = excess(0.0), excess(1.0)
    return at_0 / (at_0 - at_1)


def learned_value(name: str, case: Case, terminates: bool) -> float:
    env_config = {"terminates": terminates, "continuous": case.continuous}
    config = {"env_config": env_config, "gamma": GAMMA, **case.config}
    exp = Experiment(name, Ones, use_preset=False, config=config)
    while exp.training.env_steps < case.steps:
        exp.training.iterate()
    with torch.no_grad():
        outputs = exp.training.model(torch.ones(1, 1))
    exp.close()
    return float(outputs["value"] if "value" in outputs else outputs["q"].max())


def test_fixed_points_by_hand():
    for lambda_ in (0.0, 0.5, 1.0):
        assert fixed_point(lambda_, terminates=False) == pytest.approx(100.0)
    assert fixed_point(0.0, terminates=True) == pytest.approx(1 / (1 - 0.99 * 0.9))  # nine of ten steps have a future
    rewards_to_come = [sum(GAMMA**i for i in range(n)) for n in range(1, LENGTH + 1)]
    assert fixed_point(1.0, terminates=True) == pytest.approx(np.mean(rewards_to_come))


def params() -> list[Any]:
    return [pytest.param(name, marks=[pytest.mark.slow] if case.slow else []) for name, case in CASES.items()]


@pytest.mark.parametrize("name", params())
def test_an_episode_that_was_cut_goes_on(name):
    assert learned_value(name, CASES[name], terminates=False) == pytest.approx(100.0, rel=0.05)


@pytest.mark.parametrize("name", params())
def test_an_episode_that_terminated_does_not(name):
    want = fixed_point(CASES[name].lambda_, terminates=True)
    assert learned_value(name, CASES[name], terminates=True) == pytest.approx(want, rel=0.15)
