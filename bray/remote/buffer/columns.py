"""Rows of samples as columns: on their way to a shard (a PendingBatch, with the receipt that its sender may wait
for), in the queue of a shard and on their way to a consumer (a Chunk); and the shard as both sides see it, a Port."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import threading
import time
from asyncio.events import _get_running_loop
from collections import deque
from collections.abc import Callable, Generator, Sequence
from typing import Any

import numpy as np

from bray import tree
from bray.errors import DataError
from bray.remote.buffer.slabs import Slab, Slot
from bray.tree import NestedArray
from bray.tree.layout import Layout, Layouts, describe

logger = logging.getLogger("bray.remote")

MOST_IN_FLIGHT = 4
_BATCH_BYTES = 1 << 19  # small samples that travel in one message

_lock = threading.Lock()


def _forked() -> None:
    global _lock
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_forked)


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


# --- on the way to a shard --------------------------------------------------------------------------------------------


class Pushed:
    """What `push` returns. Await it, or take its `result()`, to know that the samples have arrived; or forget it."""

    __slots__ = ("_batches",)

    def __init__(self, batches: Sequence[Receipt]):
        self._batches = batches

    def __await__(self) -> Generator[Any, None, None]:
        for batch in self._batches:
            if not batch.done and (future := batch.wait_by(asyncio.get_running_loop().create_future())) is not None:
                yield from future
            if batch.error is not None:
                raise batch.error

    def result(self, timeout: float | None = None) -> None:
        """Wait in a thread."""
        end = None if timeout is None else time.monotonic() + timeout
        for batch in self._batches:
            if not batch.done and (event := batch.wait_by(threading.Event())) is not None:
                left = None if end is None else max(0.0, end - time.monotonic())
                if not event.wait(left):
                    raise TimeoutError(f"samples that were pushed have not arrived in {timeout:g} s")
            if batch.error is not None:
                raise batch.error

    def done(self) -> bool:
        return all(batch.done for batch in self._batches)


class Receipt:
    """Whether samples have arrived. Many callers may wait for the same one, each with a future of its own loop."""

    __slots__ = ("_waiting", "done", "error")

    def __init__(self) -> None:
        self.done = False
        self.error: BaseException | None = None
        self._waiting: list[asyncio.Future[None] | threading.Event] | None = None

    def wait_by(self, waiter: Any) -> Any:
        """A future, for a coroutine of its loop, or an Event, for a thread, which will be set; None where it is
        done."""
        with _lock:
            if self.done:
                return None
            if self._waiting is None:
                self._waiting = []
            self._waiting.append(waiter)
        return waiter

    def finish(self, error: BaseException | None = None) -> None:
        with _lock:
            if self.done:
                return
            self.error = error
            self.done = True
            waiting, self._waiting = self._waiting, None
        if waiting is None:
            if error is not None:
                logger.error("samples that were pushed did not arrive: %s: %s", type(error).__name__, error)
            return
        others: dict[asyncio.AbstractEventLoop, list[asyncio.Future[None]]] = {}
        here = _get_running_loop()
        for waiter in waiting:
            if isinstance(waiter, threading.Event):
                waiter.set()
            elif (loop := waiter.get_loop()) is here:
                _wake([waiter])
            else:
                others.setdefault(loop, []).append(waiter)
        for loop, futures in others.items():
            with contextlib.suppress(RuntimeError):  # that loop has ended
                loop.call_soon_threadsafe(_wake, futures)


def _wake(futures: list[asyncio.Future[None]]) -> None:
    for future in futures:
        if not future.done():
            future.set_result(None)


class PendingBatch(Receipt):
    """Rows of one layout that have no receipt yet. They wait in the writer's queue until they are sent; a batch whose
    shard dies goes back there. They lie in `data`, which may be a slot of a slab, or are gathered as the bytes of each
    column."""

    __slots__ = ("_adds", "_columns", "data", "drop", "layout", "most", "rows", "slot", "source")

    def __init__(self, layout: Layout, drop: bool, source: str, most: int):
        super().__init__()
        self.layout, self.drop, self.source, self.rows = layout, drop, source, 0
        self.most = max(1, min(most, _BATCH_BYTES // max(1, layout.row_bytes)))
        self.data: Any = None
        self.slot: Slot | None = None
        self._columns: list[list[bytes]] = [[] for _ in layout.sizes]
        self._adds = [c.append for c in self._columns]

    @property
    def nbytes(self) -> int:
        return self.rows * self.layout.row_bytes

    def takes(self, layout: Layout, drop: bool, source: str) -> bool:
        """Whether more rows of this kind may join."""
        return self.layout is layout and self.drop is drop and self.source == source and self.rows < self.most

    def add(self, leaves: list[np.ndarray]) -> None:
        for add, leaf in zip(self._adds, leaves):  # noqa: B905 (twice as fast)
            add(leaf.tobytes())
        self.rows += 1

    def add_rows(self, columns: list[np.ndarray], first: int, end: int) -> None:
        for add, column in zip(self._adds, columns, strict=True):
            add(column[first:end].tobytes())
        self.rows += end - first

    def add_large(self, leaves: list[np.ndarray], memory: Memory) -> None:
        """The only row, straight to where it stays."""
        self.data, self.slot = memory(self.layout.offsets(1)[1])
        for column, leaf in zip(self.layout.columns(self.data, 1), leaves, strict=True):
            np.copyto(column[0, ...], leaf)
        self.rows = 1

    def move(self, memory: Memory) -> None:
        """Copy the rows to other memory."""
        data, slot = memory(self.layout.offsets(self.rows)[1])
        self._write(data.data)
        self.data, self.slot = data, slot

    def joined(self) -> Any:
        """The columns one after the other, as they are written down."""
        if self.data is not None:
            return self.data.data[: self.layout.offsets(self.rows)[1]]
        out = bytearray(self.layout.offsets(self.rows)[1])
        self._write(memoryview(out))
        return out

    def _write(self, memory: memoryview) -> None:
        if self.data is not None:
            memory[: len(self.data)] = self.data.data
            return
        for start, column in zip(self.layout.offsets(self.rows)[0], self._columns, strict=True):
            rows = b"".join(column)
            memory[start : start + len(rows)] = rows

    def forget_rows(self) -> None:
        """Whoever keeps the receipt does not keep the samples."""
        self.data, self.slot, self._columns, self._adds = None, None, [], []


Give = Callable[[int, list[Chunk], int], None]
"""Called with the answer to a pop: kind, pieces of the batch, samples that wait."""
Done = Callable[[BaseException | None], None]
"""Called when samples that were pushed are in the shard's queue, or with the reason why they are not."""


class Port:
    """A shard. One of the same process (`worker.py`) is called directly, from any thread; one elsewhere is reached
    through a link (`connection.py`). Writers and readers do not know which they use."""

    up = True
    gone = False
    """It will not come back."""
    ready = True
    """Takes samples."""
    behind = 0
    """Samples that wait for room in a shard of this process."""
    offered: Slab | None = None
    """The slab of this process that the shard was asked to map."""
    in_flight = bytes_in_flight = 0
    last_sent = -1
    """These three are kept by the writer."""

    def connect(self) -> None:
        """Connect, and stay connected."""

    def offer(self, slab: Callable[[], Slab], answered: Callable[[], None]) -> None:
        """Ask the shard whether it can map this slab of ours; after that it takes samples."""

    def stop_lending(self) -> bool:
        """The shard is gone. Whether consumers of it may still read what was lent to it."""
        return False

    def push(self, chunk: Chunk, drop: bool, done: Done, source: str = "") -> None:
        """Samples for a shard of this process: the memory becomes the shard's."""
        raise NotImplementedError

    def send(self, batch: PendingBatch, done: Done) -> None:
        """Samples for a shard of another process; at most MOST_IN_FLIGHT batches without a receipt."""
        raise NotImplementedError

    def pop(self, most: int, give: Give) -> None:
        """Ask for a batch, or for at most `most` samples. `give` is called when there are some, or when the buffer has
        ended."""
        raise NotImplementedError

    def withdraw(self) -> None:
        """Pops without an answer get one: NOTHING."""
        raise NotImplementedError
