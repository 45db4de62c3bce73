"""What plain Ray reaches: python -m benchmarks.remote.plain_ray CASE [--seconds 5]     one JSON line

Each case is written the way a careful user of Ray would, several variants of it, and the best one is the peer.

forward-single, forward-batched   64 asyncio callers await one call of an actor per forward of the MLP in ONNX Runtime
                                  (one thread); the second
                    one batches inside the actor, with our batcher
forward-torch       the same unbatched with torch eager
trajectories-put    4 producers `ray.put` trajectories of 128 steps (3.6 MB, in columns), 16 references per actor call;
                    one consumer `ray.get`s them, two calls ahead of each producer
trajectories-put1   one reference per actor call
trajectories-return the trajectories are what the call returns (16 each): Ray puts them itself
small-1, small-4    samples of 100 B, one call of the sink's actor each, from one producer or four; no more than a
                    thousand under way each
small-pickled       the same from one producer, which pickles each sample itself: Ray is quicker with plain bytes than
                    with arrays

`cpu_us` is CPU time of all processes, Ray's own among them, per forward, trajectory or sample.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import pickle
import time
from collections import deque
from typing import Any

import numpy as np
import ray

from benchmarks.remote.settings import (
    ACTIONS,
    LARGEST_BATCH,
    OBS,
    PRODUCERS,
    REMOTE_CALLERS,
    say,
    size,
    small_sample,
    trajectory,
)
from benchmarks.serving.__main__ import cpu_seconds, family

WARM_UP = 1.0
WINDOW = 1000


def start_ray() -> None:
    """A Ray of our own; logical CPUs are plenty, so that every actor finds a place."""
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    ray.init(
        address="local",
        num_cpus=16,
        object_store_memory=1 << 30,
        include_dashboard=False,
        log_to_driver=False,
        configure_logging=False,
    )


class Stretch:
    """Wall and CPU time of everything from now on."""

    def __init__(self) -> None:
        self.cpu, self.start = cpu_seconds(family(os.getpid())), time.perf_counter()

    def result(self, case: str, count: int, **more: Any) -> dict[str, Any]:
        wall = time.perf_counter() - self.start
        cpu = cpu_seconds(family(os.getpid())) - self.cpu
        rate = {"per_second": round(count / wall, 1), "cpu_us": round(1e6 * cpu / max(1, count), 1)}
        return {"case": case, **rate, "seconds": round(wall, 2), **more}


# --- forward ----------------------------------------------------------------------------------------------------------


def mlp() -> Any:
    import torch
    from torch import nn

    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(OBS, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, ACTIONS))


def mlp_onnx() -> bytes:
    from bray.inference.export import export_onnx
    from bray.inference.graph import with_constant_weights

    model = mlp()
    graph = export_onnx(model, [np.zeros((2, OBS), np.float32)])
    return with_constant_weights(graph, {k: v.numpy() for k, v in model.state_dict().items()})


class Single:
    def __init__(self, file: bytes):
        from bray.inference.onnx_engine import OnnxEngine

        self.engine = OnnxEngine(file)

    def forward(self, x: np.ndarray) -> np.ndarray:
        return self.engine.forward(x[None])[0]


class Batched:
    def __init__(self, file: bytes):
        from bray.inference.batcher import Batcher
        from bray.inference.onnx_engine import OnnxEngine

        self.batcher = Batcher(OnnxEngine(file).forward, max_batch_size=LARGEST_BATCH)

    async def forward(self, x: np.ndarray) -> np.ndarray:
        return await self.batcher.submit(x)


class Torch:
    def __init__(self, file: bytes):
        import torch

        torch.set_num_threads(1)
        self.torch, self.model = torch, mlp()

    def forward(self, x: np.ndarray) -> np.ndarray:
        with self.torch.inference_mode():
            return self.model(self.torch.from_numpy(x[None]))[0].numpy()


def forward(case: str, kind: type, seconds: float) -> dict[str, Any]:
    options: dict[str, Any] = {"max_concurrency": 2 * REMOTE_CALLERS} if kind is Batched else {}
    actor = ray.remote(num_cpus=0, **options)(kind).remote(mlp_onnx())
    obs = np.random.default_rng(0).normal(size=(REMOTE_CALLERS, OBS)).astype(np.float32)
    times: list[float] = []

    async def caller(x: np.ndarray, end: float) -> None:
        now = time.perf_counter()
        while now < end:
            await actor.forward.remote(x)
            then, now = now, time.perf_counter()
            times.append(now - then)

    async def ask() -> dict[str, Any]:
        await actor.forward.remote(obs[0])
        await asyncio.gather(*[caller(x, time.perf_counter() + WARM_UP) for x in obs])
        times.clear()
        stretch = Stretch()
        await asyncio.gather(*[caller(x, stretch.start + seconds) for x in obs])
        p50, p99 = np.percentile(times, [50, 99])
        return stretch.result(case, len(times), p50_us=round(1e6 * p50), p99_us=round(1e6 * p99))

    import uvloop

    return uvloop.run(ask())


# --- trajectories -----------------------------------------------------------------------------------------------------


class Producer:
    def __init__(self, seed: int):
        self.trajectories = [trajectory(seed + i) for i in range(4)]

    def put(self, count: int) -> list[Any]:
        return [ray.put(self.trajectories[i % 4]) for i in range(count)]

    def give(self, count: int) -> tuple[Any, ...]:
        return tuple(self.trajectories[i % 4] for i in range(count))


def trajectories(case: str, way: str, count: int, seconds: float) -> dict[str, Any]:
    producers = [ray.remote(num_cpus=0)(Producer).remote(4 * i) for i in range(PRODUCERS)]
    bytes_each = size(trajectory(0))
    under_way: dict[Any, tuple[Any, list[Any]]] = {}

    def ask(producer: Any) -> None:
        if way == "put":
            ref = producer.put.remote(count)
            under_way[ref] = producer, []
        else:
            refs = producer.give.options(num_returns=count).remote(count)
            refs = refs if isinstance(refs, list) else [refs]
            under_way[refs[-1]] = producer, refs

    def consume(end: float) -> int:
        got, checked = 0, 0.0
        while time.perf_counter() < end:
            (ready, *_), _ = ray.wait(list(under_way))
            producer, refs = under_way.pop(ready)
            ask(producer)
            for value in ray.get(refs or ray.get(ready)):
                checked += float(value["obs"][:, 0, 0, 0].sum() + value["reward"].sum())  # every step is looked at
                got += 1
        assert checked > 0
        return got

    for producer in [*producers, *producers]:
        ask(producer)
    consume(time.perf_counter() + 3 * WARM_UP)  # until the pages of the object store have all been used once
    stretch = Stretch()
    got = consume(stretch.start + seconds)
    result = stretch.result(case, got)
    return result | {"bytes_per_second": round(result["per_second"] * bytes_each)}


# --- small samples ----------------------------------------------------------------------------------------------------


class Sink:
    def __init__(self) -> None:
        self.count, self.samples = 0, deque[Any](maxlen=10_000)

    def push(self, sample: Any) -> None:
        self.samples.append(pickle.loads(sample) if isinstance(sample, bytes) else sample)
        self.count += 1

    def counted(self) -> tuple[int, float]:
        """How many came, and when: a call waits behind the samples under way."""
        return self.count, time.perf_counter()


def push_for(sink: Any, seconds: float, seed: int, pickled: bool) -> None:
    """One call per sample; wait for an old one every now and then, so that Ray's queue stays bounded."""
    samples = [small_sample(seed + i) for i in range(16)]
    marks: deque[Any] = deque()
    end, n = time.perf_counter() + seconds, 0
    while time.perf_counter() < end:
        sample = samples[n % 16]
        ref = sink.push.remote(pickle.dumps(sample, 5) if pickled else sample)
        n += 1
        if n % (WINDOW // 4) == 0:
            marks.append(ref)
            if len(marks) == 4:
                ray.get(marks.popleft())
    ray.get(list(marks))


def small(case: str, producers: int, pickled: bool, seconds: float) -> dict[str, Any]:
    sink = ray.remote(num_cpus=0)(Sink).remote()
    pushing = ray.remote(num_cpus=1)(push_for)
    jobs = [pushing.remote(sink, seconds + 5 * WARM_UP, i, pickled) for i in range(producers)]
    while ray.get(sink.counted.remote())[0] == 0:
        time.sleep(0.1)
    time.sleep(WARM_UP)
    before, start = ray.get(sink.counted.remote())
    stretch = Stretch()
    time.sleep(seconds)
    after, end = ray.get(sink.counted.remote())
    result = stretch.result(case, after - before)
    ray.get(jobs)
    return result | {"per_second": round((after - before) / (end - start), 1)}


CASES: dict[str, Any] = {
    "forward-single": lambda c, s: forward(c, Single, s),
    "forward-batched": lambda c, s: forward(c, Batched, s),
    "forward-torch": lambda c, s: forward(c, Torch, s),
    "trajectories-put": lambda c, s: trajectories(c, "put", 16, s),
    "trajectories-put1": lambda c, s: trajectories(c, "put", 1, s),
    "trajectories-return": lambda c, s: trajectories(c, "return", 16, s),
    "small-1": lambda c, s: small(c, 1, False, s),
    "small-4": lambda c, s: small(c, 4, False, s),
    "small-pickled": lambda c, s: small(c, 1, True, s),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("case", choices=CASES)
    parser.add_argument("--seconds", type=float, default=5.0)
    args = parser.parse_args()
    start_ray()
    try:
        say(CASES[args.case](args.case, args.seconds))
    finally:
        ray.shutdown()


if __name__ == "__main__":
    main()
