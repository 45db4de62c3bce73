"""CQL-Discrete: DQN that holds down the values of choices that the data does not show (Kumar et al. 2020).   B batch, N
choices."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bray.algos import dqn
from bray.config.declare import Amount
from bray.rl import losses

Policy, experience, make_model = dqn.Policy, dqn.experience, dqn.make_model
"""As DQN acts and replays."""


@dataclass(frozen=True)
class Config(dqn.Config):
    cql_alpha: Amount = 1.0
    """Weight of the conservative term beside half the squared TD error; 0 = DQN."""


class Learner(dqn.Learner):
    """DQN's, with the conservative term in the loss."""

    config: Config

    def columns(self, batch: dict[str, Any]) -> dict[str, Any]:
        mask = self.layout.legal(batch["obs"])
        return super().columns(batch) | ({} if mask is None else {"mask": mask})

    def sample_loss(self, batch: dict[str, Any], values: Tensor, td_error: Tensor) -> Tensor:
        """cql_alpha (log sum_a exp Q(s, a) - Q(s, a of the data)) beside the TD error; over legal actions."""
        legal = values.masked_fill(~batch["mask"], -torch.inf) if "mask" in batch else values
        gap = legal.logsumexp(-1) - losses.select(values, batch["action"])
        return super().sample_loss(batch, values, td_error) + self.config.cql_alpha * gap
