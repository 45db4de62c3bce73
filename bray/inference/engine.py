"""What executes a Model: numpy trees in, numpy trees out, whatever is behind it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np

from bray.errors import CheckpointError, DataError


class Engine(Protocol):
    """A Model that can be asked, on some hardware, with some weights."""

    def forward(self, *args: Any) -> Any:
        """The Model's arguments, each a tree of arrays `[B, ...]` -> its outputs, a tree of arrays `[B, ...]`."""
        ...

    def set_weights(self, weights: Mapping[str, np.ndarray]) -> None:
        """New weights, by the names of the Model's `state_dict`; the next forward uses them."""
        ...


def gather(structure: Any, value: Any, out: list[Any], where: str = "") -> None:
    """Append the leaves of `value` to `out` in the order of `structure`: a dict may hold its keys in any order, and
    more of them.
    Parts whose structure is None are left out."""
    if structure is None:
        return
    if isinstance(structure, dict):
        if not isinstance(value, Mapping) or not structure.keys() <= value.keys():
            got = sorted(value) if isinstance(value, Mapping) else type(value).__name__
            raise DataError(f"{where or 'an input'}: expected a dict with the keys {sorted(structure)}, got {got}")
        for key, part in structure.items():
            gather(part, value[key], out, f"{where}/{key}" if where else key)
    elif isinstance(structure, (list, tuple)):
        if not isinstance(value, (list, tuple)) or len(value) != len(structure):
            have = len(value) if isinstance(value, (list, tuple)) else type(value).__name__
            raise DataError(f"{where or 'inputs'}: expected {len(structure)} parts, got {have}")
        for i, part in enumerate(structure):
            gather(part, value[i], out, f"{where}/{i}" if where else str(i))
    else:
        out.append(value)


def lasting(array: np.ndarray) -> np.ndarray:
    """The array itself if nobody writes into it (it is read only, as what comes out of Ray's object store is), else a
    copy, read only. So weights that eight processes of a machine serve lie in its memory once, and changing to them
    takes no time."""
    if array.flags.c_contiguous and array.flags.aligned and _is_read_only(array):
        return array
    copy = np.array(array, order="C")
    copy.flags.writeable = False
    return copy


def _is_read_only(array: Any) -> bool:
    while isinstance(array, np.ndarray):
        if array.flags.writeable:
            return False
        if array.base is None:
            return True
        array = array.base
    try:
        return memoryview(array).readonly
    except TypeError:
        return False


def fit_weights(wanted: Mapping[str, tuple[np.dtype, tuple[int, ...]]], weights: Mapping[str, Any]) -> dict[str, Any]:
    """The weights that are wanted, by name; one that is missing or of another type or shape is named."""
    wrong = []
    for name, (dtype, shape) in wanted.items():
        got = weights.get(name)
        if got is None or got.dtype != dtype or tuple(got.shape) != shape:
            have = "none" if got is None else f"{got.dtype}{list(got.shape)}"
            wrong.append(f"{name}: expected {dtype}{list(shape)}, got {have}")
    if wrong:
        raise CheckpointError(
            f"these weights do not fit the Model in {len(wrong)} of {len(wanted)} places: {'; '.join(wrong[:5])}"
        )
    return {name: weights[name] for name in wanted}
