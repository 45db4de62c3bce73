"""Piece: the columns of a stretch of trajectory, the same whether an environment in this process, a worker, a live game
or a file brought it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from bray import tree
from bray.data.flags import TERMINATED, TRUNCATED, VALID
from bray.errors import ConfigError, DataError, UnknownName
from bray.tree import NestedArray

DEFAULT = "default"
"""The side of a run with one policy."""
_LAST = ("drop", "last", "null_padding")


@dataclass
class Piece:
    """T rows of B games, time first, as arrays; as tensors where environments play on the device that learns. Rows
    follow the autoreset rule of `bray/envs/vector.py`: where `valid[t]`, the successor of row t is row t + 1, which is
    why observations and outputs have one row more than actions."""

    obs: NestedArray
    """`[T + 1, B, ...]`"""
    action: NestedArray
    """`[T, B, ...]`, as the learner wants them."""
    reward: np.ndarray
    """`[T, B]` float32, clipped or normalised where that is asked for."""
    terminated: np.ndarray
    """`[T, B]` bool: the episode ended and there is no future."""
    truncated: np.ndarray
    """`[T, B]` bool: the episode was cut and its future is not seen."""
    valid: np.ndarray
    """`[T, B]` bool: False for dead rows and for rows that wait, which have no weight anywhere."""
    first: np.ndarray
    """`[T + 1, B]` bool: an episode starts here; recurrent state is zeroed before it."""
    outputs: NestedArray = field(default_factory=dict)
    """`[T + 1, B, ...]`: what the Policy keeps of the Model's outputs, such as `value`."""
    extras: dict[str, NestedArray] = field(default_factory=dict)
    """`[T, B, ...]`: what the Policy decided beside the action, such as `logp`."""
    state: NestedArray | None = None
    """`[ceil(T / state_every), B, ...]`: what a Model with memory knew before rows 0, state_every, 2 state_every,
    ..."""
    state_every: int = 1
    version: int | np.ndarray = 0
    """Of the weights that acted: one number, or `[T, B]` where they changed on the way."""
    stream: np.ndarray | None = None
    """`[B]`: which game each column is of; None = environment b of this process."""
    start: int | np.ndarray = 0
    """The tick (`[B]`, or one for all) of row 0. Pieces of a stream that follow each other have no gap."""
    in_line: bool = False
    """Whether column b + 1 goes on where column b ends, unless the last valid row of column b ends an episode or is
    truncated."""
    side: str = DEFAULT
    """Whose policy acted."""
    lent: bool = False
    """Whether its source may overwrite its arrays at the next `gather`. Whoever keeps such a piece copies it."""
    on_device: tuple[NestedArray, Any] | None = None
    """`obs`, and the same as a tensor on the GPU, where the Model that acted has been given them there: a Learner need
    not copy them again."""

    demos: dict[str, NestedArray] | None = None
    """Transitions of files that are learnt from beside it, as those of a Dataset."""

    @property
    def seen(self) -> NestedArray:
        """`obs`, on the GPU where they are there already: not where others have taken their place."""
        obs, there = self.on_device or (None, None)
        return there if obs is self.obs else self.obs

    @property
    def length(self) -> int:
        return len(self.reward)

    @property
    def num_envs(self) -> int:
        games: int = self.reward.shape[1]
        return games

    def check(self) -> Piece:
        """Raise DataError unless all columns have the same T and B; returns itself."""
        if np.ndim(self.reward) != 2:
            raise DataError(f"a piece's reward is [T, B], got shape {np.shape(self.reward)}")
        t, b = self.reward.shape
        for name, rows in _ROWS.items():
            for path, leaf in tree.paths(getattr(self, name), name):
                if np.shape(leaf)[:2] != (t + rows, b):
                    raise DataError(
                        f"piece column {path!r}: expected shape ({t + rows}, {b}, ...), got {np.shape(leaf)}"
                    )
        known = -(-t // self.state_every)
        for path, leaf in tree.paths(self.state, "state") if self.state is not None else ():
            if np.shape(leaf)[:2] != (known, b):
                raise DataError(f"piece column {path!r}: expected shape ({known}, {b}, ...), got {np.shape(leaf)}")
        return self

    def rows(self, start: int, end: int) -> Piece:
        """Rows [start, end) as views."""
        if not 0 <= start < end <= self.length:
            raise DataError(
                f"a piece of a trajectory of {self.length} rows is 0 <= start < end <= {self.length}, got {start}, "
                f"{end}"
            )
        state = self.state
        if state is not None:
            if start % self.state_every:
                raise ConfigError(
                    f"a piece of a Model with memory is cut where its state is known, every {self.state_every} rows; "
                    f"got row {start}"
                )
            state = tree.index(state, slice(start // self.state_every, -(-end // self.state_every)))
        cut = {name: tree.index(getattr(self, name), slice(start, end + rows)) for name, rows in _ROWS.items()}
        version = self.version if np.ndim(self.version) == 0 else np.asarray(self.version)[start:end]
        return replace(self, **cut, state=state, version=version, start=self.start + start, on_device=None)


def oldest(version: int | np.ndarray) -> int:
    """Of the weights that acted in a piece."""
    return version if isinstance(version, int) else int(np.min(version))


def side_by_side(pieces: Sequence[Piece]) -> Piece:
    """The columns of several pieces of as many rows, copied."""
    first = pieces[0]
    columns = {
        name: tree.map(lambda *parts: np.concatenate(parts, 1), *(getattr(piece, name) for piece in pieces))
        for name in COLUMNS
        if getattr(first, name) is not None
    }
    version: Any = first.version
    if any(np.ndim(piece.version) or piece.version != version for piece in pieces):
        version = np.concatenate([np.broadcast_to(piece.version, piece.reward.shape) for piece in pieces], 1)
    return replace(first, **columns, version=version, lent=False, on_device=None)


def wider(piece: Piece, columns: int) -> Piece:
    """An uninitialised piece like this one, but with `columns` games."""

    def column(x: np.ndarray) -> np.ndarray:
        return np.empty((len(x), columns, *x.shape[2:]), x.dtype)

    made = {name: tree.map(column, value) for name in COLUMNS if (value := getattr(piece, name)) is not None}
    version = np.empty((piece.length, columns), np.int64)
    return replace(piece, **made, version=version, lent=False, on_device=None)


def write_columns(to: Piece, start: int, piece: Piece) -> None:
    """Copy a piece to the columns of another one, from `start` on."""
    mine = (slice(None), slice(start, start + piece.num_envs))
    for name in COLUMNS:
        if (value := getattr(piece, name)) is not None:
            tree.map(lambda x, y: x.__setitem__(mine, y), getattr(to, name), value)
    to.version[mine] = piece.version  # type: ignore[index]


_ROWS = {
    "obs": 1,
    "action": 0,
    "reward": 0,
    "terminated": 0,
    "truncated": 0,
    "valid": 0,
    "first": 1,
    "outputs": 1,
    "extras": 0,
}  # rows of a column beyond T
COLUMNS = (*_ROWS, "state")
"""The arrays of a piece."""


def arrays_of(piece: Piece) -> dict[str, Any]:
    """The columns of a piece, copied: with `facts_of` they are what `Piece` is made of again."""
    columns = {name: value for name in (*COLUMNS, "version") if (value := getattr(piece, name)) is not None}
    return {k: v if isinstance(v, int) else tree.map(lambda x: on_host(x).copy(), v) for k, v in columns.items()}


def facts_of(piece: Piece) -> dict[str, Any]:
    return {"state_every": piece.state_every, "in_line": piece.in_line, "side": piece.side}


def on_host(x: Any) -> np.ndarray:
    return x if isinstance(x, np.ndarray) else np.asarray(x.numpy(force=True))


def unroll(piece: Piece, length: int, last: str = "drop") -> list[Piece]:
    """Cut into pieces of `length` rows. What remains at the end is left out (`drop`), covered by a piece of the last
    `length` rows that overlaps the one before (`last`), or filled up with null rows: zeros, and `valid` False
    (`null_padding`).
    A trajectory shorter than `length` has no last `length` rows, so `last` pads it. 10 rows of 4: 2, 3 and 3 pieces."""
    if last not in _LAST:
        raise UnknownName("way to treat the last piece", last, _LAST)
    if length < 1:
        raise ConfigError(f"pieces have at least 1 row, got {length}")
    total = piece.length
    whole = total // length
    pieces = [piece.rows(i * length, (i + 1) * length) for i in range(whole)]
    rest = total - whole * length
    if rest and last == "last" and whole:
        pieces.append(piece.rows(total - length, total))
    elif rest and last != "drop":
        pieces.append(_pad(piece.rows(total - rest, total), length))
    return pieces


def nstep(piece: Piece, n: int, gamma: float) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """For each row, `[T, B]`: the discounted sum of m <= n rewards, gamma**m (0 where the last one terminated), and the
    row to bootstrap from. Windows end with the episode or with the trajectory, as those of a `ReplayRing` end with the
    newest row. Dead rows have sum 0, discount 1 and themselves as bootstrap; `valid` weighs them out."""
    from bray.data.windows import nstep_windows

    if n < 1:
        raise ConfigError(f"n-step returns sum at least 1 reward, got n = {n}")
    t, b = piece.reward.shape
    if n == 1:
        total = np.where(piece.valid, piece.reward, np.float32(0.0)).astype(np.float32, copy=False)
        discount = np.where(piece.terminated, np.float32(0.0), np.float32(gamma))
        return total, np.where(piece.valid, discount, np.float32(1.0)), np.arange(t)[:, None] + piece.valid
    flags = piece.terminated * TERMINATED + piece.truncated * TRUNCATED + piece.valid * VALID
    flat = np.append(
        flags.astype(np.uint8).reshape(-1), np.zeros(b, np.uint8)
    )  # the row after the last is never summed
    reward = np.append(np.asarray(piece.reward, np.float32).reshape(-1), np.zeros(b, np.float32))
    total, discount, after = nstep_windows(reward, flat, np.arange(t * b), t * b, b, n, gamma)
    return total.reshape(t, b), discount.reshape(t, b), (after // b).reshape(t, b)


def nstep_td_errors(piece: Piece, chosen: np.ndarray, value: np.ndarray, n: int, gamma: float) -> np.ndarray:
    """The n-step TD error of each row, `[T, B]` float32: with the value of the action that was chosen `[T, B]` and of
    each observation `[T + 1, B]`, as they were when it was played. 0 for dead rows; windows as in `nstep`."""
    total, discount, after = nstep(piece, n, gamma)
    future = np.where(discount > 0.0, discount * np.take_along_axis(value, after, 0), np.float32(0.0))
    return np.where(piece.valid, total + future - chosen, np.float32(0.0)).astype(np.float32)


def _pad(piece: Piece, length: int) -> Piece:
    missing = length - piece.length

    def grow(x: Any, missing: int = missing) -> np.ndarray:
        x = np.asarray(x)
        return np.concatenate([x, np.zeros((missing, *x.shape[1:]), x.dtype)])

    version = piece.version if np.ndim(piece.version) == 0 else grow(piece.version)
    state, every = piece.state, piece.state_every
    if state is not None:
        known = -(-length // every) - -(-piece.length // every)
        state = tree.map(lambda x: grow(x, known), state)
    columns = {name: tree.map(grow, getattr(piece, name)) for name in _ROWS}
    return replace(piece, **columns, state=state, version=version, on_device=None)
