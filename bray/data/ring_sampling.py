"""How a ReplayRing is sampled: n-step transitions, sequences, groups, single transitions by id.

Uniform one-step replay is numpy only; n-step windows and priorities bring their Numba kernels when they are asked for.
"""

from __future__ import annotations

import numpy as np

from bray import tree
from bray.data.flags import ELIGIBLE, ELIGIBLE_MASK, FIRST, JOINT, RETIRED, TERMINATED, TRUNCATED, VALID
from bray.data.ring_storage import RingConfig, RingStorage
from bray.errors import ConfigError, DataError, UnknownName
from bray.tree import NestedArray

_TRIES = 8
"""Times that rows at which no sequence can be learnt are drawn again before the others are looked through."""
_ONE = np.uint32(1)  # of the counters' own type: add.at is ten times slower otherwise


class SampledRing(RingStorage):
    """A ring that can be sampled. `within` restricts a draw to a range of ids: from (included), to (excluded)."""

    def __init__(self, config: RingConfig, example: dict[str, NestedArray]):
        super().__init__(config, example)
        self.beta = config.beta
        self._discounts = np.array([config.gamma, 0.0], np.float32)

    def sample(
        self,
        batch_size: int,
        rng: np.random.Generator,
        beta: float | None = None,
        within: tuple[int, int] | None = None,
    ) -> dict[str, NestedArray]:
        """`batch_size` transitions: obs, action, reward (n-step sum), discount (gamma**m, 0 where terminated),
        next_obs, weight, id, and the extras of the first row. The arrays are the caller's.

        A window sums m <= n_step rewards: to the end of the episode, or to the newest row if that comes first. Weights
        are 1 when uniform, else (N P_i)^-beta divided by the largest one of this batch.
        """
        ids, slots, weight = self._draw(batch_size, rng, beta, within)
        batch = self._batch(ids, slots, weight)
        if self._uses is not None:
            self._use(ids, slots)
        return batch

    def sample_sequences(
        self,
        batch_size: int,
        length: int,
        burn_in: int,
        rng: np.random.Generator,
        beta: float | None = None,
        within: tuple[int, int] | None = None,
    ) -> dict[str, NestedArray]:
        """`batch_size` runs of T = burn_in + length rows of one environment each, `[T, B, ...]`: obs and first (T + 1
        rows), action, reward, terminated, truncated, valid, id, extras, and weight `[B]`. An extra called `state` comes
        as it was at the first row, `[B, ...]`.

        Sequences cross episode ends (`first` and `valid` say where) but never the newest row. Uniform: all starts are
        equally likely. Prioritized: a row is drawn by priority, of those at which the learning part of a sequence can
        start; `weight` and `anchor` (its id) are that row's.

        With states: a gap inside an episode (a joint) hides what the memory saw. A sequence with a joint in its burn-in
        begins at the joint, with the state stored there. Rows behind a later joint are not `valid`.
        """
        if length < 1 or burn_in < 0:
            raise ConfigError(f"sequences have length >= 1 and burn_in >= 0, got {length} and {burn_in}")
        n, total = self.num_envs, burn_in + length
        low, stop = (x // n for x in within or self.id_range())
        high = stop - total  # the last start
        if high < low:
            raise DataError(
                f"sequences of {total} rows need {total + 1} rows, the replay has "
                f"{stop - low + 1 if self.steps else 0}. Add more, or sample shorter ones."
            )
        if self._tree is None:
            start, env = np.divmod(rng.integers(low * n, (high + 1) * n, batch_size), n)
            anchor = (start + burn_in) * n + env
            weight = np.ones(batch_size, np.float32)
        else:
            span = (low + burn_in) * n, (high + burn_in + 1) * n
            anchor, weight = self._draw_anchors(batch_size, rng, beta, within, span)
            start, env = np.divmod(anchor, n)
            start -= burn_in
        ids = (start + np.arange(total + 1)[:, None]) * n + env
        slots = ids % self._size
        flags = self._flags.take(slots)
        if joined := "state" in self._extras and bool((flags & JOINT).any()):
            late = _last(flags[1 : burn_in + 1] & JOINT)
            ids += np.where(start + late <= high, late, 0) * n
            slots = ids % self._size
            flags = self._flags.take(slots)
        if self._frames is None:
            obs = take_rows(self._columns["obs"], slots)
        else:
            obs = self._frames.gather(self._flags, slots, self._frames.stack)
        inner, flat = flags[:-1], slots[:-1]
        first, valid = (flags & FIRST) != 0, (inner & VALID) != 0
        if joined:
            joint = (flags & JOINT) != 0
            first &= ~joint
            valid[1:] &= ~np.logical_or.accumulate(joint[1:-1], 0)
        batch = {
            "obs": obs,
            "action": take_rows(self._columns["action"], flat),
            "reward": self._reward.take(flat),
            "terminated": (inner & TERMINATED) != 0,
            "truncated": (inner & TRUNCATED) != 0,
            "valid": valid,
            "first": first,
            "weight": weight,
            "id": ids[:-1],
            "anchor": anchor,
        }
        for name in self._extras:
            batch[name] = take_rows(self._columns[name], slots[0] if name == "state" else flat)
        return batch

    def sample_groups(
        self,
        batch_size: int,
        rng: np.random.Generator,
        by: str = "episode",
        length: int | None = None,
        within: tuple[int, int] | None = None,
    ) -> dict[str, NestedArray]:
        """`batch_size` different groups, all equally likely, `[T, B, ...]`: the columns of `sample`, and `valid`. A
        group is the transitions that can be sampled of one episode, or with one value of the integer extra `by`, oldest
        first; of an episode that is still running, or partly overwritten, those that are there.

        T is the longest group's length; with `length` it is that, and a longer group gives a run of so many from a
        random start. What a group lacks are zeros with `valid` False and id -1. Priorities are not looked at; weights
        are 1. A call looks at all stored rows.
        """
        ids = np.arange(*(within or self.id_range()))
        slots = ids % self._size
        flags = self._flags.take(slots)
        if by in self._extras:
            column = self._columns[by]
            if not isinstance(column, np.ndarray) or column.ndim != 1 or column.dtype.kind not in "biu":
                raise ConfigError(f"groups are made by an extra that is one integer per row; {by!r} is not")
            keys = column.take(slots)
        elif by == "episode":
            starts = ((flags & FIRST) != 0).reshape(-1, self.num_envs)
            keys = (np.cumsum(starts, 0) * self.num_envs + np.arange(self.num_envs)).reshape(-1)
        else:
            raise UnknownName("key of groups", by, ("episode", *self._extras))
        good = np.flatnonzero((flags & ELIGIBLE_MASK) == ELIGIBLE)
        picked, valid = _choose_groups(keys[good], batch_size, length, rng)
        ids, slots = (x[good[picked]].reshape(-1) for x in (ids, slots))
        batch = self._batch(ids, slots, np.ones(len(ids), np.float32))
        if self._uses is not None:
            self._use(ids[valid.reshape(-1)], slots[valid.reshape(-1)])
        batch = tree.map(lambda x: x.reshape(*valid.shape, *x.shape[1:]), batch)
        tree.map(lambda x: x.__setitem__(~valid, 0), batch)
        batch["id"][~valid] = -1
        return {**batch, "valid": valid}

    def take(self, id: np.ndarray) -> dict[str, NestedArray]:
        """The transitions with these ids, in this order, as `sample` gives them, with weight 1. Not a draw: it is not
        counted for `max_use`."""
        ids = np.asarray(id, np.int64).reshape(-1)
        slots = ids % self._size
        newest = max(0, self.steps - 1)
        low, high = max(0, newest - self.window) * self.num_envs, newest * self.num_envs
        wrong = np.flatnonzero((ids < low) | (ids >= high) | ((self._flags.take(slots) & VALID) == 0))
        if len(wrong):
            raise DataError(
                f"transition {ids[wrong[0]]} is not in the replay: it was overwritten, has no successor yet, or is a "
                f"dead row. Ids here are {low} to {high - 1}."
            )
        return self._batch(ids, slots, np.ones(len(ids), np.float32))

    def newest(self, count: int) -> dict[str, NestedArray]:
        """The newest `count` transitions (or as many as there are), oldest first, used up and stale ones too; as
        `take`."""
        newest = max(0, self.steps - 1)
        low = max(0, newest - min(self.window, 2 * count))  # at most every other row is a dead one
        ids = np.arange(low * self.num_envs, newest * self.num_envs)
        return self.take(ids[(self._flags.take(ids % self._size) & VALID) != 0][-count:])

    def stats(self) -> dict[str, float]:
        """Mean and maximum of use, staleness and (when prioritized) priority of the rows drawn since the last call,
        measured in one batch of 16; empty when nothing was drawn. Sequences are left out. For
        `ReplayRing(monitor=True)`."""
        if self._monitor is None:
            raise ConfigError("this replay keeps no numbers about its draws: stats needs ReplayRing(monitor=True)")
        return self._monitor.row()

    def _batch(self, ids: np.ndarray, slots: np.ndarray, weight: np.ndarray) -> dict[str, NestedArray]:
        """The transitions at these slots."""
        if self.n_step == 1 and self._tree is None:
            reward = self._reward.take(slots)
            discount = self._discounts.take(self._flags.take(slots) & TERMINATED)
            after = slots + self.num_envs
            after[after >= self._size] -= self._size
        else:
            from bray.data.windows import nstep_windows

            newest = ((self.steps - 1) % self.rows) * self.num_envs
            reward, discount, after = nstep_windows(
                self._reward, self._flags, slots, newest, self.num_envs, self.n_step, self.gamma
            )
        if self._frames is None:
            obs = take_rows(self._columns["obs"], slots)
            next_obs = take_rows(self._columns["obs"], after)
        elif self.n_step == 1:
            both = self._frames.gather(self._flags, after, self._frames.stack + 1)
            obs, next_obs = both[:, :-1], both[:, 1:]  # two views of one copy
        else:
            obs = self._frames.gather(self._flags, slots, self._frames.stack)
            next_obs = self._frames.gather(self._flags, after, self._frames.stack)
        batch = {
            "obs": obs,
            "action": take_rows(self._columns["action"], slots),
            "reward": reward,
            "discount": discount,
            "next_obs": next_obs,
            "weight": weight,
            "id": ids,
        }
        for name in self._extras:
            batch[name] = take_rows(self._columns[name], slots)
        return batch

    def _draw(
        self, n: int, rng: np.random.Generator, beta: float | None, within: tuple[int, int] | None = None
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Ids, slots and weights of n draws, of the ids from `within[0]` to `within[1]` (excluded) where it is
        given."""
        if self._count == 0:
            limits = " and ".join(name for name in ("max_use", "max_staleness") if getattr(self, name))
            raise DataError(
                f"the replay has no transition to sample: {self.steps} rows were added (a row is sampled when its "
                f"successor is there){f', and {limits} leave none of them' if limits and self.steps > 1 else ''}"
            )
        low, high = self.id_range()
        if within is not None and within != (low, high):
            return self._draw_within(n, rng, self.beta if beta is None else float(beta), *within)
        if self._tree is not None:
            if not self._tree.total > 0.0:
                raise DataError("all priorities are 0, so nothing can be drawn by priority: keep eps above 0")
            return self._tree.draw(rng.random(n), self.beta if beta is None else float(beta), high)
        ids = rng.integers(low, high, n)
        slots = ids % self._size
        wrong = np.flatnonzero((self._flags.take(slots) & ELIGIBLE_MASK) != ELIGIBLE)
        if len(wrong) and self._count * 8 < high - low:  # drawing again would take long: choose among the good ones
            stored = np.arange(low, high)
            good = stored[(self._flags.take(stored % self._size) & ELIGIBLE_MASK) == ELIGIBLE]
            ids = good[rng.integers(0, len(good), n)]
            slots = ids % self._size
            wrong = wrong[:0]
        while len(wrong):
            ids[wrong] = rng.integers(low, high, len(wrong))
            slots[wrong] = ids[wrong] % self._size
            wrong = wrong[(self._flags.take(slots[wrong]) & ELIGIBLE_MASK) != ELIGIBLE]
        return ids, slots, np.ones(n, np.float32)

    def _draw_anchors(
        self,
        n: int,
        rng: np.random.Generator,
        beta: float | None,
        within: tuple[int, int] | None,
        span: tuple[int, int],
    ) -> tuple[np.ndarray, np.ndarray]:
        """Ids and weights of n draws by priority, of the ids in `span`: most are, so the others are drawn again."""
        assert self._tree is not None
        ids = self._draw(n, rng, beta, within)[0]
        for _ in range(_TRIES):
            wrong = np.flatnonzero((ids < span[0]) | (ids >= span[1]))
            if not len(wrong):
                break
            ids[wrong] = self._draw(len(wrong), rng, beta, within)[0]
        if len(wrong := np.flatnonzero((ids < span[0]) | (ids >= span[1]))):
            if not (self._tree.leaves.take(self.ids(span) % self._size) > 0.0).any():
                return rng.integers(*span, n), np.ones(n, np.float32)  # dead rows: any, for what follows them
            ids[wrong] = self._draw_within(len(wrong), rng, 0.0, *span)[0]
        p = self._tree.leaves.take(ids % self._size)
        return ids, ((p / p.min()) ** -(self.beta if beta is None else float(beta))).astype(np.float32)

    def _draw_within(
        self, n: int, rng: np.random.Generator, beta: float, low: int, high: int
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """As `_draw`, from a part of the rows; its cost grows with the part."""
        ids = self.ids((low, high))
        if len(ids) == 0:
            raise DataError("this part of the replay has no transition to sample")
        if self._tree is None:
            ids = ids[rng.integers(0, len(ids), n)]
            return ids, ids % self._size, np.ones(n, np.float32)
        p = self._tree.leaves.take(ids % self._size)
        ids, p = ids[p > 0.0], p[p > 0.0]
        if len(ids) == 0:
            raise DataError("all priorities in this part of the replay are 0: keep eps above 0")
        upto = np.cumsum(p)
        point = (np.arange(n) + rng.random(n)) / n * upto[-1]
        drawn = np.minimum(np.searchsorted(upto, point, side="right"), len(ids) - 1)  # rounding may reach the total
        ids, p = ids[drawn], p[drawn]
        return ids, ids % self._size, ((p / p.min()) ** -beta).astype(np.float32)

    def _use(self, ids: np.ndarray, slots: np.ndarray) -> None:
        """Count a batch's draws and retire what was drawn often enough."""
        assert self._uses is not None
        np.add.at(self._uses, slots, _ONE)
        if self._monitor is not None and self._monitor.wants():
            assert self._versions is not None
            self._monitor.see(
                self._uses.take(slots),
                self.version - self._versions.take(ids // self.num_envs % self.rows),
                None if self._tree is None else self._tree.leaves.take(slots),
            )
        if self.max_use is not None:
            gone = np.unique(slots[self._uses.take(slots) >= self.max_use])
            if len(gone):
                self._flags[gone] |= RETIRED
                self._count -= len(gone)
                if self._tree is not None:
                    self._tree.set(gone, 0.0)


def _last(flags: np.ndarray) -> np.ndarray:
    """1 + the last row of `[T, B]` that has a flag; 0 where none has."""
    rows = np.arange(1, len(flags) + 1)[:, None]
    last: np.ndarray = ((flags != 0) * rows).max(0, initial=0)
    return last


def take_rows(column: NestedArray, slots: np.ndarray) -> NestedArray:
    if isinstance(column, np.ndarray):
        return column.take(slots, 0)
    return tree.map(lambda x: x.take(slots, 0), column)


def _choose_groups(
    keys: np.ndarray, batch_size: int, length: int | None, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """`batch_size` different values of `keys` `[N]`, all equally likely, and the positions that have each, in order:
    `[T, B]` positions and valid. With `length`, T is that, and a longer group gives a run from a random start. Where a
    group has fewer than T, valid is False and the position is that of its last row."""
    if length is not None and length < 1:
        raise ConfigError(f"groups have length >= 1, got {length}")
    order = np.argsort(keys, kind="stable")  # group after group, each in order
    _, first, count = np.unique(keys[order], return_index=True, return_counts=True)
    if not 1 <= batch_size <= len(count):
        raise DataError(f"different groups are drawn: the rows that can be sampled have {len(count)}, got {batch_size}")
    chosen = rng.choice(len(count), batch_size, replace=False)
    first, count = first[chosen], count[chosen]
    total = length or int(count.max())
    at = rng.integers(0, np.maximum(count - total, 0) + 1) + np.arange(total)[:, None]
    return order[first + np.minimum(at, count - 1)], at < count
