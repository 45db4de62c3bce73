"""Evaluation: whole episodes, raw rewards, the same seeds in every run."""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Callable
from typing import Any

import numpy as np

from bray.act import GREEDY, TRAINED
from bray.capture import Record
from bray.envs.config import EnvConfig
from bray.envs.make import make_vec
from bray.envs.missing import warn_once
from bray.envs.vector import VecEnv
from bray.train.acting import acting_engine, initial_state
from bray.train.rollout import Rollout, Step

logger = logging.getLogger("bray")

EVAL_SEED = 1_000_003
"""Evaluation episodes are the same ones in every run."""
LONGEST = 30_000
"""Steps after which an episode of an evaluation is cut: Atari's longest has 27,000."""


def eval_config(config: EnvConfig, num_envs: int) -> EnvConfig:
    """The environment as it is judged: whole episodes, raw rewards, all waited for. An environment given as an object
    is there only once."""
    if not isinstance(config.id, (str, type)) and hasattr(config.id, "step"):
        num_envs = 1
    atari = dataclasses.replace(config.atari, episodic_life=False)
    return dataclasses.replace(
        config,
        num_envs=num_envs,
        env_config=config.env_config | config.eval_env_config,
        per_env=[one | config.eval_env_config for one in config.per_env[:num_envs]],
        atari=atari,
        clip_rewards=None,
        normalize_rewards=False,
        wait_num=None,
        step_wait_timeout=0.0,
    )


def trained(
    env: VecEnv,
    engine: Any,
    policy: Any,
    seed: int,
    mode: str = GREEDY,
    initial_state: Callable[[int], Any] | None = None,
) -> Rollout:
    """A rollout of a policy whose training is over, at the start of its first episodes."""
    rollout = Rollout(env, engine, policy, np.random.default_rng(seed), mode, initial_state=initial_state)
    rollout.set_clock(TRAINED)
    rollout.reset(seed)
    return rollout


def play(
    env: VecEnv,
    engine: Any,
    policy: Any,
    episodes: int,
    seed: int,
    *,
    mode: str = GREEDY,
    initial_state: Callable[[int], Any] | None = None,
    on_step: Callable[[Step], None] | None = None,
    most_steps: int | None = None,
) -> list[tuple[float, int]]:
    """Play `episodes` whole episodes (each environment its share, so that short ones are not preferred): (return,
    length) each. With `most_steps` those that end within so many environment steps. One that has no end is cut and is
    the last of its environment."""
    share = [episodes // env.num_envs + (b < episodes % env.num_envs) for b in range(env.num_envs)]
    done: list[list[tuple[float, int]]] = [[] for _ in share]
    rollout = trained(env, engine, policy, seed, mode, initial_state)
    while any(len(d) < s for d, s in zip(done, share, strict=True)):
        if most_steps is not None and rollout.env_steps >= most_steps:
            break
        step = rollout.step()
        if on_step is not None:
            on_step(step)
        for b, return_, length in rollout.ended:
            if len(done[b]) < share[b]:
                done[b].append((return_, length))
        if rollout.env_steps >= LONGEST:
            for b in map(int, np.flatnonzero(rollout.lengths >= LONGEST)):
                if len(done[b]) < share[b]:
                    warn_once(
                        logger,
                        f"an episode was cut after {LONGEST:,} steps and counts as it stands: "
                        "env.max_episode_steps=N gives episodes an end",
                    )
                    done[b].append((float(rollout.returns[b]), int(rollout.lengths[b])))
                    share[b] = len(done[b])
    return [result for d in done for result in d]


def evaluate_model(
    model: Any, policy: Any, env: EnvConfig, episodes: int, record: Record = True, threads: int = 0
) -> dict[str, Any]:
    """Greedy episodes in environments of their own, on seeds that are the same in every run: mean with a 95 % interval.
    `threads`: of environments that have threads; 0 = one per core."""
    with make_vec(eval_config(env, min(episodes, 16)), seed=EVAL_SEED, threads=threads) as envs:
        engine = acting_engine(model, policy, record)
        return summarize(play(envs, engine, policy, episodes, EVAL_SEED, initial_state=initial_state(model)))


def play_steps(
    env: VecEnv,
    engine: Any,
    policy: Any,
    steps: int,
    seed: int,
    *,
    mode: str = GREEDY,
    initial_state: Callable[[int], Any] | None = None,
) -> tuple[list[tuple[float, int]], tuple[float, int]]:
    """Play exactly `steps` steps in one environment, episode after episode: (return, length) of each whole one, and of
    the one that was cut (length 0: none was)."""
    done: list[tuple[float, int]] = []
    rollout = trained(env, engine, policy, seed, mode, initial_state)
    while rollout.env_steps < steps:
        rollout.step()
        done += [(return_, length) for _, return_, length in rollout.ended]
    return done, (float(rollout.returns[0]), int(rollout.lengths[0]))


def much_worse(greedy: list[tuple[float, int]], sampled: list[tuple[float, int]]) -> tuple[float, float] | None:
    """(mean greedy return, mean sampled return) where the greedy one is clearly the smaller: by more than chance (both
    95 % intervals) and by more than a tenth of what there is to tell apart."""
    if len(greedy) < 2 or len(sampled) < 2:
        return None
    g, s = (np.array([r for r, _ in results]) for results in (greedy, sampled))
    chance = 1.96 * math.sqrt(g.var(ddof=1) / len(g) + s.var(ddof=1) / len(s))
    matters = 0.1 * max(abs(g.mean()), abs(s.mean()))
    return (float(g.mean()), float(s.mean())) if s.mean() - g.mean() > max(chance, matters) else None


def summarize(results: list[tuple[float, int]]) -> dict[str, Any]:
    """Mean return of evaluation episodes with the half width of its 95 % confidence interval."""
    returns = np.array([r for r, _ in results])
    n = len(returns)
    return {
        "eval/return_mean": float(returns.mean()),
        "eval/return_ci95": float(1.96 * returns.std(ddof=1) / math.sqrt(n)) if n > 1 else None,
        "eval/return_min": float(returns.min()),
        "eval/return_max": float(returns.max()),
        "eval/length_mean": float(np.mean([n for _, n in results])),
        "eval/episodes": n,
    }
