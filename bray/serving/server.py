"""One worker of a game service: sockets, the session table, a watchdog, and the admin port."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import resource
import socket
import sys
import time
from collections.abc import Awaitable, Callable
from typing import Any

from bray._version import __version__
from bray.errors import ConfigError
from bray.http_server import HttpServer, Reply, Request, listening
from bray.serving.admin import MAX_ADMIN, AdminGuard
from bray.serving.config import ServiceConfig
from bray.serving.connection import Front
from bray.serving.http import HttpConnection
from bray.serving.metrics import Numbers, prometheus
from bray.serving.protocol import KIND_NAMES
from bray.serving.sessions import LATENCY_BOUNDS, Sessions
from bray.serving.tcp import FirstByte
from bray.serving.tls import HANDSHAKE_S, ServerTls
from bray.serving.watchdog import LoopWatchdog

logger = logging.getLogger("bray.serving")

Route = Callable[[str, str, bytes], Awaitable[tuple[int, str, bytes]]]
"""Answers (method, path, body) with (status, content type, body)."""


Prepare = Callable[["Server"], Any]
"""Called before a server listens, to give it more routes and numbers; it may be async."""


def admin_of(config: ServiceConfig, port: int) -> int:
    """The admin port that goes with a port: the next one, or any where any was asked for."""
    if config.admin_port is not None:
        return config.admin_port
    return port + 1 if config.port else 0


class Server:
    """A worker in this process and event loop. `make_actor()` gives a new Actor; Actors are reused by later
    sessions."""

    def __init__(self, make_actor: Callable[[], Any] | None, config: ServiceConfig, worker: int = 0):
        self.config, self.worker = config, worker
        self.make_actor = make_actor
        """Must be known before `open`."""
        self.port = self.admin_port = 0
        self.numbers: list[Callable[[], Numbers]] = [self._numbers]
        """More sources of numbers for /metrics."""
        self.gather: Callable[[], Awaitable[list[Numbers]]] | None = None
        """How to get the numbers of all workers; None = this one is all there is."""
        self.routes: dict[str, Route] = {}
        """More paths of the admin port, by their first part: {"models": handler}."""
        self.close_hooks: list[Callable[[], Awaitable[None]]] = []
        """What else ends with this worker."""
        self._started = time.time()
        self._server: asyncio.Server | None = None
        self._admin: HttpServer | None = None
        self._sweeper: asyncio.Task[None] | None = None

    async def start(self) -> None:
        self.open()
        try:
            await self.listen()
        except ConfigError:
            self._watchdog.close()
            raise

    async def prepare(self, how: Prepare | None) -> None:
        if how is not None and asyncio.iscoroutine(preparing := how(self)):
            await preparing

    def open(self) -> None:
        """Make the table of sessions: from now on requests may come, as yet from a gateway only."""
        assert self.make_actor is not None
        self.sessions = Sessions(self.make_actor, self.config)
        self.access = self.sessions.access
        self.front = Front(self.sessions, self.config)
        self._guard = AdminGuard(self.config, self.access.audit)
        self._tls = None if self.config.tls_cert is None else ServerTls(self.config.tls_cert, self.config.tls_key)
        self._watchdog = LoopWatchdog(self.sessions.loop, self.sessions.whose_code_runs, self.config.blocked_after_s)

    async def listen(self, shared: bool | None = None, admin: socket.socket | None = None) -> None:
        """Take connections. `shared`: the ports are shared with other processes; None = where there are several
        workers.
        `admin`: the admin port's socket, where whichever worker is awake is to answer."""
        shared = self.config.workers > 1 if shared is None else shared
        sock = listening(self.config.host, self.config.port, shared=shared)
        self.port = sock.getsockname()[1]
        try:
            admin_sock = admin or listening(self.config.admin_host, admin_of(self.config, self.port), shared=shared)
        except ConfigError:
            sock.close()
            raise
        self.admin_port = admin_sock.getsockname()[1]
        make: Any = FirstByte if self.config.use_tcp else HttpConnection
        tls: Any = {}
        if self._tls is not None:
            tls = {"ssl": self._tls.context, "ssl_handshake_timeout": HANDSHAKE_S}
        loop = self.sessions.loop
        self._server = await loop.create_server(lambda: make(self.front), sock=sock, backlog=1024, **tls)
        self._admin = HttpServer(self._answer_admin, max_waiting=MAX_ADMIN)
        await self._admin.listen(admin_sock)
        self._sweeper = asyncio.create_task(self._sweep())

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(max(0.05, min(1.0, self.config.request_timeout_s / 4)))
            self.front.sweep()
            self.refresh()

    def refresh(self) -> None:
        """Take up token files and certificates that have changed; done about every second."""
        self.access.refresh()
        self._guard.tokens.refresh()
        if self._tls is not None:
            self._tls.refresh()

    async def drain(self, timeout: float | None = None) -> None:
        """Refuse new sessions and wait for the running ones, at most `timeout` seconds; then for the requests under
        way."""
        await self.sessions.drain(self.config.drain_timeout_s if timeout is None else timeout)

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
        await self.sessions.close()
        await self.front.close()
        if self._sweeper is not None:
            self._sweeper.cancel()
        self._watchdog.close()
        if self._admin is not None:
            self._admin.close()
        for closer in self.close_hooks:
            await closer()

    # --- admin --------------------------------------------------------------------------------------------------------

    def _numbers(self) -> Numbers:
        s, f = self.sessions, self.front
        usage = resource.getrusage(resource.RUSAGE_SELF)
        out: Numbers = {
            "bray_sessions": len(s.sessions),
            "bray_slots": self.config.actors_per_worker,
            "bray_slots_free": s.free,
            "bray_pending": len(s.running),
            "bray_sessions_started_total": s.started,
            "bray_sessions_expired_total": s.expired,
            "bray_actors_made_total": s.actors_made,
            "bray_connections": len(f.open),
            "bray_connections_accepted_total": f.accepted,
            "bray_connections_refused_total": f.refused,
            "bray_refused_unread_total": f.unknown,
            "bray_body_bytes": f.held,
            "bray_bytes_received_total": f.bytes_in,
            "bray_bytes_sent_total": f.bytes_out,
            "bray_loop_blocked_total": self._watchdog.blocked,
            "bray_process_cpu_seconds_total": usage.ru_utime + usage.ru_stime,
            "bray_process_resident_bytes": _resident(),
            "bray_draining": float(s.draining),
        }
        for code, n in self.access.audit.counts.items():
            out[f'bray_access_refused_total{{code="{code}"}}'] = n
        for kind, statuses in zip(KIND_NAMES, s.counts, strict=True):
            for status, n in statuses.items():
                out[f'bray_requests_total{{kind="{kind}",status="{status}"}}'] = n
        total = 0
        for bound, n in zip((*LATENCY_BOUNDS, "+Inf"), s.latency, strict=True):
            total += n
            out[f'bray_tick_seconds_bucket{{le="{bound}"}}'] = total
        out["bray_tick_seconds_sum"] = s.latency_sum
        out["bray_tick_seconds_count"] = total
        return out

    def all_numbers(self) -> Numbers:
        return {name: value for source in self.numbers for name, value in source().items()}

    async def admin(self, method: str, path: str, body: bytes) -> tuple[int, str, bytes]:
        """Answer a request of the admin port: status, content type, body."""
        path = path.split("?", 1)[0]
        route = self.routes.get(path.split("/")[1] if path.startswith("/") else "")
        if route is not None:
            return await route(method, path, body)
        if method != "GET":
            return 405, "text/plain", b"expected GET\n"
        if path == "/healthz":
            return 200, "text/plain", b"ok\n"
        if path == "/readyz":
            return (503, "text/plain", b"draining\n") if self.sessions.draining else (200, "text/plain", b"ready\n")
        if path == "/version":
            info = {"bray": __version__, "python": sys.version.split()[0], "pid": os.getpid(), "worker": self.worker}
            return (
                200,
                "application/json",
                json.dumps(info | {"uptime_s": round(time.time() - self._started, 1)}).encode(),
            )
        if path == "/metrics":
            rows = await self.gather() if self.gather is not None else [self.all_numbers()]
            return 200, "text/plain; version=0.0.4", prometheus(rows).encode()
        known = ["healthz", "readyz", "metrics", "version", *self.routes]
        return 404, "text/plain", f"there are {', '.join('/' + name for name in known)}\n".encode()

    async def _answer_admin(self, request: Request) -> Reply:
        method, path = request.method, request.target
        refusal = self._guard.refusal(method, request.path, request.headers, request.peer)
        if refusal is not None:
            return Reply(refusal.status, refusal.body, "application/json")
        status = 500
        try:
            status, kind, body = await self.admin(method, path, request.body)
        finally:
            if method not in ("GET", "HEAD"):
                what = f"{method} {path[:100]!r} {request.body[:200]!r} was answered with {status}"
                self.access.audit.changed(request.peer, what)
        return Reply(status, body, kind)


def _resident() -> float:
    with open("/proc/self/statm") as f:
        return float(int(f.read().split()[1]) * resource.getpagesize())
