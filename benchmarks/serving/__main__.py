"""python -m benchmarks.serving [echo|tcp|affinity|model|cnn|capacity ...] [--repeat 5] [--seconds 4]: the game service
beside its peers, in one run.

`bash benchmarks/serving/install_peers.sh` makes the peers' environment first. Everything of a server runs on core 0
(BENCH_CORES) and the load generator (load.cpp, compiled with g++ when first needed) on core 1. One JSON line per
measurement, one per case with medians and ratios. `cpu_us` is CPU time of all the server's processes per request: what
counts where the two cores are shared with others.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import os
import platform
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from benchmarks import one_of

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
PEERS = Path(os.environ.get("BENCH_PEERS", ROOT / ".venv-serving-peers" / "bin"))
LOAD = Path(tempfile.gettempdir()) / "bray-load"
CORES = os.environ.get("BENCH_CORES", "0,1").split(",")
"""The server's core and the load generator's."""
_TICKS = os.sysconf("SC_CLK_TCK")


def build_load() -> None:
    source = HERE / "load.cpp"
    if not LOAD.exists() or LOAD.stat().st_mtime < source.stat().st_mtime:
        subprocess.run(["g++", "-O2", "-std=c++17", "-o", str(LOAD), str(source)], check=True)


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def family(pid: int) -> list[int]:
    """A process and all its descendants."""
    out, waiting = [], [pid]
    while waiting:
        p = waiting.pop()
        out.append(p)
        with contextlib.suppress(FileNotFoundError):
            for task in Path(f"/proc/{p}/task").iterdir():
                with contextlib.suppress(FileNotFoundError):
                    waiting += [int(x) for x in (task / "children").read_text().split()]
    return out


def cpu_seconds(pids: list[int]) -> float:
    total = 0
    for pid in pids:
        with contextlib.suppress(FileNotFoundError):
            fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
            total += int(fields[11]) + int(fields[12])
    return total / _TICKS


def answers(port: int) -> bool:
    """Whether a stateless request is answered with 200 (HAProxy has no server of its own: anything will do)."""
    try:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
        connection.request("POST", "/step", b"x" * 28224)
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False


@contextlib.contextmanager
def server(
    command: list[str],
    port: int,
    env: dict[str, str] | None = None,
    wait: float = 60.0,
    ready: Callable[[int], bool] = answers,
) -> Iterator[int]:
    """A server on core 0; yields its process id once the port answers."""
    base = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    base |= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    process = subprocess.Popen(
        ["taskset", "-c", CORES[0], *command],
        env=base | (env or {}),
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        until = time.monotonic() + wait
        while True:
            if ready(port):
                break
            if process.poll() is not None or time.monotonic() > until:
                raise RuntimeError(f"did not start: {' '.join(command)}")
            time.sleep(0.1)
        time.sleep(0.5)
        yield process.pid
    finally:
        pids = family(process.pid)
        process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(8)
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.wait()


def load(port: int, pids: list[int], seconds: float, *options: str) -> dict[str, Any]:
    command = ["taskset", "-c", CORES[1], str(LOAD), "--port", str(port), "--seconds", str(seconds), *options]
    before = cpu_seconds(pids)
    began = time.monotonic()
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    wall = time.monotonic() - began
    cpu = cpu_seconds(pids) - before
    result = json.loads(done.stdout)
    # CPU time is of the whole run, the warm-up second included; requests are counted after it
    result["cpu_us"] = round(cpu / max(1, result["requests"]) * result["seconds"] / wall * 1e6, 2)
    return result


def bray(what: str, port: int, *options: str) -> list[str]:
    return [sys.executable, "-m", "benchmarks.serving.ours", what, f"port={port}", "admin_port=0", *options]


def uvicorn(app: str, port: int) -> list[str]:
    options = [
        "--loop",
        "uvloop",
        "--http",
        "httptools",
        "--no-access-log",
        "--log-level",
        "error",
        "--port",
        str(port),
    ]
    return [str(PEERS / "uvicorn"), "--app-dir", str(HERE / "peers"), *options, app]


def say(row: dict[str, Any]) -> None:
    print(json.dumps(row), flush=True)


def summary(case: str, rows: dict[str, list[dict[str, Any]]], ours: str, peers: list[str]) -> None:
    medians = {
        k: {m: statistics.median(r[m] for r in v) for m in ("per_second", "p50_us", "p99_us", "cpu_us")}
        for k, v in rows.items()
    }
    ratios = {}
    for peer in peers:
        if peer in medians and ours in medians:
            ratios[peer] = {
                "requests": round(medians[ours]["per_second"] / medians[peer]["per_second"], 2),
                "cpu": round(medians[peer]["cpu_us"] / medians[ours]["cpu_us"], 2),
            }
    say(
        {
            "case": case,
            "medians": medians,
            f"{ours} against": ratios,
            "repeat": max(map(len, rows.values())),
            "machine": platform.machine(),
        }
    )


def measure(case: str, sides: dict[str, Any], repeat: int) -> dict[str, list[dict[str, Any]]]:
    """Each side in turn, `repeat` times, so that a busy minute hits all alike."""
    rows: dict[str, list[dict[str, Any]]] = {}
    for _ in range(repeat):
        for name, side in sides.items():
            try:
                result = side()
            except (RuntimeError, subprocess.CalledProcessError) as e:
                say({"case": case, "side": name, "failed": str(e)})
                continue
            rows.setdefault(name, []).append(result)
            say({"case": case, "side": name, **result})
    return rows


def echo_side(
    command: Any, seconds: float, *options: str, env: dict[str, str] | None = None
) -> Callable[[], dict[str, Any]]:
    """Start `command(port)`, load it, end it."""

    def side() -> dict[str, Any]:
        port = free_port()
        with server(command(port), port, env) as pid:
            return load(port, family(pid), seconds, *options)

    return side


def ours_http(seconds: float) -> Any:
    return echo_side(lambda p: bray("echo", p), seconds)


def ours_tcp(seconds: float) -> Any:
    return echo_side(lambda p: bray("echo", p, "use_tcp=true"), seconds, "--tcp")


def echo(repeat: int, seconds: float) -> None:
    """An echo Actor, 1 KiB body, 32 keep-alive connections, one worker."""
    sides = {
        "bray": ours_http(seconds),
        "bray, plain Actor": echo_side(lambda p: bray("plain", p), seconds),
        "bray, TCP": ours_tcp(seconds),
    }
    if (PEERS / "uvicorn").exists():
        sides["uvicorn"] = echo_side(lambda p: uvicorn("asgi:app", p), seconds, "--no-start")
        sides["fastapi"] = echo_side(lambda p: uvicorn("fast:app", p), seconds, "--no-start")
        ray = [str(PEERS / "python"), str(HERE / "peers" / "ray_serve.py")]
        settings = {"RAY_SERVE_ENABLE_HA_PROXY": "1", "RAY_SERVE_THROUGHPUT_OPTIMIZED": "1"}
        env = settings | {"RAY_USAGE_STATS_ENABLED": "0"}
        sides["ray serve, HAProxy"] = echo_side(lambda p: [*ray, str(p)], seconds, "--no-start", env=env)
    rows = measure("echo", sides, repeat)
    summary("echo", rows, "bray", ["uvicorn", "fastapi", "ray serve, HAProxy"])
    summary("echo over TCP", rows, "bray, TCP", ["bray"])


def tcp(repeat: int, seconds: float) -> None:
    """The echo Actor over our two protocols, nothing else between."""
    rows = measure("tcp", {"bray": ours_http(seconds), "bray, TCP": ours_tcp(seconds)}, repeat)
    summary("tcp", rows, "bray, TCP", ["bray"])


HAPROXY = """
global
    maxconn 4000
defaults
    mode http
    timeout connect 5s
    timeout client 60s
    timeout server 60s
frontend f
    bind 127.0.0.1:{port}
    default_backend b
backend b
    balance hdr(session)
    hash-type consistent
    server a 127.0.0.1:{a}
    server b 127.0.0.1:{b}
"""


def affinity(repeat: int, seconds: float) -> None:
    """Two workers, 1024 sessions over 64 connections, starts on other connections than ticks; everything of the server
    on core 0."""
    options = ("--connections", "64", "--sessions", "1024")

    def ours() -> dict[str, Any]:
        port = free_port()
        with server(bray("echo", port, "workers=2"), port) as pid:
            time.sleep(1.0)
            return load(port, family(pid), seconds, *options, "--elsewhere")

    def haproxy() -> dict[str, Any]:
        a, b, port = free_port(), free_port(), free_port()
        with tempfile.NamedTemporaryFile("w", suffix=".cfg") as f:
            f.write(HAPROXY.format(port=port, a=a, b=b))
            f.flush()
            with server(bray("echo", a), a) as one, server(bray("echo", b), b) as two:
                with server(["haproxy", "-db", "-f", f.name], port) as proxy:
                    return load(port, family(one) + family(two) + family(proxy), seconds, *options, "--elsewhere")

    def one() -> dict[str, Any]:
        port = free_port()
        with server(bray("echo", port), port) as pid:
            return load(port, family(pid), seconds, *options, "--elsewhere")

    rows = measure("affinity", {"bray, 2 workers": ours, "HAProxy, 2 workers": haproxy, "bray, 1 worker": one}, repeat)
    summary("affinity", rows, "bray, 2 workers", ["HAProxy, 2 workers", "bray, 1 worker"])


def with_model(case: str, kind: str, size: int, repeat: int, seconds: float) -> None:
    """128 sessions that ask a model, and the same ones that do not."""
    options = ("--connections", "128", "--sessions", "128", "--bytes", str(size))

    def run(what: str, *settings: str) -> Any:
        def side() -> dict[str, Any]:
            port = free_port()
            with server(bray(what, port, *settings), port) as pid:
                return load(port, family(pid), seconds, *options)

        return side

    if kind == "mlp":
        sides = {"with the model": run("mlp"), "without": run("mlp-none")}
    else:
        sides = {"batched": run("cnn"), "batch of one": run("cnn", "batch=1")}
    rows = measure(case, sides, repeat)
    first, second = list(sides)
    summary(case, rows, first, [second])
    if kind == "mlp" and first in rows:
        rate = 0.7 * statistics.median(r["per_second"] for r in rows[first])
        for _ in range(repeat):
            port = free_port()
            with server(bray("mlp", port), port) as pid:
                result = load(port, family(pid), seconds, *options, "--rate", f"{rate:.0f}")
            say(
                {
                    "case": f"{case} at 70 % load",
                    "rate": round(rate),
                    **result,
                    "p99_over_p50": round(result["p99_us"] / result["p50_us"], 2),
                }
            )


def capacity(repeat: int, seconds: float) -> None:
    """What one core serves: benchmarks/serving/capacity.py."""
    from benchmarks.serving import capacity

    capacity.capacity(repeat, seconds)


def main() -> None:
    cases = {
        "echo": echo,
        "tcp": tcp,
        "affinity": affinity,
        "model": lambda r, s: with_model("model", "mlp", 1024, r, s),
        "cnn": lambda r, s: with_model("cnn", "cnn", 4 * 84 * 84, r, s),
        "capacity": capacity,
    }
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", type=one_of(cases), help=f"{', '.join(cases)}; none: all")
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=4.0)
    args = parser.parse_args()
    build_load()
    for name in args.cases or cases:
        cases[name](args.repeat, args.seconds)


if __name__ == "__main__":
    main()
