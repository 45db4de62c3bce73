"""A player: environments, a Policy and a copy of the Model, in a process of their own. It plays rows when it is asked to."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from bray.act import Clock
from bray.data.experience import Counts
from bray.data.piece import Piece
from bray.envs.config import EnvConfig
from bray.envs.make import make_vec
from bray.envs.rewards import RewardTransform
from bray.envs.vector import episode_seed
from bray.inference.torch_engine import load_weights
from bray.train.acting import acting_engine, initial_state
from bray.train.config import RunConfig
from bray.train.rollout import EnvSource, Rollout
from bray.train.spent import WEIGHTS, Cores, Laps


@dataclass
class Plan:
    """What a player is told."""

    algo: Any
    run: RunConfig
    env: EnvConfig
    model: Any
    config: Any
    """Of the algorithm."""
    index: int
    """From 1; 0 is the process that learns."""
    rows: int
    state_every: int
    life: int = 0
    """How many workers this one replaces; it plays other episodes than they did."""


class Played(NamedTuple):
    """The rows that a player was asked for."""

    piece: Piece
    counts: Counts
    seconds: dict[str, float]
    """Since the answer before, by phase (`train/spent.py`)."""
    metrics: list[dict[str, float]]
    """`custom_metrics` of the episodes that ended."""


class Player:
    """See the module."""

    def __init__(self, plan: Plan):
        torch.set_num_threads(1)
        torch.manual_seed(plan.run.seed)
        seed = episode_seed(plan.run.seed, plan.index, plan.life) if plan.life else plan.run.seed
        self.env = make_vec(plan.env, seed=seed, worker_index=plan.index)
        spec = self.env.spec
        policy = plan.algo.Policy(plan.config, spec)
        self.model = plan.algo.make_model(plan.config, spec, plan.model)
        policy.draws = getattr(self.model, "draws", None) or {}
        rewards = RewardTransform(plan.env, plan.env.num_envs, getattr(plan.config, "gamma", 1.0))
        rng = RowsOfAll(plan.run.seed, plan.index - 1, plan.run.num_workers, plan.env.num_envs)
        self.rollout = Rollout(
            self.env,
            acting_engine(self.model, policy, plan.run.record),
            policy,
            rng,  # type: ignore[arg-type]
            rewards=rewards if rewards.active else None,
            initial_state=initial_state(self.model),
        )
        self.rollout.reset(seed)
        self.source = EnvSource(self.rollout, plan.rows, plan.state_every, plan.run.record, plan.index)
        self.laps, self._cores = Laps(), Cores(every=0.1)

    def play(self, weights: Mapping[str, np.ndarray], clock: tuple[int, int]) -> Played:
        """The rows of a piece with these weights."""
        load_weights(self.model, weights)
        self.laps.lap(WEIGHTS)
        self.rollout.clock = Clock(*clock)
        self.rollout.version = clock[1]
        (piece,), counts = self.source.gather()
        return Played(piece, counts, self._seconds(), self.source.ended_metrics())

    def _seconds(self) -> dict[str, float]:
        self.laps.lap("other")  # what of it was env and forward, the source knows
        spent = self.laps.take() | (played := self.source.seconds())
        spent["other"] -= sum(played.values())
        spent["transfer"] = spent.get("transfer", 0.0) + spent[WEIGHTS]
        return spent | self._cores.take()

    def watch(self, callbacks: bytes) -> None:
        self.source.watch(pickle.loads(callbacks))  # our own bytes, from our own parent

    def foreach_env(self, fn: bytes) -> list[Any]:
        return self.env.foreach_env(pickle.loads(fn))  # our own bytes, from our own parent

    def foreach_worker(self, fn: bytes) -> Any:
        return self.source.foreach_worker(pickle.loads(fn))[0]  # our own bytes, from our own parent

    def get_state(self) -> dict[str, Any]:
        return self.source.get_state()

    def set_state(self, state: dict[str, Any], clock: tuple[int, int]) -> bool:
        return self.source.set_state(state, Clock(*clock))

    def close(self) -> None:
        with suppress(Exception):
            self.env.close()


class _Bits:
    """The state of a generator, which all workers share, with a seed of this worker's own for those who make generators from it."""

    def __init__(self, rng: np.random.Generator, seed: list[int]):
        self._rng, self.seed_seq = rng, np.random.SeedSequence(seed)

    @property
    def state(self) -> Any:
        return self._rng.bit_generator.state

    @state.setter
    def state(self, state: Any) -> None:
        self._rng.bit_generator.state = state


class RowsOfAll:
    """A random generator that draws for the environments of all workers and gives out those of this one: they act as they would in one process."""

    def __init__(self, seed: int, worker: int, workers: int, rows: int):
        self._rng = np.random.default_rng([seed, 0])
        self.bit_generator = _Bits(self._rng, [seed, 0, worker])
        self._rows, self._all, self._mine = rows, workers * rows, slice(worker * rows, (worker + 1) * rows)

    def _draw(self, draw: Callable[..., Any], size: Any, *arguments: Any) -> Any:
        shape = (size,) if isinstance(size, int) else tuple(size or ())
        if not shape or shape[0] != self._rows:
            return draw(*arguments, size)
        return draw(*arguments, (self._all, *shape[1:]))[self._mine]

    def random(self, size: Any = None, dtype: Any = np.float64) -> Any:
        return self._draw(lambda size: self._rng.random(size, dtype), size)

    def standard_normal(self, size: Any = None, dtype: Any = np.float64) -> Any:
        return self._draw(lambda size: self._rng.standard_normal(size, dtype), size)

    def uniform(self, low: float = 0.0, high: float = 1.0, size: Any = None) -> Any:
        return self._draw(self._rng.uniform, size, low, high)

    def integers(self, low: int, high: int | None = None, size: Any = None) -> Any:
        return self._draw(self._rng.integers, size, low, high)
