"""C51: DQN that learns the distribution of returns on fixed atoms (Bellemare et al. 2017).   B batch, N actions, K
atoms."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

import torch
from pydantic import Field
from torch import Tensor, nn

from bray.algos import dqn
from bray.errors import ConfigError
from bray.nn.catalog import ModelConfig
from bray.rl import losses
from bray.spec import EnvSpec

Policy, experience = dqn.Policy, dqn.experience
"""As DQN acts and replays: by the means of the distributions."""


@dataclass(frozen=True)
class Config(dqn.Config):
    num_atoms: Annotated[int, Field(gt=1)] = 51
    """Atoms K of a distribution."""
    v_min: float = -10.0
    """Return at the first atom; smaller ones count as this. Choose it below every discounted return."""
    v_max: float = 10.0
    """Return at the last atom; larger ones count as this. Choose it above every discounted return: 100 for reward 1 a
    step at gamma 0.99."""

    priorities_are_td_errors = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.v_min < self.v_max:
            raise ConfigError(f"v_min should be below v_max, got {self.v_min} and {self.v_max}")


def make_model(config: Config, spec: EnvSpec, model: ModelConfig) -> nn.Module:
    return dqn.make_model(config, spec, model, num_atoms=config.num_atoms, support=(config.v_min, config.v_max))


class Learner(dqn.Learner):
    """DQN's, with the cross entropy to the projected distribution of r + discount z as its error."""

    def errors(self, batch: dict[str, Any], online: Any, target: Any, choose: Any) -> tuple[Tensor, Tensor, Tensor]:
        outputs = self.model(batch["obs"], *online)
        support: Tensor = self.model.support  # type: ignore[assignment]
        logits = losses.select_action(outputs["logits"], batch["action"])
        with torch.no_grad():
            after = self.target(batch["next_obs"], *target)
            best = self.best_next(batch, after["q"], choose)
            probs = losses.select_action(after["logits"], best).softmax(-1)
            goal = losses.project(probs, support, batch["reward"], batch["discount"])
        loss = losses.categorical_loss(logits, goal)
        return loss, loss, losses.select(outputs["q"], batch["action"])
