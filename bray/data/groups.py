"""Choosing groups of rows: whole episodes, or whatever shares a key."""

from __future__ import annotations

import numpy as np

from bray.errors import ConfigError, DataError


def choose(
    keys: np.ndarray, batch_size: int, length: int | None, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """`batch_size` different values of `keys` `[N]`, all equally likely, and the positions that have each, in order: `[T, B]`
    positions and valid. With `length`, T is that, and a longer group gives a run from a random start. Where a group
    has fewer than T, valid is False and the position is that of its last row."""
    if length is not None and length < 1:
        raise ConfigError(f"groups have length >= 1, got {length}")
    order = np.argsort(keys, kind="stable")  # group after group, each in order
    _, first, count = np.unique(keys[order], return_index=True, return_counts=True)
    if not 1 <= batch_size <= len(count):
        raise DataError(f"different groups are drawn: the rows that can be sampled have {len(count)}, got {batch_size}")
    chosen = rng.choice(len(count), batch_size, replace=False)
    first, count = first[chosen], count[chosen]
    total = length or int(count.max())
    at = rng.integers(0, np.maximum(count - total, 0) + 1) + np.arange(total)[:, None]
    return order[first + np.minimum(at, count - 1)], at < count
