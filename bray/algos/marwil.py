"""MARWIL: cloning what turned out better than expected more than what did not (Wang et al. 2018).   B batch."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bray.algos import bc, rows
from bray.algos.base import Update
from bray.config.declare import Amount, Positive, Share
from bray.data.experience import Dataset
from bray.data.file_windows import Windows
from bray.nn.catalog import ModelConfig
from bray.rl import losses
from bray.spec import EnvSpec

make_model, Policy = bc.make_model, bc.Policy
"""As BC acts, and a value that is learnt."""
_WHOLE = sys.maxsize
"""Steps of a return: to the end of the episode."""


@dataclass(frozen=True)
class Config(bc.Config):
    beta: Amount = 1.0
    """How much a good outcome counts: a row has weight exp(beta A / c), A = R - V; 0 = BC with a value."""
    gamma: Share = 0.99
    """Discount per step."""
    value_coef: Amount = 1.0
    """Weight of the value loss."""
    norm_rate: Share = 0.01
    """c is the root of the mean square of A, a running one that moves so far with each batch."""
    max_weight: Positive = 20.0
    """A row weighs at most so much."""


def experience(config: Config, spec: EnvSpec, model: ModelConfig) -> Dataset:
    if model.use_lstm:
        return Windows(config.batch_size, model.max_seq_len, gamma=config.gamma)
    return Dataset(config.batch_size, gamma=config.gamma, n_step=_WHOLE)


class Learner(bc.Learner):
    """In the trainer: rows with their returns in, better weights out."""

    config: Config
    untrained = ()

    def build(self) -> dict[str, Any]:
        self.squares = torch.zeros(2, device=self.device)  # sum of A^2, and of its weights
        return super().build() | {"squares": self.squares}

    def columns(self, batch: dict[str, Any]) -> dict[str, Any]:
        more = ("reward", "discount") if self.memory else ("reward", "discount", "next_obs")
        return super().columns(batch) | {k: batch[k] for k in more}

    def gradient_step(self, batch: dict[str, Any], *draws: Tensor) -> tuple[Update, dict[str, Tensor]]:
        """L = -exp(beta A / c) log pi(a) + value_coef (R - V)^2 / 2 - entropy_coef S."""
        c, shape = self.config, batch["weight"].shape
        new, batch, mean, memory = self.outputs(batch, draws, ("dist", "value"))
        logp, entropy = self.log_prob_entropy(new["dist"], batch)
        with torch.no_grad():  # the end of an episode that was cut, or one that counts 0
            if "next_obs" in batch:
                cut = rows.actor_critic(self.model, {"obs": batch["next_obs"]}, draws, ("value",))["value"]
            else:
                cut = values_at_cuts(new["value"].view(shape), batch["weight"].view(shape)).flatten()
        error = losses.td_error(new["value"], batch["reward"], batch["discount"], cut)
        advantage = -error.detach()
        self.squares.lerp_(torch.stack([mean(advantage.square()), torch.ones_like(advantage[0])]), c.norm_rate)
        norm = (self.squares[0] / self.squares[1]).sqrt() + 1e-8
        weight = (c.beta * advantage / norm).exp().clamp(max=c.max_weight)
        policy_loss, value_loss = -mean(weight * logp), 0.5 * mean(error.square())
        loss = policy_loss + c.value_coef * value_loss - c.entropy_coef * mean(entropy)
        grad_norm = self.optimizer.step(loss)
        numbers = {"loss": loss, "policy_loss": policy_loss, "value_loss": value_loss, "entropy": mean(entropy)}
        return Update.of(numbers | {"weight": mean(weight), "grad_norm": grad_norm}), memory


def values_at_cuts(value: Tensor, weight: Tensor) -> Tensor:
    """`[L, B]`: for each row the value of the observation that its episode was cut at, which is the next row without
    weight. While that is still to come, the value of the last row stands in for it."""
    later, found = value[-1], []
    for v, w in zip(value.flip(0), weight.flip(0), strict=True):
        later = torch.where(w > 0, later, v)
        found.append(later)
    return torch.stack(found[::-1])
