"""Self-play in one process: a policy plays itself, as it is now and as it was.

    a game begins     the league draws a job: of each agent, whether it is the policy that learns or which snapshot
    each step         one forward for all seats that learn, and one for each snapshot that is to decide
    a game ends       its result goes to the league's log, and the next job is drawn
    an update         the league says whether the weights are frozen now

Only the seats of the policy that learns have rows. Snapshots are copies of weights in the run directory, beside those
of its checkpoints, and stay there.
"""

from __future__ import annotations

import copy
import logging
from collections import OrderedDict, deque
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from bray import tree
from bray.act import SAMPLE, TRAINED, Clock, Tick, decide_now
from bray.capture import Record
from bray.data.experience import Counts
from bray.data.piece import Piece
from bray.envs.vector import VecEnv
from bray.errors import CheckpointError
from bray.inference.torch_engine import load_weights
from bray.league import IN_RUN, League, Outcome, PlayerRef, Rating, ResultLog, make_players
from bray.rundir import RunDir
from bray.train.acting import ActingPolicy, player_of
from bray.train.config import SelfPlayConfig
from bray.train.opponents import FIRST
from bray.train.rollout import zeroed
from bray.train.side import Side
from bray.train.table import WINDOW, Match, SeatRollout, TableSource, Turn, outcome, shares

logger = logging.getLogger("bray")

LIVE = -1
"""In the place of a snapshot's version: the weights that learn."""


class Snapshots:
    """Copies of a policy's weights, by their version; those that play have a Model of their own."""

    def __init__(self, side: Side, most: int, record: Record = True):
        """most: Models at once. To be made before the policy is told which seats are its own."""
        self._policy = copy.deepcopy(side.policy)
        self._side, self._most, self._record = side, most, record
        self._players: OrderedDict[int, ActingPolicy] = OrderedDict()
        self._unsaved: dict[int, Mapping[str, np.ndarray]] = {}
        self._directory: RunDir | None = None

    def keep_in(self, directory: RunDir) -> None:
        self._directory = directory
        for version, weights in self._unsaved.items():
            self._save(version, weights)
        self._unsaved = {}

    def add(self, version: int) -> None:
        """The weights of now."""
        self._players.pop(version, None)
        if self._directory is None:
            self._unsaved[version] = self._side.weights()
        else:
            self._save(version, self._side.weights_now())

    def _save(self, version: int, weights: Mapping[str, np.ndarray]) -> None:
        assert self._directory is not None
        self._directory.save_weights(version, weights, self._side.name)
        self._directory.protect(version, self._side.name)

    def player(self, version: int) -> ActingPolicy:
        """Who plays by these weights. CheckpointError where they are gone."""
        if version not in self._players:
            weights = self._unsaved.get(version)
            if weights is None:
                if self._directory is None:
                    raise CheckpointError(f"there are no weights of step {version}")
                weights = self._directory.load_weights(version, self._side.name)
            full = len(self._players) >= self._most
            player = self._players.popitem(last=False)[1] if full else self._new_player()
            load_weights(player.engine.model, weights)
            self._players[version] = player
        self._players.move_to_end(version)
        return self._players[version]

    def _new_player(self) -> ActingPolicy:
        return player_of(copy.deepcopy(self._side.model), self._policy, self._record, SAMPLE)


class LeagueSeats(SeatRollout):
    """The seats of one policy, some of which are its snapshots'."""

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

    def begin(self) -> None:
        """All games are at their first observation, and it is known who plays."""
        live = self._version_of == LIVE
        self._others, self._began[:] = self.acts & ~live, False
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
        self._others = acts & ~live
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


class LeagueSource(TableSource):
    """Games of one policy against itself and its snapshots, as a league draws them."""

    def __init__(
        self,
        env: VecEnv,
        seats: Mapping[str, LeagueSeats],
        agents: Sequence[str],
        config: SelfPlayConfig,
        snapshots: Snapshots,
        seed: int,
    ):
        ((name, self._seats),) = seats.items()
        self.config, self.snapshots = config, snapshots
        keys = ("pool", "newest", "snapshot_every", "weighting")
        about = {"kind": "self_play", **{key: getattr(config, key) for key in keys}}
        self.me = PlayerRef(name)
        self.league = League(make_players({name: about}), agents, ResultLog())
        self._rng = np.random.default_rng([seed, 36])
        self._jobs = [0] * env.num_envs
        self._resumes = False
        self._newest: deque[int] = deque(maxlen=WINDOW)  # how games against snapshots ended
        super().__init__(env, seats, agents)

    def keep_in(self, directory: RunDir) -> None:
        """Where results and snapshots are written."""
        self.league.log.keep_in(directory.path / IN_RUN)
        self.snapshots.keep_in(directory)

    def first(self) -> ActingPolicy:
        """The first of its snapshots."""
        self._freeze_first()
        step = self.league.past()[0].step
        assert step is not None
        return self.snapshots.player(step)

    def rate(self, opponent: str, outcomes: Sequence[int]) -> Rating:
        """How strong an opponent is, after games of an evaluation against it. Of the first snapshot its own games
        say it."""
        if opponent == FIRST:
            return self.league.rating(self.league.past()[0])
        self.league.evaluated(self.me, opponent, outcomes)
        return self.league.opponents[opponent]

    def _freeze_first(self) -> None:
        """What it begins with: not before `init_from` has been heard."""
        if not self.league.past():
            self._freeze(Clock(self.env_steps, self._seats.version))

    def _begin(self, obs: Any) -> None:
        super()._begin(obs)
        if not self._resumes:
            self._deal_all()

    def _deal_all(self) -> None:
        for game in range(self.env.num_envs):
            self._deal(game)
        self._seats.begin()

    def _deal(self, game: int) -> None:
        """Draw who plays the game that begins."""
        job = self.league.job(self._rng)
        while not all(self._is_there(ref) for ref in dict.fromkeys(job.seats.values())):
            self.league.drop(job.id)
            job = self.league.job(self._rng)
        self._jobs[game] = job.id
        self._seats.deal(game, [LIVE if (step := job.seats[a].step) is None else step for a in self.league.agents])

    def step(self) -> None:
        super().step()
        for match in self.matches:
            self._count(match)
            self._deal(match.game)

    def _count(self, match: Match) -> None:
        seats = self.league.seats(self._jobs[match.game])
        if self.league.finish(Outcome(self._jobs[match.game], match.returns, match.length)):
            mine = [agent for agent, ref in seats.items() if ref == self.me]
            if len(mine) < len(seats):
                self._newest.append(outcome(match, mine))

    def gather(self, timeout: float = 0.0) -> tuple[list[Piece], Counts]:
        self._freeze_first()
        return super().gather(timeout)

    def publish(self, side: str, weights: Any, clock: Clock) -> None:
        super().publish(side, weights, clock)
        self._freeze(clock)

    def _freeze(self, clock: Clock) -> None:
        """Where it is time to: keep a copy of the weights of now."""
        snapshot = self.league.trained(self.me.side, clock.env_steps, clock.version)
        if snapshot is not None:
            self.snapshots.add(clock.version)

    def close(self) -> None:
        super().close()
        self.league.log.close()

    def numbers(self) -> dict[str, float]:
        rating = self.league.rating(self.me)
        found = {"league/rating": rating.elo, "league/rating_ci95": rating.half}
        found["league/snapshots"] = len(self.league.past())
        return super().numbers() | found | shares("league", self._newest)

    def get_state(self, midway: bool = False) -> dict[str, Any]:
        state = super().get_state(midway)
        state["json"]["league"] = self.league.get_state() | {
            "jobs": list(self._jobs),
            "rng": self._rng.bit_generator.state,
            "newest": list(self._newest),
        }
        return state

    def set_state(self, state: dict[str, Any], clock: Clock) -> bool:
        saved = state["json"]["league"]
        self.league.set_state(saved)
        self._rng.bit_generator.state = saved["rng"]
        self._newest.extend(map(int, saved["newest"]))
        jobs = list(map(int, saved["jobs"]))
        seated = [ref for job in jobs for ref in self.league.seats(job).values()]
        if not all(self._is_there(ref) for ref in dict.fromkeys(seated)):
            state = {**state, "json": {**state["json"], "env": None}}  # games that cannot go on begin anew
        self._resumes = True
        exact = super().set_state(state, clock)
        self._resumes = False
        if exact:
            self._jobs = jobs
        else:
            for job in jobs:
                self.league.drop(job)
            self._deal_all()
        return exact

    def _is_there(self, ref: PlayerRef) -> bool:
        """Whether it can play; a snapshot whose weights are gone is left out from now on."""
        try:
            if ref.step is not None:
                self.snapshots.player(ref.step)
            return True
        except CheckpointError as e:
            logger.warning("%s", e)
            self.league.lost(ref)
            return False
