"""Whether a policy gets what it is asked for (DT): the score of its cases."""

from __future__ import annotations

import numpy as np

from bray.experiment import Experiment

TARGETS = (20.0, 50.0, 100.0, 200.0, 400.0)
EPISODES = 16


def rank_correlation(exp: Experiment) -> float:
    """Spearman's, between five returns on CartPole that are asked for and the mean returns of 16 episodes each."""
    got = []
    for target in TARGETS:
        exp.ask_for(target)
        got.append(float(np.mean([return_ for return_, _ in exp.play(EPISODES)])))
    exp.served.policy.target_return = None
    return float(np.corrcoef(_ranks(got), _ranks(TARGETS))[0, 1]) if len(set(got)) > 1 else 0.0


def _ranks(x: object) -> np.ndarray:
    """Equal ones have the mean of their ranks."""
    x = np.asarray(x, float)
    ranks: np.ndarray = (x[:, None] > x).sum(1) + 0.5 * ((x[:, None] == x).sum(1) - 1)
    return ranks
