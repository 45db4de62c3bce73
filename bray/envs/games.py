"""Two small games with pictures, to try convolutions on where nothing is installed: `bray/Catch-v0` and
`bray/Breakout-v0`. `torch_games.py` has them for a GPU."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces

SIDE = 16
"""Height and width of a picture."""
PADDLE = 3
WALL, ROWS = 2, 3
"""Breakout's first row of bricks, and how many there are."""

_ACTIONS = spaces.Discrete(3)  # left, stay, right
CATCH_SPACES = spaces.Box(0, 255, (2, SIDE, SIDE), np.uint8), _ACTIONS
"""Channels: ball, paddle."""
BREAKOUT_SPACES = spaces.Box(0, 255, (4, SIDE, SIDE), np.uint8), _ACTIONS
"""Channels: ball, where the ball was before, paddle, bricks."""


class _Pictures(gym.Env):
    metadata = {"render_modes": ["rgb_array"], "render_fps": 15}  # noqa: RUF012

    def __init__(self, render_mode: str | None = None):
        self.render_mode = render_mode

    def picture(self) -> np.ndarray:
        raise NotImplementedError

    def render(self) -> Any:
        colours = np.array([[255, 255, 255], [90, 140, 255], [255, 160, 60], [110, 110, 120]], np.float64)
        picture = self.picture().astype(np.float64) / 255.0
        drawn = np.clip(np.tensordot(colours[: len(picture)].T, picture, 1), 0, 255).astype(np.uint8)
        return np.kron(drawn.transpose(1, 2, 0), np.ones((16, 16, 1), np.uint8))

    def _moved_paddle(self, action: int) -> int:
        return min(max(self.paddle + int(action) - 1, 0), SIDE - PADDLE)

    paddle = 0


class Catch(_Pictures):
    """A ball falls aslant from a random column and bounces off the sides; one point if the paddle is under it at the
    bottom, else one less. A perfect player has 1 per episode."""

    observation_space, action_space = CATCH_SPACES

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[np.ndarray, dict[str, Any]]:
        super().reset(seed=seed)
        self.x, self.y, self.drift = int(self.np_random.integers(SIDE)), 0, int(self.np_random.integers(-1, 2))
        self.paddle = SIDE // 2 - 1
        return self.picture(), {}

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        self.paddle = self._moved_paddle(action)
        if not 0 <= self.x + self.drift < SIDE:
            self.drift = -self.drift
        self.x += self.drift
        self.y += 1
        if self.y < SIDE - 1:
            return self.picture(), 0.0, False, False, {}
        caught = self.paddle <= self.x < self.paddle + PADDLE
        return self.picture(), 1.0 if caught else -1.0, True, False, {}

    def picture(self) -> np.ndarray:
        out = np.zeros((2, SIDE, SIDE), np.uint8)
        out[0, self.y, self.x] = 255
        out[1, SIDE - 1, self.paddle : self.paddle + PADDLE] = 255
        return out


class Breakout(_Pictures):
    """A ball flies diagonally; it bounces off sides, top and paddle, and breaks a brick with each hit (one point). The
    episode ends when the paddle misses it; a wall that is broken down is built again."""

    observation_space, action_space = BREAKOUT_SPACES

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[np.ndarray, dict[str, Any]]:
        super().reset(seed=seed)
        self.x, self.y = int(self.np_random.integers(SIDE)), WALL + ROWS
        self.right, self.down = int(self.np_random.integers(2)) * 2 - 1, 1
        self.before = self.x, self.y
        self.paddle = SIDE // 2 - 1
        self.wall = np.ones((ROWS, SIDE), bool)
        return self.picture(), {}

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        self.before = self.x, self.y
        if not self.wall.any():
            self.wall[:] = True
        self.paddle = self._moved_paddle(action)
        if not 0 <= self.x + self.right < SIDE:
            self.right = -self.right
        self.x += self.right
        if self.y + self.down < 0:
            self.down = -self.down
        y, reward, missed = self.y + self.down, 0.0, False
        brick = y - WALL
        if 0 <= brick < ROWS and self.wall[brick, self.x]:
            self.wall[brick, self.x], reward = False, 1.0
            self.down = -self.down
        elif y == SIDE - 1 and self.paddle <= self.x < self.paddle + PADDLE:
            self.down = -self.down
        else:
            self.y, missed = y, y == SIDE - 1
        return self.picture(), reward, missed, False, {}

    def picture(self) -> np.ndarray:
        out = np.zeros((4, SIDE, SIDE), np.uint8)
        out[0, self.y, self.x] = 255
        out[1, self.before[1], self.before[0]] = 255
        out[2, SIDE - 1, self.paddle : self.paddle + PADDLE] = 255
        out[3, WALL : WALL + ROWS] = self.wall * 255
        return out
