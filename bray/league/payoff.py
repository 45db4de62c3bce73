"""Who wins against whom: counts of each pair that has met, in which newer games weigh more."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from itertools import repeat
from typing import NamedTuple

import numpy as np

WIN, DRAW, LOSS = 1, 0, -1


class Record(NamedTuple):
    """Of one player against another. Wins, draws and losses weigh less with each game that they have since played."""

    wins: float
    draws: float
    losses: float
    games: int


class Payoff:
    """Players are numbers. Only pairs that have met take memory: some 300 bytes each."""

    def __init__(self, decay: float = 0.99, min_games: int = 8):
        """decay: of what a game counts, with each later one of the same two. min_games: below so many games nothing is
        known, and each wins half of them."""
        self.decay, self.min_games = decay, min_games
        self._pairs: dict[int, dict[int, int]] = {}  # of each player, with whom: the number of the pair
        self._counts = array("d")  # of each pair: won by the player of the lower number, drawn, won by the other
        self._games = array("q")

    def add(self, a: int, b: int, outcome: int) -> None:
        """A game of two; the outcome is a's."""
        if b < a:
            a, b, outcome = b, a, -outcome
        pairs = self._pairs.setdefault(a, {})
        pair = pairs.get(b)
        counts, decay = self._counts, self.decay
        if pair is None:
            pair = pairs[b] = self._pairs.setdefault(b, {})[a] = len(self._games)
            counts.extend((0.0, 0.0, 0.0))
            self._games.append(0)
        at = 3 * pair
        counts[at] *= decay
        counts[at + 1] *= decay
        counts[at + 2] *= decay
        counts[at + 1 - outcome] += 1.0
        self._games[pair] += 1

    def record(self, a: int, b: int) -> Record:
        pair = self._pairs.get(a, {}).get(b)
        if pair is None:
            return Record(0.0, 0.0, 0.0, 0)
        first, drawn, second = self._counts[3 * pair : 3 * pair + 3]
        won, lost = (first, second) if a < b else (second, first)
        return Record(won, drawn, lost, self._games[pair])

    def win_rates(self, a: int, others: Sequence[int]) -> np.ndarray:
        """How often `a` wins against each of the others, a draw being half a win."""
        pairs = self._pairs.get(a)
        if not pairs or not others:
            return np.full(len(others), 0.5)
        found = np.fromiter(map(pairs.get, others, repeat(-1)), np.int64, len(others))
        counts = np.frombuffer(self._counts).reshape(-1, 3)[found]
        games = np.frombuffer(self._games, np.int64)[found]
        won = np.where(np.asarray(others) > a, counts[:, 0], counts[:, 2])
        known = (found >= 0) & (games >= self.min_games)
        return np.where(known, (won + 0.5 * counts[:, 1]) / np.maximum(counts.sum(1), 1e-300), 0.5)

    def win_rate(self, a: int, b: int) -> float:
        return float(self.win_rates(a, [b])[0])

    @property
    def pairs(self) -> int:
        """How many have met."""
        return len(self._games)
