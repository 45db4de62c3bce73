"""ReplayRing, per second: add 1, sample 256, update 256 priorities, and the cycle of the three; medians of five.

`replay-84`: 1e6 transitions of float32[84]. `replay-frames`: 1e5 transitions of uint8[4, 84, 84], stacked frames. One
environment, prioritized (alpha 0.6, beta 0.4), obs and next_obs returned, the replay full. Each case runs in a process
of its own, so that peak_rss_mb is its own.

    python -m benchmarks.replay [replay-84] [replay-frames] [--seconds 2]
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

CASES: dict[str, tuple[int, tuple[int, ...], Any, int | None]] = {
    "replay-84": (1_000_000, (84,), np.float32, None),
    "replay-frames": (100_000, (4, 84, 84), np.uint8, 4),
}
BATCH = 256
ROUNDS = 5
EPISODE = 1000


def per_second(function: Callable[[], Any], seconds: float) -> float:
    """Calls per second, the median of five rounds."""
    rates = []
    for _ in range(ROUNDS):
        calls, start = 0, time.perf_counter()
        while (spent := time.perf_counter() - start) < seconds / ROUNDS:
            for _ in range(4):
                function()
            calls += 4
        rates.append(calls / spent)
    return statistics.median(rates)


def measure(case: str, seconds: float = 2.0) -> dict[str, Any]:
    """Fill a replay in this process and time it; `seconds` per number."""
    from bray.data import ReplayRing

    capacity, shape, dtype, stack = CASES[case]
    example = {"obs": np.zeros(shape, dtype), "action": np.int64(0)}
    replay = ReplayRing(capacity, 1, example, prioritized=True, alpha=0.6, beta=0.4, frame_stack=stack)
    rng = np.random.default_rng(0)
    if stack:
        frames = rng.integers(0, 256, (EPISODE + stack, *shape[1:]), dtype)
        rows = np.stack([frames[t : t + stack] for t in range(EPISODE + 1)])[:, None]
    else:
        rows = rng.random((EPISODE + 1, 1, *shape), np.float32)
    action, reward = np.ones(1, np.int64), np.ones(1, np.float32)
    yes, no = np.ones(1, bool), np.zeros(1, bool)
    at = 0

    def add() -> None:
        """One row of endless episodes of 1000 steps: the last one terminates, its final observation is a dead row."""
        nonlocal at
        replay.add(rows[at], action, reward, yes if at == EPISODE - 1 else no, no, no if at == EPISODE else yes)
        at = at + 1 if at < EPISODE else 0

    for _ in range(capacity + 1):
        add()
    priorities = rng.uniform(0.1, 2.0, (64, BATCH)).astype(np.float32)
    turn = 0

    def update(id: np.ndarray) -> None:
        nonlocal turn
        turn = (turn + 1) % 64
        replay.update_priorities(id, priorities[turn])

    def sample() -> np.ndarray:
        return replay.sample(BATCH, rng)["id"]

    def cycle() -> None:
        add()
        update(sample())

    for _ in range(200):
        cycle()
    batch = replay.sample(BATCH, rng)
    assert batch["obs"].shape == batch["next_obs"].shape == (BATCH, *shape)
    ids = batch["id"]
    return {
        "peer": "bray",
        "case": case,
        "add_per_s": round(per_second(add, seconds)),
        "sample_per_s": round(per_second(sample, seconds)),
        "update_per_s": round(per_second(lambda: update(ids), seconds)),
        "cycle_per_s": round(per_second(cycle, seconds)),
        "peak_rss_mb": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, 1),
    }


def main(argv: list[str] | None = None) -> int:
    """Print one JSON line per case."""
    parser = argparse.ArgumentParser(prog="benchmarks replay", description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"of {', '.join(CASES)}; all by default")
    parser.add_argument("--seconds", type=float, default=2.0, help="per number")
    args = parser.parse_args(argv)
    for case in args.cases:
        if case not in CASES:
            parser.error(f"unknown case {case!r}; known: {', '.join(CASES)}")
    for case in args.cases or CASES:
        if len(args.cases) == 1:
            print(json.dumps(measure(case, args.seconds)), flush=True)
            continue
        command = [sys.executable, "-m", "benchmarks.replay", case, "--seconds", str(args.seconds)]
        done = subprocess.run(command, cwd=Path(__file__).resolve().parent.parent)
        if done.returncode:
            return done.returncode
    return 0


if __name__ == "__main__":
    sys.exit(main())
