"""MAPPO: PPO for the agents of a game, with a critic that sees the state of the whole game (Yu et al. 2022).

Each agent acts by what it sees itself. The critic sees the game's `global_state` beside it, learns returns less their
running mean, by their running deviation, and stays with the Learner: what is published, exported and served are the
agents. Without a global state this is PPO, each agent for itself (IPPO, de Witt et al. 2020).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from bray import act, tree
from bray.act import Clock
from bray.algos import ppo, rows
from bray.algos.base import Update, to_torch
from bray.config.declare import Positive
from bray.data.piece import Piece
from bray.errors import ConfigError
from bray.nn import catalog
from bray.nn.catalog import ModelConfig
from bray.nn.normalize import update_normalizers
from bray.spec import EnvSpec


@dataclass(frozen=True)
class Config(ppo.Config):
    max_grad_norm: Positive | None = 10.0
    """Gradients of agents and critic together are scaled down to this norm; null = off."""
    normalize_value: bool = True
    """The critic learns returns less their running mean, by their running standard deviation."""


def make_model(config: Config, spec: EnvSpec, model: ModelConfig) -> nn.Module:
    if spec.global_state is None:
        raise ConfigError(
            f"MAPPO's critic sees the state of the whole game, and {spec.id} declares none: define global_state_space "
            "and global_state() in the game (docs/agents.md), or use PPO"
        )
    return catalog.make_model("actor", spec, model)


class Policy(act.Policy):
    """Beside the environment: actions drawn from the distribution head. Values are the Learner's."""

    def __init__(self, config: Config, spec: EnvSpec):
        super().__init__(spec.layout, act.make_rule("dist"))


class Learner(ppo.Learner):
    """PPO's, with a critic of its own in place of the Model's value."""

    def build(self) -> dict[str, Any]:
        self.critic = catalog.make_model("state_value", self.spec, self.model_config).to(self.device)
        return {**super().build(), "critic": self.critic}

    def parameters(self) -> Iterable[nn.Parameter]:
        return [*self.model.parameters(), *self.critic.parameters()]

    def prepare(self, data: Piece) -> Piece:
        return data  # values are computed by weights, which `prepare` does not read

    def update(self, batch: Piece, clock: Clock) -> Update:
        piece = self.with_new_values(batch)
        update = super().update(piece if self.novelty else self.rows_to_learn(piece), clock)
        update_normalizers(self.critic, tree.map(lambda x: x[:-1], piece.obs), piece.valid)
        return update

    @torch.no_grad()
    def with_new_values(self, piece: Piece) -> Piece:
        obs = tree.map(lambda x: x.flatten(0, 1), to_torch(piece.seen, self.device))
        value = self.critic(obs).float().reshape(piece.first.shape)
        return replace(piece, outputs={"value": value if isinstance(piece.reward, Tensor) else value.cpu().numpy()})

    def outputs(self, batch: dict[str, Any], draws: tuple[Tensor, ...]) -> dict[str, Tensor]:
        new = rows.actor_critic(self.model, batch, draws, ("dist",))
        obs = batch["obs"] if "first" not in batch else tree.map(lambda x: x.flatten(0, 1), batch["obs"])
        return new | {"value": self.critic(obs).float()}
