"""A worker of a training that exchanges files in a directory (`bray work DIR`); what the files are is in
`exchange.py`."""

from __future__ import annotations

import logging
import os
import secrets
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from threading import Event, Thread
from typing import Any

import msgspec

from bray._version import __version__
from bray.act import Clock
from bray.algos import get_algo
from bray.config import ConfigSource, Resolved, resolve
from bray.data.piece import arrays_of
from bray.envs.config import EnvConfig
from bray.envs.rewards import Moments
from bray.errors import ConfigError
from bray.nn.catalog import ModelConfig
from bray.rundir.files import write_atomic
from bray.rundir.trust import Answer, When, check, named
from bray.train.config import RunConfig
from bray.train.exchange_folder import AHEAD, TURN_S, About, Folder, GivenSeat, OfPolicy, Told
from bray.train.sampler import Sampler, SamplerPlan

logger = logging.getLogger("bray")

_BEAT_S = 1.0  # between two touches of a worker's file


class _Presence(Thread):
    """Says every second that a worker is here, and looks whether its training still is."""

    def __init__(self, folder: Folder, told: Told):
        super().__init__(daemon=True)
        self.name, self._folder, self._told = secrets.token_hex(8), folder, told
        self._file, self._closed = folder.workers / self.name, Event()
        self.over = self.ended = False
        """Whether the training is no more the one that was joined; whether it has said that it is at its end."""
        write_atomic(self._file, told.training, sync=False)
        self.start()

    def run(self) -> None:
        while not self._closed.wait(_BEAT_S):
            try:
                os.utime(self._file)
                told = self._folder.told()
            except OSError:  # the training has given us up, or the directory cannot be reached
                self.over = True
                return
            self.ended = told is None or told.ended
            self.over = self.ended or told != self._told

    def close(self) -> None:
        self._closed.set()
        self.join()
        with suppress(OSError):
            self._file.unlink()


class ExchangeWorker:
    """What plays for the trainings of a directory: for one until that ends, and for the next one where it was killed.

    trust    whether to import what the config of a training names
    wait_s   raise ConfigError after so many seconds without a training, or with one that takes nothing
    """

    def __init__(self, path: str | Path, trust: Answer = False, wait_s: float = 600.0):
        self.folder, self.wait_s, self._trust = Folder(path), wait_s, trust
        self.pieces = 0
        """Played so far."""
        self._since = time.monotonic()  # nothing has happened

    def run(self) -> None:
        """Play until a training has said that it is at its end."""
        ended = False
        while not ended:
            told = self._await_training()
            algo, config = self._read(told)
            presence = _Presence(self.folder, told)
            try:
                if (seat := self._await_seat(presence)) is not None:
                    self._play(self._sampler(told, algo, config, seat), presence)
            finally:
                presence.close()
            ended = presence.ended

    def _read(self, told: Told) -> tuple[Any, Resolved]:
        """The algorithm and the config of a training, where all that it asks to import may be imported."""
        path, given = self.folder.path, told.config
        check(path, named(given, path, frozenset({When.MADE, When.PLAYS})), self._trust)
        try:
            algo = get_algo(given["run"]["algorithm"])
        except (KeyError, TypeError) as e:
            raise ConfigError(f"{path / 'training.json'} names no algorithm ({e})") from None
        sections = {"run": RunConfig, "env": EnvConfig, "model": ModelConfig, "algo": algo.Config}
        return algo, resolve(sections, [ConfigSource(str(path / "training.json"), given)])

    def _wait(self, for_what: str) -> None:
        if time.monotonic() > self._since + self.wait_s:
            raise ConfigError(f"{self.folder.path}: {self.wait_s:g} s without {for_what} (--wait-s)")
        time.sleep(TURN_S)

    def _await_training(self) -> Told:
        while (told := self.folder.told()) is None or told.ended:
            self._wait(f"a training: start one with --exchange {self.folder.path}")
        if told.bray != __version__:
            raise ConfigError(
                f"{self.folder.path}: a training of Bray {told.bray}, and this is {__version__}: install the same one"
            )
        return told

    def _await_seat(self, presence: _Presence) -> GivenSeat | None:
        """None where the training is over before there is one."""
        while not presence.over:
            with suppress(FileNotFoundError):
                data = (self.folder.seats / presence.name).read_bytes()
                logger.info("%s: playing, as worker %s", self.folder.path, presence.name)
                return msgspec.json.decode(data, type=GivenSeat)
            self._wait("a free seat: run.num_workers is how many there are, and the training has to be at work")
        return None

    def _sampler(self, told: Told, algo: Any, config: Resolved, seat: GivenSeat) -> Sampler:
        run = replace(config["run"], output=None)  # what is written is the affair of the process that learns
        parts = (algo, run, config["env"], config["model"], config["algo"])
        return Sampler(SamplerPlan(*parts, seat.index, told.rows, told.state_every, seat.life, seat.begun))

    def _play(self, sampler: Sampler, presence: _Presence) -> None:
        self._since, number = time.monotonic(), 0
        known: Path | None = None
        try:
            while not presence.over and (self.folder.seats / presence.name).exists():
                if (self.folder.data / f"{presence.name}-{number - AHEAD}").exists():
                    self._wait("a training that takes what is played")
                    continue
                newest = self.folder.newest_policy()
                if newest is None:
                    self._wait("weights")
                    continue
                if newest != known:
                    try:
                        said, weights = self.folder.take(newest, OfPolicy)
                    except FileNotFoundError:  # there is a newer one
                        continue
                    known = newest
                clock, returns = Clock(said.env_steps, said.version), Moments.saved(said.returns)
                (piece,), counts, seconds, metrics, news, *_ = sampler.play(weights, clock, returns)
                episodes = [(float(total), int(length)) for total, length in counts.episodes]
                about = About(counts.env_steps, episodes, metrics, news.numbers, seconds)
                self.folder.put(self.folder.data / f"{presence.name}-{number}", about, arrays_of(piece))
                number += 1
                self.pieces += 1
                self._since = time.monotonic()
        finally:
            sampler.close()


def serve_worker(conn: Any, path: str) -> None:
    """In a process that the training itself has started: what it asks for is its own."""
    with suppress(KeyboardInterrupt):
        ExchangeWorker(path, trust=True).run()
