"""Weights as numpy arrays, to and from torch modules. Torch itself is not needed for the way out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from bray import tree
from bray.errors import DataError


def get_torch_model_weights(model: Any) -> dict[str, np.ndarray]:
    """The weights of a torch module (its `state_dict`, buffers included) as numpy arrays of their own."""
    module = getattr(model, "module", model) if type(model).__name__ == "DistributedDataParallel" else model
    return {name: np.array(_as_numpy(name, x)) for name, x in module.state_dict().items()}


def set_torch_model_weights(model: Any, weights: Mapping[str, Any]) -> None:
    """Put weights into a torch module, in place. CheckpointError names what does not fit."""
    from bray.inference.torch_engine import load_weights

    load_weights(model, as_arrays(weights))


def as_arrays(weights: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Weights given as torch tensors or numpy arrays as numpy arrays; they may share the memory of what was given."""
    if not isinstance(weights, Mapping):
        raise DataError(
            "expected weights by name, as bray.get_torch_model_weights(model) gives them, got a "
            f"{type(weights).__name__}"
        )
    return {str(name): _as_numpy(name, x) for name, x in weights.items()}


def _as_numpy(name: Any, x: Any) -> np.ndarray:
    try:
        return tree.as_array(x)
    except DataError as e:
        raise DataError(f"weight {name!r}: {e}") from None
