"""Returns that are asked for: what Models are told beside observations that play for as much as they are asked
(Decision Transformer)."""

from __future__ import annotations

from typing import Any

import numpy as np

ASKED = "asked_return"
"""An entry `[..., 3]` of the memory of such a Model, which the caller writes: the return still asked for, whether one
is asked for (where none is, the Model asks for its own in the first step of an episode), and the reward of the previous
action."""


def is_asked(carry: Any) -> bool:
    """Whether a memory is of a Model that is asked for a return."""
    return isinstance(carry, dict) and ASKED in carry


def with_return(carry: Any, asked: float | None, reward: Any = None) -> Any:
    """A memory with the reward of the previous action, and where an episode begins with the return that is asked for;
    None leaves them. Another kind of memory is left as it is."""
    if not is_asked(carry):
        return carry
    told = np.array(carry[ASKED], np.float32)
    begun = told[..., 1] > 0.5
    if reward is not None:
        told[..., 2] = np.where(begun, reward, 0.0)
    if asked is not None:
        told[..., 0], told[..., 1] = np.where(begun, told[..., 0], asked), 1.0
    return {**carry, ASKED: told}
