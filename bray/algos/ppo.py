"""PPO: clipped policy optimisation with generalised advantages (Schulman et al. 2017).

Discrete, multi-discrete, continuous and composite actions, with masks; recurrent when the Model is (`use_lstm`).
T steps per rollout, B environments, N = T * B rows; L rows per sequence and S sequences when recurrent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from bray import act, distributions, tree
from bray.act import Clock
from bray.algos import magnet, rnd, rows
from bray.algos.base import Update, to_torch
from bray.config.declare import Amount, AmountSchedule, Count, Needs, Positive, RateSchedule, Share
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
    magnet_coef: AmountSchedule = 0.0
    """Weight of a penalty on KL(pi, magnet), for self-play, which goes in circles without it (Sokota et al. 2023), and
    to keep to demonstrations for a while; a number or a schedule over env steps. 0 = no magnet."""
    magnet: Annotated[Literal["uniform", "slow", "start"], Needs("magnet_coef")] = "uniform"
    """What the policy is drawn to: `uniform`, all legal actions alike (continuous ones: mean 0, deviation 1), `slow`, a
    copy of the policy that follows it, or `start`, the policy of `init_from`."""
    magnet_tau: Annotated[float, Field(gt=0, le=1)] = 0.01
    """The slow copy moves this fraction of the way after each update."""
    normalize_value: bool = False
    """The value network learns returns less their running mean, by their running standard deviation (MAPPO, Yu et al.
    2022)."""
    recompute_advantages: bool = False
    """Compute values and advantages anew before every epoch after the first."""
    adam_eps: Positive = 1e-5
    """Adam's epsilon."""
    precision: Literal["float32", "bfloat16"] = "float32"
    """Arithmetic of the network in updates; bfloat16 pays on CPUs with AMX and on GPUs."""


def make_model(config: Any, spec: EnvSpec, model: ModelConfig) -> nn.Module:
    return catalog.make_model("actor_critic", spec, model)


def experience(config: Any, spec: EnvSpec, model: ModelConfig) -> Rollouts:
    return rows.rollouts(config, model)


class Policy(act.Policy):
    """Beside the environment: actions drawn from the distribution head."""

    keeps = ("value",)

    def __init__(self, config: Any, spec: EnvSpec):
        super().__init__(spec.layout, act.make_rule("dist"))


class Learner(rows.Learner):
    """In the trainer: rollouts in, better weights out."""

    config: Config

    def build(self) -> dict[str, Any]:
        c = self.config
        if c.recompute_advantages and is_recurrent(self.model):
            raise ConfigError(
                "recompute_advantages=true does not go with a memory (use_lstm=true, or a custom_model that returns a "
                "state): leave one of them out"
            )
        self.optimizer = Optimizer(self.parameters(), self.lr(0), max_grad_norm=c.max_grad_norm, eps=c.adam_eps)
        self.entropy_coef = self.scheduled("entropy_coef", 0.0 if self.layout.continuous else 0.01)
        self.kl_coef = torch.tensor(float(c.kl_coef), device=self.device)
        self.returns = RunningNorm(()).to(self.device)
        self.magnet, drawn_to = magnet.make_magnet(self, self.optimizer)
        self.novelty, explorer = rnd.make_novelty(self)
        return {
            "optimizer": self.optimizer,
            **({"kl_coef": self.kl_coef} if c.kl_coef else {}),
            **({"returns": self.returns} if c.normalize_value else {}),
            **drawn_to,
            **explorer,
        }

    def parameters(self) -> Iterable[nn.Parameter]:
        """Of all networks that a gradient step changes."""
        return self.model.parameters()

    def prepare(self, data: Piece) -> Any:
        return data if self.novelty else self.rows_to_learn(data)

    def update(self, batch: Any, clock: Clock) -> Update:
        c = self.config
        self.optimizer.set_lr(self.lr(clock.env_steps))
        self.follow_schedules(clock)
        numbers: dict[str, float] = {}
        if self.novelty:
            batch, numbers["novelty"] = self.novelty.rewarded(batch)
            batch = self.rows_to_learn(batch)
        piece, batch = batch.get("piece"), {k: x for k, x in batch.items() if k != "piece"}
        numbers["explained_variance"] = rows.explained_variance(batch)
        batch = self.in_new_units(batch)
        steps: list[Update] = []
        with rows.statistics_of_what_acted(self.model, batch["obs"], batch["weight"], first=not self.steps):
            for epoch in range(c.epochs):
                if epoch == 0:
                    one_pass = self.bind(batch)
                elif c.recompute_advantages:
                    one_pass = self.bind(self.advantage_rows(self.with_new_values(piece)))
                last = one_pass()
                steps += last
                if c.target_kl is not None and self.over_ranks(last[-1].metrics["kl"]) > c.target_kl:
                    break
        if self.magnet:
            self.magnet.follow()
        return Update.mean(steps) | numbers | self.adapt_kl_coef(last)

    def gradient_step(self, batch: dict[str, Any], *draws: Tensor) -> Update:
        """One minibatch: L = -L_clip + value_coef L_value - entropy_coef S."""
        c, weight = self.config, batch["weight"]
        with rows.autocast(self.device, c.precision):
            new = self.outputs(batch, draws)
        logp, entropy = distributions.log_prob_entropy(self.layout, new["dist"], batch["action"], batch.get("mask"))
        ratio = (logp - batch["logp"]).exp()
        policy_loss = self.policy_loss(ratio, batch["advantage"])
        if c.kl_coef:
            policy_loss = policy_loss + self.kl_coef * losses.kl_estimate(batch["logp"], logp)
        if self.magnet:
            magnet_kl = self.magnet.kl(new["dist"], batch, draws)
            policy_loss = policy_loss + self.magnet.coef * magnet_kl
        value_loss = losses.value_loss(new["value"], batch["target"], batch["value"], c.clip_value)
        loss = torch.dot(weight, policy_loss + c.value_coef * value_loss - self.entropy_coef * entropy)
        grad_norm = self.optimizer.step(loss)
        with torch.no_grad():
            change = ratio - 1.0
            numbers = {
                "policy_loss": policy_loss,
                "value_loss": value_loss,
                "entropy": entropy,
                # Schulman's low-variance estimate of KL(old, new); a row of weight 0 may hold what is illegal in it
                "kl": change - torch.where(weight > 0.0, ratio, 1.0).log(),
                "clip_fraction": (change.abs() > c.clip).float(),
                "grad_norm": grad_norm,
            }
            if self.magnet:
                numbers["magnet_kl"] = magnet_kl
        return Update.of(numbers, weight)

    def outputs(self, batch: dict[str, Any], draws: tuple[Tensor, ...]) -> dict[str, Tensor]:
        """`dist` and `value` of the rows of a batch."""
        return rows.actor_critic(self.model, batch, draws)

    def policy_loss(self, ratio: Tensor, advantage: Tensor) -> Tensor:
        """Of each row, ratio = pi/pi_old; another one in a class of your own is another surrogate."""
        return losses.clipped_surrogate(ratio, advantage, self.config.clip, self.config.dual_clip)

    # --- rows and options ---------------------------------------------------------------------------------------------

    def rows_to_learn(self, data: Piece) -> dict[str, Any]:
        batch = self.advantage_rows(data)
        return {**batch, "piece": data} if self.config.recompute_advantages else batch

    def advantage_rows(self, data: Piece) -> dict[str, Any]:
        c = self.config
        if c.normalize_value:
            data = replace(data, outputs={"value": self.returns.restore(data.outputs["value"])})
        standardize = c.normalize_advantage
        return rows.advantage_rows(data, self.layout, c.gamma, c.lambda_, standardize, self.over_ranks)

    def in_new_units(self, batch: dict[str, Any]) -> dict[str, Any]:
        """`normalize_value`: the statistics of returns move, and the old values with them, as the network's own do:
        `clip_value` bounds what learning changes."""
        if not self.config.normalize_value:
            return batch
        said = self.returns.standardize(batch["value"])
        self.returns.update(batch["target"], batch["weight"])
        return batch | {"value": self.returns.restore(said)}

    def bind(self, batch: dict[str, Any]) -> Callable[[], list[Update]]:
        """`passes_over` these rows, whose values and targets are in units of the network."""
        if self.config.normalize_value:
            batch = batch | {k: self.returns.standardize(batch[k]) for k in ("value", "target")}
        return self.passes_over(batch)

    @torch.no_grad()
    def with_new_values(self, piece: Piece) -> Piece:
        """`recompute_advantages`: the rollout with the values of the weights as they are now."""
        obs = tree.map(lambda x: x.flatten(0, 1), to_torch(piece.seen, self.device))
        value = self.model(obs)["value"].float().reshape(piece.first.shape)
        return replace(piece, outputs={"value": value if isinstance(piece.reward, Tensor) else value.cpu().numpy()})

    def adapt_kl_coef(self, last: list[Update]) -> dict[str, float]:
        """The weight of the KL penalty, where there is one; then it follows the KL of the last epoch."""
        c = self.config
        if not c.kl_coef:
            return {}
        before, kl = float(self.kl_coef), self.over_ranks(Update.mean(last).metrics["kl"])
        if kl > 1.5 * c.kl_aim:
            self.kl_coef *= 2.0
        elif kl < c.kl_aim / 1.5:
            self.kl_coef /= 2.0
        return {"kl_coef": before}
