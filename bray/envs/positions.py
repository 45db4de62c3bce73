"""Positions of a game that can be copied, for those who search it; and where a player's observation says what has been
played so far (`env.moves`).

    observation  {..., "moves": int16[most]}    the actions of all agents since the start, in order, then -1

So a Policy that searches needs to know nothing but its observation, wherever it plays: beside the environment, in a
worker, in a service.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from gymnasium import spaces

from bray import tree
from bray.envs.multi_agent import Agents, AroundAgents, MultiAgentEnv, StepOfAgents, game_over
from bray.errors import ConfigError, EnvError
from bray.spec import ACTION_MASK, MOVES

_KEPT = 4096
"""Positions that are remembered, so that the next decision of a game does not begin at its start."""


class WithMoves(AroundAgents):
    """A game in turns whose observations have `moves`."""

    def __init__(self, env: MultiAgentEnv):
        self.env, self.possible_agents = env, env.possible_agents
        name, most = type(env).__name__, getattr(env, "max_moves", None)
        if not isinstance(most, int) or most < 1:
            raise ConfigError(
                f"env.moves: {name} does not say how long its games are: set max_moves, the most actions of all agents "
                f"in one game; got {most!r}"
            )
        self.global_state_space, self.metadata, self.render_mode = env.global_state_space, env.metadata, env.render_mode
        self.action_spaces = {agent: env.action_space(agent) for agent in self.possible_agents}
        for agent, space in self.action_spaces.items():
            if not isinstance(space, spaces.Discrete) or space.start:
                raise ConfigError(f"env.moves: actions are numbers from 0, and those of {agent!r} are {space}")
        self.observation_spaces = {a: self._with_moves(env.observation_space(a), most) for a in self.possible_agents}
        self._moves, self._count = np.full(most, -1, np.int16), 0

    def _with_moves(self, seen: Any, most: int) -> spaces.Dict:
        members = dict(seen.spaces) if isinstance(seen, spaces.Dict) else {"obs": seen}
        if MOVES in members:
            raise ConfigError(f"env.moves: the observation has an entry {MOVES!r} of its own: leave out env.moves=true")
        actions = max(int(space.n) for space in self.action_spaces.values())
        return spaces.Dict({**members, MOVES: spaces.Box(-1, actions - 1, (most,), np.int16)})

    def _seen(self, observations: Agents) -> Agents:
        moves = self._moves.copy()
        return {
            agent: {**(seen if isinstance(seen, dict) else {"obs": seen}), MOVES: moves}
            for agent, seen in observations.items()
        }

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Agents, Agents]:
        obs, infos = self.env.reset(seed=seed, options=options)
        self._moves.fill(-1)
        self._count = 0
        return self._seen(obs), infos

    def step(self, actions: Agents) -> StepOfAgents:
        if len(actions) != 1:
            raise EnvError(f"env.moves: agents take turns, and {', '.join(actions) or 'nobody'} act at once")
        if self._count == len(self._moves):
            raise EnvError(f"env.moves: the game has more than {self._count} actions: set a larger max_moves")
        (self._moves[self._count],) = actions.values()
        self._count += 1
        obs, rewards, terminateds, truncateds, infos = self.env.step(actions)
        return self._seen(obs), rewards, terminateds, truncateds, infos


class Position:
    """A game at a point where one agent decides; never changed, `after` makes another."""

    __slots__ = ("_env", "agent", "agents", "mask", "mover", "obs")

    def __init__(self, env: MultiAgentEnv, observations: Agents, agents: Sequence[str], ended: Agents):
        deciding = [agent for agent in observations if not ended.get(agent)]
        if len(deciding) != 1:
            raise ConfigError(
                f"{type(env).__name__}: a game can be searched in which one agent decides at a time, got "
                f"{', '.join(deciding) or 'nobody'}"
            )
        self._env, self.agents, (self.agent,) = env, agents, deciding
        self.mover, self.obs = agents.index(self.agent), observations[self.agent]
        mask = self.obs.get(ACTION_MASK) if isinstance(self.obs, dict) else None
        self.mask = np.ones(int(env.action_space(self.agent).n), bool) if mask is None else np.asarray(mask) > 0

    def after(self, action: int) -> tuple[float, Position | None]:
        """The reward of who decides here, and the next position; None where the game is over."""
        env = self._env.clone()
        obs, rewards, terminateds, truncateds, _ = env.step({self.agent: action})
        reward = float(rewards.get(self.agent, 0.0))
        if game_over(terminateds, truncateds, type(env).__name__):
            return reward, None
        return reward, Position(env, obs, self.agents, terminateds)

    def play_out(self, rng: np.random.Generator) -> float:
        """What who decides here is paid until the end of the game, if all choose at random from now on."""
        env, paid, at = self._env.clone(), 0.0, self
        while True:
            legal = np.flatnonzero(at.mask)
            obs, rewards, terminateds, truncateds, _ = env.step({at.agent: int(legal[int(rng.random() * len(legal))])})
            paid += float(rewards.get(self.agent, 0.0))
            if game_over(terminateds, truncateds, type(env).__name__):
                return paid
            at = Position(env, obs, self.agents, terminateds)


class KnownPositions:
    """Finds positions of a game by the actions that led there. `make` makes a game, which begins the same every time
    and can `clone`."""

    def __init__(self, make: Callable[[], MultiAgentEnv]):
        env = make()
        name, agents = type(env).__name__, list(env.possible_agents)
        if len(agents) > 2:
            raise ConfigError(f"{name} has {len(agents)} agents: a search is for games of two, or of one")
        begun = [Position(game := env.clone(), game.reset(seed=seed)[0], agents, {}) for seed in (0, 1)]
        if not tree.equal(begun[0].obs, begun[1].obs):
            raise ConfigError(f"{name} begins otherwise with another seed: a search is for games without chance")
        self._start = begun[0]
        self._known: OrderedDict[bytes, Position] = OrderedDict()

    def at(self, moves: np.ndarray) -> Position | None:
        """The position behind these actions, which end with the first number below 0; None where they are not those of
        a game that goes on."""
        count = len(moves) if (moves >= 0).all() else int(np.argmax(moves < 0))
        known, position = self._known, self._start
        behind = count
        while behind > 0:
            if (found := known.get(moves[:behind].tobytes())) is not None:
                position = found
                break
            behind -= 1
        for i in range(behind, count):
            action = int(moves[i])
            if action >= len(position.mask) or not position.mask[action]:
                return None
            _, after = position.after(action)
            if after is None:
                return None
            position = after
            known[moves[: i + 1].tobytes()] = position
            if len(known) > _KEPT:
                known.popitem(last=False)
        return position
