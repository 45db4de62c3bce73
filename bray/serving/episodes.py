"""Episode files: the States of an episode on disk, to be looked at, rendered and learnt from.

    BRAYEPSD  version  | zstd(MessagePack: a list of States, each a map of its fields)

JSON values are stored as they are (a tuple comes back as a list), arrays as packed trees (`bray.tree`), protobuf
messages as their type's name and bytes. What none of these can hold is left out, and named once in the log.

Reading trusts nothing: no pickle, the frame's checksum (of zstd) is required, what the values would take in memory is
added up before they are made, and whatever is wrong is a DataError.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import struct
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import zstandard

from bray import tree
from bray.errors import CheckpointError, DataError
from bray.rundir.reader import read_plain
from bray.serving.protocol import Refusal
from bray.serving.state import State

logger = logging.getLogger("bray.serving")

SUFFIX = ".episode"
_HEAD = b"BRAYEPSD" + struct.pack("<Q", 1)
MAX_EPISODE = 1 << 28  # bytes of one episode before compression
MAX_MEMORY = 1 << 30  # bytes of the values of one episode
_ARRAY, _MESSAGE = 1, 2  # MessagePack's extension types
_UNSAFE = re.compile(r"[^A-Za-z0-9._-]")
_NUMBERED = re.compile(r"-(\d+)\.(\d+)" + re.escape(SUFFIX) + r"\Z")
_left_out: set[tuple[str, str]] = set()  # (field, type) that the log has named


class PackedMessage(NamedTuple):
    """A protobuf message whose class was not given to `read_episode`."""

    type: str
    """Full name of the message, package included."""
    data: bytes


# --- writing ----------------------------------------------------------------------------------------------------------


def pack_state(state: State) -> bytes:
    """The fields of a State, as far as they can be stored."""
    try:
        _ = state.input  # a field once it is read
    except Refusal:  # an agent made sense of it all the same
        state.input = None
    fields = vars(state)
    try:
        return _encode(fields)
    except Exception:  # an object of any kind may be among the fields, and raise what it likes
        return _encode({name: packed for name, value in fields.items() if (packed := _try(name, value)) is not None})


def write_episode(directory: Path | str, session: str, actor: int, states: Iterable[bytes], keep: int) -> Path:
    """Write packed States as `<session>-<actor>.<n>.episode`, where n goes on after the files of this actor that are
    there, and remove all but the newest `keep` files of the actor. A file has its name only when it is whole."""
    data = _encode([msgspec.Raw(s) for s in states])
    if len(data) > MAX_EPISODE:
        raise DataError(
            f"an episode of {len(data)} bytes; the most that is saved is {MAX_EPISODE}: set a smaller episode_length"
        )
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    saved = _files_of(directory, actor)
    path = directory / f"{_safe(session)}-{actor}.{saved[-1][0] + 1 if saved else 0}{SUFFIX}"
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        temporary.write_bytes(_HEAD + zstandard.ZstdCompressor(level=1, write_checksum=True).compress(data))
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
    for _, old in saved[: max(0, len(saved) + 1 - keep)]:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(old)
    return path


def _pack_other(value: Any) -> Any:
    """What MessagePack has no word for: arrays and messages."""
    if hasattr(value, "SerializePartialToString"):
        packed = _encode((value.DESCRIPTOR.full_name, value.SerializePartialToString()))
        return msgspec.msgpack.Ext(_MESSAGE, packed)
    if isinstance(value, (np.str_, np.bytes_)):
        return value.item()
    if hasattr(value, "__array__"):
        return msgspec.msgpack.Ext(_ARRAY, tree.pack(np.asarray(value)))
    raise TypeError(f"a {type(value).__qualname__} cannot be stored")


_encode = msgspec.msgpack.Encoder(enc_hook=_pack_other).encode


def _try(name: str, value: Any) -> msgspec.Raw | None:
    try:
        return msgspec.Raw(_encode(value))
    except Exception as e:
        if (name, type(value).__qualname__) not in _left_out:
            _left_out.add((name, type(value).__qualname__))
            logger.warning("episode files leave out state.%s, a %s: %s", name, type(value).__qualname__, e)
        return None


def _safe(session: str) -> str:
    """A session as part of a file name, whatever the client called it."""
    return _UNSAFE.sub("_", session)[:100].lstrip(".") or "session"


def _files_of(directory: Path, actor: int) -> list[tuple[int, Path]]:
    """(number, path) of the files of an actor, oldest first."""
    found = []
    for entry in os.scandir(directory):
        match = _NUMBERED.search(entry.name)
        if match and int(match[1]) == actor:
            found.append((int(match[2]), Path(entry.path)))
    return sorted(found)


# --- reading ----------------------------------------------------------------------------------------------------------


def read_episode(path: Path | str, messages: Iterable[Any] = ()) -> list[State]:
    """The States of an episode file. Protobuf messages of the classes in `messages` are parsed, others come as
    PackedMessage."""
    try:
        return unpack_episode(read_plain(path, most=MAX_EPISODE), messages)
    except CheckpointError as e:
        raise DataError(str(e)) from None
    except DataError as e:
        raise DataError(f"{path}: {e}") from None


def unpack_episode(data: bytes, messages: Iterable[Any] = ()) -> list[State]:
    """The States in the bytes of an episode file; DataError when they are anything else."""
    classes = {m.DESCRIPTOR.full_name: m for m in messages}

    def unpack_other(code: int, packed: memoryview) -> Any:
        if code == _ARRAY:
            array = tree.unpack(packed, copy=True)
            if not isinstance(array, np.ndarray):
                raise DataError("an array that is a tree")
            return array[()]  # numpy's scalars come back as scalars
        if code == _MESSAGE:
            return _parse(msgspec.msgpack.decode(packed, type=PackedMessage), classes)
        raise DataError(f"a value of unknown kind {code}")

    if not data.startswith(_HEAD):
        raise DataError("not an episode file, or one of another version")
    try:
        block = memoryview(data)[len(_HEAD) :]
        frame = zstandard.get_frame_parameters(block)
        if frame.content_size > MAX_EPISODE:  # also when it is not told
            raise DataError(f"it says that it holds {frame.content_size} bytes, the most is {MAX_EPISODE}")
        if not frame.has_checksum:
            raise DataError("it has no checksum")
        content = zstandard.ZstdDecompressor().decompress(
            block, max_output_size=frame.content_size, allow_extra_data=False
        )
        if _memory(content) > MAX_MEMORY:
            raise DataError(f"its values would take more than {MAX_MEMORY >> 20} MiB of memory")
        rows = msgspec.msgpack.decode(content, type=list[dict[str, Any]], ext_hook=unpack_other)
    except (zstandard.ZstdError, DataError, ValueError, TypeError, RecursionError, MemoryError) as e:
        raise DataError(f"a damaged or foreign episode file ({e})") from None
    return [_state(fields) for fields in rows]


_LARGEST_COST = 272
# Runs of values of MessagePack. Of one or a few bytes each: short lists, maps and texts, null, booleans, small numbers.
_TEXTS = b"|".join(b"%c.{%d}" % (0xA0 + n, n) for n in range(1, 32))
_SMALL = re.compile(rb"(?:[\x00-\xa0\xc0\xc2\xc3\xe0-\xff]+|" + _TEXTS + b")++", re.DOTALL)
_CODES = (
    (bytes(range(256)), 16),
    (bytes(range(0x80, 0xA0)), _LARGEST_COST),
    (bytes(range(0xA0, 0xC0)), 96),
)  # and costs
# Numbers: their codes, and the bytes behind a code. `++`: without a place to go back to for each repetition.
_NUMBERS = [
    (re.compile(b"(?:[%b].{%d})++" % (codes, size), re.DOTALL), size + 1)
    for codes, size in ((b"\xcb\xcf\xd3", 8), (b"\xca\xce\xd2", 4), (b"\xcd\xd1", 2), (b"\xcc\xd0", 1))
]
_SIZED = {0xC4: 1, 0xC5: 2, 0xC6: 4, 0xC7: 1, 0xC8: 2, 0xC9: 4, 0xD9: 1, 0xDA: 2, 0xDB: 4}  # bytes, extensions, text
_COUNTED = {0xDC: 2, 0xDD: 4, 0xDE: 2, 0xDF: 4}  # long lists and maps


def _memory(content: bytes) -> int:
    """Bytes of memory that the values would take, estimated without making them; stops when that is too much."""
    if len(content) * _LARGEST_COST <= MAX_MEMORY:
        return 0
    at = total = 0
    while at < len(content) and total <= MAX_MEMORY:
        before = at
        if match := _SMALL.match(content, at):
            at = match.end()
            total += sum(cost * (len(match[0]) - len(match[0].translate(None, codes))) for codes, cost in _CODES)
        for pattern, size in _NUMBERS:
            if match := pattern.match(content, at):
                total += (match.end() - at) // size * 48
                at = match.end()
        if at == before:
            length, cost = _value_at(content, at)
            at, total = at + length, total + cost
    return total


def _value_at(content: bytes, at: int) -> tuple[int, int]:
    """Length and cost of a value that is not one of a run."""
    code = content[at]
    if wide := _SIZED.get(code):
        length = int.from_bytes(content[at + 1 : at + 1 + wide], "big")
        return 1 + wide + (0xC7 <= code <= 0xC9) + length, 2 * length + 512
    if 0xD4 <= code <= 0xD8:
        return 2 + (1 << (code - 0xD4)), 512
    return 1 + _COUNTED.get(code, 0), _LARGEST_COST


def _parse(packed: PackedMessage, classes: dict[str, Any]) -> Any:
    if packed.type not in classes:
        return packed
    from google.protobuf.message import DecodeError

    try:
        return classes[packed.type].FromString(packed.data)
    except DecodeError as e:
        raise DataError(f"a {packed.type} message that is none: {e}") from None


def _state(fields: dict[str, Any]) -> State:
    state = State()
    vars(state).clear()
    vars(state).update(fields)
    return state
