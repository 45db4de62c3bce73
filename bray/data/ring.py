"""ReplayRing: a ring of rows of B environments, sampled as n-step transitions or as sequences.

`ring_storage.py` has its rows, `ring_sampling.py` the ways to sample them, this file how it is saved and restored.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np

from bray import tree
from bray.data import segments
from bray.data.flags import ENDED, RETIRED, TRUNCATED, VALID
from bray.data.ring_sampling import SampledRing, take_rows
from bray.data.ring_storage import RingConfig
from bray.data.view import View
from bray.errors import CheckpointError, DataError
from bray.tree import NestedArray

SEGMENT_BYTES = 64 << 20
"""Size from which a save begins another segment file."""
_VERSION = 1


class ReplayRing(SampledRing):
    """Uniform or prioritized replay.

    `capacity` counts transitions of all environments. `example` gives shapes and dtypes by ONE environment's row:
    `obs`, `action` and any extras (a recurrent `state`, `logp`, ...). `options` are the other fields of `RingConfig`.
    """

    def __init__(self, capacity: int, num_envs: int, example: dict[str, NestedArray], **options: Any):
        super().__init__(RingConfig(capacity, num_envs, **options), example)
        self._segments: list[list[int]] = []
        self._saved = 0

    def view(self, rows: slice) -> View:
        """A part of the history to sample from: rows are counted from the oldest one that can be sampled, as in a list,
        so `slice(-1000, None)` is the newest 1000 (of every environment). It shares the storage and moves along with
        it."""
        return View(self, rows)

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
        """Append the rows added since the last save to `directory`; returns the small tree that, with these files, is
        the whole replay. A kill at any moment leaves earlier states loadable."""
        directory = Path(directory)
        directory.mkdir(parents=True, exist_ok=True)
        low = max(0, self.steps - self.rows)
        kept = [e for e in self._segments if e[1] > low]
        at = max(self._saved, low)
        most = max(1, SEGMENT_BYTES * self.rows // self.nbytes)
        while at < self.steps:
            end = min(self.steps, at + most)
            kept.append(segments.write(directory, at, end, self._export(at, end)))
            at = end
        self._segments, self._saved = kept, self.steps
        return {**self._cursor(), "segments": np.array(kept, np.int64).reshape(-1, 4)}

    def load(self, directory: Path | str, state: NestedArray) -> None:
        """Become the replay that `save` returned `state` for: the next samples are the same ones. After an error the
        replay is empty."""
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
        """Delete the segments that neither these states (those of all checkpoints kept) nor this replay's next save
        need."""
        low = self.steps - self.rows
        keep = [e for state in states for e in segments.entries(state)] + [e for e in self._segments if e[1] > low]
        return segments.prune(Path(directory), keep)

    def change_rewards(self, change: Callable[[np.ndarray], np.ndarray]) -> None:
        """Of all rows."""
        if (changed := change(self._reward)) is not self._reward:
            self._reward[:] = changed

    def leave_out(self, largest: float) -> int:
        """Make dead rows of those that are not finite, or whose reward is beyond this size; how many can no longer be
        drawn."""
        n, before = self.num_envs, self._count
        spoilt = ~(np.abs(self._reward) <= largest)
        for path, column in tree.paths(self._columns):
            if column.dtype.kind == "f":
                odd = ~np.isfinite(column.reshape(self._size, -1)).all(1)
                spoilt |= odd | np.roll(odd, -n) if path.split("/")[0] == "obs" else odd  # and the row that leads there
        if not spoilt.any():
            return 0
        self._reward[spoilt] = 0.0
        self._flags[spoilt] &= np.uint8(~(VALID | ENDED) & 0xFF)
        if self._tree is not None:
            self._tree.leaves[spoilt.nonzero()[0]] = 0.0
            self._tree.rebuild()
            self.max_priority = float(self._tree.leaves.max()) or 1.0  # theirs may have been the largest by far
        newest = ((self.steps - 1) % self.rows) * n
        self._entering = int(np.count_nonzero(self._flags[newest : newest + n] & VALID))
        self._count = len(self.ids())
        return before - self._count

    def _layout(self) -> list[int]:
        return [self.num_envs, self.rows, self.config.frame_stack or 0, self.window, self.max_use or 0]

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
            if self._given:
                state["newest_priority"] = self._priority.copy()
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
            newest = np.asarray(state.get("newest_priority", np.ones(self.num_envs)), np.float64)
            if newest.shape != (self.num_envs,):
                raise CheckpointError(
                    f"the replay state's newest_priority has shape {newest.shape}, expected {(self.num_envs,)}"
                )
            values = np.concatenate([state["priority"], newest, [float(state.get("max_priority", -1.0))]])
            if not (np.isfinite(values) & (values >= 0)).all():
                raise CheckpointError("the replay state's priorities are not all finite and >= 0")

    def _clear(self) -> None:
        """Forget all rows."""
        self._flags[:] = 0
        self._first[:] = True
        self._any_ended = False
        self.steps = self.late_updates = self._count = self._entering = self._saved = self.version = self._fresh = 0
        self.max_priority, self._given = 1.0, False
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
            self._given = "newest_priority" in state
            self._priority[:] = state.get("newest_priority", 1.0)
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
        rows = {name: take_rows(column, slots) for name, column in self._columns.items()}
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
