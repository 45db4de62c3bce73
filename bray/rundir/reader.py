"""Reading from a run directory. It may come from anywhere, so it is data and nothing else.

A file is opened part by part below the directory without following a link, has to be a plain file, and may not be
larger than its kind is; only then is memory given to it. A file that Bray wrote carries its own checksum (`seal`). What
is wrong is a CheckpointError.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import stat
from pathlib import Path
from typing import Any, BinaryIO

from bray.errors import CheckpointError

MOST_JSON = 8 << 20
"""Bytes of a JSON file."""
MOST_TEXT = 1 << 20
"""Bytes of config.yaml: reading YAML takes a thousand times its size for a moment."""
_MARK = b"bray-sha256:"
BLANK = _MARK.decode() + "0" * 64
"""Where the checksum of a file goes, while the file is made."""
_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC


def most_bytes() -> int:
    """Bytes of the largest files, weights and training states: half of this machine's memory."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2


def open_plain(path: str | Path, root: str | Path | None = None) -> BinaryIO:
    """Open a plain file. With `root`, `path` is relative to that directory, stays in it, and no part of it may be a
    link; without, it is a path that the user gave, whose links are followed."""
    path = Path(path)
    where = path if root is None else Path(root) / path
    try:
        # O_NONBLOCK: a FIFO without a writer would be waited for
        fd = os.open(where, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK) if root is None else _open_below(root, path)
    except FileNotFoundError:
        raise CheckpointError(f"{where} is missing") from None
    except OSError as e:
        if root is not None and _is_link(Path(root), path):
            raise CheckpointError(
                f"{where}: a link, or below one. Only plain files inside of a run directory are read: put a copy in "
                "its place"
            ) from None
        raise CheckpointError(f"{where} cannot be read ({e.strerror or e})") from None
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise CheckpointError(f"{where}: expected a plain file, it is a directory, a pipe or a device")
    return os.fdopen(fd, "rb")


def _open_below(root: str | Path, path: Path) -> int:
    """Part by part, each relative to the one before: nobody can put a link in its place meanwhile."""
    if path.is_absolute() or ".." in path.parts or not path.parts:
        raise CheckpointError(f"{path}: expected the name of a file inside of {root}")
    *folders, name = path.parts
    at = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for folder in folders:
            inner = os.open(folder, _FLAGS | os.O_DIRECTORY, dir_fd=at)
            os.close(at)
            at = inner
        return os.open(name, _FLAGS | os.O_NONBLOCK, dir_fd=at)
    finally:
        os.close(at)


def _is_link(root: Path, path: Path) -> bool:
    with contextlib.suppress(OSError):
        return any((root / Path(*path.parts[:n])).is_symlink() for n in range(1, len(path.parts) + 1))
    return False


def read_plain(path: str | Path, root: str | Path | None = None, most: int = MOST_JSON) -> bytes:
    """The bytes of a plain file (see `open_plain`) that has no more than `most`."""
    with open_plain(path, root) as f:
        size = os.fstat(f.fileno()).st_size
        if size > most:
            where = path if root is None else Path(root) / path
            raise CheckpointError(
                f"{where} has {size:,} bytes, expected at most {most:,}: it is not what it claims to be"
            )
        try:
            return f.read(size)
        except OSError as e:
            raise CheckpointError(f"{path} cannot be read ({e.strerror or e})") from None


def read_text(path: str | Path, root: str | Path | None = None) -> str:
    """UTF-8 text of at most MOST_TEXT bytes."""
    try:
        return read_plain(path, root, MOST_TEXT).decode()
    except UnicodeDecodeError as e:
        raise CheckpointError(f"{path}: expected text in UTF-8, it cannot be read ({e})") from None


def read_json(path: str | Path, root: str | Path | None = None) -> Any:
    """JSON from a run directory; CheckpointError when it is missing or broken."""
    data = read_plain(path, root)
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as e:
        where = path if root is None else Path(root) / path
        raise CheckpointError(f"{where}: expected JSON, it cannot be read ({e})") from None


def read_dict(path: str | Path, root: str | Path | None = None) -> dict[str, Any]:
    """A JSON object."""
    value = read_json(path, root)
    if not isinstance(value, dict):
        where = path if root is None else Path(root) / path
        raise CheckpointError(f"{where}: expected a JSON object, got {str(value)[:60]}")
    return value


# --- checksums inside of files ----------------------------------------------------------------------------------------


def seal(data: bytes) -> bytes:
    """A file's bytes with their own checksum where they hold BLANK."""
    return data.replace(BLANK.encode(), _MARK + hashlib.sha256(data).hexdigest().encode(), 1)


def changed(where: Path | str) -> CheckpointError:
    return CheckpointError(f"{where}: its content was changed after it was written (checksum)")


def check_seal(data: bytes, where: str | Path) -> bool:
    """Whether a file carries a checksum (one of an older Bray, or of another tool, does not). CheckpointError when the
    content is another one."""
    at = data.find(_MARK) + len(_MARK)
    said = data[at : at + 64]
    if at < len(_MARK) or said == b"0" * 64:
        return False
    digest = hashlib.sha256(memoryview(data)[:at])
    digest.update(b"0" * 64)
    digest.update(memoryview(data)[at + 64 :])
    if digest.hexdigest().encode() != said:
        raise changed(where)
    return True
