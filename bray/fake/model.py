"""A model that knows nothing: outputs of any shape, after any time."""

from __future__ import annotations

import time
import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from bray import tree
from bray.errors import DataError

_ANSWERS = 251  # different answers


class FakeModel:
    """An Engine with chosen outputs and a chosen latency.

        FakeModel({"dist": ((4,), "float32"), "value": ((), "float32")}, latency_s=0.002)

    outputs       by name: (shape without batch dimension, dtype), or a dict of such
    latency_s     seconds per forward, plus `per_sample_s` for each row. It sleeps: other threads run meanwhile, and an
                  event loop is blocked as by a real forward
    seed          another seed, other answers
    fail_every    every Nth forward raises RuntimeError; 0: none does

    The answer to a sample depends on the seed, the weights and the sample alone, not on its batch: floats are normally
    distributed, integers from 0 to 9. Equal samples get equal answers; different ones may (there are 251 answers).
    """

    def __init__(
        self,
        outputs: Mapping[str, Any],
        latency_s: float = 0.0,
        per_sample_s: float = 0.0,
        seed: int = 0,
        fail_every: int = 0,
    ):
        self.outputs = outputs
        self.latency_s = latency_s
        self.per_sample_s = per_sample_s
        self.seed = seed
        self.fail_every = fail_every
        self.forwards = 0
        self._table = self._answers(0)

    def forward(self, *args: Any) -> dict[str, Any]:
        """Any batched trees -> the outputs, one row per sample."""
        self.forwards += 1
        leaves = [np.asarray(x) for x in tree.leaves(args)]
        rows = leaves[0].shape[0] if leaves and leaves[0].shape else 0
        if not rows or any(x.shape[:1] != (rows,) for x in leaves):
            raise DataError(f"expected arrays [B, ...] with the same B >= 1, got {[list(x.shape) for x in leaves]}")
        if wait := self.latency_s + self.per_sample_s * rows:
            time.sleep(wait)
        if self.fail_every and self.forwards % self.fail_every == 0:
            raise RuntimeError(f"FakeModel fails at forward {self.forwards}, as fail_every={self.fail_every} asks for")
        sums = np.zeros(rows, np.int64)
        for x in leaves:
            checksums = np.array(
                [zlib.crc32(row.data) for row in np.ascontiguousarray(x).reshape(rows, -1).view(np.uint8)]
            )
            sums = (sums * 31 + checksums) % _ANSWERS
        return tree.index(self._table, sums)

    def set_weights(self, weights: Mapping[str, np.ndarray]) -> None:
        """Other weights, other answers."""
        total = 0
        for name in sorted(weights):
            total = zlib.crc32(np.ascontiguousarray(weights[name]).tobytes(), zlib.crc32(name.encode(), total))
        self._table = self._answers(total)

    def _answers(self, weights: int) -> dict[str, Any]:
        rng = np.random.default_rng([self.seed, weights])

        def answer(kind: Any) -> Any:
            if isinstance(kind, Mapping):
                return {name: answer(part) for name, part in kind.items()}
            shape, dtype = (_ANSWERS, *kind[0]), np.dtype(kind[1])
            if dtype.kind == "f":
                return rng.standard_normal(shape).astype(dtype)
            return rng.integers(0, 2 if dtype.kind == "b" else 10, shape).astype(dtype)

        return {name: answer(kind) for name, kind in self.outputs.items()}
