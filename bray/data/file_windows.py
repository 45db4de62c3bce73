"""Runs of consecutive rows of files, for Models with memory."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from bray import tree
from bray.data.experience import Batch, Dataset, EndOfData
from bray.data.piece import Piece, nstep
from bray.errors import DataError
from bray.tree import NestedArray


class Windows(Dataset):
    """Files row after row: each of the columns of a batch goes through whole episodes in a random order, `length` rows
    a batch, and takes up in the next batch where it left off. So whoever learns from them has the memory of a row's
    past: that of an episode's first row (`first`) is empty, that of a batch's row 0 the one with which the batch before
    ended. Each episode is gone through once in an epoch; an epoch begins while the last episodes of the one before are
    still under way.

    Batches `[L, B, ...]`: the columns of the files; `first`; `to_go`, the undiscounted rest of the episode's rewards,
    that of this row among them; `before`, the action of the row before, zeros in an episode's first; and `weight`, 0
    for the rows behind the end of the last episode of all. With `gamma`, `reward` is the discounted sum to the end of
    the episode and `discount` what the observation there counts: 0, or where an episode was cut gamma to the number of
    steps to it, and then that observation is a row of its own without weight."""

    def __init__(self, rows: int, length: int, epochs: int = 1, gamma: float | None = None):
        super().__init__(rows, epochs)
        self._discount = gamma
        self.length, self.columns = length, max(1, rows // length)
        self._at = np.full((self.columns, 2), -1, np.int64)  # the episode of each column, and its next row
        self._queue = np.zeros(0, np.int64)  # episodes of this epoch that are not begun
        self._held: dict[int, dict[str, NestedArray] | None] = {}
        self._bytes = 0
        self._last: NestedArray | None = None

    def add(self, piece: Piece) -> None:
        raise DataError("Windows read their episodes themselves (read_from)")

    def complete(self) -> None:
        self._complete = True
        assert self._pieces is not None
        self.count = int(self._pieces.steps.sum())
        if all(self._read_rows(i) is None for i in range(len(self._pieces.steps))):  # none is read beyond the first
            raise DataError("the data set has no transitions to learn from")

    def next(self, clock: Any, timeout: float = 0.0) -> Batch | None:
        if not self._complete:
            return None
        data: dict[str, NestedArray] | None = None
        for b in range(self.columns):
            t = 0
            while t < self.length and (found := self._episode(b)) is not None:
                i, start, episode = found
                n = min(self.length - t, len(episode["weight"]) - start)
                data = self._blank(episode) if data is None else data
                place, rows = (slice(t, t + n), b), slice(start, start + n)
                tree.map(lambda to, x, place=place, rows=rows: to.__setitem__(place, x[rows]), data, episode)
                t, over = t + n, start + n == len(episode["weight"])
                self._at[b] = (-1, -1) if over else (i, start + n)
                self._let_go(i, over)
        if data is None:
            raise EndOfData(f"{self.epochs} epochs of {self.count:,} transitions are learnt")
        valid = data["weight"] > 0
        if not valid.any():  # the last observations of all
            return self.next(clock, timeout)
        self._last = tree.map(lambda x: x[valid], data["obs"])
        return Batch(data, int(valid.sum()))

    def _blank(self, episode: dict[str, NestedArray]) -> dict[str, NestedArray]:
        shape = (self.length, self.columns)
        blank: dict[str, NestedArray] = tree.map(lambda x: np.zeros((*shape, *x.shape[1:]), x.dtype), episode)
        return blank

    def _episode(self, b: int) -> tuple[int, int, dict[str, NestedArray]] | None:
        """That of a column, and the row where it goes on; a new one where it has none. None where all are learnt."""
        while True:
            i, start = self._at[b].tolist()
            if i < 0:
                if not len(self._queue):
                    if self.epoch == self.epochs:
                        return None
                    assert self._pieces is not None
                    self.epoch, self._queue = self.epoch + 1, self.rng.permutation(len(self._pieces.steps))
                i, start, self._queue = int(self._queue[0]), 0, self._queue[1:]
            if (episode := self._read_rows(i)) is not None and start < len(episode["weight"]):
                return i, start, episode
            self._at[b] = -1, -1  # one that is left out

    def _read_rows(self, i: int) -> dict[str, NestedArray] | None:
        assert self._pieces is not None
        if i not in self._held:
            piece = self._pieces.read(i)
            self._held[i] = None if piece is None else _rows(piece, self._discount)
            self._bytes += 0 if piece is None else tree.nbytes(self._held[i])
        return self._held[i]

    def _let_go(self, i: int, over: bool) -> None:
        """Of an episode that is learnt from, where memory is short; it is read again when its turn comes."""
        if over and self._bytes > self._memory and i not in self._at[:, 0]:
            self._bytes -= tree.nbytes(self._held.pop(i))

    def draw(self, size: int) -> dict[str, NestedArray]:
        raise DataError("rows in order cannot be mixed into batches of single transitions")

    def newest_obs(self, rows: int) -> NestedArray | None:
        return None if self._last is None else tree.map(lambda x: x[-rows:], self._last)

    def get_state(self, directory: Path | None) -> dict[str, Any]:
        json = {"rng": self.rng.bit_generator.state, "epoch": self.epoch} | self._of_files()
        return {"arrays": {"at": self._at.copy(), "queue": self._queue}, "json": json}

    def set_state(self, state: Mapping[str, Any], directory: Path | None) -> bool:
        self._require_same_files(state["json"])
        self.rng.bit_generator.state = state["json"]["rng"]
        self.epoch = int(state["json"]["epoch"])
        self._at, self._queue = (np.array(state["arrays"][k], np.int64) for k in ("at", "queue"))
        return True


def _rows(piece: Piece, gamma: float | None) -> dict[str, NestedArray]:
    """The rows `[T, ...]` of an episode, or `[T + 1, ...]`."""
    t = piece.length
    reward, action = piece.reward[:, 0].astype(np.float64), np.asarray(piece.action)[:, 0]
    before = np.zeros_like(action)
    before[1:] = action[:-1]
    rows: dict[str, NestedArray] = {
        "action": action,
        "before": before,
        "reward": reward.astype(np.float32),
        "to_go": np.cumsum(reward[::-1])[::-1].astype(np.float32),
        "first": np.arange(t) == 0,
        "weight": np.ones(t, np.float32),
    }
    if gamma is not None:
        total, discount, _ = nstep(piece, sys.maxsize, gamma)
        rows |= {"reward": total[:, 0], "discount": discount[:, 0]}
        if discount.any():
            t += 1
            rows = tree.map(lambda x: np.concatenate([x, np.zeros_like(x[:1])]), rows)
    return rows | {"obs": tree.map(lambda x: x[:t, 0], piece.obs)}
