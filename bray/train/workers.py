"""Rollout workers: processes that play, each with its own environments and its own copy of the Model, as one source of pieces.

They play in rounds. All are given the same weights, each plays the rows of one piece, and the pieces of a round are put side by side in the order of
the workers. With `overlap` the next round is played while the learner learns from this one: its weights are then one round old.
Weights and pieces go through shared memory. A worker that dies or hangs is killed, replaced and counted; its part of the round is played again.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
import multiprocessing
import os
import pickle
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from multiprocessing.connection import Connection
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import torch

from bray import tree
from bray.act import Clock
from bray.data.experience import Counts
from bray.data.piece import Piece
from bray.envs.config import EnvConfig
from bray.envs.make import make_vec
from bray.envs.process import STOP, Child, Lost, error_answer, portable, unpack
from bray.envs.rewards import RewardTransform
from bray.envs.vector import episode_seed
from bray.errors import ConfigError, EnvError
from bray.inference.torch_engine import load_weights
from bray.train.acting import acting_engine, initial_state
from bray.train.callbacks import CallbackList, EpisodeMetrics
from bray.train.config import RunConfig
from bray.train.rollout import EnvSource, Rollout
from bray.train.source import Source

logger = logging.getLogger("bray")

REPLAY_ROWS = 16
"""Rows of a round for algorithms that replay, which want them one by one: a question to a worker costs as much as several steps."""
SLOW, LEAST_S = 10.0, 60.0
"""A worker is hung when it takes this many times as long as the longest round before, and at least so many seconds."""
_ALIGN = 64


@dataclass
class Plan:
    """What a worker is told."""

    algo: Any
    run: RunConfig
    env: EnvConfig
    model: Any
    config: Any
    """Of the algorithm."""
    index: int
    """From 1; 0 is the process that learns."""
    rows: int
    state_every: int
    weights: dict[str, tuple[int, tuple[int, ...], np.dtype]]
    """Where each array lies in a slot of the shared memory."""
    slot_bytes: int
    life: int = 0
    """How many workers this one replaces; it plays other episodes than they did."""


# --- in the process that learns ---------------------------------------------------------------------------------------


class WorkerSource(Source):
    """See the module."""

    exact = True

    def __init__(self, plan: Plan, weights: Callable[[], Mapping[str, np.ndarray]], overlap: bool):
        self.plan, self.overlap, self.restarts = plan, overlap, 0
        self._weights, self._clock = weights, Clock()
        self._memory = multiprocessing.get_context("spawn").RawArray(ctypes.c_uint8, max(1, 2 * plan.slot_bytes))
        self._slots = [_views(self._memory, plan, slot) for slot in range(2)]
        self._round, self._lag = 0, 0
        self._playing = False
        self._answers: list[dict[str, Any]] = []
        self._question: tuple[Any, ...] = ()
        self._seconds: dict[str, float] = {}
        self._longest = 0.0
        self._metrics = EpisodeMetrics()
        self._watch: bytes | None = None
        self._each: bytes | None = None
        self._pieces: list[list[Piece]] = [[] for _ in range(plan.run.num_workers)]
        self._children: list[Child] = []
        self._finalizer = Finalize(self, _close_all, (self._children,), exitpriority=10)
        try:
            for w in range(plan.run.num_workers):
                self._children.append(self._start(w))
            for child in self._children:
                child.started()
        except BaseException:
            self.close()
            raise

    def _start(self, w: int, life: int = 0) -> Child:
        told, needs_main = portable(replace(self.plan, index=w + 1, life=life))
        return Child(serve_player, (self._memory, told), "bray-rollout", needs_main)

    @property
    def process_ids(self) -> list[int]:
        return [child.process.pid or 0 for child in self._children]

    # --- rounds

    def gather(self, timeout: float = 0.0) -> tuple[list[Piece], Counts]:
        if not self._playing:
            self._play()
        self._finish()
        answers, self._answers, self._playing = self._answers, [], False
        piece = self._joined([answer["half"] for answer in answers])
        self._lag = self._clock.version - int(piece.version)
        if self.overlap:
            self._play()
        for name in ("env", "forward"):
            self._seconds[name] = self._seconds.get(name, 0.0) + sum(a["seconds"][name] for a in answers) / len(answers)
        for answer in answers:
            self._metrics.add(answer["metrics"])
        steps = sum(answer["counts"].env_steps for answer in answers)
        return [piece], Counts(steps, tuple(e for answer in answers for e in answer["counts"].episodes))

    def _finish(self) -> None:
        """Wait until the round under way is played; `gather` returns it."""
        if self._playing and not self._answers:
            start = time.perf_counter()
            self._answers = [self._answer(w) for w in range(len(self._children))]
            self._longest = max(self._longest, time.perf_counter() - start)

    def _play(self) -> None:
        """Let all workers play a round with the newest weights."""
        slot = self._round % 2
        for name, array in self._weights().items():
            self._slots[slot][name][...] = array
        self._question = ("gather", slot, tuple(self._clock))
        self._round += 1
        for w, child in enumerate(self._children):
            try:
                child.send(pickle.dumps(self._question))
            except Lost as e:
                self._replace(w, e)
        self._playing = True

    def _answer(self, w: int) -> dict[str, Any]:
        """What worker w, or one that replaces it, has played."""
        while True:
            try:
                answer, _ = unpack(self._children[w].receive(self._limit))
            except Lost as e:
                self._replace(w, e)
                continue
            if "memory" in answer:
                self._pieces[w] = _attach(*answer["memory"])
            return answer

    @property
    def _limit(self) -> float:
        return self.plan.run.worker_timeout_s or max(LEAST_S, SLOW * self._longest)

    def _replace(self, w: int, why: Lost) -> None:
        """Kill a worker by its id, start another one, and let it play the round."""
        child = self._children[w]
        where = child.stack()
        child.kill()
        self.restarts += 1
        report = f"{where}\nrollout worker {w + 1} (process {child.process.pid}) {why} (exit code {child.process.exitcode})".lstrip()
        if self.restarts > self.plan.run.max_worker_restarts:
            raise EnvError(
                f"{report}. run.max_worker_restarts={self.plan.run.max_worker_restarts} are used up: see above why they end, or allow more."
            )
        logger.warning("%s. Replaced (%d so far); its episodes are lost.", report, self.restarts)
        self._children[w] = self._start(w, self.restarts)
        self._children[w].started()
        for method, told in (("watch", self._watch), ("foreach_env", self._each)):
            if told is not None:
                self._ask(w, method, told)
        self._children[w].send(pickle.dumps(self._question))

    def _joined(self, halves: list[int]) -> Piece:
        """The workers' pieces of a round side by side, copied: they write over theirs in the round after the next."""
        pieces = [self._pieces[w][half] for w, half in enumerate(halves)]
        columns = {
            name: tree.map(lambda *parts: np.concatenate(parts, 1), *(getattr(piece, name) for piece in pieces))
            for name in _COLUMNS
            if getattr(pieces[0], name) is not None
        }
        return replace(pieces[0], **columns, version=self._question[2][1])

    # --- the rest of a Source

    def publish(self, weights: Callable[[], Mapping[str, np.ndarray]], clock: Clock) -> None:
        self._weights, self._clock = weights, clock

    def seconds(self) -> dict[str, float]:
        spent, self._seconds = self._seconds, {}
        return spent

    def numbers(self) -> dict[str, float]:
        counted = {"workers/policy_lag": self._lag, "workers/restarts": self.restarts}
        return counted | self._metrics.row()

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

    def _ask(self, w: int, method: str, *arguments: Any) -> Any:
        child = self._children[w]
        child.send(pickle.dumps((method, *arguments)))
        return unpack(child.receive(None))[0]

    def _ask_all(self, method: str, *arguments: Any) -> list[Any]:
        """The same question to all workers, after the round that they play."""
        self._finish()
        try:
            return [self._ask(w, method, *arguments) for w in range(len(self._children))]
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
        if saved is None or len(saved) != len(self._children):
            return False
        told = [{"arrays": state["arrays"][str(w)], "json": json} for w, json in enumerate(saved)]
        exact = [self._ask(w, "set_state", one, tuple(clock)) for w, one in enumerate(told)]
        return all(exact)

    def close(self) -> None:
        self._finalizer()


def _close_all(children: list[Child]) -> None:
    for child in children:
        child.close()


_COLUMNS = [
    f.name for f in fields(Piece) if f.name in {"obs", "action", "reward", "terminated", "truncated", "valid", "first"}
]
_COLUMNS += ["outputs", "extras", "state"]


def slot_places(weights: Mapping[str, np.ndarray]) -> tuple[dict[str, tuple[int, tuple[int, ...], np.dtype]], int]:
    """Where each array lies in a slot of shared memory, and the slot's size."""
    places, size = {}, 0
    for name, array in weights.items():
        places[name] = size, array.shape, array.dtype
        size += -(-array.nbytes // _ALIGN) * _ALIGN
    return places, size


def _views(memory: Any, plan: Plan, slot: int) -> dict[str, np.ndarray]:
    return {
        name: np.frombuffer(memory, dtype, int(np.prod(shape)), slot * plan.slot_bytes + at).reshape(shape)
        for name, (at, shape, dtype) in plan.weights.items()
    }


def _attach(path: str, size: int, template: Piece) -> list[Piece]:
    """The two pieces in a file that a worker has made; nobody else opens it any more."""
    with open(path, "r+b") as file:
        memory = mmap.mmap(file.fileno(), 2 * size)
    os.unlink(path)
    return [_placed(template, memory, half * size) for half in range(2)]


def _placed(template: Piece, memory: mmap.mmap, start: int) -> Piece:
    def view(place: _Place) -> np.ndarray:
        return np.frombuffer(memory, place.dtype, int(np.prod(place.shape)), start + place.at).reshape(place.shape)

    filled = {name: tree.map(view, value) for name in _COLUMNS if (value := getattr(template, name)) is not None}
    return replace(template, **filled)


class _Place:
    """Where an array of a piece lies in the memory."""

    def __init__(self, at: int, array: np.ndarray):
        self.at, self.shape, self.dtype = at, array.shape, array.dtype


# --- in a worker ------------------------------------------------------------------------------------------------------


def serve_player(conn: Connection, memory: Any, told: bytes) -> None:
    """Play rounds until told to stop."""
    try:
        player = Player(pickle.loads(told), memory)  # our own bytes, from our own parent
    except BaseException as e:
        conn.send(error_answer(e))
        return
    conn.send(("ok", None, []))
    try:
        while (message := conn.recv_bytes()) != STOP:
            method, *arguments = pickle.loads(message)
            try:
                answer: tuple[Any, ...] = ("ok", getattr(player, method)(*arguments), [])
            except Exception as e:
                answer = error_answer(e)
            conn.send(answer)
    finally:
        player.close()


class Player:
    """Environments, a Policy and a copy of the Model."""

    def __init__(self, plan: Plan, memory: Any):
        torch.set_num_threads(1)
        torch.manual_seed(plan.run.seed)
        self.plan = plan
        seed = episode_seed(plan.run.seed, plan.index, plan.life) if plan.life else plan.run.seed
        self.env = make_vec(plan.env, seed=seed, worker_index=plan.index)
        spec = self.env.spec
        policy = plan.algo.Policy(plan.config, spec)
        self.model = plan.algo.make_model(plan.config, spec, plan.model)
        policy.draws = getattr(self.model, "draws", None) or {}
        rewards = RewardTransform(plan.env, plan.env.num_envs, getattr(plan.config, "gamma", 1.0))
        rng = RowsOfAll(plan.run.seed, plan.index - 1, plan.run.num_workers, plan.env.num_envs)
        self.rollout = Rollout(
            self.env,
            acting_engine(self.model, policy, plan.run.record),
            policy,
            rng,  # type: ignore[arg-type]
            rewards=rewards if rewards.active else None,
            initial_state=initial_state(self.model),
        )
        self.rollout.reset(seed)
        self.source = EnvSource(self.rollout, plan.rows, plan.state_every, plan.run.record)
        self._slots = [_views(memory, plan, slot) for slot in range(2)]
        self._pieces: list[Piece] = []
        self._half = 0

    def gather(self, slot: int, clock: tuple[int, int]) -> dict[str, Any]:
        """A round with the weights of a slot; which half of the memory holds its piece."""
        load_weights(self.model, self._slots[slot])
        self.rollout.clock = Clock(*clock)
        self.rollout.version = clock[1]
        (piece,), counts = self.source.gather()
        answer: dict[str, Any] = {
            "counts": counts,
            "seconds": self.source.seconds(),
            "metrics": self.source.ended_metrics(),
        }
        if not self._pieces:
            answer["memory"] = self._make_memory(piece)
        for name in _COLUMNS:
            if (value := getattr(piece, name)) is not None:
                tree.map(np.copyto, getattr(self._pieces[self._half], name), value)
        answer["half"] = self._half
        self._half = 1 - self._half
        return answer

    def _make_memory(self, piece: Piece) -> tuple[str, int, Piece]:
        size = 0

        def place(array: np.ndarray) -> _Place:
            nonlocal size
            made = _Place(size, array)
            size += -(-array.nbytes // _ALIGN) * _ALIGN
            return made

        template = replace(
            piece, **{name: tree.map(place, value) for name in _COLUMNS if (value := getattr(piece, name)) is not None}
        )
        folder = "/dev/shm" if Path("/dev/shm").is_dir() else None
        handle, path = tempfile.mkstemp(prefix="bray-rollout-", dir=folder)
        with os.fdopen(handle, "r+b") as file:
            os.posix_fallocate(file.fileno(), 0, max(1, 2 * size))
            memory = mmap.mmap(file.fileno(), 2 * size)
        self._pieces = [_placed(template, memory, half * size) for half in range(2)]
        return path, size, template

    def watch(self, callbacks: bytes) -> None:
        self.source.watch(pickle.loads(callbacks))  # our own bytes, from our own parent

    def foreach_env(self, fn: bytes) -> list[Any]:
        return self.env.foreach_env(pickle.loads(fn))  # our own bytes, from our own parent

    def get_state(self) -> dict[str, Any]:
        return self.source.get_state()

    def set_state(self, state: dict[str, Any], clock: tuple[int, int]) -> bool:
        return self.source.set_state(state, Clock(*clock))

    def close(self) -> None:
        with suppress(Exception):
            self.env.close()


class _Bits:
    """The state of a generator, which all workers share, with a seed of this worker's own for those who make generators from it."""

    def __init__(self, rng: np.random.Generator, seed: list[int]):
        self._rng, self.seed_seq = rng, np.random.SeedSequence(seed)

    @property
    def state(self) -> Any:
        return self._rng.bit_generator.state

    @state.setter
    def state(self, state: Any) -> None:
        self._rng.bit_generator.state = state


class RowsOfAll:
    """A random generator that draws for the environments of all workers and gives out those of this one: they act as they would in one process."""

    def __init__(self, seed: int, worker: int, workers: int, rows: int):
        self._rng = np.random.default_rng([seed, 0])
        self.bit_generator = _Bits(self._rng, [seed, 0, worker])
        self._rows, self._all, self._mine = rows, workers * rows, slice(worker * rows, (worker + 1) * rows)

    def _draw(self, draw: Callable[..., Any], size: Any, *arguments: Any) -> Any:
        shape = (size,) if isinstance(size, int) else tuple(size or ())
        if not shape or shape[0] != self._rows:
            return draw(*arguments, size)
        return draw(*arguments, (self._all, *shape[1:]))[self._mine]

    def random(self, size: Any = None, dtype: Any = np.float64) -> Any:
        return self._draw(lambda size: self._rng.random(size, dtype), size)

    def standard_normal(self, size: Any = None, dtype: Any = np.float64) -> Any:
        return self._draw(lambda size: self._rng.standard_normal(size, dtype), size)

    def uniform(self, low: float = 0.0, high: float = 1.0, size: Any = None) -> Any:
        return self._draw(self._rng.uniform, size, low, high)

    def integers(self, low: int, high: int | None = None, size: Any = None) -> Any:
        return self._draw(self._rng.integers, size, low, high)
