"""DQfD: DQN from demonstrations, whose choices are worth a margin more than others (Hester et al. 2018).   B batch, N
choices."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bray.algos import dqn
from bray.config.declare import Amount, Count
from bray.errors import ConfigError
from bray.rl import losses

Policy, experience, make_model = dqn.Policy, dqn.experience, dqn.make_model
"""As DQN acts and replays."""


@dataclass(frozen=True)
class Config(dqn.Config):
    n_step: Count = 10
    """Rewards summed before bootstrapping: what was demonstrated late in an episode is soon known at its start."""
    margin: Amount = 0.8
    """The demonstrated choice is to be worth so much more than any other."""
    margin_coef: Amount = 1.0
    """Weight of the supervised loss that asks for it; 0 = DQN on the same rows."""
    weight_decay: Amount = 1e-5
    """Weights shrink by this share of the learning rate at every step: demonstrations are few."""


class Learner(dqn.Learner):
    """DQN's, with the supervised loss on rows of demonstrations."""

    config: Config

    def build(self) -> dict[str, Any]:
        parts = super().build()
        self.optimizer.weight_decay = self.config.weight_decay
        return parts

    def columns(self, batch: dict[str, Any]) -> dict[str, Any]:
        mask = self.layout.legal(batch["obs"])
        columns = super().columns(batch) | {"demo": demonstrated(batch)}
        return columns if mask is None else columns | {"mask": mask}

    def sample_loss(self, batch: dict[str, Any], values: Tensor, td_error: Tensor) -> Tensor:
        """Beside the TD error: max_a (Q(s, a) + margin 1{a != demonstrated}) - Q(s, demonstrated), over legal
        choices."""
        legal = values.masked_fill(~batch["mask"], -torch.inf) if "mask" in batch else values
        supervised = losses.margin_loss(legal, batch["action"], self.config.margin)
        return super().sample_loss(batch, values, td_error) + self.config.margin_coef * batch["demo"] * supervised


def demonstrated(batch: dict[str, Any]) -> np.ndarray:
    """`[B]`: 1 for rows of demonstrations, 0 for those that were played. All of them are, where files are all there
    is."""
    if "demo" in batch:
        demo: np.ndarray = batch["demo"]
        return demo
    if "id" in batch:  # a replay of what was played
        raise ConfigError(
            "this algorithm learns from demonstrations: name files with --data FILES; with --data-share 0.25 beside "
            "--env it plays and learns from both"
        )
    return np.ones(len(batch["reward"]), np.float32)
