"""A game of several agents as callbacks of episodes see it."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from bray import tree
from bray.train.callbacks import Episode


class SideStep(NamedTuple):
    """What a step of all games was to the seats of a side, `[B, N]`."""

    action: Any
    acted: np.ndarray
    reward: np.ndarray
    ended: np.ndarray
    terminated: np.ndarray


class GameStep(NamedTuple):
    """A step of all games."""

    valid: np.ndarray
    terminated: np.ndarray
    truncated: np.ndarray
    sides: dict[str, SideStep]


class GameEpisode(Episode):
    """A game that is being played. Of each step it has dicts by agent: `action` of those who acted, `reward`, `obs` of
    those who decide next or have just ended, and `ended` of these: whether an agent was terminated; else it was
    truncated. `total_reward` is the sum of `returns`."""

    def __init__(self, source: Any, number: int, env_index: int):
        super().__init__(source, number, env_index)
        self._places = source.places
        self._seats: dict[str, tuple[str, int]] = {}
        self.policies: dict[str, str] = {}
        """Which policy decides for each agent; `NAME@STEP` as it was."""
        for agent, side, player, i in source.seated(env_index):
            self._seats[agent], self.policies[agent] = (side, i), player
        self.returns = {agent: source.return_of(side, env_index, i) for agent, (side, i) in self._seats.items()}
        """Rewards of each agent so far."""
        self.action, self.reward = {}, {}
        self.ended: dict[str, bool] = {}

    @property
    def obs(self) -> Any:
        b, seen = self._at, self._rollout.obs
        at = {agent: (seen[self._places[side]], i) for agent, (side, i) in self._seats.items()}
        shown = {a: (s, i) for a, (s, i) in at.items() if a in self.ended or s["flags"][b, i]}
        return {a: tree.index(s["obs"], (b, i)) for a, (s, i) in shown.items()}

    def played(self, step: GameStep, reward: Any, infos: Any) -> None:
        self.length += 1
        self.action, self.reward, self.ended = {}, {}, {}
        for agent, (name, i) in self._seats.items():
            side, at = step.sides[name], (self._at, i)
            self.reward[agent] = paid = float(side.reward[at])
            self.returns[agent] += paid
            if side.acted[at]:
                self.action[agent] = tree.index(side.action, at)
            if side.ended[at]:
                self.ended[agent] = bool(side.terminated[at])
        self.total_reward = sum(self.returns.values())
        self.info = infos[self._at] if infos else {}
        self.terminated, self.truncated = bool(step.terminated[self._at]), bool(step.truncated[self._at])
