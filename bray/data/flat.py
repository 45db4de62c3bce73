"""Episodes that lie one behind the other in columns `[N, ...]`: npz files, and the layout of D4RL.

The columns are found by the names that people give them. An episode ends where one of its flags says so; where there is
no flag for time limits, but the observation after each step, it ends where that is not the next observation. The
observation after the last step is needed where a time limit ended the episode, since learners bootstrap from it; where
it is not in the file, that step is left out.
"""

from __future__ import annotations

import math
import os
import struct
import tokenize
import zipfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from bray import tree
from bray.data.files import MAX_EPISODE, Episode, Unchanged, check_size, check_squeezed
from bray.errors import DataError
from bray.spec import EnvSpec
from bray.tree import NestedArray

NAMES = {
    "obs": ("obs", "observations", "observation", "states"),
    "action": ("action", "actions"),
    "reward": ("reward", "rewards"),
    "terminated": ("terminated", "terminateds", "terminations", "terminals", "dones", "done"),
    "truncated": ("truncated", "truncateds", "truncations", "timeouts"),
    "next_obs": ("next_obs", "next_observations", "new_obs"),
    "logp": ("logp", "action_logp", "infos/action_log_probs", "action_log_probs"),
}
"""What a column may be called. `logp`: the log probability of the action under whoever chose it."""
_NEEDED = ("obs", "action", "reward")
_BLOCK = 1 << 16  # rows looked at together


class FlatSource:
    """`columns`: what a file holds, by path; `column[a:b]` reads a part of one."""

    def __init__(self, path: Path, columns: Mapping[str, Any]):
        self._file, self.notes = Unchanged(path), list[str]()
        self.spec: EnvSpec | None = None
        found = {name: _column(columns, words) for name, words in NAMES.items()}
        self._columns: dict[str, NestedArray] = {k: v for k, v in found.items() if v is not None}
        if missing := [name for name in _NEEDED if name not in self._columns]:
            expected = "; ".join(" or ".join(NAMES[name]) for name in missing)
            raise DataError(f"{path}: expected a column {expected}; it has {', '.join(sorted(columns)) or 'none'}")
        if "terminated" not in self._columns and "truncated" not in self._columns:
            raise DataError(
                f"{path} does not say where episodes end: expected a column {' or '.join(NAMES['terminated'])}, and "
                f"one for time limits, {' or '.join(NAMES['truncated'])}; it has {', '.join(sorted(columns))}"
            )
        n = self._count_rows()
        self._terminated, truncated = self._flags("terminated", n), self._flags("truncated", n)
        if "truncated" not in self._columns:
            self._find_limits(n, truncated)
        ends = np.flatnonzero(self._terminated | truncated) + 1
        self._ends = ends if (len(ends) and ends[-1] == n) or not n else np.append(ends, n)
        self._starts = np.append(0, self._ends[:-1]) if len(self._ends) else self._ends
        if self._last_row and len(self._ends) > 1:
            raise DataError(f"{path}: obs has a row more than reward, and {len(self._ends):,} episodes are in the file")
        lacks = ~self._terminated[self._ends - 1] if "next_obs" not in self._columns and not self._last_row else 0
        self.steps: np.ndarray = self._ends - self._starts - lacks
        if lost := int(np.sum(lacks)):
            self.notes.append(
                f"{path}: {lost:,} episodes are cut, by a time limit or the end of the file, and the observation "
                "after their last step is not there: that step is left out"
            )
        kept = self.steps > 0
        self._starts, self._ends, self.steps = self._starts[kept], self._ends[kept], self.steps[kept]

    def _count_rows(self) -> int:
        """Steps of the whole file; all columns have as many rows, the observations perhaps one more."""
        rows: dict[str, int] = {}
        for name, column in self._columns.items():
            for path, leaf in tree.paths(column, name):
                if not leaf.shape:
                    raise DataError(f"{self._file.path}: {path} is a single number, expected a row for each step")
                rows[path] = int(leaf.shape[0])
        leaves = tree.leaves(self._columns)
        try:
            size = sum(x.dtype.itemsize * math.prod(x.shape) for x in leaves)
            check_squeezed(size, os.stat(self._file.path).st_size)
        except DataError as e:
            raise DataError(f"{self._file.path}: {e}") from None
        n = rows.get("reward", 0)
        if math.prod(self._columns["reward"].shape[1:]) != 1:
            raise DataError(f"{self._file.path}: reward is a number for each step, got {self._columns['reward'].shape}")
        self._last_row = any(x == n + 1 for path, x in rows.items() if path.partition("/")[0] == "obs")
        for path, x in rows.items():
            if x != n + (self._last_row and path.partition("/")[0] == "obs"):
                raise DataError(f"{self._file.path}: {path} has {x:,} rows and reward {n:,}: expected as many")
        return n

    def _flags(self, name: str, n: int) -> np.ndarray:
        if name not in self._columns:
            return np.zeros(n, bool)
        flags = np.asarray(self._columns[name][0:n])
        if flags.size != n or flags.dtype.kind not in "biuf" or not ((flags == 0) | (flags == 1)).all():
            raise DataError(f"{self._file.path}: {name} is 0 or 1 for each step; got {flags.dtype}{list(flags.shape)}")
        return flags.reshape(n).astype(bool)

    def _find_limits(self, n: int, truncated: np.ndarray) -> None:
        """Where games jump without being over, a time limit that has no flag has ended an episode."""
        path = self._file.path
        if "next_obs" not in self._columns:
            self.notes.append(f"{path}: no flag for time limits: they cannot be told from terminations")
            return
        obs, behind = (dict(tree.paths(self._columns[name])) for name in ("obs", "next_obs"))
        shapes = [{name: x.shape[1:] for name, x in rows.items()} for rows in (obs, behind)]
        if shapes[0] != shapes[1]:
            raise DataError(f"{path}: rows of obs are {shapes[0]} and of next_obs {shapes[1]}: expected the same")
        for name, after in behind.items():
            for start in range(0, n - 1, _BLOCK):
                end = min(start + _BLOCK, n - 1)
                jumps = (after[start:end] != obs[name][start + 1 : end + 1]).reshape(end - start, -1).any(1)
                truncated[start:end] |= jumps & ~self._terminated[start:end]
        self.notes.append(f"{path}: no flag for time limits; {int(truncated.sum()):,} are found by where games jump")

    def __len__(self) -> int:
        return len(self.steps)

    def where(self, i: int) -> str:
        return f"{self._file.path}, episode {i} (from row {self._starts[i]})"

    def __getitem__(self, i: int) -> Episode:
        try:
            return self._read(int(self._starts[i]), int(self._ends[i]))
        except (*_BROKEN, MemoryError) as e:
            raise DataError(f"{self.where(i)} cannot be read ({e or type(e).__name__})") from None
        finally:
            self._file.check()

    def _read(self, start: int, end: int) -> Episode:
        leaves = tree.leaves(self._columns)
        check_size(sum(x.dtype.itemsize * math.prod(x.shape[1:]) for x in leaves) * (end - start), MAX_EPISODE)

        def part(name: str, rows: slice) -> NestedArray:
            return tree.map(lambda x: np.asarray(x[rows]), self._columns[name])

        names = [name for name in ("obs", "action", "reward", "logp") if name in self._columns]
        rows: dict[str, Any] = {name: part(name, slice(start, end)) for name in names}
        last = None
        if self._last_row:
            last = part("obs", slice(end, end + 1))
        elif "next_obs" in self._columns:
            last = part("next_obs", slice(end - 1, end))
        return finished({**rows, "reward": rows["reward"].reshape(-1)}, self._terminated[start:end], last)


def finished(rows: dict[str, NestedArray], terminated: np.ndarray, last: NestedArray | None) -> Episode:
    """An episode of columns of T rows each, and the observation `[1, ...]` after them, where it is known. Nobody looks
    at that of a terminated one; without it, the last step of another one is left out."""
    n, obs = len(terminated), rows["obs"]
    if last is None and terminated[-1]:
        last = tree.index(obs, slice(n - 1, n))
    if last is None:
        n -= 1
    else:
        try:
            obs = tree.concat([obs, last])
        except ValueError:
            raise DataError("the observation after its last step has another shape than the others") from None
    truncated = np.zeros(n, bool)
    truncated[n - 1 :] = not terminated[n - 1]
    out = {name: tree.index(column, slice(0, n)) for name, column in rows.items()}
    return {**out, "obs": obs, "terminated": terminated[:n].copy(), "truncated": truncated}


def _column(columns: Mapping[str, Any], words: tuple[str, ...]) -> NestedArray | None:
    """The column of one of these names: an array, or a dict of those behind `name/`."""
    for word in words:
        if word in columns:
            return columns[word]
        if inside := {k.removeprefix(f"{word}/"): v for k, v in columns.items() if k.startswith(f"{word}/")}:
            out: dict[str, Any] = {}
            for path, x in inside.items():
                *above, name = path.split("/")
                place = out
                for key in above:
                    place = place.setdefault(key, {})
                place[name] = x
            return out
    return None


# --- npz --------------------------------------------------------------------------------------------------------------


class _Stored:
    """An array of an npz file that is not compressed: rows are read where they lie."""

    def __init__(self, path: Path, offset: int, shape: tuple[int, ...], dtype: np.dtype):
        self.path, self._offset, self.shape, self.dtype = path, offset, shape, dtype

    def __getitem__(self, rows: slice) -> np.ndarray:
        start, end, _ = rows.indices(self.shape[0])
        width = self.dtype.itemsize * math.prod(self.shape[1:])
        with open(self.path, "rb") as f:
            data = os.pread(f.fileno(), width * (end - start), self._offset + width * start)
        if len(data) != width * (end - start):
            raise DataError(f"{self.path} ends before its rows do")
        return np.frombuffer(data, self.dtype).reshape(end - start, *self.shape[1:])


class _Squeezed:
    """An array of an npz file that is compressed: it is unpacked as a whole, when it is first asked for."""

    def __init__(self, path: Path, name: str, shape: tuple[int, ...], dtype: np.dtype):
        self.path, self._name, self.shape, self.dtype = path, name, shape, dtype
        self._array: np.ndarray | None = None

    def __getitem__(self, rows: slice) -> np.ndarray:
        if self._array is None:
            try:
                with zipfile.ZipFile(self.path) as archive, archive.open(self._name) as f:
                    self._array = np.lib.format.read_array(f, allow_pickle=False)
            except (*_BROKEN, MemoryError) as e:
                raise DataError(f"{self.path}: {self._name} cannot be read ({e})") from None
        return self._array[rows]


_BROKEN = (
    zipfile.BadZipFile,
    zlib.error,
    ValueError,
    OSError,
    EOFError,
    RuntimeError,
    NotImplementedError,
    SyntaxError,  # what Python and numpy make of a head that is none
    tokenize.TokenError,
    struct.error,
)


def open_npz(path: Path) -> FlatSource:
    """The columns of an npz file. Those of `np.savez` are read in parts, those of `np.savez_compressed` as wholes."""
    columns: dict[str, Any] = {}
    try:
        with zipfile.ZipFile(path) as archive, open(path, "rb") as raw:
            for member in archive.infolist():
                if not member.filename.endswith(".npy"):
                    continue
                name = member.filename.removesuffix(".npy")
                with archive.open(member) as f:
                    version = np.lib.format.read_magic(f)
                    form = np.lib.format
                    head = form.read_array_header_1_0 if version == (1, 0) else form.read_array_header_2_0
                    shape, fortran, dtype = head(f)
                    start = f.tell()
                if dtype.hasobject:
                    raise DataError(
                        f"{path}: {name} is a pickled array, which is not read, since it could run anything: write it "
                        "as numbers"
                    )
                if fortran and len(shape) > 1:
                    raise DataError(f"{path}: {name} lies column by column: write np.ascontiguousarray of it")
                size = dtype.itemsize * math.prod(shape)
                if start + size != member.file_size:
                    raise DataError(
                        f"{path}: {name} says it has {size} bytes, and there are {member.file_size - start}"
                    )
                if member.compress_type == zipfile.ZIP_STORED:
                    raw.seek(member.header_offset + 26)
                    names, extra = struct.unpack("<HH", raw.read(4))
                    offset = member.header_offset + 30 + names + extra + start
                    columns[name] = _Stored(path, offset, shape, dtype)
                else:
                    check_size(size, member.compress_size)
                    columns[name] = _Squeezed(path, member.filename, shape, dtype)
    except DataError as e:
        raise e if str(path) in str(e) else DataError(f"{path}: {e}") from None
    except (*_BROKEN, MemoryError) as e:
        raise DataError(f"{path} cannot be read as npz ({e})") from None
    return FlatSource(path, columns)
