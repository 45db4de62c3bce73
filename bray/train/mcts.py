"""An opponent that searches and has learnt nothing: UCT with random playouts (Kocsis & Szepesvari 2006), as OpenSpiel's
MCTSBot."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from bray import tree
from bray.act.tree_search import Trees, grow
from bray.envs.multi_agent import MultiAgentEnv, adapt_agents
from bray.envs.positions import KnownPositions, Position
from bray.errors import ConfigError
from bray.spec import MOVES
from bray.train.table import SeatRollout, TableSource


def best_move(position: Position, simulations: int, rng: np.random.Generator, c: float = 2.0) -> int:
    """The action that is visited most."""

    def order(positions: list[Position]) -> np.ndarray:
        """In which legal actions are tried first: at random."""
        mask = np.array([position.mask for position in positions])
        return np.where(mask, 1.0 - rng.random(mask.shape), 0.0)

    trees = Trees(1, simulations + 1, len(position.mask), c, puct=False)
    growing = grow(trees, [position], order([position]), simulations)
    try:
        asked = next(growing)
        while True:
            asked = growing.send((order(asked), np.array([one.play_out(rng) for one in asked])))
    except StopIteration as end:
        return int(end.value[0].argmax())


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
        return best_move(position, self.simulations, self._rng, self.c)


class SearchSeats(SeatRollout):
    """Seats of one who searches alone, in copies of the games as they stand (`clone`)."""

    table: TableSource
    """Where it plays."""

    def __init__(self, *args: Any, simulations: int, c: float, **more: Any):
        super().__init__(*args, **more)
        self._simulations, self._c = simulations, c

    def decide(self) -> Any:
        seen, actions = self.seen, tree.map(np.array, super().decide())
        agents, games = self.table.obs[self.name]["agent"].reshape(-1), self.table.foreach_env(_copy_of)
        for i in np.flatnonzero(self.acts).tolist():
            game = games[i * self.games // self.num_seats]
            names = list(game.possible_agents)
            position = Position(game, {names[int(agents[i])]: tree.map(lambda x, i=i: x[i], seen)}, names, {})
            actions[i] = best_move(position, self._simulations, self.rng, self._c)
        return actions


def _copy_of(env: Any) -> MultiAgentEnv:
    game = adapt_agents(env)
    assert game is not None, "who sits at a table plays a game of several agents"
    return game.clone()
