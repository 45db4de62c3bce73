"""Environments in worker processes, several in each; observations, rewards, flags and actions go through shared memory.

A step is one byte to each worker and one short message back. A worker runs `InProcessVecEnv` on its share, so that both
forms give the same trajectories. A worker that dies or hangs is killed and replaced; its environments' episodes end as truncated.
With `wait_num` a step returns when enough workers have answered. The others keep their actions and the shared memory of their
rows; what they answer is returned by a later step.
Workers end with this process, however it ends: they watch its end of the pipe, and the kernel kills them where it can (Linux).
"""

from __future__ import annotations

import ctypes
import faulthandler
import importlib
import itertools
import logging
import math
import multiprocessing
import os
import pickle
import select
import signal
import sys
import tempfile
import threading
import time
import traceback
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from multiprocessing.connection import Connection, wait
from typing import Any

import gymnasium as gym
import numpy as np

from bray import tree
from bray.envs.config import EnvConfig
from bray.envs.inprocess import FORM, InProcessVecEnv, give_up
from bray.envs.registry import Source
from bray.envs.vector import Actions, BatchCheck, Infos, StepResult, VecEnv, _dtype, allocator, check_state
from bray.errors import ConfigError, EnvError
from bray.spec import EnvSpec, Space
from bray.tree import NestedArray

log = logging.getLogger("bray.envs")

_START_TIMEOUT = 120.0
_ALIGN = 64


class Shared:
    """The arrays both sides see, laid out one after another in one piece of memory."""

    def __init__(self, spec: EnvSpec, num_envs: int):
        self.spec, self.num_envs, self.size = spec, num_envs, 0
        self._at: list[tuple[int, tuple[int, ...], np.dtype]] = []
        for space in (spec.observation, spec.action):
            self._add(space)
        for dtype in (np.float32, np.bool_, np.bool_, np.bool_, np.int64):
            self._place((num_envs,), np.dtype(dtype))

    def _add(self, space: Space) -> None:
        if space.kind in ("dict", "tuple"):
            for part in space.parts:
                self._add(part)
        else:
            self._place((self.num_envs, *space.shape), _dtype(space))

    def _place(self, shape: tuple[int, ...], dtype: np.dtype) -> None:
        self._at.append((self.size, shape, dtype))
        self.size += -(-int(np.prod(shape)) * dtype.itemsize // _ALIGN) * _ALIGN

    def view(self, memory: Any) -> dict[str, Any]:
        """{obs, action, reward, terminated, truncated, dead, episode} as arrays of the memory."""
        arrays = iter(np.frombuffer(memory, t, int(np.prod(shape)), at).reshape(shape) for at, shape, t in self._at)

        def build(space: Space) -> NestedArray:
            if space.kind == "dict":
                return {k: build(s) for k, s in space.items}
            if space.kind == "tuple":
                return tuple(build(s) for s in space.parts)
            return next(arrays)

        out = {"obs": build(self.spec.observation), "action": build(self.spec.action)}
        return out | {k: next(arrays) for k in ("reward", "terminated", "truncated", "dead", "episode")}


# --- the worker's side ------------------------------------------------------------------------------------------------


def _worker(conn: Connection, memory: Any, payload: bytes, trace_path: str, parent: int, by_main_thread: bool) -> None:
    """Serve one share of the environments until told to stop or the parent is gone."""
    _die_with_parent(parent, by_main_thread)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's business
    with open(trace_path, "w") as trace:
        faulthandler.enable(trace)
        if hasattr(faulthandler, "register"):
            faulthandler.register(signal.SIGUSR1, trace)
        try:
            envs, failures, view = _make_share(memory, payload)
        except BaseException as e:
            conn.send(("error", *_describe(e)))
            return
        conn.send(("ready",))
        try:
            _serve(conn, envs, failures, view)
        except (EOFError, BrokenPipeError, ConnectionResetError):
            pass  # the parent is gone or has given up on us
        finally:
            envs.close()


def _die_with_parent(parent: int, by_main_thread: bool) -> None:
    """Two ways, for a process may hang in C with Python's lock held: the kernel's, and a thread that watches the parent."""
    if sys.platform == "linux" and by_main_thread:  # the kernel's signal comes when the starting *thread* ends
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    process = multiprocessing.parent_process()
    if process is None or (by_main_thread and os.getppid() != parent):
        os._exit(1)
    sentinel = process.sentinel

    def watch() -> None:
        wait([sentinel])
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _make_share(memory: Any, payload: bytes) -> tuple[InProcessVecEnv, list[tuple[int, str]], dict[str, Any]]:
    from bray.envs.make import build_number  # make imports this module

    given = pickle.loads(payload)  # our own bytes, from our own parent
    for module in given["config"].import_modules:
        importlib.import_module(module)
    if (gym_spec := given["gym_spec"]) is not None:  # the user may have registered it in the parent only
        gym.registry.setdefault(gym_spec.id, gym_spec)
    source, config, spec, low, high = (given[k] for k in ("source", "config", "spec", "low", "high"))
    failures: list[tuple[int, str]] = []
    envs = InProcessVecEnv(
        partial(build_number, source, config, given["render_mode"], given["worker_index"]),
        high - low,
        spec,
        name=source.name,
        seed=given["seed"],
        first=low,
        seed_offset=given["worker_index"] * config.num_envs,
        check=config.check,
        check_values=False,  # the parent checks the whole batch at once
        on_failure=lambda i, report: failures.append((i, report)),
    )
    view = tree.map(lambda x: x[low:high], Shared(spec, config.num_envs).view(memory))
    if given["episodes"] is not None:  # we replace a worker that died
        for i, obs in envs.take_over(given["episodes"], given["begin"]):
            for to, leaf in zip(tree.leaves(view["obs"]), tree.leaves(obs), strict=True):
                to[i] = leaf
        view["episode"][...] = envs.episodes
    return envs, failures, view


def _serve(conn: Connection, envs: InProcessVecEnv, failures: list[tuple[int, str]], view: dict[str, Any]) -> None:
    obs_leaves = tree.leaves(view["obs"])

    def publish(obs: NestedArray) -> None:
        for to, given in zip(obs_leaves, tree.leaves(obs), strict=True):
            to[...] = given
        view["dead"][...] = envs.dead
        view["episode"][...] = envs.episodes

    while True:
        message = conn.recv_bytes()
        try:
            if message == b"s":
                obs, view["reward"][...], view["terminated"][...], view["truncated"][...], infos = envs.step(
                    view["action"]
                )
                publish(obs)
                if infos is None and not failures:
                    conn.send_bytes(b"k")
                else:
                    conn.send_bytes(pickle.dumps(("step", infos, failures)))
                failures.clear()
                continue
            command, argument = pickle.loads(message)
            if command == "close":
                return
            if command == "reset":
                publish(envs.reset(argument))
                answer: tuple[Any, ...] = ("ok", None)
            elif command == "get_state":
                answer = ("ok", envs.get_state())
            elif command == "set_state":
                publish(envs.set_state(argument))
                answer = ("ok", envs.exact)
            else:
                answer = ("ok", envs.render())
            conn.send_bytes(pickle.dumps((*answer, list(failures))))
            failures.clear()
        except (EOFError, BrokenPipeError):
            raise
        except Exception as e:
            conn.send_bytes(pickle.dumps(("error", *_describe(e))))


def _describe(e: BaseException) -> tuple[str, str]:
    """(kind, text) of an error that the parent raises: our own are one message, others carry their traceback."""
    if isinstance(e, ConfigError):
        return "config", str(e)
    if isinstance(e, EnvError):
        return "env", str(e)
    return "env", "".join(traceback.format_exception(e)).rstrip()


# --- the parent's side ------------------------------------------------------------------------------------------------


class _Lost(Exception):
    """A worker that died or did not answer in time."""


class _Process:
    """One worker, seen from the parent."""

    def __init__(self, context: Any, memory: Any, payload: bytes):
        self.conn, theirs = context.Pipe()
        handle, self._trace_path = tempfile.mkstemp(prefix="bray-env-")
        self._trace = os.fdopen(handle)
        by_main = threading.current_thread() is threading.main_thread()
        self.process = context.Process(
            target=_worker,
            args=(theirs, memory, payload, self._trace_path, os.getpid(), by_main),
            daemon=True,
            name="bray-env",
        )
        with _main_only_if(b"__main__" in payload):
            self.process.start()
        theirs.close()  # so that the worker's death is seen as the end of the pipe
        self._poll = None
        if hasattr(select, "poll"):
            self._poll = select.poll()
            self._poll.register(self.conn.fileno(), select.POLLIN)

    def send(self, message: bytes) -> None:
        try:
            self.conn.send_bytes(message)
        except (BrokenPipeError, ConnectionResetError):
            raise _Lost("died") from None

    def receive(self, timeout: float | None) -> bytes:
        try:
            if timeout is not None and not self._ready(timeout):
                raise _Lost(f"did not answer within {timeout:g} s")
            return self.conn.recv_bytes()
        except (EOFError, ConnectionResetError):
            raise _Lost("died") from None

    def _ready(self, timeout: float) -> bool:
        return bool(self._poll.poll(timeout * 1000)) if self._poll is not None else self.conn.poll(timeout)

    def started(self) -> None:
        """Wait until its environments exist; what they raised is raised here."""
        try:
            answer = pickle.loads(self.receive(_START_TIMEOUT))
        except _Lost as e:
            self.kill()
            raise EnvError(
                f"a worker process of the environments {e} while starting (exit code {self.process.exitcode}). If your environment "
                "is defined in the script you run, put the training under `if __name__ == '__main__':`."
            ) from None
        finally:
            self._unlink()  # both sides hold it open
        if answer[0] == "error":
            self.kill()
            raise ConfigError(answer[2]) if answer[1] == "config" else EnvError(answer[2])

    def stack(self) -> str:
        """Where a hung worker is, or where a crashed one was."""
        if self.process.is_alive() and hasattr(signal, "SIGUSR1") and self.process.pid:
            os.kill(self.process.pid, signal.SIGUSR1)
            self.process.join(0.2)  # the time to write it down
        self._trace.seek(0)
        return self._trace.read().strip()

    def _unlink(self) -> None:
        with suppress(FileNotFoundError):
            os.unlink(self._trace_path)

    def kill(self) -> None:
        self._unlink()
        self.process.kill()
        self.process.join()
        self.conn.close()
        self._trace.close()

    def close(self) -> None:
        if self._trace.closed:
            return
        with suppress(OSError):
            self.conn.send_bytes(pickle.dumps(("close", None)))
        self.process.join(1.0)
        self.kill()


@contextmanager
def _main_only_if(needed: bool) -> Iterator[None]:
    """A spawned process runs the user's script again to find what is defined there. Where nothing of ours is, it need not."""
    main = sys.modules.get("__main__")
    if needed or main is None:
        yield
        return
    hidden: dict[str, Any] = {k: main.__dict__[k] for k in ("__file__", "__spec__") if k in main.__dict__}
    main.__dict__.pop("__file__", None)
    main.__spec__ = None
    try:
        yield
    finally:
        main.__dict__.update(hidden)


class SubprocessVecEnv(VecEnv):
    """See the module."""

    def __init__(
        self,
        config: EnvConfig,
        source: Source,
        spec: EnvSpec,
        *,
        seed: int,
        worker_index: int = 0,
        render_mode: str | None = None,
    ):
        self.num_envs, self.spec, self.name = config.num_envs, spec, source.name
        self._config, self._timeout = config, config.step_timeout
        self._given = {
            "source": source,
            "gym_spec": source.gym_spec,
            "config": config,
            "spec": spec,
            "worker_index": worker_index,
            "render_mode": render_mode,
            "seed": seed,
        }
        self.waits = config.wait_num is not None
        processes = min(
            config.num_envs, config.num_processes or (config.num_envs if self.waits else os.cpu_count() or 1)
        )
        edges = np.linspace(0, config.num_envs, processes + 1).round().astype(int).tolist()
        self._shares = list(itertools.pairwise(edges))
        shared = Shared(spec, config.num_envs)
        self._context = multiprocessing.get_context("spawn")
        self._memory = self._context.RawArray(ctypes.c_uint8, max(1, shared.size))
        self._view = shared.view(self._memory)
        self._obs_leaves = tree.leaves(self._view["obs"])
        self._action_leaves = tree.leaves(self._view["action"])
        self._cast = Actions(spec.action, self.num_envs).cast
        self._alloc = allocator(spec.observation, self.num_envs)
        self._check = BatchCheck(spec.observation, self.num_envs) if config.check else None
        self.dead = np.zeros(self.num_envs, bool)
        self._waiting = np.zeros(self.num_envs, bool)
        self._sent: dict[int, float] = {}  # workers with a step under way, and since when (only where `waits`)
        self._answers: dict[int, bytes | _Lost] = {}  # what has come of these, until a step returns it
        self._last: NestedArray = None
        self._workers: list[_Process] = []
        self._finalizer = weakref.finalize(self, _close_all, self._workers)
        try:
            for share in self._shares:
                self._workers.append(self._start(share))
            for worker in self._workers:
                worker.started()
        except BaseException:
            self.close()
            raise

    def _start(
        self, share: tuple[int, int], episodes: list[int] | None = None, begin: list[bool] | None = None
    ) -> _Process:
        given = {**self._given, "low": share[0], "high": share[1], "episodes": episodes, "begin": begin}
        try:
            payload = pickle.dumps(given)
        except (pickle.PicklingError, AttributeError, TypeError) as e:
            raise ConfigError(
                f"{self.name} cannot be made in another process ({e}): define its class or creator at the top of a module, "
                "or set env.vector=inprocess"
            ) from e
        return _Process(self._context, self._memory, payload)

    # --- stepping -----------------------------------------------------------------------------------------------------

    @property
    def waiting(self) -> np.ndarray:
        return self._waiting

    def reset(self, seed: int | None = None) -> NestedArray:
        self._settle()
        if seed is not None:
            self._given["seed"] = seed
        self._ask("reset", [seed] * len(self._workers))
        self.dead = np.zeros(self.num_envs, bool)
        obs = self._read_obs()
        self._last = obs
        self._checked(obs, None)
        return obs

    def step(self, actions: NestedArray) -> StepResult:
        if self._last is None:
            raise EnvError(f"{self.name}: reset comes before the first step")
        if self.waits:
            return self._step_ready(actions)
        for to, given in zip(self._action_leaves, tree.leaves(self._cast(actions)), strict=True):
            to[...] = given
        lost: dict[int, _Lost] = {}
        for w, worker in enumerate(self._workers):
            try:
                worker.send(b"s")
            except _Lost as e:
                lost[w] = e
        infos: Infos = None
        for w, worker in enumerate(self._workers):
            if w in lost:
                continue
            try:
                answer = worker.receive(self._timeout)
            except _Lost as e:
                lost[w] = e
                continue
            infos = self._infos(infos, w, answer)
        for w, why in lost.items():
            self._replace(w, why)
        view = self._view
        obs, reward = self._read_obs(), view["reward"].copy()
        self.dead = view["dead"].copy()
        if self._check is not None:
            self._checked(obs, reward)
        self._last = obs
        return obs, reward, view["terminated"].copy(), view["truncated"].copy(), infos

    def _infos(self, infos: Infos, w: int, answer: bytes) -> Infos:
        """With those of worker w."""
        some = None if answer == b"k" else self._unpack(answer)
        if some is not None:
            infos = infos or [{} for _ in range(self.num_envs)]
            infos[self._shares[w][0] : self._shares[w][1]] = some
        return infos

    def _step_ready(self, actions: NestedArray) -> StepResult:
        """A step that returns when `wait_num` environments are ready. Of a worker that has not answered nothing is read or written
        in the shared memory: it is at work there."""
        assert self._config.wait_num is not None
        batch = tree.leaves(self._cast(actions))
        now = time.monotonic()
        for w, (low, high) in enumerate(self._shares):
            if w in self._sent:
                continue  # its last action is still under way
            for to, given in zip(self._action_leaves, batch, strict=True):
                to[low:high] = given[low:high]
            self._sent[w] = now
            try:
                self._workers[w].send(b"s")
            except _Lost as e:
                self._answers[w] = e
        self._gather(self._config.wait_num, self._config.step_wait_timeout)
        view, n = self._view, self.num_envs
        obs, dead, waiting = tree.map(np.copy, self._last), self.dead.copy(), np.ones(n, bool)
        reward, terminated, truncated = np.zeros(n, np.float32), np.zeros(n, bool), np.zeros(n, bool)
        columns = [(reward, view["reward"]), (terminated, view["terminated"]), (truncated, view["truncated"])]
        columns += [(dead, view["dead"]), *zip(tree.leaves(obs), self._obs_leaves, strict=True)]
        infos: Infos = None
        for w, answer in self._answers.items():
            if isinstance(answer, _Lost):
                self._replace(w, answer)
            else:
                infos = self._infos(infos, w, answer)
            rows = slice(*self._shares[w])
            for to, given in columns:
                to[rows] = given[rows]
            waiting[rows] = False
            del self._sent[w]
        self._answers.clear()
        self.dead, self._waiting = dead, waiting
        self._checked(obs, reward)
        self._last = obs
        return obs, reward, terminated, truncated, infos

    def _gather(self, least: int, further: float = 0.0) -> None:
        """Take in answers of the steps under way until `least` environments are ready, and those that come `further` seconds later.
        Who is slower than `step_timeout`, counted from its own action, is lost."""
        limit = math.inf if self._timeout is None else self._timeout
        until = math.inf
        while asked := [w for w in self._sent if w not in self._answers]:
            now = time.monotonic()
            if (
                until == math.inf
                and sum(high - low for low, high in map(self._shares.__getitem__, self._answers)) >= least
            ):
                until = now + further
            left = min(until, min(self._sent[w] for w in asked) + limit) - now
            came = wait([self._workers[w].conn for w in asked], None if left == math.inf else max(0.0, left))
            now = time.monotonic()
            for w in asked:
                worker = self._workers[w]
                try:
                    if worker.conn in came:
                        self._answers[w] = worker.receive(None)
                    elif now - self._sent[w] >= limit:
                        self._answers[w] = _Lost(f"did not answer within {limit:g} s")
                except _Lost as e:
                    self._answers[w] = e
            if now >= until:
                return

    def _settle(self) -> None:
        """Wait for the steps under way and forget what comes of them."""
        if not self._sent:
            return
        self._gather(self.num_envs)
        for w, answer in self._answers.items():
            if isinstance(answer, _Lost):
                self._replace(w, answer)
            else:
                self._infos(None, w, answer)
        self._sent.clear()
        self._answers.clear()
        self._waiting = np.zeros(self.num_envs, bool)

    def _read_obs(self) -> NestedArray:
        obs = self._alloc()
        for to, given in zip(tree.leaves(obs), self._obs_leaves, strict=True):
            to[...] = given
        return obs

    def _unpack(self, answer: bytes) -> Infos:
        kind, *rest = pickle.loads(answer)
        if kind == "error":
            raise ConfigError(rest[1]) if rest[0] == "config" else EnvError(rest[1])
        self._count(rest[1])
        return rest[0]

    def _checked(self, obs: NestedArray, reward: np.ndarray | None) -> None:
        what: tuple[int, str] | None = None
        if self._check is not None and not self._check.ok(obs):
            what = self._check.explain(obs)
        elif self._check is not None and reward is not None and not np.isfinite(reward.dot(reward)):
            bad = np.flatnonzero(~np.isfinite(reward))
            what = (int(bad[0]), f"the reward is {reward[bad[0]]}") if bad.size else None
        if what is not None:
            i = what[0]
            w = next(w for w, (low, high) in enumerate(self._shares) if low <= i < high)
            row = self._one(w, "get_state", None)["json"]["envs"][i - self._shares[w][0]]
            raise EnvError(
                f"{self.name}, environment {i}, episode {row['episode']}, step {row['steps']}: {what[1]}. Correct the "
                "environment, or set env.check=false to go on regardless."
            )

    # --- what goes wrong ----------------------------------------------------------------------------------------------

    def _count(self, failures: list[tuple[int, str]]) -> None:
        """Environments that raised; their workers have rebuilt them already."""
        for _, report in failures:
            self.restarts += 1
            if self.restarts > self._config.max_restarts:
                raise give_up(report, self._config.max_restarts)
            log.warning("%s. Rebuilt (%d of at most %d).", report, self.restarts, self._config.max_restarts)

    def _replace(self, w: int, why: _Lost) -> None:
        """Kill a worker by its id, start another, and end its environments' episodes as truncated."""
        low, high = self._shares[w]
        worker = self._workers[w]
        where = worker.stack()
        worker.kill()
        report = (
            f"{where}\n{self.name}, environments {low} to {high - 1}: their process {worker.process.pid} {why} "
            f"(exit code {worker.process.exitcode})"
        ).lstrip()
        self._count([(low, report)])
        rows, view = slice(low, high), self._view
        alive = ~self.dead[rows]  # the others had ended before; their next episodes start now, as this step was to do
        for to, given in zip(self._obs_leaves, tree.leaves(self._last), strict=True):
            to[rows] = given[rows]
        self._workers[w] = self._start((low, high), view["episode"][rows].tolist(), (~alive).tolist())
        self._workers[w].started()
        view["reward"][rows] = 0.0
        view["terminated"][rows] = False
        view["truncated"][rows] = alive
        view["dead"][rows] = alive

    # --- the rest -----------------------------------------------------------------------------------------------------

    def _ask(self, command: str, arguments: list[Any]) -> list[Any]:
        """The same question to every worker. Replays may be long; a reset has a limit where steps have one."""
        timeout = max(self._timeout, _START_TIMEOUT) if self._timeout is not None and command == "reset" else None
        try:
            for worker, argument in zip(self._workers, arguments, strict=True):
                worker.send(pickle.dumps((command, argument)))
            return [self._unpack(worker.receive(timeout)) for worker in self._workers]
        except _Lost as e:
            raise EnvError(f"{self.name}: a worker process {e} in {command}") from None

    def _one(self, w: int, command: str, argument: Any) -> Any:
        self._workers[w].send(pickle.dumps((command, argument)))
        return self._unpack(self._workers[w].receive(None))

    def get_state(self) -> dict[str, Any]:
        if self.waits:
            return self._ended_state()
        states = self._ask("get_state", [None] * len(self._workers))
        envs = [e for s in states for e in s["arrays"]["envs"]]
        rows = [r for s in states for r in s["json"]["envs"]]
        json = {"form": FORM, "num_envs": self.num_envs, "seed": states[0]["json"]["seed"], "restarts": self.restarts}
        return {"arrays": {"envs": envs}, "json": {**json, "envs": rows}}

    def _ended_state(self) -> dict[str, Any]:
        """A state from which all environments go on with their next episodes: steps that are under way cannot be saved."""
        self.exact = False
        envs = [{"obs": tree.map(lambda x, i=i: np.array(x[i]), self._last)} for i in range(self.num_envs)]
        rows = [{"episode": k, "steps": 0, "dead": True, "lost": False} for k in self._view["episode"].tolist()]
        json = {"form": FORM, "num_envs": self.num_envs, "seed": self._given["seed"], "restarts": self.restarts}
        return {"arrays": {"envs": envs}, "json": {**json, "envs": rows}}

    def set_state(self, state: dict[str, Any]) -> NestedArray:
        arrays, json = check_state(state, FORM, self.num_envs)
        self._settle()
        shares = [
            {
                "arrays": {"envs": arrays["envs"][low:high]},
                "json": {**json, "num_envs": high - low, "envs": json["envs"][low:high]},
            }
            for low, high in self._shares
        ]
        self.exact = all(self._ask("set_state", shares)) and not self.waits
        self.restarts, self._given["seed"] = int(json["restarts"]), int(json["seed"])
        self.dead = self._view["dead"].copy()
        self._last = obs = self._read_obs()
        return tree.map(np.copy, obs)

    def render(self) -> np.ndarray | None:
        self._gather(self.num_envs)  # a worker answers one question at a time; the next step returns what comes here
        return None if isinstance(self._answers.get(0), _Lost) else self._one(0, "render", None)

    def close(self) -> None:
        self._finalizer()


def _close_all(workers: list[_Process]) -> None:
    for worker in workers:
        worker.close()
