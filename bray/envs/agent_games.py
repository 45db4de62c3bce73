"""Small games of several agents, for tests and examples, such as `bray.envs.agent_games:TwoStep`."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
from gymnasium import spaces

from bray.envs.multi_agent import ALL, Agents, MultiAgentEnv, StepOfAgents
from bray.errors import ConfigError, EnvError, UnknownName
from bray.spec import ACTION_MASK


class TwoStep(MultiAgentEnv):
    """The two-step game of Rashid et al. 2018 (QMIX), for two agents who share the reward. In the first step agent a
    alone chooses one of two matrices: the first pays 7 whatever they do, the second 0, 1 or 8, so that the best return
    is 8 and one false step costs most of it. A sum of what each is worth alone cannot say this: VDN learns 7."""

    PAYOFF = (((7.0, 7.0), (7.0, 7.0)), ((0.0, 1.0), (1.0, 8.0)))

    def __init__(self) -> None:
        self.possible_agents = ["a", "b"]
        self.observation_spaces = dict.fromkeys("ab", spaces.Box(0.0, 1.0, (3,), np.float32))
        self.action_spaces = dict.fromkeys("ab", spaces.Discrete(2))
        self.global_state_space = spaces.Box(0.0, 1.0, (3,), np.float32)
        self._place = 0

    def _seen(self) -> Agents:
        return {"a": self.global_state(), "b": self.global_state()}

    def global_state(self) -> np.ndarray:
        return np.eye(3, dtype=np.float32)[self._place]

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Agents, Agents]:
        self._place = 0
        return self._seen(), {}

    def step(self, actions: Agents) -> StepOfAgents:
        if self._place == 0:
            self._place, paid, over = 1 + int(actions["a"]), 0.0, False
        else:
            paid, over = self.PAYOFF[self._place - 1][int(actions["a"])][int(actions["b"])], True
        ends = dict.fromkeys(("a", "b", ALL), over)
        return self._seen(), {"a": paid / 2, "b": paid / 2}, ends, {ALL: False}, {}


MATRICES = {
    "biased_rps": [[[0.0, -1.0, 2.0], [1.0, 0.0, -1.0], [-2.0, 1.0, 0.0]]],
    "prisoners_dilemma": [[[-1.0, -20.0], [0.0, -10.0]], [[-1.0, 0.0], [-20.0, -10.0]]],
    "zero_sum": [[[3.0, -2.0], [-2.0, 1.0]]],
}
"""Payoffs of `Matrix`. Equilibria: rock, paper and scissors with 1/4, 1/2 and 1/4, since rock takes two from scissors;
both prisoners tell; both choose the first with 3/8."""


class Matrix(MultiAgentEnv):
    """Two players choose at the same time, once, and see nothing but which of them they are. `game` names one of
    `MATRICES`, or is what the first and the second are paid, [row's choice][column's choice]; where the second table is
    left out, the second player is paid what the first one loses."""

    def __init__(self, game: str | list[Any] = "biased_rps") -> None:
        if isinstance(game, str) and game not in MATRICES:
            raise UnknownName("matrix game", game, MATRICES, "env.env_config.game")
        tables = [np.array(x, float) for x in (MATRICES[game] if isinstance(game, str) else game)]
        if len(tables) == 1:
            tables.append(-tables[0])
        if len(tables) != 2 or tables[0].ndim != 2 or tables[0].shape != tables[1].shape:
            raise ConfigError(
                "env.env_config.game: expected one table of payoffs or two of one shape, rows of the first player's "
                f"choices, got {game!r}"
            )
        self.tables = tables
        self.possible_agents = ["row", "column"]
        self.observation_spaces = dict.fromkeys(self.possible_agents, spaces.Box(0.0, 1.0, (2,), np.float32))
        self.action_spaces = {a: spaces.Discrete(n) for a, n in zip(self.possible_agents, tables[0].shape, strict=True)}

    def _seen(self) -> Agents:
        return dict(zip(self.possible_agents, np.eye(2, dtype=np.float32), strict=True))

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Agents, Agents]:
        return self._seen(), {}

    def step(self, actions: Agents) -> StepOfAgents:
        chosen = int(actions["row"]), int(actions["column"])
        paid = {a: float(table[chosen]) for a, table in zip(self.possible_agents, self.tables, strict=True)}
        return self._seen(), paid, dict.fromkeys(("row", "column", ALL), True), {ALL: False}, {}


class Hunt(MultiAgentEnv):
    """Hunters on a line look for berries, and a pit kills who falls into it. A berry pays its finder 1 and grows again
    elsewhere; the dead get nothing. The game ends when all are dead, or after `length` steps. A dead hunter comes back
    `returns` steps later, where that is given. Walking out of the line is illegal (`action_mask`)."""

    MOVES = (-1, 0, 1)

    def __init__(self, hunters: int = 3, cells: int = 8, length: int = 30, returns: int = 0) -> None:
        self.possible_agents = [f"hunter_{i}" for i in range(hunters)]
        self.cells, self.length, self.returns = cells, length, returns
        seen = spaces.Dict(
            {
                "obs": spaces.Box(0.0, 1.0, (3 * cells,), np.float32),
                ACTION_MASK: spaces.Box(0, 1, (3,), np.int8),
            }
        )
        self.observation_spaces = dict.fromkeys(self.possible_agents, seen)
        self.action_spaces = dict.fromkeys(self.possible_agents, spaces.Discrete(3))
        self.global_state_space = spaces.Box(0.0, 1.0, ((hunters + 2) * cells,), np.float32)
        self._rng = np.random.default_rng()
        self._at: dict[str, int] = {}
        self._dead: dict[str, int] = {}
        self._t = self._pit = self._berry = 0

    @property
    def agents(self) -> list[str]:
        """Who lives."""
        return list(self._at)

    def _grow(self) -> None:
        self._berry = int(self._rng.choice([c for c in range(self.cells) if c != self._pit]))

    def _spot(self, cell: int | None) -> np.ndarray:
        spot = np.zeros(self.cells, np.float32)
        if cell is not None:
            spot[cell] = 1.0
        return spot

    def _seen(self, hunter: str) -> dict[str, np.ndarray]:
        at = self._at[hunter]
        obs = np.concatenate([self._spot(at), self._spot(self._berry), self._spot(self._pit)])
        return {"obs": obs, ACTION_MASK: np.array([at > 0, True, at < self.cells - 1], np.int8)}

    def global_state(self) -> np.ndarray:
        places = [self._at.get(hunter) for hunter in self.possible_agents]
        return np.concatenate([self._spot(cell) for cell in (*places, self._berry, self._pit)])

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Agents, Agents]:
        if seed is not None:
            self._rng = np.random.default_rng(seed)
        self._t, self._dead, self._pit = 0, {}, int(self._rng.integers(1, self.cells - 1))
        self._at = dict.fromkeys(self.possible_agents, 0)
        self._grow()
        return {hunter: self._seen(hunter) for hunter in self._at}, {}

    def step(self, actions: Agents) -> StepOfAgents:
        self._t += 1
        rewards, fallen = dict.fromkeys(actions, 0.0), []
        for hunter in [h for h in self.possible_agents if h in actions]:
            self._at[hunter] = int(np.clip(self._at[hunter] + self.MOVES[int(actions[hunter])], 0, self.cells - 1))
            if self._at[hunter] == self._berry:
                rewards[hunter] += 1.0
                self._grow()
            if self._at[hunter] == self._pit:
                fallen.append(hunter)
        obs = {hunter: self._seen(hunter) for hunter in self._at}
        for hunter in fallen:
            del self._at[hunter]
            self._dead[hunter] = self._t
        for hunter, when in list(self._dead.items()):
            if self.returns and self._t - when >= self.returns:
                del self._dead[hunter]
                self._at[hunter] = 0
                obs[hunter] = self._seen(hunter)
        over = not self._at and not self.returns
        terminateds = {**dict.fromkeys(fallen, True), ALL: over}
        return obs, rewards, terminateds, {ALL: self._t >= self.length and not over}, {}


class Nim(MultiAgentEnv):
    """Two players take one to three of `sticks` in turn; who takes the last one wins 1, and the other loses 1."""

    def __init__(self, sticks: int = 12) -> None:
        self.possible_agents = ["first", "second"]
        self.sticks = sticks
        seen = spaces.Dict(
            {"obs": spaces.Box(0.0, 1.0, (sticks + 1,), np.float32), ACTION_MASK: spaces.Box(0, 1, (3,), np.int8)}
        )
        self.observation_spaces = dict.fromkeys(self.possible_agents, seen)
        self.action_spaces = dict.fromkeys(self.possible_agents, spaces.Discrete(3))
        self._left, self._turn = sticks, 0
        self.max_moves = sticks

    def clone(self) -> Nim:
        return copy.copy(self)

    def _seen(self) -> dict[str, np.ndarray]:
        mask = np.array([take <= self._left for take in (1, 2, 3)], np.int8)
        return {"obs": np.eye(self.sticks + 1, dtype=np.float32)[self._left], ACTION_MASK: mask}

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Agents, Agents]:
        self._left, self._turn = self.sticks, 0
        return {"first": self._seen()}, {}

    def step(self, actions: Agents) -> StepOfAgents:
        player, other = self.possible_agents[self._turn], self.possible_agents[1 - self._turn]
        self._left -= 1 + int(actions[player])
        self._turn = 1 - self._turn
        over = self._left <= 0
        if not over:
            return {other: self._seen()}, {player: 0.0}, {ALL: False}, {ALL: False}, {}
        self._left = 0
        obs = {player: self._seen(), other: self._seen()}
        return obs, {player: 1.0, other: -1.0}, dict.fromkeys((player, other, ALL), True), {ALL: False}, {}


class ConnectFour(MultiAgentEnv):
    """Two players drop stones into seven columns of six; four in a row win 1, and the other loses 1. Actions are those
    of `openspiel:connect_four`; a player sees three planes: own stones, empty cells, and those of the other, the lowest
    row first. For a quick look at four in a row the stones of a player are one number as well, with a bit for each
    cell, column by column with an empty cell on top. Nothing is changed in place, so that a copy shares all of it."""

    max_moves = 42

    def __init__(self) -> None:
        self.possible_agents = ["player_0", "player_1"]
        seen = spaces.Dict({"obs": spaces.Box(0, 1, (3, 6, 7), np.uint8), ACTION_MASK: spaces.Box(0, 1, (7,), np.int8)})
        self.observation_spaces = dict.fromkeys(self.possible_agents, seen)
        self.action_spaces = dict.fromkeys(self.possible_agents, spaces.Discrete(7))
        self._begin()

    def _begin(self) -> None:
        self._planes = np.zeros((3, 6, 7), np.uint8)  # as who moves next sees them
        self._planes[1] = 1
        self._mine = self._theirs = self._moves = 0

    def clone(self) -> ConnectFour:
        other: ConnectFour = object.__new__(type(self))  # copy.copy takes seven times as long
        other.__dict__ = self.__dict__.copy()
        return other

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Agents, Agents]:
        self._begin()
        return {self.possible_agents[0]: _with_columns(self._planes)}, {}

    def step(self, actions: Agents) -> StepOfAgents:
        turn = self._moves & 1
        player, other = self.possible_agents[turn], self.possible_agents[1 - turn]
        column, taken = int(actions[player]), self._mine | self._theirs
        cells = taken + (1 << 7 * column)  # adding 1 carries to the lowest empty cell of the column
        stone = cells & (0b111111 << 7 * column) & ~taken
        if not stone:
            raise EnvError(f"column {column} is full")
        row = stone.bit_length() - 1 - 7 * column
        board = self._mine | stone
        self._mine, self._theirs = self._theirs, board
        self._planes = self._planes[::-1].copy()
        self._planes[1, row, column], self._planes[2, row, column] = 0, 1
        self._moves += 1
        won = False
        for by in (1, 6, 7, 8):
            pairs = board & board >> by
            won = won or pairs & pairs >> 2 * by != 0
        if not won and self._moves < self.max_moves:
            return {other: _with_columns(self._planes)}, {player: 0.0}, {ALL: False}, {ALL: False}, {}
        seen = {player: _with_columns(self._planes[::-1].copy()), other: _with_columns(self._planes)}
        rewards = {player: float(won), other: -float(won)}
        return seen, rewards, dict.fromkeys((player, other, ALL), True), {ALL: False}, {}


def _with_columns(planes: np.ndarray) -> dict[str, np.ndarray]:
    """What a player of Connect Four sees, and which columns are not full."""
    return {"obs": planes, ACTION_MASK: planes[1, 5].view(np.int8)}


class Weather(MultiAgentEnv):
    """Two agents are paid by the weather of the day, which only the global state shows, whatever they do. What an agent
    sees says nothing of its return; what a critic of the whole game sees says all."""

    def __init__(self, length: int = 8) -> None:
        self.possible_agents = ["ann", "bob"]
        self.length = length
        self.observation_spaces = dict.fromkeys(self.possible_agents, spaces.Box(0.0, 1.0, (1,), np.float32))
        self.action_spaces = dict.fromkeys(self.possible_agents, spaces.Discrete(2))
        self.global_state_space = spaces.Box(-1.0, 1.0, (2,), np.float32)
        self._rng = np.random.default_rng()
        self._t, self._weather = 0, 0.0

    def _seen(self) -> Agents:
        return {agent: np.zeros(1, np.float32) for agent in self.possible_agents}

    def global_state(self) -> np.ndarray:
        return np.array([self._weather, self._t / self.length], np.float32)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Agents, Agents]:
        if seed is not None:
            self._rng = np.random.default_rng(seed)
        self._t, self._weather = 0, float(self._rng.uniform(-1.0, 1.0))
        return self._seen(), {}

    def step(self, actions: Agents) -> StepOfAgents:
        self._t += 1
        paid = dict.fromkeys(self.possible_agents, self._weather)
        return self._seen(), paid, {ALL: self._t == self.length}, {ALL: False}, {}
