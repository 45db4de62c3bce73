"""A2C: synchronous advantage actor-critic (Mnih et al. 2016), one gradient step per rollout.   T steps, B environments."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
import torch
from pydantic import Field
from torch import Tensor, nn

from bray.algos import ppo
from bray.algos.base import Update, actor_critic, explained_variance, flat_obs, load_learner, save_learner, to_torch
from bray.capture import capture
from bray.nn import catalog, distributions
from bray.nn.catalog import ModelConfig
from bray.nn.normalize import update_normalizers
from bray.optim import Optimizer
from bray.rl import losses
from bray.schedules import Schedule, make_schedule
from bray.spec import EnvSpec


@dataclass(frozen=True)
class Config:
    on_policy: ClassVar[bool] = True

    rollout_length: Annotated[int, Field(gt=0)] = 16
    """Steps T that each environment takes between two updates."""
    lr: Schedule = 1e-3
    """Learning rate; a number or a schedule over env steps."""
    optimizer: Literal["adam", "rmsprop", "sgd"] = "adam"
    """The paper used RMSprop."""
    gamma: Annotated[float, Field(ge=0, le=1)] = 0.99
    """Discount per step."""
    lambda_: Annotated[float, Field(ge=0, le=1)] = 0.95
    """GAE's lambda; 1 is the paper's n-step return."""
    entropy_coef: Annotated[float, Field(ge=0)] = 0.01
    """Weight of the entropy bonus."""
    value_coef: Annotated[float, Field(ge=0)] = 0.5
    """Weight of the value loss."""
    max_grad_norm: Annotated[float, Field(gt=0)] | None = 0.5
    """Gradients are scaled down to this norm; null = off."""
    normalize_advantage: bool = False
    """Standardise the advantages of each rollout."""


METRICS = ("policy_loss", "value_loss", "entropy", "grad_norm")
Policy = ppo.Policy
"""The same acting and the same advantages as PPO's."""


def make_model(config: Config, spec: EnvSpec, model: ModelConfig) -> nn.Module:
    return catalog.make_model("actor_critic", spec, model)


class Learner:
    """In the trainer: a rollout's samples in, better weights out."""

    def __init__(
        self,
        config: Config,
        spec: EnvSpec,
        model: nn.Module,
        model_config: ModelConfig,
        seed: int = 0,
        record: bool = True,
    ):
        self.config, self.layout, self.model = config, spec.layout, model
        self.device = next(model.parameters()).device
        self.lr = make_schedule(config.lr)
        self.optimizer = Optimizer(
            model.parameters(),
            self.lr(0),
            kind=config.optimizer,
            max_grad_norm=config.max_grad_norm,
            eps=1e-5,
            betas=(0.9, 0.99),
        )
        self.rng = np.random.default_rng([seed, 1])
        self.steps = 0
        self._step = capture(self._gradient_step, enabled=record)

    def update(self, batch: dict[str, Any], env_steps: int = 0) -> Update:
        update_normalizers(self.model, flat_obs(batch), batch["weight"].reshape(-1))
        self.optimizer.set_lr(self.lr(env_steps))
        explained = explained_variance(batch["value"], batch["target"], batch["weight"])
        values = self._step(to_torch(ppo.pack(batch), self.device)).cpu()
        self.steps += 1
        return Update((*METRICS, "explained_variance"), torch.cat([values, torch.tensor([explained])]))

    def _gradient_step(self, batch: dict[str, Any]) -> Tensor:
        c = self.config
        dist, value, batch = actor_critic(self.model, batch)
        _, _, advantage, target, weight = batch["floats"].unbind(0)
        logp, entropy = distributions.log_prob_entropy(self.layout, dist, batch["action"], batch.get("mask"))
        policy_loss = -logp * advantage
        value_loss = losses.value_loss(value, target)
        grad_norm = self.optimizer.step(
            torch.dot(weight, policy_loss + c.value_coef * value_loss - c.entropy_coef * entropy)
        )
        means = torch.mv(torch.stack([policy_loss, value_loss, entropy]).detach(), weight)
        return torch.cat([means, grad_norm.unsqueeze(0)])

    def state_dict(self) -> dict[str, Any]:
        return save_learner(self)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        load_learner(self, state)
