"""One line a minute per cause: what happens at every request or session must not fill the disk that the log is on."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Hashable
from typing import Any

_EVERY_S = 60.0
_MAX_CAUSES = 1024


class LimitedLog:
    """A logger that says the same thing once a minute, and how often it happened in between."""

    def __init__(self, logger: logging.Logger, clock: Callable[[], float] = time.monotonic):
        self._logger, self._clock = logger, clock
        self._said: dict[Hashable, float] = {}  # by cause: when
        self._left_out: dict[Hashable, int] = {}

    def log(self, level: int, cause: Hashable, message: str, *args: Any, exc_info: Any = None) -> None:
        """`cause` is what lines have in common that need not be said twice: not a session, but what went wrong with it."""
        now = self._clock()
        if now - self._said.get(cause, -_EVERY_S) < _EVERY_S:
            self._left_out[cause] = self._left_out.get(cause, 0) + 1
            return
        if len(self._said) >= _MAX_CAUSES:
            self._said.clear()
        self._said[cause] = now
        if n := self._left_out.pop(cause, 0):
            message = f"{message} (and {n} more like this since the last such line)"
        self._logger.log(level, message, *args, exc_info=exc_info)

    def error(self, cause: Hashable, message: str, *args: Any, exc_info: Any = None) -> None:
        self.log(logging.ERROR, cause, message, *args, exc_info=exc_info)

    def warning(self, cause: Hashable, message: str, *args: Any, exc_info: Any = None) -> None:
        self.log(logging.WARNING, cause, message, *args, exc_info=exc_info)
