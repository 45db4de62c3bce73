"""A shard of a buffer: a store, those who wait for room in it, and those who wait for samples of it.

The shard itself is plain: `push`, `pop` and `draw` take a function that is called when it is done. In one process they are called directly,
from any thread; producers and consumers of other processes reach them through links (`messages.py`).
"""

from __future__ import annotations

import logging
import math
import os
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgspec
import numpy as np

from bray.cluster import io, wire
from bray.cluster.session import session
from bray.data.limit import RateLimit
from bray.errors import ConfigError, DataError, UnknownName
from bray.remote.buffer import messages as m
from bray.remote.buffer.columns import Chunk, Layouts, join, private
from bray.remote.buffer.messages import Facts
from bray.remote.buffer.slabs import Slab, SlabAddress, Slot
from bray.remote.buffer.stores import Queue, Ring

logger = logging.getLogger("bray.remote")

STORES = ("queue", "uniform", "prioritized")
_MAX_LEASED = 1 << 30  # bytes one consumer may hold of a shard's memory; what it asks for beyond comes as a copy
_ASK_LIMIT_AGAIN = 1.0


@dataclass(frozen=True)
class Settings:
    """How a buffer was made. All its handles know it."""

    name: str
    size: int = 512
    batch_size: int | None = None
    num_workers: int = 2
    density: int = 100
    store: str = "queue"
    alpha: float = 0.6
    beta: float = 0.4
    eps: float = 1e-5
    max_reuse: int | None = None
    pushed_per_sampled: tuple[float, float] = (0.0, math.inf)

    def __post_init__(self) -> None:
        if self.store not in STORES:
            raise UnknownName("store", str(self.store), STORES, f"buffer {self.name!r}")
        if not self.name or "/" in self.name:
            raise ConfigError(f"the name of a buffer is not empty and has no '/': got {self.name!r}")
        for key, value in (("size", self.size), ("batch_size", self.batch_size), ("num_workers", self.num_workers)):
            if value is not None and (not isinstance(value, int) or value < 1):
                raise ConfigError(f"buffer {self.name!r}: {key} is a whole number of at least 1, got {value!r}")
        if not 1 <= self.density <= 100:
            raise ConfigError(
                f"buffer {self.name!r}: density is the percentage of its workers that a producer connects to, "
                f"1 to 100; got {self.density!r}"
            )
        sampled = self.store != "queue"
        if sampled and self.batch_size is None:
            raise ConfigError(f"buffer {self.name!r}: store={self.store!r} draws batches: give batch_size")
        if not sampled and (self.max_reuse is not None or self.pushed_per_sampled != (0.0, math.inf)):
            raise ConfigError(
                f"buffer {self.name!r}: a queue gives each sample once; max_reuse and pushed_per_sampled are for store='uniform' "
                "and 'prioritized' (PrefetchBuffer has a max_reuse for the batches of a queue)"
            )
        for name, number, low, high in (
            ("alpha", self.alpha, 0.0, math.inf),
            ("beta", self.beta, 0.0, 1.0),
            ("eps", self.eps, 0.0, math.inf),
            ("max_reuse", 1 if self.max_reuse is None else self.max_reuse, 1, math.inf),
        ):
            if not low <= number <= high:
                raise ConfigError(f"buffer {self.name!r}: {name} is between {low} and {high}, got {number}")
        RateLimit(*self.pushed_per_sampled)  # checks them

    @property
    def shards(self) -> int:
        """Shards that there are: none without room for a batch."""
        return min(self.num_workers, self.size)

    def capacity(self, shard: int) -> int:
        """Samples that a shard holds; all together hold `size` batches."""
        batches = self.size // self.shards + (shard < self.size % self.shards)
        return batches * (self.batch_size or 1)


class Opening(NamedTuple):
    """How a shard is reached."""

    address: wire.Address
    settings: Settings


class _Ask:
    """Someone waits for samples."""

    __slots__ = ("give", "most", "owner")

    def __init__(self, give: Callable[..., None], most: int, owner: Any):
        self.give, self.most, self.owner = give, most, owner


class BufferShard:
    """One of the workers of a RemoteBuffer."""

    def __init__(self, settings: Settings, index: int):
        self.settings, self.index = settings, index
        self._lock = threading.RLock()
        capacity = settings.capacity(index)
        self._queue: Queue | None = None
        self._ring: Ring | None = None
        if settings.store == "queue":
            self._queue = Queue(capacity, settings.batch_size)
        else:
            self._ring = Ring(
                capacity, settings.store == "prioritized", settings.alpha, settings.eps, settings.max_reuse
            )
        self._store: Any = self._queue or self._ring
        limited = settings.pushed_per_sampled != (0.0, math.inf)
        self._limit = RateLimit(*settings.pushed_per_sampled) if limited else None
        self._pushes: deque[tuple[Chunk, Callable[..., None]]] = deque()  # wait for room
        self._asks: deque[_Ask] = deque()  # wait for samples
        self._draws: deque[Callable[[], None]] = deque()  # wait for the limits
        self._looks: deque[Callable[[], None]] = deque()  # wait for the first row
        self._readers: set[Any] = set()
        self._sources: dict[str, bool] = {}  # name: ended
        self._progress: dict[str, Any] = {}
        self._others_push = False
        self._calls: list[tuple[Callable[..., None], tuple[Any, ...]]] = []
        self._timer = False
        self.pushed = self.popped = self.dropped = self.lost = 0
        self.behind = 0
        """Samples that wait for room."""
        self._lost: dict[int, int] = {}
        # for links only
        self._layouts = Layouts()
        self._listener: wire.Listener | None = None
        self._slab: Slab | None = None
        self._leases = 0

    # --- the shard, from any thread -----------------------------------------------------------------------------------

    def push(self, chunk: Chunk, drop: bool, done: Callable[[BaseException | None], None], source: str = "") -> None:
        """Take samples; `done(None)` when they are in (or the oldest ones made room), `done(error)` when they cannot be."""
        with self._lock:
            try:
                self._store.check(chunk.layout)
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
        if queue is not None:
            if chunk.rows > queue.capacity:
                self.dropped += chunk.rows - queue.capacity
                chunk = chunk.part(chunk.rows - queue.capacity, chunk.rows)
            if (excess := chunk.rows - queue.room) > 0:
                queue.drop(excess)
                self.dropped += excess
        self._store.put(chunk)
        if self._limit is not None:
            self._limit.pushed(chunk.rows)

    def pop(self, most: int, give: Callable[..., None], owner: Any = None) -> None:
        """Ask for a batch, or for at most so many samples: `give(kind, pieces, facts)` is called when there are some, or when there will
        be none."""
        with self._lock:
            self._readers.add(owner)
            self._asks.append(_Ask(give, most, owner))
            self._serve()
        self._run_calls()

    def withdraw(self, owner: Any = None) -> None:
        """Whoever asked does not wait any longer: what it has not been given, it will not be."""
        with self._lock:
            mine = [a for a in self._asks if a.owner == owner]
            self._asks = deque(a for a in self._asks if a.owner != owner)
            for ask in mine:
                self._call(ask.give, m.NOTHING, [], self._facts())
        self._run_calls()

    def draw(
        self,
        at: np.ndarray,
        wait: bool,
        largest: float,
        give: Callable[..., None],
        memory: Callable[[int], Any] = private,
    ) -> None:
        """Rows at these fractions of the mass; with `wait`, as soon as the limits allow a draw. To wait until there are rows, ask for none."""
        ring = self._ring
        if ring is None:
            raise ConfigError("a queue is popped, not drawn from")

        def now() -> None:
            before = ring.mass
            chunks = [ring.draw(at, memory)] if len(at) and before > 0.0 else []
            rows = chunks[0].rows if chunks else 0
            self.popped += rows
            if rows and self._limit is not None:
                self._limit.sampled(rows)
            facts = self._facts()
            facts.before = before
            self._call(give, m.ROWS if chunks else m.NOTHING, chunks, facts)

        with self._lock:
            ring.largest = max(ring.largest, largest)
            if wait:
                (self._draws if len(at) else self._looks).append(now)
            else:
                now()
            self._serve()
        self._run_calls()

    def set_priorities(self, ids: np.ndarray, priorities: np.ndarray) -> None:
        if self._ring is None:
            raise ConfigError("a queue has no priorities: make the buffer with store='prioritized'")
        with self._lock:
            self._ring.set_priorities(ids, priorities)

    def _serve(self) -> None:
        """Let in and give out whatever can be."""
        queue = self._queue
        if queue is None:
            self._serve_ring()
            return
        while True:
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
            while self._asks and queue.has(ended):
                ask = self._asks.popleft()
                moved = True
                share = max(1, queue.rows // len(self._readers))  # of single samples: leave some for the others
                pieces = queue.take(min(ask.most, share))
                self.popped += sum(p.rows for p in pieces)
                self._call(ask.give, m.ROWS, pieces, self._facts())
            if not moved:
                break
        if ended and not queue.rows:
            for ask in self._asks:
                self._call(ask.give, m.ENDED, [], self._facts())
            self._asks.clear()

    def _serve_ring(self) -> None:
        limit, ring = self._limit, self._ring
        assert ring is not None
        while True:
            moved = False
            while self._pushes and (limit is None or limit.may_push()):
                chunk, done = self._pushes.popleft()
                self._put_now(chunk)
                self.behind -= chunk.rows
                self._call(done, None)
                moved = True
            while self._draws and (limit is None or limit.may_sample()):
                self._draws.popleft()()
                moved = True
            while self._looks and ring.mass > 0.0:
                self._looks.popleft()()
            if not moved:
                break
        if self._pushes and not self._timer:  # what was sampled fades with time, and then pushing is free again
            self._timer = True
            io.loop().call_soon_threadsafe(lambda: io.loop().call_later(_ASK_LIMIT_AGAIN, self._again))

    def _again(self) -> None:
        with self._lock:
            self._timer = False
            self._serve()
        self._run_calls()

    def _facts(self) -> Facts:
        ring = self._ring
        if ring is None:
            return Facts(self._store.rows)
        return Facts(ring.rows, 0.0, ring.mass, ring.largest, ring.rows)

    def _call(self, function: Callable[..., None], *args: Any) -> None:
        self._calls.append((function, args))

    def _run_calls(self) -> None:
        """Outside of the lock: whoever is called may come back with something else."""
        while True:
            with self._lock:
                if not self._calls:
                    return
                calls, self._calls = self._calls, []
            for function, args in calls:
                function(*args)

    # --- the ends of sources ------------------------------------------------------------------------------------------

    def _ended(self) -> bool:
        return bool(self._sources) and not self._others_push and all(self._sources.values())

    async def source(self, name: str, ended: bool) -> None:
        """A source begins, or all it had is in. When all sources have ended and nobody else ever pushed, so does the buffer."""
        with self._lock:
            self._sources[name] = ended
            if not ended:
                self._progress.pop(name, None)  # of one that had the name before
            self._serve()
        self._run_calls()

    def progress(self, source: str, value: Any = None) -> Any:
        """How far a source is, by its own words: kept for it, should it be killed and begin anew."""
        if value is not None:
            self._progress[source] = value
        return self._progress.get(source)

    # --- numbers ------------------------------------------------------------------------------------------------------

    def numbers(self) -> dict[str, Any]:
        """pushed, popped (or drawn), dropped, lost (in a crash, about), waiting, behind (waiting for room), bytes of the samples, bytes of
        shared memory."""
        with self._lock:
            out = {
                "shard": self.index,
                "pid": os.getpid(),
                "pushed": self.pushed,
                "popped": self.popped,
                "dropped": self.dropped,
                "lost": self.lost,
                "waiting": self._store.rows,
                "behind": self.behind,
                "bytes": self._store.nbytes,
                "shared_bytes": self._slab.used if self._slab is not None else 0,
                "links": len(self._listener.links) if self._listener is not None else 0,
            }
            if self._ring is not None:
                out |= {
                    "dropped": self._ring.overwritten_unused,
                    "late_priorities": self._ring.late,
                    "mass": self._ring.mass,
                }
            return out

    # --- links --------------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        if session().cluster.kind == "local":
            return
        self._slab = Slab()
        self._listener = await session().listen(f"buffer/{self.settings.name}/{self.index}", self._handle, self._gone)

    def described(self) -> Settings:
        return self.settings

    def opening(self) -> Opening:
        assert self._listener is not None
        return Opening(self._listener.address, self.settings)

    async def close(self) -> None:
        if self._listener is not None:
            await self._listener.close()
        if self._slab is not None:
            self._slab.close()

    def _handle(self, link: wire.Link, kind: int, number: int, body: memoryview) -> None:
        peer: _Peer = link.data
        if kind == m.OPEN:
            self._opened(link, number, body)
        elif kind == m.PUSH:
            chunk, drop = m.read_push(body, self._layouts)
            self.push(chunk, drop, lambda e: self._pushed(link, number, e, 0), peer.source)
        elif kind == m.WRITTEN:
            layout, rows, drop, offset, want = m.read_written(body, self._layouts)
            slot = peer.granted.pop(offset, None)
            if slot is None:
                raise DataError(f"a slot at {offset} that this producer was not given")
            columns = layout.columns(slot.slab.data(slot), rows)
            self.push(
                Chunk(layout, columns, rows, slot), drop, lambda e: self._pushed(link, number, e, want), peer.source
            )
        elif kind == m.SLOTS:
            nbytes, count = np.frombuffer(body, np.int64).tolist()
            slots = [self._grant(peer, nbytes) for _ in range(min(count, 64))]
            link.reply(number, m.pack_numbers(np.array([(s.offset, s.size) for s in slots], np.int64)))
        elif kind == m.RETURN:
            for offset in np.frombuffer(body, np.int64).tolist():
                peer.granted.pop(offset, None)
        elif kind == m.POP:
            (most,) = np.frombuffer(body, np.int64).tolist()
            self.pop(most, lambda kind, pieces, facts: self._give(link, number, kind, pieces, facts), link)
        elif kind == m.WITHDRAW:
            self.withdraw(link)
        elif kind == m.RELEASE:
            for lease in np.frombuffer(body, np.int64).tolist():
                peer.release(lease)
        elif kind == m.DRAW:
            wait, rows, largest = m.read_draw(body)
            at = np.frombuffer(body, np.float64, rows, m.DRAW_SIZE)

            def drawn(kind: int, chunks: list[Chunk], facts: Facts) -> None:
                self._give(link, number, kind, chunks, facts)

            self.draw(at, bool(wait), largest, drawn, lambda n: self._memory(peer, n))
        elif kind == m.PRIORITIES:
            rows = len(body) // 24
            ids = np.frombuffer(body, np.int64, 2 * rows).reshape(rows, 2)
            self.set_priorities(ids, np.frombuffer(body, np.float64, rows, 16 * rows))
        elif kind == m.SEES:
            peer.sees = True
        else:
            raise DataError(f"an unknown message {kind}: the processes run different versions")

    def _opened(self, link: wire.Link, number: int, body: memoryview) -> None:
        hello = msgspec.msgpack.decode(body, type=Hello)
        link.data = _Peer(hello.source)
        with self._lock:
            if hello.generation and hello.waiting:  # of the one that died; each peer tells what it knew last
                self._lost[hello.generation] = max(self._lost.get(hello.generation, 0), hello.waiting)
                self.lost = sum(self._lost.values())
            self._others_push |= hello.others_push
            if hello.source:
                self._sources[hello.source] = hello.ended
                self._serve()
        self._run_calls()
        slab = self._slab
        assert slab is not None
        link.reply(number, msgspec.msgpack.encode((self.generation, *slab.address)))

    @property
    def generation(self) -> int:
        """Which of the shards of this name, one after the other, this one is."""
        assert self._slab is not None
        return int.from_bytes(self._slab.address.nonce[:7], "little") | 1

    def _grant(self, peer: _Peer, nbytes: int) -> Slot:
        assert self._slab is not None
        slot = self._slab.take(nbytes)
        peer.granted[slot.offset] = slot
        return slot

    def _pushed(self, link: wire.Link, number: int, error: BaseException | None, want: int) -> None:
        if link.closed:
            return
        if error is not None:
            link.fail(number, error)
            return
        offset, size = -1, 0
        if want:
            slot = self._grant(link.data, want)
            offset, size = slot.offset, slot.size
        link.reply(number, m.pack_ack(self._store.rows, self._others_push, offset, size))

    def _memory(self, peer: _Peer, nbytes: int) -> tuple[Any, Any]:
        """Where a batch for this peer is put together."""
        if nbytes < m.LARGE or not peer.sees or peer.leased + nbytes > _MAX_LEASED:
            return private(nbytes)
        assert self._slab is not None
        slot = self._slab.take(nbytes)
        return self._slab.data(slot), slot

    def _give(self, link: wire.Link, number: int, kind: int, pieces: list[Chunk], facts: Facts) -> None:
        peer: _Peer = link.data
        if link.closed:
            if self._queue is not None and pieces:  # it went while it was being served
                self.dropped += sum(p.rows for p in pieces)
            return
        if not pieces:
            link.reply(number, *m.answer(kind, facts))
            return
        chunk = pieces[0] if len(pieces) == 1 else join(pieces, lambda n: self._memory(peer, n))
        if chunk.held is None or not peer.sees or peer.leased + chunk.held.size > _MAX_LEASED:
            if chunk.held is not None:  # its slot may be written anew before the socket has taken all of it
                chunk = join([chunk], private)
            link.reply(number, *m.answer(m.ROWS, facts, chunk))
            return
        self._leases += 1
        peer.leases[self._leases] = chunk.held
        peer.leased += chunk.held.size
        link.reply(number, *m.answer(m.LEASE, facts, chunk, self._leases))

    def _gone(self, link: wire.Link) -> None:
        """A peer has died or left: what it held is free, and it waits for nothing."""
        with self._lock:
            self._readers.discard(link)
            self._asks = deque(a for a in self._asks if a.owner is not link)
        link.data = None  # its slots go with it


class Hello(msgspec.Struct, array_like=True):
    """How a peer introduces itself."""

    source: str = ""
    ended: bool = False
    others_push: bool = False
    generation: int = 0
    """The shard that it knew before, and what waited in there."""
    waiting: int = 0


class _Peer:
    """What a shard knows of a link."""

    def __init__(self, source: str = ""):
        self.source = source
        self.sees = False
        """Whether it looks into our slab."""
        self.granted: dict[int, Slot] = {}
        self.leases: dict[int, Slot] = {}
        self.leased = 0

    def release(self, lease: int) -> None:
        if (slot := self.leases.pop(lease, None)) is not None:
            self.leased -= slot.size


def slab_address(reply: memoryview) -> tuple[int, SlabAddress]:
    """(generation, slab) of a shard's answer to OPEN."""
    generation, pid, fd, nonce = msgspec.msgpack.decode(reply, type=tuple[int, int, int, bytes])
    return generation, SlabAddress(pid, fd, nonce)
