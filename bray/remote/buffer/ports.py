"""A process's connections to the shards of a buffer: a link to each, or direct calls where they are objects of the same
process."""

from __future__ import annotations

import asyncio
import logging
import time
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

import msgspec
import numpy as np

from bray.cluster import io
from bray.cluster.session import ClusterSession
from bray.errors import DataError, LinkLost, MissingComponent, Unreachable
from bray.remote.buffer import messages as m
from bray.remote.buffer.columns import Chunk, join, private
from bray.remote.buffer.slabs import SlabAddress, Window, look_into
from bray.remote.buffer.worker import BufferShard
from bray.serving.link import Link, machine_id
from bray.tree.layout import Layouts

logger = logging.getLogger("bray.remote")

RETRY_S = 0.5
"""Seconds before a shard that could not be reached is tried again."""
_GIVE_UP = 6  # a shard that was missing this often will not come back
_UNMAP_AFTER = 60.0  # slabs that nothing came from for this long

Got = Callable[[int, Chunk | None], None]


class Port(Protocol):
    """A shard, as its consumers see it. `got(kind, chunk)` is called when the answer comes."""

    index: int
    gone: bool
    """It will not come back."""

    @property
    def up(self) -> bool: ...

    def pop(self, most: int, got: Got) -> None: ...
    def withdraw(self) -> None: ...


class LocalPort:
    """A shard of this process."""

    up = True
    gone = False

    def __init__(self, index: int, shard: BufferShard):
        self.index, self.shard = index, shard

    def pop(self, most: int, got: Got) -> None:
        self.shard.pop(most, lambda kind, pieces, _: self._got(got, kind, pieces), self)

    def withdraw(self) -> None:
        self.shard.withdraw(self)

    def _got(self, got: Got, kind: int, pieces: list[Chunk]) -> None:
        chunk = pieces[0] if len(pieces) == 1 else join(pieces, private) if pieces else None
        got(kind, chunk)


class RemotePort:
    """A link to a shard, reconnected when it breaks. All methods belong on the io loop."""

    def __init__(self, session: ClusterSession, name: str, index: int, owner: PortOwner):
        self.session, self.index, self.owner = session, index, owner
        self.name = name
        self.link: Any = None
        self.waiting = 0
        """Samples in the shard, by its last answer."""
        self.gone = False
        self.others_push = False
        """Whether anyone but sources pushes to this buffer, so that it does not end with them. A restarted shard is
        told."""
        self._generation = self._had = 0  # the shard of the last connection, and how many samples waited there
        self._pid = 0
        self._layouts = Layouts()
        self._windows: dict[bytes, tuple[Window, float]] = {}  # nonce -> slab, when it was last used
        self._kept: dict[int, Any] = {}  # lease -> weak reference to the memory that arrays use
        self._freed: deque[int] = deque()
        self._keeping: Any = None

    @property
    def up(self) -> bool:
        return self.link is not None and not self.link.closed

    def connect(self) -> None:
        """Connect, and stay connected."""
        if self._keeping is None:
            self._keeping = io.spawn(self._keep(), f"the connection to {self.name}")

    def close(self) -> None:
        if self._keeping is not None:
            self._keeping.cancel()
        if self.link is not None and not self._kept:  # else memory that arrays here still show would be reused
            self.link.close()

    async def _keep(self) -> None:
        missing, said = 0, False
        while missing < _GIVE_UP:
            try:
                await self._open()
            except MissingComponent:
                missing += 1
                await asyncio.sleep(RETRY_S)
                continue
            except Unreachable as e:
                if not said:
                    logger.info("%s is not reached yet: %s", self.name, str(e).split(". The", 1)[0])
                    said = True
                    self.owner.port_down(self)
                await asyncio.sleep(RETRY_S)
                continue
            missing, said = 0, False
            self.owner.port_up(self)
            await self._ended.wait()
            self._down()
        self.gone = True
        self.owner.port_gone(self)

    async def _open(self) -> None:
        opening = await self.session.cluster.find(self.name).call("opening", timeout=30.0)
        ended = asyncio.Event()
        link = await self.session.connect(opening.address, self._handle, lambda _: ended.set())
        hello = m.Hello(*self.owner.source, self.others_push, self._generation, self._had)
        welcome = msgspec.msgpack.decode(await link.request(m.OPEN, msgspec.msgpack.encode(hello)), type=m.Welcome)
        self._generation, self._pid, slab = welcome.generation, welcome.slab[0], SlabAddress(*welcome.slab)
        if opening.address.machine == machine_id() and self._window(slab) is not None:
            link.post(m.SEES)
        self.link, self._ended = link, ended

    def _down(self) -> None:
        self._had = self.waiting
        about = f"about {self._had} samples that waited there are lost" if self._had else "nothing is known to be lost"
        logger.warning("%s is gone: %s. The other shards go on, and this one is waited for", self.name, about)
        self.link = None
        self._windows, self._kept, self._freed, self.waiting = {}, {}, deque(), 0
        self.owner.port_down(self)

    def _handle(self, link: Link, kind: int, number: int, body: memoryview) -> None:
        if kind != m.FREED:
            raise DataError(f"an unknown message {kind}: the processes run different versions")
        self.owner.port_freed(self, np.frombuffer(body, np.int64).tolist())

    # --- asking -------------------------------------------------------------------------------------------------------

    def pop(self, most: int, got: Got) -> None:
        self.release()
        self._ask(got, m.POP, m.pack_numbers(np.array([most], np.int64)))

    def withdraw(self) -> None:
        if self.up:
            self.link.post(m.WITHDRAW)

    def release(self) -> None:
        """Tell the shard which leases are not used here any more."""
        if self._freed and self.up:
            freed = [self._freed.popleft() for _ in range(len(self._freed))]
            self.link.post(m.RELEASE, m.pack_numbers(np.array(freed, np.int64)))

    def tick(self) -> None:
        """Called every second: the last leases are not followed by a question, and slabs of producers that have left
        take memory."""
        self.release()
        oldest = time.monotonic() - _UNMAP_AFTER
        self._windows = {nonce: (w, used) for nonce, (w, used) in self._windows.items() if used > oldest}

    def _ask(self, got: Got, kind: int, *pieces: bytes) -> None:
        if not self.up:
            got(m.NOTHING, None)
            return
        self.link.request(kind, *pieces).add_done_callback(lambda f: self._answered(f, got))

    def _answered(self, future: asyncio.Future[memoryview], got: Got) -> None:
        if future.cancelled() or (error := future.exception()) is not None:
            if not future.cancelled() and not isinstance(error, LinkLost):
                self.owner.port_failed(self, error)
            got(m.NOTHING, None)
            return
        answer = m.Answer(future.result(), self._layouts)
        self.waiting = answer.waiting
        kind, chunk = answer.kind, answer.chunk
        if answer.lease is not None:
            chunk = self._look(answer, answer.lease)
            kind = m.NOTHING if chunk is None else m.ROWS
        got(kind, chunk)

    def _window(self, slab: SlabAddress) -> Window | None:
        window = self._windows[slab.nonce][0] if slab.nonce in self._windows else look_into(slab)
        if window is not None:
            self._windows[slab.nonce] = window, time.monotonic()
        return window

    def _look(self, answer: m.Answer, lease: m.Lease) -> Chunk | None:
        """Rows in shared memory, as arrays of this process. When the last of these arrays goes, the shard is told.
        None: the shard has ended."""
        window = self._window(SlabAddress(self._pid, lease.fd, lease.nonce))
        if window is None:
            return None
        layout = answer.layout
        memory = window.data(lease.offset, max(1, layout.offsets(lease.total)[1]))
        kept, freed, number = self._kept, self._freed, lease.number

        def forgotten(_: Any) -> None:  # in any thread: no lock, no loop; `release` sends it
            kept.pop(number, None)
            freed.append(number)

        kept[number] = weakref.ref(memory, forgotten)
        chunk = Chunk(layout, layout.columns(memory, lease.total), lease.total)
        return chunk.part(lease.first, lease.first + answer.rows)


class PortOwner(Protocol):
    """Is told what happens to its ports, on the io loop."""

    source: tuple[str, bool]
    """The source that this process reads, and whether it has ended."""

    def port_up(self, port: RemotePort) -> None: ...
    def port_down(self, port: RemotePort) -> None: ...
    def port_gone(self, port: RemotePort) -> None: ...
    def port_freed(self, port: RemotePort, loans: list[int]) -> None: ...
    def port_failed(self, port: RemotePort, error: BaseException | None) -> None: ...
