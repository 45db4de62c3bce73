"""Opponents for board games, and how often one loses to them."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from bray.act import GREEDY
from bray.experiment import Experiment
from bray.train.games import play_two
from bray.train.opponents import load_opponent
from bray.train.table import outcome

GAMES = 1_000
_LINES = [0b111, 0b111000, 0b111000000, 0b1001001, 0b10010010, 0b100100100, 0b100010001, 0b1010100]


@functools.cache
def _best(mine: int, theirs: int) -> tuple[int, tuple[int, ...]]:
    """Of tic-tac-toe, with a bit for each stone: the outcome for who moves, and the moves that lead to it."""
    if any(theirs & line == line for line in _LINES):
        return -1, ()
    free = [cell for cell in range(9) if not (mine | theirs) >> cell & 1]
    if not free:
        return 0, ()
    found = {cell: -_best(theirs, mine | 1 << cell)[0] for cell in free}
    top = max(found.values())
    return top, tuple(cell for cell, value in found.items() if value == top)


def perfect_tic_tac_toe(obs: Any, rng: np.random.Generator) -> int:
    """Draws among the optimal moves; it sees the planes of `openspiel:tic_tac_toe`: empty, second, first."""
    _, second, first = (sum(1 << int(cell) for cell in np.flatnonzero(plane)) for plane in obs["obs"])
    mine, theirs = (first, second) if first.bit_count() == second.bit_count() else (second, first)
    return int(rng.choice(_best(mine, theirs)[1]))


def minus_losses(exp: Experiment) -> float:
    """Of a thousand games of tic-tac-toe against an opponent who draws among the optimal moves; seats alternate."""
    spec = exp.spec_of()
    (mine,), (side,) = exp.players(spec).values(), spec.sides.values()
    other = load_opponent("benchmarks.learning.boards:perfect_tic_tac_toe", side.spec)
    played = play_two(mine, other, exp.config["env"], spec.agents, GAMES, mode=GREEDY)
    return -float(sum(outcome(match, (agent,)) < 0 for match, agent in played))
