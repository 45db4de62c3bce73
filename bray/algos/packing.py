"""Rollouts packed for the hot path: a minibatch takes all columns of single floats in one operation. It changes no
numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bray import tree
from bray.capture.over_ranks import by_itself

FLOATS = ("logp", "value", "advantage", "target", "weight")


def piece_size(rows: int, pieces: int) -> int:
    """Rows of each minibatch, where one pass is cut into `pieces`; some have one more where these do not divide the
    rows."""
    return max(1, rows // pieces)


def pack(batch: dict[str, Any], minibatches: int = 1, over_ranks: Callable[[Any], Any] = by_itself) -> dict[str, Any]:
    """FLOATS as one array `[5, ...]`, where the batch has them. Weights are scaled so that those of one of
    `minibatches` of `piece_size` sum to one (of several ranks: in the mean of them): a weighted mean is then a dot
    product."""
    if not batch.keys() >= set(FLOATS):
        return batch
    rows = batch["weight"].shape[-1]
    scale = rows / piece_size(rows, minibatches) / max(1.0, over_ranks(float(batch["weight"].sum())))
    stack: Any = torch.stack if isinstance(batch["weight"], Tensor) else np.stack
    floats = stack([batch[k] for k in FLOATS[:-1]] + [batch["weight"] * np.float32(scale)])
    return {k: v for k, v in batch.items() if k not in FLOATS} | {"floats": floats}


def take(batch: dict[str, Any], index: Tensor) -> dict[str, Any]:
    """A minibatch of a packed batch: rows, or whole sequences (whose axis is the second, but for their states)."""
    axis = 1 if "first" in batch else 0
    axes = {"floats": axis + 1, "state": 0}
    return {k: tree.map(lambda x, k=k: x.index_select(axes.get(k, axis), index), v) for k, v in batch.items()}


def unpack(batch: dict[str, Any], size: int | None = None) -> dict[str, Any]:
    """A packed batch by the names of its columns: FLOATS, `action` and `mask` are rows `[N, ...]`, what the Model reads
    stays as it is. `size`: the `piece_size` for which the weights were scaled; those of a minibatch with one more sum
    to one as well."""
    if "floats" not in batch:
        return batch
    columns = dict(batch)
    floats, taken = columns.pop("floats"), batch["floats"].shape[-1]
    if "first" in batch:
        columns |= {k: columns[k].flatten(0, 1) for k in ("action", "mask") if k in columns}
        floats = floats.flatten(1)
    columns |= zip(FLOATS, floats.unbind(0), strict=True)
    if size is not None and taken > size:
        columns["weight"] = columns["weight"] * (size / taken)
    return columns
