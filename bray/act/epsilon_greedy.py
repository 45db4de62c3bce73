"""How DQN acts: the best of the action values, or now and then a random legal action."""

from __future__ import annotations

import sys

import numpy as np

from bray.act.clock import Clock
from bray.act.rules import RULES, Arrays, Mask, Rng, Rule
from bray.schedules import Schedule, make_schedule
from bray.spec import ActionLayout


class EpsilonGreedy(Rule):
    """The best of the action values, or with probability epsilon a random legal action.

    With a spread, environment i of N explores with epsilon ** (1 + spread i / (N - 1)) (Horgan et al. 2018): some much,
    most little. Who has no number among others (a live game, a single environment, a served policy) has the exponent of
    the middle.
    """

    name, reads, stochastic = "q", ("q",), False

    def __init__(self, epsilon: Schedule = 0.0, spread: float = 0.0):
        self.epsilon, self.spread = make_schedule(epsilon), spread
        self._exponents: np.ndarray | None = None

    def seat(self, first: int, rows: int, total: int) -> None:
        if self.spread and total > 1:
            self._exponents = 1.0 + self.spread * np.arange(first, first + rows) / (total - 1)

    def _middle(self, env_steps: int) -> float:
        return float(self.epsilon(env_steps) ** (1.0 + self.spread / 2.0))

    def _epsilons(self, rows: int, env_steps: int) -> float | np.ndarray:
        if self._exponents is None or len(self._exponents) != rows:
            return self._middle(env_steps)
        epsilons: np.ndarray = np.power(self.epsilon(env_steps), self._exponents)
        return epsilons

    def choose(self, layout: ActionLayout, outputs: Arrays, mask: Mask, rng: Rng, clock: Clock) -> Arrays:
        return {"action": epsilon_greedy(outputs["q"], self._epsilons(len(outputs["q"]), clock.env_steps), rng, mask)}

    def probabilities(self, layout: ActionLayout, outputs: Arrays, mask: Mask, clock: Clock) -> np.ndarray:
        epsilon = np.reshape(self._epsilons(len(outputs["q"]), clock.env_steps), (-1, 1))
        legal = np.ones_like(outputs["q"], float) if mask is None else mask.astype(float)
        best = super().probabilities(layout, outputs, mask, clock)
        odds: np.ndarray = (1.0 - epsilon) * best + epsilon * legal / legal.sum(-1, keepdims=True)
        return odds

    def blank(self, layout: ActionLayout, rows: int, rng: np.random.Generator) -> Arrays:
        return {"q": rng.random((rows, layout.num_params), np.float32)}

    def numbers(self, env_steps: int) -> dict[str, float]:
        numbers = {"epsilon": self._middle(env_steps)}
        if self.spread:
            most = float(self.epsilon(env_steps))
            numbers |= {"epsilon_max": most, "epsilon_min": most ** (1.0 + self.spread)}
        return numbers

    def trained(self) -> dict[str, float]:
        return {"epsilon": self._middle(sys.maxsize)}


class EachGreedy(EpsilonGreedy):
    """For teams: each of N agents the best of its own action values, or with probability epsilon, drawn for each, one
    of its legal actions. `q [B, N, A]`; the action is MultiDiscrete."""

    name = "q_each"

    def choose(self, layout: ActionLayout, outputs: Arrays, mask: Mask, rng: Rng, clock: Clock) -> Arrays:
        shape = (len(outputs["q"]), layout.size, -1)
        epsilons = self._epsilons(shape[0], clock.env_steps)
        each = epsilons if isinstance(epsilons, float) else epsilons[:, None]
        legal = None if mask is None else mask.reshape(shape)
        return {"action": epsilon_greedy(outputs["q"].reshape(shape), each, rng, legal)}


for _rule in (EpsilonGreedy, EachGreedy):
    RULES[_rule.name] = _rule


def epsilon_greedy(q: np.ndarray, epsilon: float | np.ndarray, rng: Rng, mask: Mask = None) -> np.ndarray:
    """The best actions `[...]` by `q [..., N]`, or with probability epsilon (one, or one per row; drawn per row) a
    uniformly random legal one."""
    best: np.ndarray = (q if mask is None else np.where(mask, q, -np.inf)).argmax(-1)
    if rng is None or (isinstance(epsilon, float) and epsilon <= 0.0):
        return best
    n = q.shape[-1]
    drawn = rng.random(q.shape[:-1])
    explore = np.less(drawn, epsilon)
    if True not in explore.ravel().tolist():  # the usual case late in training; ten times faster than any()
        return best
    # `drawn` below epsilon, divided by epsilon, is uniform in 0..1: the same draw also says which action. Workers share
    # one stream of random numbers (`RowsOfAll`); a second draw by those that explore alone would put them out of step.
    u = np.where(explore, drawn / np.where(explore, epsilon, 1.0), 0.0)
    if mask is None:
        other = np.minimum((u * n).astype(np.int64), n - 1)
    else:
        order, legal = np.argsort(~mask, axis=-1, kind="stable"), mask.sum(-1)  # legal actions first
        other = np.take_along_axis(order, np.minimum((u * legal).astype(np.int64), legal - 1)[..., None], -1)[..., 0]
    chosen: np.ndarray = np.where(explore, other, best)
    return chosen
