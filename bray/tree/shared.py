"""Arrays in memory that the processes of one machine share."""

from __future__ import annotations

import ctypes
import multiprocessing
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from bray.tree.layout import aligned


@dataclass(frozen=True)
class Place:
    """Where an array lies in a memory. A leaf of trees."""

    at: int
    shape: tuple[int, ...]
    dtype: np.dtype

    def of(self, memory: Any, start: int = 0) -> np.ndarray:
        count = int(np.prod(self.shape))
        return np.frombuffer(memory, self.dtype, count, start + self.at).reshape(self.shape)


def places(arrays: Iterable[np.ndarray], lead: tuple[int, ...] = ()) -> tuple[list[Place], int]:
    """Places for arrays behind each other, and the bytes of all. Each has the axes `lead` before its own."""
    out, at = [], 0
    for x in arrays:
        out.append(Place(at, (*lead, *x.shape), x.dtype))
        at += aligned(int(np.prod(lead)) * x.nbytes)
    return out, max(1, at)


class SharedArrays:
    """Arrays `[rows, ...]`, one like each example `[...]`. It can be sent to a process that is being started."""

    def __init__(self, examples: Iterable[np.ndarray], rows: int):
        self._places, size = places(examples, (rows,))
        self.memory: Any = multiprocessing.get_context("spawn").RawArray(ctypes.c_uint8, size)

    def views(self) -> list[np.ndarray]:
        return [place.of(self.memory) for place in self._places]
