"""Rollout workers of games of several agents: what they are told of all policies, and whose piece is whose."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from bray.act import Clock
from bray.data.experience import Counts
from bray.data.piece import Piece, side_by_side
from bray.train.sampler import GamePlan, Played
from bray.train.side import Side
from bray.train.table import MatchNumbers
from bray.train.workers import Home, WorkerSource


class GameWorkers(WorkerSource):
    """Rollout workers that play games of several agents: in rounds, unless all who learn do so from what older weights
    did."""

    def __init__(
        self, plan: GamePlan, home: Home, sides: Mapping[str, Side], told: Callable[[], Any], asynchronous: bool
    ):
        """told: what workers are told of all sides"""
        self._numbers, self._sides, self._told = MatchNumbers(), sides, told
        super().__init__(plan, home, told, asynchronous)

    def publish(self, side: str, weights: Any, clock: Clock) -> None:
        super().publish(side, self._told, clock)

    def _pieces(self, came: list[tuple[int, Played]]) -> list[Piece]:
        """In rounds, a side's pieces side by side where its seats were level in all workers, as in one process."""
        out: list[Piece] = []
        for name in self._sides:
            mine = [piece for _, played in came for piece in played.pieces if piece.side == name]
            if not self.asynchronous and mine and all(piece.stream is None for piece in mine):
                out.append(side_by_side(mine))
            else:
                out += [piece if piece.stream is not None or self.asynchronous else _apart(piece) for piece in mine]
        return out

    def _count(self, came: list[tuple[int, Played]]) -> Counts:
        for _, played in came:
            self._numbers.add(played.matches)
        return super()._count(came)

    def numbers(self) -> dict[str, float]:
        return super().numbers() | self._numbers.row()

    def get_state(self, midway: bool = False) -> dict[str, Any]:
        state = super().get_state(midway)
        state["json"]["matches"] = self._numbers.get_state()
        return state

    def set_state(self, state: dict[str, Any], clock: Clock) -> bool:
        self._numbers.set_state(state["json"].get("matches", "{}"))
        return super().set_state(state, clock)


def weights_of(sides: Mapping[str, Side]) -> dict[str, np.ndarray]:
    """Of all sides, as `GameSampler.play` reads them."""
    out: dict[str, np.ndarray] = {}
    for name, side in sides.items():
        out |= {f"{name}/{k}": x for k, x in side.weights_now().items()}
    return out | versions_of(sides)


def versions_of(sides: Mapping[str, Side]) -> dict[str, np.ndarray]:
    """As `weights_of`, where workers have no Models."""
    return {f"{name}/": np.array(side.version, np.int64) for name, side in sides.items()}


def _apart(piece: Piece) -> Piece:
    """Columns that are level here, where they are not in another worker: each of a game by itself."""
    return dataclasses.replace(piece, stream=np.arange(piece.num_envs))
