"""A sampler: environments, a Policy and a copy of the Model (or a line to it), in a process of their own. It plays rows
when it is asked to."""

from __future__ import annotations

import itertools
import pickle
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch

from bray.act import Clock
from bray.data.experience import Counts
from bray.data.piece import Piece, side_by_side
from bray.envs.config import EnvConfig
from bray.envs.make import make_vec
from bray.envs.rewards import Moments, RewardTransform
from bray.envs.table import ALL_ONE, DEFAULT, Seating
from bray.envs.vector import VecEnv, episode_seed
from bray.inference.torch_engine import load_weights
from bray.metrics.spent import WEIGHTS, Cores, Laps
from bray.train.acting import acting_engine, initial_state
from bray.train.callbacks import CallbackList
from bray.train.central import Answers, CentralEngine, Line
from bray.train.config import RunConfig
from bray.train.machine import cores
from bray.train.matches import Deal, Dealt, LeagueSeats, MatchSource, Snapshots, Told
from bray.train.output import EpisodeOutput
from bray.train.rollout import EnvSource, Rollout
from bray.train.source import RolloutWorker
from bray.train.table import Match, SeatRollout, TableSource


@dataclass
class Parts:
    """What a training consists of: enough to act as it does in another process."""

    algo: Any
    run: RunConfig
    env: EnvConfig
    model: Any
    config: Any
    """Of the algorithm."""


@dataclass
class SamplerPlan(Parts):
    """What a sampler is told."""

    index: int
    """From 1; 0 is the process that learns."""
    rows: int
    state_every: int
    life: int = 0
    """How many workers this one replaces; it plays other episodes than they did."""
    begun: int = 0
    """Environment steps of the run when it started: after a resume `life` counts anew."""

    @property
    def seed(self) -> int:
        """Of the episodes and the draws of this life."""
        seed = self.run.seed
        return episode_seed(episode_seed(seed, self.index, self.life), self.index, self.begun) if self.life else seed


class Played(NamedTuple):
    """The rows that a sampler was asked for."""

    pieces: list[Piece]
    """Of each side, and of any length where the games of a side act when it is their turn."""
    counts: Counts
    seconds: dict[str, float]
    """Since the answer before, by phase (`train/spent.py`)."""
    metrics: list[dict[str, float]]
    """`custom_metrics` of the episodes that ended."""
    returns: Moments
    """Of its returns, where rewards are normalised by them (`RewardTransform`)."""
    matches: tuple[Match, ...] = ()
    """Games of several agents that ended."""
    told: Told | None = None
    """What is told of a league."""


class Sampler:
    """See the module."""

    def __init__(self, plan: SamplerPlan, line: Line | None = None):
        """line: where inference is central, whom to ask."""
        torch.set_num_threads(1)
        self._plan, self._line, self._seed = plan, line, plan.seed
        torch.manual_seed(self._seed)
        groups = group_numbers(plan.run, plan.env.num_envs)
        told: dict[str, Any] = {
            "seed": self._seed,
            "worker_index": plan.index,
            "threads": max(1, cores() // plan.run.workers),
        }
        envs = [make_vec(plan.env, numbers=n if len(groups) > 1 else None, **told) for n in groups]
        self.model = plan.algo.make_model(plan.config, envs[0].spec, plan.model)
        answers = Answers(line) if line else None
        sources: list[EnvSource] = []
        for g, (env, numbers) in enumerate(zip(envs, groups, strict=True)):
            engine = CentralEngine(line, g, answers, plan.life) if line and answers else None
            sources.append(self._play_group(env, numbers, engine))
        self._groups = sources
        self.source = sources[0] if len(sources) == 1 else Turns(sources)
        self.laps, self._cores = Laps(), Cores(every=0.1)

    def _play_group(self, env: VecEnv, numbers: range, engine: Any) -> EnvSource:
        plan = self._plan
        policy = plan.algo.Policy(plan.config, env.spec)
        policy.draws = getattr(self.model, "draws", None) or {}
        rewards = RewardTransform(plan.env, len(numbers), getattr(plan.config, "gamma", 1.0))
        policy.seat(self._mine(numbers).start, len(numbers), plan.run.workers * plan.env.num_envs)
        rollout = Rollout(
            env,
            engine or acting_engine(self.model, policy, plan.run.record),
            policy,
            self._rng(self._seed, numbers),
            rewards=rewards if rewards.active else None,
            initial_state=initial_state(self.model),
        )
        rollout.worker_index, rollout.numbers_from = plan.index, numbers.start
        if plan.run.output is not None:
            rollout.output = EpisodeOutput(plan.run.output, plan.index, numbers.start, plan.run.output_file_mb)
        rollout.reset()  # by the seed that they were made with: native ones of another worker have another one
        return EnvSource(rollout, plan.rows, plan.state_every, plan.run.record)

    def _mine(self, numbers: range) -> range:
        """Which of the environments of all workers these are."""
        before = (self._plan.index - 1) * self._plan.env.num_envs
        return range(before + numbers.start, before + numbers.stop)

    def _rng(self, seed: int, numbers: range) -> Any:
        return RowsOfAll(seed, self._mine(numbers), self._plan.run.workers * self._plan.env.num_envs)

    def play(self, weights: Mapping[str, np.ndarray], clock: Clock, returns: Moments) -> Played:
        """The rows of a piece with these weights; where it has a line, with those of whom it asks. Rewards are
        normalised by the `returns` of all samplers, and what comes here."""
        self.laps.lap("idle")
        if self._line is None:
            load_weights(self.model, weights)
        self.laps.lap(WEIGHTS)
        self.source.set_clock(clock)
        for rewards in self._normalized:
            rewards.learn(returns)
        pieces, counts = self.source.gather()
        news = Moments.of_all(rewards.take_news() for rewards in self._normalized)
        return Played(pieces, counts, self._seconds(), self.source.ended_metrics(), news)

    @property
    def _normalized(self) -> list[RewardTransform]:
        transforms = [group.rollout.rewards for group in self._groups]
        return [rewards for rewards in transforms if rewards is not None and rewards.normalize]

    def _seconds(self) -> dict[str, float]:
        self.laps.lap("other")  # what of it was env and forward, the source knows
        spent = self.laps.take() | (played := self.source.seconds())
        spent["other"] -= sum(played.values())
        spent["transfer"] = spent.get("transfer", 0.0) + spent[WEIGHTS]
        return spent | self._cores.take()

    def watch(self, callbacks: bytes) -> None:
        self.source.watch(pickle.loads(callbacks))  # our own bytes, from our own parent

    def foreach_env(self, fn: bytes) -> list[Any]:
        return self.source.foreach_env(pickle.loads(fn))  # our own bytes, from our own parent

    def foreach_worker(self, fn: bytes) -> Any:
        worker = RolloutWorker(
            self._plan.index,
            tuple(group.rollout.env for group in self._groups),
            None if self._line else self.model,
            tuple(group.rollout.policy for group in self._groups),
        )
        return pickle.loads(fn)(worker)  # our own bytes, from our own parent

    def get_state(self) -> dict[str, Any]:
        return self.source.get_state()

    def set_state(self, state: dict[str, Any], clock: Clock) -> bool:
        """False, with new episodes, where the environments were in another number of groups."""
        if len(state["json"].get("groups", (None,))) != len(self._groups):
            self.start_anew(clock)
            return False
        return self.source.set_state(state, clock)

    def start_anew(self, clock: Clock) -> None:
        """Other episodes and other random numbers than those that the run began with."""
        for group in self._groups:
            numbers = range(group.rollout.numbers_from, group.rollout.numbers_from + group.rollout.env.num_envs)
            seed = episode_seed(self._plan.run.seed, 1 + self._mine(numbers).start, 1 + clock.env_steps)
            group.rollout.rng = self._rng(seed, numbers)
            group.rollout.reset(seed)

    def close(self) -> None:
        with suppress(Exception):
            self.source.close()


@dataclass
class SidePlan:
    """One policy at a table, as a sampler plays it."""

    algo: Any
    model: Any
    config: Any
    """Of the algorithm."""
    rows: int | None
    """Of a piece; None: nobody learns from what it does."""
    replays: bool
    state_every: int


@dataclass
class GamePlan(SamplerPlan):
    """What a sampler of games of several agents is told."""

    sides: dict[str, SidePlan] = field(default_factory=dict)
    seating: Seating = ALL_ONE


def make_sampler(plan: SamplerPlan, line: Any = None) -> Any:
    return GameSampler(plan, line) if isinstance(plan, GamePlan) else Sampler(plan, line)


class GameSampler:
    """A sampler of games of several agents: as `Sampler`, with a Model and a Policy for each side. Weights come by
    `SIDE/name`, with the version of each side's as `SIDE/` alone."""

    def __init__(self, plan: GamePlan, lines: Mapping[str, Line] | None = None):
        """lines: where inference is central, whom each side asks."""
        torch.set_num_threads(1)
        self._plan, self._lines = plan, lines or {}
        torch.manual_seed(plan.seed)
        threads = max(1, cores() // plan.run.workers)
        env = make_vec(plan.env, seed=plan.seed, worker_index=plan.index, threads=threads, seating=plan.seating)
        games, total = env.num_envs, plan.run.workers * env.num_envs
        self.models: dict[str, Any] = {}
        league, seats, snapshots = plan.run.self_play, {}, {}
        for i, (name, of) in enumerate(plan.sides.items()):
            side = env.spec.sides[name if league is None else DEFAULT]
            model = self.models[name] = of.algo.make_model(of.config, side.spec, of.model)
            policy = of.algo.Policy(of.config, side.spec)
            policy.draws = getattr(model, "draws", None) or {}
            make: Any = SeatRollout
            if league is not None:
                snapshots[name] = Snapshots(name, model, policy, league.pool + 1, plan.run.record)
                make = partial(LeagueSeats, snapshots=snapshots[name])
            mine = range((plan.index - 1) * games * side.seats, plan.index * games * side.seats)
            policy.seat(mine.start, len(mine), total * side.seats)
            rewards = RewardTransform(plan.env, len(mine), getattr(of.config, "gamma", 1.0))
            seats[name] = make(
                name,
                side,
                games,
                self._engine(name, model, policy),
                policy,
                RowsOfAll(plan.seed, mine, total * side.seats, i),
                rewards=rewards if rewards.active else None,
                initial_state=initial_state(model),
                rows=of.rows,
                replays=of.replays,
                state_every=of.state_every,
                record=plan.run.record,
            )
            seats[name].first_seat = mine.start
        self._dealt = Dealt(snapshots)
        deals: Any = TableSource if league is None else partial(MatchSource, deals=self._dealt)
        self.source: TableSource = deals(env, seats, env.spec.agents)
        self.source.worker_index = plan.index
        self.source.reset()
        self.laps, self._cores = Laps(), Cores(every=0.1)

    def _engine(self, name: str, model: Any, policy: Any) -> Any:
        line = self._lines.get(name)
        if line is None:
            return acting_engine(model, policy, self._plan.run.record)
        return CentralEngine(line, 0, Answers(line), self._plan.life)

    def play(
        self, weights: Mapping[str, np.ndarray], clock: Clock, returns: Moments, deal: Deal | None = None
    ) -> Played:
        """Games with these weights, until one side has a piece. In a league they are the matches that it is dealt."""
        self.laps.lap("idle")
        if deal is not None:
            self._dealt.take(deal)
        for name, seat in self.source.seats.items():
            mine = {k.removeprefix(f"{name}/"): x for k, x in weights.items() if k.startswith(f"{name}/")}
            seat.version, seat.env_steps = int(mine.pop("")), self.source.env_steps
            if name not in self._lines:
                load_weights(self.models[name], mine)
            seat.set_clock(Clock(clock.env_steps, seat.version))
        self.laps.lap(WEIGHTS)
        pieces, counts = self.source.gather()
        self.laps.lap("other")
        spent = self.laps.take() | (played := self.source.seconds())
        spent["other"] -= sum(played.values())
        spent["transfer"] = spent.get("transfer", 0.0) + spent[WEIGHTS]
        metrics = self.source.ended_metrics()
        told = None if deal is None else self._dealt.tell()
        return Played(pieces, counts, spent | self._cores.take(), metrics, Moments(), tuple(self.source.ended), told)

    def watch(self, callbacks: bytes) -> None:
        self.source.watch(pickle.loads(callbacks))  # our own bytes, from our own parent

    def foreach_env(self, fn: bytes) -> list[Any]:
        return self.source.foreach_env(pickle.loads(fn))  # our own bytes, from our own parent

    def foreach_worker(self, fn: bytes) -> Any:
        policies = tuple(seat.policy for seat in self.source.seats.values())
        worker = RolloutWorker(self._plan.index, (self.source.env,), None if self._lines else self.models, policies)
        return pickle.loads(fn)(worker)  # our own bytes, from our own parent

    def get_state(self) -> dict[str, Any]:
        return self.source.get_state()

    def set_state(self, state: dict[str, Any], clock: Clock) -> bool:
        return self.source.set_state(state, clock)

    def start_anew(self, clock: Clock) -> None:
        """Other games and other random numbers than those that the run began with."""
        seed = episode_seed(self._plan.run.seed, self._plan.index, 1 + clock.env_steps)
        for i, seat in enumerate(self.source.seats.values()):
            seat.rng = np.random.default_rng([seed, i])
        self._dealt.clear()
        self.source.reset(seed)

    def close(self) -> None:
        with suppress(Exception):
            self.source.close()


class Turns:
    """Groups of environments that play in turn, as one source: while one waits for its answer, the others step. Its
    columns are theirs side by side."""

    def __init__(self, groups: list[EnvSource]):
        self.groups = groups

    def set_clock(self, clock: Clock) -> None:
        for group in self.groups:
            group.set_clock(clock)

    def gather(self) -> tuple[list[Piece], Counts]:
        rows = self.groups[0].rows
        for group in self.groups:
            group.begin()
            group.rollout.ask()
        for t in range(rows - 1):
            for group in self.groups:
                group.row(t)
                group.rollout.ask()
        pieces, counts = [], Counts()
        for group in self.groups:
            group.row(rows - 1)
            (piece,), counted = group.end()
            pieces.append(piece)
            counts = Counts(counts.env_steps + counted.env_steps, (*counts.episodes, *counted.episodes))
        return [side_by_side(pieces)], counts

    def seconds(self) -> dict[str, float]:
        spent = [group.seconds() for group in self.groups]
        return {name: sum(one[name] for one in spent) for name in spent[0]}

    def ended_metrics(self) -> list[dict[str, float]]:
        return [metrics for group in self.groups for metrics in group.ended_metrics()]

    def watch(self, callbacks: CallbackList) -> None:
        for group in self.groups:
            group.watch(callbacks)

    def foreach_env(self, fn: Callable[[Any], Any]) -> list[Any]:
        return [result for group in self.groups for result in group.foreach_env(fn)]

    def get_state(self) -> dict[str, Any]:
        states = [group.get_state() for group in self.groups]
        arrays = {str(g): state["arrays"] for g, state in enumerate(states)}
        exact = all(state["json"]["exact"] for state in states)
        return {"arrays": arrays, "json": {"groups": [state["json"] for state in states], "exact": exact}}

    def set_state(self, state: dict[str, Any], clock: Clock) -> bool:
        saved = state["json"]["groups"]
        told = [{"arrays": state["arrays"][str(g)], "json": json} for g, json in enumerate(saved)]
        exact = [group.set_state(one, clock) for group, one in zip(self.groups, told, strict=True)]
        return all(exact)

    def close(self) -> None:
        for group in self.groups:
            group.close()


def group_numbers(run: RunConfig, num_envs: int) -> list[range]:
    """The environments of each group of a worker."""
    groups = min(num_envs, run.env_groups or (2 if run.inference == "central" else 1))
    edges = [round(num_envs * g / groups) for g in range(groups + 1)]
    return [range(a, b) for a, b in itertools.pairwise(edges)]


class _Bits:
    """The state of a generator, which all workers share, with a seed of this worker's own for those who make generators
    from it."""

    def __init__(self, rng: np.random.Generator, seed: list[int]):
        self._rng, self.seed_seq = rng, np.random.SeedSequence(seed)

    @property
    def state(self) -> Any:
        return self._rng.bit_generator.state

    @state.setter
    def state(self, state: Any) -> None:
        self._rng.bit_generator.state = state


class RowsOfAll:
    """A random generator that draws for the environments of all workers and gives out those of `mine`: they act as they
    would in one process."""

    def __init__(self, seed: int, mine: range, total: int, stream: int = 0):
        self._rng = np.random.default_rng([seed, stream])
        self.bit_generator = _Bits(self._rng, [seed, stream, mine.start])
        self._rows, self._all, self._mine = len(mine), total, slice(mine.start, mine.stop)

    def _draw(self, draw: Callable[..., Any], size: Any, *arguments: Any) -> Any:
        shape = (size,) if isinstance(size, int) else tuple(size or ())
        if not shape or shape[0] != self._rows:
            return draw(*arguments, size)
        return draw(*arguments, (self._all, *shape[1:]))[self._mine]

    def random(self, size: Any = None, dtype: Any = np.float64) -> Any:
        return self._draw(lambda size: self._rng.random(size, dtype), size)

    def standard_normal(self, size: Any = None, dtype: Any = np.float64) -> Any:
        return self._draw(lambda size: self._rng.standard_normal(size, dtype), size)

    def normal(self, loc: Any = 0.0, scale: Any = 1.0, size: Any = None) -> Any:
        return self._draw(self._rng.normal, size, loc, scale)

    def choice(self, a: Any, size: Any = None, replace: bool = True, p: Any = None) -> Any:
        return self._draw(lambda size: self._rng.choice(a, size, replace, p), size)

    def uniform(self, low: float = 0.0, high: float = 1.0, size: Any = None) -> Any:
        return self._draw(self._rng.uniform, size, low, high)

    def integers(self, low: int, high: int | None = None, size: Any = None) -> Any:
        return self._draw(self._rng.integers, size, low, high)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"rng.{name}: in a rollout worker a Policy draws by random, standard_normal, normal, uniform, integers "
            "and choice, which are drawn for the environments of all workers so that these act as in one process"
        )
