"""How SAC acts: tanh of a Gaussian."""

from __future__ import annotations

import numpy as np

from bray.act.rules import RULES, Arrays, Mask, Rng, Rule
from bray.spec import ActionLayout


class Squashed(Rule):
    """tanh of a Gaussian (SAC); uniformly random actions before learning starts."""

    name, reads = "squashed", ("dist",)

    def __init__(self, learning_starts: int = 0):
        self.learning_starts = learning_starts

    def choose(self, layout: ActionLayout, outputs: Arrays, mask: Mask, rng: Rng, env_steps: int) -> Arrays:
        if rng is not None and env_steps < self.learning_starts:
            return {"action": rng.uniform(-1.0, 1.0, (len(outputs["dist"]), layout.size)).astype(np.float32)}
        return {"action": squashed(outputs["dist"], rng)}


RULES[Squashed.name] = Squashed


def squashed(dist: np.ndarray, rng: Rng) -> np.ndarray:
    """tanh of a Gaussian (SAC): actions `[B, D]` in [-1, 1]; the mean's when greedy."""
    mean, log_std = np.split(dist, 2, -1)
    if rng is None:
        return np.tanh(mean)
    return np.tanh(mean + np.exp(log_std) * rng.standard_normal(mean.shape, np.float32))
