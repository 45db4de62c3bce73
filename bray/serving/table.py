"""Who owns a session: a table that all workers of a machine share, in a mapped file under a lock of the kernel.

A worker that is killed, even while it changes the table, blocks nobody. Workers have a parent that starts them in rows 0, 1, ... and clears the row of
one that dies (`workers.py`), or they have none, `join` the table and watch each other: each holds a kernel lock on its row for as long as it lives.
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import mmap
import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from bray.errors import ConfigError

logger = logging.getLogger("bray.serving")

_WORKER = struct.Struct("<4i")  # open for new sessions, slots, sessions owned, slots lent to stateless requests
_ROW = _WORKER.size + 16  # of a worker: behind that the digest of its name, where it has joined
_ENTRY = struct.Struct("<16sii8x")  # digest of the session, its owner + 1 (0: nobody), who promised it the session + 1
_DIGEST = 16
_ENTRIES = np.dtype([("digest", "V16"), ("owner", "<i4"), ("promised_by", "<i4"), ("unused", "V8")])


class Table:
    """Sessions and their owners: open addressing with linear probing over digests, in a mapped file."""

    def __init__(self, path: Path, workers: int, slots: int, create: bool = False):
        """`create`: make the file where it is not there; several workers may do so at once."""
        self.workers, self.slots = workers, slots
        self.capacity = 1 << max(10, (2 * workers * slots - 1).bit_length())
        self._entries = _ROW * workers
        size = self._entries + self.capacity * _ENTRY.size
        self._mine: int | None = None  # the row that this process has joined
        self._fd = os.open(path, os.O_RDWR | (os.O_CREAT if create else 0), 0o600)
        if create:
            os.ftruncate(self._fd, size)  # sparse: pages that no session falls into are never made
        self._map = mmap.mmap(self._fd, size)

    def close(self) -> None:
        self._map.close()
        os.close(self._fd)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        fcntl.lockf(self._fd, fcntl.LOCK_EX, 1, 0)
        try:
            yield
        finally:
            fcntl.lockf(self._fd, fcntl.LOCK_UN, 1, 0)

    # --- workers without a parent -------------------------------------------------------------------------------------

    def join(self, name: str) -> int:
        """Take a row for as long as this process lives: the one that a worker of this name had before, else any that nobody holds. What
        the row's last worker owned is forgotten. From now on workers that have died are told from those that live."""
        digest, unused = _digest(name.encode()), bytes(_DIGEST)
        with self._locked():
            names = [self._map[i * _ROW + _WORKER.size : (i + 1) * _ROW] for i in range(self.workers)]
            for i in sorted(range(self.workers), key=lambda i: (names[i] != digest, names[i] != unused)):
                if self._hold(i):
                    lost = self._clear(i)
                    if lost:
                        logger.error("%s is here in place of one that died with %d sessions", name, lost)
                    self._map[i * _ROW + _WORKER.size : (i + 1) * _ROW] = digest
                    self._mine = i
                    return i
        raise ConfigError(f"{name} is one worker too many: {self.workers} of this service are alive on this machine")

    def _hold(self, i: int) -> bool:
        """Take a row's lock, which the kernel frees when this process ends; False when another process has it."""
        try:
            fcntl.lockf(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, 1 + i)
        except OSError:
            return False
        return True

    def _lives(self, i: int) -> bool:
        if self._mine is None or i == self._mine:
            return True  # with a parent, that one clears the rows of the dead
        if not self._hold(i):
            return True
        fcntl.lockf(self._fd, fcntl.LOCK_UN, 1, 1 + i)
        return False

    def leave(self) -> bool:
        """Give the row back before this process ends; whether nobody is left."""
        assert self._mine is not None
        with self._locked():
            self._clear(self._mine)
            fcntl.lockf(self._fd, fcntl.LOCK_UN, 1, 1 + self._mine)
            return not any(self._lives(i) for i in range(self.workers) if i != self._mine)

    def clear_if_dead(self, worker: int) -> None:
        """Clear a worker's row if it has died."""
        with self._locked():
            if not self._lives(worker) and (lost := self._clear(worker)):
                logger.error("worker %d has died with %d sessions", worker, lost)

    # --- rows ---------------------------------------------------------------------------------------------------------

    def _worker(self, i: int) -> tuple[int, int, int, int]:
        return _WORKER.unpack_from(self._map, i * _ROW)

    def _set_worker(self, i: int, *values: int) -> None:
        _WORKER.pack_into(self._map, i * _ROW, *values)

    def _probe(self, digest: bytes) -> Iterator[tuple[int, bytes, int]]:
        """(place, digest, owner) of the entries from a digest's first place on, up to and with the first free one."""
        at = int.from_bytes(digest[:8], "little")
        for i in range(self.capacity):
            place = (at + i) & (self.capacity - 1)
            found, owner, _ = _ENTRY.unpack_from(self._map, self._entries + place * _ENTRY.size)
            yield place, found, owner - 1
            if not owner:
                return

    def _set(self, place: int, digest: bytes, owner: int, promised_by: int = -1) -> None:
        _ENTRY.pack_into(self._map, self._entries + place * _ENTRY.size, digest, owner + 1, promised_by + 1)

    def claim(self, session: bytes, me: int) -> int | None:
        """Choose an owner and write it down: the worker that asks unless another has clearly more room. None: no slot is free
        anywhere. KeyError, with its owner: the session is running."""
        digest = _digest(session)
        with self._locked():
            while True:
                free_place = dead = -1
                for place, found, owner in self._probe(digest):
                    free_place = place  # the last one of the probe
                    if owner >= 0 and found == digest:
                        if self._lives(owner):
                            raise KeyError(owner)
                        dead = owner
                if dead < 0:
                    best = self._choose(me, keep=self.slots // 4)
                    if best is None:
                        return None
                    if self._lives(best):
                        break
                    dead = best
                self._clear(dead)
            self._set(free_place, digest, best, -1 if best == me else me)
            is_open, slots, owned, lent = self._worker(best)
            self._set_worker(best, is_open, slots, owned + 1, lent)
            return best

    def _choose(self, me: int, keep: int) -> int | None:
        """The worker with the most free slots; `me` if the best has at most `keep` more: a session that is played elsewhere than where its
        connection ends costs half as much again, most of it here."""
        free = self._free()
        best = int(free.argmax())
        if free[best] <= 0:
            return None
        return me if free[me] > 0 and free[best] - free[me] <= keep else best

    def _free(self) -> np.ndarray:
        """Free slots of each worker; 0 or less where it takes no sessions."""
        is_open, slots, owned, lent = np.frombuffer(self._map, "<i4", self._entries // 4).reshape(-1, _ROW // 4).T[:4]
        return (slots - owned - lent) * is_open

    def settle(self, session: bytes, me: int) -> bool:
        """A session that another worker promised to this one is here; False when this one does not own it."""
        digest = _digest(session)
        with self._locked():
            for place, found, owner in self._probe(digest):
                if owner == me and found == digest:
                    self._set(place, digest, me)
                    return True
        return False

    def find(self, session: bytes) -> int | None:
        digest = _digest(session)
        with self._locked():
            return next((owner for _, found, owner in self._probe(digest) if owner >= 0 and found == digest), None)

    def release(self, session: bytes, owner: int) -> None:
        """Remove a session, if this worker owns it."""
        digest = _digest(session)
        with self._locked():
            for place, found, who in self._probe(digest):
                if who == owner and found == digest:
                    self._remove(place)
                    is_open, slots, owned, lent = self._worker(owner)
                    self._set_worker(owner, is_open, slots, max(0, owned - 1), lent)
                    return

    def _remove(self, place: int) -> None:
        """Free a place and close the gap: entries behind it move up, so that probes never stop too early."""
        mask = self.capacity - 1
        self._set(place, bytes(_DIGEST), -1)
        hole, at = place, place
        while True:
            at = (at + 1) & mask
            digest, owner, promised_by = _ENTRY.unpack_from(self._map, self._entries + at * _ENTRY.size)
            if not owner:
                return
            home = int.from_bytes(digest[:8], "little") & mask
            if (at - home) & mask >= (at - hole) & mask:
                self._set(hole, digest, owner - 1, promised_by - 1)
                self._set(at, bytes(_DIGEST), -1)
                hole = at

    def lend(self, me: int, lent: int) -> None:
        with self._locked():
            is_open, slots, owned, _ = self._worker(me)
            self._set_worker(me, is_open, slots, owned, lent)

    def roomiest(self, me: int) -> int | None:
        """Another worker with a free slot, the one with the most."""
        with self._locked():
            while True:
                free = self._free()
                free[me] = 0
                best = int(free.argmax())
                if free[best] <= 0:
                    return None
                if self._lives(best):
                    return best
                self._clear(best)

    def running(self) -> int:
        """Sessions of all workers that live."""
        with self._locked():
            return sum(n for i in range(self.workers) if (n := self._worker(i)[2]) and self._lives(i))

    def total(self) -> int:
        """Slots of all workers that take sessions."""
        with self._locked():
            return sum(w[1] for i in range(self.workers) if (w := self._worker(i))[0])

    def used(self) -> list[int]:
        """The rows that have, or had, a worker."""
        with self._locked():
            return [i for i in range(self.workers) if self._worker(i)[1]]

    def open(self, worker: int, is_open: bool) -> None:
        """Whether a worker takes new sessions."""
        with self._locked():
            _, _, owned, lent = self._worker(worker)
            self._set_worker(worker, int(is_open), self.slots, owned, lent)

    def clear(self, dead: int) -> int:
        """Forget everything a worker owned or had promised to others, and count the others anew (it may have died while it counted);
        returns the number of sessions that are lost."""
        with self._locked():
            return self._clear(dead)

    def _clear(self, dead: int) -> int:
        """Entry by entry: whoever is killed in here leaves the sessions of the others where they are."""
        table = np.frombuffer(self._map, _ENTRIES, self.capacity, self._entries)
        is_lost = table["owner"] == dead + 1
        lost = int(is_lost.sum())
        places = np.flatnonzero(is_lost | (table["promised_by"] == dead + 1)).tolist()
        starts = [self._entries + place * _ENTRY.size for place in places]
        for digest in [self._map[at : at + _DIGEST] for at in starts]:
            self._remove(next(place for place, found, owner in self._probe(digest) if owner >= 0 and found == digest))
        owned = np.bincount(table["owner"], minlength=self.workers + 1)[1:].tolist()
        for i in range(self.workers):
            is_open, slots, _, lent = self._worker(i)
            self._set_worker(i, 0 if i == dead else is_open, slots, owned[i], 0 if i == dead else lent)
        return lost


def _digest(session: bytes) -> bytes:
    return hashlib.blake2b(session, digest_size=_DIGEST).digest()
