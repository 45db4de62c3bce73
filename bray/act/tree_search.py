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
from typing import Any

import numpy as np

from bray.compiled import compiled

NOT_TRIED, GAME_OVER = -1, -2
"""What is behind an edge, where that is no node."""

Evaluated = tuple[np.ndarray, np.ndarray]
"""Of positions: prior `[n, actions]` (0 where illegal, else what adds up to 1), value `[n]`."""
Evaluating = Generator[list[Any], Evaluated, np.ndarray]


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

    def add(self, game: int, mover: int, prior: np.ndarray) -> int:
        """A node; its number."""
        node = int(self.size[game])
        self.mover[game, node], self.prior[game, node] = mover, prior
        self.size[game] += 1
        return node

    def descend(self, leaves: int, simulations: int) -> tuple[list[list[int]], list[int]]:
        """`leaves` descents in each game, or fewer where more would be beyond so many simulations: [descent, game,
        node, action] of each edge that nobody has tried, and the lengths of the ways there. Descents that end a game
        have been counted already."""
        games, nodes, _ = self.visits.shape
        if len(self.paths) < games * leaves or self.paths.shape[1] < nodes:
            self.paths = np.zeros((games * leaves, nodes, 2), np.int32)
        edges = self.visits, self.total, self.prior, self.reward, self.behind, self.mover
        found, lengths = _descend(*edges, self.paths, leaves, simulations, self.c, self.puct)
        return found.tolist(), lengths.tolist()

    def back_up(self, game: int, descent: int, length: int, value: float) -> None:
        """What was found at the end of a descent, as its mover values it, for all edges on the way."""
        edges = self.visits, self.total, self.reward, self.mover, self.behind
        _back_up(*edges, self.paths, game, descent, length, value)


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


_back_up = compiled(_back_up_edges)
_descend = compiled(_descend)


def grow(trees: Trees, roots: Sequence[Any], priors: np.ndarray, simulations: int, leaves: int = 1) -> Evaluating:
    """So many simulations from each root, whose priors are known; visits of the roots' edges `[games, actions]`.

    Yields positions and is sent what they are worth. `leaves` of each game come at a time: the later ones are chosen
    before the earlier are known (virtual loss)."""
    places: list[list[Any]] = [[root] for root in roots]
    for game, root in enumerate(roots):
        trees.add(game, root.mover, priors[game])
    left = True
    while left:
        found, lengths = trees.descend(leaves, simulations)
        asked, waiting = [], []
        for (descent, game, node, action), length in zip(found, lengths, strict=True):
            reward, position = places[game][node].after(action)
            trees.reward[game, node, action] = reward
            if position is None:
                trees.behind[game, node, action] = GAME_OVER
                trees.back_up(game, descent, length, 0.0)
            else:
                asked.append(position)
                waiting.append((game, node, action, descent, length))
        if asked:
            prior, value = yield asked
            for (game, node, action, descent, length), position, p, v in zip(
                waiting, asked, prior, value.tolist(), strict=True
            ):
                if trees.behind[game, node, action] == NOT_TRIED:  # else another descent of this round came here too
                    trees.behind[game, node, action] = trees.add(game, position.mover, p)
                    places[game].append(position)
                trees.back_up(game, descent, length, v)
        left = bool((trees.visits[:, 0].sum(-1) < simulations).any())
    return trees.visits[:, 0].copy()
