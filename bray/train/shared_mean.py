"""The mean of large arrays over the ranks of one machine, in memory that they share: each of several ranks adds up its
part of the array for all of them. Over sockets every number would be copied by the kernel, and be sent as often as
there are ranks.
"""

from __future__ import annotations

import mmap
import os
import tempfile
from contextlib import suppress
from typing import Protocol

import msgspec
import numpy as np
import torch
from torch import Tensor

FOLDER = "/dev/shm"
"""Of files that are nowhere but in memory; each is gone as soon as all ranks have opened it."""
_HEAD = 64  # bytes before the arrays: what tells this memory from another one of the same name
_BLOCK = 1 << 16  # numbers that are added up at a time: they stay in a core's cache

SMALLEST = 1 << 16
"""Numbers of an array for which this is the shorter way."""


class Ranks(Protocol):
    """What the mean asks of `bray.train.ranks.Ranks`."""

    size: int
    rank: int

    @property
    def first(self) -> bool: ...

    def broadcast(self, data: bytes) -> bytes: ...

    def all_reduce_min(self, number: float) -> float: ...


class SharedMean:
    """Float32; what is on a GPU is copied here and back. Where the ranks do not share a machine, or its memory for
    files is full, there is none."""

    def __init__(self, ranks: Ranks):
        self._ranks = ranks
        self._arrays: np.ndarray | None = None  # [places, numbers]: what each has given, and the mean of several
        self._refused = False
        self._turn = 0

    def mean(self, x: Tensor) -> Tensor | None:
        """All ranks call it with arrays of the same size; None: take another way."""
        size, rank, count = self._ranks.size, self._ranks.rank, x.numel()
        if not self._refused and (self._arrays is None or self._arrays.shape[1] < count):
            self._arrays = self._open(count)
            self._refused = self._arrays is None
        if self._arrays is None:
            return None
        if size == 2:  # each adds up all of it for itself, while the next arrays have other places: they meet once
            self._turn = 2 - self._turn
            given, mean = self._arrays[self._turn : self._turn + 2, :count], np.empty(count, np.float32)
            given[rank] = x.detach().cpu().numpy()
            self._ranks.all_reduce_min(0)
            _take_mean(given, mean, 0, count)
            return torch.from_numpy(mean).to(x.device)
        given, mean = self._arrays[:size, :count], self._arrays[size, :count]
        given[rank] = x.detach().cpu().numpy()
        self._ranks.all_reduce_min(0)  # nobody reads before all have written
        _take_mean(given, mean, rank * count // size, (rank + 1) * count // size)
        self._ranks.all_reduce_min(0)
        return torch.from_numpy(mean.copy()).to(x.device)  # the next one writes over it when all have come to that

    def _open(self, count: int) -> np.ndarray | None:
        """Memory for arrays of so many numbers, which the first rank makes; None where one of them cannot have it."""
        ranks = self._ranks
        arrays = 4 if ranks.size == 2 else ranks.size + 1
        length = _HEAD + 4 * arrays * count
        path, token, memory = "", os.urandom(_HEAD), None
        try:
            if ranks.first:
                with suppress(OSError):
                    fd, path = tempfile.mkstemp(prefix="bray-ranks-", dir=FOLDER)
                    with os.fdopen(fd, "r+b") as file:
                        os.posix_fallocate(fd, 0, length)  # else a full disk is found out by a signal
                        file.write(token)
                        file.flush()
                        memory = mmap.mmap(fd, length)
            told, theirs = msgspec.msgpack.decode(ranks.broadcast(msgspec.msgpack.encode((path, token))))
            if not ranks.first:
                with suppress(OSError), open(told, "r+b") as file:
                    if os.fstat(file.fileno()).st_size == length and file.read(_HEAD) == theirs:
                        memory = mmap.mmap(file.fileno(), length)
            agreed = ranks.all_reduce_min(memory is not None)
        finally:
            if path:
                os.unlink(path)  # those who have it open keep it
        if memory is None or not agreed:
            return None
        return np.frombuffer(memory, np.float32, offset=_HEAD).reshape(arrays, count)


def _take_mean(given: np.ndarray, mean: np.ndarray, at: int, end: int) -> None:
    """Of `given [ranks, numbers]` between two places. By numpy, in one thread: those of torch wait for each other at
    every block, which takes longer than to add where other processes have the cores."""
    for start in range(at, end, _BLOCK):
        span = slice(start, min(start + _BLOCK, end))
        np.add(given[0, span], given[1, span], out=mean[span])
        for other in given[2:, span]:
            mean[span] += other
        mean[span] *= 1.0 / len(given)
