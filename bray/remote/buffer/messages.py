"""What producers, consumers and the shards of a buffer say to each other over a link."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np

from bray.errors import DataError
from bray.remote.buffer.columns import Chunk, Layout, Layouts

OPEN, PUSH, SLOTS, WRITTEN, RETURN, POP, WITHDRAW, RELEASE, DRAW, PRIORITIES, SEES = range(1, 12)
# OPEN        request  who I am                                                      -> who you are, and your slab
# PUSH        request  samples                                                       -> they are there
# SLOTS       request  I have large samples                                          -> slots to write them to
# WRITTEN     request  samples lie in this slot                                      -> they are there; the next slot
# RETURN      post     slots that I do not need
# POP         request  a batch, or samples                                           -> them, as soon as they are there
# WITHDRAW    post     I do not wait any longer
# RELEASE     post     what lay in your slab I have no more use for
# DRAW        request  rows at these places                                          -> them
# PRIORITIES  post     new ones
# SEES        post     I can look into your slab

LARGE = 1 << 16
"""Samples, and batches, of so many bytes go through shared memory where there is some."""

DROP = 1  # flag of PUSH and WRITTEN
NOTHING, ENDED, ROWS, LEASE = range(4)  # kinds of answers

_PUSH = struct.Struct("<III4x")  # flags, rows, length of the layout
_WRITTEN = struct.Struct(
    "<III4xqq"
)  # flags, rows, length of the layout, offset of the slot, bytes wanted of the next one
_ACK = struct.Struct(
    "<q?qq"
)  # samples that wait there, whether others than sources push, offset of the next slot or -1, its size
_ANSWER = struct.Struct("<B3xIIIqqqqdddq")
# kind, rows, length of the layout, first row, rows in the slot, samples that wait there, number of the lease, offset,
# mass before the draw, mass, largest priority, rows in the store
_DRAW = struct.Struct("<IId")  # wait?, rows, largest priority known
_ALIGN = 64
_ZEROS = bytes(_ALIGN)


def _head(head: bytes, layout: Layout) -> bytes:
    """Head and layout, filled up so that columns start on a cache line."""
    size = len(head) + len(layout.spec)
    return head + layout.spec + _ZEROS[: -size % _ALIGN]


def _columns_at(head: struct.Struct, length: int) -> int:
    return -(-(head.size + length) // _ALIGN) * _ALIGN


def _layout(body: memoryview, at: int, length: int, layouts: Layouts) -> Layout:
    if at + length > len(body):
        raise DataError("a message that ends in its head")
    return layouts.parse(bytes(body[at : at + length]))


# --- pushing ----------------------------------------------------------------------------------------------------------


def push_head(layout: Layout, rows: int, drop: bool) -> bytes:
    """What goes before the columns."""
    return _head(_PUSH.pack(DROP if drop else 0, rows, len(layout.spec)), layout)


def read_push(body: memoryview, layouts: Layouts) -> tuple[Chunk, bool]:
    flags, rows, length = _PUSH.unpack_from(body)
    layout = _layout(body, _PUSH.size, length, layouts)
    columns = layout.columns(body, rows, _columns_at(_PUSH, length))
    return Chunk(layout, columns, rows), bool(flags & DROP)


def written(layout: Layout, rows: int, drop: bool, offset: int, want: int) -> bytes:
    """Samples lie in the slot at `offset`; another slot of `want` bytes (0: none) is welcome."""
    return _head(_WRITTEN.pack(DROP if drop else 0, rows, len(layout.spec), offset, want), layout)


def read_written(body: memoryview, layouts: Layouts) -> tuple[Layout, int, bool, int, int]:
    flags, rows, length, offset, want = _WRITTEN.unpack_from(body)
    return _layout(body, _WRITTEN.size, length, layouts), rows, bool(flags & DROP), offset, want


pack_ack, read_ack = _ACK.pack, _ACK.unpack_from
pack_draw, read_draw = _DRAW.pack, _DRAW.unpack_from
DRAW_SIZE = _DRAW.size


# --- answers ----------------------------------------------------------------------------------------------------------


class Facts:
    """What an answer tells beside its rows."""

    __slots__ = ("before", "largest", "mass", "rows", "waiting")

    def __init__(self, waiting: int = 0, before: float = 0.0, mass: float = 0.0, largest: float = 1.0, rows: int = 0):
        self.waiting, self.before, self.mass, self.largest, self.rows = waiting, before, mass, largest, rows


def answer(kind: int, facts: Facts, chunk: Chunk | None = None, lease: int = 0) -> list[Any]:
    """The pieces of an answer to POP or DRAW."""
    rows, spec = (chunk.rows, chunk.layout.spec) if chunk is not None else (0, b"")
    first, total, offset = 0, rows, 0
    if kind == LEASE:
        assert chunk is not None
        first, total, offset = chunk.first, chunk.total, chunk.held.offset
    head = _ANSWER.pack(
        kind,
        rows,
        len(spec),
        first,
        total,
        facts.waiting,
        lease,
        offset,
        facts.before,
        facts.mass,
        facts.largest,
        facts.rows,
    )
    if chunk is None:
        return [head]
    return [_head(head, chunk.layout), *(chunk.pieces() if kind == ROWS else ())]


class Answer:
    """An answer as the asker reads it. `chunk` is there unless it is in a slot (`kind` LEASE)."""

    __slots__ = ("chunk", "facts", "first", "kind", "layout", "lease", "offset", "rows", "total")

    def __init__(self, body: memoryview, layouts: Layouts):
        (
            self.kind,
            self.rows,
            length,
            self.first,
            self.total,
            waiting,
            self.lease,
            self.offset,
            before,
            mass,
            largest,
            rows,
        ) = _ANSWER.unpack_from(body)
        self.facts = Facts(waiting, before, mass, largest, rows)
        self.chunk: Chunk | None = None
        if self.kind in (ROWS, LEASE):
            self.layout = _layout(body, _ANSWER.size, length, layouts)
        if self.kind == ROWS:
            data = np.array(body[_columns_at(_ANSWER, length) :])  # a copy: rows are the reader's to write
            self.chunk = Chunk(self.layout, self.layout.columns(data, self.rows), self.rows)


def pack_numbers(*arrays: np.ndarray) -> bytes:
    return b"".join(np.ascontiguousarray(a).tobytes() for a in arrays)
