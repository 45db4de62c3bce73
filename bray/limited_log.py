"""One line a minute per cause: what happens at every request, session or save must not fill the disk that the log is
on."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Hashable
from typing import Any

_EVERY_S = 60.0
_MAX_CAUSES = 1024


class OncePer:
    """Says whether it is time to say something again: `if once.due(): log.warning(...)`."""

    def __init__(self, seconds: float = _EVERY_S, clock: Callable[[], float] = time.monotonic):
        self._seconds, self._clock, self._last = seconds, clock, -math.inf
        self._missed = 0
        self.left_out = 0
        """How often it was not due before it was."""

    def due(self) -> bool:
        now = self._clock()
        if now - self._last < self._seconds:
            self._missed += 1
            return False
        self._last, self.left_out, self._missed = now, self._missed, 0
        return True


class LimitedLog:
    """A logger that says the same thing once a minute, and how often it happened in between."""

    def __init__(self, logger: logging.Logger, clock: Callable[[], float] = time.monotonic):
        self._logger, self._clock = logger, clock
        self._causes: dict[Hashable, OncePer] = {}

    def log(self, level: int, cause: Hashable, message: str, *args: Any, exc_info: Any = None) -> None:
        """`cause` is what lines have in common that need not be said twice: not a session, but what went wrong with
        it."""
        once = self._causes.get(cause)
        if once is None:
            if len(self._causes) >= _MAX_CAUSES:
                self._causes.clear()
            once = self._causes[cause] = OncePer(clock=self._clock)
        if not once.due():
            return
        if once.left_out:
            message = f"{message} (and {once.left_out} more like this since the last such line)"
        self._logger.log(level, message, *args, exc_info=exc_info)

    def error(self, cause: Hashable, message: str, *args: Any, exc_info: Any = None) -> None:
        self.log(logging.ERROR, cause, message, *args, exc_info=exc_info)

    def warning(self, cause: Hashable, message: str, *args: Any) -> None:
        self.log(logging.WARNING, cause, message, *args)
