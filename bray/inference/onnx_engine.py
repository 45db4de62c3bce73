"""ONNX Runtime as an engine. A file that `bray export` wrote is all it needs: no torch, no Model, no environment."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime

from bray import tree
from bray.errors import CheckpointError, ConfigError, DataError
from bray.inference.engine import fit_weights, lasting
from bray.inference.graph import KEY, Signature, leaf_names, refuse_external_data, with_constant_weights
from bray.inference.proof import prove_beside
from bray.rundir import check_seal, read_plain
from bray.rundir.reader import most_bytes

_DTYPES = {"float": "float32", "double": "float64", "float16": "float16", "bool": "bool"}


class OnnxEngine:
    """A graph in ONNX Runtime, on the CPU. With its weights inside it is fastest; with weights as inputs it waits for
    `set_weights` and can take new ones at any time."""

    def __init__(self, model: str | Path | bytes, threads: int = 1, root: Path | None = None):
        """`model`: the file's bytes, or its path: then it is as it was written, and answers what the samples beside it
        say (`bray.inference.proof`). `root`: the directory that `path` is relative to, and stays in."""
        self.threads = threads
        data, where = model if isinstance(model, bytes) else _read(Path(model), root), "this ONNX file"
        if not isinstance(model, bytes):
            where = str(model if root is None else root / model)
        self.session = _session(data, threads, where)
        self.signature = Signature.from_json(self.session.get_modelmeta().custom_metadata_map.get(KEY), where)
        self.step = self.signature.step
        self._names = leaf_names(self.signature.inputs)
        kinds = {x.name: (_dtype(x.type), tuple(x.shape)) for x in self.session.get_inputs()}
        self._declared = {name: kinds[name] for name in self._names}
        inputs, outputs = self.signature.inputs, self.signature.outputs
        self._single = inputs[0] if len(inputs) == 1 and isinstance(inputs[0], str) else None
        self._out_names = leaf_names(outputs)
        self._keys = list(outputs) if isinstance(outputs, dict) and list(outputs.values()) == self._out_names else None
        self._graph = data if self.signature.weights == "inputs" else b""
        self._wanted = {name: kind for name, kind in kinds.items() if name not in self._declared}
        self._weights: dict[str, Any] | None = None if self._wanted else {}
        self._bindings: dict[int, Any] = {}
        self._lock = threading.Lock()
        if not isinstance(model, bytes):
            prove_beside(self, data, Path(model), root)

    @property
    def runs_on(self) -> str:
        """For messages."""
        return f"ONNX Runtime {onnxruntime.__version__} ({', '.join(self.session.get_providers())})"

    def forward(self, *args: Any) -> Any:
        """A batch of what the Model takes (observations; and recurrent states) -> its outputs."""
        if self._single is not None and len(args) == 1 and isinstance(args[0], np.ndarray):
            feed = {self._single: args[0]}
        else:
            feed = dict(zip(self._names, tree.leaves_like(self.signature.inputs, args), strict=True))
        try:
            values = self._run_bound(feed) if self._wanted else self.session.run(self._out_names, feed)
        except Exception:
            self._explain(feed)
            raise
        if self._keys is not None:
            return dict(zip(self._keys, values, strict=True))
        named = dict(zip(self._out_names, values, strict=True))
        return tree.map(named.__getitem__, self.signature.outputs)

    def initial_state(self, rows: int) -> Any:
        """Of a Model with memory: what it remembers before it has seen anything, zeros."""

        def zeros(name: str | None) -> np.ndarray:
            dtype, shape = ("float32", ()) if name is None else self._declared[name]  # None: the graph does not read it
            return np.zeros((rows, *shape[1:]), dtype)

        return tree.map(zeros, self.signature.inputs[1])

    def _run_bound(self, feed: dict[str, np.ndarray]) -> list[np.ndarray]:
        """With weights as inputs: they and the outputs stay bound, which saves 30 % of a small forward."""
        arrays = {
            name: np.ascontiguousarray(x) for name, x in feed.items()
        }  # bound by address: they must live until the end
        batch = len(next(iter(arrays.values())))
        with self._lock:
            bound = self._bindings.get(batch)
            if bound is None:
                if self._weights is None:
                    raise ConfigError("the weights of this graph are inputs: call set_weights before the first forward")
                bound = self.session.io_binding()
                for name, value in self._weights.items():
                    bound.bind_ortvalue_input(name, value)
                for name in self._out_names:
                    bound.bind_output(name)
            for name, array in arrays.items():
                bound.bind_cpu_input(name, array)
            self.session.run_with_iobinding(bound)
            self._bindings[batch] = bound  # not one that failed
            return bound.copy_outputs_to_cpu()

    def set_weights(self, weights: Mapping[str, np.ndarray]) -> None:
        """New weights for a graph whose weights are inputs; what the graph does not need is ignored."""
        if self.signature.weights == "constant":
            raise ConfigError(
                "the weights of this graph are constants: load the graph whose weights are inputs instead"
            )
        fitting = fit_weights(self._wanted, weights)
        values = {k: onnxruntime.OrtValue.ortvalue_from_numpy(lasting(v)) for k, v in fitting.items()}
        with self._lock:
            self._weights = values
            self._bindings.clear()

    def with_weights(self, weights: Mapping[str, np.ndarray], step: int | None = None) -> OnnxEngine:
        """An engine of its own with these weights inside: 15 to 30 % faster than with weights as inputs, and made in
        milliseconds."""
        if self.signature.weights == "constant":
            raise ConfigError(
                "the weights of this graph are constants: load the graph whose weights are inputs instead"
            )
        return OnnxEngine(with_constant_weights(self._graph, weights, step), self.threads)

    def _explain(self, feed: dict[str, Any]) -> None:
        """After an error: raise one that names the input whose type or shape is not as declared, if there is one."""
        for name, value in feed.items():
            dtype, shape = self._declared[name]
            x = np.asarray(value)
            same = len(x.shape) == len(shape) and all(
                a == b for a, b in zip(x.shape, shape, strict=True) if type(b) is int
            )
            if x.dtype != dtype or not same:
                expected = f"{dtype}[{', '.join(map(str, shape))}]"
                raise DataError(f"input {name!r}: expected {expected}, got {x.dtype}{list(x.shape)}") from None
        if len({len(x) for x in feed.values()}) > 1:
            sizes = {name: len(x) for name, x in feed.items()}
            raise DataError(f"inputs of one batch have the same number of rows, got {sizes}") from None


def _read(path: Path, root: Path | None) -> bytes:
    """A file as it was written, which asks for no other file."""
    where = path if root is None else root / path
    if not where.exists():
        raise CheckpointError(f"{where} is missing: `bray export` writes it")
    data = read_plain(path, root, most_bytes())
    check_seal(data, where)
    refuse_external_data(data, where)
    return data


def _session(data: bytes, threads: int, where: str) -> onnxruntime.InferenceSession:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.add_session_config_entry(
        "session.intra_op.allow_spinning", "0"
    )  # waiting threads would burn the game's cores
    options.enable_cpu_mem_arena = (
        False  # as fast (MLP, Nature CNN, batch 1 to 128), and memory goes back after a large batch
    )
    options.log_severity_level = 4  # errors are raised, not printed
    try:
        return onnxruntime.InferenceSession(data, options, providers=["CPUExecutionProvider"])
    except Exception as e:  # ONNX Runtime has a class of its own for each kind of broken file
        raise DataError(f"{where}: expected an ONNX file that ONNX Runtime can load ({e})") from None


def _dtype(kind: str) -> np.dtype:
    """`tensor(float)` as numpy calls it."""
    name = kind.removeprefix("tensor(").removesuffix(")")
    return np.dtype(_DTYPES.get(name, name))
