"""Exchange over a directory that machines share (`run.exchange`): workers that somebody else starts, at any time and on
any machine (`bray work DIR`), play for a training. Policies and what was played are files, and nothing else connects
the two; workers join and leave while it runs.

    training.json      what a worker is told: the config of the run, and which training it is of
    policy/N           the N-th publication of weights; the newest two are kept
    workers/NAME       a worker is here. It touches the file every second, and removes it when it leaves
    seats/NAME         the training has a seat for it: which of `num_workers`
    data/NAME-N        the N-th piece that it has played; gone when the training has it

Files have their names only when they are whole, begin with a checksum, and nothing in them is unpickled: who may write
in the directory can spoil a training, and run nothing. Clocks of different machines are never compared. A worker plays
two pieces ahead of what the training has taken, and no more.
"""

from __future__ import annotations

import fcntl
import logging
import os
import re
import secrets
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import IO, Any

import msgspec
import numpy as np

from bray import tree
from bray._version import __version__
from bray.act import Clock
from bray.config import Resolved
from bray.data.experience import Counts
from bray.data.piece import COLUMNS, Piece
from bray.envs.process import Child
from bray.envs.rewards import Moments
from bray.errors import CheckpointError, ConfigError, DataError, EnvError
from bray.limited_log import LimitedLog
from bray.metrics.spent import WEIGHTS
from bray.named import in_script
from bray.nn.own import example_obs
from bray.rundir.files import write_atomic, writing
from bray.rundir.trust import named, remember
from bray.spec import EnvSpec
from bray.train.exchange_folder import TURN_S, About, Folder, GivenSeat, OfPolicy, Told, names_in
from bray.train.exchange_worker import serve_worker
from bray.train.played import PlayedSource
from bray.train.rollout import returns_of
from bray.train.sampler import Played, SamplerPlan

logger = logging.getLogger("bray")

_SILENT_S = 20.0  # after which a worker that has not touched its file is gone
_CLOSE_S = 3.0  # for a worker of our own to hear that it is over
_LOOK_S = 0.25  # between two looks who is there
_EVERY_S = 0.05  # between two publications: a file each
_SLOWEST_START_S = 300.0  # a worker makes its environments after it has been given its seat
_PIECE = re.compile(r"([0-9a-f]{16})-(\d{1,12})")


@dataclass
class _Worker:
    """One that has a seat."""

    name: str
    seat: int
    mark: int
    """When its file was touched, by the clock of whoever keeps the directory."""
    heard: float = field(default_factory=time.monotonic)
    """When we saw that."""
    played: float = field(default_factory=time.monotonic)
    """When its last piece was taken, or it got its seat."""
    pieces: int = 0
    longest: float = 0.0


class ExchangeSource(PlayedSource):
    """See the module: the side of the process that learns."""

    def __init__(
        self,
        plan: SamplerPlan,
        spec: EnvSpec,
        weights: Callable[[], Mapping[str, np.ndarray]],
        lanes: bool,
    ):
        assert plan.run.exchange is not None
        super().__init__(plan.run.workers if lanes else None)
        self.plan, self._spec, self._weights, self._news = plan, spec, weights, True
        self.folder = Folder(plan.run.exchange)
        self._workers: dict[str, _Worker] = {}
        self.joined = self.left = self.refused = self.restarts = 0
        """Workers so far; pieces that were damaged or do not fit; workers of our own that were replaced."""
        self._number, self._next, self._looked = 0, 0.0, 0.0
        self._columns: dict[str, str] = {}  # of the first piece: the others have the same
        self._limited = LimitedLog(logger)
        self._lock = self._claim()
        config = self._config()
        self._told = Told(__version__, secrets.token_hex(8), False, plan.rows, plan.state_every, config)
        try:
            self._clear()
            self.folder.tell(self._told)
        except BaseException:
            self._lock.close()
            raise
        remember(named(config, self.folder.path))
        self._own = [self._start() for _ in range(plan.run.exchange_workers)]

    def _claim(self) -> IO[bytes]:
        """Only one training at a time; a lock that ends with this process."""
        path = self.folder.path / "lock"
        with writing(path, "nothing was changed"):
            self.folder.path.mkdir(parents=True, exist_ok=True)
            lock = open(path, "ab")  # noqa: SIM115  held until close
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.close()
            raise ConfigError(
                f"run.exchange={self.folder.path}: another training exchanges files there; give each a directory of "
                "its own"
            ) from None
        except OSError as e:
            logger.warning("%s cannot be locked (%s): see to it that only one training uses it", self.folder.path, e)
        return lock

    def _start(self) -> Child:
        """A worker of our own, which ends with us."""
        return Child(serve_worker, (str(self.folder.path),), "bray-work", serve_worker.__module__)

    @property
    def process_ids(self) -> list[int]:
        """Of workers of our own."""
        return [child.process.pid or 0 for child in self._own]

    def _restart(self) -> None:
        """Those of our own that have died."""
        for i, child in enumerate(self._own):
            if child.process.is_alive():
                continue
            child.kill()
            self.restarts += 1
            most = self.plan.run.max_worker_restarts
            if self.restarts > most:
                raise EnvError(
                    f"a worker has died ({child.end}). run.max_worker_restarts={most} are used up: see above why they "
                    "end, or allow more"
                )
            logger.warning("a worker has died (%s). Replaced (%d so far)", child.end, self.restarts)
            self._own[i] = self._start()

    def _config(self) -> dict[str, Any]:
        """Of the run, as other processes make it again."""
        plan = self.plan
        config = Resolved({"run": plan.run, "env": plan.env, "model": plan.model, "algo": plan.config}, {}).to_dict()
        for key, name, _ in named(config):
            if in_script(name):
                raise ConfigError(
                    f"run.exchange: {key}={name} is in the script that trains, and workers are other programs: move it "
                    "to a module, and name it module:Name"
                )
        if not isinstance(config["env"]["id"], str):
            raise ConfigError("run.exchange: workers elsewhere make the environment by its name: env=module:Class")
        return config

    def _clear(self) -> None:
        """What another training has left."""
        for folder in (self.folder.policy, self.folder.data, self.folder.seats, self.folder.workers):
            with writing(folder, "nothing was changed"):
                folder.mkdir(exist_ok=True)
                for path in folder.iterdir():
                    if folder != self.folder.workers:
                        path.unlink(missing_ok=True)

    # --- pieces

    def gather(self, timeout: float = 0.0) -> tuple[list[Piece], Counts]:
        self._laps.lap("elsewhere")
        end = time.monotonic() + timeout
        while True:
            if self._news and time.monotonic() >= self._next:
                self._publish()
            if time.monotonic() >= self._looked + _LOOK_S:
                self._look()
            self._take()
            if self._came or time.monotonic() >= end:
                break
            time.sleep(TURN_S)
            self._laps.lap("idle")
        came, self._came = self._came, []
        pieces = self._pieces(came)
        self._laps.lap("transfer")
        return pieces, self._count(came)

    def _take(self) -> None:
        """What has been played. Pieces of a worker are taken in their order, and those of nobody thrown away."""
        waiting: dict[str, list[int]] = {}
        for name in names_in(self.folder.data):
            if (match := _PIECE.fullmatch(name)) is None:
                continue  # being written
            if match[1] in self._workers:
                waiting.setdefault(match[1], []).append(int(match[2]))
            else:
                with suppress(OSError):
                    (self.folder.data / name).unlink()
        for name in sorted(waiting, key=lambda name: self._workers[name].seat):
            worker = self._workers[name]
            for number in sorted(waiting[name]):
                if number == worker.pieces:
                    self._take_piece(worker)
        self._laps.lap("transfer")

    def _take_piece(self, worker: _Worker) -> None:
        path = self.folder.data / f"{worker.name}-{worker.pieces}"
        try:
            played = self._checked(*self.folder.take(path, About))
        except FileNotFoundError:  # listed, but not seen here yet
            return
        except (DataError, CheckpointError) as e:
            self.refused += 1
            self._limited.warning("piece", "run.exchange: what a worker has sent is left out: %s", e)
            if self._lanes is not None:
                self._lanes.cut(worker.seat)
        else:
            spent = sum(played.seconds.get(phase, 0.0) for phase in ("env", "forward", "other"))
            worker.longest = max(worker.longest, spent)
            self._keep(worker.seat, played)
        worker.pieces += 1
        worker.played = time.monotonic()
        with suppress(FileNotFoundError):
            path.unlink()

    def _checked(self, about: About, arrays: Any) -> Played:
        """A piece of as many rows and games as were asked for, with the columns of the others."""
        if not isinstance(arrays, dict) or not arrays.keys() <= {*COLUMNS, "version"}:
            raise DataError(f"not the columns of a piece: {sorted(arrays)}")
        version = arrays.pop("version", np.zeros((), np.int64))
        try:
            piece = Piece(**arrays, state_every=self.plan.state_every).check()
        except (AttributeError, TypeError, ValueError) as e:
            raise DataError(f"not the columns of a piece: {e}") from None
        rows, games = self.plan.rows, self.plan.env.num_envs
        if piece.reward.shape != (rows, games):
            raise DataError(f"expected {rows} rows of {games} games, got {piece.length} of {piece.num_envs}")
        self._columns = self._columns or _columns(arrays)
        _require(self._columns, _columns(arrays))
        obs = tree.map(lambda x: x.numpy()[None], example_obs(self._spec.observation, 1))
        _require(_columns({"obs": obs}), _columns({"obs": piece.obs}))
        if version.dtype.kind != "i" or version.shape not in ((), piece.reward.shape) or version.min() < 0:
            raise DataError(f"versions of weights are whole numbers, got {version.dtype}{list(version.shape)}")
        piece.version = version if version.ndim else int(version)
        if not 0 <= about.env_steps <= rows * games or len(about.episodes) > rows * games:
            raise DataError(
                f"{about.env_steps} steps and {len(about.episodes)} episodes in {rows} rows of {games} games"
            )
        counts = Counts(about.env_steps, tuple(about.episodes))
        return Played([piece], counts, about.seconds, about.metrics, Moments.saved(about.returns))

    # --- workers

    def _look(self) -> None:
        """Who has come, and who has gone."""
        self._restart()
        self._looked = now = time.monotonic()
        marks: dict[str, int] = {}
        for name in names_in(self.folder.workers):
            with suppress(FileNotFoundError):
                if re.fullmatch("[0-9a-f]{16}", name):
                    marks[name] = os.stat(self.folder.workers / name).st_mtime_ns
        for worker in list(self._workers.values()):
            if (mark := marks.get(worker.name)) is None:
                self._take()  # what it has left here
                self._leave(worker, "")
            elif mark != worker.mark:
                worker.mark, worker.heard = mark, now
            elif now > worker.heard + _SILENT_S:
                self._leave(worker, f"says nothing for {_SILENT_S:g} s")
            if worker.name in self._workers and now > worker.played + (limit := self._limit(worker)):
                self._leave(worker, f"has played nothing for {limit:g} s")
        for name in sorted(marks.keys() - self._workers.keys()):
            free = set(range(self.plan.run.workers)) - {worker.seat for worker in self._workers.values()}
            if free and self._is_here(name):
                self._welcome(name, min(free), marks[name])

    def _limit(self, worker: _Worker) -> float:
        limit = self.plan.run.worker_timeout_s or max(60.0, 10 * worker.longest)
        return limit if worker.pieces else max(limit, _SLOWEST_START_S)

    def _is_here(self, name: str) -> bool:
        """Whether the worker of a file has come to this training, and not to one that was here before."""
        with suppress(OSError):
            return (self.folder.workers / name).read_bytes() == self._told.training.encode()
        return False

    def _welcome(self, name: str, seat: int, mark: int) -> None:
        self._workers[name] = _Worker(name, seat, mark)
        given = GivenSeat(seat + 1, self.joined, self._clock.env_steps)
        write_atomic(self.folder.seats / name, msgspec.json.encode(given), sync=False)
        if self._lanes is not None:
            self._lanes.join(seat)
        self.joined += 1
        logger.info("worker %s has joined: seat %d of %d", name, seat + 1, self.plan.run.workers)

    def _leave(self, worker: _Worker, why: str) -> None:
        del self._workers[worker.name]
        self.left += 1
        level = logging.WARNING if why else logging.INFO
        logger.log(level, "worker %s %s; its seat is free again", worker.name, why or "has left")
        for path in (self.folder.seats / worker.name, *([self.folder.workers / worker.name] if why else [])):
            with suppress(FileNotFoundError):
                path.unlink()
        if self._lanes is not None:
            self._lanes.leave(worker.seat)

    # --- the rest of a Source

    def _publish(self) -> None:
        self._number += 1
        said = OfPolicy(self._clock.env_steps, self._clock.version, self.returns.numbers)
        self.folder.put(self.folder.policy / f"{self._number:012d}", said, dict(self._weights()))
        with suppress(FileNotFoundError):
            (self.folder.policy / f"{self._number - 2:012d}").unlink()
        self._news, self._next = False, time.monotonic() + _EVERY_S
        self._laps.lap(WEIGHTS)

    def publish(self, side: str, weights: Callable[[], Mapping[str, np.ndarray]], clock: Clock) -> None:
        self._weights, self._clock, self._news = weights, clock, True

    def wait_reason(self) -> str:
        if self._workers:
            return ""
        return f"no worker is here: start some with `bray work {self.folder.path}`"

    def numbers(self) -> dict[str, float]:
        here = {"workers/here": len(self._workers), "workers/joined": self.joined, "workers/left": self.left}
        return super().numbers() | here | {"workers/refused": self.refused, "workers/restarts": self.restarts}

    def get_state(self, midway: bool = False) -> dict[str, Any]:
        json = {"workers": None, "exact": False, "metrics": self._metrics.get_state(), "returns": self.returns.numbers}
        return {"arrays": {}, "json": json}

    def set_state(self, state: dict[str, Any], clock: Clock) -> bool:
        self._clock, self._news = clock, True
        self._metrics.set_state(state["json"].get("metrics", "[]"))
        self.returns = returns_of(state)
        return False

    def close(self) -> None:
        """The workers end, as far as they are told so here."""
        if self._lock.closed:
            return
        with suppress(CheckpointError):
            self.folder.tell(msgspec.structs.replace(self._told, ended=True))
        for child in self._own:
            child.process.join(_CLOSE_S)
            child.kill()
        self._lock.close()


def _columns(arrays: Any) -> dict[str, str]:
    """What arrays are of, behind their axes of time and games."""
    return {path: f"{leaf.dtype}{list(leaf.shape[2:])}" for path, leaf in tree.paths(arrays)}


def _require(expected: Mapping[str, str], got: Mapping[str, str]) -> None:
    if expected != got:
        wrong = next(k for k in (*expected, *got) if expected.get(k) != got.get(k))
        raise DataError(f"column {wrong!r}: expected {expected.get(wrong)}, got {got.get(wrong)}")
