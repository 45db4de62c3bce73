"""Our side: python -m benchmarks.remote.ours CASE [--seconds 5]     one JSON line

bare          the engine (ONNX Runtime) and the batcher alone, in one process, 32 callers: what local mode is measured
              against
local         RemoteModel in local mode, 32 callers
remote        RemoteModel with one worker on this machine, 64 callers
trajectories  RemoteBuffer: 4 producers push trajectories of 128 steps (3.6 MB), one consumer takes them
pictures      RemoteBuffer: 4 producers push steps with a picture (28 KB) one by one, one consumer takes batches of 128
small         RemoteBuffer: 4 producers push samples of 100 B one by one, one consumer takes batches of 128
publish       a model of 5 MiB with 8 workers that are asked all the time: milliseconds from `publish_weights` to the
              last answer of the old weights, and how much longer than usual an answer took meanwhile

Every case but the first opens a session on a Ray of its own. Producers are members of the cluster, as agents are; the
consumer is this process.
`cpu_us` is CPU time of all processes, Ray's own among them, per forward, trajectory or sample.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import numpy as np

from benchmarks.remote.plain_ray import WARM_UP, Stretch, mlp, mlp_onnx
from benchmarks.remote.settings import (
    ACTIONS,
    LARGEST_BATCH,
    LOCAL_CALLERS,
    OBS,
    PRODUCERS,
    PUBLISH_BYTES,
    PUBLISH_WORKERS,
    REMOTE_CALLERS,
    STEPS,
    picture,
    say,
    size,
    small_sample,
    trajectory,
)


@contextlib.contextmanager
def session() -> Iterator[Any]:
    import bray

    with tempfile.TemporaryDirectory(prefix="bray-project-") as project:
        opened = bray.init(project, "trial", cluster="ray", address="local", num_cpus=16, object_store_memory=1 << 30)
        try:
            yield opened
        finally:
            bray.shutdown()


def observations(count: int) -> np.ndarray:
    return np.random.default_rng(0).normal(size=(count, OBS)).astype(np.float32)


# --- forward ----------------------------------------------------------------------------------------------------------


GRAPH_S = 60.0


async def graph_made(opened: Any, forward: Callable[[np.ndarray], Awaitable[Any]]) -> None:
    """Torch answers until the ONNX graph is made: wait for its file, and a little for those who read it."""
    until = time.monotonic() + GRAPH_S
    folder = opened.path / "models" / "m"
    while not list(folder.glob("*.onnx")):
        await forward(observations(1)[0])
        await asyncio.sleep(0.1)
        if time.monotonic() > until:
            raise RuntimeError(f"no ONNX graph in {folder} after {GRAPH_S:g} s")
    await asyncio.sleep(3 * WARM_UP)


async def ask(case: str, forward: Callable[[np.ndarray], Awaitable[Any]], callers: int, seconds: float) -> Any:
    """`callers` that ask back to back. One time is taken per forward, as in the plain case."""
    obs = observations(callers)
    times: list[float] = []

    async def caller(x: np.ndarray, end: float) -> None:
        now = time.perf_counter()
        while now < end:
            await forward(x)
            then, now = now, time.perf_counter()
            times.append(now - then)

    await asyncio.gather(*[caller(x, time.perf_counter() + WARM_UP) for x in obs])
    times.clear()
    stretch = Stretch()
    await asyncio.gather(*[caller(x, stretch.start + seconds) for x in obs])
    p50, p99 = np.percentile(times, [50, 99])
    return stretch.result(case, len(times), p50_us=round(1e6 * p50), p99_us=round(1e6 * p99))


def bare(case: str, seconds: float) -> dict[str, Any]:
    import uvloop

    from bray.inference.batcher import Batcher
    from bray.inference.onnx_engine import OnnxEngine

    engine = OnnxEngine(mlp_onnx())

    async def main() -> Any:
        batcher = Batcher(engine.forward, max_batch_size=LARGEST_BATCH)
        try:
            return await ask(case, batcher.submit, LOCAL_CALLERS, seconds)
        finally:
            await batcher.close()

    return uvloop.run(main())


def forward(case: str, workers: int, callers: int, seconds: float) -> dict[str, Any]:
    import uvloop

    import bray

    with session() as opened:
        model = bray.RemoteModel(
            "m",
            model=mlp(),
            forward_args=(observations(1)[0],),
            max_batch_size=LARGEST_BATCH,
            num_workers=workers,
            local_mode=workers == 0,
            use_onnx="infer",
        )

        async def main() -> Any:
            await graph_made(opened, model.forward)
            return await ask(case, model.forward, callers, seconds)

        return uvloop.run(main())


# --- buffer -----------------------------------------------------------------------------------------------------------


SAMPLES = {"trajectories": trajectory, "pictures": picture, "small": small_sample}


class Producer:
    """Pushes the same few samples over and over, and waits where the buffer is full."""

    def __init__(self, buffer: Any, what: str, seed: int):
        make = SAMPLES[what]
        self.buffer, self.samples = buffer, [make(seed + i) for i in range(4)]

    async def push(self, seconds: float) -> int:
        n, end = 0, time.monotonic() + seconds
        while time.monotonic() < end:
            await self.buffer.push(self.samples[n % 4], drop=False)
            n += 1
        return n

    async def push_many(self, seconds: float) -> int:
        """Without waiting for each one, as agents push: a few hundred are under way."""
        n, end = 0, time.monotonic() + seconds
        while time.monotonic() < end:
            await asyncio.gather(*[self.buffer.push(self.samples[i % 4], drop=False) for i in range(256)])
            n += 256
        return n


def produced(case: str, seconds: float) -> dict[str, Any]:
    import bray

    large = case == "trajectories"
    warm_up = (3 if large else 2) * WARM_UP
    with session() as opened:
        buffer = bray.RemoteBuffer("b", size=32, batch_size=None if large else STEPS, num_workers=1)
        producers = [opened.cluster.start(f"producer/{i}", Producer, buffer, case, 4 * i) for i in range(PRODUCERS)]
        method, long = "push" if large else "push_many", seconds + warm_up + 3.0
        ends = [producer.call(method, long, timeout=long + 60.0) for producer in producers]

        def consume(until: float) -> int:
            got, checked = 0, 0.0
            while time.perf_counter() < until:
                batch = next(buffer)
                reward = batch["reward"]
                if large:
                    checked += float(batch["obs"][:, 0, 0, 0].sum())  # every step is looked at
                checked += float(reward.sum())
                got += 1 if large else len(reward)
            assert checked > 0
            return got

        next(buffer)
        consume(time.perf_counter() + warm_up)
        stretch = Stretch()
        result = stretch.result(case, consume(stretch.start + seconds))
        until = time.monotonic() + 30.0
        while not all(end.done() for end in ends) and time.monotonic() < until:
            with contextlib.suppress(TimeoutError):
                buffer.pop(timeout=1.0)  # so that nobody waits for room
    result["bytes_per_second"] = round(result["per_second"] * size(SAMPLES[case](0)))
    return result


# --- publish ----------------------------------------------------------------------------------------------------------

PUBLISHES = 15
ASKERS = 16
PAUSE_S = 0.02


class Publisher:
    """Publishes from a process of its own, as a trainer does."""

    def __init__(self, model: Any):
        self.model = model
        self.weights, _ = model.get_weights()

    def publish(self, step: int) -> int:
        return self.model.publish_weights({k: v + np.float32(1e-3) for k, v in self.weights.items()}, step).result(60)


def publish(case: str, seconds: float) -> dict[str, Any]:
    import torch
    import uvloop
    from torch import nn

    import bray

    width = round((PUBLISH_BYTES / 4) ** 0.5) - 6
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(OBS, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, ACTIONS))
    weights = {k: v.numpy() for k, v in net.state_dict().items()}
    answers: list[tuple[float, float, int]] = []  # when, how long it took, which version

    async def asker(model: Any, x: np.ndarray) -> None:
        while True:
            start = time.perf_counter()
            _, step = await model.forward(x, with_step=True)
            now = time.perf_counter()
            answers.append((now, now - start, step))
            await asyncio.sleep(PAUSE_S)

    async def main(opened: Any, model: Any) -> dict[str, Any]:
        await graph_made(opened, model.forward)
        publisher = opened.cluster.start("publisher", Publisher, model)
        asking = [asyncio.create_task(asker(model, x)) for x in observations(ASKERS)]
        await asyncio.sleep(2 * WARM_UP)
        reach, pauses, quiet, usual = [], [], [], []
        for i in range(PUBLISHES):
            answers.clear()
            await asyncio.sleep(max(0.5, seconds / PUBLISHES))
            usual.append(statistics.median(took for _, took, _ in answers))
            quiet.append(1e3 * (max(took for _, took, _ in answers) - usual[-1]))
            answers.clear()
            start = time.perf_counter()
            await publisher.call("publish", i + 1, timeout=60.0)
            await asyncio.sleep(max(0.5, seconds / PUBLISHES))
            late = [when - start for when, _, step in answers if step <= i]
            reach.append(1e3 * max(late, default=0.0))
            pauses.append(1e3 * (max(took for _, took, _ in answers) - usual[-1]))
        for task in asking:
            task.cancel()
        return {
            "case": case,
            "reach_ms": round(statistics.median(reach), 1),
            "reach_ms_most": round(max(reach), 1),
            "forward_ms": round(1e3 * statistics.median(usual), 2),
            "pause_ms": round(statistics.median(pauses), 1),
            "pause_ms_most": round(max(pauses), 1),
            # the longest wait of as many seconds in which nothing is published
            "pause_ms_without": round(statistics.median(quiet), 1),
            "pause_ms_more": round(statistics.median(p - q for p, q in zip(pauses, quiet, strict=True)), 1),
            "publishes": PUBLISHES,
            "bytes": sum(x.nbytes for x in weights.values()),
        }

    with session() as opened:
        model = bray.RemoteModel(
            "m",
            model=net,
            forward_args=(observations(1)[0],),
            max_batch_size=8,
            num_workers=PUBLISH_WORKERS,
            cpus_per_worker=0.5,
            memory_per_worker=256,
            use_onnx="train",
        )
        return uvloop.run(main(opened, model))


CASES: dict[str, Callable[[str, float], dict[str, Any]]] = {
    "bare": bare,
    "local": lambda c, s: forward(c, 0, LOCAL_CALLERS, s),
    "remote": lambda c, s: forward(c, 1, REMOTE_CALLERS, s),
    "trajectories": produced,
    "pictures": produced,
    "small": produced,
    "publish": publish,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("case", choices=CASES)
    parser.add_argument("--seconds", type=float, default=5.0)
    args = parser.parse_args()
    say(CASES[args.case](args.case, args.seconds))


if __name__ == "__main__":
    main()
