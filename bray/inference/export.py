"""A Model as an ONNX graph.

One graph is exported, with the weights as inputs, so that it fits every version of a run; the file that has its weights
inside is made of it (`graph.with_constant_weights`), here and in a server without torch, and ONNX Runtime folds and
fuses the constants when it loads it.
"""

from __future__ import annotations

import copy
import io
import logging
import re
import traceback
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stderr
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

from bray import tree
from bray.errors import ExportError
from bray.inference.graph import Signature, write_signature

ARGUMENTS = ("obs", "state")
"""Names of a Model's first arguments; further ones are arg2, arg3, ..."""
_BATCH = "batch"


def export_onnx(model: nn.Module, args: Sequence[Any], outputs: Sequence[str] | None = None, step: int = 0) -> bytes:
    """The file of a Model's graph, weights as inputs, any batch size.

    `args`: an example of what the Model takes, each a tree of arrays or tensors `[B, ...]`; only types and shapes
    matter. `outputs`: which entries of its dict of outputs to keep (a served policy needs those that it acts by, and
    "state"); None = all. What the kept ones do not depend on is left out: weights, and parts of an observation such as
    the action mask.
    """
    names = [ARGUMENTS[i] if i < len(ARGUMENTS) else f"arg{i}" for i in range(len(args))]
    inputs = tuple(_named(x, name) for x, name in zip(args, names, strict=True))
    flat = [_example(x) for x in tree.leaves(tuple(args))]
    wrapped = _Flat(copy.deepcopy(model).cpu().eval(), inputs, outputs)
    program = _trace(wrapped, flat)
    in_names = tree.leaves(inputs)
    taken = set(in_names)
    out_tree = wrapped.seen.outputs
    out_tree = _named(out_tree, "" if isinstance(out_tree, dict) else "output")
    out_tree = tree.map(lambda name: f"next/{name}" if name in taken else name, out_tree)
    out_names = tree.leaves(out_tree)
    weights = model.state_dict()
    twice = [name for name, n in Counter([*in_names, *out_names, *weights]).items() if n > 1]
    if twice:
        raise ExportError(
            f"the Model cannot be exported: two of its inputs, outputs and weights are named {twice[0]!r}"
        )
    proto = _convert(program, in_names, out_names, set(weights))
    left = {x.name for x in proto.graph.input}
    signature = Signature(tuple(_pruned(x, left) for x in inputs), out_tree, step)
    write_signature(proto, signature)
    return proto.SerializeToString()


class _Flat(nn.Module):
    """A Model that takes and returns its leaves, one after the other."""

    def __init__(self, model: nn.Module, inputs: tuple[Any, ...], outputs: Sequence[str] | None):
        super().__init__()
        self.model, self.inputs, self.outputs = model, inputs, outputs
        self.seen = SimpleNamespace(outputs=None)  # an attribute of its own would be put back after tracing

    def forward(self, *flat: Tensor) -> tuple[Tensor, ...]:
        leaves = iter(flat)
        out = self.model(*tree.map(lambda _: next(leaves), self.inputs))
        if self.outputs is not None:
            missing = [k for k in self.outputs if k not in out]
            if missing:
                raise ExportError(f"the Model has no output {missing[0]!r}, it has: {', '.join(out)}")
            out = {k: out[k] for k in self.outputs}
        for path, x in tree.paths(out):
            if not isinstance(x, Tensor):
                raise ExportError(
                    f"the Model cannot be exported: its outputs are a tree of tensors, but {path or 'the output'} is a "
                    f"{type(x).__name__}"
                )
        self.seen.outputs = tree.map(lambda _: "", out)
        return tuple(tree.leaves(out))


def _named(value: Any, root: str) -> Any:
    """The tree with the path of each leaf in its place."""
    paths = iter([path for path, _ in tree.paths(value, root)])
    return tree.map(lambda _: next(paths), value)


def _example(x: Any) -> Tensor:
    """Two rows of the same kind: PyTorch takes a batch of one for a constant."""
    dtype = x.dtype if isinstance(x, Tensor) else torch.from_numpy(np.empty(0, x.dtype)).dtype
    return torch.zeros(2, *x.shape[1:], dtype=dtype)


def _pruned(names: Any, left: set[str]) -> Any:
    """A tree of names without those that the graph has lost; None where nothing is left."""
    if isinstance(names, dict):
        parts = {k: _pruned(v, left) for k, v in names.items()}
        return {k: v for k, v in parts.items() if v is not None} or None
    if isinstance(names, (list, tuple)):
        items = [_pruned(v, left) for v in names]
        if all(v is None for v in items):
            return None
        return items if isinstance(names, list) else tuple(items)
    return names if names in left else None


# --- PyTorch's two steps ----------------------------------------------------------------------------------------------


def _trace(model: _Flat, flat: list[Tensor]) -> torch.export.ExportedProgram:
    """The Model's forward as a graph of operations."""
    batch = torch.export.Dim(_BATCH)
    try:
        with _quiet():
            return torch.export.export(
                model, tuple(flat), dynamic_shapes=(tuple({0: batch} for _ in flat),), strict=False
            )
    except ExportError:
        raise
    except Exception as e:  # the forward is the user's code: anything
        raise ExportError(f"the Model cannot be exported: {_why(e)}{_where(e)}. {_GO_ON}") from e


_GO_ON = "It trains and serves with torch as it is."


def _why(e: Exception) -> str:
    first = (str(e).strip().splitlines() or [type(e).__name__])[0]
    if isinstance(e, GuardOnDataDependentSymNode) or "data-dependent" in first:
        return "its forward goes another way for other values of a tensor (use torch.where, and no item() or int())"
    if "Constraints violated" in first or "specialized it to be a constant" in str(e):
        return "it takes one batch size only (write -1 or x.shape[0] where its code has a number)"
    return f"its forward raised {type(e).__name__}: {first}"


def _where(e: Exception) -> str:
    """The last line of the user's own code that an exception went through."""
    frames = [f for f in traceback.extract_tb(e.__traceback__) if _users(f.filename)]
    return f", at {Path(frames[-1].filename).name}:{frames[-1].lineno}: {frames[-1].line}" if frames else ""


def _users(filename: str) -> bool:
    return not re.search(r"[/\\]torch[/\\]", filename) and Path(filename) != Path(__file__) and filename[0] != "<"


def _convert(program: torch.export.ExportedProgram, inputs: list[str], outputs: list[str], weights: set[str]) -> Any:
    """The graph in ONNX, weights as inputs; an `onnx.ModelProto`."""
    try:
        with _quiet():
            made = torch.onnx.export(
                program, dynamo=True, optimize=False, verbose=False, input_names=inputs, output_names=outputs
            )
            assert made is not None
            graph = made.model.graph
            for name in list(graph.initializers):
                if name.removeprefix("model.") in weights:
                    value = graph.initializers.pop(name)
                    value.const_value, value.name = None, name.removeprefix("model.")
                    graph.inputs.append(value)
            made.optimize()  # not before: it would fold weights together, and their names would be lost
            proto = made.model_proto
    except Exception as e:
        raise ExportError(f"the Model cannot be exported: {_which(e, program)}. {_GO_ON}") from e
    _tidy(proto)
    for x in proto.graph.output:
        dims = x.type.tensor_type.shape.dim
        if not dims or dims[0].dim_param != _BATCH:
            raise ExportError(
                f"the Model cannot be exported: its output {x.name!r} has not one row for each row of its input. "
                f"{_GO_ON}"
            )
    return proto


def _which(e: Exception, program: torch.export.ExportedProgram) -> str:
    """The operation that has no ONNX form, and the line of code that uses it."""
    found = re.search(r"No ONNX function found for <OpOverload\(op='([^']+)'", str(e))
    if found is None:
        return (str(e.__cause__ or e).strip().splitlines() or [type(e).__name__])[0]
    operation = found[1]
    place = ""
    for node in program.graph.nodes:
        if operation.rpartition(".")[2] in str(node.target):
            lines = [x.strip() for x in str(node.meta.get("stack_trace", "")).strip().splitlines()]
            calls = [i for i, x in enumerate(lines) if (m := re.match(r'File "([^"]+)"', x)) and _users(m[1])]
            if calls and (m := re.match(r'File "([^"]+)", line (\d+)', lines[calls[-1]])):
                code = lines[calls[-1] + 1] if calls[-1] + 1 < len(lines) else ""
                place = f", at {Path(m[1]).name}:{m[2]}: {code}"
    return f"the operation {operation} has no form in ONNX{place}"


def _tidy(proto: Any) -> None:
    """Drop what is not read (inputs, and notes that hold paths of this machine), and call the batch dimension
    `batch`."""
    graph = proto.graph
    read = {name for node in graph.node for name in node.input} | {x.name for x in graph.output}
    kept = [x for x in graph.input if x.name in read]
    symbols = {x.type.tensor_type.shape.dim[0].dim_param for x in graph.input if x.type.tensor_type.shape.dim} - {""}
    del graph.input[:]
    graph.input.extend(kept)
    for node in graph.node:
        node.doc_string = ""
        del node.metadata_props[:]
    for x in [*graph.input, *graph.output, *graph.value_info]:
        x.doc_string = ""
        del x.metadata_props[:]
        for dim in x.type.tensor_type.shape.dim:
            if dim.dim_param in symbols:
                dim.dim_param = _BATCH
    del graph.metadata_props[:]
    graph.name = "bray"


@contextmanager
def _quiet() -> Iterator[None]:
    """PyTorch's exporter talks: of packages that are not there, of its own future, and where it fails it prints all it
    has. What matters of that is in our error."""
    logger = logging.getLogger("torch")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings(), redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)
