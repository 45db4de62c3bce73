"""The messages between producers, consumers and the shards of a buffer."""

from __future__ import annotations

import struct
from typing import Any, NamedTuple

import msgspec
import numpy as np

from bray.errors import DataError
from bray.remote.buffer.columns import Chunk
from bray.remote.buffer.slabs import SlabAddress
from bray.tree.layout import ALIGN, Layout, Layouts, aligned

OPEN, SLAB, PUSH, LENT, FREED, POP, WITHDRAW, RELEASE, SEES = range(1, 10)
# OPEN        request  Hello                                                         -> Welcome
# SLAB        request  the producer's slab                                           -> SEEN or UNSEEN
# PUSH        request  samples                                                       -> receipt
# LENT        request  samples in the producer's slab                                -> receipt
# FREED       post     (from the shard) the producer may reuse what it lent
# POP         request  a batch, or samples                                           -> answer, as soon as there is one
# WITHDRAW    post     pops without an answer are to be answered NOTHING
# RELEASE     post     the consumer does not use these leases any more
# SEES        post     the consumer can map the shard's slab

LARGE = 1 << 16
"""Samples, and batches, of at least this many bytes go through shared memory where both sides can map it."""

SEEN, UNSEEN = b"\1", b"\0"
NOTHING, ENDED, ROWS, LEASE = range(4)  # kinds of answers

_PUSH = struct.Struct("<?3xIQ")  # drop, rows, length of the layout
_LENT = struct.Struct("<QQQ")  # number of the loan, offset and size of the slot
_RECEIPT = struct.Struct("<q?")  # samples waiting in the shard, whether anyone but sources pushes
_ANSWER = struct.Struct("<B3xIIq")  # kind, rows, length of the layout, samples that wait in the shard
_LEASE = struct.Struct("<QQQ16sII")  # number of the lease, offset, slab (fd, nonce), first row, rows in the slot

pack_receipt, read_receipt = _RECEIPT.pack, _RECEIPT.unpack_from


class Hello(msgspec.Struct, array_like=True):
    """How a producer or consumer introduces itself."""

    source: str = ""
    ended: bool = False
    others_push: bool = False
    generation: int = 0
    """The shard of this name that it was connected to before, and how many samples waited there."""
    waiting: int = 0


class Welcome(msgspec.Struct, array_like=True):
    """The shard's answer."""

    generation: int
    slab: tuple[int, int, bytes]


def _with_layout(head: bytes, layout: Layout) -> bytes:
    """Head and layout, padded so that the columns after it are aligned."""
    size = len(head) + len(layout.spec)
    return head + layout.spec + bytes(-size % ALIGN)


def _read_layout(body: memoryview, at: int, length: int, layouts: Layouts) -> tuple[Layout, int]:
    """The layout at this offset, and where the columns begin."""
    end = at + length
    if end > len(body):
        raise DataError("a message that ends in its head")
    return layouts.parse(bytes(body[at:end])), aligned(end)


# --- pushing ----------------------------------------------------------------------------------------------------------


def push_head(layout: Layout, rows: int, drop: bool) -> bytes:
    """What goes before the columns."""
    return _with_layout(_PUSH.pack(drop, rows, len(layout.spec)), layout)


def read_push(body: memoryview, layouts: Layouts) -> tuple[Chunk, bool]:
    drop, rows, length = _PUSH.unpack_from(body)
    layout, start = _read_layout(body, _PUSH.size, length, layouts)
    return Chunk(layout, layout.columns(body, rows, start), rows), drop


def lent(layout: Layout, rows: int, drop: bool, number: int, offset: int, size: int) -> bytes:
    head = _PUSH.pack(drop, rows, len(layout.spec)) + _LENT.pack(number, offset, size)
    return head + layout.spec


def read_lent(body: memoryview, layouts: Layouts) -> tuple[Layout, int, bool, int, int, int]:
    """Layout, rows, drop, number of the loan, offset and size of the slot."""
    drop, rows, length = _PUSH.unpack_from(body)
    layout, _ = _read_layout(body, _PUSH.size + _LENT.size, length, layouts)
    return layout, rows, drop, *_LENT.unpack_from(body, _PUSH.size)


# --- answers ----------------------------------------------------------------------------------------------------------


class Lease(NamedTuple):
    """Rows that the consumer reads in a slab: `rows` of the `total` in the slot, from `first` on."""

    number: int
    offset: int
    fd: int
    nonce: bytes
    first: int
    total: int


def answer(kind: int, waiting: int, chunk: Chunk | None = None, lease: int = 0) -> list[Any]:
    """The parts of an answer to POP."""
    if chunk is None:
        return [_ANSWER.pack(kind, 0, 0, waiting)]
    layout = chunk.layout
    head = _ANSWER.pack(kind, chunk.rows, len(layout.spec), waiting)
    if kind == LEASE:
        slab: SlabAddress = chunk.held.memory.address
        where = _LEASE.pack(lease, chunk.held.offset, slab.fd, slab.nonce, chunk.first, chunk.total)
        return [head + where + layout.spec]
    return [_with_layout(head, layout), *chunk.pieces()]


class Answer:
    """An answer as the consumer reads it: a `chunk`, or the `lease` of one, or neither."""

    __slots__ = ("chunk", "kind", "layout", "lease", "rows", "waiting")

    def __init__(self, body: memoryview, layouts: Layouts):
        self.kind, self.rows, length, self.waiting = _ANSWER.unpack_from(body)
        self.chunk: Chunk | None = None
        self.lease: Lease | None = None
        if self.kind == LEASE:
            self.lease = Lease(*_LEASE.unpack_from(body, _ANSWER.size))
            self.layout, _ = _read_layout(body, _ANSWER.size + _LEASE.size, length, layouts)
        elif self.kind == ROWS:
            self.layout, start = _read_layout(body, _ANSWER.size, length, layouts)
            data = np.array(body[start:])  # a copy: rows are the reader's to write
            self.chunk = Chunk(self.layout, self.layout.columns(data, self.rows), self.rows)


def pack_numbers(*arrays: np.ndarray) -> bytes:
    return b"".join(np.ascontiguousarray(a).tobytes() for a in arrays)
