"""Our side of `forward` and `publish`: python -m benchmarks.remote.model CASE [--seconds 5]     one JSON line

bare            32 asyncio callers ask the batcher and the engine themselves, no handle in between: what local mode is measured by
forward-local   the same callers ask a RemoteModel in local mode, in a session of Ray
forward-remote  64 callers ask a RemoteModel with one worker process on this machine
forward-torch   the same with torch instead of ONNX Runtime
publish         a model of 5 MiB with 8 workers is published; from the call until the last worker answers with it. Callers ask all the while, and
                the longest wait of one of them is told (`pause_ms`, beside the median)

The MLP is that of `plain_ray`, in ONNX Runtime with constant weights. `cpu_us` is CPU time of all processes, Ray's own among them, per forward.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.remote.plain_ray import WARM_UP, Stretch, mlp, mlp_onnx
from benchmarks.remote.settings import (
    LARGEST_BATCH,
    LOCAL_CALLERS,
    OBS,
    PUBLISH_BYTES,
    PUBLISH_WORKERS,
    REMOTE_CALLERS,
    say,
)

RAY = {
    "address": "local",
    "num_cpus": 16,
    "object_store_memory": 1 << 30,
    "include_dashboard": False,
    "log_to_driver": False,
}

Ask = Callable[[np.ndarray], Awaitable[Any]]


async def measure(case: str, ask: Ask, callers: int, seconds: float) -> dict[str, Any]:
    """So many callers ask back to back."""
    obs = np.random.default_rng(0).normal(size=(callers, OBS)).astype(np.float32)
    n = 0

    async def caller(x: np.ndarray, end: float) -> None:
        nonlocal n
        while time.perf_counter() < end:
            await ask(x)
            n += 1

    await asyncio.gather(*[caller(x, time.perf_counter() + WARM_UP) for x in obs])
    n = 0
    stretch = Stretch()
    await asyncio.gather(*[caller(x, stretch.start + seconds) for x in obs])
    return stretch.result(case, n)


def bare(case: str, seconds: float) -> dict[str, Any]:
    import uvloop

    from bray.inference.batcher import Batcher
    from bray.inference.onnx_engine import OnnxEngine

    async def main() -> dict[str, Any]:
        batcher = Batcher(OnnxEngine(mlp_onnx()).forward, max_batch_size=LARGEST_BATCH)
        return await measure(case, batcher.submit, LOCAL_CALLERS, seconds)

    return uvloop.run(main())


def forward(case: str, workers: int, callers: int, onnx: str | None, seconds: float) -> dict[str, Any]:
    import uvloop

    from bray.remote.model.handle import RemoteModel

    model = RemoteModel(
        "mlp",
        mlp(),
        (np.zeros((1, OBS), np.float32),),
        max_batch_size=LARGEST_BATCH,
        num_workers=workers,
        use_onnx=onnx,
    )
    wait_for_onnx(model, workers, onnx)
    return uvloop.run(measure(case, model.forward, callers, seconds))


def wait_for_onnx(model: Any, workers: int, onnx: str | None) -> None:
    """Until the graph is made and everybody answers with it."""
    from bray.remote.cluster import session

    model(np.zeros(OBS, np.float32))
    end = time.monotonic() + 60

    def engines() -> set[str]:
        if not workers:
            return {model._client.served.engine}
        members = [session().cluster.find(f"model/mlp/{i}") for i in range(workers)]
        return {m.call("numbers").result()["engine"] for m in members}

    while onnx is not None and "torch" in engines():
        assert time.monotonic() < end, "the ONNX graph was not made in a minute"
        time.sleep(0.2)


def publish(case: str, seconds: float) -> dict[str, Any]:
    import torch
    import uvloop
    from torch import nn

    from bray.remote.model.handle import RemoteModel
    from bray.remote.model.weights import get_torch_model_weights

    width = int((PUBLISH_BYTES / 4 / 2) ** 0.5)
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, width))
    x = np.zeros(width, np.float32)
    model = RemoteModel("large", net, (x,), num_workers=PUBLISH_WORKERS, cpus_per_worker=0.1, memory_per_worker=100)
    weights = get_torch_model_weights(net)
    size = sum(w.nbytes for w in weights.values())

    async def main() -> dict[str, Any]:
        from bray.remote.cluster import session

        workers = [session().cluster.find(f"model/large/{i}") for i in range(PUBLISH_WORKERS)]
        took: list[float] = []
        waits: list[float] = []
        done = False

        async def caller() -> None:
            while not done:
                start = time.perf_counter()
                await model.forward(x)
                waits.append(time.perf_counter() - start)
                await asyncio.sleep(0.02)

        async def arrives(worker: Any, step: int) -> None:
            while (await worker.call("numbers"))["step"] < step:
                await asyncio.sleep(0.005)

        asking = [asyncio.create_task(caller()) for _ in range(PUBLISH_WORKERS)]
        await asyncio.sleep(WARM_UP)
        quiet, waits[:] = sorted(waits), []
        stretch = Stretch()
        end = time.perf_counter() + seconds
        while time.perf_counter() < end:
            start = time.perf_counter()
            step = await model.publish_weights(weights)
            await asyncio.gather(*[arrives(w, step) for w in workers])
            took.append(time.perf_counter() - start)
            await asyncio.sleep(0.1)
        done = True
        await asyncio.gather(*asking)
        ms = [round(1e3 * float(t), 1) for t in np.percentile(took, [50, 90, 100])]
        return stretch.result(
            case,
            len(took),
            bytes=size,
            median_ms=ms[0],
            p90_ms=ms[1],
            most_ms=ms[2],
            wait_ms=[round(1e3 * float(t), 2) for t in np.percentile(waits, [50, 99, 100])],
            quiet_wait_ms=[round(1e3 * float(t), 2) for t in np.percentile(quiet, [50, 99, 100])],
        )

    return uvloop.run(main())


CASES: dict[str, Any] = {
    "bare": bare,
    "forward-local": lambda c, s: forward(c, 0, LOCAL_CALLERS, "infer", s),
    "forward-remote": lambda c, s: forward(c, 1, REMOTE_CALLERS, "infer", s),
    "forward-torch": lambda c, s: forward(c, 1, REMOTE_CALLERS, None, s),
    "publish": publish,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("case", choices=CASES)
    parser.add_argument("--seconds", type=float, default=5.0)
    args = parser.parse_args()
    if args.case == "bare":
        say(CASES[args.case](args.case, args.seconds))
        return
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    from bray.remote import cluster

    with tempfile.TemporaryDirectory() as folder:
        cluster.init(str(Path(folder) / "project"), args.case, **RAY)
        try:
            say(CASES[args.case](args.case, args.seconds))
        finally:
            cluster.shutdown()


if __name__ == "__main__":
    main()
