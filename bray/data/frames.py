"""Stacked frames stored once: one frame per row, stacks rebuilt when sampled.

An observation `[k, ...]` is k consecutive frames, newest last, so inside an episode a stack is the one before it
shifted by one.
Only an episode's first stack holds frames that no row has: these k - 1 are kept as "zeros" or "copies of the first
frame" (what almost every environment does, at no cost), else as they are.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from bray.data.flags import FIRST
from bray.errors import ConfigError, DataError

ZEROS = -1
REPEAT = -2


class FrameStore:
    """The observation column of a replay whose observations are frame stacks."""

    def __init__(self, example: np.ndarray, stack: int, rows: int, num_envs: int, make: Any):
        if example.ndim < 2 or example.shape[0] != stack:
            raise ConfigError(
                f"frame_stack={stack} needs observations of shape [{stack}, ...], newest frame last; got "
                f"{example.shape}"
            )
        self.stack, self.num_envs = stack, num_envs
        self.shape, self.dtype = example.shape, example.dtype
        frame_bytes = example[0].nbytes
        self.word = np.dtype(np.uint64 if frame_bytes % 8 == 0 else np.uint8)  # frames are copied and compared as words
        self.width = frame_bytes // self.word.itemsize
        self.size = rows * num_envs
        self.frames: np.ndarray = make((self.size + 1, self.width), self.word)  # the last one stays zero
        self.pad = np.full(self.size, ZEROS, np.int32)  # of an episode's first row: ZEROS, REPEAT, or row of pads
        self.pads = np.zeros((0, stack - 1, self.width), self.word)
        self.free: list[int] = []
        self.last = np.zeros((num_envs, stack, self.width), self.word)

    @property
    def nbytes(self) -> int:
        return self.frames.nbytes + self.pad.nbytes + self.pads.nbytes + self.last.nbytes

    def check(self, obs: np.ndarray, first: np.ndarray) -> np.ndarray:
        """The stacks of one row as words, after checking that each continues its environment's previous one."""
        words = np.ascontiguousarray(obs).reshape(self.num_envs, -1).view(self.word).reshape(self.last.shape)
        wrong = (words[:, :-1] != self.last[:, 1:]).any((1, 2)) & ~first
        if wrong.any():
            env = int(np.flatnonzero(wrong)[0])
            raise DataError(
                f"environment {env}: its observation is not the previous frame stack shifted by one frame "
                f"(frame_stack={self.stack}, newest frame last). Does a wrapper change frames after stacking? "
                "Without frame_stack the replay keeps whole stacks. If the environment was reset, call cut() first."
            )
        return words

    def write(self, words: np.ndarray, first: np.ndarray, slot: int) -> None:
        end = slot + self.num_envs
        self.frames[slot:end] = words[:, -1]
        self.last[...] = words
        if self.pads.size:
            self._release(slot, end)
        for env in np.flatnonzero(first):
            history = words[env, :-1]
            if not history.any():
                self.pad[slot + env] = ZEROS
            elif (history == words[env, -1]).all():
                self.pad[slot + env] = REPEAT
            else:
                self.pad[slot + env] = self._keep(history)

    def _release(self, slot: int, end: int) -> None:
        """Rows about to be overwritten give their kept frames back."""
        for s in range(slot, end):
            if self.pad[s] >= 0:
                self.free.append(int(self.pad[s]))
                self.pad[s] = ZEROS

    def _keep(self, history: np.ndarray) -> int:
        if not self.free:
            n = len(self.pads)
            more = max(8, n // 2)
            self.pads = np.concatenate([self.pads, np.zeros((more, *self.pads.shape[1:]), self.word)])
            self.free.extend(range(n + more - 1, n - 1, -1))
        at = self.free.pop()
        self.pads[at] = history
        return at

    def gather(self, flags: np.ndarray, slots: np.ndarray, length: int) -> np.ndarray:
        """`length` frames ending with the rows `slots`: `[..., length, *frame shape]`. With length = stack + 1 the
        window holds a row's stack and its predecessor's; then no slot may be an episode's first row.

        One `take` over a matrix of frame numbers: numpy copies whole frames forwards, 1.7 times as fast here as a
        compiled loop.
        """
        numbers = slots.reshape(-1, 1) + np.arange(1 - length, 1) * self.num_envs
        numbers[numbers < 0] += self.size
        starts = (flags.take(numbers[:, 1:]) & FIRST) != 0
        kept: list[tuple[int, int, int]] = []
        rows = np.flatnonzero(starts.any(1))
        if len(rows):  # frames older than an episode's first row were never rows
            at = length - 1 - starts[rows, ::-1].argmax(1)  # the newest start in the window
            start = numbers[rows, at]
            code = self.pad[start]
            older = np.arange(length) < at[:, None]
            filler = np.where(code == REPEAT, start, self.size)
            numbers[rows] = np.where(older, filler[:, None], numbers[rows])
            kept = [(int(rows[i]), int(at[i]), int(code[i])) for i in np.flatnonzero(code >= 0)]
        out = self.frames.take(numbers, 0)
        for row, n, pad in kept:
            out[row, :n] = self.pads[pad, self.stack - 1 - n :]
        return out.reshape(len(out), -1).view(self.dtype).reshape(*slots.shape, length, *self.shape[1:])

    # --- state ---

    def export(self, slots: np.ndarray) -> dict[str, np.ndarray]:
        """Rows as a tree; kept frames are numbered in order of appearance."""
        pad = self.pad[slots]
        real = pad >= 0
        kept = self.pads[pad[real]]
        pad[real] = np.arange(len(kept))
        return {"frames": self.frames[slots], "pad": pad, "pads": kept}

    def restore(self, slots: np.ndarray, frames: np.ndarray, pad: np.ndarray, pads: np.ndarray) -> None:
        """The inverse of `export`."""
        self.frames[slots] = frames
        pad = np.maximum(pad, REPEAT)
        for i in np.flatnonzero(pad >= 0):
            if pad[i] >= len(pads):
                raise DataError(f"a row refers to kept frames {pad[i]} of {len(pads)}")
            pad[i] = self._keep(pads[pad[i]])
        self.pad[slots] = pad

    def clear(self) -> None:
        self.pad[:] = ZEROS
        self.pads = self.pads[:0]
        self.free = []
