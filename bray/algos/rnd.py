"""Random network distillation: a reward for what is new (Burda et al. 2018). An option of algorithms, no algorithm
itself.

A predictor learns what a fixed random network makes of observations. Where few like it were seen, its error is large;
that error, divided by its running root mean square and times `rnd`, is added to the reward of the step that led there.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from bray import tree
from bray.algos import base
from bray.algos.base import to_torch
from bray.data.piece import Piece
from bray.nn.catalog import ModelConfig
from bray.nn.encoders import make_encoder
from bray.nn.layers import HIDDEN_GAIN, linear
from bray.nn.normalize import RunningNorm, update_normalizers
from bray.optim import Optimizer
from bray.spec import EnvSpec

FEATURES = 64
"""What the predictor predicts."""
ROWS = 256
"""Observations per gradient step of the predictor, at most."""


class Novelty(nn.Module):
    """Target, predictor and their statistics; its `state_dict` and that of `optimizer` belong into checkpoints."""

    def __init__(self, spec: EnvSpec, config: ModelConfig, weight: float, lr: float, device: torch.device):
        super().__init__()
        seen = replace(config, custom_model=None, layers=None, use_lstm=False, normalize_observations=True)
        self.target = self._network(spec, seen, 0).requires_grad_(False)
        self.predictor = self._network(spec, seen, 1)
        self.errors = RunningNorm(())
        self.weight = weight
        self.to(device)
        self.optimizer = Optimizer(self.predictor.parameters(), lr)

    def _network(self, spec: EnvSpec, config: ModelConfig, more: int) -> nn.Module:
        encoder = make_encoder(spec.observation, config)
        width = int(encoder.out_features)
        hidden = [layer for _ in range(more) for layer in (linear(width, width, HIDDEN_GAIN, config.init), nn.ReLU())]
        return nn.Sequential(encoder, *hidden, linear(width, FEATURES, 1.0, config.init))

    def error(self, obs: Any) -> Tensor:
        """Mean squared error of the prediction, `[N]`."""
        return (self.predictor(obs) - self.target(obs)).square().mean(1)

    def reward(self, obs: Any, weight: np.ndarray) -> np.ndarray:
        """The reward for arriving at each of the observations `[N, ...]`; then they are learnt. Rows of weight 0 get
        and count nothing."""
        for module in (self.target, self.predictor):
            update_normalizers(module, obs, weight)
        columns = to_torch({"obs": obs, "weight": weight.astype(np.float32)}, self.errors.mean.device)
        rows = [tree.map(lambda x, i=i: x[i : i + ROWS], columns) for i in range(0, len(weight), ROWS)]
        with torch.no_grad():
            error = torch.cat([self.error(r["obs"]) for r in rows])
            self.errors.update(error, columns["weight"])
            size = (self.errors.mean.square() + self.errors.var).sqrt().clamp(min=1e-8).float()
            reward = self.weight * error / size * (columns["weight"] > 0)
        for r in rows:
            self.optimizer.step(torch.mean(r["weight"] * self.error(r["obs"])))
        return reward.cpu().numpy()

    def rewarded(self, piece: Piece) -> tuple[Piece, float]:
        """A rollout with these rewards added, and their mean."""
        after = tree.map(lambda x: x[1:].reshape(-1, *x.shape[2:]), piece.seen)
        bonus = self.reward(after, piece.valid.reshape(-1)).reshape(piece.reward.shape)
        return replace(piece, reward=piece.reward + bonus), float(bonus.sum() / max(1, np.count_nonzero(piece.valid)))


def make_novelty(learner: base.Learner) -> tuple[Novelty | None, dict[str, Any]]:
    """What `rnd` in a Learner's Config asks for, and what checkpoints hold of it. Called by its `build`, last: weights
    are drawn."""
    c = learner.config
    if not getattr(c, "rnd", 0.0):  # PG has no such option
        return None, {}
    novelty = Novelty(learner.spec, learner.model_config, c.rnd, c.rnd_lr, learner.device)
    return novelty, {"novelty": novelty, "novelty_optimizer": novelty.optimizer}
