"""Batches on the wire: columns of raw numbers. What they look like is described once per connection, then called by a number.

    body = step i64 | rows u32 | layout u32 | length of the description u32 | 4 bytes 0 | description | columns, each padded to 8 bytes

The description is JSON: {"d": [[key, node], ...]}, {"l": [node, ...]}, {"t": [node, ...]} or {"a": [dtype, shape without rows]}. It comes with
the first batch of a kind on a connection, and with every batch that has no number (layout 0). Nothing is unpickled, and every length is
checked before an array is made.
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Callable
from typing import Any, NamedTuple

import msgspec
import numpy as np

from bray.errors import DataError

_HEAD = struct.Struct("<qIII4x")
_DTYPE = re.compile(r"[<|][biufc]\d{1,2}")
_MAX_DESCRIPTION = 1 << 20
_MAX_DEPTH = 64
MOST_KINDS = 64
"""Layouts that one side of a connection remembers; further kinds are described each time."""
CURRENT = -1
"""The step of a request for whichever version is current."""


class Layout:
    """How batches of one kind lie in bytes."""

    def __init__(self, description: Any):
        self._leaves: list[tuple[np.dtype, tuple[int, ...], int]] = []  # dtype, shape of a row, bytes of a row
        self._build = self._node(description, 0)
        self.text = msgspec.json.encode(description)

    def _node(self, node: Any, depth: int) -> Callable[[list[Any]], Any]:
        """A function that takes this node's arrays off a list (its end first) and puts them together."""
        if depth > _MAX_DEPTH or not isinstance(node, dict) or len(node) != 1:
            raise DataError("not the description of a batch")
        ((kind, body),) = node.items()
        if not isinstance(body, list):
            raise DataError("not the description of a batch: a node without content")
        if kind == "a":
            self._leaves.append(_leaf(body))
            return lambda arrays: arrays.pop()
        if kind == "d":
            if not all(isinstance(p, list) and len(p) == 2 and isinstance(p[0], str) for p in body):
                raise DataError("not the description of a batch: a dict with keys that are not text")
            parts = [(key, self._node(child, depth + 1)) for key, child in body]
            return lambda arrays: {key: build(arrays) for key, build in parts}
        if kind not in ("l", "t"):
            raise DataError(f"not the description of a batch: unknown node {str(kind)[:20]!r}")
        items = [self._node(child, depth + 1) for child in body]
        if kind == "l":
            return lambda arrays: [build(arrays) for build in items]
        return lambda arrays: tuple(build(arrays) for build in items)

    def read(self, body: memoryview, at: int, rows: int) -> Any:
        """The columns that start at `at` as a tree of arrays `[rows, ...]`, copied: theirs is aligned and may be written into."""
        arrays = []
        for dtype, shape, width in self._leaves:
            size = rows * width
            if at + size > len(body):
                raise DataError(f"a batch of {rows} rows is cut short: expected more than {len(body)} bytes")
            column = np.frombuffer(body, dtype, size // dtype.itemsize, at) if size else np.empty(0, dtype)
            arrays.append(column.reshape(rows, *shape).copy())
            at += size + (-size & 7)
        arrays.reverse()
        return self._build(arrays)


def _leaf(body: list[Any]) -> tuple[np.dtype, tuple[int, ...], int]:
    try:
        name, shape = body
        if not (isinstance(name, str) and _DTYPE.fullmatch(name)) or not isinstance(shape, list) or len(shape) > 32:
            raise ValueError
        if not all(type(n) is int and 0 <= n < 1 << 32 for n in shape):
            raise ValueError
        dtype = np.dtype(name)
    except (TypeError, ValueError):
        raise DataError(f"not the description of a batch: an array of {str(body)[:60]}") from None
    return dtype, tuple(shape), dtype.itemsize * math.prod(shape)


def kind_of(node: Any) -> Any:
    """What decides the layout of a batch: structure, dtypes, shapes of rows. Hashable."""
    if type(node) is np.ndarray:
        return node.dtype, node.shape[1:]
    if isinstance(node, dict):
        return dict, tuple([(k, kind_of(v)) for k, v in node.items()])
    return (list if isinstance(node, list) else tuple), tuple([kind_of(v) for v in node])


def _describe(node: Any) -> Any:
    if isinstance(node, dict):
        return {"d": [[str(k), _describe(v)] for k, v in node.items()]}
    if isinstance(node, (list, tuple)):
        return {"l" if isinstance(node, list) else "t": [_describe(v) for v in node]}
    if node.dtype.kind not in "biufc":
        raise DataError(f"a batch holds numbers, got an array of dtype {node.dtype}")
    return {"a": [node.dtype.newbyteorder("<").str, list(node.shape[1:])]}


class Writer:
    """What one side of a connection has described so far."""

    def __init__(self) -> None:
        self._known: dict[Any, int] = {}

    def write(self, batch: Any, rows: int, step: int) -> list[bytes | memoryview]:
        """A batch `[rows, ...]` as the pieces of a body."""
        kind = kind_of(batch)
        number, text = self._known.get(kind), b""
        if number is None:
            text = Layout(_describe(batch)).text
            number = len(self._known) + 1 if len(self._known) < MOST_KINDS else 0
            if number:
                self._known[kind] = number
        pieces: list[bytes | memoryview] = [_HEAD.pack(step, rows, number, len(text)) + text + bytes(-len(text) & 7)]
        _columns(batch, pieces)
        return pieces


def _columns(node: Any, out: list[bytes | memoryview]) -> None:
    if type(node) is np.ndarray:
        if node.nbytes < 4096:
            out.append(node.tobytes())  # as quick as a view of it
        else:
            out.append(np.ascontiguousarray(node).reshape(-1).view(np.uint8).data)
        if node.nbytes & 7:
            out.append(bytes(-node.nbytes & 7))
    else:
        for part in node.values() if isinstance(node, dict) else node:
            _columns(part, out)


class Batch(NamedTuple):
    """What a body holds."""

    step: int
    rows: int
    text: bytes
    """The description; equal ones are of one kind."""
    values: Any


class Reader:
    """What the other side of a connection has described so far."""

    def __init__(self) -> None:
        self._known: dict[int, Layout] = {}

    def read(self, body: memoryview) -> Batch:
        """Raises DataError on anything that is not such a body."""
        if len(body) < _HEAD.size:
            raise DataError(f"not a batch: {len(body)} bytes")
        step, rows, number, size = _HEAD.unpack_from(body)
        at = _HEAD.size
        if size:
            if size > _MAX_DESCRIPTION or at + size > len(body) or number > MOST_KINDS:
                raise DataError(f"not a batch: a description of {size} bytes, number {number}")
            try:
                layout = Layout(msgspec.json.decode(body[at : at + size]))
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as e:
                raise DataError(f"not a batch: its description is no JSON ({e})") from None
            at += size + (-size & 7)
            if number:
                self._known[number] = layout
        else:
            found = self._known.get(number)
            if found is None:
                raise DataError(f"not a batch: layout {number} was never described")
            layout = found
        return Batch(step, rows, layout.text, layout.read(body, at, rows))
