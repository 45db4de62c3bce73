"""TD3+BC: TD3 whose actor also stays with the actions of the data (Fujimoto & Gu 2021).   B batch, D action
dimensions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.nn import functional as F

from bray.algos import td3
from bray.config.declare import Amount, Positive, RateSchedule

DEFAULTS = {"model": {**td3.DEFAULTS["model"], "normalize_observations": True}}
"""The paper normalises observations: actions of the data are hard to tell from ranges that differ."""
Policy, experience, make_model = td3.Policy, td3.experience, td3.make_model


@dataclass(frozen=True)
class Config(td3.Config):
    lr: RateSchedule = 3e-4
    """Learning rate of the actor; a number or a schedule over env steps."""
    critic_lr: Positive = 3e-4
    """Learning rate of the critics."""
    alpha: Amount = 2.5
    """How much values count beside the actions of the data; 0 = those alone."""


class Learner(td3.Learner):
    """TD3's, with the actor's loss of the paper."""

    config: Config
    actor_numbers = ("actor_loss", "bc_loss")

    def actor_loss(self, batch: dict[str, Any], draws: Any) -> dict[str, Tensor]:
        """L = (mu(s) - a)^2 - lambda Q(s, mu(s)), with lambda = alpha / mean |Q|, so that the size of rewards does not
        matter."""
        action = self.model(batch["obs"], *draws)["mu"]
        q = self.critic(batch["obs"], action, 1)
        lambda_ = self.config.alpha / q.detach().abs().mean()
        bc_loss = F.mse_loss(action, batch["action"])
        return {"actor_loss": bc_loss - lambda_ * q.mean(), "bc_loss": bc_loss}
