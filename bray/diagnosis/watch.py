"""What a run says of its own health and speed: symptoms in its rows, dead units counted now and then, what holds it
up."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from bray.diagnosis.bottleneck import Advisor, Machine
from bray.diagnosis.symptoms import DEAD_UNITS, Symptoms
from bray.metrics import HEALTH, ITERATION

COUNT_UNITS = 20
"""Iterations between two looks for dead units: not seconds, so that another run of the seed has the same rows."""


class Watch:
    """Looks at each row of a run before it is written. `options`: those of the run by name, from all its sections."""

    def __init__(self, options: Mapping[str, Any] | None, machine: Callable[[], Machine] | None = None):
        """`options` is None where no algorithm of ours learns; without a `machine` nothing is said of speed."""
        self.symptoms = Symptoms(options)
        self.advisor = None if machine is None else Advisor(options or {}, machine)
        self._has_units = True  # that can die, until a look finds none

    def resume(self, row: Mapping[str, Any] | None) -> None:
        """Go on after this row: what was said in it is not said again."""
        said = (row or {}).get(HEALTH) or ""
        if self.advisor is not None:
            self.advisor.resume(row)
        self.symptoms.resume(row or {}, [cause for cause in said.split(", ") if cause])

    def look(self, row: Mapping[str, Any], dead_units: Callable[[], float | None]) -> dict[str, Any]:
        """What belongs into the row: the share of dead units where they were counted, and the causes that were said so
        far. `dead_units()` is None for a network without any that can die, NaN where it cannot be told yet."""
        if self.advisor is not None:
            self.advisor.look(row)
        seen: dict[str, Any] = {}
        if self._has_units and row[ITERATION] % COUNT_UNITS == 0:
            dead = dead_units()
            self._has_units = dead is not None
            seen = {} if dead is None or math.isnan(dead) else {DEAD_UNITS: dead}
        told = self.symptoms.look({**row, **seen})
        return seen | ({HEALTH: ", ".join(told)} if told else {})
