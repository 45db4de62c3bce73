"""The workers of one machine, which share a port: a request that reaches another worker than its session's owner is
forwarded to it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from pathlib import Path

from bray.errors import BrayError
from bray.serving.gateway import NOT_HERE, Peer, PeerRequest, Sending, ask_numbers, has_no_room
from bray.serving.link import Address, Link, Listener, connect, machine_id
from bray.serving.metrics import Numbers
from bray.serving.protocol import AUTO, START, Refusal
from bray.serving.request import Request
from bray.serving.server import Server
from bray.serving.table import Table

_BEAT_S = 0.2
_ATTEMPTS = 3  # to place a session whose name others take and give back at the same moment


class NodePeer(Peer):
    """Another worker of this machine."""

    def __init__(self, answered: Callable[[NodePeer, Request, int, bytes], None], worker: int):
        super().__init__(answered, f"worker {worker}")
        self.worker = worker


class NodeGateway(Sending):
    """The other workers of this machine, as one worker sees them. Their sockets are in a directory that only this user
    can read."""

    def __init__(self, server: Server, table: Table, directory: Path):
        """The table's row has been taken: its number is this worker's."""
        super().__init__(server)
        server.access.share(directory, table.me, table.workers)
        self.table, self.directory = table, directory
        self.owners: dict[bytes, int] = {}  # of sessions elsewhere that were asked for here
        self._max_owners = max(1024, 4 * table.workers * table.slots)
        self._peers: dict[int, NodePeer] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._tried: dict[Request, set[int]] = {}  # workers that had no room for it, or did not own its session
        self._listener = Listener(self.handle, b"")
        self._beats: asyncio.TimerHandle | None = None
        if server.config.use_gateway is not None:
            self.sessions.gateway = self

    async def start(self) -> None:
        path = self._path(self.table.me)
        path.unlink(missing_ok=True)  # of the worker whose place this one takes
        await self._listener.start_unix(str(path))
        self._beat()
        self.table.open(True)

    def _beat(self) -> None:
        self.table.beat()
        self._beats = self.sessions.loop.call_later(_BEAT_S, self._beat)

    def _path(self, worker: int) -> Path:
        return self.directory / f"{worker}.sock"

    async def close(self) -> None:
        self.table.open(False)
        self._timer.cancel()
        if self._beats is not None:
            self._beats.cancel()
        await self._listener.close()
        for peer in self._peers.values():
            if peer.link is not None:
                peer.link.close()

    # --- what Sessions asks -------------------------------------------------------------------------------------------

    def place(self, request: Request) -> bool:
        if isinstance(request, PeerRequest):  # whoever sent it has chosen this worker
            if self.table.claim(request.session):
                return True
            request.reply(NOT_HERE, b"")
            return False
        for _ in range(_ATTEMPTS):
            # An owner knows whether the session is about to end.
            owner = self.table.find(request.session)
            if owner is None:
                owner = self.table.choose({p.worker: p.starts for p in self._peers.values()})
            if owner is None:
                self.refuse_full(request, self.table.total())
                return False
            if owner != self.table.me:
                self._forward(owner, request)
                return False
            if self.table.claim(request.session):
                return True
        self._refuse_race(request)
        return False

    def _refuse_race(self, request: Request) -> None:
        self.forget(request)
        why = "another worker took this session's name at the same moment: try again"
        self.sessions.refuse(request, Refusal(503, "overloaded", why))

    def forward(self, request: Request) -> bool:
        if isinstance(request, PeerRequest):
            request.reply(NOT_HERE, b"")
            return True
        owner = self.owners.get(request.session)
        if owner is None:
            owner = self.table.find(request.session)
            if owner is None:
                return False
        self._forward(owner, request)
        return True

    def spill(self, request: Request) -> bool:
        owner = None if isinstance(request, PeerRequest) else self.table.choose(but=(self.table.me,))
        if owner is None:
            return False
        self.send(self._peer(owner), request)
        return True

    def release(self, session: bytes) -> None:
        self.table.release(session)

    def disconnected(self, session: bytes) -> None:
        peer = self._peers.get(self.owners.get(session, -1))
        if peer is not None:
            peer.tell_disconnected(session)

    def lent(self, actors: int) -> None:
        self.table.lend(actors)

    def running(self) -> int:
        return self.table.running()

    # --- requests on their way ----------------------------------------------------------------------------------------

    def peers(self) -> Iterable[Peer]:
        return self._peers.values()

    def forget(self, request: Request) -> None:
        self._tried.pop(request, None)

    def _forward(self, owner: int, request: Request) -> None:
        if request.session not in self.owners and len(self.owners) >= self._max_owners:
            self.owners.pop(next(iter(self.owners)))
        self.owners[request.session] = owner
        self.send(self._peer(owner), request)

    def _peer(self, worker: int) -> NodePeer:
        peer = self._peers.get(worker)
        if peer is None:
            peer = self._peers[worker] = NodePeer(self._answered, worker)
            task = self.sessions.loop.create_task(self._connect(peer))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        return peer

    async def _connect(self, peer: NodePeer) -> None:
        try:
            link = await self._link_to(peer.worker, lost=lambda link: self._lost(peer))
        except BrayError:
            self._lost(peer)
        else:
            peer.connected(link)
            if link.closed:  # it died meanwhile
                self._lost(peer)

    async def _link_to(self, worker: int, lost: Callable[[Link], None] | None = None) -> Link:
        return await connect(Address(machine_id(), str(self._path(worker)), "", 0), b"", lost=lost)

    def _answered(self, peer: NodePeer, request: Request, status: int, body: bytes) -> None:
        if status == 200 and not self._tried:  # nearly always
            request.reply(status, body)
        elif status == NOT_HERE or has_no_room(request, status, body):
            self._elsewhere(request, peer.worker)
        else:
            if status == 404:
                self.owners.pop(request.session, None)
            self.forget(request)
            request.reply(status, body)

    def _elsewhere(self, request: Request, worker: int) -> None:
        """That worker has less room than it seemed, or does not own the session: ask who does, or else another one."""
        tried = self._tried.setdefault(request, set())
        tried.add(worker)
        self.owners.pop(request.session, None)
        if request.kind == AUTO:
            self._begin_elsewhere(request, tried)
        elif request.session in self.sessions.sessions:
            self.forget(request)
            self.sessions.handle(request)
        elif (owner := self.table.find(request.session)) is not None and owner not in tried:
            self._forward(owner, request)
        elif request.kind == START:
            self._begin_elsewhere(request, tried)
        else:
            self.refuse_lost(request)

    def _begin_elsewhere(self, request: Request, tried: set[int]) -> None:
        owner = self.table.choose(but=tried)
        if owner is None:
            self.refuse_full(request, self.table.total())
        elif owner == self.table.me:
            self._begin_here(request)
        elif request.kind == START:
            self._forward(owner, request)
        else:
            self.send(self._peer(owner), request)

    def _begin_here(self, request: Request) -> None:
        """Nobody else has room for it."""
        self.forget(request)
        if request.kind == AUTO:
            self.sessions.auto_here(request)
        elif self.table.claim(request.session):
            self.sessions.begin_here(request)
        else:
            self._refuse_race(request)

    def _lost(self, peer: NodePeer) -> None:
        """A worker has died, or its socket takes no more: what waits for it is answered here."""
        if self._peers.get(peer.worker) is peer:
            del self._peers[peer.worker]
        for session in [s for s, owner in self.owners.items() if owner == peer.worker]:
            del self.owners[session]
        if peer.link is None and self.table.lives(peer.worker):
            self.refuse_late(peer, float("inf"))
        else:
            for request in peer.take_all():
                self.refuse_lost(request)

    async def gather(self, timeout: float = 2.0) -> list[Numbers]:
        async def ask(worker: int) -> Numbers | None:
            try:
                link = await self._link_to(worker)
            except BrayError:
                return None
            try:
                return await ask_numbers(link, timeout)
            finally:
                link.close()

        others = await asyncio.gather(*[ask(worker) for worker in self.table.awake()])
        return [self._numbers(), *[row for row in others if row is not None]]
