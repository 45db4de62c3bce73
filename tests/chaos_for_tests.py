"""`Chaos`, a game of several agents in which everything happens that the contract allows, and `collect`, which makes
rows of what it wrote down: by the rules of docs/agents.md, and not as `bray/train/table.py` does it."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass
from typing import Any

import numpy as np
from gymnasium import spaces

import bray

ALL = "__all__"
AGENTS = ("a", "b", "c", "d")
NUMBERS = dict(zip(AGENTS, (0.25, 0.5, 0.75, 1.0), strict=True))


class Chaos(bray.MultiAgentEnv):
    """Agents come, die and come back, act alone or together, and are paid while others move. What is to happen is drawn
    by the seed alone; observations show the last actions. It keeps a `log`.

    even: all act at every step, and the game alone ends. mixed: c and d have spaces of their own. fails: how often a
    step raises."""

    logs: dict[int, list[Any]] = defaultdict(list)  # noqa: RUF012  what a rebuilt one goes on with

    def __init__(self, even: bool = False, mixed: bool = False, fails: float = 0.0, vector_index: int = 0):
        self.even, self.fails, self.possible_agents = even, fails, list(AGENTS)
        masked = {"obs": spaces.Box(-1.0, 99.0, (4,), np.float32), "action_mask": spaces.MultiBinary(3)}
        self.observation_spaces = dict.fromkeys(AGENTS, spaces.Dict(masked))
        self.action_spaces = dict.fromkeys(AGENTS, spaces.Discrete(3))
        if mixed:
            for agent in "cd":
                self.observation_spaces[agent] = spaces.Discrete(50, start=3)
                self.action_spaces[agent] = spaces.MultiDiscrete([2, 3])
        self.number, self.log = vector_index, Chaos.logs[vector_index]

    def _see(self, agent: str) -> Any:
        rng = self.rng
        if isinstance(self.observation_spaces[agent], spaces.Discrete):
            return int(rng.integers(3, 53))
        mask = rng.permutation([1, *rng.integers(0, 2, 2)]).astype(np.int8)
        obs = [self.t / 8, NUMBERS[agent], rng.random(), self.last]
        return {"obs": np.array(obs, np.float32), "action_mask": mask}

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.rng, self.seed, self.t, self.last = np.random.default_rng(seed), seed, 0, 0.0
        self.alive = {a for a in AGENTS if self.even or self.rng.random() < 0.7}
        self.dead: set[str] = set()
        self.silent: set[str] = set()  # who has ended, and is not back before it sees something
        obs = self._next()
        self.due = set(obs)
        self.log.append(("begin", seed, obs))
        return dict(obs), {}

    def _next(self) -> dict[str, Any]:
        """Who decides next, and what they see: all, some, one, or now and then nobody."""
        here, how = sorted(self.alive), self.rng.random()
        if not self.even and here and how < 0.6:
            here = [str(self.rng.choice(here))] if how < 0.4 else [a for a in here if self.rng.random() < 0.5]
        return {agent: self._see(agent) for agent in here}

    def step(self, actions: dict[str, Any]) -> Any:
        assert set(actions) == self.due, (actions, self.due)
        rng = self.rng
        self.t += 1
        self.last = float(sum(np.sum(action) for action in actions.values()) % 4)
        if rng.random() < self.fails:
            self.log.append(("failed", dict(actions)))
            raise RuntimeError("a step of Chaos failed")
        rewards = {a: float(rng.integers(-8, 9)) / 4 for a in AGENTS if a not in self.silent and rng.random() < 0.6}
        rewards |= {a: 0.0 for a in sorted(self.silent) if rng.random() < 0.2}
        terminateds, truncateds, last = {}, {}, {}
        flagged = set() if self.even else {a for a in AGENTS if rng.random() < 0.07 and a not in self.silent}
        passing = (
            set() if self.even else {a for a in sorted(self.dead) if rng.random() < 0.05}
        )  # it is back, and gone again
        for agent in sorted(flagged | passing):
            how = rng.integers(3)
            terminateds[agent], truncateds[agent] = bool(how != 1), bool(how != 0)
            if agent in passing or rng.random() < 0.6:
                last[agent] = self._see(agent)
            self.alive.discard(agent)
        for agent in sorted(self.dead - passing):
            if rng.random() < 0.2:
                terminateds[agent] = True  # said again, which says nothing new
            elif rng.random() < 0.15:
                self.dead.discard(agent)
                self.alive.add(agent)
        self.dead |= flagged
        if not self.even:
            self.alive |= {a for a in AGENTS if a not in self.alive | self.dead and rng.random() < 0.2}
        how = rng.random() if rng.random() < 0.06 else 1.0
        terminateds[ALL], truncateds[ALL] = how < 0.6, 0.4 < how < 1.0
        if over := terminateds[ALL] or truncateds[ALL]:
            obs = last | {a: self._see(a) for a in sorted(self.alive) if self.even or rng.random() < 0.6}
            if rng.random() < 0.5:  # some games say it of each agent too
                terminateds |= dict.fromkeys(self.alive, terminateds[ALL])
                truncateds |= dict.fromkeys(self.alive, truncateds[ALL])
        else:
            obs = last | self._next()
        self.due = set() if over else set(obs) - set(last)
        self.silent = (self.silent | flagged) - self.due
        self.log.append(("step", dict(actions), obs, rewards, dict(terminateds), dict(truncateds)))
        return dict(obs), rewards, terminateds, truncateds, {}


def fixed(agent: str, game: Any) -> str:
    return "one" if agent in "ab" else "two"


def drawn(agent: str, game: Any) -> str:
    """Another policy in each game, by all that is known of it."""
    number = game.env + 5 * game.episode + 11 * game.seed + 3 * AGENTS.index(agent)
    return ("one", "two")[number // 3 % 2]


# --- the collector ----------------------------------------------------------------------------------------------------


@dataclass
class Game:
    """Which one it is, as a mapping is told."""

    env: int
    episode: int
    seed: int


@dataclass
class Row:
    """A decision and what came of it; or the last observation of an episode, which is not `valid`."""

    obs: Any
    first: bool = False
    action: Any = None
    reward: float = 0.0
    terminated: bool = False
    truncated: bool = False
    valid: bool = True
    closed: bool = False


class Collector:
    """The rows of one environment, from its log. A seat is a side and a number: agents of a side have its numbers in
    the order of `possible_agents`."""

    def __init__(self, env: int, side_of: Any, limit: int | None = None):
        """limit: env.max_episode_steps"""
        self.env, self.side_of, self.limit, self.episode = env, side_of, limit, -1
        self.rows: dict[Any, list[Row]] = defaultdict(list)  # by seat
        self.matches: list[Any] = []  # (return of each agent, length) of games that are over
        self.env_steps = self.agent_steps = 0
        self.gone: list[Any] = []  # (seat, observation) of agents that ended in the last step

    def collect(self, log: list[Any]) -> Collector:
        for kind, *told in log:
            self._say_goodbye()
            if kind == "begin":
                self._begin(*told)
            elif kind == "step":
                self._step(*told)
            else:  # the environment is built anew, and nothing is known of what the actions did
                self._step(*told, {}, {}, {}, {ALL: True})
        return self

    def _begin(self, seed: int, obs: Any) -> None:
        self.episode += 1
        game, taken = Game(self.env, self.episode, seed), Counter()
        self.seat = {}
        for agent in AGENTS:
            side = self.side_of(agent, game)
            self.seat[agent] = side, taken[side]
            taken[side] += 1
        self.newest, self.due = dict(obs), dict(obs)
        self.open: dict[str, Row] = {}
        self.playing: set[str] = set()
        self.returns, self.steps = dict.fromkeys(AGENTS, 0.0), 0

    def _step(self, actions: Any, obs: Any, rewards: Any, terminateds: Any, truncateds: Any) -> None:
        assert actions.keys() == self.due.keys()
        self.steps += 1
        self.env_steps += 1
        self.agent_steps += len(actions)
        for agent, action in actions.items():
            row = Row(self.due[agent], agent not in self.playing, action)
            self.rows[self.seat[agent]].append(row)
            self.open[agent] = row
            self.playing.add(agent)
        for agent, reward in rewards.items():
            self.returns[agent] += reward
            if agent in self.open:
                self.open[agent].reward += reward
        self.newest |= obs
        over = terminateds.get(ALL) or truncateds.get(ALL) or self.steps == self.limit
        self.due = {}
        for agent in AGENTS:
            own = terminateds.get(agent) or truncateds.get(agent)  # what is said of itself comes before the game's end
            if own or over:
                if agent in self.playing:
                    row = self.open.pop(agent)
                    row.terminated = bool(terminateds.get(agent) or (not own and terminateds.get(ALL)))
                    row.truncated = not row.terminated
                    row.closed = True
                    self.gone.append((self.seat[agent], self.newest[agent]))
                    self.playing.discard(agent)
            elif agent in obs:
                self.due[agent] = obs[agent]
                if agent in self.open:
                    self.open.pop(agent).closed = True
        if over:
            self.matches.append((self.returns, self.steps))
            self.due = {}

    def _say_goodbye(self) -> None:
        for seat, obs in self.gone:
            self.rows[seat].append(Row(obs, valid=False, closed=True))
        self.gone = []

    def finish(self) -> dict[Any, list[Row]]:
        """With the row that each seat shows next, if any: its decision, or the last observation of its episode."""
        for agent, obs in self.due.items():
            self.rows[self.seat[agent]].append(Row(obs, agent not in self.playing))
        for seat, obs in self.gone:
            self.rows[seat].append(Row(obs, valid=False))
        return self.rows
