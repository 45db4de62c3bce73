"""Vector environments that somebody else wrote as one: Gymnasium's own, ALE's in C++, EnvPool.

Each adapter keeps the contract of VecEnv and adds a few microseconds. Seeds are given once, at reset.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import logging
from collections.abc import Callable
from json import dumps, loads
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.vector import AutoresetMode

from bray import tree
from bray.envs.atari import SERVES, is_atari, shows_pictures
from bray.envs.config import AtariConfig, EnvConfig
from bray.envs.registry import EnvOrigin
from bray.envs.spaces import BatchCheck, spec_from_gym
from bray.envs.vector import StepResult, VecEnv
from bray.errors import CheckpointError, ConfigError, UnknownName
from bray.spec import EnvSpec
from bray.tree import NestedArray

log = logging.getLogger("bray.envs")


class NativeVecEnv(VecEnv):
    """A Gymnasium vector environment that resets on the next step, as CartPole's own.

    Its state is its attributes: arrays, numbers and its random generator. Where it holds anything else (a C++ object),
    it cannot be saved, and a resume starts new episodes with `exact` False.
    """

    form = "native"

    def __init__(self, env: Any, spec: EnvSpec, *, seed: int = 0, check: bool = True):
        self.env, self.spec, self.num_envs = env, spec, env.num_envs
        self._seed, self._check = seed, BatchCheck.of(spec) if check else None
        self.dead = np.zeros(self.num_envs, bool)
        self._obs: NestedArray = None
        self._t = 0
        self.exact = self._unsavable() is None

    def reset(self, seed: int | None = None) -> NestedArray:
        if self._obs is None and seed is None:
            seed = self._seed
        obs = self._start(seed)
        self._seed = self._seed if seed is None else seed
        self.dead = np.zeros(self.num_envs, bool)
        self._obs = obs = _own(obs)
        self._check_values(obs)
        return obs

    def _start(self, seed: int | None) -> Any:
        """The first observations of the inner environment; with a seed it begins anew."""
        inner = None if seed is None else int(np.random.SeedSequence(seed).generate_state(1)[0] >> 1)
        return self.env.reset(seed=inner)[0]

    def _advance(self, actions: NestedArray) -> tuple[Any, Any, Any, Any]:
        """(obs, reward, terminated, truncated) of the inner environment; sets `dead`."""
        if type(actions) is list:
            actions = np.asarray(actions)
        obs, reward, terminated, truncated, _ = self.env.step(actions)
        self.dead = terminated | truncated
        return obs, reward, terminated, truncated

    def step(self, actions: NestedArray) -> StepResult:
        obs, reward, terminated, truncated = self._advance(actions)
        self._t += 1
        self._obs = obs = _own(obs)
        if reward.dtype != np.float32:
            reward = reward.astype(np.float32)
        self._check_values(obs, reward, self.dead)
        return obs, reward, terminated, truncated, None

    def _where(self, i: int) -> str:
        return f"{self.spec.id}, environment {i}, step {self._t}"

    # --- exact resume -------------------------------------------------------------------------------------------------

    _PASSIVE = (str, type(None), gym.Space, dict, list, tuple, type, gym.envs.registration.EnvSpec)

    def _unsavable(self) -> str | None:
        """The first attribute that is neither numbers nor known to be constant."""
        for name, value in vars(self.env).items():
            if not isinstance(value, (np.ndarray, np.generic, bool, int, float, np.random.Generator, *self._PASSIVE)):
                return f"{name}: {type(value).__name__}"
        return None

    def get_state(self) -> dict[str, Any]:
        json: dict[str, Any] = {"form": self.form, "num_envs": self.num_envs, "seed": self._seed, "step": self._t}
        arrays: dict[str, Any] = {"obs": self._obs, "dead": self.dead}
        json["exact"] = self.exact = self._unsavable() is None
        if self.exact:
            values = vars(self.env)
            arrays["attributes"] = {
                k: np.array(v) for k, v in values.items() if isinstance(v, np.ndarray) and v.dtype.kind in "biuf"
            }
            json["numbers"] = {k: v for k, v in values.items() if isinstance(v, (bool, int, float))}
            generators = {k: v.bit_generator.state for k, v in values.items() if isinstance(v, np.random.Generator)}
            json["rng"] = loads(dumps(generators, default=np.ndarray.tolist))
        return {"arrays": arrays, "json": json}

    def set_state(self, state: dict[str, Any]) -> NestedArray:
        arrays, json = self._read_state(state)
        self._seed, self._t = int(json["seed"]), int(json["step"])
        self.exact = bool(json["exact"])
        if not self.exact:
            log.warning("%s cannot save its state: new episodes start (exact: false).", self.spec.id)
            # other seeds than at the start, else the same episodes come again
            return self.reset(int(np.random.SeedSequence((self._seed, self._t)).generate_state(1)[0]))
        self.env.reset(seed=0)  # makes the generator that is filled next
        for name, value in arrays["attributes"].items():
            setattr(self.env, name, np.array(value))
        for name, value in json["numbers"].items():
            setattr(self.env, name, value)
        for name, value in json["rng"].items():
            try:
                getattr(self.env, name).bit_generator.state = value
            except (ValueError, TypeError, KeyError) as e:
                raise CheckpointError(f"{self.spec.id}: not the state of its random generator {name!r}: {e}") from None
        self.dead = np.array(arrays["dead"], bool)
        self._obs = tree.map(np.array, arrays["obs"])
        return tree.map(np.copy, self._obs)

    def render(self) -> np.ndarray | None:
        pictures = self.env.render()
        return pictures[0] if isinstance(pictures, (tuple, list)) else pictures

    def close(self) -> None:
        self.env.close()


class AleVecEnv(NativeVecEnv):
    """ALE's AtariVectorEnv: preprocessing and threads in C++. It cannot save its state. At the start of an episode it
    presses FIRE for one frame; the rest is done here, as in `AtariFrames`."""

    def __init__(self, env: Any, spec: EnvSpec, config: AtariConfig, *, seed: int = 0, check: bool = True):
        super().__init__(env, spec, seed=seed, check=check)
        self._episodic_life = config.episodic_life
        buttons = [button.name for button in env.ale.get_action_set()]
        self._fire = buttons.index("FIRE") if config.fire_reset and "FIRE" in buttons else None
        self._lives = np.zeros(self.num_envs, np.int32)
        self._serves = np.full(self.num_envs, SERVES)

    def _start(self, seed: int | None) -> Any:
        seeds = None
        if seed is not None:  # one per game: consecutive seeds would give workers the same games
            seeds = (np.random.SeedSequence(seed).generate_state(self.num_envs) >> 1).astype(np.int64)
        obs, info = self.env.reset(seed=seeds)
        self._lives, self._serves = info["lives"], np.full(self.num_envs, SERVES)
        return obs

    def _advance(self, actions: NestedArray) -> tuple[Any, Any, Any, Any]:
        actions = np.ascontiguousarray(actions, np.int64)
        if self._fire is not None and self._serves.any():
            actions = np.where(self._serves > 0, self._fire, actions)
        obs, reward, terminated, truncated, info = self.env.step(actions)
        dead, lives = terminated | truncated, info["lives"]
        began = self.dead  # this step was the reset
        lost = (lives > 0) & (lives < self._lives) & ~began
        self._serves = np.where(lost | began, SERVES, np.maximum(self._serves - 1, 0))
        if self._episodic_life:
            terminated = terminated | lost
        self._lives, self.dead = lives, dead
        return obs, reward, terminated, truncated

    def close(self) -> None:
        """Its threads end when the object goes."""
        self.env = None


class EnvPoolVecEnv(NativeVecEnv):
    """EnvPool's Gymnasium interface: it resets on the step after the end, and is seeded when made."""

    def __init__(self, make: Callable[[int], Any], spec: EnvSpec, *, seed: int = 0, check: bool = True):
        self._make = make
        super().__init__(make(seed), spec, seed=seed, check=check)
        self.exact = False

    def _start(self, seed: int | None) -> Any:
        if seed is not None and seed != self._seed:
            self.env.close()
            self.env = self._make(seed)
        return self.env.reset()[0]

    def _advance(self, actions: NestedArray) -> tuple[Any, Any, Any, Any]:
        obs, reward, terminated, truncated, _ = self.env.step(actions)
        terminated, truncated = terminated.astype(bool), truncated.astype(bool) & ~terminated.astype(bool)
        self.dead = terminated | truncated
        return obs, reward, terminated, truncated

    def _unsavable(self) -> str | None:
        return "EnvPool"


def _own(obs: NestedArray) -> NestedArray:
    return tree.map(np.ascontiguousarray, obs) if isinstance(obs, (dict, tuple)) else np.ascontiguousarray(obs)


# --- choosing ---------------------------------------------------------------------------------------------------------


def why_not_native(config: EnvConfig, source: EnvOrigin, render_mode: str | None) -> str | None:
    """None where Gymnasium's registry has a vector form of this very environment, else the reason there is none."""
    spec = source.gym_spec
    if spec is None:
        return "it is not an environment of Gymnasium's registry"
    if config.teams:
        return "env.teams joins agents of a game of several, and it has one"
    if config.per_env:
        return "env.per_env gives each environment its own arguments"
    if config.wrappers or config.flatten_obs or config.drop_obs or config.action_bounds:
        return "wrappers work on single environments"
    if is_atari(spec):
        if not shows_pictures(config.atari, config.env_config):
            return "ALE's vector form shows preprocessed pictures only"
        if render_mode is not None:
            return "ALE's vector form does not draw"
        if config.env_config:
            return f"ALE's vector form does not take {sorted(config.env_config)}"
        return None if importlib.util.find_spec("ale_py") else "ale_py is not installed"
    if spec.vector_entry_point is None:
        return "it has no vector_entry_point"
    if config.frame_stack:
        return "env.frame_stack works on single environments"
    if spec.additional_wrappers:
        return "its registration adds wrappers"
    try:
        creator = _load(spec.vector_entry_point)
    except (ImportError, AttributeError, gym.error.Error) as e:
        return f"its vector form cannot be imported: {e}"
    mode = (getattr(creator, "metadata", None) or {}).get("autoreset_mode")
    if mode != AutoresetMode.NEXT_STEP:
        return f"its vector form resets by {mode}, not on the next step"
    return None


def _load(entry_point: Any) -> Any:
    return entry_point if callable(entry_point) else gym.envs.registration.load_env_creator(entry_point)


def make_native(
    config: EnvConfig,
    source: EnvOrigin,
    preprocessing: dict[str, Any],
    seed: int,
    render_mode: str | None,
    threads: int = 0,
) -> VecEnv:
    """The vector form that the registry (or ALE) has; ask `why_not_native` first. `threads`: of ALE's; 0 = one per
    core."""
    gym_spec = source.gym_spec
    limit = gym_spec.max_episode_steps
    if config.max_episode_steps is not None:
        limit = config.max_episode_steps if config.max_episode_steps > 0 else None
    atari = is_atari(gym_spec)
    env = _make_ale(config, source, limit, threads) if atari else _make_registered(config, source, limit, render_mode)
    spaces = env.single_observation_space, env.single_action_space
    spec = spec_from_gym(source.name, *spaces, limit, preprocessing)
    if atari:
        return AleVecEnv(env, spec, config.atari, seed=seed, check=config.check)
    env.action_space = _AnyAction()  # after what the spec needs was read
    return NativeVecEnv(env, spec, seed=seed, check=config.check)


class _AnyAction(gym.Space):
    """In place of a batch of action spaces: Gymnasium's vector environments ask `contains` at every step, a third of
    the time of a step of CartPole. Actions come from a Policy that was made for the space."""

    def contains(self, x: Any) -> bool:
        return True


def _make_registered(config: EnvConfig, source: EnvOrigin, limit: int | None, render_mode: str | None) -> Any:
    gym_spec = source.gym_spec
    creator = _load(gym_spec.vector_entry_point)
    arguments = {**gym_spec.kwargs, **config.env_config}
    if "max_episode_steps" in inspect.signature(creator).parameters:
        arguments["max_episode_steps"] = limit if limit is not None else np.iinfo(np.int32).max
    elif limit != gym_spec.max_episode_steps:
        raise ConfigError(f"the vector form of {source.name} does not take max_episode_steps: set env.vector=inprocess")
    if render_mode is not None:
        arguments["render_mode"] = render_mode
    try:
        return creator(num_envs=config.num_envs, **arguments)
    except TypeError as e:
        raise ConfigError(f"the vector form of {source.name} does not take {config.env_config}: {e}") from e


def _make_ale(config: EnvConfig, source: EnvOrigin, limit: int | None, threads: int) -> Any:
    from ale_py.vector_env import AtariVectorEnv

    atari, kwargs = config.atari, source.gym_spec.kwargs
    sticky = atari.repeat_action_probability
    frames = kwargs.get("max_num_frames_per_episode", 108_000)
    if config.max_episode_steps is not None:
        frames = np.iinfo(np.int32).max if limit is None else limit * atari.frame_skip
    return AtariVectorEnv(
        kwargs["game"],
        config.num_envs,
        max_num_frames_per_episode=int(frames),
        repeat_action_probability=kwargs.get("repeat_action_probability", 0.0) if sticky is None else sticky,
        full_action_space=atari.full_action_space,
        img_height=atari.size,
        img_width=atari.size,
        grayscale=atari.grayscale,
        stack_num=config.frame_stack or atari.frame_stack,
        frameskip=atari.frame_skip,
        noop_max=atari.noop_max,
        use_fire_reset=atari.fire_reset,
        reward_clipping=False,
        num_threads=threads,
    )


def make_envpool(config: EnvConfig, source: EnvOrigin, seed: int) -> VecEnv:
    """The environment of that name in EnvPool, whose spaces are its own."""
    if importlib.util.find_spec("envpool") is None:
        raise ConfigError("env.vector=envpool needs the package envpool: pip install envpool")
    refused = ("wrappers", "frame_stack", "flatten_obs", "drop_obs", "action_bounds", "per_env")
    if any(getattr(config, key) for key in refused):
        raise ConfigError(f"env.vector=envpool takes no {', '.join(refused[:-1])} or {refused[-1]}: use env_config")
    envpool = importlib.import_module("envpool")
    task = source.name
    if task.startswith("ALE/"):
        task = task.removeprefix("ALE/")
    if task not in envpool.list_all_envs():
        raise UnknownName("EnvPool environment", task, envpool.list_all_envs())
    arguments = dict(config.env_config)
    if config.max_episode_steps is not None and config.max_episode_steps > 0:
        arguments["max_episode_steps"] = config.max_episode_steps

    def make(seed: int) -> Any:
        env = envpool.make_gymnasium(task, num_envs=config.num_envs, seed=seed % 2**31, **arguments)
        env.num_envs = config.num_envs
        return env

    env = make(seed)
    limit = getattr(getattr(env, "spec", None), "config", None)
    steps = getattr(limit, "max_episode_steps", config.max_episode_steps)
    spec = spec_from_gym(source.name, env.observation_space, env.action_space, steps, {})
    env.close()
    return EnvPoolVecEnv(make, spec, seed=seed, check=config.check)
