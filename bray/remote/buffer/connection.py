"""This process's connection to a buffer, shared by all its handles: a writer, a reader, and a port to each shard."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np

from bray.cluster import io
from bray.cluster.local import LocalCluster
from bray.cluster.session import ClusterSession, session
from bray.errors import BrayError, DataError, LinkLost, MissingComponent, Unreachable
from bray.remote.buffer import messages as m
from bray.remote.buffer.columns import Chunk, Done, Give, PendingBatch, Port
from bray.remote.buffer.options import BufferDefinition
from bray.remote.buffer.reader import BufferReader
from bray.remote.buffer.slabs import Slab, SlabAddress, Slot, Window, look_into
from bray.remote.buffer.writer import Writer
from bray.serving.link import Link, machine_id
from bray.tree.layout import Layouts

logger = logging.getLogger("bray.remote")

FLUSH_TIMEOUT = 5.0
RETRY_S = 0.5
"""Seconds before a shard that could not be reached is tried again."""
_A_MOMENT = 0.002  # seconds in which a shard that has samples answers
_GIVE_UP = 6  # a shard that was missing this often will not come back
_UNMAP_AFTER = 60.0  # slabs that nothing came from for this long


class BufferConnection:
    """The ports are the shards themselves where they are objects of this process, else links."""

    ended = False

    def __init__(self, settings: BufferDefinition, here: ClusterSession):
        self.settings, cluster = settings, here.cluster
        self.source = ("", False)
        """The source that this process reads into the buffer, and whether it has ended."""
        self._links: list[ShardLink] = []
        ports: list[Port]
        if cluster.kind == "local":
            assert isinstance(cluster, LocalCluster)
            ports = [cluster.hosted(n).worker for n in settings.members]
        else:
            self._links = [ShardLink(here, n, self) for n in settings.members]
            ports = [*self._links]
        self.writer = Writer(settings, ports, here=not self._links)
        self.reader = BufferReader(settings, ports, *((io.call, _later) if self._links else (_now, _now)))
        self._reading = self._closed = False

    def read(self, prefetch: int = 0) -> BufferReader:
        """The reader, connected, which fetches so many batches ahead at least. (Of a shard of this process nothing
        would be gained by that.)"""
        if self._links:
            self.reader.prefetch = max(prefetch, self.reader.prefetch)
            if not self._reading:
                self._reading = True
                io.call(self._connect)
        return self.reader

    def _connect(self) -> None:
        for link in self._links:
            link.connect()
        self._tick()

    def _tick(self) -> None:
        for link in self._links:
            link.tick()
        self.reader.tick()
        if not self._closed:
            io.loop().call_later(1.0, self._tick)

    def close(self) -> None:
        if not self._links:
            return
        if io.is_loop():
            self._close_links()
            return
        source, has_ended = self.source
        if not source or has_ended:  # a source that is stopped halfway waits for room that nobody makes any more
            self.writer.flush(FLUSH_TIMEOUT)
        closed = threading.Event()
        io.call(self._close_links)
        io.call(closed.set)
        closed.wait(1.0)  # links cannot do anything without the session, which ends next

    def _close_links(self) -> None:
        self._closed = True
        for link in self._links:
            link.close()
        self.writer.close()

    def port_gone(self, port: ShardLink) -> None:
        """On the io loop."""
        if not all(link.gone for link in self._links):
            self.writer.port_down(port)
            return
        stopped = Unreachable(f"buffer {self.settings.name!r} has been stopped: all its workers are gone")
        self.writer.fail(stopped)
        self.reader.fail(stopped, for_good=True)


class ShardLink(Port):
    """A link to a shard, reconnected when it breaks. All methods belong on the io loop."""

    def __init__(self, session: ClusterSession, name: str, owner: BufferConnection):
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
                    self._owner.writer.port_down(self)
                await asyncio.sleep(RETRY_S)
                continue
            missing, said = 0, False
            self._owner.writer.port_up(self)
            self._owner.reader.port_up()
            await ended.wait()
            self._down()
        self.gone = True
        self._owner.port_gone(self)

    async def _open(self) -> asyncio.Event:
        address = await self._session.cluster.find(self._name).call("opening", timeout=30.0)
        ended = asyncio.Event()
        link = await self._session.connect(address, self._handle, lambda _: ended.set())
        hello = m.Hello(*self._owner.source, self._others_push, self._generation, self._had)
        welcome = m.decode(await link.request(m.OPEN, m.encode(hello)), m.Welcome)
        self._generation, self._pid = welcome.generation, welcome.slab.pid
        if address.machine == machine_id() and self._window(welcome.slab) is not None:
            link.post(m.SEES)
        self._link = link
        return ended

    def _down(self) -> None:
        self._had = self._waiting
        about = f"about {self._had} samples that waited there are lost" if self._had else "nothing is known to be lost"
        logger.warning("%s is gone: %s. The other shards go on, and this one is waited for", self._name, about)
        self._link = None
        self._windows, self._kept, self._freed, self._waiting = {}, {}, deque(), 0
        self._owner.writer.port_down(self)

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

    def send(self, batch: PendingBatch, done: Done) -> None:
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

    def pop(self, most: int, give: Give) -> None:
        self._release()
        if self.up:
            self._link.request(m.POP, m.encode(most)).add_done_callback(lambda f: self._answered(f, give))
        else:
            give(m.NOTHING, [], 0)

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

    def _answered(self, future: asyncio.Future[memoryview], give: Give) -> None:
        if future.cancelled() or (error := future.exception()) is not None:
            if not future.cancelled() and not isinstance(error, LinkLost):
                self._owner.reader.fail(error if isinstance(error, BrayError) else BrayError(str(error)))
            give(m.NOTHING, [], 0)
            return
        body = future.result()
        answer, start = m.unpack(body, m.Answer)
        self._waiting = answer.waiting
        if answer.kind != m.ROWS:
            give(answer.kind, [], answer.waiting)
            return
        layout, rows, lease = self._layouts.parse(answer.spec), answer.rows, answer.lease
        pieces: list[Chunk] = []
        if lease is None:  # a copy: rows are the reader's to write
            pieces = [Chunk(layout, layout.columns(np.array(body[start:]), rows), rows)]
        elif (memory := self._leased(lease, layout.offsets(lease.total)[1])) is not None:
            whole = Chunk(layout, layout.columns(memory, lease.total), lease.total)
            pieces = [whole.part(lease.first, lease.first + rows)]
        give(m.ROWS if pieces else m.NOTHING, pieces, answer.waiting)

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


def _later(function: Callable[[], None]) -> None:
    io.loop().call_later(_A_MOMENT, function)


def _now(function: Callable[[], None]) -> None:
    function()


def connection(settings: BufferDefinition) -> BufferConnection:
    """The connection of this process and session to a buffer."""
    here = session()
    return here.own(("buffer", settings.name), lambda: BufferConnection(settings, here))
