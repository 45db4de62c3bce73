"""Recordings of live sessions: every request and its reply, byte for byte, so that a game can be played again against another model.

A file is a magic, then frames: four bytes of length and a msgpack array. The first frame is a dict that says what was recorded.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from bray.errors import DataError
from bray.serving.protocol import END, START, TICK

logger = logging.getLogger("bray.serving")

MAGIC = b"BRAYREC1"
_LARGEST = 256 << 20  # bytes of a frame
_FLUSH = 64 << 10


class Step(msgspec.Struct, array_like=True):
    """One request of a recorded session."""

    kind: int
    time: float
    """Seconds since the session's start."""
    body: bytes
    reply: bytes | None
    """None: the Actor raised."""


class Recording:
    """The file of one session, written while it runs. A disk that fails ends the recording, not the session."""

    def __init__(self, directory: Path, session: str, about: dict[str, Any]):
        name = re.sub(r"[^\w.-]+", "-", session)[:80] or "session"
        self.path = directory / f"{name}-{time.time_ns():x}.rec"
        self._start = time.monotonic()
        self._buffer = bytearray(MAGIC)
        self._file: Any = None
        self._over = False
        self._frame(msgspec.msgpack.encode({"session": session, "time": time.time(), **about}))

    def _frame(self, data: bytes) -> None:
        self._buffer += len(data).to_bytes(4, "little") + data

    def add(self, kind: int, body: bytes, reply: bytes | None) -> None:
        if self._over:
            return
        self._frame(msgspec.msgpack.encode(Step(kind, time.monotonic() - self._start, bytes(body), reply)))
        if len(self._buffer) > _FLUSH or kind == END:
            self.flush()

    def flush(self) -> None:
        try:
            if self._file is None:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                self._file = open(self.path, "xb", buffering=0)  # noqa: SIM115
            self._file.write(self._buffer)
        except OSError as e:
            logger.error("recording %s ends: %s", self.path.name, e.strerror or e)
            self._over = True
        self._buffer.clear()

    def close(self) -> None:
        if self._buffer and not self._over:
            self.flush()
        if self._file is not None:
            self._file.close()


def read_recording(path: str | Path) -> tuple[dict[str, Any], list[Step]]:
    """What was recorded, and its steps. A recording that was cut off is read as far as it goes; anything else is a DataError."""
    try:
        data = Path(path).read_bytes()
    except OSError as e:
        raise DataError(f"{path} cannot be read ({e.strerror})") from None
    if not data.startswith(MAGIC):
        raise DataError(f"{path} is not a recording of `bray serve --record`: it should start with {MAGIC!r}")
    frames = list(_frames(memoryview(data)[len(MAGIC) :]))
    try:
        if not frames:
            raise DataError(f"{path} is cut off before its first frame")
        about = msgspec.msgpack.decode(frames[0], type=dict[str, Any])
        steps = [msgspec.msgpack.decode(frame, type=Step) for frame in frames[1:]]
    except (msgspec.DecodeError, RecursionError) as e:
        raise DataError(f"{path} is not a recording: {e}") from None
    if any(step.kind not in (START, TICK, END) for step in steps):
        raise DataError(f"{path} is not a recording: it holds requests of an unknown kind")
    return about, steps


def _frames(view: memoryview) -> Iterator[memoryview]:
    at = 0
    while at + 4 <= len(view):
        size = int.from_bytes(view[at : at + 4], "little")
        if size > _LARGEST or at + 4 + size > len(view):
            return
        yield view[at + 4 : at + 4 + size]
        at += 4 + size
