"""How a process reaches the shards of a buffer: through a link each, or directly where they are objects of the same process."""

from __future__ import annotations

import asyncio
import logging
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

import msgspec
import numpy as np

from bray.cluster import io, wire
from bray.cluster.session import Session
from bray.errors import BrayError, LinkLost, MissingComponent, Unreachable
from bray.remote.buffer import messages as m
from bray.remote.buffer.columns import Chunk, Layouts
from bray.remote.buffer.messages import Facts
from bray.remote.buffer.slabs import Window, look_into
from bray.remote.buffer.worker import BufferShard, Hello, slab_address

logger = logging.getLogger("bray.remote")

_AGAIN = 0.5
_SURE = 6  # a shard that is asked for so often and is not there will not come back

Got = Callable[[int, Chunk | None, Facts], None]


class Port(Protocol):
    """A shard, as its consumers see it. `got(kind, chunk, facts)` is called when the answer comes."""

    index: int
    facts: Facts
    """What its last answer told."""
    gone: bool
    """For good."""

    @property
    def up(self) -> bool: ...

    def pop(self, most: int, got: Got) -> None: ...
    def withdraw(self) -> None: ...
    def draw(self, at: np.ndarray, wait: bool, largest: float, got: Got) -> None: ...
    def set_priorities(self, ids: np.ndarray, priorities: np.ndarray) -> None: ...


class LocalPort:
    """A shard of this process."""

    up = True
    gone = False

    def __init__(self, index: int, shard: BufferShard, join: Callable[[list[Chunk]], Chunk]):
        self.index, self.shard, self._join = index, shard, join
        self.facts = Facts()

    def pop(self, most: int, got: Got) -> None:
        self.shard.pop(most, lambda kind, pieces, facts: self._got(got, kind, pieces, facts), self)

    def withdraw(self) -> None:
        self.shard.withdraw(self)

    def draw(self, at: np.ndarray, wait: bool, largest: float, got: Got) -> None:
        self.shard.draw(at, wait, largest, lambda kind, pieces, facts: self._got(got, kind, pieces, facts))

    def set_priorities(self, ids: np.ndarray, priorities: np.ndarray) -> None:
        self.shard.set_priorities(ids, priorities)

    def _got(self, got: Got, kind: int, pieces: list[Chunk], facts: Facts) -> None:
        self.facts = facts
        got(kind, self._join(pieces) if pieces else None, facts)


class RemotePort:
    """A link to a shard, made anew when it breaks. All methods belong on the io loop."""

    def __init__(self, session: Session, name: str, index: int, owner: PortOwner):
        self.session, self.index, self.owner = session, index, owner
        self.name = f"buffer/{name}/{index}"
        self.link: Any = None
        self.window: Window | None = None
        self.facts = Facts()
        self.gone = False  # for good
        self.others_push = False
        """Others than sources push to this buffer, so that it does not end with them. A shard that was made anew is told."""
        self._generation = self._had = 0  # the shard that was there before, and what waited in it
        self._layouts = Layouts()
        self._kept: dict[int, Any] = {}  # leases: weak references to the memory that arrays use
        self._freed: deque[int] = deque()
        self._keeping: Any = None

    @property
    def up(self) -> bool:
        return self.link is not None and not self.link.closed

    def connect(self) -> None:
        """Connect, and stay so."""
        if self._keeping is None:
            self._keeping = io.spawn(self._keep(), f"the connection to {self.name}")

    def close(self) -> None:
        if self._keeping is not None:
            self._keeping.cancel()
        if self.link is not None and not self._kept:  # else the shard would reuse memory that arrays here still show
            self.link.close()

    async def _keep(self) -> None:
        missing, said = 0, False
        while missing < _SURE:
            try:
                await self._open()
            except MissingComponent:
                missing += 1
                await asyncio.sleep(_AGAIN)
                continue
            except Unreachable as e:
                if not said:
                    logger.info("%s is not reached yet: %s", self.name, str(e).split(". The", 1)[0])
                    said = True
                    self.owner.port_down(self)
                await asyncio.sleep(_AGAIN)
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
        link = await self.session.connect(opening.address, lost=lambda _: ended.set())
        hello = Hello(*self.owner.source, self.others_push, self._generation, self._had)
        self._generation, slab = slab_address(await link.request(m.OPEN, msgspec.msgpack.encode(hello)))
        self.window = look_into(slab) if opening.address.machine == wire.machine_id() else None
        if self.window is not None:
            link.post(m.SEES)
        self.link, self._ended = link, ended

    def _down(self) -> None:
        self._had = self.facts.waiting
        about = f"about {self._had} samples that waited there are lost" if self._had else "nothing is known to be lost"
        logger.warning("%s is gone: %s. The other shards go on, and this one is waited for", self.name, about)
        self.link = self.window = None
        self._kept, self._freed, self.facts = {}, deque(), Facts()
        self.owner.port_down(self)

    # --- asking -------------------------------------------------------------------------------------------------------

    def pop(self, most: int, got: Got) -> None:
        self.release()
        self._ask(got, m.POP, m.pack_numbers(np.array([most], np.int64)))

    def withdraw(self) -> None:
        if self.up:
            self.link.post(m.WITHDRAW)

    def draw(self, at: np.ndarray, wait: bool, largest: float, got: Got) -> None:
        self.release()
        self._ask(got, m.DRAW, m.pack_draw(wait, len(at), largest), m.pack_numbers(at))

    def set_priorities(self, ids: np.ndarray, priorities: np.ndarray) -> None:
        if self.up:
            self.link.post(m.PRIORITIES, m.pack_numbers(ids.astype(np.int64), priorities.astype(np.float64)))

    def release(self) -> None:
        """Tell the shard what is not used here any more."""
        if self._freed and self.up:
            freed = [self._freed.popleft() for _ in range(len(self._freed))]
            self.link.post(m.RELEASE, m.pack_numbers(np.array(freed, np.int64)))

    def _ask(self, got: Got, kind: int, *pieces: bytes) -> None:
        if not self.up:
            got(m.NOTHING, None, Facts())
            return
        self.link.request(kind, *pieces).add_done_callback(lambda f: self._answered(f, got))

    def _answered(self, future: asyncio.Future[memoryview], got: Got) -> None:
        if future.cancelled() or (error := future.exception()) is not None:
            if not future.cancelled() and not isinstance(error, LinkLost):
                self.owner.port_failed(self, error)
            got(m.NOTHING, None, Facts())
            return
        answer = m.Answer(future.result(), self._layouts)
        self.facts = answer.facts
        chunk = answer.chunk
        if answer.kind == m.LEASE:
            chunk = self._look(answer)
        got(m.ROWS if answer.kind == m.LEASE else answer.kind, chunk, answer.facts)

    def _look(self, answer: m.Answer) -> Chunk:
        """Rows that lie in the shard's slab, seen from here. When the last array that shows them goes, the shard is told."""
        assert self.window is not None
        layout = answer.layout
        memory = self.window.data(answer.offset, max(1, layout.offsets(answer.total)[1]))
        kept, freed, lease = self._kept, self._freed, answer.lease

        def forgotten(_: Any) -> None:  # in whatever thread: no lock, no loop; `release` sends it
            kept.pop(lease, None)
            freed.append(lease)

        kept[lease] = weakref.ref(memory, forgotten)
        chunk = Chunk(layout, layout.columns(memory, answer.total), answer.total)
        return chunk.part(answer.first, answer.first + answer.rows)


class PortOwner(Protocol):
    """Hears of its ports; called on the io loop."""

    source: tuple[str, bool]
    """The source that this process reads, and whether it has ended."""

    def port_up(self, port: RemotePort) -> None: ...
    def port_down(self, port: RemotePort) -> None: ...
    def port_gone(self, port: RemotePort) -> None: ...
    def port_failed(self, port: RemotePort, error: BaseException | None) -> None: ...


def gone(name: str) -> BrayError:
    return Unreachable(f"buffer {name!r} has been stopped: all its workers are gone")
