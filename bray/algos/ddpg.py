"""DDPG: a deterministic actor that climbs its critic (Lillicrap et al. 2016).   B batch, D action dimensions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

import torch
from pydantic import Field
from torch import Tensor, nn

from bray import act
from bray.act import Clock
from bray.algos import base
from bray.algos.base import Update, drawn, to_torch
from bray.capture import capture
from bray.config.declare import Amount, Count, Positive, RateSchedule, Share, ShareSchedule, Whole
from bray.data.experience import Replay
from bray.nn import catalog
from bray.nn.catalog import ModelConfig
from bray.nn.normalize import update_normalizers
from bray.optim import Optimizer
from bray.rl import losses
from bray.spec import EnvSpec
from bray.target import Target

DEFAULTS = {"model": {"fcnet_activation": "relu", "fcnet_hiddens": [256, 256]}}


@dataclass(frozen=True)
class OffPolicy:
    """What DDPG, TD3 and all forms of SAC share."""

    lr: RateSchedule = 1e-3
    """Learning rate of the actor; a number or a schedule over env steps."""
    critic_lr: Positive = 1e-3
    """Learning rate of the critics."""
    gamma: Share = 0.99
    """Discount per step."""
    n_step: Count = 1
    """Rewards summed before bootstrapping."""
    prioritized: bool = False
    """Draw samples with probability ~ |TD error|**priority_alpha instead of uniformly."""
    priority_alpha: Amount = 0.6
    """How strongly priorities count; 0 = uniform."""
    priority_beta: ShareSchedule = 0.4
    """Correction of that bias by importance weights, 1 = full; a number or a schedule over env steps."""
    replay_size: Count = 1_000_000
    """Transitions kept."""
    max_use: Count | None = None
    """Draws after which a transition retires, looked at after each batch; null = no limit."""
    max_staleness: Count | None = None
    """Transitions collected this many gradient steps ago, or more, are not drawn; null = no limit."""
    batch_size: Count = 256
    """Transitions per gradient step."""
    learning_starts: Whole = 500
    """Env steps with random actions before the first gradient step."""
    train_every: Count = 1
    """Env steps between two visits to the learner."""
    updates: Count = 1
    """Gradient steps per visit."""
    max_grad_norm: Positive | None = None
    """Gradients are scaled down to this norm; null = off."""


@dataclass(frozen=True)
class Noise:
    """How those with continuous actions explore."""

    random_hold: Count = 32
    """Random actions before `learning_starts` are white noise in the first half, a new one at every step, and pink in
    the second: sums of numbers that change every 1, 2, 4, ... steps, up to this many; 1 = white all the time."""
    noise_hold: Count = 1
    """The noise of actions afterwards is pink up to this many steps (Eberhard et al. 2023); 1 = white. Live games have
    white noise."""


@dataclass(frozen=True)
class Config(Noise, OffPolicy):
    tau: Annotated[float, Field(gt=0, le=1)] = 0.005
    """The targets of actor and critics move this fraction of the way after every step of the actor."""
    noise: ShareSchedule = 0.1
    """Standard deviation of the Gaussian noise on actions, in units of [-1, 1]; a number or a schedule over env
    steps."""


def make_model(config: Config, spec: EnvSpec, model: ModelConfig) -> nn.Module:
    return catalog.make_model("deterministic", spec, model)


def experience(config: OffPolicy, spec: EnvSpec, model: ModelConfig) -> Replay:
    return Replay.of(config, spec.frame_stack)


class Policy(act.Policy):
    """Beside the environment: the actor's action and noise; random ones before learning starts."""

    def __init__(self, config: Config, spec: EnvSpec):
        base.check_bounded(spec)
        settings = {name: getattr(config, name) for name in ("noise", "learning_starts", "random_hold", "noise_hold")}
        super().__init__(spec.layout, act.make_rule("deterministic", settings))


class Learner(base.Learner):
    """In the trainer: replayed transitions in, better weights out. Critics and targets never leave it.

    A step of the critics, and after every `policy_delay` of them one of the actor: two recordings. TD3 and SAC are this
    with other hooks:
    `values`, `actor_loss`."""

    config: Config
    actor_numbers: tuple[str, ...] = ("actor_loss",)
    """What `actor_loss` returns: rows have these before the first step of the actor too."""
    num_critics, policy_delay = 1, 1

    def build(self) -> dict[str, Any]:
        c = self.config
        self.critic = self.make_critic().to(self.device)
        self.optimizer = Optimizer(self.model.parameters(), self.lr(0), max_grad_norm=c.max_grad_norm)
        self.critic_optimizer = Optimizer(self.critic.parameters(), c.critic_lr, max_grad_norm=c.max_grad_norm)
        self.actor_values = torch.zeros(len(self.actor_numbers), device=self.device)  # of the last step of the actor
        self._actor_step = capture(self.actor_step, enabled=self.record)
        parts = {"critic": self.critic, "optimizer": self.optimizer, "critic_optimizer": self.critic_optimizer}
        self.targets = self.make_targets()
        self.normalizing = [self.model, self.critic, *(x.module for x in self.targets.values())]
        return parts | self.targets | {"actor_values": self.actor_values}

    def make_critic(self) -> nn.Module:
        return catalog.make_model("continuous_q", self.spec, self.model_config, n=self.num_critics)

    def make_targets(self) -> dict[str, Target]:
        self.target = Target(self.critic, self.critic_optimizer, self.config.tau)
        self.target_actor = Target(self.model, self.optimizer, self.config.tau)
        return {"target": self.target, "target_actor": self.target_actor}

    def update(self, batch: dict[str, Any], clock: Clock) -> Update:
        tensors, draws = to_torch(self.columns(batch), self.device), self.draw(2)
        for module in self.normalizing:  # all see the same scale
            update_normalizers(module, tensors["obs"], tensors["weight"])
        self.optimizer.set_lr(self.lr(clock.env_steps))
        critic, td_error = self._step(tensors, *(x[1] for x in draws))
        self.steps += 1
        if self.steps % self.policy_delay == 0:
            self._actor_step(tensors, *(x[0] for x in draws))
        first, *rest = critic.names  # a row has the actor's numbers behind the critics' loss
        values = torch.cat([critic.values[:1], self.actor_values, critic.values[1:]])
        priorities = td_error.cpu().numpy() if self.config.prioritized else None
        return Update((first, *self.actor_numbers, *rest), values, priorities)

    def columns(self, batch: dict[str, Any]) -> dict[str, Any]:
        """What the two steps read of a batch."""
        return {k: batch[k] for k in ("obs", "action", "reward", "discount", "next_obs", "weight")}

    def gradient_step(self, batch: dict[str, Any], *draws: Tensor) -> tuple[Update, Tensor]:
        """A step of the critics, and the size of the TD errors."""
        noise = drawn(self.model, draws)
        q, q_next = self.values(batch, noise)
        td_error = losses.td_error(q, batch["reward"], batch["discount"], q_next)
        numbers = self.critic_loss(batch, q, td_error, noise)
        grad_norm = self.critic_optimizer.step(numbers["critic_loss"])
        return Update.of(numbers | {"q": q.detach().mean(), "grad_norm": grad_norm}), td_error.detach().abs().mean(0)

    def critic_loss(self, batch: dict[str, Any], q: Tensor, td_error: Tensor, draws: Any) -> dict[str, Tensor]:
        """What the critics go down, and what else is logged of it."""
        return {"critic_loss": 0.5 * (batch["weight"] * td_error.square()).mean(-1).sum()}

    def values(self, batch: dict[str, Any], draws: Any) -> tuple[Tensor, Tensor]:
        """Values of the actions taken `[n, B]`, and of the next observation `[B]`."""
        with torch.no_grad():
            q_next = self.target(batch["next_obs"], self.next_action(batch, draws)).amin(0)
        return self.critic(batch["obs"], batch["action"]), q_next

    def next_action(self, batch: dict[str, Any], draws: Any) -> Tensor:
        """The action whose value the next observation has."""
        return self.target_actor(batch["next_obs"], *draws)["mu"]

    def actor_step(self, batch: dict[str, Any], *draws: Tensor) -> Tensor:
        """A step of the actor; then the targets follow."""
        numbers = self.actor_loss(batch, drawn(self.model, draws))
        self.optimizer.step(numbers["actor_loss"])
        for target in self.targets.values():
            target.follow()
        return self.actor_values.copy_(torch.stack([numbers[name].detach() for name in self.actor_numbers]))

    def actor_loss(self, batch: dict[str, Any], draws: Any) -> dict[str, Tensor]:
        """What the actor goes down, and what else is logged of it: here up the first critic."""
        action = self.model(batch["obs"], *draws)["mu"]
        return {"actor_loss": -self.critic(batch["obs"], action, 1).mean()}
