"""python -m benchmarks.serving.head [--repeat 5] [--seconds 4]: what one entry in front of workers
(`use_gateway: head`) costs per request.

An entry and two workers, joined by unix sockets (one machine) or TCP (several), beside one worker that games reach
directly; HTTP and framed TCP. `entry_us` is the entry's CPU time per request, `cpu_us` that of all processes of the
service. No Ray: the entry and the workers are those that Ray would place. Cores and load generator as in
`python -m benchmarks.serving`.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from typing import Any

from benchmarks.serving.__main__ import CORES, LOAD, ROOT, answers, build_load, cpu_seconds, free_port
from benchmarks.serving.ours import Echo
from bray.errors import Unreachable
from bray.serving.config import ServiceConfig
from bray.serving.gateway import BehindHead, HeadGateway
from bray.serving.link import Address, Listener, connect, machine_id
from bray.serving.server import Server
from bray.serving.workers import run_loop

SECRET = b"sixteen bytes ok"


async def _until_told() -> None:
    asked = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, asked.set)
    await asked.wait()


async def entry(port: int, address: str) -> None:
    server = Server(lambda: None, ServiceConfig(port=port, admin_port=0, use_tcp=True, actors_per_worker=0))
    server.open()
    gateway = HeadGateway(server)
    listener = Listener(gateway.handle, SECRET, gateway.lost)
    if address.isdigit():
        await listener.start_tcp("127.0.0.1", int(address))
    else:
        await listener.start_unix(address)
    await gateway.wait_for({"0", "1"}, 20.0)
    await server.listen()
    await _until_told()
    await listener.close()


async def worker(number: str, address: str) -> None:
    server = Server(Echo, ServiceConfig(actors_per_worker=1000))
    server.open()
    gateway = BehindHead(server, number)
    tcp = address.isdigit()
    where = Address(machine_id(), address, "127.0.0.1", int(address) if tcp else 0)
    for _ in range(100):
        with contextlib.suppress(Unreachable):
            gateway.connected(await connect(where, SECRET, gateway.handle, gateway.lost, unix=not tcp))
            break
        await asyncio.sleep(0.1)
    await _until_told()


async def direct(port: int) -> None:
    server = Server(Echo, ServiceConfig(port=port, admin_port=0, use_tcp=True, actors_per_worker=2000))
    await server.start()
    await _until_told()


@contextlib.contextmanager
def roles(port: int, *commands: list[str]) -> Iterator[list[int]]:
    """Processes on core 0; yields their ids once the port answers."""
    env = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    start = ["taskset", "-c", CORES[0], sys.executable, "-m", "benchmarks.serving.head"]
    processes = [subprocess.Popen([*start, *c], cwd=ROOT, env=env) for c in commands]
    try:
        until = time.monotonic() + 60
        while not answers(port):
            if any(p.poll() is not None for p in processes) or time.monotonic() > until:
                raise RuntimeError("did not start")
            time.sleep(0.1)
        yield [p.pid for p in processes]
    finally:
        for p in processes:
            p.terminate()
        for p in processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                p.wait(5)
            p.kill()
            p.wait()


def load(port: int, pids: list[int], seconds: float, tcp: bool) -> dict[str, Any]:
    options = ["--connections", "64", "--sessions", "1024", *(["--tcp"] if tcp else [])]
    command = ["taskset", "-c", CORES[1], str(LOAD), "--port", str(port), "--seconds", str(seconds), *options]
    before, began = [cpu_seconds([p]) for p in pids], time.monotonic()
    result = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    wall = time.monotonic() - began
    # CPU time is of the whole run, the warm-up second included; requests are counted after it
    scale = 1e6 / max(1, result["requests"]) * result["seconds"] / wall
    used = [(cpu_seconds([p]) - b) * scale for p, b in zip(pids, before, strict=True)]
    return {**result, "entry_us": round(used[0], 2), "cpu_us": round(sum(used), 2)}


def measure(side: str, seconds: float, tcp: bool) -> dict[str, Any]:
    port = free_port()
    if side == "direct":
        with roles(port, ["--direct", str(port)]) as pids:
            return load(port, pids, seconds, tcp)
    with tempfile.TemporaryDirectory() as directory:
        address = f"{directory}/entry.sock" if side == "unix" else str(free_port())
        workers = [["--worker", str(i), address] for i in range(2)]
        with roles(port, ["--entry", str(port), address], *workers) as pids:
            return load(port, pids, seconds, tcp)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=4.0)
    for role, words in (("--entry", 2), ("--worker", 2), ("--direct", 1)):
        parser.add_argument(role, nargs=words, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.entry:
        run_loop(entry(int(args.entry[0]), args.entry[1]))
    elif args.worker:
        run_loop(worker(*args.worker))
    elif args.direct:
        run_loop(direct(int(args.direct[0])))
    else:
        build_load()
        rows: dict[str, list[dict[str, Any]]] = {}
        for _ in range(args.repeat):
            for protocol in ("HTTP", "TCP"):
                for side in ("direct", "unix", "tcp"):
                    result = measure(side, args.seconds, protocol == "TCP")
                    name = f"{protocol}, {'direct' if side == 'direct' else 'entry, ' + side + ' links'}"
                    rows.setdefault(name, []).append(result)
                    print(json.dumps({"side": name, **result}), flush=True)
        keys = ("per_second", "p50_us", "p99_us", "entry_us", "cpu_us")
        medians = {n: {k: statistics.median(r[k] for r in rs) for k in keys} for n, rs in rows.items()}
        print(json.dumps({"medians": medians, "repeat": args.repeat, "host": socket.gethostname()}))


if __name__ == "__main__":
    main()
