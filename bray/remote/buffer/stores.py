"""The stores of a shard: a queue, which is emptied by reading, or a ring, from which batches are drawn.

Stores know nothing of processes or waiting; that is the shard's job (`worker.py`).
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np

from bray.data.flags import RETIRED, VALID
from bray.errors import DataError
from bray.remote.buffer.columns import Chunk
from bray.tree.layout import Layout, Layouts

_MESSAGE = 1 << 18  # bytes of single samples per answer


class Queue:
    """At most `capacity` rows, first in, first out, in batches of `batch_size` (None: single samples)."""

    def __init__(self, capacity: int, batch_size: int | None):
        self.capacity, self.batch_size = capacity, batch_size
        self._chunks: deque[Chunk] = deque()
        self._layout: Layout | None = None
        self.rows = self.nbytes = 0

    @property
    def room(self) -> int:
        return self.capacity - self.rows

    def check(self, layout: Layout) -> None:
        """Samples that share a batch have the same structure."""
        if self.batch_size is None:
            return
        if self._layout is None:
            self._layout = layout
        elif self._layout is not layout and (different := self._layout.differs(layout)):
            raise DataError(
                f"samples of a buffer with batch_size {self.batch_size} have the same keys and shapes; {different}. "
                "Pad or cut them, or make the buffer with batch_size=None."
            )

    def put(self, chunk: Chunk) -> None:
        self._chunks.append(chunk)
        self.rows += chunk.rows
        self.nbytes += chunk.nbytes

    def drop(self, rows: int) -> None:
        """Drop the oldest rows."""
        self._take(rows)

    def has(self, ended: bool) -> bool:
        """Whether `take` gives something: a whole batch, or the rest at the end."""
        return self.rows > 0 if self.batch_size is None or ended else self.rows >= self.batch_size

    def take(self, most: int) -> list[Chunk]:
        """A batch, in pieces; or at most `most` single samples of one layout, and no more than fit in a message."""
        if self.batch_size is not None:
            return self._take(min(self.rows, self.batch_size))
        layout = self._chunks[0].layout
        most = min(most, max(1, _MESSAGE // max(1, layout.row_bytes)))
        rows = 0
        for chunk in self._chunks:
            if chunk.layout is not layout or rows >= most:
                break
            rows += chunk.rows
        return self._take(min(rows, most))

    def _take(self, rows: int) -> list[Chunk]:
        out: list[Chunk] = []
        while rows:
            chunk = self._chunks.popleft()
            if chunk.rows > rows:
                self._chunks.appendleft(chunk.part(rows, chunk.rows))
                chunk = chunk.part(0, rows)
            rows -= chunk.rows
            self.rows -= chunk.rows
            self.nbytes -= chunk.nbytes
            out.append(chunk)
        return out


class Ring:
    """The newest `capacity` rows, each a dict. Batches are drawn from it, uniformly or by priority, and take nothing
    out.

    Row number n lies in slot n % capacity; its id is (generation, slot), the generation grows with each lap.
    Generations start with the time, so that an id of a shard that died is not taken for one of its successor.
    `max_reuse`: a row retires after this many draws (checked after each draw).
    """

    def __init__(
        self,
        capacity: int,
        prioritized: bool,
        alpha: float = 0.6,
        eps: float = 1e-5,
        max_reuse: int | None = None,
    ):
        self.capacity, self.alpha, self.eps, self.max_reuse = capacity, alpha, eps, max_reuse
        self.first_generation = time.time_ns()
        self.count = 0
        """Rows added so far."""
        self.late = 0
        """Priorities for rows that were overwritten already."""
        self.largest = 1.0
        """The largest (|priority| + eps) ** alpha so far; new rows get it."""
        self.overwritten_unused = 0
        """Rows that were overwritten before they were ever drawn."""
        self._layout: Layout | None = None
        self._sampled: Layout | None = None
        self._columns: list[np.ndarray] = []
        self._uses = np.zeros(capacity, np.uint32)
        self._flags = np.full(capacity, VALID, np.uint8)
        self._tree: Any = None
        if prioritized:
            from bray.data.prioritized import SumTree

            self._tree = SumTree(capacity)
        # uniform: the slots that can be drawn, in any order, and the position of each slot in that list
        self._order = np.zeros(capacity if self._tree is None else 0, np.int64)
        self._place = np.full(len(self._order), -1, np.int64)
        self._eligible = 0

    @property
    def rows(self) -> int:
        return min(self.count, self.capacity)

    @property
    def nbytes(self) -> int:
        return self.rows * self._layout.row_bytes if self._layout else 0

    @property
    def mass(self) -> float:
        """The sum of the priorities (uniform: the number of rows that can be drawn)."""
        return float(self._eligible) if self._tree is None else self._tree.total

    @property
    def generation(self) -> int:
        return self.first_generation + self.count // self.capacity

    def check(self, layout: Layout) -> None:
        """All rows have the structure of the first one, and dtypes that can be cast to its columns."""
        mine = self._layout
        if mine is None:
            if not layout.spec.startswith(b'{"d":'):
                raise DataError(
                    "samples of a uniform or prioritized store are dicts: they come back with an id and a weight"
                )
            if taken := {"id", "weight"} & {p.split("/")[0] for p in layout.paths}:
                raise DataError(f"a sample's key {sorted(taken)[0]!r} is what the draws of this store add: rename it")
        elif mine is not layout and mine.spec != layout.spec:
            if different := mine.differs(layout):
                raise DataError(f"samples of one store have the same keys and shapes; {different}")
            for path, had, got in zip(mine.paths, mine.dtypes, layout.dtypes, strict=True):
                if not np.can_cast(got, had, "same_kind"):
                    raise DataError(
                        f"{path!r} holds {had} since the first sample, got {got}: convert it, or push such a one first"
                    )

    def put(self, chunk: Chunk) -> None:
        layout = self._layout
        if layout is None:
            layout = self._layout = chunk.layout
            self._columns = [
                np.empty((self.capacity, *s), d) for s, d in zip(layout.shapes, layout.dtypes, strict=True)
            ]
        if chunk.rows > self.capacity:
            self.count += chunk.rows - self.capacity
            chunk = chunk.part(chunk.rows - self.capacity, chunk.rows)
        done = 0
        while done < chunk.rows:
            slot = self.count % self.capacity
            n = min(chunk.rows - done, self.capacity - slot)
            for column, new in zip(self._columns, chunk.columns, strict=True):
                column[slot : slot + n] = new[done : done + n]
            self._enter(slot, n)
            self.count += n
            done += n

    def _enter(self, slot: int, n: int) -> None:
        if self.count >= self.capacity:
            self.overwritten_unused += int(np.count_nonzero(self._uses[slot : slot + n] == 0))
        self._uses[slot : slot + n] = 0
        self._flags[slot : slot + n] = VALID
        if self._tree is not None:
            self._tree.set(np.arange(slot, slot + n), self.largest)
            return
        new = slot + np.flatnonzero(self._place[slot : slot + n] < 0)  # the others can be drawn already
        self._order[self._eligible : self._eligible + len(new)] = new
        self._place[new] = np.arange(self._eligible, self._eligible + len(new))
        self._eligible += len(new)

    def draw(self, at: np.ndarray, memory: Callable[[int], tuple[Any, Any]]) -> Chunk:
        """The rows at these fractions (0 <= f < 1, ascending) of the mass, with the keys `id` (generation, slot) and
        `weight`, which is the row's mass. The chunk lies in `memory`, as in `join`."""
        assert self._layout is not None
        layout, n = self._sampled_layout(), len(at)
        data, held = memory(layout.offsets(n)[1])
        columns = layout.columns(data, n)
        if self._tree is None:
            slots = self._order[np.minimum((at * self._eligible).astype(np.int64), self._eligible - 1)]
            columns[-1][:] = 1.0
        else:
            _, slots, _ = self._tree.draw(at * n - np.arange(n), 0.0, self.count)
            columns[-1][:] = self._tree.leaves[slots]
        for column, out in zip(self._columns, columns, strict=False):
            np.take(column, slots, 0, out, mode="clip")
        lap = self.generation - (slots >= self.count % self.capacity)  # slots after the newest are of the lap before
        columns[-2][:, 0], columns[-2][:, 1] = lap, slots
        self._use(slots)
        return Chunk(layout, columns, n, held)

    def _sampled_layout(self) -> Layout:
        if self._sampled is None:
            assert self._layout is not None
            leaves = [np.empty(s, d) for s, d in zip(self._layout.shapes, self._layout.dtypes, strict=True)]
            sample = self._layout.tree(leaves)
            self._sampled = Layouts().read({**sample, "id": np.empty(2, np.int64), "weight": np.empty((), np.float64)})[
                0
            ]
        return self._sampled

    def _use(self, slots: np.ndarray) -> None:
        np.add.at(self._uses, slots, np.uint32(1))
        if self.max_reuse is None:
            return
        tired = np.unique(slots[self._uses[slots] >= self.max_reuse])
        tired = tired[self._flags[tired] == VALID]
        self._flags[tired] |= RETIRED
        if self._tree is not None:
            self._tree.set(tired, 0.0)
            return
        for slot in tired.tolist():  # the last one takes its place
            self._eligible -= 1
            at, last = self._place[slot], self._order[self._eligible]
            self._order[at] = last
            self._place[last] = at
            self._place[slot] = -1

    def set_priorities(self, ids: np.ndarray, priorities: np.ndarray) -> None:
        """New priorities for drawn rows, by (generation, slot). Those overwritten since are left alone and counted."""
        if self._tree is None:
            raise DataError("a uniform store has no priorities: make the buffer with store='prioritized'")
        number = (ids[:, 0] - self.first_generation) * self.capacity + ids[:, 1]
        good = (ids[:, 1] >= 0) & (ids[:, 1] < self.capacity)
        number[~good] = -1
        late, self.largest = self._tree.update(
            self._flags,
            np.ascontiguousarray(number),
            np.ascontiguousarray(priorities, np.float64),
            self.count - self.rows,
            self.count,
            self.alpha,
            self.eps,
            self.largest,
        )
        self.late += late


def split(masses: np.ndarray, batch_size: int, rng: np.random.Generator) -> list[np.ndarray]:
    """Where `batch_size` draws fall, shard by shard, as fractions of each shard's mass.

    The draws are those of one tree over everything: draw i falls into the i-th of `batch_size` equal parts of the whole
    mass."""
    ends = np.cumsum(masses)
    total = ends[-1]
    x = (np.arange(batch_size) + rng.random(batch_size)) / batch_size * total
    shard = np.minimum(np.searchsorted(ends, x, "right"), int(np.flatnonzero(masses)[-1]))
    out = []
    for i, mass in enumerate(masses):
        mine = x[shard == i]
        out.append(np.clip((mine - (ends[i] - mass)) / mass, 0.0, math.nextafter(1.0, 0.0)) if len(mine) else mine)
    return out


def weigh(share: np.ndarray, count: int, beta: float) -> np.ndarray:
    """Importance weights (N P_i) ** -beta, divided by the largest one of the batch. `share` is P_i."""
    weight = (count * share) ** -beta
    return (weight / weight.max()).astype(np.float32)
