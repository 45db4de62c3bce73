"""APPO: PPO on rollouts of older weights (Schulman et al. 2017), with the advantages and value targets of V-trace (Espeholt et al. 2018).

The clip holds the policy near the one that acted, however old it is. All else is PPO's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from bray import distributions
from bray.act import Clock
from bray.algos import impala, ppo, rows
from bray.algos.base import Update, to_torch
from bray.config.declare import Count, Positive, RateSchedule, Share
from bray.data.piece import Piece
from bray.data.rollouts import Rollouts
from bray.errors import ConfigError
from bray.nn.catalog import ModelConfig
from bray.rl import returns
from bray.spec import EnvSpec

DEFAULTS = ppo.DEFAULTS
METRICS = ppo.METRICS
make_model, Policy = ppo.make_model, impala.Policy


@dataclass(frozen=True)
class Config(ppo.Config):
    rollout_length: Count = 64
    """Steps T of a rollout."""
    batch_envs: Count | None = None
    """Environments whose rollouts make a batch, at least; null = those of one worker."""
    epochs: Count = 2
    """Passes over a batch. Workers play on meanwhile: more passes make what they play older."""
    minibatches: Count = 4
    """Pieces into which each pass is cut; one gradient step per piece."""
    lr: RateSchedule = 1e-3
    """Learning rate of Adam; a number or a schedule over env steps."""
    lambda_: Share = 0.95
    """Decay of V-trace's correction beside gamma: 0 trusts the value function, 1 the observed return."""
    rho_clip: Positive = 1.0
    """The ratio of the newest policy to the one that acted counts up to this in value targets."""
    c_clip: Positive = 1.0
    """The same for what later steps say about earlier ones."""


def experience(config: Config, spec: EnvSpec, model: ModelConfig) -> Rollouts:
    return rows.rollouts(config, model, asynchronous=True, least=config.batch_envs or 1)


class Learner(ppo.Learner):
    """In the trainer: rollouts in, better weights out."""

    config: Config

    def build(self) -> dict[str, Any]:
        if self.config.recompute_advantages:
            raise ConfigError(
                "recompute_advantages: APPO computes them once per update, with its newest weights; leave it out"
            )
        return super().build()

    def prepare(self, data: Piece) -> Piece:
        """As it is: advantages are those of the newest weights."""
        return data

    def update(self, batch: Piece, clock: Clock) -> Update:
        return super().update(batch if self.novelty else self.rows_to_learn(batch), clock)

    def advantage_rows(self, data: Piece) -> dict[str, Any]:
        c = self.config
        logp, value = self.evaluate(data)
        if c.normalize_value:
            value = self.returns.restore(value)
        ratio = np.exp(logp - data.extras["logp"])
        flags = data.terminated, data.truncated, data.valid
        clips = c.rho_clip, c.c_clip, None  # the surrogate has the ratio itself
        target, advantage = returns.vtrace(value, data.reward, *flags, ratio, c.gamma, c.lambda_, *clips)
        if c.normalize_advantage:
            advantage = returns.standardize(advantage, data.valid)
        return rows.learning_rows(data, self.layout, data.extras["logp"], value[:-1], advantage, target)

    @torch.no_grad()
    def evaluate(self, data: Piece) -> tuple[np.ndarray, np.ndarray]:
        """Log probabilities `[T, B]` of what was done and values `[T + 1, B]`, both of the newest weights."""
        columns = {"obs": data.obs, "action": data.action, **rows.masks(data, self.layout), **rows.memory(data)}
        batch = to_torch(columns, self.device)
        dist, value = rows.evaluate(self.model, batch)
        logp, _ = distributions.log_prob_entropy(self.layout, dist[:-1], batch["action"], batch.get("mask"))
        return logp.cpu().numpy(), value.cpu().numpy()
