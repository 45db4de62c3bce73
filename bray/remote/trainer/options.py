"""The options of a RemoteTrainer, and of its `train`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from bray.config.declare import Amount, Count, Positive, Whole
from bray.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class RankOptions:
    """What a RemoteTrainer can be told, in Python and in launch files."""

    use_gpu: bool | None = None
    """Train on GPUs; `null` = no."""
    num_workers: Count | None = None
    """Processes (ranks) that train together; `null` = 1."""
    cpus_per_worker: Amount | None = None
    """CPUs of each process; `null` = 1."""
    gpus_per_worker: Positive | None = None
    """GPUs of each process, with `use_gpu`; `null` = 1. Processes may share one: 0.5 is half of it."""


def gpus_of_rank(use_gpu: bool | None, gpus_per_worker: float | None) -> float:
    """GPUs that one process asks for."""
    if gpus_per_worker is not None and (not use_gpu or gpus_per_worker <= 0):
        raise ConfigError(f"gpus_per_worker={gpus_per_worker:g}: expected more than 0, together with use_gpu=True")
    return (1.0 if gpus_per_worker is None else float(gpus_per_worker)) if use_gpu else 0.0


@dataclass(frozen=True, kw_only=True)
class TrainOptions:
    """What `RemoteTrainer.train` can be told, in Python and in launch files."""

    buffer_weights: tuple[Amount, ...] | None = None
    """The share of each buffer in what is trained on; `null` = equal shares."""
    batch_size: Count = 1
    """Batches of a buffer that are put together to one."""
    batch_kind: Literal["concate", "stack"] | None = "concate"
    """How they are put together: along the batch axis, along a new axis, or (`null`) as a list."""
    prefetch_size: Whole = 1
    """Batches that are made ready in the background; 0 = none."""
    max_reuse: Whole = 0
    """How often a batch may be trained on again while no new one is there; it needs `prefetch_size`."""
    accumulate: Count = 1
    """Batches of one step, whose gradients are averaged."""
    learning_rate: Positive | None = None
    """Learning rate of the optimizer; `null` = 5e-4. (A Learner has its own.)"""
    clip_grad_max_norm: Positive | None = 1.0
    """Gradients of a larger norm are shortened to it; `null` = they are not. (A Learner has its own.)"""
    weights_publish_interval: Count = 1
    """Steps between publishing the weights to the model."""
    num_steps: Count | None = None
    """Steps to train in all, counted from the model's step when the training began: a run that is resumed makes those
    that are left, and none where it was done. `null` = until the run is stopped."""
    checkpoint_interval: Count | None = None
    """Steps between checkpoints of the trainer (its optimizer, its counters); `null` = as often as the model says by
    `checkpoint_every_s`."""
