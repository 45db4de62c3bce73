"""What a buffer is made with."""

from __future__ import annotations

import math
from dataclasses import dataclass

from bray.data.limit import RateLimit
from bray.errors import ConfigError, UnknownName
from bray.remote.buffer.options import BufferOptions

STORES = ("queue", "uniform", "prioritized")


@dataclass(frozen=True)
class BufferSettings(BufferOptions):
    """How a buffer was made, known to all its handles."""

    name: str
    """Unique in the session."""

    def __post_init__(self) -> None:
        if self.store not in STORES:
            raise UnknownName("store", str(self.store), STORES, f"buffer {self.name!r}")
        if not self.name or "/" in self.name:
            raise ConfigError(f"the name of a buffer is not empty and has no '/': got {self.name!r}")
        for key, value in (("size", self.size), ("batch_size", self.batch_size), ("num_workers", self.num_workers)):
            if value is not None and (not isinstance(value, int) or value < 1):
                raise ConfigError(f"buffer {self.name!r}: {key} is a whole number of at least 1, got {value!r}")
        if not 1 <= self.density <= 100:
            raise ConfigError(
                f"buffer {self.name!r}: density is the percentage of its workers that a producer connects to, "
                f"1 to 100; got {self.density!r}"
            )
        sampled = self.store != "queue"
        if sampled and self.batch_size is None:
            raise ConfigError(f"buffer {self.name!r}: store={self.store!r} draws batches: give batch_size")
        if not sampled and (self.max_reuse is not None or self.pushed_per_sampled is not None):
            raise ConfigError(
                f"buffer {self.name!r}: a queue gives each sample once; max_reuse and pushed_per_sampled are for "
                "store='uniform' and 'prioritized' (PrefetchBuffer has a max_reuse for the batches of a queue)"
            )
        for name, number, low, high in (
            ("alpha", self.alpha, 0.0, math.inf),
            ("beta", self.beta, 0.0, 1.0),
            ("eps", self.eps, 0.0, math.inf),
            ("max_reuse", 1 if self.max_reuse is None else self.max_reuse, 1, math.inf),
        ):
            if not low <= number <= high:
                raise ConfigError(f"buffer {self.name!r}: {name} is between {low} and {high}, got {number}")
        self.make_limit()  # checks it

    def make_limit(self) -> RateLimit | None:
        """Of rows that come in per row drawn."""
        if self.pushed_per_sampled is None:
            return None
        least, most = self.pushed_per_sampled
        return RateLimit(float(least), float(most))

    @property
    def shards(self) -> int:
        """Number of shards: none without room for a batch."""
        return min(self.num_workers, self.size)

    def capacity(self, shard: int) -> int:
        """Samples that a shard holds; all shards together hold `size` batches."""
        batches = self.size // self.shards + (shard < self.size % self.shards)
        return batches * (self.batch_size or 1)
