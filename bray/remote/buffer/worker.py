"""A shard of a buffer: a queue, the pushes that wait for room in it, and the pops that wait for samples.

`push` and `pop` take a function that is called when they are done. In one process they are called directly,
from any thread; the producers and consumers of other processes reach them through links (`messages.py`).
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from bray.cluster import io
from bray.cluster.session import session
from bray.errors import DataError
from bray.remote.buffer import messages as m
from bray.remote.buffer.columns import Chunk, Done, Give, Port, Queue, join, private
from bray.remote.buffer.options import BufferDefinition
from bray.remote.buffer.slabs import Slab, SlabAddress, Slot, Window, look_into
from bray.serving.link import Address, Link, Listener
from bray.tree.layout import Layouts, to_bytes

MAX_LEASED = 1 << 30  # bytes of shared memory that one consumer may hold; beyond it gets copies


class _Pop(NamedTuple):
    """A consumer waits for samples."""

    give: Give
    most: int
    consumer: Any


class BufferShard(Port):
    """One of the workers of a RemoteBuffer; in its own process it is the port to itself."""

    def __init__(self, settings: BufferDefinition, index: int):
        self.settings, self.index = settings, index
        self._lock = threading.RLock()
        self._queue = Queue(settings.capacity(index), settings.batch_size)
        self._pushes: deque[tuple[Chunk, Callable[..., None]]] = deque()  # wait for room
        self._pops: deque[_Pop] = deque()  # wait for samples
        self._consumers: set[Any] = set()
        self._sources: dict[str, bool] = {}  # name: ended
        self._progress: dict[str, Any] = {}
        self._others_push = False
        self._calls: list[tuple[Callable[..., None], tuple[Any, ...]]] = []
        self.pushed = self.popped = self.dropped = self.lost = 0
        self.behind = 0
        """Samples that wait for room."""
        self._lost: dict[int, int] = {}
        # for links only
        self._layouts = Layouts()
        self.listener: Listener | None = None
        self._slab: Slab | None = None
        self._borrowed = 0  # bytes of producers' slabs
        self._leases = 0

    # --- the shard, from any thread -----------------------------------------------------------------------------------

    def push(self, chunk: Chunk, drop: bool, done: Done, source: str = "") -> None:
        """Take samples. `done(None)` is called when they are in the queue (evicting the oldest ones with `drop`),
        `done(error)` when they cannot be."""
        with self._lock:
            try:
                self._queue.check(chunk.layout)
            except DataError as e:
                self._call(done, e)
            else:
                self._others_push |= not source
                self.pushed += chunk.rows
                if drop:
                    self._put_now(chunk)
                    self._call(done, None)
                else:
                    self._pushes.append((chunk, done))
                    self.behind += chunk.rows
                self._serve()
        self._run_calls()

    def _put_now(self, chunk: Chunk) -> None:
        queue = self._queue
        if chunk.rows > queue.capacity:
            self.dropped += chunk.rows - queue.capacity
            chunk = chunk.part(chunk.rows - queue.capacity, chunk.rows)
        if (excess := chunk.rows - queue.room) > 0:
            queue.drop(excess)
            self.dropped += excess
        queue.put(chunk)

    def pop(self, most: int, give: Give, consumer: Any = None) -> None:
        with self._lock:
            self._consumers.add(consumer)
            self._pops.append(_Pop(give, most, consumer))
            self._serve()
        self._run_calls()

    def withdraw(self, consumer: Any = None) -> None:
        """Answer this consumer's waiting pops with NOTHING."""
        with self._lock:
            mine = [p for p in self._pops if p.consumer == consumer]
            self._pops = deque(p for p in self._pops if p.consumer != consumer)
            for pop in mine:
                self._call(pop.give, m.NOTHING, [], self._queue.rows)
        self._run_calls()

    def _serve(self) -> None:
        """Put and give out everything that can be."""
        queue, moved = self._queue, True
        while moved:
            moved = False
            while self._pushes and queue.room > 0:
                chunk, done = self._pushes.popleft()
                moved = True
                if chunk.rows > (room := queue.room):
                    self._pushes.appendleft((chunk.part(room, chunk.rows), done))
                    chunk = chunk.part(0, room)
                else:
                    self._call(done, None)
                queue.put(chunk)
                self.behind -= chunk.rows
            ended = self._ended() and not self._pushes
            while self._pops and queue.has(ended):
                pop = self._pops.popleft()
                moved = True
                share = max(1, queue.rows // len(self._consumers))  # of single samples: leave some for the others
                pieces = queue.take(min(pop.most, share))
                self.popped += sum(p.rows for p in pieces)
                self._call(pop.give, m.ROWS, pieces, queue.rows)
        if ended and not queue.rows:
            for pop in self._pops:
                self._call(pop.give, m.ENDED, [], 0)
            self._pops.clear()

    def _call(self, function: Callable[..., None], *args: Any) -> None:
        self._calls.append((function, args))

    def _run_calls(self) -> None:
        """Without the lock: whoever is called may call this shard again."""
        while True:
            with self._lock:
                if not self._calls:
                    return
                calls, self._calls = self._calls, []
            for function, args in calls:
                function(*args)

    # --- sources ------------------------------------------------------------------------------------------------------

    def _ended(self) -> bool:
        return bool(self._sources) and not self._others_push and all(self._sources.values())

    async def source(self, name: str, ended: bool) -> None:
        """A source begins, or all its samples are in. When all sources have ended and nobody else ever pushed, so does
        the buffer."""
        with self._lock:
            self._sources[name] = ended
            if not ended:
                self._progress.pop(name, None)  # of an earlier source of this name
            self._serve()
        self._run_calls()

    def progress(self, source: str, value: Any = None) -> Any:
        """The progress that a source reported last: where its worker resumes after a crash."""
        if value is not None:
            self._progress[source] = value
        return self._progress.get(source)

    # --- numbers ------------------------------------------------------------------------------------------------------

    def numbers(self) -> dict[str, Any]:
        """Samples pushed, popped, dropped, lost (in a crash, about), waiting, behind (waiting for room),
        asking (requests of consumers that wait for samples); bytes of the samples,
        bytes of shared memory."""
        with self._lock:
            return {
                "shard": self.index,
                "pid": os.getpid(),
                "pushed": self.pushed,
                "popped": self.popped,
                "dropped": self.dropped,
                "lost": self.lost,
                "waiting": self._queue.rows,
                "behind": self.behind,
                "asking": len(self._pops),
                "bytes": self._queue.nbytes,
                "shared_bytes": self._borrowed + (self._slab.used if self._slab is not None else 0),
                "links": len(self.listener.links) if self.listener is not None else 0,
            }

    # --- links --------------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        if session().cluster.kind == "local":
            return
        self._slab = Slab()
        self.listener = await session().listen(f"buffer/{self.settings.name}/{self.index}", self._handle, self._gone)

    def described(self) -> BufferDefinition:
        return self.settings

    def opening(self) -> Address:
        """Where it is reached."""
        assert self.listener is not None
        return self.listener.address

    async def close(self) -> None:
        if self.listener is not None:
            await self.listener.close()
        if self._slab is not None:
            self._slab.close()

    def _handle(self, link: Link, kind: int, number: int, body: memoryview) -> None:
        peer: _Peer = link.data
        if kind == m.OPEN:
            self._opened(link, number, body)
        elif kind == m.PUSH:
            head, start = m.unpack(body, m.Push)
            memory, held = self._borrow(link, head) if head.loan else (body[start:], None)
            layout = self._layouts.parse(head.spec)
            chunk = Chunk(layout, layout.columns(memory, head.rows), head.rows, held)
            self.push(chunk, head.drop, lambda e: self._receipt(link, number, e), peer.source)
        elif kind == m.SLAB:
            peer.window = look_into(m.decode(body, SlabAddress))
            link.reply(number, m.encode(peer.window is not None))
        elif kind == m.POP:
            self.pop(m.decode(body, int), lambda *answer: self._give(link, number, *answer), link)
        elif kind == m.WITHDRAW:
            self.withdraw(link)
        elif kind == m.RELEASE:
            for lease in m.decode(body, list[int]):
                peer.release(lease)
        elif kind == m.SEES:
            peer.sees = True
        else:
            raise DataError(f"an unknown message {kind}: the processes run different versions")

    def _opened(self, link: Link, number: int, body: memoryview) -> None:
        hello = m.decode(body, m.Hello)
        link.data = _Peer(hello.source)
        with self._lock:
            if hello.generation and hello.waiting:  # of the shard that died; each peer tells what it knew last
                self._lost[hello.generation] = max(self._lost.get(hello.generation, 0), hello.waiting)
                self.lost = sum(self._lost.values())
            self._others_push |= hello.others_push
            if hello.source:
                self._sources[hello.source] = hello.ended
                self._serve()
        self._run_calls()
        assert self._slab is not None
        generation = int.from_bytes(self._slab.address.nonce[:7], "little") | 1
        link.reply(number, m.encode(m.Welcome(generation, self._slab.address)))

    def _borrow(self, link: Link, head: m.Push) -> tuple[np.ndarray, Slot]:
        """Samples in the producer's slab. It may reuse their slot when the last chunk that refers to it is gone."""
        peer: _Peer = link.data
        size = head.size
        if peer.window is None:
            raise DataError("samples in shared memory that this shard cannot map")

        def freed() -> None:
            self._borrowed -= size
            if not link.closed:
                link.post(m.FREED, m.encode(head.loan))

        def free(slot: Slot) -> None:
            with contextlib.suppress(RuntimeError):  # the loop has ended, and the links with it
                io.call(freed)

        memory = peer.window.data(head.offset, size)
        self._borrowed += size
        return memory, Slot(peer.window, head.offset, size, free)

    def _receipt(self, link: Link, number: int, error: BaseException | None) -> None:
        if link.closed:
            return
        if error is not None:
            link.fail(number, error)
        else:
            link.reply(number, m.encode(m.Arrived(self._queue.rows, self._others_push)))

    def _memory(self, peer: _Peer, nbytes: int) -> tuple[Any, Any]:
        """Where a batch for this consumer is put together."""
        if nbytes < m.LARGE or not peer.sees or peer.leased + nbytes > MAX_LEASED:
            return private(nbytes)
        assert self._slab is not None
        return self._slab.memory(nbytes)

    def _give(self, link: Link, number: int, kind: int, pieces: list[Chunk], waiting: int) -> None:
        peer: _Peer = link.data
        if link.closed:
            self.dropped += sum(p.rows for p in pieces)  # it left while it was being served
            return
        if not pieces:
            link.reply(number, *m.pack(m.Answer(kind, waiting)))
            return
        chunk = pieces[0] if len(pieces) == 1 else join(pieces, lambda n: self._memory(peer, n))
        answer, slot = m.Answer(m.ROWS, waiting, chunk.layout.spec, chunk.rows), chunk.held
        if slot is None or not peer.sees or peer.leased + slot.size > MAX_LEASED:
            if slot is not None:  # it may be reused before the socket has taken all of it
                chunk = join([chunk], private)
            link.reply(number, *m.pack(answer, to_bytes(chunk.columns)))
            return
        self._leases += 1
        peer.leases[self._leases] = slot
        peer.leased += slot.size
        slab = slot.memory.address
        answer.lease = m.Lease(self._leases, slot.offset, slab.fd, slab.nonce, chunk.first, chunk.total)
        link.reply(number, *m.pack(answer))

    def _gone(self, link: Link) -> None:
        """A producer or consumer has died or left: free its leases, forget its pops."""
        with self._lock:
            self._consumers.discard(link)
            self._pops = deque(p for p in self._pops if p.consumer is not link)
        link.data = None


class _Peer:
    """What a shard knows of a link."""

    def __init__(self, source: str):
        self.source = source
        self.window: Window | None = None
        """Of the producer's slab."""
        self.sees = False
        """Whether the consumer can map our slab."""
        self.leases: dict[int, Slot] = {}
        self.leased = 0

    def release(self, lease: int) -> None:
        if (slot := self.leases.pop(lease, None)) is not None:
            self.leased -= slot.size
