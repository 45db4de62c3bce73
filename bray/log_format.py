"""How a line of the log is written: as text, or as JSON for programs that collect logs."""

from __future__ import annotations

import json
import logging
import time
from typing import Literal

LogFormat = Literal["text", "json"]
_format: LogFormat = "text"


class JsonLines(logging.Formatter):
    """A JSON object per line: time (UTC), level, logger, process, message, and exception where there is one."""

    def format(self, record: logging.LogRecord) -> str:
        at = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line = {
            "time": f"{at}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "process": record.process,
            "message": record.getMessage(),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False)


def set_log_format(name: LogFormat) -> None:
    """For the logs that this process opens from now on, and for those of a session that it starts."""
    global _format
    _format = name


def log_format() -> LogFormat:
    return _format


def log_formatter(text: str) -> logging.Formatter:
    """By the format that was set; `text` is how a line of text looks."""
    return JsonLines() if _format == "json" else logging.Formatter(text)
