"""python -m benchmarks.serving.hostile [quiet|pipeline|bodies|tokens ...] [--seconds 5]: a well-behaved game beside a
client that is not.

The game ticks 200 times a second on a connection of its own; one JSON line per case with its latency in milliseconds
and the service's memory before, at most and after. quiet: nobody else. pipeline: another client sends 2 MB of small
ticks at a time and reads the replies.
bodies: 120 connections send 16 MiB bodies but for their last byte, then close, again and again. tokens: the same with a
wrong token.
`reads`: what reading one tick that is accepted holds the loop for, at the limits of its size. What is measured are
milliseconds; the mechanisms are tested in tests/serving/test_serving_limits.py and tests/serving/test_values.py.
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import json
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).parent.parent.parent
SERVICE = """
import sys
from bray.serving.config import ServiceConfig
from bray.serving.workers import serve

class Echo:
    async def start(self, session, data):
        return b""
    async def tick(self, data):
        return data[:32]
    async def end(self, data):
        return b""

config = ServiceConfig(port=0, admin_port=0, tokens=("right",), actors_per_worker=1000, drain_timeout_s=0)
sys.exit(serve(Echo, config, on_ready=lambda port, admin: print(port, flush=True)))
"""


def request(kind: str, session: str, body: bytes = b"", token: str = "right", length: int | None = None) -> bytes:
    head = f"POST /step HTTP/1.1\r\nsession: {session}\r\nstep_kind: {kind}\r\ntoken: {token}\r\n"
    return f"{head}Content-Length: {len(body) if length is None else length}\r\n\r\n".encode() + body


def connect(port: int) -> socket.socket:
    sock = socket.create_connection(("127.0.0.1", port), timeout=60)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return sock


def resident_mb(pid: int) -> float:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4096 / 1e6


@contextlib.contextmanager
def service() -> Iterator[tuple[int, int]]:
    process = subprocess.Popen([sys.executable, "-c", SERVICE], stdout=subprocess.PIPE, text=True, cwd=ROOT)
    try:
        assert process.stdout is not None
        yield int(process.stdout.readline()), process.pid
    finally:
        process.terminate()
        process.wait()


# --- clients that are no games ----------------------------------------------------------------------------------------


def pipeline(port: int) -> None:
    sock = connect(port)
    sock.sendall(request("start", "greedy"))
    sock.recv(1 << 16)
    one = request("tick", "greedy", b"x")
    many = one * (2_000_000 // len(one))

    def send() -> None:
        while True:
            sock.sendall(many)

    threading.Thread(target=send, daemon=True).start()
    while True:
        sock.recv(1 << 20)


def bodies(port: int, token: str = "right") -> None:
    size = 16 << 20
    data = request("auto", "", b"", token, size) + bytes(size - 1)
    while True:
        socks = [connect(port) for _ in range(120)]
        for sock in socks:
            with contextlib.suppress(OSError):
                sock.sendall(data)
        for sock in socks:
            sock.close()


def tokens(port: int) -> None:
    bodies(port, "wrong")


CASES: dict[str, Any] = {"quiet": lambda port: None, "pipeline": pipeline, "bodies": bodies, "tokens": tokens}


def game(port: int, seconds: float, rate: float = 200.0) -> list[float]:
    """A game's waits for its answers, in milliseconds."""
    sock = connect(port)
    sock.sendall(request("start", "game"))
    sock.recv(1 << 16)
    tick = request("tick", "game", b'{"obs": [0.1, 0.2, 0.3, 0.4]}')
    waits, began = [], time.perf_counter()
    while (now := time.perf_counter()) - began < seconds:
        sock.sendall(tick)
        sock.recv(1 << 16)
        waits.append((time.perf_counter() - now) * 1e3)
        time.sleep(max(0.0, 1 / rate - (time.perf_counter() - now)))
    sock.close()
    return waits


def case(name: str, seconds: float) -> dict[str, Any]:
    with service() as (port, pid):
        over, most = threading.Event(), 0.0
        before = resident_mb(pid)
        hostile = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.serving.hostile", "--be", name, str(port)], cwd=ROOT
        )

        def watch() -> None:
            nonlocal most
            while not over.wait(0.02):
                most = max(most, resident_mb(pid))

        watcher = threading.Thread(target=watch)
        watcher.start()
        time.sleep(1.0)
        waits = sorted(game(port, seconds))
        over.set()
        hostile.kill()
        hostile.wait()
        watcher.join()
        time.sleep(1.0)
        return {
            "case": name,
            "ticks": len(waits),
            "p50_ms": round(waits[len(waits) // 2], 2),
            "p99_ms": round(waits[len(waits) * 99 // 100], 2),
            "max_ms": round(waits[-1], 2),
            "rss_mb": [round(x) for x in (before, most, resident_mb(pid))],
        }


# --- one tick ---------------------------------------------------------------------------------------------------------


def reads() -> dict[str, Any]:
    """Milliseconds of CPU time to read the dearest ticks that are accepted."""
    import msgspec

    from bray.serving import numbers
    from bray.serving.policy_actor import TickMessage
    from bray.serving.values import MAX_JSON, Observations
    from bray.spec import EnvSpec, Space

    numbers.load()
    choice = Space("discrete", (), "int64", n=(2,), start=(0,))
    n = MAX_JSON // 4 - 100
    cases = {
        "1 MiB of numbers": (n, "float32", b"[" + b"1.5," * (n - 1) + b"1.5]"),
        "1 MiB, one of them unusual": (n, "float32", b"[" + b"1.5," * (n - 1) + b"-0.0]"),
        "1 MiB of doubles": (50_000, "float64", json.dumps(np.random.default_rng(0).random(50_000).tolist()).encode()),
        "1 MiB of small integers": (2 * n, "uint8", b"[" + b"1," * (2 * n - 1) + b"1]"),
        "15 MiB of base64": (11 << 20, "uint8", b'{"base64":"' + base64.b64encode(bytes(11 << 20)) + b'"}'),
        "15 MiB of base64, converted": (11 << 20, "float32",
                                        b'{"base64":"' + base64.b64encode(bytes(11 << 20)) + b'","dtype":"uint8"}'),
    }  # fmt: skip
    out = {}
    for name, (size, dtype, text) in cases.items():
        observations = Observations(EnvSpec("t", Space("box", (size,), dtype), choice))
        body = b'{"obs":%b}' % text
        times = []
        for _ in range(5):
            began = time.thread_time()
            tick = msgspec.json.decode(body, type=TickMessage)
            observations.read(tick.obs, tick.action_mask)
            times.append((time.thread_time() - began) * 1e3)
        out[name] = round(sorted(times)[2], 1)
    return {"case": "reads", "ms": out}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("cases", nargs="*", default=[*CASES, "reads"])
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--be", nargs=2, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.be:
        name, port = given.be
        CASES[name](int(port))
        return
    for name in given.cases:
        print(json.dumps(reads() if name == "reads" else case(name, given.seconds)), flush=True)


if __name__ == "__main__":
    main()
