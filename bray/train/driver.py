"""The driver: gather pieces, add them to the experience, learn from every batch that is due. One for every way to
train.

    before_run    resume
    gather -> add -> for every due batch: before_step -> update, feedback -> after_step (log, publish, save)
    after_run     publish, save

In one process it is asked for iterations (`bray train`); with live games it waits for pieces; a rank of a launched
trainer runs it to the end.
Counters, result rows and the state of a training exist here once.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor, nn

from bray import tree
from bray.act import Clock
from bray.algos import broken
from bray.data.experience import Batch, Counts, EndOfData, Experience
from bray.data.piece import Piece
from bray.diagnosis.divergence import not_finite
from bray.errors import UnknownName
from bray.inference.torch_engine import load_weights
from bray.metrics import EpisodeStats
from bray.metrics.spent import PHASES, Cores
from bray.rundir import RunDir
from bray.train.device import tiny_as_zero
from bray.train.ranks import DistributedLearner, Ranks
from bray.train.source import Source
from bray.train.units import SAMPLE, SAMPLE_BYTES, dead_share

logger = logging.getLogger("bray")

POSITIONS = ("before_run", "before_step", "after_step", "after_run")
SAY_AFTER = 30.0
"""Seconds without a batch after which the log says why."""
WAIT_S = 0.5  # seconds: a source that has nothing is asked again, and whoever wants to stop is heard


@dataclass(frozen=True)
class Hook:
    """Something that is done at a point of the loop: `call(driver)`. Lower priorities come first; ours are 10, 20,
    ..."""

    position: str
    call: Callable[[Any], None]
    priority: float = 100.0

    def __post_init__(self) -> None:
        if self.position not in POSITIONS:
            raise UnknownName("position", self.position, POSITIONS, "of a Hook")


@dataclass
class Side:
    """One policy of a run: what acts, what it learns from, what learns. Without a learner it is frozen."""

    model: nn.Module
    policy: Any
    experience: Experience
    learner: Any
    name: str = "default"
    config: Any = None
    """Of the algorithm."""
    iterate: Callable[[Any], dict[str, float]] | None = None
    """An iteration of the algorithm's own: `iterate(driver)` gathers and learns with the driver's methods and returns
    numbers for the row (`loss/*`)."""


@dataclass
class Totals:
    """Counters of a run, from what happened in the games."""

    env_steps: int = 0
    episodes: EpisodeStats = field(default_factory=EpisodeStats)
    dropped: int = 0

    def add(self, counts: Counts) -> None:
        env_steps, episodes, dropped = counts
        self.env_steps += env_steps
        self.dropped += dropped
        if len(episodes):
            newest = episodes[-self.episodes.window :]  # an environment on a GPU ends ten thousands of them at a time
            self.episodes.add_returns((return_ for return_, _ in newest), len(episodes))
            self.episodes.add_lengths(length for _, length in newest)


class Driver:
    """Trains sides from sources. `iterate` is one iteration and returns a row of numbers; `run` goes on until it is
    stopped or the data ends."""

    def __init__(
        self,
        sides: Sequence[Side],
        sources: Sequence[Source],
        hooks: Sequence[Hook] = (),
        ranks: Ranks | None = None,
    ):
        self.sides = {side.name: side for side in sides}
        self.side = next(iter(self.sides.values()))
        """The first one: `default` where there is one policy."""
        self.sources = list(sources)
        self._running = list(sources)  # those that have not ended
        self.ranks = ranks or Ranks()
        self.distributed = {
            side.name: DistributedLearner(side.learner, self.ranks) for side in sides if self.ranks.size > 1
        }
        self.totals = Totals()
        self.iteration = 0
        self._midway = False  # in the middle of an iteration, or one was cut short
        self.update: Any = None
        """Of the last step; None where it was undone."""
        self.batch: Batch | None = None
        self._hooks = {
            p: [h.call for h in sorted(hooks, key=lambda h: h.priority) if h.position == p] for p in POSITIONS
        }
        self._saved_experience: dict[int, Any] = {}  # by the step of the checkpoint
        self._stop = threading.Event()
        self._learn_seconds = 0.0
        self._last_batch = time.monotonic()
        self._say_after = SAY_AFTER
        self.why_waiting = ""
        """Why no batch has come for a while; empty while they do."""

    # --- the parts of the common case, one side -----------------------------------------------------------------------

    @property
    def learner(self) -> Any:
        return self.side.learner

    @property
    def policy(self) -> Any:
        return self.side.policy

    @property
    def model(self) -> nn.Module:
        return self.side.model

    @property
    def experience(self) -> Experience:
        return self.side.experience

    @property
    def env_steps(self) -> int:
        """Of all games; on several ranks, what they agreed on before this step."""
        return self.totals.env_steps if self._agreed is None else self._agreed

    _agreed: int | None = None

    @property
    def clock(self) -> Clock:
        env_steps = self.totals.env_steps if self._agreed is None else self._agreed
        return Clock(env_steps, self.side.learner.steps)  # spelt out: asked for every row

    @property
    def steps(self) -> int:
        """Gradient steps: the version of the weights."""
        return int(self.learner.steps)

    # --- the loop -----------------------------------------------------------------------------------------------------

    def stop(self) -> None:
        """End after this step; may be called from any thread."""
        self._stop.set()

    def start(self) -> None:
        """Forget an earlier `stop`."""
        self._stop.clear()
        self._last_batch = time.monotonic()

    @property
    def stopped(self) -> bool:
        return self._stop.is_set()

    def call(self, position: str) -> None:
        for hook in self._hooks[position]:
            hook(self)

    def gather(self, timeout: float = 0.0) -> bool:
        """Take what the sources have; whether pieces came."""
        came = False
        for source in self._running:
            try:
                pieces, counts = source.gather(timeout)
            except EndOfData:
                self._running.remove(source)
                source.close()
                if not self._running:
                    for side in self.sides.values():
                        side.experience.complete()
                return True
            self.totals.add(counts)
            for piece in pieces:
                self.sides[piece.side].experience.add(piece)
            came = came or bool(pieces)
        return came

    def learn(self, total: Means | None = None, one: bool = False) -> int:
        """Every batch that is due, or with `one` a single one; how many there were."""
        count = 0
        for side in self.sides.values():
            if side.learner is None:
                continue
            start = time.perf_counter()
            while (batch := side.experience.next(self.clock)) is not None:
                self._learn_from(side, batch)
                if total is not None and self.update is not None:
                    total.add(self.update)
                count += 1
                if one:
                    break
            if count:
                self._learn_seconds += time.perf_counter() - start
        return count

    def _learn_from(self, side: Side, batch: Batch) -> None:
        learner = side.learner
        self.batch = batch
        if self._hooks["before_step"]:
            self.call("before_step")
        if isinstance(batch.data, Piece):
            for source in self._running:
                source.learns(batch.data, learner.steps)
        learn = self.distributed[side.name].update if self.distributed else learner.update
        with tiny_as_zero():
            update = self.update = learn(learner.prepare(batch.data), self.clock)
        if not hasattr(update, "priorities"):
            raise broken(type(learner).__qualname__, f"its update returned {type(update).__name__}, not an Update")
        if not self.keeps(update):
            self.update = None
            return
        side.experience.feedback(batch, update.priorities, learner.steps)
        clock = Clock(self.env_steps, learner.steps)
        for source in self._running:
            source.publish(self._weights_now, clock)
        if self._hooks["after_step"]:
            self.call("after_step")

    def keeps(self, update: Any) -> bool:
        """Whether what the learner has become with this update stays; else it is as it was before, and nobody is told
        of it."""
        return True

    retries: tuple[float, ...] = ()
    """Seconds before each further try, from the last checkpoint, after an error while learning; none: the error ends
    the run."""
    failure: Exception | None = None
    """Why nothing is learnt any more, though games go on."""
    trouble = ""
    """What keeps it from learning, in words, while it does."""

    def wait(self, seconds: float) -> None:
        """Until then, or until it is stopped."""
        self._stop.wait(seconds)

    def go_back(self, state: dict[str, Any], weights: Mapping[str, np.ndarray], replay_dir: Path) -> None:
        """Learn on from the state of a checkpoint, while counters and games go on as they are."""
        raise NotImplementedError

    def next_batch(self) -> Batch | None:
        """Wait until every rank has a batch; None when one wants to end or has no more data. The ranks tell each other
        before each step, so that one whose buffer is slow is waited for, and all end together."""
        batch: Batch | None = None
        while True:
            end: EndOfData | None = None
            if batch is None and not self.stopped:
                try:
                    batch = self._look_for_batch(WAIT_S)
                except EndOfData as e:
                    end = e
            rows = 0 if batch is None else batch.rows
            said = (batch is not None, end is not None, self.stopped, self.wants_to_save(), rows)
            ready, ends, stops, saves, all_rows = self.ranks.all_reduce_sum(*said)
            if stops:
                self.stop()
                return None
            if ends:
                self.ended = True
                logger.info("%straining ends: %s", self.label, end or "another rank has no more data")
                return None
            self._watch(batch is not None)
            if ready == self.ranks.size:
                self.save_now, self.rows = saves > 0, self.rows + int(all_rows)
                if self.ranks.size > 1:  # schedules are to be the same on all of them
                    self._agreed = int(self.ranks.all_reduce_max(self.totals.env_steps))
                return batch

    rows = 0
    """Rows that all ranks have learnt from in `run`."""
    save_now = False
    """Whether a rank asked for a checkpoint after this step."""

    def wants_to_save(self) -> bool:
        """Whether it is time for a checkpoint; asked before each step of `run`."""
        return False

    def _look_for_batch(self, timeout: float) -> Batch | None:
        batch = self.experience.next(self.clock, 0.0 if self._running else timeout)
        if batch is None and self._running:
            self.gather(timeout)
            batch = self.experience.next(self.clock)
        return batch

    def iterate(self, most_episodes: int | None = None) -> dict[str, Any] | None:
        """One iteration: to the next multiple of the experience's `iteration_steps`, or to the goal of the run where
        that comes first, and on to the end of a batch where it learns from each row once.
        Returns its row of numbers, or None if the data ended or a stop was requested before anything was gathered. It
        ends early when `most_episodes` have been finished since training began."""
        if self.ended:
            return None
        self._midway = True
        start, steps, cores = time.perf_counter(), self.totals.env_steps, Cores()
        self._learn_seconds = 0.0
        means = Means()
        every = self.experience.iteration_steps
        until = (steps // every + 1) * every if every else steps
        until = until if self.goal is None else min(until, self.goal)
        left = None if most_episodes is None else max(0, most_episodes - self.totals.episodes.total)
        for source in self._running:
            source.limit_episodes(left)
        own: dict[str, float] = {}
        try:
            if self.side.iterate is not None:
                own = self.side.iterate(self)
            else:
                self._learn_until(until, means, most_episodes)
        except EndOfData as e:
            logger.info("%straining ends: %s", self.label, e)
            self.ended = True
        self._midway = False
        nothing = self.ended or self.finished or (self.stopped and self.totals.env_steps == steps)
        if not means.count and not own and nothing:
            return None
        self.iteration += 1
        row = self._row(means.row() | own, steps, time.perf_counter() - start)
        return row | {f"perf/{k}": 1e3 * v for k, v in cores.take().items()}

    def _learn_until(self, until: int, means: Means, most_episodes: int | None) -> None:
        """The gathering and learning of an iteration, up to so many environment steps."""
        if self.experience.ends_with_batch:
            self._iterate_to_batch(means, until, most_episodes)
        else:
            self._iterate_to_step(means, max(until, self.totals.env_steps + 1), most_episodes)

    def _iterate_to_batch(self, means: Means, until: int, most_episodes: int | None) -> None:
        """Until there have been so many environment steps, and what they make due is learnt from."""
        totals = self.totals
        while not (learnt := self.learn(means, one=True)) or totals.env_steps < until:
            exact, full = self._exact, most_episodes is not None and totals.episodes.total >= most_episodes
            if learnt:  # of what came before, or just now
                self._watch(True)
                if full or (self.stopped and not exact):
                    return
                continue
            if self.stopped and not exact:
                return
            came = self.gather(0.0 if exact else WAIT_S)
            if not came and (exact or full):
                return  # the last episode to be counted has ended
            if not exact:
                self._watch(False)
        self._watch(True)

    def _iterate_to_step(self, means: Means, until: int, most_episodes: int | None) -> None:
        """Until there have been so many environment steps, learning whenever a batch is due."""
        totals, exact = self.totals, self._exact
        while totals.env_steps < until and (exact or not self.stopped):
            self.gather(0.0 if exact else WAIT_S)
            learnt = self.learn(means)
            if not exact:
                self._watch(learnt > 0)
            if most_episodes is not None and totals.episodes.total >= most_episodes:
                return

    goal: int | None = None
    """Environment steps after which the run ends."""
    ended = False
    """Whether the data has ended."""
    finished = False
    """Whether all that was asked for is learnt, though more data may come."""

    @property
    def _exact(self) -> bool:
        return bool(self._running) and all(source.exact for source in self._running)

    def _watch(self, learnt: bool) -> None:
        """Say why nothing is learnt, when that lasts."""
        now = time.monotonic()
        if learnt:
            self._last_batch, self._say_after, self.why_waiting = now, SAY_AFTER, ""
        elif now - self._last_batch > self._say_after:
            self._say_after *= 2
            self.why_waiting = self.reason_to_wait()
            logger.warning("%sno batch for %.0f s: %s", self.label, now - self._last_batch, self.why_waiting)

    def reason_to_wait(self) -> str:
        """Why there has been no batch for `SAY_AFTER` seconds, as it is now; empty where there has been one. May be
        asked in any thread."""
        if time.monotonic() - self._last_batch <= SAY_AFTER:
            return ""
        why = [w for w in (source.wait_reason() for source in list(self._running)) if w]
        return "; ".join([*why, self.experience.wait_reason()])

    label = ""
    """Whose words they are, in the log."""

    def _with_numbers(self, losses: dict[str, float]) -> dict[str, float]:
        """The metrics of updates, and what the learner tells beside them; a `bray.Trainer` has nothing."""
        if (terms := getattr(self.learner, "terms", None)) is not None:
            terms.require_free(losses)
        return losses | getattr(self.learner, "numbers", dict)()

    def _row(self, losses: dict[str, float], steps: int, seconds: float) -> dict[str, Any]:
        perf = dict.fromkeys(PHASES, 0.0)
        for source in self.sources:
            perf |= {k: perf.get(k, 0.0) + v for k, v in source.seconds().items()}
        perf["learn"] = self._learn_seconds
        perf["other"] = max(0.0, seconds - sum(perf[phase] for phase in PHASES))
        return {
            "training_iteration": self.iteration,
            "env_steps_total": self.totals.env_steps,
            "learner_steps_total": self.learner.steps,
            **self.totals.episodes.row(),
            **{loss_key(k): v for k, v in self._with_numbers(losses).items()},
            **{f"replay/{k}": v for k, v in self.experience.numbers().items()},
            **{f"policy/{k}": v for k, v in (self.policy.numbers(self.clock) if self.policy else {}).items()},
            **{f"perf/{k}": 1e3 * v for k, v in perf.items()},
            **{k: v for source in self.sources for k, v in source.numbers().items()},
            "env_steps_per_second": (self.totals.env_steps - steps) / seconds,
            "time_this_iter_s": seconds,
        }

    # --- state --------------------------------------------------------------------------------------------------------

    @property
    def position(self) -> int:
        """What a checkpoint is of; it only grows."""
        return self.iteration

    saves_by_step = False
    """Whether it asks for checkpoints after steps itself; else they are due after iterations."""

    def saves_after(self, error: BaseException) -> bool:
        """Whether what was learnt can be saved after this error."""
        return True

    def meta(self) -> dict[str, Any]:
        """More of `meta.json`."""
        return {}

    def get_state(self, replay_dir: Path | None = None) -> dict[str, Any]:
        """{"arrays": tree, "json": plain data}; the Model's weights are apart (`weights`). Large experience goes to
        files in `replay_dir`."""
        learner = self.learner.state_dict()
        experience = self.experience.get_state(replay_dir)
        sources = [source.get_state(self._midway) for source in self.sources]
        arrays: dict[str, Any] = {
            "sources": {str(i): state["arrays"] for i, state in enumerate(sources)},
            "learner": learner["parts"],
            "experience": experience["arrays"],
            "episodes": self.totals.episodes.get_state(),
        }
        json: dict[str, Any] = {
            "sources": [state["json"] for state in sources],
            "learner": {k: v for k, v in learner.items() if k != "parts"},
            "experience": experience["json"],
            "exact": not self._midway
            and experience.get("exact", True)
            and all(state["json"].get("exact", True) for state in sources),
            "midway": self._midway,
            "iteration": self.iteration,
            "env_steps": self.totals.env_steps,
            "dropped": self.totals.dropped,
        }
        return {"arrays": arrays, "json": json}

    def set_state(
        self, state: dict[str, Any], weights: Mapping[str, np.ndarray], replay_dir: Path | None = None
    ) -> bool:
        """Go on from a state; returns whether that is exact."""
        arrays, json = state["arrays"], state["json"]
        self.set_weights(weights)
        self.learner.load_state_dict({"parts": arrays["learner"], **json["learner"]})
        self.iteration = int(json["iteration"])
        self.totals = Totals(int(json["env_steps"]), dropped=int(json["dropped"]))
        self.totals.episodes.set_state(arrays["episodes"])
        exact = self.ranks.size == 1  # several fill theirs anew
        if exact:
            exact = self.experience.set_state({"arrays": arrays["experience"], "json": json["experience"]}, replay_dir)
        goes_on = True
        for i, source in enumerate(self.sources):
            saved = {"arrays": arrays["sources"][str(i)], "json": json["sources"][i]}
            goes_on = source.set_state(saved, self.clock) and goes_on
            if self.experience.newest_obs(1) is None:
                source.rewind()
        if not goes_on:
            self.experience.cut()
        return exact and goes_on and not json.get("midway", False)

    def prune_replay(self, directory: Path, step: int, state: dict[str, Any], run: RunDir) -> None:
        """Delete the files of the experience that no checkpoint of the run needs any more; `state` was just saved as
        that of `step`."""
        known = self._saved_experience
        known[step] = state["arrays"]["experience"]
        for other in run.steps():
            if other not in known:  # made before this process
                known[other] = run.load_state(other)["arrays"].get("experience")
        self._saved_experience = {s: known[s] for s in run.steps()}
        self.experience.prune(directory, self._saved_experience.values())

    def recent_observations(self, rows: int = 1024, most_bytes: int = 8 << 20) -> Any:
        """The newest raw observations, for checking and calibrating exported models; at most `most_bytes` of them."""
        obs = self.experience.newest_obs(rows)
        if obs is None or not tree.length(obs):
            return None
        rows = min(rows, tree.length(obs), max(1, most_bytes * tree.length(obs) // max(1, tree.nbytes(obs))))
        return tree.map(lambda x: np.ascontiguousarray(x[-rows:]), obs)

    def dead_units(self) -> float | None:
        """The share of units that are dead in the layer that has most of them, as the newest observations tell: None
        for a model without units that can die, NaN before there are observations."""
        obs = self.recent_observations(SAMPLE, SAMPLE_BYTES)
        return math.nan if obs is None else dead_share(self.model, obs)

    def _weights_now(self) -> dict[str, np.ndarray]:
        """As they are; they change as training goes on, so whoever keeps them copies them."""
        return {k: v.detach().cpu().numpy() for k, v in self.model.state_dict().items()}

    def weights(self) -> dict[str, np.ndarray]:
        return {k: v.detach().cpu().numpy().copy() for k, v in self.model.state_dict().items()}

    def set_weights(self, weights: Mapping[str, np.ndarray]) -> None:
        load_weights(self.model, weights)

    def start_with(self, weights: Mapping[str, np.ndarray]) -> None:
        """Weights from elsewhere at the start of a run: the Learner's copies of the Model begin with them too."""
        self.set_weights(weights)
        self.learner.start_with_model()

    def lost_weights(self, learner: Mapping[str, Any] | None = None) -> str:
        """Which weights are not finite, in words; empty where all are. `learner`: its saved parts, where they are there
        already."""
        constants = {name for name, _ in self.model.named_buffers()}
        lost = not_finite(self._weights_now(), constants)
        if not lost:
            parts = self.learner.state_dict()["parts"] if learner is None else learner
            inside = dict(tree.paths(parts))
            lost = not_finite(inside, inside.keys())  # a moment of Adam may overflow without harm
        return lost

    def close(self) -> None:
        for source in self._running:
            source.close()


def loss_key(name: str) -> str:
    """The key of a metric in a row. A user's loss may name a group itself."""
    return name if "/" in name else f"loss/{name}"


class Means:
    """Means of the numbers of several updates; read once, since reading a tensor waits for its device."""

    def __init__(self) -> None:
        self.count = 0
        self._names: tuple[str, ...] = ()
        self._total: Tensor | None = None

    def add(self, update: Any) -> None:
        if update.names != self._names:  # a user's loss may name others from now on
            self._names, self._total, self.count = update.names, None, 0
        self._total = update.values if self._total is None else self._total + update.values
        self.count += 1

    def row(self) -> dict[str, float]:
        if self._total is None:
            return {}
        return dict(zip(self._names, (self._total / self.count).tolist(), strict=True))
