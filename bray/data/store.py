"""Buffers of plain Python objects, for small programs and for data that has no fixed shape. `ReplayRing` is the one for
training at speed:
columns instead of objects, n-step returns, checkpoints."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import numpy as np

from bray.data.flags import VALID
from bray.errors import ConfigError, DataError


class ReplayBuffer:
    """The transitions of the newest `capacity` pushes, drawn uniformly, none twice in a batch.

    buffer = ReplayBuffer(10_000)
    buffer.push(state, action, reward, next_state, done)
    states, actions, rewards, next_states, dones = buffer.sample(64)
    """

    def __init__(self, capacity: int, seed: int | None = None):
        self._ring = _Ring(capacity, "capacity")
        self._rng = np.random.default_rng(seed)

    def __len__(self) -> int:
        return len(self._ring.items)

    def push(self, *parts: Any) -> None:
        """One transition; when the buffer is full the oldest one makes room. Every transition has as many parts as the
        first one."""
        items = self._ring.items
        if not parts or (items and len(items[0]) != len(parts)):
            expected = f"{len(items[0])} parts, as the first one" if items else "at least one part"
            raise DataError(f"a transition has {expected}; got {len(parts)}")
        self._ring.put(parts)

    def sample(self, batch_size: int) -> tuple[tuple[Any, ...], ...]:
        """`batch_size` different transitions, part by part: all first parts, all second parts, and so on."""
        if not 1 <= batch_size <= len(self):
            raise DataError(
                f"a batch is 1 or more different transitions, and {len(self)} are there: got batch_size {batch_size}. "
                "Push more first."
            )
        drawn = self._rng.choice(len(self), batch_size, replace=False).tolist()
        return tuple(zip(*(self._ring.items[i] for i in drawn), strict=True))


class PrioritizedBuffer:
    """The newest `maxlen` items of any kind, drawn by priority (Schaul 2016); without priorities, uniformly.

    An item is drawn with probability ~ (|priority| + eps) ** alpha. New items get the largest of these so far. Draws
    are stratified and with replacement, as those of `ReplayRing`.

        buffer = PrioritizedBuffer(maxlen=10_000)
        buffer.append({"obs": obs, "action": action})
        items = buffer.sample(4)
        items, ids, weights = buffer.sample_weighted(4)
        buffer.update_priorities(ids, td_errors)
    """

    def __init__(
        self, maxlen: int, *, alpha: float = 0.6, beta: float = 0.4, eps: float = 1e-5, seed: int | None = None
    ):
        from bray.data.prioritized import SumTree  # compiled: who draws uniformly does not wait for it

        for name, number, high in (("alpha", alpha, math.inf), ("beta", beta, 1.0), ("eps", eps, math.inf)):
            if not 0.0 <= number <= high:
                raise ConfigError(f"buffer: {name} is between 0 and {high}, got {number}")
        self.alpha, self.beta, self.eps = alpha, beta, eps
        self._ring = _Ring(maxlen, "maxlen")
        self._tree = SumTree(maxlen)
        self._flags = np.full(maxlen, VALID, np.uint8)
        self._largest = 1.0
        self._rng = np.random.default_rng(seed)

    def __len__(self) -> int:
        return len(self._ring.items)

    def append(self, item: Any) -> None:
        """One item; when the buffer is full the oldest one makes room."""
        slot = self._ring.put(item)
        self._tree.set(np.array([slot]), self._largest)

    def extend(self, items: Iterable[Any]) -> None:
        """Several items, one after the other."""
        for item in items:
            self.append(item)

    def sample(self, batch_size: int) -> list[Any]:
        """`batch_size` items, as they were appended (not copies)."""
        return self.sample_weighted(batch_size)[0]

    def sample_weighted(self, batch_size: int, beta: float | None = None) -> tuple[list[Any], np.ndarray, np.ndarray]:
        """Items, their ids for `update_priorities`, and importance weights (N P_i) ** -beta divided by the largest of
        the batch."""
        if batch_size < 1:
            raise DataError(f"a batch has at least 1 item, got {batch_size}")
        if not len(self):
            raise DataError("the buffer is empty: append something before sampling")
        if not self._tree.total > 0.0:
            raise DataError("all priorities are 0, so nothing can be drawn by priority: keep eps above 0")
        beta = self.beta if beta is None else float(beta)
        ids, slots, weight = self._tree.draw(self._rng.random(batch_size), beta, self._ring.count)
        return [self._ring.items[slot] for slot in slots.tolist()], ids, weight

    def update_priorities(self, id: np.ndarray, priority: np.ndarray) -> None:
        """New priorities, such as TD errors, for drawn items; those overwritten since are left alone."""
        ids = np.ascontiguousarray(id, np.int64).reshape(-1)
        priorities = np.ascontiguousarray(priority, np.float64).reshape(-1)
        if ids.shape != priorities.shape:
            raise DataError(f"one priority per id: got {np.shape(id)} ids and {np.shape(priority)} priorities")
        count = self._ring.count
        _, self._largest = self._tree.update(
            self._flags, ids, priorities, count - len(self), count, self.alpha, self.eps, self._largest
        )


class _Ring:
    """A list of at most `size` items; the oldest one is overwritten first. Item number `id` lies in slot id % size."""

    def __init__(self, size: int, name: str):
        if size < 1:
            raise ConfigError(f"buffer: {name} is at least 1, got {size}")
        self.size, self.count = size, 0
        self.items: list[Any] = []

    def put(self, item: Any) -> int:
        slot = self.count % self.size
        if slot == len(self.items):
            self.items.append(item)
        else:
            self.items[slot] = item
        self.count += 1
        return slot
