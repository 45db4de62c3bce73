"""What `check_env` asks of environments of tensors: they are played many at once, by the rule that training uses."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from typing import Any

import numpy as np

from bray import tree
from bray.envs.build import Builder
from bray.envs.config import EnvConfig
from bray.envs.device import DeviceVecEnv, make_device
from bray.envs.vector import StepResult

_GAMES = 4


def check_tensors(config: EnvConfig, build: Builder, steps: int, seed: int) -> Iterator[tuple[str, str]]:
    """(severity, message) of each finding; what would stop a training is raised."""
    together = config if config.num_envs > 1 else replace(config, num_envs=_GAMES)

    def make() -> DeviceVecEnv:
        return make_device(together, build.source, build.preprocessing(), seed, None)

    with closing(make()) as env, closing(make()) as other:
        rng = np.random.default_rng(seed)
        actions = [np.stack([env.spec.layout.space.sample(rng) for _ in range(env.num_envs)]) for _ in range(steps)]
        began = time.perf_counter()
        first = list(_play(env, actions, seed))
        ms = (time.perf_counter() - began) / max(1, steps) * 1e3
        state = env.get_state()["json"]["exact"]
        second = list(_play(other, actions, seed))
    yield "info", f"{env.num_envs} environments of tensors on {env.tensors.device}: {ms:.2f} ms for a step of all"
    if not any((out[2] | out[3]).any() for out in first) and env.spec.max_episode_steps is None:
        yield (
            "warning",
            f"no episode ended in {steps} random steps and there is no time limit: set max_episode_steps",
        )
    differs = next((t for t, (a, b) in enumerate(zip(first, second, strict=True)) if not _same(a, b)), None)
    if differs is not None:
        yield (
            "warning",
            f"two runs with the same seed and actions differ at step {differs}: draw all randomness from reset's seed; "
            "until then resumed runs start new episodes (exact: false)",
        )
    if not state:
        yield (
            "warning",
            "it has no get_state() and set_state(state), so that a resumed run starts new episodes (exact: false): "
            "return all that the next step depends on as a dict of tensors, and take it back",
        )


def _play(env: DeviceVecEnv, actions: list[Any], seed: int) -> Iterator[StepResult]:
    env.reset(seed)
    for action in actions:
        yield env.step(action)


def _same(a: StepResult, b: StepResult) -> bool:
    return tree.equal(a[0], b[0]) and all(np.array_equal(x, y) for x, y in zip(a[1:4], b[1:4], strict=True))
