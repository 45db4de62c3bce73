"""PG: REINFORCE on whole episodes with the reward to come (Williams 1992), one gradient step per batch of episodes.   N
rows."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
from torch import nn

from bray.algos import a2c, ppo, rows
from bray.config.declare import AmountSchedule, Count, Positive, RateSchedule, Share
from bray.data.episodes import Episodes
from bray.data.piece import Piece
from bray.errors import ConfigError
from bray.nn import catalog
from bray.nn.catalog import ModelConfig
from bray.spec import EnvSpec

DEFAULTS = {"env": {"num_envs": 8}}
"""Episodes of several environments end at different times, so batches come evenly."""


@dataclass(frozen=True)
class Config:
    batch_size: Count = 1000
    """An update learns from whole episodes of at least this many steps together."""
    lr: RateSchedule = 3e-3
    """Learning rate; a number or a schedule over env steps."""
    optimizer: Literal["adam", "rmsprop", "sgd"] = "adam"
    """How gradients become steps."""
    gamma: Share = 0.99
    """Discount per step."""
    baseline: bool = True
    """Take a learned value off the returns; where an episode is truncated, the value of its last observation counts as
    its future. false = plain REINFORCE: the rewards that came, and no more."""
    normalize_advantage: bool = True
    """Standardise the returns of each batch (without a baseline their mean is one)."""
    entropy_coef: AmountSchedule = 0.0
    """Weight of the entropy bonus; a number or a schedule over env steps."""
    max_grad_norm: Positive | None = 0.5
    """Gradients are scaled down to this norm; null = off."""

    lambda_ = 1.0  # the rewards to come, all of them

    @property
    def value_coef(self) -> float:
        return 0.5 if self.baseline else 0.0


Policy = ppo.Policy
"""The same acting as PPO's."""


def make_model(config: Config, spec: EnvSpec, model: ModelConfig) -> nn.Module:
    if model.use_lstm:
        raise ConfigError("PG without memory is what is here: set use_lstm=false, or use PPO or A2C, which have it")
    return catalog.make_model("actor_critic", spec, model, memory=False)


def experience(config: Config, spec: EnvSpec, model: ModelConfig) -> Episodes:
    return Episodes(config.batch_size)


class Learner(a2c.Learner):
    """In the trainer: episodes in, better weights out. With lambda 1 GAE's advantage is the discounted reward to come
    less the value."""

    config: Config  # type: ignore[assignment]

    def prepare(self, data: Piece) -> dict[str, Any]:
        c = self.config
        if not c.baseline:
            data = replace(data, outputs={"value": np.zeros_like(data.outputs["value"])})
        standardize = c.normalize_advantage
        return rows.advantage_rows(data, self.layout, c.gamma, c.lambda_, standardize, self.over_ranks)
