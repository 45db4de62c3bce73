"""DT: the Decision Transformer, which plays for the return that it is asked for (Chen et al. 2021).   L rows, B
columns, P parameters of a distribution, A features of an action."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from bray import act
from bray.act import Clock
from bray.act.asking import ASKED
from bray.algos import bc
from bray.algos.base import Update
from bray.config.declare import Amount, Count, Positive
from bray.data.file_windows import Windows
from bray.errors import ConfigError
from bray.nn import catalog
from bray.nn.catalog import ModelConfig
from bray.nn.functions import action_features
from bray.spec import ACTION_MASK, ActionLayout, EnvSpec, Space

DEFAULTS = {
    "model": {
        "use_lstm": True,
        "recurrent": "gtrxl",
        "attention_window": 32,
        "attention_layers": 2,
        "lstm_cell_size": 64,
        "fcnet_hiddens": [64],
    }
}
"""A transformer over time; its window is how far back each layer looks."""
OBS, TO_GO, BEFORE = "obs", "return_to_go", "previous_action"


@dataclass(frozen=True)
class Config(bc.Config):
    lr: Positive = 5e-4
    """Learning rate of Adam."""
    batch_size: Count = 1024
    """Rows per gradient step: `batch_size` / `max_seq_len` sequences."""
    max_grad_norm: Positive | None = 1.0
    """Gradients are scaled down to this norm; null = off."""
    weight_decay: Amount = 1e-4
    """Weights shrink by this share of the learning rate at every step."""
    target_return: float | None = None
    """The return that it plays for, where nobody asks for another one (`bray eval --target-return`, the start of a
    session); null = the largest in the files."""


class Model(nn.Module):
    """One token for each step, made of the return that is still to come, the observation and the action before; from
    those of the past the action. It plays what it finds most likely, and remembers that it did."""

    recurrent = True
    scale: Tensor
    best: Tensor

    def __init__(self, spec: EnvSpec, config: ModelConfig):
        super().__init__()
        self.layout = spec.layout
        self.bare = spec.observation.kind != "dict"
        width = sum(part.n for part in self.layout.parts)
        more = {TO_GO: Space("box", (1,), "float32"), BEFORE: Space("box", (width,), "float32")}
        parts = dict(_parts(spec.observation)) | more
        seen = Space("dict", names=tuple(parts), parts=tuple(parts.values()))
        self.network = catalog.make_model("actor", replace(spec, observation=seen), config)
        self.width = width
        self.register_buffer("scale", torch.full((1,), 1e-6))
        self.register_buffer("best", torch.zeros(1))

    def initial_state(self, batch_size: int) -> dict[str, Tensor]:
        """Zeros: what the transformer saw, the action before, and what it was asked for (`bray.act.asking`)."""
        memory: dict[str, Tensor] = self.network.initial_state(batch_size)  # type: ignore[operator]
        zeros = self.scale.new_zeros
        return {**memory, BEFORE: zeros(batch_size, self.width), ASKED: zeros(batch_size, 3)}

    def forward(self, obs: Any, state: dict[str, Tensor]) -> dict[str, Any]:
        memory = dict(state)
        before, asked = memory.pop(BEFORE), memory.pop(ASKED)
        left, told, reward = asked.split(1, 1)
        to_go = torch.where(told > 0.5, left - reward, self.best.expand_as(left))
        seen = {OBS: obs} if self.bare else dict(obs)
        out = self.network({**seen, TO_GO: to_go / self.scale, BEFORE: before}, memory)
        asked = torch.cat([to_go, torch.ones_like(left), torch.zeros_like(left)], 1)
        mask = None if self.bare else obs.get(ACTION_MASK)
        before = likeliest(self.layout, out["dist"], None if mask is None else mask.flatten(1))
        return {"dist": out["dist"], "state": {**out["state"], BEFORE: before, ASKED: asked}}

    def unroll(self, seen: Any, state: dict[str, Tensor], first: Tensor) -> dict[str, Any]:
        """Over what was `seen [L, B, ...]`, returns and actions too, as `Learner.seen` makes it."""
        rest = {name: state[name] for name in (BEFORE, ASKED)}
        memory = {name: x for name, x in state.items() if name not in rest}
        out = self.network.unroll(seen, memory, first)  # type: ignore[operator]
        return {"dist": out["dist"], "state": {**out["state"], **rest}}


def _parts(space: Space) -> list[tuple[str, Space]]:
    return list(space.items) if space.kind == "dict" else [(OBS, space)]


def likeliest(layout: ActionLayout, dist: Tensor, mask: Tensor | None) -> Tensor:
    """The features `[B, A]` of the action that the rule `best` chooses."""
    columns, at = [], 0
    for part in layout.parts:
        x = dist[:, part.param]
        if part.kind == "gaussian":
            columns.append(x[:, : part.n].clamp(-1.0, 1.0))
            continue
        if mask is not None:
            x = x.masked_fill(mask[:, at : at + part.n] <= 0, -1e9)
        columns.append((torch.arange(part.n, device=x.device) == x.argmax(1, keepdim=True)).to(dist.dtype))
        at += part.n
    return torch.cat(columns, 1)


def make_model(config: Config, spec: EnvSpec, model: ModelConfig) -> nn.Module:
    if not model.use_lstm:
        raise ConfigError("DT is a transformer over time: leave use_lstm=true, or use BC")
    if taken := {TO_GO, BEFORE} & set(spec.observation.names):
        raise ConfigError(f"DT has a name of its own {sorted(taken)} that {spec.id} has in its observations: rename it")
    return Model(spec, model)


def experience(config: Config, spec: EnvSpec, model: ModelConfig) -> Windows:
    return Windows(config.batch_size, model.max_seq_len)


class Policy(act.Policy):
    """Beside the environment: the most likely action, always; another one would have to be told to the Model."""

    def __init__(self, config: Any, spec: EnvSpec):
        super().__init__(spec.layout, act.make_rule("best"))


class Learner(bc.Learner):
    """In the trainer: rows of files with the returns that came after them in, better weights out."""

    config: Config
    model: Any

    def build(self) -> dict[str, Any]:
        parts = super().build()
        self.optimizer.weight_decay = self.config.weight_decay
        return parts

    def update(self, batch: dict[str, Any], clock: Clock) -> Update:
        self.note_returns(batch)
        return super().update({**batch, "obs": self.seen(batch)}, clock)

    def note_returns(self, batch: dict[str, Any]) -> None:
        """How large returns are in the files, and the largest of an episode."""
        self.model.scale.clamp_(min=float(np.abs(batch["to_go"]).max()))
        starts = batch["to_go"][batch["first"] & (batch["weight"] > 0)]
        if self.config.target_return is not None:
            self.model.best.fill_(self.config.target_return)
        elif len(starts):
            best = float(starts.max())
            self.model.best.fill_(best if self.steps == 0 else max(best, float(self.model.best)))

    def seen(self, batch: dict[str, Any]) -> dict[str, Any]:
        """The tokens of rows `[L, B]`: an episode's first has no action before it."""
        action = torch.from_numpy(batch["before"])
        features = action_features(self.layout, action.reshape(-1, self.layout.size)).numpy()
        features = np.clip(features, -1.0, 1.0) * ~batch["first"].reshape(-1, 1)
        obs = batch["obs"] if isinstance(batch["obs"], dict) and not self.model.bare else {OBS: batch["obs"]}
        to_go = batch["to_go"][..., None] / float(self.model.scale)
        before = features.reshape(*batch["first"].shape, -1).astype(np.float32)
        return {**obs, TO_GO: to_go.astype(np.float32), BEFORE: before}

    def numbers(self) -> dict[str, float]:
        return super().numbers() | {"target_return": float(self.model.best)}
