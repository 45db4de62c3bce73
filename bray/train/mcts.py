"""An opponent that searches and has learnt nothing: UCT with random playouts (Kocsis & Szepesvari 2006), as OpenSpiel's
MCTSBot."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from bray.act.tree_search import Trees, grow
from bray.envs.multi_agent import MultiAgentEnv
from bray.envs.positions import KnownPositions, Position
from bray.errors import ConfigError
from bray.spec import MOVES


class MCTS:
    """`mcts(obs, rng)` is an action, as opponents of self-play are asked for one; the observation has `moves`
    (`env.moves`). `game` makes the game, as `EnvSpec.game` does."""

    def __init__(self, game: Callable[[], MultiAgentEnv], simulations: int = 500, seed: int = 0, c: float = 2.0):
        self.simulations, self.c = simulations, c
        self._positions, self._rng = KnownPositions(game), np.random.default_rng(seed)

    def __call__(self, obs: Any, rng: Any = None) -> int:
        if not isinstance(obs, dict) or MOVES not in obs:
            raise ConfigError("MCTS searches from the moves of an observation, which has none: set env.moves=true")
        position = self._positions.at(np.asarray(obs[MOVES]))
        if position is None:
            raise ConfigError(f"no game that goes on has the moves {np.asarray(obs[MOVES]).tolist()}")
        return self.best(position)

    def best(self, position: Position) -> int:
        """The action that is visited most."""
        trees = Trees(1, self.simulations + 1, len(position.mask), self.c, puct=False)
        growing = grow(trees, [position], self._order([position]), self.simulations)
        asked = next(growing)
        while True:
            values = np.array([one.play_out(self._rng) for one in asked])
            try:
                asked = growing.send((self._order(asked), values))
            except StopIteration as end:
                return int(end.value[0].argmax())

    def _order(self, positions: list[Position]) -> np.ndarray:
        """In which legal actions are tried first: at random."""
        mask = np.array([position.mask for position in positions])
        order: np.ndarray = np.where(mask, 1.0 - self._rng.random(mask.shape), 0.0)
        return order
