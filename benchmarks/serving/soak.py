"""python -m benchmarks.serving.soak [idle|http|tcp|workers|churn ...] [--ticks 1000000]: what a game service's memory
does in the long run.

idle: resident memory of one worker with 10,000 sessions that do nothing, beyond the empty one: over 100 connections of
framed TCP, then each with an HTTP connection of its own. http, tcp: a sample every 100,000 ticks of
64 sessions. workers: the same for two workers that pass requests on to each other, their memory added up. churn: the
same for sessions and connections that come and go. One JSON line per sample.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import re
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks import one_of
from benchmarks.serving.__main__ import LOAD, build_load
from bray.serving.protocol import REPLY_HEAD, pack_request

ROOT = Path(__file__).parent.parent.parent
SERVICE = """
import sys
from bray.serving.actor import Actor
from bray.serving.config import ServiceConfig
from bray.serving.workers import serve

class Echo(Actor):
    async def start(self, session, data):
        self.session = session
    async def tick(self, data):
        return data
    async def end(self, data):
        return b""

workers = int(sys.argv[1])
config = ServiceConfig(port=0, admin_port=0, use_tcp=True, workers=workers, actors_per_worker=20_000,
                       max_connections=12_000, drain_timeout_s=0)
sys.exit(serve(Echo, config, on_ready=lambda port, admin: print(port, admin, flush=True)))
"""
TICK = 'bray_requests_total{kind="tick",status="200"}'


class Service:
    """A service in processes of its own."""

    def __init__(self, workers: int = 1):
        self.workers = workers

    def __enter__(self) -> Service:
        command = [sys.executable, "-c", SERVICE, str(self.workers)]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT)
        assert self._process.stdout is not None
        self.port, self._admin = map(int, self._process.stdout.readline().split())
        return self

    def __exit__(self, *exc: object) -> None:
        self._process.terminate()
        try:
            self._process.wait(20)
        finally:
            self._process.kill()

    def numbers(self) -> dict[str, float]:
        with urllib.request.urlopen(f"http://127.0.0.1:{self._admin}/metrics", timeout=10) as reply:
            text = reply.read().decode()
        return {k: float(v) for k, v in (x.rsplit(" ", 1) for x in text.splitlines() if not x.startswith("#"))}


def megabytes(numbers: dict[str, float]) -> float:
    return round(numbers["bray_process_resident_bytes"] / 1e6, 2)


async def _ask(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, requests: list[bytes]) -> None:
    """Send these frames and wait for their replies."""
    for at in range(0, len(requests), 50):
        batch = requests[at : at + 50]
        writer.write(b"".join(batch))
        for _ in batch:
            session, body, _ = REPLY_HEAD.unpack(await reader.readexactly(REPLY_HEAD.size))
            reply = await reader.readexactly(session + body)
            if b"BRAYERR" in reply:
                raise RuntimeError(f"a request failed: {reply!r}")


async def _post(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, kind: bytes, session: bytes) -> None:
    head = b"POST /step HTTP/1.1\r\nsession: %b\r\nstep_kind: %b\r\nContent-Length: 100\r\n\r\n" % (session, kind)
    writer.write(head + b"x" * 100)
    reply = await reader.readuntil(b"\r\n\r\n")
    if not reply.startswith(b"HTTP/1.1 200 "):
        raise RuntimeError(f"a request failed: {reply!r}")
    await reader.readexactly(int(reply.split(b"Content-Length: ")[1].split(b"\r\n")[0]))


def idle_sessions(count: int = 10_000, own_connections: bool = False) -> dict[str, Any]:
    """Memory of sessions that have started, ticked once and wait, over connections that stay open."""

    async def fill(port: int, n: int) -> list[asyncio.StreamWriter]:
        writers = []
        for c in range(n):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            names = [b"session-%08d" % i for i in range(c, count, n)]
            if own_connections:
                await _post(reader, writer, b"start", *names)
                await _post(reader, writer, b"tick", *names)
            else:
                await _ask(reader, writer, [pack_request(b"start", name) for name in names])
                await _ask(reader, writer, [pack_request(b"tick", name, b"x" * 100) for name in names])
            writers.append(writer)
        return writers

    async def measure(service: Service) -> dict[str, Any]:
        reader, writer = await asyncio.open_connection("127.0.0.1", service.port)
        await _ask(reader, writer, [pack_request(k, b"warm") for k in (b"start", b"tick", b"end")])
        await asyncio.sleep(0.5)
        empty = megabytes(service.numbers())
        connections = await fill(service.port, count if own_connections else 100)
        await asyncio.sleep(0.5)
        numbers = service.numbers()
        full = megabytes(numbers)
        for each in (*connections, writer):
            each.close()
        return {
            "case": "idle",
            "sessions": int(numbers["bray_sessions"]),
            "connections": int(numbers["bray_connections"]),
            "empty_mb": empty,
            "full_mb": full,
            "mb": round(full - empty, 2),
        }

    with Service() as service:
        return asyncio.run(measure(service))


def ticks(
    count: int = 1_000_000, every: int = 100_000, use_tcp: bool = False, workers: int = 1
) -> Iterator[dict[str, Any]]:
    """Ticks as fast as they are answered, with a sample of the memory at every so many."""
    build_load()
    with Service(workers) as service:
        options = ["--port", str(service.port), "--connections", "32", "--sessions", "64", "--seconds", "100000"]
        command = [str(LOAD), *options, *(["--tcp"] if use_tcp else []), *(["--elsewhere"] if workers > 1 else [])]
        load = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        try:
            began, due = time.monotonic(), 0
            while due <= count:
                if load.poll() is not None:
                    raise RuntimeError(f"the load generator ended with {load.returncode}")
                numbers = service.numbers()
                done = int(numbers.get(TICK, 0))
                if done >= due:
                    errors = sum(v for k, v in numbers.items() if re.match(r'bray_requests_total.*status="[^2]', k))
                    yield {
                        "case": "workers" if workers > 1 else "tcp" if use_tcp else "http",
                        "ticks": done,
                        "forwarded": int(numbers.get("bray_requests_forwarded_total", 0)),
                        "rss_mb": megabytes(numbers),
                        "errors": int(errors),
                        "seconds": round(time.monotonic() - began, 1),
                    }
                    due += every
                else:
                    time.sleep(0.05)
        finally:
            load.kill()
            load.wait()


def churn(games: int = 50_000, every: int = 5_000) -> Iterator[dict[str, Any]]:
    """Games that each have a connection of their own, are started, ticked and ended."""

    async def game(port: int, name: bytes) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        await _ask(reader, writer, [pack_request(k, name, b"x" * 500) for k in (b"start", b"tick", b"end")])
        writer.close()

    async def some(port: int, first: int, n: int) -> None:
        for at in range(first, first + n, 20):
            await asyncio.gather(*(game(port, b"game-%d" % i) for i in range(at, at + 20)))

    with Service() as service:
        for first in range(0, games, every):
            asyncio.run(some(service.port, first, every))
            numbers = service.numbers()
            yield {
                "case": "churn",
                "games": first + every,
                "rss_mb": megabytes(numbers),
                "sessions": int(numbers["bray_sessions"]),
                "connections": int(numbers["bray_connections"]),
            }


def main() -> None:
    cases = ("idle", "http", "tcp", "workers", "churn")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", type=one_of(cases))
    parser.add_argument("--ticks", type=int, default=1_000_000)
    args = parser.parse_args()
    for case in args.cases or cases:
        if case == "idle":
            rows: Any = (idle_sessions(own_connections=own) for own in (False, True))
        elif case == "churn":
            rows = churn()
        else:
            rows = ticks(args.ticks, use_tcp=case == "tcp", workers=2 if case == "workers" else 1)
        for row in rows:
            print(json.dumps(row), flush=True)


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        main()
