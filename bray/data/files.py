"""Trajectory files: episodes on disk, for imitation, offline learning and pictures.

    BRAYEPIS  version  | zstd(packed tree) per episode ... | packed index | index offset, index size, BRAYEPIX

An episode is a dict of columns: obs `[T + 1, ...]`, action, reward, terminated, truncated `[T, ...]`, and any further
columns of T or T + 1 rows. The index at the end lets episode i be read without the others. Stacked frames (each stack
the one before it shifted by one) are stored once per frame and stacked again when read, before compression sees them.

Reading trusts nothing: every offset and size is checked, nothing is unpickled.
"""

from __future__ import annotations

import os
import pickle
import re
import struct
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import zstandard

from bray import tree
from bray.errors import DataError
from bray.rundir.files import write_atomic
from bray.rundir.reader import read_json
from bray.spec import EnvSpec
from bray.tree import NestedArray

SUFFIX = ".episodes"
PER_FILE = 1000
_HEAD = b"BRAYEPIS" + struct.pack("<Q", 1)
_END = b"BRAYEPIX"
_FOOT = struct.Struct("<QQ8s")
MAX_EPISODE = 1 << 32
"""Bytes of one episode in memory."""
LARGE_EPISODE = 1 << 30
"""Bytes beyond which an episode that is stored in less than `1 / MOST_SQUEEZED` of its size is refused."""
MOST_SQUEEZED = 500
WORTH = 0.875
"""Of its size: an episode that compression leaves larger is stored for quick reading."""
_COLUMNS = ("obs", "action", "reward", "terminated", "truncated")
_MAX_STACK = 16

Episode = dict[str, NestedArray]


class EpisodeWriter:
    """Writes `<prefix>-00000.episodes`, `-00001`, ... with at most `per_file` episodes each, or until one has
    `most_bytes`. Numbering goes on after the files that are there. A file has its name only when it is whole; leaving
    the `with` block finishes the last one, also after an error, since the episodes written so far are complete."""

    def __init__(self, prefix: Path | str, per_file: int = PER_FILE, most_bytes: int | None = None):
        if per_file < 1:
            raise DataError(f"per_file is at least 1, got {per_file}")
        self.prefix, self.per_file, self.most_bytes = Path(prefix), per_file, most_bytes
        self.paths: list[Path] = []
        """Finished files."""
        self._file: Any = None
        self._index: list[tuple[int, int, int, int]] = []
        self._compressors = [zstandard.ZstdCompressor(level=level, write_checksum=True) for level in (1, -1)]
        self._number = _next_number(self.prefix)

    def write(self, episode: Episode) -> None:
        steps = check_columns(episode)
        raw = tree.pack(_squeeze(episode))
        if (size := max(len(raw), tree.nbytes(episode))) > MAX_EPISODE:
            raise DataError(f"an episode of {size} bytes; the most is {MAX_EPISODE}. Write it in parts.")
        block = self._compress(raw)
        if self._file is None:
            self.prefix.parent.mkdir(parents=True, exist_ok=True)
            self._path = self.prefix.with_name(f"{self.prefix.name}-{self._number:05d}{SUFFIX}")
            temporary = self._path.with_name(self._path.name + ".tmp")
            temporary.unlink(missing_ok=True)  # that of a writer that was killed, or a link to somewhere else
            self._file = open(temporary, "xb")  # noqa: SIM115  closed by _finish
            self._file.write(_HEAD)
        self._index.append((self._file.tell(), len(block), len(raw), steps))
        self._file.write(block)
        full = self.most_bytes is not None and self._file.tell() >= self.most_bytes
        if full or len(self._index) == self.per_file:
            self._finish()

    def _compress(self, raw: bytes) -> bytes:
        """Numbers that are much like noise (most observations that are floats) save little, and take five times as
        long to read as what is stored as it is."""
        small, quick = self._compressors
        block: bytes = small.compress(raw)
        return block if len(block) < WORTH * len(raw) else quick.compress(raw)

    def close(self) -> None:
        """Finish the last file."""
        if self._file is not None:
            self._finish()

    def _finish(self) -> None:
        at = self._file.tell()
        offset, size, raw, steps = (np.array(x, np.int64) for x in zip(*self._index, strict=True))
        index = tree.pack({"offset": offset, "size": size, "raw": raw, "steps": steps})
        self._file.write(index)
        self._file.write(_FOOT.pack(at, len(index), _END))
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        os.replace(self._file.name, self._path)
        self.paths.append(self._path)
        self._number += 1
        self._file, self._index = None, []

    def __enter__(self) -> EpisodeWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def write_episodes(prefix: Path | str, episodes: Iterable[Episode], per_file: int = PER_FILE) -> list[Path]:
    """Write episodes; returns the files made. 2500 episodes make three files of 1000, 1000 and 500."""
    with EpisodeWriter(prefix, per_file) as writer:
        for episode in episodes:
            writer.write(episode)
    return writer.paths


class EpisodeReader(Sequence[Episode]):
    """The episodes of a file, of several files, or of all trajectory files of a directory, in order of name. Only the
    indexes are read at first; `reader[i]` reads one episode."""

    def __init__(self, source: Path | str | Iterable[Path | str]):
        if isinstance(source, (str, Path)):
            path = Path(source)
            if path.is_dir():
                self.paths = sorted(path.glob(f"*{SUFFIX}"))
                if not self.paths:
                    raise DataError(f"no trajectory files (*{SUFFIX}) in {path}. `bray collect` writes them.")
            else:
                self.paths = [path]
        else:
            self.paths = [Path(p) for p in source]
        self.notes: list[str] = []
        self._entries: list[tuple[Unchanged, int, int, int]] = []
        steps: list[int] = []
        for path in self.paths:
            index, file = _read_index(path), Unchanged(path)
            self._entries += [(file, o, s, r) for o, s, r, _ in index]
            steps += [n for *_, n in index]
        self.steps = np.array(steps, np.int64)
        """Transitions of each episode."""
        self.sizes = np.array([raw for *_, raw in self._entries], np.int64)
        """Bytes of each episode, with stacked frames stored once."""

    def __len__(self) -> int:
        return len(self._entries)

    def __getitem__(self, i: Any) -> Any:
        if isinstance(i, slice):
            return [self[j] for j in range(*i.indices(len(self)))]
        file, offset, size, raw = self._entries[i]
        try:
            with open(file.path, "rb") as f:
                f.seek(offset)
                block = f.read(size)
        finally:  # who removed or shortened it is told of that first
            file.check()
        try:
            return _read_block(block, raw, int(self.steps[i]))
        except (zstandard.ZstdError, DataError, MemoryError) as e:
            raise DataError(f"{self.where(i)}: damaged episode ({e})") from None

    @property
    def spec(self) -> EnvSpec | None:
        """The spaces, by spec.json beside the files or one folder above."""
        for folder in (self.paths[0].parent, self.paths[0].parent.parent) if self.paths else ():
            if (path := folder / "spec.json").exists():
                try:
                    return EnvSpec.from_json(read_json(path))
                except DataError as e:
                    raise DataError(f"{path}: {e}") from None
        return None

    def where(self, i: int) -> str:
        """File and episode, for messages."""
        file = self._entries[i][0]
        first = next(k for k, entry in enumerate(self._entries) if entry[0] is file)
        return f"{file.path}, episode {i - first}"

    def __iter__(self) -> Iterator[Episode]:
        return (self[i] for i in range(len(self)))

    def transitions(self) -> dict[str, NestedArray]:
        """All episodes as one tree of arrays, a row per transition: the columns, and next_obs. Columns of T + 1 rows
        give their first T."""
        parts = []
        for episode in self:
            n = len(episode["reward"])
            part = {name: tree.index(column, slice(0, n)) for name, column in episode.items()}
            part["next_obs"] = tree.index(episode["obs"], slice(1, n + 1))
            parts.append(part)
        if not parts:
            raise DataError("there are no episodes to read")
        columns = parts[0].keys()
        for i, part in enumerate(parts):
            if part.keys() != columns:
                raise DataError(f"episode {i} has columns {sorted(part)}, the first one {sorted(columns)}")
        rows: dict[str, NestedArray] = tree.concat(parts)
        return rows


def to_pickle(path: Path | str, episodes: Iterable[Episode]) -> None:
    """Write episodes as one pickled dict of lists (state, action, reward, next_state, terminated, info; an entry per
    episode, each a list per step), for tools that read that. We write pickles on request and never read them."""
    out: dict[str, list[Any]] = {k: [] for k in ("state", "action", "reward", "next_state", "terminated", "info")}
    for episode in episodes:
        n = check_columns(episode)
        out["state"].append(tree.split(tree.index(episode["obs"], slice(0, n)), n))
        out["next_state"].append(tree.split(tree.index(episode["obs"], slice(1, n + 1)), n))
        out["action"].append(tree.split(episode["action"], n))
        out["reward"].append(np.asarray(episode["reward"]).tolist())
        out["terminated"].append(np.asarray(episode["terminated"]).tolist())
        others = {k: v for k, v in episode.items() if k not in _COLUMNS}
        info = {"truncated": np.asarray(episode["truncated"]), **others}
        out["info"].append(tree.split(tree.index(info, slice(0, n)), n))
    write_atomic(path, pickle.dumps(out, protocol=4))


def _next_number(prefix: Path) -> int:
    pattern = re.compile(re.escape(prefix.name) + r"-(\d{5,})" + re.escape(SUFFIX))
    found = [pattern.fullmatch(p.name) for p in prefix.parent.glob("*" + SUFFIX)] if prefix.parent.is_dir() else []
    return max((int(m[1]) + 1 for m in found if m), default=0)


def check_columns(episode: Episode) -> int:
    """Number of transitions of an episode whose columns fit together."""
    if not isinstance(episode, dict) or any(k not in episode for k in _COLUMNS):
        got = sorted(episode) if isinstance(episode, dict) else type(episode).__name__
        raise DataError(f"an episode is a dict with {', '.join(_COLUMNS)}; got {got}")
    if np.ndim(episode["reward"]) != 1:
        raise DataError(f"the reward of an episode is [T], got shape {np.shape(episode['reward'])}")
    n = len(episode["reward"])
    for name, column in episode.items():
        allowed = {"obs": (n + 1,), "action": (n,), "terminated": (n,), "truncated": (n,)}.get(name, (n, n + 1))
        for path, leaf in tree.paths(column, name):
            if np.ndim(leaf) == 0 or len(leaf) not in allowed:
                rows = np.shape(leaf)[0] if np.ndim(leaf) else "no"
                raise DataError(f"episode column {path!r} has {rows} rows, expected {' or '.join(map(str, allowed))}")
    return n


def _squeeze(episode: Episode) -> NestedArray:
    """The episode with its stacked frames de-duplicated, and which those are: {leaf number: stack}."""
    stacks: dict[str, np.ndarray] = {}
    leaves = iter(range(len(tree.leaves(episode["obs"]))))

    def leaf(values: Any) -> np.ndarray:
        x = np.asarray(values)
        number = next(leaves)
        if x.ndim < 3 or len(x) < 2 or not 2 <= x.shape[1] <= _MAX_STACK or not np.array_equal(x[1:, :-1], x[:-1, 1:]):
            return x
        if x.dtype.kind == "f" and not np.array_equal(np.signbit(x[1:, :-1]), np.signbit(x[:-1, 1:])):
            return x  # 0.0 equals -0.0, but what is read back is to be the same bytes
        stacks[str(number)] = np.array(x.shape[1])
        return np.concatenate([x[0], x[1:, -1]])

    squeezed = {**episode, "obs": tree.map(leaf, episode["obs"])}
    return {"episode": squeezed, "stacks": stacks}


def _unsqueeze(block: NestedArray, stored: int) -> Episode:
    episode, stacks = block["episode"], block["stacks"]
    size = 0
    leaves = iter(range(len(tree.leaves(episode["obs"]))))

    def leaf(x: np.ndarray) -> np.ndarray:
        nonlocal size
        stack = stacks.get(str(next(leaves)))
        if stack is None:
            return x.copy()
        k = int(stack)
        if stack.ndim != 0 or not 2 <= k <= min(len(x), _MAX_STACK) or x.ndim < 2:
            raise DataError(f"frames of shape {x.shape} cannot be stacked by {k}")
        size += x.nbytes * k
        check_size(size, stored)
        windows = np.lib.stride_tricks.sliding_window_view(x, k, axis=0)  # [T + 1, ..., k]
        return np.ascontiguousarray(np.moveaxis(windows, -1, 1))

    return {name: tree.map(leaf if name == "obs" else np.copy, column) for name, column in episode.items()}


def _read_index(path: Path) -> list[tuple[int, int, int, int]]:
    """(offset, size, raw size, steps) of each episode of a file."""
    try:
        with open(path, "rb") as f:
            total = os.fstat(f.fileno()).st_size
            if f.read(len(_HEAD)) != _HEAD:
                raise DataError(f"{path} is not a trajectory file (or one of another version)")
            if total < len(_HEAD) + _FOOT.size:
                raise DataError(f"{path} is truncated: {total} bytes")
            f.seek(total - _FOOT.size)
            at, size, end = _FOOT.unpack(f.read(_FOOT.size))
            if end != _END or at + size + _FOOT.size != total or at < len(_HEAD):
                raise DataError(f"{path} is truncated or damaged: it does not end with its index")
            f.seek(at)
            index = tree.unpack(f.read(size))
    except (FileNotFoundError, IsADirectoryError):
        raise DataError(f"there is no trajectory file {path}") from None
    except DataError as e:
        raise e if str(path) in str(e) else DataError(f"{path}: {e}") from None
    names = ("offset", "size", "raw", "steps")
    if not isinstance(index, dict) or any(
        not isinstance(index.get(k), np.ndarray) or index[k].ndim != 1 or index[k].dtype.kind not in "iu" for k in names
    ):
        raise DataError(f"{path}: its index lacks {', '.join(names)}")
    if len({len(index[k]) for k in names}) != 1:
        raise DataError(f"{path}: the columns of its index have different lengths")
    rows = [tuple(int(x) for x in row) for row in zip(*(index[k] for k in names), strict=True)]
    for offset, size, raw, steps in rows:
        if offset < len(_HEAD) or size < 0 or offset + size > at or not 0 <= raw <= MAX_EPISODE or steps < 0:
            raise DataError(f"{path}: its index names an episode that is not in the file")
    return rows  # type: ignore[return-value]


def _read_block(block: bytes, raw: int, steps: int) -> Episode:
    frame = zstandard.get_frame_parameters(block)
    if frame.content_size != raw:
        raise DataError(f"an episode of {frame.content_size} bytes, the index says {raw}")
    check_size(raw, len(block))
    data = zstandard.ZstdDecompressor().decompress(block, max_output_size=raw)
    content = tree.unpack(data)
    if not isinstance(content, dict) or content.keys() != {"episode", "stacks"}:
        raise DataError("a block that is not an episode")
    if (
        not isinstance(content["stacks"], dict)
        or not isinstance(content["episode"], dict)
        or "obs" not in content["episode"]
    ):
        raise DataError("a block that is not an episode")
    if not all(isinstance(k, np.ndarray) for k in content["stacks"].values()):
        raise DataError("a block that is not an episode")
    episode = _unsqueeze(content, len(block))
    if check_columns(episode) != steps:
        raise DataError(f"an episode of {len(episode['reward'])} steps, the index says {steps}")
    return episode


def check_size(size: int, stored: int) -> None:
    """Raise DataError for an episode that cannot be held, or that is there only to fill the memory of who reads it."""
    if size > MAX_EPISODE:
        raise DataError(f"an episode of {size} bytes; the most is {MAX_EPISODE}. Write it in parts.")
    check_squeezed(size, stored)


def check_squeezed(size: int, stored: int) -> None:
    """Raise DataError for few bytes that become many in memory."""
    if size > LARGE_EPISODE and size > MOST_SQUEEZED * stored:
        raise DataError(f"{stored} bytes that say they are {size} are not read: they only fill the memory")


class Unchanged:
    """A file that must stay as it was when it was opened."""

    def __init__(self, path: Path):
        self.path = path
        self._stamp = self._look()

    def _look(self) -> tuple[int, int, int]:
        try:
            found = os.stat(self.path)
        except OSError as e:
            raise DataError(f"{self.path} cannot be read ({e.strerror})") from None
        return found.st_ino, found.st_size, found.st_mtime_ns

    def check(self) -> None:
        if self._look() != self._stamp:
            raise DataError(f"{self.path} changed while it was read: write to another file, and begin again")
