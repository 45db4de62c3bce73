"""A task for networks that read lists: what stands where in the list says nothing."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np


class Foes(gym.Env):  # type: ignore[type-arg]
    """Step away from the nearest of up to `foes` foes, left or right, ten times: reward 1 for each right step, so 5 by
    chance and 10 at best.

    Observations: the places `[foes, 2]` of the foes, and which of them are there. Rows that are not there hold places
    too."""

    def __init__(self, foes: int = 8):
        self.count = foes
        places, there = gym.spaces.Box(-1.0, 1.0, (foes, 2), np.float32), gym.spaces.MultiBinary(foes)
        self.observation_space = gym.spaces.Dict(foes=places, there=there)
        self.action_space = gym.spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
        super().reset(seed=seed)
        self.at = 0
        return self._look(), {}

    def _look(self) -> dict[str, np.ndarray]:
        self.places = self.np_random.uniform(-1.0, 1.0, (self.count, 2)).astype(np.float32)
        self.there = self.np_random.integers(0, 2, self.count).astype(np.int8)
        self.there[self.np_random.integers(self.count)] = 1
        return {"foes": self.places, "there": self.there}

    def step(self, action: Any) -> tuple[dict[str, np.ndarray], float, bool, bool, dict[str, Any]]:
        distance = np.where(self.there == 1, np.linalg.norm(self.places, axis=1), np.inf)
        right = bool(self.places[distance.argmin(), 0] < 0)
        self.at += 1
        return self._look(), float((int(action) == 1) == right), self.at == 10, False, {}
