"""NFSP: neural fictitious self-play (Heinrich & Silver 2016).   B batch, N actions.

Each agent of a game learns two things: by DQN a best response to the others, and by imitation the average of all the
best responses that it has played. With probability eta (`anticipation`) it plays a game by the first, else by the
second. It is the average that comes to an equilibrium of a two-player zero-sum game, so that is what a trained policy
acts by: what is evaluated, exported and served.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any

import numpy as np
import torch
from pydantic import Field
from torch import Tensor, nn

from bray import act, distributions
from bray.act import GREEDY, TRAINED, Clock, Tick
from bray.algos import base
from bray.algos.base import Update, to_torch
from bray.config.declare import Count, Excludes, Positive, RateSchedule, Share, ShareSchedule, Whole
from bray.data.reservoir import KEEP, Reservoirs
from bray.errors import ConfigError
from bray.nn import catalog
from bray.nn.catalog import ModelConfig
from bray.nn.normalize import update_normalizers
from bray.optim import Optimizer
from bray.rl import losses
from bray.spec import EnvSpec
from bray.target import Target

DEFAULTS = {"env": {"num_envs": 16}}
"""Of one game alone the newest rows are all of one best response."""


def _epsilon() -> dict[str, Any]:
    return {"kind": "linear", "start": 0.1, "end": 0.001, "steps": 500_000}


@dataclass(frozen=True)
class Config:
    anticipation: Share = 0.1
    """Probability eta that an agent plays a game by its best response."""
    lr: RateSchedule = 1e-3
    """Learning rate of Adam for the best response; a number or a schedule over env steps."""
    average_lr: RateSchedule = 1e-3
    """Learning rate of Adam for the average policy; a number or a schedule over env steps."""
    gamma: Share = 1.0
    """Discount per decision. A game is worth what it pays."""
    replay_size: Count = 100_000
    """Transitions kept for the best response: the newest."""
    reservoir_size: Count = 1_000_000
    """Decisions kept for the average policy: of all that best responses ever made, each with the same chance."""
    batch_size: Count = 128
    """Transitions, and as many decisions, per gradient step."""
    learning_starts: Whole = 1_000
    """Env steps before the first gradient step."""
    train_every: Count = 64
    """Decisions between two visits to the learner."""
    updates: Count = 2
    """Gradient steps per visit, of both networks."""
    target_period: Count = 300
    """Gradient steps between two copies of the best response to the target network."""
    tau: Annotated[Annotated[float, Field(gt=0, le=1)] | None, Excludes("target_period")] = None
    """Instead of copies, move the target this fraction of the way after every gradient step; null = copies."""
    epsilon: ShareSchedule = field(default_factory=_epsilon)
    """Probability of a random action where the best response plays; a number or a schedule over env steps."""
    huber: Positive | None = None
    """TD errors beyond this count linearly; null = squared errors."""
    max_grad_norm: Positive | None = 10.0
    """Gradients of each network are scaled down to this norm; null = off."""


class Model(nn.Module):
    """Two networks that share nothing: `dist` of the average policy, `q` of the best response."""

    def __init__(self, average: nn.Module, response: nn.Module):
        super().__init__()
        self.average, self.response = average, response

    def forward(self, obs: Any) -> dict[str, Tensor]:
        return {"dist": self.average(obs)["dist"], "q": self.response(obs)["q"]}


def make_model(config: Config, spec: EnvSpec, model: ModelConfig) -> nn.Module:
    if model.use_lstm:
        raise ConfigError("NFSP replays single decisions and cannot train a memory: set use_lstm=false, or use PPO")
    return Model(catalog.make_model("categorical", spec, model), catalog.make_model("q", spec, model))


def experience(config: Config, spec: EnvSpec, model: ModelConfig) -> Reservoirs:
    return Reservoirs.of(config, spec.frame_stack, reservoir_size=config.reservoir_size)


class Policy(act.Policy):
    """Beside the environment: the average policy, or for a whole game the best response to it."""

    reads = ("dist", "q")

    def __init__(self, config: Config, spec: EnvSpec):
        self.num_actions = spec.num_actions  # refuses spaces that are not Discrete
        super().__init__(spec.layout, act.make_rule("dist"))
        self.response, self.anticipation = act.make_rule("q", {"epsilon": config.epsilon}), config.anticipation
        self._responds = np.zeros(0, bool)

    def act(
        self, outputs: dict[str, np.ndarray], tick: Tick, rng: np.random.Generator | None, mode: str, clock: Clock
    ) -> tuple[Any, dict[str, Any]]:
        action, extras = super().act(outputs, tick, rng, mode, clock)
        if mode == GREEDY or clock == TRAINED:
            return action, extras
        assert rng is not None
        assert tick.first is not None
        drawn = rng.random(len(tick.first)) < self.anticipation
        before = self._responds if len(self._responds) == len(drawn) else np.zeros(len(drawn), bool)
        self._responds = np.where(tick.first, drawn, before)
        best = self.response.choose(self.layout, outputs, self.layout.mask(tick.obs), rng, clock)["action"]
        chosen = np.where(self._responds, best, extras["action"])
        return self.layout.to_env(chosen), {"action": chosen, KEEP: self._responds}

    def acts_by_rule(self) -> bool:
        """Its training over, it is the average policy."""
        return True

    def numbers(self, clock: Clock) -> dict[str, float]:
        return self.response.numbers(clock.env_steps)

    def get_state(self) -> dict[str, np.ndarray]:
        return {"responds": self._responds.copy()}

    def set_state(self, state: dict[str, np.ndarray]) -> None:
        self._responds = np.array(state["responds"], bool)


class Learner(base.Learner):
    """In the trainer: transitions for the best response, its own decisions for the average policy."""

    config: Config
    model: Model

    def build(self) -> dict[str, Any]:
        c, clip = self.config, self.config.max_grad_norm
        self.average_lr = self.scheduled("average_lr")
        self.optimizer = Optimizer(self.model.response.parameters(), self.lr(0), max_grad_norm=clip)
        self.average = Optimizer(self.model.average.parameters(), float(self.average_lr), max_grad_norm=clip)
        self.target = Target(self.model.response, self.optimizer, c.tau or 1.0)
        return {"optimizer": self.optimizer, "average": self.average, "target": self.target}

    def update(self, batch: dict[str, Any], clock: Clock) -> Update:
        c, kept = self.config, batch["kept"]
        for module in (self.model, self.target.module):  # all see the same scale
            update_normalizers(module, batch["obs"], batch["weight"])
        self.follow_schedules(clock)
        self.optimizer.set_lr(self.lr(clock.env_steps))
        self.average.set_lr(float(self.average_lr))
        columns = {k: batch[k] for k in ("obs", "action", "reward", "discount", "next_obs")}
        columns |= {"kept_obs": kept["obs"], "kept_action": kept["action"]}
        masks = {"next_mask": self.layout.legal(batch["next_obs"]), "kept_mask": self.layout.legal(kept["obs"])}
        columns |= {k: x for k, x in masks.items() if x is not None}
        update: Update = self._step(to_torch(columns, self.device))
        self.steps += 1
        if c.tau is None and self.steps % c.target_period == 0:
            self.target.copy()
        return update

    def gradient_step(self, batch: dict[str, Any]) -> Update:
        """One step of each network: Q-learning on all transitions, cross-entropy on what best responses did."""
        q = losses.select(self.model.response(batch["obs"])["q"], batch["action"])
        with torch.no_grad():
            q_next = self.target(batch["next_obs"])["q"]
            if "next_mask" in batch:
                q_next = q_next.masked_fill(~batch["next_mask"], -torch.inf)
        error = losses.td_error(q, batch["reward"], batch["discount"], q_next.amax(-1))
        loss = losses.huber(error, self.config.huber).mean()
        grad_norm = self.optimizer.step(loss)
        dist = self.model.average(batch["kept_obs"])["dist"]
        logp, entropy = distributions.log_prob_entropy(self.layout, dist, batch["kept_action"], batch.get("kept_mask"))
        average_loss = -logp.mean()
        average_grad_norm = self.average.step(average_loss)
        numbers = {"loss": loss, "q": q.mean(), "td_error": error.detach().abs().mean(), "grad_norm": grad_norm}
        more = {"average_loss": average_loss, "entropy": entropy.mean(), "average_grad_norm": average_grad_norm}
        return Update.of(numbers | more)

    def start_with_model(self) -> None:
        self.target.copy()
