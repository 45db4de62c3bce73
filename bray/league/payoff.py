"""Who wins against whom: counts of each pair that has met, in which newer games weigh more."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

WIN, DRAW, LOSS = 1, 0, -1
_NEVER = 1 << 62


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
        # Of each player, by the other one: the number of their pair, or where the other one is its first, ~number.
        self._pairs: dict[int, dict[int, int]] = {}
        self._rows: dict[int, np.ndarray] = {}
        """The same of who has asked for its win rates, to look up thousands at once; _NEVER: not met."""
        self._counts = array("d")  # of each pair: won by the first, drawn, lost by the first
        self._games = array("q")

    def add(self, a: int, b: int, outcome: int) -> None:
        """A game of two; the outcome is a's."""
        pairs = self._pairs.get(a)
        if pairs is None:
            pairs = self._pairs[a] = {}
        pair = pairs.get(b)
        counts = self._counts
        if pair is None:
            pairs[b] = pair = len(self._games)
            self._pairs.setdefault(b, {})[a] = ~pair
            for one, other, number in ((a, b, pair), (b, a, ~pair)):
                if (row := self._rows.get(one)) is not None and other < len(row):
                    row[other] = number
            counts.extend((0.0, 0.0, 0.0))
            self._games.append(0)
        elif pair < 0:
            pair, outcome = ~pair, -outcome
        at, decay = 3 * pair, self.decay
        counts[at] *= decay
        counts[at + 1] *= decay
        counts[at + 2] *= decay
        counts[at + 1 - outcome] += 1.0
        self._games[pair] += 1

    def record(self, a: int, b: int) -> Record:
        pair = self._pairs.get(a, {}).get(b)
        if pair is None:
            return Record(0.0, 0.0, 0.0, 0)
        number = pair if pair >= 0 else ~pair
        won, drawn, lost = self._counts[3 * number : 3 * number + 3]
        return (
            Record(won, drawn, lost, self._games[number])
            if pair >= 0
            else Record(lost, drawn, won, self._games[number])
        )

    def win_rates(self, a: int, others: Sequence[int]) -> np.ndarray:
        """How often `a` wins against each of the others, a draw being half a win."""
        rates, pairs = np.full(len(others), 0.5), self._pairs.get(a)
        if not pairs or not len(others):
            return rates
        of, row = np.asarray(others), self._rows.get(a)
        if row is None or len(row) <= of.max():
            met = np.fromiter(pairs, np.int64, len(pairs))
            row = self._rows[a] = np.full(2 * (max(of.max(), met.max()) + 1), _NEVER)
            row[met] = np.fromiter(pairs.values(), np.int64, len(pairs))
        found = row[of]
        met = np.flatnonzero(found != _NEVER)
        swapped = found[met] < 0
        pair = np.where(swapped, ~found[met], found[met])
        counts = np.frombuffer(self._counts).reshape(-1, 3)[pair]
        rate = (counts[:, 0] + 0.5 * counts[:, 1]) / counts.sum(1)
        known = np.frombuffer(self._games, np.int64)[pair] >= self.min_games
        rates[met[known]] = np.where(swapped, 1.0 - rate, rate)[known]
        return rates

    def win_rate(self, a: int, b: int) -> float:
        return float(self.win_rates(a, [b])[0])

    def games(self, a: int) -> int:
        """All that it has played."""
        return sum(self._games[pair if pair >= 0 else ~pair] for pair in self._pairs.get(a, {}).values())

    @property
    def pairs(self) -> int:
        """How many have met."""
        return len(self._games)
