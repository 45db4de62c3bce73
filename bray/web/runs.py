"""The trials of a project and the episodes of a trial, as they lie on disk.

Two kinds of file hold episodes: `episodes/*.episode`, the States of a game session, and `trajectories/*.episodes`,
which `bray collect` writes with many episodes each. An episode has a name, which is its file's, with `#number` for one
of many.

Names come from a browser. A name is a plain file name, so none leads out of the run directory.
"""

from __future__ import annotations

import os
import re
import threading
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from bray import tree
from bray.data.files import SUFFIX as MANY, EpisodeReader
from bray.errors import CheckpointError, DataError, UnknownName
from bray.rundir import open_plain
from bray.serving.episodes import MAX_MEMORY, SUFFIX as ONE, read_episode
from bray.serving.state import State

_FOLDERS = ("episodes", "trajectories")
_PLAIN = re.compile(r"[^./\\\0][^/\\\0]{0,200}")
_SAVED = re.compile(r"(.*)-(\d+)\.(\d+)" + re.escape(ONE))
_KEPT = 3  # episodes in memory
MOST_ROWS = 1 << 18
"""Rows of a trajectory that is shown: each becomes a State, of 2 kB and more."""


@dataclass(frozen=True)
class Entry:
    """An episode as a list shows it."""

    name: str
    title: str
    detail: str
    ticks: int | None
    """None: only reading it would tell."""
    bytes: int
    modified: float
    error: str | None = None
    """Why it cannot be read, as far as that is known."""


@dataclass(frozen=True)
class Episode:
    """An episode that was read."""

    states: list[State]
    stamp: tuple[Any, ...]
    """Another one when the file has changed."""


class Project:
    """A project directory and the trials in it. Safe to use from several threads."""

    def __init__(self, path: Path | str, trial: str | None = None, messages: Iterable[Any] = ()):
        """`trial` is listed although it has no episodes yet. `messages` are protobuf classes that States may hold."""
        self.path, self.trial, self.messages = Path(path), trial, list(messages)
        self._lock = threading.Lock()
        self._read: OrderedDict[tuple[Any, ...], Episode] = OrderedDict()
        self._readers: dict[Path, tuple[tuple[int, int], EpisodeReader | DataError]] = {}
        self._damaged: dict[tuple[Any, ...], str] = {}

    # --- trials

    def trials(self) -> list[str]:
        """Names of the trials that have episodes, those with the newest ones first. Several seeds of a trial are
        `trial/seed-1`, ..."""
        newest: dict[str, float] = {} if self.trial is None else {self.trial: 0.0}
        for folder in _FOLDERS:
            for pattern in (f"*/{folder}", f"*/*/{folder}"):
                for path in self.path.glob(pattern):
                    name = path.parent.relative_to(self.path).as_posix()
                    if path.is_dir() and _is_trial(name):
                        newest[name] = max(newest.get(name, 0.0), path.stat().st_mtime)
        return sorted(newest, key=lambda name: (-newest[name], name))

    def run(self, trial: str) -> Path:
        """The run directory of a trial."""
        path = self.path / trial
        if trial == self.trial or (_is_trial(trial) and any((path / folder).is_dir() for folder in _FOLDERS)):
            return path
        raise UnknownName("trial", trial, self.trials(), str(self.path))

    # --- episodes

    def episodes(self, trial: str, find: str = "", most: int = 200) -> tuple[list[Entry], int]:
        """The newest episodes of a trial whose name contains `find`, and how many there are in all."""
        run = self.run(trial)
        files: list[tuple[float, Path, os.stat_result]] = []
        for folder, suffix in zip(_FOLDERS, (ONE, MANY), strict=True):
            for entry in _scan(run / folder):
                if entry.name.endswith(suffix) and _PLAIN.fullmatch(entry.name):
                    try:
                        if not entry.is_file(follow_symlinks=False):
                            continue
                        status = entry.stat(follow_symlinks=False)
                    except FileNotFoundError:  # a training keeps its newest episodes only
                        continue
                    files.append((status.st_mtime, Path(entry.path), status))
        files.sort(key=lambda f: (-f[0], f[1].name))
        total = 0
        for _, path, status in files:
            reader = self._reader(path, status) if path.suffix == MANY else None
            total += len(reader) if isinstance(reader, EpisodeReader) else 1
        listed = (e for _, path, status in files for e in self._entries(path, status) if find.lower() in e.name.lower())
        return list(islice(listed, most)), total

    def _entries(self, path: Path, status: os.stat_result) -> Iterator[Entry]:
        size, modified = status.st_size, status.st_mtime
        if path.suffix == ONE:
            saved = _SAVED.fullmatch(path.name)
            title, detail = (saved[1], f"actor {saved[2]}, episode {saved[3]}") if saved else (path.stem, "")
            error = self._damaged.get((path, *_stamp(status)))
            yield Entry(path.name, title, detail, None, size, modified, error)
            return
        reader = self._reader(path, status)
        if isinstance(reader, DataError):
            yield Entry(path.name, path.stem, "trajectories", None, size, modified, str(reader))
            return
        for i, steps in enumerate(reader.steps):
            name = f"{path.name}#{i}"
            error = self._damaged.get((path, *_stamp(status), i))
            yield Entry(name, f"{path.stem} #{i}", "trajectory", int(steps) + 1, size, modified, error)

    def read(self, trial: str, name: str) -> Episode:
        """The States of an episode; DataError when the file is damaged, or has gone."""
        file, _, number = name.partition("#")
        folder = {ONE: _FOLDERS[0], MANY: _FOLDERS[1]}.get(Path(file).suffix)
        if folder is None or not _PLAIN.fullmatch(file) or not (number.isdigit() if number else folder == _FOLDERS[0]):
            raise DataError(f"{name!r} is not the name of an episode")
        run = self.run(trial)
        path = run / folder / file
        if not path.exists():
            raise DataError(f"episode {name} is gone; a training keeps its newest ones only")
        try:
            with open_plain(Path(folder, file), run) as f:
                status = os.fstat(f.fileno())
        except CheckpointError as e:
            raise DataError(str(e)) from None
        key = (path, *_stamp(status), *([int(number)] if number else []))
        with self._lock:
            if key in self._read:
                self._read.move_to_end(key)
                return self._read[key]
            try:
                states = self._trajectory(path, status, int(number)) if number else read_episode(path, self.messages)
                if not states:
                    raise DataError(f"{path}: an episode without a single tick")
            except DataError as e:
                self._damaged[key] = str(e)
                raise
            self._read[key] = Episode(states, key)
            while len(self._read) > _KEPT:
                self._read.popitem(last=False)
            return self._read[key]

    def _reader(self, path: Path, status: os.stat_result) -> EpisodeReader | DataError:
        """A trajectory file whose index has been read."""
        stamp = _stamp(status)
        known = self._readers.get(path)
        if known is None or known[0] != stamp:
            try:
                known = stamp, EpisodeReader(path)
            except DataError as e:
                known = stamp, e
            self._readers[path] = known
        return known[1]

    def _trajectory(self, path: Path, status: os.stat_result, number: int) -> list[State]:
        reader = self._reader(path, status)
        if isinstance(reader, DataError):
            raise reader
        if number >= len(reader):
            raise DataError(f"{path} holds {len(reader)} episodes, there is no number {number}")
        rows, size = int(reader.steps[number]) + 1, int(reader.sizes[number])  # checked before anything is made of them
        if rows > MOST_ROWS or size > MAX_MEMORY:
            raise DataError(
                f"{path}: episode {number} has {rows:,} rows of {size:,} bytes; the most that is shown are "
                f"{MOST_ROWS:,} and {MAX_MEMORY:,}: `bray collect` writes shorter ones where env.max_episode_steps is "
                "set"
            )
        return states_of(reader[number], f"{path.stem}#{number}")


def states_of(episode: dict[str, Any], session: str) -> list[State]:
    """The rows of a trajectory as States: a field for each column, and `input` and `output` as a game and a PolicyAgent
    would exchange them. The last State is the final observation, with no action."""
    steps = len(episode["reward"])
    states = []
    for t in range(steps + 1):
        row = {k: tree.index(column, t) for k, column in episode.items() if t < _rows(column)}
        said = {"obs": row.get("obs"), "reward": 0.0, "terminated": False, "truncated": False}
        if t > 0:
            said |= {k: episode[k][t - 1].item() for k in ("reward", "terminated", "truncated")}
        state = State(session, 0, t, said)
        if t < steps:
            state.output = {"action": row["action"]}
        vars(state).update(row)
        states.append(state)
    return states


def _rows(column: Any) -> int:
    return min((len(leaf) for leaf in tree.leaves(column)), default=0)


def _is_trial(name: str) -> bool:
    parts = name.split("/")
    return len(parts) <= 2 and all(_PLAIN.fullmatch(part) for part in parts)


def _scan(folder: Path) -> Iterator[os.DirEntry[str]]:
    if folder.is_symlink():
        return  # what it leads to is not of this run
    try:
        with os.scandir(folder) as entries:
            yield from entries
    except (FileNotFoundError, NotADirectoryError):
        pass


def _stamp(status: os.stat_result) -> tuple[int, int]:
    return status.st_mtime_ns, status.st_size
