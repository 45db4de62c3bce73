"""int8: a graph of ONNX Runtime whose layers compute with bytes, scaled by what recorded observations made of them. No
torch here.

Activations uint8, weights int8 with a scale for each output channel, both formats of ONNX Runtime (QDQ, QOperator) were
equally fast on the Neoverse N1; QDQ it is. Three things of our own: the last layers stay float32 (they cost next to
nothing, and their rounding would decide between close actions); so does a dense layer that reads observations (each of
their numbers has a range of its own, and one scale does not fit all); and pictures of bytes enter the first convolution
as they are, without a way through float32.

Weights have 7 bits (`reduce_range`): x86 CPUs without VNNI add two products of a byte and a weight in 16 bits, which
255 * (127 + 127) overflows without a word; 255 * (64 + 64) does not. A file is made on one CPU and served on another.
"""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import numpy_helper
from onnxruntime.quantization import CalibrationDataReader, QuantFormat, QuantType, quantize_static
from onnxruntime.quantization.shape_inference import quant_pre_process

from bray import tree
from bray.errors import DataError, ExportError
from bray.inference.graph import leaf_names, read_signature, write_signature

_LAYERS = ("Conv", "Gemm", "MatMul")
_BETWEEN = ("Relu", "Reshape", "Flatten", "Transpose", "MaxPool", "Add", "Concat")
"""What may stand between two layers and can pass bytes on."""
_ROWS = 32


def quantize(model: bytes, args: Sequence[Any]) -> bytes:
    """The file of a graph with constant weights -> the same in int8, calibrated on `args`: what the Model takes, many
    rows `[N, ...]`."""
    signature = read_signature(onnx.load_model_from_string(model))
    if signature.weights != "constant" or signature.precision != "float32":
        raise DataError("int8 is made of a float32 graph with its weights inside: expected model.onnx")
    names = leaf_names(signature.inputs)
    rows = dict(zip(names, tree.leaves_like(signature.inputs, tuple(args)), strict=True))
    logger = logging.getLogger()
    level = logger.level
    logger.setLevel(logging.ERROR)  # it recommends, on the root logger, what is done already
    try:
        with tempfile.TemporaryDirectory() as d:
            given, before, after = (Path(d) / name for name in ("given.onnx", "float32.onnx", "int8.onnx"))
            given.write_bytes(model)  # of a model in memory it takes the large weights apart, and then misses them
            quant_pre_process(given, before, skip_symbolic_shape=True)
            prepared = onnx.load(before)
            quantize_static(
                prepared,
                after,
                _Recorded(rows),
                quant_format=QuantFormat.QDQ,
                op_types_to_quantize=[*_LAYERS, *_BETWEEN],
                activation_type=QuantType.QUInt8,
                weight_type=QuantType.QInt8,
                per_channel=True,
                reduce_range=True,
                nodes_to_exclude=_float_layers(prepared.graph),
            )
            out = onnx.load(after)
    finally:
        logger.setLevel(level)
    if not any(x.data_type == onnx.TensorProto.INT8 and x.dims for x in out.graph.initializer):
        raise ExportError(
            "there is nothing to quantize in this Model: int8 is for convolutions, and for dense layers between the "
            "first and the last"
        )
    _feed_bytes(out.graph)
    write_signature(out, replace(signature, precision="int8"))
    return out.SerializeToString()


class _Recorded(CalibrationDataReader):
    """Recorded inputs, some rows at a time."""

    def __init__(self, rows: dict[str, np.ndarray]):
        n = tree.length(rows)
        self._batches: Iterator[Any] = iter([tree.index(rows, slice(i, i + _ROWS)) for i in range(0, n, _ROWS)])

    def get_next(self) -> dict[str, np.ndarray] | None:
        return next(self._batches, None)


def _float_layers(graph: Any) -> list[str]:
    """The layers that stay float32: see the top of this file."""
    makes = {name: node for node in graph.node for name in node.output}
    inputs = {x.name for x in graph.input}

    def before(names: Iterable[str]) -> tuple[set[str], bool]:
        """The nearest layers on all ways back, and whether one of the ways ends at an input."""
        layers, seen, todo = set(), set(), list(names)
        while todo:
            name = todo.pop()
            node = makes.get(name)
            if node is not None and node.op_type in _LAYERS:
                layers.add(node.name)
            elif name not in seen:
                seen.add(name)
                todo += node.input if node is not None else ()
        return layers, not inputs.isdisjoint(seen)

    first = {node.name for node in graph.node if node.op_type in ("Gemm", "MatMul") and before(node.input)[1]}
    return sorted(first | before(x.name for x in graph.output)[0])


def _feed_bytes(graph: Any) -> None:
    """bytes -> float32 -> * c -> uint8 with scale s is, but for rounding, the bytes themselves with scale c; without a
    product c is 1."""
    makes = {name: node for node in graph.node for name in node.output}
    values = {x.name: x for x in graph.initializer}
    kinds = {x.name: x.type.tensor_type.elem_type for x in [*graph.input, *graph.value_info]}
    for node in [n for n in graph.node if n.op_type == "QuantizeLinear"]:
        scaled = cast = makes.get(node.input[0])
        factor: Any = numpy_helper.from_array(np.array(1.0, np.float32))
        if scaled is not None and scaled.op_type == "Mul":
            cast, factor = makes.get(scaled.input[0]), values.get(scaled.input[1])
        if cast is None or cast.op_type != "Cast" or kinds.get(cast.input[0]) != onnx.TensorProto.UINT8:
            continue
        readers = [n for n in graph.node if node.output[0] in n.input]
        if factor is None or factor.dims or any(n.op_type != "DequantizeLinear" for n in readers):
            continue
        scale, zero = f"{cast.input[0]}_scale", f"{cast.input[0]}_zero"
        graph.initializer.append(numpy_helper.from_array(numpy_helper.to_array(factor), scale))
        graph.initializer.append(numpy_helper.from_array(np.array(0, np.uint8), zero))
        for reader in readers:
            reader.input[:] = [cast.input[0], scale, zero]
        graph.node.remove(node)
        for unused in filter(None, (scaled, cast)):
            if unused in graph.node and not any(unused.output[0] in n.input for n in graph.node):
                graph.node.remove(unused)
