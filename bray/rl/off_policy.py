"""What a policy is worth, by episodes that another one played.

Columns are `[N, T]`, an episode in each row, filled up with zeros behind its end. `ratio` is pi(a|s) / mu(a|s), the
policy that is judged over the one that played; 1 behind the end. What is estimated is the discounted return from the
start to the end of an episode; a time limit is an end.
Everything is float64: products over long episodes leave the range of float32.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

RESAMPLES = 1000


class Estimate(NamedTuple):
    """A mean with the 95 % interval of the bootstrap over episodes."""

    value: float
    low: float
    high: float


def importance_sampling(reward: np.ndarray, ratio: np.ndarray, gamma: float, rng: np.random.Generator) -> Estimate:
    """Per decision (Precup et al. 2000): the mean of sum_t gamma^t (prod_{k<=t} ratio_k) r_t. Unbiased."""
    return _mean((_discounts(reward, gamma) * np.cumprod(ratio, 1) * reward).sum(1), rng)


def weighted_importance_sampling(
    reward: np.ndarray, ratio: np.ndarray, gamma: float, rng: np.random.Generator
) -> Estimate:
    """As `importance_sampling`, but at each step the products are divided by their mean over the episodes: a little
    bias, and far less variance."""
    weight = np.cumprod(ratio, 1)
    parts = _discounts(reward, gamma) * weight * reward

    def value(counts: np.ndarray) -> np.ndarray:
        return np.asarray(_share(counts @ parts, counts @ weight).sum(1))

    return _by_bootstrap(value, len(reward), rng)


def doubly_robust(
    reward: np.ndarray, ratio: np.ndarray, q: np.ndarray, v: np.ndarray, gamma: float, rng: np.random.Generator
) -> Estimate:
    """Jiang and Li 2016: V_t = v_t + ratio_t (r_t + gamma V_{t+1} - q_t), with values `q` of the actions taken and `v`
    of the states, `[N, T]`. Right on average if either the ratios or the values are, where values come from other
    episodes."""
    value = np.zeros(len(reward))
    for t in range(reward.shape[1] - 1, -1, -1):
        value = v[:, t] + ratio[:, t] * (reward[:, t] + gamma * value - q[:, t])
    return _mean(value, rng)


def weighted_doubly_robust(
    reward: np.ndarray, ratio: np.ndarray, q: np.ndarray, v: np.ndarray, gamma: float, rng: np.random.Generator
) -> Estimate:
    """Thomas and Brunskill 2016: `doubly_robust` with the weights of `weighted_importance_sampling`:
    sum_t gamma^t (w_t (r_t - q_t) + w_{t-1} v_t)."""
    weight, discounts = np.cumprod(ratio, 1), _discounts(reward, gamma)
    before = np.concatenate([np.ones((len(reward), 1)), weight[:, :-1]], 1)
    errors, values = discounts * weight * (reward - q), discounts * before * v

    def value(counts: np.ndarray) -> np.ndarray:
        of_steps = _share(counts @ errors, counts @ weight) + _share(counts @ values, counts @ before)
        return np.asarray(of_steps.sum(1))

    return _by_bootstrap(value, len(reward), rng)


class Fitted(NamedTuple):
    """Normal equations of each episode, so that any set of episodes is fitted without looking at rows again."""

    gram: np.ndarray
    """`[N, D, D]`: sums of x x'."""
    future: np.ndarray
    """`[N, D, D]`: sums of x (discount * x_next)'."""
    target: np.ndarray
    """`[N, D]`: sums of x r."""
    start: np.ndarray
    """`[N, D]`: what the policy expects of the first state."""


def fitted(
    x: np.ndarray, x_next: np.ndarray, reward: np.ndarray, discount: np.ndarray, episode: np.ndarray, start: np.ndarray
) -> Fitted:
    """Rows of all episodes: features of state and action `x [R, D]`, those that the policy expects of the next state
    `x_next`, `discount [R]` (0 where it terminated), the episode of each row."""
    n, width = len(start), x.shape[1]
    out = Fitted(np.zeros((n, width, width)), np.zeros((n, width, width)), np.zeros((n, width)), start)
    for i in range(n):
        rows = episode == i
        out.gram[i] = x[rows].T @ x[rows]
        out.future[i] = x[rows].T @ (discount[rows, None] * x_next[rows])
        out.target[i] = x[rows].T @ reward[rows]
    return out


def fitted_q(of: Fitted, counts: np.ndarray, iterations: int, ridge: float = 1.0) -> np.ndarray:
    """Fitted Q evaluation (Le et al. 2019) with features: `iterations` times, w is the ridge regression of
    r + discount x_next' w on x. `counts [N]`: how often each episode counts. Returns w `[D]`."""
    gram = np.tensordot(counts, of.gram, 1) + ridge * np.eye(of.gram.shape[1])
    future, target = np.tensordot(counts, of.future, 1), (counts @ of.target)[:, None]
    solved = np.linalg.solve(gram, np.concatenate([future, target], 1))
    step, target = solved[:, :-1], solved[:, -1]
    w: np.ndarray = np.zeros_like(target)
    for _ in range(iterations):
        w = target + step @ w
    return w


def fitted_q_evaluation(of: Fitted, iterations: int, rng: np.random.Generator, resamples: int = 100) -> Estimate:
    """What `fitted_q` says of the first states, fitted anew for each resample of the episodes."""
    n = len(of.start)

    def value(counts: np.ndarray) -> np.ndarray:
        return np.array([(c @ of.start / c.sum()) @ fitted_q(of, c, iterations) for c in counts])

    return _by_bootstrap(value, n, rng, resamples)


def _discounts(reward: np.ndarray, gamma: float) -> np.ndarray:
    return np.broadcast_to(gamma ** np.arange(reward.shape[1], dtype=np.float64), reward.shape)


def _share(x: np.ndarray, of: np.ndarray) -> np.ndarray:
    """x / of, and 0 where all of it is 0: no episode did what the policy would have done."""
    share: np.ndarray = np.divide(x, of, out=np.zeros_like(x), where=of > 0)
    return share


def _mean(each: np.ndarray, rng: np.random.Generator) -> Estimate:
    return _by_bootstrap(lambda counts: counts @ each / len(each), len(each), rng)


def _by_bootstrap(
    value: Callable[[np.ndarray], np.ndarray], n: int, rng: np.random.Generator, resamples: int = RESAMPLES
) -> Estimate:
    """`value(counts [B, N])`: the estimate `[B]` of episodes that count so often."""
    counts = rng.multinomial(n, np.full(n, 1.0 / n), resamples).astype(np.float64)
    low, high = np.quantile(value(counts), [0.025, 0.975])
    return Estimate(float(value(np.ones((1, n)))[0]), float(low), float(high))
