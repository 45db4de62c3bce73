"""Games that do not exist: many sessions that tick at a service, and a table of what came back and how fast.

Sockets and asyncio alone: it runs wherever Python does.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import urllib.request
from collections import Counter
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

from bray.client import ClientError
from bray.client.session import tls_context
from bray.client.wire import Reply, http_request, reply_error, reply_parser, tcp_request
from bray.errors import BrayError

_TIMEOUT_S = 10.0


@dataclass(frozen=True)
class Load:
    """What to do to a service."""

    host: str = "127.0.0.1"
    port: int = 8000
    tcp: bool = False
    sessions: int = 8
    rate: float = 0.0
    """Ticks per second of each session; 0 = the next one as soon as the last is answered."""
    seconds: float = 5.0
    connections: int = 32
    """At most; sessions share them."""
    bodies: tuple[bytes, ...] = (b"x" * 1024,)
    """Bodies of the ticks, one after the other."""
    token: str = ""
    tls: Any = False
    """As of `bray.Client`."""
    admin_port: int | None = None
    """Where the service's CPU time and memory are asked; None = the port after the games'."""


@dataclass
class Result:
    requests: int = 0
    seconds: float = 0.0
    latencies: list[float] = field(default_factory=list)
    errors: Counter[str] = field(default_factory=Counter)
    started: int = 0
    cpu_s: float | None = None
    """CPU time of the service while the games ran."""
    resident: float | None = None
    """Its memory at the end, in bytes."""

    def quantile(self, q: float) -> float | None:
        if not self.latencies:
            return None
        values = sorted(self.latencies)
        return values[min(len(values) - 1, int(q * len(values)))]

    def to_json(self) -> dict[str, Any]:
        out: dict[str, Any] = {
            "requests": self.requests,
            "seconds": round(self.seconds, 3),
            "per_second": round(self.requests / self.seconds, 1) if self.seconds else None,
            "sessions_started": self.started,
            "errors": dict(self.errors),
        }
        for name, q in (("p50", 0.5), ("p90", 0.9), ("p99", 0.99), ("max", 1.0)):
            value = self.quantile(q)
            out[f"{name}_ms"] = None if value is None else round(value * 1e3, 3)
        if self.cpu_s is not None:
            out["server_cpu"] = round(self.cpu_s / self.seconds, 3) if self.seconds else None
            out["server_cpu_us_per_request"] = round(self.cpu_s / max(1, self.requests) * 1e6, 1)
        if self.resident is not None:
            out["server_rss_mb"] = round(self.resident / 1e6, 1)
        return out


class _Connection(asyncio.Protocol):
    """One connection and the requests on it. HTTP: one at a time; TCP: one per session."""

    def __init__(self, load: Load):
        self.load = load
        self.transport: Any = None
        self.waiting: dict[tuple[bytes, int], asyncio.Future[Reply]] = {}  # by what TCP echoes
        self.busy = asyncio.Lock()
        self.lost = False
        self._replies = reply_parser(load.tcp)
        self._time = 0
        self._secrets: dict[bytes, bytes] = {}

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport

    def connection_lost(self, exc: Exception | None) -> None:
        self.lost = True
        for future in self.waiting.values():
            if not future.done():
                future.set_exception(ConnectionError("connection lost"))

    def data_received(self, data: bytes) -> None:
        try:
            replies = self._replies.feed(data)
        except ClientError:  # the service speaks another protocol
            return self.transport.abort()
        for reply in replies:
            future = self.waiting.get((reply.session, reply.time))
            if future is not None and not future.done():
                future.set_result(reply)

    async def ask(self, kind: bytes, session: bytes, body: bytes) -> None:
        load, token = self.load, self.load.token.encode()
        if load.tcp:
            self._time += 1
            await self._send((session, self._time), tcp_request(session, kind, b"", token, body, self._time))
            return
        secret = self._secrets.get(session, b"")
        async with self.busy:
            message = http_request(load.host.encode(), session, kind, b"", token, body, secret)
            reply = await self._send((b"", 0), message)
        if reply.secret:
            self._secrets[session] = reply.secret

    async def _send(self, ticket: tuple[bytes, int], message: bytes) -> Reply:
        if self.lost:
            raise ConnectionError("connection lost")
        self.waiting[ticket] = future = asyncio.get_running_loop().create_future()
        self.transport.write(message)
        try:
            reply = await asyncio.wait_for(future, _TIMEOUT_S)
        finally:
            del self.waiting[ticket]
        if reply.failed:
            error = reply_error(reply, "")
            raise ServiceSaid(error.code if self.load.tcp else f"{error.status} {error.code}")
        return reply


class ServiceSaid(Exception):
    """An error reply."""


class FakeGamecore:
    """Plays a `Load`. `await run()`, or `play()` where no loop runs."""

    def __init__(self, load: Load):
        self.load = load
        self.result = Result()

    def play(self) -> Result:
        return asyncio.run(self.run())

    async def run(self) -> Result:
        load = self.load
        loop = asyncio.get_running_loop()
        connections = []
        tls = tls_context(load.tls)
        try:
            for _ in range(max(1, min(load.connections, load.sessions))):
                _, c = await loop.create_connection(lambda: _Connection(load), load.host, load.port, ssl=tls)
                connections.append(c)
        except OSError as e:
            raise BrayError(
                f"no service answers at {load.host}:{load.port} ({e.strerror or e}): start one with `bray serve` or "
                "`bray fake actor`"
            ) from None
        prefix = f"fake-{random.getrandbits(32):08x}"
        names = [f"{prefix}-{i}".encode() for i in range(load.sessions)]
        games = [(name, connections[i % len(connections)]) for i, name in enumerate(names)]
        started = await asyncio.gather(*[self._count(c.ask(b"start", name, b"")) for name, c in games])
        games = [game for game, ok in zip(games, started, strict=True) if ok]
        self.result.started = len(games)
        before = await loop.run_in_executor(None, self._service)
        begin = perf_counter()
        await asyncio.gather(*[self._game(name, c, begin) for name, c in games])
        self.result.seconds = perf_counter() - begin
        after = await loop.run_in_executor(None, self._service)
        if before and after and games:  # else there was no time in which games ran
            self.result.cpu_s, self.result.resident = after[0] - before[0], after[1]
        await asyncio.gather(*[self._count(c.ask(b"end", name, b"")) for name, c in games])
        for c in connections:
            c.transport.close()
        return self.result

    async def _count(self, asked: Any) -> bool:
        try:
            await asked
            return True
        except ServiceSaid as e:
            self.result.errors[str(e)] += 1
        except TimeoutError:
            self.result.errors["no answer in time"] += 1
        except ConnectionError:
            self.result.errors["connection lost"] += 1
        return False

    async def _game(self, name: bytes, connection: _Connection, begin: float) -> None:
        load, result = self.load, self.result
        over = begin + load.seconds
        due = begin + (random.random() / load.rate if load.rate else 0.0)
        for body in itertools.cycle(load.bodies):
            if load.rate:
                await asyncio.sleep(max(0.0, due - perf_counter()))
            since = due if load.rate else perf_counter()  # a tick that could not be sent in time has waited too
            if perf_counter() >= over or connection.lost:
                return
            if await self._count(connection.ask(b"tick", name, body)):
                result.requests += 1
                result.latencies.append(perf_counter() - since)
            elif not load.rate:
                await asyncio.sleep(0.05)
            if load.rate:
                due += 1.0 / load.rate

    def _service(self) -> tuple[float, float] | None:
        """CPU seconds and memory of the service, where its admin port answers."""
        port = self.load.port + 1 if self.load.admin_port is None else self.load.admin_port
        try:
            with urllib.request.urlopen(f"http://{self.load.host}:{port}/metrics", timeout=2) as reply:
                lines = dict(x.rsplit(" ", 1) for x in reply.read().decode().splitlines() if not x.startswith("#"))
            return float(lines["bray_process_cpu_seconds_total"]), float(lines["bray_process_resident_bytes"])
        except (OSError, ValueError, KeyError):
            return None
