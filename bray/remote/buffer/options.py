"""The options of a RemoteBuffer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from annotated_types import Interval

from bray.config.declare import Amount, Count, Positive, Share


@dataclass(frozen=True, kw_only=True)
class BufferOptions:
    """What a RemoteBuffer can be told, in Python and in launch files."""

    size: Count = 512
    """Batches that it holds (samples, where `batch_size` is null); a full one drops the oldest."""
    batch_size: Count | None = None
    """Samples in a batch; `null` = samples come out as they were pushed."""
    num_workers: Count = 2
    """Processes that hold it."""
    density: Annotated[int, Interval(ge=1, le=100)] = 100
    """Per cent of its processes that a producer connects to, at least one; less saves connections and memory."""
    store: Literal["queue", "uniform", "prioritized"] = "queue"
    """`queue`: each sample is taken once, in order; `uniform` and `prioritized`: replay, drawn again and again."""
    alpha: Amount = 0.6
    """Of `prioritized`: a priority counts as `(|p| + eps) ** alpha`."""
    beta: Share = 0.4
    """Of `prioritized`: exponent of the importance weights."""
    eps: Amount = 1e-5
    """Of `prioritized`: what is added to every priority."""
    max_reuse: Count | None = None
    """Of replay: a sample that was drawn so often is drawn no more; `null` = no limit."""
    pushed_per_sampled: tuple[Amount, Positive] | None = None
    """Of replay: the least and the most rows that come in per row drawn; drawing or pushing waits. `null` = no
    limit."""
