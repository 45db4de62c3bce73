"""How DQN acts: the best of the action values, or now and then a random legal action."""

from __future__ import annotations

import sys

import numpy as np

from bray.act.rules import RULES, Arrays, Mask, Rng, Rule
from bray.schedules import Schedule, make_schedule
from bray.spec import ActionLayout


class EpsilonGreedy(Rule):
    """The best of the action values, or with probability epsilon a random legal action."""

    name, reads, stochastic = "q", ("q",), False

    def __init__(self, epsilon: Schedule = 0.0):
        self.epsilon = make_schedule(epsilon)

    def choose(self, layout: ActionLayout, outputs: Arrays, mask: Mask, rng: Rng, env_steps: int) -> Arrays:
        return {"action": epsilon_greedy(outputs["q"], self.epsilon(env_steps), rng, mask)}

    def blank(self, layout: ActionLayout, rows: int, rng: np.random.Generator) -> Arrays:
        return {"q": rng.random((rows, layout.num_params), np.float32)}

    def numbers(self, env_steps: int) -> dict[str, float]:
        return {"epsilon": self.epsilon(env_steps)}

    def trained(self) -> dict[str, float]:
        return {"epsilon": float(self.epsilon(sys.maxsize))}


RULES[EpsilonGreedy.name] = EpsilonGreedy


def epsilon_greedy(q: np.ndarray, epsilon: float, rng: Rng, mask: Mask = None) -> np.ndarray:
    """The best action `[B]` by `q [B, N]`, or with probability epsilon (drawn per row) a uniformly random legal one."""
    best = (q if mask is None else np.where(mask, q, -np.inf)).argmax(-1)
    if rng is None or epsilon <= 0.0:
        return best
    batch, n = q.shape
    explore = np.less(rng.random(batch), epsilon)
    if True not in explore.tolist():  # the usual case late in training; ten times faster than any()
        return best
    u = rng.random(batch)
    if mask is None:
        other = (u * n).astype(np.int64)
    else:
        order = np.argsort(~mask, axis=-1, kind="stable")  # legal actions first
        other = np.take_along_axis(order, (u * mask.sum(-1)).astype(np.int64)[:, None], -1)[:, 0]
    return np.where(explore, other, best)
