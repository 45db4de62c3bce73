"""python -m benchmarks.serving capacity [--repeat 3] [--seconds 4]: what one core serves, and what a session takes of
memory.

`bray serve` with one worker on core 0, games (load.cpp) on core 1, each model in turn: the MLP of `make demo`, PPO with
an LSTM, PPO with a Nature CNN on pictures of 4x84x84 bytes in base64. Ticks per second of CPU time of the service,
which other work on the machine does not change; the latency at 70 % of that rate; resident memory of 2,000 sessions
that have played a tick. One JSON line per measurement, then the table of docs/operating.md with medians.
"""

from __future__ import annotations

import base64
import http.client
import json
import re
import statistics
import subprocess
import sys
import tempfile
import urllib.request
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np

from benchmarks.serving.__main__ import family, free_port, load, say, server

SESSIONS = 2000
LOAD = 0.7
"""The share of a core that leaves room for a burst."""
KINDS = {
    "MLP, 64x64, 4 numbers (the demo)": ("CartPole-v1", {}),
    "LSTM, 256 units, 4 numbers": ("CartPole-v1", {"use_lstm": True}),
    "CNN, Nature, 4x84x84 bytes": ("benchmarks.serving.capacity:Pictures", {}),
}
_TRAIN = """
import json, sys
from bray.experiment import Experiment, export_graph
env, config, path = json.loads(sys.argv[1])
exp = Experiment("PPO", env, path=path, use_preset=False, num_envs=2, rollout_length=16, config=config)
list(exp.train(stop={"training_iteration": 1}))
exp.close()
export_graph(path)
"""


class Pictures(gym.Env):
    """Noise, in the shape of stacked frames."""

    observation_space = gym.spaces.Box(0, 255, (4, 84, 84), np.uint8)
    action_space = gym.spaces.Discrete(6)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[np.ndarray, dict[str, Any]]:
        super().reset(seed=seed)
        return self._look(), {}

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        return self._look(), 0.0, False, False, {}

    def _look(self) -> np.ndarray:
        return self.np_random.integers(0, 256, (4, 84, 84), np.uint8)


def train(env: str, config: dict[str, Any], path: Path) -> None:
    """In a process of its own: an untrained network costs as much as a trained one."""
    subprocess.run([sys.executable, "-c", _TRAIN, json.dumps([env, config, str(path)])], check=True)


def body_of(env: str) -> bytes:
    if env.startswith("CartPole"):
        return b'{"obs": [0.0273956, -0.0061139, 0.0358672, 0.0197368]}'
    picture = np.random.default_rng(0).integers(0, 256, (4, 84, 84), np.uint8)
    return json.dumps({"obs": {"base64": base64.b64encode(picture.tobytes()).decode(), "dtype": "uint8"}}).encode()


def resident(admin_port: int) -> float:
    with urllib.request.urlopen(f"http://127.0.0.1:{admin_port}/metrics", timeout=10) as reply:
        return float(re.search(r"^bray_process_resident_bytes (\S+)$", reply.read().decode(), re.M)[1])  # type: ignore[index]


def is_ready(admin_port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{admin_port}/readyz", timeout=5) as reply:
            return reply.status == 200
    except OSError:
        return False


def play(port: int, sessions: int, body: bytes, ends: bool) -> None:
    """Sessions of one tick each, one after the other over one connection."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    for i in range(sessions):
        for kind, sent in (("start", b""), ("tick", body), ("end", b""))[: 3 if ends else 2]:
            connection.request("POST", "/step", sent, {"session": f"memory-{i}-{ends}", "step_kind": kind})
            reply = connection.getresponse()
            if reply.read() is None or reply.status != 200:
                raise RuntimeError(f"a {kind} was answered with {reply.status}")
    connection.close()


def measure(run: Path, body: Path, seconds: float) -> dict[str, Any]:
    port, admin_port = free_port(), free_port()
    words = ["serve", str(run), f"--port={port}", f"--admin-port={admin_port}", f"--sessions={2 * SESSIONS}"]
    command = [sys.executable, "-m", "bray", *words]
    with server(command, port, ready=lambda _: is_ready(admin_port)) as pid:
        play(port, 50, body.read_bytes(), ends=True)
        empty = resident(admin_port)
        play(port, SESSIONS, body.read_bytes(), ends=False)
        full = resident(admin_port)
        options = ("--connections", "128", "--sessions", "128", "--body", str(body))
        most = load(port, family(pid), seconds, *options)
        rate = LOAD * 1e6 / most["cpu_us"]
        busy = load(port, family(pid), seconds, *options, "--rate", f"{rate:.0f}")
    return {
        "ticks_per_core": round(1e6 / most["cpu_us"]),
        "p50_ms": round(busy["p50_us"] / 1e3, 2),
        "p99_ms": round(busy["p99_us"] / 1e3, 2),
        "empty_mb": round(empty / 1e6, 1),
        "session_kb": round((full - empty) / SESSIONS / 1e3, 2),
    }


def capacity(repeat: int, seconds: float) -> None:
    rows: dict[str, list[dict[str, Any]]] = {kind: [] for kind in KINDS}
    with tempfile.TemporaryDirectory(prefix="bray-capacity-") as folder:
        runs = {kind: Path(folder) / str(i) / "run" for i, kind in enumerate(KINDS)}
        for kind, (env, config) in KINDS.items():
            train(env, config, runs[kind])
            (runs[kind].parent / "body").write_bytes(body_of(env))
        for _ in range(repeat):
            for kind, run in runs.items():
                rows[kind].append(measure(run, run.parent / "body", seconds))
                say({"case": "capacity", "model": kind, **rows[kind][-1]})
    print_table({kind: {k: statistics.median(r[k] for r in found) for k in found[0]} for kind, found in rows.items()})


def print_table(medians: dict[str, dict[str, float]]) -> None:
    print(
        "| model | ticks/s per core | sessions per core at 10 ticks/s | at 30 ticks/s | p50 | p99 | a worker | a "
        "session |"
    )
    print("|---|--:|--:|--:|--:|--:|--:|--:|")
    for kind, row in medians.items():
        sessions = [int(LOAD * row["ticks_per_core"] / rate) for rate in (10, 30)]
        print(
            f"| {kind} | {row['ticks_per_core']:,.0f} | {sessions[0]:,} | {sessions[1]:,} | {row['p50_ms']:.1f} ms | "
            f"{row['p99_ms']:.1f} ms | {row['empty_mb']:.0f} MB | {row['session_kb']:.1f} kB |"
        )
