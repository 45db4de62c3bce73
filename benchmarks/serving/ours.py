"""Our side of `python -m benchmarks.serving`: python -m benchmarks.serving.ours WHAT [key=value ...]

WHAT: echo (async Actor), plain (the same without async), mlp, cnn (a model behind the batcher), mlp-none, cnn-none (the
same Actors that do not ask their model). Sessions, limits, metrics and the watchdog are on, as always.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import numpy as np

from bray.config import parse_assignments
from bray.serving.config import ServiceConfig
from bray.serving.workers import serve


class Echo:
    async def start(self, session: str, data: bytes) -> bytes:
        return b""

    async def tick(self, data: bytes) -> bytes:
        return data[:32]

    async def end(self, data: bytes) -> bytes:
        return b""


class Plain:
    def start(self, session: str, data: bytes) -> bytes:
        return b""

    def tick(self, data: bytes) -> bytes:
        return data[:32]

    def end(self, data: bytes) -> bytes:
        return b""


class Asks(Echo):
    """Reads an observation from the body, asks the model, answers with the logits' bytes; without a host it answers
    zeros."""

    def __init__(self, host: Any, shape: tuple[int, ...], dtype: str):
        self.host, self.dtype, self.shape = host, dtype, shape
        self.size = int(np.prod(shape))

    async def tick(self, data: bytes) -> bytes:
        obs = np.frombuffer(data, self.dtype, self.size).reshape(self.shape)
        if self.host is None:
            return bytes(16) + obs[:0].tobytes()
        out = await self.host.forward(obs)
        return out["dist"].tobytes()


def model(kind: str) -> tuple[bytes, tuple[int, ...], str]:
    """An exported Model with fresh weights: a 64x64 MLP of 4 numbers, or a Nature CNN of 4x84x84 bytes. The file is
    kept in BENCH_MODELS, where that is set: a machine without torch can use it."""
    shape, dtype = ((4,), "float32") if kind == "mlp" else ((4, 84, 84), "uint8")
    kept = Path(os.environ["BENCH_MODELS"], f"{kind}.onnx") if "BENCH_MODELS" in os.environ else None
    if kept is not None and kept.exists():
        return kept.read_bytes(), shape, dtype
    from bray.inference.export import export_onnx
    from bray.inference.graph import with_constant_weights
    from bray.nn.catalog import ModelConfig, make_model
    from bray.spec import EnvSpec, Space

    space = Space("box", shape, dtype) if kind == "mlp" else Space("box", shape, dtype, 0, 255)
    spec = EnvSpec(kind, space, Space("discrete", (), "int64", n=(4,), start=(0,)))
    net = make_model("actor_critic", spec, ModelConfig())
    graph = export_onnx(net, (np.zeros((2, *space.shape), space.dtype),), ("dist",))
    weights = {k: v.numpy() for k, v in net.state_dict().items()}
    file = with_constant_weights(graph, weights)
    if kept is not None:
        kept.write_bytes(file)
    return file, shape, dtype


def main() -> None:
    what, *rest = sys.argv[1:]
    given = parse_assignments(rest).values
    batch = int(given.pop("batch", 32))
    config = ServiceConfig(**({"actors_per_worker": 20_000, "max_pending": 4096} | dict(given)))
    make: Any = {"echo": Echo, "plain": Plain}.get(what)
    prepare = None
    if make is None:
        kind, _, without = what.partition("-")
        file, shape, dtype = model(kind)
        box: dict[str, Any] = {"host": None}

        async def load(server: Any) -> None:
            from bray.inference.host import ModelHost
            from bray.inference.onnx_engine import OnnxEngine

            if not without:
                box["host"] = ModelHost("m", OnnxEngine(file), max_batch_size=batch, max_queue=4096)

        def make_asking() -> Asks:
            return Asks(box["host"], shape, dtype)

        make, prepare = make_asking, load
    sys.exit(serve(make, config, on_ready=lambda port, admin: print("ready", port, admin, flush=True), prepare=prepare))


if __name__ == "__main__":
    main()
