"""What a run says of its own health and speed: symptoms in its rows, dead units counted now and then, what holds it
up."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bray.config import Resolved
from bray.diagnosis.bottleneck import Advisor
from bray.diagnosis.symptoms import DEAD_UNITS, SECTIONS, Symptoms
from bray.metrics import HEALTH, ITERATION
from bray.train.driver import Driver
from bray.train.units import SAMPLE, SAMPLE_BYTES, dead_share

COUNT_UNITS = 20
"""Iterations between two looks for dead units: not seconds, so that another run of the seed has the same rows."""


class Watch:
    """Looks at each row of a run before it is written."""

    def __init__(self, config: Resolved):
        self.symptoms = Symptoms(config.options(*SECTIONS))
        self.advisor = Advisor(config.options("run", *SECTIONS))
        self._has_units = True  # that can die, until a look finds none

    def resume(self, row: Mapping[str, Any] | None) -> None:
        """Go on after this row: what was said in it is not said again."""
        said = (row or {}).get(HEALTH) or ""
        self.advisor.resume(row)
        self.symptoms.resume(row or {}, [cause for cause in said.split(", ") if cause])

    def look(self, row: Mapping[str, Any], training: Driver) -> dict[str, Any]:
        """What belongs into the row: the share of dead units where they were counted, and the causes that were said so
        far."""
        self.advisor.look(row)
        seen: dict[str, Any] = {}
        if self._has_units and row[ITERATION] % COUNT_UNITS == 0:
            obs = training.recent_observations(SAMPLE, SAMPLE_BYTES)
            if obs is not None and (dead := dead_share(training.model, obs)) is not None:
                seen[DEAD_UNITS] = dead
            self._has_units = obs is None or bool(seen)
        told = self.symptoms.look({**row, **seen})
        return seen | ({HEALTH: ", ".join(told)} if told else {})
