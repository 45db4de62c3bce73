"""Many games of several agents in one object, for loops that are compiled and for numpy: `ManyGames`. What a step costs
in Python is paid once for all of them, so that self-play goes as fast as its networks are.

A class of it is an environment as any other. Where one policy decides for all agents, as in self-play, all games of a
training are one object of it (`env.vector: native`); everywhere else each game is one with a single game in it
(`OneOfMany`). Both play the same episodes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from bray import tree
from bray.envs.config import EnvConfig
from bray.envs.multi_agent import ALL, Agents, MultiAgentEnv, StepOfAgents
from bray.envs.registry import EnvOrigin
from bray.envs.table import ACTS, DEFAULT, TERMINATED, TRUNCATED, Seating, check_of
from bray.envs.vector import StepResult, VecEnv, episode_seed
from bray.errors import CheckpointError
from bray.spec import EnvSpec
from bray.tree import NestedArray

FEWEST = 8
"""Games from which one step of all is cheaper than a step of each."""


class ManyGames(ABC):
    """B games of N agents, made as `YourGames(num_games=B, **env_config)`. All agents are in a game from its beginning
    to its end; those who act decide next.

    `begin` and `step` write the arrays below, in the order of `possible_agents`. What is random in a game comes from
    the seed that it begins with. Arrays that are attributes are its state, which a checkpoint holds."""

    possible_agents: Sequence[str]
    observation_spaces: Mapping[str, Any]
    action_spaces: Mapping[str, Any]
    metadata: Mapping[str, Any] = {"step_ms": 0.0}

    obs: NestedArray
    """`[B, N, ...]`: what each agent sees; of one who does not act, anything, but for the last observation."""
    acts: np.ndarray
    """bool[B, N]: who decides next."""
    reward: np.ndarray
    """float32[B, N]: of the last step."""
    terminated: np.ndarray
    """bool[B]: whether the last step ended the game."""
    truncated: np.ndarray
    """bool[B]: whether it cut the game off."""

    @abstractmethod
    def begin(self, game: int, seed: int) -> None:
        """Begin this game: write its rows of `obs` and `acts`."""

    @abstractmethod
    def step(self, actions: Any, playing: np.ndarray) -> None:
        """One step of the games that are `playing` (bool[B]), by the actions `[B, N, ...]` of those who act: write
        their rows of all arrays, and leave the other games as they are."""

    def get_state(self) -> dict[str, np.ndarray]:
        arrays: dict[str, np.ndarray] = {}
        for name, value in vars(self).items():
            for i, leaf in enumerate(tree.leaves(value)):
                if isinstance(leaf, np.ndarray):
                    arrays[f"{name}.{i}"] = leaf.copy()
        return arrays

    def set_state(self, state: Mapping[str, np.ndarray]) -> None:
        for name, value in vars(self).items():
            for i, leaf in enumerate(tree.leaves(value)):
                if isinstance(leaf, np.ndarray):
                    try:
                        leaf[...] = state[f"{name}.{i}"]
                    except (KeyError, ValueError) as e:
                        raise CheckpointError(f"not the state of these games: {name}: {e}") from None


class OneOfMany(MultiAgentEnv):
    """A `ManyGames` of one game as an environment."""

    def __init__(self, games: ManyGames):
        self.games = games
        self.possible_agents = list(games.possible_agents)
        self.observation_spaces, self.action_spaces = games.observation_spaces, games.action_spaces
        self.metadata = games.metadata
        self._rng = np.random.default_rng()
        self._actions = {a: np.zeros_like(space.sample()) for a, space in games.action_spaces.items()}
        self._playing = np.ones(1, bool)

    def _seen(self, over: bool) -> Agents:
        acts = self.games.acts[0]
        return {
            agent: tree.map(lambda x, i=i: x[0, i].copy(), self.games.obs)
            for i, agent in enumerate(self.possible_agents)
            if over or acts[i]
        }

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Agents, Agents]:
        self.games.begin(0, int(self._rng.integers(1 << 31)) if seed is None else seed)
        return self._seen(False), {}

    def step(self, actions: Agents) -> StepOfAgents:
        games = self.games
        given = [actions.get(agent, self._actions[agent]) for agent in self.possible_agents]
        games.step(tree.map(lambda x: x[None], tree.stack([tree.map(np.asarray, a) for a in given])), self._playing)
        terminated, truncated = bool(games.terminated[0]), bool(games.truncated[0])
        paid = dict(zip(self.possible_agents, games.reward[0].tolist(), strict=True))
        return self._seen(terminated or truncated), paid, {ALL: terminated}, {ALL: truncated}, {}


class ManyGamesVecEnv(VecEnv):
    """A `ManyGames` as tables whose seats are all at one side (`table.TableEnv`)."""

    form = "many"

    def __init__(self, games: ManyGames, spec: EnvSpec, num_envs: int, seed: int, first: int = 0, check: bool = True):
        """first: the number of the first environment, counted over all workers"""
        self.games, self.spec, self.num_envs, self._seed, self._first = games, spec, num_envs, seed, first
        self._check = check_of(spec, True) if check else None
        self._limit = spec.max_episode_steps
        self.dead = np.zeros(num_envs, bool)
        self._episodes = np.full(num_envs, -1)
        self._tick = np.zeros(num_envs, np.int64)
        agents = len(games.possible_agents)
        self._agent = np.tile(np.arange(agents, dtype=np.int16), (num_envs, 1))

    def reset(self, seed: int | None = None) -> NestedArray:
        if seed is not None:
            self._seed, self._episodes = seed, np.full(self.num_envs, -1)
        for b in range(self.num_envs):
            self._begin(b)
        self.dead = np.zeros(self.num_envs, bool)
        obs = self._seen(np.zeros_like(self.games.reward), self.games.acts * np.uint8(ACTS))
        self._check_values(obs)
        return obs

    def _begin(self, b: int) -> None:
        self._episodes[b] += 1
        self._tick[b] = 0
        self.games.begin(b, episode_seed(self._seed, self._first + b, int(self._episodes[b])))

    def _seen(self, reward: np.ndarray, flags: np.ndarray) -> NestedArray:
        side = {"obs": tree.map(np.copy, self.games.obs), "reward": reward, "flags": flags, "agent": self._agent}
        return {DEFAULT: side, "tick": self._tick.copy()}

    def step(self, actions: NestedArray) -> StepResult:
        games, playing = self.games, ~self.dead
        for b in np.flatnonzero(self.dead).tolist():
            self._begin(b)
        games.step(actions[DEFAULT], playing)
        self._tick += playing
        reward = np.where(playing[:, None], games.reward, np.float32(0.0))
        terminated, truncated = games.terminated & playing, games.truncated & playing
        flags = games.acts * np.uint8(ACTS)
        ends = terminated | truncated
        if True in ends.tolist():
            flags[terminated], flags[truncated & ~terminated] = TERMINATED, TRUNCATED
        if self._limit is not None:
            truncated = truncated | ((self._tick >= self._limit) & playing)
        self.dead = terminated | truncated
        obs = self._seen(reward, flags)
        self._check_values(obs, reward.sum(1), self.dead)
        return obs, reward.sum(1), terminated, truncated, None

    def get_state(self) -> dict[str, Any]:
        arrays = {"games": self.games.get_state(), "dead": self.dead, "episodes": self._episodes, "tick": self._tick}
        return {"arrays": arrays, "json": {"form": self.form, "num_envs": self.num_envs, "seed": self._seed}}

    def set_state(self, state: dict[str, Any]) -> NestedArray:
        arrays, json = self._read_state(state)
        self._seed = int(json["seed"])
        self.games.set_state(arrays["games"])
        self.dead, self._episodes = np.array(arrays["dead"], bool), np.array(arrays["episodes"])
        self._tick = np.array(arrays["tick"], np.int64)
        flags = np.where(self.dead[:, None], np.uint8(0), self.games.acts * np.uint8(ACTS))
        return self._seen(np.zeros_like(self.games.reward), flags)


def plays_many(source: EnvOrigin, config: EnvConfig, seating: Seating | None) -> bool:
    """Whether all games are one object: they are of a class for it, there are several or it is asked for, one policy
    decides for all agents, and nothing is asked that each game has of its own."""
    if not (isinstance(source.creator, type) and issubclass(source.creator, ManyGames)):
        return False
    several = config.num_envs >= FEWEST and config.step_timeout is None
    own = config.per_env or config.moves or config.teams or config.wrappers
    asked = config.vector == "native" or (config.vector == "auto" and several)
    return asked and seating in (None, Seating()) and not own
