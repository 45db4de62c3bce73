"""A rank of a launched training: the Driver and the Run of `bray train`, over a RemoteModel and buffers. The ranks
agree before each step who has a batch, who wants to end and whether a checkpoint is due. It runs without a cluster too.

before_run    resume
after_step    log, publish, evaluate, save
after_run     publish
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

from bray.act import Clock
from bray.act.feed import Latest, Weights
from bray.config import Resolved
from bray.config.check import check_fields
from bray.config.declare import Count
from bray.data.experience import Batch, EndOfData
from bray.diagnosis.symptoms import SECTIONS
from bray.diagnosis.watch import Watch
from bray.errors import CheckpointError, ConfigError, Unreachable
from bray.figures import read_results
from bray.inference.host import Promise
from bray.inference.torch_engine import load_weights
from bray.metrics import ENV_STEPS, ITERATION, Sinks
from bray.remote.model.definition import Definition
from bray.remote.trainer.base import LossLearner
from bray.remote.trainer.feed import Feed
from bray.remote.trainer.options import TrainOptions
from bray.rundir import TRAINER_JSON, Checkpoint, RunDir, pack_state, unpack_state
from bray.train.config import RunConfig
from bray.train.driver import Driver, Hook
from bray.train.goals import Score
from bray.train.progress import open_sinks
from bray.train.ranks import Ranks, is_rank_lost
from bray.train.run import Run
from bray.train.side import Means, Side, loss_key
from bray.train.source import Source

logger = logging.getLogger("bray.remote")

ROW_S = 5.0
"""Seconds of an iteration, at least: a row of a cluster asks all of its processes for their numbers."""
_EVAL_WAIT = 30.0
_REPORT_EVERY = 60.0
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
        check_fields(self, "train")


class RankDriver(Driver):
    """One rank's training.

    name          of the trainer; its checkpoints are in `run_path`
    side          its learner is a LossLearner, or an algorithm's Learner; its model is the torch module that is trained
    sources       of pieces; none where the side's experience reads buffers itself
    remote_model  `get_weights() -> (weights, step)`, `publish_weights(weights, step, env_steps) -> Promise`, `name`,
                  maybe its `definition`
    eval_feed     batches of the evaluation
    merge         `merge(name, value, **labels)`: takes numbers for the log
    reported      what agents and other processes have reported, for a row
    config        of the algorithm: what the words about its health may speak of
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
        reported: Callable[[], dict[str, Any]] = dict,
        feeds: Sequence[Feed] = (),
        config: Resolved | None = None,
    ):
        self.name, self.remote_model = name, remote_model
        self._definition: Definition = getattr(remote_model, "definition", None) or Definition(remote_model.name, id="")
        self.settings = s = settings or Settings()
        self._merge, self._reported_by_others = merge, reported
        self._run_path, self._about, self._feeds = run_path, about, feeds
        self._by_loss = isinstance(side.learner, LossLearner)
        if s.accumulate > 1 and not self._by_loss:
            raise ConfigError(f"accumulate={s.accumulate} needs a bray.Trainer; a Learner makes its own minibatches")
        self._eval_feed = eval_feed
        self.first = 0
        """The model's step when this training began."""
        self.resumed: int | None = None
        """The step of the checkpoint that this process went on from."""
        self._published = self._evaluated = self._reuses = 0
        self._reported_at = time.monotonic()
        self._reported = 0
        self._latest = Latest(self._send, name=f"trainer {name}")
        self._owns_dir = False
        self._alone = False  # the other ranks do not take part in what is saved
        self._since, self._begun = time.monotonic(), 0
        ours = [
            Hook("before_run", RankDriver._resume, 10),
            Hook("after_step", RankDriver._log, 20),
            Hook("after_step", RankDriver._publish, 30),
            Hook("after_step", RankDriver._evaluate, 40),
            Hook("after_step", lambda driver: driver.run.save_when_due(driver.save_now), 50),
            Hook("after_run", RankDriver._publish_last, 20),
        ]
        super().__init__([side], sources, [*ours, *s.hooks], ranks)
        self.label = f"trainer {name}, rank {self.ranks.rank} of {self.ranks.size}: "
        kept = RunConfig(
            algorithm="" if config is None else config["run"].algorithm,
            checkpoint_updates=s.checkpoint_interval or 0,
            checkpoint_every_s=0.0 if s.checkpoint_interval else self._definition.checkpoint_every_s,
            keep_checkpoints=self._definition.keep_checkpoints,
        )
        self.run = Run(
            self,
            kept,
            None if run_path is None else self._open_dir,
            Score(kept),
            Watch(None if config is None else config.options("run", *SECTIONS)),
            about={"env": None if config is None else config["env"].id},
            model=remote_model.name,
        )
        self.run.exact = False

    def train(self) -> dict[str, Any]:
        """Run to the end; the summary."""
        try:
            self.call("before_run")
            with self._open_sinks() as out:
                for _ in self.run.rows({}, out):
                    pass
            self.call("after_run")
        except Exception as e:
            if self._alone and self.run.all_saved:
                e.add_note(f"step {self.steps} is saved: the same command goes on from there")
            raise
        finally:
            for feed in (*self._feeds, *([self._eval_feed] if self._eval_feed else [])):
                feed.close()
            if self._owns_dir:
                self.run.close()
            else:
                self.close()
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

    def iterate(self, most_episodes: int | None = None) -> dict[str, Any] | None:
        row = super().iterate(most_episodes)
        if row is None or not self.ranks.first:
            return row
        others = self._reported_by_others()
        return {**row, **others} if self._by_loss else {**others, **{k: v for k, v in row.items() if v is not None}}

    def _learn_until(self, until: int, means: Mapping[str, Means], most_episodes: int | None) -> None:
        self._midway = False  # it saves after any step
        end = time.monotonic() + ROW_S
        while (batch := self.next_batch()) is not None:
            began = time.monotonic()
            self._learn_from(self.side, batch)
            means[self.side.name].add(self.update)
            self._learn_seconds += time.monotonic() - began
            if time.monotonic() >= end and self.totals.env_steps >= until:
                break

    def next_batch(self) -> Batch | None:
        most = self.settings.num_steps
        self.finished = most is not None and self.steps >= self.first + most
        if self.finished:
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
        return self.ranks.first and self.run.is_late()

    def _learn_from(self, side: Side, batch: Batch) -> None:
        began = time.monotonic()
        super()._learn_from(side, batch)
        self._merge("perf/step_ms", 1000.0 * (time.monotonic() - began), trainer=self.name)

    # --- after each step ----------------------------------------------------------------------------------------------

    def _log(self) -> None:
        assert self.update is not None
        metrics = {loss_key(k): v for k, v in self.side.with_numbers(self.update.metrics).items()}
        # before it is published
        self.run.health.check({ITERATION: self.steps, ENV_STEPS: self.env_steps, **metrics}, self.lost_weights)
        for name, value in metrics.items():  # on every rank: the log has their mean
            self._merge(name, value, trainer=self.name)
        now = time.monotonic()
        if self.ranks.first and now > self._reported_at + _REPORT_EVERY:
            rate = (self.steps - self._reported) / (now - self._reported_at)
            shown = ", ".join(f"{k.removeprefix('loss/')} {v:.4g}" for k, v in list(metrics.items())[:4])
            logger.info("trainer %s: step %d, %.1f steps/s, %s", self.name, self.steps, rate, shown)
            self._reported_at, self._reported = now, self.steps

    def _publish(self) -> None:
        if self.steps - self._published >= self.settings.weights_publish_interval:
            self._send_weights()

    def _publish_last(self) -> None:
        if self.steps > self._published:
            self._send_weights(wait=True)
        self._latest.settle()

    def _send_weights(self, wait: bool = False) -> None:
        """Publish what the model is now. While the last ones are still under way newer ones wait, so that slow workers
        get the newest."""
        if not self.ranks.first:
            self._published = self.steps
            return
        self._latest.publish(self.side.weights_now, self.clock)
        if wait:
            self._latest.flush()

    def _send(self, weights: Weights, clock: Clock) -> Promise:
        self._published = clock.version
        return self.remote_model.publish_weights(weights, step=clock.version, env_steps=clock.env_steps)

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

    saves_by_step = True

    @property
    def position(self) -> int:
        return self.steps  # the ranks agree on steps, not on rows

    def saves_after(self, error: BaseException) -> bool:
        """Where this rank can do so alone: after an error of the user's code. Ranks that lost another one start
        again."""
        lost = isinstance(error, (Unreachable, CheckpointError)) or is_rank_lost(error)
        self._alone = self.ranks.first and isinstance(error, Exception) and not lost
        return self._alone

    def meta(self) -> dict[str, Any]:
        return {"trainer": self.name, "ranks": self.ranks.size, "samples": self.rows}

    def get_state(self, replay_dir: Path | None = None) -> dict[str, Any]:
        """With the random numbers of all ranks; of this one, where the others do not take part."""
        mine = pack_state({"process": random_state(), "learner": self._rng_state()})
        ranks = [mine] if self._alone else self.ranks.gather(mine)
        state = super().get_state(replay_dir)
        state["json"] |= {"first": self.first, "rows": self.rows, "ranks": ranks, "definition": self._definition.id}
        return state

    def set_state(
        self, state: dict[str, Any], weights: Mapping[str, np.ndarray], replay_dir: Path | None = None
    ) -> bool:
        mine, saved = self._rng_state(), state["json"]  # each rank draws its own numbers
        super().set_state(state, weights, replay_dir)
        self.first, self.rows = int(saved["first"]), int(saved["rows"])
        if self.ranks.rank < len(saved["ranks"]):
            drawn = unpack_state(saved["ranks"][self.ranks.rank])
            set_random_state(drawn["process"])
            mine = drawn["learner"]
        self._set_rng_state(mine)
        return False  # games go on by themselves

    def _rng_state(self) -> Any:
        rng = getattr(self.learner, "rng", None)
        return None if rng is None else rng.bit_generator.state

    def _set_rng_state(self, state: Any) -> None:
        if state is not None:
            self.learner.rng.bit_generator.state = state

    def _open_dir(self) -> RunDir:
        assert self._run_path is not None
        self._owns_dir = not (self._run_path / TRAINER_JSON).exists()  # else the session has locked it
        directory = open_run(self._run_path) if self._owns_dir else RunDir(self._run_path)
        if self._about is not None:
            self._about(directory)
        return directory

    def _open_sinks(self) -> Sinks:
        if self._run_path is None or not self.ranks.first:
            return Sinks([])
        out = open_sinks(self.run.directory, board=False)  # the session's master has TensorBoard's
        if self.resumed is not None:
            if self.run.last_row is None:  # rows of before launched trainings counted them
                self.iteration = max((row[ITERATION] for row in read_results(self._run_path)), default=0)
            out.truncate_after(self.iteration, self.env_steps)
        return out

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
        chosen = self._definition.checkpoint  # once per definition: the same one means that this rank was restarted
        if chosen is None or saved.state["json"].get("definition") == self._definition.id:
            return saved
        if str(chosen).isdecimal() and int(chosen) in run.steps():
            return run.load_checkpoint(int(chosen))
        logger.warning(
            "trainer %s: model %s starts from checkpoint %s, of which there is no state of the trainer: optimizer and "
            "counters begin anew",
            self.name, self.remote_model.name, chosen,
        )  # fmt: skip
        return None

    def _resume(self) -> None:
        """Go on from the newest checkpoint, else from the model's weights; equal on all ranks."""
        start: dict[str, Any] = {}
        if self.ranks.first:
            weights, step = self.remote_model.get_weights()
            start = {"weights": dict(weights), "model_step": int(step), "saved": None}
            if self._run_path is not None and (saved := self._find_saved(self.run.directory)) is not None:
                start.update(weights=saved.weights, saved=saved.state, step=saved.step)
            if start["saved"] is None:
                # parts of a Learner that no model holds (critics) are as the first rank drew them
                start["drawn"] = self.learner.state_dict()
        start = unpack_state(self.ranks.broadcast(pack_state(start) if self.ranks.first else b""))
        if start["saved"] is None:
            mine = self._rng_state()
            load_weights(self.model, start["weights"])  # in place: the optimizer may hold views of them
            self.learner.load_state_dict(start["drawn"])
            self._set_rng_state(mine)
            self.first = self.learner.steps = start["model_step"]
        else:
            assert self._run_path is not None
            self.resumed = int(start["step"])
            self.run.resume(self._run_path, start["saved"], start["weights"])
            # Versions that were published after the checkpoint, before a crash, are not given twice.
            self.learner.steps = max(self.steps, start["model_step"])
            self.run.saved_at = self.steps
            if self.ranks.first:
                logger.info("trainer %s goes on from the checkpoint of step %d", self.name, self.resumed)
        self._evaluated = self._reported = self.steps
        self._published = start["model_step"]
        if self.steps > self._published or self.env_steps > 0:  # agents explore as far as training is
            self._send_weights(wait=True)
        if self._definition.checkpoint is not None:
            self.run.save()  # so that a rank that is restarted goes on from here
        self.model.train()
        self._since = self._last_batch = time.monotonic()
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
