"""Pieces of workers that play at their own pace, put in step for a replay whose rows are one step of all
environments."""

from __future__ import annotations

from collections import deque
from dataclasses import replace

import numpy as np

from bray import tree
from bray.data.piece import COLUMNS, Piece, side_by_side

AHEAD = 4
"""Pieces that a worker may be ahead of another before that one is no longer waited for."""


class Lanes:
    """`add` pieces of worker w, `take` them side by side, each worker in columns of its own.

    Where a worker is too far behind, was replaced or has left, its columns have a gap: rows that are not valid and show
    its last observation. The row before the gap so has its successor, and sums of rewards end there.
    """

    def __init__(self, workers: int):
        self._waiting: list[deque[Piece | None]] = [deque() for _ in range(workers)]
        self._last: list[Piece | None] = [None] * workers
        self._absent: set[int] = set()

    def add(self, worker: int, piece: Piece) -> None:
        self._waiting[worker].append(piece)

    def cut(self, worker: int) -> None:
        """Its next piece does not continue its last one."""
        self._waiting[worker].append(None)

    def leave(self, worker: int) -> None:
        """It is not waited for until another one joins in its place."""
        self.cut(worker)
        self._absent.add(worker)

    def join(self, worker: int) -> None:
        self._absent.discard(worker)

    def _all_here(self) -> bool:
        return any(self._waiting) and all(mine or w in self._absent for w, mine in enumerate(self._waiting))

    def take(self) -> list[Piece]:
        """What can be put side by side now."""
        waiting, blocks = self._waiting, []
        while self._all_here() or any(sum(piece is not None for piece in mine) > AHEAD for mine in waiting):
            row = [mine.popleft() if mine else None for mine in waiting]
            like = next((piece for piece in (*row, *self._last) if piece is not None), None)
            if like is None:
                continue  # all were replaced before any of them had played
            blocks.append(side_by_side([piece or self._gap(w, like) for w, piece in enumerate(row)]))
            self._last = [piece or last for piece, last in zip(row, self._last, strict=True)]
        return blocks

    def _gap(self, worker: int, like: Piece) -> Piece:
        columns = {
            name: tree.map(np.zeros_like, value) for name in COLUMNS if (value := getattr(like, name)) is not None
        }
        last = self._last[worker]
        if last is not None:
            columns["obs"] = tree.map(lambda x: np.broadcast_to(x[-1], x.shape), last.obs)
        return replace(like, **columns)
