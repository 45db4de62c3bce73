"""What a RemoteBuffer is made with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

from annotated_types import Interval

from bray.config.declare import Count
from bray.errors import ConfigError

_OF_REPLAY = ("store", "alpha", "beta", "eps", "max_reuse", "pushed_per_sampled")
_GONE = (
    "it is gone, a buffer is a queue: each sample is taken once, oldest first. An algorithm keeps its own replay: "
    "`settings: {replay_size: ..., prioritized: true}` of its section. A bray.Trainer keeps a bray.ReplayBuffer or a "
    "bray.PrioritizedBuffer and draws from it in `handle` (docs/remote.md)"
)


@dataclass(frozen=True, kw_only=True)
class BufferOptions:
    """What a RemoteBuffer can be told, in Python and in launch files."""

    GONE: ClassVar[dict[str, str]] = dict.fromkeys(_OF_REPLAY, _GONE)
    """Keys of earlier versions: what to write instead."""

    size: Count = 512
    """Batches that it holds (samples, where `batch_size` is null); a full one drops the oldest."""
    batch_size: Count | None = None
    """Samples in a batch; `null` = samples come out as they were pushed."""
    num_workers: Count = 2
    """Processes that hold it."""
    density: Annotated[int, Interval(ge=1, le=100)] = 100
    """Per cent of its processes that a producer connects to, at least one; less saves connections and memory."""


def without_store(values: dict[str, Any]) -> dict[str, Any]:
    """`store: queue`, which earlier versions asked for, is what every buffer is."""
    return {key: value for key, value in values.items() if (key, value) != ("store", "queue")}


@dataclass(frozen=True)
class BufferDefinition(BufferOptions):
    """How a buffer was made, known to all its handles."""

    name: str
    """Unique in the session."""

    def __post_init__(self) -> None:
        from bray.config.check import check_fields  # it imports pydantic

        if not self.name or "/" in self.name:
            raise ConfigError(f"the name of a buffer is not empty and has no '/': got {self.name!r}")
        check_fields(self, f"buffer {self.name!r}")

    @property
    def shards(self) -> int:
        """Number of shards: none without room for a batch."""
        return min(self.num_workers, self.size)

    @property
    def members(self) -> list[str]:
        """The shards, by their names in the cluster."""
        return [f"buffer/{self.name}/{i}" for i in range(self.shards)]

    def capacity(self, shard: int) -> int:
        """Samples that a shard holds; all shards together hold `size` batches."""
        batches = self.size // self.shards + (shard < self.size % self.shards)
        return batches * (self.batch_size or 1)
