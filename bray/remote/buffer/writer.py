"""The producer's side of a buffer: samples are copied when they are pushed, gathered in columns, and sent when the shards keep up.

Small samples wait in columns until the io loop comes by, which is at once when there is nothing else to do, and together when there is.
Large ones are written straight into a slot of a shard's slab. A producer holds a few slots, and gets the next one with the receipt for
the last.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import threading
import time
from asyncio.events import _get_running_loop
from collections import deque
from collections.abc import Generator, Sequence
from itertools import groupby
from typing import Any

import numpy as np

from bray.cluster import io
from bray.errors import BrayError, DataError, LinkLost, Overloaded
from bray.inference.host import Promise
from bray.remote.buffer import messages as m
from bray.remote.buffer.columns import Chunk, Layout, Layouts, stack
from bray.remote.buffer.ports import LocalPort, RemotePort
from bray.remote.buffer.slabs import Window
from bray.remote.buffer.worker import BufferShard, Settings

logger = logging.getLogger("bray.remote")

MAX_SAMPLES = 4096
MAX_BYTES = 256 << 20
_TOGETHER = 1 << 19  # bytes of small samples that travel in one message
_UNDER_WAY = 4  # messages on a link that have no receipt yet
_SLOTS = 4  # slots a producer has of a shard, those under way among them
_IDLE = 5.0  # slots that were not used for so long are given back

_lock = threading.Lock()


class Pushed:
    """What `push` returns. Await it, or take its `result()`, to know that the samples have arrived; or forget it."""

    __slots__ = ("_parts",)

    def __init__(self, parts: Sequence[Part]):
        self._parts = parts

    def __await__(self) -> Generator[Any, None, None]:
        for part in self._parts:
            if not part.done and (future := part.future()) is not None:
                yield from future
            if part.error is not None:
                raise part.error

    def result(self, timeout: float | None = None) -> None:
        """Wait in a thread."""
        end = None if timeout is None else time.monotonic() + timeout
        for part in self._parts:
            if not part.done and (event := part.event()) is not None:
                left = None if end is None else max(0.0, end - time.monotonic())
                if not event.wait(left):
                    raise TimeoutError(f"samples that were pushed have not arrived in {timeout:g} s")
            if part.error is not None:
                raise part.error

    def done(self) -> bool:
        return all(part.done for part in self._parts)


class Part:
    """Samples that arrive, or fail, together. Those of many callers may be among them, so each waits with a future of its own."""

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
            with contextlib.suppress(RuntimeError):  # that loop has ended, and who waited with it
                loop.call_soon_threadsafe(_wake, futures)


def _wake(futures: list[asyncio.Future[None]]) -> None:
    for future in futures:
        if not future.done():
            future.set_result(None)


def overloaded(name: str, rows: int) -> Overloaded:
    return Overloaded(
        f"{rows} samples wait for room in buffer {name!r}, more are not taken. Await the pushes, "
        "so that whoever makes samples waits for whoever uses them, or push with drop=True"
    )


class _Check:
    """Samples of one buffer that are to share a batch look alike: said at once, not when the shard finds out."""

    def __init__(self, settings: Settings):
        self.layouts = Layouts()
        self._batched = settings.batch_size is not None
        self._first: Layout | None = None

    def read(self, samples: Sequence[Any]) -> list[tuple[Layout, list[np.ndarray]]]:
        read = self.layouts.read
        out = [read(sample) for sample in samples]
        if self._batched:
            for layout, _ in out:
                self._compare(layout)
        return out

    def read_batch(self, batch: Any) -> Chunk:
        chunk = self.layouts.read_batch(batch)
        if self._batched:
            self._compare(chunk.layout)
        return chunk

    def _compare(self, layout: Layout) -> None:
        if self._first is None:
            self._first = layout
        elif layout is not self._first and (different := self._first.differs(layout)):
            raise DataError(f"samples that share a batch have the same keys and shapes; {different}")


class LocalWriter:
    """Pushes to shards of this process."""

    def __init__(self, settings: Settings, ports: list[LocalPort]):
        self._settings, self._ports = settings, ports
        self._check = _Check(settings)
        self._lock = threading.Lock()
        self._next = 0
        self.dropped = 0

    def push(self, samples: Sequence[Any], drop: bool, source: str = "") -> Pushed:
        with self._lock:
            read = self._check.read(samples)
            shards = self._shards(len(samples), drop)
        parts = []
        for i, shard in enumerate(shards):
            for layout, group in groupby(read[i :: len(shards)], key=lambda x: x[0]):
                part = Part()
                parts.append(part)
                shard.push(stack(layout, [leaves for _, leaves in group]), drop, part.finish, source)
        return Pushed(parts)

    def push_batch(self, batch: Any, drop: bool) -> Pushed:
        with self._lock:
            chunk = self._check.read_batch(batch)
            shards = self._shards(chunk.rows, drop)
        parts = []
        for i, shard in enumerate(shards):
            part = Part()
            parts.append(part)
            columns = [np.array(c[i :: len(shards)], order="C") for c in chunk.columns]
            shard.push(Chunk(chunk.layout, columns, len(columns[0])), drop, part.finish, "")
        return Pushed(parts)

    def _shards(self, samples: int, drop: bool) -> list[BufferShard]:
        """Where so many samples go, in turn."""
        start, count = self._next, len(self._ports)
        self._next += samples
        shards = [self._ports[(start + i) % count].shard for i in range(min(count, samples))]
        if not drop and (behind := max((s.behind for s in shards), default=0)) >= MAX_SAMPLES:
            raise overloaded(self._settings.name, behind)
        return shards

    def flush(self, timeout: float) -> None:
        """All that was pushed is in, or waits for room there."""


class _Rows(Part):
    """Small samples of one layout, in columns."""

    __slots__ = ("_adds", "columns", "drop", "layout", "most", "rows")
    ready = True
    port = window = None
    offset = 0

    def __init__(self, layout: Layout, drop: bool):
        super().__init__()
        self.layout, self.drop, self.rows = layout, drop, 0
        self.most = max(1, _TOGETHER // max(1, layout.row_bytes))
        self.columns: list[list[bytes]] = [[] for _ in layout.sizes]
        self._adds = [c.append for c in self.columns]

    def add(self, leaves: list[np.ndarray]) -> None:
        for add, leaf in zip(self._adds, leaves):  # noqa: B905 (twice as fast)
            add(leaf.tobytes())
        self.rows += 1

    def add_rows(self, columns: list[np.ndarray], first: int, end: int) -> None:
        for add, column in zip(self._adds, columns, strict=True):
            add(column[first:end].tobytes())
        self.rows += end - first

    @property
    def nbytes(self) -> int:
        return self.rows * self.layout.row_bytes

    def pieces(self) -> list[bytes]:
        out = []
        for column in self.columns:
            data = b"".join(column)
            out.append(data)
            if pad := -len(data) % 64:
                out.append(bytes(pad))
        return out

    def forget(self) -> None:
        """Whoever keeps the receipt does not keep the samples."""
        self.columns, self._adds = [], []

    def write(self, memory: np.ndarray) -> None:
        starts, _ = self.layout.offsets(self.rows)
        for at, column in zip(starts, self.columns, strict=True):
            data = b"".join(column)
            memory[at : at + len(data)] = np.frombuffer(data, np.uint8)


class _Large(Part):
    """One large sample: in a slot of a shard's slab, or in memory of its own until there is one."""

    __slots__ = ("drop", "layout", "memory", "nbytes", "offset", "port", "ready", "window")
    rows = 1

    def __init__(self, layout: Layout, drop: bool):
        super().__init__()
        self.layout, self.drop = layout, drop
        self.nbytes = layout.offsets(1)[1]
        self.ready = False  # written
        self.port: RemotePort | None = None
        self.window: Window | None = None  # of the port at the time: the slot is one of that slab
        self.offset = 0
        self.memory: np.ndarray | None = None

    def fill(self, leaves: list[np.ndarray]) -> None:
        """Copy the sample to where it belongs; in the thread that pushes."""
        if self.window is not None:
            memory = self.window.data(self.offset, self.nbytes)
        else:
            memory = self.memory = np.empty(self.nbytes, np.uint8)
        for column, leaf in zip(self.layout.columns(memory, 1), leaves, strict=True):
            np.copyto(column[0, ...], leaf)
        self.ready = True

    def rescue(self) -> None:
        """The shard is gone, but not what we wrote: its memory is there as long as someone looks at it."""
        assert self.window is not None
        self.memory = np.array(self.window.data(self.offset, self.nbytes))
        self.port = self.window = None

    def pieces(self) -> list[Any]:
        return [memoryview(self.memory)]  # type: ignore[arg-type]

    def forget(self) -> None:
        self.memory = self.window = None

    def write(self, memory: np.ndarray) -> None:
        memory[: self.nbytes] = self.memory


class _Target:
    """What a writer knows of a shard."""

    def __init__(self, port: RemotePort):
        self.port = port
        self.slots: list[tuple[int, int]] = []  # (size, offset) that may be written
        self.lent = 0  # slots that hold samples without a receipt
        self.asked = False
        self.under_way = self.bytes_under_way = 0
        self.turn = 0  # when it was sent something last
        self.used = False

    @property
    def load(self) -> tuple[int, int]:
        return self.bytes_under_way, self.turn

    def find(self, nbytes: int) -> int | None:
        """A slot of ours that is large enough, the smallest such."""
        fitting = [s for s in self.slots if s[0] >= nbytes]
        if not fitting:
            return None
        slot = min(fitting)
        self.slots.remove(slot)
        self.lent += 1
        self.used = True
        return slot[1]


class RemoteWriter:
    """Pushes to shards of other processes. `push` may be called from any thread, the rest runs on the io loop."""

    def __init__(self, settings: Settings, ports: list[RemotePort]):
        self._settings = settings
        self._targets = {port: _Target(port) for port in ports}
        start = random.randrange(len(ports))  # each producer begins at another place
        self._order = [ports[(start + i) % len(ports)] for i in range(len(ports))]
        self._connections = max(1, -(-len(ports) * settings.density // 100))
        self._check = _Check(settings)
        self._lock = threading.Lock()
        self._pending: deque[_Rows | _Large] = deque()
        self._filling: _Rows | None = None  # the last one in there, where it takes more
        self._private = 0  # large samples in there that have no slot yet
        self._rows = self._bytes = self._turn = 0
        self._scheduled = self._started = self._tidying = False
        self._empty: list[Promise] = []
        self._gone: BrayError | None = None
        self._under_way: set[Any] = set()
        self.dropped = 0
        """Samples that were dropped here, because the shards did not keep up, or were lost on the way to one that died."""

    # --- any thread ---------------------------------------------------------------------------------------------------

    def push(self, samples: Sequence[Any], drop: bool, source: str = "") -> Pushed:
        copies: list[tuple[_Large, list[np.ndarray]]] = []
        with self._lock:
            self._may_push(drop)
            pushed = self._push_one(samples[0], drop) if len(samples) == 1 else None
            if pushed is None:
                pushed = Pushed(self._push_all(self._check.read(samples), drop, copies))
            wake = self._pushed(drop)
        self._copy(copies, wake)
        return pushed

    def push_batch(self, batch: Any, drop: bool) -> Pushed:
        copies: list[tuple[_Large, list[np.ndarray]]] = []
        with self._lock:
            self._may_push(drop)
            chunk = self._check.read_batch(batch)
            if chunk.layout.row_bytes < m.LARGE:
                parts: list[Any] = self._push_rows(chunk, drop)
            else:
                rows = [(chunk.layout, [c[i, ...] for c in chunk.columns]) for i in range(chunk.rows)]
                parts = self._push_all(rows, drop, copies)
            wake = self._pushed(drop)
        self._copy(copies, wake)
        return Pushed(parts)

    def _may_push(self, drop: bool) -> None:
        if self._gone is not None:
            raise self._gone
        if not drop and (self._rows >= MAX_SAMPLES or self._bytes >= MAX_BYTES):
            raise overloaded(self._settings.name, self._rows)

    def _pushed(self, drop: bool) -> bool:
        """After samples have joined those that wait; whether the io loop does not know yet."""
        if drop and (self._rows > MAX_SAMPLES or self._bytes > MAX_BYTES):
            self._drop_oldest()
        wake = not self._scheduled
        self._scheduled = True
        return wake

    def _copy(self, copies: list[tuple[_Large, list[np.ndarray]]], wake: bool) -> None:
        try:
            for large, leaves in copies:  # without the lock: others push meanwhile
                large.fill(leaves)
        except BaseException as e:  # no memory
            for large, _ in copies:
                large.finish(e)
                large.ready = True
            raise
        finally:
            if wake or copies:
                self._wake()

    def _wake(self) -> None:
        if io.is_loop():
            io.loop().call_soon(self._flush)
        else:
            io.loop().call_soon_threadsafe(self._flush)

    def _push_one(self, sample: Any, drop: bool) -> Pushed | None:
        """The usual case, and the one that has to be quick: one more small sample like the last."""
        part = self._filling
        if part is None or part.drop is not drop or part.rows >= part.most:
            return None
        leaves: list[np.ndarray] = []
        layout = part.layout
        if not layout.read(sample, leaves):
            return None
        part.add(leaves)
        self._rows += 1
        self._bytes += layout.row_bytes
        return Pushed((part,))

    def _rows_of(self, layout: Layout, drop: bool) -> _Rows:
        """Where small samples of this layout are gathered."""
        part = self._filling
        if part is None or part.layout is not layout or part.drop is not drop or part.rows >= part.most:
            part = self._filling = _Rows(layout, drop)
            self._pending.append(part)
        return part

    def _push_rows(self, chunk: Chunk, drop: bool) -> list[_Rows]:
        parts, first = [], 0
        while first < chunk.rows:
            part = self._rows_of(chunk.layout, drop)
            parts.append(part)
            end = min(chunk.rows, first + part.most - part.rows)
            part.add_rows(chunk.columns, first, end)
            first = end
        self._rows += chunk.rows
        self._bytes += chunk.nbytes
        return parts

    def _push_all(
        self,
        samples: Sequence[tuple[Layout, list[np.ndarray]]],
        drop: bool,
        copies: list[tuple[_Large, list[np.ndarray]]],
    ) -> list[_Rows | _Large]:
        parts: list[_Rows | _Large] = []
        for layout, leaves in samples:
            if layout.row_bytes < m.LARGE:
                part = self._rows_of(layout, drop)
                part.add(leaves)
                if not parts or parts[-1] is not part:
                    parts.append(part)
            else:
                large = self._large_for(layout, drop)
                parts.append(large)
                copies.append((large, leaves))
            self._rows += 1
            self._bytes += layout.row_bytes
        return parts

    def _large_for(self, layout: Layout, drop: bool) -> _Large:
        part = _Large(layout, drop)
        if not self._private:  # else it would overtake those
            for target in sorted((t for t in self._targets.values() if t.port.up), key=lambda t: t.load):
                window = target.port.window
                if window is not None and (offset := target.find(part.nbytes)) is not None:
                    part.port, part.window, part.offset = target.port, window, offset
                    self._turn += 1
                    target.turn = self._turn
                    break
                if not target.slots and not target.lent:
                    break  # it is this one's turn, and it will be asked for slots
        self._private += part.window is None
        self._pending.append(part)
        self._filling = None  # small samples that follow do not overtake it
        return part

    def _drop_oldest(self) -> None:
        """Forget the oldest samples that may be: the shards do not keep up."""
        while self._rows > MAX_SAMPLES or self._bytes > MAX_BYTES:
            for part in self._pending:
                if part.drop and part.ready and part.window is None:
                    break
            else:
                return
            self._remove(part)
            self.dropped += part.rows
            part.finish()

    def _remove(self, part: _Rows | _Large) -> None:
        self._pending.remove(part)  # the first one, or nearly
        if part is self._filling:
            self._filling = None
        self._rows -= part.rows
        self._bytes -= part.rows * part.layout.row_bytes
        self._private -= type(part) is _Large and part.window is None

    def flush(self, timeout: float) -> None:
        """Wait until all that was pushed has arrived; what cannot in this time is left."""
        promise = Promise()
        with self._lock:
            if not self._pending and not self._under_way:
                return
            self._empty.append(promise)
        try:
            promise.result(timeout)
        except TimeoutError:
            logger.warning("buffer %r: %d samples that were pushed have not arrived", self._settings.name, self._rows)

    # --- the io loop --------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Connect to as many shards as the density says; when one is gone, `port_down` connects to the next."""
        self._started = True
        for port in self._order[: self._connections]:
            port.connect()

    def _flush(self) -> None:
        if not self._started:
            self.start()
        self._scheduled = False
        while True:
            with self._lock:
                if not self._pending:
                    break
                part = self._pending[0]
                if not part.ready:
                    break
                if part.done:  # it could not be copied
                    self._remove(part)
                    continue
                if isinstance(part, _Large) and part.port is not None and part.window is not part.port.window:
                    part.rescue()
                    self._private += 1
                target = self._choose(part)
                if target is None:
                    break
                offset: int | None = None if part.window is None else part.offset
                if offset is None and target.port.window is not None and part.nbytes >= m.LARGE:
                    offset = target.find(self._memory(part))
                    if offset is None:
                        self._ask_slots(target, self._memory(part))
                        break
                self._remove(part)
            try:
                self._send(target, part, offset)
            except DataError as e:  # too large for a message
                part.finish(e)
        self._is_empty()

    @staticmethod
    def _memory(part: _Rows | _Large) -> int:
        return part.layout.offsets(part.rows)[1]

    def _choose(self, part: _Rows | _Large) -> _Target | None:
        """The shard with the least under way that takes more; a sample that lies in a slot goes there."""
        if part.port is not None:
            return self._targets[part.port]
        free = [t for t in self._targets.values() if t.port.up and t.under_way < _UNDER_WAY]
        return min(free, key=lambda t: t.load) if free else None

    def _send(self, target: _Target, part: _Rows | _Large, offset: int | None) -> None:
        port, layout = target.port, part.layout
        if offset is not None:
            if part.window is None:
                part.write(port.window.data(offset, self._memory(part)))  # type: ignore[union-attr]
            more = len(target.slots) + target.lent <= _SLOTS
            head = m.written(layout, part.rows, part.drop, offset, self._memory(part) if more else 0)
            future = port.link.request(m.WRITTEN, head)
        else:
            future = port.link.request(m.PUSH, m.push_head(layout, part.rows, part.drop), *part.pieces())
        nbytes = part.nbytes
        self._turn += 1
        target.turn = self._turn
        target.under_way += 1
        target.bytes_under_way += nbytes
        self._under_way.add(part)
        window = port.window
        future.add_done_callback(lambda f: self._received(target, part, nbytes, offset, window, f))

    def _received(
        self,
        target: _Target,
        part: _Rows | _Large,
        nbytes: int,
        offset: int | None,
        window: Window | None,
        future: asyncio.Future[memoryview],
    ) -> None:
        self._under_way.discard(part)
        target.under_way -= 1
        target.bytes_under_way -= nbytes
        current = target.port.window is window
        if offset is not None and current:
            with self._lock:
                target.lent -= 1
        error = future.exception()
        if isinstance(error, LinkLost):
            self._lost(part)
        else:
            if error is None:
                target.port.facts.waiting, target.port.others_push, following, size = m.read_ack(future.result())
                if following >= 0 and current:
                    with self._lock:
                        target.slots.append((size, following))
                    self._tidy_later()
            part.finish(error)
            part.forget()
        self._flush()

    def _lost(self, part: _Rows | _Large) -> None:
        """The shard died before the receipt came: whether it had the samples, nobody knows."""
        if part.drop:
            self.dropped += part.rows
            part.finish()
            return
        with self._lock:  # twice is better than never
            if isinstance(part, _Large) and part.window is not None:
                part.rescue()
            self._pending.appendleft(part)
            self._rows += part.rows
            self._bytes += part.rows * part.layout.row_bytes
            self._private += type(part) is _Large

    # --- slots --------------------------------------------------------------------------------------------------------

    def _ask_slots(self, target: _Target, nbytes: int) -> None:
        if target.asked or target.lent >= _SLOTS:  # one comes with each receipt
            return
        target.asked = True
        window = target.port.window
        body = m.pack_numbers(np.array([nbytes, 2], np.int64))

        def granted(future: asyncio.Future[memoryview]) -> None:
            target.asked = False
            if future.exception() is None and target.port.window is window:
                slots = np.frombuffer(future.result(), np.int64).reshape(-1, 2)
                with self._lock:
                    target.slots += [(int(size), int(offset)) for offset, size in slots]
                    target.used = True
                self._tidy_later()
            self._flush()

        target.port.link.request(m.SLOTS, body).add_done_callback(granted)

    def _tidy_later(self) -> None:
        if not self._tidying:
            self._tidying = True
            io.loop().call_later(_IDLE, self._tidy)

    def _tidy(self) -> None:
        """Give back slots that nobody wrote to for a while."""
        self._tidying = False
        again = False
        for target in self._targets.values():
            with self._lock:
                slots, idle, target.used = target.slots, not target.used, False
                if idle:
                    target.slots = []
            if idle and slots and target.port.up:
                target.port.link.post(m.RETURN, m.pack_numbers(np.array([o for _, o in slots], np.int64)))
            again |= bool(target.slots)
        if again:
            self._tidy_later()

    # --- ports --------------------------------------------------------------------------------------------------------

    def port_up(self, port: RemotePort) -> None:
        self._flush()

    def port_down(self, port: RemotePort) -> None:
        target = self._targets[port]
        with self._lock:
            target.slots, target.lent, target.asked = [], 0, False
        if self._started:
            others = [p for p in self._order if p is not port and not p.gone]
            for other in others[: self._connections]:
                other.connect()
        self._flush()

    def fail(self, error: BrayError) -> None:
        """No shard will ever come back."""
        with self._lock:
            self._gone = error
            pending, self._pending, self._filling = list(self._pending), deque(), None
            self._rows = self._bytes = self._private = 0
        for part in pending:
            part.finish(error)
        self._is_empty()

    def _is_empty(self) -> None:
        with self._lock:
            if self._pending or self._under_way:
                return
            promises, self._empty = self._empty, []
        for promise in promises:
            promise.set_result(None)
