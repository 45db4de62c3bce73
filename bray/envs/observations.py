"""Observations as arrays: entries that are not wanted are left out, and texts become the codes of their characters."""

from __future__ import annotations

import logging
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.wrappers import TransformObservation

from bray.envs.missing import warn_once
from bray.errors import ConfigError, EnvError, UnknownName

log = logging.getLogger("bray.envs")

TEXT_LENGTH = 128
"""Characters of a text whose space does not say how long it may be, such as MiniGrid's missions."""


def drop(env: gym.Env, names: list[str]) -> gym.Env:
    """Leave entries of a Dict observation out."""
    space = env.observation_space
    if not isinstance(space, gym.spaces.Dict):
        raise ConfigError(f"env.drop_obs={names} names entries of a Dict observation, and this one is {space}")
    for name in names:
        if name not in space.spaces:
            raise UnknownName("entry of the observation", name, space.spaces, where="env.drop_obs")
    kept = {k: s for k, s in space.spaces.items() if k not in names}
    if not kept:
        raise ConfigError(f"env.drop_obs={names} leaves nothing of the observation")
    return TransformObservation(
        env, lambda obs: {k: v for k, v in obs.items() if k not in names}, gym.spaces.Dict(kept)
    )


def encode_texts(env: gym.Env) -> gym.Env:
    """Each text of the observation as uint8[its greatest length]: its UTF-8 bytes, zeros after the end. Without texts:
    `env` itself."""
    space = env.observation_space
    if not text_entries(space):
        return env
    return TransformObservation(env, lambda obs: _encode(space, obs, "observation"), _encoded(space))


def text_entries(space: gym.Space, name: str = "observation") -> dict[str, int]:
    """The texts of an observation, and how long each becomes."""
    if _is_text(space):
        return {name: _length(space)}
    return {k: n for key, part in _parts(space).items() for k, n in text_entries(part, f"{name}[{key!r}]").items()}


def _is_text(space: gym.Space) -> bool:
    return space.dtype is not None and np.dtype(space.dtype).kind == "U"


def _parts(space: gym.Space) -> dict[Any, gym.Space]:
    if isinstance(space, gym.spaces.Dict):
        return dict(space.spaces)
    return dict(enumerate(space.spaces)) if isinstance(space, gym.spaces.Tuple) else {}


def _length(space: gym.Space) -> int:
    """In bytes."""
    longest = getattr(space, "max_length", None)
    if longest is None:
        return TEXT_LENGTH
    charset = "".join(getattr(space, "character_set", ""))
    return longest * max((len(c.encode()) for c in charset), default=1)


def _encoded(space: gym.Space) -> gym.Space:
    if _is_text(space):
        return gym.spaces.Box(0, 255, (_length(space),), np.uint8)
    if isinstance(space, gym.spaces.Dict):
        return gym.spaces.Dict({k: _encoded(s) for k, s in space.spaces.items()})
    if isinstance(space, gym.spaces.Tuple):
        return gym.spaces.Tuple([_encoded(s) for s in space.spaces])
    return space


def _encode(space: gym.Space, value: Any, name: str) -> Any:
    if _is_text(space):
        return _codes(space, value, name)
    parts = _parts(space)
    if isinstance(value, dict):
        return {k: _encode(parts[k], v, f"{name}[{k!r}]") if k in parts else v for k, v in value.items()}
    if isinstance(value, tuple) and len(value) == len(parts):
        return tuple(_encode(parts[k], v, f"{name}[{k}]") for k, v in enumerate(value))
    return value


def _codes(space: gym.Space, text: Any, name: str) -> np.ndarray:
    if not isinstance(text, str):
        raise EnvError(f"{name} is a text in its space, got {type(text).__name__} {str(text)[:80]!r}")
    length, codes = _length(space), text.encode()
    if len(codes) > length:
        if hasattr(space, "max_length"):
            raise EnvError(f"{name} has at most {space.max_length} characters in its space, got {len(text)}: {text!r}")
        warn_once(log, f"{name} is longer than {length} characters and is cut: {text!r}")
    return np.frombuffer(codes[:length].ljust(length, b"\0"), np.uint8)
