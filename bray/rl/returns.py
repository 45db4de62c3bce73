"""Advantages and returns over `[T, B]` columns, time first. Numba: these are loops over single numbers."""

from __future__ import annotations

import numpy as np

from bray.compiled import compiled


def gae(
    value: np.ndarray,
    reward: np.ndarray,
    terminated: np.ndarray,
    truncated: np.ndarray,
    valid: np.ndarray,
    gamma: float,
    lambda_: float,
) -> np.ndarray:
    """Generalised advantage estimation (Schulman et al. 2016).

        delta_t = r_t + gamma (1 - terminated_t) V_{t+1} - V_t
        A_t     = delta_t + gamma lambda (1 - terminated_t - truncated_t) A_{t+1}

    `value [T+1, B]`, the rest `[T, B]`. The row after an episode's end holds its final observation (docs/architecture.md), so V_{t+1}
    is the bootstrap there too: 0 where terminated, V(final) where truncated. Rows that are not valid get 0, and the sum goes on behind
    them as if they were not there: rows of an environment that is waited for repeat the observation, and so V, of its next step.
    """
    if value.shape[0] != reward.shape[0] + 1:
        raise ValueError(f"value needs one row more than reward, got {value.shape[0]} and {reward.shape[0]}")
    return _gae(value, reward, terminated, truncated, valid, gamma, lambda_)


def standardize(x: np.ndarray, valid: np.ndarray, eps: float = 1e-8) -> np.ndarray:
    """x with mean 0 and standard deviation 1 over the valid rows."""
    rows = x[valid]
    return ((x - rows.mean()) / (rows.std() + eps)).astype(np.float32)


@compiled
def _gae(value, reward, terminated, truncated, valid, gamma, lambda_):  # pragma: no cover - compiled
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
