"""QMIX: Q-learning for a team, whose value is a monotonic mix of its agents' (Rashid et al. 2018).   B batch, N agents,
A actions, L rows of a sequence.

Each agent acts by its own values, and since the mix never falls where one of them rises, what is best for each is best
for the team. The mixer sees the state of the whole game and stays with the Learner.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Annotated, Any

import torch
from pydantic import Field
from torch import Tensor, nn

from bray import act, tree
from bray.act import Clock
from bray.algos import base, r2d2
from bray.algos.base import Update, to_torch
from bray.config.declare import Amount, Count, Excludes, Positive, RateSchedule, Share, ShareSchedule, Whole
from bray.data.experience import Replay, Sequences
from bray.errors import ConfigError
from bray.nn.catalog import ModelConfig
from bray.nn.normalize import RunningNorm, update_normalizers
from bray.nn.teams import MonotonicMixer, SharedAgent, state_key, state_space
from bray.optim import Optimizer
from bray.rl import losses
from bray.spec import EnvSpec
from bray.target import Target


def _epsilon() -> dict[str, Any]:
    return {"kind": "linear", "start": 1.0, "end": 0.05, "steps": 50_000}


@dataclass(frozen=True)
class TeamConfig:
    """What QMIX and VDN share."""

    lr: RateSchedule = 5e-4
    """Learning rate of Adam; a number or a schedule over env steps."""
    gamma: Share = 0.99
    """Discount per step."""
    n_step: Count = 1
    """Rewards summed before bootstrapping; a sample carries discount = gamma**n, or 0 where the episode terminated."""
    double: bool = True
    """Choose the next actions with the online network, value them with the target network."""
    dueling: bool = False
    """Q of an agent = V + A - mean(A)."""
    agent_ids: bool = True
    """Tell each agent its number beside its observation. One network is for all of them; without it those who see the
    same do the same."""
    replay_size: Count = 100_000
    """Steps of the team kept."""
    batch_size: Count = 64
    """Transitions per gradient step; with a memory (`use_lstm`) sequences."""
    learning_starts: Whole = 1_000
    """Env steps before the first gradient step."""
    train_every: Count = 4
    """Env steps between two visits to the learner."""
    updates: Count = 1
    """Gradient steps per visit."""
    target_period: Count = 200
    """Gradient steps between two copies of the online networks to the target networks."""
    tau: Annotated[Annotated[float, Field(gt=0, le=1)] | None, Excludes("target_period")] = None
    """Instead of copies, move the target this fraction of the way after every gradient step; null = copies."""
    epsilon: ShareSchedule = field(default_factory=_epsilon)
    """Probability that an agent acts at random, drawn for each; a number or a schedule over env steps."""
    epsilon_spread: Amount = 0.0
    """Environment i of N, those of all workers, explores with epsilon ** (1 + epsilon_spread * i / (N - 1)); 0 = all
    alike."""
    huber: Positive | None = None
    """TD errors beyond this count linearly; null = squared errors."""
    max_grad_norm: Positive | None = 10.0
    """Gradients are scaled down to this norm; null = off."""
    sequence_length: Count = 16
    """With a memory: rows L of a sequence that are learnt."""
    burn_in: Whole = 4
    """With a memory: rows before them that bring the stored memory up to date."""


@dataclass(frozen=True)
class Config(TeamConfig):
    mixer_width: Count = 32
    """Units between the agents' values and the team's."""
    hyper_width: Count = 64
    """Hidden units of the networks that make the mixer's weights of the state."""


def check_team(spec: EnvSpec, *more: str) -> None:
    """Refuse what is no team of agents with Discrete actions, or with those of `more` kinds."""
    if not spec.team or spec.action.kind not in ("multi_discrete", *more):
        what = f"one with {spec.action.kind} actions" if spec.team else "none"
        kinds = " or ".join(("Discrete", *(kind.capitalize() for kind in more)))
        raise ConfigError(
            f"this algorithm trains a team of agents with {kinds} actions, and {spec.id} has {what}: join the agents "
            "of a game with env.teams={team: [a, b, c]}"
        )


def make_model(config: TeamConfig, spec: EnvSpec, model: ModelConfig) -> nn.Module:
    check_team(spec)
    return SharedAgent(spec, model, config.agent_ids, dueling=config.dueling)


def experience(config: TeamConfig, spec: EnvSpec, model: ModelConfig) -> Replay:
    if model.use_lstm:
        return Sequences.of(config, length=config.sequence_length, burn_in=config.burn_in)
    return Replay.of(config)


class Policy(act.Policy):
    """Beside the environment: each agent epsilon-greedy over its own action values."""

    def __init__(self, config: TeamConfig, spec: EnvSpec):
        check_team(spec)
        rule = act.make_rule("q_each", {"epsilon": config.epsilon, "spread": config.epsilon_spread})
        super().__init__(spec.layout, rule)


class TeamValue(nn.Module):
    """What one optimizer and one target are for: the agents' network, which is published, and the mixer, which is
    not."""

    agents: nn.Module
    mixer: nn.Module

    def __init__(self, agents: nn.Module, mixer: nn.Module):
        super().__init__()
        self.agents, self.mixer = agents, mixer


class Learner(base.Learner):
    """In the trainer: replayed steps of the team in, better weights out."""

    def make_mixer(self) -> nn.Module:
        """Agents' values `[..., N]` and the state `[..., S]` -> the team's `[...]`."""
        c, size = self.config, math.prod(state_space(self.spec).shape)
        return MonotonicMixer(size, len(self.spec.team), c.mixer_width, c.hyper_width)

    def build(self) -> dict[str, Any]:
        c = self.config
        self.online = TeamValue(self.model, self.make_mixer().to(self.device))
        self.optimizer = Optimizer(self.online.parameters(), self.lr(0), max_grad_norm=c.max_grad_norm)
        self.target = Target(self.online, self.optimizer, c.tau or 1.0)
        parts: dict[str, Any] = {"optimizer": self.optimizer, "target": self.target}
        self.norm = RunningNorm(state_space(self.spec).shape).to(self.device) if self.normalizes else None
        if self.norm is not None:
            parts["norm"] = self.norm
        return parts | ({"mixer": self.online.mixer} if self.online.mixer.state_dict() else {})

    @property
    def normalizes(self) -> bool:
        """Whether that is normalised, as the observations of the agents are."""
        return bool(self.model_config.normalize_observations) and state_space(self.spec).dtype.startswith("float")

    def start_with_model(self) -> None:
        self.target.copy()

    def prepare(self, data: dict[str, Any]) -> dict[str, Any]:
        """Of sequences, the rows that are learnt; transitions come as they are learnt."""
        c = self.config
        if "first" not in data:
            return data
        return r2d2.windows(data, c.burn_in, c.n_step, c.gamma) | {"alive": data["alive"]}

    def update(self, batch: dict[str, Any], clock: Clock) -> Update:
        alive = batch["alive"]  # those who are dead see zeros, which are no observations
        seen = tree.map(lambda x: x[: len(alive)], batch["obs"])
        late: Any = self.target.module
        for module in (self.model, late.agents):  # both see the same scale
            update_normalizers(module, seen, alive)
        if self.norm is not None:
            self.norm.update(seen[state_key(self.spec)], alive.any(-1))
        self.optimizer.set_lr(self.lr(clock.env_steps))
        update: Update = self._step(to_torch(self.columns(batch), self.device))
        self.steps += 1
        if self.config.tau is None and self.steps % self.config.target_period == 0:
            self.target.copy()
        return update

    def columns(self, batch: dict[str, Any]) -> dict[str, Any]:
        """What `gradient_step` reads of a batch, with the legal actions `[..., N, A]` of the rows that are bootstrapped
        from."""
        names = ["obs", "action", "reward", "discount"]
        if "first" in batch:
            later = tree.map(lambda x: x[self.config.burn_in :], batch["obs"])
            names += ["first", "state", "after", "valid"]
        else:
            later = batch["next_obs"]
            names += ["next_obs", "weight"]
        columns = {k: batch[k] for k in names}
        rows = later["obs"].shape[: -len(dict(self.spec.observation.items)["obs"].shape)]
        mask = self.layout.legal(tree.map(lambda x: x.reshape(-1, *x.shape[len(rows) :]), later))
        return columns if mask is None else columns | {"mask": mask.reshape(*rows, len(self.spec.team), -1)}

    def gradient_step(self, batch: dict[str, Any]) -> Update:
        q, q_next = self.team_values(batch)
        error = losses.td_error(q, batch["reward"], batch["discount"], q_next)
        weight = batch["valid" if "first" in batch else "weight"]
        share = weight / self.over_ranks(weight.sum()).clamp(min=1.0)
        loss = (share * losses.huber(error, self.config.huber)).sum()
        grad_norm = self.optimizer.step(loss)
        if self.config.tau is not None:
            self.target.follow()
        numbers = {"loss": loss, "q": (share * q).sum(), "td_error": (share * error.abs()).sum()}
        return Update.of({k: x.detach() for k, x in numbers.items()} | {"grad_norm": grad_norm})

    def team_values(self, batch: dict[str, Any]) -> tuple[Tensor, Tensor]:
        """The team's value of the actions taken, and of the best ones in the rows that are bootstrapped from: `[B]`, of
        sequences `[L, B]`."""
        online, double = self.online, self.config.double
        target: Any = self.target.module
        if "first" not in batch:
            q = losses.select(self.model(batch["obs"])["q"], batch["action"])
            with torch.no_grad():
                q_target = target.agents(batch["next_obs"])["q"]
                q_next = self._best(batch, self.model(batch["next_obs"])["q"] if double else q_target, q_target)
                future = target.mixer(q_next, self.state(batch["next_obs"]))
            return online.mixer(q, self.state(batch["obs"])), future
        burn_in = self.config.burn_in
        values, seen = self._unroll(self.model, batch), tree.map(lambda x: x[burn_in:], batch["obs"])
        q, state = losses.select(values[:-1], batch["action"]), self.state(seen)
        with torch.no_grad():
            q_target = self._unroll(target.agents, batch)
            future = target.mixer(self._best(batch, values if double else q_target, q_target), state)
        return online.mixer(q, state[:-1]), future.gather(0, batch["after"])

    def _best(self, batch: dict[str, Any], chooses: Tensor, values: Tensor) -> Tensor:
        """Of each agent, the value of the legal action that is best by the one, as the other values it."""
        if "mask" in batch:
            chooses = chooses.masked_fill(~batch["mask"], -torch.inf)
        return losses.select(values, chooses.argmax(-1))

    def state(self, obs: dict[str, Tensor]) -> Tensor:
        """What the mixer sees, `[..., S]`."""
        state, dims = obs[state_key(self.spec)], len(state_space(self.spec).shape)
        state = state.float() if self.norm is None else self.norm(state)
        return state.flatten(state.ndim - dims) if dims else state.unsqueeze(-1)

    def _unroll(self, model: Any, batch: dict[str, Any]) -> Tensor:
        """Action values of the rows that are learnt and of the one behind them, `[L + 1, B, N, A]`."""
        burn_in = self.config.burn_in
        rest = tree.map(lambda x: x[burn_in:], batch["obs"])
        q: Tensor = model.unroll(rest, r2d2.burnt_in(model, batch, burn_in), batch["first"][burn_in:])["q"]
        return q

    def rows_of(self, batch: dict[str, Any], *rest: Any) -> dict[str, Any]:
        """Of sequences the rows that are learnt, with the memory that they begin with."""
        if "first" not in batch:
            return batch
        burn_in = self.config.burn_in
        learnt = slice(burn_in, -1)
        rows = {k: batch[k] for k in ("action", "reward", "discount", "after")} | {"weight": batch["valid"]}
        rows |= {"obs": tree.map(lambda x: x[learnt], batch["obs"]), "first": batch["first"][learnt]}
        return rows | {"state": r2d2.burnt_in(self.model, batch, burn_in)}
