"""Several learners (`run.num_learners`): processes that play environments of their own and learn the same weights
together, so that an update is that of one learner with all their rows.

The first one is the process of the run: it evaluates, writes and saves. The others are its children, or processes of a
Ray cluster (`bray/remote/home.py`), and hear of each iteration. All wait for each other before each update; gradients
and whatever rows have in common are averaged (`bray/capture/over_ranks.py`). Where one of them dies, or the run loads a
checkpoint, all are started anew with the state of the first one: of what was learnt at most the iteration under way is
lost.
"""

from __future__ import annotations

import logging
import pickle
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import timedelta
from functools import partial
from multiprocessing.connection import Connection
from typing import Any, NamedTuple, Protocol
from zlib import crc32

import msgspec
import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.constants import default_pg_timeout

from bray.data.experience import Batch, Counts
from bray.envs.config import EnvConfig
from bray.envs.process import STOP, Child, Lost, error_answer, portable, unpack
from bray.envs.registry import sent
from bray.errors import ConfigError, EnvError
from bray.train.config import RunConfig
from bray.train.driver import WAIT_S, Totals
from bray.train.local import LocalTraining
from bray.train.machine import cores
from bray.train.ranks import Ranks, is_rank_lost
from bray.train.side import Means
from bray.train.workers import Worker

logger = logging.getLogger("bray")

_SEEDS = 10_007  # from one rank to the next: no two of them play the same games
_HERE = "127.0.0.1"


class _Told(Totals):
    """What was counted since the first rank heard of it."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: list[Counts] = []

    def add(self, counts: Counts) -> None:
        super().add(counts)
        self.counts.append(counts)


class RankTraining(LocalTraining):
    """A learner that learns together with others."""

    def __init__(self, algo: Any, run: RunConfig, env: EnvConfig, model: Any, config: Any, home: Any = None):
        self._waiting: Batch | None = None  # for a batch of every other rank
        super().__init__(algo, run, env, model, config, home, ranks=Ranks())
        if self.side.iterate is not None:
            self.close()
            raise ConfigError(f"run.num_learners: {run.algorithm} has an iteration of its own; use num_workers")
        if not self.ranks.first:
            self.totals = _Told()

    def learn_together(self, until: int, means: Mapping[str, Means], stops: Callable[[], bool]) -> None:
        """Gather until every rank has a batch, then all learn; until there have been so many environment steps in all.
        Then the first rank hears what the others counted. `stops`: whether to end before."""
        side, ends_with_batch = self.side, self.experience.ends_with_batch
        while True:
            if self._waiting is None:
                self._waiting = side.experience.next(self.clock_of(side))
            said = self._waiting is not None, stops(), self.totals.env_steps
            ready, ends, self._agreed = map(int, self.ranks.all_reduce_sum(*said))
            if ready == self.ranks.size:
                assert self._waiting is not None
                start = time.perf_counter()
                batch, self._waiting = self._waiting, None
                self._learn_from(side, batch)
                self._learn_seconds += time.perf_counter() - start
                if self.update is not None:
                    means[side.name].add(self.update)
                if ends_with_batch and self._agreed >= until:
                    break
            elif ends or (self._agreed >= until and not ends_with_batch):
                break
            elif self._waiting is None:
                self.gather(0.0 if self._exact else WAIT_S)
        mine = self.totals
        weights = 0
        for x in side.weights_now().values():
            weights = crc32(np.ascontiguousarray(x).data, weights)
        news = [weights, mine.counts if isinstance(mine, _Told) else []]
        told = [msgspec.json.decode(x) for x in self.ranks.gather(msgspec.json.encode(news, enc_hook=_plain))]
        self.agree = all(theirs == weights for theirs, _ in told)
        if isinstance(mine, _Told):
            self.totals = _Told()
            return
        for _, others in told:
            for counts in others:
                mine.add(Counts(*counts))

    agree = True
    """Whether all had the same weights at the end of the last iteration."""

    def take_over(self, state: Mapping[str, Any]) -> None:
        """Go on as the first rank does, with random numbers of one's own."""
        own = self.learner.rng.bit_generator.state
        self.set_weights(state["weights"])
        self.learner.load_state_dict({**state["learner"], "rng": own})
        self._agreed, self._waiting = state["env_steps"], None
        for source in self.sources:
            source.publish(self.side.name, self.side.weights_now, self.clock)


def _plain(x: Any) -> Any:
    return x.tolist() if isinstance(x, (np.ndarray, np.generic)) else x


class LearnersTraining(RankTraining):
    """The first of several learners, which starts the others."""

    def __init__(
        self,
        algo: Any,
        run: RunConfig,
        env: EnvConfig,
        model: Any,
        config: Any,
        crew: Callable[[], Crew] | None = None,
    ):
        """`crew` makes the place where the others live; None = processes of this machine."""
        if dist.is_initialized():
            raise ConfigError(
                "run.num_learners: another training with several learners is at work in this process; close it first"
            )
        if crew is None and run.device == "cpu" and run.num_learners > (there := cores()):
            logger.warning(
                "run.num_learners=%d and %d cores: learners that share a core are slower than fewer with larger "
                "batches; set num_learners=%d or less",
                run.num_learners, there, there,
            )  # fmt: skip
        self._parts = algo, run, sent(env), model, config
        self._crew: Crew = ProcessCrew() if crew is None else crew()
        self._on = "" if crew is None else " on ray"
        self._others: list[Worker] = []
        self._kept: dict[str, Any] = {}
        self._news = True
        self.restarts = 0
        try:
            self._start_others(run)
            super().__init__(algo, run, env, model, config)
            self._wait_for_others()
        except BaseException:
            self._end_others()
            self._crew.close()
            raise

    def _start_others(self, run: RunConfig) -> None:
        size = run.num_learners
        store = dist.TCPStore(_HERE, 0, size, is_master=True, wait_for_workers=False)
        alone = not self._on and run.device == "cuda" and torch.cuda.device_count() >= size  # each with its own GPU
        backend = "nccl" if alone else "gloo"
        for rank in range(1, size):
            place = Place(rank, size, self._crew.address, store.port, backend)
            self._others.append(self._crew.start(partial(JoinedLearner, self._parts, place), self.restarts > 0))
        dist.init_process_group(backend, store=store, rank=0, world_size=size, timeout=_patience(run))

    def _wait_for_others(self) -> None:
        for other in self._others:
            other.started()

    def _end_others(self) -> None:
        for other in self._others:
            other.kill()
        self._others.clear()
        if dist.is_initialized():
            dist.destroy_process_group()

    def _learn_until(self, until: int, means: Mapping[str, Means], most_episodes: int | None) -> None:
        def stops() -> bool:
            full = most_episodes is not None and self.totals.episodes.total >= most_episodes
            return full or (self.stopped and not self._exact)

        while True:
            try:
                if not self._others:
                    self._begin_again()
                self._kept = {
                    "weights": self.weights(),
                    "learner": self.learner.state_dict(),
                    "env_steps": self.totals.env_steps,
                }
                for other in self._others:
                    other.send("learn", until, self._kept if self._news else None)
                self._news = False
                self.learn_together(until, means, stops)
                for other in self._others:
                    other.receive(None)
                if not self.agree:
                    logger.warning("the weights of the learners differ: all go on with those of the first one")
                    self._news = True
                return
            except BaseException as e:
                lost = isinstance(e, Lost) or is_rank_lost(e)
                why = self._why_lost() if lost else ""
                self._end_others()
                if not lost:
                    raise
                self.restarts += 1
                most = self.run_config.max_worker_restarts
                if self.restarts > most:
                    raise EnvError(f"{why}. run.max_worker_restarts={most} are used up: see above why") from None
                logger.warning("%s. All learners begin this iteration again (%d so far).", why, self.restarts)
                self.take_over(self._kept)

    def _why_lost(self) -> str:
        """Which other one has died; what it raised, where it raised something, is raised here."""
        words = []
        for rank, other in enumerate(self._others, 2):
            try:
                other.receive(1.0)
            except Lost as e:
                if str(e) == "died":
                    words.append(f"learner {rank} ({other.name}) died: {other.kill()}")
        return "; ".join(words) or "another learner was lost"

    def _begin_again(self) -> None:
        self._start_others(self.run_config)
        self.ranks.meet()
        self._wait_for_others()
        self._news = True

    def set_state(self, state: dict[str, Any], weights: Mapping[str, np.ndarray], replay_dir: Any = None) -> bool:
        self._news = True
        return super().set_state(state, weights, replay_dir)

    def get_state(self, replay_dir: Any = None) -> dict[str, Any]:
        state = super().get_state(replay_dir)
        state["json"]["learners"] = self.run_config.num_learners
        return state

    def start_with(self, weights: Mapping[str, np.ndarray]) -> None:
        super().start_with(weights)
        self._news = True

    def set_weights(self, weights: Mapping[str, Any]) -> None:
        super().set_weights(weights)
        self._news = True

    @property
    def process_ids(self) -> list[int]:
        """Of the other learners."""
        return [other.process_id for other in self._others]

    def describe(self) -> str:
        return f"{self.run_config.num_learners} learners{self._on}, each with {super().describe()}"

    def close(self) -> None:
        super().close()
        for other in self._others:
            other.close()
        self._end_others()
        self._crew.close()


# --- where the others live --------------------------------------------------------------------------------------------


class Crew(Protocol):
    """Where other learners live."""

    address: str
    """Where they find the first one."""

    def start(self, make: Callable[[], JoinedLearner], again: bool) -> Worker:
        """Begin to start one; `started` waits for it. `again`: in place of others."""
        ...

    def close(self) -> None: ...


class ProcessCrew:
    """Processes of this machine."""

    address = _HERE

    def start(self, make: Callable[[], JoinedLearner], again: bool) -> LearnerProcess:
        return LearnerProcess(make)

    def close(self) -> None:
        """Nothing is left when they are closed."""


class LearnerProcess:
    """A learner in a process, seen from its parent."""

    def __init__(self, make: Callable[[], JoinedLearner]):
        told, needs_main = portable(make)
        self._child = Child(serve_learner, (told,), "bray-learner", __name__, needs_main)

    @property
    def name(self) -> str:
        return f"process {self.process_id}"

    @property
    def process_id(self) -> int:
        return self._child.process.pid or 0

    def started(self) -> None:
        self._child.started()

    def send(self, method: str, *arguments: Any) -> None:
        self._child.send(pickle.dumps((method, *arguments)))

    def receive(self, timeout: float | None) -> Any:
        return unpack(self._child.receive(timeout))[0]

    def kill(self) -> str:
        self._child.kill()
        return self._child.end

    def close(self) -> None:
        self._child.close()


# --- in the process of another learner --------------------------------------------------------------------------------


class Place(NamedTuple):
    """Which of the learners one is, and where it finds the first one."""

    rank: int
    size: int
    host: str
    port: int
    backend: str


def _patience(run: RunConfig) -> timedelta:
    """With others in the middle of an iteration: one whose machine is gone says nothing."""
    return timedelta(seconds=run.worker_timeout_s) if run.worker_timeout_s else default_pg_timeout


class JoinedLearner:
    """Takes part in the iterations that the first rank tells of."""

    def __init__(self, parts: tuple[Any, ...], place: Place):
        algo, run, env, model, config = parts
        rank, size, host, port, backend = place
        if dist.is_initialized():  # a process of Ray may have been another learner before
            dist.destroy_process_group()
        store = dist.TCPStore(host, port, size)
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=_patience(run))
        run = replace(run, seed=run.seed + _SEEDS * rank, device=f"cuda:{rank}" if backend == "nccl" else run.device)
        self.training = RankTraining(algo, run, env, model, config)

    def learn(self, until: int, state: Mapping[str, Any] | None) -> bool:
        """One iteration; False where another rank was lost, of which the first one knows more."""
        training = self.training
        try:
            if state is not None:
                training.take_over(state)
            training.learn_together(until, {training.side.name: Means()}, lambda: False)
        except Exception as e:
            dist.destroy_process_group()  # else those who wait for this one wait until their patience ends
            if is_rank_lost(e):
                return False
            raise
        return True

    def close(self) -> None:
        self.training.close()


def serve_learner(conn: Connection, told: bytes) -> None:
    """Answer the first rank until told to stop."""
    try:
        learner: JoinedLearner = pickle.loads(told)()  # our own bytes, from our own parent
    except BaseException as e:
        conn.send(error_answer(e))
        return
    conn.send(("ok", None, []))
    try:
        while (message := conn.recv_bytes()) != STOP:
            method, *arguments = pickle.loads(message)
            try:
                answer: tuple[str, Any, Any] = "ok", getattr(learner, method)(*arguments), []
            except Exception as e:
                answer = error_answer(e)
            conn.send_bytes(pickle.dumps(answer))
    finally:
        learner.close()
