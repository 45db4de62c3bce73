"""PPO: clipped policy optimisation with generalised advantages (Schulman et al. 2017).

Discrete, multi-discrete, continuous and composite actions, with masks; recurrent when the Model is (`use_lstm`).
T steps per rollout, B environments, N = T * B rows; L rows per sequence and S sequences when recurrent.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from bray import act, distributions, tree
from bray.act import Clock
from bray.algos import rnd, rows
from bray.algos.base import Update, to_torch
from bray.algos.packing import pack, piece_size, take, unpack
from bray.config.declare import Amount, AmountSchedule, Count, Positive, RateSchedule, Share
from bray.data.piece import Piece
from bray.data.rollouts import Rollouts
from bray.errors import ConfigError
from bray.inference.torch_engine import is_recurrent
from bray.nn import catalog
from bray.nn.catalog import ModelConfig
from bray.nn.normalize import RunningNorm
from bray.optim import Optimizer
from bray.rl import losses
from bray.spec import EnvSpec

DEFAULTS = {"env": {"num_envs": 8}}
"""Rollouts of several environments are less alike than one long rollout, and quicker."""


@dataclass(frozen=True)
class Config:
    rollout_length: Count = 256
    """Steps T that each environment takes between two updates."""
    epochs: Count = 10
    """Passes over a rollout."""
    minibatches: Count = 32
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
    entropy_coef: AmountSchedule | None = None
    """Weight of the entropy bonus; a number or a schedule over env steps. null = 0.01, or 0 where all actions are
    continuous: it would keep their noise large."""
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
    kl_coef: Amount = 0.0
    """First weight of a penalty on KL(old, new), beside the clip; it is doubled or halved after an update that ends
    beyond 1.5 times or below 2/3 of `kl_aim`. 0 = no penalty."""
    kl_aim: Positive = 0.01
    """Where that penalty holds the KL of an update."""
    normalize_value: bool = False
    """The value network learns returns less their running mean, by their running standard deviation (MAPPO, Yu et al.
    2022)."""
    recompute_advantages: bool = False
    """Compute values and advantages anew before every epoch after the first."""
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
        if c.recompute_advantages and is_recurrent(self.model):
            raise ConfigError(
                "recompute_advantages=true does not go with a memory (use_lstm=true, or a custom_model that returns a "
                "state): leave one of them out"
            )
        self.optimizer = Optimizer(self.model.parameters(), self.lr(0), max_grad_norm=c.max_grad_norm, eps=c.adam_eps)
        self.entropy_coef = self.scheduled("entropy_coef", 0.0 if self.layout.continuous else 0.01)
        self.kl_coef = torch.tensor(float(c.kl_coef), device=self.device)
        self.returns = RunningNorm(())
        return {
            "optimizer": self.optimizer,
            **({"kl_coef": self.kl_coef} if c.kl_coef else {}),
            **({"returns": self.returns} if c.normalize_value else {}),
            **self.explore(),
        }

    def prepare(self, data: Piece) -> Any:
        return data if self.novelty else self.rows_to_learn(data)

    def rows_to_learn(self, data: Piece) -> dict[str, Any]:
        batch = self.advantage_rows(data)
        return {**batch, "piece": data} if self.config.recompute_advantages else batch

    def advantage_rows(self, data: Piece) -> dict[str, Any]:
        c = self.config
        if c.normalize_value:
            data = replace(data, outputs={"value": self.returns.restore(data.outputs["value"])})
        return rows.advantage_rows(data, self.layout, c.gamma, c.lambda_, c.normalize_advantage)

    def update(self, batch: Any, clock: Clock) -> Update:
        extra: dict[str, float] = {}
        if self.novelty:
            batch, extra["novelty"] = self.novelty.rewarded(batch)
            batch = self.rows_to_learn(batch)
        c = self.config
        self.optimizer.set_lr(self.lr(clock.env_steps))
        self.follow_schedules(clock)
        extra["explained_variance"] = rows.explained_variance(batch["value"], batch["target"], batch["weight"])
        if c.normalize_value:
            # the old values move with the statistics, as the network's own do: `clip_value` bounds what learning
            # changes
            said = self.returns.standardize(batch["value"])
            self.returns.update(batch["target"], batch["weight"])
            batch = batch | {"value": self.returns.restore(said)}
        piece = batch.get("piece")
        batch = {k: x for k, x in batch.items() if k != "piece"}
        results: list[Tensor] = []
        seen = rows.flat_obs(batch), batch["weight"].reshape(-1)
        with rows.statistics_of_what_acted(self.model, *seen, first=not self.steps):
            for epoch in range(c.epochs):
                before = len(results)
                if epoch == 0:
                    step = self.bind(batch)
                elif piece is not None:
                    step = self.bind(self.advantage_rows(self.with_new_values(piece)))
                for index in rows.minibatches(self.rng, batch["weight"].shape[-1], c.minibatches):
                    results.append(step(torch.from_numpy(index).to(self.device), *(x[0] for x in self.draw())))
                    self.steps += 1
                if c.target_kl is not None and Update(METRICS, results[-1]).metrics["kl"] > c.target_kl:
                    break
        means = torch.stack(results).mean(0).cpu()
        update = Update((*METRICS, *extra), torch.cat([means, torch.tensor(list(extra.values()))]))
        return self.with_kl_coef(update, results[before:]) if c.kl_coef else update

    def bind(self, batch: dict[str, Any]) -> Any:
        """`gradient_step` on the rows of this batch."""
        if self.config.normalize_value:
            batch = batch | {k: self.returns.standardize(batch[k]) for k in ("value", "target")}
        return self._step.bind(to_torch(pack(batch, self.config.minibatches), self.device))

    def rows_of(self, batch: dict[str, Any], index: Tensor, *draws: Tensor) -> dict[str, Any]:
        return take(batch, index)

    def gradient_step(self, batch: dict[str, Any], index: Tensor, *draws: Tensor) -> Tensor:
        """One minibatch; METRICS."""
        c, minibatch = self.config, take(batch, index)
        with rows.autocast(self.device, c.precision):
            new = rows.actor_critic(self.model, minibatch, draws)
        old = unpack(minibatch, piece_size(batch["floats"].shape[-1], c.minibatches))
        logp, entropy = distributions.log_prob_entropy(self.layout, new["dist"], old["action"], old.get("mask"))
        policy_loss, ratio = losses.ppo_clip(logp, old["logp"], old["advantage"], c.clip, c.dual_clip)
        if c.kl_coef:
            policy_loss = policy_loss + self.kl_coef * losses.kl_estimate(old["logp"], logp)
        value_loss = losses.value_loss(new["value"], old["target"], old["value"], c.clip_value)
        loss = torch.dot(old["weight"], policy_loss + c.value_coef * value_loss - self.entropy_coef * entropy)
        grad_norm = self.optimizer.step(loss)
        with torch.no_grad():
            change = ratio - 1.0
            kl = change - ratio.log()  # Schulman's low-variance estimate of KL(old, new)
            clipped = (change.abs() > c.clip).float()
            means = torch.mv(torch.stack([policy_loss, value_loss, entropy, kl, clipped]), old["weight"])
        return torch.cat([means, grad_norm.unsqueeze(0)])

    # --- options ------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def with_new_values(self, piece: Piece) -> Piece:
        """The rollout with the values of the weights as they are now."""
        obs = tree.map(lambda x: x.flatten(0, 1), to_torch(piece.seen, self.device))
        value = self.model(obs)["value"].float().cpu().numpy().reshape(piece.first.shape)
        return replace(piece, outputs={"value": value})

    def with_kl_coef(self, update: Update, last: list[Tensor]) -> Update:
        """Adapt the weight of the penalty to the KL of the last epoch; it joins the numbers of the update."""
        c, kl = self.config, Update(METRICS, torch.stack(last).mean(0)).metrics["kl"]
        names, values = (*update.names, "kl_coef"), torch.cat([update.values, self.kl_coef.cpu().reshape(1)])
        if kl > 1.5 * c.kl_aim:
            self.kl_coef *= 2.0
        elif kl < c.kl_aim / 1.5:
            self.kl_coef /= 2.0
        return Update(names, values)
