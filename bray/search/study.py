"""A study: which trials there are, how far each goes, and what Optuna is told of them.

A trial is the same settings with several seeds. It goes from one **rung** (a number of environment steps) to the next
with all its seeds; at each the interquartile mean of their scores is its value, by which the scheduler ends it or lets
it go on. Between two rungs its runs wait as checkpoints, so that few processes serve many trials.

Optuna's storage is the only record. A trial that a kill found at work is there as RUNNING, with its settings: its runs
are asked again, and answer at once where they were done.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import optuna
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend, JournalFileOpenLock
from optuna.trial import FrozenTrial, Trial, TrialState

from bray.config.declare import show
from bray.errors import BrayError, ConfigError, UnknownName
from bray.metrics.stats import iqm
from bray.search.population import copy_runs, exploits
from bray.search.runner import TrialEnd, TrialRun
from bray.search.space import Space

SCHEDULERS = ("asha", "median", "pbt")
SAMPLERS = ("tpe", "random")
JOURNAL = "study.journal"
_ETA = 3  # asha: of those that came to a rung, one in so many goes on
_TENTHS = [n / 10 for n in range(1, 10)]
_RUNGS = {"asha": [_ETA**-3, _ETA**-2, _ETA**-1], "median": _TENTHS, "pbt": _TENTHS}
_FAILED_AT_FIRST = 3
"""Trials: when the first ones all fail, more of them are no use."""


@dataclass(frozen=True)
class Plan:
    """How a space is searched."""

    name: str
    stop: dict[str, float]
    """When a run is over."""
    trials: int | None = None
    num_seeds: int = 1
    seed: int = 0
    """The first one of each trial; what is sampled goes by it too."""
    scheduler: str | None = None
    sampler: str = "tpe"

    def __post_init__(self) -> None:
        for given, known, what in ((self.scheduler, SCHEDULERS, "scheduler"), (self.sampler, SAMPLERS, "sampler")):
            if given is not None and given not in known:
                raise UnknownName(what, given, known)
        if self.num_seeds < 1 or (self.trials is not None and self.trials < 1):
            raise ConfigError(f"expected trials and num_seeds >= 1, got {self.trials} and {self.num_seeds}")
        if not self.stop:
            raise ConfigError("say how long a run is: --steps N (in Python: steps=N), in environment steps")
        if self.scheduler is not None and "env_steps_total" not in self.stop:
            raise ConfigError(
                f"{self.scheduler} compares trials at numbers of environment steps: say how many a run has, --steps N"
            )
        if self.scheduler == "pbt" and (self.trials or 2) < 2:
            raise ConfigError("pbt trains a population: expected --trials 2 or more")

    @property
    def seeds(self) -> list[int]:
        return list(range(self.seed, self.seed + self.num_seeds))

    @property
    def rungs(self) -> list[int]:
        """Numbers of environment steps; the last one is the end of the run."""
        end = int(self.stop.get("env_steps_total", 0))
        return [max(1, round(part * end)) for part in _RUNGS.get(self.scheduler or "", [])] + [end]


@dataclass(frozen=True)
class TrialScore:
    """What is known of a trial."""

    number: int
    values: dict[str, Any]
    state: str
    """complete, stopped (by the scheduler), failed, or at work."""
    score: float | None
    """Interquartile mean over its seeds; larger is better."""
    scores: list[float]
    steps: int
    error: str = ""
    parent: int | None = None
    """pbt: the trial that it began from."""


@dataclass
class _Member:
    """A trial at work."""

    trial: Trial
    values: dict[str, Any]
    rungs: list[int]
    """Those to come."""
    todo: list[int]
    """Seeds to go to the first of them."""
    outcomes: dict[int, TrialEnd] = field(default_factory=dict)
    """Of those that are there."""

    @property
    def value(self) -> float:
        return float(iqm([o.score for o in self.outcomes.values() if o.score is not None]))


class Study:
    """root    its directory
    job        the job of a run: (trial's directory name, values, seed, stop) -> TrialRun
    told       called with each trial that is over"""

    def __init__(
        self,
        root: Path,
        space: Space,
        plan: Plan,
        job: Callable[[str, dict[str, Any], int, dict[str, float]], TrialRun],
        storage: str | None = None,
        told: Callable[[TrialScore], None] = lambda finding: None,
    ):
        self.root, self.space, self.plan, self._job, self._told = root, space, plan, job, told
        grid, self.total = _planned(space, plan)
        self._optuna = _open(root, plan.name, storage)
        self._optuna.pruner = _pruner(plan)
        self._refuse_other_settings()
        for number in range(len(self._trials()), self.total if grid else 0):
            row = grid[number % len(grid)]
            self._optuna.enqueue_trial({d.name: d.plain(row[d.name]) for d in space.dimensions if d.name in row})
        self._members: dict[int, _Member] = {}
        for loser, parent, values in self._optuna.user_attrs.get("generation", {}).get("exploits", []):
            self._exploit(loser, parent, values)  # those that a kill left undone
        for frozen in self._trials(TrialState.RUNNING):
            self._enter(Trial(self._optuna, frozen._trial_id))

    # --- what there is ------------------------------------------------------------------------------------------------

    def findings(self) -> list[TrialScore]:
        """All trials that have begun, in their order."""
        return [self._finding(t) for t in self._trials() if t.state != TrialState.WAITING]

    def importances(self) -> dict[str, float]:
        """How much of what differs between good trials and all is due to each key; empty where that cannot be said."""
        if len(self._trials(TrialState.COMPLETE)) < 4 or len(self.space.dimensions) < 2:
            return {}
        try:
            return optuna.importance.get_param_importances(self._optuna)
        except (RuntimeError, ValueError):  # of trials that are all alike
            return {}

    def _trials(self, *states: TrialState) -> list[FrozenTrial]:
        return self._optuna.get_trials(deepcopy=False, states=states or None)

    def _finding(self, trial: FrozenTrial) -> TrialScore:
        about = trial.user_attrs
        state = {TrialState.COMPLETE: "complete", TrialState.PRUNED: "stopped", TrialState.FAIL: "failed"}
        reported = trial.intermediate_values
        return TrialScore(
            trial.number,
            {d.name: d.from_plain(trial.params[d.name]) for d in self.space.dimensions if d.name in trial.params},
            state.get(trial.state, "at work"),
            reported[max(reported)] if reported else None,
            about.get("scores", []),
            about.get("steps", 0),
            about.get("error", ""),
            about.get("parent"),
        )

    # --- work ---------------------------------------------------------------------------------------------------------

    def take(self) -> tuple[tuple[_Member, int], TrialRun] | None:
        """The next run to go on with, if there is one now: those of earlier trials first."""
        for member in self._members.values():
            if member.todo:
                seed = member.todo.pop(0)
                end = dict(self.plan.stop)
                if member.rungs[1:]:
                    end["env_steps_total"] = member.rungs[0]
                return (member, seed), self._job(_folder(member.trial.number), member.values, seed, end)
        if not self._more():
            return None
        begun = [t for t in self._trials() if t.state != TrialState.WAITING]
        self._optuna.sampler = _sampler(self.plan, len(begun))
        self._enter(self._optuna.ask())
        return self.take()

    def done(self, ticket: tuple[_Member, int], outcome: TrialEnd) -> None:
        """What came of a run."""
        member, seed = ticket
        if member.trial.number not in self._members:  # another of its runs has failed
            return
        member.outcomes[seed] = outcome
        if outcome.error:
            member.trial.set_user_attr("error", f"seed {seed}: {outcome.error}")
            self._end(member, TrialState.FAIL)
            self._refuse_failures()
            self._next_generation()
        elif len(member.outcomes) == self.plan.num_seeds:
            self._at_rung(member)

    def _more(self) -> bool:
        """Whether there are trials to begin."""
        own = [t for t in self._trials() if "parent" not in t.user_attrs]
        return bool(self._trials(TrialState.WAITING)) or len(own) < self.total

    def _enter(self, trial: Trial) -> None:
        """Go on with a trial, new or not. What it is to be is in the storage from here on."""
        values = {d.name: d.suggest(trial) for d in self.space.dimensions}
        if self.plan.scheduler == "pbt":
            last = self._optuna.user_attrs.get("generation", {}).get("rung", 0)
        else:
            last = max(self._frozen(trial).intermediate_values, default=0)
        rungs = [rung for rung in self.plan.rungs if rung > last] or self.plan.rungs[-1:]
        self._members[trial.number] = _Member(trial, values, rungs, self.plan.seeds)

    def _frozen(self, trial: Trial) -> FrozenTrial:
        return self._trials()[trial.number]

    def _at_rung(self, member: _Member) -> None:
        rung = member.rungs[0]
        if rung not in self._frozen(member.trial).intermediate_values:
            member.trial.report(member.value, rung)
        if not member.rungs[1:] or all(outcome.over for outcome in member.outcomes.values()):
            self._end(member, TrialState.COMPLETE)
            self._next_generation()
        elif self.plan.scheduler == "pbt":
            self._next_generation()
        elif member.trial.should_prune():
            self._end(member, TrialState.PRUNED)
        else:
            self._go_on(member)

    def _go_on(self, member: _Member) -> None:
        member.rungs, member.todo, member.outcomes = member.rungs[1:], self.plan.seeds, {}

    def _end(self, member: _Member, state: TrialState) -> None:
        member.trial.set_user_attr("scores", [o.score for o in member.outcomes.values() if o.score is not None])
        member.trial.set_user_attr("steps", max(o.steps for o in member.outcomes.values()))
        self._optuna.tell(member.trial, member.value if state == TrialState.COMPLETE else None, state)
        del self._members[member.trial.number]
        self._told(self._finding(self._frozen(member.trial)))

    def _refuse_failures(self) -> None:
        """Raise where the first trials have all failed: that is no matter of their settings."""
        over = [self._finding(t) for t in self._trials() if t.state.is_finished()]
        if len(over) >= min(_FAILED_AT_FIRST, self.total) and all(f.state == "failed" for f in over):
            raise BrayError(
                f"the first {len(over)} trials failed, and the study ends: {over[0].error} (the traceback is in "
                f"{self.root / _folder(over[0].number)}). When that is mended, search under another name"
            )

    # --- pbt ----------------------------------------------------------------------------------------------------------

    def _next_generation(self) -> None:
        """When the whole population is at a rung: decide who goes on from whom, write it down, and do it."""
        members = self._members
        if self.plan.scheduler != "pbt" or not members or self._more():
            return
        if any(len(m.outcomes) < self.plan.num_seeds for m in members.values()):
            return
        rung = next(iter(members.values())).rungs[0]
        rng = np.random.default_rng([self.plan.seed, rung])
        pairs = exploits({number: m.value for number, m in members.items()}, rng)
        decided = []
        for loser, parent in pairs:
            old = members[parent].values
            new = {d.name: d.plain(d.explore(old[d.name], rng)) for d in self.space.dimensions}
            decided.append((loser, parent, new))
        self._optuna.set_user_attr("generation", {"rung": rung, "exploits": decided})
        for loser, parent, values in decided:
            self._exploit(loser, parent, values)
        for member in members.values():
            self._go_on(member)

    def _exploit(self, loser: int, parent: int, values: dict[str, Any]) -> None:
        """End a trial, and let another one begin in its place from the runs of its parent."""
        child = next((t for t in self._trials() if t.user_attrs.get("replaces") == loser), None)
        if child is None:
            self._optuna.enqueue_trial(values, {"parent": parent, "replaces": loser})
            child = self._trials()[-1]
        if child.state == TrialState.WAITING:  # until it runs its parent stays where it is
            copy_runs(self.root / _folder(parent), self.root / _folder(child.number))
        if loser in self._members:
            self._end(self._members[loser], TrialState.PRUNED)
        elif (left := self._trials()[loser]).state == TrialState.RUNNING:
            self._optuna.tell(left.number, state=TrialState.PRUNED)

    # --- settings -----------------------------------------------------------------------------------------------------

    def _refuse_other_settings(self) -> None:
        """Raise where the study was begun with other settings, or elsewhere."""
        plan = self.plan
        ours = {
            "directory": f"{socket.gethostname()}:{self.root.resolve()}",
            "stop": plan.stop,
            "num_seeds": plan.num_seeds,
            "seed": plan.seed,
            "scheduler": plan.scheduler,
            "sampler": plan.sampler,
            **self.space.fixed,
            **{d.key: str(d) for d in self.space.dimensions},
        }
        theirs = self._optuna.user_attrs.get("settings")
        if theirs is None:
            self._optuna.set_user_attr("settings", ours)
            return
        differ = [key for key in {**theirs, **ours} if theirs.get(key) != ours.get(key)]
        if differ:
            key = differ[0]
            more = f" (and {len(differ) - 1} more: {', '.join(differ[1:4])})" if differ[1:] else ""
            raise ConfigError(
                f"the study {plan.name!r} has {key}={show(theirs.get(key))}, got {show(ours.get(key))}{more}: give "
                "what it has to go on with it, or choose another --name"
            )


def _folder(number: int) -> str:
    return f"trial-{number:04d}"


def _planned(space: Space, plan: Plan) -> tuple[list[dict[str, Any]], int]:
    """The combinations of values that are tried as often as each other (none: all is sampled), and how many trials."""
    if space.listed:
        every = space.combinations(grid_only=False)
        if plan.trials is None or plan.trials >= len(every):
            return every, len(every)
    if plan.trials is None:
        ranges = ", ".join(d.name for d in space.dimensions if not d.values)
        raise ConfigError(f"say how many trials there are, --trials N: {ranges} may have any value of a range")
    return (space.combinations(grid_only=True) if any(d.grid for d in space.dimensions) else []), plan.trials


def _open(root: Path, name: str, storage: str | None) -> optuna.Study:
    """The study in Optuna's storage. The directory is this process's alone, so what a kill left of a journal can be
    put right."""
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    journal = root / JOURNAL
    if storage is None and journal.exists():
        os.truncate(journal, journal.read_bytes().rfind(b"\n") + 1)  # without half a line
        Path(f"{journal}.lock").unlink(missing_ok=True)
    try:
        backend: Any = storage or JournalStorage(JournalFileBackend(str(journal), JournalFileOpenLock(str(journal))))
        return optuna.create_study(storage=backend, study_name=name, direction="maximize", load_if_exists=True)
    except Exception as e:  # of SQLAlchemy, of a driver, of JSON
        where = f"--storage {storage}" if storage else journal
        raise ConfigError(f"{where}: the study cannot be opened ({type(e).__name__}: {str(e).splitlines()[0]})") from e


def _sampler(plan: Plan, number: int) -> Any:
    """Seeded by the number of the trial: a study that goes on draws nothing twice."""
    if plan.sampler == "random":
        return optuna.samplers.RandomSampler(seed=plan.seed + number)
    return optuna.samplers.TPESampler(seed=plan.seed + number, constant_liar=True)


def _pruner(plan: Plan) -> Any:
    if plan.scheduler == "asha":
        return optuna.pruners.SuccessiveHalvingPruner(plan.rungs[0], _ETA)
    return optuna.pruners.MedianPruner() if plan.scheduler == "median" else optuna.pruners.NopPruner()
