"""Self-play and leagues: policies play each other, and each other and themselves as they were.

    a game begins     the league draws a job: of each agent, which policy decides, as it learns or which snapshot of it
    each step         one forward for all seats of a policy that learn, and one for each snapshot that is to decide
    a game ends       its result goes to the league's log, and the next job is drawn
    an update         the league says whether the weights are frozen now

With rollout workers the process that learns has the league: a question brings a worker jobs, and weights of snapshots
that it does not have; its answer brings the results.

All policies sit at the same side of the table, each at the seats that the job gives it. Only seats of policies that
learn have rows. Snapshots are copies of weights in the run directory, beside those of its checkpoints, and stay there.
"""

from __future__ import annotations

import logging
from collections import OrderedDict, deque
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from bray.act import Clock
from bray.data.experience import Counts
from bray.data.piece import Piece
from bray.envs.process import Lost
from bray.envs.table import DEFAULT
from bray.envs.vector import VecEnv
from bray.errors import CheckpointError
from bray.league import IN_RUN, Job, League, Outcome, PlayerRef, Rating, ResultLog, make_players
from bray.metrics.rows import side_key
from bray.rundir import RunDir
from bray.train.acting import ActingPolicy
from bray.train.config import RunConfig
from bray.train.game_workers import GameWorkers
from bray.train.matches import Deal, LeagueSeats, MatchSource, Snapshots, jobs_in, snapshots_of
from bray.train.opponents import FIRST
from bray.train.sampler import Played
from bray.train.side import Side
from bray.train.table import WINDOW, outcome, shares
from bray.train.workers import Seat

logger = logging.getLogger("bray")

KEPT = 64
"""Snapshots whose weights a worker keeps, and the process that learns for those that do not have them yet."""


def players_of(run: RunConfig) -> dict[str, Any]:
    """What a config says of each player of its league."""
    if not run.policies:
        return {DEFAULT: "self_play"}
    said = {name: own.get("player") if isinstance(own, Mapping) else None for name, own in run.policies.items()}
    return {name: player or "main" for name, player in said.items()}


class RunLeague:
    """The league of a run: draws its matches, counts their results, and keeps copies of the players' weights."""

    def __init__(self, sides: Mapping[str, Side], agents: Sequence[str], run: RunConfig):
        assert run.self_play is not None
        self.config = config = run.self_play
        defaults = {key: getattr(config, key) for key in ("pool", "newest", "snapshot_every", "weighting")}
        self.league = League(make_players(players_of(run), defaults), agents, ResultLog())
        most, record = config.pool + 1, run.record
        self.snapshots = {n: Snapshots(n, side.model, side.policy, most, record) for n, side in sides.items()}
        self._sides = dict(sides)
        self._rng = np.random.default_rng([run.seed, 36])
        # Of each player, how its games against others than itself ended.
        self._newest: dict[str, deque[int]] = {name: deque(maxlen=WINDOW) for name in sides}

    def keep_in(self, directory: RunDir) -> None:
        """Where results and snapshots are written."""
        self.league.log.keep_in(directory.path / IN_RUN)
        for snapshots in self.snapshots.values():
            snapshots.keep_in(directory)

    has_jobs = True

    def draw(self) -> Job:
        """A match of players that can play."""
        job = self.league.job(self._rng)
        while not self.are_there(job):
            self.league.drop(job.id)
            job = self.league.job(self._rng)
        return job

    def job_of(self, id: int) -> Job:
        """That is under way."""
        return Job(id, self.league.seats(id))

    def drop(self, id: int) -> None:
        self.league.drop(id)

    def finish(self, job: Job, match: Any) -> bool:
        """A match has ended as this game did; whether its result counts."""
        if not self.league.finish(Outcome(job.id, match.returns, match.length)):
            return False
        for name, newest in self._newest.items():
            mine = [agent for agent, ref in job.seats.items() if ref == PlayerRef(name)]
            if 0 < len(mine) < len(job.seats):
                newest.append(outcome(match, mine))
        return True

    def are_there(self, job: Job) -> bool:
        """Whether all who are to play can; a snapshot whose weights are gone is left out from now on."""
        return all(self._is_there(ref) for ref in dict.fromkeys(job.seats.values()))

    def _is_there(self, ref: PlayerRef) -> bool:
        try:
            if ref.step is not None:
                self.find(ref)
            return True
        except CheckpointError as e:
            logger.warning("%s", e)
            self.league.lost(ref)
            return False

    def find(self, ref: PlayerRef) -> Any:
        """Who plays by a snapshot; CheckpointError where its weights are gone."""
        return self.snapshots[ref.side].player(ref.step or 0)

    def first(self) -> ActingPolicy:
        """The first snapshot of the first player."""
        self.freeze_first(0)
        return self.snapshots[self._first.side].player(self._first.step or 0)

    @property
    def _first(self) -> PlayerRef:
        return self.league.past(next(iter(self._sides)))[0]

    def rate(self, player: PlayerRef, opponent: str, outcomes: Sequence[int]) -> Rating:
        """How strong an opponent is, after games of an evaluation against it. Of the first snapshot its own games
        say it."""
        if opponent == FIRST:
            return self.league.rating(self._first)
        self.league.evaluated(player, opponent, outcomes)
        return self.league.opponents[opponent]

    def freeze_first(self, env_steps: int) -> None:
        """What players begin with: not before `init_from` has been heard."""
        for name, side in self._sides.items():
            if not self.league.past(name):
                self.freeze(name, Clock(env_steps, side.version))

    def freeze(self, name: str, clock: Clock) -> bool:
        """Where it is time to: keep a copy of the weights of now, and where the player starts anew, let it. Whether
        its weights are others now."""
        snapshot = self.league.trained(name, clock.env_steps, clock.version)
        if snapshot is None:
            return False
        self.snapshots[name].add(clock.version, self._sides[name].weights_now())
        if snapshot.anew:
            begun = self.league.past(name)[0]
            try:
                self._sides[name].start_with(self.snapshots[name].weights(begun.step or 0))
                return True
            except CheckpointError as e:
                logger.warning("player %s goes on as it is, and does not start anew from %s: %s", name, begun, e)
        return False

    def numbers(self) -> dict[str, float]:
        found: dict[str, float] = {}
        for name, newest in self._newest.items():
            rating = self.league.rating(PlayerRef(name))
            one = {"league/rating": rating.elo, "league/rating_ci95": rating.half}
            one |= {"league/snapshots": len(self.league.past(name)), **shares("league", newest)}
            found |= one if name == DEFAULT else {side_key(name, key): value for key, value in one.items()}
        return found

    def get_state(self) -> dict[str, Any]:
        newest = {name: list(outcomes) for name, outcomes in self._newest.items()}
        return self.league.get_state() | {"rng": self._rng.bit_generator.state, "newest": newest}

    def set_state(self, state: Mapping[str, Any]) -> None:
        self.league.set_state(state)
        self.set_own_state(state)

    def restart(self, state: Mapping[str, Any]) -> None:
        """Go on behind a state that is older than the log: all of its results count."""
        self.league.restart(state)
        self.set_own_state(state)

    def set_own_state(self, state: Mapping[str, Any]) -> None:
        """All but the league's."""
        self._rng.bit_generator.state = state["rng"]
        for name, outcomes in state["newest"].items():
            self._newest[name] = deque(map(int, outcomes), WINDOW)

    def close(self) -> None:
        self.league.log.close()


class LeagueSource(MatchSource):
    """Games of the players of a league, as it draws them, in this process."""

    def __init__(self, env: VecEnv, seats: Mapping[str, LeagueSeats], agents: Sequence[str], league: RunLeague):
        self.league = league
        super().__init__(env, seats, agents, league)

    def gather(self, timeout: float = 0.0) -> tuple[list[Piece], Counts]:
        self.league.freeze_first(self.env_steps)
        return super().gather(timeout)

    def publish(self, side: str, weights: Any, clock: Clock) -> None:
        super().publish(side, weights, clock)
        self.league.freeze(side, clock)

    def close(self) -> None:
        super().close()
        self.league.close()

    def numbers(self) -> dict[str, float]:
        return super().numbers() | self.league.numbers()


class SentLeague(RunLeague):
    """The league of a run whose matches are played by workers."""

    def __init__(self, sides: Mapping[str, Side], agents: Sequence[str], run: RunConfig):
        super().__init__(sides, agents, run)
        self._newest_weights: OrderedDict[PlayerRef, Mapping[str, np.ndarray]] = OrderedDict()

    def find(self, ref: PlayerRef) -> Mapping[str, np.ndarray]:
        kept = self._newest_weights
        if ref not in kept:
            kept[ref] = self.snapshots[ref.side].weights(ref.step or 0)
            if len(kept) > KEPT:
                kept.popitem(last=False)
        kept.move_to_end(ref)
        return kept[ref]


class LeagueWorkers(GameWorkers):
    """Rollout workers that play the matches of a league. Each has some to play next; those of one that is lost are
    given back, and played under other numbers."""

    def __init__(self, *args: Any, league: SentLeague, **more: Any):
        self.league = league
        super().__init__(*args, **more)
        n, games = len(self._seats), self.plan.env.num_envs
        self._open: list[dict[int, Job]] = [{} for _ in range(n)]
        """Of each worker, matches of which it has not told a result."""
        self._ended = [games] * n
        """Of each worker, matches that its last answer told."""
        self._sits: list[frozenset[PlayerRef]] = [frozenset()] * n
        """Of each worker, snapshots that sat in its games then."""
        self._has: list[OrderedDict[PlayerRef, None]] = [OrderedDict() for _ in range(n)]
        """Of each worker, snapshots whose weights it has."""

    def gather(self, timeout: float = 0.0) -> tuple[list[Piece], Counts]:
        self.league.freeze_first(self._clock.env_steps)
        return super().gather(timeout)

    def publish(self, side: str, weights: Any, clock: Clock) -> None:
        super().publish(side, weights, clock)
        self.league.freeze(side, clock)

    def _question_for(self, seat: Seat) -> tuple[Any, ...]:
        return *super()._question_for(seat), self._deal(seat.index, seat.under_way)

    def _deal(self, w: int, questions: int) -> Deal:
        """Matches for a worker: one more for each game, and as many as it may come to the end of."""
        known, has = self._open[w], self._has[w]
        most = self.plan.env.num_envs + (self._ended[w] * 5 // 4 + 1) * questions
        jobs = [self.league.draw() for _ in range(most - len(known))]
        known |= {job.id: job for job in jobs}
        needed = self._sits[w].union(*map(snapshots_of, known.values()))
        new = sorted(needed - has.keys())
        for ref in sorted(needed):
            has[ref] = None
            has.move_to_end(ref)
        forget = [ref for ref in [*has][: max(0, len(has) - KEPT)] if ref not in needed]
        for ref in forget:
            del has[ref]
        return Deal(jobs, {ref: self.league.find(ref) for ref in new}, forget)

    def _keep(self, w: int, played: Played) -> None:
        assert played.told is not None
        for job in played.told.ended:
            self._open[w].pop(job.id, None)
        self._ended[w], self._sits[w] = len(played.told.ended), played.told.snapshots
        super()._keep(w, played)

    def _count(self, came: list[tuple[int, Played]]) -> Counts:
        """In the order of the workers, so that rounds repeat."""
        for _, played in came:
            assert played.told is not None
            for job, match in zip(played.told.ended, played.matches, strict=True):
                self.league.finish(job if job.id >= 0 else self.league.league.open(job.seats), match)
        return super()._count(came)

    def _replace(self, seat: Seat, why: Lost) -> None:
        self._lose(seat.index)
        super()._replace(seat, why)

    def _lose(self, w: int) -> None:
        """What a worker had is played by others."""
        for id in self._open[w]:
            self.league.league.give_back(id)
        self._open[w], self._sits[w], self._has[w] = {}, frozenset(), OrderedDict()

    def numbers(self) -> dict[str, float]:
        return super().numbers() | self.league.numbers()

    def get_state(self, midway: bool = False) -> dict[str, Any]:
        state = super().get_state(midway)
        state["json"] |= {"league": self.league.get_state(), "ended": list(self._ended)}
        return state

    def set_state(self, state: dict[str, Any], clock: Clock) -> bool:
        """As it was, in rounds. Else games begin anew, and all results of the log count."""
        plain = state["json"]
        workers, saved = plain.get("workers") or (), plain["league"]
        if len(workers) == len(self._seats):
            self.league.set_state(saved)
            if self._take_back(workers) and super().set_state(state, clock):
                self._ended = list(map(int, plain["ended"]))
                return True
        for w in range(len(self._seats)):
            self._lose(w)
        self.league.restart(saved)
        return super().set_state({**state, "json": {**plain, "workers": None}}, clock)

    def _take_back(self, workers: Sequence[Mapping[str, Any]]) -> bool:
        """The matches that workers had; whether all of their players are there."""
        for w, state in enumerate(workers):
            here = {job.id: job for part in ("open", "next") for job in jobs_in(state["league"][part])}
            self._open[w] = {id: job for id, job in here.items() if id >= 0}
            self._sits[w] = frozenset().union(*map(snapshots_of, here.values()))
        return all(self.league.are_there(job) for jobs in self._open for job in jobs.values()) and all(
            self.league.are_there(Job(-1, {str(ref): ref for ref in refs})) for refs in self._sits
        )

    def close(self) -> None:
        super().close()
        self.league.close()
