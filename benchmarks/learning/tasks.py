"""Small tasks whose answer is known, each about one thing: memory, or exploration.
`--env benchmarks.learning.tasks:Cue`."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np


class Cue(gym.Env):
    """Which of two cues was shown is asked for `delay` steps later: reward 1 for the right answer, -1 for the wrong
    one, 0 before.

    Observations: the cue (-1 or 1 in the first, 0 in all others) and whether the answer counts now. Without memory the
    mean is 0."""

    def __init__(self, delay: int = 20):
        self.observation_space = gym.spaces.Box(-1.0, 1.0, (2,), np.float32)
        self.action_space = gym.spaces.Discrete(2)
        self.delay = delay

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[np.ndarray, dict[str, Any]]:
        super().reset(seed=seed)
        self.cue, self.at = int(self.np_random.integers(2)), 0
        return np.array([2.0 * self.cue - 1.0, 0.0], np.float32), {}

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        asked = self.at == self.delay
        reward = 0.0 if not asked else 1.0 if int(action) == self.cue else -1.0
        self.at += 1
        return np.array([0.0, self.at == self.delay], np.float32), reward, asked, False, {}


class MaskedCartPole(gym.ObservationWrapper):
    """CartPole-v1 that shows the position and the angle, not how fast they change: a policy has to remember."""

    def __init__(self) -> None:
        super().__init__(gym.make("CartPole-v1"))
        shown: Any = self.env.observation_space
        self.observation_space = gym.spaces.Box(shown.low[[0, 2]], shown.high[[0, 2]], dtype=np.float32)

    def observation(self, observation: np.ndarray) -> np.ndarray:
        return observation[[0, 2]]


class Chain(gym.Env):
    """`length` states in a row; an episode begins in the second and lasts `length` + 9 steps (Osband et al. 2016). One
    action goes left, the other right; which one differs from state to state, so that no constant policy gets far.
    Reward 0.001 in the first state, 1 in the last one: the best return is 11, and a random walk never gets there."""

    def __init__(self, length: int = 50):
        self.observation_space = gym.spaces.Discrete(length)
        self.action_space = gym.spaces.Discrete(2)
        self.length, self.right = length, np.random.default_rng(0).integers(2, size=length)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[int, dict[str, Any]]:
        super().reset(seed=seed)
        self.state, self.at = 1, 0
        return self.state, {}

    def step(self, action: Any) -> tuple[int, float, bool, bool, dict[str, Any]]:
        reward = 1.0 if self.state == self.length - 1 else 0.001 if self.state == 0 else 0.0
        self.state = min(max(self.state + (1 if int(action) == self.right[self.state] else -1), 0), self.length - 1)
        self.at += 1
        return self.state, reward, False, self.at == self.length + 9, {}
