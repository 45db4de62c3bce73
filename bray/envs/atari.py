"""Preprocessing of single Atari games (Arcade Learning Environment): frame skip, maximum of two frames, gray, resize,
frame stack.

The pictures equal those of ALE's C++ vector environment (native.py), so that a model trained there can be evaluated,
filmed and served with single games. Resizing averages areas, first of rows, then of columns, and needs no image
library.
"""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np

from bray.envs.config import AtariConfig
from bray.envs.vector import LIFE_LOST

Taps = list[tuple[np.ndarray, np.ndarray]]
"""How one axis of a picture is resized; see `area_taps`."""
SERVES = 2
"""Actions in place of which FIRE is pressed, at the start and after a lost life: with sticky actions a game overlooks
one frame of it in four, and the frames of one action once in 256 times."""


def is_atari(spec: Any) -> bool:
    """Whether a Gymnasium spec is one of ALE's games."""
    return spec is not None and isinstance(spec.entry_point, str) and spec.entry_point.startswith("ale_py")


def shows_pictures(config: AtariConfig, arguments: dict[str, Any]) -> bool:
    """Whether the game is preprocessed as pictures (and not played from RAM or left alone)."""
    return config.preprocess and arguments.get("obs_type", "rgb") != "ram"


def game_arguments(config: AtariConfig) -> dict[str, Any]:
    """What AtariEnv is made with so that `AtariFrames` can do the rest."""
    out: dict[str, Any] = {"frameskip": 1, "obs_type": "grayscale" if config.grayscale else "rgb"}
    if config.full_action_space:
        out["full_action_space"] = True
    if config.repeat_action_probability is not None:
        out["repeat_action_probability"] = config.repeat_action_probability
    return out


def area_weights(old: int, new: int) -> np.ndarray:
    """Resizing `old` pixels to `new` as a matrix [new, old]: each row averages the old pixels that a new pixel
    covers."""
    edges = np.linspace(0.0, old, new + 1)
    cells = np.arange(old)
    cover = np.minimum(edges[1:, None], cells + 1) - np.maximum(edges[:-1, None], cells)
    weights = np.clip(cover, 0.0, None)
    return (weights / weights.sum(1, keepdims=True)).astype(np.float32)


def area_taps(old: int, new: int) -> Taps:
    """`area_weights` without its zeros: a few pairs (index of an old pixel for each new one, its weight), whose
    products are summed."""
    weights = area_weights(old, new)
    order = np.argsort(-weights, axis=1, kind="stable")
    count = int((weights > 0).sum(1).max())
    return [(order[:, k], np.take_along_axis(weights, order[:, k : k + 1], 1)[:, 0]) for k in range(count)]


def resize(frame: np.ndarray, rows: Taps, columns: Taps) -> np.ndarray:
    """A picture [H, W] or [H, W, 3] made smaller by averaging areas, as `area_taps` has them for its two axes."""
    colour = (1,) * (frame.ndim - 2)
    high: Any = sum(frame[at] * w.reshape(-1, 1, *colour) for at, w in rows)
    out: Any = sum(high[:, at] * w.reshape(-1, *colour) for at, w in columns)
    return np.rint(out).astype(np.uint8)


class AtariFrames(gym.Wrapper):
    """AtariEnv (frameskip 1) -> observations uint8 [stack, size, size] (or [stack, size, size, 3]), oldest first."""

    def __init__(self, env: gym.Env, config: AtariConfig, frame_stack: int | None = None):
        super().__init__(env)
        self.config = config
        self.stack = frame_stack or config.frame_stack
        self._ale: Any = env.unwrapped.ale  # type: ignore[attr-defined]
        height, width = env.observation_space.shape[:2]  # type: ignore[index]
        colours = () if config.grayscale else (3,)
        self._rows, self._columns = area_taps(height, config.size), area_taps(width, config.size)
        self._frames = [np.zeros((height, width, *colours), np.uint8) for _ in range(2)]
        self._screen = self._ale.getScreenGrayscale if config.grayscale else self._ale.getScreenRGB
        shape = (self.stack, config.size, config.size, *colours)
        self.observation_space = gym.spaces.Box(0, 255, shape, np.uint8)
        self._stack = np.zeros(shape, np.uint8)
        meanings = env.unwrapped.get_action_meanings()  # type: ignore[attr-defined]
        self._fire = meanings.index("FIRE") if config.fire_reset and "FIRE" in meanings else None
        self._lives, self._serves = 0, 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[np.ndarray, dict]:
        _, info = self.env.reset(seed=seed, options=options)
        rng = self.env.unwrapped.np_random
        idle = int(rng.integers(0, self.config.noop_max)) + 1 if self.config.noop_max else 0
        for action in [0] * max(0, idle - (self._fire is not None)) + ([] if self._fire is None else [self._fire]):
            _, _, terminated, truncated, info = self.env.step(action)
            if terminated or truncated:
                _, info = self.env.reset(options=options)
        self._lives, self._serves = self._ale.lives(), SERVES
        self._screen(self._frames[1])
        self._stack = np.zeros_like(self._stack)
        self._stack[-1] = resize(self._frames[1], self._rows, self._columns)
        return self._stack.copy(), info

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        total, skip = 0.0, self.config.frame_skip
        if self._serves and self._fire is not None:
            action = self._fire
        for t in range(skip):
            _, reward, terminated, truncated, info = self.env.step(action)
            total += float(reward)
            if skip - t <= 2:
                self._screen(self._frames[2 - (skip - t)])
            if terminated or truncated:
                break
        frame = np.maximum(*self._frames) if skip > 1 else self._frames[1]
        stack = np.empty_like(self._stack)
        stack[:-1], stack[-1] = self._stack[1:], resize(frame, self._rows, self._columns)
        self._stack = stack
        lives = self._ale.lives()
        lost, self._lives = 0 < lives < self._lives, lives
        self._serves = SERVES if lost else max(0, self._serves - 1)
        if self.config.episodic_life and lost and not terminated:
            return stack.copy(), total, True, truncated, {**info, LIFE_LOST: True}
        return stack.copy(), total, terminated, truncated, info
