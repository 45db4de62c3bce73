"""RLlib's files of experience: a JSON object for each line, a SampleBatch of rows of one or more episodes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from bray.data.files import MAX_EPISODE, Episode, Unchanged
from bray.data.flat import finished
from bray.errors import DataError
from bray.spec import EnvSpec

_PACKED = (
    "is packed by RLlib (a pickle in LZ4), and whoever unpacks it runs what is in it: write the files again with "
    '"output_compress_columns": []'
)


class _Ends(msgspec.Struct):
    """What says where episodes are, of a line; the rest is not looked at."""

    rewards: Any = None
    eps_id: Any = None
    agent_index: Any = None
    dones: Any = None
    terminateds: Any = None
    truncateds: Any = None
    policy_batches: dict[str, Any] | None = None


class JsonSource:
    """Rows of a line are of one episode while `eps_id` and `agent_index` stay; an episode may go on in later lines."""

    def __init__(self, path: Path):
        self._file, self.notes = Unchanged(path), list[str]()
        self.spec: EnvSpec | None = None
        self._offsets: list[int] = []
        self._episodes: list[list[tuple[int, int, int]]] = []
        """Of each episode, (line, first row, end)."""
        self._read: tuple[int, dict[str, Any]] = (-1, {})
        self._limits = False
        cut = self._find_episodes()
        self.steps = np.array([sum(end - start for _, start, end in parts) for parts in self._episodes], np.int64)
        self.steps -= cut
        kept = np.flatnonzero(self.steps > 0)
        self._episodes, self.steps = [self._episodes[i] for i in kept], self.steps[kept]
        if not self._limits:
            self.notes.append(f"{path}: no flag for time limits: they cannot be told from terminations")
        if lost := int(cut.sum()):
            self.notes.append(
                f"{path}: {lost:,} episodes are cut, and there is no new_obs with the observation after their last "
                "step: that step is left out"
            )

    def _lines(self) -> Iterator[tuple[int, bytes]]:
        with open(self._file.path, "rb") as f:
            while line := f.readline(MAX_EPISODE):
                if line.strip():
                    yield f.tell() - len(line), line

    def _find_episodes(self) -> np.ndarray:
        """Where the rows of each episode are; returns which of them lack the observation after their last step."""
        open_: dict[Any, list[tuple[int, int, int]]] = {}
        lacks: list[bool] = []

        def end(key: Any, whole: bool) -> None:
            self._episodes.append(open_.pop(key))
            lacks.append(not whole)

        after: dict[int, bool] = {}
        for number, (offset, line) in enumerate(self._lines()):
            self._offsets.append(offset)
            try:
                found = _decode(line, _Ends)
                if found.policy_batches is not None:
                    found = msgspec.convert(self._one_policy(found.policy_batches, number), _Ends)
            except (ValueError, RecursionError) as e:
                raise DataError(f"{self._file.path}, line {number + 1}: not a SampleBatch in JSON ({e})") from None
            after[number] = b'"new_obs"' in line
            keys, terminated, ended = self._rows(found, number)
            starts = [0, *(np.flatnonzero(_differ(keys) | ended[:-1]) + 1).tolist(), len(ended)]
            for a, b in pairwise(starts):
                key = keys[a]
                open_.setdefault(key, []).append((number, a, b))
                if ended[b - 1]:
                    end(key, bool(terminated[b - 1]) or after[number])
        for key in list(open_):
            end(key, after[open_[key][-1][0]])
        return np.array(lacks, np.int64)

    def _one_policy(self, batches: dict[str, Any], number: int) -> dict[str, Any]:
        if len(batches) != 1:
            raise DataError(
                f"{self._file.path}, line {number + 1} has rows of the policies {sorted(batches)}; expected those of "
                "one, and files for each"
            )
        (batch,) = batches.values()
        if not isinstance(batch, dict):
            raise DataError(f"{self._file.path}, line {number + 1}: expected columns, got {str(batch)[:40]}")
        return batch

    def _rows(self, found: _Ends, number: int) -> tuple[list[Any], np.ndarray, np.ndarray]:
        """For each row of a line: which episode, whether it terminated, whether it ended."""
        where = f"{self._file.path}, line {number + 1}"
        n = len(self._column(found.rewards, "rewards", where))
        terminated = found.terminateds if found.terminateds is not None else found.dones
        if terminated is None:
            raise DataError(f"{where}: expected terminateds (or dones), which say where episodes end")
        flags, limits = self._column(terminated, "terminateds", where), np.zeros(n, bool)
        if found.truncateds is not None:
            self._limits = True
            limits = self._column(found.truncateds, "truncateds", where)
        ids = [0] * n if found.eps_id is None else self._column(found.eps_id, "eps_id", where).tolist()
        given = found.agent_index
        agents = [0] * n if given is None else self._column(given, "agent_index", where).tolist()
        if not len(flags) == len(limits) == len(ids) == len(agents) == n or not n:
            raise DataError(f"{where}: its columns have different lengths, or no rows")
        if any(x.ndim > 1 or not ((x == 0) | (x == 1)).all() for x in (flags, limits)):
            raise DataError(f"{where}: terminateds and truncateds are true or false for each row")
        over, cut = flags.astype(bool), limits.astype(bool)
        return list(zip(ids, agents, strict=True)), over & ~cut, over | cut

    def _column(self, given: Any, name: str, where: str) -> np.ndarray:
        if isinstance(given, str):
            raise DataError(f"{where}: {name} {_PACKED}")
        try:
            array = np.asarray(given)
        except ValueError:
            raise DataError(f"{where}: rows of {name} have different shapes") from None
        if array.dtype.kind not in "biuf" or not array.ndim:
            raise DataError(f"{where}: expected numbers in {name}, got {str(given)[:40]}")
        return array

    def __len__(self) -> int:
        return len(self._episodes)

    def where(self, i: int) -> str:
        return f"{self._file.path}, episode {i} (from line {self._episodes[i][0][0] + 1})"

    def _line(self, number: int) -> dict[str, Any]:
        if self._read[0] != number:
            with open(self._file.path, "rb") as f:
                f.seek(self._offsets[number])
                line = _decode(f.readline(MAX_EPISODE), dict[str, Any])
            if "policy_batches" in line:
                line = self._one_policy(line["policy_batches"], number)
            self._read = number, line
        return self._read[1]

    def __getitem__(self, i: int) -> Episode:
        try:
            return self._episode(i)
        except (ValueError, RecursionError, MemoryError) as e:  # no JSON behind the columns that were looked at first
            raise DataError(f"{self.where(i)} cannot be read ({e})") from None
        finally:
            self._file.check()

    def _episode(self, i: int) -> Episode:
        where, parts = self.where(i), self._episodes[i]
        columns: dict[str, list[np.ndarray]] = {}
        last: np.ndarray | None = None
        terminated: list[np.ndarray] = []
        for number, start, end in parts:
            line = self._line(number)
            for ours, theirs in (("obs", "obs"), ("action", "actions"), ("reward", "rewards"), ("logp", "action_logp")):
                if theirs in line:
                    columns.setdefault(ours, []).append(self._column(line[theirs], theirs, where)[start:end])
            if missing := [name for name in ("obs", "action", "reward") if name not in columns]:
                raise DataError(f"{where}: it lacks {', '.join(missing)}; it has {sorted(line)}")
            last = self._column(line["new_obs"], "new_obs", where)[end - 1 : end] if "new_obs" in line else None
            found = msgspec.convert({k: line.get(k) for k in _Ends.__struct_fields__}, _Ends)
            terminated.append(self._rows(found, number)[1][start:end])
        rows = {name: np.concatenate(several) for name, several in columns.items()}
        return finished(rows, np.concatenate(terminated), last)


def _decode(line: bytes, kind: Any) -> Any:
    """A line of JSON as `kind`. Python writes NaN, which is no JSON: the episode that has it is refused, not its
    file."""
    try:
        return msgspec.json.decode(line, type=kind)
    except msgspec.DecodeError:
        return msgspec.convert(json.loads(line), kind)


def _differ(keys: list[Any]) -> np.ndarray:
    """Whether the row after each is of another episode."""
    return np.array([a != b for a, b in pairwise(keys)], bool)
