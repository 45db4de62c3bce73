"""COMA: policy gradients for a team, each agent against a baseline of its own (Foerster et al. 2018).   T steps, B
games, N agents, A choices.

A critic that sees the whole game values all choices of an agent while the others do what they did. An agent learns from
how much better what it did was than what its policy does on average; where its choice changes nothing, from nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
import torch
from pydantic import Field
from torch import Tensor, nn

from bray import act, tree
from bray.act import Clock
from bray.algos import base, qmix, rows
from bray.algos.base import Update, to_torch
from bray.config.declare import AmountSchedule, Count, Positive, RateSchedule, Share
from bray.data.piece import Piece
from bray.data.rollouts import Rollouts
from bray.distributions import NEVER
from bray.nn.catalog import ModelConfig
from bray.nn.teams import CounterfactualCritic, SharedAgent
from bray.optim import Optimizer
from bray.rl import losses, returns
from bray.spec import EnvSpec
from bray.target import Target

DEFAULTS = {"env": {"num_envs": 8}}
"""Games that are played together, so that an update learns from several."""


@dataclass(frozen=True)
class Config:
    rollout_length: Count = 32
    """Steps T that each game takes between two updates."""
    lr: RateSchedule = 1e-3
    """Learning rate of the agents; a number or a schedule over env steps."""
    critic_lr: Positive = 1e-3
    """Learning rate of the critic."""
    critic_updates: Count = 8
    """Gradient steps of the critic on a rollout, before the one of the agents."""
    gamma: Share = 0.99
    """Discount per step."""
    lambda_: Share = 0.8
    """Of the critic's TD(lambda) targets: 0 trusts the target critic, 1 the observed return."""
    tau: Annotated[float, Field(gt=0, le=1)] = 0.05
    """The target critic moves this fraction of the way after every gradient step of the critic."""
    entropy_coef: AmountSchedule = 0.01
    """Weight of the entropy bonus; a number or a schedule over env steps."""
    agent_ids: bool = True
    """Tell each agent its number beside its observation. One network is for all of them; without it those who see the
    same do the same."""
    max_grad_norm: Positive | None = 0.5
    """Gradients are scaled down to this norm; null = off."""


def make_model(config: Config, spec: EnvSpec, model: ModelConfig) -> nn.Module:
    qmix.check_team(spec)
    return SharedAgent(spec, model, config.agent_ids, "actor")


def experience(config: Config, spec: EnvSpec, model: ModelConfig) -> Rollouts:
    return Rollouts(config.rollout_length, state_every=config.rollout_length)


class Policy(act.Policy):
    """Beside the environment: each agent's choice drawn from its own policy."""

    def __init__(self, config: Config, spec: EnvSpec):
        qmix.check_team(spec)
        super().__init__(spec.layout, act.make_rule("dist"))


class Learner(base.Learner):
    """In the trainer: rollouts in, better weights out. The critic and its target never leave it."""

    config: Config

    def build(self) -> dict[str, Any]:
        c = self.config
        self.entropy_coef = self.scheduled("entropy_coef")
        self.critic = CounterfactualCritic(self.spec, self.model_config).to(self.device)
        self.optimizer = Optimizer(self.model.parameters(), self.lr(0), max_grad_norm=c.max_grad_norm)
        self.critic_optimizer = Optimizer(self.critic.parameters(), c.critic_lr, max_grad_norm=c.max_grad_norm)
        self.target = Target(self.critic, self.critic_optimizer, c.tau)
        parts = {"critic": self.critic, "optimizer": self.optimizer, "critic_optimizer": self.critic_optimizer}
        return parts | {"target": self.target}

    def prepare(self, data: Piece) -> dict[str, Any]:
        """Its columns, with the legal choices of all T + 1 rows."""
        columns = {
            k: getattr(data, k) for k in ("obs", "action", "reward", "terminated", "truncated", "valid", "first")
        }
        flat = tree.map(lambda x: x.reshape(-1, *x.shape[2:]), data.obs)
        mask = self.layout.legal(flat)
        if mask is not None:
            columns["mask"] = mask.reshape(*data.first.shape, len(self.spec.team), -1)
        if data.state is not None:
            columns["state"] = tree.index(data.state, 0)
        return columns | {"weight": (data.extras["alive"] & data.valid[..., None]).astype(np.float32)}

    def update(self, batch: dict[str, Any], clock: Clock) -> Update:
        self.optimizer.set_lr(self.lr(clock.env_steps))
        self.follow_schedules(clock)
        games = batch["first"].shape[1]
        noise = self.rng.gumbel(size=(games, len(self.spec.team), self.spec.action.n[0])).astype(np.float32)
        seen, first = tree.map(lambda x: x[:-1], batch["obs"]), not self.steps
        with (
            rows.statistics_of_what_acted(self.model, {"obs": seen["obs"]}, batch["weight"], first),
            rows.statistics_of_what_acted(self.critic.own, {"obs": seen["obs"]}, batch["weight"], first),
            rows.statistics_of_what_acted(self.critic.state, seen, batch["weight"].any(-1), first),
        ):
            update: Update = self._step(to_torch(batch | {"noise": noise}, self.device))
        self.steps += 1
        return update

    def gradient_step(self, batch: dict[str, Any]) -> Update:
        """`critic_updates` steps of the critic, then one of the agents."""
        logits = self.logits(batch)
        action = self.with_next(batch["action"], logits[-1].detach(), batch["noise"])
        target = self.targets(batch, action)
        share = batch["weight"] / self.over_ranks(batch["weight"].sum()).clamp(min=1.0)
        seen = tree.map(lambda x: x[:-1], batch["obs"])
        for _ in range(self.config.critic_updates):
            error = losses.select(self.values(self.critic, seen, action[:-1]), action[:-1]) - target
            critic_loss = 0.5 * (share * error.square()).sum()
            critic_norm = self.critic_optimizer.step(critic_loss)
            self.target.follow()
        with torch.no_grad():
            q = self.values(self.critic, seen, action[:-1])
        logp = logits[:-1].log_softmax(-1)
        advantage = losses.counterfactual_advantage(q, logp.exp(), action[:-1])
        policy_loss = -(share * losses.select(logp, action[:-1]) * advantage).sum()
        entropy = -(share * (logp.exp() * logp).sum(-1)).sum()
        grad_norm = self.optimizer.step(policy_loss - self.entropy_coef * entropy)
        numbers = {
            "policy_loss": policy_loss,
            "critic_loss": critic_loss,
            "entropy": entropy,
            "q": (share * losses.select(q, action[:-1])).sum(),
            "advantage": (share * advantage.abs()).sum(),
            "grad_norm": grad_norm,
            "critic_grad_norm": critic_norm,
        }
        return Update.of({k: x.detach() for k, x in numbers.items()})

    def logits(self, batch: dict[str, Any]) -> Tensor:
        """Of all agents in all rows, `[T + 1, B, N, A]`; those of illegal choices are `NEVER`."""
        if "state" in batch:
            dist = self.model.unroll(batch["obs"], batch["state"], batch["first"])["dist"]  # type: ignore[operator]
        else:
            flat = {"obs": batch["obs"]["obs"].flatten(0, 1)}
            dist = self.model(flat)["dist"].unflatten(0, batch["first"].shape)
        dist = dist.unflatten(-1, (len(self.spec.team), -1))
        return dist.where(batch["mask"], NEVER) if "mask" in batch else dist

    def with_next(self, action: Tensor, logits: Tensor, noise: Tensor) -> Tensor:
        """`[T + 1, B, N]`: behind the rollout, what the policy does next. Behind an episode that was truncated the dead
        row has what it would have done there."""
        return torch.cat([action.long(), (logits + noise).argmax(-1).unsqueeze(0)])

    @torch.no_grad()
    def targets(self, batch: dict[str, Any], action: Tensor) -> Tensor:
        """TD(lambda) of the team's rewards, by the target critic's values of what was done: `[T, B, N]`."""
        value = losses.select(self.values(self.target.module, batch["obs"], action), action)
        reward, terminated, truncated, valid = (
            batch[k].unsqueeze(-1).expand(value[:-1].shape) for k in ("reward", "terminated", "truncated", "valid")
        )
        target: Tensor = returns.lambda_returns(
            value, reward, terminated, truncated, valid, self.config.gamma, self.config.lambda_
        )
        return target

    def rows_of(self, batch: dict[str, Any], *rest: Any) -> dict[str, Any]:
        """Those of the team that are learnt: rows, or sequences where its agents have a memory."""
        found = {k: batch[k] for k in ("action", "reward")} | {"weight": batch["weight"].amax(-1)}
        found["obs"] = tree.map(lambda x: x[:-1], batch["obs"])
        if "state" in batch:
            return found | {"first": batch["first"][:-1], "state": batch["state"]}
        return {k: tree.map(lambda x: x.flatten(0, 1), x) for k, x in found.items()}

    def values(self, critic: nn.Module, obs: Any, action: Tensor) -> Tensor:
        """`[T, B, N, A]`."""
        flat = tree.map(lambda x: x.flatten(0, 1), obs)
        q: Tensor = critic(flat, action.flatten(0, 1)).unflatten(0, action.shape[:2])
        return q
