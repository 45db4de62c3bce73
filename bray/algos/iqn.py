"""IQN: DQN that learns the return's whole quantile function (Dabney et al. 2018).   B batch, N actions, K fractions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from bray.algos import dqn
from bray.config.declare import Amount, Count
from bray.errors import ConfigError
from bray.nn import catalog
from bray.nn.catalog import ModelConfig
from bray.rl import losses
from bray.spec import EnvSpec

Policy, experience = dqn.Policy, dqn.experience
"""As DQN acts and replays: by the means of the quantiles, with new fractions for every decision in training."""


@dataclass(frozen=True)
class Config(dqn.Config):
    num_fractions: Count = 8
    """Fractions K whose quantiles are learnt from each transition, and of its target."""
    acting_fractions: Count = 32
    """Fractions whose quantiles make the action values."""
    num_cosines: Count = 64
    """Terms of the embedding of a fraction."""
    huber: Amount = 1.0
    """Errors beyond this count linearly; 0 = all of them."""
    risk: Literal["neutral", "cpw", "cvar", "pow", "wang"] = "neutral"
    """Which outcomes count when it acts: all alike, or as `bray.rl.transforms.distort` says."""
    eta: float = 0.71
    """How strongly: above 0 for cpw; for cvar the part of the outcomes, the worst ones, that counts (above 0, at most
    1)."""

    priorities_are_td_errors = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.risk in ("cpw", "cvar") and self.eta <= 0) or (self.risk == "cvar" and self.eta > 1):
            expected = "above 0 and at most 1" if self.risk == "cvar" else "above 0"
            raise ConfigError(f"risk={self.risk} needs an eta {expected}, got {self.eta}")


def make_model(config: Config, spec: EnvSpec, model: ModelConfig) -> nn.Module:
    if model.use_lstm or config.dueling:
        raise ConfigError("IQN has no memory and no dueling streams: set use_lstm=false and dueling=false")
    return catalog.make_model(
        "implicit_quantiles",
        spec,
        model,
        noisy=config.noisy,
        num_fractions=config.acting_fractions,
        num_cosines=config.num_cosines,
        risk=config.risk,
        eta=config.eta,
    )


class Learner(dqn.Learner):
    """DQN's, with the quantile regression loss at drawn fractions as its error."""

    config: Config

    def columns(self, batch: dict[str, Any]) -> dict[str, Any]:
        tau = self.rng.random((2, len(batch["reward"]), self.config.num_fractions), np.float32)
        return super().columns(batch) | {"tau": tau}

    def errors(self, batch: dict[str, Any], online: Any, target: Any, choose: Any) -> tuple[Tensor, Tensor, Tensor]:
        tau, tau_next = batch["tau"].unbind(0)
        quantiles = losses.select_action(self.model.quantiles(batch["obs"], tau, *online), batch["action"])  # type: ignore[operator]
        with torch.no_grad():
            after = self.target.module.quantiles(batch["next_obs"], tau_next, *target)  # type: ignore[operator]
            # the policy that is followed chooses: by a distorted mean where `risk` distorts it
            plain = self.config.double or self.config.risk == "neutral"
            q_target = after.mean(-1) if plain else self.target(batch["next_obs"], *target)["q"]
            best = self.best_next(batch, q_target, choose)
            following = losses.select_action(after, best)
            goal = batch["reward"].unsqueeze(1) + batch["discount"].unsqueeze(1) * following
        loss = losses.quantile_huber(quantiles, tau, goal, self.config.huber)
        return loss, loss, quantiles.mean(-1)
