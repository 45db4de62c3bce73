"""Samples that are on their way to a shard, the receipts that whoever pushed them may wait for, and the shard as its
producers and consumers see it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import threading
import time
from asyncio.events import _get_running_loop
from collections.abc import Callable, Generator, Sequence
from typing import Any

import numpy as np

from bray.remote.buffer.columns import Chunk, Memory
from bray.remote.buffer.slabs import Slab, Slot
from bray.tree.layout import Layout

logger = logging.getLogger("bray.remote")

MOST_IN_FLIGHT = 4
_BATCH_BYTES = 1 << 19  # small samples that travel in one message

_lock = threading.Lock()


def _forked() -> None:
    global _lock
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_forked)


class Pushed:
    """What `push` returns. Await it, or take its `result()`, to know that the samples have arrived; or forget it."""

    __slots__ = ("_batches",)

    def __init__(self, batches: Sequence[Receipt]):
        self._batches = batches

    def __await__(self) -> Generator[Any, None, None]:
        for batch in self._batches:
            if not batch.done and (future := batch.future()) is not None:
                yield from future
            if batch.error is not None:
                raise batch.error

    def result(self, timeout: float | None = None) -> None:
        """Wait in a thread."""
        end = None if timeout is None else time.monotonic() + timeout
        for batch in self._batches:
            if not batch.done and (event := batch.event()) is not None:
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

    def future(self) -> asyncio.Future[None] | None:
        """For a coroutine of any loop; None where it is done."""
        return self._wait(asyncio.get_running_loop().create_future())

    def event(self) -> threading.Event | None:
        """For a thread."""
        return self._wait(threading.Event())

    def _wait(self, waiter: Any) -> Any:
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
