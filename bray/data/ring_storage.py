"""What a ReplayRing stores: a ring of rows of B environments, and which of them may be sampled.

Row t of environment b holds obs_t, action_t, reward_t, terminated_t, truncated_t, valid_t and whatever else the
algorithm keeps. The successor of a valid row is the next row of the same environment (the autoreset rule
of `bray/envs/vector.py`), so each observation is stored once; the newest row has no successor yet and is not sampled.

Slots are laid out row by row: slot = (t mod rows) * B + b. The id of a transition is t * B + b, so slot = id mod (rows
* B), and an id whose row was overwritten is known by its age.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from bray import tree
from bray.data.flags import ELIGIBLE, ELIGIBLE_MASK, ENDED, FIRST, JOINT, TERMINATED, TRUNCATED, VALID
from bray.data.monitor import Monitor
from bray.errors import ConfigError, DataError, UnknownName
from bray.tree import NestedArray

_RESERVED = {
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
    "priority",
}  # columns and outputs of our own
_FLAGS = ("terminated", "truncated", "valid")
_AFTER_END = (
    "environment {env}: its episode ended with the previous row, so this row (the final observation) has valid=False "
    "and the next one starts an episode. Vector environments of Gymnasium do so with AutoresetMode.NEXT_STEP."
)
_BITS = np.array([TERMINATED, TRUNCATED, VALID, FIRST, JOINT], np.uint8)


@dataclass(frozen=True)
class RingConfig:
    """The options of a ReplayRing."""

    capacity: int
    """Transitions of all environments."""
    num_envs: int
    gamma: float = 0.99
    n_step: int = 1
    prioritized: bool = False
    alpha: float = 0.6
    beta: float = 0.4
    eps: float = 1e-5
    max_use: int | None = None
    """A row retires after this many draws (checked after each batch; sequences do not count)."""
    max_staleness: int | None = None
    """Rows that came this many versions of the weights ago, or more, are not sampled. Whoever trains calls
    `advance`."""
    monitor: bool = False
    """Count the draws of each row and keep numbers for `stats`."""
    frame_stack: int | None = None
    """Observations are one array `[frame_stack, ...]` of consecutive frames, newest last, and each frame is stored
    once."""
    directory: Path | str | None = None
    """Observations live in memory-mapped files there instead of in memory."""

    def __post_init__(self) -> None:
        for name in ("capacity", "num_envs", "n_step", "max_use", "max_staleness", "frame_stack"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"replay: {name} is at least 1, got {value}")
        for name, high in (("gamma", 1.0), ("alpha", math.inf), ("beta", 1.0), ("eps", math.inf)):
            number = getattr(self, name)
            if not 0.0 <= number <= high:
                raise ConfigError(f"replay: {name} is between 0.0 and {high}, got {number}")


class RingStorage:
    """Columns, flags and priorities, and how rows enter and leave."""

    def __init__(self, config: RingConfig, example: dict[str, NestedArray]):
        if not {"obs", "action"} <= example.keys():
            raise ConfigError(f"the example row of a replay has 'obs' and 'action', got {sorted(example)}")
        if taken := sorted(_RESERVED & example.keys()):
            raise ConfigError(f"replay column {taken[0]!r} is always there and cannot be an extra")
        self.config, self.num_envs = config, config.num_envs
        self.n_step, self.gamma = config.n_step, config.gamma
        self.max_use, self.max_staleness = config.max_use, config.max_staleness
        self.example = tree.map(lambda x: np.zeros(np.shape(x), np.asarray(x).dtype), example)
        """One row of one environment, of zeros: names, shapes and dtypes."""
        self.window = -(-config.capacity // config.num_envs)
        """The oldest sampleable row is this many rows before the newest one."""
        self.rows = self.window + (config.frame_stack or 1)
        """Stored rows: the sampleable ones, the newest one, and for frame stacks the frames before the oldest one."""
        self._size = self.rows * config.num_envs
        self._extras = tuple(k for k in example if k not in ("obs", "action"))
        self._make_columns(example)
        self.steps = 0
        """Rows added so far."""
        self.late_updates = 0
        """Priorities that came for rows already overwritten (or too old); they were ignored."""
        self.max_priority = 1.0
        """The largest (|priority| + eps)^alpha so far; new rows that come without a priority get it."""
        self._priority = np.ones(config.num_envs)  # of the newest row, which enters the tree when its successor comes
        self._given = False  # whether it came with the row
        self.version = 0
        """Version of the weights that act now (see `advance`); rows remember the one they came with."""
        self._fresh = 0  # rows before this one are stale
        self._count = 0
        self._entering = 0  # environments whose newest row is valid
        self._stage = np.zeros((5, config.num_envs), bool)  # the flags of the row being added
        self._first = self._stage[3]  # environments whose next row starts an episode, or follows a gap
        self._first[:] = True
        # Environments whose newest row was truncated: their final observation must follow. After `terminated` a valid
        # row may follow, because a lost life ends the return but not the game; the next row is then not used as a
        # bootstrap.
        self._ended = np.zeros(config.num_envs, bool)
        self._any_ended = False
        self._cuts: list[int] = []

    def _make_columns(self, example: dict[str, NestedArray]) -> None:
        config, size = self.config, self._size
        self._frames = None
        if config.frame_stack is not None:
            from bray.data.frames import FrameStore

            if isinstance(example["obs"], (dict, list, tuple)):
                raise ConfigError("frame_stack works for observations that are one array, not for a tree of arrays")
            make = _Files(config.directory, "obs").make
            self._frames = FrameStore(np.asarray(example["obs"]), config.frame_stack, self.rows, config.num_envs, make)
        self._columns: dict[str, NestedArray] = {}
        for name, row in example.items():
            if name == "obs" and self._frames is not None:
                continue
            make = _Files(config.directory if name == "obs" else None, name).make
            self._columns[name] = tree.map(lambda x, make=make: make((size, *np.shape(x)), np.asarray(x).dtype), row)
        self._reward = np.zeros(size, np.float32)
        self._flags = np.zeros(size, np.uint8)
        self._uses = np.zeros(size, np.uint32) if config.max_use or config.monitor else None
        self._versions = np.zeros(self.rows, np.int64) if config.max_staleness or config.monitor else None
        self._monitor = Monitor() if config.monitor else None
        self._tree = None
        if config.prioritized:
            from bray.data.prioritized import SumTree

            self._tree = SumTree(size)

    def add(
        self,
        obs: NestedArray,
        action: NestedArray,
        reward: np.ndarray,
        terminated: np.ndarray,
        truncated: np.ndarray,
        valid: np.ndarray,
        *,
        first: np.ndarray | None = None,
        priority: np.ndarray | None = None,
        version: int | None = None,
        **extras: NestedArray,
    ) -> None:
        """One row of all environments, leaves `[B, ...]`. All is checked before anything is written. `first [B]`: where
        an episode begins, if that may not be everywhere behind a row that is not valid; `priority`: its errors `[B]`,
        if they are known already (a uniform replay does not look at them); `version`: of the weights that acted, if it
        is not the newest."""
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
        if first is None:
            self._stage[4] = False
        else:
            np.logical_and(self._first, np.logical_not(first), out=self._stage[4])
        if self._any_ended and (self._ended & self._stage[2]).any():
            env = int(np.flatnonzero(self._ended & self._stage[2])[0])
            raise DataError(_AFTER_END.format(env=env))
        if priority is not None and (np.shape(priority) != (n,) or not np.isfinite(priority).all()):
            raise DataError(
                f"replay: a row's priority is {n} finite numbers, got {priority}. The loss has probably diverged."
            )
        self._write(writes, words, self.version if version is None else min(version, self.version))
        self._given = priority is not None
        if priority is not None and self._tree is not None:
            self._priority[:] = (np.abs(priority) + self.config.eps) ** self.config.alpha
            self.max_priority = max(self.max_priority, float(self._priority.max(where=self._stage[2], initial=0.0)))

    def extend(
        self,
        obs: NestedArray,
        action: NestedArray,
        reward: np.ndarray,
        terminated: np.ndarray,
        truncated: np.ndarray,
        valid: np.ndarray,
        *,
        first: np.ndarray,
        version: int,
        **extras: NestedArray,
    ) -> None:
        """Rows of one environment that follow each other, leaves `[R, ...]`: the same as `add` for each, at once."""
        assert self.num_envs == 1
        rows = len(reward)
        one_by_one = self._frames is not None or self.max_staleness is not None
        most, put = (1, self.add) if one_by_one else (self.window, self.extend)
        if one_by_one or rows > most:
            columns = (obs, action, reward, terminated, truncated, valid)
            for start in range(0, rows, most):
                *part, begins, others = tree.index((*columns, first, extras), slice(start, start + most))
                put(*part, first=begins, version=version, **others)
            return
        flags = np.zeros((5, rows), bool)
        writes: list[tuple[np.ndarray, np.ndarray]] = []
        for name, value in (("obs", obs), ("action", action), *extras.items()):
            if name not in self._columns or len(extras) != len(self._extras):
                self._refuse(extras)
            _match(self._columns[name], value, rows, name, writes)
        _match(self._reward, reward, rows, "reward", writes)
        flags[:3] = terminated, truncated, valid
        flags[3] = np.concatenate([self._first, ~flags[2, :-1]])
        flags[4] = flags[3] & ~first
        ends = np.concatenate([self._ended & self._any_ended, flags[1, :-1] & flags[2, :-1]])
        if (ends & flags[2]).any():
            raise DataError(_AFTER_END.format(env=0))
        slots = (self.steps + np.arange(rows)) % self.rows
        if (leave := self.steps + rows - self.window - 1) > 0:  # rows that are older than the window
            leaving = slots[max(0, rows - leave) :]
            self._count -= int(np.count_nonzero((self._flags[leaving] & ELIGIBLE_MASK) == ELIGIBLE))
        for column, value in writes:
            column[slots] = value
        self._flags[slots] = _BITS.dot(flags.view(np.uint8))
        if self._uses is not None:
            self._uses[slots] = 0
        if self._versions is not None:
            self._versions[slots] = min(version, self.version)
        if self._tree is not None:
            if not self._given:
                self._priority.fill(self.max_priority)
            entering = np.concatenate([[(self.steps - 1) % self.rows] if self.steps else [], slots]).astype(np.int64)
            priority = np.full(len(entering), self.max_priority)
            priority[0 if self.steps else slice(0)] = self._priority[0]
            priority[(self._flags[entering] & ELIGIBLE_MASK) != ELIGIBLE] = 0.0
            priority[-1] = 0.0  # the newest row, which has no successor yet
            self._tree.assign(entering, priority)
        self._count += self._entering + int(np.count_nonzero(flags[2, :-1]))
        self._entering = int(flags[2, -1])
        self._first[:] = not flags[2, -1]
        self._any_ended, self._given = bool(flags[1, -1]), False
        self._ended = flags[1, -1:] & flags[2, -1:]
        self.steps += rows

    def _write(self, writes: list[tuple[np.ndarray, np.ndarray]], words: np.ndarray | None, version: int) -> None:
        """Write the checked row: columns, words of frames, and the flags in `_stage`."""
        n = self.num_envs
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
        self._flags[slot:end] = _BITS.dot(self._stage.view(np.uint8))
        if self._uses is not None:
            self._uses[slot:end] = 0
        if self._versions is not None:
            self._versions[self.steps % self.rows] = version
        if self._tree is not None:
            enter = (slot - n) % self._size if self.steps else -1
            if not self._given:
                self._priority.fill(self.max_priority)
            self._tree.turn(self._flags, enter, leave, n, self._priority)
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
        """The weights that act are now of this version (gradient steps, or whatever grows with each publication). Rows
        added from here on carry it, and rows that came `max_staleness` versions before it or earlier are no longer
        sampled."""
        if version < self.version:
            raise DataError(f"versions of the weights only grow: the replay is at {self.version}, got {version}")
        self.version = version
        if self.max_staleness is not None:
            self._expire()

    def cut(self) -> None:
        """The rows that come next do not follow the newest ones: environments were reset or replaced, as by a resume
        that could not restore them. The newest rows become dead rows: final observations, never sampled themselves."""
        if self.steps == 0:
            return
        slot = ((self.steps - 1) % self.rows) * self.num_envs
        self._flags[slot : slot + self.num_envs] &= np.uint8(~(VALID | ENDED) & 0xFF)
        self._entering = 0
        self._first[:] = True
        self._any_ended = False
        self._cuts = [t for t in self._cuts if t >= self.steps - self.rows] + [self.steps - 1]

    def update_priorities(self, id: np.ndarray, priority: np.ndarray) -> None:
        """New priorities for sampled transitions. Rows overwritten since are left alone and counted in
        `late_updates`."""
        if self._tree is None:
            raise ConfigError("this replay is uniform: update_priorities needs ReplayRing(prioritized=True)")
        ids = np.ascontiguousarray(id, np.int64).reshape(-1)
        priorities = np.ascontiguousarray(priority, np.float64).reshape(-1)
        if ids.shape != priorities.shape:
            raise DataError(f"one priority per id: got {np.shape(id)} ids and {np.shape(priority)} priorities")
        low, high = self.id_range()
        late, self.max_priority = self._tree.update(
            self._flags, ids, priorities, low, high, self.config.alpha, self.config.eps, self.max_priority
        )
        self.late_updates += late

    def __len__(self) -> int:
        """Transitions that can be sampled."""
        return self._count

    def id_range(self) -> tuple[int, int]:
        """Ids that may be sampled: from (included), to (excluded). Some of them may be dead rows."""
        newest = max(0, self.steps - 1)
        return max(0, newest - self.window, self._fresh) * self.num_envs, newest * self.num_envs

    def ids(self, within: tuple[int, int] | None = None) -> np.ndarray:
        """Ids of all transitions that can be sampled (in this range of ids), oldest first."""
        ids = np.arange(*(within or self.id_range()))
        eligible: np.ndarray = ids[(self._flags.take(ids % self._size) & ELIGIBLE_MASK) == ELIGIBLE]
        return eligible

    def _expire(self) -> None:
        """Rows that are too stale leave. Versions only grow (but for rows of several workers, by a few), so these are
        the oldest ones."""
        assert self._versions is not None
        assert self.max_staleness is not None
        n, newest, least = self.num_envs, self.steps - 1, self.version - self.max_staleness
        row = self.id_range()[0] // n
        while row < newest and self._versions[row % self.rows] <= least:
            slot = (row % self.rows) * n
            self._count -= self._eligible(slot, slot + n)
            if self._tree is not None:
                self._tree.turn(self._flags, -1, slot, n, self._priority)
            row += 1
        self._fresh = row

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
