"""The producer's side of a buffer: samples are copied when they are pushed, gathered into batches, and sent as fast as
the shards take them.

Small samples for shards of other processes are gathered until the io loop comes by: at once when it is idle, many
together when it is busy. Large ones are copied straight into shared memory of this process, from where the shard and
its consumers read them. A shard of this process takes all at once, in the thread that pushes.
"""

from __future__ import annotations

import itertools
import logging
import random
import threading
from collections import deque
from collections.abc import Sequence
from operator import itemgetter
from typing import Any
from zlib import crc32

import numpy as np

from bray.cluster import io
from bray.errors import BrayError, DataError, LinkLost, Overloaded
from bray.inference.host import Promise
from bray.remote.buffer import messages as m
from bray.remote.buffer.columns import (
    MOST_IN_FLIGHT,
    AlikeSamples,
    Chunk,
    PendingBatch,
    Port,
    Pushed,
    Receipt,
    read_batch,
    stack,
)
from bray.remote.buffer.options import BufferDefinition
from bray.remote.buffer.slabs import Slab
from bray.tree.layout import Layout, Layouts

logger = logging.getLogger("bray.remote")

MAX_SAMPLES = 4096
MAX_BYTES = 256 << 20


class Writer:
    """Pushes to the shards of a buffer. `push`, `push_batch` and `flush` may be called from any thread. Shards of this
    process (`here`) take samples at once; for others, all else happens on the io loop."""

    def __init__(self, settings: BufferDefinition, ports: Sequence[Port], here: bool):
        self._settings, self._ports, self._here = settings, ports, here
        start = 0 if here else random.randrange(len(ports))  # each producer begins with another shard
        self.order = [*ports[start:], *ports[:start]]
        """Which shard is connected to first, and which next when one dies."""
        self._connections = max(1, -(-len(ports) * settings.density // 100))
        # a large push is spread over the shards, so that it finds the room of all of them
        self._most = max(1, settings.capacity(len(ports) - 1) // 2) if len(ports) > 1 else 1 << 31
        self._layouts, self._alike = Layouts(), AlikeSamples(settings.batch_size)
        self._lock = threading.Lock()
        self._queue: deque[PendingBatch] = deque()
        self._gathering: PendingBatch | None = None  # the last one in the queue, where it takes more rows
        self._rows = self._bytes = 0  # in the queue
        self._sent = 0  # batches without a receipt
        self._sends = itertools.count()
        self._slab: Slab | None = None
        self._scheduled = self._started = False
        self._empty: list[Promise] = []
        self._homes: dict[str, Port] = {}  # source -> the shard that all its samples go to, as long as it lives
        self._gone: BrayError | None = None
        self.dropped = 0
        """Samples that were dropped here because the shards did not keep up, or were lost on the way to one that
        died."""

    # --- any thread ---------------------------------------------------------------------------------------------------

    def push(self, samples: Sequence[Any], drop: bool, source: str = "") -> Pushed:
        """Samples of a `source` come out in the order in which they were pushed."""
        with self._lock:
            self._may_push(drop)
            one = self._add_one_more(samples[0], drop, source) if len(samples) == 1 else None
            read = [self._layouts.read(sample) for sample in samples] if one is None else []
            for layout, _ in read:
                self._alike.check(layout)
        if self._here:
            groups = itertools.groupby(read, key=itemgetter(0))
            return self._push_here([stack(each, [leaves for _, leaves in rows]) for each, rows in groups], drop, source)
        return self._push_all(read, drop, source) if one is None else self._pushed([one], drop)

    def push_batch(self, batch: Any, drop: bool) -> Pushed:
        with self._lock:
            self._may_push(drop)
            chunk = read_batch(batch, self._layouts)
            self._alike.check(chunk.layout)
            small = chunk.layout.row_bytes < m.LARGE and not self._here
            batches = self._gather_rows(chunk, drop) if small else []
        if self._here:
            chunk.columns = [np.array(c, order="C") for c in chunk.columns]
            return self._push_here([chunk], drop)
        if small:
            return self._pushed(batches, drop)
        return self._push_all([(chunk.layout, [c[i, ...] for c in chunk.columns]) for i in range(chunk.rows)], drop)

    def _push_here(self, chunks: list[Chunk], drop: bool, source: str = "") -> Pushed:
        """To shards of this process, in turn: now, and there they wait for room."""
        receipts, most = [], self._most
        for chunk in chunks:
            for first in range(0, chunk.rows, most):
                turn = crc32(source.encode()) if source else next(self._sends)
                receipts.append(Receipt())
                part = chunk.part(first, min(first + most, chunk.rows))
                self._ports[turn % len(self._ports)].push(part, drop, receipts[-1].finish, source)
        return Pushed(receipts)

    def _may_push(self, drop: bool) -> None:
        if self._gone is not None:
            raise self._gone
        if drop:
            return
        rows = self._rows + (sum([p.behind for p in self._ports]) if self._here else 0)
        if rows >= MAX_SAMPLES or self._bytes >= MAX_BYTES:
            raise Overloaded(
                f"{rows} samples wait for room in buffer {self._settings.name!r}, more are not taken. Await the "
                "pushes, so that whoever makes samples waits for whoever uses them, or push with drop=True"
            )

    def _add_one_more(self, sample: Any, drop: bool, source: str) -> PendingBatch | None:
        """The usual case, and the one that has to be quick: one more small sample like the last one."""
        batch = self._gathering
        if batch is None or not batch.takes(batch.layout, drop, source):
            return None
        leaves: list[np.ndarray] = []
        if not batch.layout.read(sample, leaves):
            return None
        batch.add(leaves)
        self._rows += 1
        self._bytes += batch.layout.row_bytes
        return batch

    def _push_all(self, samples: Sequence[tuple[Layout, list[np.ndarray]]], drop: bool, source: str = "") -> Pushed:
        large: dict[int, PendingBatch] = {}
        for i, (layout, leaves) in enumerate(samples):  # copied without the lock: other threads push meanwhile
            if layout.row_bytes >= m.LARGE:
                large[i] = PendingBatch(layout, drop, source, 1)
                large[i].add_large(leaves, self._own_slab().memory)
        batches: list[PendingBatch] = []
        with self._lock:
            if source:
                self._connections = 1
            for i, (layout, leaves) in enumerate(samples):
                if i in large:
                    batch = large[i]
                    self._queue.append(batch)
                    self._gathering = None  # small samples that follow do not overtake it
                else:
                    batch = self._gather(layout, drop, source)
                    batch.add(leaves)
                if not batches or batches[-1] is not batch:
                    batches.append(batch)
                self._rows += 1
                self._bytes += layout.row_bytes
        return self._pushed(batches, drop)

    def _gather(self, layout: Layout, drop: bool, source: str = "") -> PendingBatch:
        """The batch that the next small sample of this layout joins."""
        batch = self._gathering
        if batch is None or not batch.takes(layout, drop, source):
            batch = self._gathering = PendingBatch(layout, drop, source, self._most)
            self._queue.append(batch)
        return batch

    def _gather_rows(self, chunk: Chunk, drop: bool) -> list[PendingBatch]:
        batches, first = [], 0
        while first < chunk.rows:
            batch = self._gather(chunk.layout, drop)
            batches.append(batch)
            end = min(chunk.rows, first + batch.most - batch.rows)
            batch.add_rows(chunk.columns, first, end)
            first = end
        self._rows += chunk.rows
        self._bytes += chunk.nbytes
        return batches

    def _pushed(self, batches: list[PendingBatch], drop: bool) -> Pushed:
        """After the batches have joined the queue: drop what is too much, and tell the io loop."""
        if drop and (self._rows > MAX_SAMPLES or self._bytes > MAX_BYTES):
            self._drop_oldest()
        if not self._scheduled:
            self._scheduled = True
            loop = io.loop()
            (loop.call_soon if io.is_loop() else loop.call_soon_threadsafe)(self._flush)
        return Pushed(batches)

    def _drop_oldest(self) -> None:
        """The shards do not keep up: drop the oldest samples that may be dropped."""
        with self._lock:
            while self._rows > MAX_SAMPLES or self._bytes > MAX_BYTES:
                batch = next((b for b in self._queue if b.drop), None)
                if batch is None:
                    return
                self._remove(batch)
                self.dropped += batch.rows
                batch.finish()

    def _remove(self, batch: PendingBatch) -> None:
        self._queue.remove(batch)  # the first one, or nearly
        if batch is self._gathering:
            self._gathering = None
        self._rows -= batch.rows
        self._bytes -= batch.nbytes

    def flush(self, timeout: float) -> None:
        """Wait until all that was pushed has arrived; what has not after `timeout` is left."""
        promise = Promise()
        with self._lock:
            if not self._queue and not self._sent:
                return
            self._empty.append(promise)
        try:
            promise.result(timeout)
        except TimeoutError:
            logger.warning("buffer %r: %d samples that were pushed have not arrived", self._settings.name, self._rows)

    # --- sending ------------------------------------------------------------------------------------------------------

    def _flush(self) -> None:
        """Send what the shards take."""
        self._scheduled = False
        if not self._started:
            self._start()
        while self._queue:
            with self._lock:
                port = self._port_for(self._queue[0]) if self._queue else None
                if port is None:
                    break
                batch = self._queue[0]
                self._remove(batch)
                self._sent += 1
            port.in_flight += 1
            port.bytes_in_flight += batch.nbytes
            self._send(port, batch)
        self._tell_if_empty()

    def _start(self) -> None:
        self._started = True
        for port in self.order[: self._connections]:  # when one of these dies, `port_down` connects to the next
            port.connect()
        for port in self._ports:
            if port.up:  # for reading
                port.offer(self._own_slab, self._flush)

    def _send(self, port: Port, batch: PendingBatch) -> None:
        port.last_sent = next(self._sends)
        try:
            port.send(batch, lambda error: self._received(port, batch, error))
        except DataError as e:  # too large for a message
            self._received(port, batch, e)

    def _port_for(self, batch: PendingBatch) -> Port | None:
        """Of the shards that take samples now, the one with the least under way; that of its source for a batch that
        has one."""
        ports, source = [p for p in self._ports if p.ready and p.up], batch.source
        if source and ports:
            if self._homes.get(source) not in ports:
                self._homes[source] = ports[crc32(source.encode()) % len(ports)]
            ports = [self._homes[source]]
        free = [p for p in ports if p.in_flight < MOST_IN_FLIGHT]
        return min(free, key=lambda p: (p.bytes_in_flight, p.last_sent), default=None)

    def _received(self, port: Port, batch: PendingBatch, error: BaseException | None) -> None:
        """A receipt, or an error."""
        port.in_flight -= 1
        port.bytes_in_flight -= batch.nbytes
        if isinstance(error, LinkLost):
            self._lost(port, batch)
        else:
            batch.finish(error)
            batch.forget_rows()
        self._sent -= 1
        self._flush()

    def _lost(self, port: Port, batch: PendingBatch) -> None:
        """The shard died before the receipt came: nobody knows whether it had the samples."""
        self._stop_lending(port)
        if batch.drop:
            self.dropped += batch.rows
            batch.finish()
            return
        if batch.slot is not None:
            batch.move(self._own_slab().memory)  # a consumer may use the old one
        with self._lock:  # sent again: twice is better than never
            self._queue.appendleft(batch)
            self._rows += batch.rows
            self._bytes += batch.nbytes

    def _tell_if_empty(self) -> None:
        with self._lock:
            if self._queue or self._sent:
                return
            promises, self._empty = self._empty, []
        for promise in promises:
            promise.set_result(None)

    # --- links --------------------------------------------------------------------------------------------------------

    def _own_slab(self) -> Slab:
        with self._lock:
            if self._slab is None:
                self._slab = Slab()
            return self._slab

    def _stop_lending(self, port: Port) -> None:
        """Consumers may still read what we lent to a shard that died, so that slab is not used any more."""
        if not port.stop_lending():
            return
        self.close()
        for other in self._ports:
            if other.offered and other.up:
                other.offer(self._own_slab, self._flush)

    def port_up(self, port: Port) -> None:
        if self._started:
            port.offer(self._own_slab, self._flush)

    def port_down(self, port: Port) -> None:
        self._stop_lending(port)
        if self._started:
            others = [p for p in self.order if p is not port and not p.gone]
            for other in others[: self._connections]:
                other.connect()
        self._flush()

    def close(self) -> None:
        """Nobody else can map our slab any more; who has mapped it keeps it."""
        with self._lock:
            slab, self._slab = self._slab, None
        if slab is not None:
            slab.close()

    def fail(self, error: BrayError) -> None:
        """No shard will ever come back."""
        with self._lock:
            self._gone = error
            pending, self._queue, self._gathering = list(self._queue), deque(), None
            self._rows = self._bytes = 0
        for batch in pending:
            batch.finish(error)
        self._tell_if_empty()
