"""How fast rows may come into a buffer compared with how fast they are drawn."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from bray.errors import ConfigError


class RateLimit:
    """Keeps rows pushed per row sampled between `least` and `most`, over about the last `window` seconds.

    Both counts are multiplied by 0.01 ** (1 / window) per second, so what happened `window` seconds ago weighs a
    hundredth.
    `may_push` is False while too much is pushed (actors wait for the learner), `may_sample` while too little is (the
    learner waits for new rows). A side is asked before it acts and may overshoot by one call; since `least <= most`,
    one of the two may always go on. Nothing sampled within the window (less than one row is left of it): nothing to
    compare with, pushing is free.

        limit = RateLimit(least=0.25)                  # each row is drawn four times at most, on average
        if limit.may_push():
            replay.add(...)
            limit.pushed(replay.num_envs)
        if limit.may_sample():
            batch = replay.sample(256, rng)
            limit.sampled(256)

    A training in one process needs none: `train_every`, `updates` and `batch_size` fix the ratio exactly there. It is
    for actors and learners that run at their own pace. `clock` gives seconds.
    """

    def __init__(
        self,
        least: float = 0.0,
        most: float = math.inf,
        window: float = 30.0,
        clock: Callable[[], float] = time.monotonic,
    ):
        if not 0.0 <= least <= most or most == 0.0:
            raise ConfigError(
                f"rows pushed per row sampled: expected 0 <= least <= most and most > 0, got {least}, {most}"
            )
        if not 0.0 < window < math.inf:
            raise ConfigError(f"the window of a rate limit is more than 0 seconds, got {window}")
        self.least, self.most, self.window = least, most, window
        self._clock = clock
        self._time = clock()
        self._pushed = self._sampled = 0.0

    def pushed(self, rows: int = 1) -> None:
        """So many rows came in."""
        self._decay()
        self._pushed += rows

    def sampled(self, rows: int = 1) -> None:
        """So many rows were drawn."""
        self._decay()
        self._sampled += rows

    def counts(self) -> tuple[float, float]:
        """Rows pushed and rows sampled, decayed to now."""
        self._decay()
        return self._pushed, self._sampled

    def may_push(self) -> bool:
        """Whether rows may come in now."""
        pushed, sampled = self.counts()
        return sampled < 1.0 or pushed <= self.most * sampled

    def may_sample(self) -> bool:
        """Whether rows may be drawn now."""
        pushed, sampled = self.counts()
        return pushed >= self.least * sampled

    def _decay(self) -> None:
        now = self._clock()
        factor = 0.01 ** ((now - self._time) / self.window)
        self._time = now
        self._pushed *= factor
        self._sampled *= factor
