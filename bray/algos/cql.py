"""CQL: SAC that holds down the values of actions that the data does not show (Kumar et al. 2020).   B batch, D action
dimensions, n critics, S samples."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from bray.algos import sac
from bray.algos.sac import squashed_sample
from bray.config.declare import Amount, Count, Positive, RateSchedule
from bray.nn.heads import ContinuousQ
from bray.optim import Optimizer

DEFAULTS = {"model": {**sac.DEFAULTS["model"], "init": "torch"}}
"""Critics that begin as small functions bend less between the actions of the data."""
Policy, experience, make_model = sac.Policy, sac.experience, sac.make_model
"""As SAC acts and replays."""


@dataclass(frozen=True)
class Config(sac.Config):
    lr: RateSchedule = 1e-4
    """Learning rate of the actor; a number or a schedule over env steps."""
    critic_lr: Positive = 3e-4
    """Learning rate of the critics."""
    alpha_lr: Positive = 1e-4
    """Learning rate of the temperature, and of the conservative weight."""
    initial_alpha: Positive = 1.0
    """Temperature at the start: how much one unit of entropy is worth."""
    cql_alpha: Amount = 2.5
    """Weight of the conservative term beside half the squared TD error, at the start; 0 = SAC."""
    cql_gap: float | None = 5.0
    """That weight falls while critics value drawn actions less than this above those of the data, and grows when they
    do not (the paper's Lagrange form); null = it stays."""
    samples: Count = 10
    """Actions drawn of each kind: any, the policy's, the policy's at the next observation."""
    soft_backup: bool = False
    """The value of the next observation is that of a drawn action and of its entropy, as SAC's; false = of the policy's
    mean."""


class Learner(sac.Learner):
    """SAC's, with the conservative term in the critics' loss."""

    config: Config
    critic: ContinuousQ

    def build(self) -> dict[str, Any]:
        self.log_cql = nn.Parameter(torch.zeros(1, device=self.device))  # of what `cql_alpha` is multiplied by
        self.cql_optimizer = Optimizer([self.log_cql], self.config.alpha_lr)
        return super().build() | {"log_cql": self.log_cql, "cql_optimizer": self.cql_optimizer}

    def columns(self, batch: dict[str, Any]) -> dict[str, Any]:
        size = (self.config.samples, len(batch["reward"]), self.layout.size)
        drawn = {"any": 2.0 * self.rng.random(size, np.float32) - 1.0}
        return super().columns(batch) | drawn | {"samples": self.rng.standard_normal((2, *size), np.float32)}

    def values(self, batch: dict[str, Any], draws: Any) -> tuple[Tensor, Tensor]:
        if self.config.soft_backup:
            return super().values(batch, draws)
        with torch.no_grad():
            mean, _ = self.model(batch["next_obs"], *draws)["dist"].chunk(2, -1)
            q_next = self.target(batch["next_obs"], torch.tanh(mean)).amin(0)
        return self.critic(batch["obs"], batch["action"]), q_next

    def critic_loss(self, batch: dict[str, Any], q: Tensor, td_error: Tensor, draws: Any) -> dict[str, Tensor]:
        """cql_alpha E[log sum_a exp Q(s, a) - Q(s, a of the data)] beside the TD errors. The sum is taken by importance
        sampling: each drawn action counts exp Q over its density."""
        numbers = super().critic_loss(batch, q, td_error, draws)
        actions, logps = [batch["any"]], [torch.full_like(batch["any"][..., 0], -self.layout.size * math.log(2.0))]
        with torch.no_grad():
            for obs, noise in zip((batch["obs"], batch["next_obs"]), batch["samples"], strict=True):
                action, logp = squashed_sample(self.model(obs, *draws)["dist"], noise)
                actions.append(action)
                logps.append(logp)
        values = self.critic.of_many(batch["obs"], torch.cat(actions))  # [n, 3 S, B]
        worth = (values - torch.cat(logps)).logsumexp(1) - math.log(values.shape[1])
        gaps = (batch["weight"] * (worth - q)).mean(-1)
        weight, gap = self.config.cql_alpha * self.log_cql.detach().exp(), gaps.sum()
        loss = numbers["critic_loss"] + (weight * gap).squeeze()
        if (limit := self.config.cql_gap) is not None:
            self.cql_optimizer.step(torch.sum(self.log_cql * (limit - gaps.detach().mean())))
        return {"critic_loss": loss, "gap": gap, "cql_weight": weight.squeeze()}
