"""What every peer script shares: the command line, the stopwatch, peak memory and the one JSON line it prints.

Only numpy is imported here, so that a peer's peak memory is its own.
"""

import argparse
import json
import time
from collections import deque
from pathlib import Path

import numpy as np

SEED = 1

REPLAY_ALPHA = 0.6
REPLAY_BETA = 0.4
REPLAY_BATCH = 256
REPLAY_CASES = {"replay-84": (1_000_000, (84,), np.float32), "replay-frames": (100_000, (4, 84, 84), np.uint8)}
"""Case -> (capacity, observation shape, dtype)."""


def parser(doc: str, cases) -> argparse.ArgumentParser:
    """The command line of every script: a case and how long to measure it."""
    parsed = argparse.ArgumentParser(description=doc.splitlines()[0])
    parsed.add_argument("case", choices=list(cases))
    parsed.add_argument("--seconds", type=float, default=15.0, help="how long to measure, after the warm-up")
    return parsed


class Stopwatch:
    """Skips the warm-up, then counts environment steps and seconds between the ends of iterations."""

    def __init__(self, seconds: float, warm_steps: int = 1, warm_seconds: float = 2.0):
        self.limit = seconds
        self.warm_steps = warm_steps
        self.warm_seconds = warm_seconds
        self.first_tick = None
        self.start = None
        self.start_cpu = 0.0
        self.start_step = 0
        self.env_steps = 0
        self.seconds = 0.0
        self.cpu_seconds = 0.0
        self.returns = deque(maxlen=100)

    def tick(self, env_steps: int) -> bool:
        """Call after every iteration with the total number of environment steps; True when it is time to stop."""
        now, cpu = time.perf_counter(), time.process_time()
        if self.first_tick is None:
            self.first_tick = now
        if self.start is None:
            if env_steps >= self.warm_steps and now - self.first_tick >= self.warm_seconds:
                self.start, self.start_cpu, self.start_step = now, cpu, env_steps
            return False
        self.env_steps = env_steps - self.start_step
        self.seconds, self.cpu_seconds = now - self.start, cpu - self.start_cpu
        return self.seconds >= self.limit


def peak_rss_mb() -> float:
    """Peak resident memory of this process. Not `getrusage`: that one also remembers the launcher's."""
    status = Path("/proc/self/status").read_text()
    return round(int(status.split("VmHWM:")[1].split()[0]) / 1024, 1)


def report(peer: str, version: str, case: str, watch: Stopwatch) -> None:
    """Prints the JSON line of a training case.

    Two entries are there to judge the others by: `cpu_seconds` (processor time of all threads; on a busy machine the
    steps per processor second of a single-threaded case vary less than those per second) and `mean_return` (of the last
    100 episodes, which shows that the peer learns).
    """
    import torch

    line = {
        "peer": peer,
        "version": version,
        "case": case,
        "env_steps_per_second": round(watch.env_steps / watch.seconds, 1),
        "env_steps": watch.env_steps,
        "seconds": round(watch.seconds, 2),
        "cpu_seconds": round(watch.cpu_seconds, 2),
        "threads": torch.get_num_threads(),
        "peak_rss_mb": peak_rss_mb(),
        "mean_return": round(float(np.mean(watch.returns)), 1) if watch.returns else None,
    }
    print(json.dumps(line), flush=True)


def random_observations(count: int, shape: tuple[int, ...], dtype) -> np.ndarray:
    """Noise to fill a replay with, made without a larger temporary array that would count as peak memory."""
    rng = np.random.default_rng(SEED)
    if dtype == np.uint8:
        return rng.integers(0, 256, (count, *shape), dtype=dtype)
    return rng.random((count, *shape), dtype=dtype)


def calls_per_second(function, seconds: float) -> float:
    """How often `function()` runs per second, after a few calls of warm-up."""
    for _ in range(10):
        function()
    calls, start = 0, time.perf_counter()
    while (elapsed := time.perf_counter() - start) < seconds:
        for _ in range(10):
            function()
        calls += 10
    return calls / elapsed


def measure_replay(peer: str, version: str, case: str, seconds: float, add, sample, update) -> None:
    """Times the three operations of a filled prioritized replay and their cycle, and prints the JSON line.

    `add()` stores one transition, `sample()` returns the indices of a batch it gathered, `update(indices, priorities)`.
    """
    priorities = np.random.default_rng(SEED).uniform(0.1, 2.0, (64, REPLAY_BATCH)).astype(np.float32)
    turn = 0

    def some_priorities():
        nonlocal turn
        turn = (turn + 1) % len(priorities)
        return priorities[turn]

    def cycle():
        add()
        update(sample(), some_priorities())

    for _ in range(200):
        cycle()
    indices = sample()
    share = seconds / 4
    line = {
        "peer": peer,
        "version": version,
        "case": case,
        "add_per_s": round(calls_per_second(add, share)),
        "sample_per_s": round(calls_per_second(sample, share)),
        "update_per_s": round(calls_per_second(lambda: update(indices, some_priorities()), share)),
        "cycle_per_s": round(calls_per_second(cycle, share)),
        "peak_rss_mb": peak_rss_mb(),
    }
    print(json.dumps(line), flush=True)
