"""Environments: made from a config, stepped many at once under one rule (`vector.py`)."""

from bray.envs.build import env_spec
from bray.envs.config import AtariConfig, EnvConfig
from bray.envs.make import make_env, make_vec
from bray.envs.registry import EnvContext, list_envs, register_env
from bray.envs.rewards import RewardTransform
from bray.envs.vector import VecEnv, episode_seed

__all__ = [
    "AtariConfig",
    "EnvConfig",
    "EnvContext",
    "RewardTransform",
    "VecEnv",
    "env_spec",
    "episode_seed",
    "list_envs",
    "make_env",
    "make_vec",
    "register_env",
]
