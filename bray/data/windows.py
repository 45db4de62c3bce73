"""N-step windows over the rows of a replay ring."""

from __future__ import annotations

import numpy as np

from bray.compiled import compiled
from bray.data.flags import ENDED, TERMINATED, VALID


def nstep_windows(
    reward: np.ndarray, flags: np.ndarray, slots: np.ndarray, newest: int, num_envs: int, n: int, gamma: float
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """For each slot: the discounted sum of m <= n rewards, gamma**m (0 where the last one terminated), and the slot to
    bootstrap from, which is the one after the last summed reward. A window ends with the first terminated or truncated
    row, before a dead row, and before the row that starts at slot `newest` (its successor is not known yet)."""
    total = np.empty(len(slots), np.float32)
    discount = np.empty(len(slots), np.float32)
    after = np.empty(len(slots), np.int64)
    _windows(reward, flags, slots, newest, num_envs, n, gamma, total, discount, after)
    return total, discount, after


@compiled
def _windows(
    reward: np.ndarray,
    flags: np.ndarray,
    slots: np.ndarray,
    newest: int,
    num_envs: int,
    n: int,
    gamma: float,
    total: np.ndarray,
    discount: np.ndarray,
    after: np.ndarray,
) -> None:
    for i in range(slots.shape[0]):
        slot = slots[i]
        value = 0.0
        factor = 1.0
        terminated = False
        for _ in range(n):
            flag = flags[slot]
            if flag & VALID == 0 or newest <= slot < newest + num_envs:
                break
            value += factor * reward[slot]
            factor *= gamma
            slot += num_envs
            if slot >= flags.shape[0]:
                slot -= flags.shape[0]
            if flag & ENDED:
                terminated = flag & TERMINATED != 0
                break
        total[i] = value
        discount[i] = 0.0 if terminated else factor
        after[i] = slot
