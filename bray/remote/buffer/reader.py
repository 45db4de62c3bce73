"""The consumer's side of a buffer. All consumers of a process share one reader, so that each gets what was fetched
ahead."""

from __future__ import annotations

import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from bray.errors import BrayError, Ended
from bray.inference.host import Promise
from bray.remote.buffer import messages as m
from bray.remote.buffer.columns import Chunk, join, private
from bray.remote.buffer.messages import ShardState
from bray.remote.buffer.ports import Port
from bray.remote.buffer.settings import BufferSettings
from bray.remote.buffer.stores import split, weigh
from bray.tree import NestedArray

PREFETCH = 2
"""Batches that an iteration keeps ready."""
PAUSE_S = 5.0  # an iteration that pauses this long stops fetching ahead: other consumers may want the samples
_MOST = 4096  # single samples per request

Make = Callable[[], NestedArray]
"""Makes what `pop` returns, in the thread that called it."""

_readers: weakref.WeakSet[Reader] = weakref.WeakSet()
_interrupted: set[int] = set()


def interrupt(thread: int) -> None:
    """Raise Ended in this thread when it waits in `pop`, now or later. The thread calls `forget_interrupt` before it
    ends."""
    _interrupted.add(thread)
    for reader in list(_readers):
        reader.interrupt(thread)


def forget_interrupt() -> None:
    _interrupted.discard(threading.get_ident())


class _Waiter(Promise):
    def __init__(self) -> None:
        super().__init__()
        self.thread = threading.get_ident()


class Reader:
    """Fetched batches, and the callers that wait for one. `run` calls a function where ports may be used: on the io
    loop, or at once."""

    def __init__(self, settings: BufferSettings, ports: Sequence[Port], run: Callable[[Callable[[], None]], None]):
        self._settings, self._ports, self._run = settings, ports, run
        self._lock = threading.RLock()
        self._waiters: deque[_Waiter] = deque()
        self._back: deque[Make] = deque()  # returned by callers that were interrupted
        self._failed: BrayError | None = None
        self._asked_at = 0.0
        self.prefetch = 0
        _readers.add(self)

    def pop(self) -> Make | Promise:
        """The next batch, or a promise of it."""
        self._asked_at = time.monotonic()
        with self._lock:
            make = self._back.popleft() if self._back else self._next()
            if make is None:
                if self._failed is not None:
                    raise self._failed
                promise = _Waiter()
                if promise.thread in _interrupted:
                    raise Ended("the wait was interrupted")
                if not self._waiters:
                    self._begin()
                self._waiters.append(promise)
            low = make is None or self._is_low()
        if low:
            self._run(self._ask)
        return promise if make is None else make

    def tick(self) -> None:
        """Called every second where ports may be used: stop fetching ahead for an iteration that pauses."""
        if time.monotonic() >= self._asked_at + PAUSE_S:
            self.pause()

    def pause(self) -> None:
        """Stop prefetching unless a caller is waiting. The next iteration restarts it."""
        with self._lock:
            if not self.prefetch or self._waiters:
                return
            self.prefetch = 0
        self._run(self._withdraw)

    def give_up(self, promise: Any) -> bool:
        """Stop waiting; False where the result has come meanwhile."""
        with self._lock:
            if promise not in self._waiters:
                return False
            self._waiters.remove(promise)
            withdraw = not self._waiters and not self.prefetch
        if withdraw:
            self._run(self._withdraw)
        return True

    def interrupt(self, thread: int) -> None:
        for promise in [w for w in list(self._waiters) if w.thread == thread]:
            if self.give_up(promise):
                _settle(promise, error=Ended("the wait was interrupted"))
        self.pause()  # what is pushed now is for others

    def put_back(self, make: Make) -> None:
        """Whoever waited for this was interrupted: it goes to the next caller."""
        with self._lock:
            self._back.append(make)
        self._serve()

    def fail(self, error: BrayError, for_good: bool = False) -> None:
        with self._lock:
            waiters, self._waiters = self._waiters, deque()
            self._failed = error if for_good else None
        for promise in waiters:
            _settle(promise, error=error)

    def _serve(self) -> None:
        """Give what is ready to the callers that wait."""
        while True:
            with self._lock:
                if not self._waiters:
                    return
                make = self._back.popleft() if self._back else self._next()
                if make is None:
                    return
                promise = self._waiters.popleft()
            _settle(promise, make)

    def _next(self) -> Make | None:
        raise NotImplementedError

    def _is_low(self) -> bool:
        raise NotImplementedError

    def _ask(self) -> None:
        raise NotImplementedError

    def _begin(self) -> None:
        """The first caller begins to wait."""

    def _withdraw(self) -> None: ...

    def port_up(self, port: Any) -> None:
        if self._waiters or self.prefetch:
            self._ask()

    def port_down(self, port: Any) -> None: ...


def _settle(promise: Promise, result: Any = None, error: BaseException | None = None) -> None:
    if not promise.set_running_or_notify_cancel():
        return
    if error is None:
        promise.set_result(result)
    else:
        promise.set_exception(error)


class QueueReader(Reader):
    """Reads a queue: each batch, or sample, goes to one consumer."""

    def __init__(self, settings: BufferSettings, ports: Sequence[Port], run: Callable[[Callable[[], None]], None]):
        super().__init__(settings, ports, run)
        self._ready: deque[Chunk] = deque()
        self._row = 0  # of the first one in there
        self._asked = dict.fromkeys(ports, 0)
        self._ended: set[Port] = set()  # said so since a caller waits; an earlier end may be outdated by a new source
        self._wait = 0
        self._most = 1
        self._turn = 0

    def _next(self) -> Make | None:
        if not self._ready:
            return None
        chunk = self._ready[0]
        if self._settings.batch_size is not None:
            self._ready.popleft()
            return chunk.batch
        row = self._row
        self._row += 1
        if self._row == chunk.rows:
            self._ready.popleft()
            self._row = 0
        return lambda: chunk.row(row)

    def _is_low(self) -> bool:
        return len(self._ready) < self.prefetch

    def _begin(self) -> None:
        self._ended.clear()
        self._wait += 1

    def _ask(self) -> None:
        with self._lock:
            live = [p for p in self._ports if not p.gone]
            if not live:
                return
            if self._waiters and not self._ready and self._ended.issuperset(live):
                ended = Ended(f"all sources of buffer {self._settings.name!r} have ended, and their samples are read")
                self.fail(ended)
                return
            self._turn += 1
            live = live[self._turn % len(live) :] + live[: self._turn % len(live)]
        for port in live:
            with self._lock:
                wanted = bool(self._waiters) or self._is_low()
                depth = 2 if self.prefetch else 1
                if not wanted or not port.up or port in self._ended or self._asked[port] >= depth:
                    continue
                self._asked[port] += 1
                most, wait = self._most if self.prefetch else 1, self._wait
            port.pop(most, lambda *answer, port=port, most=most, wait=wait: self._got(port, most, wait, *answer))

    def _got(self, port: Port, most: int, wait: int, kind: int, chunk: Chunk | None, facts: ShardState) -> None:
        with self._lock:
            self._asked[port] -= 1
            if kind == m.ENDED:
                if wait == self._wait:
                    self._ended.add(port)
            elif chunk is not None:
                self._ready.append(chunk)
                if chunk.rows >= most and self.prefetch:
                    self._most = min(_MOST, 2 * self._most)
        self._serve()
        if self._waiters or self._is_low():
            self._ask()
        elif not self.prefetch and any(self._asked.values()):
            self._withdraw()

    def _withdraw(self) -> None:
        for port, asked in self._asked.items():
            if asked:
                port.withdraw()


class Sampler(Reader):
    """Draws from all shards as if they were one store: each shard gives rows in proportion to its share of the
    priorities."""

    def __init__(self, settings: BufferSettings, ports: Sequence[Port], run: Callable[[Callable[[], None]], None]):
        super().__init__(settings, ports, run)
        self._rng = np.random.default_rng()
        self._ready: deque[_Draw] = deque()
        self._drawing = 0
        self._known = False  # whether there is something to draw from
        self._looking = False
        self.beta = settings.beta

    def _next(self) -> Make | None:
        return self._ready.popleft().batch if self._ready else None

    def _is_low(self) -> bool:
        return len(self._ready) + self._drawing < self.prefetch

    def _ask(self) -> None:
        while True:
            with self._lock:
                wanted = max(len(self._waiters), self.prefetch)
                if len(self._ready) + self._drawing >= wanted or self._looking:
                    return
                masses = np.array([p.facts.mass if p.up else 0.0 for p in self._ports])
                if self._known and masses.sum() > 0.0:
                    self._drawing += 1
                else:
                    self._looking, self._known = True, False
            if self._looking:
                self._look()
                return
            self._draw(masses)

    def _look(self) -> None:
        """Wait until one of the shards has rows, then ask all of them for their mass."""
        ports = [p for p in self._ports if p.up]
        largest = self._largest()

        def found(kind: int, chunk: Chunk | None, facts: ShardState) -> None:
            with self._lock:
                if self._known or not self._looking or not facts.mass:
                    return
                self._known = True
            left = len(ports)

            def heard(*_: Any) -> None:
                nonlocal left
                with self._lock:
                    left -= 1
                    if left:
                        return
                    self._looking = False
                self._ask()

            for port in ports:
                port.draw(_NOWHERE, False, largest, heard)

        for port in ports:
            port.draw(_NOWHERE, True, largest, found)

    def port_up(self, port: Any) -> None:
        self._look_anew()

    def port_down(self, port: Any) -> None:
        self._look_anew()

    def _look_anew(self) -> None:
        with self._lock:
            self._looking = self._known = False
        self._ask()

    def _largest(self) -> float:
        return max(p.facts.largest for p in self._ports)

    def _draw(self, masses: np.ndarray) -> None:
        assert self._settings.batch_size is not None
        draw = _Draw(masses / masses.sum(), self)
        places = split(masses, self._settings.batch_size, self._rng)
        asked = [(p, at) for p, at in zip(self._ports, places, strict=True) if p.up]
        left, largest = len(asked), self._largest()

        def drawn(port: Port, kind: int, chunk: Chunk | None, facts: ShardState) -> None:
            nonlocal left
            with self._lock:
                left -= 1
                draw.count += facts.rows
                if chunk is not None:
                    draw.pieces.append((port.index, chunk, facts.before))
                if left:
                    return
                self._drawing -= 1
                whole = sum(c.rows for _, c, _ in draw.pieces) == self._settings.batch_size
                if whole:
                    self._ready.append(draw)
                else:  # a shard died, or all its rows have retired
                    self._known = False
            self._serve()
            self._ask()

        for port, at in asked:
            # shards that give no rows are asked too, for their mass
            port.draw(at, bool(len(at)), largest, lambda *answer, port=port: drawn(port, *answer))


_NOWHERE = np.empty(0)


class _Draw:
    """A batch in pieces, one from each shard."""

    def __init__(self, shares: np.ndarray, sampler: Sampler):
        self.shares, self.sampler = shares, sampler
        self.count = 0
        self.pieces: list[tuple[int, Chunk, float]] = []

    def batch(self) -> NestedArray:
        """Put together: the samples, `id` int64[B, 3] (shard, generation, slot) and `weight` float32[B]."""
        chunks = [c for _, c, _ in self.pieces]
        out = (chunks[0] if len(chunks) == 1 else join(chunks, private)).batch()
        shard = np.concatenate([np.full(c.rows, i) for i, c, _ in self.pieces])
        # the probability of a row: that of its shard, times its part of what the shard had when it was drawn
        factor = np.concatenate([np.full(c.rows, self.shares[i] / before) for i, c, before in self.pieces])
        out["id"] = np.column_stack([shard, out["id"]])
        out["weight"] = weigh(out["weight"] * factor, self.count, self.sampler.beta)
        return out
