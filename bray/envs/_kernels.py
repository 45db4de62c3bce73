"""Compiled loops of the environments; apart, so that Numba is imported only where one is used."""

from __future__ import annotations

from bray.compiled import compiled


@compiled
def first_outside(x, low, high):
    """The first position of the flat batch `x` whose value is not within [low, high] (NaN is not), or -1."""
    n = low.size
    for start in range(0, x.size, n):
        for j in range(n):
            if not (low[j] <= x[start + j] <= high[j]):
                return start + j
    return -1
