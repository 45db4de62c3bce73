"""Brings a session's requests to the worker that owns it. `Sessions` asks a gateway what it does not know itself.

    node   all workers of a machine listen on one port. A request that reaches another worker than its session's owner is forwarded. Owners
           are in a Table that the workers share: NodeGateway.
    head   games connect to one server that has no slots of its own, and it forwards to workers on many machines:

           games --HTTP, TCP--> Server + HeadGateway <--links-- Server + BehindHead (listens to nobody else), one per worker

           A worker connects to the head, not the other way round, and is known until the connection ends. It says who it is, how many slots it
           has and which sessions run there, so that a head that was killed and came back knows everything again. Later it tells which
           sessions begin and end. The head alone chooses owners, by free slots.

Workers talk over `serving/link.py`. A request is (kind, lengths of session, key and client, session, key, client, body), its reply a status and a body.
"""

from __future__ import annotations

import asyncio
import json
import logging
import struct
from collections.abc import Callable, Iterable
from pathlib import Path
from time import perf_counter
from typing import Any

from bray.errors import BrayError
from bray.serving.link import Address, Link, Listener, connect, machine_id
from bray.serving.protocol import AUTO, START, TICK, Refusal, no_session
from bray.serving.sessions import Gateway, Request, Sessions
from bray.serving.table import Table

logger = logging.getLogger("bray.serving")

_LENGTHS = struct.Struct("<HHH")  # of session, key and client
_STATUS = struct.Struct("<H")
_pack_lengths, _unpack_lengths = _LENGTHS.pack, _LENGTHS.unpack_from
_pack_status, _unpack_status = _STATUS.pack, _STATUS.unpack_from
_SMALL = 1 << 12  # bytes; such a body is cheaper copied than sent as a piece of its own
_NUMBERS, _HELLO, _BEGAN, _OVER = range(16, 20)
"""Kinds of messages beside those of the protocol: a worker's numbers are asked; a worker tells who it is, and which sessions begin and end."""
_NOT_HERE = 999  # a status beside those of the protocol: this worker does not own that session
_GRACE_S = 5.0  # a worker answers a late tick itself; the head gives it this much longer

Numbers = dict[str, float]


class PeerRequest(Request):
    """A request that another worker received."""

    __slots__ = ("link", "number")

    def __init__(self, kind: int, session: bytes, key: bytes, body: bytes, link: Link, number: int):
        self.kind, self.session, self.key, self.body = kind, session, key, body
        self.arrived = perf_counter()
        self.link, self.number = link, number

    def reply(self, status: int, body: bytes) -> None:
        if len(body) < _SMALL:
            self.link.reply(self.number, _pack_status(status) + body)
        else:
            self.link.reply(self.number, _pack_status(status), body)


class Peer:
    """Another worker as this one sees it, and the requests that it has not answered."""

    def __init__(self, answered: Callable[[Any, Request, int, bytes], None]):
        self._answered = answered
        self.link: Link | None = None
        self.waiting: dict[int, Request] = {}  # by the numbers of the link
        self.unsent: list[Request] = []  # until it is connected

    def connected(self, link: Link) -> None:
        self.link, self.waiting = link, link.asked
        link.replied, link.as_bytes = self._replied, True
        unsent, self.unsent = self.unsent, []
        for request in unsent:
            self.ask(request)

    def ask(self, request: Request) -> None:
        if self.link is None:
            self.unsent.append(request)
            return
        session, key, client = request.session, request.key, request.client
        names = _pack_lengths(len(session), len(key), len(client)) + session + key + client
        if len(request.body) < _SMALL:
            self.link.ask(request, request.kind, names + request.body)
        else:
            self.link.ask(request, request.kind, names, request.body)

    def _replied(self, request: Request, body: bytes | None) -> None:
        if body is None:
            failed = Refusal(
                500, "actor_error", "the worker could not read the request; the service's log has the reason"
            )
            self._answered(self, request, failed.status, failed.body)
        else:
            self._answered(self, request, _unpack_status(body)[0], body[_STATUS.size :])

    def take_all(self) -> list[Request]:
        """What it has not answered, and will not any more."""
        lost = [*self.waiting.values(), *self.unsent]
        self.waiting.clear()
        self.unsent.clear()
        return lost


class _Forwarding(Gateway):
    """What the gateways have in common."""

    def __init__(self, sessions: Sessions, numbers: Callable[[], Numbers]):
        self.sessions, self._numbers = sessions, numbers
        self.forwarded = 0

    def handle(self, link: Link, kind: int, number: int, body: memoryview | bytes) -> None:
        """A message from another worker: mostly a request of one of its clients for a session here."""
        if kind == _NUMBERS:
            link.reply(number, json.dumps(self._numbers()).encode())
            return
        if type(body) is not bytes:
            link.as_bytes, body = True, bytes(body)
        session, key, client = _unpack_lengths(body)
        a = _LENGTHS.size + session
        b = a + key
        c = b + client
        request = PeerRequest(kind, body[_LENGTHS.size : a], body[a:b], body[c:], link, number)
        request.client = body[b:c]
        if kind == START and request.session not in self.sessions.sessions:
            self._start_here(request)
        else:
            self.sessions.handle(request)

    def _start_here(self, request: PeerRequest) -> None:
        """A session that another worker places here."""
        if self.sessions.draining:
            self.release(request.session)
            self.sessions.handle(request)
        else:
            self.sessions.begin_here(request)

    def _refuse_lost(self, request: Request) -> None:
        """Answer a request whose worker is gone."""
        why = "the worker that was to answer has just ended"
        if request.kind == START:
            refusal = Refusal(503, "overloaded", f"{why}: try again")
        elif request.kind == AUTO:  # it may have run
            refusal = Refusal(504, "tick_timeout", why)
        else:
            refusal = no_session(request.session)
        self.sessions.refuse(request, refusal)

    def _refuse_full(self, request: Request, slots: int) -> None:
        self.sessions.refuse(request, Refusal(429, "no_free_slot", f"all {slots} slots of this service are taken"))


async def _ask_numbers(link: Link, timeout: float) -> Numbers | None:
    """The numbers of a worker; None when it does not answer in time."""
    try:
        return json.loads(bytes(await asyncio.wait_for(link.request(_NUMBERS), timeout)))
    except (BrayError, TimeoutError):
        return None


# --- workers of one machine -----------------------------------------------------------------------------------------------


class NodeGateway(_Forwarding):
    """The other workers of this machine, as one worker sees them. Their sockets are in a directory that only this user can read."""

    def __init__(
        self,
        sessions: Sessions,
        table: Table,
        directory: Path,
        me: int,
        numbers: Callable[[], Numbers],
        forward: bool = True,
    ):
        super().__init__(sessions, numbers)
        self.table, self.directory, self.me = table, directory, me
        self.owners: dict[bytes, int] = {}  # of sessions elsewhere that were asked for here
        self._max_owners = max(1024, 4 * table.workers * table.slots)
        self._peers: dict[int, Peer] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._retried: set[Request] = set()  # requests whose owner was not where we thought
        self._listener = Listener(self.handle, b"")
        if forward:
            sessions.gateway = self

    async def start(self) -> None:
        path = self._path(self.me)
        path.unlink(missing_ok=True)  # of the worker whose place this one takes
        await self._listener.start_unix(str(path))
        self.table.open(self.me, True)

    def _path(self, worker: int) -> Path:
        return self.directory / f"{worker}.sock"

    async def close(self) -> None:
        self.table.open(self.me, False)
        await self._listener.close()
        for peer in self._peers.values():
            if peer.link is not None:
                peer.link.close()

    # --- what Sessions asks -------------------------------------------------------------------------------------------

    def place(self, request: Request) -> bool:
        try:
            owner = self.table.claim(request.session, self.me)
        except KeyError as e:
            (owner,) = e.args
            if owner == self.me or isinstance(request, PeerRequest):
                self.sessions.exists(request)
            else:  # it knows whether the session is about to end, and nobody answers where it was killed
                self._send(owner, request)
            return False
        if owner is None:
            self._refuse_full(request, self.table.total())
            return False
        if owner == self.me:
            return True
        self._remember(request.session, owner)
        self._send(owner, request)
        return False

    def forward(self, request: Request) -> bool:
        if isinstance(request, PeerRequest):
            request.reply(_NOT_HERE, b"")
            return True
        owner = self.owners.get(request.session)
        if owner is None:
            owner = self.table.find(request.session)
            if owner is None or owner == self.me:
                return False
            self._remember(request.session, owner)
        self._send(owner, request)
        return True

    def spill(self, request: Request) -> bool:
        owner = None if isinstance(request, PeerRequest) else self.table.roomiest(self.me)
        if owner is None:
            return False
        self._send(owner, request)
        return True

    def release(self, session: bytes) -> None:
        self.table.release(session, self.me)

    def lent(self, actors: int) -> None:
        self.table.lend(self.me, actors)

    def running(self) -> int:
        return self.table.running()

    def idle(self) -> bool:
        return not any(peer.waiting or peer.unsent for peer in self._peers.values())

    def _remember(self, session: bytes, owner: int) -> None:
        if len(self.owners) >= self._max_owners:
            self.owners.pop(next(iter(self.owners)))
        self.owners[session] = owner

    # --- requests on their way ----------------------------------------------------------------------------------------

    def _send(self, owner: int, request: Request) -> None:
        self.forwarded += 1
        peer = self._peers.get(owner)
        if peer is None:
            peer = self._peers[owner] = Peer(self._answered)
            task = self.sessions.loop.create_task(self._connect(owner, peer))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        peer.ask(request)

    async def _connect(self, owner: int, peer: Peer) -> None:
        try:
            link = await self._link_to(owner, lost=lambda link: self._lost(owner, peer))
        except BrayError:
            self._lost(owner, peer)
        else:
            peer.connected(link)
            if link.closed:  # it died meanwhile
                self._lost(owner, peer)

    async def _link_to(self, worker: int, lost: Callable[[Link], None] | None = None) -> Link:
        return await connect(Address(machine_id(), str(self._path(worker)), "", 0), b"", lost=lost)

    def _start_here(self, request: PeerRequest) -> None:
        if self.table.settle(request.session, self.me):
            super()._start_here(request)
        else:  # its place in the table was given back meanwhile
            self.sessions.handle(request)

    def _answered(self, peer: Peer, request: Request, status: int, body: bytes) -> None:
        if status == 200 and not self._retried:  # nearly always
            request.reply(status, body)
            return
        if status != _NOT_HERE:
            if request.kind not in (AUTO, START) and status == 404:
                self.owners.pop(request.session, None)
            self._retried.discard(request)
            request.reply(status, body)
            return
        self.owners.pop(request.session, None)
        owner = None if request in self._retried else self.table.find(request.session)
        if owner is None:
            self._retried.discard(request)
            self._refuse_lost(request)
        elif owner == self.me:
            self.sessions.handle(request)
        else:
            self._retried.add(request)
            self._remember(request.session, owner)
            self._send(owner, request)

    def _lost(self, owner: int, peer: Peer) -> None:
        """A worker has died: what waits for it is answered here."""
        if self._peers.get(owner) is peer:
            del self._peers[owner]
        for session in [s for s, o in self.owners.items() if o == owner]:
            del self.owners[session]
        self.table.clear_if_dead(owner)
        for request in peer.take_all():
            self._retried.discard(request)
            if request.kind == START:
                self.table.release(request.session, owner)
            self._refuse_lost(request)

    async def gather(self, timeout: float = 2.0) -> list[Numbers]:
        """The numbers of all workers that answer in time."""

        async def ask(worker: int) -> Numbers | None:
            try:
                link = await self._link_to(worker)
            except BrayError:
                return None
            try:
                return await _ask_numbers(link, timeout)
            finally:
                link.close()

        others = await asyncio.gather(*[ask(worker) for worker in self.table.used() if worker != self.me])
        return [self._numbers(), *[row for row in others if row is not None]]


# --- one head before workers on many machines -----------------------------------------------------------------------------


class HeadPeer(Peer):
    """A worker as the head sees it."""

    link: Link

    def __init__(self, answered: Callable[[Any, Request, int, bytes], None], link: Link, name: str, slots: int):
        super().__init__(answered)
        self.connected(link)
        self.name, self.slots = name, slots
        self.sessions: set[bytes] = set()
        self.lent = 0  # slots taken by stateless requests

    @property
    def free(self) -> int:
        return self.slots - len(self.sessions) - self.lent


class HeadGateway(_Forwarding):
    """The gateway of a server that has no slots of its own (`actors_per_worker` 0): all its workers, on all machines. `handle` and `lost` are for
    the Listener that the workers connect to."""

    def __init__(self, sessions: Sessions, numbers: Callable[[], Numbers]):
        super().__init__(sessions, numbers)
        self.workers: dict[str, HeadPeer] = {}
        self.owners: dict[bytes, HeadPeer] = {}
        self._addresses: dict[bytes, str] = {}  # session -> the client address whose slot it takes
        self._tried: dict[Request, set[HeadPeer]] = {}  # workers that had no room for it after all
        self._limit = sessions.config.tick_timeout_s + _GRACE_S
        self._changed = asyncio.Event()  # set whenever a worker comes
        self._timer = sessions.loop.call_later(1.0, self._end_late)
        sessions.gateway = self

    async def close(self) -> None:
        self._timer.cancel()
        for worker in list(self.workers.values()):
            worker.link.close()

    async def wait_for(self, workers: set[str], timeout: float) -> bool:
        """Wait until these are there; False when they are not in time."""
        try:
            async with asyncio.timeout(timeout):
                while not workers <= set(self.workers):
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            return False
        return True

    # --- what Sessions asks -------------------------------------------------------------------------------------------

    def place(self, request: Request) -> bool:
        owner = self.owners.get(request.session)
        if owner is None:
            owner = self._roomiest()
            if owner is None:
                self._no_room(request)
                return False
            refusal = self.sessions.access.slot_refusal(getattr(request, "address", ""))
            if refusal is not None:
                self.sessions.refuse(request, refusal)
                return False
            self._addresses[request.session] = getattr(request, "address", "")
            self._give(request.session, owner)
        # else its owner knows whether the session is about to end
        self._send(owner, request)
        return False

    def forward(self, request: Request) -> bool:
        owner = self.owners.get(request.session)
        if owner is None:
            return False
        self._send(owner, request)
        return True

    def spill(self, request: Request) -> bool:
        owner = self._roomiest()
        if owner is None:
            self._no_room(request)
        else:
            owner.lent += 1
            self._send(owner, request)
        return True

    def running(self) -> int:
        return len(self.owners)

    def idle(self) -> bool:
        return not any(worker.waiting for worker in self.workers.values())

    # --- workers ------------------------------------------------------------------------------------------------------

    def _roomiest(self, but: Iterable[HeadPeer] = ()) -> HeadPeer | None:
        best = max((w for w in self.workers.values() if w not in but), key=lambda w: w.free, default=None)
        return best if best is not None and best.free > 0 else None

    def _give(self, session: bytes, owner: HeadPeer) -> None:
        self.owners[session] = owner
        owner.sessions.add(session)

    def _forget(self, session: bytes, owner: HeadPeer) -> None:
        if self.owners.get(session) is owner:
            del self.owners[session]
            if session in self._addresses:
                self.sessions.access.free_slot(self._addresses.pop(session))

    def _no_room(self, request: Request) -> None:
        self._tried.pop(request, None)
        if self.workers:
            self._refuse_full(request, sum(w.slots for w in self.workers.values()))
        else:
            why = "none of the workers is there at the moment: try again later"
            self.sessions.refuse(request, Refusal(503, "overloaded", why))

    def handle(self, link: Link, kind: int, number: int, body: memoryview | bytes) -> None:
        """What a worker tells."""
        worker: HeadPeer = link.data
        session = bytes(body)
        if kind == _HELLO:
            self._came(link, json.loads(session))
        elif kind == _BEGAN:
            self._give(session, worker)
        elif kind == _OVER:
            worker.sessions.discard(session)
            self._forget(session, worker)

    def _came(self, link: Link, about: dict[str, Any]) -> None:
        worker = link.data = HeadPeer(self._answered, link, about["name"], about["slots"])
        link.enable_keepalive()
        before = self.workers.get(worker.name)
        if before is not None:  # its connection has ended, and we have not heard it yet
            self.lost(before.link)
            before.link.abort()
        self.workers[worker.name] = worker
        for session in about["sessions"]:
            name = session.encode()
            worker.sessions.add(name)
            self.owners.setdefault(name, worker)  # one that was started elsewhere meanwhile is the newer
        logger.info("%s is there: %d slots, %d sessions", worker.name, worker.slots, len(worker.sessions))
        self._changed.set()

    def lost(self, link: Link) -> None:
        """A worker has ended, or its machine is gone. Its sessions are lost, and what waits for it gets its answer here."""
        worker: HeadPeer | None = link.data
        if worker is None:
            return
        if self.workers.get(worker.name) is worker:
            del self.workers[worker.name]
            level = logging.INFO if self.sessions.draining else logging.ERROR
            logger.log(level, "%s is gone with %d sessions", worker.name, len(worker.sessions))
        for session in worker.sessions:
            self._forget(session, worker)
        worker.sessions.clear()
        for request in worker.take_all():
            self._tried.pop(request, None)
            self._refuse_lost(request)

    # --- requests on their way ----------------------------------------------------------------------------------------

    def _send(self, owner: HeadPeer, request: Request) -> None:
        self.forwarded += 1
        owner.ask(request)

    def _answered(self, worker: HeadPeer, request: Request, status: int, body: bytes) -> None:
        if request.kind == TICK:  # nearly always
            request.reply(status, body)
            return
        if request.kind == AUTO:
            worker.lent -= 1
        if status != 429 or request.kind not in (START, AUTO):
            self._tried.pop(request, None)
            request.reply(status, body)
            return
        # It has less room than we thought: an Actor that does not end, or a session that has begun there a moment ago.
        tried = self._tried.setdefault(request, set())
        tried.add(worker)
        other = self._roomiest(tried)
        if other is None:
            self._no_room(request)
            return
        if request.kind == START:
            self._give(request.session, other)
        else:
            other.lent += 1
        self._send(other, request)

    def _end_late(self) -> None:
        """Answer what a worker that stands still does not."""
        self._timer = self.sessions.loop.call_later(1.0, self._end_late)
        before = perf_counter() - self._limit
        for worker in list(self.workers.values()):
            late = []
            for number, request in worker.waiting.items():
                if request.arrived > before:
                    break
                late.append(number)
            for number in late:
                request = worker.waiting.pop(number)
                self._tried.pop(request, None)
                if request.kind == AUTO:
                    worker.lent -= 1
                why = f"{worker.name} has not answered within {self._limit:g} s"
                self.sessions.refuse(request, Refusal(504, "tick_timeout", why))

    async def gather(self, timeout: float = 2.0) -> list[Numbers]:
        """The numbers of all workers that answer in time; the head's own are added to those of one of them."""
        asked = await asyncio.gather(*[_ask_numbers(worker.link, timeout) for worker in self.workers.values()])
        rows = [row for row in asked if row is not None]
        own = self._numbers()
        if not rows:
            return [own]
        rows[0] = {name: rows[0].get(name, 0.0) + own.get(name, 0.0) for name in rows[0] | own}
        return rows


class BehindHead(_Forwarding):
    """The gateway of a worker whose requests all come from a head. `handle` and `lost` are for its connection."""

    def __init__(self, sessions: Sessions, name: str, numbers: Callable[[], Numbers]):
        super().__init__(sessions, numbers)
        self.name = name
        self.link: Link | None = None
        self.gone = asyncio.Event()
        """Set when there is no connection: make one and call `connected`."""
        self.gone.set()
        sessions.access.sessions = None  # the head counts the sessions of an address
        sessions.gateway = self

    def connected(self, link: Link) -> None:
        if link.closed:
            return
        self.link = link
        self.gone.clear()
        link.enable_keepalive()
        names = [name.decode() for name in self.sessions.sessions]
        about = {"name": self.name, "slots": self.sessions.config.actors_per_worker, "sessions": names}
        self._tell(_HELLO, json.dumps(about).encode())

    def lost(self, link: Link) -> None:
        if self.link is link:
            self.link = None
            self.gone.set()

    async def close(self) -> None:
        if self.link is not None:
            self.link.close()

    def _tell(self, kind: int, body: bytes) -> None:
        if self.link is not None and not self.link.closed:  # else the next hello says it
            self.link.post(kind, body)

    def _start_here(self, request: PeerRequest) -> None:
        if not self.sessions.draining:
            self.place(request)
        super()._start_here(request)

    # --- what Sessions asks -------------------------------------------------------------------------------------------

    def place(self, request: Request) -> bool:
        self._tell(_BEGAN, request.session)
        return True

    def release(self, session: bytes) -> None:
        self._tell(_OVER, session)
