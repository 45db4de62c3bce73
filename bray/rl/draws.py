"""`bray.distributions.draw_rows`, compiled: a rollout draws for thousands of rows at once. The numbers are the same, bit for bit."""

from __future__ import annotations

import numpy as np

from bray.compiled import compiled
from bray.distributions import DISTRIBUTIONS, Drawn

_NO_MASK = np.empty((0, 0), np.bool_)
_MOST_LIKELY = np.empty(0)


def use_compiled_draws() -> None:
    """From now on choices of this process are drawn by compiled code. A service never needs it, nor the package numba."""
    DISTRIBUTIONS["categorical"].draw_rows = draw_rows


def draw_rows(logits: np.ndarray, u: np.ndarray | None, mask: np.ndarray | None) -> Drawn:
    legal = _NO_MASK if mask is None else np.ascontiguousarray(mask)
    return _draw_rows(np.ascontiguousarray(logits), _MOST_LIKELY if u is None else u, legal)


@compiled
def _draw_rows(logits, u, mask):  # pragma: no cover - compiled
    """One draw per row by inverting the cumulative distribution at u[b] (empty u: the most likely) and its log probability."""
    batch, n = logits.shape
    action = np.empty(batch, np.int64)
    logp = np.empty(batch, np.float32)
    for b in range(batch):
        top = -np.inf
        best = 0
        for i in range(n):
            if (mask.size == 0 or mask[b, i]) and logits[b, i] > top:
                top = logits[b, i]
                best = i
        total = 0.0
        for i in range(n):
            if mask.size == 0 or mask[b, i]:
                total += np.exp(logits[b, i] - top)
        if u.size:
            left = u[b] * total
            for i in range(n):
                if mask.size == 0 or mask[b, i]:
                    left -= np.exp(logits[b, i] - top)
                    best = i  # rounding may leave a crumb: the last legal choice takes it
                    if left < 0.0:
                        break
        action[b] = best
        logp[b] = logits[b, best] - top - np.log(total) if total != 0.0 else 0.0  # nothing is legal: an episode's end
    return action, logp
