"""A Model as a Policy asks it."""

from __future__ import annotations

from dataclasses import dataclass
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


@dataclass
class ActingPolicy:
    """Who plays a side, where nobody learns."""

    engine: Any
    policy: Any
    initial_state: Any = None
    mode: str | None = None
    """How it chooses actions, where not as everybody does."""
    seats: Any = None
    """What sits at the table for it, in place of a SeatRollout."""


def acting_engine(model: nn.Module, policy: Any, record: Record = True) -> TorchEngine:
    """The Model as a Policy asks it."""
    return TorchEngine(model, None if is_recurrent(model) else policy.reads, record)


def player_of(model: nn.Module, policy: Any, record: Record = True, mode: str | None = None) -> ActingPolicy:
    """Who plays by a Model and a Policy."""
    return ActingPolicy(acting_engine(model, policy, record), policy, initial_state(model), mode)
