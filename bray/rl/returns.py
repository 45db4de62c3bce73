"""Advantages and returns over `[T, B]` columns, time first.

`terminated` ends an episode for good: nothing follows it. `truncated` cuts it off: the value of its final observation
still counts. The row after either holds that final observation (`bray/envs/vector.py`) and is not `valid`. So
`value [T+1, B]` has the value that each row bootstraps from in the row behind it, and no function here takes a `done`.
Arrays may be numpy's or torch's; the results are of that kind.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch

from bray.capture.over_ranks import by_itself
from bray.compiled import compiled

Array = Any
"""numpy array or torch tensor."""
_EQUAL = 1e-6  # float32 rounds at 6e-8 of a number, and returns are sums of many


def discounted_sum(x: Array, decay: Array) -> Array:
    """y_t = x_t + decay_t y_{t+1}, y_T = 0: the recursion behind every function here. `x, decay [T, ...]` ->
    `[T, ...]`.

    numpy: a compiled loop that sums in float64. torch: log2(T) operations over whole columns (Hillis and Steele 1986),
    because an operation per step costs more than its arithmetic on a CPU and far more on a GPU.
    """
    if isinstance(x, np.ndarray):
        columns = _discounted_sum(x.reshape(len(x), -1), np.broadcast_to(decay, x.shape).reshape(len(x), -1))
        return columns.reshape(x.shape)
    step = 1
    while step < len(x):
        x = torch.cat([torch.addcmul(x[:-step], decay[: len(x) - step], x[step:]), x[-step:]])
        decay = decay[:-step] * decay[step:]
        step *= 2
    return x


def gae(
    value: Array,
    reward: Array,
    terminated: Array,
    truncated: Array,
    valid: Array,
    gamma: float,
    lambda_: float,
) -> Array:
    """Generalised advantage estimation (Schulman et al. 2016).

        delta_t = r_t + gamma (1 - terminated_t) V_{t+1} - V_t
        A_t     = delta_t + gamma lambda (1 - terminated_t - truncated_t) A_{t+1}

    `value [T+1, B]`, the rest `[T, B]`. Rows that are not valid get 0, and the sum goes on behind
    them as if they were not there: rows of an environment that is waited for repeat the observation, and so V, of its
    next step.
    """
    _check(value, reward)
    if isinstance(value, np.ndarray):
        return _gae(value, reward, terminated, truncated, valid, gamma, lambda_)
    delta = _delta(value, reward, terminated, valid, gamma)
    return discounted_sum(delta, _decay(terminated | truncated, valid, gamma * lambda_, delta)) * valid


def lambda_returns(
    value: Array,
    reward: Array,
    terminated: Array,
    truncated: Array,
    valid: Array,
    gamma: float,
    lambda_: Any,
) -> Array:
    """TD(lambda) targets `[T, B]`: G_t = r_t + gamma (1 - terminated_t) ((1 - lambda_t) V_{t+1} + lambda_t G_{t+1}),
    V_{t+1} alone behind the last step of an episode or piece (Sutton and Barto, ch. 12). `lambda_` is a number or
    `[T, B]`; 1 gives the discounted return with a bootstrap. Rows that are not valid pass on what follows them."""
    _check(value, reward)
    delta = _delta(value, reward, terminated, valid, gamma)
    return value[:-1] + discounted_sum(delta, _decay(terminated | truncated, valid, gamma * lambda_, delta))


def n_step_returns(
    value: Array,
    reward: Array,
    terminated: Array,
    truncated: Array,
    valid: Array,
    gamma: float,
    n: int,
) -> Array:
    """sum_{k<n} gamma^k r_{t+k} + gamma^n V_{t+n} `[T, B]`, with fewer steps where the episode or the piece ends
    earlier or a row that is not valid follows; 0 instead of V where it terminated. Rows that are not valid get V."""
    _check(value, reward)
    discount = gamma * (1.0 - _real(terminated, value))
    ends = (terminated | truncated)[:-1] | ~valid[1:]
    where = np.where if isinstance(value, np.ndarray) else torch.where
    target = value
    for _ in range(n):
        following = where(ends, value[1:-1], target[1:-1])
        target = _cat(reward + discount * _cat(following, value[-1:]), value[-1:])
        target = where(_cat(valid, valid[-1:]), target, value)
    return target[:-1]


class VTrace(NamedTuple):
    target: Array
    """vs `[T, B]`: what the value function is trained towards."""
    advantage: Array
    """Of the policy gradient `[T, B]`, already weighted by the clipped ratio."""


def vtrace(
    value: Array,
    reward: Array,
    terminated: Array,
    truncated: Array,
    valid: Array,
    ratio: Array,
    gamma: float,
    lambda_: float = 1.0,
    rho_clip: float = 1.0,
    c_clip: float = 1.0,
    rho_pg_clip: float | None = 1.0,
) -> VTrace:
    """V-trace (Espeholt et al. 2018): value targets and advantages of pi from what mu did; `ratio` = pi/mu `[T, B]`.

        vs_t = V_t + delta_t + gamma c_t (vs_{t+1} - V_{t+1}),   delta_t = rho_t (r_t + gamma V_{t+1} - V_t)
        A_t  = rho_pg_t (r_t + gamma vs_{t+1} - V_t),     rho = min(rho_clip, ratio), c = lambda min(c_clip, ratio)

    Behind the last step of an episode or piece vs_{t+1} is V_{t+1}. Without a `rho_pg_clip` rho_pg is 1: for a loss
    that has the ratio itself.
    """
    _check(value, reward)
    ended, rho = terminated | truncated, ratio.clip(None, rho_clip)
    delta = rho * _delta(value, reward, terminated, valid, gamma)
    excess = discounted_sum(delta, _decay(ended, valid, gamma * lambda_ * ratio.clip(None, c_clip), delta))
    following = value[1:] + _cat(excess[1:], 0 * excess[:1]) * (1.0 - _real(ended, value))
    gain = reward + gamma * (1.0 - _real(terminated, value)) * following - value[:-1]
    rho_pg = 1.0 if rho_pg_clip is None else ratio.clip(None, rho_pg_clip)
    return VTrace(value[:-1] + excess, rho_pg * gain * valid)


def retrace(
    q: Array,
    value: Array,
    reward: Array,
    terminated: Array,
    truncated: Array,
    valid: Array,
    ratio: Array,
    gamma: float,
    lambda_: float = 1.0,
) -> Array:
    """Retrace targets `[T, B]` for Q of the actions taken (Munos et al. 2016).

        Qret_t = r_t + gamma (V_{t+1} + c_{t+1} (Qret_{t+1} - Q_{t+1})),   c = lambda min(1, pi/mu)

    `q [T, B]` of the actions taken, `value [T+1, B]` = sum_a pi(a) Q(a), `ratio [T, B]` = pi/mu. Rows that are not
    valid get Q.
    """
    _check(value, reward)
    error = reward + gamma * (1.0 - _real(terminated, value)) * value[1:] - q
    c = lambda_ * ratio.clip(None, 1.0)
    decay = _decay(terminated | truncated, valid, gamma * _cat(c[1:], 0 * c[:1]), error)
    return q + discounted_sum(error * valid, decay) * valid


def upgo_returns(
    value: Array, reward: Array, terminated: Array, truncated: Array, valid: Array, gamma: float = 1.0
) -> Array:
    """Returns `[T, B]` that follow the game while it goes better than expected (Vinyals et al. 2019): lambda_t = 1
    where r_{t+1} + gamma V_{t+2} >= V_{t+1}, else 0; 1 in the last row."""
    better = _real(_delta(value, reward, terminated, valid, gamma) >= 0, value)
    of_next_valid = discounted_sum(better * valid, 1.0 - _real(valid, value))[1:]
    lambda_ = _cat(of_next_valid, 0 * value[:1] + 1.0)
    return lambda_returns(value, reward, terminated, truncated, valid, gamma, lambda_)


def standardize(x: Array, valid: Array, over_ranks: Callable[[Any], Any] = by_itself, eps: float = 1e-8) -> Array:
    """x with mean 0 and standard deviation 1 over the valid rows, of all ranks together; 0 where there are none, or
    where all are equal but for rounding."""
    if isinstance(x, torch.Tensor):
        weight, wide = valid.double(), x.double()
        count = over_ranks(weight.sum()).clamp(min=1e-9)
        middle = over_ranks((wide * weight).sum()) / count
        spread = over_ranks(((wide - middle).square() * weight).sum()).div(count).sqrt()
        equal = spread <= _EQUAL * middle.abs()
        return torch.where(equal, 0.0, (wide - middle) / (spread + eps)).float()
    rows = x[valid].astype(np.float64)
    count = max(1e-9, over_ranks(float(rows.size)))
    mean = over_ranks(rows.sum()) / count
    deviation = np.sqrt(over_ranks(np.square(rows - mean).sum()) / count)
    if deviation <= _EQUAL * abs(mean):
        return np.zeros(x.shape, np.float32)
    return ((x - mean) / (deviation + eps)).astype(np.float32)


def _check(value: Array, reward: Array) -> None:
    if len(value) != len(reward) + 1:
        raise ValueError(f"value needs one row more than reward, got {len(value)} and {len(reward)}")


def _delta(value: Array, reward: Array, terminated: Array, valid: Array, gamma: float) -> Array:
    """r_t + gamma (1 - terminated_t) V_{t+1} - V_t; 0 where a row is not valid."""
    return (reward + gamma * (1.0 - _real(terminated, value)) * value[1:] - value[:-1]) * valid


def _decay(ended: Array, valid: Array, weight: Any, like: Array) -> Array:
    """What the sum behind a row counts in it: `weight`, 0 at the end of an episode, 1 in a row that is not valid."""
    kept = _real(valid, like)
    return kept * (1.0 - _real(ended, like)) * weight + (1.0 - kept)


def _real(flags: Array, like: Array) -> Array:
    return flags.astype(like.dtype) if isinstance(flags, np.ndarray) else flags.to(like.dtype)


def _cat(first: Array, second: Array) -> Array:
    return np.concatenate([first, second]) if isinstance(first, np.ndarray) else torch.cat([first, second])


@compiled
def _discounted_sum(x: np.ndarray, decay: np.ndarray) -> np.ndarray:  # pragma: no cover - compiled
    steps, batch = x.shape
    out = np.empty_like(x)
    carry = np.zeros(batch, np.float64)
    for t in range(steps - 1, -1, -1):
        for b in range(batch):
            carry[b] = x[t, b] + decay[t, b] * carry[b]
            out[t, b] = carry[b]
    return out


@compiled
def _gae(  # pragma: no cover - compiled
    value: np.ndarray,
    reward: np.ndarray,
    terminated: np.ndarray,
    truncated: np.ndarray,
    valid: np.ndarray,
    gamma: float,
    lambda_: float,
) -> np.ndarray:
    steps, batch = reward.shape
    advantage = np.zeros((steps, batch), np.float32)
    carry = np.zeros(batch, np.float64)
    for t in range(steps - 1, -1, -1):
        for b in range(batch):
            if not valid[t, b]:
                continue
            if terminated[t, b] or truncated[t, b]:
                carry[b] = 0.0  # what follows is another episode
            bootstrap = 0.0 if terminated[t, b] else gamma * value[t + 1, b]
            carry[b] = reward[t, b] + bootstrap - value[t, b] + gamma * lambda_ * carry[b]
            advantage[t, b] = carry[b]
    return advantage
