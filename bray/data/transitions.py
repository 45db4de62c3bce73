"""Transitions of several pieces, to be drawn in any order: every observation is held once, and a transition has the row
of its own and that of the one which it bootstraps from."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from bray import tree
from bray.data.piece import Piece, nstep
from bray.tree import NestedArray


class Transitions:
    """Its arrays grow, unless `begin` says how many there will be."""

    def __init__(self, n_step: int, gamma: float):
        self.n_step, self.gamma = n_step, gamma
        self._most = {"obs": 0, "columns": 0}
        self._arrays: dict[str, Any] = {}
        self._length = {"obs": 0, "columns": 0}

    def __len__(self) -> int:
        return self._length["columns"]

    def begin(self, rows: int, pieces: int) -> None:
        """Anew, for at most so many; in the same memory, where that is enough."""
        for kind, most in (("obs", rows + pieces), ("columns", rows)):
            self._length[kind] = 0
            if most > self._most[kind]:
                self._most[kind] = most
                self._arrays.pop(kind, None)

    def add(self, piece: Piece) -> None:
        """The valid rows of a piece, copied."""
        total, discount, after = nstep(piece, self.n_step, self.gamma)
        games, start = piece.num_envs, self._length["obs"]
        rows = np.flatnonzero(piece.valid)

        def valid(x: Any) -> Any:
            flat = x.reshape(-1, *x.shape[2:])
            return flat if len(flat) == len(rows) else flat[rows]

        self._append("obs", tree.map(lambda x: x.reshape(-1, *x.shape[2:]), piece.obs))
        columns = {
            **{"action": piece.action, "reward": total, "discount": discount},
            **piece.extras,
            "after": after * games + np.arange(games),
        }
        columns = tree.map(valid, columns)
        self._append("columns", columns | {"at": start + rows, "after": start + columns["after"]})

    def _append(self, kind: str, new: NestedArray) -> None:
        start = self._length[kind]
        end = start + tree.length(new)
        if kind not in self._arrays or end > self._most[kind]:
            most = self._most[kind] = max(self._most[kind], end, 2 * start)
            old = self._arrays.get(kind)
            self._arrays[kind] = tree.map(lambda x: np.empty((most, *x.shape[1:]), x.dtype), new)
            if old is not None:
                tree.map(lambda x, y: x.__setitem__(slice(0, start), y[:start]), self._arrays[kind], old)
        tree.map(lambda x, y: x.__setitem__(slice(start, end), y), self._arrays[kind], new)
        self._length[kind] = end

    def take(self, rows: np.ndarray) -> dict[str, NestedArray]:
        """These transitions, as those of a Replay."""
        obs = self._arrays["obs"]
        columns = tree.map(lambda x: x.take(rows, 0), self._arrays["columns"])
        at, after = columns.pop("at"), columns.pop("after")
        return {
            "obs": tree.map(lambda x: x.take(at, 0), obs),
            **{name: columns.pop(name) for name in ("action", "reward", "discount")},
            "next_obs": tree.map(lambda x: x.take(after, 0), obs),
            "weight": np.ones(len(rows), np.float32),
            **columns,
        }

    def newest_obs(self, rows: int) -> NestedArray:
        end = len(self)
        at = self._arrays["columns"]["at"][max(0, end - rows) : end]
        return tree.map(lambda x: x[at], self._arrays["obs"])


def bytes_of_row(piece: Piece) -> float:
    """What a transition of such a piece takes."""
    counted: Iterable[Any] = (piece.obs, piece.action, piece.extras)
    return sum(tree.nbytes(x) for x in counted) / piece.length + 24.0
