"""Environments in worker processes, several in each; observations, rewards, flags and actions go through shared memory.

A step is one byte to each worker and one short message back. A worker runs `InProcessVecEnv` on its share, so that both
forms give the same trajectories. A worker that dies or hangs is killed and replaced; its environments' episodes end as
truncated.
With `wait_num` a step returns when enough workers have answered. The others keep their actions and the shared memory of
their rows; what they answer is returned by a later step.
Workers end with this process, however it ends: they watch its end of the pipe, and the kernel kills them where it can
(Linux).
"""

from __future__ import annotations

import ctypes
import itertools
import math
import multiprocessing
import os
import pickle
import time
from collections.abc import Callable
from dataclasses import replace
from multiprocessing.connection import wait
from multiprocessing.util import Finalize
from typing import Any

import cloudpickle
import numpy as np

from bray import tree
from bray.envs.build import Builder, built_spec
from bray.envs.inprocess import FORM, episodes_state
from bray.envs.process import START_TIMEOUT, Child, Lost, portable, unpack
from bray.envs.replayed_calls import ReplayedCalls
from bray.envs.spaces import caster
from bray.envs.table import check_of
from bray.envs.vector import Infos, StepResult, VecEnv
from bray.envs.worker import QUIET, STEP, EnvArrays, Share, serve_share
from bray.errors import ConfigError, EnvError
from bray.tree import NestedArray


class SubprocessVecEnv(VecEnv):
    """All environments of a config, or those with the given `numbers`; of these it then waits for the same part
    (`wait_num`). See the module."""

    form = FORM

    def __init__(self, build: Builder, seed: int, numbers: range | None = None):
        config = build.config
        numbers = range(config.num_envs) if numbers is None else numbers
        self.num_envs, self.name, self.spec = len(numbers), build.name, built_spec(build)
        part = self.num_envs / config.num_envs
        self._max_restarts, self._timeout = config.max_restarts, config.step_timeout
        self.waits = config.wait_num is not None
        self._wait_num = self.num_envs if config.wait_num is None else max(1, round(config.wait_num * part))
        self._wait_longer = config.step_wait_timeout
        most = self.num_envs if self.waits else os.cpu_count() or 1
        processes = min(self.num_envs, max(1, round(config.num_processes * part)) if config.num_processes else most)
        edges = np.linspace(0, self.num_envs, processes + 1).round().astype(int).tolist()
        self._rows = [slice(low, high) for low, high in itertools.pairwise(edges)]
        self._share = Share(replace(build, remote=True), self.spec, seed, numbers, range(0), build.source.gym_spec)
        self._calls = ReplayedCalls()
        shared = EnvArrays(self.spec, self.num_envs)
        self._memory = multiprocessing.get_context("spawn").RawArray(ctypes.c_uint8, max(1, shared.size))
        self._view = shared.view(self._memory)
        self._action_leaves = tree.leaves(self._view["action"])
        self._cast = caster(self.spec.action, self.num_envs)
        self._check = check_of(self.spec, build.source.keeps_bounds) if config.check else None
        self.dead = self._waiting = np.zeros(self.num_envs, bool)
        self._sent: dict[int, float] = {}  # workers with a step under way, and since when
        self._answers: dict[int, bytes | Lost] = {}  # what has come of these, until a step returns it
        self._last: NestedArray = None
        self._workers: list[Child] = []
        # Not weakref's: at exit this one comes before multiprocessing ends children by SIGTERM, which ours do not hear.
        self._finalizer = Finalize(self, _close_all, (self._workers,), exitpriority=10)
        try:
            for rows in self._rows:
                self._workers.append(self._start(rows))
            for worker in self._workers:
                worker.started()
        except BaseException:
            self.close()
            raise

    @property
    def process_ids(self) -> list[int]:
        """Of the workers, in the order of their environments."""
        return [worker.process.pid or 0 for worker in self._workers]

    def _start(self, rows: slice, episodes: list[int] | None = None, begin: list[bool] | None = None) -> Child:
        share = replace(self._share, numbers=self._share.beside[rows], episodes=episodes, begin=begin)
        try:
            told, needs_main = portable(share)
            return Child(serve_share, (self._memory, told), "bray-env", serve_share.__module__, needs_main)
        except (pickle.PicklingError, AttributeError, TypeError) as e:
            raise ConfigError(
                f"{self.name} cannot be made in another process ({e}): its creator uses something that cannot be sent "
                "there. Make that inside the creator, or set env.vector=inprocess"
            ) from e

    # --- stepping -----------------------------------------------------------------------------------------------------

    @property
    def waiting(self) -> np.ndarray:
        return self._waiting

    def reset(self, seed: int | None = None) -> NestedArray:
        self._settle()
        if seed is not None:
            self._share.seed = seed
        self._ask_all("reset", [(seed,)] * len(self._workers))
        self.dead = np.zeros(self.num_envs, bool)
        self._last = obs = tree.map(np.copy, self._view["obs"])
        self._check_values(obs)
        return obs

    def step(self, actions: NestedArray) -> StepResult:
        """Where `waits`, nothing is read or written in the rows of a worker that has not answered: it is at work
        there."""
        if self._last is None:
            raise EnvError(f"{self.name}: reset comes before the first step")
        self._send(actions)
        self._collect(self._wait_num, self._wait_longer)
        infos: Infos = None
        answered = list(self._answers)
        for w in answered:
            infos = self._take(w, infos)
        view = self._view
        self._waiting = np.full(self.num_envs, len(answered) < len(self._workers))
        if len(answered) == len(self._workers):
            obs, reward, self.dead = tree.map(np.copy, view["obs"]), view["reward"].copy(), view["dead"].copy()
            terminated, truncated = view["terminated"].copy(), view["truncated"].copy()
        else:
            for w in answered:
                self._waiting[self._rows[w]] = False
            obs = tree.map(self._ready_rows, view["obs"], self._last)
            reward, self.dead = self._ready_rows(view["reward"]), self._ready_rows(view["dead"], self.dead)
            terminated, truncated = self._ready_rows(view["terminated"]), self._ready_rows(view["truncated"])
        self._check_values(obs, reward, self.dead)
        self._last = obs
        return obs, reward, terminated, truncated, infos

    def _ready_rows(self, new: np.ndarray, old: Any = False) -> np.ndarray:
        """A new array of what is ready; the other rows are as before."""
        return np.where(self._waiting.reshape(-1, *[1] * (new.ndim - 1)), old, new)

    def _send(self, actions: NestedArray) -> None:
        """Give actions to the workers that have none under way."""
        free = ~self._waiting if self._sent else slice(None)
        for to, given in zip(self._action_leaves, tree.leaves(self._cast(actions)), strict=True):
            to[free] = given[free]
        now = time.monotonic()
        for w, worker in enumerate(self._workers):
            if w not in self._sent:
                self._sent[w] = now
                try:
                    worker.send(STEP)
                except Lost as e:
                    self._answers[w] = e

    def _collect(self, least: int, further: float = 0.0) -> None:
        """Receive answers to the steps under way until `least` environments are ready, and those that come `further`
        seconds later. A worker that is slower than `step_timeout`, counted from its own action, is lost."""
        if least == self.num_envs:  # one after the other, which is much faster than asking who is ready
            for w in self._sent:
                if w not in self._answers:
                    self._receive(w)
            return
        limit = math.inf if self._timeout is None else self._timeout
        until = math.inf
        while pending := [w for w in self._sent if w not in self._answers]:
            now = time.monotonic()
            if until == math.inf and sum(self._rows[w].stop - self._rows[w].start for w in self._answers) >= least:
                until = now + further
            left = min(until, min(self._sent[w] for w in pending) + limit) - now
            came = wait([self._workers[w].conn for w in pending], None if left == math.inf else max(0.0, left))
            now = time.monotonic()
            for w in pending:
                if self._workers[w].conn in came:
                    self._receive(w)
                elif now - self._sent[w] >= limit:
                    self._answers[w] = Lost(f"did not answer within {limit:g} s")
            if now >= until:
                return

    def _receive(self, w: int) -> None:
        try:
            self._answers[w] = self._workers[w].receive(self._timeout)
        except Lost as e:
            self._answers[w] = e

    def _take(self, w: int, infos: Infos) -> Infos:
        """Worker w's answer is done with: its infos are added, or it is replaced."""
        answer = self._answers.pop(w)
        del self._sent[w]
        if isinstance(answer, Lost):
            self._replace(w, answer)
        elif answer != QUIET and (some := self._result(answer)) is not None:
            infos = infos or [{} for _ in range(self.num_envs)]
            infos[self._rows[w]] = some
        return infos

    def _settle(self) -> None:
        """Wait for the steps under way and forget what comes of them."""
        self._collect(self.num_envs)
        for w in list(self._answers):
            self._take(w, None)
        self._waiting = np.zeros(self.num_envs, bool)

    # --- what goes wrong ----------------------------------------------------------------------------------------------

    def _where(self, i: int) -> str:
        w = next(w for w, rows in enumerate(self._rows) if i < rows.stop)
        try:
            row = self._ask(w, "get_state")["json"]["envs"][i - self._rows[w].start]
        except (Lost, EnvError):
            return f"{self.name}, environment {self._share.beside[i]}, episode {self._view['episode'][i]}"
        return f"{self.name}, environment {self._share.beside[i]}, episode {row['episode']}, step {row['steps']}"

    def _replace(self, w: int, why: Lost) -> None:
        """Kill a worker by its id, start another, and end its environments' episodes as truncated."""
        rows, worker, view = self._rows[w], self._workers[w], self._view
        where = worker.stack()
        worker.kill()
        numbers = self._share.beside[rows]
        report = (
            f"{where}\n{self.name}, environments {numbers[0]} to {numbers[-1]}: their process {worker.process.pid} "
            f"{why} ({worker.end})"
        ).lstrip()
        self._count_restart(report)
        alive = ~self.dead[rows]  # the others had ended before; their next episodes start now, as this step was to do
        for to, given in zip(tree.leaves(view["obs"]), tree.leaves(self._last), strict=True):
            to[rows] = given[rows]
        self._workers[w] = self._start(rows, view["episode"][rows].tolist(), (~alive).tolist())
        self._workers[w].started()
        view["reward"][rows] = 0.0
        view["terminated"][rows] = False
        view["truncated"][rows] = view["dead"][rows] = alive

    # --- the rest -----------------------------------------------------------------------------------------------------

    def _result(self, answer: bytes) -> Any:
        """What a worker answered; environments that raised (it has rebuilt them already) are counted."""
        result, failures = unpack(answer)
        for report in failures:
            self._count_restart(report)
        return result

    def _ask(self, w: int, method: str, *arguments: Any) -> Any:
        self._workers[w].send(pickle.dumps((method, *arguments)))
        return self._result(self._workers[w].receive(None))

    def _ask_all(self, method: str, arguments: list[tuple[Any, ...]]) -> list[Any]:
        """The same question to every worker; every answer is read before one of them is an error, so that none is taken
        for that to the next question.
        Replays may be long; saving has a limit, and a reset has one where steps have."""
        limit = max(self._timeout or 0.0, START_TIMEOUT)
        timeout = limit if method == "get_state" or (method == "reset" and self._timeout is not None) else None
        lost: Lost | None = None
        asked, answers = [], []
        for worker, some in zip(self._workers, arguments, strict=True):
            try:
                worker.send(pickle.dumps((method, *some)))
                asked.append(worker)
            except Lost as e:
                lost = e
        for worker in asked:
            try:
                answers.append(worker.receive(timeout))
            except Lost as e:
                worker.process.kill()  # what it may answer later would be too late; the next step finds it dead
                lost = e
        if lost is not None:
            raise EnvError(f"{self.name}: a worker process {lost} in {method}")
        return [self._result(answer) for answer in answers]

    def get_state(self) -> dict[str, Any]:
        if self.waits:
            return self._ended_state()
        states = self._ask_all("get_state", [()] * len(self._workers))
        envs = [e for s in states for e in s["arrays"]["envs"]]
        rows = [r for s in states for r in s["json"]["envs"]]
        return episodes_state(envs, rows, self._share.seed, self.restarts)

    def _ended_state(self) -> dict[str, Any]:
        """A state from which all environments go on with their next episodes: steps that are under way cannot be
        saved."""
        self.exact = False
        envs = [{"obs": tree.map(np.array, tree.index(self._last, i))} for i in range(self.num_envs)]
        rows = [{"episode": k, "steps": 0, "dead": True, "lost": False} for k in self._view["episode"].tolist()]
        return episodes_state(envs, rows, self._share.seed, self.restarts)

    def set_state(self, state: dict[str, Any]) -> NestedArray:
        arrays, json = self._read_state(state)
        self._settle()
        self.restarts, self._share.seed = int(json["restarts"]), int(json["seed"])
        shares = [
            episodes_state(arrays["envs"][rows], json["envs"][rows], self._share.seed, self.restarts)
            for rows in self._rows
        ]
        self.exact = all(self._ask_all("set_state", [(share,) for share in shares])) and not self.waits
        self.dead = self._view["dead"].copy()
        self._last = obs = tree.map(np.copy, self._view["obs"])
        return tree.map(np.copy, obs)

    def foreach_env(self, fn: Callable[[Any], Any]) -> list[Any]:
        self._collect(self.num_envs)  # a worker answers one question at a time; the next step returns what comes here
        code = cloudpickle.dumps(fn)  # to our own children, for lambdas too
        self._calls.add(fn, code)
        self._share.each = tuple(self._calls)
        answers = self._ask_all("foreach_env", [(code,)] * len(self._workers))
        return [result for answer in answers for result in answer]

    def render(self) -> np.ndarray | None:
        self._collect(self.num_envs)  # a worker answers one question at a time; the next step returns what comes here
        return None if isinstance(self._answers.get(0), Lost) else self._ask(0, "render")

    def close(self) -> None:
        self._finalizer()


def _close_all(workers: list[Child]) -> None:
    for worker in workers:
        worker.close()
