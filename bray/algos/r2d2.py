"""R2D2: DQN with a memory, on replayed sequences (Kapturowski et al. 2019).   L rows that are learnt, B sequences, N
actions.

A sequence is `burn_in` rows that only bring the memory up to date, from the state stored when it was played, then L
rows that are learnt.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from bray import tree
from bray.algos import dqn
from bray.algos.rnd import Novelty
from bray.config.declare import Amount, Count, Share, ShareSchedule, Whole
from bray.data.experience import Sequences
from bray.data.piece import Piece, nstep
from bray.errors import ConfigError
from bray.inference.torch_engine import is_recurrent
from bray.nn import catalog
from bray.nn.catalog import ModelConfig
from bray.nn.normalize import update_normalizers
from bray.rl import losses
from bray.spec import EnvSpec

Policy = dqn.Policy
"""As DQN acts; the memory travels beside it."""
DEFAULTS = {"model": {"use_lstm": True, "lstm_cell_size": 64, "fcnet_hiddens": [64], "fcnet_activation": "relu"}}
"""The memory of each replayed row is stored, so it is small."""


@dataclass(frozen=True)
class Config(dqn.Config):
    sequence_length: Count = 32
    """Rows L of a sequence that are learnt. (The paper: 80, for Atari.)"""
    burn_in: Whole = 8
    """Rows before them that bring the stored memory up to date. (The paper: 40.)"""
    rescale: bool = True
    """Learn h(Q) = sign(Q) (sqrt(|Q| + 1) - 1) + Q / 1000 in place of Q, so that large returns need no clipped
    rewards."""
    eta: Share = 0.9
    """Priority of a sequence: eta times its largest |TD error| + (1 - eta) times the mean."""
    n_step: Count = 5
    """Rewards summed before bootstrapping."""
    dueling: bool = True
    """Q = V + A - mean(A)."""
    prioritized: bool = True
    """Draw sequences with probability ~ priority**priority_alpha instead of uniformly."""
    priority_alpha: Amount = 0.9
    """How strongly priorities count; 0 = uniform."""
    priority_beta: ShareSchedule = 0.6
    """Correction of that bias by importance weights, 1 = full; a number or a schedule over env steps."""
    batch_size: Count = 32
    """Sequences per gradient step."""
    train_every: Count = 8
    """Env steps between two visits to the learner."""

    priorities_are_td_errors = False

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("max_use", "max_staleness"):
            if getattr(self, name) is not None:
                raise ConfigError(
                    f"{name} counts draws of single transitions and R2D2 replays sequences: leave it null, or use DQN"
                )


def make_model(config: Config, spec: EnvSpec, model: ModelConfig) -> nn.Module:
    if not model.use_lstm and model.custom_model is None:
        raise ConfigError("R2D2 is DQN with a memory: set use_lstm=true, or use DQN")
    made = catalog.make_model("q", spec, model, memory=True, dueling=config.dueling, noisy=config.noisy)
    if not is_recurrent(made):
        raise ConfigError(
            "R2D2 is DQN with a memory: the forward of custom_model should take and return a state; or use DQN"
        )
    return made


def experience(config: Config, spec: EnvSpec, model: ModelConfig) -> Sequences:
    return Sequences.of(config, spec.frame_stack, length=config.sequence_length, burn_in=config.burn_in)


def windows(data: dict[str, Any], burn_in: int, n_step: int, gamma: float) -> dict[str, Any]:
    """The rows of sequences that are learnt, with sums of up to n rewards and the row to bootstrap from; windows end
    with the episode or the sequence."""
    names = ("action", "reward", "terminated", "truncated", "valid")
    action, reward, terminated, truncated, valid = (tree.index(data[k], slice(burn_in, None)) for k in names)
    piece = Piece(data["obs"], action, reward, terminated, truncated, valid, data["first"])
    total, discount, after = nstep(piece, n_step, gamma)
    columns = {k: data[k] for k in ("obs", "first", "state", "weight")}
    columns |= {"action": action, "reward": total, "discount": discount, "after": after}
    return columns | {"valid": valid.astype(np.float32)}


def burnt_in(model: Any, batch: dict[str, Any], burn_in: int, draws: Any = ()) -> Any:
    """The memory with which the rows that are learnt begin."""
    if not burn_in:
        return batch["state"]
    before = tree.map(lambda x: x[:burn_in], batch["obs"])
    with torch.no_grad():
        return model.unroll(before, batch["state"], batch["first"][:burn_in], *draws)["state"]


class Learner(dqn.Learner):
    """DQN's, with sequences in place of transitions: `[T, B]` columns, and one loss, weight and priority for each of
    B."""

    config: Config

    def prepare(self, data: dict[str, Any]) -> dict[str, Any]:
        return data if self.novelty else self._windows(data)

    def _windows(self, data: dict[str, Any]) -> dict[str, Any]:
        return windows(data, self.config.burn_in, self.config.n_step, self.config.gamma)

    def observe(self, module: nn.Module, batch: dict[str, Any]) -> None:
        update_normalizers(module, batch["obs"])

    def rewarded(self, batch: dict[str, Any], novelty: Novelty) -> tuple[dict[str, Any], float]:
        """Each row that is learnt is paid for the observation that it leads to, before rewards are summed."""
        learnt = slice(self.config.burn_in, None)
        reward, valid = batch["reward"].copy(), batch["valid"][learnt]
        after = tree.map(lambda x: x[learnt][1:].reshape(-1, *x.shape[2:]), batch["obs"])
        bonus = novelty.reward(after, valid.reshape(-1)).reshape(valid.shape)
        reward[learnt] += bonus
        return self._windows(batch | {"reward": reward}), float(bonus.sum() / max(1, np.count_nonzero(valid)))

    def columns(self, batch: dict[str, Any]) -> dict[str, Any]:
        seen = tree.map(lambda x: x[self.config.burn_in :], batch["obs"])
        mask = self.layout.legal(tree.map(lambda x: x.reshape(-1, *x.shape[2:]), seen))
        if mask is None:
            return batch
        rows = len(batch["reward"]) + 1
        return batch | {"next_mask": mask.reshape(rows, -1, mask.shape[-1])}

    def errors(self, batch: dict[str, Any], online: Any, target: Any, choose: Any) -> tuple[Tensor, Tensor, Tensor]:
        """Per sequence: its loss, its priority, and the mean Q of the actions taken."""
        c, valid = self.config, batch["valid"]
        values = self._unroll(self.model, batch, online)
        q = losses.select(values[:-1], batch["action"])
        with torch.no_grad():
            q_target = self._unroll(self.target.module, batch, target)
            best = self.best(batch, values if c.double else q_target)
            q_next = losses.select(q_target, best).gather(0, batch["after"])
        error = losses.rescaled_td_error if c.rescale else losses.td_error
        td_error = error(q, batch["reward"], batch["discount"], q_next) * valid
        count = valid.sum(0).clamp(min=1.0)
        size = td_error.detach().abs()
        priority = c.eta * size.amax(0) + (1.0 - c.eta) * size.sum(0) / count
        return losses.huber(td_error, c.huber).sum(0) / count, priority, (q * valid).sum(0) / count

    def _unroll(self, model: Any, batch: dict[str, Any], draws: Any) -> Tensor:
        """Action values of the rows that are learnt and of the one behind them, `[L + 1, B, N]`."""
        burn_in, state = self.config.burn_in, burnt_in(model, batch, self.config.burn_in, draws)
        rest = tree.map(lambda x: x[burn_in:], batch["obs"])
        q: Tensor = model.unroll(rest, state, batch["first"][burn_in:], *draws)["q"]
        return q

    def rows_of(self, batch: dict[str, Any], *draws: Tensor) -> dict[str, Any]:
        """All columns `[L, B]`; a row that is valid counts as much as its sequence."""
        learnt = slice(self.config.burn_in, -1)
        taken = {k: batch[k] for k in ("action", "reward", "discount", "after")}
        taken |= {"obs": tree.map(lambda x: x[learnt], batch["obs"]), "first": batch["first"][learnt]}
        return taken | {
            "state": burnt_in(self.model, batch, self.config.burn_in),
            "weight": batch["valid"] * batch["weight"],
        }
