"""IMPALA: actor-critic from rollouts of older weights, corrected by V-trace (Espeholt et al. 2018). One gradient step
per batch.

T steps per rollout, B environments. Workers play on while the learner learns (`num_workers`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from bray import act, distributions, tree
from bray.act import Clock
from bray.algos import base, rows
from bray.algos.base import Update, to_torch
from bray.config.declare import Amount, AmountSchedule, Count, Positive, RateSchedule, Share
from bray.data.piece import Piece
from bray.data.rollouts import Rollouts
from bray.nn import catalog
from bray.nn.catalog import ModelConfig
from bray.optim import Optimizer
from bray.rl import losses, returns
from bray.spec import EnvSpec

DEFAULTS = {"env": {"num_envs": 8}}
"""Of each worker, or of the one process: the rows of a single environment are too much alike for an update."""


@dataclass(frozen=True)
class Config:
    rollout_length: Count = 20
    """Steps T of a rollout. A Model with memory is trained on the whole of it."""
    batch_envs: Count | None = None
    """Environments whose rollouts make a batch; null = those of one worker."""
    lr: RateSchedule = 1e-3
    """Learning rate; a number or a schedule over env steps."""
    optimizer: Literal["adam", "rmsprop"] = "adam"
    """The paper used RMSprop."""
    optimizer_eps: Positive = 1e-5
    """Epsilon of the optimizer; the paper's RMSprop: 0.1."""
    gamma: Share = 0.99
    """Discount per step."""
    lambda_: Share = 1.0
    """Decay of V-trace's correction beside gamma; 1 is the paper's."""
    rho_clip: Positive = 1.0
    """The ratio of the newest policy to the one that acted counts up to this in value targets and in the policy's
    gradient."""
    c_clip: Positive = 1.0
    """The same for what later steps say about earlier ones."""
    entropy_coef: AmountSchedule = 0.01
    """Weight of the entropy bonus; a number or a schedule over env steps."""
    value_coef: Amount = 0.5
    """Weight of the value loss."""
    max_grad_norm: Positive | None = 0.5
    """Gradients are scaled down to this norm; null = off."""


def make_model(config: Config, spec: EnvSpec, model: ModelConfig) -> nn.Module:
    return catalog.make_model("actor_critic", spec, model)


def experience(config: Config, spec: EnvSpec, model: ModelConfig) -> Rollouts:
    steps = config.rollout_length
    return Rollouts(steps, state_every=steps, asynchronous=True, games=config.batch_envs)


class Policy(act.Policy):
    """Beside the environment: actions drawn from the distribution head. Values are the Learner's affair: those of its
    newest weights count."""

    def __init__(self, config: Any, spec: EnvSpec):
        super().__init__(spec.layout, act.make_rule("dist"))


class Learner(base.Learner):
    """In the trainer: rollouts in, better weights out."""

    config: Config

    def build(self) -> dict[str, Any]:
        c = self.config
        self.entropy_coef = self.scheduled("entropy_coef")
        self.optimizer = Optimizer(
            self.model.parameters(),
            self.lr(0),
            kind=c.optimizer,
            max_grad_norm=c.max_grad_norm,
            eps=c.optimizer_eps,
            betas=(0.9, 0.99),
        )
        return {"optimizer": self.optimizer}

    def prepare(self, data: Piece) -> dict[str, Any]:
        """Columns `[T, B, ...]`, observations `[T + 1, B, ...]`. Weights sum to one: a weighted mean is a sum."""
        weight = data.valid.astype(np.float32)
        return {
            "obs": data.seen,
            "action": data.action,
            "logp": data.extras["logp"],
            "reward": data.reward,
            "terminated": data.terminated,
            "truncated": data.truncated,
            "valid": data.valid,
            "weight": weight / max(1.0, self.over_ranks(float(weight.sum()))),
            **rows.masks(data, self.layout),
            **rows.memory(data),
        }

    def update(self, batch: dict[str, Any], clock: Clock) -> Update:
        self.optimizer.set_lr(self.lr(clock.env_steps))
        self.follow_schedules(clock)
        seen, valid = tree.map(lambda x: x[:-1], batch["obs"]), batch["valid"].astype(np.float32)
        with rows.statistics_of_what_acted(self.model, seen, valid, first=not self.steps):
            update: Update = self._step(to_torch(batch, self.device), *(x[0] for x in self.draw()))
        self.steps += 1
        return update

    def gradient_step(self, batch: dict[str, Any], *draws: Tensor) -> Update:
        c, weight = self.config, batch["weight"]
        dist, value = rows.evaluate(self.model, batch, draws)
        logp, entropy = distributions.log_prob_entropy(self.layout, dist[:-1], batch["action"], batch.get("mask"))
        ratio = (logp.detach() - batch["logp"]).exp()
        flags = batch["terminated"], batch["truncated"], batch["valid"]
        clips = c.rho_clip, c.c_clip, c.rho_clip
        target, advantage = returns.vtrace(value.detach(), batch["reward"], *flags, ratio, c.gamma, c.lambda_, *clips)
        policy_loss = -logp * advantage
        value_loss = losses.value_loss(value[:-1], target)
        loss = torch.sum(weight * (policy_loss + c.value_coef * value_loss - self.entropy_coef * entropy))
        numbers = {"policy_loss": policy_loss, "value_loss": value_loss, "entropy": entropy}
        numbers |= {"rho": ratio.clamp(max=c.rho_clip), "grad_norm": self.optimizer.step(loss)}
        return Update.of(numbers, weight)

    def rows_of(self, batch: dict[str, Any], *draws: Tensor) -> dict[str, Any]:
        taken: dict[str, Any] = {k: batch[k] for k in ("action", "logp", "weight", "mask") if k in batch}
        taken["obs"] = tree.map(lambda x: x[:-1], batch["obs"])
        if "first" in batch:
            return {**taken, "first": batch["first"][:-1], "state": batch["state"]}
        return tree.map(lambda x: x.flatten(0, 1), taken)
