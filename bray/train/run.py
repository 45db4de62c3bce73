"""One run: a training and its directory. Result rows, health, checkpoints and resume exist here once, for `bray train`,
`--live`, `--data` and every rank of a launched trainer; these differ in their Driver and in what they add to a row.

    rows      iteration -> row completed (evaluations, symptoms, callbacks) -> written -> checkpoint when due
    save      the Driver's state, the row, the best score so far; one writer, whoever trains
    resume    the same, backwards
"""

from __future__ import annotations

import json
import logging
import math
import platform
import sys
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bray import rundir
from bray._version import __version__
from bray.diagnosis.divergence import Health
from bray.diagnosis.watch import Watch
from bray.errors import BrayError, CheckpointError, ConfigError, DiskFull, Diverged
from bray.limited_log import OncePer
from bray.metrics import Sinks
from bray.metrics.rows import flatten_row
from bray.metrics.spent import BETWEEN
from bray.rundir import Model, RunDir
from bray.train.callbacks import make_callbacks
from bray.train.config import RunConfig
from bray.train.driver import Driver
from bray.train.goals import STOP_COUNTS, Score, awaited_of, current, reached
from bray.train.gpu import GpuLost, told_clearly
from bray.train.older import from_0_1
from bray.train.progress import when_and_where

logger = logging.getLogger("bray")

_AUTO_REPLAY_BYTES = 2 << 30  # checkpoint_replay=auto saves replays up to this size
_TRY_AGAIN = 60.0  # seconds: a full disk is not asked at every iteration


class Run:
    """A training at work in its run directory.

    training   its Driver
    open_dir   makes or opens the run directory, when it is needed first; None: nothing is saved. Of several ranks the
               first one writes
    owner      what callbacks are given: the Experiment
    about      more of `meta.json`
    model      name of the model whose weights are saved
    """

    def __init__(
        self,
        training: Driver,
        config: RunConfig,
        open_dir: Callable[[], RunDir] | None,
        score: Score,
        watch: Watch,
        *,
        owner: Any = None,
        about: Mapping[str, Any] | None = None,
        model: str = "default",
    ):
        self.training, self.config, self.score, self.watch = training, config, score, watch
        self.owner, self.about, self.model = owner, about or {}, model
        self._open_dir = open_dir
        self._dir: RunDir | None = None
        self.callbacks = make_callbacks()
        self.saved_callbacks: dict[str, Any] = {}
        """Of the checkpoint that is resumed, until `callbacks` have them."""
        self.evaluations: Any = None
        self.health = Health()
        self.last_row: dict[str, Any] | None = None
        self.time = 0.0
        """Seconds of training, over all resumes."""
        self.exact = True
        """Whether another run of this seed, or a resumed one, is the same run."""
        self.told_envs = False
        """Whether a function of the user changed the environments: that is in no checkpoint."""
        self.stop_requested = self.hurries = False
        self.saved_at = -1
        """The Driver's position in the newest checkpoint; -1: there is none."""
        self._saved_step = 0  # gradient steps in it
        self._saved_time = time.monotonic()  # when the state that was saved was that of the run
        self._unsaved: DiskFull | None = None  # why the last checkpoint is not there, where ranks cannot try again
        self._lapped = self._between = self._save_seconds = self._try_again = self._looked_at = 0.0
        self._once = OncePer()
        self._tries = 0  # to learn on after an error, since the newest checkpoint
        self._told_replay = self._told_counters = self._told_large = False

    @property
    def directory(self) -> RunDir:
        if self._dir is None:
            assert self._open_dir is not None
            self._dir = self._open_dir()
        return self._dir

    @property
    def has_directory(self) -> bool:
        """Whether it was made or opened."""
        return self._dir is not None

    @property
    def saved(self) -> bool:
        """Whether its directory holds a checkpoint."""
        return self._dir is not None and bool(self._dir.steps())

    @property
    def all_saved(self) -> bool:
        """Whether the newest checkpoint holds all iterations."""
        return self.saved_at == self.training.position

    def request_stop(self, hurry: bool = False) -> None:
        self.stop_requested, self.hurries = True, self.hurries or hurry
        self.training.stop()

    def close(self) -> None:
        self.training.close()
        if self._dir is not None:
            self._dir.close()

    # --- rows ---------------------------------------------------------------------------------------------------------

    def rows(
        self,
        stop: Mapping[str, float],
        out: Sinks,
        evaluations: Any = None,
        tend: Callable[[float], None] = lambda seconds: None,
    ) -> Generator[dict[str, Any], None, None]:
        """Train until a stop condition holds: one row per iteration. Saves when due, and at the end however it comes.
        `tend` is called after each row with the seconds since the start."""
        training, run = self.training, self.config
        self.evaluations = evaluations
        awaited = [self.score.awaited, *awaited_of(stop)]
        self._looked_at = began = time.monotonic()
        self._lapped, self._between = time.perf_counter(), 0.0
        try:
            self.callbacks.on_train_start(self.owner)
            if self.saved_at < 0:
                self.save()  # a run can be resumed from its first second
            while not self.stop_requested and not reached(stop, self.last_row):
                row = self._iterate(stop)
                if row is None:
                    break
                try:
                    self._complete(row, stop)
                finally:  # the next checkpoint holds this iteration, whatever a callback raises
                    self.last_row = row
                    self._unless_full(partial(out.write, row))
                try:
                    self.health.check(row, training.lost_weights)
                    for key in awaited:
                        key.look(row, bool(run.eval_freq))
                    if not training.saves_by_step:
                        self.save_when_due()
                except Diverged as e:
                    self._go_back(e)
                if evaluations is not None:
                    evaluations.begin_when_due()
                tend(time.monotonic() - began)
                self._between = self._lap()
                yield row
                self._lapped = time.perf_counter()  # what the caller did is not the training's
        except Exception as e:
            self._save_after(e)
            raise
        except BaseException as e:  # the caller has had enough, or Ctrl-C
            if self.training.saves_after(e):
                self._save_last()
            raise
        else:
            self._save_last()
            if training.failure is not None:
                raise training.failure

    def _iterate(self, stop: Mapping[str, float]) -> dict[str, Any] | None:
        """One iteration; None when the data has ended."""
        training, between = self.training, self._between + self._lap()
        training.goal = int(stop["env_steps_total"]) if "env_steps_total" in stop else None
        while True:
            try:
                with told_clearly(getattr(training.learner, "device", None)):
                    row = training.iterate(int(stop["episodes_total"]) if "episodes_total" in stop else None)
                break
            except GpuLost:
                raise
            except Exception as e:
                cause = self.health.cause(e, training.lost_weights())
                if cause is not None:
                    cause.__cause__ = e
                self._go_back(cause or e)
        self._lap()
        self._between = 0.0
        if row is None:
            return None
        return row | {f"perf/{BETWEEN}": 1e3 * between, "time_total_s": self.time, **when_and_where()}

    def _go_back(self, error: Exception) -> None:
        """After an error while learning: try again from the newest checkpoint, after a pause that grows. When that has
        failed too often, nothing is learnt any more; whoever plays goes on, and the error is raised at the end. Where
        nobody plays apart from the learner (`Driver.retries`) it is raised now."""
        training, pauses = self.training, self.training.retries
        if not pauses or training.failure is not None or isinstance(error, ConfigError):
            raise error
        self._tries += 1
        what, pause = f"learning has failed ({type(error).__name__}: {error})", 0.0
        if self._tries > len(pauses):
            training.failure = error
            then = f"That was try {self._tries}: it stays off until the run is resumed"
        else:
            pause = pauses[self._tries - 1]
            step = self._saved_step
            then = f"Try {self._tries} of {len(pauses)} begins in {pause:g} s, from the checkpoint of step {step}"
        training.trouble = f"{what}. {then}. Games are answered with the last good weights"
        logger.error("%s", training.trouble, exc_info=None if isinstance(error, BrayError) else error)
        training.wait(pause)
        checkpoint = self.directory.load_checkpoint("latest")
        several = {name: model.weights for name, model in checkpoint.models.items()}
        weights: Any = several if training.several else checkpoint.weights
        training.go_back(checkpoint.state, weights, self.directory.path / "replay")

    def _lap(self) -> float:
        """Seconds since the last call; they count in `time_total_s`."""
        last, self._lapped = self._lapped, time.perf_counter()
        self.time += self._lapped - last
        return self._lapped - last

    def _complete(self, row: dict[str, Any], stop: Mapping[str, float]) -> None:
        """Add to a row what evaluations, the watch over symptoms and callbacks say. The last row waits for evaluations
        beside the training."""
        evaluations, ends = self.evaluations, bool(reached(stop, row))
        if evaluations is not None:
            try:
                evaluations.look(row, self.callbacks)
                if ends:
                    evaluations.finish(row, self.callbacks)
            finally:
                self._lap()
                row["time_total_s"] = self.time
        row |= self.watch.look(row, self.training.dead_units)
        self._show(row)
        if evaluations is not None and self.stop_requested and not self.hurries:
            evaluations.finish(row, self.callbacks)

    def _show(self, row: dict[str, Any]) -> None:
        """Show a row to the callbacks of the user, who may add to it. Its counters stay: goals and resumes go by
        them. A whole number that no float holds is not a finite one, here and in every sink."""
        counted = {key: row[key] for key in STOP_COUNTS if key in row}
        try:
            self.callbacks.on_train_result(self.owner, row)
        finally:
            changed = [key for key, value in counted.items() if row.get(key) != value]
            row |= counted
            large = [k for k, v in row.items() if isinstance(v, int) and abs(v) > sys.float_info.max]
            row |= dict.fromkeys(large, math.inf)
            if large and not self._told_large:
                self._told_large = True
                logger.warning(
                    "a callback set row[%r] to a number that is too large for a float: it counts as infinity", large[0]
                )
            if changed and not self._told_counters:
                self._told_counters = True
                logger.warning(
                    "a callback changed row[%r], which the training counts itself: it stays as it was. "
                    "Give your own number another name",
                    changed[0],
                )

    # --- checkpoints --------------------------------------------------------------------------------------------------

    def is_late(self) -> bool:
        """Whether waiting for the next look, and for writing the checkpoint then, would exceed `checkpoint_every_s`."""
        now = time.monotonic()
        until, self._looked_at = 2 * now - self._looked_at + self._save_seconds, now
        every = self.config.checkpoint_every_s
        return bool(every) and until - self._saved_time >= every

    def save_when_due(self, late: bool | None = None) -> None:
        """`late`: what ranks have agreed on."""
        run, score, training = self.config, self.score, self.training
        due = run.checkpoint_freq and training.iteration % run.checkpoint_freq == 0
        if every := run.checkpoint_updates:
            due = due or training.steps // every > self._saved_step // every
        due = (self.is_late() if late is None else late) or due
        better = score.key.startswith("eval/") and score.is_better(score.of(current(self.last_row or {})))
        if (due or better) and time.monotonic() >= self._try_again:
            self._unless_full(self.save)

    def _unless_full(self, write: Callable[[], Any]) -> None:
        """Write something; on a full disk, warn and go on, and try again after a minute. Rows are kept in memory and
        the last checkpoint stays valid. At the end of the run a disk that is still full is an error."""
        try:
            write()
        except DiskFull as e:
            if self.training.ranks.size == 1:  # several decide together
                self._try_again = time.monotonic() + _TRY_AGAIN
            if self._once.due():
                logger.warning("%s%s Training goes on, and tries to write again every minute.", self.training.label, e)

    def _save_last(self) -> None:
        if self.training.position > 0 and not self.all_saved:
            self.save()
        if self._unsaved is not None:
            raise self._unsaved

    def _save_after(self, error: Exception) -> None:
        """Save what was learnt before an error. The error is raised by the caller whether this works or not."""
        if isinstance(error, (Diverged, GpuLost)) or not self.training.saves_after(error) or self.all_saved:
            return
        try:
            self._save_last()
        except Exception as e:
            where = f"iteration {max(0, self.saved_at)}"
            logger.error("%swhat was learnt after %s could not be saved: %s", self.training.label, where, e)

    def save(self) -> Path | None:
        """A checkpoint of everything, and `best` if it is; its directory. The ranks of a training save together, and
        the first one writes."""
        training = self.training
        if self._open_dir is None:
            return None
        began, position = time.monotonic(), training.position
        replay = None if training.ranks.size > 1 else self.directory.path / "replay"
        with rundir.writing(replay or Path("replay"), "the previous checkpoint is kept"):
            state = training.get_state(replay if self._keeps_replay() else None)
        if training.ranks.size > 1:
            self.saved_at, self._saved_time, self._saved_step = position, began, training.steps
            if not training.ranks.first:
                return None
        try:
            path, refused = self._write(state)
            self._unsaved = None
        except DiskFull as e:
            self._unsaved = e if training.ranks.size > 1 else None
            raise
        self.saved_at, self._saved_time, self._saved_step, self._tries = position, began, training.steps, 0
        if replay is not None:
            with rundir.writing(replay, "the new checkpoint is safe"):
                load = self.directory.load_state
                kept = self.directory.steps()
                training.prune_replay(
                    replay, training.number, state["arrays"], kept, lambda other: load(other)["arrays"]
                )
        self._save_seconds = time.monotonic() - began
        if refused is not None:
            raise refused
        self.callbacks.on_checkpoint(self.owner, path)
        return path

    def _write(self, state: dict[str, Any]) -> tuple[Path, Exception | None]:
        """The files of a checkpoint. Returned beside its directory: the error of a callback that cannot say its state;
        what was learnt is saved before that is raised."""
        training, run, score = self.training, self.config, self.score
        if lost := training.lost_weights(state["arrays"]):
            raise self.health.diverged(f"{lost} are not finite")
        row = self.last_row or {}
        now = dict(current(row))
        if row.get("learner_steps_total") != training.steps:  # inside an iteration
            now["episode_return_mean"] = training.return_mean
        value = score.of(now)
        best = score.is_better(value)
        best_score = value if best else score.best
        refused, callbacks = None, {}
        try:
            callbacks = self.saved_callbacks | self.callbacks.get_state()
        except Exception as e:
            refused = e
        state["json"] |= {"best": best_score, "best_by": score.name, "time": self.time, "row": flatten_row(row)}
        state["json"] |= {"callbacks": json.dumps(callbacks), "told_envs": self.told_envs}
        weights, observations = training.weights(), training.recent_observations()
        if training.several:
            weights = {name: Model(side.version, weights[name]) for name, side in training.sides.items()}
        state["arrays"]["observations"] = observations
        meta = self._meta(now) | {
            "exact": self.exact and state["json"]["exact"] and not self.told_envs,
            "score": value,
            "score_by": score.name,
        }
        path = self.directory.save_checkpoint(
            training.number,
            weights,
            state,
            meta,
            name=self.model,
            best=best,
            keep=run.keep_checkpoints,
            keep_best=run.keep_best,
            spare=self.evaluations.looked_at if self.evaluations is not None else set(),
        )
        score.best = best_score
        return path, refused

    def _meta(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """`meta.json` of a checkpoint: for people, and for tools that look at many runs."""
        training = self.training
        return {
            "bray": __version__,
            "torch": torch.__version__,
            "numpy": np.__version__,
            "python": platform.python_version(),
            "machine": platform.machine(),
            "algorithm": self.config.algorithm,
            **self.about,
            **training.meta(),
            **({"steps": {name: side.version for name, side in training.sides.items()}} if training.several else {}),
            "seed": self.config.seed,
            "training_iteration": training.iteration,
            "env_steps_total": training.env_steps,
            "learner_steps_total": training.steps,
            "episode_return_mean": row.get("episode_return_mean"),
            "eval/return_mean": row.get("eval/return_mean"),
        }

    def _keeps_replay(self) -> bool:
        how = self.config.checkpoint_replay
        size = sum(side.experience.nbytes for side in self.training.sides.values())
        if self.training.ranks.size > 1 or how == "never":
            return False
        if how == "always" or size <= _AUTO_REPLAY_BYTES:
            return True
        if not self._told_replay:
            self._told_replay = True
            logger.warning(
                "the replay (%.1f GiB when full) is not saved with checkpoints: a resumed run fills it anew. "
                "checkpoint_replay=always saves it, =never is silent",
                size / 2**30,
            )
        return False

    # --- coming back --------------------------------------------------------------------------------------------------

    def resume(self, path: Path, state: dict[str, Any], weights: Mapping[str, Any]) -> str:
        """Take over the state of a checkpoint of the run in `path`; returns why that is not exact, in words."""
        training = self.training
        with fits_state(path):
            if "rollout" in state["json"]:
                state = from_0_1(state)
            saved = state["json"]
            why = why_inexact(saved, training.set_state(state, weights, path / "replay"))
            callbacks = json.loads(saved.get("callbacks", "{}"))
            self.saved_callbacks = {name: [dict(state) for state in mine] for name, mine in callbacks.items()}
            self.exact = not why
            self.time, self.last_row = float(saved.get("time", 0.0)), dict(saved.get("row") or {}) or None
            self.watch.resume(self.last_row)
            if saved.get("best_by", self.score.name) == self.score.name:
                self.score.best = None if saved["best"] is None else float(saved["best"])
        self.saved_at, self._saved_step = training.position, training.steps
        return why


def why_inexact(state: Mapping[str, Any], restored: bool) -> str:
    """Why a run does not go on exactly from the state of a checkpoint, in words; empty where it does. `restored`:
    whether all that was saved is back."""
    why, experiences = [], [part["experience"] for part in _of_sides(state)]
    gone = [one for one in experiences if one.get("came") and one.get("rows") is False]
    lost = bool(gone)
    if any(one.get("old_layout") for one in gone):
        why.append("the replay has the layout of Bray 0.1, it fills anew")
    elif lost:
        why.append("the replay was not saved (checkpoint_replay), it fills anew")
    if state.get("midway"):
        why.append("the checkpoint is of the middle of an iteration, which was cut short: new episodes start")
    elif not restored and not lost:
        why.append(
            "the environments cannot go on where they were (their state cannot be restored exactly, or other workers "
            "play them): new episodes start"
        )
    if state.get("told_envs"):
        why.append(
            "what foreach_env or foreach_worker told the environments is not saved: tell them again, now or in "
            "on_train_start of a callback"
        )
    return "; ".join(why)


def _of_sides(state: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The states of the sides of a training, or of several that train in turn."""
    if "policies" in state:
        return [side for part in state["policies"].values() for side in _of_sides(part)]
    return list(state["sides"].values()) if "sides" in state else [state]


@contextmanager
def fits_state(path: Path) -> Iterator[None]:
    """Turn an error while loading a training state (wrong types or shapes) into one message that names the run."""
    try:
        yield
    except BrayError:
        raise
    except Exception as e:  # numpy, torch and Python have many for this
        raise CheckpointError(
            f"{path}: its training state does not fit its config ({type(e).__name__}: {str(e)[:200]}). Resume another "
            f"checkpoint, or start from its weights with --init-from {path}. `--debug` shows where"
        ) from e
