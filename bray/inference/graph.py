"""ONNX files that say what they are: which trees go in and come out, of which step, with which weights. No torch here.

The metadata of a file holds one JSON object under the key `bray`:

| key         | meaning
              |
|-------------|--------------------------------------------------------------------------------------------------------------|
| `format`    | 1
              |
| `inputs`    | for each argument of the Model the tree of its input names; null where the graph does not read a part
              |
| `outputs`   | the tree of output names
              |
| `step`      | the version of the weights (learner steps); of a graph whose weights are inputs: the one it was made at
              |
| `weights`   | `constant`, or `inputs`: the graph's other inputs are weights, named as in the Model's `state_dict`
              |
| `precision` | `float32` or `int8`
|

A tree is a name, null, `{"dict": {key: tree}}`, `{"list": [tree]}` or `{"tuple": [tree]}`. Names are paths: `obs`,
`obs/position`, `state/h`; an output whose path is an input's name too is `next/state/h`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from bray.errors import DataError
from bray.inference.engine import fit_weights
from bray.rundir.reader import BLANK

KEY = "bray"
FORMAT = 1


@dataclass(frozen=True)
class Signature:
    """What a file says of itself; see the module's table."""

    inputs: tuple[Any, ...]
    outputs: Any
    step: int = 0
    weights: str = "inputs"
    precision: str = "float32"

    def to_json(self) -> str:
        return json.dumps(
            {
                "format": FORMAT,
                "inputs": [_encode(x) for x in self.inputs],
                "outputs": _encode(self.outputs),
                "step": self.step,
                "weights": self.weights,
                "precision": self.precision,
            }
        )

    @staticmethod
    def from_json(text: str | None, where: str = "this ONNX file") -> Signature:
        """Read it; DataError when it is not there or from a later version."""
        if text is None:
            raise DataError(f"{where} does not say what its inputs are: expected one that `bray export` wrote")
        try:
            d = json.loads(text)
            if d["format"] != FORMAT:
                raise DataError(f"{where} has format {d['format']!r}, this Bray reads {FORMAT}: export the run again")
            inputs = tuple(_decode(x) for x in d["inputs"])
            return Signature(inputs, _decode(d["outputs"]), int(d["step"]), d["weights"], d["precision"])
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as e:
            raise DataError(f"{where}: its description cannot be read ({type(e).__name__}: {e})") from None


def _encode(tree: Any) -> Any:
    if isinstance(tree, dict):
        return {"dict": {k: _encode(v) for k, v in tree.items()}}
    if isinstance(tree, (list, tuple)):
        return {"list" if isinstance(tree, list) else "tuple": [_encode(v) for v in tree]}
    return tree


def _decode(node: Any) -> Any:
    if node is None or isinstance(node, str):
        return node
    ((kind, body),) = node.items()
    if kind == "dict":
        return {k: _decode(v) for k, v in body.items()}
    items = [_decode(v) for v in body]
    return {"list": items, "tuple": tuple(items)}[kind]


def with_constant_weights(graph: bytes, weights: Mapping[str, np.ndarray], step: int | None = None) -> bytes:
    """The file of a graph whose weights are inputs -> the file of the same graph with these weights inside."""
    import onnx  # 0.3 s, and a server that reads files needs none of it

    model = onnx.load_model_from_string(graph)
    signature = read_signature(model)
    if signature.weights != "inputs":
        raise DataError("this graph has its weights inside already: expected the one whose weights are inputs")
    names = set(leaf_names(signature.inputs))
    inputs = list(model.graph.input)
    wanted = {x.name: _declared(x) for x in inputs if x.name not in names}
    for name, array in fit_weights(wanted, weights).items():
        model.graph.initializer.append(onnx.numpy_helper.from_array(np.ascontiguousarray(array), name))
    del model.graph.input[:]
    model.graph.input.extend(x for x in inputs if x.name in names)
    step = signature.step if step is None else step
    write_signature(model, replace(signature, weights="constant", step=step))
    return model.SerializeToString()


def refuse_external_data(graph: bytes, where: str | Path) -> None:
    """Raise for an ONNX file that asks for the content of other files of this machine."""
    import onnx
    from google.protobuf.message import DecodeError

    try:
        model = onnx.load_model_from_string(graph)
    except DecodeError as e:
        raise DataError(f"{where}: expected an ONNX file ({e})") from None
    for part in _messages(model):
        if isinstance(part, onnx.TensorProto) and (part.external_data or part.data_location):
            raise DataError(
                f"{where}: its tensor {part.name[:60]!r} lies in another file, which is not read: export it as one file"
            )


def _messages(message: Any) -> Iterator[Any]:
    """A protobuf message and all that is in it."""
    yield message
    for field, value in message.ListFields():
        if field.message_type is not None:
            for part in [value] if hasattr(value, "ListFields") else value:
                yield from _messages(part)


def _declared(value: Any) -> tuple[np.dtype, tuple[int, ...]]:
    import onnx

    kind = value.type.tensor_type
    return onnx.helper.tensor_dtype_to_np_dtype(kind.elem_type), tuple(d.dim_value for d in kind.shape.dim)


def read_signature(model: Any) -> Signature:
    """Of an `onnx.ModelProto`."""
    return Signature.from_json({p.key: p.value for p in model.metadata_props}.get(KEY))


def write_signature(model: Any, signature: Signature) -> None:
    """Into an `onnx.ModelProto`, in place of all other metadata; and room for the checksum of its file
    (`rundir.seal`)."""
    del model.metadata_props[:]
    model.metadata_props.add(key=KEY, value=signature.to_json())
    model.metadata_props.add(key="checksum", value=BLANK)


def leaf_names(tree: Any) -> list[str]:
    """All names in a tree of names, in the order in which `engine.gather` takes leaves."""
    if tree is None:
        return []
    if isinstance(tree, dict):
        return [name for part in tree.values() for name in leaf_names(part)]
    if isinstance(tree, (list, tuple)):
        return [name for part in tree for name in leaf_names(part)]
    return [tree]
