"""Recordings of live sessions: every request and its reply, byte for byte, so that a game can be played again against
another model.

    BRAYREC2 | frame | frame ...     frame = length u32 | its CRC-32 | the CRC-32 of the data | data   (little endian)

The data of the first frame is a map that says what was recorded, of the others a `Step`, in MessagePack. A file is
called after a hash of its session, since a client may call that what it likes; the name itself is in the first frame.
"""

from __future__ import annotations

import hashlib
import logging
import os
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO
from zlib import crc32

import msgspec

from bray.errors import CheckpointError, DataError
from bray.limited_log import LimitedLog
from bray.rundir.reader import open_plain
from bray.serving.protocol import END, START, TICK

logger = logging.getLogger("bray.serving")
_limited = LimitedLog(logger)

MAGIC = b"BRAYREC2"
_LENGTH = struct.Struct("<I")
_CHECKS = struct.Struct("<II")
_HEAD = _LENGTH.size + _CHECKS.size
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


class About(msgspec.Struct, kw_only=True):
    """What was recorded: the first frame of a file, which may hold more."""

    session: str
    time: float
    """When the session began, in seconds since 1970."""
    run: str
    """The run directory that was served."""
    model: str
    version: int

    def __post_init__(self) -> None:
        if "\0" in self.run:
            raise ValueError("a run directory's path has no zero bytes")


class Recording:
    """The file of one session, written while it runs. A disk that fails ends the recording, not the session."""

    def __init__(self, directory: Path, session: str, about: dict[str, Any]):
        name = hashlib.blake2b(session.encode(), digest_size=12).hexdigest()
        self.path = directory / f"{name}-{time.time_ns():x}.rec"
        self._start = time.monotonic()
        self._buffer = bytearray(MAGIC)
        self._file: Any = None
        self._over = False
        self._frame(msgspec.msgpack.encode({"session": session, "time": time.time(), **about}))

    def _frame(self, data: bytes) -> None:
        length = _LENGTH.pack(len(data))
        self._buffer += length + _CHECKS.pack(crc32(length), crc32(data)) + data

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
            self._write()
        except OSError as e:
            why = e.strerror or str(e)
            _limited.error((self.path.parent, why), "recording %s ends: %s", self.path, why)
            self._over = True
        self._buffer.clear()

    def _write(self) -> None:
        """All of it: a disk that is nearly full takes a part, and says why with the rest."""
        rest = memoryview(bytes(self._buffer))
        while rest:
            rest = rest[self._file.write(rest) :]

    def close(self) -> None:
        if self._buffer and not self._over:
            self.flush()
        if self._file is not None:
            self._file.close()


def read_recording(path: str | Path) -> tuple[About, list[Step]]:
    """What was recorded, and its steps. A recording that was cut off is read as far as it goes; anything else is a
    DataError."""
    try:
        with open_plain(path) as file:
            if file.read(len(MAGIC)) != MAGIC:
                raise DataError(f"it is not a recording of `bray serve --record`: it should start with {MAGIC!r}")
            frames = _frames(file)
            first = next(frames, None)
            if first is None:
                raise DataError("it is cut off before its first frame")
            about = msgspec.msgpack.decode(first, type=About)
            steps = [msgspec.msgpack.decode(frame, type=Step) for frame in frames]
    except CheckpointError as e:
        raise DataError(str(e)) from None
    except OSError as e:
        raise DataError(f"{path} cannot be read ({e.strerror or e})") from None
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError, DataError) as e:
        raise DataError(f"{path} is not a recording, or a damaged one: {e}") from None
    if any(step.kind not in (START, TICK, END) for step in steps):
        raise DataError(f"{path} is not a recording: it holds requests of an unknown kind")
    return about, steps


def _frames(file: BinaryIO) -> Iterator[bytes]:
    """Up to where the file ends, be it within a frame."""
    left = os.fstat(file.fileno()).st_size - file.tell()
    number = 0
    while len(head := file.read(_HEAD)) == _HEAD:
        (length,) = _LENGTH.unpack_from(head)
        length_check, data_check = _CHECKS.unpack_from(head, _LENGTH.size)
        if crc32(head[: _LENGTH.size]) != length_check or length > _LARGEST:
            raise DataError(f"the length of frame {number} does not fit its checksum")
        left -= _HEAD + length
        if left < 0:
            return
        data = file.read(length)
        if crc32(data) != data_check:
            raise DataError(f"frame {number} does not fit its checksum")
        yield data
        number += 1
