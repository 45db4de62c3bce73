"""Weights: safetensors files, and whether they fit a model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import safetensors.numpy
from safetensors import SafetensorError

from bray.errors import CheckpointError, DataError
from bray.rundir.reader import BLANK, check_seal, most_bytes, read_plain, seal

_MOST_HEADER = 16 << 20
_TORCH = (b"PK\x03\x04", b"\x80")  # how torch.save begins a file, now (a ZIP archive) and before (a pickle)


@dataclass
class WeightReport:
    """How weights fit a model: what is `missing` in them, `redundant`, or of another shape or type (`mismatched`)."""

    weights: dict[str, np.ndarray] = field(default_factory=dict)
    """The ones that fit."""
    missing: list[str] = field(default_factory=list)
    redundant: list[str] = field(default_factory=list)
    mismatched: list[str] = field(default_factory=list)

    @property
    def exact(self) -> bool:
        return not (self.missing or self.redundant or self.mismatched)

    def __str__(self) -> str:
        parts = [f"{len(self.weights)} tensors fit"]
        for word in ("missing", "redundant", "mismatched"):
            names = getattr(self, word)
            if names:
                parts.append(f"{word}: " + ", ".join(names[:6]) + (f", … ({len(names)})" if len(names) > 6 else ""))
        return "; ".join(parts)


def match_weights(
    wanted: Mapping[str, np.ndarray],
    got: Mapping[str, np.ndarray],
    strict: bool = True,
    add_prefix: str = "",
    remove_prefix: str = "",
    skip: Sequence[str] = (),
) -> WeightReport:
    """The weights of `got` that fit a model that wants `wanted`. Strict: anything that does not fit raises; else it is
    reported.
    Prefixes of names can be removed and added, and names that start with one of `skip` are left out."""
    renamed = {add_prefix + name.removeprefix(remove_prefix): array for name, array in got.items()}
    renamed = {name: array for name, array in renamed.items() if not name.startswith(tuple(skip))}
    report = WeightReport(redundant=[name for name in renamed if name not in wanted])
    for name, want in wanted.items():
        have = renamed.get(name)
        if have is None:
            report.missing.append(name)
        elif have.shape != want.shape or have.dtype != want.dtype:
            report.mismatched.append(
                f"{name} (expected {want.dtype}{list(want.shape)}, got {have.dtype}{list(have.shape)})"
            )
        else:
            report.weights[name] = have
    if strict and not report.exact:
        raise CheckpointError(f"these weights belong to another model: {report}")
    return report


def read_weights(path: str | Path, root: str | Path | None = None) -> dict[str, np.ndarray]:
    """A safetensors file as arrays: intact where it carries a checksum, and finite. `root`: see `open_plain`."""
    data = read_plain(path, root, most_bytes())
    where = path if root is None else Path(root) / path
    check_seal(data, where)
    return unpack_weights(data, where)


def unpack_weights(data: bytes, where: str | Path) -> dict[str, np.ndarray]:
    """The arrays of a safetensors file; they are finite."""
    if data.startswith(_TORCH) and data[8:9] != b"{":  # a safetensors file begins with a length of 8 bytes, then JSON
        new = Path(where).with_suffix(".safetensors")
        raise CheckpointError(
            f"{where}: a file of torch.save is not read, because reading a pickle can run code. Where its weights have "
            f'names, convert it once, safely: python -c "import torch, safetensors.torch as s; '
            f"s.save_file(torch.load('{where}', weights_only=True), '{new}')\" and give {new.name} "
            "(a list, as the first Bray saved it: docs/moving.md)"
        )
    try:
        if int.from_bytes(data[:8], "little") > _MOST_HEADER:
            raise ValueError(f"its header claims more than {_MOST_HEADER:,} bytes")
        weights = safetensors.numpy.load(data)
    except (SafetensorError, ValueError, KeyError, TypeError, OverflowError, MemoryError) as e:
        raise CheckpointError(f"{where}: expected a safetensors file, it cannot be read ({e})") from None
    check_finite(weights, where)
    return weights


def check_finite(weights: Mapping[str, np.ndarray], where: str | Path) -> None:
    """Refuse weights that are no numbers any more: what they would do is noise."""
    for name, array in weights.items():
        if array.dtype.kind == "f" and not np.isfinite(array).all() and not _is_mask(array):
            bad = int(np.size(array) - np.isfinite(array).sum())
            raise CheckpointError(
                f"{where}: {bad:,} of {array.size:,} numbers of the tensor {name!r} are NaN or infinite: the training "
                "diverged. Use an older checkpoint"
            )


def _is_mask(array: np.ndarray) -> bool:
    """0 and -inf alone, as what is added to scores to rule some of them out."""
    return bool(np.isin(array, (0.0, -np.inf)).all() and (array == 0).any())


def pack_weights(weights: Mapping[str, np.ndarray]) -> bytes:
    """The bytes of a safetensors file, with their checksum in its metadata."""
    for name, array in weights.items():
        if not isinstance(array, np.ndarray) or array.dtype.kind not in "biuf":
            got = getattr(array, "dtype", type(array).__name__)
            raise DataError(f"weight {name!r}: expected a numpy array of numbers, got {got}")
    check_finite(weights, "weights that cannot be saved")
    arrays = {k: np.ascontiguousarray(v).reshape(v.shape) for k, v in weights.items()}
    return seal(safetensors.numpy.save(arrays, metadata={"checksum": BLANK}))
