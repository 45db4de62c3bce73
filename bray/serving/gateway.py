"""Brings a session's requests to the worker that owns it. `Sessions` asks a gateway what it does not know itself.

    node   all workers of a machine listen on one port. A request that reaches another worker than its session's owner
           is forwarded. Owners are in a Table that the workers share: NodeGateway, in `node.py`.
    head   games connect to one server that has no slots of its own, and it forwards to workers on many machines:

           games --HTTP, TCP--> Server + HeadGateway <--links-- Server + BehindHead, one per worker, for nobody else

           A worker connects to the head, not the other way round, and is known until the connection ends. It says who
           it is, how many slots it has and which sessions run there, so that a head that was killed and came back knows
           everything again. Later it tells which sessions begin and end. The head alone chooses owners, by free slots.

Workers talk over `serving/link.py`. A request is (kind, lengths of session, key and client, session, key, client,
body), its reply a status and a body.
"""

from __future__ import annotations

import asyncio
import json
import logging
import struct
from collections.abc import Callable, Iterable
from time import perf_counter
from typing import Any

from bray.errors import BrayError
from bray.serving.link import Link
from bray.serving.metrics import Numbers
from bray.serving.protocol import AUTO, START, TICK, Refusal, no_session
from bray.serving.request import Gateway, Request
from bray.serving.server import Server

logger = logging.getLogger("bray.serving")

_LENGTHS = struct.Struct("<HHH")  # of session, key and client
_STATUS = struct.Struct("<H")
_pack_lengths, _unpack_lengths = _LENGTHS.pack, _LENGTHS.unpack_from
_pack_status, _unpack_status = _STATUS.pack, _STATUS.unpack_from
_SMALL = 1 << 12  # bytes; such a body is cheaper copied than sent as a piece of its own
_NUMBERS, _HELLO, _BEGAN, _OVER, _DISCONNECTED = range(16, 21)
"""Kinds of messages beside those of the protocol: a worker's numbers are asked; a worker tells who it is, and which
sessions begin and end; the connection of a session has closed."""
NOT_HERE = 999
"""A status beside those of the protocol: this worker does not own that session."""
GRACE_S = 5.0  # a worker answers a late tick itself; whoever forwarded it waits at most this much longer
_MAX_LARGE = 64 << 20  # bytes of bodies that one worker has not answered, beside those of less than _SMALL


def has_no_room(request: Request, status: int, body: bytes) -> bool:
    """Whether a worker could not begin what it was asked to, so that another may; other limits hold everywhere."""
    return status == 429 and request.kind in (START, AUTO) and json.loads(body)["error"] == "no_free_slot"


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

    def __init__(self, answered: Callable[[Any, Request, int, bytes], None], name: str):
        self._answered, self.name = answered, name
        self.link: Link | None = None
        self.waiting: dict[int, Request] = {}  # by the numbers of the link
        self.unsent: list[Request] = []  # until it is connected
        self.starts = self.lent = 0  # starts and stateless requests among them
        self.large = 0  # bytes of their bodies, beside small ones

    def connected(self, link: Link) -> None:
        self.link, self.waiting = link, link.asked
        link.replied, link.as_bytes = self._replied, True
        unsent, self.unsent = self.unsent, []
        for request in unsent:
            self._put(link, request)

    def is_full(self, most: int) -> bool:
        """Whether it has so many requests, or so large ones, to answer that it gets no more: one that stands still must
        not fill our memory."""
        return len(self.waiting) + len(self.unsent) >= most or self.large >= _MAX_LARGE

    def ask(self, request: Request) -> None:
        if request.kind != TICK or len(request.body) >= _SMALL:
            self._count(request, +1)
        if self.link is None:
            self.unsent.append(request)
        else:
            self._put(self.link, request)

    def tell_disconnected(self, session: bytes) -> None:
        """The connection that brought requests of this session of its is closed."""
        if self.link is not None and not self.link.closed:
            self.link.post(_DISCONNECTED, session)

    def _put(self, link: Link, request: Request) -> None:
        session, key, client = request.session, request.key, request.client
        names = _pack_lengths(len(session), len(key), len(client)) + session + key + client
        if len(request.body) < _SMALL:
            link.ask(request, request.kind, names + request.body)
        else:
            link.ask(request, request.kind, names, request.body)

    def _count(self, request: Request, n: int) -> None:
        self.starts += n * (request.kind == START)
        self.lent += n * (request.kind == AUTO)
        if len(request.body) >= _SMALL:
            self.large += n * len(request.body)

    def _replied(self, request: Request, body: bytes | None) -> None:
        if request.kind != TICK or len(request.body) >= _SMALL:
            self._count(request, -1)
        if body is None:
            failed = Refusal(
                500, "actor_error", "the worker could not read the request; the service's log has the reason"
            )
            self._answered(self, request, failed.status, failed.body)
        else:
            self._answered(self, request, _unpack_status(body)[0], body[_STATUS.size :])

    def take_all(self) -> list[Request]:
        """What it has not answered, and will not any more."""
        return self.take_late(float("inf"))

    def take_late(self, before: float) -> list[Request]:
        """What came before a time and is not answered; an answer that comes after all is thrown away."""
        late = []
        while self.waiting and (first := next(iter(self.waiting.items())))[1].arrived <= before:
            late.append(self.waiting.pop(first[0]))
        while self.unsent and self.unsent[0].arrived <= before:
            late.append(self.unsent.pop(0))
        for request in late:
            self._count(request, -1)
        return late


class Forwarding(Gateway):
    """What the gateways have in common."""

    def __init__(self, server: Server):
        """Of this worker, which is open."""
        self.sessions, self._numbers = server.sessions, server.all_numbers

    def handle(self, link: Link, kind: int, number: int, body: memoryview | bytes) -> None:
        """A message from another worker: mostly a request of one of its clients for a session here."""
        if kind == _NUMBERS:
            link.reply(number, json.dumps(self._numbers()).encode())
            return
        if kind == _DISCONNECTED:
            self.sessions.disconnected(bytes(body))
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
        self.sessions.handle(request)


class Sending(Forwarding):
    """A gateway that hands requests on: none for ever, and no more to a worker than that one can hold."""

    def __init__(self, server: Server):
        super().__init__(server)
        self.forwarded = 0
        server.gather = self.gather
        server.numbers.append(lambda: {"bray_requests_forwarded_total": self.forwarded})
        timeout = self.sessions.config.tick_timeout_s
        self._limit = timeout + min(GRACE_S, timeout)
        self._timer: asyncio.Handle = self.sessions.loop.call_soon(self._end_late)

    def peers(self) -> Iterable[Peer]:
        raise NotImplementedError

    def forget(self, request: Request) -> None:
        """A request has got its answer."""
        raise NotImplementedError

    async def gather(self, timeout: float = 2.0) -> list[Numbers]:
        """The numbers of all workers that answer in time."""
        raise NotImplementedError

    def idle(self) -> bool:
        return not any(peer.waiting or peer.unsent for peer in self.peers())

    def send(self, peer: Peer, request: Request) -> bool:
        """Hand a request on; False when it was refused instead."""
        if peer.is_full(self.sessions.config.max_pending):
            self.forget(request)
            why = f"{len(peer.waiting) + len(peer.unsent)} requests wait for {peer.name}: try again later"
            self.sessions.refuse(request, Refusal(503, "overloaded", why))
            return False
        self.forwarded += 1
        peer.ask(request)
        return True

    def _end_late(self) -> None:
        """Answer what a worker that stands still does not."""
        self._timer = self.sessions.loop.call_later(max(0.02, min(1.0, self._limit / 10)), self._end_late)
        before = perf_counter() - self._limit
        for peer in list(self.peers()):
            self.refuse_late(peer, before)

    def refuse_late(self, peer: Peer, before: float) -> None:
        for request in peer.take_late(before):
            self.forget(request)
            why = f"{peer.name} has not answered in time"
            self.sessions.refuse(request, Refusal(504, "tick_timeout", why))

    def refuse_lost(self, request: Request) -> None:
        """Answer a request whose worker is gone."""
        why = "the worker that was to answer has just ended"
        self.forget(request)
        if request.kind == START:
            refusal = Refusal(503, "overloaded", f"{why}: try again")
        elif request.kind == AUTO:  # it may have run
            refusal = Refusal(504, "tick_timeout", why)
        else:
            refusal = no_session(request.session)
        self.sessions.refuse(request, refusal)

    def refuse_full(self, request: Request, slots: int) -> None:
        self.forget(request)
        self.sessions.refuse(request, Refusal(429, "no_free_slot", f"all {slots} slots of this service are taken"))


async def ask_numbers(link: Link, timeout: float) -> Numbers | None:
    """The numbers of a worker; None when it does not answer in time."""
    try:
        numbers: Numbers = json.loads(bytes(await asyncio.wait_for(link.request(_NUMBERS), timeout)))
        return numbers
    except (BrayError, TimeoutError):
        return None


# --- one head before workers on many machines -------------------------------------------------------------------------


class HeadPeer(Peer):
    """A worker as the head sees it."""

    link: Link

    def __init__(self, answered: Callable[[Any, Request, int, bytes], None], link: Link, name: str, slots: int):
        super().__init__(answered, name)
        self.connected(link)
        self.slots = slots
        self.sessions: set[bytes] = set()

    @property
    def free(self) -> int:
        return self.slots - len(self.sessions) - self.lent


class HeadGateway(Sending):
    """The gateway of a server that has no slots of its own (`actors_per_worker` 0): all its workers, on all machines.
    `handle` and `lost` are for the Listener that the workers connect to."""

    def __init__(self, server: Server):
        super().__init__(server)
        self.workers: dict[str, HeadPeer] = {}
        self.owners: dict[bytes, HeadPeer] = {}
        self._addresses: dict[bytes, str] = {}  # session -> the client address whose slot it takes
        self._tried: dict[Request, set[HeadPeer]] = {}  # workers that had no room for it after all
        self._changed = asyncio.Event()  # set whenever a worker comes
        self.sessions.gateway = self

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
        if owner is not None:  # it knows whether the session is about to end
            self.send(owner, request)
            return False
        owner, access = self._roomiest(), self.sessions.access
        address = getattr(request, "address", "")
        if owner is None:
            self._no_room(request)
        elif (refusal := access.slot_refusal(address)) is not None:
            self.sessions.refuse(request, refusal)
        elif self.send(owner, request):
            self._addresses[request.session] = address
            self._give(request.session, owner)
        else:
            access.free_slot(address)
        return False

    def forward(self, request: Request) -> bool:
        owner = self.owners.get(request.session)
        if owner is None:
            return False
        self.send(owner, request)
        return True

    def spill(self, request: Request) -> bool:
        owner = self._roomiest()
        if owner is None:
            self._no_room(request)
        else:
            self.send(owner, request)
        return True

    def disconnected(self, session: bytes) -> None:
        owner = self.owners.get(session)
        if owner is not None:
            owner.tell_disconnected(session)

    def running(self) -> int:
        return len(self.owners)

    def peers(self) -> Iterable[Peer]:
        return self.workers.values()

    def forget(self, request: Request) -> None:
        self._tried.pop(request, None)

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
        if self.workers:
            self.refuse_full(request, sum(w.slots for w in self.workers.values()))
        else:
            why = "none of the workers is there at the moment: try again later"
            self.forget(request)
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
        """A worker has ended, or its machine is gone. Its sessions are lost, and what waits for it gets its answer
        here."""
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
            self.refuse_lost(request)

    # --- requests on their way ----------------------------------------------------------------------------------------

    def _answered(self, worker: HeadPeer, request: Request, status: int, body: bytes) -> None:
        if request.kind == TICK:  # nearly always
            request.reply(status, body)
            return
        if not has_no_room(request, status, body):
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
        if self.send(other, request) and request.kind == START:
            self._give(request.session, other)

    async def gather(self, timeout: float = 2.0) -> list[Numbers]:
        """The head's own are added to those of one of them."""
        asked = await asyncio.gather(*[ask_numbers(worker.link, timeout) for worker in self.workers.values()])
        rows = [row for row in asked if row is not None]
        own = self._numbers()
        if not rows:
            return [own]
        rows[0] = {name: rows[0].get(name, 0.0) + own.get(name, 0.0) for name in rows[0] | own}
        return rows


class BehindHead(Forwarding):
    """The gateway of a worker whose requests all come from a head. `handle` and `lost` are for its connection."""

    def __init__(self, server: Server, name: str):
        super().__init__(server)
        self.name = name
        self.link: Link | None = None
        self.gone = asyncio.Event()
        """Set when there is no connection: make one and call `connected`."""
        self.gone.set()
        self.sessions.access.sessions = None  # the head counts the sessions of an address
        self.sessions.gateway = self

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
        if self.sessions.draining:
            self.release(request.session)
            self.sessions.handle(request)
        else:
            self.place(request)
            self.sessions.begin_here(request)

    # --- what Sessions asks -------------------------------------------------------------------------------------------

    def place(self, request: Request) -> bool:
        self._tell(_BEGAN, request.session)
        return True

    def release(self, session: bytes) -> None:
        self._tell(_OVER, session)
