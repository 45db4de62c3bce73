"""The sum tree of prioritized replay (Schaul 2016): draw slot i with probability p_i / sum(p), change p_i, in O(log n).

Each node holds the sum of eight children, one cache line, so a tree over a million slots is seven levels deep and takes
8/7 of its leaves. A parent is always recomputed as the sum of its children in one order, never adjusted by a
difference: the tree is a pure function of its leaves (no drift, and a checkpoint needs the leaves only).
"""

from __future__ import annotations

from functools import partial

import numpy as np

from bray.compiled import compiled
from bray.data.flags import ELIGIBLE, ELIGIBLE_MASK
from bray.errors import DataError

FAN = 8


class SumTree:
    """Priorities of `size` slots; `tree[:size]` are the leaves, one level after the other up to the total at the
    end."""

    def __init__(self, size: int):
        self.size = size
        offsets = [0]
        n = size
        while True:
            padded = -(-n // FAN) * FAN if n > 1 else 1
            offsets.append(offsets[-1] + padded)
            if n == 1:
                break
            n = -(-n // FAN)
        self.offsets = np.array(offsets[:-1], np.int64)
        # Groups of eight start on cache lines, so that each level of a descent touches one.
        memory = np.zeros(offsets[-1] + FAN, np.float64)
        skip = -memory.ctypes.data % 64 // 8
        self.tree = memory[skip : skip + offsets[-1]]

    @property
    def total(self) -> float:
        return float(self.tree[-1])

    @property
    def leaves(self) -> np.ndarray:
        """All priorities, a view. After writing to it call `rebuild`."""
        return self.tree[: self.size]

    @property
    def nbytes(self) -> int:
        return self.tree.nbytes

    def rebuild(self) -> None:
        """Compute all sums anew from the leaves."""
        _rebuild(self.tree, self.offsets)

    def set(self, slots: np.ndarray, priority: float) -> None:
        """One priority for several slots."""
        slots = np.ascontiguousarray(slots, np.int64)
        self.tree[slots] = priority
        _lift(self.tree, self.offsets, slots.copy())

    def assign(self, slots: np.ndarray, priorities: np.ndarray) -> None:
        """A priority for each of several slots."""
        self.tree[slots] = priorities
        _lift(self.tree, self.offsets, slots.copy())

    def turn(self, flags: np.ndarray, enter: int, leave: int, count: int, priority: np.ndarray) -> None:
        """`count` slots from `enter` on get their `priority` where they are eligible; `count` slots from `leave` on get
        0.
        A negative start means none."""
        _turn(self.tree, self.offsets, flags, enter, leave, count, priority)

    def draw(self, u: np.ndarray, beta: float, newest: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Stratified draws: draw i falls into the i-th of len(u) equal parts of the total, at u[i] of its width.
        Returns ids (all below `newest`), slots, and weights (N P_i)^-beta divided by the largest one of the batch."""
        ids, slots = np.empty(len(u), np.int64), np.empty(len(u), np.int64)
        weight = np.empty(len(u), np.float32)
        _draw(self.tree, self.offsets, u, beta, newest, self.size, slots, ids, weight)
        return ids, slots, weight

    def update(
        self,
        flags: np.ndarray,
        id: np.ndarray,
        priority: np.ndarray,
        oldest: int,
        newest: int,
        alpha: float,
        eps: float,
        largest: float,
    ) -> tuple[int, float]:
        """Set (|priority| + eps)^alpha for the transitions `id` that are still between oldest (included) and newest
        (excluded). Returns how many were not, and the largest priority seen."""
        late, largest = _update(self.tree, self.offsets, flags, id, priority, oldest, newest, alpha, eps, largest)
        if late < 0:
            bad = int(np.flatnonzero(~np.isfinite(priority))[0])
            raise DataError(
                f"priorities are finite numbers, got {priority[bad]} at position {bad}. The loss has probably diverged."
            )
        return late, largest


@partial(compiled, inline="always")
def _sum(tree: np.ndarray, i: int) -> float:
    """Eight neighbours, in the order in which a descent halves them."""
    left: float = (tree[i] + tree[i + 1]) + (tree[i + 2] + tree[i + 3])
    right: float = (tree[i + 4] + tree[i + 5]) + (tree[i + 6] + tree[i + 7])
    return left + right


@compiled
def _lift(tree: np.ndarray, offsets: np.ndarray, nodes: np.ndarray) -> None:
    """Recompute the ancestors of some leaves, level by level; `nodes` is overwritten. Neighbours that share a parent
    cost one sum, so sorted slots (as stratified draws are) are cheapest."""
    for level in range(1, offsets.shape[0]):
        below, here = offsets[level - 1], offsets[level]
        last = -1
        for i in range(nodes.shape[0]):
            node = nodes[i] >> 3
            nodes[i] = node
            if node != last:
                last = node
                tree[here + node] = _sum(tree, below + (node << 3))


@compiled
def _rebuild(tree: np.ndarray, offsets: np.ndarray) -> None:
    for level in range(1, offsets.shape[0]):
        below, here = offsets[level - 1], offsets[level]
        for node in range((here - below) >> 3):
            tree[here + node] = _sum(tree, below + (node << 3))


@compiled
def _turn(
    tree: np.ndarray, offsets: np.ndarray, flags: np.ndarray, enter: int, leave: int, count: int, priority: np.ndarray
) -> None:
    nodes = np.empty(2 * count, np.int64)
    n = 0
    if leave >= 0:
        for slot in range(leave, leave + count):
            tree[slot] = 0.0
            nodes[n] = slot
            n += 1
    if enter >= 0:
        for slot in range(enter, enter + count):
            tree[slot] = priority[slot - enter] if flags[slot] & ELIGIBLE_MASK == ELIGIBLE else 0.0
            nodes[n] = slot
            n += 1
    _lift(tree, offsets, nodes[:n])


@compiled
def _draw(
    tree: np.ndarray,
    offsets: np.ndarray,
    u: np.ndarray,
    beta: float,
    newest: int,
    size: int,
    slots: np.ndarray,
    ids: np.ndarray,
    weight: np.ndarray,
) -> None:
    n = u.shape[0]
    total = tree[-1]
    x = np.empty(n, np.float64)
    for i in range(n):
        x[i] = (i + u[i]) / n * total
        slots[i] = 0
    one, two, four = np.uint64(1), np.uint64(2), np.uint64(4)  # unsigned: no test for negative indices
    # All draws go down one level before any goes further, so that their cache misses overlap; and each of the three
    # halvings of a group is a select, not a branch, which would be mispredicted half of the time.
    for level in range(offsets.shape[0] - 2, -1, -1):
        nodes = tree[offsets[level] :]
        most = (offsets[level] - offsets[level - 1]) // 8 - 1 if level else np.int64(size - 1)  # the rest is padding
        for i in range(n):
            at = np.uint64(slots[i] << 3)
            here = x[i]
            left = (nodes[at] + nodes[at + one]) + (nodes[at + two] + nodes[at + two + one])
            right = left <= here
            here = here - left if right else here
            at = at + four if right else at
            left = nodes[at] + nodes[at + one]
            right = left <= here
            here = here - left if right else here
            at = at + two if right else at
            left = nodes[at]
            right = left <= here
            here = here - left if right else here
            at = at + one if right else at
            slots[i] = min(np.int64(at), most)
            x[i] = here
    for i in range(n):
        if tree[slots[i]] <= 0.0:  # a rounded difference led past the last child, once in 1e15 draws: take a neighbour
            slot = slots[i]
            while slot > 0 and tree[slot] <= 0.0:
                slot -= 1
            while tree[slot] <= 0.0:
                slot += 1
            slots[i] = slot
    least = tree[slots[0]]
    start = newest - newest % size  # the id of slot 0, or of the slot that slot 0 will overwrite
    for i in range(n):
        least = min(least, tree[slots[i]])
        ids[i] = start + slots[i]
        if ids[i] >= newest:
            ids[i] -= size
    for i in range(n):
        weight[i] = np.exp(-beta * np.log(tree[slots[i]] / least))


@compiled
def _update(
    tree: np.ndarray,
    offsets: np.ndarray,
    flags: np.ndarray,
    id: np.ndarray,
    priority: np.ndarray,
    oldest: int,
    newest: int,
    alpha: float,
    eps: float,
    largest: float,
) -> tuple[int, float]:
    for i in range(id.shape[0]):
        if not np.isfinite(priority[i]):
            return -1, largest
    nodes = np.empty(id.shape[0], np.int64)
    late = 0
    n = 0
    for i in range(id.shape[0]):
        if id[i] < oldest or id[i] >= newest:
            late += 1
            continue
        slot = id[i] % flags.shape[0]
        if flags[slot] & ELIGIBLE_MASK == ELIGIBLE:
            value = (abs(priority[i]) + eps) ** alpha
            tree[slot] = value
            largest = max(largest, value)
            nodes[n] = slot
            n += 1
    _lift(tree, offsets, nodes[:n])
    return late, largest
