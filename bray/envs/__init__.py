"""Environments: made from a config, stepped many at once under one rule (`vector.py`)."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
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

_HOMES = {
    "env_spec": "build",
    **dict.fromkeys(("AtariConfig", "EnvConfig"), "config"),
    **dict.fromkeys(("make_env", "make_vec"), "make"),
    **dict.fromkeys(("EnvContext", "list_envs", "register_env"), "registry"),
    "RewardTransform": "rewards",
    **dict.fromkeys(("VecEnv", "episode_seed"), "vector"),
}


def __getattr__(name: str) -> Any:
    """Imported when it is used: a command line that shows the options of an environment needs no Gymnasium."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
