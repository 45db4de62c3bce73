"""`bray.distributions.draw_rows`, compiled: a rollout draws for thousands of rows at once. Draws are the same, bit for
bit."""

from __future__ import annotations

import numpy as np

from bray.compiled import compiled
from bray.distributions import DISTRIBUTIONS, Drawn

_NO_MASK = np.empty((0, 0), np.bool_)
_MOST_LIKELY = np.empty(0)


def use_compiled_draws() -> None:
    """From now on choices of this process are drawn by compiled code. A service never needs it, nor the package
    numba."""
    DISTRIBUTIONS["categorical"].draw_rows = draw_rows


def draw_rows(logits: np.ndarray, u: np.ndarray | None, mask: np.ndarray | None) -> Drawn:
    legal = _NO_MASK if mask is None else np.ascontiguousarray(mask)
    return _draw_rows(np.ascontiguousarray(logits), _MOST_LIKELY if u is None else u, legal)


@compiled
def _draw_rows(logits: np.ndarray, u: np.ndarray, mask: np.ndarray) -> Drawn:  # pragma: no cover - compiled
    """One draw per row by inverting the cumulative distribution at u[b] (empty u: the most likely) and its log
    probability."""
    batch, n = logits.shape
    action = np.empty(batch, np.int64)
    logp = np.empty(batch, np.float32)
    weights = np.empty(n)
    for b in range(batch):
        top = -np.inf
        best = last = -1
        for i in range(n):
            if mask.size == 0 or mask[b, i]:
                last = i
                if best < 0 or logits[b, i] > top:
                    top = logits[b, i]
                    best = i
        total = 0.0
        for i in range(n):
            weights[i] = 0.0
            if mask.size == 0 or mask[b, i]:
                below = logits[b, i] - top
                weights[i] = 1.0 if below == 0.0 else np.exp(below)
                total += weights[i]
        if u.size:
            left = u[b] * total
            best = 0
            for i in range(n):  # to the end: a processor cannot guess where a draw stops
                left -= weights[i]
                best += 0 if left < 0.0 else 1
            best = min(best, last)  # rounding may leave a crumb: the last legal choice takes it
        best = max(best, 0)
        action[b] = best
        logp[b] = logits[b, best] - top - np.log(total) if total != 0.0 else 0.0  # nothing is legal: an episode's end
    return action, logp
