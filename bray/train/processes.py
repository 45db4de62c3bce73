"""Samplers as processes of this machine. Weights and pieces go through shared memory, questions and answers through a
pipe.

Nobody waits for anybody there: see `SharedFeed`."""

from __future__ import annotations

import os
import pickle
import secrets
import tempfile
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import numpy as np

from bray.act import Clock
from bray.act.feed import SharedFeed
from bray.envs.process import START_TIMEOUT, STOP, Child, error_answer, portable, unpack
from bray.errors import EnvError
from bray.train.central import CentralServer, CentralServers
from bray.train.piece_memory import PieceReader, PieceWriter
from bray.train.sampler import Played, Sampler, SamplerPlan, make_sampler

# --- in the process that learns ---------------------------------------------------------------------------------------


class Processes:
    """Where samplers live: processes of this machine."""

    def __init__(self, weights: Mapping[str, np.ndarray], central: CentralServer | CentralServers | None = None):
        """central: who computes the Models for them; it takes the weights, and `weights` has none."""
        self._feed = SharedFeed(weights)
        self._central = central
        self._starting: list[SamplerProcess] = []

    def start(self, plan: SamplerPlan) -> SamplerProcess:
        """Begin to start a sampler; `started` waits for it. Where more start than there are cores for, they would only
        slow each other down, beyond their time limit: the next one then begins when the first of them is there."""
        self._starting = [worker for worker in self._starting if worker.starting]
        if len(self._starting) >= 2 * (os.cpu_count() or 1):
            wait([self._starting.pop(0).conn], START_TIMEOUT)
        line = self._central.line(plan.index - 1) if self._central else None
        self._starting.append(SamplerProcess(plan, self._feed, line))
        return self._starting[-1]

    def publish(self, weights: Callable[[], Mapping[str, np.ndarray]], clock: Clock) -> None:
        """Samplers take the newest weights when they begin to play, so a question need not say which."""
        if self._central:
            self._central.take_weights()
        self._feed.publish(weights, clock)

    def wait(self, workers: Sequence[Any], timeout: float) -> list[Any]:
        ready = set(wait([worker.conn for worker in workers], timeout))
        return [worker for worker in workers if worker.conn in ready]

    def close(self) -> None:
        """Nothing is left when the samplers are closed."""


class SamplerProcess:
    """A sampler in a process, seen from its parent. Questions are answered in their order; `Lost` is raised where it
    died or hangs."""

    def __init__(self, plan: SamplerPlan, feed: SharedFeed, line: Any = None):
        told, needs_main = portable(plan)
        path = _memory_path()
        self._memory = PieceReader(path)
        self._child = Child(serve_player, (feed, line, told, path), "bray-rollout", Sampler.__module__, needs_main)
        self.starting = True

    @property
    def name(self) -> str:
        return f"process {self._child.process.pid}"

    @property
    def conn(self) -> Connection:
        return self._child.conn

    @property
    def process_id(self) -> int:
        return self._child.process.pid or 0

    def started(self) -> None:
        self.starting = False
        self._child.started()

    def send(self, method: str, *arguments: Any) -> None:
        """Ask without waiting."""
        self._child.send(pickle.dumps((method, *arguments)))

    def receive(self, timeout: float | None) -> Any:
        """The answer to the oldest question. Rows that were played lie in memory that the sampler writes over when it
        plays the third time from now."""
        answer, _ = unpack(self._child.receive(timeout))
        if not isinstance(answer, Played):
            return answer
        return answer._replace(pieces=self._memory.read(answer.pieces))  # type: ignore[arg-type]

    def kill(self) -> str:
        """End it at once; where it was, and how it ended."""
        self.starting = False
        where = self._child.stack()
        self._child.kill()
        self._memory.remove()
        return f"{where}\n{self._child.end}".lstrip()

    def close(self) -> None:
        self._child.close()
        self._memory.remove()


def _memory_path() -> Path:
    """What the names of the files of a sampler's memory begin with."""
    folder = "/dev/shm" if Path("/dev/shm").is_dir() else tempfile.gettempdir()
    return Path(folder) / f"bray-rollout-{os.getpid()}-{secrets.token_hex(8)}"


# --- in a sampler's process -------------------------------------------------------------------------------------------


def serve_player(conn: Connection, feed: SharedFeed, line: Any, told: bytes, path: Path) -> None:
    """Play until told to stop."""
    try:
        sampler = make_sampler(pickle.loads(told), line)  # our own bytes, from our own parent
    except BaseException as e:
        conn.send(error_answer(e))
        return
    conn.send(("ok", None, []))
    memory = PieceWriter(path)
    try:
        while (message := conn.recv_bytes()) != STOP:
            method, *arguments = pickle.loads(message)
            try:
                if method == "play":
                    newest = feed.read()
                    played = sampler.play(newest.weights, newest.clock, *arguments[2:])
                    result: Any = played._replace(pieces=memory.write(played.pieces))
                else:
                    result = getattr(sampler, method)(*arguments)
                answer = _packed(method, result)
            except BaseException as e:  # a sys.exit() in code of the user too
                answer = pickle.dumps(error_answer(e))
            conn.send_bytes(answer)
            sampler.laps.lap("transfer")
    finally:
        sampler.close()


def _packed(method: str, result: Any) -> bytes:
    try:
        return pickle.dumps(("ok", result, []))
    except (pickle.PicklingError, AttributeError, TypeError) as e:
        raise EnvError(
            f"{method}: what the function returned cannot be sent to the process that learns ({e}): return numbers, "
            "text, arrays, or lists of these"
        ) from None
