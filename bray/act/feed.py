"""How weights reach whoever acts: a learner publishes them, and whoever acts asks for the newest.

    publish(weights, clock)   from now on these are the newest
    newest(known)             the newest publication; None where that is the `known` one, which costs next to nothing
    wait(known, timeout)      the same, as soon as there is one

Three carriers: memory of this machine (`SharedFeed`, for rollout workers), a run directory (`FileFeed`, for services)
and the object store of a cluster (`bray.cluster.feed`, for remote models and workers on Ray). What holds for all:

- A publication is weights, the Clock of the training, and a mark that tells it from all others: the same version may
  be published again, after a resume or by hand. A mark is compared, and says nothing else.
- A reader never gets half of one. A publisher that is killed or interrupted leaves the publication before it.
- Versions do not go back, whoever publishes.
"""

from __future__ import annotations

import asyncio
import ctypes
import logging
import multiprocessing
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import numpy as np

from bray.act.clock import Clock
from bray.errors import CheckpointError, Unreachable
from bray.rundir import RunDir
from bray.tree.shared import SharedArrays

logger = logging.getLogger("bray")

Weights = Mapping[str, np.ndarray]

_LOOK_S = 0.02  # between two looks of those who wait where nobody tells them


@dataclass(frozen=True)
class Publication:
    """Weights of one moment. Do not write into them."""

    weights: Any
    """Arrays by name; a carrier may have a reference to them."""
    clock: Clock
    mark: Any = None


class WeightFeed:
    """The contract. A carrier has `publish`, `mark` and `read`."""

    def publish(self, weights: Callable[[], Weights], clock: Clock) -> Any:
        """`weights` is called and copied before this returns: a learner goes on writing into its arrays."""
        raise NotImplementedError

    @property
    def mark(self) -> Any:
        """Of the newest publication; None where there is none."""
        raise NotImplementedError

    def read(self) -> Publication:
        """The newest publication."""
        raise NotImplementedError

    def newest(self, known: Any = None) -> Publication | None:
        return None if self.mark == known else self.read()

    async def wait(self, known: Any, timeout: float) -> Publication | None:
        end = time.monotonic() + timeout
        while (found := self.newest(known)) is None and time.monotonic() < end:
            await asyncio.sleep(_LOOK_S)
        return found


class SharedFeed(WeightFeed):
    """Two copies of the weights in memory that all processes see. Each has a counter that is odd while it is written: a
    reader that finds it odd, or changed behind its copy, takes the other one. Nobody waits for anybody, and a reader
    that is killed leaves nothing behind."""

    def __init__(self, weights: Weights):
        self._names = list(weights)
        self._arrays = SharedArrays(weights.values(), 2)
        # which copy is the newest; then of each copy its counter, env_steps and version
        self._numbers = multiprocessing.get_context("spawn").RawArray(ctypes.c_int64, 7)

    def views(self, slot: int) -> dict[str, np.ndarray]:
        return {name: x[slot, ...] for name, x in zip(self._names, self._arrays.views(), strict=True)}

    def publish(self, weights: Callable[[], Weights], clock: Clock) -> None:
        """Over the older of the two."""
        given, slot = weights(), 1 - self._numbers[0]
        at = 1 + 3 * slot
        number = self._numbers[at] | 1  # it is odd already where Ctrl-C has cut a write short
        self._numbers[at] = number
        _in_order()
        for name, array in self.views(slot).items():
            array[...] = given[name]
        self._numbers[at + 1], self._numbers[at + 2] = clock[:2]
        _in_order()
        self._numbers[at] = number + 1
        self._numbers[0] = slot

    @property
    def mark(self) -> Any:
        slot = self._numbers[0]
        number = self._numbers[1 + 3 * slot]
        return (slot, number) if number else None

    def read(self) -> Publication:
        """A copy of the newest ones, whole."""
        while True:
            slot = self._numbers[0]
            at = 1 + 3 * slot
            before = self._numbers[at]
            _in_order()
            weights = {name: array.copy() for name, array in self.views(slot).items()}
            clock = Clock(*self._numbers[at + 1 : at + 3])
            _in_order()
            if before % 2 == 0 and self._numbers[at] == before:
                return Publication(weights, clock, (slot, before))


_turn = threading.Lock()


def _in_order() -> None:
    """What this process wrote or read so far comes before what follows, for other processes too. On ARM stores and
    loads may overtake each other, but none overtakes a lock that is released and taken again."""
    for _ in range(2):
        with _turn:
            pass


class FileFeed(WeightFeed):
    """The versions of a model in a run directory: a mark is a step. The newest is the one that `label` (latest, best)
    names; without a label, the last of those that `skips` does not name."""

    def __init__(self, run: RunDir, name: str = "default", label: str | None = None, skips: Iterable[int] = ()):
        self.run, self.name, self.label, self.skips = run, name, label, skips

    def publish(self, weights: Callable[[], Weights], clock: Clock) -> None:
        self.run.save_weights(clock.version, weights(), self.name)

    @property
    def mark(self) -> int | None:
        if self.label is not None:
            return self.run.pointer(self.label)
        return max((step for step in self.run.versions(self.name) if step not in self.skips), default=None)

    def step(self) -> int:
        """Of the newest version."""
        step = self.mark
        if step is None:
            raise CheckpointError(f"{self.run.path} has no checkpoint {(self.label or self.name)!r} yet")
        return step

    def read(self, step: int | None = None) -> Publication:
        """The newest version, or the one of this step."""
        step = self.step() if step is None else step
        return Publication(self.run.load_weights(step, self.name), Clock(version=step), step)


class Latest:
    """Publishes at most every so many seconds, and not while the publication before is under way; then the newest of
    those that came meanwhile. All in the learner's thread: weights are asked for when they are published. One that does
    not arrive because nobody can be reached is logged, and training goes on."""

    def __init__(self, publish: Callable[[Weights, Clock], Future[Any]], every: float = 0.0, name: str = "training"):
        """publish: its result is there when the weights have arrived."""
        self._publish, self._every, self._name = publish, every, name
        self._pending: tuple[Callable[[], Weights], Clock] | None = None
        self._under_way: Future[Any] | None = None
        self._version, self._next = 0, 0.0

    def publish(self, weights: Callable[[], Weights], clock: Clock) -> None:
        self._pending = weights, clock
        if time.monotonic() > self._next and (self._under_way is None or self._under_way.done()):
            self.flush()

    def flush(self) -> None:
        """Publish what waits, after the one that is under way. An error of that one is raised here."""
        self.settle()
        if self._pending is not None:
            (weights, clock), self._pending = self._pending, None
            self._version, self._next = clock.version, time.monotonic() + self._every
            self._under_way = self._reach(lambda: self._publish(weights(), clock))

    def settle(self) -> None:
        """Wait for the publication that is under way; its error is raised here."""
        sent, self._under_way = self._under_way, None
        if sent is not None:
            self._reach(sent.result)

    def _reach(self, call: Callable[[], Any]) -> Any:
        try:
            return call()
        except Unreachable as e:
            logger.warning("%s: step %d is not published, training goes on: %s", self._name, self._version, e)
