"""Teams: agents of a game joined into one (`env.teams`), and a game of one agent as a Gymnasium environment.

    env.teams: {team: [a, b, c]}

    observation  {"obs": [N, ...], "action_mask": [N, A], "global_state": ...}    the last two where there are such
    action       MultiDiscrete [N], or Box [N, ...]
    reward       the sum of the members' rewards
    info         "rewards" float32[N] of each member; "alive" bool[N]: who acted in this step

Members that have ended keep their row: zeros, and choice 0 as the only legal one. Those who observe less, or have fewer
choices, are filled up with zeros, and what they do not have is illegal. Members act at the same time: one without an
observation that has not ended is an error.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces

from bray.envs.multi_agent import (
    ALL,
    AroundAgents,
    MultiAgentEnv,
    StepOfAgents,
    answered,
    as_float,
    ended,
    game_over,
)
from bray.errors import ConfigError, EnvError, UnknownName
from bray.spec import ACTION_MASK, GLOBAL_STATE

Agents = dict[str, Any]
ALIVE, REWARDS = "alive", "rewards"


class Team:
    """The members of a team: their spaces joined, their observations and actions as one."""

    def __init__(self, name: str, members: Sequence[str], env: MultiAgentEnv):
        self.name, self.members = name, tuple(members)
        observed: list[tuple[Any, bool]] = [_without_mask(env.observation_space(m)) for m in self.members]
        self._parts, self._masks = [part for part, _ in observed], [mask for _, mask in observed]
        first = self._parts[0]
        self._plain = isinstance(first, spaces.Box) and all(part == first for part in self._parts)
        if self._plain:
            low, high = (np.stack([x] * len(self.members)) for x in (first.low, first.high))
            obs: spaces.Space = spaces.Box(low, high, dtype=first.dtype)
        else:
            width = max(spaces.flatdim(part) for part in self._parts)
            obs = spaces.Box(-np.inf, np.inf, (len(self.members), width), np.float32)
        self._shape: tuple[int, ...] = obs.shape or ()
        self._dtype: Any = obs.dtype
        self.action_space = self._joined_actions([env.action_space(m) for m in self.members])
        self.masked = any(self._masks) or len(set(self._choices)) > 1
        entries: dict[str, spaces.Space] = {"obs": obs}
        if self.masked:
            entries[ACTION_MASK] = spaces.Box(0, 1, (len(self.members), max(self._choices)), np.int8)
        self.observation_space = spaces.Dict(entries)

    def _joined_actions(self, actions: list[Any]) -> spaces.Space:
        self._choices: list[int] = []
        if all(isinstance(a, spaces.Discrete) for a in actions):
            self._choices = [int(a.n) for a in actions]
            self._starts = [int(a.start) for a in actions]
            return spaces.MultiDiscrete([max(self._choices)] * len(actions))
        first = actions[0]
        if isinstance(first, spaces.Box) and all(a == first for a in actions):
            low, high = (np.stack([x] * len(actions)) for x in (first.low, first.high))
            return spaces.Box(low, high, dtype=first.dtype)
        raise ConfigError(
            f"env.teams.{self.name}: actions of a team are all Discrete, or Boxes of one shape and one range; got "
            f"{dict(zip(self.members, map(str, actions), strict=True))}"
        )

    def observe(self, observations: Agents, acting: set[str]) -> dict[str, np.ndarray]:
        """The joined observation; of those who act next the masks count."""
        obs = np.zeros(self._shape, self._dtype)
        for i, (member, part) in enumerate(zip(self.members, self._parts, strict=True)):
            if member in observations:
                seen = _features(observations[member], self._masks[i])
                if self._plain:
                    obs[i] = seen
                else:
                    flat = np.ravel(np.asarray(spaces.flatten(part, seen)))
                    obs[i, : flat.size] = flat
        if not self.masked:
            return {"obs": obs}
        mask = np.zeros((len(self.members), max(self._choices)), np.int8)
        for i, member in enumerate(self.members):
            if member not in acting:
                mask[i, 0] = 1
            elif self._masks[i]:
                mask[i, : self._choices[i]] = np.asarray(observations[member][ACTION_MASK]).reshape(-1)
            else:
                mask[i, : self._choices[i]] = 1
        return {"obs": obs, ACTION_MASK: mask}

    def actions(self, joined: Any, acting: set[str]) -> Agents:
        """Of the members who act, in their own units."""
        chosen = {m: joined[i] for i, m in enumerate(self.members) if m in acting}
        if not self._choices:
            return chosen
        starts = dict(zip(self.members, self._starts, strict=True))
        return {m: int(a) + starts[m] for m, a in chosen.items()}


class Teams(AroundAgents):
    """A game whose teams are agents. Who is in no team stays an agent."""

    def __init__(self, env: MultiAgentEnv, teams: Mapping[str, Sequence[Any]]):
        self.env, self._who = env, type(env).__name__
        members = {name: [str(m) for m in of] for name, of in teams.items()}
        _check_members(members, env.possible_agents)
        self.teams = {name: Team(name, of, env) for name, of in members.items()}
        taken = {m for of in members.values() for m in of}
        self._single = [a for a in env.possible_agents if a not in taken]
        self.possible_agents = [*self.teams, *self._single]
        self.observation_spaces = {n: t.observation_space for n, t in self.teams.items()} | {
            a: env.observation_space(a) for a in self._single
        }
        self.action_spaces = {n: t.action_space for n, t in self.teams.items()} | {
            a: env.action_space(a) for a in self._single
        }
        self.global_state_space = env.global_state_space
        self.metadata, self.render_mode = env.metadata, env.render_mode
        self._living: dict[str, set[str]] = {}
        self._acting: set[str] = set()
        self._steps = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Agents, Agents]:
        obs, infos = answered("reset", self.env.reset(seed=seed, options=options), self._who)
        self._steps, self._acting = 0, set(obs)
        self._living = {name: set(team.members) for name, team in self.teams.items()}
        joined = {a: obs[a] for a in self._single if a in obs}
        for name, team in self.teams.items():
            if self._asked(team):
                joined[name] = team.observe(obs, self._acting)
        return joined, {a: infos[a] for a in self._single if a in infos}

    def step(self, actions: Agents) -> StepOfAgents:
        acted, given = self._acting, {}
        for name, action in actions.items():
            given.update(self.teams[name].actions(action, acted) if name in self.teams else {name: action})
        obs, rewards, terminateds, truncateds, _ = results = answered("step", self.env.step(given), self._who)
        self._steps += 1
        over = game_over(terminateds, truncateds, self._who)
        ends = {a for a in {**terminateds, **truncateds} if ended(a, terminateds, truncateds)}
        self._acting = set() if over else obs.keys() - ends
        kept = (*self._single, ALL)
        joined: Any = tuple({a: x[a] for a in kept if a in x} for x in results)
        for name, team in self.teams.items():
            members = set(team.members)
            self._living[name] = (self._living[name] - ends) | (self._acting & members)
            done = over or not self._living[name]
            terminated = terminateds.get(ALL, False) if over else any(terminateds.get(m) for m in ends & members)
            joined[2][name], joined[3][name] = done and bool(terminated), done and not terminated
            if done or self._asked(team):
                acting = self._acting
                if joined[3][name]:  # learners bootstrap from what members would have chosen from
                    acting = {m for m in members & obs.keys() if not terminateds.get(m)}
                joined[0][name] = team.observe(obs, acting)
            joined[1][name] = sum(as_float(rewards[m], m) for m in team.members if m in rewards)
            joined[4][name] = {
                REWARDS: np.array([as_float(rewards.get(m, 0.0), m) for m in team.members], np.float32),
                ALIVE: np.array([m in acted for m in team.members], bool),
            }
        return joined

    def _asked(self, team: Team) -> bool:
        """Whether the team decides next: then all of its living members do."""
        living = self._living[team.name]
        asked = living & self._acting
        if asked and asked != living:
            missing = [m for m in team.members if m in living - asked]
            raise EnvError(
                f"env.teams.{team.name}: {', '.join(missing)} has no observation at step {self._steps} and has not "
                f"ended, while there is one of {', '.join(m for m in team.members if m in asked)}: members of a team "
                "act at the same time. Leave it out of the team, or give it an observation"
            )
        return bool(asked)


class OneAgent(gym.Env):
    """A game of one agent, which may be a team, as an environment that any training plays.

    A global state that the game declares stands beside the observation, as the key `global_state` of a Dict."""

    def __init__(self, env: MultiAgentEnv):
        (self.agent,) = env.possible_agents
        self.env, self._who = env, type(env).__name__
        self.observation_space = env.observation_space(self.agent)
        self.action_space = env.action_space(self.agent)
        self.metadata, self.render_mode = dict(env.metadata), env.render_mode
        self.members: tuple[str, ...] = ()
        """Of the team, where it is one."""
        if isinstance(env, Teams) and self.agent in env.teams:
            self.members = env.teams[self.agent].members
        self.global_state_space = env.global_state_space
        self.observation_space = beside_state(self.observation_space, self.global_state_space, self.agent)

    def _seen(self, obs: Any) -> Any:
        if self.global_state_space is None:
            return obs
        return {**(obs if isinstance(obs, Mapping) else {"obs": obs}), GLOBAL_STATE: self.env.global_state()}

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        obs, infos = answered("reset", self.env.reset(seed=seed, options=options), self._who)
        if self.agent not in obs:
            raise EnvError(f"{self.agent} has no observation after reset, and nobody else plays")
        return self._seen(obs[self.agent]), infos.get(self.agent, {})

    def step(self, action: Any) -> Any:
        out = answered("step", self.env.step({self.agent: action}), self._who)
        obs, rewards, terminateds, truncateds, infos = out
        over = game_over(terminateds, truncateds, self._who)
        done = over or ended(self.agent, terminateds, truncateds)
        if self.agent not in obs:
            why = "and the game is not over" if not done else "of its end"
            raise EnvError(f"{self.agent} has no observation after a step {why}, and nobody else plays")
        terminated = bool(terminateds.get(self.agent) or terminateds.get(ALL))
        reward = as_float(rewards.get(self.agent, 0.0), self.agent)
        return self._seen(obs[self.agent]), reward, terminated, done and not terminated, infos.get(self.agent, {})

    def render(self) -> Any:
        return self.env.render()

    def close(self) -> None:
        self.env.close()


def beside_state(seen: Any, state: Any, agent: str) -> Any:
    """What an agent sees, with a global state that the game declares beside it."""
    if state is None:
        return seen
    entries = dict(seen.spaces) if isinstance(seen, spaces.Dict) else {"obs": seen}
    if GLOBAL_STATE in entries:
        raise ConfigError(
            f"{agent} observes a key {GLOBAL_STATE!r} and the game declares global_state_space, which gets this key: "
            "give the member of the observation another name"
        )
    return spaces.Dict({**entries, GLOBAL_STATE: state})


def _check_members(teams: Mapping[str, Sequence[str]], agents: Sequence[str]) -> None:
    seen: dict[str, str] = {}
    for name, members in teams.items():
        if not members:
            raise ConfigError(f"env.teams.{name} has no members; agents are {', '.join(agents)}")
        for member in members:
            if member not in agents:
                raise UnknownName("agent", member, agents, f"env.teams.{name}")
            if (other := seen.setdefault(member, name)) != name or members.count(member) > 1:
                raise ConfigError(f"env.teams: {member} is in {other} and in {name}; an agent is in one team, once")
        if name in agents and name not in members:
            raise ConfigError(f"env.teams.{name}: an agent has this name already; give the team another one")


def _without_mask(space: Any) -> tuple[Any, bool]:
    """What a member observes besides its mask of legal actions, and whether it has one."""
    if not isinstance(space, spaces.Dict):
        return space, False
    rest = {k: s for k, s in space.spaces.items() if k != ACTION_MASK}
    masked = len(rest) < len(space.spaces)
    return (next(iter(rest.values())) if masked and len(rest) == 1 else spaces.Dict(rest)), masked


def _features(obs: Any, masked: bool) -> Any:
    if not masked:
        return obs
    rest = {k: x for k, x in obs.items() if k != ACTION_MASK}
    return next(iter(rest.values())) if len(rest) == 1 else rest
