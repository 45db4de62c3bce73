"""APPO: PPO on rollouts of older weights (Schulman et al. 2017), with the advantages and value targets of V-trace
(Espeholt et al. 2018).

The clip holds the policy near the newest one, with which the update begins; the ratio of that one to the policy that
acted, which may be much older, weighs the advantages (the decoupled objective, Hilton et al. 2021). All else is PPO's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from bray import distributions, tree
from bray.act import Clock
from bray.algos import impala, ppo, rows
from bray.algos.base import Update, to_torch
from bray.capture.transfer import to_host
from bray.config.declare import Count, Positive, RateSchedule, Share
from bray.data.piece import Piece
from bray.data.rollouts import Rollouts
from bray.errors import ConfigError
from bray.nn.catalog import ModelConfig
from bray.rl import returns
from bray.spec import EnvSpec

DEFAULTS = ppo.DEFAULTS
make_model, Policy = ppo.make_model, impala.Policy


@dataclass(frozen=True)
class Config(ppo.Config):
    rollout_length: Count = 64
    """Steps T of a rollout."""
    batch_envs: Count | None = None
    """Environments whose rollouts make a batch; null = those of one worker."""
    epochs: Count = 2
    """Passes over a batch. Workers play on meanwhile: more passes make what they play older."""
    minibatches: Count = 4
    """Pieces into which each pass is cut; one gradient step per piece."""
    lr: RateSchedule = 1e-3
    """Learning rate of Adam; a number or a schedule over env steps."""
    lambda_: Share = 0.95
    """Decay of V-trace's correction beside gamma: 0 trusts the value function, 1 the observed return."""
    rho_clip: Positive = 1.0
    """The ratio of the newest policy to the one that acted counts up to this in value targets and as the weight of an
    advantage."""
    c_clip: Positive = 1.0
    """The same for what later steps say about earlier ones."""


def experience(config: Config, spec: EnvSpec, model: ModelConfig) -> Rollouts:
    return rows.rollouts(config, model, asynchronous=True, games=config.batch_envs)


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
        batch = self.on_device(data)
        logp, value = self.evaluate(batch)
        if c.normalize_value:
            value = self.returns.restore(value)
        ratio = np.exp(logp - data.extras["logp"])
        flags = data.terminated, data.truncated, data.valid
        clips = c.rho_clip, c.c_clip, None  # advantages are standardised before they are weighed
        target, advantage = returns.vtrace(value, data.reward, *flags, ratio, c.gamma, c.lambda_, *clips)
        if c.normalize_advantage:
            advantage = returns.standardize(advantage, data.valid, self.over_ranks)
        weighed = advantage * np.minimum(ratio, np.float32(c.rho_clip))
        learnt = rows.learning_rows(data, self.layout, logp, value[:-1], weighed, target)
        if data.state is None:  # they are on the device already
            learnt["obs"] = tree.map(lambda x: x[:-1].flatten(0, 1), batch["obs"])
        return learnt

    def on_device(self, data: Piece) -> dict[str, Any]:
        columns = {"obs": data.seen, "action": data.action, **rows.masks(data, self.layout), **rows.memory(data)}
        if data.state is not None:
            columns["state"] = data.state
        return to_torch(columns, self.device)

    @torch.no_grad()
    def evaluate(self, batch: dict[str, Any]) -> tuple[np.ndarray, np.ndarray]:
        """Log probabilities `[T, B]` of what was done and values `[T + 1, B]`, both of the newest weights."""
        dist, value = (
            rows.evaluate_sequences(self.model, batch) if "first" in batch else rows.evaluate(self.model, batch)
        )
        logp, _ = distributions.log_prob_entropy(self.layout, dist[:-1], batch["action"], batch.get("mask"))
        on_host = to_host([logp, value])
        return on_host[0], on_host[1]
