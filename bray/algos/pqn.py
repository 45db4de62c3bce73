"""PQN: Q(lambda) on many environments, without replay and without a target network (Gallici et al. 2024).   T steps, B
environments, N = T * B rows."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from bray import tree
from bray.act import Clock
from bray.algos import dqn, rows
from bray.algos.base import Update, drawn
from bray.config.declare import Amount, Count, Positive, RateSchedule, Share, ShareSchedule
from bray.data.piece import Piece
from bray.data.rollouts import Rollouts
from bray.errors import ConfigError
from bray.nn import catalog
from bray.nn.catalog import ModelConfig
from bray.nn.normalize import update_normalizers
from bray.optim import Optimizer
from bray.rl import losses, returns
from bray.spec import EnvSpec

DEFAULTS = {
    "env": {"num_envs": 32},
    "model": {"layer_norm": True, "fcnet_activation": "relu", "fcnet_hiddens": [128, 128]},
}
"""Many environments stand in for the replay, layer norm for the target network."""


def _epsilon() -> dict[str, Any]:
    return {"kind": "linear", "start": 1.0, "end": 0.05, "steps": 50_000}


@dataclass(frozen=True)
class Config:
    rollout_length: Count = 32
    """Steps T that each environment takes between two updates."""
    epochs: Count = 4
    """Passes over a rollout."""
    minibatches: Count = 4
    """Pieces into which each pass is cut; one gradient step per piece."""
    lr: RateSchedule = 5e-4
    """Learning rate of Adam; a number or a schedule over env steps."""
    gamma: Share = 0.99
    """Discount per step."""
    lambda_: Share = 0.65
    """Q(lambda): 0 trusts the action values, 1 the observed return."""
    epsilon: ShareSchedule = field(default_factory=_epsilon)
    """Probability of a random action; a number or a schedule over env steps."""
    epsilon_spread: Amount = 0.0
    """Environment i of N explores with epsilon ** (1 + epsilon_spread * i / (N - 1)); 0 = all alike."""
    max_grad_norm: Positive | None = 10.0
    """Gradients are scaled down to this norm; null = off."""


def make_model(config: Config, spec: EnvSpec, model: ModelConfig) -> nn.Module:
    if model.use_lstm:
        raise ConfigError("PQN without memory is what is here: set use_lstm=false, or use PPO")
    return catalog.make_model("q", spec, model)


def experience(config: Config, spec: EnvSpec, model: ModelConfig) -> Rollouts:
    return rows.rollouts(config, model)


class Policy(dqn.Policy):
    """As DQN acts; the action values stay with the rows, because the targets are made of them."""

    keeps = ("q",)


class Learner(rows.Learner):
    """In the trainer: rollouts in, better weights out."""

    config: Config

    def build(self) -> dict[str, Any]:
        c = self.config
        self.optimizer = Optimizer(self.model.parameters(), self.lr(0), max_grad_norm=c.max_grad_norm)
        return {"optimizer": self.optimizer}

    def prepare(self, data: Piece) -> dict[str, Any]:
        """Rows with Peng's Q(lambda) targets: V = max_a Q over the legal actions, as the acting weights saw it."""
        c, q, steps = self.config, data.outputs["q"], data.length
        mask = self.layout.legal(tree.map(lambda x: x.reshape(-1, *x.shape[2:]), data.obs))
        if mask is not None:
            q = np.where(mask.reshape(q.shape), q, -np.inf)
        flags = (data.terminated, data.truncated, data.valid)
        target = returns.lambda_returns(q.max(-1), data.reward, *flags, c.gamma, c.lambda_)
        columns = {
            "obs": tree.map(lambda x: x[:steps], data.seen),
            "action": data.action,
            "target": target,
            "weight": data.valid.astype(np.float32),
        }
        return tree.map(lambda x: x.reshape(-1, *x.shape[2:]), columns)

    def update(self, batch: dict[str, Any], clock: Clock) -> Update:
        update_normalizers(self.model, batch["obs"], batch["weight"])
        self.optimizer.set_lr(self.lr(clock.env_steps))
        one_pass = self.passes_over(batch)
        return Update.mean([step for _ in range(self.config.epochs) for step in one_pass()])

    def gradient_step(self, batch: dict[str, Any], *draws: Tensor) -> Update:
        weight = batch["weight"] / self.over_ranks(batch["weight"].sum()).clamp(min=1.0)
        q = losses.select(self.model(batch["obs"], *drawn(self.model, draws))["q"], batch["action"])
        error = q - batch["target"]
        loss = torch.dot(weight, 0.5 * error.square())
        numbers = {"loss": loss, "q": q, "td_error": error.abs(), "grad_norm": self.optimizer.step(loss)}
        return Update.of(numbers, weight)
