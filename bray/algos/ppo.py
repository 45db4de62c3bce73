"""PPO: clipped policy optimisation with generalised advantages (Schulman et al. 2017).

Discrete, multi-discrete, continuous and composite actions, with masks; recurrent when the Model is (`use_lstm`).
T steps per rollout, B environments, N = T * B rows; L rows per sequence and S sequences when recurrent.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from bray import act, distributions
from bray.act import Clock
from bray.algos import rnd, rows
from bray.algos.base import Update, to_torch
from bray.algos.packing import pack, take, unpack
from bray.config.declare import Amount, Count, Positive, RateSchedule, Share
from bray.data.experience import Rollouts
from bray.data.piece import Piece
from bray.nn import catalog
from bray.nn.catalog import ModelConfig
from bray.nn.normalize import update_normalizers
from bray.optim import Optimizer
from bray.rl import losses
from bray.spec import EnvSpec


@dataclass(frozen=True)
class Config:
    rollout_length: Count = 128
    """Steps T that each environment takes between two updates."""
    epochs: Count = 4
    """Passes over a rollout."""
    minibatches: Count = 4
    """Pieces into which each pass is cut; one gradient step per piece."""
    lr: RateSchedule = 3e-4
    """Learning rate of Adam; a number or a schedule over env steps."""
    gamma: Share = 0.99
    """Discount per step."""
    lambda_: Share = 0.95
    """GAE's lambda: 0 trusts the value function, 1 the observed return."""
    clip: Positive = 0.2
    """The ratio pi/pi_old counts only within 1 +- clip."""
    dual_clip: Annotated[float, Field(gt=1)] | None = None
    """Bound c of the dual clip for negative advantages; null = off."""
    clip_value: Positive | None = None
    """Bound of the value function's change per update; null = off."""
    entropy_coef: Amount = 0.01
    """Weight of the entropy bonus."""
    value_coef: Amount = 0.5
    """Weight of the value loss."""
    max_grad_norm: Positive | None = 0.5
    """Gradients are scaled down to this norm; null = off."""
    rnd: Amount = 0.0
    """Explore by random network distillation: weight of the reward for what is new, which is 1 on average; 0 = off."""
    rnd_lr: Positive = 1e-3
    """Learning rate of the network that gets to know what was seen."""
    normalize_advantage: bool = True
    """Standardise the advantages of each rollout."""
    target_kl: Positive | None = None
    """Stop the epochs of an update once the policy has moved this far; null = never."""
    adam_eps: Positive = 1e-5
    """Adam's epsilon."""
    precision: Literal["float32", "bfloat16"] = "float32"
    """Arithmetic of the network in updates; bfloat16 pays on CPUs with AMX and on GPUs."""


METRICS = ("policy_loss", "value_loss", "entropy", "kl", "clip_fraction", "grad_norm")


def make_model(config: Config, spec: EnvSpec, model: ModelConfig) -> nn.Module:
    return catalog.make_model("actor_critic", spec, model)


def experience(config: Config, spec: EnvSpec, model: ModelConfig) -> Rollouts:
    return rows.rollouts(config, model)


class Policy(act.Policy):
    """Beside the environment: actions drawn from the distribution head."""

    keeps = ("value",)

    def __init__(self, config: Config, spec: EnvSpec):
        super().__init__(spec.layout, act.make_rule("dist"))


class Learner(rnd.Learner):
    """In the trainer: rollouts in, better weights out."""

    config: Config

    def build(self) -> dict[str, Any]:
        c = self.config
        self.optimizer = Optimizer(self.model.parameters(), self.lr(0), max_grad_norm=c.max_grad_norm, eps=c.adam_eps)
        return {"optimizer": self.optimizer, **self.explore()}

    def prepare(self, data: Piece) -> Any:
        return data if self.novelty else self.advantages(data)

    def advantages(self, data: Piece) -> dict[str, Any]:
        c = self.config
        return rows.advantage_rows(data, self.layout, c.gamma, c.lambda_, c.normalize_advantage)

    def update(self, batch: Any, clock: Clock) -> Update:
        extra: dict[str, float] = {}
        if self.novelty:
            batch, extra["novelty"] = self.novelty.rewarded(batch)
            batch = self.advantages(batch)
        c = self.config
        update_normalizers(self.model, rows.flat_obs(batch), batch["weight"].reshape(-1))
        self.optimizer.set_lr(self.lr(clock.env_steps))
        extra["explained_variance"] = rows.explained_variance(batch["value"], batch["target"], batch["weight"])
        step = self._step.bind(to_torch(pack(batch, c.minibatches), self.device))
        results: list[Tensor] = []
        for _ in range(c.epochs):
            for index in rows.minibatches(self.rng, batch["weight"].shape[-1], c.minibatches):
                results.append(step(torch.from_numpy(index).to(self.device), *(x[0] for x in self.draw())))
                self.steps += 1
            if c.target_kl is not None and Update(METRICS, results[-1]).metrics["kl"] > c.target_kl:
                break
        means = torch.stack(results).mean(0).cpu()
        return Update((*METRICS, *extra), torch.cat([means, torch.tensor(list(extra.values()))]))

    def gradient_step(self, batch: dict[str, Any], index: Tensor, *draws: Tensor) -> Tensor:
        """One minibatch; METRICS."""
        c, minibatch = self.config, take(batch, index)
        with rows.autocast(self.device, c.precision):
            new = rows.actor_critic(self.model, minibatch, draws)
        old = unpack(minibatch)
        logp, entropy = distributions.log_prob_entropy(self.layout, new["dist"], old["action"], old.get("mask"))
        policy_loss, ratio = losses.ppo_clip(logp, old["logp"], old["advantage"], c.clip, c.dual_clip)
        value_loss = losses.value_loss(new["value"], old["target"], old["value"], c.clip_value)
        loss = torch.dot(old["weight"], policy_loss + c.value_coef * value_loss - c.entropy_coef * entropy)
        grad_norm = self.optimizer.step(loss)
        with torch.no_grad():
            change = ratio - 1.0
            kl = change - ratio.log()  # Schulman's low-variance estimate of KL(old, new)
            clipped = (change.abs() > c.clip).float()
            means = torch.mv(torch.stack([policy_loss, value_loss, entropy, kl, clipped]), old["weight"])
        return torch.cat([means, grad_norm.unsqueeze(0)])
