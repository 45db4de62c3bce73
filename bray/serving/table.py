"""Who owns a session, on one machine. Nobody ever waits here: a worker that is stopped or killed at any moment stands
in no other's way.

A worker owns a session while it holds a record lock of the kernel on a range of bytes: where the range begins follows
from the session's name, how long it is says which worker holds it. To take, to ask and to give back are one call each,
none of which blocks, and the kernel frees what a process held when it ends.

Beside that each worker has a row in a mapped file, which it alone writes: whether it takes sessions, how much room it
has, when its event loop last turned. Others read it to choose where a session begins. What they read may be a moment
old, so the worker that they ask has the last word.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import mmap
import os
import struct
import time
from collections.abc import Collection, Mapping
from pathlib import Path

import numpy as np

from bray.errors import ConfigError

_ROW = np.dtype(
    [("open", "<i4"), ("slots", "<i4"), ("sessions", "<i4"), ("lent", "<i4"), ("beat", "<f8"), ("name", "V16")]
)
"""Of a worker: takes new sessions, slots, sessions that it owns, slots lent to stateless requests, time of its last
beat, digest of its name."""
_FLOCK = struct.Struct("@hhqqi4x")  # of the kernel: type, whence, start, length, process
_FILES = 64  # the kernel looks through a file's locks one by one
_RANGE_BITS = 10
SILENT_S = 1.0
"""A worker whose loop has not turned for this long gets new sessions only where no other has room."""


class Table:
    """The workers and sessions of one machine, as one of them (or their parent) sees them. One per process: closing it
    frees the process's locks."""

    def __init__(self, path: Path, workers: int, slots: int, create: bool = False):
        """`create`: make the files where they are not there; several workers may do so at once."""
        if workers >= 1 << _RANGE_BITS:
            raise ConfigError(f"expected fewer than {1 << _RANGE_BITS} workers on one machine, got {workers}")
        self.workers, self.slots = workers, slots
        self.me = -1
        """The row of this process; -1 = it has none."""
        flags = os.O_RDWR | (os.O_CREAT if create else 0)
        self._fd = os.open(path, flags, 0o600)
        size = workers * _ROW.itemsize
        if create:
            os.ftruncate(self._fd, size)
        self._map = mmap.mmap(self._fd, size)
        self._rows = np.frombuffer(self._map, _ROW, workers)
        self._locks = [os.open(path.with_name(f"{path.name}.{i}"), flags, 0o600) for i in range(_FILES)]

    def close(self) -> None:
        del self._rows
        self._map.close()
        for fd in (self._fd, *self._locks):
            os.close(fd)

    # --- rows ---------------------------------------------------------------------------------------------------------

    def take(self, row: int, name: str = "") -> bool:
        """Make a row that of this process for as long as it lives; False when another process has it."""
        if not _lock(self._fd, row, 1):
            return False
        self.me = row
        self._rows[row] = (0, self.slots, 0, 0, time.monotonic(), _digest(name.encode()))
        return True

    def join(self, name: str) -> int:
        """Take the row that a worker of this name had before, else any that nobody has. For workers without a parent to
        number them."""
        digest, unused = _digest(name.encode()), bytes(16)
        names = [bytes(n) for n in self._rows["name"]]
        for row in sorted(range(self.workers), key=lambda i: (names[i] != digest, names[i] != unused)):
            if self.take(row, name):
                return row
        raise ConfigError(f"{name} is one worker too many: {self.workers} of this service are alive on this machine")

    def leave(self) -> bool:
        """Give the row back before this process ends; whether nobody is left."""
        self.clear(self.me)
        fcntl.lockf(self._fd, fcntl.LOCK_UN, 1, self.me)
        return not any(self.lives(row) for row in range(self.workers) if row != self.me)

    def clear(self, row: int) -> int:
        """Empty the row of a worker that has died; returns the sessions it had."""
        lost = int(self._rows["sessions"][row])
        for field in ("open", "sessions", "lent"):
            self._rows[field][row] = 0
        return lost

    def lives(self, row: int) -> bool:
        return row == self.me or _holder(self._fd, row) is not None

    def beat(self) -> None:
        """Say that this worker's event loop turns."""
        self._rows["beat"][self.me] = time.monotonic()

    def last_beat(self, row: int) -> float:
        return float(self._rows["beat"][row])

    def open(self, is_open: bool) -> None:
        """Whether this worker takes new sessions."""
        self._rows["open"][self.me] = is_open

    def lend(self, actors: int) -> None:
        """So many slots of this worker are taken by stateless requests."""
        self._rows["lent"][self.me] = actors

    def awake(self) -> list[int]:
        """The other workers that live and whose loops turn."""
        silent = self._silent()
        return [row for row in range(self.workers) if row != self.me and not silent[row] and self.lives(row)]

    def running(self) -> int:
        """Sessions of all workers that live."""
        return sum(n for row, n in enumerate(self._rows["sessions"].tolist()) if n and self.lives(row))

    def total(self) -> int:
        """Slots of all workers that take sessions."""
        return sum(
            slots
            for row, (slots, is_open) in enumerate(zip(*self._lists("slots", "open"), strict=True))
            if is_open and self.lives(row)
        )

    def _lists(self, *fields: str) -> list[list[int]]:
        return [self._rows[field].tolist() for field in fields]

    def _silent(self) -> np.ndarray:
        silent = self._rows["beat"] < time.monotonic() - SILENT_S
        if self.me >= 0:
            silent[self.me] = False  # whoever asks is awake
        return silent

    def choose(self, starting: Mapping[int, int] | None = None, but: Collection[int] = ()) -> int | None:
        """The worker for a new session: this one unless another has clearly more room, since a session that is played
        elsewhere than where its connection ends costs half as much again. None: no slot is free anywhere.

        starting  sessions on their way to a worker, which may be counted there already
        but       workers that are not asked
        """
        rows = self._rows
        free = (rows["slots"] - rows["sessions"] - rows["lent"]) * rows["open"]
        free[list(but)] = 0
        awake = np.where(self._silent(), 0, free)
        expected = awake.copy()
        for row, n in (starting or {}).items():
            expected[row] -= n
        for room in (expected, awake, free):
            while room[best := int(room.argmax())] > 0:
                if self.me >= 0 and room[self.me] > 0 and room[best] - room[self.me] <= self.slots // 4:
                    return self.me
                if self.lives(best):
                    return best
                room[best] = 0
        return None

    # --- sessions -----------------------------------------------------------------------------------------------------

    def claim(self, session: bytes) -> bool:
        """Make this worker the owner of a session; False when another one owns it."""
        fd, start = self._place(session)
        if not _lock(fd, start, 1 + self.me):
            return False
        self._rows["sessions"][self.me] += 1
        return True

    def release(self, session: bytes) -> None:
        """Give back a session that this worker has claimed."""
        fd, start = self._place(session)
        fcntl.lockf(fd, fcntl.LOCK_UN, 1 + self.me, start)
        self._rows["sessions"][self.me] -= 1

    def find(self, session: bytes) -> int | None:
        """Which other worker owns a session."""
        length = _holder(*self._place(session))
        return None if length is None else length - 1

    def _place(self, session: bytes) -> tuple[int, int]:
        """The file and the first byte of a session's range."""
        digest = hashlib.blake2b(session, digest_size=8).digest()
        return self._locks[digest[0] % _FILES], int.from_bytes(digest[1:], "little") >> 3 << _RANGE_BITS


def _lock(fd: int, start: int, length: int) -> bool:
    """Lock a range, as far as no other process has; never waits."""
    with contextlib.suppress(BlockingIOError, PermissionError):
        fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB, length, start)
        return True
    return False


def _holder(fd: int, start: int) -> int | None:
    """The length of the range that another process has locked here; None when none has."""
    answer = fcntl.fcntl(fd, fcntl.F_GETLK, _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, start, 1, 0))
    kind, _, _, length, _ = _FLOCK.unpack(answer)
    return None if kind == fcntl.F_UNLCK else length


def _digest(name: bytes) -> bytes:
    return hashlib.blake2b(name, digest_size=16).digest()
