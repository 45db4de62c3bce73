"""BC: behavioural cloning, doing what demonstrators did (Pomerleau 1989).   B batch, P parameters of a distribution."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from bray import act, distributions, tree
from bray.act import Clock
from bray.algos import base, ppo, rows
from bray.algos.base import Update, drawn, to_torch
from bray.config.declare import Amount, Count, Positive
from bray.data.experience import Dataset
from bray.data.file_windows import Windows
from bray.errors import ConfigError, DataError
from bray.inference.torch_engine import is_recurrent
from bray.nn.catalog import ModelConfig
from bray.nn.normalize import update_normalizers
from bray.optim import Optimizer
from bray.spec import ActionLayout, EnvSpec


@dataclass(frozen=True)
class Config:
    lr: Positive = 1e-3
    """Learning rate of Adam."""
    batch_size: Count = 256
    """Rows per gradient step."""
    entropy_coef: Amount = 0.0
    """Weight of an entropy bonus: it keeps a policy that has seen few demonstrations from being sure of everything."""
    min_std: Positive = 0.05
    """Standard deviations of numbers are learnt down to this, in units of [-1, 1]: a demonstrator that always does the
    same would make them 0. What starts from this policy explores with it."""
    max_grad_norm: Positive | None = None
    """Gradients are scaled down to this norm; null = off."""


def make_model(config: Any, spec: EnvSpec, model: ModelConfig) -> nn.Module:
    """PPO's, so that PPO can go on from its weights."""
    return ppo.make_model(config, spec, model)


def without_memory(config: Any, spec: EnvSpec, model: ModelConfig) -> nn.Module:
    """The same for those who learn from single rows."""
    if model.use_lstm:
        raise ConfigError("it learns from single rows and cannot train a memory: set use_lstm=false")
    return make_model(config, spec, model)


def experience(config: Config, spec: EnvSpec, model: ModelConfig) -> Dataset:
    return Windows(config.batch_size, model.max_seq_len) if model.use_lstm else Dataset(config.batch_size)


class Policy(act.Policy):
    """Beside the environment: actions drawn from the distribution head, as PPO's."""

    def __init__(self, config: Any, spec: EnvSpec):
        super().__init__(spec.layout, act.make_rule("dist"))


class Learner(base.Learner):
    """In the trainer: rows of demonstrations in, better weights out."""

    config: Config
    untrained: tuple[str, ...] = ("value",)

    def build(self) -> dict[str, Any]:
        c = self.config
        self.optimizer = Optimizer(self.model.parameters(), c.lr, max_grad_norm=c.max_grad_norm)
        self.least = least_params(self.layout, c.min_std).to(self.device)
        self.memory: dict[str, Tensor] = {}
        if is_recurrent(self.model):
            columns = experience(c, self.spec, self.model_config).columns  # type: ignore[attr-defined]
            self.memory = dict(self.model.initial_state(columns))  # type: ignore[operator]
        return {"optimizer": self.optimizer} | {f"memory.{name}": x for name, x in self.memory.items()}

    def update(self, batch: dict[str, Any], clock: Clock) -> Update:
        update_normalizers(self.model, batch["obs"], batch["weight"])
        columns = self.columns(batch)
        if self.memory:
            columns |= {"first": batch["first"], "state": self.memory}
        update: Update
        update, memory = self._step(to_torch(columns, self.device), *(x[0] for x in self.draw()))
        for name, x in self.memory.items():
            x.copy_(memory[name])
        self.steps += 1
        return update

    def columns(self, batch: dict[str, Any]) -> dict[str, Any]:
        """What `gradient_step` reads of a batch."""
        return {k: batch[k] for k in ("obs", "action", "weight")} | legal_choices(self.layout, batch)

    def gradient_step(self, batch: dict[str, Any], *draws: Tensor) -> tuple[Update, dict[str, Tensor]]:
        """L = -log pi(a) - entropy_coef S; and what a Model with memory remembers at the end of its rows."""
        new, batch, mean, memory = self.outputs(batch, draws, ("dist",))
        logp, entropy = (mean(x) for x in self.log_prob_entropy(new["dist"], batch))
        loss = -(logp + self.config.entropy_coef * entropy)
        grad_norm = self.optimizer.step(loss)
        numbers = {"policy_loss": -logp, "entropy": entropy, "grad_norm": grad_norm}
        return Update.of({"loss": loss} | numbers), memory

    def outputs(
        self, batch: dict[str, Any], draws: tuple[Tensor, ...], names: tuple[str, ...]
    ) -> tuple[dict[str, Tensor], dict[str, Any], Callable[[Tensor], Tensor], dict[str, Tensor]]:
        """For the rows of a batch `[N, ...]`, or `[L, B, ...]` where the Model has a memory: outputs `[N, ...]`, the
        other columns `[N, ...]`, the mean over rows that count, and what is remembered behind the last ones."""
        if "state" not in batch:
            return rows.actor_critic(self.model, batch, draws, names), batch, torch.mean, {}
        noise = drawn(self.model, draws)
        out = self.model.unroll(batch["obs"], batch["state"], batch["first"], *noise)  # type: ignore[operator]
        flat = {k: x.flatten(0, 1) for k, x in batch.items() if isinstance(x, Tensor) and k != "obs"}
        share = flat["weight"] / flat["weight"].sum()
        new = {k: out[k].float().flatten(0, 1) for k in names}
        return new, flat, partial(torch.dot, share), {k: x.detach() for k, x in out["state"].items()}

    def log_prob_entropy(self, dist: Tensor, batch: dict[str, Any]) -> tuple[Tensor, Tensor]:
        """Of the demonstrated actions."""
        dist = torch.maximum(dist, self.least)
        logp, entropy = distributions.log_prob_entropy(self.layout, dist, batch["action"], batch.get("mask"))
        return logp, entropy


def least_params(layout: ActionLayout, min_std: float) -> Tensor:
    """`[P]`: minus infinity, but for logarithms of standard deviations."""
    least = torch.full((layout.num_params,), -torch.inf)
    for part in layout.parts:
        if part.kind == "gaussian":
            least[part.param.start + part.n : part.param.stop] = math.log(min_std)
    return least


def legal_choices(layout: ActionLayout, batch: dict[str, Any]) -> dict[str, np.ndarray]:
    """`mask`, where observations have one. A demonstrator who did what is masked would be learnt from without end; in
    rows without weight nobody did anything."""
    lead = batch["action"].shape[: batch["action"].ndim - len(layout.shape)]
    mask = layout.legal(tree.map(lambda x: x.reshape(-1, *x.shape[len(lead) :]), batch["obs"]))
    if mask is None:
        return {}
    mask |= batch["weight"].reshape(-1, 1) == 0
    choices, at = batch["action"].reshape(len(mask), -1), 0
    for part in (p for p in layout.parts if p.kind == "categorical"):
        choice = choices[:, part.action.start].astype(np.int64)
        wrong = np.flatnonzero(~mask[np.arange(len(mask)), at + choice])
        if len(wrong):
            raise DataError(
                f"the files hold choice {choice[wrong[0]]} where the action_mask of its observation forbids it "
                f"({len(wrong)} of {len(mask)} rows of a batch): mend the mask or leave these episodes out"
            )
        at += part.n
    return {"mask": mask.reshape(*lead, -1)}
