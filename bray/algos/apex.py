"""Ape-X DQN: many actors, one learner, one prioritized replay (Horgan et al. 2018)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from bray.algos import dqn
from bray.config.declare import Amount, Count, ShareSchedule

make_model, experience, Policy, Learner = dqn.make_model, dqn.experience, dqn.Policy, dqn.Learner
"""All of it is DQN's; only the defaults differ. The actors are rollout workers (`num_workers`)."""
PLAYS_ON = True
"""Actors play while the learner learns: `--num-workers auto` may start some."""
DEFAULTS = {"env": {"num_envs": 8}}
"""Exploration is spread over environments, so there are several in each process."""


@dataclass(frozen=True)
class Config(dqn.Config):
    n_step: Count = 3
    """Rewards summed before bootstrapping."""
    dueling: bool = True
    """Q = V + A - mean(A)."""
    prioritized: bool = True
    """Draw samples with probability ~ |TD error|**priority_alpha instead of uniformly."""
    initial_priority: Literal["max", "td_error"] = "td_error"
    """Priority of a new transition: the largest so far; or its own |TD error|, by the values that it was played with,
    in pieces of 16 rows."""
    epsilon: ShareSchedule = 0.4
    """Probability of a random action in the first environment, which explores most; a number or a schedule over env
    steps."""
    epsilon_spread: Amount = 7.0
    """Environment i of N, those of all workers, explores with epsilon ** (1 + epsilon_spread * i / (N - 1)). A single
    one, and live games, which have no number, have the exponent of the middle."""
