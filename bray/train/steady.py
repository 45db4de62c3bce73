"""A driver for games that go on whatever happens to the learner.

an update that is not finite   is undone, and its games are named
a learner that raises          goes back to the newest checkpoint, after a pause that grows, a few times
                               (`Run`); then nothing is learnt any more, games are answered, and the run ends with
                               the error
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bray.data.experience import Batch
from bray.errors import Diverged
from bray.inference.torch_engine import load_weights
from bray.limited_log import OncePer
from bray.train.driver import WAIT_S, Driver
from bray.train.side import Means, Side
from bray.train.source import Source

logger = logging.getLogger("bray")

UNDONE = 10
"""Updates, one after the other, that were undone: the learner then goes back to its checkpoint."""
COPYING = 20.0
"""A copy of the learner is made when so many times as long has passed as the last one took; it is what an update that
is undone goes back to."""


class SteadyDriver(Driver):
    retries = (1.0, 4.0, 16.0, 64.0, 256.0)

    def __init__(self, sides: Sequence[Side], sources: Sequence[Source]):
        super().__init__(sides, sources)
        self.updates_undone = self._in_a_row = 0
        self._good: dict[str, tuple[dict[str, np.ndarray], dict[str, Any]]] = {}
        """Weights and learner of each side, all finite."""
        self._copy_after: dict[str, float] = {}
        self._updating = self.side
        self._once = OncePer()

    def start(self) -> None:
        super().start()
        self.failure, self.trouble = None, ""

    def suspects(self) -> list[str]:
        """The games of the last batch, the most unusual ones first."""
        raise NotImplementedError

    def check_rows(self) -> None:
        """Leave out rows of a checkpoint that would not be taken from a game today."""
        raise NotImplementedError

    # --- updates ------------------------------------------------------------------------------------------------------

    def _learn_from(self, side: Side, batch: Batch) -> None:
        self._updating = side
        if side.name not in self._good:
            self._copy(side)
        super()._learn_from(side, batch)

    def keeps(self, update: Any) -> bool:
        side = self._updating
        finite = all(math.isfinite(x) for name, x in update.metrics.items() if "loss" in name)
        if finite and (time.perf_counter() < self._copy_after.get(side.name, 0.0) or self._copy(side)):
            self._in_a_row = 0
            return True
        if side.name not in self._good:
            raise Diverged("the first update was not finite")
        _become(side, *self._good[side.name])
        self.updates_undone += 1
        self._in_a_row += 1
        if self._once.due():
            games = self.suspects()
            more = f" and {len(games) - 3} more" if len(games) > 3 else ""
            who = f"; its games: {', '.join(games[:3])}{more}" if games else ""
            logger.warning("update %d is not finite and was undone (%d so far)%s", self.steps, self.updates_undone, who)
        if self._in_a_row >= UNDONE:
            self._in_a_row = 0
            raise Diverged(f"{UNDONE} updates, one after the other, were not finite")
        return False

    def changed(self, side: Side) -> None:
        """A side has got other weights than by an update: no copy of before is gone back to."""
        self._good.pop(side.name, None)

    def _copy(self, side: Side) -> bool:
        """Copy weights and learner, if they are finite."""
        began = time.perf_counter()
        weights, learner = side.weights(), side.learner.state_dict()
        if side.lost_weights(learner["parts"]):
            return False
        self._good[side.name] = weights, learner
        now = time.perf_counter()
        self._copy_after[side.name] = now + COPYING * (now - began)
        return True

    # --- iterations ---------------------------------------------------------------------------------------------------

    def iterate(self, most_episodes: int | None = None) -> dict[str, Any] | None:
        row = super().iterate(most_episodes)
        if self.failure is None:
            self.trouble = ""
        return None if row is None else row | {"live/updates_undone": self.updates_undone}

    def _learn_until(self, until: int, means: Mapping[str, Means], most_episodes: int | None) -> None:
        if self.failure is None:
            super()._learn_until(until, means, most_episodes)
            return
        until = max(until, self.totals.env_steps + 1)
        while self.totals.env_steps < until and not self.stopped:
            for source in self._running:
                self.totals.add(source.gather(WAIT_S)[1])

    # --- coming back --------------------------------------------------------------------------------------------------

    def go_back(self, state: dict[str, Any], weights: Mapping[str, Any], replay_dir: Path) -> None:
        parts, about = self._of_sides(state["arrays"]), self._of_sides(state["json"])
        self._good, self._in_a_row = {}, 0
        for name, side in self.sides.items():
            saved = {"parts": parts[name]["learner"], **about[name]["learner"]}
            _become(side, weights[name] if self.several else weights, saved)
            side.experience.cut()
            side.load_experience(parts[name], about[name], self._place(replay_dir, name))
            side.experience.cut()  # games have gone on since
            side.experience.forget()
        self.check_rows()
        for side in self.sides.values():
            for source in self._running:
                source.publish(side.name, side.weights_now, self.clock_of(side))
        self._last_batch = time.monotonic()

    def set_state(
        self, state: dict[str, Any], weights: Mapping[str, np.ndarray], replay_dir: Path | None = None
    ) -> bool:
        exact = super().set_state(state, weights, replay_dir)
        self.check_rows()
        return exact


def _become(side: Side, weights: Mapping[str, np.ndarray], learner: dict[str, Any]) -> None:
    steps = side.learner.steps
    load_weights(side.model, weights)
    side.learner.load_state_dict(learner)
    side.learner.steps = max(steps, side.learner.steps)  # versions do not go back
