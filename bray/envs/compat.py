"""Environments of older interfaces, made to speak Gymnasium's: `reset(seed) -> (obs, info)`, `step -> 5 values`."""

from __future__ import annotations

import inspect
from typing import Any

import gymnasium as gym
import numpy as np

from bray.errors import EnvError


def convert_space(space: Any) -> Any:
    """A space of the old `gym` package (told by its class's name) as Gymnasium's; Gymnasium's own pass through."""
    if space is None or isinstance(space, gym.Space):
        return space
    kind = type(space).__name__
    if kind == "Box":
        return gym.spaces.Box(space.low, space.high, dtype=space.dtype)
    if kind == "Discrete":
        return gym.spaces.Discrete(int(space.n), start=int(getattr(space, "start", 0)))
    if kind == "MultiDiscrete":
        return gym.spaces.MultiDiscrete(np.asarray(space.nvec))
    if kind == "MultiBinary":
        return gym.spaces.MultiBinary(space.n)
    if kind == "Dict":
        return gym.spaces.Dict({k: convert_space(s) for k, s in space.spaces.items()})
    if kind == "Tuple":
        return gym.spaces.Tuple([convert_space(s) for s in space.spaces])
    raise EnvError(
        f"a space of type {type(space).__module__}.{kind} is neither Gymnasium's nor one we can convert. "
        "Use Box, Discrete, MultiDiscrete, MultiBinary, Dict or Tuple of gymnasium.spaces."
    )


class AnyApi(gym.Env):
    """A user's environment of any age as a Gymnasium one.

    What `step` and `reset` return is looked at once; after that a modern environment's own methods stand in this
    object's place, so that it costs nothing.
    """

    def __init__(self, env: Any):
        for name in ("reset", "step", "observation_space", "action_space"):
            if not hasattr(env, name):
                raise EnvError(
                    f"{type(env).__name__} has no {name!r}. An environment has reset, step, observation_space and "
                    "action_space; see gymnasium.Env."
                )
        self.env = env
        self.observation_space = convert_space(env.observation_space)
        self.action_space = convert_space(env.action_space)
        self.metadata = getattr(env, "metadata", None) or {}
        self.render_mode = getattr(env, "render_mode", None)
        self.spec = getattr(env, "spec", None)
        try:
            parameters = dict(inspect.signature(env.reset).parameters)
        except (TypeError, ValueError):
            parameters = {}
        any_keyword = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
        self._reset_arguments = {k for k in ("seed", "options") if k in parameters or any_keyword}

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        given = {
            k: v for k, v in (("seed", seed), ("options", options)) if k in self._reset_arguments and v is not None
        }
        if seed is not None and "seed" not in given and callable(seeder := getattr(self.env, "seed", None)):
            seeder(seed)
        out = self.env.reset(**given)
        if isinstance(out, tuple) and len(out) == 2 and isinstance(out[1], dict | None):
            return out[0], out[1] or {}
        return out, {}

    def step(self, action: Any) -> Any:
        out = self.env.step(action)
        if not isinstance(out, tuple) or len(out) not in (4, 5):
            got = f"{len(out)} values" if isinstance(out, tuple) else type(out).__name__
            raise EnvError(
                f"{type(self.env).__name__}.step returns (obs, reward, terminated, truncated, info), got {got}."
            )
        if isinstance(out[1], np.ndarray):
            self.step = self._step_array  # type: ignore[method-assign]
            return _with_number(out)
        if len(out) == 5:
            self.step = self.env.step  # type: ignore[method-assign]
            return out
        self.step = self._step4  # type: ignore[method-assign]
        return _from_old(*out)

    def _step_array(self, action: Any) -> Any:
        return _with_number(self.env.step(action))

    def _step4(self, action: Any) -> Any:
        return _from_old(*self.env.step(action))

    def render(self) -> Any:
        return self.env.render() if hasattr(self.env, "render") else None

    def close(self) -> None:
        if callable(close := getattr(self.env, "close", None)):
            close()

    @property
    def unwrapped(self) -> Any:
        return self.env.unwrapped if isinstance(self.env, gym.Env) else self

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name == "env":
            raise AttributeError(name)
        return getattr(self.env, name)


def _with_number(out: tuple[Any, ...]) -> Any:
    """What `step` returned, with a reward that is an array of one number as that number."""
    obs, reward, *rest = out
    reward = reward.item() if np.size(reward) == 1 and isinstance(reward, np.ndarray) else reward
    return (obs, reward, *rest) if len(rest) == 3 else _from_old(obs, reward, *rest)


def _from_old(
    obs: Any, reward: Any, done: Any, info: dict[str, Any] | None
) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
    """Old gym's `done` is both ends at once; its TimeLimit says in info which one it was."""
    truncated = bool(done) and bool((info or {}).get("TimeLimit.truncated", False))
    return obs, reward, bool(done) and not truncated, truncated, info or {}


def adapt(env: Any) -> gym.Env:
    """`env` itself when it comes from a package known to follow Gymnasium, else inside `AnyApi`."""
    base = env.unwrapped if isinstance(env, gym.Env) else env
    if isinstance(env, gym.Env) and type(base).__module__.split(".")[0] in ("gymnasium", "ale_py"):
        return env
    return AnyApi(env)
