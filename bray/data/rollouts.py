"""Rollouts: each row is learnt from once, in batches of a fixed shape `[T, B]`."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from bray import tree
from bray.data.experience import ITERATION_STEPS, Batch, Dataset, Experience, Pieces
from bray.data.piece import COLUMNS, Piece, arrays_of, facts_of, on_host, wider, write_columns
from bray.errors import ConfigError
from bray.tree import NestedArray


class Rollouts(Experience):
    """Each row once, while it is fresh: batches are canvases of `length` rows by `columns` games.

    A piece that fills a canvas passes through as it is: environments in this process step together. Pieces of live
    games are ragged and are laid one after the other: behind each goes its last observation as a dead row and its last
    row counts as truncated, so nothing leaks from one to the next. What does not fit goes to the next canvas. Rows of a
    Model with memory are cut into sequences of `state_every` rows, one per column, the last of a piece padded; the
    columns of a piece stay in line (`Piece.in_line`), so that advantages go through the whole piece.

    `asynchronous`: for algorithms that learn from what older weights did. Pieces of workers come as they are played.
    With `games`, so many columns make a batch, side by side in the order in which they came: it is the same for one
    process with all environments and for workers that share them. A batch of lent pieces holds until the next one is
    taken.

    `demos`: for algorithms that learn from files beside what they play: pieces have `demos`, once there are files.
    """

    iteration_steps = ITERATION_STEPS

    def __init__(
        self,
        length: int,
        columns: int | None = None,
        state_every: int = 1,
        asynchronous: bool = False,
        games: int | None = None,
        demos: bool = False,
    ):
        self.mixes = demos
        self._files: Dataset | None = None
        self._share = 0.0
        self.piece_length, self.columns, self.state_every = length, columns, state_every
        self.asynchronous, self.games = asynchronous, games
        self.sized_by = ""
        """The key that says how many rows a rollout has, where that is not the algorithm's alone."""
        self._ready: deque[Piece] = deque()
        self._beside: Piece | None = None
        self._filled = 0
        self._made: list[Piece] = []
        self._canvas: _Canvas | None = None
        self._last: Piece | None = None

    def mix_with(self, pieces: Pieces, share: float, memory: int, seed: int) -> None:
        if not 0.0 < share < 1.0:
            raise ConfigError(f"data.share: rollouts and files beside them are a share between 0 and 1, got {share}")
        self._share, self._files = share, Dataset(1, sys.maxsize)
        self._files.read_from(pieces, memory, seed)

    def add(self, piece: Piece) -> None:
        if piece.stream is None and piece.length == self.piece_length:
            games = self.games or piece.num_envs
            if piece.lent or piece.num_envs % games or self._beside is not None:
                self._put_beside(piece)
            elif piece.num_envs == games:
                self._ready.append(piece)
            else:
                self._ready.extend(_columns(piece, at, at + games) for at in range(0, piece.num_envs, games))
            return
        if self._canvas is None:
            assert self.piece_length is not None
            rows = self.piece_length * (self.columns or 1)
            length = self.state_every if piece.state is not None else min(self.piece_length, rows)
            self._canvas = _Canvas(piece, length, max(1, -(-rows // length)))
        self._ready.extend(self._canvas.lay(piece))

    def _put_beside(self, piece: Piece) -> None:
        at = 0
        while at < piece.num_envs:
            if self._beside is None:
                self._beside, self._filled = self._unused(piece), 0
            n = min(piece.num_envs - at, self._beside.num_envs - self._filled)
            write_columns(self._beside, self._filled, _columns(piece, at, at + n))
            at, self._filled = at + n, self._filled + n
            if self._filled == self._beside.num_envs:
                self._ready.append(self._beside)
                self._beside = None

    def _unused(self, like: Piece) -> Piece:
        """One that was learnt from is written over: memory that is asked for anew costs more than the copy."""
        in_use, games = [id(piece) for piece in (*self._ready, self._last)], self.games or like.num_envs
        for piece in self._made:
            if id(piece) not in in_use and piece.num_envs == games:
                return piece
        self._made.append(wider(like, games))
        return self._made[-1]

    def room(self) -> bool:
        return len(self._ready) < 2

    def next(self, clock: Any, timeout: float = 0.0) -> Batch | None:
        if not self._ready:
            return None
        piece = self._last = self._ready.popleft()
        rows = int(piece.valid.sum())
        if self._files is not None:
            demos = self._files.draw(max(1, round(rows * self._share / (1.0 - self._share))))
            piece = replace(piece, demos=demos)
        return Batch(piece, rows)

    def forget(self) -> None:
        self._ready.clear()
        self._beside = None
        if self._canvas is not None:
            self._canvas.clear()

    def _waiting(self) -> dict[str, list[Piece]]:
        """What is not learnt from yet. No row of it is followed by what comes next, so that it holds whatever becomes
        of the games."""
        beside = [] if self._beside is None else [_columns(self._beside, 0, self._filled)]
        canvas = [] if self._canvas is None or not self._canvas.filled else [self._canvas.piece]
        return {"ready": list(self._ready), "beside": beside, "canvas": canvas}

    def change_rewards(self, change: Callable[[np.ndarray], np.ndarray]) -> None:
        for pieces in self._waiting().values():
            for piece in pieces:
                piece.reward[...] = change(piece.reward)

    def leave_out(self, largest: float) -> int:
        """Rows that wait are one batch with others: where one of them is not to be learnt from, all that waits goes."""
        pieces = [piece for pieces in self._waiting().values() for piece in pieces]
        if all(_is_sound(piece, largest) for piece in pieces):
            return 0
        self.forget()
        return sum(int(np.count_nonzero(piece.valid)) for piece in pieces)

    def get_state(self, directory: Path | None) -> dict[str, Any]:
        waiting = self._waiting()
        arrays: dict[str, Any] = {}
        json: dict[str, Any] = {}
        if self._files is not None:
            files = self._files.get_state(None)
            arrays["files"], json["files"] = files["arrays"], files["json"]
        if not any(waiting.values()):
            return {"arrays": arrays, "json": json}
        canvas = None if not waiting["canvas"] or self._canvas is None else self._canvas.at
        wide = 0 if self._beside is None else self._beside.num_envs
        json |= {"wide": wide, "at": canvas, "pieces": {k: [facts_of(p) for p in v] for k, v in waiting.items()}}
        arrays |= {k: {str(i): arrays_of(piece) for i, piece in enumerate(v)} for k, v in waiting.items()}
        return {"arrays": arrays, "json": json}

    def set_state(self, state: Mapping[str, Any], directory: Path | None) -> bool:
        self.forget()
        if self._files is not None and "files" in state["json"]:
            self._files.set_state({"arrays": state["arrays"]["files"], "json": state["json"]["files"]}, None)
        about = state["json"].get("pieces")
        if not about:
            return True
        found = {
            k: [Piece(**state["arrays"][k][str(i)], **one).check() for i, one in enumerate(v)] for k, v in about.items()
        }
        self._ready.extend(found["ready"])
        if found["beside"]:
            mine = found["beside"][0]
            self._beside, self._filled = wider(mine, int(state["json"]["wide"])), mine.num_envs
            write_columns(self._beside, 0, mine)
        if found["canvas"]:
            piece = found["canvas"][0]
            self._canvas = _Canvas(piece, piece.length, piece.num_envs)
            self._canvas.piece, self._canvas.at = piece, (int(x) for x in state["json"]["at"])
        return True

    def wait_reason(self) -> str:
        if self._canvas is None:
            return "no game has sent a row to learn from yet"
        c = self._canvas
        return f"{c.filled:,} of {c.length * c.columns:,} rows of the next rollout have come{self._by}"

    @property
    def _by(self) -> str:
        return f" ({self.sized_by} sets how many)" if self.sized_by else ""

    def when_due(self) -> str:
        assert self.piece_length is not None
        return f"whenever {self.piece_length * (self.columns or 1):,} rows have come{self._by}"

    def newest_obs(self, rows: int) -> NestedArray | None:
        if self._last is None:
            return None

        def newest(x: Any) -> np.ndarray:
            last = x.reshape(-1, *x.shape[2:])[-rows:]
            return last if isinstance(last, np.ndarray) else last.numpy(force=True)

        return tree.map(newest, self._last.obs)


def _columns(piece: Piece, start: int, end: int) -> Piece:
    """Games of a piece, as views."""
    names = [name for name in COLUMNS if getattr(piece, name) is not None]
    names += ["version"] if np.ndim(piece.version) else []
    views = {name: tree.map(lambda x: x[:, start:end], getattr(piece, name)) for name in names}
    return replace(piece, **views, on_device=None)


def _is_sound(piece: Piece, largest: float) -> bool:
    """Whether all its rows are finite, and no reward is beyond this size."""
    leaves = (x for name in COLUMNS if (value := getattr(piece, name)) is not None for x in tree.leaves(value))
    finite = all(np.isfinite(x).all() for x in map(on_host, leaves) if x.dtype.kind == "f")
    return finite and bool((np.abs(on_host(piece.reward)) <= largest).all())


class _Canvas:
    """A piece `[length, columns]` that is being filled, column after column."""

    def __init__(self, example: Piece, length: int, columns: int):
        self.length, self.columns = length, columns
        self._example = example.rows(0, 1)
        self.clear()

    def clear(self) -> None:
        self.piece, self._row, self._column = self._blank(), 0, 0

    @property
    def at(self) -> tuple[int, int]:
        """The row and the column where the next one goes."""
        return self._row, self._column

    @at.setter
    def at(self, place: Iterable[int]) -> None:
        self._row, self._column = place

    @property
    def filled(self) -> int:
        return self._column * self.length + self._row

    def _blank(self) -> Piece:
        def column(rows: int) -> Any:
            return lambda x: np.zeros((rows, self.columns, *x.shape[2:]), x.dtype)

        e, t = self._example, self.length
        return Piece(
            obs=tree.map(column(t + 1), e.obs),
            action=tree.map(column(t), e.action),
            reward=np.zeros((t, self.columns), np.float32),
            terminated=np.zeros((t, self.columns), bool),
            truncated=np.zeros((t, self.columns), bool),
            valid=np.zeros((t, self.columns), bool),
            first=np.zeros((t + 1, self.columns), bool),
            outputs=tree.map(column(t + 1), e.outputs),
            extras=tree.map(column(t), e.extras),
            state=None if e.state is None else tree.map(column(1), e.state),
            state_every=t if e.state is not None else 1,
            version=np.zeros((t, self.columns), np.int64),
            in_line=e.state is not None,
        )

    def lay(self, piece: Piece) -> Iterator[Piece]:
        """Add the columns of a piece; returns the canvases that are full now."""
        for b in range(piece.num_envs):
            at = 0
            while at < piece.length:
                # A column of T rows has T + 1 observations, so at its end the last observation needs no row of its own.
                n = min(piece.length - at, self.length - self._row)
                self._write(piece, b, at, n)
                at += n
                if not self.piece.in_line or at == piece.length or self._column == self.columns - 1:
                    self._truncate(n)
                self._row += n + 1
                if self._row >= self.length or piece.state is not None:
                    self._row, self._column = 0, self._column + 1
                if self._column == self.columns:
                    yield self.piece
                    self.clear()

    def _write(self, piece: Piece, b: int, at: int, n: int) -> None:
        mine, row, column = self.piece, self._row, self._column

        def put(to: Any, of: Any, rows: int) -> None:
            tree.map(lambda x, y: x.__setitem__((slice(row, row + rows), column), y[at : at + rows, b]), to, of)

        put(mine.obs, piece.obs, n + 1)
        put(mine.first, piece.first, n + 1)
        put(mine.outputs, piece.outputs, n + 1)
        for name in ("action", "reward", "terminated", "truncated", "valid", "extras"):
            put(getattr(mine, name), getattr(piece, name), n)
        version = np.asarray(piece.version)
        mine.version[row : row + n, column] = version if version.ndim == 0 else version[at : at + n, b]  # type: ignore[index]
        if row + n < self.length:
            mine.valid[row + n, column] = False
        if piece.state is not None:
            tree.map(lambda x, y: x.__setitem__((0, column), y[at // piece.state_every, b]), mine.state, piece.state)

    def _truncate(self, n: int) -> None:
        """The last n rows that were written have no successor."""
        mine, row, column = self.piece, self._row, self._column
        played = np.flatnonzero(mine.valid[row : row + n, column])  # rows that wait, or fill up, may be the last ones
        if len(played) and not mine.terminated[last := row + played[-1], column]:
            mine.truncated[last, column] = True
