"""Experience: what an algorithm learns from. Pieces of trajectory in, batches out, priorities back.

    Rollouts    the newest rows, once: a canvas `[T, B]` (PPO, A2C; `rollouts.py`)
    Replay      transitions drawn again and again, uniform or prioritized (DQN, SAC)
    Sequences   runs of rows drawn again and again, for Models with memory
    Dataset     all transitions of files, epoch by epoch
    Episodes    whole episodes, once (PG; `episodes.py`)
    Generation  the return of an episode of each environment (ES; `generation.py`)

The ratio of updates to gathered rows is kept here, so it is the same for every source. An experience of your own has
the methods of `Experience`.
"""

from __future__ import annotations

import sys
import zlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol, Self

import numpy as np

from bray import tree
from bray.data.piece import Piece, oldest
from bray.data.ring import ReplayRing
from bray.data.transitions import Transitions, bytes_of_row
from bray.errors import CheckpointError, ConfigError, DataError
from bray.schedules import Schedule, make_schedule
from bray.tree import NestedArray

ITERATION_STEPS = 1000
"""Environment steps of an iteration, unless `run.iteration_steps` says otherwise."""
LABEL_ROWS = 16
"""Rows of a piece whose priorities are computed where it is played: n-step sums end with the piece, and its last
observation costs a forward."""


class EndOfData(Exception):
    """All data has been used: no further batch will come."""


class Counts(NamedTuple):
    """Steps and episodes of the games. They are sent beside the pieces, so that they stay right when a piece is
    dropped."""

    env_steps: int = 0
    episodes: Any = ()
    """(return, length) of each episode that ended, raw: a tuple of them, or an array `[n, 2]` where they are many."""
    dropped: int = 0
    """Rows that were dropped and will not be learnt from."""
    agent_steps: int = 0
    """Decisions of all agents, in games of several."""


@dataclass
class Batch:
    """What one `Learner.update` gets."""

    data: Any
    rows: int
    """Number of valid rows."""
    ids: Any = None
    """Ids of its transitions, where the Learner returns priorities for them."""
    origin: str = ""


class Experience:
    """The interface, with defaults. Times are a `Clock`."""

    piece_length: int | None = None
    """Rows that a source collects per piece; None = any number."""
    state_every: int = 1
    """Number of rows between two stored recurrent states of a piece."""
    iteration_steps: int = 0
    """Environment steps of an iteration, at least; 0 = an iteration is one batch."""
    ends_with_batch: bool = True
    """Whether an iteration ends with a batch; else with the step, be a batch due or not."""
    asynchronous: bool = False
    """Whether rollout workers play on while it learns, each at its own pace and with weights that are some versions
    old."""
    lanes: bool = False
    """Whether a row is one step of all environments: pieces of such workers then come side by side."""
    mixes: bool = False
    """Whether files can be learnt from beside what is played (`mix_with`)."""

    def check_live(self) -> None:
        """Raise ConfigError if games that come and go cannot fill it."""

    def seed(self, seed: int) -> None:
        """Seed of all random draws."""

    def add(self, piece: Piece) -> None:
        """Add a piece. What is kept of it is copied, so that the caller may overwrite it."""
        raise NotImplementedError

    def mix_with(self, pieces: Pieces, share: float, memory: int, seed: int) -> None:
        """From now on this share of every batch is transitions of `pieces`, each as often as the others."""
        raise NotImplementedError

    def room(self) -> bool:
        """Whether more pieces may be added now. False makes sources wait that can."""
        return True

    def next(self, clock: Any, timeout: float = 0.0) -> Batch | None:
        """The next batch to learn from, or None if none is due yet. Raises EndOfData when there will be no more."""
        raise NotImplementedError

    def feedback(self, batch: Batch, priorities: np.ndarray | None, version: int) -> None:
        """Called after the update with this batch, with its priorities. Ids of rows that have been overwritten are
        counted and ignored."""

    def complete(self) -> None:
        """No more pieces will come."""
        raise EndOfData("the source of pieces has ended")

    def cut(self) -> None:
        """The next piece does not continue the last one."""

    def forget(self) -> None:
        """Give up what waits to be learnt from once: it may be what a learner was led astray by."""

    def change_rewards(self, change: Callable[[np.ndarray], np.ndarray]) -> None:
        """Of the rows that are there."""

    def leave_out(self, largest: float) -> int:
        """Do not learn from rows that are there and not finite, or whose reward is beyond this size; how many."""
        return 0

    def wait_reason(self) -> str:
        """Why `next` returned None, as text for the log."""
        return "no batch is due yet"

    def when_due(self) -> str:
        """When there are batches, with the keys that say so; empty where that needs no words."""
        return ""

    def numbers(self) -> dict[str, float]:
        """Metrics for the result rows, `replay/*`."""
        return {}

    def newest_obs(self, rows: int) -> NestedArray | None:
        """The newest observations `[N, ...]`, to check and calibrate exported models."""
        return None

    @property
    def nbytes(self) -> int:
        return 0

    def get_state(self, directory: Path | None) -> dict[str, Any]:
        """{"arrays": tree, "json": plain data}; large parts go to files in the directory, or nowhere without one.
        `"exact": False` beside these where something is left out."""
        return {"arrays": {}, "json": {}}

    def set_state(self, state: Mapping[str, Any], directory: Path | None) -> bool:
        """Restore what `get_state` returned; returns whether the continuation is exact."""
        return True

    def prune(self, directory: Path, kept: Iterable[Any]) -> None:
        """Delete files that none of these states (the `arrays` of kept checkpoints) needs."""


# --- replay -----------------------------------------------------------------------------------------------------------


class Replay(Experience):
    """Transitions of `size` rows at most, drawn in batches again and again.

    After `learning_starts` environment steps, `updates` batches are due for every `train_every` steps. Environments of
    this process step together and share rows of the ring; pieces of live games lie one after the other, each with its
    last observation behind it.

    A new row has the largest priority so far. With `initial_priority="td_error"` it has that of its piece's column
    `priority`, where there is one (`Policy.label` makes it): pieces then have 16 rows.
    """

    piece_length: int | None = 1
    iteration_steps = ITERATION_STEPS
    ends_with_batch = False
    asynchronous = lanes = mixes = True

    def __init__(
        self,
        size: int,
        batch_size: int,
        *,
        gamma: float = 0.99,
        n_step: int = 1,
        prioritized: bool = False,
        alpha: float = 0.6,
        beta: Schedule = 0.4,
        initial_priority: str = "max",
        learning_starts: int = 0,
        train_every: int = 1,
        updates: int = 1,
        max_use: int | None = None,
        max_staleness: int | None = None,
        frame_stack: int | None = None,
    ):
        self.size, self.batch_size = size, batch_size
        self.learning_starts, self.train_every, self.updates = learning_starts, train_every, updates
        self.prioritized, self._beta = prioritized, make_schedule(beta if prioritized else 1.0)
        if prioritized and initial_priority == "td_error":
            self.piece_length = LABEL_ROWS
        self._options: dict[str, Any] = {"gamma": gamma, "n_step": n_step, "prioritized": prioritized}
        if prioritized:
            self._options["alpha"] = alpha
        self._options |= {"max_use": max_use, "max_staleness": max_staleness, "frame_stack": frame_stack}
        self.least = batch_size
        """Transitions needed before the first draw: fewer would be drawn again and again within one batch."""
        self.ring: ReplayRing | None = None
        self._due = 0  # environment steps that are not learnt from yet
        self._left = 0  # batches of the visit under way
        self._version = 0
        self._ragged = False
        self._lanes: int | None = None  # environments of the run, where all step together
        self._piece: Piece | None = None
        self._views: list[tuple[list[Any], dict[str, Any]]] = []
        self._files: Dataset | None = None
        self._share, self._drawn = 0.0, 0  # of a batch from files; batches so far
        self.files_first = 0
        """Batches that are still to come of the files alone, before any with rows that are played."""
        self.seed(0)

    @classmethod
    def of(cls, config: Any, frame_stack: int | None = None, **more: Any) -> Self:
        """By the fields of an algorithm's Config that have the usual names; `more` arguments."""
        names = (
            "gamma",
            "n_step",
            "prioritized",
            "initial_priority",
            "learning_starts",
            "train_every",
            "updates",
            "max_use",
            "max_staleness",
        )
        options = {name: getattr(config, name) for name in names if hasattr(config, name)}
        for name in ("alpha", "beta"):
            if hasattr(config, f"priority_{name}"):
                options[name] = getattr(config, f"priority_{name}")
        return cls(config.replay_size, config.batch_size, frame_stack=frame_stack, **options, **more)

    def seed(self, seed: int) -> None:
        self.rng = np.random.default_rng([seed, 2])

    def mix_with(self, pieces: Pieces, share: float, memory: int, seed: int) -> None:
        """Batches have a column `demo` that says which rows are of the files (1 or 0). The numbers of rows are rounded
        so that the share holds over batches."""
        if type(self) is not Replay:
            raise ConfigError(
                "rows of files are mixed into batches of single transitions, and this algorithm draws "
                f"{type(self).__name__}"
            )
        self._share = share
        self._files = Dataset(self.batch_size, sys.maxsize, self._options["gamma"], self._options["n_step"])
        self._files.read_from(pieces, memory, seed)

    def check_rows(self, num_envs: int, ready: int) -> None:
        """Refuse a size that could never hold a batch: `ready` of `num_envs` rows come at a time, and every other may
        be a dead one."""
        self._lanes = num_envs
        size = -(-2 * self.batch_size * num_envs // ready)
        if self.size < size:
            raise ConfigError(
                f"a gradient step waits until batch_size={self.batch_size} transitions can be drawn, so replay_size "
                f"is at least {size}; got {self.size}"
            )

    def _make_ring(self, example: dict[str, NestedArray], lanes: int) -> ReplayRing:
        ring = ReplayRing(self.size, lanes, example, monitor=True, **self._options)
        ring.advance(self._version)
        return ring

    def add(self, piece: Piece) -> None:
        self._ragged = piece.stream is not None
        limit = self._options["max_staleness"]
        if self._ragged and limit is not None and self._version - np.max(piece.version) >= limit:
            return  # too old when it came
        if self.ring is None:
            row = {"obs": piece.obs, "action": piece.action, **self._kept(piece)}
            row.pop("priority", None)  # not a column of the ring
            example = tree.map(lambda x: x[0, 0], row)
            self.ring = self._make_ring(example, 1 if self._ragged else piece.num_envs)
        if self._ragged:
            self._add_ragged(piece)
        else:
            add, version = self.ring.add, oldest(piece.version)
            for columns, extras in self._rows_of(piece):
                add(*columns, version=version, **extras)
        self._due += int(np.count_nonzero(piece.valid))

    def _rows_of(self, piece: Piece) -> list[tuple[list[Any], dict[str, Any]]]:
        """Views of the rows, made once for a piece that comes again and again, written over."""
        if piece is not self._piece:
            names, kept = ("obs", "action", "reward", "terminated", "truncated", "valid"), self._kept(piece)
            if piece.state is not None:  # who stores no memory need not know where episodes begin
                kept = {**kept, "first": piece.first}
            self._views = [
                ([tree.index(getattr(piece, name), t) for name in names], tree.index(kept, t))
                for t in range(piece.length)
            ]
            self._piece = piece
        return self._views

    def _kept(self, piece: Piece) -> dict[str, NestedArray]:
        return piece.extras

    def _add_ragged(self, piece: Piece) -> None:
        """The rows of one game after the other, each with its last observation behind them as a dead row: the row
        before that has a successor, and nothing follows."""
        assert self.ring is not None
        t, games = piece.length, piece.num_envs
        rows = np.minimum(np.arange(t + 1), t - 1)  # of a dead row the rest is as before it

        def in_line(x: np.ndarray) -> np.ndarray:
            """`[T + 1, B, ...]`, game after game."""
            return np.swapaxes(x, 0, 1).reshape(games * (t + 1), *x.shape[2:])

        def with_last(x: Any) -> np.ndarray:
            return in_line(np.asarray(x)[rows])

        dead = ~with_last(piece.valid)
        dead[t :: t + 1] = True
        terminated = with_last(piece.terminated) & ~dead
        last = np.zeros(games * (t + 1), bool)
        last[t - 1 :: t + 1] = True
        self.ring.extend(
            tree.map(in_line, piece.obs),
            tree.map(with_last, piece.action),
            np.where(dead, np.float32(0.0), with_last(piece.reward)).astype(np.float32, copy=False),
            terminated,
            (with_last(piece.truncated) | (last & ~terminated)) & ~dead,
            ~dead,
            first=in_line(piece.first),
            version=oldest(piece.version),
            **tree.map(with_last, self._kept(piece)),
        )

    def __len__(self) -> int:
        return 0 if self.ring is None else len(self.ring)

    def next(self, clock: Any, timeout: float = 0.0) -> Batch | None:
        if self.files_first and self.ring is not None:
            self.files_first -= 1
            return Batch(data := self._draw_files(self.batch_size), self.batch_size, data["id"])
        if self._left == 0:
            if self._due < self.train_every:
                return None
            if clock.env_steps <= self.learning_starts or not self._ready():
                self._due = self.train_every
                return None
            self._due -= self.train_every
            self._left = self.updates
        elif not self._ready():  # the rest is used up or stale: wait for new rows
            self._due %= self.train_every
            self._left = 0
            return None
        self._left -= 1
        data = self._draw(self._beta(clock.env_steps))
        return Batch(data, self.batch_size, data["id"])

    def _ready(self) -> bool:
        """Whether enough transitions are stored to draw from."""
        return len(self) >= self.least

    def _draw(self, beta: float) -> dict[str, NestedArray]:
        assert self.ring is not None
        if self._files is None:
            return self.ring.sample(self.batch_size, self.rng, beta)
        share = self._share * self.batch_size
        demos = int(share * (self._drawn + 1) + 1e-9) - int(share * self._drawn + 1e-9)
        demos = min(demos, self.batch_size - 1)  # one row at least is played
        self._drawn += 1
        mine = self.ring.sample(self.batch_size - demos, self.rng, beta)
        mine["demo"] = np.zeros(self.batch_size - demos, np.float32)
        if not demos:
            return mine
        theirs = self._draw_files(demos)
        if lacks := mine.keys() - theirs.keys():
            raise DataError(f"the files have no columns {sorted(lacks)}, which rows that are played have")
        return {name: tree.concat([column, theirs[name]]) for name, column in mine.items()}

    def _draw_files(self, rows: int) -> dict[str, NestedArray]:
        assert self._files is not None
        return {**self._files.draw(rows), "demo": np.ones(rows, np.float32), "id": np.full(rows, -1, np.int64)}

    def room(self) -> bool:
        return self._due < max(4 * self.train_every, self.batch_size) or not self._ready()

    def feedback(self, batch: Batch, priorities: np.ndarray | None, version: int) -> None:
        assert self.ring is not None
        if priorities is not None:
            played = slice(None) if self._files is None else batch.ids >= 0
            self.ring.update_priorities(batch.ids[played], priorities[played])
        self._version = version
        self.ring.advance(version)

    def cut(self) -> None:
        if self.ring is not None:
            self.ring.cut()

    def change_rewards(self, change: Callable[[np.ndarray], np.ndarray]) -> None:
        if self.ring is not None:
            self.ring.change_rewards(change)

    def leave_out(self, largest: float) -> int:
        return 0 if self.ring is None else self.ring.leave_out(largest)

    def wait_reason(self) -> str:
        if self.ring is None:
            return "no game has sent a row to learn from yet"
        return (
            f"{len(self):,} transitions are there; learning starts after {self.learning_starts:,} environment steps "
            f"(learning_starts) and with a batch of {self.least:,} transitions (batch_size)"
        )

    def when_due(self) -> str:
        return f"after {self.learning_starts:,} steps (learning_starts), then every {self.train_every:,} (train_every)"

    def numbers(self) -> dict[str, float]:
        if self.ring is None:
            return {}
        files = {} if self._files is None else {"files_epoch": self._files.epoch}
        return {"size": len(self.ring), **self.ring.stats(), **files}

    def newest_obs(self, rows: int) -> NestedArray | None:
        if self.ring is None:
            return None
        newest = self.ring.newest(rows)["obs"]  # looked at, not drawn: saving must not count as use
        return newest if tree.length(newest) else None

    @property
    def nbytes(self) -> int:
        return 0 if self.ring is None else self.ring.nbytes

    def get_state(self, directory: Path | None) -> dict[str, Any]:
        json = {"rng": self.rng.bit_generator.state, "due": self._due, "left": self._left, "version": self._version}
        files: dict[str, Any] = {}
        if self._files is not None:
            files = {"files": (state := self._files.get_state(None))["arrays"]}
            json |= {"files": state["json"], "drawn": self._drawn, "files_first": self.files_first}
        if self.ring is None or directory is None:
            came = self.ring is not None
            return {"arrays": files, "json": {**json, "rows": False, "came": came}, "exact": not came}
        arrays = {"ring": self.ring.save(directory), "example": self.ring.example, **files}
        return {"arrays": arrays, "json": {**json, "rows": True, "came": True, "ragged": self._ragged}}

    def set_state(self, state: Mapping[str, Any], directory: Path | None) -> bool:
        arrays, json = state["arrays"], state["json"]
        self.rng.bit_generator.state = json["rng"]
        self._due, self._left, self._version = int(json["due"]), int(json["left"]), int(json["version"])
        if self._files is not None and "files" in json:
            self._files.set_state({"arrays": arrays["files"], "json": json["files"]}, None)
            self._drawn, self.files_first = int(json["drawn"]), int(json.get("files_first", 0))
        if not json["rows"] or directory is None:
            self.ring = None
            return not json["came"]
        self._ragged, lanes = bool(json["ragged"]), int(arrays["ring"]["layout"][0])
        if self._lanes not in (None, lanes) and not self._ragged:
            raise CheckpointError(
                f"the replay is of {lanes} environments in step, this run has {self._lanes} (num_envs, times "
                "num_workers where there are any): resume with as many, or start a new run from its weights with "
                "--init-from"
            )
        self.ring = self._make_ring(arrays["example"], lanes)
        self.ring.load(directory, arrays["ring"])
        return True

    def prune(self, directory: Path, kept: Iterable[Any]) -> None:
        if self.ring is not None:
            self.ring.prune(directory, [state["ring"] for state in kept if state and "ring" in state])


class Sequences(Replay):
    """Replay of sequences: `burn_in + length` consecutive rows of one game, `[T, B, ...]`. A sequence may begin at any
    row, so sequences overlap. The recurrent state of a Model is stored for every row; a batch has that of its first
    row."""

    def __init__(self, size: int, batch_size: int, length: int, burn_in: int = 0, **options: Any):
        super().__init__(size, batch_size, **options)
        self.length, self.burn_in = length, burn_in

    def check_rows(self, num_envs: int, ready: int) -> None:
        super().check_rows(num_envs, ready)
        rows = self.burn_in + self.length
        if self.size < rows * num_envs:
            raise ConfigError(
                f"a sequence is {rows} rows of one environment, so replay_size is at least {rows} * {num_envs} "
                f"environments = {rows * num_envs}; got {self.size}"
            )

    def _ready(self) -> bool:
        if self.ring is None or not super()._ready():
            return False
        low, high = self.ring.id_range()
        return (high - low) // self.ring.num_envs >= self.burn_in + self.length  # of each game

    def _kept(self, piece: Piece) -> dict[str, NestedArray]:
        return piece.extras if piece.state is None else {**piece.extras, "state": piece.state}

    def _draw(self, beta: float) -> dict[str, NestedArray]:
        assert self.ring is not None
        data = self.ring.sample_sequences(self.batch_size, self.length, self.burn_in, self.rng, beta)
        return {**data, "id": data.pop("anchor")}  # its priority goes to the row that was drawn


# --- files ------------------------------------------------------------------------------------------------------------


class Pieces(Protocol):
    """Pieces that can be read in any order (`bray.train.source.FileSource`)."""

    @property
    def steps(self) -> np.ndarray:
        """Transitions of each."""

    def read(self, i: int) -> Piece | None:
        """Piece i; None where it is left out."""


class Dataset(Experience):
    """All transitions of a source that ends, in a new random order each epoch; batches as those of `Replay`, without
    priorities.

    Pieces are given to it (`add`), or it reads them itself (`read_from`): as many at a time as fit into `memory` bytes.
    Where that is not all of them, each epoch deals the episodes out anew, into parts that are read and shuffled one
    after the other."""

    def __init__(self, batch_size: int, epochs: int = 1, gamma: float = 0.99, n_step: int = 1):
        if batch_size < 1 or epochs < 1:
            raise ConfigError(f"a Dataset has batch_size >= 1 and epochs >= 1, got {batch_size} and {epochs}")
        self.batch_size, self.epochs, self.gamma, self.n_step = batch_size, epochs, gamma, n_step
        self._rows = Transitions(n_step, gamma)
        """Those in memory."""
        self._order = np.zeros(0, np.int64)  # of them, those that are still to be learnt from in this epoch
        self._pieces: Pieces | None = None
        self._memory = 0
        self._episodes = np.zeros(0, np.int64)  # in the order of this epoch
        self._part = (0, 0)  # of these, the ones in memory
        self._complete = False
        self.count = 0
        """Transitions of an epoch."""
        self.epoch = 0
        self.seed(0)

    def check_live(self) -> None:
        self.check_rows(0, 0)

    def check_rows(self, num_envs: int, ready: int) -> None:
        """Games do not end, so that it would never be complete."""
        raise ConfigError(
            "this algorithm learns from files: name them with --data FILES (`bray collect` writes "
            "some); an environment named beside them is what it is evaluated in"
        )

    def seed(self, seed: int) -> None:
        self.rng = np.random.default_rng([seed, 2])

    def read_from(self, pieces: Pieces, memory: int, beside: int | None = None) -> None:
        """Read pieces as they are needed, instead of being given them. `beside`: the seed of an experience that draws
        them beside what is played."""
        self._pieces, self._memory = pieces, memory
        if beside is not None:
            self.rng = np.random.default_rng([beside, 4])

    def add(self, piece: Piece) -> None:
        if self._complete:
            raise DataError("this Dataset is complete: no more pieces are taken")
        self._rows.add(piece)

    def complete(self) -> None:
        self._complete = True
        if self._pieces is not None:
            self._rows_at_once = self._rows_that_fit(self._pieces)
            self.count = int(self._pieces.steps.sum())
            new = self._part == (0, 0)
            if new:
                self._episodes = np.arange(len(self._pieces.steps))
            if not new or self.epoch or self.count <= self._rows_at_once:
                self._read(*((0, len(self._episodes)) if new else self._part))
        if self._pieces is None or self._reads_once:
            self.count = len(self._rows)
        if not self.count:
            raise DataError("the data set has no transitions to learn from")

    @property
    def _reads_once(self) -> bool:
        return self._part == (0, len(self._episodes))

    def _rows_that_fit(self, pieces: Pieces) -> int:
        """By the first piece that can be read."""
        for i in range(len(pieces.steps)):
            if (piece := pieces.read(i)) is not None:
                return max(1, int(self._memory / bytes_of_row(piece)))
        raise DataError("the data set has no transitions to learn from")

    def _read(self, start: int, end: int) -> None:
        """Have these in memory, by their place in the order of the epoch, and nothing else."""
        assert self._pieces is not None
        chosen = self._episodes[start:end]
        self._rows.begin(int(self._pieces.steps[chosen].sum()), len(chosen))
        for i in chosen.tolist():
            if (piece := self._pieces.read(i)) is not None:
                self._rows.add(piece)
        self._part = (start, end)

    def _next_part(self) -> None:
        """The transitions that come after those in memory, in random order."""
        once = self._pieces is None or self._reads_once
        if once or self._part[1] in (0, len(self._episodes)):
            if self.epoch == self.epochs:
                raise EndOfData(f"{self.epochs} epochs of {self.count:,} transitions are learnt")
            self.epoch += 1
            if not once:
                assert self._pieces is not None
                self._episodes, self._part = self.rng.permutation(len(self._pieces.steps)), (0, 0)
        if not once:
            assert self._pieces is not None
            start = self._part[1]
            rows = np.cumsum(self._pieces.steps[self._episodes[start:]])
            self._read(start, start + max(1, int(np.searchsorted(rows, self._rows_at_once, "right"))))
        self._order = self.rng.permutation(len(self._rows))

    def next(self, clock: Any, timeout: float = 0.0) -> Batch | None:
        if not self._complete:
            return None
        size = min(self.batch_size, self.count)
        return Batch(self.draw(size), size)

    def draw(self, size: int) -> dict[str, NestedArray]:
        """So many transitions, in the order of the epoch."""
        if not self._complete:
            self.complete()
        parts: list[dict[str, NestedArray]] = []
        while len(self._order) < size:  # what is left of a part comes first in the next batch: shapes stay the same
            if len(self._order):
                parts.append(self._rows.take(self._order))
                size -= len(self._order)
                self._order = self._order[:0]
            self._next_part()
        parts.append(self._rows.take(self._order[:size]))
        self._order = self._order[size:]
        rows: dict[str, NestedArray] = tree.concat(parts) if len(parts) > 1 else parts[0]
        return rows

    def wait_reason(self) -> str:
        return "the files are still being read"

    def newest_obs(self, rows: int) -> NestedArray | None:
        return self._rows.newest_obs(rows) if self._complete and len(self._rows) else None

    def get_state(self, directory: Path | None) -> dict[str, Any]:
        json = {"rng": self.rng.bit_generator.state, "epoch": self.epoch, "at": 0, "part": list(self._part)}
        return {"arrays": {"order": self._order, "episodes": self._episodes}, "json": json | self._of_files()}

    def _of_files(self) -> dict[str, Any]:
        """By what the files of a run are known again: how long their episodes are."""
        if self._pieces is None:
            return {}
        steps = np.ascontiguousarray(self._pieces.steps, "<i8")
        return {"files": {"episodes": len(steps), "steps": int(steps.sum()), "lengths": zlib.crc32(steps.tobytes())}}

    def _require_same_files(self, json: Mapping[str, Any]) -> None:
        then, now = json.get("files"), self._of_files().get("files")
        if then is None or now is None or then == now:
            return  # older checkpoints do not say
        was, found = (f"{x['episodes']:,} episodes of {x['steps']:,} steps" for x in (then, now))
        raise CheckpointError(
            f"the files that are learnt from have changed: they had {was}, and have {found}"
            f"{'' if was != found else ' of other lengths'}. Resume with those that were there, or learn from these "
            "in a run of its own (--init-from RUN_DIR starts it with what was learnt)"
        )

    def set_state(self, state: Mapping[str, Any], directory: Path | None) -> bool:
        arrays, json = state["arrays"], state["json"]
        self._require_same_files(json)
        self._order = np.array(arrays["order"][int(json["at"]) :], np.int64)
        self.rng.bit_generator.state = json["rng"]
        self.epoch = int(json["epoch"])
        if "part" in json:
            start, end = json["part"]
            self._part, self._episodes = (int(start), int(end)), np.array(arrays["episodes"], np.int64)
        return True
