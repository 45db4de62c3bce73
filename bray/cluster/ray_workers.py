"""Worker processes of this one that Ray places on any node: started, asked, killed. They end with this process.

Each holds one object and answers questions (its methods) in their order. Ray restarts none of them: whoever asks
decides what a lost one is worth.
Arguments and answers go through the object store, arrays without a copy of their own; what `put` returns is sent to
each machine once.
"""

from __future__ import annotations

import faulthandler
import logging
import os
import pickle
import signal
import socket
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from bray.cluster.machine import Machine
from bray.cluster.ray import START_TIMEOUT, RayCluster, prepare_worker
from bray.cluster.ray_start import start_ray
from bray.cluster.session import SessionInfo
from bray.envs.process import Lost, LostAtStart, error_answer, read_answer
from bray.errors import ConfigError, EnvError, ResourceError
from bray.log_format import log_format

logger = logging.getLogger("bray.remote")

LOOK_S = 5.0
"""Seconds between two looks whether there is room for the CPUs of a worker that runs without them."""
_CLOSE_S = 5.0
_KILL_S = 10.0
_TRIES = 3  # to place a worker that replaces another


class RayWorkers:
    """The workers of this process on a Ray cluster.

    name, count    what they are in messages, and how many there will be
    cpus, gpus     what Ray reserves for each; parts of one too
    moves_before   the question before which a worker without reserved CPUs (see `start`) is given up as soon as there
                   is room for them
    ray_kwargs     go to `ray.init` where no Ray is connected yet
    """

    def __init__(self, name: str, count: int, cpus: float, gpus: float, moves_before: str, ray_kwargs: dict[str, Any]):
        self.name, self.count, self.cpus, self.gpus, self.moves_before = name, count, cpus, gpus, moves_before
        modules = tuple(os.path.abspath(p) for p in sys.path)
        self.info = SessionInfo(
            "", "", "", f"{name}-{os.getpid()}", b"", one_machine=False, modules=modules, log_format=log_format()
        )
        connected, started = start_ray(self.info.namespace, ray_kwargs)
        self.cluster = RayCluster(self.info, connected)
        self._ends: list[tuple[Any, Any]] = []
        self._room, self._looked = True, 0.0
        try:
            self.cluster.check_group(name, count, cpus, gpus)
            if started:  # its CPUs are as many as were asked for
                for problem in Machine.look().shortage(count * cpus, count * gpus):
                    logger.warning("%s: %s", name, problem)
            self.cluster.wait_group(name, count, cpus, gpus)
        except BaseException:
            self.close()
            raise

    def start(self, make: Callable[[], Any], replaces: bool = False) -> RayWorker:
        """Begin to start a worker that holds what `make` makes; `started` waits for it.

        replaces  it is started for one that was lost: where the cluster has become too small, it runs without reserved
                  CPUs
        """
        try:
            made = ray.cloudpickle.dumps(make)
        except (pickle.PicklingError, AttributeError, TypeError) as e:
            raise ConfigError(f"{self.name}: what they are made of cannot be sent to other processes ({e})") from e
        return RayWorker(self, made, replaces)

    def put(self, value: Any) -> Any:
        """A reference to a value, as an argument of questions."""
        return ray.put(value)

    def wait(self, workers: Sequence[RayWorker], timeout: float) -> list[RayWorker]:
        """Those whose oldest question is answered, who have started or are lost; waits so many seconds for the first of
        them."""
        asked = {worker.oldest: worker for worker in workers if worker.oldest is not None}
        if not asked:
            return []
        ray.wait(list(asked), timeout=timeout)
        ready, _ = ray.wait(list(asked), num_returns=len(asked), timeout=0)
        for worker in workers:
            worker.tend()
        return [asked[ref] for ref in ready if asked[ref].oldest == ref]  # else it has begun again

    def has_room(self, now: bool = False) -> bool:
        """Whether all workers would fit with their CPUs, as it was at most LOOK_S ago."""
        if now or time.monotonic() > self._looked + LOOK_S:
            self._room = self.cluster.room(self.count, self.cpus, self.gpus) >= self.count
            self._looked = time.monotonic()
        return self._room

    def busy(self) -> ResourceError:
        return self.cluster.busy(self.name, f"{self.cpus:g} CPUs and {self.gpus:g} GPUs for each worker")

    def end(self, actor: Any, last: Any) -> None:
        """Kill an actor in `close`, when it has answered its last question."""
        self._ends.append((actor, last))

    def close(self) -> None:
        """End those that were asked to close, and the Ray that was started for them."""
        ending, self._ends = self._ends, []
        if ray.is_initialized() and ending:
            with suppress(ray.exceptions.RayError):
                ray.wait([last for _, last in ending], num_returns=len(ending), timeout=_CLOSE_S)
            for actor, _ in ending:
                ray.kill(actor)
        self.cluster.close()


class _WorkerProcess(NamedTuple):
    """Where a worker runs."""

    process_id: int
    host: str
    node: str


class RayWorker:
    """A worker, seen from the process that asks it. `Lost` is raised where it died, its node is gone, or it hangs."""

    def __init__(self, workers: RayWorkers, made: bytes, replaces: bool):
        self._workers, self._made, self._replaces = workers, made, replaces
        self._guest, self._tries = False, _TRIES
        self._place: _WorkerProcess | None = None
        self._asked: deque[Any] = deque()
        self._end, self._moves, self._closed = "", False, False
        self._begin(guest=replaces and not workers.has_room(now=True))

    def _begin(self, guest: bool) -> None:
        """guest  on a node that has no CPUs left for it"""
        self._guest, self._end = guest, ""
        actor: Any = ray.remote(_Actor)
        self._actor = actor.options(
            num_cpus=0 if guest else self._workers.cpus,
            num_gpus=self._workers.gpus,
            scheduling_strategy="SPREAD",
            max_restarts=0,
            max_task_retries=0,
        ).remote(self._workers.info, self._workers.name)
        self._where = self._actor.place.remote()
        self._asked = deque([self._actor.make.remote(self._made)])

    @property
    def name(self) -> str:
        place = self._place
        return "not placed yet" if place is None else f"process {place.process_id} on {place.host}"

    @property
    def process_id(self) -> int:
        return 0 if self._place is None else self._place.process_id

    @property
    def oldest(self) -> Any:
        """The answer to come first, as a reference; None where nothing was asked."""
        return self._asked[0] if self._asked else None

    def started(self) -> None:
        """Wait until what it holds is made; what that raised is raised here."""
        try:
            self._wait_placed()
            self.receive(START_TIMEOUT)
        except Lost as e:
            end = self.kill()
            self._asked.clear()
            self._end = ""  # told here
            raise LostAtStart(f"{e} while starting\n{end}".rstrip()) from None
        except (ConfigError, EnvError, ResourceError):
            self.kill()
            raise

    def _wait_placed(self) -> None:
        end = time.monotonic() + START_TIMEOUT
        while not ray.wait([self._where], timeout=1.0)[0]:
            self.tend()
            if time.monotonic() > end:
                raise self._workers.busy()
        self._place = self._get(self._where, None)

    def tend(self) -> None:
        """One that replaces another and is not placed yet: begin again where Ray has put it on a node that has just
        gone, and without CPUs where there is no room for them any more."""
        if not self._replaces or self._place is not None:
            return
        if ray.wait([self._where], timeout=0)[0]:
            try:
                self._place = self._get(self._where, None)
            except Lost:
                if self._tries:
                    self._tries -= 1
                    self._begin(guest=not self._workers.has_room(now=True))
        elif not self._guest and not self._workers.has_room():
            ray.kill(self._actor)
            self._begin(guest=True)

    def send(self, method: str, *arguments: Any) -> None:
        """Ask without waiting."""
        if self._guest and method == self._workers.moves_before and self._workers.has_room():
            self._moves = True
            raise Lost("ran without CPUs of its own, and there is room for them again")
        self._asked.append(self._actor.answer.remote(method, *arguments))

    def receive(self, timeout: float | None) -> Any:
        """The answer to the oldest question. Its arrays are read-only and lie in the object store."""
        try:
            answer = self._get(self._asked[0], timeout)
        except EnvError:  # that is the answer: the next question has another
            self._asked.popleft()
            raise
        self._asked.popleft()
        return read_answer(answer)[0]

    def _get(self, ref: Any, timeout: float | None) -> Any:
        try:
            return ray.get(ref, timeout=timeout)
        except ray.exceptions.GetTimeoutError:
            raise Lost(f"did not answer within {timeout:g} s") from None
        except ray.exceptions.RayTaskError as e:  # what it was told or would say cannot be sent
            raise EnvError(str(e)) from None
        except ray.exceptions.RayError as e:
            self._end = _summary(e)
            raise Lost("died") from None

    def kill(self) -> str:
        """End it at once; how it ended. Where a hung one was is shown on the terminal."""
        hangs = self._asked and not self._end and not self._moves
        if hangs and self._place is not None:  # Ray asks it to end, and it does not hear that
            on_its_node = NodeAffinitySchedulingStrategy(self._place.node, soft=False)
            kill = ray.remote(_kill).options(num_cpus=0, scheduling_strategy=on_its_node, max_retries=0)
            with suppress(ray.exceptions.RayError):
                ray.get(kill.remote(self._place.process_id), timeout=_KILL_S)
        ray.kill(self._actor)
        self._closed = True
        return self._end

    def close(self) -> None:
        """Ask it to end; the `close` of all waits for it."""
        if not self._closed and ray.is_initialized():
            self._workers.end(self._actor, self._actor.close.remote())
        self._closed = True


def _summary(error: ray.exceptions.RayError) -> str:
    """The lines of Ray's message that differ from case to case."""
    lines = [line.partition(" Some common causes")[0] for line in str(error).splitlines() if not line.startswith("\t")]
    return "\n".join(lines)


# --- in a worker's process --------------------------------------------------------------------------------------------


class _Actor:
    """The Ray actor around what a worker holds."""

    def __init__(self, info: SessionInfo, name: str):
        prepare_worker(info)
        self._name = name
        self._held: Any = None
        if hasattr(faulthandler, "register"):
            faulthandler.register(signal.SIGUSR1, sys.stderr, all_threads=False)

    def __repr__(self) -> str:
        """Ray puts it before what it prints."""
        return self._name

    def place(self) -> _WorkerProcess:
        return _WorkerProcess(os.getpid(), socket.gethostname(), ray.get_runtime_context().get_node_id())

    def make(self, made: bytes) -> tuple[str, Any, Any]:
        try:
            self._held = ray.cloudpickle.loads(made)()
            return "ok", None, []
        except Exception as e:
            return error_answer(e)

    def answer(self, method: str, *arguments: Any) -> tuple[str, Any, Any]:
        try:
            return "ok", getattr(self._held, method)(*arguments), []
        except Exception as e:
            return error_answer(e)

    def close(self) -> None:
        if self._held is not None:
            self._held.close()


def _kill(process_id: int) -> None:
    """On its node: let a process say where it is, and kill it."""
    with suppress(ProcessLookupError):
        os.kill(process_id, signal.SIGUSR1)
        time.sleep(0.2)  # the time to write it down
        os.kill(process_id, signal.SIGKILL)
