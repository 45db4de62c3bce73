"""DAgger: cloning what an expert would do wherever the learner comes to (Ross et al. 2011).   B games."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from torch import Tensor

from bray import tree
from bray.act import SAMPLE, TRAINED, Clock, Tick
from bray.algos import bc
from bray.algos.base import Update, drawn, to_torch
from bray.algos.expert import Expert, load_expert
from bray.algos.r2d2 import burnt_in
from bray.config.declare import Count, ShareSchedule, Whole
from bray.data.experience import Replay, Sequences
from bray.errors import ConfigError
from bray.nn.catalog import ModelConfig
from bray.nn.normalize import update_normalizers
from bray.schedules import make_schedule
from bray.spec import EnvSpec

make_model = bc.make_model


def _beta() -> dict[str, Any]:
    return {"kind": "linear", "start": 1.0, "end": 0.0, "steps": 2_000}


@dataclass(frozen=True)
class Config(bc.Config):
    expert: str = ""
    """Who says what to do: a run directory, module:function (of one observation; returns an action), or the address of
    a service, http://HOST:PORT or tcp://HOST:PORT. It is asked at every step, greedily."""
    beta: ShareSchedule = field(default_factory=_beta)
    """Probability that the expert's action is played and not the learner's; a number or a schedule over env steps."""
    replay_size: Count = 100_000
    """Rows kept: what was seen, and what the expert would have done there."""
    learning_starts: Whole = 500
    """Env steps before the first gradient step."""
    train_every: Count = 4
    """Env steps between two visits to the learner; 1,000, with as many `updates` as a round takes, for rounds as in the
    paper."""
    updates: Count = 1
    """Gradient steps per visit."""
    burn_in: Whole = 8
    """Rows before each sequence that only warm up the memory of a network that has one: the one that is stored is of
    older weights."""


def experience(config: Config, spec: EnvSpec, model: ModelConfig) -> Replay:
    """Single rows; sequences where the network has a memory."""
    if not model.use_lstm:
        return Replay.of(config, spec.frame_stack)
    length = model.max_seq_len
    sequences = replace(config, batch_size=max(1, config.batch_size // length))
    return Sequences.of(sequences, spec.frame_stack, length=length, burn_in=config.burn_in)


class Policy(bc.Policy):
    """Beside the environment: the learner's actions, or now and then the expert's; and a column `expert`, what that
    would have done."""

    def __init__(self, config: Config, spec: EnvSpec):
        super().__init__(config, spec)
        self.config, self.spec, self.beta = config, spec, make_schedule(config.beta)
        self.expert: Expert | None = None

    def seat(self, first: int, rows: int, total: int) -> None:
        super().seat(first, rows, total)
        self.expert = load_expert(self.config.expert, self.spec, rows)

    def act(
        self, outputs: dict[str, np.ndarray], tick: Tick, rng: np.random.Generator | None, mode: str, clock: Clock
    ) -> tuple[Any, dict[str, Any]]:
        action, extras = super().act(outputs, tick, rng, mode, clock)
        if mode != SAMPLE or clock.env_steps == TRAINED.env_steps:
            return action, extras
        if self.expert is None or tick.first is None:
            raise ConfigError("DAgger asks its expert in environments that Bray steps (--env), not in live games")
        assert rng is not None
        said = self.layout.from_env(self.expert.act(tick.obs, tick.first))
        self._check(said, tick.obs)
        theirs = rng.random(len(said)) < self.beta(clock.env_steps)
        played = np.where(theirs.reshape(-1, *[1] * (said.ndim - 1)), said, extras["action"])
        return self.layout.to_env(played), {"action": played, "expert": said}

    def _check(self, said: np.ndarray, obs: Any) -> None:
        """Refuse what the expert may not do: it has no likelihood."""
        mask, at = self.layout.legal(obs), 0
        for part in (p for p in self.layout.parts if p.kind == "categorical"):
            choice = said.reshape(len(said), -1)[:, part.action.start].astype(np.int64)
            legal = (choice >= 0) & (choice < part.n)
            if mask is not None and legal.all():
                legal = mask[np.arange(len(mask)), at + choice]
            if not legal.all():
                raise ConfigError(
                    f"algo.expert: {self.config.expert} chose {choice[~legal][0]} of {part.n} where it is not legal"
                )
            at += part.n

    def acts_by_rule(self) -> bool:
        """Without the expert."""
        return True

    def numbers(self, clock: Clock) -> dict[str, float]:
        return super().numbers(clock) | {"beta": self.beta(clock.env_steps)}

    def get_state(self) -> dict[str, Any]:
        carry = getattr(self.expert, "carry", None)
        return {} if carry is None else {"carry": carry}

    def set_state(self, state: dict[str, Any]) -> None:
        if self.expert is not None and "carry" in state:
            self.expert.carry = state["carry"]  # type: ignore[attr-defined]


class Learner(bc.Learner):
    """In the trainer: rows of all rounds with the expert's actions in, better weights out."""

    config: Config

    def build(self) -> dict[str, Any]:
        parts = super().build()
        self.memory = {}  # sequences come with theirs
        return {"optimizer": parts["optimizer"]}

    def update(self, batch: dict[str, Any], clock: Clock) -> Update:
        """Of rows `[B]`; of sequences `[T, B]` the rows behind `burn_in`."""
        if "state" not in batch:
            return super().update(batch, clock)
        n, valid = self.config.burn_in, batch["valid"].astype(np.float32)
        seen = tree.map(lambda x: x[:-1], batch["obs"])
        update_normalizers(self.model, seen, valid)
        learnt = {"obs": tree.map(lambda x: x[n:], seen), "expert": batch["expert"][n:], "weight": valid[n:]}
        columns = self.columns(learnt) | {"state": batch["state"]}
        columns |= {"before": tree.map(lambda x: x[:n], seen), "first": batch["first"][:-1]}
        update: Update
        update, _ = self._step(to_torch(columns, self.device), *(x[0] for x in self.draw()))
        self.steps += 1
        return update

    def gradient_step(self, batch: dict[str, Any], *draws: Tensor) -> tuple[Update, dict[str, Tensor]]:
        if "before" not in batch:
            return super().gradient_step(batch, *draws)
        n, past = self.config.burn_in, batch | {"obs": batch["before"]}
        state = burnt_in(self.model, past, n, drawn(self.model, draws))
        rest = {k: x for k, x in batch.items() if k != "before"}
        return super().gradient_step(rest | {"state": state, "first": batch["first"][n:]}, *draws)

    def columns(self, batch: dict[str, Any]) -> dict[str, Any]:
        return super().columns({**batch, "action": batch["expert"]})
