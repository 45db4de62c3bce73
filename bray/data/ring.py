"""ReplayRing: a ring of rows of B environments, sampled as n-step transitions or as sequences.

Row t of environment b holds obs_t, action_t, reward_t, terminated_t, truncated_t, valid_t and whatever else the algorithm
keeps. The successor of a valid row is the next row of the same environment (docs/architecture.md, the autoreset rule), so each
observation is stored once; the newest row has no successor yet and is not sampled.

Slots are laid out row by row: slot = (t mod rows) * B + b. The id of a transition is t * B + b, so slot = id mod (rows * B), and
an id whose row was overwritten is known by its age.

Uniform one-step replay is numpy only; n-step windows and priorities bring their Numba kernels when they are asked for.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from bray import tree
from bray.data import groups, segments
from bray.data.flags import ELIGIBLE, ELIGIBLE_MASK, ENDED, FIRST, RETIRED, TERMINATED, TRUNCATED, VALID
from bray.data.monitor import Monitor
from bray.data.view import View
from bray.errors import CheckpointError, ConfigError, DataError, UnknownName
from bray.tree import NestedArray

_RESERVED = [
    "obs",
    "action",
    "reward",
    "terminated",
    "truncated",
    "valid",
    "first",
    "discount",
    "next_obs",
    "weight",
    "id",
    "flags",
    "version",
]  # columns and outputs of our own
_FLAGS = ("terminated", "truncated", "valid")
_BITS = np.array([TERMINATED, TRUNCATED, VALID, FIRST], np.uint8)
_ONE = np.uint32(1)  # of the counters' own type: add.at is ten times slower otherwise
_SEGMENT_BYTES = 64 << 20
_VERSION = 1


class ReplayRing:
    """Uniform or prioritized replay.

    `capacity` counts transitions of all environments. `example` gives shapes and dtypes by ONE environment's row: `obs`, `action`
    and any extras (a recurrent `state`, `logp`, ...). `max_use`: a row retires after it was drawn so often (looked at after
    each batch; sequences do not count). `max_staleness`: rows that came so many versions of the weights ago, or more, are not
    sampled; whoever trains calls `advance`. `monitor`: count the draws of each row and keep numbers for `stats`.
    `frame_stack=k`: observations are one array `[k, ...]` of consecutive frames, newest last, and each frame is stored once.
    `directory`: observations live in memory-mapped files there instead of in memory.
    """

    def __init__(
        self,
        capacity: int,
        num_envs: int,
        example: dict[str, NestedArray],
        *,
        gamma: float = 0.99,
        n_step: int = 1,
        prioritized: bool = False,
        alpha: float = 0.6,
        beta: float = 0.4,
        eps: float = 1e-5,
        max_use: int | None = None,
        max_staleness: int | None = None,
        monitor: bool = False,
        frame_stack: int | None = None,
        directory: Path | str | None = None,
    ):
        for name, value, least in (
            ("capacity", capacity, 1),
            ("num_envs", num_envs, 1),
            ("n_step", n_step, 1),
            ("max_use", max_use, 1),
            ("max_staleness", max_staleness, 1),
            ("frame_stack", frame_stack, 1),
        ):
            if value is not None and value < least:
                raise ConfigError(f"replay: {name} is at least {least}, got {value}")
        for name, number, low, high in (
            ("gamma", gamma, 0.0, 1.0),
            ("alpha", alpha, 0.0, math.inf),
            ("beta", beta, 0.0, 1.0),
            ("eps", eps, 0.0, math.inf),
        ):
            if not low <= number <= high:
                raise ConfigError(f"replay: {name} is between {low} and {high}, got {number}")
        if not {"obs", "action"} <= example.keys():
            raise ConfigError(f"the example row of a replay has 'obs' and 'action', got {sorted(example)}")
        for name in example:
            if name in _RESERVED[2:]:
                raise ConfigError(f"replay column {name!r} is always there and cannot be an extra")
        self.capacity, self.num_envs = capacity, num_envs
        self.example = tree.map(lambda x: np.zeros(np.shape(x), np.asarray(x).dtype), example)
        """One row of one environment, of zeros: names, shapes and dtypes."""
        self.gamma, self.n_step = gamma, n_step
        self.alpha, self.beta, self.eps = alpha, beta, eps
        self.max_use, self.max_staleness, self.frame_stack = max_use, max_staleness, frame_stack
        self.rows = -(-capacity // num_envs) + (frame_stack or 1)
        """Stored rows: the sampleable ones, the newest one, and for frame stacks the frames before the oldest one."""
        self.window = -(-capacity // num_envs)
        """The oldest sampleable row is so many rows before the newest one."""
        self._size = size = self.rows * num_envs
        self._extras = tuple(k for k in example if k not in ("obs", "action"))

        self._frames = None
        if frame_stack is not None:
            from bray.data.frames import FrameStore

            if isinstance(example["obs"], (dict, list, tuple)):
                raise ConfigError("frame_stack works for observations that are one array, not for a tree of arrays")
            make = _Files(directory, "obs").make
            self._frames = FrameStore(np.asarray(example["obs"]), frame_stack, self.rows, num_envs, make)
        self._columns: dict[str, NestedArray] = {}
        for name, row in example.items():
            if name == "obs" and self._frames is not None:
                continue
            make = _Files(directory if name == "obs" else None, name).make
            self._columns[name] = tree.map(lambda x, make=make: make((size, *np.shape(x)), np.asarray(x).dtype), row)
        self._reward = np.zeros(size, np.float32)
        self._flags = np.zeros(size, np.uint8)
        self._uses = np.zeros(size, np.uint32) if max_use or monitor else None
        self._versions = np.zeros(self.rows, np.int64) if max_staleness or monitor else None
        self._monitor = Monitor() if monitor else None
        self._tree = None
        if prioritized:
            from bray.data.prioritized import SumTree

            self._tree = SumTree(size)
        self._discounts = np.array([gamma, 0.0], np.float32)

        self.steps = 0
        """Rows added so far."""
        self.late_updates = 0
        """Priorities that came for rows already overwritten (or too old); they were ignored."""
        self.max_priority = 1.0
        """The largest (|priority| + eps)^alpha so far; new rows get it."""
        self.version = 0
        """Version of the weights that act now (see `advance`); rows remember the one they came with."""
        self._fresh = 0  # rows before this one are stale
        self._count = 0
        self._entering = 0  # valid environments of the newest row
        self._stage = np.zeros((4, num_envs), bool)  # the flags of the row being added
        self._first = self._stage[3]  # whose next row starts an episode
        self._first[:] = True
        # Whose newest row was truncated, so that a final observation must follow. After `terminated` a valid row may follow: a lost
        # life ends the return but not the game, and the successor is not bootstrapped from.
        self._ended = np.zeros(num_envs, bool)
        self._any_ended = False
        self._cuts: list[int] = []
        self._segments: list[list[int]] = []
        self._saved = 0

    # --- writing ------------------------------------------------------------------------------------------------------

    def add(
        self,
        obs: NestedArray,
        action: NestedArray,
        reward: np.ndarray,
        terminated: np.ndarray,
        truncated: np.ndarray,
        valid: np.ndarray,
        **extras: NestedArray,
    ) -> None:
        """One row of all environments, leaves `[B, ...]`. All is checked before anything is written."""
        n = self.num_envs
        writes: list[tuple[np.ndarray, np.ndarray]] = []
        words = None
        if self._frames is None:
            _match(self._columns["obs"], obs, n, "obs", writes)
        else:
            stack = np.asarray(obs)
            if stack.shape != (n, *self._frames.shape) or stack.dtype != self._frames.dtype:
                raise DataError(
                    f"replay column 'obs': expected {self._frames.dtype} {(n, *self._frames.shape)}, "
                    f"got {stack.dtype} {stack.shape}"
                )
            words = self._frames.check(stack, self._first)
        _match(self._columns["action"], action, n, "action", writes)
        _match(self._reward, reward, n, "reward", writes)
        if len(extras) != len(self._extras):
            self._refuse(extras)
        for name, value in extras.items():
            if name not in self._columns:
                self._refuse(extras)
            _match(self._columns[name], value, n, name, writes)
        for name, value, staged in zip(_FLAGS, (terminated, truncated, valid), self._stage, strict=False):
            if np.shape(value) != (n,):
                raise DataError(f"replay column {name!r}: expected shape {(n,)}, got {np.shape(value)}")
            staged[...] = value
        if self._any_ended and (self._ended & self._stage[2]).any():
            env = int(np.flatnonzero(self._ended & self._stage[2])[0])
            raise DataError(
                f"environment {env}: its episode ended with the previous row, so this row (the final observation) has valid=False and "
                "the next one starts an episode. Vector environments of Gymnasium do so with AutoresetMode.NEXT_STEP."
            )
        flags = _BITS.dot(self._stage.view(np.uint8))

        slot = (self.steps % self.rows) * n
        leaving = self.steps - self.window - 1  # the row that is now too old, if it has not left as a stale one
        leave = (leaving % self.rows) * n if leaving >= self._fresh else -1
        if leave >= 0:
            self._count -= self._eligible(leave, leave + n)
        end = slot + n
        for column, value in writes:
            column[slot:end] = value
        if words is not None:
            self._frames.write(words, self._first, slot)  # type: ignore[union-attr]
        self._flags[slot:end] = flags
        if self._uses is not None:
            self._uses[slot:end] = 0
        if self._versions is not None:
            self._versions[self.steps % self.rows] = self.version
        if self._tree is not None:
            enter = (slot - n) % self._size if self.steps else -1
            self._tree.turn(self._flags, enter, leave, n, self.max_priority)
        self._count += self._entering
        self._entering = int(np.count_nonzero(self._stage[2]))
        np.logical_not(self._stage[2], out=self._first)
        self._any_ended = bool(np.count_nonzero(self._stage[1]))
        if self._any_ended:
            self._ended = self._stage[1] & self._stage[2]
        self.steps += 1
        if self.max_staleness is not None:
            self._expire()

    def advance(self, version: int) -> None:
        """The weights that act are now of this version (gradient steps, or whatever grows with each publication). Rows added from
        here on carry it, and rows that came `max_staleness` versions before it or earlier are no longer sampled."""
        if version < self.version:
            raise DataError(f"versions of the weights only grow: the replay is at {self.version}, got {version}")
        self.version = version
        if self.max_staleness is not None:
            self._expire()

    def cut(self) -> None:
        """The rows that come next do not follow the newest ones: environments were reset or replaced, as by a resume that
        could not restore them. The newest rows become dead rows: final observations, never sampled themselves."""
        if self.steps == 0:
            return
        slot = ((self.steps - 1) % self.rows) * self.num_envs
        self._flags[slot : slot + self.num_envs] &= np.uint8(~(VALID | ENDED) & 0xFF)
        self._entering = 0
        self._first[:] = True
        self._any_ended = False
        self._cuts = [t for t in self._cuts if t >= self.steps - self.rows] + [self.steps - 1]

    def update_priorities(self, id: np.ndarray, priority: np.ndarray) -> None:
        """New priorities for sampled transitions. Rows overwritten since are left alone and counted in `late_updates`."""
        if self._tree is None:
            raise ConfigError("this replay is uniform: update_priorities needs ReplayRing(prioritized=True)")
        ids = np.ascontiguousarray(id, np.int64).reshape(-1)
        priorities = np.ascontiguousarray(priority, np.float64).reshape(-1)
        if ids.shape != priorities.shape:
            raise DataError(f"one priority per id: got {np.shape(id)} ids and {np.shape(priority)} priorities")
        low, high = self._range()
        late, self.max_priority = self._tree.update(
            self._flags, ids, priorities, low, high, self.alpha, self.eps, self.max_priority
        )
        self.late_updates += late

    # --- sampling -----------------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        """Transitions that can be sampled."""
        return self._count

    def sample(self, batch_size: int, rng: np.random.Generator, beta: float | None = None) -> dict[str, NestedArray]:
        """`batch_size` transitions: obs, action, reward (n-step sum), discount (gamma**m, 0 where terminated), next_obs,
        weight, id, and the extras of the first row. The arrays are the caller's.

        A window sums m <= n_step rewards: to the end of the episode, or to the newest row if that comes first. Weights are 1
        when uniform, else (N P_i)^-beta divided by the largest one of this batch.
        """
        return self._sample(batch_size, rng, beta)

    def sample_sequences(
        self, batch_size: int, length: int, burn_in: int, rng: np.random.Generator, beta: float | None = None
    ) -> dict[str, NestedArray]:
        """`batch_size` runs of T = burn_in + length rows of one environment each, `[T, B, ...]`: obs and first (T + 1 rows),
        action, reward, terminated, truncated, valid, id, extras, and weight `[B]`. An extra called `state` comes as it was at
        the first row, `[B, ...]`.

        Sequences cross episode ends (`first` and `valid` say where) but never the newest row. Uniform: all starts are equally
        likely. Prioritized: a row is drawn by priority and the sequence is laid so that its learning part starts there (or
        as near as the stored rows allow); `weight` is that row's.
        """
        return self._sequences(batch_size, length, burn_in, rng, beta)

    def sample_groups(
        self, batch_size: int, rng: np.random.Generator, by: str = "episode", length: int | None = None
    ) -> dict[str, NestedArray]:
        """`batch_size` different groups, all equally likely, `[T, B, ...]`: the columns of `sample`, and `valid`. A group is the
        transitions that can be sampled of one episode, or with one value of the integer extra `by`, oldest first; of an
        episode that is still running, or partly overwritten, those that are there.

        T is the longest group's length; with `length` it is that, and a longer group gives a run of so many from a random
        start. What a group lacks are zeros with `valid` False and id -1. Priorities are not looked at; weights are 1. A
        call looks at all stored rows.
        """
        return self._groups(batch_size, rng, by, length, *self._range())

    def take(self, id: np.ndarray) -> dict[str, NestedArray]:
        """The transitions with these ids, in this order, as `sample` gives them, with weight 1. Not a draw: it is not counted
        for `max_use`."""
        ids = np.asarray(id, np.int64).reshape(-1)
        slots = ids % self._size
        newest = max(0, self.steps - 1)
        low, high = max(0, newest - self.window) * self.num_envs, newest * self.num_envs
        wrong = np.flatnonzero((ids < low) | (ids >= high) | ((self._flags.take(slots) & VALID) == 0))
        if len(wrong):
            raise DataError(
                f"transition {ids[wrong[0]]} is not in the replay: it was overwritten, has no successor yet, or is a dead row. "
                f"Ids here are {low} to {high - 1}."
            )
        return self._batch(ids, slots, np.ones(len(ids), np.float32))

    def newest(self, count: int) -> dict[str, NestedArray]:
        """The newest `count` transitions (or as many as there are), oldest first, used up and stale ones too; as `take`."""
        newest = max(0, self.steps - 1)
        low = max(0, newest - min(self.window, 2 * count))  # at most every other row is a dead one
        ids = np.arange(low * self.num_envs, newest * self.num_envs)
        return self.take(ids[(self._flags.take(ids % self._size) & VALID) != 0][-count:])

    def ids(self) -> np.ndarray:
        """Ids of all transitions that can be sampled, oldest first."""
        return self._ids(*self._range())

    def view(self, rows: slice) -> View:
        """A part of the history to sample from: rows are counted from the oldest one that can be sampled, as in a list, so
        `slice(-1000, None)` is the newest 1000 (of every environment). It shares the storage and moves along with it."""
        return View(self, rows)

    def stats(self) -> dict[str, float]:
        """Mean and maximum of use, staleness and (when prioritized) priority of the rows drawn since the last call, measured in
        one batch of 16; empty when nothing was drawn. Sequences are left out. For `ReplayRing(monitor=True)`."""
        if self._monitor is None:
            raise ConfigError("this replay keeps no numbers about its draws: stats needs ReplayRing(monitor=True)")
        return self._monitor.row()

    def _sample(
        self, batch_size: int, rng: np.random.Generator, beta: float | None, within: tuple[int, int] | None = None
    ) -> dict[str, NestedArray]:
        ids, slots, weight = self._draw(batch_size, rng, beta, within)
        batch = self._batch(ids, slots, weight)
        if self._uses is not None:
            self._use(ids, slots)
        return batch

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
            obs = _take(self._columns["obs"], slots)
            next_obs = _take(self._columns["obs"], after)
        elif self.n_step == 1:
            both = self._frames.gather(self._flags, after, self._frames.stack + 1)
            obs, next_obs = both[:, :-1], both[:, 1:]  # two views of one copy
        else:
            obs = self._frames.gather(self._flags, slots, self._frames.stack)
            next_obs = self._frames.gather(self._flags, after, self._frames.stack)
        batch = {
            "obs": obs,
            "action": _take(self._columns["action"], slots),
            "reward": reward,
            "discount": discount,
            "next_obs": next_obs,
            "weight": weight,
            "id": ids,
        }
        for name in self._extras:
            batch[name] = _take(self._columns[name], slots)
        return batch

    def _sequences(
        self,
        batch_size: int,
        length: int,
        burn_in: int,
        rng: np.random.Generator,
        beta: float | None,
        within: tuple[int, int] | None = None,
    ) -> dict[str, NestedArray]:
        if length < 1 or burn_in < 0:
            raise ConfigError(f"sequences have length >= 1 and burn_in >= 0, got {length} and {burn_in}")
        n, total = self.num_envs, burn_in + length
        low, stop = (x // n for x in within or self._range())
        high = stop - total  # the last start
        if high < low:
            raise DataError(
                f"sequences of {total} rows need {total + 1} rows, the replay has {stop - low + 1 if self.steps else 0}. "
                "Add more, or sample shorter ones."
            )
        if self._tree is None:
            start, env = np.divmod(rng.integers(low * n, (high + 1) * n, batch_size), n)
            weight = np.ones(batch_size, np.float32)
        else:
            anchor, _, weight = self._draw(batch_size, rng, beta, within)
            start, env = np.divmod(anchor, n)
            start = np.clip(start - burn_in, low, high)
        ids = (start + np.arange(total + 1)[:, None]) * n + env
        slots = ids % self._size
        flags = self._flags.take(slots)
        if self._frames is None:
            obs = _take(self._columns["obs"], slots)
        else:
            obs = self._frames.gather(self._flags, slots, self._frames.stack)
        inner, flat = flags[:-1], slots[:-1]
        batch = {
            "obs": obs,
            "action": _take(self._columns["action"], flat),
            "reward": self._reward.take(flat),
            "terminated": (inner & TERMINATED) != 0,
            "truncated": (inner & TRUNCATED) != 0,
            "valid": (inner & VALID) != 0,
            "first": (flags & FIRST) != 0,
            "weight": weight,
            "id": ids[:-1],
        }
        for name in self._extras:
            batch[name] = _take(self._columns[name], slots[0] if name == "state" else flat)
        return batch

    def _groups(
        self, batch_size: int, rng: np.random.Generator, by: str, length: int | None, low: int, high: int
    ) -> dict[str, NestedArray]:
        ids = np.arange(low, high)
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
        picked, valid = groups.choose(keys[good], batch_size, length, rng)
        ids, slots = (x[good[picked]].reshape(-1) for x in (ids, slots))
        batch = self._batch(ids, slots, np.ones(len(ids), np.float32))
        if self._uses is not None:
            self._use(ids[valid.reshape(-1)], slots[valid.reshape(-1)])
        batch = tree.map(lambda x: x.reshape(*valid.shape, *x.shape[1:]), batch)
        tree.map(lambda x: x.__setitem__(~valid, 0), batch)
        batch["id"][~valid] = -1
        return {**batch, "valid": valid}

    def _range(self) -> tuple[int, int]:
        """Ids that may be sampled: from (included), to (excluded)."""
        newest = max(0, self.steps - 1)
        return max(0, newest - self.window, self._fresh) * self.num_envs, newest * self.num_envs

    def _ids(self, low: int, high: int) -> np.ndarray:
        ids = np.arange(low, high)
        return ids[(self._flags.take(ids % self._size) & ELIGIBLE_MASK) == ELIGIBLE]

    def _expire(self) -> None:
        """Rows that are too stale leave. Versions only grow, so these are the oldest ones."""
        assert self._versions is not None
        assert self.max_staleness is not None
        n, newest, least = self.num_envs, self.steps - 1, self.version - self.max_staleness
        row = self._range()[0] // n
        while row < newest and self._versions[row % self.rows] <= least:
            slot = (row % self.rows) * n
            self._count -= self._eligible(slot, slot + n)
            if self._tree is not None:
                self._tree.turn(self._flags, -1, slot, n, 0.0)
            row += 1
        self._fresh = row

    def _draw(
        self, n: int, rng: np.random.Generator, beta: float | None, within: tuple[int, int] | None = None
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Ids, slots and weights of n draws, of the ids from `within[0]` to `within[1]` (excluded) where it is given."""
        if self._count == 0:
            limits = " and ".join(name for name in ("max_use", "max_staleness") if getattr(self, name))
            raise DataError(
                f"the replay has no transition to sample: {self.steps} rows were added (a row is sampled when its successor is "
                f"there){f', and {limits} leave none of them' if limits and self.steps > 1 else ''}"
            )
        low, high = self._range()
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

    def _draw_within(
        self, n: int, rng: np.random.Generator, beta: float, low: int, high: int
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """As `_draw`, from a part of the rows; its cost grows with the part."""
        ids = self._ids(low, high)
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

    def _eligible(self, start: int, end: int) -> int:
        if end - start == 1:
            return int(int(self._flags[start]) & ELIGIBLE_MASK == ELIGIBLE)
        return int(np.count_nonzero((self._flags[start:end] & ELIGIBLE_MASK) == ELIGIBLE))

    def _refuse(self, extras: dict[str, Any]) -> None:
        for name in extras:
            if name not in self._extras:
                raise UnknownName("replay column", name, self._extras, "the example row decides which there are")
        missing = sorted(set(self._extras) - extras.keys())
        raise DataError(f"add needs every column of the example row, {', '.join(missing)} missing")

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays, trees and counters included."""
        own = (self._reward, self._flags, self._first, self._uses, self._versions)
        parts = tree.nbytes(self._columns) + sum(x.nbytes for x in own if x is not None)
        return parts + (self._tree.nbytes if self._tree else 0) + (self._frames.nbytes if self._frames else 0)

    # --- state --------------------------------------------------------------------------------------------------------

    def get_state(self) -> NestedArray:
        """Everything, rows included, as one tree: for small replays. Large ones use `save`."""
        low = max(0, self.steps - self.rows)
        return {**self._cursor(), "rows": self._export(low, self.steps)}

    def set_state(self, state: NestedArray) -> None:
        """The inverse of `get_state`, for a replay made with the same arguments. After an error the replay is empty."""
        self._check_state(state)
        try:
            self._clear()
            self.steps = int(state["steps"])
            self._import(max(0, self.steps - self.rows), self.steps, state.get("rows"), "the state")
            self._finish(state)
        except BaseException:
            self._clear()
            raise

    def save(self, directory: Path | str) -> NestedArray:
        """Append the rows added since the last save to `directory`; returns the small tree that, with these files, is the
        whole replay. A kill at any moment leaves earlier states loadable."""
        directory = Path(directory)
        directory.mkdir(parents=True, exist_ok=True)
        low = max(0, self.steps - self.rows)
        kept = [e for e in self._segments if e[1] > low]
        at = max(self._saved, low)
        most = max(1, _SEGMENT_BYTES * self.rows // self.nbytes)
        while at < self.steps:
            end = min(self.steps, at + most)
            kept.append(segments.write(directory, at, end, self._export(at, end)))
            at = end
        self._segments, self._saved = kept, self.steps
        return {**self._cursor(), "segments": np.array(kept, np.int64).reshape(-1, 4)}

    def load(self, directory: Path | str, state: NestedArray) -> None:
        """Become the replay that `save` returned `state` for: the next samples are the same ones. After an error the replay
        is empty."""
        directory = Path(directory)
        self._check_state(state)
        entries = sorted(segments.entries(state))
        try:
            self._clear()
            self.steps = int(state["steps"])
            at = max(0, self.steps - self.rows)
            for entry in entries:
                first, end = entry[:2]
                if not first <= at < end <= self.steps:
                    raise CheckpointError(
                        f"replay segments of the checkpoint do not follow each other at row {at}: {entries}"
                    )
                self._import(first, end, segments.read(directory, entry), f"segment {first}-{end} of {directory}")
                at = end
            if at != self.steps:
                raise CheckpointError(f"replay segments end at row {at}, the checkpoint was made at row {self.steps}")
            self._finish(state)
        except BaseException:
            self._clear()
            raise
        self._segments, self._saved = entries, self.steps

    def prune(self, directory: Path | str, states: Iterable[NestedArray]) -> list[str]:
        """Delete the segments that neither these states (those of all checkpoints kept) nor this replay's next save need."""
        low = self.steps - self.rows
        keep = [e for state in states for e in segments.entries(state)] + [e for e in self._segments if e[1] > low]
        return segments.prune(Path(directory), keep)

    def _layout(self) -> list[int]:
        return [self.num_envs, self.rows, self.frame_stack or 0, self.window, self.max_use or 0]

    def _cursor(self) -> dict[str, Any]:
        """What a checkpoint holds apart from the rows."""
        filled = min(self.steps, self.rows) * self.num_envs
        state: dict[str, Any] = {
            "version": np.int64(_VERSION),
            "layout": np.array(self._layout(), np.int64),
            "steps": np.int64(self.steps),
            "late_updates": np.int64(self.late_updates),
            "weights_version": np.int64(self.version),
            "cuts": np.array([t for t in self._cuts if t >= self.steps - self.rows], np.int64),
        }
        if self._uses is not None:
            state["uses"] = self._uses[:filled].copy()
        if self._tree is not None:
            state["max_priority"] = np.float64(self.max_priority)
            state["priority"] = self._tree.leaves[:filled].copy()
        return state

    def _check_state(self, state: NestedArray) -> None:
        """Refuse the state of something else, or of a replay with other settings, before anything is changed."""
        needed = ("version", "layout", "steps", "late_updates", "cuts")
        if not isinstance(state, dict) or any(k not in state for k in needed):
            raise CheckpointError("not the state of a replay")
        if int(state["version"]) != _VERSION:
            raise CheckpointError(f"a replay state of version {int(state['version'])}; this is version {_VERSION}")
        names = ("num_envs", "rows", "frame_stack", "window", "max_use")
        pairs = zip(names, self._layout(), np.asarray(state["layout"]).tolist(), strict=False)
        different = [f"{name} {theirs} (here {mine})" for name, mine, theirs in pairs if mine != theirs]
        if different or np.shape(state["layout"]) != (len(names),):
            raise CheckpointError(f"the checkpoint's replay was made with other settings: {', '.join(different)}")
        filled = min(int(state["steps"]), self.rows) * self.num_envs
        for name, present in (("uses", self._uses is not None), ("priority", self._tree is not None)):
            if name == "uses" and not self.max_use and name not in state:
                continue  # only numbers to look at
            if (name in state) != present:
                raise CheckpointError(
                    f"the checkpoint's replay was made with{'' if name in state else 'out'} "
                    f"{'max_use or monitor' if name == 'uses' else 'priorities'}, this one was not made so"
                )
            if present and np.shape(state[name]) != (filled,):
                raise CheckpointError(
                    f"the replay state's {name} has shape {np.shape(state[name])}, expected {(filled,)}"
                )
        if self._tree is not None:
            values = np.append(np.asarray(state["priority"], np.float64), float(state.get("max_priority", -1.0)))
            if not (np.isfinite(values) & (values >= 0)).all():
                raise CheckpointError("the replay state's priorities are not all finite and >= 0")

    def _clear(self) -> None:
        """Forget all rows."""
        self._flags[:] = 0
        self._first[:] = True
        self._any_ended = False
        self.steps = self.late_updates = self._count = self._entering = self._saved = self.version = self._fresh = 0
        self.max_priority = 1.0
        self._cuts, self._segments = [], []
        if self._frames is not None:
            self._frames.clear()
        if self._uses is not None:
            self._uses[:] = 0
        if self._tree is not None:
            self._tree.leaves[:] = 0.0
            self._tree.rebuild()

    def _finish(self, state: NestedArray) -> None:
        """The rest, once the rows are there."""
        n = self.num_envs
        filled = min(self.steps, self.rows) * n
        self.late_updates = int(state["late_updates"])
        self._cuts = [int(t) for t in state["cuts"]]
        for t in self._cuts:
            slot = (t % self.rows) * n
            self._flags[slot : slot + n] &= np.uint8(~(VALID | ENDED) & 0xFF)
        if self._uses is not None and "uses" in state:
            self._uses[:filled] = state["uses"]
        if self._uses is not None and self.max_use:
            self._flags[self._uses >= self.max_use] |= RETIRED
        if self._tree is not None:
            self.max_priority = float(state["max_priority"])
            self._tree.leaves[:filled] = state["priority"]
            self._tree.rebuild()
        self._count = len(self.ids())
        self.version = int(state.get("weights_version", 0))
        if self.max_staleness is not None:
            self._expire()
        if self.steps:
            newest = ((self.steps - 1) % self.rows) * n
            flags = self._flags[newest : newest + n]
            lives = (flags & VALID) != 0
            self._ended = lives & ((flags & TRUNCATED) != 0)
            self._any_ended = bool(self._ended.any())
            self._entering = int(np.count_nonzero(lives))
            self._first[:] = ~lives
            if self._frames is not None:
                slots = np.arange(newest, newest + n)
                stacks = self._frames.gather(self._flags, slots, self._frames.stack)
                self._frames.last[...] = stacks.reshape(n, -1).view(self._frames.word).reshape(self._frames.last.shape)

    def _slots(self, first: int, end: int) -> np.ndarray:
        return np.arange(first * self.num_envs, end * self.num_envs) % self._size

    def _export(self, first: int, end: int) -> NestedArray:
        """Rows [first, end) as a tree of columns `[rows * B, ...]`."""
        slots = self._slots(first, end)
        rows = {name: _take(column, slots) for name, column in self._columns.items()}
        if self._frames is not None:
            rows["obs"] = self._frames.export(slots)
        if self._versions is not None:
            rows["version"] = self._versions[np.arange(first, end) % self.rows]  # one for all environments
        flags = self._flags[slots] & np.uint8(~RETIRED & 0xFF)  # follows from the use counts
        return {**rows, "reward": self._reward[slots], "flags": flags}

    def _import(self, first: int, end: int, rows: NestedArray, where: str) -> None:
        slots = self._slots(first, end)
        mine: dict[str, NestedArray] = {**self._columns, "reward": self._reward, "flags": self._flags}
        if self._frames is not None:
            mine["obs"] = {"frames": self._frames.frames, "pad": self._frames.pad, "pads": self._frames.pads}
        if self._versions is not None and (self.max_staleness is not None or "version" in (rows or ())):
            mine["version"] = self._versions
        expected = {path: (x.dtype, x.shape[1:]) for path, x in tree.paths(mine)}
        got = {path: (x.dtype, x.shape[1:]) for path, x in tree.paths(rows)} if isinstance(rows, dict) else {}
        if got != expected:
            wrong = sorted(p for p in expected.keys() | got.keys() if expected.get(p) != got.get(p))
            raise CheckpointError(
                f"replay rows in {where} have other columns than this replay: {', '.join(wrong)} "
                f"(expected {expected.get(wrong[0])}, got {got.get(wrong[0])})"
            )
        lengths = {"version": end - first} if "version" in mine else {}
        if any(
            len(x) != lengths.get(path, len(slots))
            for path, x in tree.paths(rows)
            if not (self._frames and path == "obs/pads")
        ):
            raise CheckpointError(f"replay rows in {where}: expected {len(slots)} in every column")
        left = max(0, self.steps - self.rows - first)  # rows that have left the ring since
        if self._versions is not None and "version" in mine:
            self._versions[np.arange(first + left, end) % self.rows] = rows["version"][left:]
        skip = left * self.num_envs
        slots = slots[skip:]
        for name, column in self._columns.items():
            tree.map(lambda mine, theirs: mine.__setitem__(slots, theirs[skip:]), column, rows[name])
        if self._frames is not None:
            stored = rows["obs"]
            try:
                self._frames.restore(slots, stored["frames"][skip:], stored["pad"][skip:], stored["pads"])
            except DataError as e:
                raise CheckpointError(f"replay rows in {where}: {e}") from None
        self._reward[slots] = rows["reward"][skip:]
        self._flags[slots] = rows["flags"][skip:]


class _Files:
    """Makes a column's arrays: in memory, or each in a memory-mapped file of `directory`."""

    def __init__(self, directory: Path | str | None, name: str):
        self.directory, self.name, self.made = directory, name, 0

    def make(self, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        if np.dtype(dtype).kind not in "biufc":
            raise ConfigError(f"replay column {self.name!r} holds numbers, its example has dtype {dtype}")
        if self.directory is None:
            return np.zeros(shape, dtype)
        Path(self.directory).mkdir(parents=True, exist_ok=True)
        path = Path(self.directory) / f"{self.name}-{self.made}.column"
        self.made += 1
        return np.asarray(np.memmap(path, dtype, "w+", shape=shape))


def _match(
    column: NestedArray, value: NestedArray, n: int, name: str, writes: list[tuple[np.ndarray, np.ndarray]]
) -> None:
    """Collect (array, rows to write) pairs of a column after comparing structure, shapes and dtypes."""
    if isinstance(column, np.ndarray):
        if type(value) is np.ndarray and value.dtype == column.dtype and value.shape == (n, *column.shape[1:]):
            writes.append((column, value))
            return
        if isinstance(value, (dict, tuple)):
            raise DataError(f"replay column {name!r} is one array, got a {type(value).__name__}")
        x = np.asarray(value)
        if x.shape[:1] != (n,) or x.shape[1:] != column.shape[1:]:
            raise DataError(f"replay column {name!r}: expected shape {(n, *column.shape[1:])}, got {x.shape}")
        if x.dtype != column.dtype and not np.can_cast(x.dtype, column.dtype, "same_kind"):
            raise DataError(
                f"replay column {name!r} holds {column.dtype}, got {x.dtype}: convert it, or change the example row"
            )
        writes.append((column, x))
        return
    if isinstance(column, dict):
        if not isinstance(value, dict) or value.keys() != column.keys():
            got = sorted(value) if isinstance(value, dict) else type(value).__name__
            raise DataError(f"replay column {name!r}: expected a dict with {sorted(column)}, got {got}")
        for key, part in column.items():
            _match(part, value[key], n, f"{name}/{key}", writes)
        return
    if not isinstance(value, (list, tuple)) or len(value) != len(column):
        raise DataError(f"replay column {name!r}: expected {len(column)} parts, got {type(value).__name__}")
    for i, part in enumerate(column):
        _match(part, value[i], n, f"{name}/{i}", writes)


def _take(column: NestedArray, slots: np.ndarray) -> NestedArray:
    if isinstance(column, np.ndarray):
        return column.take(slots, 0)
    return tree.map(lambda x: x.take(slots, 0), column)
