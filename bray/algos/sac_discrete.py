"""SAC for discrete actions: expectations over all actions in place of samples (Christodoulou 2019).   B batch, N
actions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

import torch
from pydantic import Field
from torch import Tensor, nn

from bray import act
from bray.algos import ddpg, sac
from bray.config.declare import Share, Whole
from bray.nn import catalog
from bray.nn.catalog import ModelConfig
from bray.rl import losses
from bray.spec import EnvSpec

DEFAULTS, experience = sac.DEFAULTS, sac.experience


@dataclass(frozen=True)
class Config(sac.Soft):
    learning_starts: Whole = 5_000
    """Env steps with random actions before the first gradient step."""
    tau: Annotated[float, Field(gt=0, le=1)] = 0.005
    """The target critics move this fraction of the way after every gradient step."""
    entropy_scale: Share = 0.7
    """The temperature aims at this share of the entropy of a uniform choice among the legal actions."""


def make_model(config: Config, spec: EnvSpec, model: ModelConfig) -> nn.Module:
    return catalog.make_model("categorical", spec, model)


class Policy(act.Policy):
    """Beside the environment: draws from the actor's probabilities, near uniform at the start."""

    def __init__(self, config: Config, spec: EnvSpec):
        self.num_actions = spec.num_actions  # refuses spaces that are not Discrete
        super().__init__(spec.layout, act.make_rule("dist"))


class Learner(sac.Learner):
    """SAC's, with critics that value all actions at once."""

    config: Config  # type: ignore[assignment]

    def make_critic(self) -> nn.Module:
        return catalog.make_model("discrete_q", self.spec, self.model_config, n=self.num_critics)

    def columns(self, batch: dict[str, Any]) -> dict[str, Any]:
        columns = ddpg.Learner.columns(self, batch)
        masks = {"mask": self.layout.legal(batch["obs"]), "next_mask": self.layout.legal(batch["next_obs"])}
        return columns | {k: v for k, v in masks.items() if v is not None}

    def values(self, batch: dict[str, Any], draws: Any) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            probs, logp = policy(self.model(batch["next_obs"], *draws)["dist"], batch.get("next_mask"))
            q_next = self.target(batch["next_obs"]).amin(0) - self.log_alpha.exp() * logp
        q = self.critic(batch["obs"])
        return losses.select(q, batch["action"].expand(len(q), -1)), (probs * q_next).sum(-1)

    def actor_loss(self, batch: dict[str, Any], draws: Any) -> dict[str, Tensor]:
        probs, logp = policy(self.model(batch["obs"], *draws)["dist"], batch.get("mask"))
        alpha = self.log_alpha.detach().exp()
        with torch.no_grad():
            q = self.critic(batch["obs"]).amin(0)
        loss = (probs * (alpha * logp - q)).sum(-1).mean()
        choices = batch["mask"].sum(-1) if "mask" in batch else torch.full_like(loss.detach(), probs.shape[-1])
        entropy = self.adapt(-(probs * logp).sum(-1).detach(), self.config.entropy_scale * choices.log())
        return {"actor_loss": loss, "alpha": alpha.squeeze(), "entropy": entropy}


def policy(logits: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """Probabilities and their logarithms `[B, N]`; an illegal action has probability 0 and log 0, so that it drops out
    of sums."""
    if mask is None:
        logp = logits.log_softmax(-1)
        return logp.exp(), logp
    logp = logits.masked_fill(~mask, -torch.inf).log_softmax(-1)
    return logp.exp(), logp.masked_fill(~mask, 0.0)
