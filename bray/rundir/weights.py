"""Weights: safetensors files, and whether they fit a model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import safetensors.numpy
from safetensors import SafetensorError

from bray.errors import CheckpointError, DataError


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
    """The weights of `got` that fit a model that wants `wanted`. Strict: anything that does not fit raises; else it is reported.
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


def read_weights(path: str | Path) -> dict[str, np.ndarray]:
    """A safetensors file as arrays."""
    try:
        return safetensors.numpy.load(Path(path).read_bytes())
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing") from None
    except (OSError, SafetensorError, ValueError, KeyError) as e:
        raise CheckpointError(f"{path}: expected a safetensors file, it cannot be read ({e})") from None


def pack_weights(weights: Mapping[str, np.ndarray]) -> bytes:
    """The bytes of a safetensors file."""
    for name, array in weights.items():
        if not isinstance(array, np.ndarray) or array.dtype.kind not in "biuf":
            got = getattr(array, "dtype", type(array).__name__)
            raise DataError(f"weight {name!r}: expected a numpy array of numbers, got {got}")
        if array.dtype.kind == "f" and np.isnan(array).any():
            lost = np.count_nonzero(np.isnan(array))
            raise CheckpointError(f"weight {name!r}: {lost} of {array.size} values are NaN; such weights are not saved")
    return safetensors.numpy.save({k: np.ascontiguousarray(v).reshape(v.shape) for k, v in weights.items()})
