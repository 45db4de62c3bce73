"""Self-play and leagues: policies play each other, and each other and themselves as they were.

    a game begins     the league draws a job: of each agent, which policy decides, as it learns or which snapshot of it
    each step         one forward for all seats of a policy that learn, and one for each snapshot that is to decide
    a game ends       its result goes to the league's log, and the next job is drawn
    an update         the league says whether the weights are frozen now

All policies sit at the same side of the table, each at the seats that the job gives it. Only seats of policies that
learn have rows. Snapshots are copies of weights in the run directory, beside those of its checkpoints, and stay there.
"""

from __future__ import annotations

import copy
import logging
from collections import OrderedDict, deque
from collections.abc import Mapping, Sequence
from typing import Any

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
from bray.league import IN_RUN, Job, League, Outcome, PlayerRef, Rating, ResultLog, make_players
from bray.metrics.rows import side_key
from bray.rundir import RunDir
from bray.train.acting import ActingPolicy, player_of
from bray.train.config import RunConfig
from bray.train.opponents import FIRST
from bray.train.rollout import zeroed
from bray.train.side import Side
from bray.train.table import WINDOW, SeatRollout, TableSource, Turn, outcome, shares

logger = logging.getLogger("bray")

LIVE, ELSEWHERE = -1, -2
"""In the place of a snapshot's version: the weights that learn; nobody of this policy."""


def players_of(run: RunConfig) -> dict[str, Any]:
    """What a config says of each player of its league."""
    if not run.policies:
        return {DEFAULT: "self_play"}
    said = {name: own.get("player") if isinstance(own, Mapping) else None for name, own in run.policies.items()}
    return {name: player or "main" for name, player in said.items()}


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
        self._draws = self.rng.spawn(1)[0]

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

    def draw(self) -> Job:
        """A match of players that can play."""
        job = self.league.job(self._rng)
        while not self.are_there(job):
            self.league.drop(job.id)
            job = self.league.job(self._rng)
        return job

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

    def set_own_state(self, state: Mapping[str, Any]) -> None:
        """All but the league's."""
        self._rng.bit_generator.state = state["rng"]
        for name, outcomes in state["newest"].items():
            self._newest[name].extend(map(int, outcomes))

    def close(self) -> None:
        self.league.log.close()


class LeagueSource(TableSource):
    """Games of the players of a league, as it draws them."""

    def __init__(self, env: VecEnv, seats: Mapping[str, LeagueSeats], agents: Sequence[str], league: RunLeague):
        self.league = league
        self._seats = dict(seats)
        self._jobs: list[Job] = []
        """The match of each game."""
        self._resumes = False
        super().__init__(env, seats, agents, DEFAULT)

    def _begin(self, obs: Any) -> None:
        super()._begin(obs)
        if not self._resumes:
            self._deal_all()

    def _deal_all(self) -> None:
        self._jobs = [self.league.draw() for _ in range(self.env.num_envs)]
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
            self.league.finish(self._jobs[match.game], match)
            self._jobs[match.game] = self.league.draw()
            self._deal(match.game)

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

    def get_state(self, midway: bool = False) -> dict[str, Any]:
        state = super().get_state(midway)
        state["json"]["league"] = self.league.get_state() | {"jobs": [job.id for job in self._jobs]}
        return state

    def set_state(self, state: dict[str, Any], clock: Clock) -> bool:
        saved = state["json"]["league"]
        self.league.set_state(saved)
        jobs = [Job(id, self.league.league.seats(id)) for id in map(int, saved["jobs"])]
        if not all(self.league.are_there(job) for job in jobs):
            state = {**state, "json": {**state["json"], "env": None}}  # games that cannot go on begin anew
        self._resumes = True
        exact = super().set_state(state, clock)
        self._resumes = False
        if exact:
            self._jobs = jobs
        else:
            for job in jobs:
                self.league.league.drop(job.id)
            self._deal_all()
        return exact


def _version_of(ref: PlayerRef, name: str) -> int:
    """What `LeagueSeats.deal` is told of a seat."""
    return ELSEWHERE if ref.side != name else LIVE if ref.step is None else ref.step
