"""Samplers as processes of this machine. Weights and pieces go through shared memory, questions and answers through a
pipe.

Nobody waits for anybody there: see `SharedFeed`."""

from __future__ import annotations

import mmap
import os
import pickle
import secrets
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import numpy as np

from bray import tree
from bray.act import Clock
from bray.act.feed import SharedFeed
from bray.data.piece import COLUMNS, Piece
from bray.envs.process import START_TIMEOUT, STOP, Child, error_answer, portable, unpack
from bray.errors import EnvError
from bray.train.central import CentralServer, Line
from bray.train.sampler import Played, Sampler, SamplerPlan
from bray.tree.shared import places

_PLACES = 3
"""For pieces of a sampler: one that is lent to the process that learns, and two that it may have been asked for."""


# --- in the process that learns ---------------------------------------------------------------------------------------


class Processes:
    """Where samplers live: processes of this machine."""

    def __init__(self, weights: Mapping[str, np.ndarray], central: CentralServer | None = None):
        """central: who computes the Model for them; then it takes the weights, and they do not."""
        self._feed = SharedFeed({} if central else weights)
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
        self._feed.publish(dict if self._central else weights, clock)

    def wait(self, workers: Sequence[Any], timeout: float) -> list[Any]:
        ready = set(wait([worker.conn for worker in workers], timeout))
        return [worker for worker in workers if worker.conn in ready]

    def close(self) -> None:
        """Nothing is left when the samplers are closed."""


class SamplerProcess:
    """A sampler in a process, seen from its parent. Questions are answered in their order; `Lost` is raised where it
    died or hangs."""

    def __init__(self, plan: SamplerPlan, feed: SharedFeed, line: Line | None = None):
        told, needs_main = portable(plan)
        self._memory = _memory_file()
        self._child = Child(
            serve_player, (feed, line, told, self._memory), "bray-rollout", Sampler.__module__, needs_main
        )
        self._pieces: list[Piece] = []
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
        if not isinstance(answer, _Placed):
            return answer
        if answer.memory is not None:
            self._pieces = _attach(self._memory, *answer.memory)
        arrays = {name: getattr(self._pieces[answer.place], name) for name in COLUMNS}
        return answer.played._replace(piece=replace(answer.played.piece, **arrays))

    def kill(self) -> str:
        """End it at once; where it was, and how it ended."""
        self.starting = False
        where = self._child.stack()
        self._child.kill()
        self._memory.unlink(missing_ok=True)  # of one whose first answer was not read
        return f"{where}\n{self._child.end}".lstrip()

    def close(self) -> None:
        self._child.close()
        self._memory.unlink(missing_ok=True)


class _Placed:
    """What was played, its arrays in a place of the sampler's memory; with the first, how large a place is and what
    lies in it."""

    def __init__(self, played: Played, place: int, memory: tuple[int, Piece] | None):
        self.played, self.place, self.memory = played, place, memory


def _memory_file() -> Path:
    """A name for the memory of a sampler's pieces. The parent gives it, so that it can take the file away whatever
    becomes of the sampler."""
    folder = "/dev/shm" if Path("/dev/shm").is_dir() else tempfile.gettempdir()
    return Path(folder) / f"bray-rollout-{os.getpid()}-{secrets.token_hex(8)}"


def _attach(path: Path, size: int, template: Piece) -> list[Piece]:
    """The pieces in a file that a sampler has made; nobody else opens it any more."""
    with path.open("r+b") as file:
        pieces = _map(file.fileno(), size, template)
    path.unlink()
    return pieces


def _map(file: int, size: int, template: Piece) -> list[Piece]:
    """The pieces in a file; `template` says which place each of their arrays has."""
    memory, columns = mmap.mmap(file, _PLACES * size), _columns(template)
    starts = range(0, _PLACES * size, size)
    return [replace(template, **tree.map(lambda place, at=at: place.of(memory, at), columns)) for at in starts]


def _columns(piece: Piece) -> dict[str, Any]:
    return {name: value for name in COLUMNS if (value := getattr(piece, name)) is not None}


# --- in a sampler's process -------------------------------------------------------------------------------------------


def serve_player(conn: Connection, feed: SharedFeed, line: Line | None, told: bytes, file: Path) -> None:
    """Play until told to stop."""
    try:
        sampler = Sampler(pickle.loads(told), line)  # our own bytes, from our own parent
    except BaseException as e:
        conn.send(error_answer(e))
        return
    conn.send(("ok", None, []))
    memory = _Memory(file)
    try:
        while (message := conn.recv_bytes()) != STOP:
            method, *arguments = pickle.loads(message)
            try:
                if method == "play":
                    newest = feed.read()
                    result: Any = memory.place(sampler.play(newest.weights, newest.clock, returns=arguments[-1]))
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


class _Memory:
    """A file in memory, with places for one piece each."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._pieces: list[Piece] = []
        self._next = 0

    def place(self, played: Played) -> _Placed:
        """Copy the arrays of the piece to the next place."""
        made = None if self._pieces else self._make(played.piece)
        place, self._next = self._next, (self._next + 1) % _PLACES
        for name, value in _columns(played.piece).items():
            tree.map(np.copyto, getattr(self._pieces[place], name), value)
        nothing: dict[str, Any] = dict.fromkeys(COLUMNS)
        return _Placed(played._replace(piece=replace(played.piece, **nothing)), place, made)

    def _make(self, piece: Piece) -> tuple[int, Piece]:
        columns = _columns(piece)
        found, size = places(tree.leaves(columns))
        each = iter(found)
        template = replace(piece, **tree.map(lambda _: next(each), columns))
        handle = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(handle, "r+b") as file:
            os.posix_fallocate(file.fileno(), 0, _PLACES * size)
            self._pieces = _map(file.fileno(), size, template)
        return size, template
