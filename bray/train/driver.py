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
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn

from bray.act import Clock
from bray.algos import broken
from bray.data.experience import Batch, Counts, EndOfData, Experience
from bray.data.piece import DEFAULT, Piece
from bray.errors import ConfigError, UnknownName
from bray.inference.torch_engine import load_weights
from bray.metrics import EpisodeStats
from bray.metrics.rows import side_key
from bray.metrics.spent import PHASES, Cores
from bray.rundir import RunDir
from bray.train.device import tiny_as_zero
from bray.train.ranks import DistributedLearner, Ranks
from bray.train.side import Means, Side
from bray.train.source import Source

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
class Totals:
    """Counters of a run, from what happened in the games."""

    env_steps: int = 0
    episodes: EpisodeStats = field(default_factory=EpisodeStats)
    dropped: int = 0
    agent_steps: int = 0

    def add(self, counts: Counts) -> None:
        env_steps, episodes, dropped, agent_steps = counts
        self.env_steps += env_steps
        self.dropped += dropped
        self.agent_steps += agent_steps
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
        self._learning = [side for side in sides if side.learner is not None]
        for side in sides if len(sides) > 1 else ():
            if side.iterate is not None:
                raise ConfigError(f"{side.name}: an algorithm with an iteration of its own trains alone")
        self.ranks = ranks or Ranks(alone=True)
        self.distributed = {
            side.name: DistributedLearner(side.learner, self.ranks) for side in self._learning if self.ranks.size > 1
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
        self._saved_experience: dict[int, Any] = {}  # by the number of the checkpoint
        self._stop = False
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
        return self.clock_of(self.side)

    def clock_of(self, side: Side) -> Clock:
        """All sides play in the same games; each has a version of its own."""
        env_steps = self.totals.env_steps if self._agreed is None else self._agreed
        return Clock(env_steps, 0 if side.learner is None else side.learner.steps)  # spelt out: asked for every row

    @property
    def steps(self) -> int:
        """Gradient steps of all sides: where there is one, the version of its weights."""
        return sum(side.version for side in self.sides.values())

    @property
    def several(self) -> bool:
        """Whether what is saved is by side, and checkpoints are called by iterations."""
        return len(self.sides) > 1

    # --- the loop -----------------------------------------------------------------------------------------------------

    def stop(self) -> None:
        """End after this step; may be called from any thread, and from a signal's handler, which may interrupt this one
        anywhere: it takes no lock."""
        self._stop = True

    def start(self) -> None:
        """Forget an earlier `stop`."""
        self._stop = False
        self._last_batch = time.monotonic()

    @property
    def stopped(self) -> bool:
        return self._stop

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
                    for side in self._learning:
                        side.experience.complete()
                return True
            self.totals.add(counts)
            for piece in pieces:
                side = self.sides[piece.side]
                if side.learner is not None:
                    side.experience.add(piece)
            came = came or bool(pieces)
        return came

    def learn(self, total: Mapping[str, Means] | None = None, one: bool = False) -> int:
        """Every batch that is due, or with `one` a single one of each side; how many there were."""
        count = 0
        start = time.perf_counter()
        for side in self._learning:
            while (batch := side.experience.next(self.clock_of(side))) is not None:
                self._learn_from(side, batch)
                if total is not None and self.update is not None:
                    total[side.name].add(self.update)
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
            update = self.update = learn(learner.prepare(batch.data), self.clock_of(side))
        if not hasattr(update, "priorities"):
            raise broken(type(learner).__qualname__, f"its update returned {type(update).__name__}, not an Update")
        if not self.keeps(update):
            self.update = None
            return
        side.experience.feedback(batch, update.priorities, learner.steps)
        clock = self.clock_of(side)
        for source in self._running:
            source.publish(side.name, side.weights_now, clock)
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
        end = time.monotonic() + seconds
        while not self._stop and (left := end - time.monotonic()) > 0:
            time.sleep(min(left, WAIT_S))

    def go_back(self, state: dict[str, Any], weights: Mapping[str, Any], replay_dir: Path) -> None:
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
        means = {name: Means() for name in self.sides}
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
        if not any(mean.count for mean in means.values()) and not own and nothing:
            return None
        self.iteration += 1
        losses = {name: mean.row() for name, mean in means.items()}
        losses[self.side.name] |= own
        row = self._row(losses, steps, time.perf_counter() - start)
        return row | {f"perf/{k}": 1e3 * v for k, v in cores.take().items()}

    def _learn_until(self, until: int, means: Mapping[str, Means], most_episodes: int | None) -> None:
        """The gathering and learning of an iteration, up to so many environment steps."""
        if self.experience.ends_with_batch and [self.side] == self._learning == list(self.sides.values()):
            self._iterate_to_batch(means, until, most_episodes)
        else:
            self._iterate_to_step(means, max(until, self.totals.env_steps + 1), most_episodes)

    def _iterate_to_batch(self, means: Mapping[str, Means], until: int, most_episodes: int | None) -> None:
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

    def _iterate_to_step(self, means: Mapping[str, Means], until: int, most_episodes: int | None) -> None:
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
        return "; ".join([*why, *(side.experience.wait_reason() for side in self._learning)])

    label = ""
    """Whose words they are, in the log."""

    def _row(self, losses: Mapping[str, dict[str, float]], steps: int, seconds: float) -> dict[str, Any]:
        perf = dict.fromkeys(PHASES, 0.0)
        for source in self.sources:
            perf |= {k: perf.get(k, 0.0) + v for k, v in source.seconds().items()}
        perf["learn"] = self._learn_seconds
        perf["other"] = max(0.0, seconds - sum(perf[phase] for phase in PHASES))
        sides = list(self.sides.values())
        return {
            "training_iteration": self.iteration,
            "env_steps_total": self.totals.env_steps,
            **({"agent_steps_total": self.totals.agent_steps} if self.totals.agent_steps else {}),
            "learner_steps_total": self.steps,
            **self.totals.episodes.row(),
            **{k: v for side in sides for k, v in side.row(losses[side.name], self.clock_of(side)).items()},
            **{side_key(s.name, "learner_steps_total"): s.version for s in sides if s.name != DEFAULT},
            **{f"perf/{k}": 1e3 * v for k, v in perf.items()},
            **{k: v for source in self.sources for k, v in source.numbers().items()},
            "env_steps_per_second": (self.totals.env_steps - steps) / seconds,
            "time_this_iter_s": seconds,
        }

    # --- state --------------------------------------------------------------------------------------------------------

    @property
    def number(self) -> int:
        """What a checkpoint of now is called."""
        return self.iteration if self.several else self.steps

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
        """{"arrays": tree, "json": plain data}; the Models' weights are apart (`weights`). Large experience goes to
        files in `replay_dir`."""
        sides = {name: side.get_state(self._place(replay_dir, name)) for name, side in self.sides.items()}
        sources = [source.get_state(self._midway) for source in self.sources]
        arrays: dict[str, Any] = {
            "sources": {str(i): state["arrays"] for i, state in enumerate(sources)},
            "episodes": self.totals.episodes.get_state(),
        }
        json: dict[str, Any] = {
            "sources": [state["json"] for state in sources],
            "exact": not self._midway
            and all(state["exact"] for state in sides.values())
            and all(state["json"].get("exact", True) for state in sources),
            "midway": self._midway,
            "iteration": self.iteration,
            "env_steps": self.totals.env_steps,
            "dropped": self.totals.dropped,
            **({"agent_steps": self.totals.agent_steps} if self.totals.agent_steps else {}),
        }
        for kind, out in (("arrays", arrays), ("json", json)):
            out |= {"sides": {k: v[kind] for k, v in sides.items()}} if self.several else sides[self.side.name][kind]
        return {"arrays": arrays, "json": json}

    def set_state(self, state: dict[str, Any], weights: Mapping[str, Any], replay_dir: Path | None = None) -> bool:
        """Go on from a state; returns whether that is exact. `weights`: as `weights` gave them."""
        arrays, json = state["arrays"], state["json"]
        self.set_weights(weights)
        parts, about = self._of_sides(arrays), self._of_sides(json)
        for name, side in self.sides.items():
            side.load_learner(parts[name], about[name])
        self.iteration = int(json["iteration"])
        self.totals = Totals(int(json["env_steps"]), dropped=int(json["dropped"]))
        self.totals.agent_steps = int(json.get("agent_steps", 0))
        self.totals.episodes.set_state(arrays["episodes"])
        exact = self.ranks.size == 1  # several fill theirs anew
        for name, side in self.sides.items() if exact else ():
            place = self._place(replay_dir, name)
            exact = side.load_experience(parts[name], about[name], place) and exact
        goes_on, empty = True, all(side.experience.newest_obs(1) is None for side in self._learning)
        for i, source in enumerate(self.sources):
            saved = {"arrays": arrays["sources"][str(i)], "json": json["sources"][i]}
            goes_on = source.set_state(saved, self.clock) and goes_on
            if empty:
                source.rewind()
        if not goes_on:
            for side in self._learning:
                side.experience.cut()
        return exact and goes_on and not json.get("midway", False)

    def _of_sides(self, state: Mapping[str, Any]) -> Mapping[str, Any]:
        """The parts of a state by side. Where there is one, they stand beside the rest."""
        return state["sides"] if self.several else {self.side.name: state}

    def _place(self, directory: Path | None, side: str) -> Path | None:
        """Where the experience of a side is saved."""
        return directory / side if self.several and directory is not None else directory

    def prune_replay(
        self, directory: Path, number: int, arrays: Mapping[str, Any], kept: Sequence[int], load: Callable[[int], Any]
    ) -> None:
        """Delete the files of the experience that none of the checkpoints `kept` needs any more; `arrays`, of the
        state, were just saved as those of `number`. `load` reads those of another one."""
        known = self._saved_experience
        known[number] = arrays
        for other in kept:
            if other not in known:  # made before this process
                known[other] = load(other)
        self._saved_experience = {s: known[s] for s in kept}
        for name, side in self.sides.items():
            place = self._place(directory, name)
            assert place is not None
            side.experience.prune(
                place, [self._of_sides(state)[name].get("experience") for state in self._saved_experience.values()]
            )

    @property
    def return_mean(self) -> float | None:
        """Of the newest episodes."""
        return self.totals.episodes.return_mean

    def recent_observations(self) -> dict[str, Any]:
        """The newest raw observations as `obs`, where there are any; by side where there are several."""
        found = {name: side.recent_observations() for name, side in self.sides.items()}
        named = {name: {} if obs is None else {"obs": obs} for name, obs in found.items()}
        return named if self.several else named[self.side.name]

    def dead_units(self) -> float | None:
        return self.side.dead_units()

    def weights(self) -> dict[str, Any]:
        """Copies; by side where there are several."""
        return {name: side.weights() for name, side in self.sides.items()} if self.several else self.side.weights()

    def set_weights(self, weights: Mapping[str, Any]) -> None:
        for name, side in self.sides.items():
            load_weights(side.model, weights[name] if self.several else weights)

    def start_with(self, weights: Mapping[str, np.ndarray]) -> None:
        self.side.start_with(weights)

    def show_weights(self) -> None:
        """Weights have come from elsewhere: sources that hold some already, before anything is learnt, get those of
        now."""

    def lost_weights(self, arrays: Mapping[str, Any] | None = None) -> str:
        """Which weights are not finite, in words; empty where all are. `arrays`: of the state, where it is there
        already."""
        parts = {} if arrays is None else {k: v["learner"] for k, v in self._of_sides(arrays).items()}
        found = [side.lost_weights(parts.get(name)) for name, side in self.sides.items()]
        return " and ".join(lost for lost in found if lost)

    def keep_in(self, directory: RunDir) -> None:
        """Where it writes what is not in checkpoints; told before it trains."""

    def close(self) -> None:
        for source in self._running:
            source.close()
