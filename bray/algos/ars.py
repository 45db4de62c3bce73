"""ARS: augmented random search, V2-t (Mania et al. 2018): ES with a linear policy, plain steps and the best directions
alone.   M directions."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from bray.algos import es
from bray.config.declare import Positive, RateSchedule, Share
from bray.optim import Optimizer

DEFAULTS = {"env": {"num_envs": 32}, "model": {"fcnet_hiddens": [], "normalize_observations": True}}
"""A linear policy on normalised observations."""


@dataclass(frozen=True)
class Config:
    lr: RateSchedule = 0.03
    """Step size alpha; a number or a schedule over env steps."""
    sigma: Positive = 0.05
    """Standard deviation nu of the noise on every weight."""
    top: Share = 0.5
    """Share of the directions that count: those with the best return on either side."""

    l2 = 0.0


make_model, experience, Policy = es.make_model, es.experience, es.Policy


class Learner(es.Learner):
    """In the trainer: returns of a generation in, better weights out."""

    config: Config

    def build(self) -> dict[str, Optimizer]:
        self.optimizer = Optimizer(self.model.moved_parameters(), self.lr(0), kind="sgd")
        return {"optimizer": self.optimizer}

    def weights(self, plus: np.ndarray, minus: np.ndarray) -> np.ndarray:
        """(r+ - r-) / (b sigma_R) for the b best directions, sigma_R the standard deviation of their 2b returns; 0 for
        the others. `[M]`"""
        count = max(1, round(self.config.top * len(plus)))
        best = np.argsort(-np.maximum(plus, minus), kind="stable")[:count]
        scale = count * max(np.concatenate([plus[best], minus[best]]).std(), 1e-8)
        weights = np.zeros(len(plus))
        weights[best] = (plus[best] - minus[best]) / scale
        return weights
