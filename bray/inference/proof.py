"""What an exported graph has to answer: some inputs and the outputs that it gave where it was exported. Whoever loads
the graph, on whatever machine, asks it that first and refuses it where it answers otherwise. No torch here.

`samples.tree` beside the graph is a packed tree (`bray.tree`):

    inputs    what the Model takes, rows `[N, ...]`
    outputs   what the Model itself answered, in float32
    int8      what `model.int8.onnx` answered, where there is one
    about     JSON as bytes: `step`, `made_on`, `tolerance` (precision -> output -> how far it may be off), `files`
              (name -> SHA-256 of the files that were exported together) and the `checksum` of this file

A graph whose weights are inputs answers with those of its export, `graph.weights`: the proof is of the graph, so it
holds for the weights of all versions.
"""

from __future__ import annotations

import hashlib
import json
import logging
import platform
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np

from bray import tree
from bray.errors import CheckpointError, DataError
from bray.inference.cpu import this_cpu
from bray.inference.engine import Engine
from bray.inference.verify import ATOL, RTOL, run
from bray.rundir import check_seal, read_plain, read_weights, seal, write_atomic
from bray.rundir.reader import BLANK

logger = logging.getLogger("bray")

SAMPLES, WEIGHTS = "samples.tree", "graph.weights"
_ROWS = 32
_MOST_BYTES, _MOST_ROWS = 64 << 20, 256  # of a file that anybody may have written
_said: set[Path] = set()  # graphs without a proof


class _About(msgspec.Struct):
    step: int
    made_on: str
    tolerance: dict[str, dict[str, float]]
    files: dict[str, str] = {}


@dataclass(frozen=True)
class Proof:
    """See the module."""

    inputs: tuple[Any, ...]
    outputs: dict[str, Any]
    """By precision."""
    tolerance: dict[str, dict[str, float]]
    """By precision and output."""
    step: int
    made_on: str
    files: dict[str, str] = field(default_factory=dict)
    weights: Mapping[str, np.ndarray] | None = None
    """For a graph whose weights are inputs, where it does not come from a file."""

    @staticmethod
    def make(args: tuple[Any, ...], expected: Any, exported: Engine, step: int, **more: Any) -> Proof:
        """`expected`: what the Model itself answers to the rows `args`; `exported`: its graph, whose distance from that
        is added to what rounding may be elsewhere."""
        some = slice(-_ROWS, None)
        inputs, outputs = tree.index(tuple(args), some), tree.index(expected, some)
        tolerance = {"float32": _tolerance(outputs, run(exported, inputs))}
        return Proof(inputs, {"float32": outputs}, tolerance, step, f"{_engine(exported)}, {_machine()}", **more)

    def with_int8(self, engine: Engine) -> Proof:
        """And what int8 answers: elsewhere it may be off from that by as much as it is from the Model."""
        outputs = run(engine, self.inputs)
        tolerance = _tolerance(outputs, self.outputs["float32"])
        return replace(
            self,
            outputs={**self.outputs, "int8": outputs},
            tolerance={**self.tolerance, "int8": tolerance},
        )

    def pack(self, files: Mapping[str, bytes]) -> bytes:
        """`samples.tree` beside these files."""
        about = {
            "checksum": BLANK,
            "step": self.step,
            "made_on": self.made_on,
            "tolerance": self.tolerance,
            "files": {name: hashlib.sha256(data).hexdigest() for name, data in files.items()},
        }
        samples = {"inputs": self.inputs, "outputs": self.outputs["float32"]}
        samples |= {k: v for k, v in self.outputs.items() if k != "float32"}
        return seal(tree.pack({**samples, "about": np.frombuffer(json.dumps(about).encode(), np.uint8)}))

    def is_of(self, name: str, data: bytes) -> bool:
        """Whether a file is one of those that were exported together."""
        return self.files.get(name) == hashlib.sha256(data).hexdigest()

    @staticmethod
    def unpack(data: bytes, where: str | Path) -> Proof | None:
        """None for the samples of an older Bray, which do not say how far an engine may be off."""
        try:
            samples: Any = tree.unpack(data)
            if "about" not in samples:
                return None
            if not check_seal(data, where):
                raise DataError("it has no checksum")
            about = msgspec.json.decode(samples["about"].tobytes(), type=_About)
            outputs = {"float32" if k == "outputs" else k: samples[k] for k in ("outputs", "int8") if k in samples}
            rows = {len(x) for x in tree.leaves((samples["inputs"], outputs))}
            if len(rows) != 1 or max(rows) > _MOST_ROWS or not isinstance(samples["inputs"], tuple):
                raise DataError(f"expected the same number of rows everywhere, at most {_MOST_ROWS}")
            if {k: set(_paths(v)) for k, v in outputs.items()} != {k: set(v) for k, v in about.tolerance.items()}:
                raise DataError("expected a tolerance for each output")
        except (DataError, msgspec.MsgspecError, KeyError, TypeError, ValueError, AttributeError) as e:
            raise CheckpointError(f"{where}: expected samples that `bray export` wrote ({e})") from None
        return Proof(samples["inputs"], outputs, about.tolerance, about.step, about.made_on, about.files)


class ProvenGraph(NamedTuple):
    """The bytes of a graph, and its proof."""

    graph: bytes
    proof: Proof


def write_export(folder: Path, files: Mapping[str, bytes], proof: Proof) -> None:
    """Files that were exported together, each with its checksum inside, and then the proof of them."""
    sealed = {name: seal(data) for name, data in files.items()}
    for name, data in sealed.items():
        write_atomic(folder / name, data)
    write_atomic(folder / SAMPLES, proof.pack(sealed))


def prove(engine: Engine, proof: Proof, where: str | Path) -> None:
    """Raise where an engine, here, does not answer what it has to."""
    precision = getattr(getattr(engine, "signature", None), "precision", "float32")
    if precision not in proof.outputs:
        raise CheckpointError(f"{where}: {SAMPLES} beside it has no outputs in {precision}: `bray export` writes them")
    got = _paths(engine.forward(*proof.inputs))
    for name, expected in _paths(proof.outputs[precision]).items():
        found, allowed = _distance(got.get(name), expected), proof.tolerance[precision][name]
        if not found <= allowed:
            raise CheckpointError(
                f"{where}: it is not used, because here it answers otherwise than where it was exported. Output "
                f"{name!r} is off by {found:.3g}, at most {allowed:.3g} was expected ({precision}, step {proof.step}). "
                f"Here: {_engine(engine)}, {_machine()}. There: {proof.made_on}. Try another version of ONNX Runtime, "
                "`bray export` on a machine like this one, or the engine torch"
            )


def read_proof(folder: Path, root: Path | None = None) -> Proof | None:
    """The proof of the files in a folder, if there is one (`root`: as `open_plain` says)."""
    where = (folder if root is None else root / folder) / SAMPLES
    if not (where.is_symlink() or where.exists()):
        return None
    return Proof.unpack(read_plain(folder / SAMPLES, root, _MOST_BYTES), where)


def prove_beside(engine: Any, data: bytes, path: Path, root: Path | None = None) -> None:
    """`prove` for the engine of a file by the samples beside it. Where there are none, or of another export, that is
    said once. `data`: the file's bytes."""
    where = path if root is None else root / path
    proof = read_proof(path.parent, root)
    if proof is None or not proof.is_of(path.name, data):
        if where not in _said:
            _said.add(where)
            why = "no samples of this Bray are" if proof is None else f"{SAMPLES} of another export is"
            logger.warning("%s: %s beside it, so it is used without a proof: `bray export` writes one", where, why)
        return
    if engine.signature.weights == "inputs":
        engine = engine.with_weights(read_weights(path.parent / WEIGHTS, root), proof.step)
    prove(engine, proof, where)


def _paths(outputs: Any) -> dict[str, Any]:
    """Outputs by their names, as the graph has them."""
    return dict(tree.paths(outputs, "" if isinstance(outputs, dict) else "output"))


def _tolerance(outputs: Any, other: Any) -> dict[str, float]:
    """How far each output may be off: what was measured between two engines, and rounding."""
    others = _paths(other)
    out = {}
    for name, x in _paths(outputs).items():
        sizes = np.abs(x[np.isfinite(x)].astype(np.float64))
        out[name] = float(_distance(others[name], x) + ATOL + RTOL * sizes.max(initial=0.0))
    return out


def _distance(got: Any, expected: np.ndarray) -> float:
    """The largest difference; NaN where there is none to be had."""
    if got is None or got.shape != expected.shape:
        return np.nan
    a, b = np.asarray(got, np.float64), np.asarray(expected, np.float64)
    with np.errstate(invalid="ignore"):
        off = np.where((a == b) | (np.isnan(a) & np.isnan(b)), 0.0, np.abs(a - b))
    return float(off.max(initial=0.0))


def _engine(engine: Any) -> str:
    return getattr(engine, "runs_on", type(engine).__name__)


def _machine() -> str:
    name, features = this_cpu()
    return f"{platform.machine()}, {name} ({', '.join(features)})"
