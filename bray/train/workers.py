"""Rollout workers: samplers, each with its own environments and its own copy of the Model, as one source of pieces.

In rounds: all are given the same weights, each plays the rows of one piece, and the pieces of a round are put side by
side in the order of the workers. One round ahead: the next round is asked for before the last one is learnt from, so
that playing and learning overlap and still go by counts alone. Asynchronous: each has a piece or two to play under way,
with the newest weights that are there when it begins one, and plays on while the learner learns; whatever has been
played is taken. A slow worker then holds nobody up, and what is learnt from is some versions old.
A worker that dies or hangs is killed, replaced and counted; what it was asked for is played again. Where samplers live
is a `Home`:
processes of this machine (`processes.py`) or of a cluster (`bray/remote/home.py`).
"""

from __future__ import annotations

import logging
import pickle
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from multiprocessing.util import Finalize
from typing import Any, Protocol

import cloudpickle
import numpy as np

from bray.act import Clock
from bray.data.experience import Counts
from bray.data.piece import Piece, side_by_side
from bray.envs.process import START_TIMEOUT, Lost
from bray.envs.replayed_calls import ReplayedCalls
from bray.errors import ConfigError, EnvError
from bray.metrics.spent import WEIGHTS
from bray.train.callbacks import CallbackList
from bray.train.played import PlayedSource, data_of, lent, played_of
from bray.train.rollout import returns_of
from bray.train.sampler import Played, SamplerPlan
from bray.train.source import RolloutWorker

logger = logging.getLogger("bray")

REPLAY_ROWS = 16
"""Rows of a piece for algorithms that replay, which want them one by one: a question to a worker costs as much as
several steps."""
SLOW, LEAST_S = 10.0, 60.0
"""A worker is hung when it takes this many times as long as for the longest piece before, and at least so many
seconds."""
TURN_S = 1.0  # seconds after which those who wait for all workers look whether one of them hangs


class Worker(Protocol):
    """A sampler somewhere else. Questions (methods of `Sampler`) are answered in their order; `Lost` is raised where it
    died or hangs."""

    @property
    def name(self) -> str: ...
    @property
    def process_id(self) -> int: ...
    def started(self) -> None: ...
    def send(self, method: str, *arguments: Any) -> None: ...
    def receive(self, timeout: float | None) -> Any: ...
    def kill(self) -> str: ...
    def close(self) -> None: ...


class Home(Protocol):
    """Where samplers live, and how weights get there. What `publish` returns is the first argument of the question
    `play`, the clock the second, and the returns that rewards are normalised by the third."""

    def start(self, plan: SamplerPlan) -> Worker: ...
    def publish(self, weights: Callable[[], Mapping[str, np.ndarray]], clock: Clock) -> Any: ...
    def wait(self, workers: Sequence[Any], timeout: float) -> list[Any]:
        """Those of these workers that have answered, have started or have died; waits so many seconds for the first of
        them."""
        ...

    def close(self) -> None: ...


@dataclass
class Seat:
    """A worker, and what it was asked for."""

    index: int
    worker: Worker
    starting: bool = True
    under_way: int = 0
    """Questions `play` that are not answered."""
    since: float = 0.0
    """When it began with the oldest of them, or to start."""
    given_up: bool = False
    """It is dead, and no other one may be started."""


class WorkerSource(PlayedSource):
    """See the module."""

    def __init__(
        self,
        plan: SamplerPlan,
        home: Home,
        weights: Callable[[], Mapping[str, np.ndarray]],
        asynchronous: bool = False,
        lanes: bool = False,
        ahead: bool = False,
    ):
        """ahead: play in rounds, one round ahead of what is learnt from."""
        super().__init__(plan.run.workers if (asynchronous or ahead) and lanes else None)
        self.plan, self.home, self.asynchronous, self.exact = plan, home, asynchronous, not asynchronous
        self.restarts = 0
        self._ahead = ahead
        self._weights, self._news = weights, True
        self._question: tuple[Any, ...] = ()
        self._longest = 0.0
        self._watch: bytes | None = None
        self._calls = ReplayedCalls()
        self._seats: list[Seat] = []
        self._finalizer = Finalize(self, _close_all, (self._seats, home), exitpriority=10)
        try:
            for w in range(plan.run.workers):
                self._seats.append(Seat(w, self._start(w)))
            for seat in self._seats:
                seat.worker.started()
                seat.starting = False
        except BaseException:
            self.close()
            raise

    def _start(self, w: int, life: int = 0) -> Worker:
        return self.home.start(replace(self.plan, index=w + 1, life=life, begun=self._clock.env_steps))

    @property
    def process_ids(self) -> list[int]:
        return [seat.worker.process_id for seat in self._seats]

    # --- pieces

    def gather(self, timeout: float = 0.0) -> tuple[list[Piece], Counts]:
        self._laps.lap("elsewhere")
        if self.asynchronous:
            if self._news:
                self._publish()
            if not any(seat.under_way for seat in self._seats):
                self._ask_for_pieces(2)
            self._take(0.0)
            # Where all have played already the learner is the slower side, and a second piece would only be older when
            # its turn comes.
            most = 1 if len({w for w, _ in self._came}) == len(self._seats) else 2
            if not self._came:
                self._take(timeout)
            self._ask_for_pieces(most)
        else:
            if not self._ahead or not any(seat.under_way for seat in self._seats):
                self._publish()
                here = {w for w, _ in self._came}  # of a round that was cut short, or was saved
                self._ask_for_pieces(1, [seat for seat in self._seats if seat.index not in here])
            while len(self._came) < len(self._seats):
                self._take(TURN_S)
            if self._ahead:
                self._publish()
                self._ask_for_pieces(1)
        came, self._came = sorted(self._came, key=lambda answer: answer[0]), []
        pieces = self._pieces(came)
        self._laps.lap("transfer")
        return pieces, self._count(came)

    def _pieces(self, came: list[tuple[int, Played]]) -> list[Piece]:
        if self._lanes is None and not self.asynchronous:
            rounds = [played.pieces for _, played in came]
            if all(piece.stream is None for pieces in rounds for piece in pieces):  # all at once: as one process would
                return [side_by_side(list(same)) for same in zip(*rounds, strict=True)]  # copied
        return super()._pieces(came)

    def _publish(self) -> None:
        self._question = ("play", self.home.publish(self._weights, self._clock), self._clock, self.returns)
        self._news = False
        self._laps.lap(WEIGHTS)

    def _question_for(self, seat: Seat) -> tuple[Any, ...]:
        return self._question

    def _ask_for_pieces(self, most: int, seats: Sequence[Seat] | None = None) -> None:
        """Ask until each worker has `most` pieces to play. `seats`: which workers; None = all."""
        for seat in self._seats if seats is None else seats:
            while seat.under_way < most:
                seat.since = seat.since if seat.under_way else time.monotonic()
                seat.under_way += 1
                if seat.starting:
                    continue  # it is asked when it is there
                try:
                    seat.worker.send(*self._question_for(seat))
                except Lost as e:
                    self._replace(seat, e)

    def _take(self, timeout: float, keep: bool = False) -> None:
        """What has been played goes to `_came`, waiting so long for the first. Workers that died or hang are replaced.
        keep: copy it, because workers will be asked for more before it is used."""
        busy = [seat for seat in self._seats if seat.under_way or seat.starting]
        ready = self.home.wait([seat.worker for seat in busy], timeout)
        self._laps.lap("idle")
        for seat in busy:
            try:
                if seat.worker not in ready:
                    self._check_hung(seat)
                elif seat.starting:
                    self._welcome(seat)
                else:
                    self._receive(seat, keep)
            except Lost as e:
                self._replace(seat, e)
        self._laps.lap("transfer")

    def _receive(self, seat: Seat, keep: bool) -> None:
        try:
            played: Played = seat.worker.receive(self._limit)
        except Lost:
            raise
        except Exception as e:  # the answer is an error: the worker is there
            seat.under_way -= 1
            if isinstance(e, (EnvError, ConfigError)):
                *traceback, said = str(e).rpartition("\n")
                raise type(e)(f"{''.join(traceback)}rollout worker {seat.index + 1}: {said}") from None
            raise
        seat.under_way -= 1
        seat.since = time.monotonic()
        self._longest = max(self._longest, sum(played.seconds.get(phase, 0.0) for phase in ("env", "forward", "other")))
        played = lent(played)
        if keep or self._lanes is not None:
            played = _kept(played)
        self._keep(seat.index, played)

    @property
    def _limit(self) -> float:
        return self.plan.run.worker_timeout_s or max(LEAST_S, SLOW * self._longest)

    def _check_hung(self, seat: Seat) -> None:
        limit = max(self._limit, START_TIMEOUT) if seat.starting else self._limit
        if time.monotonic() - seat.since > limit:
            raise Lost(f"did not answer within {limit:g} s")

    def _replace(self, seat: Seat, why: Lost) -> None:
        """Kill a worker and begin to start another one; the others play on meanwhile."""
        worker, w = seat.worker, seat.index
        end = worker.kill()
        self.restarts += 1
        report = f"{end}\nrollout worker {w + 1} ({worker.name}) {why}".lstrip()
        if self.restarts > self.plan.run.max_worker_restarts:
            seat.under_way, seat.starting, seat.given_up = 0, False, True
            raise EnvError(
                f"{report}. run.max_worker_restarts={self.plan.run.max_worker_restarts} are used up: see above why "
                "they end, or allow more."
            )
        logger.warning("%s. Replaced (%d so far); its episodes are lost.", report, self.restarts)
        seat.worker, seat.starting, seat.since = self._start(w, self.restarts), True, time.monotonic()
        if self._lanes is not None:
            self._lanes.cut(w)

    def _welcome(self, seat: Seat) -> None:
        """A replacement has started: make the lost worker's calls again (callbacks, functions of the user), and send
        it the questions that were under way."""
        seat.worker.started()
        if self._watch is not None:
            self._ask(seat, "watch", self._watch)
        for method, code in self._calls:
            self._ask(seat, method, code)
        for _ in range(seat.under_way):
            seat.worker.send(*self._question_for(seat))
        seat.starting, seat.since = False, time.monotonic()

    # --- the rest of a Source

    def publish(self, side: str, weights: Callable[[], Mapping[str, np.ndarray]], clock: Clock) -> None:
        self._weights, self._clock, self._news = weights, clock, True

    def wait_reason(self) -> str:
        starting = [str(seat.index + 1) for seat in self._seats if seat.starting]
        return f"rollout workers that are starting: {', '.join(starting)}" if starting else ""

    def numbers(self) -> dict[str, float]:
        return super().numbers() | {"workers/restarts": self.restarts}

    def watch(self, callbacks: CallbackList) -> None:
        """Only those that ask for episodes go to the workers: others may hold what belongs to this process."""
        watching = callbacks.of_episodes()
        if not watching.callbacks and self._watch is None:
            return
        if self._watch is None and (names := callbacks.of_two_places()):
            logger.warning(
                "callbacks %s: with num_workers each worker has a copy for its episodes. What on_episode_start, _step "
                "and _end leave in `self` is not seen in on_train_result: use episode.custom_metrics",
                ", ".join(names),
            )
        self._watch = _code(watching, "callbacks of episodes")
        self._ask_all("watch", self._watch)

    def foreach_env(self, fn: Callable[[Any], Any]) -> list[Any]:
        return [result for results in self._tell(fn, "foreach_env", "functions for environments") for result in results]

    def foreach_worker(self, fn: Callable[[RolloutWorker], Any]) -> list[Any]:
        return self._tell(fn, "foreach_worker", "functions for workers")

    def _tell(self, fn: Any, method: str, what: str) -> list[Any]:
        code = _code(fn, what)
        answers = self._ask_all(method, code)
        self._calls.add(fn, (method, code), method)
        return answers

    def _ask(self, seat: Seat, method: str, *arguments: Any) -> Any:
        seat.worker.send(method, *arguments)
        return seat.worker.receive(max(self._limit, START_TIMEOUT))  # it may be the user's code, as a start is

    def _ask_all(self, method: str, *arguments: Any) -> list[Any]:
        """The same question to all workers, behind what they are playing; `gather` returns that. One that has died
        meanwhile is replaced."""
        if any(seat.given_up for seat in self._seats):
            raise EnvError(f"{method}: a rollout worker is gone for good")
        while any(seat.under_way or seat.starting for seat in self._seats):
            self._take(TURN_S, keep=True)
        return [self._ask_again(seat, method, *arguments) for seat in self._seats]

    def _ask_again(self, seat: Seat, method: str, *arguments: Any) -> Any:
        while True:
            try:
                return self._ask(seat, method, *arguments)
            except Lost as e:
                self._replace(seat, e)
            while seat.starting:
                self._take(TURN_S)

    def get_state(self, midway: bool = False) -> dict[str, Any]:
        """In rounds: the states of all environments, and the round that is played and not learnt from yet. Otherwise a
        resumed run starts new episodes."""
        state: dict[str, Any] = {"arrays": {}, "json": {"workers": None, "exact": False}}
        if not self.asynchronous and not midway:
            try:
                state = self._state_of_all()
            except EnvError as e:  # what was learnt is saved in any case
                logger.warning(
                    "the state of the environments cannot be saved, a resumed run starts new episodes: %s", e
                )
        state["json"] |= {"metrics": self._metrics.get_state(), "returns": self.returns.numbers}
        return state

    def _state_of_all(self) -> dict[str, Any]:
        states = self._ask_all("get_state")
        if self._came and not (self._ahead and len(self._came) == len(self._seats)):
            raise EnvError("a round was cut short, and what was played of it is neither learnt nor counted")
        if self._ahead and self.restarts:
            raise EnvError("a worker was replaced: its rows are no more in step with those of the others")
        arrays = {str(w): state["arrays"] for w, state in enumerate(states)}
        exact = all(state["json"]["exact"] for state in states)
        json: dict[str, Any] = {"workers": [state["json"] for state in states], "exact": exact}
        if self._came:
            data = {w: data_of(played) for w, played in sorted(self._came, key=lambda answer: answer[0])}
            arrays["round"] = {str(w): of_worker for w, (of_worker, _) in data.items()}
            json["round"] = [about for _, about in data.values()]
        return {"arrays": arrays, "json": json}

    def set_state(self, state: dict[str, Any], clock: Clock) -> bool:
        self._clock, self._news = clock, True
        self._metrics.set_state(state["json"].get("metrics", "[]"))  # older checkpoints have none
        self.returns = returns_of(state)
        saved = state["json"].get("workers")  # none where one process played
        played = state["json"].get("round")
        if saved is None or len(saved) != len(self._seats) or (played is not None and not self._ahead):
            self._ask_all("start_anew", clock)
            return False
        told = [{"arrays": state["arrays"][str(w)], "json": json} for w, json in enumerate(saved)]
        exact = [self._ask(seat, "set_state", one, clock) for seat, one in zip(self._seats, told, strict=True)]
        if played is not None:
            for w, about in enumerate(played):
                self._keep(w, played_of(state["arrays"]["round"][str(w)], about))
        return all(exact)

    def close(self) -> None:
        self._finalizer()


def _kept(played: Played) -> Played:
    """With pieces of its own."""
    return played._replace(pieces=[side_by_side([piece]) if piece.lent else piece for piece in played.pieces])


def _code(value: Any, what: str) -> bytes:
    """As workers are told it."""
    try:
        return bytes(cloudpickle.dumps(value))
    except (pickle.PicklingError, AttributeError, TypeError) as e:
        raise ConfigError(
            f"{what} run in the rollout workers, and these cannot be sent there ({e}): make what they hold when they "
            "first need it, or set num_workers=0"
        ) from e


def _close_all(seats: list[Seat], home: Home) -> None:
    for seat in seats:
        seat.worker.close()
    home.close()
