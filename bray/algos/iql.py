"""IQL: implicit Q-learning, values of the best actions of the data without asking for others (Kostrikov et al. 2021).
B batch, n critics."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

import torch
from pydantic import Field
from torch import Tensor, nn

from bray import distributions
from bray.algos import bc, ddpg
from bray.config.declare import Amount, Positive, RateSchedule, Whole
from bray.nn import catalog
from bray.rl import losses
from bray.spec import EnvSpec
from bray.target import Target

DEFAULTS, experience, make_model = ddpg.DEFAULTS, ddpg.experience, bc.without_memory
"""PPO's network: its policy and its value are the ones of the paper, and PPO can go on from both."""


@dataclass(frozen=True)
class Config(ddpg.OffPolicy):
    lr: RateSchedule = 3e-4
    """Learning rate of policy and value; a number or a schedule over env steps."""
    critic_lr: Positive = 1e-3
    """Learning rate of the critics."""
    learning_starts: Whole = 500
    """Env steps before the first gradient step."""
    tau: Annotated[float, Field(gt=0, le=1)] = 0.005
    """The target critics move this fraction of the way after every gradient step."""
    expectile: Annotated[float, Field(gt=0, lt=1)] = 0.7
    """V is this expectile of Q over the actions of the data: 0.5 = their mean, towards 1 = the best of them."""
    beta: Amount = 3.0
    """How much the policy prefers actions that are better than V: a row has weight exp(beta (Q - V)); 0 = BC."""
    max_weight: Positive = 100.0
    """A row weighs at most so much."""
    min_std: Positive = 0.05
    """Standard deviations of numbers are learnt down to this, in units of [-1, 1]."""


class Policy(bc.Policy):
    """Beside the environment: as BC's."""

    def __init__(self, config: Config, spec: EnvSpec):
        if not spec.layout.continuous:
            self.num_actions = spec.num_actions  # refuses spaces that are not Discrete
        super().__init__(config, spec)


class Learner(ddpg.Learner):
    """In the trainer: transitions in, better weights out. Critics and their targets never leave it."""

    config: Config  # type: ignore[assignment]
    actor_numbers = ("actor_loss", "value_loss", "entropy", "weight")
    num_critics = 2

    def build(self) -> dict[str, Any]:
        self.least = bc.least_params(self.layout, self.config.min_std).to(self.device)
        return super().build()

    def make_critic(self) -> nn.Module:
        kind = "continuous_q" if self.layout.continuous else "discrete_q"
        return catalog.make_model(kind, self.spec, self.model_config, n=self.num_critics)

    def make_targets(self) -> dict[str, Target]:
        self.target = Target(self.critic, self.critic_optimizer, self.config.tau)
        return {"target": self.target}

    def columns(self, batch: dict[str, Any]) -> dict[str, Any]:
        return super().columns(batch) | bc.legal_choices(self.layout, batch)

    def q(self, critic: Any, batch: dict[str, Any]) -> Tensor:
        """Values of the actions of the data `[n, B]`."""
        if self.layout.continuous:
            values: Tensor = critic(batch["obs"], batch["action"])
            return values
        values = critic(batch["obs"])
        return losses.select(values, batch["action"].expand(len(values), -1))

    def values(self, batch: dict[str, Any], draws: Any) -> tuple[Tensor, Tensor]:
        """The next observation has the value V, whatever would be done there."""
        with torch.no_grad():
            v_next = self.model(batch["next_obs"], *draws)["value"]
        return self.q(self.critic, batch), v_next

    def actor_loss(self, batch: dict[str, Any], draws: Any) -> dict[str, Tensor]:
        """V: the expectile of Q, by asymmetric squares; the policy: -exp(beta (Q - V)) log pi(a). Both in one loss:
        they share a network, or nothing."""
        c, new = self.config, self.model(batch["obs"], *draws)
        with torch.no_grad():
            q = self.q(self.target, batch).amin(0)
            weight = (c.beta * (q - new["value"])).exp().clamp(max=c.max_weight)
        value_loss = losses.expectile(q - new["value"], c.expectile).mean()
        dist = torch.maximum(new["dist"], self.least)
        logp, entropy = distributions.log_prob_entropy(self.layout, dist, batch["action"], batch.get("mask"))
        loss = value_loss - (weight * logp).mean()
        return {"actor_loss": loss, "value_loss": value_loss, "entropy": entropy.mean(), "weight": weight.mean()}
