"""From a config to environments: one (`make_env`), many (`make_vec`), or only what they look like (`env_spec`)."""

from __future__ import annotations

import dataclasses
import logging
import os
import time
import traceback
from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np

from bray.envs import atari, compat, native, wrappers
from bray.envs.config import EnvConfig
from bray.envs.inprocess import InProcessVecEnv, spec_of
from bray.envs.registry import EnvContext, Source, resolve
from bray.envs.vector import VecEnv, episode_seed
from bray.errors import BrayError, ConfigError, EnvError
from bray.spec import EnvSpec

log = logging.getLogger("bray.envs")

_SUBPROCESS_GAIN = 500e-6
"""Seconds a step must become shorter before `auto` starts processes; two messages per process cost about a third of this."""


def make_env(config: EnvConfig, index: int = 0, render_mode: str | None = None, worker_index: int = 0) -> gym.Env:
    """One environment with everything the config asks for, including its time limit, as a Gymnasium environment."""
    env, limit = build(resolve(config), config, index, render_mode, worker_index)
    return env if limit is None else gym.wrappers.TimeLimit(env, limit)


def make_vec(config: EnvConfig, *, seed: int, render_mode: str | None = None, worker_index: int = 0) -> VecEnv:
    """`config.num_envs` environments in the form `config.vector` names; auto takes the fastest that is correct."""
    source = resolve(config)
    form = config.vector
    if form == "envpool":
        return native.make_envpool(config, source, seed + worker_index)
    why_not = native.why_not_native(config, source, render_mode)
    if form == "native" and why_not is not None:
        raise ConfigError(
            f"{source.name} has no native vector form: {why_not}. Use env.vector=inprocess or subprocess."
        )
    if form == "native" or (form == "auto" and why_not is None and _native_pays(config, source)):
        worker_seed = episode_seed(seed, worker_index, 0) if worker_index else seed
        return native.make_native(config, source, _preprocessing(config, source), worker_seed, render_mode)
    if source.single and form == "subprocess":
        raise ConfigError("an environment object cannot be moved to another process: give its class or a factory")
    if form == "subprocess" or (form == "auto" and _processes_pay(config, source)):
        from bray.envs.subprocess import SubprocessVecEnv

        try:
            return SubprocessVecEnv(
                config, source, env_spec(config), seed=seed, worker_index=worker_index, render_mode=render_mode
            )
        except ConfigError:
            if form == "subprocess" or config.step_timeout is not None:
                raise
            log.info("%s cannot be made in another process: its environments run in this one.", source.name)
    return InProcessVecEnv(
        partial(build_number, source, config, render_mode, worker_index),
        config.num_envs,
        name=source.name,
        seed=seed,
        seed_offset=worker_index * config.num_envs,
        check=config.check,
        max_restarts=config.max_restarts,
        preprocessing=_preprocessing(config, source),
    )


def env_spec(config: EnvConfig) -> EnvSpec:
    """Spaces, time limit and preprocessing; makes one environment and closes it."""
    source = resolve(config)
    env, limit = build(source, config)
    try:
        return spec_of(env, source.name, limit, _preprocessing(config, source))
    finally:
        if not source.single:
            env.close()


def build(
    source: Source, config: EnvConfig, index: int = 0, render_mode: str | None = None, worker_index: int = 0
) -> tuple[gym.Env, int | None]:
    """Environment `index` without its time limit, and that limit (a VecEnv counts steps itself)."""
    arguments = EnvContext(
        config.arguments(index), worker_index=worker_index, vector_index=index, remote=worker_index > 0
    )
    pictures = atari.is_atari(source.gym_spec) and atari.shows_pictures(config.atari, arguments)
    if pictures:
        arguments.update({**atari.game_arguments(config.atari), **arguments})
    try:
        env = source.make(arguments, render_mode)
    except BrayError:
        raise
    except Exception as e:
        trace = "".join(traceback.format_exception(e)).rstrip()
        raise EnvError(f"{trace}\n{source.name}: making environment {index} raised {type(e).__name__}") from e
    if source.gym_id is not None:
        env, limit = _strip(env, keep_limit=bool(config.wrappers) and config.max_episode_steps is None)
    else:
        limit = None
    if not isinstance(env, gym.Env) and not hasattr(env, "step"):
        raise EnvError(f"{source.name}: its creator returned {type(env).__name__}, which is not an environment")
    env = compat.adapt(env)
    if pictures:
        env = atari.AtariFrames(env, config.atari, config.frame_stack)
    for wrapper in config.wrappers:
        env = wrappers.apply(wrapper, env)
    if config.frame_stack and not pictures:
        env = gym.wrappers.FrameStackObservation(env, config.frame_stack)
    if config.flatten_obs:
        env = wrappers.flatten(env)
    if config.max_episode_steps is not None:
        limit = config.max_episode_steps if config.max_episode_steps > 0 else None
    return env, limit


def build_number(source: Source, config: EnvConfig, render_mode: str | None, worker_index: int, index: int) -> Any:
    """`build` with the number last, to be bound by `partial`."""
    return build(source, config, index, render_mode, worker_index)


def _strip(env: gym.Env, keep_limit: bool) -> tuple[gym.Env, int | None]:
    """Without the layers of `gym.make` that we do faster ourselves: order enforcing, and the limit unless a wrapper needs it."""
    limit = None
    while isinstance(env, (gym.wrappers.TimeLimit, gym.wrappers.OrderEnforcing, gym.wrappers.PassiveEnvChecker)):
        if isinstance(env, gym.wrappers.TimeLimit):
            if keep_limit:
                return env, None
            limit = env._max_episode_steps
        env = env.env
    return env, limit


def _preprocessing(config: EnvConfig, source: Source) -> dict[str, Any]:
    """For the record in spec.json: what was done between the game and the agent."""
    out: dict[str, Any] = {}
    if atari.is_atari(source.gym_spec) and atari.shows_pictures(config.atari, config.env_config):
        out["atari"] = dataclasses.asdict(config.atari)
    if config.wrappers:
        out["wrappers"] = [w if isinstance(w, (str, dict)) else repr(w) for w in config.wrappers]
    if config.frame_stack:
        out["frame_stack"] = config.frame_stack
    if config.flatten_obs:
        out["flatten_obs"] = True
    return out


def _native_pays(config: EnvConfig, source: Source) -> bool:
    """C++ always does. A numpy step of a small batch costs as much as about seven plain ones; a fixed number, not a
    measured one, because the two forms draw their episodes differently."""
    return config.num_envs >= 8 or atari.is_atari(source.gym_spec)


def _processes_pay(config: EnvConfig, source: Source) -> bool:
    """Whether stepping in several processes saves more time than it costs, measured on a few random steps.

    Both forms give the same trajectories, so that the choice changes nothing but the speed.
    """
    if source.single:
        return False
    if config.step_timeout is not None:
        return True
    processes = min(config.num_envs, config.num_processes or os.cpu_count() or 1)
    if processes == 1:
        return False
    seconds = _seconds_per_step(config, source)
    return seconds * (config.num_envs - -(-config.num_envs // processes)) > _SUBPROCESS_GAIN


def _seconds_per_step(config: EnvConfig, source: Source, most: int = 16, budget: float = 0.05) -> float:
    env, _ = build(source, config)
    space = spec_of(env, source.name, None).action
    rng = np.random.default_rng(0)
    steps, spent = 0, 0.0
    try:
        env.reset(seed=0)
        while steps < most and spent < budget:
            action = space.sample(rng)
            start = time.perf_counter()
            _, _, terminated, truncated, _ = env.step(action)
            if steps:  # the first step may load or compile
                spent += time.perf_counter() - start
            steps += 1
            if terminated or truncated:
                env.reset(seed=steps)
    except BrayError:
        raise
    except Exception:  # it will be told where restarts are counted
        return 0.0
    finally:
        env.close()
    return spent / max(1, steps - 1)
