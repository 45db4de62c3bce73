"""SQIL-Discrete: soft Q-learning rewarded for being where demonstrators were (Reddy et al. 2020).   B batch, N
choices."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bray.algos import dqn, sqil
from bray.config.declare import Positive
from bray.rl import losses

Policy, experience, make_model = dqn.Policy, dqn.experience, dqn.make_model
"""As DQN acts and replays."""


@dataclass(frozen=True)
class Config(dqn.Config):
    alpha: Positive = 0.1
    """Temperature of the soft value alpha log sum_a exp(Q(s, a) / alpha): how much one unit of entropy is worth."""

    def __post_init__(self) -> None:
        super().__post_init__()
        sqil.check_one_step(self.n_step)


class Learner(dqn.Learner):
    """DQN's, with rewards of its own and soft values."""

    config: Config

    def columns(self, batch: dict[str, Any]) -> dict[str, Any]:
        return super().columns(batch) | {"reward": sqil.reward(batch)}

    def next_value(self, batch: dict[str, Any], target: Any, choose: Any) -> Tensor:
        q = self.target(batch["next_obs"], *target)["q"]
        if "next_mask" in batch:
            q = q.masked_fill(~batch["next_mask"], -torch.inf)
        return losses.soft_value(q, self.config.alpha)
