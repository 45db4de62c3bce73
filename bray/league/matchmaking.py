"""Whom to play: probabilities of opponents, by how often one wins against each of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from bray.errors import DataError, UnknownName

WEIGHTINGS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "squared": lambda w: (1.0 - w) ** 2,
    "variance": lambda w: w * (1.0 - w),
    "linear": lambda w: 1.0 - w,
    "uniform": np.ones_like,
}
"""Squared and linear prefer those one loses to, variance those of one's own strength."""


def pfsp(win_rates: Sequence[float] | np.ndarray, weighting: str = "squared") -> np.ndarray:
    """Prioritized fictitious self-play (Vinyals et al. 2019): a probability for each opponent. All are equally likely
    where the weighting leaves nobody: who wins every game has nobody to prefer."""
    if weighting not in WEIGHTINGS:
        raise UnknownName("weighting", str(weighting), WEIGHTINGS, "of opponents")
    w = np.asarray(win_rates, np.float64)
    if w.ndim != 1 or not len(w) or not ((w >= 0.0) & (w <= 1.0)).all():
        raise DataError(f"expected win rates from 0 to 1, at least one of them, got {win_rates!r}")
    weights = WEIGHTINGS[weighting](w)
    total = weights.sum()
    return weights / total if total > 1e-8 else np.full(len(w), 1.0 / len(w))
