"""A rank of a launched training: the one driver, with hooks that resume, log, publish, evaluate and save. It runs
without a cluster too.

before_run    resume
after_step    log, publish, evaluate, save
after_run     save, publish
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from annotated_types import Gt

from bray.config.declare import Count, describe, options
from bray.data.experience import Batch, EndOfData
from bray.diagnosis.divergence import Health
from bray.diagnosis.symptoms import Symptoms
from bray.errors import BrayError, CheckpointError, ConfigError, DiskFull, Diverged, Unreachable
from bray.inference.host import Promise
from bray.inference.torch_engine import load_weights
from bray.limited_log import OncePer
from bray.metrics import ENV_STEPS, ITERATION
from bray.remote.trainer.base import LossLearner
from bray.remote.trainer.feed import Feed
from bray.remote.trainer.options import TrainOptions
from bray.rundir import Checkpoint, RunDir, pack_state, unpack_state, writing
from bray.train.driver import Driver, Hook, Side
from bray.train.ranks import Ranks, is_rank_lost
from bray.train.source import Source

logger = logging.getLogger("bray.remote")

SAVE_EVERY = 60.0
"""Seconds between checkpoints where neither a number of steps nor the model's `checkpoint_every_s` is given."""
_KEEP = 5
_EVAL_WAIT = 30.0
_REPORT_EVERY = 60.0
_SYMPTOM_STEPS = 500  # gradient steps in a row that look bad before it is said
_LOCK_PATIENCE = 15.0  # a rank that was killed may hold the directory a moment longer


@dataclass(frozen=True, kw_only=True)
class Settings(TrainOptions):
    """What a training is told, as `RemoteTrainer.train` takes it."""

    eval_interval: Count = 1000
    """Steps between evaluations."""
    eval_steps: Count = 10
    """Batches of an evaluation."""
    hooks: tuple[Hook, ...] = ()
    """More of the loop."""

    def __post_init__(self) -> None:
        for key, option in options(Settings).items():
            value = getattr(self, key)
            if value is not None and Gt(0) in option.metadata and not value > 0:
                raise ConfigError(f"{key}: expected {describe(option.hint)}, got {value}")


class RankDriver(Driver):
    """One rank's training.

    name          of the trainer; its checkpoints are in `run_path`
    side          its learner is a LossLearner, or an algorithm's Learner; its model is the torch module that is trained
    sources       of pieces; none where the side's experience reads buffers itself
    remote_model  `get_weights() -> (weights, step)`, `publish_weights(weights, step, env_steps) -> Promise`
    eval_feed     batches of the evaluation
    merge         `merge(name, value, **labels)`: takes numbers for the log
    options       of the algorithm, by name: what the words about its health may speak of
    """

    def __init__(
        self,
        name: str,
        side: Side,
        sources: Sequence[Source],
        remote_model: Any,
        settings: Settings | None = None,
        *,
        eval_feed: Feed | None = None,
        run_path: Path | None = None,
        about: Callable[[RunDir], None] | None = None,
        ranks: Ranks | None = None,
        merge: Callable[..., None] = lambda *a, **k: None,
        feeds: Sequence[Feed] = (),
        options: Mapping[str, Any] | None = None,
    ):
        self.name, self.remote_model = name, remote_model
        self.settings = s = settings or Settings()
        self._merge, self._run_path, self._about, self._feeds = merge, run_path, about, feeds
        self._by_loss = isinstance(side.learner, LossLearner)
        if s.accumulate > 1 and not self._by_loss:
            raise ConfigError(f"accumulate={s.accumulate} needs a bray.Trainer; a Learner makes its own minibatches")
        if eval_feed is not None and not hasattr(getattr(side.learner, "trainer", None), "eval"):
            raise ConfigError("eval needs a bray.Trainer with a method `eval`")
        self._eval_feed = eval_feed
        self.first = 0
        """The model's step when this training began."""
        self.resumed: int | None = None
        """The step of the checkpoint that this process went on from."""
        self._published = self._saved = self._evaluated = self._reuses = 0
        self._saved_at = self._reported_at = time.monotonic()
        self._save_every: float | None = None
        self._keep = _KEEP
        self._reported = 0
        self._publishing: Promise | None = None
        self._publish_step = 0
        self._run_dir: RunDir | None = None
        self._owns_dir = True
        self._best: float | None = None
        self._unsaved: DiskFull | None = None  # why the last checkpoint is not there
        self._once = OncePer()
        self._health, self._symptoms = Health(), Symptoms(options, _SYMPTOM_STEPS)
        self._since, self._begun = time.monotonic(), 0
        ours = [
            Hook("before_run", RankDriver._resume, 10),
            Hook("after_step", RankDriver._log, 20),
            Hook("after_step", RankDriver._publish, 30),
            Hook("after_step", RankDriver._evaluate, 40),
            Hook("after_step", RankDriver._save, 50),
            Hook("after_run", RankDriver._save_last, 10),  # before anything that may wait for others
            Hook("after_run", RankDriver._publish_last, 20),
        ]
        super().__init__([side], sources, [*ours, *s.hooks], ranks)
        self.label = f"trainer {name}, rank {self.ranks.rank} of {self.ranks.size}: "

    def train(self) -> dict[str, Any]:
        """Run to the end; the summary."""
        try:
            self.run()
        except Exception as e:
            self._save_after(e)
            raise
        finally:
            self.close()
            for feed in (*self._feeds, *([self._eval_feed] if self._eval_feed else [])):
                feed.close()
            if self._run_dir is not None and self._owns_dir:
                self._run_dir.close()
        seconds = time.monotonic() - self._since
        return {
            "name": self.name,
            "steps": self.steps - self.first,
            "model_step": self.steps,
            "samples": self.rows,
            "ranks": self.ranks.size,
            "stopped": self.stopped,
            "out_of_data": self.ended,
            "resumed_from": self.resumed,
            "seconds": round(seconds, 3),
            "steps_per_second": round((self.steps - self._begun) / max(seconds, 1e-9), 3),
            "metrics": {} if self.update is None else self.update.metrics,
        }

    # --- a step -------------------------------------------------------------------------------------------------------

    def next_batch(self) -> Batch | None:
        most = self.settings.num_steps
        if most is not None and self.steps >= self.first + most:
            return None
        began = time.monotonic()
        batch = super().next_batch()
        if batch is not None:
            self._merge("perf/wait_ms", 1000.0 * (time.monotonic() - began), trainer=self.name)
        return batch

    def _look_for_batch(self, timeout: float) -> Batch | None:
        """With `max_reuse` the last batch is learnt from again while the next one is not ready."""
        last = self.batch
        if not self._by_loss and last is not None and self._reuses < self.settings.max_reuse:
            batch = super()._look_for_batch(0.0)
            if batch is None:
                self._reuses += 1
                return replace(last, rows=0)  # its rows are counted already
        else:
            batch = super()._look_for_batch(timeout)
        if batch is not None:
            self._reuses = 0
        return batch

    def wants_to_save(self) -> bool:
        by_time = self.ranks.first and self.settings.checkpoint_interval is None
        return by_time and time.monotonic() > self._saved_at + (self._save_every or SAVE_EVERY)

    def _learn_from(self, side: Side, batch: Batch) -> None:
        began = time.monotonic()
        super()._learn_from(side, batch)
        self._merge("perf/step_ms", 1000.0 * (time.monotonic() - began), trainer=self.name)

    # --- after each step ----------------------------------------------------------------------------------------------

    def _log(self) -> None:
        assert self.update is not None
        metrics = self._with_numbers(self.update.metrics)
        row: dict[str, float] = {ITERATION: self.steps, ENV_STEPS: self.env_steps}
        row |= {k if "/" in k else f"loss/{k}": v for k, v in metrics.items()}
        self._health.check(row, self.lost_weights)
        self._symptoms.look(row)
        for name, value in metrics.items():  # on every rank: the log has their mean
            self._merge(name if "/" in name else f"loss/{name}", value, trainer=self.name)
        now = time.monotonic()
        if self.ranks.first and now > self._reported_at + _REPORT_EVERY:
            rate = (self.steps - self._reported) / (now - self._reported_at)
            shown = ", ".join(f"{k} {v:.4g}" for k, v in list(metrics.items())[:4])
            logger.info("trainer %s: step %d, %.1f steps/s, %s", self.name, self.steps, rate, shown)
            self._reported_at, self._reported = now, self.steps

    def _publish(self) -> None:
        if self.steps - self._published >= self.settings.weights_publish_interval:
            self._send_weights(wait=False)

    def _publish_last(self) -> None:
        if self.steps > self._published:
            self._send_weights(wait=True)
        self._settle()

    def _send_weights(self, wait: bool) -> None:
        """Publish what the model is now. While the last ones are still under way newer ones wait, so that slow workers
        get the newest."""
        if not self.ranks.first:
            self._published = self.steps
            return
        if self._publishing is not None and not (wait or self._publishing.done()):
            return
        self._settle()
        self._published = self._publish_step = self.steps
        try:
            self._publishing = self.remote_model.publish_weights(
                self._weights_now(), step=self.steps, env_steps=self.env_steps
            )
        except Unreachable as e:
            self._not_published(e)

    def _settle(self) -> None:
        """Look at how the last publish ended; one that is under way is waited for."""
        sent, self._publishing = self._publishing, None
        try:
            if sent is not None:
                sent.result()
        except Unreachable as e:
            self._not_published(e)

    def _not_published(self, error: BrayError) -> None:
        logger.warning(
            "trainer %s: step %d is not published, training goes on: %s", self.name, self._publish_step, error
        )

    def _evaluate(self) -> None:
        if self._eval_feed is None or self.steps - self._evaluated < self.settings.eval_interval:
            return
        self._evaluated = self.steps
        for done in range(self.settings.eval_steps):
            try:
                batch = self._eval_feed.get(_EVAL_WAIT)
            except EndOfData:
                batch = None
            if batch is None:
                logger.warning(
                    "trainer %s: the evaluation has %d of %d batches", self.name, done, self.settings.eval_steps
                )
                return
            for name, value in self.learner.evaluate(batch.data).items():
                self._merge(name if "/" in name else f"eval/{name}", value, trainer=self.name)

    # --- checkpoints --------------------------------------------------------------------------------------------------

    def _save(self) -> None:
        interval = self.settings.checkpoint_interval
        if self.save_now or (interval is not None and self.steps - self._saved >= interval):
            self._checkpoint()

    def _save_last(self) -> None:
        if self.steps > self._saved:
            self._checkpoint()
        if self._unsaved is not None:
            raise self._unsaved

    def _save_after(self, error: Exception) -> None:
        """The user's code has raised: save what was learnt, where this rank can do so alone. Ranks that lost another
        one start again."""
        saves = self.ranks.first and self._run_dir is not None and self.steps > self._saved
        if not saves or isinstance(error, (Unreachable, Diverged, CheckpointError)) or is_rank_lost(error):
            return
        try:
            self._checkpoint(alone=True)
        except Exception as e:
            logger.warning("trainer %s: step %d could not be saved: %s", self.name, self.steps, e)
        else:
            error.add_note(f"step {self.steps} is saved: the same command goes on from there")

    def _checkpoint(self, alone: bool = False) -> None:
        """`alone`: the other ranks do not take part, and their random numbers are not saved."""
        self.save_now = False
        if self._run_path is None:
            return
        state = pack_state({"process": random_state(), "learner": self._rng_state()})
        states = [state] if alone else self.ranks.gather(state)
        self._saved, self._saved_at = self.steps, time.monotonic()
        if not self.ranks.first:
            return
        try:
            with writing(self._run_path, "the previous checkpoint is kept"):
                self._write_checkpoint(states)
            self._unsaved = None
        except DiskFull as e:
            self._unsaved = e
            if self._once.due():
                logger.warning("trainer %s: %s Training goes on, and tries to save again.", self.name, e)

    def _write_checkpoint(self, states: list[bytes]) -> None:
        assert self._run_dir is not None
        row = self.totals.episodes.row()
        score = row.get("episode_return_mean")
        best = score is not None and (self._best is None or score > self._best)
        replay = self._replay_dir()
        state = self.get_state(replay)
        if lost := self.lost_weights(state["arrays"]["learner"]):
            raise self._health.diverged(f"{lost} are not finite")
        recent = self.recent_observations()
        state["arrays"]["observations"] = {} if recent is None else {"obs": recent}
        best_score = score if best else self._best
        state["json"] |= {"first": self.first, "rows": self.rows, "best": best_score, "ranks": states}
        state["json"]["definition"] = self._chosen_start[0]
        meta = {
            "trainer": self.name,
            "ranks": self.ranks.size,
            "samples": self.rows,
            "env_steps_total": self.env_steps,
            "learner_steps_total": self.steps,
            "episode_return_mean": row.get("episode_return_mean"),
        }
        self._run_dir.save_checkpoint(
            self.steps, self._weights_now(), state, meta, name=self.remote_model.name, best=best, keep=self._keep
        )
        self._best = best_score
        if replay is not None:
            self.prune_replay(replay, self.steps, state, self._run_dir)

    def _replay_dir(self) -> Path | None:
        """Where the experience keeps what is too large for a checkpoint: of one rank alone, up to 2 GiB."""
        if self._run_path is None or self.ranks.size > 1 or self.experience.nbytes > 2 << 30:
            return None
        return self._run_path / "replay"

    def _rng_state(self) -> Any:
        rng = getattr(self.learner, "rng", None)
        return None if rng is None else rng.bit_generator.state

    def _find_saved(self, run: RunDir) -> Checkpoint | None:
        """The checkpoint to go on from: the newest, or the one of the step that the model was told to start from."""
        if run.pointer("latest") is None:
            return None
        saved = run.load_checkpoint()
        if "arrays" not in saved.state:
            raise CheckpointError(
                f"{run.path} is of a trainer of Bray 0.1, which this version cannot go on with. Start another trial "
                f"with its weights: `checkpoint: {saved.path / 'model.safetensors'}` of model {self.remote_model.name}"
            )
        definition, chosen = self._chosen_start
        if chosen is None or saved.state["json"].get("definition") == definition:  # the latter: this rank was restarted
            return saved
        if str(chosen).isdecimal() and int(chosen) in run.steps():
            return run.load_checkpoint(int(chosen))
        logger.warning(
            "trainer %s: model %s starts from checkpoint %s, of which there is no state of the trainer: optimizer and "
            "counters begin anew",
            self.name, self.remote_model.name, chosen,
        )  # fmt: skip
        return None

    @property
    def _chosen_start(self) -> tuple[str, str | int | None]:
        return getattr(self.remote_model, "chosen_start", ("", None))

    def _resume(self) -> None:
        """Go on from the newest checkpoint, else from the model's weights; equal on all ranks."""
        start: dict[str, Any] = {}
        if self.ranks.first:
            weights, step = self.remote_model.get_weights()
            self._save_every = getattr(self.remote_model, "checkpoint_every_s", None)
            self._keep = getattr(self.remote_model, "keep_checkpoints", _KEEP)
            start = {"weights": dict(weights), "model_step": int(step), "saved": None}
            if self._run_path is not None:
                self._owns_dir = not (self._run_path / "trainer.json").exists()  # else the session has locked it
                self._run_dir = open_run(self._run_path) if self._owns_dir else RunDir(self._run_path)
                if self._about is not None:
                    self._about(self._run_dir)
                if (saved := self._find_saved(self._run_dir)) is not None:
                    start.update(weights=saved.weights, saved=saved.state, step=saved.step)
            if start["saved"] is None:
                # parts of a Learner that no model holds (critics) are as the first rank drew them
                start["drawn"] = self.learner.state_dict()
        start = unpack_state(self.ranks.broadcast(pack_state(start) if self.ranks.first else b""))
        load_weights(self.model, start["weights"])  # in place: the optimizer may hold views of them
        mine = self._rng_state()  # each rank draws its own numbers
        if start["saved"] is None:
            self.learner.load_state_dict(start["drawn"])
            self.first = self.learner.steps = start["model_step"]
        else:
            arrays, saved = start["saved"]["arrays"], start["saved"]["json"]
            self.learner.load_state_dict({"parts": arrays["learner"], **saved["learner"]})
            self.first, self.rows, self.resumed = int(saved["first"]), int(saved["rows"]), int(start["step"])
            self.totals.env_steps, self._best = int(saved["env_steps"]), saved["best"]
            self.totals.episodes.set_state(arrays["episodes"])
            if self.ranks.size == 1:
                replay = None if self._run_path is None else self._run_path / "replay"
                self.experience.set_state({"arrays": arrays["experience"], "json": saved["experience"]}, replay)
                self.experience.cut()
            for source, state in zip(self.sources, saved["sources"], strict=False):
                source.set_state({"arrays": {}, "json": state}, self.clock)
            if self.ranks.rank < len(saved["ranks"]):
                state = unpack_state(saved["ranks"][self.ranks.rank])
                set_random_state(state["process"])
                mine = state["learner"]
            # Versions that were published after the checkpoint, before a crash, are not given twice.
            self.learner.steps = max(self.steps, start["model_step"])
            if self.ranks.first:
                logger.info("trainer %s goes on from the checkpoint of step %d", self.name, self.resumed)
        if mine is not None:
            self.learner.rng.bit_generator.state = mine
        self._saved = self._evaluated = self._reported = self.steps
        self._published = start["model_step"]
        if self.steps > self._published or self.env_steps > 0:  # agents explore as far as training is
            self._send_weights(wait=True)
        if self.resumed is None or self._chosen_start[1] is not None:
            self._checkpoint()  # the run can be continued, served and evaluated from its first second
        self.model.train()
        self._since = self._last_batch = time.monotonic()  # who has asked to stop meanwhile is not forgotten
        self._begun = self.steps


def open_run(path: Path) -> RunDir:
    end = time.monotonic() + _LOCK_PATIENCE
    while True:
        try:
            return RunDir.create(path, resume=(path / "checkpoints").exists())
        except CheckpointError:
            if time.monotonic() > end:
                raise
            time.sleep(0.2)


def random_state() -> dict[str, Any]:
    """The process's random generators, for a checkpoint."""
    version, internal, gauss = random.getstate()
    name, keys, at, has, cached = np.random.get_state()
    state: dict[str, Any] = {
        "python": [version, np.array(internal, np.uint64), gauss],
        "numpy": [name, keys, at, has, cached],
        "torch": torch.get_rng_state().numpy(),
    }
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state().numpy()
    return state


def set_random_state(state: Mapping[str, Any]) -> None:
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(int(x) for x in internal), gauss))
    np.random.set_state(tuple(state["numpy"]))
    torch.set_rng_state(torch.from_numpy(state["torch"]))
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(torch.from_numpy(state["cuda"]))
