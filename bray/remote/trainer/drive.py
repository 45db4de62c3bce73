"""The training loop of a rank: batches in, better weights out, published, evaluated, saved. It runs without a cluster too.

    hooks before_run:   resume
    per step:           all ranks have a batch -> hooks before_step -> update -> hooks after_step: priorities, log, publish, evaluate, save
    hooks after_run:    publish, save

Every rank makes the same steps. Before each they tell each other who has a batch, whether somebody wants to stop and whether it is time to
save; so a rank whose buffer is slow is waited for, and all end together.
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bray.algos.base import Update
from bray.errors import BrayError, CheckpointError, ConfigError, UnknownName, Unreachable
from bray.inference.host import Promise
from bray.inference.torch_engine import load_weights
from bray.remote.trainer.base import LossLearner
from bray.remote.trainer.feed import Batch, EndOfData, Feed
from bray.remote.trainer.ranks import Ranks, Together
from bray.rundir import RunDir, pack_state, unpack_state

logger = logging.getLogger("bray.remote")

SAVE_EVERY = 60.0
"""Seconds between checkpoints where no number of steps is given."""
_KEEP = 2
_WAIT = 0.5  # a rank without a batch tells the others so after this long
_SAY_AFTER = 30.0  # and the log after this long
_REPORT_EVERY = 60.0
_LOCK_PATIENCE = 15.0  # a rank that was killed may hold the directory a moment longer

POSITIONS = ("before_run", "before_step", "after_step", "after_run")


@dataclass(frozen=True)
class Hook:
    """Something that is done at a point of the loop: `call(drive)`. Lower priorities come first; ours are 10, 20, ...

    `drive.steps`, `.learner`, `.model`, `.update` (the last step's), `.ranks` and `.stop()` are there to be used. Hooks run on every rank."""

    position: str
    call: Callable[[Drive], None]
    priority: float = 100.0

    def __post_init__(self) -> None:
        if self.position not in POSITIONS:
            raise UnknownName("position", self.position, POSITIONS, "of a Hook")


@dataclass(frozen=True)
class Settings:
    """What a training is told, as `RemoteTrainer.train` takes it."""

    buffer_weights: Sequence[float] | None = None
    batch_size: int = 1
    batch_kind: str | None = "concate"
    prefetch_size: int = 1
    max_reuse: int = 0
    accumulate: int = 1
    weights_publish_interval: int = 1
    num_steps: int | None = None
    checkpoint_interval: int | None = None
    eval_interval: int = 1000
    eval_steps: int = 10
    hooks: Sequence[Hook] = field(default=())

    def __post_init__(self) -> None:
        for key in (
            "batch_size",
            "accumulate",
            "weights_publish_interval",
            "num_steps",
            "checkpoint_interval",
            "eval_interval",
            "eval_steps",
        ):
            value = getattr(self, key)
            if value is not None and value < 1:
                raise ConfigError(f"{key}: expected a whole number >= 1, got {value}")


class Drive:
    """One rank's training.

    name          of the trainer; its checkpoints are in `run_path`
    learner       a LossLearner, or an algorithm's Learner; its `model` is the torch module that is trained
    remote_model  `get_weights() -> (weights, step)`, `publish_weights(weights, step) -> Promise`
    buffers       by name: iterables of batches; those that want them have `update_priorities(ids, priorities)`
    eval_buffer   an iterable of batches
    env_steps     `env_steps(rows, steps) -> int`: what schedules count, of the rows that all ranks have trained on and the steps made
    merge         `merge(name, value, **labels)`: takes numbers for the log
    """

    def __init__(
        self,
        name: str,
        learner: Any,
        remote_model: Any,
        buffers: Mapping[str, Any],
        settings: Settings | None = None,
        *,
        eval_buffer: Any = None,
        run_path: Path | None = None,
        ranks: Ranks | None = None,
        env_steps: Callable[[int, int], int] = lambda rows, steps: rows,
        merge: Callable[..., None] = lambda *a, **k: None,
    ):
        self.name, self.learner, self.remote_model, self.buffers = name, learner, remote_model, buffers
        self.settings = s = settings or Settings()
        self.ranks = ranks or Ranks()
        self.model: torch.nn.Module = learner.model
        self._env_steps, self._merge, self._run_path = env_steps, merge, run_path
        self._by_loss = isinstance(learner, LossLearner)
        if s.accumulate > 1 and not self._by_loss:
            raise ConfigError(f"accumulate={s.accumulate} needs a bray.Trainer; a Learner makes its own minibatches")
        if eval_buffer is not None and not hasattr(getattr(learner, "trainer", None), "eval"):
            raise ConfigError("eval needs a bray.Trainer with a method `eval`")
        self._together = None if self._by_loss else Together(learner, self.ranks)
        prepare = learner.prepare if self._by_loss else None
        self.feed = Feed(
            buffers,
            s.buffer_weights,
            s.batch_size,
            s.batch_kind,
            prepare,
            s.prefetch_size,
            s.max_reuse,
            self.ranks.rank,
        )
        self._eval_feed = None
        if eval_buffer is not None and self.ranks.first:
            self._eval_feed = Feed({"eval": eval_buffer}, None, s.batch_size, s.batch_kind, prepare, 0)
        self.first = 0
        """The model's step when this training began."""
        self.rows = 0
        """Samples that all ranks have trained on."""
        self.resumed: int | None = None
        """The step of the checkpoint that this process went on from."""
        self.update: Update | None = None
        self.batches: list[Batch] = []
        """What the last step was made of."""
        self._stop = threading.Event()
        self._ended = self._save_now = False
        self._published = self._saved = self._evaluated = 0
        self._saved_at = self._reported_at = time.monotonic()
        self._reported = 0
        self._publishing: Promise | None = None
        self._publish_step = 0
        self._run_dir: RunDir | None = None
        self._since = time.monotonic()
        ours = [
            Hook("before_run", Drive._resume, 10),
            Hook("after_step", Drive._give_priorities, 10),
            Hook("after_step", Drive._log, 20),
            Hook("after_step", Drive._publish, 30),
            Hook("after_step", Drive._evaluate, 40),
            Hook("after_step", Drive._save, 50),
            Hook("after_run", Drive._publish_last, 10),
            Hook("after_run", Drive._save_last, 20),
        ]
        every = sorted([*ours, *s.hooks], key=lambda h: h.priority)
        self._hooks = {p: [h.call for h in every if h.position == p] for p in POSITIONS}

    @property
    def steps(self) -> int:
        """Gradient steps; with those of the model before: the version of its weights."""
        return int(self.learner.steps)

    def stop(self) -> None:
        """End after this step; may be called from any thread, on any rank."""
        self._stop.set()

    def run(self) -> dict[str, Any]:
        """Train; the summary."""
        try:
            self._call("before_run")
            self.model.train()
            self._since, begun = time.monotonic(), self.steps
            last = None if self.settings.num_steps is None else self.first + self.settings.num_steps
            while (last is None or self.steps < last) and self._next():
                self._call("before_step")
                self._step()
                self._call("after_step")
            self._call("after_run")
        finally:
            self.feed.close()
            if self._eval_feed is not None:
                self._eval_feed.close()
            if self._run_dir is not None:
                self._run_dir.close()
        seconds = time.monotonic() - self._since
        return {
            "name": self.name,
            "steps": self.steps - self.first,
            "model_step": self.steps,
            "samples": self.rows,
            "ranks": self.ranks.size,
            "stopped": self._stop.is_set(),
            "out_of_data": self._ended,
            "resumed_from": self.resumed,
            "seconds": round(seconds, 3),
            "steps_per_second": round((self.steps - begun) / max(seconds, 1e-9), 3),
            "metrics": {} if self.update is None else self.update.metrics,
        }

    def _call(self, position: str) -> None:
        for call in self._hooks[position]:
            call(self)

    # --- a step -------------------------------------------------------------------------------------------------------

    def _next(self) -> bool:
        """Wait until every rank has its batches; False when one wants to end or has no more data."""
        batches: list[Batch] = []
        began, say = time.monotonic(), _SAY_AFTER
        while True:
            error = None
            try:
                while len(batches) < self.settings.accumulate and not self._stop.is_set():
                    batch = self.feed.get(_WAIT)
                    if batch is None:
                        break
                    batches.append(batch)
            except EndOfData as e:
                error = e
            has_all = len(batches) == self.settings.accumulate
            due = (
                self.ranks.first
                and self.settings.checkpoint_interval is None
                and time.monotonic() > self._saved_at + SAVE_EVERY
            )
            rows = sum(b.rows for b in batches)
            ready, ends, stops, saves, all_rows = self.ranks.total(
                has_all, error is not None, self._stop.is_set(), due, rows
            )
            if stops or ends:
                if stops:
                    self._stop.set()
                else:
                    self._ended = True
                    logger.info("trainer %s ends: %s", self.name, error or "another rank has no more data")
                return False
            if ready == self.ranks.size:
                self.batches, self._save_now = batches, saves > 0
                self.rows += int(all_rows)
                waited = time.monotonic() - began
                self._merge("perf/wait_ms", 1000.0 * waited, trainer=self.name)
                return True
            waited = time.monotonic() - began
            if waited > say and not has_all:
                say *= 2
                logger.warning(
                    "trainer %s, rank %d of %d: no batch from %s for %.0f s. Is anything pushed there?",
                    self.name, self.ranks.rank, self.ranks.size, ", ".join(self.buffers), waited,
                )  # fmt: skip

    def _step(self) -> None:
        began = time.monotonic()
        if self._together is None:
            self.update = self.learner.update([b.data for b in self.batches])
        else:
            self.update = self._together.update(self.batches[0].data, self._env_steps(self.rows, self.steps))
        self._merge("perf/step_ms", 1000.0 * (time.monotonic() - began), trainer=self.name)

    # --- after each step ----------------------------------------------------------------------------------------------

    def _give_priorities(self) -> None:
        assert self.update is not None
        for batch in self.batches:
            if batch.ids is not None and self.update.priorities is not None:
                self.buffers[batch.buffer].update_priorities(batch.ids, self.update.priorities)

    def _log(self) -> None:
        assert self.update is not None
        metrics = self.update.metrics
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
        """Publish what the model is now. While the last ones are still under way newer ones wait, so that slow workers get the newest."""
        if not self.ranks.first:
            self._published = self.steps
            return
        if self._publishing is not None and not (wait or self._publishing.done()):
            return
        self._settle()
        self._published = self._publish_step = self.steps
        try:
            self._publishing = self.remote_model.publish_weights(weights_of(self.model), step=self.steps)
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
                batch = self._eval_feed.get(_SAY_AFTER)
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
        if self._save_now or (interval is not None and self.steps - self._saved >= interval):
            self._checkpoint()

    def _save_last(self) -> None:
        if self.steps > self._saved:
            self._checkpoint()

    def _checkpoint(self) -> None:
        self._save_now = False
        if self._run_path is None:
            return
        states = self.ranks.gather(pack_state({"process": random_state(), "learner": self._rng_state()}))
        self._saved, self._saved_at = self.steps, time.monotonic()
        if not self.ranks.first:
            return
        assert self._run_dir is not None
        state = {"learner": self.learner.state_dict(), "first": self.first, "rows": self.rows, "ranks": states}
        meta = {"trainer": self.name, "ranks": self.ranks.size, "samples": self.rows}
        self._run_dir.save_checkpoint(
            self.steps, weights_of(self.model), state, meta, name=self.remote_model.name, keep=_KEEP
        )

    def _rng_state(self) -> Any:
        rng = getattr(self.learner, "rng", None)
        return None if rng is None else rng.bit_generator.state

    def _resume(self) -> None:
        """Go on from the newest checkpoint, else from the model's weights; equal on all ranks."""
        start: dict[str, Any] = {}
        if self.ranks.first:
            weights, step = self.remote_model.get_weights()
            start = {"weights": dict(weights), "model_step": int(step), "saved": None}
            if self._run_path is not None:
                self._run_dir = open_run(self._run_path)
                if self._run_dir.pointer("latest") is not None:
                    saved = self._run_dir.load_checkpoint()
                    start.update(weights=saved.weights, saved=saved.state, step=saved.step)
            if (
                start["saved"] is None
            ):  # parts of a Learner that no model holds (critics) are as the first rank drew them
                start["drawn"] = self.learner.state_dict()
        start = unpack_state(self.ranks.spread(pack_state(start) if self.ranks.first else b""))
        load_weights(self.model, start["weights"])  # in place: the optimizer may hold views of them
        mine = self._rng_state()  # each rank draws its own numbers
        if start["saved"] is None:
            self.learner.load_state_dict(start["drawn"])
            self.first = self.learner.steps = start["model_step"]
        else:
            saved = start["saved"]
            self.learner.load_state_dict(saved["learner"])
            self.first, self.rows, self.resumed = int(saved["first"]), int(saved["rows"]), int(start["step"])
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
        if self.steps > self._published:
            self._send_weights(wait=True)


def open_run(path: Path) -> RunDir:
    end = time.monotonic() + _LOCK_PATIENCE
    while True:
        try:
            return RunDir.create(path, resume=(path / "checkpoints").exists())
        except CheckpointError:
            if time.monotonic() > end:
                raise
            time.sleep(0.2)


def weights_of(model: torch.nn.Module) -> dict[str, np.ndarray]:
    """A module's weights as arrays, which change as it is trained on: whoever gets them copies them."""
    return {k: v.detach().cpu().numpy() for k, v in model.state_dict().items()}


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
