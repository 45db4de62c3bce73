"""One forward, microseconds (medians): torch eager, and our engines, one thread, batch 1 to 128.

`mlp`: 4 numbers, two layers of 64, 2 values. `nature`: the CNN of Mnih 2015 on uint8[4, 84, 84], 6 values. Arrays go in
and come out as numpy. All engines take turns, so that a busy moment hits all alike.

    python -m benchmarks.inference [mlp] [nature] [--seconds 10]
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np

CASES: dict[str, tuple[tuple[int, ...], str, int]] = {"mlp": ((4,), "float32", 2), "nature": ((4, 84, 84), "uint8", 6)}
BATCHES = (1, 8, 32, 128)
ROUNDS = 9
ROWS = 256


def observations(shape: tuple[int, ...], dtype: str) -> np.ndarray:
    rng = np.random.default_rng(0)
    if dtype == "float32":
        return rng.normal(size=(ROWS, *shape)).astype(np.float32)
    out = np.zeros((ROWS, *shape), np.uint8)
    for picture in out.reshape(-1, *shape[1:]):  # a few squares on black, as in a game
        for _ in range(4):
            y, x, side = rng.integers(0, 70), rng.integers(0, 70), rng.integers(2, 14)
            picture[y : y + side, x : x + side] = rng.integers(50, 256)
    return out


def engines(case: str, obs: np.ndarray) -> dict[str, Callable[[np.ndarray], Any]]:
    """What is timed, by name."""
    import torch

    from bray.inference.export import export_onnx
    from bray.inference.graph import with_constant_weights
    from bray.inference.onnx_engine import OnnxEngine
    from bray.inference.quantize import quantize
    from bray.inference.torch_engine import TorchEngine
    from bray.nn import ModelConfig, make_model
    from bray.spec import EnvSpec, Space

    shape, dtype, actions = CASES[case]
    bounds = (0, 255) if dtype == "uint8" else (None, None)
    spec = EnvSpec(case, Space("box", shape, dtype, *bounds), Space("discrete", (), "int64", n=(actions,), start=(0,)))
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = make_model("q", spec, ModelConfig())
    weights = {k: v.numpy() for k, v in model.state_dict().items()}
    graph = export_onnx(model, [obs])
    constant = with_constant_weights(graph, weights)
    bound = OnnxEngine(graph)
    bound.set_weights(weights)

    def eager(x: np.ndarray) -> Any:
        with torch.inference_mode():
            return model(torch.from_numpy(x))["q"].numpy()

    return {
        "torch eager": eager,
        "torch": TorchEngine(model).forward,
        "onnx": OnnxEngine(constant).forward,
        "onnx, weights as inputs": bound.forward,
        "int8": OnnxEngine(quantize(constant, [obs])).forward,
    }


def measure(case: str, seconds: float) -> dict[str, Any]:
    """Engine -> batch size -> median over rounds of the round's median."""
    obs = observations(*CASES[case][:2])
    forwards = engines(case, obs)
    out: dict[str, dict[str, float]] = {name: {} for name in forwards}
    turn = seconds / (len(BATCHES) * len(forwards) * ROUNDS)
    for batch in BATCHES:
        inputs = [np.ascontiguousarray(np.roll(obs, -7 * k, 0)[:batch]) for k in range(8)]
        medians: dict[str, list[float]] = {name: [] for name in forwards}
        for _ in range(ROUNDS + 1):
            for name, forward in forwards.items():
                times: list[float] = []
                end = time.perf_counter() + turn
                while len(times) < 5 or time.perf_counter() < end:
                    x = inputs[len(times) % len(inputs)]
                    start = time.perf_counter()
                    forward(x)
                    times.append(time.perf_counter() - start)
                medians[name].append(statistics.median(times))
        for name, rounds in medians.items():
            out[name][str(batch)] = round(1e6 * statistics.median(rounds[1:]), 1)  # the first round is to get warm
    return {"case": case, "us": out}


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
