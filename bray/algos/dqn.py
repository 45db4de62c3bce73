"""DQN: double Q-learning on n-step returns (Mnih 2015; van Hasselt 2016; Wang 2016; Schaul 2016).   B batch, N
actions."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
import torch
from pydantic import Field
from torch import Tensor, nn

from bray import act, tree
from bray.act import Clock
from bray.algos import base, rnd
from bray.algos.base import Update, drawn, to_torch
from bray.config.declare import Amount, Count, Excludes, Positive, RateSchedule, Share, ShareSchedule, Whole
from bray.data.experience import Replay
from bray.data.piece import Piece, nstep_td_errors
from bray.errors import ConfigError
from bray.nn import catalog
from bray.nn.catalog import ModelConfig
from bray.nn.normalize import update_normalizers
from bray.optim import Optimizer
from bray.rl import losses
from bray.spec import EnvSpec
from bray.target import Target


def _epsilon() -> dict[str, Any]:
    return {"kind": "linear", "start": 1.0, "end": 0.05, "steps": 10_000}


@dataclass(frozen=True)
class Config:
    lr: RateSchedule = 5e-4
    """Learning rate of Adam; a number or a schedule over env steps."""
    gamma: Share = 0.99
    """Discount per step."""
    n_step: Count = 1
    """Rewards summed before bootstrapping; a sample carries discount = gamma**n, or 0 where the episode terminated."""
    double: bool = True
    """Choose the next action with the online network, value it with the target network."""
    dueling: bool = False
    """Q = V + A - mean(A)."""
    noisy: bool = False
    """Explore by learned noise on the weights of the last layers (Fortunato et al. 2018); epsilon may then be 0."""
    rnd: Amount = 0.0
    """Explore by random network distillation: weight of the reward for what is new, which is 1 on average; 0 = off."""
    rnd_lr: Positive = 1e-3
    """Learning rate of the network that gets to know what was seen."""
    prioritized: bool = False
    """Draw samples with probability ~ |TD error|**priority_alpha instead of uniformly."""
    priority_alpha: Amount = 0.6
    """How strongly priorities count; 0 = uniform."""
    priority_beta: ShareSchedule = 0.4
    """Correction of that bias by importance weights, 1 = full; a number or a schedule over env steps."""
    initial_priority: Literal["max", "td_error"] = "max"
    """Priority of a new transition: the largest so far, so that each is soon learnt from; or its own |TD error|, by the
    values that it was played with, in pieces of 16 rows (Horgan et al. 2018)."""
    replay_size: Count = 100_000
    """Transitions kept."""
    max_use: Count | None = None
    """Draws after which a transition retires, looked at after each batch; null = no limit."""
    max_staleness: Count | None = None
    """Transitions collected this many gradient steps ago, or more, are not drawn; null = no limit."""
    batch_size: Count = 64
    """Transitions per gradient step."""
    learning_starts: Whole = 1_000
    """Env steps before the first gradient step."""
    train_every: Count = 4
    """Env steps between two visits to the learner."""
    updates: Count = 1
    """Gradient steps per visit."""
    target_period: Count = 250
    """Gradient steps between two copies of the online network to the target network."""
    tau: Annotated[Annotated[float, Field(gt=0, le=1)] | None, Excludes("target_period")] = None
    """Instead of copies, move the target this fraction of the way after every gradient step; null = copies."""
    epsilon: ShareSchedule = field(default_factory=_epsilon)
    """Probability of a random action; a number or a schedule over env steps."""
    epsilon_spread: Amount = 0.0
    """Environment i of N, those of all workers, explores with epsilon ** (1 + epsilon_spread * i / (N - 1)); 0 = all
    alike. A single one, and live games, which have no number, have the exponent of the middle."""
    huber: Positive | None = None
    """TD errors beyond this count linearly (1 is usual for Atari's clipped rewards); null = squared errors. With large
    returns a small value learns the median instead of the mean and overestimates states from which few transitions end
    the episode."""
    max_grad_norm: Positive | None = 10.0
    """Gradients are scaled down to this norm; null = off."""
    max_grad_value: Positive | None = None
    """Each entry of a gradient is clamped to this value, up and down (1 in many tutorials, with `max_grad_norm: null`);
    null = off."""
    priorities_are_td_errors: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.initial_priority == "td_error" and not self.priorities_are_td_errors:
            raise ConfigError(
                "initial_priority=td_error is for priorities that are TD errors of single transitions (DQN, Ape-X); "
                "this algorithm's are of another kind: leave it at max"
            )


def make_model(config: Config, spec: EnvSpec, model: ModelConfig, **head: Any) -> nn.Module:
    """head: what else the Q network of a relative of DQN is made of."""
    if model.use_lstm:
        raise ConfigError("DQN replays single steps and cannot train a memory: set use_lstm=false, or use R2D2 or PPO")
    return catalog.make_model("q", spec, model, dueling=config.dueling, noisy=config.noisy, **head)


def experience(config: Config, spec: EnvSpec, model: ModelConfig) -> Replay:
    return Replay.of(config, spec.frame_stack)


class Policy(act.Policy):
    """Beside the environment: epsilon-greedy over the Model's action values."""

    def __init__(self, config: Config, spec: EnvSpec):
        self.num_actions = spec.num_actions  # refuses spaces that are not Discrete
        super().__init__(spec.layout, act.make_rule("q", {"epsilon": config.epsilon, "spread": config.epsilon_spread}))
        self.config = config
        self.labels = getattr(config, "prioritized", False) and config.initial_priority == "td_error"
        if self.labels:
            self.keeps = ("q",)

    def label(self, piece: Piece) -> Piece:
        """With the TD error of each row by the values that acted, where priorities begin with it; the values themselves
        are not sent on."""
        if not self.labels:
            return piece
        q, mask = piece.outputs["q"], self.layout.legal(tree.map(lambda x: x.reshape(-1, *x.shape[2:]), piece.obs))
        value = q.max(-1) if mask is None else np.where(mask.reshape(q.shape), q, -np.inf).max(-1)
        chosen = np.take_along_axis(q[:-1], piece.action[..., None], -1)[..., 0]
        error = nstep_td_errors(piece, chosen, value, self.config.n_step, self.config.gamma)
        return replace(piece, outputs={}, extras={**piece.extras, "priority": error})


class Learner(base.Learner):
    """In the trainer: replayed transitions in, better weights and new priorities out."""

    config: Config

    def build(self) -> dict[str, Any]:
        c = self.config
        self.optimizer = Optimizer(
            self.model.parameters(), self.lr(0), max_grad_norm=c.max_grad_norm, max_grad_value=c.max_grad_value
        )
        self.target = Target(self.model, self.optimizer, c.tau or 1.0)
        self.novelty, explorer = rnd.make_novelty(self)
        return {"optimizer": self.optimizer, "target": self.target, **explorer}

    def update(self, batch: dict[str, Any], clock: Clock) -> Update:
        for module in (self.model, self.target.module):  # both see the same scale
            self.observe(module, batch)
        self.optimizer.set_lr(self.lr(clock.env_steps))
        numbers: dict[str, float] = {}
        if self.novelty:
            batch, numbers["novelty"] = self.rewarded(batch, self.novelty)
        update: Update
        update, error = self._step(to_torch(self.columns(batch), self.device), *self.draw(3))
        self.steps += 1
        if self.config.tau is None and self.steps % self.config.target_period == 0:
            self.target.copy()
        update |= numbers
        if self.config.prioritized:
            update.priorities = error.cpu().numpy()
        return update

    def rewarded(self, batch: dict[str, Any], novelty: rnd.Novelty) -> tuple[dict[str, Any], float]:
        """With a reward for how new the observation is that each transition ends with, and the mean of these."""
        bonus = novelty.reward(batch["next_obs"], np.ones(len(batch["reward"]), bool))
        return batch | {"reward": batch["reward"] + bonus}, float(bonus.mean())

    def observe(self, module: nn.Module, batch: dict[str, Any]) -> None:
        """Show the observations of a batch to what normalises them."""
        update_normalizers(module, batch["obs"], batch["weight"])

    def columns(self, batch: dict[str, Any]) -> dict[str, Any]:
        """What `gradient_step` reads of a batch."""
        columns = {k: batch[k] for k in ("obs", "action", "reward", "discount", "next_obs", "weight")}
        mask = self.layout.legal(batch["next_obs"])
        return columns if mask is None else columns | {"next_mask": mask}

    def gradient_step(self, batch: dict[str, Any], *draws: Tensor) -> tuple[Update, Tensor]:
        """And the size of the errors. The three forwards draw their noise apart (Fortunato et al. 2018)."""
        online, target, choose = (drawn(self.model, [x[i] for x in draws]) for i in range(3))
        each, error, q = self.errors(batch, online, target, choose)
        loss = torch.mean(batch["weight"] * each)
        grad_norm = self.optimizer.step(loss)
        if self.config.tau is not None:
            self.target.follow()
        error = error.detach().abs()
        return Update.of({"loss": loss, "q": q.mean(), "td_error": error.mean(), "grad_norm": grad_norm}), error

    def errors(self, batch: dict[str, Any], online: Any, target: Any, choose: Any) -> tuple[Tensor, Tensor, Tensor]:
        """Per transition: its loss, the error that its priority comes from, and Q of the action taken. The last three
        are the draws of noise for the three forwards."""
        values = self.model(batch["obs"], *online)["q"]
        q = losses.select(values, batch["action"])
        with torch.no_grad():
            q_next = self.next_value(batch, target, choose)
        td_error = losses.td_error(q, batch["reward"], batch["discount"], q_next)
        return self.sample_loss(batch, values, td_error), td_error, q

    def sample_loss(self, batch: dict[str, Any], values: Tensor, td_error: Tensor) -> Tensor:
        """Of each transition, by the values of all actions of its observation and its TD error."""
        return losses.huber(td_error, self.config.huber)

    def next_value(self, batch: dict[str, Any], target: Any, choose: Any) -> Tensor:
        """Of the next observation, by the target network."""
        q = self.target(batch["next_obs"], *target)["q"]
        return losses.select(q, self.best_next(batch, q, choose))

    def best_next(self, batch: dict[str, Any], q_target: Tensor, choose: Any) -> Tensor:
        """The legal action of the next observation that is best by the online network, or by the target if not
        `double`."""
        return self.best(batch, self.model(batch["next_obs"], *choose)["q"] if self.config.double else q_target)

    def best(self, batch: dict[str, Any], q: Tensor) -> Tensor:
        """The legal action with the largest value."""
        if "next_mask" in batch:
            q = q.masked_fill(~batch["next_mask"], -torch.inf)
        return q.argmax(-1)
