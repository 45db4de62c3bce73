"""Chunks: rows of samples that travel and wait together, as columns; and the queue of a shard, in which they wait."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from bray import tree
from bray.errors import DataError
from bray.tree import NestedArray
from bray.tree.layout import Layout, Layouts, describe


class Chunk:
    """Rows of one layout, each leaf a column `[rows, ...]`. `held` keeps their memory: a slot of shared memory, or
    None."""

    __slots__ = ("columns", "first", "held", "layout", "rows", "total")

    def __init__(self, layout: Layout, columns: list[np.ndarray], rows: int, held: Any = None):
        self.layout, self.columns, self.rows, self.held = layout, columns, rows, held
        self.first, self.total = 0, rows  # offset and total rows of the backing memory

    @property
    def nbytes(self) -> int:
        return self.layout.row_bytes * self.rows

    def part(self, first: int, end: int) -> Chunk:
        """Some of the rows, in the same memory."""
        if first == 0 and end == self.rows:
            return self
        part = Chunk(self.layout, [c[first:end] for c in self.columns], end - first, self.held)
        part.first, part.total = self.first + first, self.total
        return part

    def batch(self) -> NestedArray:
        """All rows as one tree `[rows, ...]`."""
        return self.layout.tree(self.columns)

    def row(self, i: int) -> NestedArray:
        """One row as the sample that was pushed."""
        return self.layout.tree([c[i, ...] for c in self.columns])


def read_batch(batch: Any, layouts: Layouts) -> Chunk:
    """A tree `[N, ...]` as rows."""
    batch = tree.as_arrays(batch)
    rows = tree.batch_rows(batch)
    columns = dict(tree.paths(batch))
    if len(columns) != len(tree.leaves(batch)):
        raise DataError("a batch with two arrays of the same path: a key of a sample may not contain '/'")
    layout, _ = layouts.read(tree.map(lambda leaf: leaf[0, ...], batch))
    return Chunk(layout, [columns[path] for path in layout.paths], rows)


_MESSAGE = 1 << 18  # bytes of single samples per answer

Memory = Callable[[int], tuple[Any, Any]]
"""`memory(nbytes)` gives a writable buffer, and what keeps it: a slot of shared memory, or None."""


def private(nbytes: int) -> tuple[Any, Any]:
    """Memory of this process."""
    return np.empty(nbytes, np.uint8), None


def join(chunks: Sequence[Chunk], memory: Memory) -> Chunk:
    """Several chunks of one structure as one, copied.
    Where dtypes differ the wider one is taken, as numpy does."""
    layout, rows = _common([c.layout for c in chunks]), sum(c.rows for c in chunks)
    data, held = memory(layout.offsets(rows)[1])
    columns = layout.columns(data, rows)
    for i, column in enumerate(columns):
        np.concatenate([c.columns[i] for c in chunks], out=column, casting="unsafe")
    return Chunk(layout, columns, rows, held)


def _common(layouts: list[Layout]) -> Layout:
    first = layouts[0]
    if all(x is first or x.spec == first.spec for x in layouts):
        return first
    leaves = [np.empty(s, np.result_type(*d)) for s, *d in zip(first.shapes, *(x.dtypes for x in layouts), strict=True)]
    return Layout(describe(first.tree(leaves)))


def stack(layout: Layout, rows: Sequence[list[np.ndarray]]) -> Chunk:
    """Samples, given by their leaves, as one chunk."""
    if len(rows) == 1:
        return Chunk(layout, [np.array(leaf)[None] for leaf in rows[0]], 1)
    return Chunk(layout, [np.stack(leaves) for leaves in zip(*rows, strict=True)], len(rows))


class AlikeSamples:
    """Samples that are to share a batch have the same structure."""

    def __init__(self, batch_size: int | None):
        self.batch_size = batch_size
        self._layout: Layout | None = None

    def check(self, layout: Layout) -> None:
        if self.batch_size is None:
            return
        if self._layout is None:
            self._layout = layout
        elif self._layout is not layout and (different := self._layout.differs(layout)):
            raise DataError(
                f"samples of a buffer with batch_size {self.batch_size} have the same keys and shapes; {different}. "
                "Pad or cut them, or make the buffer with batch_size=None."
            )


class Queue(AlikeSamples):
    """At most `capacity` rows, first in, first out, in batches of `batch_size` (None: single samples)."""

    def __init__(self, capacity: int, batch_size: int | None):
        super().__init__(batch_size)
        self.capacity = capacity
        self._chunks: deque[Chunk] = deque()
        self.rows = self.nbytes = 0

    @property
    def room(self) -> int:
        return self.capacity - self.rows

    def put(self, chunk: Chunk) -> None:
        self._chunks.append(chunk)
        self.rows += chunk.rows
        self.nbytes += chunk.nbytes

    def has(self, ended: bool) -> bool:
        """Whether `take` gives something: a whole batch, or the rest at the end."""
        return self.rows > 0 if self.batch_size is None or ended else self.rows >= self.batch_size

    def take(self, most: int) -> list[Chunk]:
        """A batch, in pieces; or at most `most` single samples of one layout, and no more than fit in a message."""
        if self.batch_size is not None:
            return self.drop(min(self.rows, self.batch_size))
        layout = self._chunks[0].layout
        most = min(most, max(1, _MESSAGE // max(1, layout.row_bytes)))
        rows = 0
        for chunk in self._chunks:
            if chunk.layout is not layout or rows >= most:
                break
            rows += chunk.rows
        return self.drop(min(rows, most))

    def drop(self, rows: int) -> list[Chunk]:
        """Remove the oldest rows; which they were."""
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
