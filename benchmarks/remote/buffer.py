"""RemoteBuffer: python -m benchmarks.remote.buffer CASE [--seconds 5]     one JSON line

trajectories          4 producers push trajectories of 128 steps (3.6 MB) and wait for each, one consumer takes them, one shard
trajectories-socket   the same without shared memory, as between machines
trajectories-2        two shards
steps                 4 producers push the steps of these trajectories one by one (28 KB) and wait for none, the consumer takes batches of 128
small                 4 producers push samples of 100 B one by one and wait for none, as agents do, the consumer takes batches of 128; where too many are
                      under way they wait
small-awaited         the same, each push awaited, 256 at a time
draws                 a consumer draws batches of 256 from 100k samples of 100 B in two prioritized shards and updates their priorities

Every case opens a session on a Ray of its own. Producers are members of the cluster, as agents are; the consumer is this process. `cpu_us` is CPU time of all
processes, Ray's own among them, per trajectory, step, sample or batch.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from benchmarks.remote.plain_ray import WARM_UP, Stretch
from benchmarks.remote.settings import PRODUCERS, STEPS, say, size, small_sample, trajectory

UNDER_WAY = 256


class Producer:
    """Pushes the same few samples over and over."""

    def __init__(self, case: str, seed: int):
        import bray

        if case == "trajectories-socket":
            without_shared_memory()
        self.buffer = bray.RemoteBuffer("b")
        if case.startswith("trajectories"):
            self.samples = [trajectory(seed + i) for i in range(4)]
        elif case == "steps":
            whole = trajectory(seed)
            self.samples = [{k: v[t] for k, v in whole.items()} for t in range(STEPS)]
        else:
            self.samples = [small_sample(seed + i) for i in range(4)]

    async def wait_for_each(self, seconds: float) -> None:
        n, end = 0, time.monotonic() + seconds
        while time.monotonic() < end:
            await self.buffer.push(self.samples[n % len(self.samples)], drop=False)
            n += 1

    async def wait_for_the_last(self, seconds: float) -> None:
        end, samples = time.monotonic() + seconds, self.samples
        while time.monotonic() < end:
            for i in range(UNDER_WAY):
                last = self.buffer.push(samples[i % len(samples)], drop=False)
            await last

    async def wait_for_all(self, seconds: float) -> None:
        end, samples = time.monotonic() + seconds, self.samples
        while time.monotonic() < end:
            await asyncio.gather(*[self.buffer.push(samples[i % 4], drop=False) for i in range(UNDER_WAY)])


def without_shared_memory() -> None:
    from bray.remote.buffer import ports

    ports.look_into = lambda address: None  # type: ignore[assignment]


@contextlib.contextmanager
def session() -> Iterator[Any]:
    import bray

    with tempfile.TemporaryDirectory(prefix="bray-project-") as project:
        opened = bray.init(project, "trial", cluster="ray", address="local", num_cpus=16, object_store_memory=1 << 30)
        try:
            yield opened
        finally:
            bray.shutdown()


def queue(case: str, seconds: float, method: str, batch_size: int | None, shards: int = 1) -> dict[str, Any]:
    import bray

    if case == "trajectories-socket":
        without_shared_memory()
    warm_up = 3 * WARM_UP
    with session() as opened:
        buffer = bray.RemoteBuffer("b", size=32, batch_size=batch_size, num_workers=shards)
        producers = [opened.cluster.start(f"producer/{i}", Producer, case, 4 * i) for i in range(PRODUCERS)]
        long = seconds + warm_up + 3.0
        ends = [producer.call(method, long, timeout=long + 60.0) for producer in producers]

        def consume(until: float) -> int:
            got, checked = 0, 0.0
            while time.perf_counter() < until:
                batch = next(buffer)
                if case != "small":
                    checked += float(batch["obs"][:, 0].sum() if batch_size else batch["obs"][:, 0, 0, 0].sum())
                checked += float(batch["reward"].sum())
                got += len(batch["reward"]) if batch_size else 1
            assert checked > 0
            return got

        next(buffer)
        consume(time.perf_counter() + warm_up)
        stretch = Stretch()
        result = stretch.result(case, consume(stretch.start + seconds))
        end = time.monotonic() + 30.0
        while not all(e.done() for e in ends) and time.monotonic() < end:
            with contextlib.suppress(TimeoutError):
                buffer.pop(0.2)  # nobody waits for room
    if not case.startswith("small"):
        each = size(trajectory(0)) / (1 if case.startswith("trajectories") else STEPS)
        result["bytes_per_second"] = round(result["per_second"] * each)
    return result


def draws(case: str, seconds: float) -> dict[str, Any]:
    import bray

    with session():
        buffer = bray.RemoteBuffer("b", size=400, batch_size=256, num_workers=2, store="prioritized")
        samples = [small_sample(i) for i in range(256)]
        for _ in range(400):
            buffer.push(*samples, drop=False).result()
        rng = np.random.default_rng(0)
        count = 0
        end = time.perf_counter() + WARM_UP
        stretch = None
        while True:
            batch = next(buffer)
            buffer.update_priorities(batch["id"], rng.random(256))
            count += 1
            if time.perf_counter() > end:
                if stretch is not None:
                    return stretch.result(case, count)
                stretch, count = Stretch(), 0
                end = stretch.start + seconds


CASES: dict[str, Callable[[str, float], dict[str, Any]]] = {
    "trajectories": lambda c, s: queue(c, s, "wait_for_each", None),
    "trajectories-socket": lambda c, s: queue(c, s, "wait_for_each", None),
    "trajectories-2": lambda c, s: queue(c, s, "wait_for_each", None, 2),
    "steps": lambda c, s: queue(c, s, "wait_for_the_last", STEPS),
    "small": lambda c, s: queue(c, s, "wait_for_the_last", STEPS),
    "small-awaited": lambda c, s: queue(c, s, "wait_for_all", STEPS),
    "draws": draws,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("case", choices=CASES)
    parser.add_argument("--seconds", type=float, default=5.0)
    args = parser.parse_args()
    say(CASES[args.case](args.case, args.seconds))


if __name__ == "__main__":
    main()
