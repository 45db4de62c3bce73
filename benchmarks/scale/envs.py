"""An environment whose time is its own: it sleeps."""

from __future__ import annotations

import time
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces

STEP_S = 0.005


class Sleep(gym.Env):
    """5 ms per step, 200 steps per episode, nothing to learn."""

    observation_space = spaces.Box(-1.0, 1.0, (4,), np.float32)
    action_space = spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[np.ndarray, dict[str, Any]]:
        super().reset(seed=seed)
        self.at = 0
        return np.zeros(4, np.float32), {}

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        time.sleep(STEP_S)
        self.at += 1
        return np.full(4, self.at / 200, np.float32), 1.0, self.at == 200, False, {}
