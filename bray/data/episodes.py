"""Episodes: an experience that hands out whole episodes, each row once."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from bray import tree
from bray.data.experience import ITERATION_STEPS, Batch, Experience
from bray.data.piece import Piece

_COLUMNS = ("obs", "action", "reward", "terminated", "truncated", "outputs", "extras")
_BEHIND = ("obs", "outputs")  # those with a row for the final observation


class Episodes(Experience):
    """A batch is one column `[T, 1]`: episodes that have ended, at least `rows` of their rows, one behind the other,
    each followed by its final observation as a dead row. It is filled up with dead rows to a multiple of half of
    `rows`, so that few shapes come.

    Games are kept apart by stream. Rows before the first start of an episode that is seen, or behind a gap, are not
    learnt from."""

    iteration_steps = ITERATION_STEPS

    def __init__(self, rows: int, piece_length: int = 16):
        self.rows, self.piece_length = rows, piece_length
        self._open: dict[int, list[dict[str, Any]]] = {}  # rows of episodes under way, by stream
        self._next: dict[int, int] = {}  # the tick that follows, by stream
        self._done: list[dict[str, Any]] = []
        self._newest: Any = None

    def add(self, piece: Piece) -> None:
        ticks = np.broadcast_to(np.asarray(piece.start), (piece.num_envs,))
        for b in range(piece.num_envs):
            stream = b if piece.stream is None else int(piece.stream[b])
            if piece.stream is not None:
                if self._next.get(stream, ticks[b]) != ticks[b]:
                    self._open.pop(stream, None)
                self._next[stream] = int(ticks[b]) + piece.length
            self._add_column(piece, b, stream)

    def _add_column(self, piece: Piece, b: int, stream: int) -> None:
        valid, ended = piece.valid[:, b], piece.terminated[:, b] | piece.truncated[:, b]
        start = 0
        for end in [*np.flatnonzero(ended & valid).tolist(), piece.length]:
            played = start + np.flatnonzero(valid[start : end + 1])
            start = end + 1
            if not len(played) or (stream not in self._open and not piece.first[played[0], b]):
                continue
            rows = {name: tree.index(getattr(piece, name), (played, b)) for name in _COLUMNS}
            self._open.setdefault(stream, []).append(rows)
            if end < piece.length:
                last = {name: tree.index(getattr(piece, name), ([end + 1], b)) for name in _BEHIND}
                self._end(stream, last)

    def _end(self, stream: int, last: dict[str, Any]) -> None:
        """The episode of a stream is over; `last` has its final observation."""
        episode = tree.concat(self._open.pop(stream))
        self._done.append(episode | {name: tree.concat([episode[name], last[name]]) for name in _BEHIND})

    def take(self) -> list[dict[str, Any]]:
        """The episodes that have ended since the last call, columns by name; `obs` and `outputs` have one row more."""
        done, self._done = self._done, []
        return done

    @property
    def _rows_done(self) -> int:
        return sum(len(episode["reward"]) for episode in self._done)

    def room(self) -> bool:
        return self._rows_done < 2 * self.rows

    def next(self, clock: Any, timeout: float = 0.0) -> Batch | None:
        if self._rows_done < self.rows:
            return None
        piece = lay(self.take(), max(1, self.rows // 2))
        self._newest = piece.obs
        return Batch(piece, int(np.count_nonzero(piece.valid)))

    def cut(self) -> None:
        self._open, self._done = {}, []

    def wait_reason(self) -> str:
        return f"{self._rows_done:,} of {self.rows:,} rows of episodes that have ended have come"

    def newest_obs(self, rows: int) -> Any:
        return None if self._newest is None else tree.map(lambda x: x[-rows:, 0], self._newest)

    def get_state(self, directory: Path | None) -> dict[str, Any]:
        under_way = {str(stream): tree.concat(rows) for stream, rows in self._open.items()}
        done = {str(i): episode for i, episode in enumerate(self._done)}
        return {"arrays": {"open": under_way, "done": done}, "json": {"next": list(self._next.items())}}

    def set_state(self, state: Mapping[str, Any], directory: Path | None) -> bool:
        arrays = state["arrays"]
        self._open = {int(stream): [_whole(rows)] for stream, rows in arrays.get("open", {}).items()}
        done = arrays.get("done", {})
        self._done = [_whole(done[i]) for i in sorted(done, key=int)]
        self._next = {int(stream): int(tick) for stream, tick in state["json"]["next"]}
        return True


def _whole(rows: Mapping[str, Any]) -> dict[str, Any]:
    """Columns as they were saved; those without a leaf are not in a file."""
    return {name: rows.get(name, {}) for name in _COLUMNS}


def lay(episodes: list[dict[str, Any]], multiple: int) -> Piece:
    """Whole episodes as one column; columns of `_BEHIND` have one row more than the others."""
    lengths = [len(episode["reward"]) for episode in episodes]
    rows = sum(lengths) + len(lengths) - 1
    total = -(-rows // multiple) * multiple
    starts = np.cumsum([0, *(n + 1 for n in lengths[:-1])])

    def column(name: str) -> Any:
        behind = name in _BEHIND

        def fill(*leaves: np.ndarray) -> np.ndarray:
            out = np.zeros((total + behind, 1, *leaves[0].shape[1:]), leaves[0].dtype)
            for at, x in zip(starts, leaves, strict=True):
                out[at : at + len(x), 0] = x
            return out

        return tree.map(fill, *(episode[name] for episode in episodes))

    valid, first = np.zeros((total, 1), bool), np.zeros((total + 1, 1), bool)
    first[starts] = True
    for at, n in zip(starts, lengths, strict=True):
        valid[at : at + n] = True
    return Piece(**{name: column(name) for name in _COLUMNS}, valid=valid, first=first)
