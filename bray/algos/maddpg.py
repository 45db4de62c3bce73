"""MADDPG: a critic for each agent of a team that sees all of them, actors that see for themselves (Lowe et al. 2017).
B batch, N agents, D dimensions of an agent's action or A choices.

Agents act by what each observes; while they learn, the critic of each is told the state of the game and what all of
them did, so that what the others change looks like no noise to it. Choices are drawn by Gumbel-softmax, straight
through.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
import torch
from pydantic import Field
from torch import Tensor, nn

from bray import act
from bray.act import Clock
from bray.algos import base, ddpg, qmix
from bray.algos.base import Update, to_torch
from bray.config.declare import Amount, Count, Positive, RateSchedule, Share, ShareSchedule, Whole
from bray.data.experience import Replay
from bray.distributions import NEVER
from bray.nn.catalog import ModelConfig
from bray.nn.normalize import update_normalizers
from bray.nn.teams import SharedAgent, TeamCritics
from bray.optim import Optimizer
from bray.rl import losses
from bray.rl.transforms import gumbel_softmax, one_hot
from bray.spec import EnvSpec
from bray.target import Target

DEFAULTS = {"model": {"fcnet_activation": "relu", "fcnet_hiddens": [128, 128]}}


@dataclass(frozen=True)
class TeamConfig(ddpg.Noise):
    """What MADDPG and ATOC share."""

    lr: RateSchedule = 1e-3
    """Learning rate of the actor; a number or a schedule over env steps."""
    critic_lr: Positive = 1e-3
    """Learning rate of the critics."""
    gamma: Share = 0.95
    """Discount per step."""
    replay_size: Count = 200_000
    """Steps of the team kept."""
    batch_size: Count = 256
    """Steps of the team per gradient step."""
    learning_starts: Whole = 1_000
    """Env steps before the first gradient step; continuous actions are random until then."""
    train_every: Count = 16
    """Env steps between two visits to the learner."""
    updates: Count = 1
    """Gradient steps per visit."""
    tau: Annotated[float, Field(gt=0, le=1)] = 0.01
    """The targets of actors and critics move this fraction of the way after every gradient step."""
    noise: ShareSchedule = 0.1
    """Standard deviation of the Gaussian noise on continuous actions, in units of [-1, 1]; a number or a schedule over
    env steps. Choices are drawn from the policy."""
    temperature: Positive = 1.0
    """Of the softmax whose gradient drawn choices have."""
    logit_penalty: Amount = 1e-3
    """Weight of the squared logits (of choices) in the actor's loss: keeps a policy from being sure too soon."""
    agent_ids: bool = True
    """Tell each agent its number beside its observation. One actor is for all of them; without it those who see the
    same do the same."""
    max_grad_norm: Positive | None = 0.5
    """Gradients are scaled down to this norm; null = off."""


@dataclass(frozen=True)
class Config(TeamConfig):
    """As `TeamConfig`."""


def make_model(config: TeamConfig, spec: EnvSpec, model: ModelConfig) -> nn.Module:
    qmix.check_team(spec, "box")
    kind = "deterministic" if spec.layout.continuous else "categorical"
    return SharedAgent(spec, model, config.agent_ids, kind, memory=False)


def experience(config: TeamConfig, spec: EnvSpec, model: ModelConfig) -> Replay:
    return Replay.of(config)


class Policy(act.Policy):
    """Beside the environment: choices drawn from each agent's policy, or its action and noise."""

    def __init__(self, config: TeamConfig, spec: EnvSpec):
        qmix.check_team(spec, "box")
        rule = act.make_rule("dist")
        if spec.layout.continuous:
            base.check_bounded(spec)
            names = ("noise", "learning_starts", "random_hold", "noise_hold")
            rule = act.make_rule("deterministic", {name: getattr(config, name) for name in names})
        super().__init__(spec.layout, rule)


class Learner(base.Learner):
    """In the trainer: replayed steps of the team in, better weights out. Critics and targets never leave it."""

    config: TeamConfig

    def build(self) -> dict[str, Any]:
        c = self.config
        self.critic = self.make_critic().to(self.device)
        self.optimizer = Optimizer(self.model.parameters(), self.lr(0), max_grad_norm=c.max_grad_norm)
        self.critic_optimizer = Optimizer(self.critic.parameters(), c.critic_lr, max_grad_norm=c.max_grad_norm)
        self.target = Target(self.critic, self.critic_optimizer, c.tau)
        self.target_actor = Target(self.model, self.optimizer, c.tau)
        parts = {"critic": self.critic, "optimizer": self.optimizer, "critic_optimizer": self.critic_optimizer}
        return parts | {"target": self.target, "target_actor": self.target_actor}

    def make_critic(self) -> nn.Module:
        return TeamCritics(self.spec, self.model_config)

    def update(self, batch: dict[str, Any], clock: Clock) -> Update:
        for module in (self.model, self.target_actor.module):  # the dead see zeros, which are no observations
            update_normalizers(module, batch["obs"], batch["alive"])
        for module in (self.critic, self.target.module):
            update_normalizers(module, batch["obs"], self.norm_weight(batch["alive"]))
        self.optimizer.set_lr(self.lr(clock.env_steps))
        update: Update = self._step(to_torch(self.columns(batch), self.device))
        self.steps += 1
        return update

    def norm_weight(self, alive: np.ndarray) -> np.ndarray:
        """How often each row counts in the statistics of what critics see."""
        return np.any(alive, -1)

    def columns(self, batch: dict[str, Any]) -> dict[str, Any]:
        """What `gradient_step` reads of a batch: rewards of each agent, legal choices and the noise of draws."""
        columns = {k: batch[k] for k in ("obs", "action", "rewards", "discount", "next_obs", "alive")}
        if not self.layout.discrete:
            return columns
        shape = (len(batch["discount"]), len(self.spec.team), -1)
        masks = {"mask": self.layout.legal(batch["obs"]), "next_mask": self.layout.legal(batch["next_obs"])}
        columns |= {k: x.reshape(shape) for k, x in masks.items() if x is not None}
        size = (2, *shape[:2], self.spec.action.n[0])
        return columns | {"noise": self.rng.gumbel(size=size).astype(np.float32)}

    def gradient_step(self, batch: dict[str, Any]) -> Update:
        """A step of the critics, one of the actor; then the targets follow."""
        with torch.no_grad():
            after = self.actions(self.target_actor(batch["next_obs"]), batch.get("next_mask"), batch.get("noise"), 1)
            q_next = self.target(batch["next_obs"], after)
        q = self.critic(batch["obs"], self.taken(batch))
        error = losses.td_error(q, batch["rewards"].t(), batch["discount"], q_next)
        critic_loss = 0.5 * error.square().mean()
        grad_norm = self.critic_optimizer.step(critic_loss)
        numbers = self.actor_step(batch)
        self.target.follow()
        self.target_actor.follow()
        numbers |= {"critic_loss": critic_loss, "q": q.mean(), "td_error": error.abs().mean(), "grad_norm": grad_norm}
        return Update.of({k: x.detach() for k, x in numbers.items()})

    def actor_step(self, batch: dict[str, Any]) -> dict[str, Tensor]:
        """A step of the actor, and what is logged of it."""
        outputs = self.model(batch["obs"])
        mine = self.actions(outputs, batch.get("mask"), batch.get("noise"), 0)
        loss = self.actor_loss(batch, mine) + self.penalty(outputs, batch)
        self.optimizer.step(loss)
        return {"actor_loss": loss}

    def actor_loss(self, batch: dict[str, Any], mine: Tensor) -> Tensor:
        """Up the critic of each agent by its own action, where the others do what they did."""
        own = torch.eye(len(self.spec.team), dtype=torch.bool, device=mine.device)[:, None, :, None]
        q = self.critic(batch["obs"], torch.where(own, mine, self.taken(batch)))  # [N, B]
        return -self.of_alive(q, batch)

    def of_alive(self, x: Tensor, batch: dict[str, Any]) -> Tensor:
        """The mean of `x [N, B]` over agents that act."""
        alive = batch["alive"].t().to(x.dtype)
        return (alive * x).sum() / alive.sum().clamp(min=1.0)

    def penalty(self, outputs: dict[str, Tensor], batch: dict[str, Any]) -> Tensor:
        """Of large logits."""
        if not self.layout.discrete:
            return outputs["mu"].new_zeros(())
        return self.config.logit_penalty * outputs["dist"].square().mean()

    def actions(self, outputs: dict[str, Tensor], mask: Tensor | None, noise: Tensor | None, row: int) -> Tensor:
        """Of all agents by a policy's outputs, `[B, N, D]`: choices drawn, as one-hot vectors with a gradient."""
        if not self.layout.discrete:
            return outputs["mu"].unflatten(1, (len(self.spec.team), -1))
        logits = outputs["dist"].unflatten(1, (len(self.spec.team), -1))
        assert noise is not None
        return gumbel_softmax(
            logits if mask is None else logits.where(mask, NEVER), noise[row], self.config.temperature
        )

    def rows_of(self, batch: dict[str, Any], *rest: Any) -> dict[str, Any]:
        return batch | {"weight": batch["alive"].any(-1).float()}

    def taken(self, batch: dict[str, Any]) -> Tensor:
        """The actions that were taken, in the same form."""
        if self.layout.discrete:
            return one_hot(batch["action"], self.spec.action.n[0])
        return batch["action"].float().unflatten(1, (len(self.spec.team), -1))
