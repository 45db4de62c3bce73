"""Batches for a rank: drawn from several buffers by weight, put together, prepared in a thread while the rank
trains."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any

import numpy as np

from bray import tree
from bray.act import Clock
from bray.data.experience import Batch, Counts, EndOfData, Experience
from bray.data.piece import Piece
from bray.data.rows import Decoder
from bray.errors import ConfigError, DataError
from bray.remote.buffer.iterators import Prefetcher, SampleBuffer, make_batch
from bray.train.source import Source


class Feed:
    """Batches, one by one; `get` does not wait for longer than it is told to.

    buffers        by name: iterables of trees. They are mixed by `weights` (None: equal shares) as by a SampleBuffer:
                   the shares hold batch by batch, and a buffer whose turn it is is waited for
    batch_size     trees of one buffer that are put together to a batch; `batch_kind` says how, as in a BatchBuffer
    prepare        turns a batch into what the rank trains on; runs in the feed's thread
    prefetch_size  batches that are ready beforehand; 0: a batch is made when it is asked for
    max_reuse      how often a batch is given again while the next one is not ready; needs a prefetch_size
    turn           the rank: ranks begin at different buffers
    """

    def __init__(
        self,
        buffers: Mapping[str, Iterable[Any]],
        weights: Sequence[float] | None = None,
        batch_size: int = 1,
        batch_kind: str | None = "concate",
        prepare: Callable[[Any], Any] | None = None,
        prefetch_size: int = 1,
        max_reuse: int = 0,
        turn: int = 0,
    ):
        shares = [1.0] * len(buffers) if weights is None else [float(w) for w in weights]
        if not buffers or len(shares) != len(buffers):
            raise ConfigError(
                f"buffer_weights: expected {len(buffers)} numbers >= 0, one for each of {', '.join(buffers)}, got "
                f"{weights}"
            )
        first = turn % len(buffers)
        batches = [_batches(name, buffer, batch_size, batch_kind, prepare) for name, buffer in buffers.items()]
        mixed = SampleBuffer(batches[first:] + batches[:first], shares[first:] + shares[:first])
        self.names = ", ".join(buffers)
        self._ahead = Prefetcher(mixed, prefetch_size, max_reuse if prefetch_size else 0)

    @property
    def reused(self) -> int:
        """Batches given again so far."""
        return self._ahead.reused

    def get(self, timeout: float) -> Batch | None:
        """The next batch; None when there is none in time. Errors of the thread are raised here; EndOfData is one of
        them."""
        before = self.reused
        self._ahead.start("bray-feed")
        try:
            batch = self._ahead.get(timeout)
        except StopIteration:
            raise EndOfData(f"{self.names}: no more data") from None
        return batch if self.reused == before else replace(batch, rows=0)  # its environment steps are counted already

    def close(self) -> None:
        self._ahead.close()


def _batches(
    name: str, buffer: Iterable[Any], size: int, kind: str | None, prepare: Callable[[Any], Any] | None
) -> Iterator[Batch]:
    """Those of one buffer. The last one may be smaller."""
    items = iter(buffer)
    while have := list(islice(items, size)):
        data: Any = have
        if kind is not None and (kind, size) != ("concate", 1):  # else there is nothing to join, nothing to copy
            try:
                data = make_batch(have, kind)
            except ValueError as e:
                raise DataError(
                    f"samples of buffer {name!r} cannot be put together with batch_kind={kind!r}: {e}. Samples of "
                    "different shapes come as a list with batch_kind=None."
                ) from None
        elif kind is not None:
            (data,) = have
        yield Batch(data if prepare is None else prepare(data), sum(map(count_rows, have)), origin=name)


def count_rows(batch: Any) -> int:
    """Samples in a batch: those with a weight, or the length of its first axis."""
    if isinstance(batch, dict) and "weight" in batch:
        return int((batch["weight"] > 0).sum())
    first = next(iter(tree.leaves(batch)), None)
    return len(first) if isinstance(first, np.ndarray) and first.ndim else 1


class BufferSource(Source):
    """Pieces that agents pushed into buffers."""

    def __init__(self, feed: Feed):
        self.feed = feed
        self._decoders: dict[str, Decoder] = {}

    def gather(self, timeout: float = 0.0) -> tuple[list[Piece], Counts]:
        batch = self.feed.get(timeout)
        if batch is None:
            return [], Counts()
        decoder = self._decoders.setdefault(batch.origin, Decoder())
        return decoder.decode(batch.data)

    def wait_reason(self) -> str:
        return f"nothing comes from {self.feed.names}: is anything pushed there?"

    def get_state(self, midway: bool = False) -> dict[str, Any]:
        """What the games' processes had counted: those that go on are not counted twice."""
        counted = [[buffer, *pair] for buffer, decoder in self._decoders.items() for pair in decoder.steps.items()]
        return {"arrays": {}, "json": {"counted": counted}}

    def set_state(self, state: dict[str, Any], clock: Clock) -> bool:
        for buffer, origin, steps in state["json"]["counted"]:
            self._decoders.setdefault(buffer, Decoder()).steps[int(origin)] = int(steps)
        return False

    def close(self) -> None:
        self.feed.close()


class BufferBatches(Experience):
    """Opaque samples of buffers, for a `bray.Trainer`: `accumulate` batches a step."""

    def __init__(self, feed: Feed, accumulate: int = 1):
        self.feed, self._accumulate = feed, accumulate
        self._have: list[Batch] = []

    def next(self, clock: Any, timeout: float = 0.0) -> Batch | None:
        while len(self._have) < self._accumulate:
            batch = self.feed.get(timeout)
            if batch is None:
                return None
            self._have.append(batch)
        have, self._have = self._have, []
        return Batch([b.data for b in have], sum(b.rows for b in have))

    def wait_reason(self) -> str:
        return f"nothing comes from {self.feed.names}: is anything pushed there?"


class PreparedRows:
    """For a `bray.Trainer` whose agents play with an algorithm: what they push, as batches of rows that the algorithm's
    Learner would get."""

    def __init__(self, buffer: Any, experience: Experience, prepare: Callable[[Any], Any]):
        self.name, self._buffer, self._experience, self._prepare = buffer.name, buffer, experience, prepare
        self._decoder, self._steps = Decoder(), 0

    def __iter__(self) -> Iterator[Any]:
        for samples in self._buffer:
            pieces, counts = self._decoder.decode(samples)
            self._steps += counts.env_steps
            for piece in pieces:
                self._experience.add(piece)
            while (batch := self._experience.next(Clock(self._steps))) is not None:
                yield self._prepare(batch.data)
