"""The log of a league: a line of JSON for each result and each snapshot. It is only ever added to.

    {"id": 7, "seats": {"x": "main", "o": "main@400"}, "returns": {"x": 1.0, "o": -1.0}, "length": 9}
    {"snapshot": "main@400", "steps": 51200}
    {"lost": "main@400"}                                        its weights are gone: nobody plays it any more
    {"opponent": "random", "player": "main", "outcomes": [1, 0]}    an evaluation: what it came to for the player

A kill may tear the last line; it is cut off when the league goes on, and its match counts as not played.
"""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Iterator
from pathlib import Path

import msgspec

from bray.errors import DataError
from bray.rundir.files import writing
from bray.rundir.reader import most_bytes, open_plain

logger = logging.getLogger("bray")

IN_RUN = "league/results.jsonl"
"""Where the log of a run is, in its directory."""
OUTSIDE = "outside.jsonl"
"""Beside it: results of players that a run does not have, which a resume does not cut off."""
_KEPT = "the results so far are kept"
MOST_LINE = 1 << 20
"""Bytes of a line."""


class Event(msgspec.Struct, omit_defaults=True):
    """A line."""

    id: int | None = None
    seats: dict[str, str] = {}
    """The player of each agent."""
    returns: dict[str, float] = {}
    length: int = 0
    snapshot: str | None = None
    steps: int = 0
    """Of its training, when it was frozen."""
    anew: bool = False
    """Whether it went on from the weights that it began with."""
    lost: str | None = None
    opponent: str | None = None
    """Of an evaluation: somebody who is none of the players."""
    player: str = ""
    outcomes: list[int] = []
    """Of its games: 1, 0 or -1, as the player sees them."""


class ResultLog:
    """The log in `path`, which is made with its first line. Without a path, lines wait in memory until `keep_in` says
    where they go."""

    def __init__(self, path: str | Path | None = None):
        self.path = None if path is None else Path(path)
        self._waiting: list[bytes] = []
        self.offset = 0
        """Bytes that were read or written."""
        self._encode = msgspec.json.Encoder().encode
        self._file: int | None = None

    def read(self, until: int | None = None) -> Iterator[Event]:
        """All events, or those of the first `until` bytes; `offset` is behind them."""
        self.offset = 0
        if self.path is None or not self.path.exists():
            if until:
                raise DataError(f"{self.path} is missing, and {until:,} bytes of it are known: bring it back")
            return
        decode = msgspec.json.Decoder(Event).decode
        with open_plain(self.path.name, self.path.parent) as file:
            if (size := os.fstat(file.fileno()).st_size) > most_bytes():
                raise DataError(f"{self.path} has {size:,} bytes, more than half of this machine's memory")
            for number, line in enumerate(iter(lambda: file.readline(MOST_LINE), b""), 1):
                whole = until is not None and self.offset >= until
                if whole or (not line.endswith(b"\n") and len(line) < MOST_LINE):  # or torn
                    break
                try:
                    event = decode(line)
                except (msgspec.DecodeError, UnicodeDecodeError) as e:
                    raise DataError(
                        f"{self.path}, line {number}: expected a result or a snapshot, got {line[:60]!r} ({e}). Cut "
                        "the file off before it, or bring it back: all that is known of the players is in it"
                    ) from None
                self.offset += len(line)
                yield event
        if until is not None and self.offset < until:
            raise DataError(
                f"{self.path} has {self.offset:,} bytes of whole lines, and the checkpoint knows {until:,}: it was cut "
                "off. Bring it back, or resume an older checkpoint"
            )

    def add(self, event: Event) -> None:
        """What follows `offset` in the file is cut off before the first one."""
        line = self._encode(event) + b"\n"
        if self.path is None:
            self._waiting.append(line)
        else:
            self._put(line)
        self.offset += len(line)

    def keep_in(self, path: str | Path) -> None:
        """From now on lines are written here; a log that has a place stays there."""
        if self.path is None:
            self.path = Path(path)
            waiting, self._waiting = b"".join(self._waiting), []
            if waiting:
                self.offset -= len(waiting)
                self._put(waiting)
                self.offset += len(waiting)

    def _put(self, data: bytes) -> None:
        """All of it, or nothing."""
        assert self.path is not None
        with writing(self.path, _KEPT):
            file = self._file = self._open() if self._file is None else self._file
            try:
                if os.write(file, data) < len(data):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            except BaseException:
                os.ftruncate(file, self.offset)
                raise

    def _open(self) -> int:
        assert self.path is not None
        self.path.parent.mkdir(parents=True, exist_ok=True)
        file = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
        if (size := os.fstat(file).st_size) > self.offset:
            logger.info("%s: %d bytes behind the last known result are cut off", self.path, size - self.offset)
            os.ftruncate(file, self.offset)
        return file

    def sync(self) -> int:
        """What was added is on disk; the offset behind it."""
        if self._file is not None:
            with writing(self.path or Path(), _KEPT):
                os.fsync(self._file)
        return self.offset

    def close(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None
