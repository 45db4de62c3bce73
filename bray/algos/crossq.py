"""CrossQ: SAC without target networks; batch norm in the critics takes their place (Bhatt et al. 2024).   B batch, D
action dimensions."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from bray import tree
from bray.algos import sac
from bray.algos.sac import squashed_sample
from bray.config.declare import Count, Positive, RateSchedule
from bray.nn import catalog
from bray.target import Target

DEFAULTS = sac.DEFAULTS
Policy, experience, make_model = sac.Policy, sac.experience, sac.make_model
"""As SAC acts and replays."""


@dataclass(frozen=True)
class Config(sac.Continuous):
    lr: RateSchedule = 1e-3
    """Learning rate of the actor; a number or a schedule over env steps."""
    critic_hiddens: tuple[Count, ...] = (512, 512)
    """Widths of the critics' layers; wide ones are what the method lives on. (The paper: 2048, for GPUs.)"""
    policy_delay: Count = 3
    """Gradient steps of the critics for one of the actor and the temperature."""
    adam_beta1: Positive = 0.5
    """Adam's first moment; less than the usual 0.9, because the critics chase values that move at once."""


class Learner(sac.Learner):
    """SAC's, with both halves of a transition in one batch through the critics."""

    config: Config  # type: ignore[assignment]

    def build(self) -> dict[str, Any]:
        self.policy_delay = self.config.policy_delay
        parts = super().build()
        for optimizer in (self.optimizer, self.critic_optimizer, self.alpha_optimizer):
            optimizer.betas = (self.config.adam_beta1, 0.999)
        return parts

    def make_critic(self) -> nn.Module:
        wide = dataclasses.replace(self.model_config, fcnet_hiddens=self.config.critic_hiddens)
        return catalog.make_model("continuous_q", self.spec, wide, n=self.num_critics, batch_norm=True)

    def make_targets(self) -> dict[str, Target]:
        return {}

    def values(self, batch: dict[str, Any], draws: Any) -> tuple[Tensor, Tensor]:
        """(s, a) and (s', a') are normalised together, so that both have the statistics of the mixture."""
        with torch.no_grad():
            next_action, next_logp = squashed_sample(self.model(batch["next_obs"], *draws)["dist"], batch["next_noise"])
        both = tree.map(lambda *x: torch.cat(x), batch["obs"], batch["next_obs"])
        q, q_next = self.critic(both, torch.cat([batch["action"], next_action]), None, True).chunk(2, 1)
        return q, q_next.detach().amin(0) - self.log_alpha.detach().exp() * next_logp
