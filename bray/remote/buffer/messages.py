"""The messages between producers, consumers and the shards of a buffer: a head, and columns of samples after it."""

from __future__ import annotations

import struct
from collections.abc import Iterable
from typing import Any, TypeVar

import msgspec

from bray.errors import DataError
from bray.remote.buffer.slabs import SlabAddress
from bray.tree.layout import ALIGN, aligned

OPEN, SLAB, PUSH, FREED, POP, WITHDRAW, RELEASE, SEES = range(1, 9)
# OPEN      request  Hello                                                     -> Welcome
# SLAB      request  the address of the producer's slab                        -> whether the shard can map it
# PUSH      request  Push; samples follow, or lie in the producer's slab       -> Arrived
# FREED     post     (from the shard) the producer may reuse what it lent
# POP       request  how many samples at most, where they come one by one      -> Answer, as soon as there is one
# WITHDRAW  post     pops without an answer are to be answered NOTHING
# RELEASE   post     the consumer does not use these leases any more
# SEES      post     the consumer can map the shard's slab

LARGE = 1 << 16
"""Samples, and batches, of at least this many bytes go through shared memory where both sides can map it."""

NOTHING, ENDED, ROWS = range(3)  # kinds of answers

_LENGTH = struct.Struct("<I")  # of the head


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
    slab: SlabAddress


class Push(msgspec.Struct, array_like=True):
    """Samples. Those with a `loan` lie in a slot of the producer's slab."""

    spec: bytes
    """Of their layout."""
    rows: int
    drop: bool
    loan: int = 0
    offset: int = 0
    size: int = 0


class Arrived(msgspec.Struct, array_like=True):
    """Samples have arrived."""

    waiting: int
    """Samples in the shard."""
    others_push: bool
    """Whether anyone but sources pushes."""


class Lease(msgspec.Struct, array_like=True):
    """Where the rows of an answer lie in a slab: `first` is the first of them among the `total` rows of the slot."""

    number: int
    offset: int
    fd: int
    nonce: bytes
    first: int
    total: int


class Answer(msgspec.Struct, array_like=True):
    """The answer to POP. Its rows follow, or lie where the lease says."""

    kind: int
    waiting: int
    """Samples in the shard."""
    spec: bytes = b""
    rows: int = 0
    lease: Lease | None = None


Head = TypeVar("Head")
encode = msgspec.msgpack.Encoder().encode


def pack(head: Any, columns: Iterable[Any] = ()) -> list[Any]:
    """The parts of a message. The head is padded so that columns after it are aligned."""
    data = encode(head)
    size = _LENGTH.size + len(data)
    return [_LENGTH.pack(len(data)) + data + bytes(-size % ALIGN), *columns]


def unpack(body: memoryview, kind: type[Head]) -> tuple[Head, int]:
    """The head of a message, and where its columns begin."""
    end = _LENGTH.size + int.from_bytes(body[: _LENGTH.size], "little")
    if end > len(body):
        raise DataError("a message that ends in its head")
    return decode(body[_LENGTH.size : end], kind), aligned(end)


def decode(data: Any, kind: type[Head]) -> Head:
    """A message without columns."""
    try:
        return msgspec.msgpack.decode(data, type=kind)
    except msgspec.DecodeError as e:
        raise DataError(f"a message that is none ({e}): the processes run different versions") from None
