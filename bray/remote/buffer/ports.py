"""The ways of a process to the shards of a buffer: a **Loopback** calls a shard of the same process, a **ShardLink**
reaches one elsewhere through a socket and shared memory. Writers and readers do not know which they use."""

from __future__ import annotations

import asyncio
import logging
import time
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np

from bray.cluster import io
from bray.cluster.session import ClusterSession
from bray.errors import DataError, LinkLost, MissingComponent, Unreachable
from bray.remote.buffer import messages as m
from bray.remote.buffer.columns import Chunk, join, private
from bray.remote.buffer.pending import PendingBatch
from bray.remote.buffer.slabs import Slab, SlabAddress, Slot, Window, look_into
from bray.remote.buffer.worker import BufferShard
from bray.serving.link import Link, machine_id
from bray.tree.layout import Layouts

logger = logging.getLogger("bray.remote")

RETRY_S = 0.5
"""Seconds before a shard that could not be reached is tried again."""
MOST_IN_FLIGHT = 4
_GIVE_UP = 6  # a shard that was missing this often will not come back
_UNMAP_AFTER = 60.0  # slabs that nothing came from for this long

Got = Callable[[int, Chunk | None], None]
"""Called with the answer to a pop: kind, samples."""
Done = Callable[[BaseException | None], None]
"""Called when samples that were pushed are in the shard's queue, or with the reason why they are not."""


class Port:
    """A shard, as its producers and consumers see it."""

    up = True
    gone = False
    """It will not come back."""
    ready = True
    """Takes samples."""
    behind = 0
    """Samples that wait for room in a shard of this process."""
    offered: Slab | None = None
    """The slab of this process that the shard was asked to map."""

    def __init__(self) -> None:
        self.in_flight = self.bytes_in_flight = 0  # kept by the writer
        self.last_sent = -1

    def connect(self) -> None:
        """Connect, and stay connected."""

    def offer(self, slab: Callable[[], Slab], answered: Callable[[], None]) -> None:
        """Ask the shard whether it can map this slab of ours; after that it takes samples."""

    def stop_lending(self) -> bool:
        """The shard is gone. Whether consumers of it may still read what was lent to it."""
        return False

    def take(self, chunk: Chunk, drop: bool, done: Done, source: str) -> None:
        """Samples for a shard of this process: the memory becomes the shard's."""
        raise NotImplementedError

    def push(self, batch: PendingBatch, done: Done) -> None:
        """Samples for a shard of another process; at most MOST_IN_FLIGHT batches without a receipt."""
        raise NotImplementedError

    def pop(self, most: int, got: Got) -> None:
        raise NotImplementedError

    def withdraw(self) -> None:
        """Pops without an answer get one: NOTHING."""
        raise NotImplementedError


class Loopback(Port):
    """To a shard of this process: direct calls, from any thread, and no copies but the one that `push` makes."""

    def __init__(self, shard: BufferShard):
        super().__init__()
        self._shard = shard

    @property
    def behind(self) -> int:  # type: ignore[override]
        return self._shard.behind

    def take(self, chunk: Chunk, drop: bool, done: Done, source: str) -> None:
        self._shard.push(chunk, drop, done, source)

    def pop(self, most: int, got: Got) -> None:
        def give(kind: int, pieces: list[Chunk], waiting: int) -> None:
            got(kind, None if not pieces else pieces[0] if len(pieces) == 1 else join(pieces, private))

        self._shard.pop(most, give, self)

    def withdraw(self) -> None:
        self._shard.withdraw(self)


class ShardLink(Port):
    """A link to a shard, reconnected when it breaks. All methods belong on the io loop."""

    def __init__(self, session: ClusterSession, name: str, owner: PortOwner):
        super().__init__()
        self._session, self._name, self._owner = session, name, owner
        self._link: Any = None
        self.ready = False
        self._slab: Slab | None = None  # the one that was offered, where it could be mapped
        self._lent: dict[int, Slot] = {}  # slots that it uses, or its consumers do
        self._loans = 0
        self._waiting = 0  # samples in the shard, by its last answer
        self._others_push = False  # so that it does not end with its sources; a restarted shard is told
        self._generation = self._had = 0  # the shard of the last connection, and how many samples waited there
        self._pid = 0
        self._layouts = Layouts()
        self._windows: dict[bytes, tuple[Window, float]] = {}  # nonce -> slab, when it was last used
        self._kept: dict[int, Any] = {}  # lease -> weak reference to the memory that arrays use
        self._freed: deque[int] = deque()
        self._keeping: Any = None

    @property
    def up(self) -> bool:  # type: ignore[override]
        return self._link is not None and not self._link.closed

    def connect(self) -> None:
        if self._keeping is None:
            self._keeping = io.spawn(self._keep(), f"the connection to {self._name}")

    def close(self) -> None:
        if self._keeping is not None:
            self._keeping.cancel()
        if self._link is not None and not self._kept:  # else memory that arrays here still show would be reused
            self._link.close()

    async def _keep(self) -> None:
        missing, said = 0, False
        while missing < _GIVE_UP:
            try:
                ended = await self._open()
            except MissingComponent:
                missing += 1
                await asyncio.sleep(RETRY_S)
                continue
            except Unreachable as e:
                if not said:
                    logger.info("%s is not reached yet: %s", self._name, str(e).split(". The", 1)[0])
                    said = True
                    self._owner.port_down(self)
                await asyncio.sleep(RETRY_S)
                continue
            missing, said = 0, False
            self._owner.port_up(self)
            await ended.wait()
            self._down()
        self.gone = True
        self._owner.port_gone(self)

    async def _open(self) -> asyncio.Event:
        opening = await self._session.cluster.find(self._name).call("opening", timeout=30.0)
        ended = asyncio.Event()
        link = await self._session.connect(opening.address, self._handle, lambda _: ended.set())
        hello = m.Hello(*self._owner.source, self._others_push, self._generation, self._had)
        welcome = m.decode(await link.request(m.OPEN, m.encode(hello)), m.Welcome)
        self._generation, self._pid = welcome.generation, welcome.slab.pid
        if opening.address.machine == machine_id() and self._window(welcome.slab) is not None:
            link.post(m.SEES)
        self._link = link
        return ended

    def _down(self) -> None:
        self._had = self._waiting
        about = f"about {self._had} samples that waited there are lost" if self._had else "nothing is known to be lost"
        logger.warning("%s is gone: %s. The other shards go on, and this one is waited for", self._name, about)
        self._link = None
        self._windows, self._kept, self._freed, self._waiting = {}, {}, deque(), 0
        self._owner.port_down(self)

    def _handle(self, link: Link, kind: int, number: int, body: memoryview) -> None:
        if kind != m.FREED:
            raise DataError(f"an unknown message {kind}: the processes run different versions")
        self._lent.pop(m.decode(body, int), None)

    # --- pushing ------------------------------------------------------------------------------------------------------

    def offer(self, slab: Callable[[], Slab], answered: Callable[[], None]) -> None:
        self._slab, self.offered = None, (ours := slab())

        def heard(future: asyncio.Future[memoryview]) -> None:
            if ours is self.offered and not isinstance(future.exception(), LinkLost):
                seen = future.exception() is None and m.decode(future.result(), bool)
                self.ready, self._slab = True, ours if seen else None
            answered()

        self._link.request(m.SLAB, m.encode(ours.address)).add_done_callback(heard)

    def push(self, batch: PendingBatch, done: Done) -> None:
        slab = self._slab
        if slab is not None and batch.slot is None and batch.nbytes >= m.LARGE:
            batch.move(slab.memory)
        head = m.Push(batch.layout.spec, batch.rows, batch.drop)
        if (slot := batch.slot) is not None and slot.memory is slab:
            self._loans += 1
            self._lent[self._loans] = slot
            head.loan, head.offset, head.size = self._loans, slot.offset, slot.size
            parts = m.pack(head)
        else:
            parts = m.pack(head, [batch.joined()])
        self._link.request(m.PUSH, *parts).add_done_callback(lambda f: self._received(f, done))

    def _received(self, future: asyncio.Future[memoryview], done: Done) -> None:
        error = future.exception()
        if error is None:
            arrived = m.decode(future.result(), m.Arrived)
            self._waiting, self._others_push = arrived.waiting, arrived.others_push
        done(error)

    def stop_lending(self) -> bool:
        lent, self._lent = self._lent, {}
        self.ready, self._slab, self.offered = False, None, None
        return bool(lent)

    # --- popping ------------------------------------------------------------------------------------------------------

    def pop(self, most: int, got: Got) -> None:
        self._release()
        if self.up:
            self._link.request(m.POP, m.encode(most)).add_done_callback(lambda f: self._answered(f, got))
        else:
            got(m.NOTHING, None)

    def withdraw(self) -> None:
        if self.up:
            self._link.post(m.WITHDRAW)

    def _release(self) -> None:
        """Tell the shard which leases are not used here any more."""
        if self._freed and self.up:
            freed = [self._freed.popleft() for _ in range(len(self._freed))]
            self._link.post(m.RELEASE, m.encode(freed))

    def tick(self) -> None:
        """Called every second: the last leases are not followed by a question, and slabs of producers that have left
        take memory."""
        self._release()
        oldest = time.monotonic() - _UNMAP_AFTER
        self._windows = {nonce: (w, used) for nonce, (w, used) in self._windows.items() if used > oldest}

    def _answered(self, future: asyncio.Future[memoryview], got: Got) -> None:
        if future.cancelled() or (error := future.exception()) is not None:
            if not future.cancelled() and not isinstance(error, LinkLost):
                self._owner.port_failed(error)
            got(m.NOTHING, None)
            return
        body = future.result()
        answer, start = m.unpack(body, m.Answer)
        self._waiting = answer.waiting
        if answer.kind != m.ROWS:
            got(answer.kind, None)
            return
        layout, rows, lease = self._layouts.parse(answer.spec), answer.rows, answer.lease
        chunk: Chunk | None = None
        if lease is None:  # a copy: rows are the reader's to write
            chunk = Chunk(layout, layout.columns(np.array(body[start:]), rows), rows)
        elif (memory := self._leased(lease, layout.offsets(lease.total)[1])) is not None:
            chunk = Chunk(layout, layout.columns(memory, lease.total), lease.total)
            chunk = chunk.part(lease.first, lease.first + rows)
        got(m.NOTHING if chunk is None else m.ROWS, chunk)

    def _window(self, slab: SlabAddress) -> Window | None:
        window = self._windows[slab.nonce][0] if slab.nonce in self._windows else look_into(slab)
        if window is not None:
            self._windows[slab.nonce] = window, time.monotonic()
        return window

    def _leased(self, lease: m.Lease, nbytes: int) -> np.ndarray | None:
        """Rows in shared memory. When the last array that shows them goes, the shard is told. None: the shard has
        ended."""
        window = self._window(SlabAddress(self._pid, lease.fd, lease.nonce))
        if window is None:
            return None
        memory = window.data(lease.offset, max(1, nbytes))
        kept, freed, number = self._kept, self._freed, lease.number

        def forgotten(_: Any) -> None:  # in any thread: no lock, no loop; `_release` sends it
            kept.pop(number, None)
            freed.append(number)

        kept[number] = weakref.ref(memory, forgotten)
        return memory


class PortOwner(Protocol):
    """Is told what happens to its links, on the io loop."""

    source: tuple[str, bool]
    """The source that this process reads, and whether it has ended."""

    def port_up(self, port: ShardLink) -> None: ...
    def port_down(self, port: ShardLink) -> None: ...
    def port_gone(self, port: ShardLink) -> None: ...
    def port_failed(self, error: BaseException | None) -> None: ...
