"""An episode of a policy as pictures."""

from __future__ import annotations

import dataclasses
import os
from typing import Any

import numpy as np

from bray.act import GREEDY
from bray.envs.config import EnvConfig
from bray.envs.make import make_env
from bray.envs.registry import env_name
from bray.envs.vector import LIFE_LOST, episode_seed
from bray.errors import BrayError, ConfigError
from bray.experiment.policy import ServedPolicy
from bray.train.evaluate import EVAL_SEED, eval_config


def film(
    served: ServedPolicy, env_config: EnvConfig, mode: str = "rgb_array", act: str = GREEDY, seed: int | None = None
) -> tuple[list[np.ndarray], float, int, float]:
    """One episode in one environment that draws: frames (the first picture, then one per step), return, steps,
    frames/s. In mode `human` it draws to a window itself, and there are no frames."""
    name = env_name(env_config.id)
    config = dataclasses.replace(eval_config(env_config, 1), vector="inprocess")
    if mode == "rgb_array" and not (os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")):
        os.environ.setdefault("SDL_VIDEODRIVER", "dummy")  # else pygame complains about a screen that nobody needs
    env = _open(config, mode, name)
    seed = EVAL_SEED if seed is None else seed
    served.rng = np.random.default_rng(seed)
    frames: list[np.ndarray] = []

    def shoot() -> None:
        if mode == "human":
            return  # it draws itself in reset and step
        try:
            picture = env.render()
        except NotImplementedError:
            picture = None
        picture = np.asarray(picture) if picture is not None else None
        if picture is None or picture.ndim != 3 or picture.dtype != np.uint8:
            got = "nothing" if picture is None else f"{picture.dtype}{list(picture.shape)}"
            raise ConfigError(f"{name} draws no picture: expected uint8 [H, W, 3] from render(), got {got}")
        frames.append(picture.copy())

    try:
        obs, _ = env.reset(seed=episode_seed(seed, 0, 0))
        shoot()
        total, steps, state, over = 0.0, 0, None, False
        while not over:
            action = served(obs, state, act)
            if served.recurrent:
                action, state = action
            obs, reward, terminated, truncated, info = env.step(action)
            shoot()
            total, steps = total + float(np.asarray(reward).item()), steps + 1
            over = bool(truncated) or (bool(terminated) and not info.get(LIFE_LOST))
    finally:
        env.close()
    return frames, total, steps, float((env.metadata or {}).get("render_fps") or 30)


def _open(config: Any, mode: str, name: str) -> Any:
    try:
        env = make_env(config, render_mode=mode)
    except BrayError:
        raise
    except Exception as e:  # no display, no pygame, no such mode: the environment's own words say which
        raise ConfigError(f"{name} cannot be drawn with render_mode={mode!r}: {type(e).__name__}: {e}") from e
    modes = (env.metadata or {}).get("render_modes")
    if modes and mode not in modes:
        env.close()
        raise ConfigError(f"{name} has no render mode {mode!r}, it has: {', '.join(modes)}")
    return env
