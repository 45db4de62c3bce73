"""Games that do not exist: many sessions that tick at a service, and a table of what came back and how fast.

Sockets and asyncio alone: it runs wherever Python does.
"""

from __future__ import annotations

import asyncio
import json
import random
import urllib.request
from collections import Counter, deque
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

from bray.errors import BrayError
from bray.serving.protocol import ERROR_MARK, REPLY_HEAD, pack_request

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
        self.buffer = b""
        self.waiting: deque[tuple[bytes, asyncio.Future[bytes]]] = deque()
        self.busy = asyncio.Lock()
        self.lost = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport

    def connection_lost(self, exc: Exception | None) -> None:
        self.lost = True
        while self.waiting:
            _, future = self.waiting.popleft()
            if not future.done():
                future.set_exception(ConnectionError("connection lost"))

    def data_received(self, data: bytes) -> None:
        self.buffer += data
        while self.buffer:
            reply = self._framed() if self.load.tcp else self._http()
            if reply is None:
                return
            session, result = reply
            for i, (name, future) in enumerate(self.waiting):
                if session is None or name == session:
                    del self.waiting[i]
                    if not future.done():
                        if isinstance(result, str):
                            future.set_exception(ServiceSaid(result))
                        else:
                            future.set_result(result)
                    break

    def _framed(self) -> tuple[bytes | None, bytes | str] | None:
        size = REPLY_HEAD.size
        if len(self.buffer) < size:
            return None
        n, m, _ = REPLY_HEAD.unpack_from(self.buffer)
        if len(self.buffer) < size + n + m:
            return None
        session, body = self.buffer[size : size + n], self.buffer[size + n : size + n + m]
        self.buffer = self.buffer[size + n + m :]
        return session, _code(body[len(ERROR_MARK) :]) if body.startswith(ERROR_MARK) else body

    def _http(self) -> tuple[bytes | None, bytes | str] | None:
        end = self.buffer.find(b"\r\n\r\n")
        if end < 0:
            return None
        head = self.buffer[:end].lower()
        at = head.find(b"content-length:")
        size = int(head[at + 15 :].split(b"\r\n", 1)[0]) if at >= 0 else 0
        whole = end + 4 + size
        if len(self.buffer) < whole:
            return None
        body = self.buffer[end + 4 : whole]
        self.buffer = self.buffer[whole:]
        status = head[9:12]
        return None, body if status == b"200" else f"{status.decode()} {_code(body)}"

    async def ask(self, kind: str, session: bytes, body: bytes) -> bytes:
        if self.lost:
            raise ConnectionError("connection lost")
        if self.load.tcp:
            data = pack_request(kind.encode(), session, body, token=self.load.token.encode())
            return await self._send(session, data)
        token = f"token: {self.load.token}\r\n" if self.load.token else ""
        head = (
            f"POST /step HTTP/1.1\r\nHost: {self.load.host}\r\nsession: {session.decode()}\r\nstep_kind: {kind}\r\n{token}"
            f"Content-Length: {len(body)}\r\n\r\n"
        )
        async with self.busy:
            return await self._send(session, head.encode() + body)

    async def _send(self, session: bytes, data: bytes) -> bytes:
        future: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self.waiting.append((session, future))
        self.transport.write(data)
        return await asyncio.wait_for(future, _TIMEOUT_S)


class ServiceSaid(Exception):
    """An error reply."""


def _code(body: bytes) -> str:
    try:
        return str(json.loads(body)["error"])
    except (ValueError, KeyError, TypeError):
        return ""


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
        try:
            for _ in range(max(1, min(load.connections, load.sessions))):
                _, c = await loop.create_connection(lambda: _Connection(load), load.host, load.port)
                connections.append(c)
        except OSError as e:
            raise BrayError(
                f"no service answers at {load.host}:{load.port} ({e.strerror or e}): start one with `bray serve` or `bray fake actor`"
            ) from None
        prefix = f"fake-{random.getrandbits(32):08x}"
        names = [f"{prefix}-{i}".encode() for i in range(load.sessions)]
        games = [(name, connections[i % len(connections)]) for i, name in enumerate(names)]
        started = await asyncio.gather(*[self._count(c.ask("start", name, b"")) for name, c in games])
        games = [game for game, ok in zip(games, started, strict=True) if ok]
        self.result.started = len(games)
        before = await loop.run_in_executor(None, self._service)
        begin = perf_counter()
        await asyncio.gather(*[self._game(name, c, begin) for name, c in games])
        self.result.seconds = perf_counter() - begin
        after = await loop.run_in_executor(None, self._service)
        if before and after and games:  # else there was no time in which games ran
            self.result.cpu_s, self.result.resident = after[0] - before[0], after[1]
        await asyncio.gather(*[self._count(c.ask("end", name, b"")) for name, c in games])
        for c in connections:
            if c.transport is not None:
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
        for i in range(1 << 62):
            if load.rate:
                await asyncio.sleep(max(0.0, due - perf_counter()))
            since = due if load.rate else perf_counter()  # a tick that could not be sent in time has waited too
            if perf_counter() >= over or connection.lost:
                return
            if await self._count(connection.ask("tick", name, load.bodies[i % len(load.bodies)])):
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
