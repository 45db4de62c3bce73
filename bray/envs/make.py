"""From a config to environments: one (`make_env`) or many (`make_vec`)."""

from __future__ import annotations

import logging
import os
from dataclasses import replace
from typing import Any

import gymnasium as gym

from bray.diagnosis.bottleneck import PROCESSES_GAIN
from bray.envs import atari, native
from bray.envs.build import Builder, built_spec, of_tensors
from bray.envs.config import EnvConfig
from bray.envs.inprocess import InProcessVecEnv
from bray.envs.many_games import ManyGamesVecEnv, plays_many
from bray.envs.subprocess import SubprocessVecEnv
from bray.envs.table import Seating
from bray.envs.vector import VecEnv, episode_seed
from bray.errors import ConfigError

log = logging.getLogger("bray.envs")


def make_env(config: EnvConfig, index: int = 0, render_mode: str | None = None, worker_index: int = 0) -> gym.Env:
    """One environment with everything the config asks for, including its time limit, as a Gymnasium environment."""
    env, limit = Builder.of(config, render_mode, worker_index)(index)
    return env if limit is None else gym.wrappers.TimeLimit(env, limit)


def make_vec(
    config: EnvConfig,
    *,
    seed: int,
    render_mode: str | None = None,
    worker_index: int = 0,
    numbers: range | None = None,
    threads: int = 0,
    device: Any = None,
    seating: Seating | None = None,
) -> VecEnv:
    """`config.num_envs` environments in the form `config.vector` names, or those with these `numbers`. `auto` chooses
    by what is declared, so that it chooses the same whatever else the machine does. `threads`: of a form that has
    threads; 0 = one per core. `device`: of environments of tensors; None = as they choose. `seating`: which policy
    decides for which agent, in games of several."""
    build = Builder.of(config, render_mode, worker_index, seating)
    source, form = build.source, config.vector
    together = (
        config if numbers is None else replace(config, num_envs=len(numbers), wait_num=None, step_wait_timeout=0.0)
    )
    if form == "device" or (form == "auto" and of_tensors(source)):
        from bray.envs.device import make_device

        its_seed = episode_seed(seed, worker_index, numbers.start if numbers else 0) if worker_index else seed
        return make_device(together, source, build.preprocessing(), its_seed, device)
    if form == "envpool":
        return native.make_envpool(together, source, seed + worker_index + (numbers.start << 16 if numbers else 0))
    if plays_many(source, config, seating):
        n, before = together.num_envs, max(0, worker_index - 1) * config.num_envs + (numbers.start if numbers else 0)
        return ManyGamesVecEnv(build.many(n), built_spec(build), n, seed, before, config.check)
    why_not = native.why_not_native(config, source, render_mode)
    if form == "native" and why_not is not None:
        raise ConfigError(
            f"{source.name} has no native vector form: {why_not}. Use env.vector=inprocess or subprocess."
        )
    timed = config.step_timeout is not None  # a step that hangs can be ended in another process only
    if form == "native" or (form == "auto" and why_not is None and not timed and _native_pays(build)):
        worker_seed = episode_seed(seed, worker_index, numbers.start if numbers else 0) if worker_index else seed
        return native.make_native(together, source, build.preprocessing(), worker_seed, render_mode, threads)
    if source.single and form == "subprocess":
        raise ConfigError("an environment object cannot be moved to another process: give its class or a factory")
    if form == "subprocess" or (form == "auto" and _processes_pay(build, worker_index)):
        try:
            return SubprocessVecEnv(build, seed, numbers)
        except ConfigError:
            if form == "subprocess" or timed:
                raise
            log.info("%s cannot be made in another process: its environments run in this one.", source.name)
    return InProcessVecEnv(build, seed, numbers=numbers)


def _native_pays(build: Builder) -> bool:
    """C++ always does. A numpy step of a small batch costs as much as about seven plain ones; a fixed number, not a
    measured one, because the two forms draw their episodes differently."""
    return build.config.num_envs >= 8 or atari.is_atari(build.source.gym_spec)


def _processes_pay(build: Builder, worker_index: int) -> bool:
    """Whether stepping in several processes saves more time than it costs, by the cost of a step
    (`env.step_ms`, `EnvOrigin.step_ms`). Rollout workers have the cores already.

    Both forms give the same trajectories, so that the choice changes nothing but the speed.
    """
    config = build.config
    if build.source.single:
        return False
    if config.step_timeout is not None:
        return True
    if worker_index:
        return False
    processes = min(config.num_envs, config.num_processes or os.cpu_count() or 1)
    in_turn = -(-config.num_envs // processes)  # environments of one process, one after another
    step_ms = config.step_ms if config.step_ms is not None else build.source.step_ms or 0.0
    return step_ms * (config.num_envs - in_turn) > PROCESSES_GAIN
