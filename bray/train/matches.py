"""The games of a league: who sits where, seats of those who learn and of those who do not, and what a rollout worker
knows of the league whose matches it plays."""

from __future__ import annotations

import copy
from collections import OrderedDict, deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
from torch import nn

from bray import tree
from bray.act import SAMPLE, TRAINED, Clock, Tick, decide_now
from bray.capture import Record
from bray.data.experience import Counts
from bray.data.piece import Piece
from bray.envs.table import DEFAULT
from bray.envs.vector import VecEnv
from bray.errors import CheckpointError
from bray.inference.torch_engine import load_weights
from bray.league import Job, PlayerRef
from bray.rundir import RunDir
from bray.train.acting import ActingPolicy, player_of
from bray.train.rollout import zeroed
from bray.train.table import SeatRollout, TableSource, Turn

LIVE, ELSEWHERE = -1, -2
"""In the place of a snapshot's version: the weights that learn; nobody of this policy."""


class Snapshots:
    """Copies of a policy's weights, by their version; those that play have a Model of their own."""

    def __init__(self, name: str, model: nn.Module, policy: Any, most: int, record: Record = True):
        """most: Models at once. To be made before the policy is told which seats are its own."""
        self._policy = copy.deepcopy(policy)
        self._name, self._model, self._most, self._record = name, model, most, record
        self._players: OrderedDict[int, ActingPolicy] = OrderedDict()
        self._unsaved: dict[int, Mapping[str, np.ndarray]] = {}
        self._directory: RunDir | None = None

    def keep_in(self, directory: RunDir) -> None:
        self._directory = directory
        for version, weights in self._unsaved.items():
            self._save(version, weights)
        self._unsaved = {}

    def add(self, version: int, weights: Mapping[str, np.ndarray]) -> None:
        self._players.pop(version, None)
        if self._directory is None:
            self._unsaved[version] = {name: np.array(x) for name, x in weights.items()}
        else:
            self._save(version, weights)

    def forget(self, version: int) -> None:
        """Nobody plays by it any more."""
        self._unsaved.pop(version, None)
        self._players.pop(version, None)

    def _save(self, version: int, weights: Mapping[str, np.ndarray]) -> None:
        assert self._directory is not None
        self._directory.save_weights(version, weights, self._name)
        self._directory.protect(version, self._name)

    def weights(self, version: int) -> Mapping[str, np.ndarray]:
        """CheckpointError where they are gone."""
        if version in self._unsaved:
            return self._unsaved[version]
        if self._directory is None:
            raise CheckpointError(f"there are no weights of {self._name}, step {version}")
        return self._directory.load_weights(version, self._name)

    def player(self, version: int) -> ActingPolicy:
        """Who plays by these weights."""
        if version not in self._players:
            weights = self.weights(version)
            full = len(self._players) >= self._most
            player = self._players.popitem(last=False)[1] if full else self._new_player()
            load_weights(player.engine.model, weights)
            self._players[version] = player
        self._players.move_to_end(version)
        return self._players[version]

    def _new_player(self) -> ActingPolicy:
        return player_of(copy.deepcopy(self._model), self._policy, self._record, SAMPLE)


class LeagueSeats(SeatRollout):
    """The seats of one policy: of those that a job gives it, some are its snapshots'."""

    def __init__(self, *args: Any, snapshots: Snapshots, **more: Any):
        super().__init__(*args, **more)
        n = self.num_seats
        self._snapshots = snapshots
        self._version_of = np.full(n, LIVE, np.int64)
        self._others = np.zeros(n, bool)  # seats of snapshots that decide next
        self._began = np.zeros(n, bool)  # those that have decided in this game
        self._draws = np.random.default_rng(self.rng.bit_generator.seed_seq.spawn(1)[0])  # type: ignore[attr-defined]

    def deal(self, game: int, versions: Sequence[int]) -> None:
        """Who sits where in the game that begins."""
        n = self.num_seats // self.games
        self._version_of[game * n : (game + 1) * n] = versions

    def player_at(self, row: int) -> str | None:
        version = int(self._version_of[row])
        return None if version == ELSEWHERE else str(PlayerRef(self.name, None if version == LIVE else version))

    @property
    def mine(self) -> np.ndarray:
        """The seats that this policy decides for, as it is or as it was."""
        return np.flatnonzero(self._version_of != ELSEWHERE)

    def begin(self) -> None:
        """All games are at their first observation, and it is known who plays."""
        live = self._version_of == LIVE
        self._others, self._began[:] = self.acts & (self._version_of >= 0), False
        self.acts = self.acts & live

    def decide(self) -> Any:
        actions = super().decide()
        who = np.flatnonzero(self._others)
        if not len(who):
            return actions
        actions = tree.map(np.array, actions)
        for version in np.unique(self._version_of[who]).tolist():
            self._decide_by(version, who[self._version_of[who] == version], actions)
        self._began[who] = True
        return actions

    def _decide_by(self, version: int, who: np.ndarray, actions: Any) -> None:
        """These seats by the weights of a snapshot. Their number is filled up to one of a few, each of which is
        recorded once."""
        rows = np.resize(who, min(self.num_seats, 1 << (len(who) - 1).bit_length()))
        player, first = self._snapshots.player(version), ~self._began[rows]
        obs = self.env.spec.acting(tree.map(lambda x: x[rows], self.obs))
        state = None if self.state is None else zeroed(tree.map(lambda x: x[rows], self.state), first)
        deciding = player.policy.decide(Tick(obs, None, first), state, self._draws, SAMPLE, TRAINED)
        decision = decide_now(deciding, player.engine.forward)

        def put(to: np.ndarray, of: np.ndarray) -> None:
            to[who] = of[: len(who)]

        tree.map(put, actions, decision.action)
        if self.state is not None:
            self.state = tree.map(np.array, self.state)
            tree.map(put, self.state, decision.carry)

    def take(self, turn: Turn, over: Any) -> None:
        live = self._version_of == LIVE
        acts, ended = turn.acts, turn.terminated | turn.truncated
        if over is not None:
            acts, ended = acts & ~over, ended | over
        self._others = acts & (self._version_of >= 0)
        self._began &= ~ended
        super().take(turn._replace(acts=turn.acts & live), over)

    def seat_state(self) -> dict[str, Any]:
        state = super().seat_state()
        state["arrays"] |= {
            "version_of": self._version_of.copy(),
            "others": self._others.copy(),
            "began": self._began.copy(),
        }
        state["json"]["draws"] = self._draws.bit_generator.state
        return state

    def set_seat_state(self, state: Mapping[str, Any], exact: bool) -> None:
        super().set_seat_state(state, exact)
        self._draws.bit_generator.state = state["json"]["draws"]
        if exact:
            arrays = state["arrays"]
            self._version_of = np.array(arrays["version_of"])
            self._others, self._began = np.array(arrays["others"]), np.array(arrays["began"])


class Deals(Protocol):
    """Who says which matches games are: the league, or in a worker what that was told of it."""

    @property
    def has_jobs(self) -> bool: ...
    def draw(self) -> Job: ...
    def finish(self, job: Job, match: Any) -> bool: ...
    def job_of(self, id: int) -> Job: ...
    def are_there(self, job: Job) -> bool: ...
    def drop(self, id: int) -> None: ...
    def get_state(self) -> dict[str, Any]: ...
    def set_state(self, state: Mapping[str, Any]) -> None: ...


class MatchSource(TableSource):
    """Games, each of which is a match of a league."""

    def __init__(self, env: VecEnv, seats: Mapping[str, LeagueSeats], agents: Sequence[str], deals: Deals):
        self._deals, self._seats = deals, dict(seats)
        self._jobs: list[Job] = []
        """The match of each game; none before they are dealt: a worker is told its matches with its first question."""
        self._resumes = False
        super().__init__(env, seats, agents, DEFAULT)

    def _begin(self, obs: Any) -> None:
        super()._begin(obs)
        if not self._resumes:
            self._jobs = []
            if self._deals.has_jobs:
                self._deal_all()

    def _deal_all(self) -> None:
        self._jobs = [self._deals.draw() for _ in range(self.env.num_envs)]
        for game in range(self.env.num_envs):
            self._deal(game)
        for seat in self._seats.values():
            seat.begin()

    def _deal(self, game: int) -> None:
        """Tell all who sits where in the game that begins."""
        seated = [self._jobs[game].seats[agent] for agent in self._names]
        for name, seat in self._seats.items():
            seat.deal(game, [_version_of(ref, name) for ref in seated])

    def _decide(self) -> dict[str, Any]:
        actions: Any = None
        for seat in self._seats.values():
            mine, chosen = seat.mine, seat.decide()
            if actions is None:
                actions = tree.map(np.array, chosen) if len(self._seats) > 1 else chosen
                continue
            tree.map(lambda to, of, mine=mine: to.__setitem__(mine, of[mine]), actions, chosen)
        return {DEFAULT: actions}

    def step(self) -> None:
        super().step()
        for match in self.matches:
            self._deals.finish(self._jobs[match.game], match)
            self._jobs[match.game] = self._deals.draw()
            self._deal(match.game)

    def gather(self, timeout: float = 0.0) -> tuple[list[Piece], Counts]:
        if not self._jobs:
            self._deal_all()
        return super().gather(timeout)

    def get_state(self, midway: bool = False) -> dict[str, Any]:
        state = super().get_state(midway)
        state["json"]["league"] = self._deals.get_state() | {"jobs": [job.id for job in self._jobs]}
        return state

    def set_state(self, state: dict[str, Any], clock: Clock) -> bool:
        saved = state["json"]["league"]
        self._deals.set_state(saved)
        jobs = [self._deals.job_of(id) for id in map(int, saved["jobs"])]
        if not all(self._deals.are_there(job) for job in jobs):
            state = {**state, "json": {**state["json"], "env": None}}  # games that cannot go on begin anew
        self._resumes = True
        exact = super().set_state(state, clock)
        self._resumes = False
        if exact:
            self._jobs = jobs
        else:
            for job in jobs:
                self._deals.drop(job.id)
            self._jobs = []
        return exact


def _version_of(ref: PlayerRef, name: str) -> int:
    """What `LeagueSeats.deal` is told of a seat."""
    return ELSEWHERE if ref.side != name else LIVE if ref.step is None else ref.step


# --- in a worker ------------------------------------------------------------------------------------------------------


class Deal(NamedTuple):
    """What a worker is told of a league, with each question."""

    jobs: Sequence[Job]
    """To play next."""
    weights: Mapping[PlayerRef, Mapping[str, np.ndarray]]
    """Of snapshots that it does not have yet."""
    forget: Sequence[PlayerRef]


class Told(NamedTuple):
    """What a worker tells of a league, with each answer."""

    ended: tuple[Job, ...]
    """Matches, in the order of their games. One that nobody drew has a number below 0."""
    snapshots: frozenset[PlayerRef]
    """That sit in its games now."""


class Dealt:
    """The league as a worker knows it. When all of its matches are played, a game plays its last one again."""

    def __init__(self, snapshots: Mapping[str, Snapshots]):
        self._snapshots = snapshots
        self.clear()

    def clear(self) -> None:
        self._next: deque[Job] = deque()
        self._open: dict[int, Job] = {}
        self._ended: list[Job] = []
        self._again = 0

    def take(self, deal: Deal) -> None:
        for ref in deal.forget:
            self._snapshots[ref.side].forget(ref.step or 0)
        for ref, weights in deal.weights.items():
            self._snapshots[ref.side].add(ref.step or 0, weights)
        self._next += deal.jobs

    def tell(self) -> Told:
        ended, self._ended = tuple(self._ended), []
        return Told(ended, frozenset(ref for job in self._open.values() for ref in snapshots_of(job)))

    @property
    def has_jobs(self) -> bool:
        return bool(self._next)

    def draw(self) -> Job:
        if self._next:
            job = self._next.popleft()
        else:
            self._again -= 1
            job = Job(self._again, self._ended[-1].seats)
        self._open[job.id] = job
        return job

    def finish(self, job: Job, match: Any) -> bool:
        del self._open[job.id]
        self._ended.append(job)
        return True

    def job_of(self, id: int) -> Job:
        return self._open[id]

    def are_there(self, job: Job) -> bool:
        return True  # whoever learns has looked

    def drop(self, id: int) -> None:
        del self._open[id]

    def get_state(self) -> dict[str, Any]:
        return {"open": _listed(self._open.values()), "next": _listed(self._next), "again": self._again}

    def set_state(self, state: Mapping[str, Any]) -> None:
        self.clear()
        self._open = {job.id: job for job in jobs_in(state["open"])}
        self._next, self._again = deque(jobs_in(state["next"])), int(state["again"])


def snapshots_of(job: Job) -> list[PlayerRef]:
    return [ref for ref in job.seats.values() if ref.step is not None]


def _listed(jobs: Iterable[Job]) -> list[Any]:
    return [[job.id, {agent: str(ref) for agent, ref in job.seats.items()}] for job in jobs]


def jobs_in(saved: Iterable[Any]) -> list[Job]:
    """Matches of a state of `Dealt`."""
    return [Job(int(id), {agent: PlayerRef.parse(ref) for agent, ref in seats.items()}) for id, seats in saved]
