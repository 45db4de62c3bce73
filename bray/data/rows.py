"""Pieces as samples of a Buffer, and back.

A piece of one game with T rows becomes T + 1 samples: its rows, then its last observation as a dead row with `joint`
set. Rows of many games lie one after the other, batches may cut them anywhere, and the oldest may be dropped: where
stream or tick jump, a new piece begins. For a Model with memory a sample is a whole sequence of `state_every` rows,
padded, with the state that it begins with; `joint` marks a piece's last sequence.

Counts travel in the samples: `origin` names the process that counted and `steps` is its total so far, so that what is
dropped is still counted.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from bray import tree
from bray.data.experience import Counts
from bray.data.piece import Piece, unroll

_ONE_MORE = ("obs", "first", "outputs")  # columns of T + 1 rows
_ROWS = ("action", "reward", "terminated", "truncated", "valid", "extras", "version")


def to_samples(piece: Piece, origin: int, steps: int, episodes: tuple[tuple[float, int], ...]) -> dict[str, Any]:
    """A piece of one game as a tree `[N, ...]` of samples. `steps` and `episodes`: see `Counts`; `steps` is a running
    total."""
    assert piece.num_envs == 1
    assert piece.stream is not None
    samples = _sequences(piece) if piece.state is not None else _row_by_row(piece)
    n = len(samples["reward"])
    ended = np.full((samples["reward"].size, 2), np.nan)  # a row ends one at most, and a sequence holds many rows
    for i, episode in enumerate(episodes):
        ended[i] = episode
    ended = ended.reshape(*samples["reward"].shape, 2)
    return samples | {"origin": np.full(n, origin), "steps": np.full(n, steps), "ended": ended}


def _columns(piece: Piece) -> dict[str, Any]:
    version = np.full(piece.reward.shape, piece.version) if isinstance(piece.version, int) else piece.version
    return {name: getattr(piece, name) for name in (*_ONE_MORE, *_ROWS) if name != "version"} | {"version": version}


def _row_by_row(piece: Piece) -> dict[str, Any]:
    n = piece.length + 1

    def one_more(x: np.ndarray) -> np.ndarray:
        out = np.empty((n, *x.shape[2:]), x.dtype)
        out[:-1] = x[:, 0]
        out[-1] = x[-1, 0]
        return out

    columns = _columns(piece)
    samples = {name: tree.map(lambda x: x[:, 0], columns[name]) for name in _ONE_MORE}
    samples |= {name: tree.map(one_more, columns[name]) for name in _ROWS}
    for name in ("terminated", "truncated", "valid"):
        samples[name][-1] = False
    joint = np.zeros(n, bool)
    joint[-1] = True
    stream, start = int(piece.stream[0]), int(np.max(piece.start))  # type: ignore[index]
    return samples | {"joint": joint, "stream": np.full(n, stream), "tick": start + np.arange(n)}


def _sequences(piece: Piece) -> dict[str, Any]:
    length = piece.state_every
    parts = []
    for part in unroll(piece, length, "null_padding"):
        sample = {name: tree.map(lambda x: x[None, :, 0], column) for name, column in _columns(part).items()}
        sample["state"] = tree.map(lambda x: x[None, 0, 0], part.state)
        parts.append(sample)
    n = len(parts)
    stream, start = int(piece.stream[0]), int(np.max(piece.start))  # type: ignore[index]
    marks = {"joint": np.arange(n) == n - 1, "stream": np.full(n, stream), "tick": start + length * np.arange(n)}
    samples: dict[str, Any] = tree.concat(parts)
    return samples | marks


class Decoder:
    """Batches of samples -> pieces and counts. What a batch ends in the middle of waits for the next batch."""

    def __init__(self) -> None:
        self._rest: dict[str, Any] | None = None
        self.steps: dict[int, int] = {}
        """What each process has counted so far."""

    def decode(self, samples: dict[str, Any]) -> tuple[list[Piece], Counts]:
        counts = self._count(samples)
        if self._rest is not None:
            samples, self._rest = tree.concat([self._rest, samples]), None
        return list(self._pieces(samples)), counts

    def _count(self, samples: dict[str, Any]) -> Counts:
        new = 0
        origins, steps = samples["origin"], samples["steps"]
        for origin in np.unique(origins).tolist():
            latest = int(steps[origins == origin].max())
            new += max(0, latest - self.steps.get(origin, 0))
            self.steps[origin] = max(latest, self.steps.get(origin, 0))
        ended = samples["ended"].reshape(-1, 2)
        whole = ended[~np.isnan(ended[:, 0])]
        return Counts(new, tuple((float(r), int(n)) for r, n in whole))

    def _pieces(self, samples: dict[str, Any]) -> Iterator[Piece]:
        stream, tick, joint = samples["stream"], samples["tick"], samples["joint"]
        memory = "state" in samples
        ticks = samples["reward"].shape[1] if memory else 1  # of a sample
        follows = ~joint[:-1] & (stream[1:] == stream[:-1]) & (tick[1:] == tick[:-1] + ticks)
        ends = np.append(np.flatnonzero(~follows), len(stream) - 1)
        start = 0
        for end in ends.tolist():
            if end == len(stream) - 1 and not joint[end]:
                self._rest = tree.map(lambda x, start=start: np.array(x[start:]), samples)
                return
            if memory:
                yield _from_sequences(tree.index(samples, slice(start, end + 1)))
            elif end > start:
                yield _from_rows(samples, start, end)
            start = end + 1


def _from_rows(samples: dict[str, Any], start: int, end: int) -> Piece:
    """Rows [start, end); row `end` is the observation that they bootstrap from."""

    def cut(name: str, stop: int) -> Any:
        return tree.map(lambda x: x[start:stop, None], samples[name])

    columns = {name: cut(name, end + 1) for name in _ONE_MORE} | {name: cut(name, end) for name in _ROWS}
    return Piece(**columns, stream=samples["stream"][start : start + 1], start=int(samples["tick"][start]))


def _from_sequences(samples: dict[str, Any]) -> Piece:
    """Sequences `[S, L, ...]` that follow each other as one piece `[S * L, 1]`."""
    length = samples["reward"].shape[1]

    def rows(x: np.ndarray) -> np.ndarray:
        return x[:, :length].reshape(-1, 1, *x.shape[2:])

    def one_more(x: np.ndarray) -> np.ndarray:
        return np.concatenate([rows(x), x[-1:, -1:]])

    columns = {name: tree.map(one_more, samples[name]) for name in _ONE_MORE}
    columns |= {name: tree.map(rows, samples[name]) for name in _ROWS}
    state = tree.map(lambda x: x[:, None], samples["state"])
    stream, start = samples["stream"][:1], int(samples["tick"][0])
    return Piece(**columns, state=state, state_every=length, stream=stream, start=start)
