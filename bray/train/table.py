"""Games of several agents as a source of pieces: each side's Policy decides for its seats, and each seat's rows are its
own decisions.

    env step      0        1        2        3        4              (a game of two in turns; seat 0 moves first)
    seat 0        decides           decides  .        game over
    its rows      row 0 opens       row 0 closes with the rewards of steps 0 and 1; row 1 opens
                                                      row 1 closes, terminated; then one dead row: its last observation

Where all seats of a side act at every step, their columns stay level and are one piece `[T, S]`, as an environment of
one agent gives. Else each seat's rows that are closed are a piece of its own, as a live game's are, and rows that are
still open begin the next one.
"""

from __future__ import annotations

import json
import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from bray import tree
from bray.act import GREEDY, SAMPLE, TRAINED, Clock, Policy, Tick
from bray.capture import Record
from bray.data.experience import Counts
from bray.data.piece import Piece
from bray.diagnosis.divergence import blame_policy
from bray.envs.rewards import RewardTransform
from bray.envs.table import ACTS, DEFAULT, NOBODY, TERMINATED, TRUNCATED, by_seat
from bray.envs.vector import VecEnv
from bray.inference.torch_engine import TorchEngine
from bray.metrics.rows import side_key
from bray.spec import SideSpec
from bray.train.callbacks import CallbackList, EpisodeMetrics, EpisodeWatch
from bray.train.game_episode import GameEpisode, GameStep, SideStep
from bray.train.rollout import Columns, Rollout, Step, separate_outputs, true_of, zeroed
from bray.train.source import RolloutWorker, Source

logger = logging.getLogger("bray")

WINDOW = 100
"""Games over which the returns of agents are averaged."""
SIZES, FEWEST = 8, 8
"""Of how many sizes the batches of those who act are, and the smallest."""
REPLAY_ROWS = 16
"""Rows of a piece for algorithms that replay: n-step sums end with a piece."""


class Match(NamedTuple):
    """A game that has ended."""

    game: int
    """The number of its environment."""
    players: dict[str, str]
    """Which policy decided for each agent; `NAME@STEP` as it was."""
    returns: dict[str, float]
    length: int

    @property
    def total(self) -> float:
        """Of all agents."""
        return sum(self.returns.values())


def outcome(match: Match, mine: Iterable[str]) -> int:
    """1, 0 or -1 by whether the mean return of these agents is larger than that of the others."""
    ours = [match.returns[agent] for agent in mine]
    others = [x for agent, x in match.returns.items() if agent not in mine]
    by = sum(ours) / len(ours) - sum(others) / len(others)
    return 0 if abs(by) < 1e-9 else 1 if by > 0 else -1


def shares(group: str, outcomes: Iterable[int]) -> dict[str, float]:
    """GROUP/win, /draw and /loss; nothing without games."""
    found = list(outcomes)
    kinds = {"win": 1, "draw": 0, "loss": -1}
    return {f"{group}/{name}": found.count(kind) / len(found) for name, kind in kinds.items()} if found else {}


class MatchNumbers:
    """Mean returns of agents and sides over the newest games."""

    def __init__(self) -> None:
        self._recent: dict[str, deque[float]] = {}

    def add(self, matches: Iterable[Match]) -> None:
        for match in matches:
            of_side: dict[str, list[float]] = {}
            for agent, value in match.returns.items():
                self._note(f"agent/{agent}/return_mean", value)
                of_side.setdefault(match.players[agent], []).append(value)
            for side, values in of_side.items():
                if side != DEFAULT and "@" not in side:  # not of what a policy was
                    self._note(side_key(side, "episode_return_mean"), sum(values) / len(values))

    def _note(self, key: str, value: float) -> None:
        self._recent.setdefault(key, deque(maxlen=WINDOW)).append(value)

    def row(self) -> dict[str, float]:
        return {key: sum(values) / len(values) for key, values in sorted(self._recent.items())}

    def get_state(self) -> str:
        return json.dumps({key: list(values) for key, values in self._recent.items()})

    def set_state(self, state: str) -> None:
        self._recent = {key: deque(map(float, values), WINDOW) for key, values in json.loads(state).items()}


class Turn(NamedTuple):
    """What a step of all games was to the seats of a side, `[S, ...]`."""

    obs: Any
    acts: np.ndarray
    """Who decides next."""
    reward: np.ndarray
    terminated: np.ndarray
    truncated: np.ndarray


class _Seats:
    """The seats of a side of B games, as a Rollout knows an environment: row `b * seats + i` is seat i of game b."""

    waits = False

    def __init__(self, side: SideSpec, games: int):
        self.spec, self.seats, self.games = side.spec, side.seats, games
        self.num_envs = games * side.seats
        self.dead = np.zeros(self.num_envs, bool)


class SeatRollout(Rollout):
    """The Policy of one side at its seats."""

    def __init__(
        self,
        name: str,
        side: SideSpec,
        games: int,
        engine: Any,
        policy: Any,
        rng: Any,
        *,
        mode: str = SAMPLE,
        rewards: RewardTransform | None = None,
        initial_state: Callable[[int], Any] | None = None,
        rows: int | None = None,
        replays: bool = False,
        state_every: int = 1,
        record: Record = True,
    ):
        """rows: of a piece; None: nobody learns from what it does. replays: whether they are learnt from again and
        again, in any order of games"""
        seats: Any = _Seats(side, games)
        super().__init__(seats, engine, policy, rng, mode, rewards, initial_state)
        self.name, self.games, self.rows, self._record = name, games, rows, record
        self.state_every = 1 if self.state is None else state_every  # without memory no row waits for others
        self.replays = replays
        if rows is not None and replays:
            self.rows = max(rows, REPLAY_ROWS)
        n = self.num_seats = seats.num_envs
        self.acts = np.zeros(n, bool)
        self.in_game = np.zeros(n, bool)
        """Who has decided in this game and has not ended."""
        self._final = np.zeros(n, bool)  # who shows the last observation of an episode: a dead row
        self._open = np.zeros(n, bool)
        self._sum = np.zeros(n, np.float32)  # rewards since a seat decided
        self._at = np.zeros(n, np.int64)  # where a seat's next row goes
        self._begun = np.zeros(n, np.int64)  # rows of a seat in earlier pieces
        self.steps = 0
        """Since the last piece."""
        self._rows: np.ndarray | None = None  # which go through the Model, where not all do
        self._needed: np.ndarray = np.zeros(0, np.int64)
        self._shown = np.zeros(n, bool)  # who acts, or shows a last observation
        self._shown_by_all = False
        self._own_engine = isinstance(engine, TorchEngine)  # one for many workers has the rows of all seats
        self._nothing = np.zeros(n, np.float32), np.zeros(n, bool)
        self._level = True
        self._row = 0  # where all are, as long as they are level
        self._columns: Columns | None = None
        self._version: np.ndarray = np.zeros(0, np.int64)
        self.later: Any = None
        """An engine for outputs that are computed once per piece, where that saves work."""
        self._looked = False
        self.first_seat = 0
        """The number of the first seat among those of all workers."""

    # --- one step -----------------------------------------------------------------------------------------------------

    def player_at(self, row: int) -> str | None:
        """Who decides there in this game; None: another side of the same seats."""
        return self.name

    def _tick(self) -> tuple[Tick, Any, Clock]:
        tick, state, clock = super()._tick()
        return tick._replace(acts=self.acts), state, clock

    @property
    def clock(self) -> Clock:
        """Where nobody learns from what it does, its training is over."""
        return TRAINED if self.rows is None else super().clock

    def decide(self) -> Any:
        """Actions for all seats; those of seats that do not act count for nothing."""
        start = time.perf_counter()
        if not self._looked:
            self._looked = True
            if self.rows is not None and self.policy.keeps and self.state is None:
                self.later = separate_outputs(self, self._record)
        self.first = self.acts & ~self.in_game
        before = self.state
        self._choose_rows()
        tick, state, actions, extras, outputs = self._decide()
        if before is not None:  # who does not act remembers what it did
            self.state = tree.map(lambda new, old: np.where(_beside(self.acts, new), new, old), self.state, before)
        if self.rows is not None:
            self._write(tick, state, extras, outputs)
        self.in_game |= self.acts
        self._open |= self.acts
        self._final[:] = False
        self.seconds["forward"] += time.perf_counter() - start
        return actions

    def _choose_rows(self) -> None:
        """Which rows go through the Model: of seats that act or show a last observation, filled up to one of a few
        sizes, since each is recorded. Draws are of all seats, so that they do not depend on whose turn it is."""
        self._shown, self._rows = self.acts | self._final, None
        self._shown_by_all = False not in self._shown.tolist()
        if not self._shown_by_all and self._own_engine and type(self.policy).decide is Policy.decide:
            needed = self._needed = np.flatnonzero(self._shown)
            part = max(FEWEST, -(-self.num_seats // SIZES))
            size = max(1, -(-len(needed) // part)) * part
            if size < self.num_seats:
                self._rows = np.zeros(size, np.int64)
                self._rows[: len(needed)] = needed

    def forward(self, *inputs: Any) -> Any:
        """Of all seats; zeros for those that are not asked."""
        rows, needed = self._rows, self._needed
        if rows is None:
            return self.engine.forward(*inputs)
        of_rows = len(inputs) - bool(self.policy.draws and self.mode == SAMPLE)  # draws are one for a whole batch
        asked = tree.map(lambda x: x[rows], inputs[:of_rows])
        out = self.engine.forward(*asked, *inputs[of_rows:])

        def of_all(x: np.ndarray) -> np.ndarray:
            spread = np.zeros((self.num_seats, *x.shape[1:]), x.dtype)
            spread[needed] = x[: len(needed)]
            return spread

        return tree.map(of_all, out)

    def clear(self) -> None:
        """All games begin anew; rows that are in no piece yet are lost."""
        for flags in (self.in_game, self._final, self._open):
            flags[:] = False
        self._sum[:], self._at[:], self.steps, self._level, self._columns = 0.0, 0, 0, True, None

    def _write(self, tick: Tick, state: Any, extras: dict[str, Any], outputs: dict[str, Any]) -> None:
        """Open the rows of those who act, and lay down the last observations of those who have ended."""
        nothing, off = self._nothing
        step = Step(self.obs, self.acts, self.first, state, outputs, extras, nothing, off, off, None)
        if self._columns is None:
            self._make_columns(step)
        columns = self._columns
        assert columns is not None
        if self._level and self._shown_by_all:
            row = self._row = int(self._at[0])
            columns.write(row, step)
            self._version[row] = self.version
            self._at += self._final
            return
        self._level = False
        who = np.flatnonzero(self._shown)
        at = (self._at[who], who)

        def put(column: Any, x: Any) -> None:
            tree.map(lambda to, of: to.__setitem__(at, of[who]), column, x)

        put(columns.obs, step.obs)
        put(columns.first, step.first)
        for k, column in columns.outputs.items():
            put(column, outputs[k])
        put(columns.extras, extras)
        if columns.state is not None:
            put(columns.state, state)
        for name in ("valid", "reward", "terminated", "truncated"):
            put(getattr(columns, name), getattr(step, name))
        self._version[at] = self.version
        self._at += self._final

    def _make_columns(self, step: Step) -> None:
        """For the rows of a piece, those that are left of the one before, and the open one."""
        assert self.rows is not None
        rows = self.rows + self.state_every + 1
        keep = () if self.later is not None else self.policy.keeps
        self._columns = Columns(step, rows, keep, 1)
        self._version = np.zeros((rows, self.num_seats), np.int64)

    def take(self, turn: Turn, over: np.ndarray | None) -> None:
        """What came of the decisions. `over`: of which seats the game has ended; None: of none."""
        self.obs, self.acts = turn.obs, turn.acts
        ended = turn.terminated | turn.truncated
        if over is not None:
            self.acts = turn.acts & ~over
            ended |= over
        if self.rows is None:
            self.in_game &= ~ended
            return
        ended &= self.in_game
        some_ended = True in ended.tolist()
        terminated = turn.terminated & ended
        self._sum += turn.reward
        closes = self._open & (self.acts | ended)
        learned = self._sum
        if self.rewards is not None:
            learned = self.rewards(self._sum, ended, closes)
        columns = self._columns
        assert columns is not None
        if self._level and closes.tobytes() == self._open.tobytes():
            row = self._row
            columns.reward[row] = np.where(closes, learned, np.float32(0.0))
            if some_ended:
                columns.terminated[row] = terminated
                columns.truncated[row] = ended & ~terminated
            self._at.fill(row + 1)
            self._open.fill(False)
            self._sum.fill(0.0)
        else:
            who = np.flatnonzero(closes)
            at = (self._at[who], who)
            columns.reward[at] = learned[who]
            columns.terminated[at] = terminated[who]
            columns.truncated[at] = (ended & ~terminated)[who]
            self._at += closes
            self._open &= ~closes
            self._level = False
            self._sum[~self._open] = 0.0  # nobody decided on what is paid to those who have not acted
        self._final = ended
        if some_ended:
            self.in_game &= ~ended
        self.steps += 1

    # --- pieces -------------------------------------------------------------------------------------------------------

    def pieces(self) -> list[Piece]:
        """What is ready to be learnt from: after `rows` steps all rows that are closed, else nothing."""
        if self.rows is None or self.steps < self.rows:
            return []
        self.steps = 0
        columns = self._columns
        assert columns is not None
        self._write_successors(columns)
        level = self._level and int(self._at[0]) == self.rows and not self.replays
        outputs = dict(columns.outputs)
        if self.later is not None:
            n = self.rows + 1 if level else len(columns.first)  # one of two shapes, so that each is recorded once
            seen = self.env.spec.acting(tree.map(lambda x: x[:n].reshape(-1, *x.shape[2:]), columns.obs))
            late = self.later.forward(seen)
            outputs = {k: late[k].reshape(n, -1, *late[k].shape[1:]) for k in self.policy.keeps}
        if level:
            piece = self._piece(columns, outputs, slice(None), self.rows)
            piece.version = int(self._version[0, 0])
            self._columns, self._version = None, np.zeros(0, np.int64)
            self._begun += self.rows
            self._at[:] = 0
            return [self.policy.label(piece)]
        closed = self._at - self._at % self.state_every
        pieces = []
        # In the order of the seats, so that workers in rounds learn what one process would, to the last bit.
        for who in np.split(np.arange(self.num_seats), np.flatnonzero(np.diff(closed)) + 1):
            if n := closed[who[0]]:
                piece = self._piece(columns, outputs, who, int(n))
                piece.version = self._version[:n, who]
                piece.stream, piece.start = self.first_seat + who, self._begun[who].copy()
                pieces.append(self.policy.label(piece))
        self._carry_over(columns, closed)
        return pieces

    def _write_successors(self, columns: Columns) -> None:
        """The observation behind the last closed row of each seat, where none is there yet: what it will decide on, or
        the last of its episode."""
        outputs: dict[str, Any] = {}
        if columns.outputs:
            self.first = self.acts & ~self.in_game
            state = None if self.state is None else zeroed(self.state, self.first)
            inputs = next(self.policy.decide(Tick(self.seen), state, None, GREEDY, Clock()))
            outputs = self.engine.forward(*inputs)
        who = np.flatnonzero(~self._open)
        at = (self._at[who], who)
        tree.map(lambda to, of: to.__setitem__(at, of[who]), columns.obs, self.obs)
        columns.first[at] = (self.acts & ~self.in_game)[who]
        for k, column in columns.outputs.items():
            column[at] = outputs[k][who]

    def _piece(self, columns: Columns, outputs: dict[str, Any], who: Any, n: int) -> Piece:
        def rows(x: Any, more: int = 0) -> Any:
            return tree.map(lambda leaf: leaf[: n + more][:, who], x)

        extras = rows(columns.extras)
        return Piece(
            obs=rows(columns.obs, 1),
            action=extras.pop("action"),
            reward=rows(columns.reward),
            terminated=rows(columns.terminated),
            truncated=rows(columns.truncated),
            valid=rows(columns.valid),
            first=rows(columns.first, 1),
            outputs=rows(outputs, 1),
            extras=extras,
            state=None
            if columns.state is None
            else tree.map(lambda x: x[: n : self.state_every][:, who], columns.state),
            state_every=self.state_every,
            side=self.name,
        )

    def _carry_over(self, columns: Columns, closed: np.ndarray) -> None:
        """Rows that are in no piece yet begin the next one."""
        self._begun += closed
        left = self._at - closed
        seats = np.arange(self.num_seats)

        def move(column: np.ndarray) -> None:
            for j in range(int(left.max()) + 1):
                column[j] = column[np.minimum(closed + j, len(column) - 1), seats]

        for column in (columns.obs, columns.first, columns.outputs, columns.extras, columns.state):
            if column is not None:
                tree.map(move, column)
        for column in (columns.reward, columns.valid, columns.terminated, columns.truncated, self._version):
            move(column)
        self._at = left
        self._level = not self._open.any() and not left.any()

    # --- state --------------------------------------------------------------------------------------------------------

    def seat_state(self) -> dict[str, Any]:
        """Where every seat is, and the rows that are in no piece yet."""
        columns, top = self._columns, int(self._at.max()) + 1
        kept: dict[str, Any] = {}
        if columns is not None and (self._at.any() or self._open.any()):
            names = ("obs", "first", "outputs", "extras", "state", "reward", "valid", "terminated", "truncated")
            used = np.arange(top)[:, None] < self._at + self._open  # the rest was never written

            def rows(x: np.ndarray) -> np.ndarray:
                return np.where(_beside(used, x), x[:top], np.zeros((), x.dtype))

            kept = {k: tree.map(rows, v) for k in names if (v := getattr(columns, k)) is not None}
            kept["version"] = rows(self._version)
        flags = {k: getattr(self, f"_{k}").copy() for k in ("final", "open", "sum", "at", "begun")}
        arrays = {
            **flags,
            "acts": self.acts.copy(),
            "in_game": self.in_game.copy(),
            "kept": kept,
            "state": {} if self.state is None else self.state,
            "rewards": self.rewards.get_state() if self.rewards else {},
            "policy": self.policy.get_state(),
        }
        where = {"steps": self.steps, "level": self._level, "version": self.version}
        return {"arrays": arrays, "json": {"rng": self.rng.bit_generator.state, **where}}

    def set_seat_state(self, state: Mapping[str, Any], exact: bool) -> None:
        """Go on; where games began anew, from their first observations."""
        arrays, json_ = state["arrays"], state["json"]
        self.rng.bit_generator.state = json_["rng"]
        self._told, self.version = None, int(json_["version"])
        if self.rewards and arrays["rewards"]:
            self.rewards.set_state(arrays["rewards"])
        if not exact:
            return
        for k in ("final", "open", "sum", "at", "begun"):
            setattr(self, f"_{k}", np.array(arrays[k]))
        self.acts, self.in_game = np.array(arrays["acts"]), np.array(arrays["in_game"])
        self.steps, self._level = int(json_["steps"]), bool(json_["level"])
        if policy := arrays.get("policy"):
            self.policy.set_state(policy)
        if self.state is not None:
            self.state = tree.map(np.array, arrays["state"])
        self._columns = None
        if kept := arrays["kept"]:
            self._columns = self._columns_of(kept)

    def _columns_of(self, kept: Mapping[str, Any]) -> Columns:
        first = {k: tree.map(lambda x: np.asarray(x)[0], v) for k, v in kept.items()}
        step = Step(
            first["obs"],
            first["valid"],
            first["first"],
            first.get("state"),
            first["outputs"],
            first["extras"],
            first["reward"],
            first["terminated"],
            first["truncated"],
            None,
        )
        self._make_columns(step)
        columns = self._columns
        assert columns is not None
        for name, value in kept.items():
            column = self._version if name == "version" else getattr(columns, name)
            tree.map(lambda to, of: to.__setitem__(slice(0, len(of)), of), column, value)
        return columns


def _beside(flags: np.ndarray, like: np.ndarray) -> np.ndarray:
    """Flags of rows, with as many axes as what they choose from."""
    return flags.reshape(*flags.shape, *[1] * (like.ndim - flags.ndim))


def _side_step(seat: SeatRollout, action: Any, turn: Turn, over: np.ndarray) -> SideStep:
    """For callbacks, before the seats take the turn."""
    games = len(over)
    ended = (turn.terminated | turn.truncated).reshape(games, -1) | over[:, None]
    acted, reward, in_game, terminated = (
        x.reshape(games, -1) for x in (seat.acts, turn.reward, seat.in_game, turn.terminated)
    )
    return SideStep(action, acted, reward, ended & in_game, terminated)


class TableSource(Source):
    """Games of several agents of this process, with the parameters that the Learners train in place. It plays until one
    side has a piece."""

    exact = True

    def __init__(
        self, env: VecEnv, seats: Mapping[str, SeatRollout], agents: Sequence[str] = (), place: str | None = None
    ):
        """agents: their names, by their numbers. place: the side of the table at which all policies sit, each at some
        of its seats; None: each has a side of its own."""
        self.env, self.seats = env, dict(seats)
        self.places = {name: place or name for name in self.seats}
        """Of each policy, its side of the table."""
        self.env_steps = self.agent_steps = self.games = 0
        self.matches: list[Match] = []
        """Games that ended in the last step."""
        self.ended: list[Match] = []
        """Games that ended in the last `gather`."""
        self.episodes_left: int | None = None
        self._names: list[str] = list(agents)
        self._numbers, self._metrics = MatchNumbers(), EpisodeMetrics()
        self._watch: EpisodeWatch | None = None
        self.worker_index = self.numbers_from = 0
        """Of the process that plays, and of its first environment within it."""
        self.obs: Any = None
        """What tables show now."""
        self._seconds = {"env": 0.0, "forward": 0.0}
        self._tick = np.zeros(env.num_envs, np.int64)
        self.lengths = np.zeros(env.num_envs, np.int64)
        self._returns = {self.places[name]: np.zeros(s.num_seats) for name, s in self.seats.items()}

    def reset(self, seed: int | None = None) -> None:
        self._begin(self.env.reset(seed))

    def _begin(self, obs: Any) -> None:
        """All games are at this observation, and nothing has happened in them yet."""
        self.obs, self._tick = obs, obs["tick"]
        for name, seat in self.seats.items():
            turn = self._turn(seat, obs[self.places[name]], None)
            seat.clear()
            over = np.repeat(self.env.dead, seat.env.seats)  # type: ignore[attr-defined]
            seat.obs, seat.acts = turn.obs, turn.acts & ~over

    def _turn(self, seat: SeatRollout, side: Any, stale: np.ndarray | None) -> Turn:
        """stale: whose observation stands in for one that did not come"""
        flags, reward = side["flags"].reshape(-1), side["reward"].reshape(-1)
        if stale is not None:
            again = np.repeat(stale, seat.env.seats)  # type: ignore[attr-defined]
            flags, reward = np.where(again, 0, flags), np.where(again, np.float32(0.0), reward)
        ends = flags & TERMINATED != 0, flags & TRUNCATED != 0
        return Turn(by_seat(side["obs"]), flags & ACTS != 0, reward, *ends)

    def step(self) -> None:
        """One step of every game."""
        env, games = self.env, self.env.num_envs
        was_dead = env.dead
        if self._watch is not None:
            self._watch.before_step(self)
        for seat in self.seats.values():
            seat.env_steps, seat.worker_index = self.env_steps, 0
        stacked = {
            place: tree.map(lambda x: x.reshape(games, -1, *x.shape[1:]), actions)
            for place, actions in self._decide().items()
        }
        for seat in self.seats.values():
            self.agent_steps += int(np.count_nonzero(seat.acts))
        start = time.perf_counter()
        try:
            obs, _, terminated, truncated, infos = env.step(stacked)
        except BaseException as e:
            blame_policy(e, stacked)
            raise
        self._seconds["env"] += time.perf_counter() - start
        played = ~was_dead
        stale = (obs["tick"] == self._tick) & played
        self.obs, self._tick = obs, obs["tick"]
        self.lengths += played
        self.env_steps += int(np.count_nonzero(played))
        over, self.matches = env.dead & played, []
        ends, stands_in = true_of(over), true_of(stale)
        sides: dict[str, SideStep] = {}
        turns: dict[str, Turn] = {}
        for name, seat in self.seats.items():
            place = self.places[name]
            if place not in turns:
                turns[place] = self._turn(seat, obs[place], stale if stands_in else None)
                self._returns[place] += turns[place].reward
            turn = turns[place]
            if self._watch is not None:
                sides[name] = _side_step(seat, stacked[place], turn, over)
            seat.take(turn, np.repeat(over, seat.env.seats) if ends else None)  # type: ignore[attr-defined]
        if self._watch is not None:
            self._watch.after_step(self, GameStep(played, terminated, truncated, sides), None, infos)
        for b in ends:
            self._end(b)

    def _decide(self) -> dict[str, Any]:
        """The actions of all seats, by their side of the table."""
        return {self.places[name]: seat.decide() for name, seat in self.seats.items()}

    @property
    def returns(self) -> np.ndarray:
        """Of the games so far, the sum over agents."""
        games = self.env.num_envs
        return np.sum([x.reshape(games, -1).sum(1) for x in self._returns.values()], 0)

    def return_of(self, side: str, game: int, seat: int) -> float:
        return float(self._returns[self.places[side]].reshape(self.env.num_envs, -1)[game, seat])

    def seated(self, game: int) -> Iterator[tuple[str, str, str, int]]:
        """Who sits where: an agent, its policy, who decides for it, and the number of its seat."""
        for name, seat in self.seats.items():
            first = game * (seat.num_seats // seat.games)
            for i, agent in enumerate(self.obs[self.places[name]]["agent"][game].tolist()):
                player = seat.player_at(first + i)
                if agent != NOBODY and player is not None:
                    yield self.name_of(agent), name, player, i

    def _end(self, b: int) -> None:
        returns: dict[str, float] = {}
        players: dict[str, str] = {}
        for agent, name, player, i in self.seated(b):
            returns[agent], players[agent] = self.return_of(name, b, i), player
        for paid in self._returns.values():
            paid.reshape(self.env.num_envs, -1)[b] = 0.0
        match = Match(b, players, returns, int(self.lengths[b]))
        self.lengths[b] = 0
        if self.episodes_left == 0:
            return
        self.games += 1
        self.matches.append(match)
        if self.episodes_left is not None:
            self.episodes_left -= 1
        self._numbers.add([match])

    def longer_than(self, steps: int) -> list[int]:
        """The environments whose games have been longer."""
        return np.flatnonzero(self.lengths >= steps).tolist()

    def name_of(self, agent: int) -> str:
        return self._names[agent] if agent < len(self._names) else str(agent)

    def gather(self, timeout: float = 0.0) -> tuple[list[Piece], Counts]:
        before, agents, self.ended = self.env_steps, self.agent_steps, []
        pieces: list[Piece] = []
        for seat in self.seats.values():
            if not seat.replays:
                seat.hold_time()
        while not pieces and self.episodes_left != 0:
            self.step()
            self.ended += self.matches
            pieces = [piece for seat in self.seats.values() for piece in seat.pieces()]
        episodes = tuple((m.total, m.length) for m in self.ended)
        return pieces, Counts(self.env_steps - before, episodes, agent_steps=self.agent_steps - agents)

    # --- the rest of a Source -----------------------------------------------------------------------------------------

    def limit_episodes(self, left: int | None) -> None:
        self.episodes_left = left

    def publish(self, side: str, weights: Any, clock: Clock) -> None:
        """The parameters are shared: only their version is news."""
        self.seats[side].version = clock.version

    def numbers(self) -> dict[str, float]:
        self._metrics.add(self.ended_metrics())
        return self._numbers.row() | self._metrics.row()

    def watch(self, callbacks: CallbackList) -> None:
        self._watch = callbacks.watch(GameEpisode)

    def ended_metrics(self) -> list[dict[str, float]]:
        """`custom_metrics` of the games that have ended since the last call."""
        ended: list[dict[str, float]] = []
        if self._watch is not None:
            ended, self._watch.ended = self._watch.ended, ended
        return ended

    def foreach_env(self, fn: Callable[[Any], Any]) -> list[Any]:
        return self.env.foreach_env(fn)

    def foreach_worker(self, fn: Callable[[RolloutWorker], Any]) -> list[Any]:
        models = {name: seat.engine.model for name, seat in self.seats.items()}
        one: Any = models.get(DEFAULT, models)
        return [fn(RolloutWorker(0, (self.env,), one, tuple(s.policy for s in self.seats.values())))]

    def seconds(self) -> dict[str, float]:
        spent, self._seconds = self._seconds, {"env": 0.0, "forward": 0.0}
        for seat in self.seats.values():
            spent["forward"] += seat.seconds["forward"]
            seat.seconds = {"env": 0.0, "forward": 0.0}
        return spent

    def get_state(self, midway: bool = False) -> dict[str, Any]:
        env: dict[str, Any] = {"arrays": {}, "json": None}
        if not midway:
            try:
                env = self.env.get_state()
            except Exception as e:  # what was learnt is saved in any case
                self.env.exact = False
                logger.warning("the state of the games cannot be saved, a resumed run starts new ones: %s", e)
        seats = {name: seat.seat_state() for name, seat in self.seats.items()}
        arrays = {
            "env": env["arrays"],
            "seats": {name: one["arrays"] for name, one in seats.items()},
            "returns": {place: x.copy() for place, x in self._returns.items()},
            "lengths": self.lengths.copy(),
        }
        plain = {
            "env": env["json"],
            "seats": {name: one["json"] for name, one in seats.items()},
            "exact": self.env.exact and not midway,
            "counts": [self.env_steps, self.agent_steps, self.games],
            "recent": self._numbers.get_state(),
            "metrics": self._metrics.get_state(),
        }
        return {"arrays": arrays, "json": plain}

    def set_state(self, state: dict[str, Any], clock: Clock) -> bool:
        arrays, plain = state["arrays"], state["json"]
        self.env_steps, self.agent_steps, self.games = map(int, plain["counts"])
        self._numbers.set_state(plain["recent"])
        self._metrics.set_state(plain.get("metrics", "[]"))  # older checkpoints have none
        exact = plain["env"] is not None and bool(plain["exact"])
        if plain["env"] is None:
            first = next(iter(self.seats.values()))
            self._begin(self.env.reset(int(first.rng.integers(1 << 31))))
            self.env.exact = False
        else:
            self._begin(self.env.set_state({"arrays": arrays["env"], "json": plain["env"]}))
            exact = exact and self.env.exact
        for name, seat in self.seats.items():
            seat.set_seat_state({"arrays": arrays["seats"][name], "json": plain["seats"][name]}, exact)
        if exact:
            self._returns = {place: np.array(x) for place, x in arrays["returns"].items()}
            self.lengths = np.array(arrays["lengths"])
        return exact

    def close(self) -> None:
        self.env.close()
