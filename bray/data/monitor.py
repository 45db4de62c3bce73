"""Numbers about what a replay draws: how used, how stale and how important the rows are."""

from __future__ import annotations

import numpy as np

EVERY = 16
"""Every 16th batch is measured: the means hardly differ from those over all batches, and the cost is negligible."""


class Monitor:
    """Mean and maximum of use, staleness and priority over the rows of the batches looked at since the last `row`."""

    def __init__(self) -> None:
        self._batches = self._rows = 0
        self._sums: dict[str, float] = {}
        self._largest: dict[str, float] = {}

    def wants(self) -> bool:
        """Whether to measure the batch drawn now; the first one after `row` is always measured."""
        self._batches += 1
        return self._batches % EVERY == 1

    def see(self, use: np.ndarray, staleness: np.ndarray, priority: np.ndarray | None) -> None:
        """A batch: how often each of its rows was drawn (this draw included), by how many versions of the weights it is
        older than the newest ones, and its priority."""
        for name, values in (("use", use), ("staleness", staleness), ("priority", priority)):
            if values is not None:
                self._sums[name] = self._sums.get(name, 0.0) + float(values.sum())
                self._largest[name] = max(self._largest.get(name, 0.0), float(values.max()))
        self._rows += len(use)

    def row(self) -> dict[str, float]:
        """`use_mean`, `use_max`, ...; empty when there was no batch. Starts anew."""
        out = {}
        for name, total in self._sums.items():
            out[f"{name}_mean"] = total / self._rows
            out[f"{name}_max"] = self._largest[name]
        self._batches = self._rows = 0
        self._sums.clear()
        self._largest.clear()
        return out
