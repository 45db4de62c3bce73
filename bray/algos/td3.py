"""TD3: DDPG with two critics, smoothed targets and an actor that learns less often (Fujimoto et al. 2018).   B batch, D
action dimensions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from bray.algos import ddpg
from bray.config.declare import Amount, Count

DEFAULTS = ddpg.DEFAULTS
Policy, experience, make_model = ddpg.Policy, ddpg.experience, ddpg.make_model
"""As DDPG acts and replays."""


@dataclass(frozen=True)
class Config(ddpg.Config):
    policy_delay: Count = 2
    """Gradient steps of the critics for one of the actor and the targets."""
    target_noise: Amount = 0.2
    """Standard deviation of the noise on the actions by which targets are computed, in units of [-1, 1]."""
    target_noise_clip: Amount = 0.5
    """This noise is clipped to so much."""


class Learner(ddpg.Learner):
    """DDPG's, with the smaller value of two critics at an action near that of the target actor."""

    config: Config
    num_critics = 2

    def build(self) -> dict[str, Any]:
        self.policy_delay = self.config.policy_delay
        return super().build()

    def columns(self, batch: dict[str, Any]) -> dict[str, Any]:
        noise = self.rng.standard_normal((len(batch["reward"]), self.layout.size), np.float32)
        return super().columns(batch) | {"noise": noise}

    def next_action(self, batch: dict[str, Any], draws: Any) -> Tensor:
        clip = self.config.target_noise_clip
        noise = (self.config.target_noise * batch["noise"]).clamp(-clip, clip)
        return (super().next_action(batch, draws) + noise).clamp(-1.0, 1.0)
