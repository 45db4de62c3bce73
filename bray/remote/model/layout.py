"""Batches on the wire: columns, whose layout is described once per connection and then called by a number
(`bray.tree.layout`).

    body = step i64 | rows u32 | layout u32 | length of the description u32 | 4 bytes 0 | description | columns

The description comes with the first batch of a kind on a connection, and with every batch that has no number (layout
0).
"""

from __future__ import annotations

import struct
from typing import Any, NamedTuple

import numpy as np

from bray.errors import DataError
from bray.tree.layout import Layout, describe, to_bytes

_HEAD = struct.Struct("<qIII4x")
_MAX_DESCRIPTION = 1 << 20
MOST_KINDS = 64
"""Layouts that one side of a connection remembers; further kinds are described each time."""
CURRENT = -1
"""The step of a request for whichever version is current."""


def _kind(node: Any, columns: list[np.ndarray]) -> Any:
    """What decides the layout of a batch: structure, dtypes, shapes of rows. Hashable. The arrays are appended to
    `columns`."""
    if type(node) is np.ndarray:
        columns.append(node)
        return node.dtype, node.shape[1:]
    if isinstance(node, dict):
        return dict, tuple([(k, _kind(v, columns)) for k, v in node.items()])
    return (list if isinstance(node, list) else tuple), tuple([_kind(v, columns) for v in node])


class Writer:
    """The layouts that one side of a connection has described so far."""

    def __init__(self) -> None:
        self._known: dict[Any, int] = {}

    def write(self, batch: Any, rows: int, step: int) -> list[bytes | memoryview]:
        """A batch `[rows, ...]` as the parts of a message."""
        columns: list[np.ndarray] = []
        kind = _kind(batch, columns)
        number, spec = self._known.get(kind), b""
        if number is None:
            spec = Layout(describe(batch, lead=1)).spec
            number = len(self._known) + 1 if len(self._known) < MOST_KINDS else 0
            if number:
                self._known[kind] = number
        return [_HEAD.pack(step, rows, number, len(spec)) + spec, *to_bytes(columns)]


class RowsBatch(NamedTuple):
    """What a message holds."""

    step: int
    rows: int
    text: bytes
    """The description; equal ones are of one kind."""
    values: Any


class RowsReader:
    """The layouts that the other side of a connection has described so far."""

    def __init__(self) -> None:
        self._known: dict[int, Layout] = {}

    def read(self, body: memoryview) -> RowsBatch:
        """Raises DataError on anything that is no such message. Arrays are copies, aligned and writable."""
        if len(body) < _HEAD.size:
            raise DataError(f"not a batch: {len(body)} bytes")
        step, rows, number, size = _HEAD.unpack_from(body)
        at = _HEAD.size + size
        if size > _MAX_DESCRIPTION or at > len(body) or number > MOST_KINDS:
            raise DataError(f"not a batch: a description of {size} bytes, number {number}")
        try:
            layout = Layout.parse(bytes(body[_HEAD.size : at])) if size else self._known.get(number)
            if layout is None:
                raise DataError(f"layout {number} was never described")
            columns = layout.columns(body, rows, at)
        except DataError as e:
            raise DataError(f"not a batch: {e}") from None
        if size and number:
            self._known[number] = layout
        return RowsBatch(step, rows, layout.spec, layout.tree([c.copy() for c in columns]))
