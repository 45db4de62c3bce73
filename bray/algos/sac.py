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
from bray.algos import base, ddpg
from bray.config.declare import Excludes, Positive, RateSchedule
from bray.nn import catalog
from bray.nn.catalog import ModelConfig
from bray.optim import Optimizer
from bray.spec import EnvSpec
from bray.target import Target

DEFAULTS, experience = ddpg.DEFAULTS, ddpg.experience


@dataclass(frozen=True)
class Soft(ddpg.OffPolicy):
    """What SAC, SAC-Discrete and CrossQ share."""

    lr: RateSchedule = 3e-4
    """Learning rate of the actor; a number or a schedule over env steps."""
    alpha_lr: Positive = 1e-3
    """Learning rate of the temperature."""
    initial_alpha: Positive = 0.2
    """Temperature at the start: how much one unit of entropy is worth."""
    adapt_alpha: Annotated[bool, Excludes("target_entropy")] = True
    """Learn the temperature; false keeps `initial_alpha`."""


@dataclass(frozen=True)
class Continuous(ddpg.Noise, Soft):
    """What SAC and CrossQ share."""

    target_entropy: float | None = None
    """Entropy that the temperature aims at; null = minus the number of action dimensions."""


@dataclass(frozen=True)
class Config(Continuous):
    tau: Annotated[float, Field(gt=0, le=1)] = 0.005
    """The target critics move this fraction of the way after every gradient step."""


def make_model(config: Config, spec: EnvSpec, model: ModelConfig) -> nn.Module:
    return catalog.make_model("squashed_gaussian", spec, model)


class Policy(act.Policy):
    """Beside the environment: tanh-squashed Gaussian actions; random ones before learning starts."""

    def __init__(self, config: Config, spec: EnvSpec):
        base.check_bounded(spec)
        settings = {name: getattr(config, name) for name in ("learning_starts", "random_hold", "noise_hold")}
        super().__init__(spec.layout, act.make_rule("squashed", settings))


class Learner(ddpg.Learner):
    """In the trainer: replayed transitions in, better weights out. Critics and their targets never leave it."""

    config: Config  # type: ignore[assignment]
    actor_numbers = ("actor_loss", "alpha", "entropy")
    num_critics = 2

    def build(self) -> dict[str, Any]:
        c = self.config
        self.log_alpha = nn.Parameter(torch.tensor([np.log(c.initial_alpha)], dtype=torch.float32, device=self.device))
        self.alpha_optimizer = Optimizer([self.log_alpha], c.alpha_lr)
        return super().build() | {"log_alpha": self.log_alpha, "alpha_optimizer": self.alpha_optimizer}

    def make_targets(self) -> dict[str, Target]:
        self.target = Target(self.critic, self.critic_optimizer, self.config.tau)
        return {"target": self.target}

    def columns(self, batch: dict[str, Any]) -> dict[str, Any]:
        noise = self.rng.standard_normal((2, len(batch["reward"]), self.layout.size), np.float32)
        return super().columns(batch) | {"noise": noise[0], "next_noise": noise[1]}

    def values(self, batch: dict[str, Any], draws: Any) -> tuple[Tensor, Tensor]:
        """The next observation has the smaller value of both target critics, and its entropy's worth."""
        next_obs = batch["next_obs"]
        with torch.no_grad():
            next_action, next_logp = squashed_sample(self.model(next_obs, *draws)["dist"], batch["next_noise"])
            q_next = self.target(next_obs, next_action).amin(0) - self.log_alpha.exp() * next_logp
        return self.critic(batch["obs"], batch["action"]), q_next

    def actor_loss(self, batch: dict[str, Any], draws: Any) -> dict[str, Tensor]:
        action, logp = squashed_sample(self.model(batch["obs"], *draws)["dist"], batch["noise"])
        alpha = self.log_alpha.detach().exp()
        loss = torch.mean(alpha * logp - self.critic(batch["obs"], action).amin(0))
        target = self.config.target_entropy
        entropy = self.adapt(-logp.detach(), -float(self.layout.size) if target is None else target)
        return {"actor_loss": loss, "alpha": alpha.squeeze(), "entropy": entropy}

    def adapt(self, entropy: Tensor, target: Tensor | float) -> Tensor:
        """A step of the temperature towards the entropy aimed at; returns the mean entropy."""
        if self.config.adapt_alpha:
            self.alpha_optimizer.step(torch.sum(self.log_alpha * (entropy - target).mean()))
        return entropy.mean()


def squashed_sample(dist: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
    """A sample of tanh(N(mean, std)) and its log probability, differentiable (SAC).

    `dist [..., 2D]`: mean, then log_std; `noise [..., D]`: standard normal. Returns the action in [-1, 1] `[..., D]`
    and its log density `[...]`. log(1 - tanh(u)^2) is taken as 2 (log 2 - u - softplus(-2u)), which is exact for large
    u as well.
    """
    mean, log_std = dist.chunk(2, -1)
    u = torch.addcmul(mean, log_std.exp(), noise)
    per_dim = 0.5 * noise.square() + log_std - 2.0 * (u + F.softplus(-2.0 * u))
    return torch.tanh(u), -per_dim.sum(-1) - noise.shape[-1] * (0.5 * math.log(2.0 * math.pi) + 2.0 * math.log(2.0))
