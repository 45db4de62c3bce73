"""Action distributions over a `spec.ActionLayout`: draws in numpy (acting needs no torch), log probabilities and
entropies of tensors (losses).

`dist` is the Model's head `[..., layout.num_params]`; `action` is int64 `[...]` for a single Discrete, else
`[..., layout.size]` with choices as indices (floats in mixed spaces); `mask` is bool `[..., layout.num_logits]`, the
choices of all categorical parts in order.
A distribution of your own is a class with `draw`, `log_prob`, `entropy` and `kl` in `DISTRIBUTIONS`, under the `kind`
of its `spec.ActionPart`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import reduce
from math import exp, log
from operator import add
from typing import Any

import numpy as np

from bray.spec import ActionLayout, ActionPart

NEVER = -1e9
"""The logit of a masked choice: not -inf, so that entropies stay finite. Its probability is exactly 0, and it has no
gradient. A row with every choice masked (a dead row) counts as uniform."""
_LOG_2PI = math.log(2.0 * math.pi)
_LOG_SQRT_2PI = 0.5 * _LOG_2PI

Rng = np.random.Generator | None
Drawn = tuple[np.ndarray, np.ndarray]
_LEAST = np.finfo(np.float32).min  # whatever a legal choice has, a masked one has less
_FEW = 16  # logits up to which plain Python takes the largest quicker than numpy


def draw_rows(logits: np.ndarray, u: np.ndarray | None, mask: np.ndarray | None) -> Drawn:
    """One draw per row by inverting the cumulative distribution at u[b] (no u: the most likely) and its log
    probability.

    Plain Python with the C library's `exp` and `log`, as the compiled form has them: the same draws, bit for bit, for
    the few rows of a service. numpy's own `exp` rounds otherwise.
    """
    if u is None and logits.size > _FEW:
        return _most_likely(logits, mask)
    rows: list[list[float]] = logits.tolist()
    at: list[float | None] = [None] * len(rows) if u is None else u.tolist()
    if mask is None:
        drawn = [_draw(row, v) for row, v in zip(rows, at, strict=True)]
    else:
        drawn = [_draw_legal(row, v, legal) for row, v, legal in zip(rows, at, mask.tolist(), strict=True)]
    return np.array([i for i, _ in drawn], np.int64), np.array([logp for _, logp in drawn], np.float32)


def _most_likely(logits: np.ndarray, mask: np.ndarray | None) -> Drawn:
    x = logits if mask is None else np.where(mask, np.maximum(logits, _LEAST), -np.inf)
    with np.errstate(invalid="ignore"):  # a row with every choice masked
        logp = -np.log(np.exp(x - x.max(1, keepdims=True)).sum(1))
    if mask is not None:
        logp[~mask.any(1)] = 0.0
    return x.argmax(1), logp


def _draw_legal(logits: list[float], u: float | None, legal: list[bool]) -> tuple[int, float]:
    choices = [i for i, yes in enumerate(legal) if yes]
    if not choices:  # an episode's end
        return 0, 0.0
    best, logp = _draw([logits[i] for i in choices], u)
    return choices[best], logp


def _draw(logits: list[float], u: float | None) -> tuple[int, float]:
    """(index, log probability) of one of these choices."""
    top = max(logits)
    weights = [exp(x - top) for x in logits]
    total = reduce(add, weights)  # one after the other: `sum` is more exact from Python 3.12 on
    if u is None:
        best = logits.index(top)
    else:
        left, best = u * total, -1
        for weight in weights:
            left -= weight
            best += 1  # rounding may leave a crumb: the last one takes it
            if left < 0.0:
                break
    return best, logits[best] - top - log(total)


class Categorical:
    """One of n choices: n logits."""

    masked = True
    draw_rows: Callable[[np.ndarray, np.ndarray | None, np.ndarray | None], Drawn] = staticmethod(draw_rows)
    """Training puts the compiled form here (`bray.rl.draws`)."""

    def draw(self, params: np.ndarray, rng: Rng, mask: np.ndarray | None) -> Drawn:
        """Actions and their log probability, `[B]` each; without `rng` the most likely."""
        return self.draw_rows(params, None if rng is None else rng.random(len(params)), mask)

    def fill(self, noise: Any, generator: Any) -> None:
        """With Gumbel numbers: -log of exponential ones."""
        noise.exponential_(generator=generator).log_().neg_()

    def pick(self, params: Any, noise: Any, mask: Any) -> Any:
        """A draw by tensors: the largest logit once each has its Gumbel number (Gumbel 1954)."""
        return ((params if mask is None else params.where(mask, NEVER)) + noise).argmax(-1, keepdim=True)

    def read(self, params: Any, mask: Any) -> Any:
        """What `log_prob` and `entropy` share: the log probabilities of all choices."""
        return (params if mask is None else params.where(mask, NEVER)).log_softmax(-1)

    def log_prob(self, logs: Any, action: Any) -> Any:
        return logs.gather(-1, action.long()).squeeze(-1)

    def entropy(self, logs: Any) -> Any:
        return -(logs.exp() * logs).sum(-1)

    def kl(self, logs: Any, other: Any) -> Any:
        return (logs.exp() * (logs - other)).sum(-1)


class Gaussian:
    """n independent normal numbers: n means, then n logarithms of standard deviations."""

    masked = False

    def draw(self, params: np.ndarray, rng: Rng, mask: np.ndarray | None) -> Drawn:
        mean, log_std = np.split(params, 2, -1)
        noise = rng.standard_normal(mean.shape, np.float32) if rng is not None else np.zeros_like(mean)
        logp = (-0.5 * noise * noise - log_std - _LOG_SQRT_2PI).sum(-1)
        return mean + np.exp(log_std) * noise, logp

    def fill(self, noise: Any, generator: Any) -> None:
        noise.normal_(generator=generator)

    def pick(self, params: Any, noise: Any, mask: Any) -> Any:
        mean, log_std = params.chunk(2, -1)
        return mean + log_std.exp() * noise

    def read(self, params: Any, mask: Any) -> Any:
        return params.chunk(2, -1)

    def log_prob(self, params: Any, action: Any) -> Any:
        mean, log_std = params
        z = (action - mean) * (-log_std).exp()
        return (-0.5 * z.square() - log_std).sum(-1) - 0.5 * mean.shape[-1] * _LOG_2PI

    def entropy(self, params: Any) -> Any:
        log_std = params[1]
        return log_std.sum(-1) + 0.5 * log_std.shape[-1] * (1.0 + _LOG_2PI)

    def kl(self, params: Any, other: Any) -> Any:
        (mean, log_std), (its_mean, its_log_std) = params, other
        wider = log_std - its_log_std
        away = (mean - its_mean) * (-its_log_std).exp()
        return (0.5 * ((2.0 * wider).exp() + away.square() - 1.0) - wider).sum(-1)


DISTRIBUTIONS: dict[str, Any] = {"categorical": Categorical(), "gaussian": Gaussian()}
"""By the kind of a part."""


def parts(layout: ActionLayout, mask: Any) -> Iterator[tuple[ActionPart, Any, Any]]:
    """(part, its distribution, its columns of the mask) of each part."""
    at = 0
    for part in layout.parts:
        distribution, legal = DISTRIBUTIONS[part.kind], None
        if distribution.masked:
            legal = None if mask is None else mask[..., at : at + part.n]
            at += part.n
        yield part, distribution, legal


def sample(layout: ActionLayout, dist: np.ndarray, rng: Rng, mask: np.ndarray | None = None) -> Drawn:
    """Flat actions `[B]` or `[B, size]` and their log probability `[B]`; without `rng` the most likely ones."""
    dist = np.ascontiguousarray(dist, np.float32)
    if layout.single:
        return DISTRIBUTIONS["categorical"].draw(dist, rng, mask)
    action = np.empty((len(dist), layout.size), layout.dtype)
    logp = np.zeros(len(dist), np.float32)
    for part, distribution, legal in parts(layout, mask):
        drawn, part_logp = distribution.draw(dist[:, part.param], rng, legal)
        action[:, part.action] = drawn.reshape(len(dist), -1)
        logp += part_logp
    return action, logp


def fill_noise(layout: ActionLayout, noise: Any, generator: Any) -> None:
    """What `pick` draws with, a tensor `[..., n]` with n numbers for a part of n: written over with new ones."""
    at = 0
    for part in layout.parts:
        DISTRIBUTIONS[part.kind].fill(noise[..., at : at + part.n], generator)
        at += part.n


def pick(layout: ActionLayout, dist: Any, noise: Any, mask: Any = None) -> tuple[Any, Any]:
    """`sample` for tensors, with noise in place of a generator, so that it can be recorded."""
    drawn, log_probs, at = [], [], 0
    for part, distribution, legal in parts(layout, mask):
        params = dist[..., part.param]
        drawn.append(distribution.pick(params, noise[..., at : at + part.n], legal))
        log_probs.append(distribution.log_prob(distribution.read(params, legal), drawn[-1]))
        at += part.n
    if layout.single:
        return drawn[0].squeeze(-1), log_probs[0]
    action = (
        dist.new_empty((*dist.shape[:-1], layout.size))
        if not layout.discrete
        else drawn[0].new_empty((*dist.shape[:-1], layout.size))
    )
    for part, x in zip(layout.parts, drawn, strict=True):
        action[..., part.action] = x
    return action, _sum(log_probs)


def log_prob_entropy(layout: ActionLayout, dist: Any, action: Any, mask: Any = None) -> tuple[Any, Any]:
    """Log probability (density for Gaussian parts) of flat actions, and entropy in nats: tensors `[...]`."""
    sizes = {part.n for part in layout.parts}
    if layout.discrete and len(sizes) == 1:  # one choice, or several of one size: a single softmax
        choices = DISTRIBUTIONS["categorical"]
        if layout.single:
            logs = choices.read(dist, mask)
            return choices.log_prob(logs, action.unsqueeze(-1)), choices.entropy(logs)
        logits = dist if mask is None else dist.where(mask, NEVER)
        logs = choices.read(logits.unflatten(-1, (len(layout.parts), sizes.pop())), None)
        log_prob = choices.log_prob(logs, action.unsqueeze(-1)).sum(-1)
        return log_prob, -(logs.exp() * logs).sum((-2, -1))
    log_probs, entropies = [], []
    for part, distribution, legal in parts(layout, mask):
        read = distribution.read(dist[..., part.param], legal)
        log_probs.append(distribution.log_prob(read, action[..., part.action]))
        entropies.append((part.kind, distribution.entropy(read)))
    return _sum(log_probs), _sum([x for _, x in sorted(entropies, key=lambda pair: pair[0])])


def kl(layout: ActionLayout, dist: Any, other: Any, mask: Any = None) -> Any:
    """KL(p, q) in nats of the distributions of two heads `[..., num_params]`: tensors `[...]`. A head of zeros is
    uniform over the legal choices, and the standard normal."""
    return _sum(
        [
            distribution.kl(
                distribution.read(dist[..., part.param], legal), distribution.read(other[..., part.param], legal)
            )
            for part, distribution, legal in parts(layout, mask)
        ]
    )


def _sum(terms: list[Any]) -> Any:
    return sum(terms[1:], start=terms[0])
