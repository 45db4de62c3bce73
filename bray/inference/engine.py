"""What executes a Model: numpy trees in, numpy trees out, whatever is behind it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np

from bray.errors import CheckpointError


class Engine(Protocol):
    """A Model that can be asked, on some hardware, with some weights."""

    def forward(self, *args: Any) -> Any:
        """The Model's arguments, each a tree of arrays `[B, ...]` -> its outputs, a tree of arrays `[B, ...]`."""
        ...

    def set_weights(self, weights: Mapping[str, np.ndarray]) -> None:
        """New weights, by the names of the Model's `state_dict`; the next forward uses them."""
        ...


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
