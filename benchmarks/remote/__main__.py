"""python -m benchmarks.remote forward|buffer|small|publish|training [--repeats 5] [--seconds 5] [--peers-only]: our
remote components beside plain Ray.

forward    RemoteModel: local mode beside the bare engine and batcher; a worker beside one awaited Ray actor call per
           forward
buffer     RemoteBuffer beside the same trajectories through `ray.put` and `ray.get`
small      RemoteBuffer beside one Ray call per sample of 100 B
publish    how soon new weights are served by 8 workers
training   32 grid games over HTTP: rows that reach the trainer per second of server CPU, beside the original Bray's
           architecture (original.py; `bash benchmarks/remote/install_peers.sh` makes its environment first)

Each side runs in processes (and a Ray) of its own, in turn, `--repeats` times, so that a busy minute hits all alike.
One JSON line per measurement, then one with medians, spread and the ratio to the best peer, and a table.
"""

from __future__ import annotations

import argparse
import json
import platform
import signal
import statistics
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

from benchmarks.remote import processes, training
from benchmarks.remote.settings import ROOT, say

PEER_PYTHON = ROOT / ".venv-remote-peers" / "bin" / "python"
TIMEOUT_S = 180.0

Side = Callable[[float], dict[str, Any]]


class Comparison(NamedTuple):
    """What is put side by side: `ours` should reach `goal` times the best of the peers in `measure`."""

    name: str
    ours: str
    peers: list[str]
    measure: str
    goal: float


def module(name: str, case: str) -> Side:
    """A case of ours.py or plain_ray.py."""

    def side(seconds: float) -> dict[str, Any]:
        command = [sys.executable, "-m", f"benchmarks.remote.{name}", case, "--seconds", str(seconds)]
        status, out, err = processes.run(command, TIMEOUT_S + seconds)
        lines = [x for x in out.splitlines() if x.startswith("{")]
        if status or not lines:
            raise RuntimeError((err.strip().splitlines() or [f"ended with {status} and said nothing"])[-1])
        return json.loads(lines[-1])

    return side


def whole(python: str, name: str, *options: str) -> Side:
    """A whole training; short ones say little, so it takes four times as long as the others."""
    return lambda seconds: training.measure([python, "-m", f"benchmarks.remote.{name}", *options], 4 * seconds)


SIDES: dict[str, dict[str, Side]] = {
    "forward": {
        "ours, local": module("ours", "local"),
        "bare engine and batcher": module("ours", "bare"),
        "ours, worker": module("ours", "remote"),
        "Ray call": module("plain_ray", "forward-single"),
        "Ray call, batched inside": module("plain_ray", "forward-batched"),
        "Ray call, torch": module("plain_ray", "forward-torch"),
    },
    "buffer": {
        "ours": module("ours", "trajectories"),
        "ray.put, 16 per call": module("plain_ray", "trajectories-put"),
        "ray.put, 1 per call": module("plain_ray", "trajectories-put1"),
        "returned, 16 per call": module("plain_ray", "trajectories-return"),
    },
    "small": {
        "ours": module("ours", "small"),
        "Ray calls, 1 producer": module("plain_ray", "small-1"),
        "Ray calls, 4 producers": module("plain_ray", "small-4"),
        "Ray calls, pickled before": module("plain_ray", "small-pickled"),
    },
    "publish": {"ours": module("ours", "publish")},
    "training": {
        "ours": whole(sys.executable, "ours_training"),
        "ours, one worker": whole(sys.executable, "ours_training", "actor1.num_workers=1"),
        "original": whole(str(PEER_PYTHON), "original"),
        "original, one worker": whole(str(PEER_PYTHON), "original", "--workers", "1"),
        "original, so, relay on uvloop": whole(str(PEER_PYTHON), "original", "--relay", "uvloop", "--workers", "1"),
    },
}
COMPARISONS: dict[str, list[Comparison]] = {
    "forward": [
        Comparison("local mode", "ours, local", ["bare engine and batcher"], "per_second", 0.7),
        Comparison(
            "worker", "ours, worker", ["Ray call", "Ray call, batched inside", "Ray call, torch"], "per_second", 50.0
        ),
    ],
    "buffer": [
        Comparison(
            "trajectories",
            "ours",
            ["ray.put, 16 per call", "ray.put, 1 per call", "returned, 16 per call"],
            "bytes_per_second",
            0.8,
        )
    ],
    "small": [
        Comparison(
            "samples",
            "ours",
            ["Ray calls, 1 producer", "Ray calls, 4 producers", "Ray calls, pickled before"],
            "per_second",
            30.0,
        )
    ],
    "publish": [],
    "training": [
        Comparison("two workers each", "ours", ["original"], "rows_per_cpu_second", 5.0),
        Comparison("one worker", "ours, one worker", ["original"], "rows_per_cpu_second", 5.0),
        Comparison(
            "one worker each",
            "ours, one worker",
            ["original, one worker", "original, so, relay on uvloop"],
            "rows_per_cpu_second",
            5.0,
        ),
    ],
}


def take_turns(what: str, sides: dict[str, Side], repeats: int, seconds: float) -> dict[str, list[dict[str, Any]]]:
    """Side -> its results, each side in turn."""
    results: dict[str, list[dict[str, Any]]] = {}
    for _ in range(repeats):
        for name, side in sides.items():
            try:
                result = side(seconds)
            except RuntimeError as e:
                say({"what": what, "side": name, "failed": str(e)})
                continue
            results.setdefault(name, []).append(result)
            say({"what": what, "side": name} | {k: v for k, v in result.items() if k != "case"})
    return results


def medians(results: list[dict[str, Any]]) -> dict[str, float]:
    """Of the numbers that all results have."""
    names = [k for k, v in results[0].items() if isinstance(v, (int, float))]
    return {k: statistics.median(r[k] for r in results if k in r) for k in names}


def summary(what: str, results: dict[str, list[dict[str, Any]]], repeats: int) -> dict[str, Any]:
    middle = {name: medians(rows) for name, rows in results.items()}
    ratios = {}
    for c in COMPARISONS[what]:
        peers = {p: middle[p][c.measure] for p in c.peers if p in middle}
        if c.ours not in middle or not peers:
            continue
        best = max(peers, key=lambda p: peers[p])
        each = {p: round(middle[c.ours][c.measure] / v, 2) for p, v in peers.items()}
        ratios[c.name] = {"ratio": each[best], "to": best, "measure": c.measure, "goal": c.goal, "to_each": each}
    return {"what": what, "medians": middle, "ratios": ratios, "repeats": repeats, "machine": platform.machine()}


def table(results: dict[str, list[dict[str, Any]]], told: dict[str, Any]) -> str:
    """Medians and, for the first figure, the least and the most."""
    lines = []
    for name, rows in results.items():
        middle = told["medians"][name]
        first = next(k for k, v in rows[0].items() if isinstance(v, (int, float)))
        values = [r[first] for r in rows]
        rest = "  ".join(f"{k} {v:,.1f}" for k, v in middle.items() if k not in (first, "seconds"))
        lines.append(f"{name:28} {first} {middle[first]:>14,.1f}  ({min(values):,.1f} to {max(values):,.1f})  {rest}")
    for name, r in told["ratios"].items():
        lines.append(f"{name}: {r['ratio']} times '{r['to']}' in {r['measure']} (goal {r['goal']})")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=SIDES)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--peers-only", action="store_true", help="leave out our own side")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that what was started is ended
    if args.what == "training" and not PEER_PYTHON.exists():
        parser.error("the peers' environment is not there: bash benchmarks/remote/install_peers.sh makes it")
    sides = {k: v for k, v in SIDES[args.what].items() if not (args.peers_only and k.startswith("ours"))}
    results = take_turns(args.what, sides, args.repeats, args.seconds)
    told = summary(args.what, results, args.repeats)
    say(told)
    print(table(results, told))


if __name__ == "__main__":
    main()
