"""Atari games, by Bray's extra `atari`. Pong unless told otherwise."""

from __future__ import annotations

import gymnasium as gym

from bray.envs.config import AtariConfig, EnvConfig
from bray.envs.make import make_env


def AtariEnv(game: str = "Pong") -> gym.Env:
    """The observation is the last four pictures, uint8 `[4, 42, 42]`, oldest first."""
    return make_env(EnvConfig(id=f"ALE/{game}-v5", atari=AtariConfig(size=42)))
