"""One entry for workers on many machines: games connect to it, and it hands each request to its session's owner (`use_gateway: head`).

    games --HTTP, TCP--> Server + Entry (no slots of its own) <--links-- Server + BehindEntry (listens to nobody else), one per worker

A worker connects to the entry, not the other way round: it is known from then on, and forgotten when the connection ends. It says who it
is, how many slots it has and which sessions run there, so that an entry that was killed and came back knows everything again. Later it
tells which sessions begin and end. The entry alone chooses owners, by free slots. A link carries the frames of `affinity.py`; its first bytes
are a secret that both sides know.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
import socket
from collections.abc import Callable
from time import perf_counter
from typing import Any

from bray.serving.affinity import _ANSWER, _NUMBERS, Inbound, Outbound, PeerRequest, _Numbers
from bray.serving.protocol import AUTO, START, TICK, Refusal, no_session
from bray.serving.sessions import Request, Sessions

logger = logging.getLogger("bray.serving")

_HELLO, _BEGAN, _OVER = (
    1000,
    1001,
    1002,
)  # statuses beside those of the protocol: what a worker tells without being asked
_NOTICES = 1000
_GREETING_S = 5.0  # for a connection to say the secret
_GRACE_S = 5.0  # a worker answers a late tick itself; one that has not after this much longer is not going to


def hardy(sock: Any) -> None:
    """Let the kernel notice, within about ten seconds, that the machine at the other end of a TCP connection is gone."""
    if sock is not None and sock.family != socket.AF_UNIX:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in (
            ("TCP_KEEPIDLE", 3),
            ("TCP_KEEPINTVL", 2),
            ("TCP_KEEPCNT", 3),
            ("TCP_USER_TIMEOUT", 9000),
        ):
            if hasattr(socket, option):
                sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)


# --- the entry's side -----------------------------------------------------------------------------------------------------


class _Door(asyncio.Protocol):
    """A connection that has not said the secret yet."""

    def __init__(self, entry: Entry):
        self._entry, self._said = entry, b""

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        hardy(transport.get_extra_info("socket"))
        self._timer = asyncio.get_running_loop().call_later(_GREETING_S, transport.abort)

    def data_received(self, data: bytes) -> None:
        self._said += data
        secret = self._entry.secret
        if len(self._said) < len(secret):
            return
        self._timer.cancel()
        said, rest = self._said[: len(secret)], self._said[len(secret) :]
        if not hmac.compare_digest(said, secret):
            logger.warning("a connection to the entry did not know the secret and is closed")
            self._transport.abort()
            return
        worker = Behind(self._entry)
        self._transport.set_protocol(worker)
        worker.connection_made(self._transport)
        if rest:
            worker.data_received(rest)

    def connection_lost(self, exc: Exception | None) -> None:
        self._timer.cancel()


class Behind(Outbound):
    """A worker as the entry sees it."""

    gateway: Any  # the Entry

    def __init__(self, entry: Entry):
        super().__init__(entry, -1)  # type: ignore[arg-type]
        self.name, self.slots = "", 0
        self.sessions: set[bytes] = set()
        self.lent = 0  # slots taken by stateless requests

    @property
    def free(self) -> int:
        return self.slots - len(self.sessions) - self.lent

    def frames(self, data: bytes) -> tuple[int, int]:
        waiting, answered, size, at, end = self.waiting, self.gateway.answered, _ANSWER.size, 0, len(data)
        while end - at >= size:
            number, status, body = _ANSWER.unpack_from(data, at)
            b = at + size
            c = b + body
            if c > end:
                return at, c - at
            at = c
            if status >= _NOTICES:
                self.gateway.told(self, status, data[b:c])
                continue
            request = waiting.pop(number, None)
            if request is not None:  # else it was answered without the worker
                answered(request, self, status, data[b:c])
        return at, size


class Entry:
    """The gateway of a server that has no slots of its own (`actors_per_worker` 0): all its workers, on all machines."""

    def __init__(self, sessions: Sessions, secret: bytes, numbers: Callable[[], dict[str, float]]):
        self.sessions, self.secret, self._numbers = sessions, secret, numbers
        self.workers: dict[str, Behind] = {}
        self.owners: dict[bytes, Behind] = {}
        self.forwarded = 0
        self._tried: dict[Request, set[Behind]] = {}  # who had no room for it after all
        self._limit = sessions.config.tick_timeout_s + _GRACE_S
        self._changed = asyncio.Event()  # set anew whenever a worker comes
        self._timer = sessions.loop.call_later(1.0, self._end_late)
        sessions.gateway = self

    def door(self) -> asyncio.Protocol:
        """For a listening socket: makes the protocol of each connection."""
        return _Door(self)

    def close(self) -> None:
        self._timer.cancel()
        for worker in list(self.workers.values()):
            worker.transport.close()

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
            self._give(request.session, owner)
        # else its owner knows whether the session is about to end
        self._send(owner, request)
        return False

    def forward(self, request: Request) -> bool:
        owner = self.owners.get(request.session)
        if owner is None:
            return False
        self.forwarded += 1
        owner.ask(request)
        return True

    def spill(self, request: Request) -> bool:
        owner = self._roomiest()
        if owner is None:
            self._no_room(request)
        else:
            owner.lent += 1
            self._send(owner, request)
        return True

    def release(self, session: bytes) -> None:
        raise AssertionError("an entry has no sessions of its own")

    def lent(self, actors: int) -> None:
        raise AssertionError("an entry has no slots of its own")

    def running(self) -> int:
        return len(self.owners)

    def idle(self) -> bool:
        return not any(worker.waiting for worker in self.workers.values())

    # --- workers ------------------------------------------------------------------------------------------------------

    def _roomiest(self, but: frozenset[Behind] | set[Behind] = frozenset()) -> Behind | None:
        best = max((w for w in self.workers.values() if w not in but), key=lambda w: w.free, default=None)
        return best if best is not None and best.free > 0 else None

    def _give(self, session: bytes, owner: Behind) -> None:
        self.owners[session] = owner
        owner.sessions.add(session)

    def _no_room(self, request: Request) -> None:
        self._tried.pop(request, None)
        if self.workers:
            total = sum(w.slots for w in self.workers.values())
            refusal = Refusal(429, "no_free_slot", f"all {total} slots of this service are taken")
        else:
            refusal = Refusal(503, "overloaded", "none of the workers is there at the moment: try again later")
        self.sessions.refuse(request, refusal)

    def told(self, worker: Behind, what: int, body: bytes) -> None:
        """What a worker says without being asked."""
        if what == _BEGAN:
            self._give(body, worker)
        elif what == _OVER:
            worker.sessions.discard(body)
            if self.owners.get(body) is worker:
                del self.owners[body]
        elif what == _HELLO:
            about = json.loads(body)
            worker.name, worker.slots = about["name"], about["slots"]
            before = self.workers.get(worker.name)
            if before is not None:  # its connection has ended, and we have not heard it yet
                self.lost(before)
                before.transport.abort()
            self.workers[worker.name] = worker
            for session in about["sessions"]:
                name = session.encode()
                worker.sessions.add(name)
                self.owners.setdefault(name, worker)  # one that was started elsewhere meanwhile is the newer
            logger.info("%s is there: %d slots, %d sessions", worker.name, worker.slots, len(worker.sessions))
            self._changed.set()

    def lost(self, worker: Behind) -> None:
        """A worker has ended, or its machine is gone. Its sessions are lost, and what waits for it gets its answer here."""
        if self.workers.get(worker.name) is worker:
            del self.workers[worker.name]
            level = logging.INFO if self.sessions.draining else logging.ERROR
            logger.log(level, "%s is gone with %d sessions", worker.name, len(worker.sessions))
        for session in worker.sessions:
            if self.owners.get(session) is worker:
                del self.owners[session]
        worker.sessions.clear()
        waiting, worker.waiting = worker.waiting, {}
        for request in waiting.values():
            self._tried.pop(request, None)
            if request.kind == _NUMBERS:
                request.reply(503, b"")
            elif request.kind == START:
                why = "the worker that was to answer has just ended: try again"
                self.sessions.refuse(request, Refusal(503, "overloaded", why))
            elif request.kind == AUTO:  # it may have run
                why = "the worker that was to answer has just ended"
                self.sessions.refuse(request, Refusal(504, "tick_timeout", why))
            else:
                self.sessions.refuse(request, no_session(request.session))

    # --- requests on their way ----------------------------------------------------------------------------------------

    def _send(self, owner: Behind, request: Request) -> None:
        self.forwarded += 1
        owner.ask(request)

    def answered(self, request: Request, worker: Behind, status: int, body: bytes) -> None:
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
        else:
            if request.kind == START:
                self._give(request.session, other)
            else:
                other.lent += 1
            self._send(other, request)

    def _end_late(self) -> None:
        """Answer what a worker does not: it stands still."""
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
                if request.kind == _NUMBERS:
                    request.reply(503, b"")
                else:
                    self.sessions.refuse(request, Refusal(504, "tick_timeout", why))

    async def gather(self, timeout: float = 2.0) -> list[dict[str, float]]:
        """The numbers of all workers that answer in time; the entry's own are added to those of one of them."""
        futures = []
        for worker in self.workers.values():
            future: asyncio.Future[Any] = self.sessions.loop.create_future()
            futures.append(future)
            worker.ask(_Numbers(future))
        if futures:
            await asyncio.wait(futures, timeout=timeout)
        rows: list[dict[str, float]] = [row for f in futures if f.done() and (row := f.result()) is not None]
        own = self._numbers()
        if not rows:
            return [own]
        rows[0] = {name: rows[0].get(name, 0.0) + own.get(name, 0.0) for name in rows[0] | own}
        return rows


# --- the worker's side ----------------------------------------------------------------------------------------------------


class ToEntry(Inbound):
    """A worker's connection to the entry: requests come in, answers and notices go out."""

    def __init__(self, gateway: BehindEntry):
        super().__init__(gateway)  # type: ignore[arg-type]
        self._behind = gateway

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        hardy(transport.get_extra_info("socket"))
        self._behind.connected(self)

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._behind.disconnected(self)


class BehindEntry:
    """The gateway of a worker whose requests all come from an entry."""

    def __init__(self, sessions: Sessions, name: str, secret: bytes, numbers: Callable[[], dict[str, float]]):
        self.sessions, self.name, self._secret, self._numbers = sessions, name, secret, numbers
        self.link: ToEntry | None = None
        self.gone = asyncio.Event()
        """Set when there is no connection: make one with `link_to`."""
        self.gone.set()
        sessions.gateway = self

    def link_to(self) -> ToEntry:
        """The protocol of a new connection to the entry."""
        return ToEntry(self)

    def connected(self, link: ToEntry) -> None:
        self.link = link
        self.gone.clear()
        link.send(self._secret)
        names = [name.decode() for name in self.sessions.sessions]
        about = {"name": self.name, "slots": self.sessions.config.actors_per_worker, "sessions": names}
        self._tell(_HELLO, json.dumps(about).encode())

    def disconnected(self, link: ToEntry) -> None:
        if self.link is link:
            self.link = None
            self.gone.set()

    def close(self) -> None:
        if self.link is not None:
            self.link.transport.close()

    def _tell(self, what: int, body: bytes) -> None:
        if self.link is not None:  # else the next hello says it
            self.link.answer(0, what, body)

    def arrived(self, request: PeerRequest) -> None:
        """A request from the entry."""
        sessions = self.sessions
        if request.kind == _NUMBERS:
            request.reply(200, json.dumps(self._numbers()).encode())
        elif request.kind == START and request.session not in sessions.sessions:
            if sessions.draining:
                self.release(request.session)
                sessions.handle(request)
            elif self.place(request):
                sessions.begin_here(request)
        else:
            sessions.handle(request)

    # --- what Sessions asks -------------------------------------------------------------------------------------------

    def place(self, request: Request) -> bool:
        self._tell(_BEGAN, request.session)
        return True

    def forward(self, request: Request) -> bool:
        return False

    def spill(self, request: Request) -> bool:
        return False

    def release(self, session: bytes) -> None:
        self._tell(_OVER, session)

    def lent(self, actors: int) -> None:
        """The entry counts them itself."""

    def running(self) -> int:
        return 0

    def idle(self) -> bool:
        return True
