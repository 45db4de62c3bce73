"""Forwards per second of N callers that ask back to back, and how long each waits: one at a time, with a timer of 2 ms,
and our batcher.

`mlp` and `nature` are the models of benchmarks.inference, in ONNX Runtime with one thread. Nobody thinks between two
calls, so batches are as full as they get. `cpu_us` is processor time per forward: it tells more than the clock on a
machine that is shared. The three take turns, so that a busy moment hits all alike.

    python -m benchmarks.batcher [mlp] [nature] [--seconds 10]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks.inference import CASES, engines, observations

CALLERS = (1, 32, 128)
LARGEST = {"mlp": 128, "nature": 32}  # larger batches of the CNN cost latency and gain nothing
TIMER_S = 0.002
ROUNDS = 3

Forward = Callable[[np.ndarray], Any]


class OneByOne:
    """Each sample is a batch, in the loop."""

    def __init__(self, forward: Forward, largest: int):
        self.forward, self.loop = forward, asyncio.get_running_loop()

    def submit(self, x: np.ndarray) -> asyncio.Future[Any]:
        future = self.loop.create_future()
        self.loop.call_soon(self._run, x, future)
        return future

    def _run(self, x: np.ndarray, future: asyncio.Future[Any]) -> None:
        future.set_result({k: v[0] for k, v in self.forward(x[None]).items()})

    async def close(self) -> None:
        pass


class Timer:
    """A batch starts 2 ms after its first sample, or when it is full."""

    def __init__(self, forward: Forward, largest: int):
        self.forward, self.largest, self.loop = forward, largest, asyncio.get_running_loop()
        self.queue: list[tuple[np.ndarray, asyncio.Future[Any]]] = []
        self.handle: Any = None

    def submit(self, x: np.ndarray) -> asyncio.Future[Any]:
        future = self.loop.create_future()
        self.queue.append((x, future))
        if len(self.queue) == 1:
            self.handle = self.loop.call_later(TIMER_S, self._flush)
        elif len(self.queue) == self.largest:
            self.handle.cancel()
            self._flush()
        return future

    def _flush(self) -> None:
        queue, self.queue = self.queue, []
        outputs = self.forward(np.stack([x for x, _ in queue]))
        for i, (_, future) in enumerate(queue):
            future.set_result({k: v[i] for k, v in outputs.items()})

    async def close(self) -> None:
        pass


def bray(forward: Forward, largest: int) -> Any:
    from bray.inference.batcher import Batcher

    return Batcher(forward, max_batch_size=largest)


WAYS: dict[str, Callable[[Forward, int], Any]] = {"batch 1": OneByOne, "timer 2 ms": Timer, "bray": bray}


async def ask(
    make: Callable[[Forward, int], Any], forward: Forward, obs: np.ndarray, largest: int, callers: int, seconds: float
) -> dict[str, float]:
    """One way, for a while."""
    batcher = make(forward, largest)
    times: list[float] = []
    end = float("inf")

    async def caller(x: np.ndarray) -> None:
        now = time.perf_counter()
        while now < end:
            await batcher.submit(x)
            then, now = now, time.perf_counter()
            times.append(now - then)

    for x in obs[:8]:  # to get warm
        await batcher.submit(x)
    cpu, start = time.process_time(), time.perf_counter()
    end = start + seconds
    await asyncio.gather(*[caller(obs[i % len(obs)]) for i in range(callers)])
    spent, cpu = time.perf_counter() - start, time.process_time() - cpu
    await batcher.close()
    p50, p99 = np.percentile(times, [50, 99])
    return {
        "forwards_per_s": len(times) / spent,
        "cpu_us": 1e6 * cpu / len(times),
        "p50_us": 1e6 * p50,
        "p99_us": 1e6 * p99,
    }


def measure(case: str, seconds: float) -> dict[str, Any]:
    """Figure -> number of callers -> way: the median over the rounds."""
    try:
        from uvloop import run
    except ImportError:
        run = asyncio.run
    obs = observations(*CASES[case][:2])
    forward = engines(case, obs)["onnx"]
    turn = seconds / (len(CALLERS) * len(WAYS) * ROUNDS)
    result: dict[str, Any] = {"case": case}
    for callers in CALLERS:
        rounds: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
        for _ in range(ROUNDS):
            for way, make in WAYS.items():
                rounds[way].append(run(ask(make, forward, obs, LARGEST[case], callers, turn)))
        for key in rounds["bray"][0]:
            medians = {way: round(statistics.median(r[key] for r in rs), 1) for way, rs in rounds.items()}
            result.setdefault(key, {})[str(callers)] = medians
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"of {', '.join(CASES)}; all by default")
    parser.add_argument("--seconds", type=float, default=10.0)
    args = parser.parse_args()
    for case in args.cases:
        if case not in CASES:
            parser.error(f"unknown case {case!r}; known: {', '.join(CASES)}")
    for case in args.cases or CASES:
        print(json.dumps(measure(case, args.seconds)), flush=True)


if __name__ == "__main__":
    main()
