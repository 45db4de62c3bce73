"""Rainbow: C51 with six improvements of DQN at once (Hessel et al. 2018): double, prioritized, dueling, n-step,
distributional, noisy."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from bray.algos import c51
from bray.config.declare import Amount, Count, ShareSchedule

make_model, experience, Policy, Learner = c51.make_model, c51.experience, c51.Policy, c51.Learner
"""All of it is C51's; only the defaults differ."""


def _beta() -> dict[str, Any]:
    return {"kind": "linear", "start": 0.4, "end": 1.0, "steps": 100_000}


@dataclass(frozen=True)
class Config(c51.Config):
    n_step: Count = 3
    """Rewards summed before bootstrapping."""
    dueling: bool = True
    """Q = V + A - mean(A)."""
    noisy: bool = True
    """Explore by learned noise on the weights of the last layers, instead of by epsilon."""
    prioritized: bool = True
    """Draw samples with probability ~ error**priority_alpha instead of uniformly."""
    priority_alpha: Amount = 0.5
    """How strongly priorities count; 0 = uniform."""
    priority_beta: ShareSchedule = field(default_factory=_beta)
    """Correction of that bias by importance weights, 1 = full; a number or a schedule over env steps."""
    epsilon: ShareSchedule = 0.0
    """Probability of a random action beside the noise."""
