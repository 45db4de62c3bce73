"""Players as processes of this machine. Weights and pieces go through shared memory, questions and answers through a
pipe.

Nobody waits for anybody there: the weights are written to one of two places in turn, and a player that was overtaken by
the second writing reads again."""

from __future__ import annotations

import ctypes
import mmap
import multiprocessing
import os
import pickle
import secrets
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import numpy as np

from bray import tree
from bray.act import Clock
from bray.data.piece import COLUMNS, Piece
from bray.envs.process import START_TIMEOUT, STOP, Child, error_answer, portable, unpack
from bray.errors import EnvError
from bray.train.central import CentralServer, Line
from bray.train.player import Plan, Played, Player

_ALIGN = 64
_PLACES = 3
"""For pieces of a player: one that is lent to the process that learns, and two that it may have been asked for."""


# --- in the process that learns ---------------------------------------------------------------------------------------


class Processes:
    """Where players live: processes of this machine."""

    def __init__(self, weights: Mapping[str, np.ndarray], central: CentralServer | None = None):
        """central: who computes the Model for them; then it takes the weights, and they do not."""
        self._slots = Slots({} if central else weights)
        self._central = central
        self._starting: list[PlayerProcess] = []

    def start(self, plan: Plan) -> PlayerProcess:
        """Begin to start a player; `started` waits for it. Where more start than there are cores for, they would only
        slow each other down, beyond their time limit: the next one then begins when the first of them is there."""
        self._starting = [worker for worker in self._starting if worker.starting]
        if len(self._starting) >= 2 * (os.cpu_count() or 1):
            wait([self._starting.pop(0).conn], START_TIMEOUT)
        line = self._central.line(plan.index - 1) if self._central else None
        self._starting.append(PlayerProcess(plan, self._slots, line))
        return self._starting[-1]

    def publish(self, weights: Callable[[], Mapping[str, np.ndarray]], clock: Clock) -> None:
        """Players take the newest weights when they begin to play, so a question need not say which."""
        if self._central:
            self._central.take_weights()
        self._slots.write({} if self._central else weights(), clock)

    def wait(self, workers: Sequence[Any], timeout: float) -> list[Any]:
        ready = set(wait([worker.conn for worker in workers], timeout))
        return [worker for worker in workers if worker.conn in ready]

    def close(self) -> None:
        """Nothing is left when the players are closed."""


class PlayerProcess:
    """A player in a process, seen from its parent. Questions are answered in their order; `Lost` is raised where it
    died or hangs."""

    def __init__(self, plan: Plan, slots: Slots, line: Line | None = None):
        told, needs_main = portable(plan)
        self._memory = _memory_file()
        self._child = Child(serve_player, (slots, line, told, self._memory), "bray-rollout", needs_main)
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
        """The answer to the oldest question. Rows that were played lie in memory that the player writes over when it
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


class Slots:
    """Two copies of the weights in memory that all players see. Each has a counter that is odd while it is written: a
    reader that finds it odd, or changed behind its copy, takes the other one. A reader that is killed leaves nothing
    behind."""

    def __init__(self, weights: Mapping[str, np.ndarray]):
        self._places: dict[str, _Place] = {}
        self._size = 0
        for name, array in weights.items():
            self._places[name] = _Place(self._size, array)
            self._size += _padded(array)
        context = multiprocessing.get_context("spawn")
        self._memory = context.RawArray(ctypes.c_uint8, max(1, 2 * self._size))
        self._numbers = context.RawArray(ctypes.c_int64, 7)

    def views(self, slot: int) -> dict[str, np.ndarray]:
        return {name: place.of(self._memory, slot * self._size) for name, place in self._places.items()}

    def write(self, weights: Mapping[str, np.ndarray], clock: Clock) -> None:
        """Over the older of the two."""
        slot = 1 - self._numbers[0]
        at = 1 + 3 * slot
        number = self._numbers[at] | 1  # it is odd already where Ctrl-C has cut a write short
        self._numbers[at] = number
        _in_order()
        for name, array in self.views(slot).items():
            array[...] = weights[name]
        self._numbers[at + 1 : at + 3] = [clock.env_steps, clock.version]
        _in_order()
        self._numbers[at] = number + 1
        self._numbers[0] = slot

    def read(self) -> tuple[dict[str, np.ndarray], Clock]:
        """A copy of the newest ones, whole."""
        while True:
            slot = self._numbers[0]
            at = 1 + 3 * slot
            before = self._numbers[at]
            _in_order()
            weights = {name: array.copy() for name, array in self.views(slot).items()}
            clock = Clock(*self._numbers[at + 1 : at + 3])
            _in_order()
            if before % 2 == 0 and self._numbers[at] == before:
                return weights, clock


_turn = threading.Lock()


def _in_order() -> None:
    """What this process wrote or read so far comes before what follows, for other processes too. On ARM stores and
    loads may overtake each other, but none overtakes a lock that is released and taken again."""
    for _ in range(2):
        with _turn:
            pass


class _Place:
    """Where an array lies in a memory."""

    def __init__(self, at: int, array: np.ndarray):
        self.at, self.shape, self.dtype = at, array.shape, array.dtype

    def of(self, memory: Any, start: int) -> np.ndarray:
        return np.frombuffer(memory, self.dtype, int(np.prod(self.shape)), start + self.at).reshape(self.shape)


class _Placed:
    """What was played, its arrays in a place of the player's memory; with the first, how large a place is and what lies
    in it."""

    def __init__(self, played: Played, place: int, memory: tuple[int, Piece] | None):
        self.played, self.place, self.memory = played, place, memory


def _padded(array: np.ndarray) -> int:
    return -(-array.nbytes // _ALIGN) * _ALIGN


def _memory_file() -> Path:
    """A name for the memory of a player's pieces. The parent gives it, so that it can take the file away whatever
    becomes of the player."""
    folder = "/dev/shm" if Path("/dev/shm").is_dir() else tempfile.gettempdir()
    return Path(folder) / f"bray-rollout-{os.getpid()}-{secrets.token_hex(8)}"


def _attach(path: Path, size: int, template: Piece) -> list[Piece]:
    """The pieces in a file that a player has made; nobody else opens it any more."""
    with path.open("r+b") as file:
        memory = mmap.mmap(file.fileno(), _PLACES * size)
    path.unlink()
    return [_placed(template, memory, place * size) for place in range(_PLACES)]


def _placed(template: Piece, memory: mmap.mmap, start: int) -> Piece:
    filled = {
        name: tree.map(lambda place: place.of(memory, start), value)
        for name in COLUMNS
        if (value := getattr(template, name)) is not None
    }
    return replace(template, **filled)


# --- in a player's process --------------------------------------------------------------------------------------------


def serve_player(conn: Connection, slots: Slots, line: Line | None, told: bytes, file: Path) -> None:
    """Play until told to stop."""
    try:
        player = Player(pickle.loads(told), line)  # our own bytes, from our own parent
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
                    result: Any = memory.place(player.play(*slots.read(), returns=arguments[-1]))
                else:
                    result = getattr(player, method)(*arguments)
                answer = _packed(method, result)
            except BaseException as e:  # a sys.exit() in code of the user too
                answer = pickle.dumps(error_answer(e))
            conn.send_bytes(answer)
            player.laps.lap("transfer")
    finally:
        player.close()


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
        for name in COLUMNS:
            if (value := getattr(played.piece, name)) is not None:
                tree.map(np.copyto, getattr(self._pieces[place], name), value)
        nothing: dict[str, Any] = dict.fromkeys(COLUMNS)
        return _Placed(played._replace(piece=replace(played.piece, **nothing)), place, made)

    def _make(self, piece: Piece) -> tuple[int, Piece]:
        size = 0

        def place(array: np.ndarray) -> _Place:
            nonlocal size
            made = _Place(size, array)
            size += _padded(array)
            return made

        template = replace(
            piece, **{name: tree.map(place, value) for name in COLUMNS if (value := getattr(piece, name)) is not None}
        )
        handle = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(handle, "r+b") as file:
            os.posix_fallocate(file.fileno(), 0, max(1, _PLACES * size))
            memory = mmap.mmap(file.fileno(), _PLACES * size)
        self._pieces = [_placed(template, memory, place * size) for place in range(_PLACES)]
        return size, template
