"""The time that those who act are told."""

from __future__ import annotations

import sys
from typing import NamedTuple


class Clock(NamedTuple):
    """How far training is. It travels with published weights, so that schedules read the same everywhere."""

    env_steps: int = 0
    version: int = 0
    """Gradient steps of the weights."""
    decisions: int | None = None
    """About how often the environments that ask have acted, all at once: their own steps by their number. None where
    nobody counts, as for live games, which come and go. It does not travel."""


TRAINED = Clock(sys.maxsize, sys.maxsize)
"""The time of a policy whose training is over: exploration schedules are at their end."""
