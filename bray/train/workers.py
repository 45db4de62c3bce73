"""Rollout workers: players, each with its own environments and its own copy of the Model, as one source of pieces.

They play in rounds. All are given the same weights, each plays the rows of one piece, and the pieces of a round are put side by side in the order of
the workers. With `overlap` the next round is played while the learner learns from this one: its weights are then one round old.
A worker that dies or hangs is killed, replaced and counted; its part of the round is played again. Where players live is a `Home`:
processes of this machine (`processes.py`).
"""

from __future__ import annotations

import logging
import pickle
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from multiprocessing.util import Finalize
from typing import Any, Protocol

import cloudpickle
import numpy as np

from bray.act import Clock
from bray.data.experience import Counts
from bray.data.piece import Piece, side_by_side
from bray.envs.process import Lost
from bray.errors import ConfigError, EnvError
from bray.train.callbacks import CallbackList, EpisodeMetrics
from bray.train.player import Plan, Played
from bray.train.source import RolloutWorker, Source
from bray.train.spent import WEIGHTS, Laps, WorkerTimes

logger = logging.getLogger("bray")

REPLAY_ROWS = 16
"""Rows of a round for algorithms that replay, which want them one by one: a question to a worker costs as much as several steps."""
SLOW, LEAST_S = 10.0, 60.0
"""A worker is hung when it takes this many times as long as the longest round before, and at least so many seconds."""


class Worker(Protocol):
    """A player somewhere else. Questions (methods of `Player`) are answered in their order; `Lost` is raised where it died or hangs."""

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
    """Where players live, and how weights get there. What `publish` returns is the first argument of the question `play`."""

    def start(self, plan: Plan) -> Worker: ...
    def publish(self, weights: Mapping[str, np.ndarray]) -> Any: ...


class WorkerSource(Source):
    """See the module."""

    exact = True

    def __init__(self, plan: Plan, home: Home, weights: Callable[[], Mapping[str, np.ndarray]], overlap: bool):
        self.plan, self.home, self.overlap, self.restarts = plan, home, overlap, 0
        self._weights, self._clock = weights, Clock()
        self._lag = 0
        self._playing = False
        self._answers: list[Played] = []
        self._question: tuple[Any, ...] = ()
        self._laps, self._times = Laps(), WorkerTimes()
        self._longest = 0.0
        self._metrics = EpisodeMetrics()
        self._watch: bytes | None = None
        self._each: bytes | None = None
        self._each_worker: bytes | None = None
        self._workers: list[Worker] = []
        self._finalizer = Finalize(self, _close_all, (self._workers,), exitpriority=10)
        try:
            for w in range(plan.run.num_workers):
                self._workers.append(self._start(w))
            for worker in self._workers:
                worker.started()
        except BaseException:
            self.close()
            raise

    def _start(self, w: int, life: int = 0) -> Worker:
        return self.home.start(replace(self.plan, index=w + 1, life=life))

    @property
    def process_ids(self) -> list[int]:
        return [worker.process_id for worker in self._workers]

    # --- rounds

    def gather(self, timeout: float = 0.0) -> tuple[list[Piece], Counts]:
        self._laps.lap("elsewhere")
        if not self._playing:
            self._play()
        self._finish()
        self._laps.lap("idle")
        answers, self._answers, self._playing = self._answers, [], False
        piece = side_by_side([answer.piece for answer in answers])  # copied: players write over theirs
        self._lag = self._clock.version - int(piece.version)
        self._laps.lap("transfer")
        if self.overlap:
            self._play()
        for w, answer in enumerate(answers, 1):
            self._times.add(w, answer.seconds)
            self._metrics.add(answer.metrics)
        steps = sum(answer.counts.env_steps for answer in answers)
        return [piece], Counts(steps, tuple(e for answer in answers for e in answer.counts.episodes))

    def _finish(self) -> None:
        """Wait until the round under way is played; `gather` returns it."""
        if self._playing and not self._answers:
            start = time.perf_counter()
            self._answers = [self._answer(w) for w in range(len(self._workers))]
            self._longest = max(self._longest, time.perf_counter() - start)

    def _play(self) -> None:
        """Let all workers play a round with the newest weights."""
        self._question = ("play", self.home.publish(self._weights()), tuple(self._clock))
        for w, worker in enumerate(self._workers):
            try:
                worker.send(*self._question)
            except Lost as e:
                self._replace(w, e)
        self._playing = True
        self._laps.lap(WEIGHTS)

    def _answer(self, w: int) -> Played:
        """What worker w, or one that replaces it, has played."""
        while True:
            try:
                played: Played = self._workers[w].receive(self._limit)
                return played
            except Lost as e:
                self._replace(w, e)

    @property
    def _limit(self) -> float:
        return self.plan.run.worker_timeout_s or max(LEAST_S, SLOW * self._longest)

    def _replace(self, w: int, why: Lost) -> None:
        """Kill a worker, start another one, and let it play the round."""
        worker = self._workers[w]
        end = worker.kill()
        self.restarts += 1
        report = f"{end}\nrollout worker {w + 1} ({worker.name}) {why}"
        if self.restarts > self.plan.run.max_worker_restarts:
            raise EnvError(
                f"{report}. run.max_worker_restarts={self.plan.run.max_worker_restarts} are used up: see above why they end, or allow more."
            )
        logger.warning("%s. Replaced (%d so far); its episodes are lost.", report, self.restarts)
        self._workers[w] = self._start(w, self.restarts)
        self._workers[w].started()
        for method, told in (
            ("watch", self._watch),
            ("foreach_env", self._each),
            ("foreach_worker", self._each_worker),
        ):
            if told is not None:
                self._ask(w, method, told)
        self._workers[w].send(*self._question)

    # --- the rest of a Source

    def publish(self, weights: Callable[[], Mapping[str, np.ndarray]], clock: Clock) -> None:
        self._weights, self._clock = weights, clock

    def seconds(self) -> dict[str, float]:
        spent = self._laps.take()
        weights = spent.get(WEIGHTS, 0.0)
        return {"transfer": spent.get("transfer", 0.0) + weights, WEIGHTS: weights, "idle": spent.get("idle", 0.0)}

    def numbers(self) -> dict[str, float]:
        counted = {"workers/policy_lag": self._lag, "workers/restarts": self.restarts}
        return counted | self._times.row() | self._metrics.row()

    def watch(self, callbacks: CallbackList) -> None:
        """Only those that ask for episodes go to the workers: others may hold what belongs to this process."""
        watching = callbacks.of_episodes()
        if not watching.callbacks and self._watch is None:
            return
        try:
            self._watch = cloudpickle.dumps(watching)
        except (pickle.PicklingError, AttributeError, TypeError) as e:
            raise ConfigError(
                f"callbacks of episodes run in the rollout workers, and these cannot be sent there ({e}): make what they hold when they first need it, or "
                "set num_workers=0"
            ) from e
        self._ask_all("watch", self._watch)

    def foreach_env(self, fn: Callable[[Any], Any]) -> list[Any]:
        self._each = cloudpickle.dumps(fn)
        return [result for results in self._ask_all("foreach_env", self._each) for result in results]

    def foreach_worker(self, fn: Callable[[RolloutWorker], Any]) -> list[Any]:
        self._each_worker = cloudpickle.dumps(fn)
        return self._ask_all("foreach_worker", self._each_worker)

    def _ask(self, w: int, method: str, *arguments: Any) -> Any:
        self._workers[w].send(method, *arguments)
        return self._workers[w].receive(None)

    def _ask_all(self, method: str, *arguments: Any) -> list[Any]:
        """The same question to all workers, after the round that they play."""
        self._finish()
        try:
            return [self._ask(w, method, *arguments) for w in range(len(self._workers))]
        except Lost as e:
            raise EnvError(f"a rollout worker {e} in {method}") from None

    def get_state(self) -> dict[str, Any]:
        if self._playing:  # a round that is under way is not saved
            return {"arrays": {}, "json": {"workers": None, "exact": False}}
        states = self._ask_all("get_state")
        arrays = {str(w): state["arrays"] for w, state in enumerate(states)}
        exact = all(state["json"]["exact"] for state in states)
        return {"arrays": arrays, "json": {"workers": [state["json"] for state in states], "exact": exact}}

    def set_state(self, state: dict[str, Any], clock: Clock) -> bool:
        self._clock = clock
        saved = state["json"]["workers"]
        if saved is None or len(saved) != len(self._workers):
            return False
        told = [{"arrays": state["arrays"][str(w)], "json": json} for w, json in enumerate(saved)]
        exact = [self._ask(w, "set_state", one, tuple(clock)) for w, one in enumerate(told)]
        return all(exact)

    def close(self) -> None:
        self._finalizer()


def _close_all(workers: list[Worker]) -> None:
    for worker in workers:
        worker.close()
