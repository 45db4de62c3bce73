"""A Model as a Policy asks it."""

from __future__ import annotations

from typing import Any

import numpy as np
from torch import nn

from bray import tree
from bray.capture import Record
from bray.inference.torch_engine import TorchEngine, is_recurrent


def initial_state(model: nn.Module) -> Any:
    """`initial_state(n)` of a Model with memory, as arrays; None for one without."""
    if not is_recurrent(model):
        return None
    return lambda n: tree.map(np.asarray, model.initial_state(n))  # type: ignore[operator]


def acting_engine(model: nn.Module, policy: Any, record: Record = True) -> TorchEngine:
    """The Model as a Policy asks it."""
    return TorchEngine(model, None if is_recurrent(model) else policy.reads, record)
