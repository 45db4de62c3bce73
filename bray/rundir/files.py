"""Files that are whole or not there, and JSON."""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import secrets
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from bray.errors import CheckpointError, DataError, DiskFull

DISK_FULL = (errno.ENOSPC, errno.EDQUOT)


def write_atomic(path: str | Path, data: bytes | str, sync: bool = True) -> None:
    """Write a whole file or nothing: a temporary file beside it, synced, then renamed over it. `sync`: whether it is on
    disk when this returns."""
    path = Path(path)
    temp = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        raw = data.encode() if isinstance(data, str) else data
        if sync:
            write_synced(temp, raw)
        else:
            temp.write_bytes(raw)
        os.replace(temp, path)
        if sync:
            sync_dir(path.parent)
    except BaseException as e:
        with contextlib.suppress(OSError):
            os.unlink(temp)
        if isinstance(e, OSError):
            raise write_error(e, path, "the previous file is kept") from e
        raise


def write_synced(path: Path, data: bytes) -> None:
    """A new file that is on disk when this returns."""
    with open(path, "xb") as f:
        f.write(data)
        f.flush()
        os.fsync(f.fileno())


def link_or_copy(source: Path, target: Path, data: bytes) -> None:
    """A hard link, or a copy where the file system has none."""
    try:
        os.link(source, target)
    except OSError as e:
        if e.errno in DISK_FULL:
            raise
        write_synced(target, data)


def sync_dir(path: Path) -> None:
    """A rename is on disk only when its directory is."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def write_error(e: OSError, path: Path, kept: str) -> CheckpointError:
    """The error for the user; `kept` says what is still there."""
    if e.errno in DISK_FULL:
        return DiskFull(
            f"disk full while writing {path}: {kept}. Free some space and go on: bray train --resume, or the same "
            "bray launch again."
        )
    if isinstance(e, PermissionError) or e.errno == errno.EROFS:
        return CheckpointError(
            f"{path} may not be written ({e.strerror or e}): {kept}. Make it writable for this user, or choose "
            "another place (--project)."
        )
    return CheckpointError(f"could not write {path} ({e.strerror or e}): {kept}.")


@contextlib.contextmanager
def writing(path: Path, kept: str) -> Iterator[None]:
    """Errors of the file system inside become the one for the user."""
    try:
        yield
    except OSError as e:
        raise write_error(e, path, kept) from e


def plain(value: Any) -> Any:
    """As JSON data: arrays are lists, paths are text, numbers that are not finite are None."""
    if isinstance(value, Mapping):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(v) for v in value]
    if hasattr(value, "tolist"):  # numpy's and torch's
        return plain(value.tolist())
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return str(value) if isinstance(value, Path) else value


def to_json(value: Any) -> str:
    """Sorted and indented JSON of `plain(value)`."""
    try:
        return json.dumps(plain(value), indent=2, sort_keys=True, ensure_ascii=False) + "\n"
    except (TypeError, ValueError, RecursionError) as e:
        raise DataError(f"expected plain data to write as JSON: {e}") from None
