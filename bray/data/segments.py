"""Append-only segment files: how a large replay is checkpointed without writing it again each time.

A segment holds the rows [first, end) of a replay as one packed tree. Its name carries its content's digest, so a file
is never changed after it got its name, and runs that went on from the same checkpoint in different ways do not collide.
A segment counts only where a checkpoint's state names it: `[first row, end row, bytes, digest]` per segment, as int64.
"""

from __future__ import annotations

import hashlib
import mmap
import os
import re
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from bray import tree
from bray.errors import CheckpointError, DataError
from bray.rundir import open_plain
from bray.rundir.files import sync_dir, write_synced
from bray.tree import NestedArray

_NAME = re.compile(r"rows-\d{12}-\d{12}-[0-9a-f]{16}\.seg(\.tmp)?")


def write(directory: Path, first: int, end: int, rows: NestedArray) -> list[int]:
    """Write one segment (atomically: it has its name only when it is whole and on disk) and return its entry."""
    data = tree.pack(rows)
    entry = [first, end, len(data), _digest(data)]
    path = directory / _name(entry)
    if path.exists() and path.stat().st_size == len(data):
        return entry  # a run that repeats the rows of another one from the same checkpoint
    temporary = path.with_name(path.name + ".tmp")
    temporary.unlink(missing_ok=True)  # of a process that was killed
    write_synced(temporary, data)
    os.replace(temporary, path)
    sync_dir(directory)
    return entry


def read(directory: Path, entry: list[int]) -> NestedArray:
    """The rows of one segment, as views of the mapped file. Raises CheckpointError if it is not what the state
    names."""
    path = directory / _name(entry)
    try:
        file = open_plain(path.name, directory)
    except CheckpointError as e:
        raise CheckpointError(
            f"replay segment {e}. Resume from another checkpoint, or start without the replay."
        ) from None
    with file as f:
        size = os.fstat(f.fileno()).st_size
        if size != entry[2] or not size:
            raise CheckpointError(
                f"replay segment {path} has {size} bytes, the checkpoint says {entry[2]}: it was truncated or "
                "replaced. Resume from another checkpoint, or start without the replay."
            )
        data = memoryview(mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ))
    if _digest(data) != entry[3]:
        raise CheckpointError(
            f"replay segment {path} does not hold the rows the checkpoint was made with (digest differs)"
        )
    try:
        return tree.unpack(data)
    except DataError as e:
        raise CheckpointError(f"replay segment {path}: {e}") from None


def prune(directory: Path, keep: Iterable[list[int]]) -> list[str]:
    """Delete all segments but the ones named by `keep`, and files a killed process left half written."""
    names = {_name(entry) for entry in keep}
    gone = [p for p in sorted(directory.glob("rows-*")) if _NAME.fullmatch(p.name) and p.name not in names]
    for path in gone:
        path.unlink(missing_ok=True)
    return [p.name for p in gone]


def entries(state: NestedArray) -> list[list[int]]:
    """The segments a replay state names."""
    array = np.asarray(state.get("segments", ()), np.int64) if isinstance(state, dict) else None
    if array is None or (array.size and (array.ndim != 2 or array.shape[1] != 4)):
        raise CheckpointError("not the state of a replay: it names no segments")
    return [[int(x) for x in row] for row in array.reshape(-1, 4)]


def _name(entry: list[int]) -> str:
    return f"rows-{entry[0]:012d}-{entry[1]:012d}-{entry[3] & 0xFFFFFFFFFFFFFFFF:016x}.seg"


def _digest(data: bytes | memoryview) -> int:
    return int.from_bytes(hashlib.sha256(data).digest()[:8], "little", signed=True)
