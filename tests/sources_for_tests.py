"""Pieces and sources whose right answers are known. Tests of other parts may import them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import numpy as np

from bray import tree
from bray.act import Clock
from bray.data import Counts, EndOfData, Piece
from bray.train.source import Source


def make_piece(
    rng: np.random.Generator,
    length: int,
    stream: int | None = 0,
    *,
    start: int = 0,
    version: int = 0,
    ends: tuple[int, ...] = (),
    waits: tuple[int, ...] = (),
    state_every: int | None = None,
    actions: int = 4,
) -> Piece:
    """Rows of one game; observations are [stream, tick, noise]. At rows `ends` an episode ends (every other one by
    truncation) and the row after is dead; in rows `waits` nothing has come yet. States are [stream, tick]."""

    def column(x: Any, dtype: Any = np.float32) -> np.ndarray:
        return np.asarray(x, dtype)[:, None]

    tick = start + np.arange(length + 1)
    game = np.full(length + 1, -1 if stream is None else stream)
    valid, first = np.ones(length, bool), np.zeros(length + 1, bool)
    terminated, truncated = np.zeros(length, bool), np.zeros(length, bool)
    first[0] = start == 0
    for i, row in enumerate(ends):
        (truncated if i % 2 else terminated)[row] = True
        valid[row + 1 : row + 2] = False
        first[row + 2 : row + 3] = True
    valid[list(waits)] = False
    state = None
    if state_every is not None:
        state = np.stack([game, tick], -1).astype(np.float32)[:length:state_every, None]
    return Piece(
        obs=column(np.stack([game, tick, rng.normal(size=length + 1)], -1)),
        action=column(rng.integers(0, actions, length), np.int64),
        reward=column(np.where(valid, rng.normal(size=length), 0.0)),
        terminated=column(terminated, bool),
        truncated=column(truncated, bool),
        valid=column(valid, bool),
        first=column(first, bool),
        outputs={"value": column(rng.normal(size=length + 1))},
        extras={"logp": column(-rng.random(length) - 0.1)},
        state=state,
        state_every=state_every or 1,
        version=version,
        stream=None if stream is None else np.array([stream]),
        start=start,
    ).check()


def side_by_side(*pieces: Piece) -> Piece:
    """Pieces of one game each as one piece of several."""
    names = ("obs", "action", "reward", "terminated", "truncated", "valid", "first", "outputs", "extras")
    columns = {k: tree.concat([getattr(p, k) for p in pieces], 1) for k in names}
    state = None if pieces[0].state is None else tree.concat([p.state for p in pieces], 1)
    streams = None if pieces[0].stream is None else np.concatenate([p.stream for p in pieces])
    return replace(pieces[0], **columns, state=state, stream=streams).check()


def count(piece: Piece) -> Counts:
    """What a worker says of these rows."""
    ends = np.flatnonzero((piece.terminated | piece.truncated)[:, 0])
    return Counts(int(piece.valid.sum()), tuple((float(i), int(i) + 1) for i in ends))


class Workers(Source):
    """Games elsewhere: what they send comes late, in any order, made by old weights, or is lost on the way. Counts
    always arrive."""

    def __init__(self, deliveries: Iterable[tuple[list[Piece], Counts]]):
        self.deliveries = list(deliveries)
        self.published: list[Clock] = []
        self.closed = 0

    def gather(self, timeout: float = 0.0) -> tuple[list[Piece], Counts]:
        if not self.deliveries:
            raise EndOfData("all workers have gone")
        return self.deliveries.pop(0)

    def publish(self, side: str, weights: Any, clock: Clock) -> None:
        self.published.append(clock)

    def close(self) -> None:
        self.closed += 1
