"""GAIL: PPO that is rewarded for what a network takes for demonstrations, nothing else (Ho & Ermon 2016).   N rows, F
features."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from bray import tree
from bray.act import Clock
from bray.algos import ppo, rows
from bray.algos.base import Update, to_torch
from bray.config.declare import Amount, Count, Positive
from bray.data.piece import Piece
from bray.data.rollouts import Rollouts
from bray.errors import ConfigError
from bray.nn.catalog import ModelConfig
from bray.nn.encoders import Features
from bray.nn.functions import action_features
from bray.nn.layers import MLP, linear
from bray.nn.normalize import update_normalizers
from bray.optim import Optimizer
from bray.rl import losses
from bray.spec import EnvSpec

DEFAULTS, Policy, make_model = ppo.DEFAULTS, ppo.Policy, ppo.make_model
"""As PPO acts."""


@dataclass(frozen=True)
class Config(ppo.Config):
    imitation_reward: Literal["positive", "signed"] = "positive"
    """`positive`: -log(1 - D), which likes long episodes; `signed`: log D - log(1 - D), for games that are to end
    soon."""
    discriminator_lr: Positive = 3e-4
    """Learning rate of the discriminator D, which tells demonstrations from what was played."""
    discriminator_epochs: Count = 1
    """Its passes over a rollout and as many demonstrations as `data.share` says."""
    discriminator_batch: Count = 256
    """Rows that were played in each of its gradient steps, about."""
    logit_penalty: Amount = 0.05
    """Weight of the mean square of its logits: the less sure it is, the longer its rewards tell bad from worse."""


def experience(config: Config, spec: EnvSpec, model: ModelConfig) -> Rollouts:
    return rows.rollouts(config, model, demos=True)


class Discriminator(nn.Module):
    """(obs, action `[N]` or `[N, D]`) -> logit of D `[N]`, positive for what looks demonstrated."""

    bounded: Tensor

    def __init__(self, spec: EnvSpec, config: ModelConfig):
        super().__init__()
        self.layout = spec.layout
        self.features = Features(spec.observation, replace(config, normalize_observations=True))
        width = sum(part.n for part in self.layout.parts)
        hidden = (config.fcnet_hiddens, config.fcnet_activation, config.layer_norm, config.init)
        self.trunk = MLP(self.features.out_features + width, *hidden)
        self.head = linear(self.trunk.out_features, 1, 1.0, config.init)
        self.register_buffer("bounded", torch.from_numpy(np.isfinite(self.layout.bounds()).all(0)), persistent=False)

    def forward(self, obs: Any, action: Tensor) -> Tensor:
        action = action.reshape(len(action), -1)
        # An environment clips what a policy draws: beyond the bounds it would be known by that alone.
        action = torch.where(self.bounded, action.clamp(-1.0, 1.0), action)
        x = torch.cat([self.features(obs), action_features(self.layout, action)], 1)
        return self.head(self.trunk(x)).squeeze(1)


class Learner(ppo.Learner):
    """In the trainer: rollouts with demonstrations beside them in, better weights out. The discriminator never leaves
    it."""

    config: Config

    def build(self) -> dict[str, Any]:
        parts = super().build()
        self.discriminator = Discriminator(self.spec, self.model_config).to(self.device)
        self.discriminator_optimizer = Optimizer(self.discriminator.parameters(), self.config.discriminator_lr)
        mine = {"discriminator": self.discriminator, "discriminator_optimizer": self.discriminator_optimizer}
        return parts | mine

    def prepare(self, data: Piece) -> Piece:
        return data  # advantages wait for the rewards

    def update(self, batch: Piece, clock: Clock) -> Update:
        piece, numbers = self.rewarded(batch)
        return super().update(super().prepare(piece), clock) | numbers

    def rewarded(self, piece: Piece) -> tuple[Piece, dict[str, float]]:
        """A rollout with the discriminator's rewards, once that has learnt from it."""
        if piece.demos is None:
            raise ConfigError(
                "GAIL tells what was demonstrated from what it plays itself, and needs both: --data FILES --data-share "
                "0.5 beside --env"
            )
        valid = piece.valid.reshape(-1)
        flat = {"obs": tree.map(lambda x: x[:-1], piece.obs), "action": piece.action}
        flat = tree.map(lambda x: x.reshape(valid.size, *x.shape[2:]), flat)
        theirs = {k: piece.demos[k] for k in flat}
        for obs, weight in ((flat["obs"], valid), (theirs["obs"], None)):
            update_normalizers(self.discriminator, obs, weight)
        played, shown = (to_torch(x, self.device) for x in (flat, theirs))
        numbers = self.learn_to_discriminate(played, shown, np.flatnonzero(valid))
        with torch.no_grad():
            logit = self.discriminator(**played)
            reward = losses.imitation_reward(logit, self.config.imitation_reward == "signed").cpu().numpy()
        reward = np.where(piece.valid, reward.reshape(piece.reward.shape), np.float32(0.0))
        numbers["imitation_reward"] = float(reward.sum() / max(1, len(np.flatnonzero(valid))))
        return replace(piece, reward=reward), numbers

    def learn_to_discriminate(self, played: Any, shown: Any, valid: np.ndarray) -> dict[str, float]:
        """Passes over these rows, in a new order each; means of what its steps say."""
        c, steps = self.config, max(1, round(len(valid) / self.config.discriminator_batch))
        said = []
        for _ in range(c.discriminator_epochs):
            orders = self.rng.permutation(valid), self.rng.permutation(len(shown["action"]))
            pieces = [np.array_split(order, min(steps, *map(len, orders))) for order in orders]
            for mine, theirs in zip(*pieces, strict=True):
                taken = [
                    tree.map(lambda x, i=torch.from_numpy(index).to(self.device): x[i], of)
                    for of, index in ((played, mine), (shown, theirs))
                ]
                said.append(self.discriminator_step(*taken))
        return Update.mean(said).metrics

    def discriminator_step(self, played: dict[str, Any], shown: dict[str, Any]) -> Update:
        """L = -E_demo log D - E_played log(1 - D) + logit_penalty (E_demo l^2 + E_played l^2), l the logit of D."""
        mine, theirs = self.discriminator(**played), self.discriminator(**shown)
        cross_entropy = losses.cross_entropy(theirs, 1.0).mean() + losses.cross_entropy(mine, 0.0).mean()
        size = theirs.square().mean() + mine.square().mean()
        self.discriminator_optimizer.step(cross_entropy + self.config.logit_penalty * size)
        right = [(mine < 0.0).float().mean(), (theirs > 0.0).float().mean()]
        numbers = {"discriminator_loss": cross_entropy, "played_accuracy": right[0], "demo_accuracy": right[1]}
        return Update.of({k: x.detach() for k, x in numbers.items()})
