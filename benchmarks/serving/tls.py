"""python -m benchmarks.serving.tls [--repeat 3] [--seconds 4]: what TLS costs: CPU time per tick on kept connections,
and per new connection.

An echo service beside itself with `tls_cert` and with `session_secrets`, asked by `bray.fake` over 32 connections, then
by a client that connects anew for each request. `cpu_us` is the service's CPU time per request; the rates are those of
one Python client and say little where that one is the limit.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import signal
import statistics
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from typing import Any

import bray
from benchmarks.serving.__main__ import ROOT
from bray.fake.gamecore import FakeGamecore, Load

FILES = ROOT / "tests" / "data" / "tls"
RSA, EC = str(FILES / "service.pem"), str(FILES / "other.pem")
"""Certificates with an RSA key of 2048 bits, and with one on P-256."""
CASES: dict[str, tuple[str | None, tuple[str, ...]]] = {
    "plain": (None, ()),
    "secrets": (None, ("session_secrets=true",)),
    "tls, rsa": (RSA, ()),
    "tls, ec": (EC, ()),
    "tls, ec, 2 workers": (EC, ("workers=2",)),
}


@contextlib.contextmanager
def echo(*options: str) -> Iterator[tuple[int, int]]:
    """A service's port and admin port."""
    command = [sys.executable, "-m", "benchmarks.serving.ours", "echo", "port=0", "admin_port=0", *options]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT)
    try:
        assert process.stdout is not None
        _, port, admin = process.stdout.readline().split()
        yield int(port), int(admin)
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(20)


def cpu(admin: int) -> float:
    with urllib.request.urlopen(f"http://127.0.0.1:{admin}/metrics", timeout=5) as reply:
        lines = dict(x.rsplit(" ", 1) for x in reply.read().decode().splitlines() if x[0] != "#")
    return float(lines["bray_process_cpu_seconds_total"])


def kept(port: int, admin: int, tls: Any, seconds: float) -> dict[str, Any]:
    """Ticks of 64 sessions over 32 connections that stay."""
    load = Load(port=port, admin_port=admin, tls=tls, sessions=64, seconds=seconds, bodies=(b"x" * 64,))
    result = FakeGamecore(load).play().to_json()
    assert not result["errors"], result
    return {
        "per_second": result["per_second"],
        "cpu_us": result["server_cpu_us_per_request"],
        "p99_ms": result["p99_ms"],
    }


def anew(port: int, admin: int, tls: Any, seconds: float) -> dict[str, Any]:
    """A connection for each request."""
    n, before, began = 0, cpu(admin), time.monotonic()
    while time.monotonic() - began < seconds:
        client = bray.Client(port=port, tls=tls)
        client.step(b"x" * 64)
        client.close()
        n += 1
    took = time.monotonic() - began
    return {"per_second": round(n / took, 1), "cpu_us": round((cpu(admin) - before) / n * 1e6, 1)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=4.0)
    options = parser.parse_args()
    rows: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for _ in range(options.repeat):
        for name, (cert, keys) in CASES.items():
            files = () if cert is None else (f"tls_cert={cert}", f"tls_key={cert.removesuffix('pem')}key")
            with echo(*files, *keys) as (port, admin):
                for measure in (kept, anew):
                    rows.setdefault((name, measure.__name__), []).append(measure(port, admin, cert, options.seconds))
    for (name, connections), found in rows.items():
        medians = {key: statistics.median(row[key] for row in found) for key in found[0]}
        print(json.dumps({"case": name, "connections": connections, **medians}), flush=True)


if __name__ == "__main__":
    main()
