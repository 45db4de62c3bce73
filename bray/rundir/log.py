"""`bray.log`: the "bray" logger in a file."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from pathlib import Path

from bray.errors import UnknownName

logger = logging.getLogger("bray")

_LEVELS = {"DEBUG": 10, "INFO": 20, "WARN": 30, "WARNING": 30, "ERROR": 40}


class _LogFile(logging.FileHandler):
    def close(self) -> None:
        logger.removeHandler(self)
        super().close()


def log_to(path: str | Path, level: str = "INFO") -> logging.Handler:
    """Write the "bray" logger to a file (appending); `handler.close()` ends it."""
    if level.upper() not in _LEVELS:
        raise UnknownName("log level", level, _LEVELS)
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    handler = _LogFile(path, encoding="utf-8")
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)-7s %(message)s"))
    handler.setLevel(_LEVELS[level.upper()])
    logger.addHandler(handler)
    if logger.level == logging.NOTSET or logger.level > handler.level:
        logger.setLevel(handler.level)
    return handler


@contextlib.contextmanager
def logging_to(path: str | Path, level: str = "INFO") -> Iterator[logging.Handler]:
    """`log_to` for the length of a block."""
    with contextlib.closing(log_to(path, level)) as handler:
        yield handler
