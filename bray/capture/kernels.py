"""Compiled loops of `arrays.py`; apart, so that Numba is imported only where one is used."""

from __future__ import annotations

from functools import partial

import numpy as np

from bray.compiled import compiled

_sums = partial(compiled, fastmath={"reassoc", "contract"})  # in an order that vector registers like; nan and inf stay


@_sums
def product(x, w, bias):  # pragma: no cover - compiled
    """x `[B, K]` @ w `[K, N]`, column after column, + bias `[N]`."""
    rows, depth = x.shape
    columns = w.shape[1]
    out = np.empty((rows, columns), np.float32)
    for j in range(columns):
        for i in range(rows):
            total = np.float32(0.0)
            for k in range(depth):
                total += x[i, k] * w[k, j]
            out[i, j] = total + bias[j]
    return out


@_sums
def layer_norm(x, weight, bias, eps):  # pragma: no cover - compiled
    """Rows of x `[B, N]` with mean 0 and variance 1, times weight, plus bias."""
    rows, n = x.shape
    out = np.empty((rows, n), np.float32)
    for i in range(rows):
        mean = np.float32(0.0)
        for k in range(n):
            mean += x[i, k]
        mean /= np.float32(n)
        var = np.float32(0.0)
        for k in range(n):
            var += (x[i, k] - mean) ** 2
        scale = np.float32(1.0 / np.sqrt(var / n + eps))
        for k in range(n):
            out[i, k] = (x[i, k] - mean) * scale * weight[k] + bias[k]
    return out
