"""An episode of a policy as pictures."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from bray.act import GREEDY
from bray.envs.config import EnvConfig
from bray.envs.make import make_env, make_vec
from bray.envs.registry import env_name
from bray.envs.table import Seating
from bray.envs.vector import LIFE_LOST, episode_seed
from bray.errors import BrayError, ConfigError
from bray.experiment.policy import ServedPolicy
from bray.spec import EnvSpec
from bray.train.evaluate import EVAL_SEED, eval_config
from bray.train.games import ActingPolicy, play_games

Film = tuple[list[np.ndarray], float, int, float]


def film_game(
    players: Callable[[EnvSpec], Mapping[str, ActingPolicy]],
    env_config: EnvConfig,
    seating: Seating,
    mode: str = "rgb_array",
    act: str = GREEDY,
    seed: int | None = None,
) -> Film:
    """As `film`, of a game of several agents with all who play it; the return is the sum over agents."""
    config, name = _config(env_config, mode), env_name(env_config.id)
    tried = _open(config, mode, name)  # what cannot be drawn is said before the game
    fps = _fps(tried)
    tried.close()
    seed, frames = EVAL_SEED if seed is None else seed, []
    with make_vec(config, seed=seed, render_mode=mode, seating=seating) as env:

        def shoot(source: Any) -> None:
            if mode != "human":
                frames.append(_picture(env.render, name))

        (match,) = play_games(env, players(env.spec), 1, seed, act, shoot)
    return frames, match.total, match.length, fps


def _config(env_config: EnvConfig, mode: str) -> EnvConfig:
    if mode == "rgb_array" and not (os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")):
        os.environ.setdefault("SDL_VIDEODRIVER", "dummy")  # else pygame complains about a screen that nobody needs
    return dataclasses.replace(eval_config(env_config, 1), vector="inprocess")


def _picture(render: Callable[[], Any], name: str) -> np.ndarray:
    try:
        drawn = render()
    except NotImplementedError:
        drawn = None
    picture = np.asarray(drawn) if drawn is not None else None
    if picture is None or picture.ndim != 3 or picture.dtype != np.uint8:
        got = "nothing" if picture is None else f"{picture.dtype}{list(picture.shape)}"
        raise ConfigError(f"{name} draws no picture: expected uint8 [H, W, 3] from render(), got {got}")
    return picture.copy()


def film(
    served: ServedPolicy, env_config: EnvConfig, mode: str = "rgb_array", act: str = GREEDY, seed: int | None = None
) -> Film:
    """One episode in one environment that draws: frames (the first picture, then one per step), return, steps,
    frames/s. In mode `human` it draws to a window itself, and there are no frames."""
    name = env_name(env_config.id)
    env = _open(_config(env_config, mode), mode, name)
    seed = EVAL_SEED if seed is None else seed
    served.rng = np.random.default_rng(seed)
    frames: list[np.ndarray] = []

    def shoot() -> None:
        if mode != "human":  # else it draws itself in reset and step
            frames.append(_picture(env.render, name))

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
    return frames, total, steps, _fps(env)


def _fps(env: Any) -> float:
    return float((env.metadata or {}).get("render_fps") or 30)


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
