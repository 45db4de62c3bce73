"""Wrappers that Gymnasium lacks, and how a config names wrappers. Gymnasium's own are used under their own names.

`wrappers: [action_repeat, {name: delay_reward, delay: 4}, "my.module:MyWrapper"]` is applied from the inside out.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.wrappers import TransformObservation
from gymnasium.wrappers.utils import create_zero_array

from bray import tree
from bray.envs.atari import area_taps, resize
from bray.envs.vector import LIFE_LOST
from bray.errors import ConfigError
from bray.named import load_named
from bray.spec import ACTION_MASK


class ActionRepeat(gym.Wrapper):
    """Each action lasts `repeat` steps; rewards add up, the episode's end stops it."""

    def __init__(self, env: gym.Env, repeat: int = 2):
        super().__init__(env)
        self.repeat = _at_least_one("action_repeat", "repeat", repeat)

    def step(self, action: Any) -> Any:
        total = 0.0
        for _ in range(self.repeat):
            obs, reward, terminated, truncated, info = self.env.step(action)
            total += float(reward)
            if terminated or truncated:
                break
        return obs, total, terminated, truncated, info


class BoundedActions(gym.Wrapper):
    """Bounds for a Box action space that has none, or within its own."""

    def __init__(self, env: gym.Env, low: Any, high: Any):
        super().__init__(env)
        space = env.action_space
        if not isinstance(space, gym.spaces.Box):
            raise ConfigError(f"env.action_bounds is for a Box action space, and this one is {space}")
        try:
            low, high = (np.broadcast_to(np.asarray(x, np.float64), space.shape) for x in (low, high))
        except ValueError:
            raise ConfigError(
                f"env.action_bounds: expected a number, or {space.shape} numbers, for low and for high; got {low} and "
                f"{high}"
            ) from None
        fits = np.isfinite(low) & np.isfinite(high) & (low < high) & (low >= space.low) & (high <= space.high)
        if not fits.all():
            raise ConfigError(
                f"env.action_bounds: expected finite numbers, low below high and within {space}; got {low.tolist()} "
                f"and {high.tolist()}"
            )
        self.action_space = gym.spaces.Box(low.astype(space.dtype), high.astype(space.dtype), dtype=space.dtype.type)


class NoopReset(gym.Wrapper):
    """Up to `noop_max` random idle steps at the start of each episode."""

    def __init__(self, env: gym.Env, noop_max: int = 30, noop_action: int = 0):
        super().__init__(env)
        self.noop_max, self.noop_action = noop_max, noop_action
        self._rng = np.random.default_rng()

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        obs, info = self.env.reset(seed=seed, options=options)
        if seed is not None:
            self._rng = np.random.default_rng(seed)
        for _ in range(int(self._rng.integers(1, self.noop_max + 1))):
            obs, _, terminated, truncated, info = self.env.step(self.noop_action)
            if terminated or truncated:
                obs, info = self.env.reset(options=options)
        return obs, info


class FireReset(gym.Wrapper):
    """One FIRE at the start of each episode, for games that wait for it."""

    def __init__(self, env: gym.Env, fire_action: int = 1):
        super().__init__(env)
        self.fire_action = fire_action

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        self.env.reset(seed=seed, options=options)
        obs, _, terminated, truncated, info = self.env.step(self.fire_action)
        return self.env.reset(options=options) if terminated or truncated else (obs, info)


class EpisodicLife(gym.Wrapper):
    """The learner sees a lost life as `terminated`, while the game continues. Needs `info["lives"]`, which Atari games
    set."""

    def __init__(self, env: gym.Env):
        super().__init__(env)
        self._lives = 0

    def reset(self, **options: Any) -> tuple[Any, dict[str, Any]]:
        obs, info = self.env.reset(**options)
        self._lives = (info or {}).get("lives", 0)
        return obs, info

    def step(self, action: Any) -> Any:
        obs, reward, terminated, truncated, info = self.env.step(action)
        if not info or "lives" not in info:
            raise ConfigError(
                'the wrapper episodic_life needs info["lives"], the number of lives that are left, at every step; '
                f"this environment returned info={info!r:.80}: return it, or leave the wrapper out"
            )
        lives = info["lives"]
        lost, self._lives = 0 < lives < self._lives, lives
        if lost and not terminated:
            return obs, reward, True, truncated, {**info, LIFE_LOST: True}
        return obs, reward, terminated, truncated, info


class DelayReward(gym.Wrapper):
    """Rewards are kept back and paid as one sum every `delay` steps, and at the episode's end."""

    def __init__(self, env: gym.Env, delay: int = 4):
        super().__init__(env)
        self.delay = _at_least_one("delay_reward", "delay", delay)
        self._sum, self._t = 0.0, 0

    def reset(self, **options: Any) -> tuple[Any, dict[str, Any]]:
        self._sum, self._t = 0.0, 0
        return self.env.reset(**options)

    def step(self, action: Any) -> Any:
        obs, reward, terminated, truncated, info = self.env.step(action)
        self._sum += float(reward)
        self._t += 1
        paid = 0.0
        if self._t % self.delay == 0 or terminated or truncated:
            paid, self._sum = self._sum, 0.0
        return obs, paid, terminated, truncated, info


class DelayAction(gym.Wrapper):
    """Actions take effect `delay` steps later; until then `first_action` is played."""

    def __init__(self, env: gym.Env, delay: int = 1, first_action: Any = None):
        super().__init__(env)
        self.delay = _at_least_one("delay_action", "delay", delay)
        self._first = create_zero_array(env.action_space) if first_action is None else first_action
        self._queue: deque[Any] = deque()

    def reset(self, **options: Any) -> tuple[Any, dict[str, Any]]:
        self._queue = deque([self._first] * self.delay)
        return self.env.reset(**options)

    def step(self, action: Any) -> Any:
        self._queue.append(action)
        return self.env.step(self._queue.popleft())


class EpisodeReturn(gym.Wrapper):
    """Adds `info["eval_episode_return"]`, the episode's raw return, to its last step."""

    def __init__(self, env: gym.Env):
        super().__init__(env)
        self._sum = 0.0

    def reset(self, **options: Any) -> tuple[Any, dict[str, Any]]:
        self._sum = 0.0
        return self.env.reset(**options)

    def step(self, action: Any) -> Any:
        obs, reward, terminated, truncated, info = self.env.step(action)
        self._sum += float(reward)
        if terminated or truncated:
            info = {**(info or {}), "eval_episode_return": self._sum}
        return obs, reward, terminated, truncated, info


class ObsPlusPrevActionReward(gym.Wrapper):
    """Observation -> {obs, prev_action, prev_reward}; the first ones of an episode are zero."""

    def __init__(self, env: gym.Env):
        super().__init__(env)
        self._first = create_zero_array(env.action_space)
        reward = gym.spaces.Box(-np.inf, np.inf, (1,), np.float32)
        spaces = {"obs": env.observation_space, "prev_action": env.action_space, "prev_reward": reward}
        self.observation_space = gym.spaces.Dict(spaces)

    def reset(self, **options: Any) -> tuple[Any, dict[str, Any]]:
        obs, info = self.env.reset(**options)
        return {"obs": obs, "prev_action": self._first, "prev_reward": np.zeros(1, np.float32)}, info

    def step(self, action: Any) -> Any:
        obs, reward, terminated, truncated, info = self.env.step(action)
        previous = np.copy(action) if isinstance(action, np.ndarray) else action
        out = {"obs": obs, "prev_action": previous, "prev_reward": np.array([reward], np.float32)}
        return out, reward, terminated, truncated, info


class RewardInObs(gym.Wrapper):
    """A flat observation with the last reward as one more number."""

    def __init__(self, env: gym.Env):
        super().__init__(env)
        box = env.observation_space
        if not isinstance(box, gym.spaces.Box) or len(box.shape) != 1:
            raise ConfigError(f"reward_in_obs needs a flat Box observation, got {box}: use flatten_obs first")
        low, high = np.append(box.low, -np.inf), np.append(box.high, np.inf)
        self.observation_space = gym.spaces.Box(low.astype(np.float32), high.astype(np.float32), dtype=np.float32)

    def reset(self, **options: Any) -> tuple[Any, dict[str, Any]]:
        obs, info = self.env.reset(**options)
        return np.append(obs, 0.0).astype(np.float32), info

    def step(self, action: Any) -> Any:
        obs, reward, terminated, truncated, info = self.env.step(action)
        return np.append(obs, float(reward)).astype(np.float32), reward, terminated, truncated, info


def _at_least_one(wrapper: str, key: str, value: int) -> int:
    if value < 1:
        raise ConfigError(f"{wrapper}: {key} must be 1 or more, got {value}")
    return value


def _scaled_float_frame(env: gym.Env) -> gym.Env:
    """Pixels 0..255 as float32 in [0, 1]."""
    space = gym.spaces.Box(0.0, 1.0, env.observation_space.shape, np.float32)
    return TransformObservation(env, lambda obs: np.asarray(obs, np.float32) / np.float32(255.0), space)


def _warp_frame(env: gym.Env, size: int = 84) -> gym.Env:
    """Colour pictures uint8 [H, W, 3] as gray ones [size, size], made smaller by averaging areas."""
    box = env.observation_space
    if not isinstance(box, gym.spaces.Box) or box.dtype != np.uint8 or box.shape[2:] != (3,):
        raise ConfigError(f"warp_frame needs colour pictures uint8 [H, W, 3], got {box}")
    rows, columns = (area_taps(n, _at_least_one("warp_frame", "size", size)) for n in box.shape[:2])
    gray = np.array([0.299, 0.587, 0.114], np.float32)
    space = gym.spaces.Box(0, 255, (size, size), np.uint8)
    return TransformObservation(env, lambda obs: resize(obs @ gray, rows, columns), space)


def _ram(env: gym.Env) -> gym.Env:
    """The bytes of a game's memory [N] as float32 [N, 1, 1], for networks that expect pictures."""
    box = env.observation_space
    if not isinstance(box, gym.spaces.Box) or len(box.shape) != 1:
        raise ConfigError(f"ram needs a flat Box, as Atari games give with env_config.obs_type=ram, got {box}")
    space = gym.spaces.Box(0.0, 255.0, (*box.shape, 1, 1), np.float32)
    return TransformObservation(env, lambda obs: np.asarray(obs, np.float32).reshape(space.shape), space)


def _obs_transpose(env: gym.Env) -> gym.Env:
    """Pictures [H, W, C] as [C, H, W]."""
    box = env.observation_space
    if not isinstance(box, gym.spaces.Box) or len(box.shape) != 3:
        raise ConfigError(f"obs_transpose needs pictures [H, W, C], got {box}")
    space = gym.spaces.Box(box.low.transpose(2, 0, 1), box.high.transpose(2, 0, 1), dtype=box.dtype)
    return TransformObservation(env, lambda obs: np.ascontiguousarray(np.transpose(obs, (2, 0, 1))), space)


def _static_obs_norm(env: gym.Env, mean: Any = 0.0, std: Any = 1.0) -> gym.Env:
    """(observation - mean) / std with numbers given once."""
    mean, std = np.asarray(mean, np.float32), np.asarray(std, np.float32)
    if (std <= 0).any():
        raise ConfigError(f"static_obs_norm: std must be positive, got {std}")
    space = gym.spaces.Box(-np.inf, np.inf, env.observation_space.shape, np.float32)
    return TransformObservation(env, lambda obs: ((obs - mean) / std).astype(np.float32), space)


def _clip_reward(env: gym.Env) -> gym.Env:
    """Rewards as -1, 0 or 1. (`env.clip_rewards: true` does this for the learner and leaves the metrics raw.)"""

    def sign(reward: Any) -> float:
        return float(np.sign(reward))

    return gym.wrappers.TransformReward(env, sign)


def _hybrid_dict_action(env: gym.Env) -> gym.Env:
    """A Tuple action space (type, arguments) as a Dict {action_type, action_args}."""
    space = env.action_space
    if not isinstance(space, gym.spaces.Tuple) or len(space.spaces) != 2:
        raise ConfigError(f"gym_hybrid_dict_action needs a Tuple of two action spaces, got {space}")
    both = gym.spaces.Dict({"action_type": space.spaces[0], "action_args": space.spaces[1]})
    return gym.wrappers.TransformAction(env, lambda action: (action["action_type"], action["action_args"]), both)


def _leaves(space: gym.Space) -> Iterator[gym.Space]:
    parts = getattr(space, "spaces", None) or ()
    for part in parts.values() if isinstance(parts, dict) else parts:
        yield from _leaves(part)
    if not parts:
        yield space


def flatten(env: gym.Env) -> gym.Env:
    """Observations as one flat vector; an action mask stays beside it: {observation, action_mask}."""
    space = env.observation_space
    if not space.is_np_flattenable:
        kinds = sorted({type(s).__name__ for s in _leaves(space) if not s.is_np_flattenable})
        raise ConfigError(
            f"flatten_obs: a space of kind {', '.join(kinds)} has no fixed size: leave it out with "
            "env.drop_obs=[...], or convert it in a wrapper"
        )
    if not isinstance(space, gym.spaces.Dict) or ACTION_MASK not in space.spaces:
        return gym.wrappers.FlattenObservation(env)
    rest = gym.spaces.Dict({k: s for k, s in space.spaces.items() if k != ACTION_MASK})
    both = gym.spaces.Dict({"observation": gym.spaces.flatten_space(rest), ACTION_MASK: space[ACTION_MASK]})

    def flat(obs: Any) -> Any:
        others = {k: v for k, v in obs.items() if k != ACTION_MASK}
        return {"observation": gym.spaces.flatten(rest, others), ACTION_MASK: obs[ACTION_MASK]}

    return TransformObservation(env, flat, both)


def frame_stack(env: gym.Env, n: int = 4) -> gym.Env:
    """The last `n` observations along a new first axis; an action mask is that of now alone."""
    space, stacked = env.observation_space, gym.wrappers.FrameStackObservation(env, n)
    if not isinstance(space, gym.spaces.Dict) or ACTION_MASK not in space.spaces:
        return stacked
    frames: Any = stacked.observation_space

    def newest(obs: Any) -> Any:
        return {**obs, ACTION_MASK: tree.map(lambda x: x[-1], obs[ACTION_MASK])}

    both = gym.spaces.Dict({**frames.spaces, ACTION_MASK: space[ACTION_MASK]})
    return TransformObservation(stacked, newest, both)


WRAPPERS: dict[str, Callable[..., gym.Env]] = {
    "action_repeat": ActionRepeat,
    "noop_reset": NoopReset,
    "fire_reset": FireReset,
    "max_and_skip": lambda env, skip=4: gym.wrappers.MaxAndSkipObservation(env, skip),
    "frame_stack": frame_stack,
    "warp_frame": _warp_frame,
    "ram": _ram,
    "episodic_life": EpisodicLife,
    "scaled_float_frame": _scaled_float_frame,
    "clip_reward": _clip_reward,
    "delay_reward": DelayReward,
    "delay_action": DelayAction,
    "sticky_action": lambda env, probability=0.25: gym.wrappers.StickyAction(env, probability),
    "eval_episode_return": EpisodeReturn,
    "obs_transpose": _obs_transpose,
    "obs_norm": gym.wrappers.NormalizeObservation,
    "static_obs_norm": _static_obs_norm,
    "reward_norm": gym.wrappers.NormalizeReward,
    "obs_plus_prev_action_reward": ObsPlusPrevActionReward,
    "reward_in_obs": RewardInObs,
    "gym_hybrid_dict_action": _hybrid_dict_action,
    "time_limit": lambda env, max_episode_steps: gym.wrappers.TimeLimit(env, max_episode_steps),
    "flatten": flatten,
}
"""Names a config may use. `env.atari` has the Atari ones as options, which are faster."""


def apply(wrapper: Any, env: gym.Env) -> gym.Env:
    """`env` inside a wrapper given by name, `module:Class`, class, or dict {name, **arguments}."""
    arguments: dict[str, Any] = {}
    if isinstance(wrapper, dict):
        arguments = {k: v for k, v in wrapper.items() if k != "name"}
        if "name" not in wrapper:
            raise ConfigError(f"env.wrappers: a dict has the key 'name' beside its arguments, got {wrapper}")
        wrapper = wrapper["name"]
    make = _find(wrapper) if isinstance(wrapper, str) else wrapper
    if not callable(make):
        raise ConfigError(f"env.wrappers holds names, classes and dicts with 'name', got {wrapper!r}")
    try:
        return make(env, **arguments)
    except TypeError as e:
        raise ConfigError(f"env.wrappers: {wrapper} does not take {arguments or 'no arguments'}: {e}") from e


def _find(name: str) -> Callable[..., gym.Env]:
    theirs = {k: v for k, v in vars(gym.wrappers).items() if k[0].isupper()}
    return load_named(name, "wrapper", "env.wrappers", {**theirs, **WRAPPERS})
