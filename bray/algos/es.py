"""ES: evolution strategies with antithetic noise and ranked returns (Salimans et al. 2017). No gradients: whole
episodes of perturbed weights.

B environments play B members of a generation, 2i and 2i + 1 with the weights moved by + and - sigma noise_i.   P
weights, M = B / 2 directions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from bray import act, tree
from bray.act import Clock, Tick
from bray.act.policy import Deciding
from bray.algos import base
from bray.algos.base import Update
from bray.config.declare import Amount, Positive, RateSchedule
from bray.data.generation import Generation
from bray.errors import ConfigError
from bray.nn import catalog
from bray.nn.catalog import ModelConfig
from bray.nn.noise import NOISE
from bray.nn.normalize import update_normalizers
from bray.nn.perturbed import Perturbed
from bray.optim import Optimizer
from bray.spec import EnvSpec

DEFAULTS = {"env": {"num_envs": 32}, "model": {"fcnet_hiddens": [32, 32], "normalize_observations": True}}
"""An environment is a member of the generation. Few weights: the noise of the estimate grows with their number."""


@dataclass(frozen=True)
class Config:
    lr: RateSchedule = 0.03
    """Learning rate of Adam; a number or a schedule over env steps."""
    sigma: Positive = 0.1
    """Standard deviation of the noise on every weight."""
    l2: Amount = 0.005
    """Weight decay, as a part of the gradient."""


def make_model(config: Any, spec: EnvSpec, model: ModelConfig) -> nn.Module:
    if model.use_lstm:
        raise ConfigError("ES and ARS without memory is what is here: set use_lstm=false, or use PPO or A2C")
    made = catalog.make_model("actor_critic", spec, model, memory=False)
    return Perturbed(made, catalog.example_obs(spec.observation, 1))


def experience(config: Any, spec: EnvSpec, model: ModelConfig) -> Generation:
    return Generation()


def directions(key: int, pairs: int, size: int) -> np.ndarray:
    """Standard normal `[M, P]`; Policy and Learner make them from the same key, so that only the key travels."""
    return np.random.default_rng(key).standard_normal((pairs, size), np.float32)


class Policy(act.Policy):
    """Beside the environment: the best action by the weights of each member. New weights get new noise."""

    def __init__(self, config: Any, spec: EnvSpec):
        super().__init__(spec.layout, act.make_rule("best"))
        self.sigma = config.sigma
        self._drawn_for: tuple[int, int] | None = None

    def decide(self, tick: Tick, carry: Any, rng: np.random.Generator | None, mode: str, clock: Clock) -> Deciding:
        if mode == act.GREEDY or not self.draws:
            return (yield from super().decide(tick, carry, rng, act.GREEDY, clock))
        assert rng is not None
        games = tree.length(tick.obs)
        if self._drawn_for != (clock.version, games):
            self._drawn_for, self._key = (clock.version, games), int(rng.integers(1 << 62))
            noise = self.sigma * directions(self._key, games // 2, *self.draws[NOISE])
            self._noise = np.stack([noise, -noise], 1).reshape(games, -1)
        outputs = yield tick.obs, {NOISE: self._noise}
        action, extras = self.act(outputs, tick, None, act.GREEDY, clock)
        return act.Decision(action, {**extras, "key": np.full(games, self._key)}, None, outputs)

    def acts_by_rule(self) -> bool:
        """What is served is the weights themselves, without noise."""
        return True


class Learner(base.Learner):
    """In the trainer: returns of a generation in, better weights out."""

    config: Any
    model: Perturbed

    def build(self) -> dict[str, Any]:
        self.optimizer = Optimizer(self.model.moved_parameters(), self.lr(0))
        return {"optimizer": self.optimizer}

    def update(self, batch: dict[str, Any], clock: Clock) -> Update:
        returns = batch["return"]
        self.optimizer.set_lr(self.lr(clock.env_steps))
        update_normalizers(self.model, batch["obs"])
        noise = directions(int(batch["key"][0]), len(returns) // 2, *self.model.draws[NOISE])
        weight = self.weights(returns[0::2], returns[1::2]).astype(np.float32)
        update: Update = self._step(*(torch.from_numpy(x).to(self.device) for x in (weight, noise)))
        self.steps += 1
        return update | {"return_mean": returns.mean(), "return_max": returns.max(), "return_std": returns.std()}

    def weights(self, plus: np.ndarray, minus: np.ndarray) -> np.ndarray:
        """How far each direction counts `[M]`: 1 / (B sigma) of the difference of the centred ranks of its two
        returns."""
        ranks = centred_ranks(np.concatenate([plus, minus]))
        return (ranks[: len(plus)] - ranks[len(plus) :]) / (2 * len(plus) * self.config.sigma)

    def gradient_step(self, weight: Tensor, noise: Tensor) -> Update:
        """Up the estimated gradient."""
        theta = self.optimizer.flat
        grad_norm = self.optimizer.apply(self.config.l2 * theta - weight @ noise)
        return Update.of({"grad_norm": grad_norm, "weight_norm": torch.linalg.vector_norm(theta)})


def centred_ranks(x: np.ndarray) -> np.ndarray:
    """Ranks from -1/2 (the smallest) to 1/2; equal numbers share the mean of their ranks. `[N]` -> `[N]`."""
    _, inverse, counts = np.unique(x, return_inverse=True, return_counts=True)
    ranks = (np.cumsum(counts) - (counts + 1) / 2)[inverse]
    return ranks / max(1, len(x) - 1) - 0.5
