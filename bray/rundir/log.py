"""`bray.log`: the "bray" logger in a file."""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Iterator
from pathlib import Path

from bray.errors import UnknownName
from bray.limited_log import OncePer
from bray.log_format import log_formatter
from bray.rundir.files import writing

logger = logging.getLogger("bray")

_LEVELS = {"DEBUG": 10, "INFO": 20, "WARN": 30, "WARNING": 30, "ERROR": 40}


class _LogFile(logging.FileHandler):
    _once: OncePer | None = None

    def handleError(self, record: logging.LogRecord) -> None:
        """A full disk is one line a minute on stderr, where Python would print two tracebacks for each line of the
        log."""
        self._once = self._once or OncePer()
        error = sys.exc_info()[1]
        if not isinstance(error, OSError):
            super().handleError(record)
        elif self._once.due():
            print(f"{self.baseFilename}: lines of the log are lost ({error.strerror or error})", file=sys.stderr)

    def close(self) -> None:
        logger.removeHandler(self)
        with contextlib.suppress(OSError):  # what could not be written is told
            super().close()


class _Unheard(logging.Handler):
    """Shows warnings that nobody else shows, as Python itself does until a logger has its first handler: a file is one,
    which a script's user does not see."""

    def emit(self, record: logging.LogRecord) -> None:
        heard = [*logger.handlers, *(logging.root.handlers if logger.propagate else ())]
        if logging.lastResort is not None and all(isinstance(h, (_LogFile, _Unheard)) for h in heard):
            logging.lastResort.handle(record)


_UNHEARD = _Unheard(logging.WARNING)


def log_to(path: str | Path, level: str = "INFO") -> logging.Handler:
    """Append what the "bray" logger says to a file, until `handler.close()`. Warnings that nobody else shows go to
    stderr too."""
    if level.upper() not in _LEVELS:
        raise UnknownName("log level", level, _LEVELS)
    with writing(Path(path), "nothing was changed"):
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        handler = _LogFile(path, encoding="utf-8")
    handler.setFormatter(log_formatter("%(asctime)s %(levelname)-7s %(message)s"))
    handler.setLevel(_LEVELS[level.upper()])
    logger.addHandler(handler)
    logger.addHandler(_UNHEARD)  # for good, and once: it keeps silent wherever another handler is there
    if logger.level == logging.NOTSET or logger.level > handler.level:
        logger.setLevel(handler.level)
    return handler


@contextlib.contextmanager
def logging_to(path: str | Path, level: str = "INFO") -> Iterator[logging.Handler]:
    """`log_to` for the length of a block."""
    with contextlib.closing(log_to(path, level)) as handler:
        yield handler
