"""A2C: synchronous advantage actor-critic (Mnih et al. 2016), one gradient step per rollout.   T steps, B
environments."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from bray import distributions
from bray.act import Clock
from bray.algos import ppo, rnd, rows
from bray.algos.base import Update
from bray.config.declare import Amount, AmountSchedule, Count, Positive, RateSchedule, Share
from bray.data.piece import Piece
from bray.optim import Optimizer
from bray.rl import losses

DEFAULTS = {"env": {"num_envs": 8}}
"""The rows of one environment are too much alike for an update: with one, Acrobot ends at -496, with eight at -84."""


@dataclass(frozen=True)
class Config:
    rollout_length: Count = 16
    """Steps T that each environment takes between two updates."""
    lr: RateSchedule = 1e-3
    """Learning rate; a number or a schedule over env steps."""
    optimizer: Literal["adam", "rmsprop", "sgd"] = "adam"
    """The paper used RMSprop."""
    gamma: Share = 0.99
    """Discount per step."""
    lambda_: Share = 0.95
    """GAE's lambda; 1 is the paper's n-step return."""
    entropy_coef: AmountSchedule = 0.01
    """Weight of the entropy bonus; a number or a schedule over env steps."""
    value_coef: Amount = 0.5
    """Weight of the value loss."""
    max_grad_norm: Positive | None = 0.5
    """Gradients are scaled down to this norm; null = off."""
    rnd: Amount = 0.0
    """Explore by random network distillation: weight of the reward for what is new, which is 1 on average; 0 = off."""
    rnd_lr: Positive = 1e-3
    """Learning rate of the network that gets to know what was seen."""
    normalize_advantage: bool = False
    """Standardise the advantages of each rollout."""


make_model, experience, Policy = ppo.make_model, ppo.experience, ppo.Policy
"""The same network, rollouts and acting as PPO's."""


class Learner(rows.Learner):
    """In the trainer: rollouts in, better weights out."""

    config: Config

    def build(self) -> dict[str, Any]:
        c = self.config
        self.entropy_coef = self.scheduled("entropy_coef")
        self.optimizer = Optimizer(
            self.model.parameters(),
            self.lr(0),
            kind=c.optimizer,
            max_grad_norm=c.max_grad_norm,
            eps=1e-5,
            betas=(0.9, 0.99),
        )
        self.novelty, explorer = rnd.make_novelty(self)
        return {"optimizer": self.optimizer, **explorer}

    def prepare(self, data: Piece) -> Any:
        return data if self.novelty else self.advantages(data)

    def advantages(self, data: Piece) -> dict[str, Any]:
        c = self.config
        standardize = c.normalize_advantage
        return rows.advantage_rows(data, self.layout, c.gamma, c.lambda_, standardize, self.over_ranks)

    def update(self, batch: Any, clock: Clock) -> Update:
        self.optimizer.set_lr(self.lr(clock.env_steps))
        self.follow_schedules(clock)
        numbers: dict[str, float] = {}
        if self.novelty:
            batch, numbers["novelty"] = self.novelty.rewarded(batch)
            batch = self.advantages(batch)
        numbers["explained_variance"] = rows.explained_variance(batch)
        with rows.statistics_of_what_acted(self.model, batch["obs"], batch["weight"], first=not self.steps):
            return self.step_on(batch) | numbers

    def gradient_step(self, batch: dict[str, Any], *draws: Tensor) -> Update:
        c, weight = self.config, batch["weight"]
        new = rows.actor_critic(self.model, batch, draws)
        logp, entropy = distributions.log_prob_entropy(self.layout, new["dist"], batch["action"], batch.get("mask"))
        policy_loss = -logp * batch["advantage"]
        value_loss = losses.value_loss(new["value"], batch["target"])
        loss = torch.dot(weight, policy_loss + c.value_coef * value_loss - self.entropy_coef * entropy)
        numbers = {"policy_loss": policy_loss, "value_loss": value_loss, "entropy": entropy}
        return Update.of(numbers | {"grad_norm": self.optimizer.step(loss)}, weight)
