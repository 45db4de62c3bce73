"""Sticks: a small game of two, for a league. Twelve sticks lie there; both take one to three in turn, and who takes the
last one wins. Whoever leaves the other one a multiple of four cannot lose."""

from __future__ import annotations

from typing import Any

import numpy as np
from gymnasium import spaces

import bray

STICKS = 12


class Sticks(bray.MultiAgentEnv):
    """An agent sees how many sticks there are, as one of `STICKS + 1` lights; only the one whose turn it is sees
    anything. Action 0, 1 or 2 takes one more than that, or all that are left."""

    possible_agents = ("first", "second")
    observation_spaces = dict.fromkeys(possible_agents, spaces.Box(0.0, 1.0, (STICKS + 1,), np.float32))
    action_spaces = dict.fromkeys(possible_agents, spaces.Discrete(3))

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.left, self.turn = STICKS, 0
        return {"first": self.look()}, {}

    def step(self, actions: dict[str, Any]) -> Any:
        player, other = self.possible_agents[self.turn], self.possible_agents[1 - self.turn]
        self.left, self.turn = max(0, self.left - 1 - int(actions[player])), 1 - self.turn
        if self.left:
            return {other: self.look()}, {player: 0.0}, {"__all__": False}, {"__all__": False}, {}
        seen = dict.fromkeys(self.possible_agents, self.look())
        return seen, {player: 1.0, other: -1.0}, {"__all__": True}, {"__all__": False}, {}

    def look(self) -> np.ndarray:
        return np.eye(STICKS + 1, dtype=np.float32)[self.left]
