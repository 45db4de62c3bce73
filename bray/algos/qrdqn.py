"""QR-DQN: DQN that learns quantiles of the return (Dabney et al. 2018).   B batch, N actions, K quantiles."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

import torch
from pydantic import Field
from torch import Tensor, nn

from bray.algos import dqn
from bray.config.declare import Amount
from bray.nn.catalog import ModelConfig
from bray.rl import losses
from bray.spec import EnvSpec

Policy, experience = dqn.Policy, dqn.experience
"""As DQN acts and replays: by the means of the quantiles."""


@dataclass(frozen=True)
class Config(dqn.Config):
    num_quantiles: Annotated[int, Field(gt=1)] = 50
    """Quantiles K of a return. (The paper: 200, for Atari.)"""
    huber: Amount = 1.0
    """Errors beyond this count linearly; 0 = all of them."""
    priorities_are_td_errors = False


def make_model(config: Config, spec: EnvSpec, model: ModelConfig) -> nn.Module:
    return dqn.make_model(config, spec, model, num_atoms=config.num_quantiles)


class Learner(dqn.Learner):
    """DQN's, with the quantile regression loss as its error."""

    config: Config

    def build(self) -> dict[str, Any]:
        k = self.config.num_quantiles
        self.tau = ((torch.arange(k, device=self.device) + 0.5) / k).unsqueeze(0)
        return super().build()

    def errors(self, batch: dict[str, Any], online: Any, target: Any, choose: Any) -> tuple[Tensor, Tensor, Tensor]:
        quantiles = losses.select_action(self.model(batch["obs"], *online)["quantiles"], batch["action"])
        with torch.no_grad():
            after = self.target(batch["next_obs"], *target)
            best = self.best_next(batch, after["q"], choose)
            following = losses.select_action(after["quantiles"], best)
            goal = batch["reward"].unsqueeze(1) + batch["discount"].unsqueeze(1) * following
        loss = losses.quantile_huber(quantiles, self.tau, goal, self.config.huber)
        return loss, loss, quantiles.mean(-1)
