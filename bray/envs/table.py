"""A table: a game of several agents as one environment, so that every form of VecEnv plays many of them at once.

Each agent has a seat at one of the game's **sides**; a side is a policy of the run. What a side sees of B games with N
seats each are B * N rows, and each row goes by its own decisions: it opens when its agent decides and closes when that
agent decides again or ends, with the sum of the rewards in between (`bray/train/table.py`).

    observation  {SIDE: {"obs": [N, ...], "reward": float32[N], "flags": uint8[N], "agent": int16[N]}, "tick": int64}
    action       {SIDE: [N, ...]}, of which those of seats that act count

`flags` has ACTS where the seat decides next, TERMINATED and TRUNCATED where its agent's episode has just ended. `agent`
is the number of the seat's agent among `possible_agents`, -1 where nobody sits. `tick` counts the steps of a game, so
that an observation that is repeated after a failure is known as such. The game is over when the environment is.
"""

from __future__ import annotations

import fnmatch
import logging
import traceback
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from math import isfinite
from typing import Any, NamedTuple

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from gymnasium.vector.utils import batch_space

from bray import tree
from bray.envs.missing import warn_once
from bray.envs.multi_agent import ALL, MultiAgentEnv, answered, as_float, ended, game_over
from bray.envs.spaces import BadValue, BatchCheck, splitter, writer
from bray.envs.teams import Teams, beside_state
from bray.errors import ConfigError, EnvError, UnknownName
from bray.named import load_named
from bray.spec import ACTION_MASK, GLOBAL_STATE, EnvSpec, SideSpec, Space
from bray.tree import NestedArray

log = logging.getLogger("bray.envs")

ACTS, TERMINATED, TRUNCATED = 1, 2, 4
NOBODY = -1
NOBODY_ENDS: Set[str] = frozenset()
DEFAULT = "default"


MakeSpec = Callable[[Any, Any, bool, tuple[str, ...]], EnvSpec]
"""Of a side: its spaces, whether the game declares a global state, and the members where it is a team."""


class Game(NamedTuple):
    """Which game a mapping is asked about."""

    env: int
    """The number of its environment, counted over all workers."""
    episode: int
    seed: int
    """Of this episode."""


@dataclass(frozen=True)
class Seating:
    """Which policy decides for which agent: asked when a game begins, and fixed until it ends."""

    policies: tuple[str, ...] = (DEFAULT,)
    mapping: Any = None
    """{agent or pattern: policy}, `mapping(agent, game)`, or "module:function". None: agents by the names of the
    policies, or all one policy where there is one."""

    def rule(self, agents: Sequence[str]) -> Mapping[str, str] | Callable[[str, Game], str]:
        """The policy of each agent, or a function that says it for each game."""
        mapping = self.mapping
        if isinstance(mapping, str):
            mapping = load_named(mapping, "policy_mapping", "run.policy_mapping", {})
        if callable(mapping):
            return mapping
        if mapping is None:
            if len(self.policies) == 1:
                return dict.fromkeys(agents, self.policies[0])
            mapping = {agent: agent for agent in agents if agent in self.policies}
        if not isinstance(mapping, Mapping):
            raise ConfigError(
                "run.policy_mapping is {agent: policy}, a function (agent, game) or 'module:function', got "
                f"{mapping!r}"
            )
        for agent in mapping:
            if agent not in agents and not any(c in str(agent) for c in "*?["):
                raise UnknownName("agent", str(agent), agents, "run.policy_mapping")
        found = {agent: self._of(agent, agents, mapping) for agent in agents}
        if idle := [name for name in self.policies if name not in found.values()]:
            raise ConfigError(
                f"run.policy_mapping: no agent plays by the policy {idle[0]!r}; agents are {', '.join(agents)}: map "
                "one of them to it, or leave the policy out"
            )
        return found

    def _of(self, agent: str, agents: Sequence[str], mapping: Mapping[str, Any]) -> str:
        names = [policy for pattern, policy in mapping.items() if pattern == agent]
        names = names or [policy for pattern, policy in mapping.items() if fnmatch.fnmatchcase(agent, str(pattern))]
        if not names:
            some = {a: self.policies[i % len(self.policies)] for i, a in enumerate(agents)}
            raise ConfigError(
                f"run.policy_mapping speaks of {', '.join(map(str, mapping)) or 'nobody'}, and not of agent {agent!r}: "
                f"which policy decides for it? Policies are {', '.join(self.policies)}, as in policy_mapping={some}"
            )
        return self.checked(names[0], agent)

    def asked(self, rule: Callable[[str, Game], Any], agent: str, game: Game) -> str:
        """The policy of an agent in a game, by a function."""
        try:
            policy = rule(agent, game)
        except Exception as e:
            trace = "".join(traceback.format_exception(e)).rstrip()
            raise ConfigError(
                f"{trace}\nrun.policy_mapping raised {type(e).__name__} for agent {agent!r}: a function takes "
                f"(agent, game) and returns a policy's name; game was {game}"
            ) from e
        return self.checked(policy, agent)

    def checked(self, policy: Any, agent: str) -> str:
        """A policy that a mapping names."""
        if not isinstance(policy, str):
            raise ConfigError(
                f"run.policy_mapping: expected the name of a policy for agent {agent!r} ({', '.join(self.policies)}), "
                f"got {policy!r}"
            )
        if policy not in self.policies:
            raise UnknownName("policy", policy, self.policies, f"run.policy_mapping: agent {agent!r}")
        return policy


ALL_ONE = Seating()
"""All agents decide by one policy."""


class _Side:
    """One side of a table: its seats, and what they see, written over step by step."""

    def __init__(self, name: str, agents: Sequence[str], table: TableEnv, env: MultiAgentEnv, make_spec: MakeSpec):
        self.name, self.agents, self.seats = name, tuple(agents), len(agents)
        first = self.agents[0]
        self.observation, self.action = table.seen_space(first), env.action_space(first)
        for agent in self.agents[1:]:
            for kind, mine, its in (
                ("observation", self.observation, table.seen_space(agent)),
                ("action", self.action, env.action_space(agent)),
            ):
                if Space.from_gym(mine) != Space.from_gym(its):
                    whose = "one policy" if name == DEFAULT else f"policy {name!r}"
                    raise ConfigError(
                        f"agents {first!r} and {agent!r} have other {kind} spaces ({mine} and {its}), and {whose} "
                        f"{'may be asked' if table.mapped else 'is'} to decide for both: give them policies of their "
                        f"own, as policies={{one: {{}}, two: {{}}}} and policy_mapping={{{first}: one, {agent}: two}}"
                    )
        team = env.teams[first].members if isinstance(env, Teams) and first in env.teams else ()
        spec: EnvSpec = make_spec(self.observation, self.action, env.global_state_space is not None, team)
        self.spec = SideSpec(spec, self.seats)
        self.split = splitter(spec.action)
        self.write = writer(spec.given, table.check, table.on_cast)
        self.obs, self._unseen = _filled(spec.given, self.seats), _filled(spec.given, self.seats)
        self.reward = np.zeros(self.seats, np.float32)
        self.flags = np.zeros(self.seats, np.uint8)
        self.agent = np.full(self.seats, NOBODY, np.int16)

    def forget(self) -> None:
        """A game begins: what a seat shows before it has seen something is the same in each."""
        tree.map(lambda x, unseen: np.copyto(x, unseen), self.obs, self._unseen)

    def space(self) -> spaces.Dict:
        n = self.seats
        return spaces.Dict(
            {
                "obs": batch_space(self.observation, n),
                "reward": spaces.Box(-np.inf, np.inf, (n,), np.float32),
                "flags": spaces.Box(0, ACTS | TERMINATED | TRUNCATED, (n,), np.uint8),
                "agent": spaces.Box(NOBODY, np.iinfo(np.int16).max, (n,), np.int16),
            }
        )

    def seen(self) -> dict[str, Any]:
        return {"obs": self.obs, "reward": self.reward, "flags": self.flags, "agent": self.agent}

    def show_in(self, place: Mapping[str, Any]) -> None:
        self.obs, self.reward = place["obs"], place["reward"]
        self.flags, self.agent = place["flags"], place["agent"]


class TableEnv(gym.Env):
    """See the module. Arrays that it returns are written over by its next step."""

    def __init__(self, env: MultiAgentEnv, seating: Seating, name: str, make_spec: MakeSpec, check: bool = True):
        """check: whether values of other types than declared are refused"""
        self.env, self.name, self.check = env, name, check
        self.metadata, self.render_mode = dict(env.metadata), env.render_mode
        self.at = Game(0, -1, 0)
        """The game that begins at the next reset; set before each reset."""
        agents = list(env.possible_agents)
        self._number = {agent: i for i, agent in enumerate(agents)}
        self._state_space = env.global_state_space
        self._rule = seating.rule(agents)
        self._seating = seating
        fixed = self._rule if isinstance(self._rule, Mapping) else None
        self.mapped = fixed is None
        """Whether a function says before each game which policy decides for whom."""
        of = {p: [a for a in agents if fixed is None or fixed[a] == p] for p in seating.policies}
        self._sides = {p: _Side(p, mine, self, env, make_spec) for p, mine in of.items()}
        self.sides = {p: side.spec for p, side in self._sides.items()}
        self.observation_space = spaces.Dict(
            {**{p: side.space() for p, side in self._sides.items()}, "tick": spaces.Box(0, 1 << 62, (), np.int64)}
        )
        self.action_space = spaces.Dict({p: batch_space(s.action, s.seats) for p, s in self._sides.items()})
        self._seat: dict[str, tuple[_Side, int]] = {}
        self._acting: list[tuple[str, str, int]] = []  # who decides next, its side and seat
        self._ended: Set[str] = NOBODY_ENDS
        self._tick = np.array(0)
        self._seen = {**{p: side.seen() for p, side in self._sides.items()}, "tick": self._tick}
        if fixed is not None:
            self._sit(fixed)

    def seen_space(self, agent: str) -> Any:
        """What a seat of this agent sees: with the global state, where the game declares one."""
        return beside_state(self.env.observation_space(agent), self._state_space, agent)

    def show_in(self, place: dict[str, Any]) -> None:
        """Write what is seen there from now on: to its row of a batch, which nobody has to collect then."""
        tree.map(np.copyto, place, self._seen)
        for name, side in self._sides.items():
            side.show_in(place[name])
        self._tick, self._seen = place["tick"], place

    def on_cast(self, what: str) -> None:
        warn_once(log, f"{self.name}: {what}.")

    def _sit(self, policy_of: Mapping[str, str]) -> None:
        taken = dict.fromkeys(self._sides, 0)
        self._seat = {}
        for side in self._sides.values():
            side.agent.fill(NOBODY)
        for agent, policy in policy_of.items():
            side, i = self._sides[policy], taken[policy]
            self._seat[agent] = side, i
            side.agent[i] = self._number[agent]
            taken[policy] += 1

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        if not isinstance(self._rule, Mapping):
            self._sit({agent: self._seating.asked(self._rule, agent, self.at) for agent in self._number})
        obs, _ = answered("reset", self.env.reset(seed=seed, options=options), self.name)
        for side in self._sides.values():
            side.forget()
        self._tick[...], self._ended = 0, NOBODY_ENDS
        self._show(obs, NOBODY_ENDS)
        return self._seen, {}

    def step(self, actions: Any) -> Any:
        chosen = {p: side.split(actions[p]) for p, side in self._sides.items()}
        given = {agent: chosen[side][i] for agent, side, i in self._acting}
        obs, rewards, terminateds, truncateds, infos = answered("step", self.env.step(given), self.name)
        self._tick[()] += 1
        over, ends = game_over(terminateds, truncateds, type(self.env).__name__), NOBODY_ENDS
        if any(terminateds.values()) or any(truncateds.values()):
            ends = {a for flags in (terminateds, truncateds) for a, is_so in flags.items() if is_so} - {ALL}
        self._show(obs, self._seat.keys() if over else ends)
        total, seats, was_ended, check = 0.0, self._seat, self._ended, self.check
        for agent, reward in rewards.items():
            if type(reward) is not float:
                reward = as_float(reward, agent)
            if was_ended and agent in was_ended and agent not in obs:
                if reward:
                    raise self._wrong(agent, f"it gets the reward {reward}, and has ended before")
                continue
            if agent not in seats:
                raise self._wrong(agent, f"it gets a reward and is none of possible_agents: {', '.join(seats)}")
            if check and not isfinite(reward):
                raise self._wrong(agent, f"its reward is {reward}")
            side, i = seats[agent]
            side.reward[i] = reward
            total += reward
        terminated = False
        if over or ends:
            terminated = bool(over and terminateds.get(ALL))
            for agent in seats.keys() - was_ended if over else ends & seats.keys():
                side, i = seats[agent]
                its_end = terminateds.get(agent) or (terminated and not ended(agent, terminateds, truncateds))
                side.flags[i] |= TERMINATED if its_end else TRUNCATED
        if ends or was_ended:
            self._ended = (was_ended | ends) - {agent for agent, _, _ in self._acting}
        return self._seen, total, terminated, over and not terminated, infos if any(infos.values()) else {}

    def _show(self, observations: Mapping[str, Any], ends: Set[str]) -> None:
        """Write what seats see now; who has not ended decides next."""
        for side in self._sides.values():
            side.reward.fill(0.0)
            side.flags.fill(0)
        state = None if self._state_space is None else self.env.global_state()
        seats, acting = self._seat, []
        for agent, seen in observations.items():
            if agent not in seats:
                raise self._wrong(agent, f"it has an observation and is none of possible_agents: {', '.join(seats)}")
            side, i = seats[agent]
            if state is not None:
                seen = {**(seen if isinstance(seen, Mapping) else {"obs": seen}), GLOBAL_STATE: state}
            try:
                side.write(side.obs, i, seen)
            except BadValue as e:
                raise self._wrong(agent, str(e)) from None
            if agent not in ends:
                side.flags[i] = ACTS
                acting.append((agent, side.name, i))
        self._acting = acting

    def _wrong(self, agent: str, what: str) -> EnvError:
        return EnvError(f"{self.name}, agent {agent!r}, step {self._tick}: {what}")

    def render(self) -> Any:
        return self.env.render()

    def close(self) -> None:
        self.env.close()


class SeatCheck(BatchCheck):
    """The check of games of several: it names agents, and looks at the masks of those who act. What tables write beside
    the observations of agents they have checked themselves."""

    def __init__(self, spec: EnvSpec, bounds: bool = True):
        self._agents = spec.agents
        self._sides = {name: BatchCheck.of(side.spec, bounds) for name, side in spec.sides.items()}

    def first_bad(self, batch: NestedArray) -> tuple[int, str] | None:
        for name, check in self._sides.items():
            found = check.first_bad(by_seat(batch[name]["obs"]))
            if found is not None:
                return self._of_agent(batch[name]["agent"], *found)
        return None

    def first_blocked(self, batch: NestedArray, dead: Any = None) -> tuple[int, str] | None:
        for name, check in self._sides.items():
            if check.masks:
                side = batch[name]
                idle = side["flags"] & ACTS == 0
                if dead is not None:  # cut by its limit, a game has agents who would act
                    idle |= np.asarray(dead)[:, None]
                found = check.first_blocked(by_seat(side["obs"]), idle.reshape(-1))
                if found is not None:
                    return self._of_agent(side["agent"], *found)
        return None

    def _of_agent(self, numbers: np.ndarray, seat: int, what: str) -> tuple[int, str]:
        game, number = seat // numbers.shape[1], numbers.reshape(-1)[seat]
        return game, f"agent {self._agents[number]!r}: {what}"


def by_seat(obs: NestedArray) -> NestedArray:
    """Observations `[B, N, ...]` as `[B * N, ...]`."""
    return tree.map(lambda x: x.reshape(-1, *x.shape[2:]), obs)


def check_of(spec: EnvSpec, bounds: bool) -> BatchCheck:
    """Of environments with this spec; `bounds` as `BatchCheck.of` has them."""
    return SeatCheck(spec, bounds) if spec.sides else BatchCheck.of(spec, bounds)


def _filled(space: Space, rows: int) -> Any:
    """A batch of members, for seats that have seen nothing yet: zeros, or the nearest to it."""
    if space.composite:
        made = space.join(_filled(part, rows) for part in space.parts)
        if space.kind == "dict" and ACTION_MASK in made:
            made[ACTION_MASK] = tree.map(np.ones_like, made[ACTION_MASK])
        return made
    out = np.zeros((rows, *space.shape), space.dtype)
    if space.kind == "box":
        low, high = space.bounds()
        out[...] = np.clip(0.0, low, high)
    elif space.start:
        out[...] = np.reshape(space.start, space.shape)
    return out
