"""Arrays in memory that the processes of one machine share."""

from __future__ import annotations

import ctypes
import multiprocessing
from collections.abc import Iterable
from typing import Any

import numpy as np

from bray.tree.layout import aligned


class SharedArrays:
    """Arrays `[rows, ...]`, one like each example `[...]`. It can be sent to a process that is being started."""

    def __init__(self, examples: Iterable[np.ndarray], rows: int):
        self._places, size = [], 0
        for x in examples:
            self._places.append((size, (rows, *x.shape), x.dtype))
            size += aligned(rows * x.nbytes)
        self.memory: Any = multiprocessing.get_context("spawn").RawArray(ctypes.c_uint8, max(1, size))

    def views(self) -> list[np.ndarray]:
        return [
            np.frombuffer(self.memory, dtype, int(np.prod(shape)), at).reshape(shape)
            for at, shape, dtype in self._places
        ]
