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
from bray.inference.torch_engine import TorchEngine, load_weights
from bray.inference.verify import check_close, run

_ROWS = 16

Weights = Mapping[str, np.ndarray]


def make_graph(module: Any, args: tuple[Any, ...], weights: Weights, ready: Path | None = None) -> bytes:
    """The graph of a Model, weights as inputs. `ready` is a file that may hold it already: it is used if it answers as
    the Model does.
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
            graph = ready.read_bytes()
            _check(graph, weights, rows, expected)
            return graph
        except BrayError:  # of an older Model of this name: made anew below
            pass
    graph = export_onnx(module, args)
    _check(graph, weights, rows, expected)
    return graph


def _check(graph: bytes, weights: Weights, rows: tuple[Any, ...], expected: Any) -> None:
    engine = OnnxEngine(graph)
    engine.set_weights(weights)
    check_close(engine, rows, expected, "its ONNX graph")
    check_close(
        OnnxEngine(with_constant_weights(graph, weights)), rows, expected, "its ONNX graph with constant weights"
    )


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
