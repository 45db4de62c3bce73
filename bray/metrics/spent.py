"""Where the time of a process goes, by phase: env, forward, transfer, learn, idle; the rest is `other`.

`transfer` is copying weights and pieces between processes, `idle` waiting for another process or for games.
"""

from __future__ import annotations

import time
from collections.abc import Mapping

PHASES = ("env", "forward", "transfer", "learn", "idle", "other")
WEIGHTS = "transfer_weights"
"""The part of `transfer` that weights take."""
CPU, QUEUED = "cpu", "queued"
"""Seconds on a core, by all threads of the process; and those in which its main thread waited for a core that others
had. Phases contain both."""
BETWEEN = "between"
"""Checkpoints, callbacks of the training and rows written: behind an iteration, and in no phase of it."""


class Laps:
    """Time as it passes: `lap(phase)` counts what passed since the lap before it."""

    def __init__(self) -> None:
        self._spent: dict[str, float] = {}
        self._since = time.perf_counter()

    def lap(self, phase: str) -> None:
        now = time.perf_counter()
        self._spent[phase] = self._spent.get(phase, 0.0) + now - self._since
        self._since = now

    def take(self) -> dict[str, float]:
        """What was counted since the last call."""
        spent, self._spent = self._spent, {}
        return spent


class Cores:
    """What a process gets of the cores; looked at no more often than `every` so many seconds, because a look takes 20
    us."""

    def __init__(self, every: float = 0.0) -> None:
        self._every, self._looked = every, time.perf_counter()
        self._cpu, self._queued = time.process_time(), _queued()

    def take(self) -> dict[str, float]:
        """Seconds on a core and seconds queued for one, since the last call that told of them; nothing where that was a
        moment ago."""
        now = time.perf_counter()
        if now - self._looked < self._every:
            return {}
        cpu, queued = time.process_time(), _queued()
        spent = {CPU: cpu - self._cpu, QUEUED: queued - self._queued}
        self._looked, self._cpu, self._queued = now, cpu, queued
        return spent


def _queued() -> float:
    """Of the main thread, since it began; 0 where the system does not say."""
    try:
        with open("/proc/self/schedstat", "rb", buffering=0) as file:
            return int(file.read(100).split()[1]) / 1e9
    except (OSError, IndexError, ValueError):
        return 0.0


class WorkerTimes:
    """What rollout workers say of their time, beside their pieces."""

    def __init__(self) -> None:
        self._spent: dict[int, dict[str, float]] = {}

    def add(self, worker: int, seconds: Mapping[str, float]) -> None:
        """Of a worker, from 1."""
        spent = self._spent.setdefault(worker, {})
        for phase, value in seconds.items():
            spent[phase] = spent.get(phase, 0.0) + value

    def row(self) -> dict[str, float]:
        """Milliseconds since the last call, for a result row: those of the mean worker by phase, and how long each of
        them was idle."""
        spent, self._spent = self._spent, {}
        phases = dict.fromkeys(phase for one in spent.values() for phase in one)
        mean = {f"perf/worker_{k}": 1e3 * sum(one.get(k, 0.0) for one in spent.values()) / len(spent) for k in phases}
        return mean | {f"perf/worker_idle/{w}": 1e3 * spent[w].get("idle", 0.0) for w in sorted(spent)}
