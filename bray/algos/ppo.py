"""PPO: clipped policy optimisation with generalised advantages (Schulman et al. 2017).

Discrete, multi-discrete, continuous and composite actions, with masks; recurrent when the Model is (`use_lstm`).
T steps per rollout, B environments, N = T * B rows; L rows per sequence and S sequences when recurrent.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
import torch
from pydantic import Field
from torch import Tensor, nn

from bray import tree
from bray.algos.base import (
    Update,
    actor_critic,
    autocast,
    explained_variance,
    flat_obs,
    load_learner,
    minibatches,
    save_learner,
    to_torch,
)
from bray.capture import capture
from bray.data.trajectory import Trajectory
from bray.nn import catalog, distributions
from bray.nn.catalog import ModelConfig
from bray.nn.normalize import update_normalizers
from bray.optim import Optimizer
from bray.rl import act, losses, returns
from bray.schedules import Schedule, make_schedule
from bray.spec import EnvSpec


@dataclass(frozen=True)
class Config:
    on_policy: ClassVar[bool] = True

    rollout_length: Annotated[int, Field(gt=0)] = 128
    """Steps T that each environment takes between two updates."""
    epochs: Annotated[int, Field(gt=0)] = 4
    """Passes over a rollout."""
    minibatches: Annotated[int, Field(gt=0)] = 4
    """Pieces into which each pass is cut; one gradient step per piece."""
    lr: Schedule = 3e-4
    """Learning rate of Adam; a number or a schedule over env steps."""
    gamma: Annotated[float, Field(ge=0, le=1)] = 0.99
    """Discount per step."""
    lambda_: Annotated[float, Field(ge=0, le=1)] = 0.95
    """GAE's lambda: 0 trusts the value function, 1 the observed return."""
    clip: Annotated[float, Field(gt=0)] = 0.2
    """The ratio pi/pi_old counts only within 1 +- clip."""
    dual_clip: Annotated[float, Field(gt=1)] | None = None
    """Bound c of the dual clip for negative advantages; null = off."""
    clip_value: Annotated[float, Field(gt=0)] | None = None
    """Bound of the value function's change per update; null = off."""
    entropy_coef: Annotated[float, Field(ge=0)] = 0.01
    """Weight of the entropy bonus."""
    value_coef: Annotated[float, Field(ge=0)] = 0.5
    """Weight of the value loss."""
    max_grad_norm: Annotated[float, Field(gt=0)] | None = 0.5
    """Gradients are scaled down to this norm; null = off."""
    normalize_advantage: bool = True
    """Standardise the advantages of each rollout."""
    target_kl: Annotated[float, Field(gt=0)] | None = None
    """Stop the epochs of an update once the policy has moved this far; null = never."""
    adam_eps: Annotated[float, Field(gt=0)] = 1e-5
    """Adam's epsilon."""
    precision: Literal["float32", "bfloat16"] = "float32"
    """Arithmetic of the network in updates; bfloat16 pays on CPUs with AMX and on GPUs."""


METRICS = ("policy_loss", "value_loss", "entropy", "kl", "clip_fraction", "grad_norm")


def make_model(config: Config, spec: EnvSpec, model: ModelConfig) -> nn.Module:
    return catalog.make_model("actor_critic", spec, model)


class Policy:
    """Beside the environment: distribution parameters in, actions out; rollouts into advantages."""

    act_outputs = ("dist",)
    """Outputs that `act` reads."""
    rule = "dist"
    """How a service acts without this class: one of `rl.act.RULES`."""
    keep_outputs = ("value",)
    """Outputs that `samples` reads for all T+1 rows."""

    def __init__(self, config: Config, spec: EnvSpec, max_seq_len: int | None = None):
        self.config, self.layout, self.max_seq_len = config, spec.layout, max_seq_len

    def act(
        self, outputs: dict[str, np.ndarray], obs: Any, rng: np.random.Generator | None, step: int
    ) -> tuple[Any, dict[str, Any]]:
        action, logp = act.sample(self.layout, outputs["dist"], rng, self.layout.mask(obs))
        return self.layout.to_env(action), {"action": action, "logp": logp}

    def samples(self, trajectory: Trajectory) -> dict[str, Any]:
        """Rows `[N, ...]`, or sequences `[L, S, ...]` with their first state when the Model is recurrent."""
        t, c = trajectory, self.config
        value = t.outputs["value"]
        advantage = returns.gae(value, t.reward, t.terminated, t.truncated, t.valid, c.gamma, c.lambda_)
        target = advantage + value[:-1]
        if c.normalize_advantage:
            advantage = returns.standardize(advantage, t.valid)
        mask = self._mask(t.obs, len(t.reward))
        rows = {
            "obs": tree.map(lambda x: x[:-1], t.obs),
            "action": t.extras["action"],
            "logp": t.extras["logp"],
            "value": value[:-1],
            "advantage": advantage,
            "target": target,
            "weight": t.valid.astype(np.float32),
        } | ({} if mask is None else {"mask": mask})
        if "state" not in t.extras:
            return tree.map(lambda x: x.reshape(-1, *x.shape[2:]), rows)
        length = _sequence_length(len(t.reward), self.max_seq_len)
        rows["first"] = t.first[:-1]
        sequences = tree.map(lambda x: _cut(x, length), rows)
        sequences["state"] = tree.map(lambda x: _cut(x, length)[0], t.extras["state"])
        return sequences

    def _mask(self, obs: Any, steps: int) -> np.ndarray | None:
        flat = tree.map(lambda x: x[:steps].reshape(-1, *x.shape[2:]), obs)
        mask = self.layout.mask(flat)
        return None if mask is None else mask.reshape(steps, -1, mask.shape[-1])


def _sequence_length(steps: int, max_seq_len: int | None) -> int:
    """The longest divisor of the rollout length that is at most `max_seq_len`."""
    return max(n for n in range(1, min(steps, max_seq_len or steps) + 1) if steps % n == 0)


def _cut(x: np.ndarray, length: int) -> np.ndarray:
    """`[T, B, ...]` -> `[L, T/L * B, ...]`: pieces of L rows, side by side."""
    steps, batch = x.shape[:2]
    pieces = x.reshape(steps // length, length, batch, *x.shape[2:]).swapaxes(0, 1)
    return np.ascontiguousarray(pieces.reshape(length, -1, *x.shape[2:]))


class Learner:
    """In the trainer: a rollout's samples in, better weights out."""

    def __init__(
        self,
        config: Config,
        spec: EnvSpec,
        model: nn.Module,
        model_config: ModelConfig,
        seed: int = 0,
        record: bool = True,
    ):
        self.config, self.layout, self.model = config, spec.layout, model
        self.device = next(model.parameters()).device
        self.lr = make_schedule(config.lr)
        self.optimizer = Optimizer(
            model.parameters(), self.lr(0), max_grad_norm=config.max_grad_norm, eps=config.adam_eps
        )
        self.rng = np.random.default_rng([seed, 1])
        self.steps = 0
        self._step = capture(self._minibatch, enabled=record)

    def update(self, batch: dict[str, Any], env_steps: int = 0) -> Update:
        c = self.config
        update_normalizers(self.model, flat_obs(batch), batch["weight"].reshape(-1))
        self.optimizer.set_lr(self.lr(env_steps))
        explained = explained_variance(batch["value"], batch["target"], batch["weight"])
        rows = batch["weight"].shape[-1]  # rows, or sequences
        columns = to_torch(pack(batch, c.minibatches), self.device)
        step = self._step.bind(columns)
        results = []
        for _ in range(c.epochs):
            for index in minibatches(self.rng, rows, c.minibatches):
                results.append(step(torch.from_numpy(index).to(self.device)))
                self.steps += 1
            if c.target_kl is not None and float(results[-1][3]) > c.target_kl:
                break
        means = torch.stack(results).mean(0).cpu()
        return Update((*METRICS, "explained_variance"), torch.cat([means, torch.tensor([explained])]))

    def _minibatch(self, batch: dict[str, Any], index: Tensor) -> Tensor:
        c = self.config
        batch = _take(batch, index)
        with autocast(self.device, c.precision):
            dist, value, batch = actor_critic(self.model, batch)
        logp_old, value_old, advantage, target, weight = batch["floats"].unbind(0)
        logp, entropy = distributions.log_prob_entropy(self.layout, dist, batch["action"], batch.get("mask"))
        policy_loss, ratio = losses.ppo_clip(logp, logp_old, advantage, c.clip, c.dual_clip)
        value_loss = losses.value_loss(value, target, value_old, c.clip_value)
        loss = torch.dot(weight, policy_loss + c.value_coef * value_loss - c.entropy_coef * entropy)
        grad_norm = self.optimizer.step(loss)
        with torch.no_grad():
            change = ratio - 1.0
            kl = change - ratio.log()  # Schulman's low-variance estimate of KL(old, new)
            clipped = (change.abs() > c.clip).float()
            means = torch.mv(torch.stack([policy_loss, value_loss, entropy, kl, clipped]), weight)
        return torch.cat([means, grad_norm.unsqueeze(0)])

    def state_dict(self) -> dict[str, Any]:
        return save_learner(self)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        load_learner(self, state)


FLOATS = ("logp", "value", "advantage", "target", "weight")


def pack(batch: dict[str, Any], pieces: int = 1) -> dict[str, Any]:
    """The columns of single floats as one array `[5, ...]`: a minibatch takes its rows from it in one operation. Weights are scaled so
    that the rows of one of `pieces` minibatches sum to one: a weighted mean is then a dot product."""
    scale = pieces / max(1.0, float(batch["weight"].sum()))
    floats = np.stack([batch[k] for k in FLOATS[:-1]] + [batch["weight"] * np.float32(scale)])
    return {k: v for k, v in batch.items() if k not in FLOATS} | {"floats": floats}


def _take(batch: dict[str, Any], index: Tensor) -> dict[str, Any]:
    """A minibatch: rows, or whole sequences (whose axis comes second, but for their states)."""
    axis = 1 if "first" in batch else 0

    def take(name: str, x: Any) -> Any:
        if isinstance(x, dict):
            return {k: take(name, v) for k, v in x.items()}
        if isinstance(x, (list, tuple)):
            return type(x)(take(name, v) for v in x)
        return x.index_select(axis + (name == "floats") if name != "state" else 0, index)

    return {k: take(k, v) for k, v in batch.items()}
