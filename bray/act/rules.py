"""Rules: how outputs of a Model become actions, in numpy; masks are applied here.

`dist` is the Model's distribution head `[B, P]`, laid out by `ActionLayout`. `rng=None` means the most likely action. A rule is
known by its name in a run's `policy.json`, so that a service acts by it without torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numba
import numpy as np

from bray.errors import UnknownName
from bray.schedules import Schedule, make_schedule
from bray.spec import ActionLayout

_LOG_SQRT_2PI = 0.5 * math.log(2.0 * math.pi)
_DONE = 1 << 60  # env steps: the end of every schedule


Arrays = dict[str, np.ndarray]
Rng = np.random.Generator | None
Mask = np.ndarray | None


class Rule:
    """A way to choose."""

    name = ""
    reads: tuple[str, ...] = ()
    """Outputs of the Model."""
    stochastic = True
    """Whether draws are what it was trained for, not only for exploring."""

    def choose(self, layout: ActionLayout, outputs: Arrays, mask: Mask, rng: Rng, env_steps: int) -> Arrays:
        """`action`, flat as the learner wants it, and what else it keeps."""
        raise NotImplementedError

    def blank(self, layout: ActionLayout, rows: int, rng: np.random.Generator) -> Arrays:
        """Outputs that know nothing: drawn from, they give random legal actions."""
        return {name: np.zeros((rows, layout.num_params), np.float32) for name in self.reads}

    def numbers(self, env_steps: int) -> dict[str, float]:
        """What a result row says of it."""
        return {}

    def trained(self) -> dict[str, float]:
        """Its settings at the end of training, for `policy.json`."""
        return {}


class Distribution(Rule):
    """Draw from the distribution head; keeps the log-probability."""

    name, reads = "dist", ("dist",)

    def choose(self, layout: ActionLayout, outputs: Arrays, mask: Mask, rng: Rng, env_steps: int) -> Arrays:
        action, logp = sample(layout, outputs["dist"], rng, mask)
        return {"action": action, "logp": logp}


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
        return {"epsilon": float(self.epsilon(_DONE))}


class Squashed(Rule):
    """tanh of a Gaussian (SAC); uniformly random actions before learning starts."""

    name, reads = "squashed", ("dist",)

    def __init__(self, learning_starts: int = 0):
        self.learning_starts = learning_starts

    def choose(self, layout: ActionLayout, outputs: Arrays, mask: Mask, rng: Rng, env_steps: int) -> Arrays:
        if rng is not None and env_steps < self.learning_starts:
            return {"action": rng.uniform(-1.0, 1.0, (len(outputs["dist"]), layout.size)).astype(np.float32)}
        return {"action": squashed(outputs["dist"], rng)}


RULES: dict[str, Callable[..., Rule]] = {"dist": Distribution, "q": EpsilonGreedy, "squashed": Squashed}
"""By name; a rule of your own is added here."""


def make_rule(name: str, settings: Mapping[str, Any] | None = None) -> Rule:
    """The rule that a `policy.json` names, with its settings at the end of training."""
    if name not in RULES:
        raise UnknownName("acting rule", name, RULES, "policy.json")
    return RULES[name](**settings or {})


def sample(
    layout: ActionLayout, dist: np.ndarray, rng: np.random.Generator | None, mask: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Flat actions `[B]` or `[B, size]` and their log-probability `[B]`."""
    dist = np.ascontiguousarray(dist, np.float32)
    batch = len(dist)
    if layout.single:
        u = rng.random(batch) if rng is not None else _GREEDY
        return _categorical(dist, u, _NO_MASK if mask is None else mask)
    action = np.empty((batch, layout.size), layout.dtype)
    logp = np.zeros(batch, np.float32)
    at = 0
    for part in layout.parts:
        params = dist[:, part.param]
        if part.kind == "categorical":
            legal = _NO_MASK if mask is None else np.ascontiguousarray(mask[:, at : at + part.n])
            at += part.n
            u = rng.random(batch) if rng is not None else _GREEDY
            a, lp = _categorical(np.ascontiguousarray(params), u, legal)
            action[:, part.action.start] = a
            logp += lp
        else:
            mean, log_std = params[:, : part.n], params[:, part.n :]
            noise = rng.standard_normal(mean.shape, np.float32) if rng is not None else np.zeros_like(mean)
            action[:, part.action] = mean + np.exp(log_std) * noise
            logp += (-0.5 * noise * noise - log_std - _LOG_SQRT_2PI).sum(-1)
    return action, logp


def squashed(dist: np.ndarray, rng: np.random.Generator | None) -> np.ndarray:
    """tanh of a Gaussian (SAC): actions `[B, D]` in [-1, 1]; the mean's when greedy."""
    mean, log_std = np.split(dist, 2, -1)
    if rng is None:
        return np.tanh(mean)
    return np.tanh(mean + np.exp(log_std) * rng.standard_normal(mean.shape, np.float32))


def epsilon_greedy(
    q: np.ndarray, epsilon: float, rng: np.random.Generator | None, mask: np.ndarray | None = None
) -> np.ndarray:
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


_GREEDY = np.empty(0)
_NO_MASK = np.empty((0, 0), np.bool_)


@numba.njit(cache=True, nogil=True)
def _categorical(logits, u, mask):  # pragma: no cover - compiled
    """One draw per row by inverting the cumulative distribution at u[b] (empty u: the most likely) and its log-probability."""
    batch, n = logits.shape
    action = np.empty(batch, np.int64)
    logp = np.empty(batch, np.float32)
    for b in range(batch):
        top = -np.inf
        best = 0
        for i in range(n):
            if (mask.size == 0 or mask[b, i]) and logits[b, i] > top:
                top = logits[b, i]
                best = i
        total = 0.0
        for i in range(n):
            if mask.size == 0 or mask[b, i]:
                total += np.exp(logits[b, i] - top)
        if u.size:
            left = u[b] * total
            for i in range(n):
                if mask.size == 0 or mask[b, i]:
                    left -= np.exp(logits[b, i] - top)
                    best = i  # rounding may leave a crumb: the last legal choice takes it
                    if left < 0.0:
                        break
        action[b] = best
        logp[b] = logits[b, best] - top - np.log(total)
    return action, logp
