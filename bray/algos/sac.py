"""SAC: soft actor-critic with an adapted temperature (Haarnoja et al. 2018).   B batch, D action dimensions."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional as F

from bray import act
from bray.act import Clock
from bray.algos import base
from bray.algos.base import Update, drawn, to_torch
from bray.config.declare import Amount, Count, Excludes, Positive, RateSchedule, Share, ShareSchedule, Whole
from bray.data.experience import Replay
from bray.errors import ConfigError
from bray.nn import catalog
from bray.nn.catalog import ModelConfig
from bray.nn.normalize import update_normalizers
from bray.optim import Optimizer
from bray.rl import losses
from bray.spec import EnvSpec
from bray.target import Target


@dataclass(frozen=True)
class Config:
    lr: RateSchedule = 3e-4
    """Learning rate of the actor; a number or a schedule over env steps."""
    critic_lr: Positive = 1e-3
    """Learning rate of the critics."""
    alpha_lr: Positive = 1e-3
    """Learning rate of the temperature."""
    gamma: Share = 0.99
    """Discount per step."""
    n_step: Count = 1
    """Rewards summed before bootstrapping."""
    tau: Annotated[float, Field(gt=0, le=1)] = 0.005
    """The target critics move this fraction of the way after every gradient step."""
    initial_alpha: Positive = 0.2
    """Temperature at the start: how much one unit of entropy is worth."""
    target_entropy: float | None = None
    """Entropy that the temperature aims at; null = minus the number of action dimensions."""
    adapt_alpha: Annotated[bool, Excludes("target_entropy")] = True
    """Learn the temperature; false keeps `initial_alpha`."""
    prioritized: bool = False
    """Draw samples with probability ~ |TD error|**priority_alpha instead of uniformly."""
    priority_alpha: Amount = 0.6
    """How strongly priorities count; 0 = uniform."""
    priority_beta: ShareSchedule = 0.4
    """Correction of that bias by importance weights, 1 = full; a number or a schedule over env steps."""
    replay_size: Count = 1_000_000
    """Transitions kept."""
    max_use: Count | None = None
    """Draws after which a transition retires, looked at after each batch; null = no limit."""
    max_staleness: Count | None = None
    """Transitions collected this many gradient steps ago, or more, are not drawn; null = no limit."""
    batch_size: Count = 256
    """Transitions per gradient step."""
    learning_starts: Whole = 1_000
    """Env steps with uniformly random actions before the first gradient step."""
    train_every: Count = 1
    """Env steps between two visits to the learner."""
    updates: Count = 1
    """Gradient steps per visit."""
    max_grad_norm: Positive | None = None
    """Gradients are scaled down to this norm; null = off."""


METRICS = ("critic_loss", "actor_loss", "alpha", "entropy", "q", "grad_norm")


def make_model(config: Config, spec: EnvSpec, model: ModelConfig) -> nn.Module:
    return catalog.make_model("squashed_gaussian", spec, model)


def experience(config: Config, spec: EnvSpec, model: ModelConfig) -> Replay:
    return Replay.of(config, spec.frame_stack)


class Policy(act.Policy):
    """Beside the environment: tanh-squashed Gaussian actions; uniformly random ones before learning starts."""

    def __init__(self, config: Config, spec: EnvSpec):
        if not spec.layout.continuous:
            raise ConfigError(f"SAC needs a Box action space, {spec.id} has {spec.action.kind}")
        super().__init__(spec.layout, act.make_rule("squashed", {"learning_starts": config.learning_starts}))


class Learner(base.Learner):
    """In the trainer: replayed transitions in, better weights out. Critics and their targets never leave it."""

    config: Config

    def build(self) -> dict[str, Any]:
        c = self.config
        self.size = self.layout.size
        self.target_entropy = -float(self.size) if c.target_entropy is None else c.target_entropy
        self.critic = catalog.make_model("continuous_q", self.spec, self.model_config).to(self.device)
        self.optimizer = Optimizer(self.model.parameters(), self.lr(0), max_grad_norm=c.max_grad_norm)
        self.critic_optimizer = Optimizer(self.critic.parameters(), c.critic_lr, max_grad_norm=c.max_grad_norm)
        self.target = Target(self.critic, self.critic_optimizer, c.tau)
        self.log_alpha = nn.Parameter(torch.tensor([np.log(c.initial_alpha)], dtype=torch.float32, device=self.device))
        self.alpha_optimizer = Optimizer([self.log_alpha], c.alpha_lr)
        return {
            "critic": self.critic,
            "optimizer": self.optimizer,
            "critic_optimizer": self.critic_optimizer,
            "target": self.target,
            "log_alpha": self.log_alpha,
            "alpha_optimizer": self.alpha_optimizer,
        }

    def update(self, batch: dict[str, Any], clock: Clock) -> Update:
        for module in (self.model, self.critic, self.target.module):  # all three see the same scale
            update_normalizers(module, batch["obs"], batch["weight"])
        self.optimizer.set_lr(self.lr(clock.env_steps))
        columns = {k: batch[k] for k in ("obs", "action", "reward", "discount", "next_obs", "weight")}
        columns["noise"] = self.rng.standard_normal((2, len(batch["reward"]), self.size), np.float32)
        values, td_error = self._step(to_torch(columns, self.device), *self.draw(2))
        self.steps += 1
        return Update(METRICS, values, td_error.cpu().numpy() if self.config.prioritized else None)

    def gradient_step(self, batch: dict[str, Any], *draws: Tensor) -> tuple[Tensor, Tensor]:
        """METRICS, and the size of the TD errors."""
        obs, next_obs, (noise, next_noise) = batch["obs"], batch["next_obs"], batch["noise"].unbind(0)
        now, then = (drawn(self.model, [x[i] for x in draws]) for i in range(2))
        alpha = self.log_alpha.detach().exp()

        with torch.no_grad():
            next_action, next_logp = squashed_sample(self.model(next_obs, *then)["dist"], next_noise)
            q_next = self.target(next_obs, next_action).amin(0) - alpha * next_logp
        q = self.critic(obs, batch["action"])
        td_error = losses.td_error(q, batch["reward"], batch["discount"], q_next)
        critic_loss = 0.5 * (batch["weight"] * td_error.square()).mean(-1).sum()
        grad_norm = self.critic_optimizer.step(critic_loss)

        action, logp = squashed_sample(self.model(obs, *now)["dist"], noise)
        actor_loss = torch.mean(alpha * logp - self.critic(obs, action).amin(0))
        self.optimizer.step(actor_loss)

        entropy = -logp.detach().mean()
        if self.config.adapt_alpha:
            self.alpha_optimizer.step(torch.sum(self.log_alpha * (entropy - self.target_entropy)))
        self.target.follow()
        values = torch.stack(
            [critic_loss.detach(), actor_loss.detach(), alpha.squeeze(), entropy, q.detach().mean(), grad_norm]
        )
        return values, td_error.detach().abs().mean(0)


def squashed_sample(dist: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
    """A sample of tanh(N(mean, std)) and its log probability, differentiable (SAC).

    `dist [..., 2D]`: mean, then log_std; `noise [..., D]`: standard normal. Returns the action in [-1, 1] `[..., D]` and its
    log density `[...]`. log(1 - tanh(u)^2) is taken as 2 (log 2 - u - softplus(-2u)), which is exact for large u as well.
    """
    mean, log_std = dist.chunk(2, -1)
    u = torch.addcmul(mean, log_std.exp(), noise)
    per_dim = 0.5 * noise.square() + log_std - 2.0 * (u + F.softplus(-2.0 * u))
    return torch.tanh(u), -per_dim.sum(-1) - noise.shape[-1] * (0.5 * math.log(2.0 * math.pi) + 2.0 * math.log(2.0))
