"""Few seeds in numbers: the interquartile mean and its bootstrap interval (Agarwal et al. 2021)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def iqm(values: Sequence[float] | np.ndarray) -> np.ndarray:
    """Mean of the middle half along the last axis. The two values that the quarters cut through count by the part that
    is inside."""
    x = np.sort(np.asarray(values, np.float64), -1)
    n = x.shape[-1]
    edges = np.arange(n + 1)
    inside = np.clip(edges[1:], n / 4, 3 * n / 4) - np.clip(edges[:-1], n / 4, 3 * n / 4)
    return x @ (inside / inside.sum())


def interval(values: Sequence[float], resamples: int = 2_000, share: float = 0.95) -> tuple[float, float]:
    """Percentile bootstrap interval of `iqm`: where it lies when the seeds are drawn again, with replacement."""
    x = np.asarray(values, np.float64)
    draws = np.random.default_rng(0).integers(0, len(x), (resamples, len(x)))
    low, high = np.quantile(iqm(x[draws]), [(1 - share) / 2, (1 + share) / 2])
    return float(low), float(high)


def summary(values: Sequence[float]) -> list[float]:
    """[interquartile mean, low, high]."""
    return [round(float(v), 1) for v in (iqm(values), *interval(values))]
