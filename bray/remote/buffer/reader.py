"""The consumer's side of a buffer. All consumers of a process share one reader, so that each gets what was fetched
ahead."""

from __future__ import annotations

import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from bray.errors import BrayError, Ended
from bray.inference.host import Promise
from bray.remote.buffer import messages as m
from bray.remote.buffer.columns import Chunk, Port, join, private
from bray.remote.buffer.options import BufferDefinition
from bray.tree import NestedArray

PREFETCH = 2
"""Batches that an iteration keeps ready."""
PAUSE_S = 5.0  # an iteration that pauses this long stops fetching ahead: other consumers may want the samples
_MOST = 4096  # single samples per request

Make = Callable[[], NestedArray]
"""Makes what `pop` returns, in the thread that called it."""

_readers: weakref.WeakSet[BufferReader] = weakref.WeakSet()
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


class BufferReader:
    """Fetched batches (or samples), each for one consumer, and the callers that wait for one. `run` calls a function
    where ports may be used: on the io loop, or at once. `later` does so there after a moment."""

    def __init__(
        self,
        settings: BufferDefinition,
        ports: Sequence[Port],
        run: Callable[[Callable[[], None]], None],
        later: Callable[[Callable[[], None]], Any],
    ):
        self._settings, self._ports, self._run, self._later = settings, ports, run, later
        self._lock = threading.RLock()
        self._waiters: deque[_Waiter] = deque()
        self._back: deque[Make] = deque()  # returned by callers that were interrupted
        self._failed: BrayError | None = None
        self._asked_at = 0.0
        self.prefetch = 0
        self._ready: deque[Chunk] = deque()
        self._row = 0  # of the first one in there
        self._asked = dict.fromkeys(ports, 0)
        self._ended: set[Port] = set()  # said so since a caller waits; an earlier end may be outdated by a new source
        self._wait = 0
        self._most = 1
        self._turn = 0
        _readers.add(self)

    # --- callers, in any thread ---------------------------------------------------------------------------------------

    def pop(self) -> Make | Promise:
        """The next batch, or a promise of it."""
        self._asked_at = time.monotonic()
        with self._lock:
            make = self._next()
            if make is None:
                if self._failed is not None:
                    raise self._failed
                promise = _Waiter()
                if promise.thread in _interrupted:
                    raise Ended("the wait was interrupted")
                if not self._waiters:
                    self._ended.clear()
                    self._wait += 1
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

    def leave(self, promise: Promise) -> None:
        """The caller was interrupted (Ctrl-C, a cancelled task): what came for it goes to the next one."""
        if not self.give_up(promise) and promise.done() and promise.exception() is None:
            with self._lock:
                self._back.append(promise.result())
            self._serve()

    def interrupt(self, thread: int) -> None:
        for promise in [w for w in list(self._waiters) if w.thread == thread]:
            if self.give_up(promise):
                promise.settle(error=Ended("the wait was interrupted"))
        self.pause()  # what is pushed now is for others

    def fail(self, error: BrayError, for_good: bool = False) -> None:
        with self._lock:
            waiters, self._waiters = self._waiters, deque()
            self._failed = error if for_good else None
        for promise in waiters:
            promise.settle(error=error)

    # --- fetching -----------------------------------------------------------------------------------------------------

    def _next(self) -> Make | None:
        if self._back:
            return self._back.popleft()
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

    def _serve(self) -> None:
        """Give what is ready to the callers that wait."""
        while True:
            with self._lock:
                make = self._next() if self._waiters else None
                if make is None:
                    return
                promise = self._waiters.popleft()
            promise.settle(make)

    def _is_low(self) -> bool:
        return len(self._ready) < self.prefetch

    def _ask(self, of_all: bool = False) -> None:
        """Without prefetching, one shard for each caller that waits; of all only when that one has nothing: what a
        second one sends as well would lie here until somebody pops again."""
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
                enough = not self.prefetch and not of_all and sum(self._asked.values()) >= len(self._waiters)
                if not wanted or enough or not port.up or port in self._ended or self._asked[port] >= depth:
                    continue
                self._asked[port] += 1
                most, wait = self._most if self.prefetch else 1, self._wait
            port.pop(most, lambda *answer, port=port, most=most, wait=wait: self._got(port, most, wait, *answer))
        with self._lock:
            first = self._waiters[0] if self._waiters else None
        if first is not None and not self.prefetch and not of_all:
            self._later(lambda: self._ask_all_for(first))

    def _ask_all_for(self, first: _Waiter) -> None:
        if self._waiters and self._waiters[0] is first:
            self._ask(of_all=True)

    def _got(self, port: Port, most: int, wait: int, kind: int, pieces: list[Chunk], waiting: int) -> None:
        chunk = None if not pieces else pieces[0] if len(pieces) == 1 else join(pieces, private)
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

    def port_up(self) -> None:
        if self._waiters or self.prefetch:
            self._ask()
