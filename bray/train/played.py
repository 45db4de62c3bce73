"""What samplers have played, as a source of pieces: the part that is the same wherever they live."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from bray.act import Clock
from bray.data.experience import Counts
from bray.data.lanes import Lanes
from bray.data.piece import Piece, arrays_of, facts_of
from bray.envs.rewards import Moments
from bray.metrics.spent import WEIGHTS, Laps, WorkerTimes
from bray.train.callbacks import EpisodeMetrics
from bray.train.sampler import Played
from bray.train.source import Source


class Lag:
    """By how many versions the weights that acted were older than the newest ones, over the rows since the last row of
    numbers."""

    def __init__(self) -> None:
        self._total = self._rows = self._most = 0

    def see(self, piece: Piece, version: int) -> None:
        behind = version - np.broadcast_to(piece.version, piece.valid.shape)[piece.valid]
        self._total += int(behind.sum())
        self._rows += behind.size
        self._most = max(self._most, int(behind.max(initial=0)))

    def row(self) -> dict[str, float]:
        row = {"workers/policy_lag": self._total / max(1, self._rows), "workers/policy_lag_max": self._most}
        self._total = self._rows = self._most = 0
        return row


class PlayedSource(Source):
    """A source of what comes as `Played`, each with the number of its worker, from 0. `lanes`: of how many workers, for
    a replay whose rows are one step of all environments."""

    def __init__(self, lanes: int | None):
        self._lanes = None if lanes is None else Lanes(lanes)
        self._lag, self._clock = Lag(), Clock()
        self._came: list[tuple[int, Played]] = []
        self._laps, self._times = Laps(), WorkerTimes()
        self._metrics = EpisodeMetrics()
        self.returns = Moments()  # of all workers, where rewards are normalised

    def _keep(self, w: int, played: Played) -> None:
        self._came.append((w, played))
        if self._lanes is not None:  # here, so that one that dies next is cut behind it
            for piece in played.pieces:
                self._lanes.add(w, piece)

    def _pieces(self, came: list[tuple[int, Played]]) -> list[Piece]:
        pieces = [piece for _, played in came for piece in played.pieces]
        if self._lanes is None:
            return pieces
        for piece in pieces:  # a replay keeps them: what counts is how old they come
            self._lag.see(piece, self._clock.version)
        return self._lanes.take()

    def _count(self, came: list[tuple[int, Played]]) -> Counts:
        for w, played in came:
            self._times.add(w + 1, played.seconds)
            self._metrics.add(played.metrics)
            self.returns.add(played.returns)  # in the order of the workers: rounds repeat to the last bit
        steps = sum(played.counts.env_steps for _, played in came)
        agent_steps = sum(played.counts.agent_steps for _, played in came)
        # where nothing was due to be learnt from them nobody publishes, and time goes on all the same
        self._clock = self._clock._replace(env_steps=self._clock.env_steps + steps)
        return Counts(steps, tuple(e for _, p in came for e in p.counts.episodes), agent_steps=agent_steps)

    def learns(self, piece: Piece, version: int) -> None:
        if self._lanes is None:
            self._lag.see(piece, version)

    def seconds(self) -> dict[str, float]:
        spent = self._laps.take()
        weights = spent.get(WEIGHTS, 0.0)
        return {"transfer": spent.get("transfer", 0.0) + weights, WEIGHTS: weights, "idle": spent.get("idle", 0.0)}

    def numbers(self) -> dict[str, float]:
        return self._lag.row() | self._times.row() | self._metrics.row()


def data_of(played: Played) -> tuple[dict[str, Any], dict[str, Any]]:
    """What was played, as arrays and plain data."""
    return {str(i): arrays_of(piece) for i, piece in enumerate(played.pieces)}, {
        "pieces": [facts_of(piece) for piece in played.pieces],
        "env_steps": played.counts.env_steps,
        "episodes": [[float(return_), int(length)] for return_, length in played.counts.episodes],
        "metrics": played.metrics,
        "returns": played.returns.numbers,
    }


def played_of(arrays: Mapping[str, Any], about: Mapping[str, Any]) -> Played:
    """The inverse; pieces are checked for having columns of one size."""
    pieces = [Piece(**arrays[str(i)], **facts).check() for i, facts in enumerate(about["pieces"])]
    counts = Counts(int(about["env_steps"]), tuple((float(r), int(n)) for r, n in about["episodes"]))
    return Played(pieces, counts, {}, list(about["metrics"]), Moments.saved(about["returns"]))


def lent(played: Played) -> Played:
    """With pieces whose arrays their worker overwrites."""
    return played._replace(pieces=[replace(piece, lent=True) for piece in played.pieces])
