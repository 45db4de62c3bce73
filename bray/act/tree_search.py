"""Monte-Carlo tree search over many games at once.

A tree is of one game; an edge is an action at a position that the tree holds. Trees lie side by side in arrays
`[games, nodes, actions]`, so that one compiled pass goes down all of them, and the positions at which they arrive are
evaluated together. A *position* is anything with

    mover           who decides there
    mask            bool[actions], what is legal
    after(action)   (the reward of who moves, the next position; None where the game is over)

Values are of who decides: a value goes up a tree with its sign changed wherever somebody else does. So the games are
those in which one side wins what the other loses, or of one player.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Any, NamedTuple

import numpy as np

from bray.compiled import compiled

NOT_TRIED, GAME_OVER = -1, -2
"""What is behind an edge, where that is no node."""

Evaluated = tuple[np.ndarray, np.ndarray]
"""Of positions: prior `[n, actions]` (0 where illegal, else what adds up to 1), value `[n]`."""
Evaluating = Generator[list[Any], Evaluated, np.ndarray]


class Ends(NamedTuple):
    """What is behind `[n]` edges."""

    reward: np.ndarray
    """Of the step there, for who takes it."""
    over: np.ndarray
    """Whether the game ends with it."""
    mover: np.ndarray
    prior: np.ndarray
    value: np.ndarray
    """As its mover values it."""


class Trees:
    """See the module. `puct`: the next edge by PUCT (Silver et al. 2018),

        Q(s, a) + c P(s, a) sqrt(N(s)) / (1 + N(s, a))        Q = 0 where N(s, a) = 0

    else by UCT (Kocsis & Szepesvari 2006), Q + c sqrt(log N(s) / N(s, a)), each edge once before any is taken twice, in
    the order of their priors. N(s) counts the visit that brought s into the tree. Ties go to the first action."""

    def __init__(self, games: int, nodes: int, actions: int, c: float, puct: bool = True):
        shape = (games, nodes, actions)
        self.c, self.puct = c, puct
        self.visits, self.prior = np.zeros(shape, np.int64), np.zeros(shape)
        self.total, self.reward = np.zeros(shape), np.zeros(shape)
        self.behind = np.full(shape, NOT_TRIED, np.int32)
        self.mover = np.zeros((games, nodes), np.int32)
        self.size = np.zeros(games, np.int64)
        self.paths = np.zeros((0, 2, 2), np.int32)

    def descend(self, leaves: int, simulations: int) -> tuple[np.ndarray, np.ndarray]:
        """`leaves` descents in each game, or fewer where more would be beyond so many simulations: [descent, game,
        node, action] of each edge that nobody has tried, and the lengths of the ways there. Descents that end a game
        have been counted already."""
        games, nodes, _ = self.visits.shape
        if len(self.paths) < games * leaves or self.paths.shape[1] < nodes:
            self.paths = np.zeros((games * leaves, nodes, 2), np.int32)
        edges = self.visits, self.total, self.prior, self.reward, self.behind, self.mover
        found, lengths = _descend(*edges, self.paths, leaves, simulations, self.c, self.puct)
        return found, lengths

    def plant(self, movers: Sequence[int], priors: np.ndarray) -> None:
        """The root of each game."""
        self.mover[:, 0], self.prior[:, 0] = movers, priors
        self.size[:] = 1

    def expand(self, found: np.ndarray, lengths: np.ndarray, ends: Ends) -> list[int]:
        """What is behind edges that `descend` found, and what that is worth, for all edges on the way there. The
        number of each new node; -1 where the game is over, or where an earlier one of these came to the same edge."""
        edges = self.visits, self.total, self.reward, self.mover, self.behind, self.prior, self.size
        nodes: list[int] = _expand(*edges, self.paths, found, lengths, *ends).tolist()
        return nodes


def _descend(
    visits: Any,
    total: Any,
    prior: Any,
    reward: Any,
    behind: Any,
    mover: Any,
    paths: Any,
    leaves: Any,
    simulations: Any,
    c: Any,
    puct: Any,
) -> Any:
    games, _, actions = visits.shape
    found = np.empty((games * leaves, 4), np.int64)
    lengths = np.empty(games * leaves, np.int64)
    count = 0
    for g in range(games):
        done = visits[g, 0].sum()
        for k in range(min(leaves, simulations - done)):
            node, length = 0, 0
            while True:
                visited = 1.0 + visits[g, node].sum()
                best, best_score = -1, -np.inf
                for a in range(actions):
                    p = prior[g, node, a]
                    if p <= 0.0:
                        continue
                    n = visits[g, node, a]
                    q = total[g, node, a] / n if n else 0.0
                    if puct:
                        score = q + c * p * np.sqrt(visited) / (1.0 + n)
                    elif n:
                        score = q + c * np.sqrt(np.log(visited) / n)
                    else:
                        score = 1e9 + p
                    if score > best_score:
                        best, best_score = a, score
                paths[g * leaves + k, length, 0], paths[g * leaves + k, length, 1] = node, best
                length += 1
                # A loss, until the value is there: further descents of the round look elsewhere.
                visits[g, node, best] += 1
                total[g, node, best] -= 1.0
                after = behind[g, node, best]
                if after >= 0:
                    node = after
                    continue
                if after == GAME_OVER:
                    _back_up(visits, total, reward, mover, behind, paths, g, g * leaves + k, length, 0.0)
                else:
                    found[count] = (g * leaves + k, g, node, best)
                    lengths[count] = length
                    count += 1
                break
    return found[:count], lengths[:count]


def _back_up_edges(
    visits: Any,
    total: Any,
    reward: Any,
    mover: Any,
    behind: Any,
    paths: Any,
    game: Any,
    descent: Any,
    length: Any,
    value: Any,
) -> None:
    for i in range(length - 1, -1, -1):
        node, action = paths[descent, i, 0], paths[descent, i, 1]
        after = behind[game, node, action]
        if after >= 0 and mover[game, after] != mover[game, node]:
            value = -value
        value = reward[game, node, action] + value
        total[game, node, action] += 1.0 + value


def _expand(
    visits: Any,
    total: Any,
    reward: Any,
    mover: Any,
    behind: Any,
    prior: Any,
    size: Any,
    paths: Any,
    found: Any,
    lengths: Any,
    rewards: Any,
    over: Any,
    movers: Any,
    priors: Any,
    values: Any,
) -> Any:
    nodes = np.full(len(found), -1, np.int64)
    for i in range(len(found)):
        descent, game, node, action = found[i, 0], found[i, 1], found[i, 2], found[i, 3]
        reward[game, node, action] = rewards[i]
        if over[i]:
            behind[game, node, action] = GAME_OVER
        elif behind[game, node, action] == NOT_TRIED:
            new = nodes[i] = size[game]
            behind[game, node, action], mover[game, new], prior[game, new] = new, movers[i], priors[i]
            size[game] += 1
        _back_up(visits, total, reward, mover, behind, paths, game, descent, lengths[i], values[i])
    return nodes


_back_up = compiled(_back_up_edges)
_descend, _expand = compiled(_descend), compiled(_expand)


def grow(trees: Trees, roots: Sequence[Any], priors: np.ndarray, simulations: int, leaves: int = 1) -> Evaluating:
    """So many simulations from each root, whose priors are known; visits of the roots' edges `[games, actions]`.

    Yields positions and is sent what they are worth. `leaves` of each game come at a time: the later ones are chosen
    before the earlier are known (virtual loss)."""
    places: list[list[Any]] = [[root] for root in roots]
    trees.plant([root.mover for root in roots], priors)
    while (trees.visits[:, 0].sum(-1) < simulations).any():
        found, lengths = trees.descend(leaves, simulations)
        if not len(found):
            continue  # all of them ended a game
        edges = found.tolist()
        rewards, after = zip(*[places[game][node].after(action) for _, game, node, action in edges], strict=True)
        ends = Ends(np.array(rewards, float), np.array([p is None for p in after]), *_zeros(len(edges), priors))
        if asked := [position for position in after if position is not None]:
            goes_on = ~ends.over
            ends.mover[goes_on] = [position.mover for position in asked]
            ends.prior[goes_on], ends.value[goes_on] = yield asked
        for (_, game, _, _), position, new in zip(edges, after, trees.expand(found, lengths, ends), strict=True):
            if new >= 0:
                places[game].append(position)
    return trees.visits[:, 0].copy()


def _zeros(n: int, priors: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    return np.zeros(n, np.int32), np.zeros((n, priors.shape[1])), np.zeros(n)
