"""The processes of a game service on a cluster: workers, and the entry of `use_gateway: head`. All of them live on the
io loop."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import shutil
import socket
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bray.cluster.session import session
from bray.errors import BrayError, ConfigError
from bray.remote.actor.policy_agent import stop_waiting
from bray.serving.agent import AgentActor, number_actors
from bray.serving.config import ServiceConfig
from bray.serving.gateway import BehindHead, HeadGateway
from bray.serving.link import Address, machine_id
from bray.serving.node import NodeGateway
from bray.serving.server import Prepare, Server
from bray.serving.table import Table
from bray.serving.workers import allow_files, relax_gc

logger = logging.getLogger("bray.serving")

_NODES = 8  # of a cluster that may share one machine (in tests; else it is one)
_LINK_AGAIN = 0.3
_BACK_S = 5.0  # for the workers of an entry that was killed to find the new one


@dataclass(frozen=True)
class ActorService:
    """What all processes of a service know."""

    key: str
    """Unique to one `serve`: no file of an earlier one is taken for its own."""
    config: ServiceConfig
    alone: bool = False
    """One worker in the user's own process."""
    entry: str | None = None
    """The member that takes the connections of all workers."""
    prepare: Prepare | None = None
    """Called in each of its processes before it listens: see RemoteActor."""


class ActorWorker:
    """Holds `actors_per_worker` sessions. It listens on the port of the service, together with the others of its
    machine, or it stands behind an entry and listens to nobody else."""

    def __init__(
        self, service: ActorService, number: int, make: Callable[..., Any], args: tuple[Any, ...], kwargs: Any
    ):
        self.service, self.number = service, number
        self._make, self._args, self._kwargs = make, args, kwargs
        self._table: Table | None = None
        self._gateway: NodeGateway | BehindHead | None = None
        self._linking: asyncio.Task[None] | None = None
        self._closed = False

    async def start(self) -> None:
        config = self.service.config
        allow_files(2 * config.max_connections)
        if not self.service.alone:
            _say_where()
            number_actors(self.number * config.actors_per_worker, config.actors_per_worker)
        if isinstance(self._make, type) and issubclass(self._make, AgentActor):
            self._kwargs.setdefault("save_dir", str(session().path))
        server = self.server = Server(self._make_actor, config, self.number)
        server.open()
        try:
            await server.prepare(self.service.prepare)
            server.sessions.pool.append(self._first_actor())
            server.sessions.actors_made += 1
            if session().cluster.kind != "local":  # else this is the user's own process
                relax_gc()
            if self.service.entry is not None:
                await self._stand_behind()
            else:
                if not self.service.alone:
                    await self._share_machine()
                await server.listen(shared=not self.service.alone)
        except BaseException:
            await self.close()
            raise

    def _make_actor(self) -> Any:
        return self._make(*self._args, **self._kwargs)

    def _first_actor(self) -> Any:
        """Made before anybody is let in: what is wrong with the class is an error of `serve`, and its models are
        connected."""
        actor = self._make_actor()
        missing = [name for name in ("start", "tick") if not callable(getattr(actor, name, None))]
        if not callable(getattr(actor, "end", None)) and not callable(getattr(actor, "stop", None)):
            missing.append("end")
        if missing:
            raise ConfigError(
                f"expected an Actor with start(session, data), tick(data) and end(data); {type(actor).__qualname__} "
                f"has no {', '.join(missing)}"
            )
        return actor

    async def _share_machine(self) -> None:
        """Join the table of the workers on this machine: all those that share a port, whichever node of the cluster
        they belong to."""
        config = self.service.config
        machine = hashlib.blake2b(machine_id().encode(), digest_size=6).hexdigest()
        self._directory = Path(tempfile.gettempdir()) / f"bray-{self.service.key}-{machine}"
        self._directory.mkdir(mode=0o700, exist_ok=True)
        self._table = Table(
            self._directory / "sessions", _NODES * config.workers, config.actors_per_worker, create=True
        )
        self._table.join(session().member)
        self._gateway = NodeGateway(self.server, self._table, self._directory)
        await self._gateway.start()

    # --- behind an entry ----------------------------------------------------------------------------------------------

    async def _stand_behind(self) -> None:
        self._gateway = BehindHead(self.server, session().member)
        await self._link()
        self._linking = asyncio.get_running_loop().create_task(self._stay_linked())

    async def _link(self) -> None:
        assert isinstance(self._gateway, BehindHead)
        assert self.service.entry is not None
        member = session().cluster.find(self.service.entry)
        address = Address(*await member.call("links_at", retry=True, timeout=30.0))
        self._gateway.connected(await session().connect(address, self._gateway.handle, self._gateway.lost))

    async def _stay_linked(self) -> None:
        """An entry that was killed comes back at another address."""
        assert isinstance(self._gateway, BehindHead)
        while True:
            await self._gateway.gone.wait()
            logger.warning("the connection to %s has ended: looking for it", self.service.entry)
            while self._gateway.gone.is_set():
                try:
                    await self._link()
                except BrayError as e:
                    logger.info("%s is not there yet: %s", self.service.entry, e)
                    await asyncio.sleep(_LINK_AGAIN)

    # --- asked by the handle ------------------------------------------------------------------------------------------

    def ports(self) -> tuple[int, int]:
        """Of the games and of the admin."""
        return self.server.port, self.server.admin_port

    async def drain(self, timeout: float | None = None) -> None:
        """As SIGTERM does: no new sessions, running ones may end in time, then everything is closed."""
        if self._closed:
            return
        if isinstance(self._gateway, NodeGateway):
            self._gateway.table.open(False)
        stop_waiting()
        await self.server.drain(timeout)
        await self.close()

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        if self._linking is not None:
            self._linking.cancel()
        await self.server.close()
        if self._gateway is not None:
            await self._gateway.close()
        if self._table is not None and self._table.leave():
            shutil.rmtree(self._directory, ignore_errors=True)


class HeadWorker:
    """Takes the connections of all games and hands their requests to the workers of all nodes."""

    def __init__(self, service: ActorService):
        self.service = service
        self._closed = False

    async def start(self) -> None:
        config = replace(self.service.config, actors_per_worker=0)
        allow_files(2 * config.max_connections)
        _say_where()
        server = self.server = Server(_no_actor, config)
        server.open()
        await server.prepare(self.service.prepare)
        entry = self.entry = HeadGateway(server)
        self._listener = await session().listen("entry", entry.handle, entry.lost)
        me = session().member
        workers = set(session().cluster.names(me.rpartition("/")[0] + "/")) - {me}
        self._opening = asyncio.get_running_loop().create_task(self._open(workers))

    async def _open(self, workers: set[str]) -> None:
        """Let games in. One that was killed first waits for its workers: their sessions go on."""
        if not await self.entry.wait_for(workers, _BACK_S):
            logger.warning("not all workers have come back: %s", ", ".join(sorted(workers - set(self.entry.workers))))
        await self.server.listen(shared=True)

    def links_at(self) -> tuple[Any, ...]:
        """Where workers connect."""
        return tuple(self._listener.address)

    async def ports(self) -> tuple[int, int]:
        await asyncio.shield(self._opening)
        return self.server.port, self.server.admin_port

    async def wait_for(self, workers: list[str], timeout: float) -> bool:
        return await self.entry.wait_for(set(workers), timeout)

    async def drain(self, timeout: float | None = None) -> None:
        """Let the sessions of all workers end, then take no more connections. The workers stay linked: they end after
        this."""
        await self.server.drain(timeout)
        await self._close_server()

    async def _close_server(self) -> None:
        self._opening.cancel()
        if not self._closed:
            self._closed = True
            await self.server.close()

    async def close(self) -> None:
        await self._close_server()
        await self.entry.close()
        await self._listener.close()


def _no_actor() -> Any:
    raise AssertionError("an entry has no slots")


def _say_where() -> None:
    """Errors in the log of this process say where they happened."""
    where = f"{session().member} (pid {os.getpid()} on {socket.gethostname()})"

    def add(record: logging.LogRecord) -> bool:
        if record.levelno >= logging.WARNING:
            record.msg, record.args = f"{where}: {record.getMessage()}", ()
        return True

    logger.addFilter(add)
