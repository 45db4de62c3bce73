"""The Model as an ONNX graph, made once and checked against torch before anybody is answered by it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from bray import tree
from bray.errors import BrayError, ExportError
from bray.inference.export import export_onnx
from bray.inference.graph import with_constant_weights
from bray.inference.onnx_engine import OnnxEngine
from bray.inference.proof import Proof, ProvenGraph
from bray.inference.quantize import quantize
from bray.inference.torch_engine import TorchEngine, load_weights
from bray.inference.verify import check_close, run

_ROWS = 16

Weights = Mapping[str, np.ndarray]


def make_graph(
    module: Any, args: tuple[Any, ...], weights: Weights, step: int = 0, ready: Path | None = None
) -> ProvenGraph:
    """The graph of a Model, weights as inputs, and the proof of it with these weights. `ready` is a file that may hold
    it already: it is used if it answers as the Model does.
    ExportError says which operation cannot be exported and why, or that the Model draws random numbers."""
    load_weights(module, weights)
    module.eval()
    drawn = random_operations(module, args)
    if drawn:
        raise ExportError(
            f"its forward draws random numbers ({', '.join(drawn)}), which ONNX Runtime would draw otherwise. Return "
            "the distribution and draw outside of forward to use ONNX"
        )
    rows = _some_rows(args)
    expected = run(TorchEngine(module, record=False), rows)
    if ready is not None and ready.is_file():
        try:
            return _proven(ready.read_bytes(), weights, step, rows, expected)
        except BrayError:  # of an older Model of this name: made anew below
            pass
    return _proven(export_onnx(module, args), weights, step, rows, expected)


def _proven(graph: bytes, weights: Weights, step: int, rows: tuple[Any, ...], expected: Any) -> ProvenGraph:
    engine = OnnxEngine(graph)
    engine.set_weights(weights)
    check_close(engine, rows, expected, "its ONNX graph")
    check_close(
        OnnxEngine(with_constant_weights(graph, weights)), rows, expected, "its ONNX graph with constant weights"
    )
    return ProvenGraph(graph, Proof.make(rows, expected, engine, step, weights=weights))


def make_int8(graph: bytes, weights: Weights, step: int, rows: tuple[Any, ...]) -> ProvenGraph:
    """A version in int8, calibrated on rows of inputs."""
    constant = with_constant_weights(graph, weights, step)
    int8, engine = quantize(constant, rows), OnnxEngine(constant)
    some = tree.index(tuple(rows), slice(-_ROWS, None))
    return ProvenGraph(int8, Proof.make(some, run(engine, some), engine, step).with_int8(OnnxEngine(int8)))


def _some_rows(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Rows to compare answers on: the example's, and random ones in place of its floats (other numbers may be
    indices)."""
    rng = np.random.default_rng(0)

    def some(x: np.ndarray) -> np.ndarray:
        repeated = np.repeat(x[:1], _ROWS, 0)
        if x.dtype.kind == "f":
            repeated = rng.normal(size=repeated.shape).astype(x.dtype)
        return np.concatenate([x, repeated])

    return tuple(tree.map(some, args))


def random_operations(module: Any, args: tuple[Any, ...]) -> list[str]:
    """The operations of a forward that draw random numbers."""
    found: dict[str, None] = {}

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, given: Any = (), kwargs: Any = None) -> Any:
            if torch.Tag.nondeterministic_seeded in func.tags:
                found[str(func.overloadpacket).removeprefix("aten.")] = None
            return func(*given, **(kwargs or {}))

    tensors = tree.map(lambda x: torch.from_numpy(np.array(x)), args)
    with torch.no_grad(), torch.random.fork_rng(devices=[]), Watch():
        module(*tensors)
    return list(found)
