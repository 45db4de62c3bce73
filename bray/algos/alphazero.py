"""AlphaZero: a search guided by a network, and a network that learns what the search found (Silver et al. 2018).
B batch, N actions.

For two players in turns, of whom one wins what the other loses. Each decision is a tree search of `simulations` steps
with the network's prior P and value v at its leaves. The network learns the visits pi of the root's edges and the
outcome z of the game, so that the next search begins with what this one came to.
"""

from __future__ import annotations

import logging
from collections.abc import Generator
from dataclasses import dataclass, replace
from typing import Annotated, Any

import numpy as np
from pydantic import Field
from torch import Tensor, nn

from bray import act, tree
from bray.act import SAMPLE, TRAINED, Clock, Deciding, Decision, Tick
from bray.act.tree_search import Trees, grow
from bray.algos import base
from bray.algos.base import Update, to_torch
from bray.config.declare import Amount, Count, Positive, RateSchedule, Share, Whole
from bray.data.positions import Positions
from bray.envs.positions import KnownPositions
from bray.errors import ConfigError
from bray.nn import catalog
from bray.nn.catalog import ModelConfig
from bray.nn.normalize import update_normalizers
from bray.optim import Optimizer
from bray.rl import losses
from bray.spec import ACTION_MASK, MOVES, EnvSpec

DEFAULTS = {"env": {"num_envs": 16, "moves": True}}
"""Positions of many games are evaluated together; a search begins where the moves have led."""
log = logging.getLogger("bray")


@dataclass(frozen=True)
class Config:
    simulations: Count = 64
    """Steps of the search for each decision; each adds a position to the tree."""
    leaves: Count = 1
    """Of each game, so many positions are evaluated at a time; the later ones are chosen before the earlier are known
    (virtual loss). 2 fills the rows that the other player leaves empty: half as many forwards."""
    c_puct: Positive = 1.5
    """How far the search follows the prior before the values."""
    dirichlet_alpha: Positive = 1.0
    """Of the noise that is mixed into the prior of a root: about 10 by the number of legal actions."""
    dirichlet_share: Share = 0.25
    """The share of that noise; in training only."""
    temperature: Positive = 1.0
    """The first actions of a game are drawn by the visits to the power of 1 by this."""
    temperature_moves: Whole = 8
    """Of both players, so many; then, and in evaluations from the start, the most visited action."""
    lr: RateSchedule = 1e-3
    """Learning rate of Adam; a number or a schedule over env steps."""
    weight_decay: Amount = 1e-4
    """Of all weights, per step and by the learning rate (AdamW)."""
    mirror: bool = False
    """Learn every second position of a batch as a mirror shows it, left and right exchanged: for games on boards whose
    actions are the columns, or the cells row by row, and that are the same game then. Twice as many positions."""
    value_coef: Amount = 1.0
    """Weight of the value loss."""
    replay_size: Count = 50_000
    """Positions kept: the newest of games that have ended."""
    batch_size: Count = 256
    """Positions per gradient step."""
    learning_starts: Whole = 2_000
    """Env steps before the first gradient step."""
    train_every: Count = 64
    """Decisions between two visits to the learner."""
    updates: Count = 1
    """Gradient steps per visit."""
    max_grad_norm: Annotated[float, Field(gt=0)] | None = 5.0
    """The gradient is scaled down to this norm; null = off."""


class Model(nn.Module):
    """`dist` and a `value` in [-1, 1]. The moves tell the search where it is, and the network nothing."""

    def __init__(self, network: nn.Module):
        super().__init__()
        self.network = network

    def forward(self, obs: Any) -> dict[str, Tensor]:
        out = self.network({name: x for name, x in obs.items() if name != MOVES})
        return {"dist": out["dist"], "value": out["value"].tanh()}


def make_model(config: Config, spec: EnvSpec, model: ModelConfig) -> nn.Module:
    if model.use_lstm:
        raise ConfigError("AlphaZero searches from positions and has no use for a memory: set use_lstm=false")
    if MOVES not in spec.observation.names:
        raise ConfigError(
            f"AlphaZero searches a game of agents who take turns, by the moves in its observations, and {spec.id} "
            "has none: set env.moves=true, which a game of several agents can have"
        )
    parts = {name: part for name, part in spec.observation.items if name != MOVES}
    seen = replace(spec.observation, names=tuple(parts), parts=tuple(parts.values()))
    return Model(catalog.make_model("actor_critic", replace(spec, observation=seen), model, memory=False))


def experience(config: Config, spec: EnvSpec, model: ModelConfig) -> Positions:
    if spec.game is not None:
        KnownPositions(spec.game)  # what cannot be searched is refused before the first game
    return Positions.of(config)


class Policy(act.Policy):
    """Beside the environment: a search from each position at which somebody decides."""

    reads = ("dist", "value")

    def __init__(self, config: Config, spec: EnvSpec):
        self.num_actions = spec.num_actions  # refuses spaces that are not Discrete
        super().__init__(spec.layout, act.make_rule("dist"))
        self.config, self.spec = config, spec
        self.simulations: int = config.simulations
        self._positions: KnownPositions | None = None
        self._told = False

    def decide(self, tick: Tick, carry: Any, rng: np.random.Generator | None, mode: str, clock: Clock) -> Deciding:
        outputs = yield (tick.obs,)
        rows = len(tick.obs[MOVES])
        action, pi = np.zeros(rows, np.int64), np.zeros((rows, self.num_actions), np.float32)
        roots, acts, others = self._roots(tick)
        explores = mode == SAMPLE and clock != TRAINED
        if len(others):
            action, _ = self.act(outputs, tick, rng, mode, clock)
        if len(acts):
            seeds = rng.integers(0, 1 << 62, size=rows)[acts] if rng is not None else acts
            draws = [np.random.default_rng(seed) for seed in seeds]
            priors = self._priors(roots, outputs["dist"][acts])
            if explores:
                priors = self._with_noise(roots, priors, draws)
            trees = Trees(len(acts), self.simulations + 1, self.num_actions, self.config.c_puct)
            growing = grow(trees, roots, priors, self.simulations, self.config.leaves)
            visits = yield from self._evaluate(growing, tick.obs)
            moves = (tick.obs[MOVES][acts] >= 0).sum(1)
            pi[acts] = visits / visits.sum(1, keepdims=True)
            action[acts] = self._choose(visits, draws, (moves < self.config.temperature_moves) & (mode == SAMPLE))
        return Decision(self.layout.to_env(action), {"action": action, "pi": pi}, None, outputs)

    def _roots(self, tick: Tick) -> tuple[list[Any], np.ndarray, np.ndarray]:
        """The positions from which to search, their rows, and the rows of those for whom the network alone decides."""
        moves = tick.obs[MOVES]
        who = np.arange(len(moves)) if tick.acts is None else np.flatnonzero(tick.acts)
        if not self.simulations:
            return [], who[:0], who
        if self._positions is None:
            if self.spec.game is None:
                raise ConfigError("AlphaZero searches the game, which is not there: play it in its environment (--env)")
            self._positions = KnownPositions(self.spec.game)
        found = [self._positions.at(moves[row]) for row in who.tolist()]
        there = np.array([position is not None for position in found], bool)
        if not there.all() and not self._told:  # once, whatever else clients of a service send
            self._told, wrong = True, moves[who[~there][0]].tolist()
            log.warning("no game that goes on has the moves %s: there the network decides without a search", wrong)
        return [position for position in found if position is not None], who[there], who[~there]

    def _evaluate(self, growing: Any, like: Any) -> Generator[tuple[Any, ...], dict[str, Any], np.ndarray]:
        """Answer a search by forwards of as many rows as the first one had, the number for which it is recorded."""
        rows = len(like[MOVES])
        blank = {MOVES: np.full_like(like[MOVES], -1)}
        try:
            leaves = next(growing)
            while True:
                priors, values = [], []
                for start in range(0, len(leaves), rows):
                    part = leaves[start : start + rows]
                    filled = [*part, *[part[0]] * (rows - len(part))]
                    obs = tree.stack([p.obs if isinstance(p.obs, dict) else {"obs": p.obs} for p in filled])
                    outputs = yield (tree.map(lambda to, x: x.astype(to.dtype, copy=False), like, obs | blank),)
                    priors.append(self._priors(part, outputs["dist"][: len(part)]))
                    values.append(outputs["value"][: len(part)])
                leaves = growing.send((np.concatenate(priors), np.concatenate(values).astype(np.float64)))
        except StopIteration as end:
            return end.value

    def _priors(self, positions: list[Any], logits: np.ndarray) -> np.ndarray:
        mask = np.array([p.mask for p in positions])
        logits = np.where(mask, logits.astype(np.float64), -np.inf)
        odds = np.exp(logits - logits.max(-1, keepdims=True))
        # above 0 where legal, whatever the network says: a search looks everywhere in the end
        priors: np.ndarray = np.where(mask, np.maximum(odds / odds.sum(-1, keepdims=True), 1e-12), 0.0)
        return priors

    def _with_noise(self, roots: list[Any], priors: np.ndarray, draws: list[Any]) -> np.ndarray:
        share, out = self.config.dirichlet_share, priors.copy()
        for i, (root, rng) in enumerate(zip(roots, draws, strict=True)):
            legal = np.flatnonzero(root.mask)
            noise = rng.dirichlet(np.full(len(legal), self.config.dirichlet_alpha))
            out[i, legal] = np.maximum((1.0 - share) * priors[i, legal] + share * noise, 1e-12)
        return out

    def _choose(self, visits: np.ndarray, draws: list[Any], drawn: np.ndarray) -> np.ndarray:
        chosen = visits.argmax(1)
        for i in np.flatnonzero(drawn).tolist():
            odds = (visits[i] / visits[i].max()) ** (1.0 / self.config.temperature)
            chosen[i] = draws[i].choice(len(odds), p=odds / odds.sum())
        return chosen


class Learner(base.Learner):
    """In the trainer: positions with the visits of their search and the outcome of their game."""

    config: Config

    def build(self) -> dict[str, Any]:
        c = self.config
        self.optimizer = Optimizer(
            self.model.parameters(), self.lr(0), max_grad_norm=c.max_grad_norm, weight_decay=c.weight_decay
        )
        seen = {name: part.shape for name, part in self.spec.observation.items if name not in (MOVES, ACTION_MASK)}
        if c.mirror and not all(len(shape) > 1 and self._is_board(shape) for shape in seen.values()):
            raise ConfigError(
                f"mirror: expected observations that are boards of {self.layout.num_params} columns or cells, as many "
                f"as there are actions, got {seen}: set mirror=false"
            )
        return {"optimizer": self.optimizer}

    def _is_board(self, shape: tuple[int, ...]) -> bool:
        return self.layout.num_params in (shape[-1], shape[-2] * shape[-1])

    def prepare(self, data: dict[str, Any]) -> dict[str, Any]:
        if not self.config.mirror:
            return data
        boards = {name: x for name, x in data["obs"].items() if name not in (MOVES, ACTION_MASK)}
        width = next(iter(boards.values())).shape[-1]
        boards = {name: _mirrored(x, width) for name, x in boards.items()}
        by_action = {name: _mirrored(x, width) for name, x in data["obs"].items() if name == ACTION_MASK}
        return {**data, "obs": data["obs"] | boards | by_action, "pi": _mirrored(data["pi"], width)}

    def update(self, batch: dict[str, Any], clock: Clock) -> Update:
        self.optimizer.set_lr(self.lr(clock.env_steps))
        update_normalizers(self.model, batch["obs"], None)
        columns = {name: batch[name] for name in ("obs", "pi", "outcome")}
        if (mask := self.layout.legal(batch["obs"])) is not None:
            columns["mask"] = mask
        update: Update = self._step(to_torch(columns, self.device))
        self.steps += 1
        return update

    def gradient_step(self, batch: dict[str, Any]) -> Update:
        """l = (z - v)^2 - pi log p"""
        out, pi = self.model(batch["obs"]), batch["pi"]
        logits = out["dist"]
        if "mask" in batch:
            logits = logits.masked_fill(~batch["mask"], -1e9)
        policy_loss = losses.categorical_loss(logits, pi).mean()
        value_loss = (batch["outcome"] - out["value"]).square().mean()
        grad_norm = self.optimizer.step(policy_loss + self.config.value_coef * value_loss)
        target_entropy = -(pi * pi.clamp(min=1e-12).log()).sum(-1).mean()
        numbers = {"policy_loss": policy_loss, "value_loss": value_loss, "target_entropy": target_entropy}
        return Update.of(numbers | {"grad_norm": grad_norm})


def _mirrored(x: np.ndarray, width: int) -> np.ndarray:
    """Every second row with the columns of its board in reverse order."""
    out = x.reshape(len(x), -1, width).copy()
    out[1::2] = out[1::2, :, ::-1]
    return out.reshape(x.shape)
