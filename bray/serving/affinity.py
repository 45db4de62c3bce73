"""Who owns a session: a table that all workers of a machine share, and the sockets over which they hand each other requests.

A session's owner is chosen at `start` by free slots. A request that reaches another worker is forwarded over a unix socket. The table is a
mapped file under a lock of the kernel: a worker that is killed, even inside the table, holds nobody up.

Workers have a parent that starts them in rows 0, 1, ... and clears the row of one that dies (`workers.py`), or they have none, `join` the
table and watch each other: each holds a lock of the kernel for as long as it lives.
"""

from __future__ import annotations

import asyncio
import fcntl
import hashlib
import json
import logging
import mmap
import os
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np

from bray.errors import ConfigError
from bray.serving.protocol import AUTO, START, TICK, Refusal, no_session
from bray.serving.sessions import Request, Sessions

logger = logging.getLogger("bray.serving")

# --- the table ------------------------------------------------------------------------------------------------------------

_WORKER = struct.Struct("<4i")  # open for new sessions, slots, sessions owned, slots lent to stateless requests
_ROW = _WORKER.size + 16  # of a worker: behind that the digest of its name, where it has joined
_ENTRY = struct.Struct("<16sii8x")  # digest of the session, its owner + 1 (0: nobody), who promised it the session + 1
_DIGEST = 16
_ENTRIES = np.dtype([("digest", "V16"), ("owner", "<i4"), ("promised_by", "<i4"), ("unused", "V8")])


class Table:
    """Sessions and their owners: open addressing with linear probing over digests, in a mapped file."""

    def __init__(self, path: Path, workers: int, slots: int, create: bool = False):
        """`create`: make the file where it is not there; several workers may do so at once."""
        self.workers, self.slots = workers, slots
        self.capacity = 1 << max(10, (2 * workers * slots - 1).bit_length())
        self._entries = _ROW * workers
        size = self._entries + self.capacity * _ENTRY.size
        self._mine: int | None = None  # the row that this process has joined
        self._fd = os.open(path, os.O_RDWR | (os.O_CREAT if create else 0), 0o600)
        if create:
            os.ftruncate(self._fd, size)  # sparse: pages that no session falls into are never made
        self._map = mmap.mmap(self._fd, size)

    def close(self) -> None:
        self._map.close()
        os.close(self._fd)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        fcntl.lockf(self._fd, fcntl.LOCK_EX, 1, 0)
        try:
            yield
        finally:
            fcntl.lockf(self._fd, fcntl.LOCK_UN, 1, 0)

    # --- workers without a parent -------------------------------------------------------------------------------------

    def join(self, name: str) -> int:
        """Take a row for as long as this process lives: the one that a worker of this name had before, else any that nobody holds. What
        the row's last worker owned is forgotten. From now on workers that have died are told from those that live."""
        digest, unused = _digest(name.encode()), bytes(_DIGEST)
        with self._locked():
            names = [self._map[i * _ROW + _WORKER.size : (i + 1) * _ROW] for i in range(self.workers)]
            for i in sorted(range(self.workers), key=lambda i: (names[i] != digest, names[i] != unused)):
                if self._hold(i):
                    lost = self._clear(i)
                    if lost:
                        logger.error("%s is here in place of one that died with %d sessions", name, lost)
                    self._map[i * _ROW + _WORKER.size : (i + 1) * _ROW] = digest
                    self._mine = i
                    return i
        raise ConfigError(f"{name} is one worker too many: {self.workers} of this service are alive on this machine")

    def _hold(self, i: int) -> bool:
        """Take a row's lock, which the kernel frees when this process ends; False when another process has it."""
        try:
            fcntl.lockf(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, 1 + i)
        except OSError:
            return False
        return True

    def _lives(self, i: int) -> bool:
        if self._mine is None or i == self._mine:
            return True  # with a parent, that one clears the rows of the dead
        if not self._hold(i):
            return True
        fcntl.lockf(self._fd, fcntl.LOCK_UN, 1, 1 + i)
        return False

    def leave(self) -> bool:
        """Give the row back before this process ends; whether nobody is left."""
        assert self._mine is not None
        with self._locked():
            self._clear(self._mine)
            fcntl.lockf(self._fd, fcntl.LOCK_UN, 1, 1 + self._mine)
            return not any(self._lives(i) for i in range(self.workers) if i != self._mine)

    def bury(self, worker: int) -> None:
        """Clear a worker's row if it has died."""
        with self._locked():
            if not self._lives(worker) and (lost := self._clear(worker)):
                logger.error("worker %d has died with %d sessions", worker, lost)

    # --- rows ---------------------------------------------------------------------------------------------------------

    def _worker(self, i: int) -> tuple[int, int, int, int]:
        return _WORKER.unpack_from(self._map, i * _ROW)

    def _set_worker(self, i: int, *values: int) -> None:
        _WORKER.pack_into(self._map, i * _ROW, *values)

    def _probe(self, digest: bytes) -> Iterator[tuple[int, bytes, int]]:
        """(place, digest, owner) of the entries from a digest's first place on, up to and with the first free one."""
        at = int.from_bytes(digest[:8], "little")
        for i in range(self.capacity):
            place = (at + i) & (self.capacity - 1)
            found, owner, _ = _ENTRY.unpack_from(self._map, self._entries + place * _ENTRY.size)
            yield place, found, owner - 1
            if not owner:
                return

    def _set(self, place: int, digest: bytes, owner: int, promised_by: int = -1) -> None:
        _ENTRY.pack_into(self._map, self._entries + place * _ENTRY.size, digest, owner + 1, promised_by + 1)

    def claim(self, session: bytes, me: int) -> int | None:
        """Choose an owner and write it down: the worker that asks unless another has clearly more room. None: no slot is free
        anywhere. KeyError, with its owner: the session is running."""
        digest = _digest(session)
        with self._locked():
            while True:
                free_place = dead = -1
                for place, found, owner in self._probe(digest):
                    free_place = place  # the last one of the probe
                    if owner >= 0 and found == digest:
                        if self._lives(owner):
                            raise KeyError(owner)
                        dead = owner
                if dead < 0:
                    best = self._choose(me, keep=self.slots // 4)
                    if best is None:
                        return None
                    if self._lives(best):
                        break
                    dead = best
                self._clear(dead)
            self._set(free_place, digest, best, -1 if best == me else me)
            is_open, slots, owned, lent = self._worker(best)
            self._set_worker(best, is_open, slots, owned + 1, lent)
            return best

    def _choose(self, me: int, keep: int) -> int | None:
        """The worker with the most free slots; `me` if the best has at most `keep` more: a session that is played elsewhere than where its
        connection ends costs half as much again, most of it here."""
        free = self._free()
        best = int(free.argmax())
        if free[best] <= 0:
            return None
        return me if free[me] > 0 and free[best] - free[me] <= keep else best

    def _free(self) -> np.ndarray:
        """Free slots of each worker; 0 or less where it takes no sessions."""
        is_open, slots, owned, lent = np.frombuffer(self._map, "<i4", self._entries // 4).reshape(-1, _ROW // 4).T[:4]
        return (slots - owned - lent) * is_open

    def settle(self, session: bytes, me: int) -> bool:
        """A session that another worker promised to this one is here; False when this one does not own it."""
        digest = _digest(session)
        with self._locked():
            for place, found, owner in self._probe(digest):
                if owner == me and found == digest:
                    self._set(place, digest, me)
                    return True
        return False

    def find(self, session: bytes) -> int | None:
        digest = _digest(session)
        with self._locked():
            return next((owner for _, found, owner in self._probe(digest) if owner >= 0 and found == digest), None)

    def release(self, session: bytes, owner: int) -> None:
        """Remove a session, if this worker owns it."""
        digest = _digest(session)
        with self._locked():
            for place, found, who in self._probe(digest):
                if who == owner and found == digest:
                    self._remove(place)
                    is_open, slots, owned, lent = self._worker(owner)
                    self._set_worker(owner, is_open, slots, max(0, owned - 1), lent)
                    return

    def _remove(self, place: int) -> None:
        """Free a place and close the gap: entries behind it move up, so that probes never stop too early."""
        mask = self.capacity - 1
        self._set(place, bytes(_DIGEST), -1)
        hole, at = place, place
        while True:
            at = (at + 1) & mask
            digest, owner, promised_by = _ENTRY.unpack_from(self._map, self._entries + at * _ENTRY.size)
            if not owner:
                return
            home = int.from_bytes(digest[:8], "little") & mask
            if (at - home) & mask >= (at - hole) & mask:
                self._set(hole, digest, owner - 1, promised_by - 1)
                self._set(at, bytes(_DIGEST), -1)
                hole = at

    def lend(self, me: int, lent: int) -> None:
        with self._locked():
            is_open, slots, owned, _ = self._worker(me)
            self._set_worker(me, is_open, slots, owned, lent)

    def roomy(self, me: int) -> int | None:
        """Another worker with a free slot, the one with the most."""
        with self._locked():
            while True:
                free = self._free()
                free[me] = 0
                best = int(free.argmax())
                if free[best] <= 0:
                    return None
                if self._lives(best):
                    return best
                self._clear(best)

    def running(self) -> int:
        """Sessions of all workers that live."""
        with self._locked():
            return sum(n for i in range(self.workers) if (n := self._worker(i)[2]) and self._lives(i))

    def total(self) -> int:
        """Slots of all workers that take sessions."""
        with self._locked():
            return sum(w[1] for i in range(self.workers) if (w := self._worker(i))[0])

    def used(self) -> list[int]:
        """The rows that have, or had, a worker."""
        with self._locked():
            return [i for i in range(self.workers) if self._worker(i)[1]]

    def open(self, worker: int, is_open: bool) -> None:
        """Whether a worker takes new sessions."""
        with self._locked():
            _, _, owned, lent = self._worker(worker)
            self._set_worker(worker, int(is_open), self.slots, owned, lent)

    def clear(self, dead: int) -> int:
        """Forget everything a worker owned or had promised to others, and count the others anew (it may have died while it counted);
        returns the number of sessions that are lost."""
        with self._locked():
            return self._clear(dead)

    def _clear(self, dead: int) -> int:
        """Entry by entry: whoever is killed in here leaves the sessions of the others where they are."""
        table = np.frombuffer(self._map, _ENTRIES, self.capacity, self._entries)
        is_lost = table["owner"] == dead + 1
        lost = int(is_lost.sum())
        places = np.flatnonzero(is_lost | (table["promised_by"] == dead + 1)).tolist()
        starts = [self._entries + place * _ENTRY.size for place in places]
        for digest in [self._map[at : at + _DIGEST] for at in starts]:
            self._remove(next(place for place, found, owner in self._probe(digest) if owner >= 0 and found == digest))
        owned = np.bincount(table["owner"], minlength=self.workers + 1)[1:].tolist()
        for i in range(self.workers):
            is_open, slots, _, lent = self._worker(i)
            self._set_worker(i, 0 if i == dead else is_open, slots, owned[i], 0 if i == dead else lent)
        return lost


def _digest(session: bytes) -> bytes:
    return hashlib.blake2b(session, digest_size=_DIGEST).digest()


# --- the sockets between workers ------------------------------------------------------------------------------------------

_ASK = struct.Struct("<IBHHI")  # number, kind, lengths of session, key, body
_ANSWER = struct.Struct("<IHI")  # number, status, length of body
_NUMBERS = 16  # a kind beside those of the protocol: a worker asks another for its numbers
_NOT_HERE = 999  # a status beside those of the protocol: this worker does not own that session


class PeerRequest(Request):
    """A request that another worker received."""

    __slots__ = ("link", "number")

    def __init__(self, kind: int, session: bytes, key: bytes, body: bytes, link: Inbound, number: int):
        self.kind, self.session, self.key, self.body = kind, session, key, body
        self.arrived = perf_counter()
        self.link, self.number = link, number

    def reply(self, status: int, body: bytes) -> None:
        self.link.answer(self.number, status, body)


class _Link(asyncio.Protocol):
    """Frames over a unix socket. What is written in one turn of the loop leaves in one piece."""

    def __init__(self) -> None:
        self.transport: Any = None
        self._loop = asyncio.get_running_loop()
        self._out: list[bytes] = []
        self._parts: list[bytes] = []  # of a frame that is not complete
        self._missing = 0  # at least so many bytes of it

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport

    def send(self, *pieces: bytes) -> None:
        if not self._out:
            self._loop.call_soon(self._flush)
        self._out += pieces

    def _flush(self) -> None:
        data = b"".join(self._out)
        self._out.clear()
        if self.transport is not None:
            self.transport.write(data)

    def data_received(self, data: bytes) -> None:
        if self._parts:
            self._parts.append(data)
            self._missing -= len(data)
            if self._missing > 0:
                return
            data = b"".join(self._parts)
            self._parts.clear()
        at, whole = self.frames(data)
        if at < len(data):
            self._parts.append(data[at:])
            self._missing = whole - (len(data) - at)

    def frames(self, data: bytes) -> tuple[int, int]:
        """Handle the complete frames; returns where the rest begins, and how long the frame there is at least."""
        raise NotImplementedError


class Inbound(_Link):
    """From another worker: its clients' requests for our sessions."""

    def __init__(self, gateway: NodeGateway):
        super().__init__()
        self.gateway = gateway

    def frames(self, data: bytes) -> tuple[int, int]:
        arrived, size, at, end = self.gateway.arrived, _ASK.size, 0, len(data)
        while end - at >= size:
            number, kind, session, key, body = _ASK.unpack_from(data, at)
            a = at + size
            b = a + session
            c = b + key
            d = c + body
            if d > end:
                return at, d - at
            at = d
            arrived(PeerRequest(kind, data[a:b], data[b:c], data[c:d], self, number))
        return at, size

    def answer(self, number: int, status: int, body: bytes) -> None:
        if self.transport is not None:
            self.send(_ANSWER.pack(number, status, len(body)), body)

    def connection_lost(self, exc: Exception | None) -> None:
        self.transport = None


class Outbound(_Link):
    """To another worker: requests for its sessions, and their answers back."""

    def __init__(self, gateway: NodeGateway, worker: int):
        super().__init__()
        self.gateway, self.worker = gateway, worker
        self.waiting: dict[int, Request] = {}
        self._numbers = count()

    def ask(self, request: Request) -> None:
        number = next(self._numbers) & 0xFFFFFFFF
        self.waiting[number] = request
        session, key, body = request.session, request.key, request.body
        self.send(_ASK.pack(number, request.kind, len(session), len(key), len(body)), session, key, body)

    def frames(self, data: bytes) -> tuple[int, int]:
        waiting, answered, size, at, end = self.waiting, self.gateway.answered, _ANSWER.size, 0, len(data)
        while end - at >= size:
            number, status, body = _ANSWER.unpack_from(data, at)
            b = at + size
            c = b + body
            if c > end:
                return at, c - at
            at = c
            request = waiting.pop(number, None)
            if request is not None:
                answered(request, self.worker, status, data[b:c])
        return at, size

    def connection_lost(self, exc: Exception | None) -> None:
        self.transport = None
        self.gateway.lost(self)


class _Numbers(Request):
    """The question for a worker's numbers."""

    __slots__ = ("future",)

    def __init__(self, future: asyncio.Future[Any]):
        super().__init__(_NUMBERS, b"", b"", b"")
        self.future = future

    def reply(self, status: int, body: bytes) -> None:
        if not self.future.done():
            self.future.set_result(json.loads(body) if status == 200 else None)


class NodeGateway:
    """The other workers of this machine, as one worker sees them."""

    def __init__(
        self,
        sessions: Sessions,
        table: Table,
        directory: Path,
        me: int,
        numbers: Callable[[], dict[str, float]],
        forward: bool = True,
    ):
        self.sessions, self.table, self.directory, self.me = sessions, table, directory, me
        self._numbers = numbers
        self.owners: dict[bytes, int] = {}  # of sessions elsewhere that were asked for here
        self._links: dict[int, Outbound] = {}
        self._connecting: dict[int, list[Request]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._once_more: set[Request] = set()  # requests whose owner was not where we thought
        self._owners_kept = max(1024, 4 * table.workers * table.slots)
        self.forwarded = 0
        if forward:
            sessions.gateway = self

    async def start(self) -> None:
        path = _socket_path(self.directory, self.me)
        path.unlink(missing_ok=True)  # of the worker whose place this one takes
        loop = asyncio.get_running_loop()
        self._server = await loop.create_unix_server(lambda: Inbound(self), str(path))
        self.table.open(self.me, True)

    def close(self) -> None:
        self.table.open(self.me, False)
        self._server.close()
        for link in self._links.values():
            link.transport.close()

    def idle(self) -> bool:
        return not any(self._connecting.values()) and not any(link.waiting for link in self._links.values())

    def running(self) -> int:
        return self.table.running()

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
            total = self.table.total()
            self.sessions.refuse(request, Refusal(429, "no_free_slot", f"all {total} slots of this service are taken"))
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
        if isinstance(request, PeerRequest):
            return False
        owner = self.table.roomy(self.me)
        if owner is None:
            return False
        self._send(owner, request)
        return True

    def release(self, session: bytes) -> None:
        self.table.release(session, self.me)

    def lent(self, actors: int) -> None:
        self.table.lend(self.me, actors)

    def _remember(self, session: bytes, owner: int) -> None:
        if len(self.owners) >= self._owners_kept:
            self.owners.pop(next(iter(self.owners)))
        self.owners[session] = owner

    # --- requests on their way ----------------------------------------------------------------------------------------

    def _send(self, owner: int, request: Request) -> None:
        self.forwarded += 1
        link = self._links.get(owner)
        if link is not None:
            link.ask(request)
        elif owner in self._connecting:
            self._connecting[owner].append(request)
        else:
            self._connecting[owner] = [request]
            task = asyncio.get_running_loop().create_task(self._connect(owner))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _connect(self, owner: int) -> None:
        loop = asyncio.get_running_loop()
        try:
            path = str(_socket_path(self.directory, owner))
            _, link = await loop.create_unix_connection(lambda: Outbound(self, owner), path)
        except OSError:
            link = None
        if link is None or link.transport is None:  # it has died, or did while the two were being connected
            self.table.bury(owner)
            for request in self._connecting.pop(owner):
                self._lost(request, owner)
            return
        self._links[owner] = link
        for request in self._connecting.pop(owner):
            link.ask(request)

    def arrived(self, request: PeerRequest) -> None:
        """A request from another worker."""
        if request.kind == TICK:
            self.sessions.handle(request)
        elif request.kind == _NUMBERS:
            request.reply(200, json.dumps(self._numbers()).encode())
        elif request.kind == START and request.session not in self.sessions.sessions:
            if not self.table.settle(request.session, self.me):  # its place in the table was given back meanwhile
                self.sessions.handle(request)
            elif self.sessions.draining:
                self.release(request.session)
                self.sessions.handle(request)
            else:
                self.sessions.begin_here(request)
        else:
            self.sessions.handle(request)

    def answered(self, request: Request, owner: int, status: int, body: bytes) -> None:
        if status == 200 and not self._once_more:  # nearly always
            request.reply(status, body)
            return
        if status != _NOT_HERE:
            if request.kind not in (AUTO, START) and status == 404:
                self.owners.pop(request.session, None)
            self._once_more.discard(request)
            request.reply(status, body)
            return
        self.owners.pop(request.session, None)
        if request not in self._once_more and (now := self.table.find(request.session)) is not None:
            if now == self.me:
                self.sessions.handle(request)
            else:
                self._once_more.add(request)
                self._remember(request.session, now)
                self._send(now, request)
            return
        self._once_more.discard(request)
        self._refuse_lost(request)

    def lost(self, link: Outbound) -> None:
        """A worker has died: what waits for it gets no answer from it any more."""
        if self._links.get(link.worker) is link:
            del self._links[link.worker]
        for session in [s for s, owner in self.owners.items() if owner == link.worker]:
            del self.owners[session]
        self.table.bury(link.worker)
        waiting, link.waiting = link.waiting, {}
        for request in waiting.values():
            self._lost(request, link.worker)

    def _lost(self, request: Request, owner: int) -> None:
        self.owners.pop(request.session, None)
        self._once_more.discard(request)
        if request.kind == START:
            self.table.release(request.session, owner)
        self._refuse_lost(request)

    def _refuse_lost(self, request: Request) -> None:
        if request.kind == START:
            refusal = Refusal(503, "overloaded", "the worker that was to answer has just ended: try again")
        elif request.kind == AUTO:  # it may have run
            refusal = Refusal(504, "tick_timeout", "the worker that was to answer has just ended")
        else:
            refusal = no_session(request.session)
        if request.kind == _NUMBERS:
            request.reply(503, b"")
        else:
            self.sessions.refuse(request, refusal)

    async def gather(self, timeout: float = 2.0) -> list[dict[str, float]]:
        """The numbers of all workers that answer in time."""
        loop = asyncio.get_running_loop()
        futures = []
        for worker in self.table.used():
            if worker != self.me:
                future: asyncio.Future[Any] = loop.create_future()
                futures.append(future)
                self._send(worker, _Numbers(future))
        if futures:
            await asyncio.wait(futures, timeout=timeout)
        answers = [f.result() for f in futures if f.done()]
        return [self._numbers(), *[a for a in answers if a is not None]]


def _socket_path(directory: Path, worker: int) -> Path:
    return directory / f"{worker}.sock"
