"""The producer's side of a buffer: samples are copied when they are pushed, gathered into batches, and sent as fast as
the shards take them.

Small samples are gathered until the io loop comes by: at once when it is idle, many together when it is busy. Large
ones are copied straight into shared memory of this process, from where the shard and its consumers read them.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import random
import threading
from collections import deque
from collections.abc import Sequence
from itertools import groupby
from typing import Any
from zlib import crc32

import msgspec
import numpy as np

from bray.cluster import io
from bray.errors import BrayError, DataError, LinkLost, Overloaded
from bray.inference.host import Promise
from bray.remote.buffer import messages as m
from bray.remote.buffer.columns import Chunk, stack
from bray.remote.buffer.options import BufferDefinition
from bray.remote.buffer.pending import PendingBatch, Pushed, Receipt, SampleCheck
from bray.remote.buffer.ports import LocalPort, RemotePort
from bray.remote.buffer.slabs import Slab, Slot
from bray.remote.buffer.worker import BufferShard
from bray.tree.layout import Layout

logger = logging.getLogger("bray.remote")

MAX_SAMPLES = 4096
MAX_BYTES = 256 << 20
_MAX_IN_FLIGHT = 4  # messages to a shard without a receipt


def _overloaded(name: str, rows: int) -> Overloaded:
    return Overloaded(
        f"{rows} samples wait for room in buffer {name!r}, more are not taken. Await the pushes, "
        "so that whoever makes samples waits for whoever uses them, or push with drop=True"
    )


class LocalWriter:
    """Pushes to shards of this process."""

    def __init__(self, settings: BufferDefinition, ports: list[LocalPort]):
        self._settings, self._ports = settings, ports
        self._check = SampleCheck(settings)
        self._lock = threading.Lock()
        self._next = 0
        self.dropped = 0

    def push(self, samples: Sequence[Any], drop: bool, source: str = "") -> Pushed:
        with self._lock:
            read = self._check.read(samples)
            shards = self._shards(len(samples), drop, source)
        receipts = []
        for i, shard in enumerate(shards):
            for layout, group in groupby(read[i :: len(shards)], key=lambda x: x[0]):
                receipts.append(Receipt())
                shard.push(stack(layout, [leaves for _, leaves in group]), drop, receipts[-1].finish, source)
        return Pushed(receipts)

    def push_batch(self, batch: Any, drop: bool) -> Pushed:
        with self._lock:
            chunk = self._check.read_batch(batch)
            shards = self._shards(chunk.rows, drop)
        receipts = [Receipt() for _ in shards]
        for i, shard in enumerate(shards):
            columns = [np.array(c[i :: len(shards)], order="C") for c in chunk.columns]
            shard.push(Chunk(chunk.layout, columns, len(columns[0])), drop, receipts[i].finish)
        return Pushed(receipts)

    def keep_order(self) -> None:
        """Samples of a source go to one shard; see `_shards`."""

    def _shards(self, samples: int, drop: bool, source: str = "") -> list[BufferShard]:
        """The shards that this many samples go to, in turn. Those of a source go to one, so that they keep their
        order."""
        start, count = self._next, len(self._ports)
        if source:
            start, samples = crc32(source.encode()), 1
        else:
            self._next += samples
        shards = [self._ports[(start + i) % count].shard for i in range(min(count, samples))]
        if not drop and (behind := max((s.behind for s in shards), default=0)) >= MAX_SAMPLES:
            raise _overloaded(self._settings.name, behind)
        return shards

    def flush(self, timeout: float) -> None:
        """Everything that was pushed is in the store, or waits there."""


class _Target:
    """What a writer knows of a shard."""

    def __init__(self, port: RemotePort):
        self.port = port
        self.ready = False
        """Connected, and we know whether it can map our slab."""
        self.slab: Slab | None = None
        """The slab of ours that it has mapped."""
        self.lent: dict[int, Slot] = {}
        """Slots that it uses, or its consumers do."""
        self.in_flight = self.bytes_in_flight = 0
        self.last_sent = 0

    @property
    def load(self) -> tuple[int, int]:
        return self.bytes_in_flight, self.last_sent


class RemoteWriter:
    """Pushes to shards of other processes. `push`, `push_batch` and `flush` may be called from any thread, all else on
    the io loop."""

    def __init__(self, settings: BufferDefinition, ports: list[RemotePort]):
        self._settings = settings
        self._targets = {port: _Target(port) for port in ports}
        start = random.randrange(len(ports))  # each producer begins with another shard
        self.order = [ports[(start + i) % len(ports)] for i in range(len(ports))]
        """Which shard is connected to first, and which next when one dies."""
        self._connections = max(1, -(-len(ports) * settings.density // 100))
        self._check = SampleCheck(settings)
        self._lock = threading.Lock()
        self._queue: deque[PendingBatch] = deque()
        self._gathering: PendingBatch | None = None  # the last one in the queue, where it takes more rows
        self._rows = self._bytes = 0  # in the queue
        self._sent: set[PendingBatch] = set()
        self._slab: Slab | None = None
        self._numbers = itertools.count(1)
        self._scheduled = self._started = False
        self._empty: list[Promise] = []
        self._in_order = False
        self._only: _Target | None = None
        self._gone: BrayError | None = None
        self.dropped = 0
        """Samples that were dropped here because the shards did not keep up, or were lost on the way to one that
        died."""

    # --- any thread ---------------------------------------------------------------------------------------------------

    def keep_order(self) -> None:
        """From now on all samples go to one shard, as long as it lives: they come out in the order in which they were
        pushed."""
        self._in_order, self._connections = True, 1

    def push(self, samples: Sequence[Any], drop: bool, source: str = "") -> Pushed:
        with self._lock:
            self._may_push(drop)
            if len(samples) == 1 and (batch := self._add_one_more(samples[0], drop)) is not None:
                return self._pushed([batch], drop)
            read = self._check.read(samples)
        return self._push_all(read, drop)

    def push_batch(self, batch: Any, drop: bool) -> Pushed:
        with self._lock:
            self._may_push(drop)
            chunk = self._check.read_batch(batch)
            if chunk.layout.row_bytes < m.LARGE:
                return self._pushed(self._gather_rows(chunk, drop), drop)
        rows = [(chunk.layout, [c[i, ...] for c in chunk.columns]) for i in range(chunk.rows)]
        return self._push_all(rows, drop)

    def _may_push(self, drop: bool) -> None:
        if self._gone is not None:
            raise self._gone
        if not drop and (self._rows >= MAX_SAMPLES or self._bytes >= MAX_BYTES):
            raise _overloaded(self._settings.name, self._rows)

    def _pushed(self, batches: list[PendingBatch], drop: bool) -> Pushed:
        """After the batches have joined the queue: drop what is too much, and tell the io loop."""
        if drop:
            self._drop_oldest()
        if not self._scheduled:
            self._scheduled = True
            loop = io.loop()
            (loop.call_soon if io.is_loop() else loop.call_soon_threadsafe)(self._flush)
        return Pushed(batches)

    def _add_one_more(self, sample: Any, drop: bool) -> PendingBatch | None:
        """The usual case, and the one that has to be quick: one more small sample like the last one."""
        batch = self._gathering
        if batch is None or batch.drop is not drop or batch.rows >= batch.most:
            return None
        leaves: list[np.ndarray] = []
        layout = batch.layout
        if not layout.read(sample, leaves):
            return None
        batch.add(leaves)
        self._rows += 1
        self._bytes += layout.row_bytes
        return batch

    def _push_all(self, samples: Sequence[tuple[Layout, list[np.ndarray]]], drop: bool) -> Pushed:
        large: dict[int, PendingBatch] = {}
        for i, (layout, leaves) in enumerate(samples):  # copied without the lock: other threads push meanwhile
            if layout.row_bytes >= m.LARGE:
                large[i] = PendingBatch(layout, drop)
                large[i].add_large(leaves, self._memory())
        batches: list[PendingBatch] = []
        with self._lock:
            for i, (layout, leaves) in enumerate(samples):
                if i in large:
                    batch = large[i]
                    self._queue.append(batch)
                    self._gathering = None  # small samples that follow do not overtake it
                else:
                    batch = self._gather(layout, drop)
                    batch.add(leaves)
                if not batches or batches[-1] is not batch:
                    batches.append(batch)
                self._rows += 1
                self._bytes += layout.row_bytes
            return self._pushed(batches, drop)

    def _gather(self, layout: Layout, drop: bool) -> PendingBatch:
        """The batch that the next small sample of this layout joins."""
        batch = self._gathering
        if batch is None or batch.layout is not layout or batch.drop is not drop or batch.rows >= batch.most:
            batch = self._gathering = PendingBatch(layout, drop)
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

    def _drop_oldest(self) -> None:
        """The shards do not keep up: drop the oldest samples that may be dropped."""
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

    def _memory(self) -> Slab:
        with self._lock:
            if self._slab is None:
                self._slab = Slab()
            return self._slab

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

    # --- the io loop --------------------------------------------------------------------------------------------------

    def _flush(self) -> None:
        """Send what the shards take, each batch to the one with the least in flight."""
        if not self._started:
            self._started = True
            for port in self.order[: self._connections]:  # when one of these dies, `port_down` connects to the next
                port.connect()
            for target in self._targets.values():
                if target.port.up:  # for reading
                    self._offer_slab(target)
        self._scheduled = False
        while self._queue:
            free = [t for t in self._open_targets() if t.in_flight < _MAX_IN_FLIGHT]
            if not free:
                return
            with self._lock:
                if not self._queue:  # all dropped just now
                    break
                batch = self._queue[0]
                self._remove(batch)
                self._sent.add(batch)
            self._send(min(free, key=lambda t: t.load), batch)
        self._tell_if_empty()

    def _open_targets(self) -> list[_Target]:
        """The shards that samples may go to now."""
        targets = [t for t in self._targets.values() if t.ready and t.port.up]
        if not self._in_order or not targets:
            return targets
        if self._only not in targets:
            self._only = targets[0]
        return [self._only]

    def _send(self, target: _Target, batch: PendingBatch) -> None:
        link, slab, layout = target.port.link, target.slab, batch.layout
        try:
            if slab is not None and batch.slot is None and batch.nbytes >= m.LARGE:
                batch.move(slab)
            number = next(self._numbers)
            if (slot := batch.slot) is not None and slot.memory is slab:
                head = m.lent(layout, batch.rows, batch.drop, number, slot.offset, slot.size)
                target.lent[number] = slot
                future = link.request(m.LENT, head)
            else:
                head = m.push_head(layout, batch.rows, batch.drop)
                future = link.request(m.PUSH, head, *batch.pieces())
        except DataError as e:  # too large for a message
            self._sent.discard(batch)
            batch.finish(e)
            return
        target.in_flight += 1
        target.bytes_in_flight += batch.nbytes
        target.last_sent = number
        future.add_done_callback(lambda f: self._received(target, batch, f))

    def _received(self, target: _Target, batch: PendingBatch, future: asyncio.Future[memoryview]) -> None:
        """A receipt, or an error."""
        target.in_flight -= 1
        target.bytes_in_flight -= batch.nbytes
        error = future.exception()
        if isinstance(error, LinkLost):
            self._lost(target, batch)
        else:
            self._sent.discard(batch)
            if error is None:
                target.port.waiting, target.port.others_push = m.read_receipt(future.result())
            batch.finish(error)
            batch.forget_rows()
        self._flush()

    def _lost(self, target: _Target, batch: PendingBatch) -> None:
        """The shard died before the receipt came: nobody knows whether it had the samples."""
        self._disconnected(target)
        if batch.drop:
            self.dropped += batch.rows
            self._sent.discard(batch)
            batch.finish()
            return
        if batch.slot is not None:
            batch.move(self._memory())  # a consumer may use the old one
        with self._lock:  # sent again: twice is better than never
            self._sent.discard(batch)
            self._queue.appendleft(batch)
            self._rows += batch.rows
            self._bytes += batch.nbytes

    # --- shared memory ------------------------------------------------------------------------------------------------

    def _offer_slab(self, target: _Target) -> None:
        """Ask a shard whether it can map our slab."""
        slab = self._memory()

        def answered(future: asyncio.Future[memoryview]) -> None:
            if not isinstance(future.exception(), LinkLost) and slab is self._slab:
                seen = future.exception() is None and future.result() == m.SEEN
                target.ready, target.slab = True, slab if seen else None
            self._flush()

        target.port.link.request(m.SLAB, msgspec.msgpack.encode(slab.address)).add_done_callback(answered)

    def _disconnected(self, target: _Target) -> None:
        """Consumers may still read what we lent to a shard that died, so that slab is not used any more."""
        lent, target.lent = target.lent, {}
        target.ready, target.slab = False, None
        if not lent:
            return
        self.close()
        for other in self._targets.values():
            other.slab = None
            if other.ready and other.port.up:
                self._offer_slab(other)

    def port_freed(self, port: RemotePort, loans: list[int]) -> None:
        for number in loans:
            self._targets[port].lent.pop(number, None)

    def close(self) -> None:
        """Nobody else can map our slab any more; who has mapped it keeps it."""
        with self._lock:
            slab, self._slab = self._slab, None
        if slab is not None:
            slab.close()

    # --- ports --------------------------------------------------------------------------------------------------------

    def port_up(self, port: RemotePort) -> None:
        if self._started:
            self._offer_slab(self._targets[port])

    def port_down(self, port: RemotePort) -> None:
        self._disconnected(self._targets[port])
        if self._started:
            others = [p for p in self.order if p is not port and not p.gone]
            for other in others[: self._connections]:
                other.connect()
        self._flush()

    def fail(self, error: BrayError) -> None:
        """No shard will ever come back."""
        with self._lock:
            self._gone = error
            pending, self._queue, self._gathering = list(self._queue), deque(), None
            self._rows = self._bytes = 0
        for batch in pending:
            batch.finish(error)
        self._tell_if_empty()

    def _tell_if_empty(self) -> None:
        with self._lock:
            if self._queue or self._sent:
                return
            promises, self._empty = self._empty, []
        for promise in promises:
            promise.set_result(None)
