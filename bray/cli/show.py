"""The terminal: one console for what commands say, and a log handler that says warnings there."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from bray.cli.options import Acting, Reading
from bray.config.schema import rows
from bray.errors import BrayError, ConfigError, UnknownName
from bray.log_format import JsonLines, LogFormat, set_log_format

_LEVELS = {
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "warn": logging.WARNING,
    "error": logging.ERROR,
}


def terminal() -> Console:
    """stdout, as it is now. A file or pipe gets long lines instead of folded ones."""
    wide = not sys.stdout.isatty() and "COLUMNS" not in os.environ
    return Console(highlight=False, width=200 if wide else None)


def say(text: str | Text = "", style: str = "") -> None:
    """A line that is never folded, so that a path in it can be copied."""
    terminal().print(Text(text, style) if isinstance(text, str) else text, soft_wrap=True)


def put(table: Any) -> None:
    """A table, folded to the width of the terminal."""
    terminal().print(table)


def facts(rows: list[tuple[str, Any]]) -> None:
    """`name  value` lines with the names dimmed and aligned."""
    width = max((len(name) for name, _ in rows), default=0)
    for name, value in rows:
        say(Text.assemble((f"{name:<{width}}  ", "dim"), str(value)))


def plain_table(*columns: str) -> Table:
    """A table without lines. Columns whose name starts with '>' are numbers."""
    table = Table(box=None, pad_edge=False, header_style="dim")
    for name in columns:
        table.add_column(name.lstrip(">"), justify="right" if name.startswith(">") else "left", overflow="fold")
    return table


def key_table(cls: type) -> Table:
    """Every key of a dataclass: default, type and meaning."""
    table = plain_table("key", "default", "type", "what it does")
    for row in rows(cls):
        table.add_row(Text(row.key, "bold"), Text(row.default), Text(row.type, "dim"), Text(row.doc, "dim"))
    return table


def show_failure(error: Exception) -> None:
    """Print the traceback of the process that raised it, then one line that says what failed."""
    notes = list(getattr(error, "__notes__", ()))
    traces = [note for note in notes if "Traceback (most recent call last)" in note]
    for trace in traces:
        print(trace, file=sys.stderr)
    if not traces and not isinstance(error, BrayError):
        frame = error.__traceback__
        while frame is not None and frame.tb_frame.f_globals.get("__name__", "").startswith("bray."):
            frame = frame.tb_next
        error.__notes__ = []
        traceback.print_exception(error.with_traceback(frame or error.__traceback__))
    said = "".join(f"{note}: " for note in notes if note not in traces)
    name = "" if isinstance(error, BrayError) else f"{type(error).__name__}: "
    print(f"error: {said}{name}{error}", file=sys.stderr)


class _Handler(logging.Handler):
    """Looks up stderr at each message: a live display redirects it while it is on."""

    def emit(self, record: logging.LogRecord) -> None:
        sys.stderr.write(f"{self.format(record)}\n")  # in one piece: workers write to the same place


class _Plain(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return f"{record.levelname.lower()}: {record.getMessage()}"


class _Shown:
    """Which messages of the "bray" logger are said on stderr."""

    def __init__(self) -> None:
        self.handler, self.logger = _Handler(), logging.getLogger("bray")
        self.before = self.logger.level

    def set(self, level: str) -> None:
        """From this level on: debug, info, warning or warn, error."""
        if level.lower() not in _LEVELS:
            raise UnknownName("log level", level, _LEVELS, "--log-level")
        self.handler.setLevel(_LEVELS[level.lower()])
        if self.before == logging.NOTSET or self.before > self.handler.level:
            self.logger.setLevel(self.handler.level)


@contextlib.contextmanager
def log_shown(level: str = "warning", format: LogFormat = "text") -> Iterator[_Shown]:
    """Within: what the "bray" logger has to say from `level` on is said on stderr, as text or as JSON."""
    shown = _Shown()
    shown.set(level)
    shown.handler.setFormatter(JsonLines() if format == "json" else _Plain())
    set_log_format(format)
    shown.logger.addHandler(shown.handler)
    try:
        yield shown
    finally:
        shown.logger.removeHandler(shown.handler)
        shown.logger.setLevel(shown.before)
        set_log_format("text")


def trusting(options: Reading) -> bool | Callable[[str], bool]:
    """Whether to import what a run directory names: --trust, else whoever sits at the terminal is asked."""
    if options.trust or not (sys.stdin.isatty() and sys.stderr.isatty()):
        return options.trust

    def ask(what: str) -> bool:
        print(what, end=" ", file=sys.stderr)
        print("Allow it, now and later? [y/N] ", end="", file=sys.stderr, flush=True)
        return sys.stdin.readline().strip().lower() in ("y", "yes")

    return ask


def renamed_act(act: str | None, old: bool, flag: str) -> str | None:
    """What --act says; `old` is the flag that it replaces, for one release."""
    if not old:
        return act
    print(f"{flag} is now --act sample; {flag} goes with the next release", file=sys.stderr)
    if act == "greedy":
        raise ConfigError(f"--act greedy and {flag} contradict each other: leave out {flag}")
    return "sample"


def how_to_act(options: Acting) -> str:
    """`sample` or `greedy`."""
    return renamed_act(options.act, options.explore, "--explore") or "greedy"
