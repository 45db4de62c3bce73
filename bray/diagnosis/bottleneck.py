"""What holds a run up, from the `perf/*` numbers of its rows, and which setting would make it faster.

`Times.of(rows)` says where the wall time goes, `find_bottleneck` names what takes most of it, and what to change: keys
that the run has, with values, and at most how much faster it gets (Amdahl's law). All of it is data in, data out: rows
and config may come from any run directory.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bray.metrics import number
from bray.metrics.spent import BETWEEN, CPU, PHASES, QUEUED, WEIGHTS

logger = logging.getLogger("bray")

SAY_AFTER_S, SAY_AFTER_ROWS = 60.0, 5
"""Seconds and rows of training after which a run says what holds it up."""
LOUD_GAIN = 1.5
"""What is gained without learning anything else is a warning from here on; else it is for the log."""
MOST = 0.4
"""Share of the time from which a phase is what holds a run up; without it a run is at most 1 / (1 - 0.4) = 1.7 times as
fast."""
LEAST_GAIN = 1.1
"""Changes that give less are not worth a word."""
LEAST_WORKER_GAIN = 1.5
"""A first worker beside a learner that replays costs a core and the copies of what it played: where it gave less than
this at most, runs got slower."""
CROWDED = 0.3
"""Share of its time that a process waits for a core, from which there are too few of them."""
SHORT_STEP_S = 3e-3
"""Seconds of a gradient step below which most of it is not arithmetic: fewer and larger ones take less time."""
MOST_THREADS = 4
"""Threads that an update is advised. They wait for each other after every product: two trainings of SAC side by side
on 16 cores were 60 and 90 times slower with 16 threads each than with one."""
ONE_CORE = 1.2
"""Cores that a process keeps busy, above which it has several threads."""
_CORES = (CPU, QUEUED)
MOST_WORKERS, MOST_ENVS = 32, 64
PROCESSES_GAIN = 0.5
"""Milliseconds that a step of all environments must become shorter before they get processes of their own; two messages
per process cost about a third of this."""
MORE = 4
"""Times as many environments, or as few minibatches, as an advice goes at once."""


@dataclass(frozen=True)
class Machine:
    cores: int
    gpus: int = 0


@dataclass(frozen=True)
class Times:
    """Where the time of some rows went, as shares of it."""

    seconds: float
    learner: dict[str, float]
    """Phases of the process that learns, `evaluation` and `between`: they are all of its time."""
    worker: dict[str, float]
    """Those of the mean rollout worker, all of its time; empty without workers."""
    worker_idle: dict[int, float]
    """How much of its time each worker waits."""
    learner_cores: dict[str, float]
    """`cpu` and `queued` of the process that learns, as shares of its time."""
    worker_cores: dict[str, float]
    weights: float
    """Share of the wall time that passes with copying weights alone."""
    step_seconds: float | None
    """Of a gradient step, without the wait for a core that others have."""

    @classmethod
    def of(cls, rows: Sequence[Mapping[str, Any]]) -> Times | None:
        """Of the rows of a run, without its first, in which much is made; None where they do not tell."""
        told = [row for row in rows if number(row, "time_this_iter_s") and number(row, "perf/learn") is not None]
        if len(told) < 2:
            return None
        first, told = told[0], told[1:]
        evaluating, between = _evaluating(told), _sum(told, f"perf/{BETWEEN}") / 1e3
        wall = _sum(told, "time_this_iter_s") + evaluating + between
        learner, learner_cores = ({k: _sum(told, f"perf/{k}") / 1e3 / wall for k in keys} for keys in (PHASES, _CORES))
        learner |= {"evaluation": evaluating / wall, BETWEEN: between / wall}
        worked = sum(_sum(told, f"perf/worker_{phase}") for phase in PHASES) or 1.0
        workers = sum(isinstance(key, str) and key.startswith("perf/worker_idle/") for key in told[-1])
        worker, worker_cores = (
            {k: _sum(told, f"perf/worker_{k}") / worked for k in keys if workers} for keys in (PHASES, _CORES)
        )
        copying = _sum(told, f"perf/worker_{WEIGHTS}") / worked
        steps = (number(told[-1], "learner_steps_total") or 0.0) - (number(first, "learner_steps_total") or 0.0)
        step = _sum(told, "perf/learn") / 1e3 / steps * (1.0 - min(0.9, learner_cores[QUEUED])) if steps > 0 else None
        return cls(
            wall,
            learner,
            worker,
            {w: _sum(told, f"perf/worker_idle/{w}") / worked for w in range(1, 1 + workers)},
            learner_cores,
            worker_cores,
            _sum(told, f"perf/{WEIGHTS}") / 1e3 / wall + learner["idle"] * _share(copying, worker),
            step,
        )

    @property
    def wall(self) -> dict[str, float]:
        """Shares of the wall time by what has to happen before it can go on: while the process that learns waits for
        workers, that is what they do.
        What remains of `idle` is the wait for the slowest of them, or for games."""
        if not self.worker:
            return self.learner
        waits = self.learner["idle"]
        busy = 1.0 - self.worker["idle"]
        slowest = 1.0 - min(self.worker_idle.values())
        even = waits * (busy / slowest if slowest > 0 else 1.0)
        played = {phase: even * _share(self.worker[phase], self.worker) for phase in PHASES if phase != "idle"}
        return {k: played.get(k, 0.0) + (waits - even if k == "idle" else v) for k, v in self.learner.items()}

    @property
    def env_waits(self) -> bool:
        """Whether most of a step of the environments is neither arithmetic nor a queue for a core: they sleep, or ask
        somebody."""
        phases, cores = (self.worker, self.worker_cores) if self.worker else (self.learner, self.learner_cores)
        asleep = 1.0 - phases["idle"] - sum(cores.values()) if cores.get(CPU) else 0.0
        return asleep > 0.5 * phases["env"]

    @property
    def queued(self) -> float:
        """How much of its time a process waits for a core that others have."""
        return max(cores.get(QUEUED, 0.0) for cores in (self.learner_cores, self.worker_cores))


@dataclass(frozen=True)
class Change:
    """Keys to set."""

    keys: dict[str, Any]
    gain: float
    """At most so many times as many environment steps a second."""
    same: bool = True
    """Whether it learns the same; else returns are to be compared."""

    def __str__(self) -> str:
        said = " ".join(f"{k}={v}" for k, v in self.keys.items())
        return (
            f"{said} (at most {self.gain:.1f} times as "
            f"fast{'' if self.same else '; learns differently, compare returns'})"
        )


@dataclass(frozen=True)
class Finding:
    """What holds a run up."""

    name: str
    """`learner-bound`, ...; `balanced` where nothing stands out."""
    because: str
    """The numbers it rests on."""
    share: float
    note: str = ""
    changes: tuple[Change, ...] = ()

    def __str__(self) -> str:
        text = f"{self.name}: {self.because}{'; ' if self.note else ''}{self.note}"
        return f"{text}. Try {', or '.join(map(str, self.changes))}." if self.changes else f"{text}."


def find_bottleneck(times: Times, options: Mapping[str, Any], machine: Machine) -> Finding:
    """What takes most of the wall time, and what to change. `options`: those of the run by name, from all its
    sections."""
    wall = times.wall
    phase = max(wall, key=lambda k: wall[k])
    share = wall[phase]
    if share < MOST:
        parts = ", ".join(f"{k} {v:.0%}" for k, v in sorted(wall.items(), key=lambda kv: -kv[1]) if v >= 0.005)
        return Finding("balanced", f"nothing stands out ({parts})", share)
    name, doing, rule = _PHASES[phase]
    note, changes = rule(_Run(times, options, machine))
    if times.queued > CROWDED:
        busy = f"there are more processes than cores: one waits {times.queued:.0%} of its time for them"
        note = f"{note}; {busy}" if note else busy
    best = sorted((c for c in changes if c.gain >= LEAST_GAIN), key=lambda c: not c.same)
    return Finding(name, f"{share:.0%} of the time is {doing} ({_key(phase, times)})", share, note, tuple(best))


class Advisor:
    """Looks at the rows of a run, and says once what holds it up, after about a minute. `options`: as in
    `find_bottleneck`."""

    def __init__(self, options: Mapping[str, Any], machine: Callable[[], Machine]):
        self._options, self._machine = options, machine
        self._rows: list[Mapping[str, Any]] = []
        self._seconds = 0.0
        self.said: Finding | None = None
        self._done = False

    def resume(self, row: Mapping[str, Any] | None) -> None:
        """Go on after this row: where it comes after the minute, it was said."""
        self._done = (number(row or {}, "time_total_s") or 0.0) >= SAY_AFTER_S

    def look(self, row: Mapping[str, Any]) -> None:
        if self._done:
            return
        self._rows.append(dict(row))
        self._seconds += number(row, "time_this_iter_s") or 0.0
        if self._seconds < SAY_AFTER_S or len(self._rows) < SAY_AFTER_ROWS:
            return
        self._done, rows, self._rows = True, self._rows, []
        if (times := Times.of(rows)) is None:
            return
        self.said = found = find_bottleneck(times, self._options, self._machine())
        loud = any(change.same and change.gain >= LOUD_GAIN for change in found.changes)
        logger.log(logging.WARNING if loud else logging.INFO, "%s `bray doctor RUN_DIR` says more.", found)


# --- what to change ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Run:
    """What advice rests on. The options may be anything: they come from a file."""

    times: Times
    options: Mapping[str, Any]
    machine: Machine

    def count(self, name: str, default: int = 0) -> int:
        value = self.options.get(name)
        return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else default

    @property
    def could_use_gpu(self) -> bool:
        return bool(self.machine.gpus) and self.options.get("device", "cpu") == "cpu"

    @property
    def one_thread(self) -> bool:
        """Whether updates are computed by one core. `threads` may say auto."""
        on_cpu = self.options.get("device", "cpu") == "cpu"
        return on_cpu and self.count("threads", 1) == 1 and self.times.learner_cores.get(CPU, 0.0) < ONE_CORE

    @property
    def replays(self) -> bool:
        return "replay_size" in self.options

    @property
    def env_waits(self) -> bool:
        """Whether environments wait more than they compute, and this process with them: it does not where they are in
        processes already."""
        return not self.processes and self.times.env_waits

    @property
    def processes(self) -> int:
        """In which the environments of the process that learns run already; 0 where they are in it."""
        form, step_ms, envs = self.options.get("vector"), self.options.get("step_ms"), self.count("num_envs", 1)
        there = min(envs, self.count("num_processes") or self.machine.cores)
        shorter = step_ms * (envs - -(-envs // there)) if isinstance(step_ms, (int, float)) else 0.0
        pays = form == "auto" and not self.count("num_workers") and shorter > PROCESSES_GAIN
        return there if pays or form == "subprocess" or self.options.get("step_timeout") is not None else 0

    @property
    def envs(self) -> int:
        """Of all processes."""
        return self.count("num_envs", 1) * max(1, self.count("num_workers"))

    @property
    def cores(self) -> int:
        """Cores that the run may have: others use some where there is a queue."""
        return max(1, round(self.machine.cores * (1.0 - min(1.0, self.times.queued))))

    def more_workers(self) -> list[Change]:
        """As many as the cores take, or as the waiting of environments allows; the environments are dealt out to them,
        so that it learns the same."""
        now, total = self.count("num_workers"), self.envs
        most = MOST_WORKERS if self.env_waits else min(MOST_WORKERS, self.cores)
        workers = max(w for w in range(1, most + 1) if total % w == 0) if total > 1 else most
        if self.options.get("vector") == "auto":
            now = max(now, self.processes)
        if workers <= max(1, now) or not (self.replays or "rollout_length" in self.options):
            return []
        playing = self.times.wall["env"] + self.times.wall["forward"]
        factor = workers / max(1, now)
        gain = _speedup(playing, factor)
        if self.replays and not now:  # it plays while it learns
            gain = 1.0 / max(1.0 - playing, playing / factor)
        keys: dict[str, Any] = {"num_workers": workers, "num_envs": max(1, total // workers)}
        if self.replays and not now:  # so that another run of the seed is the same
            keys["lockstep"] = True
        return [Change(keys, gain if self.env_waits else min(gain, float(self.cores)), same=total > 1)]

    def more_envs(self, share: float) -> list[Change]:
        """One forward for more environments takes little longer. Rollouts keep their size: as many times shorter."""
        envs, length = self.count("num_envs", 1), self.count("rollout_length")
        if "num_envs" not in self.options or envs * MORE > MOST_ENVS or (length and length // MORE < 8):
            return []
        keys = {"num_envs": envs * MORE} | ({"rollout_length": length // MORE} if length else {})
        return [Change(keys, _speedup(share, MORE), same=False)]


Advice = tuple[str, list[Change]]
"""A note, and changes."""


def _speedup(share: float, factor: float) -> float:
    """Amdahl's law: a part of this share that gets so many times as fast."""
    return 1.0 / max(1.0 - share + share / factor, 1e-3)


def _env(run: _Run) -> Advice:
    changes = run.more_workers()
    if run.env_waits:
        return "the environment waits more than it computes", changes
    if changes or run.times.queued > CROWDED:
        return "", changes
    return "all cores play already: a faster environment or more cores would help", []


def _forward(run: _Run) -> Advice:
    wall, changes = run.times.wall, []
    if run.could_use_gpu and not run.count("num_workers"):
        changes.append(Change({"device": "cuda"}, _speedup(wall["forward"] + wall["learn"], math.inf)))
    return "", changes + run.more_workers() + run.more_envs(wall["forward"])


def _learn(run: _Run) -> Advice:
    share, step, cores, count = run.times.wall["learn"], run.times.step_seconds, run.cores, run.count
    changes: list[Change] = []

    def change(name: str, value: Any, factor: float, same: bool = True) -> None:
        changes.append(Change({name: value}, _speedup(share, factor), same))

    def fewer(name: str, times: int) -> None:
        less = max(1, count(name) // times)
        change(name, less, count(name) / less, same=False)

    long_steps = step is not None and step >= SHORT_STEP_S
    note = "more workers will not help"
    if long_steps and run.could_use_gpu:
        change("device", "cuda", math.inf)
    elif long_steps and run.one_thread and cores > 1:
        threads = min(cores, MOST_THREADS)
        change("threads", threads, (1 + threads) / 2)
    beside = 1.0 / max(share, 1.0 - share)
    if run.replays and not count("num_workers") and cores > 1 and beside >= LEAST_WORKER_GAIN:
        note = "one worker plays while it learns, more will not help"
        changes.append(Change({"num_workers": 1, "lockstep": True}, beside))
    if count("minibatches") > 1 and not long_steps:
        fewer("minibatches", MORE)
    if count("epochs") > 1:
        fewer("epochs", 2)
    if count("updates") > 1:
        fewer("updates", 2)
    elif count("train_every"):
        change("train_every", 2 * count("train_every"), 2.0, same=False)
    return note if step is None else f"{note}; a gradient step takes {1e3 * step:.2g} ms", changes


def _transfer(run: _Run) -> Advice:
    """In one process nothing is copied, but environments are stepped one after the other."""
    times, wall, changes = run.times, run.times.wall, []
    kept = wall["learn"] + wall["other"] + wall["forward"]
    if times.worker and kept + run.count("num_workers") * wall["env"] < 1.0:
        gain = 1.0 / max(kept + wall["env"], 1e-3)
        changes.append(Change({"num_workers": 0, "num_envs": run.envs}, gain))
    if times.weights <= 0.5 * wall["transfer"]:
        return "most of it are pieces: smaller observations (uint8, fewer pixels) are copied sooner", changes
    if length := run.count("rollout_length"):
        changes.append(Change({"rollout_length": 2 * length}, _speedup(times.weights, 2.0), same=False))
    return "most of it are weights, once for each piece: longer pieces need them less often", changes


def _idle(run: _Run) -> Advice:
    idle = run.times.worker_idle
    if not idle:
        return "more games at once, or faster ones, would give it more to learn from", []
    slowest = min(idle, key=lambda w: idle[w])
    return f"worker {slowest} is the slowest, the others wait for it at the end of each round", []


def _other(run: _Run) -> Advice:
    return "callbacks of episodes are called for each step", run.more_envs(run.times.wall["other"])


def _evaluation(run: _Run) -> Advice:
    every, share = run.count("eval_freq"), run.times.wall["evaluation"]
    return "", [Change({"eval_freq": MORE * every}, _speedup(share, MORE))] if every else []


def _between(run: _Run) -> Advice:
    return "on_train_result, other callbacks of the training and checkpoints: do less there, or less often", []


_PHASES: dict[str, tuple[str, str, Callable[[_Run], Advice]]] = {
    "env": ("env-bound", "stepping environments", _env),
    "forward": ("inference-bound", "choosing actions", _forward),
    "transfer": ("transfer-bound", "copying weights and pieces between processes", _transfer),
    "learn": ("learner-bound", "the update", _learn),
    "idle": ("waiting", "waiting for games or for the slowest worker", _idle),
    "other": ("bookkeeping", "storing rows, callbacks and the rest", _other),
    "evaluation": ("evaluation-bound", "evaluations", _evaluation),
    BETWEEN: ("between iterations", "spent between iterations", _between),
}
"""What a run that mostly does this is, what it does, and what to say."""


# --- rows -------------------------------------------------------------------------------------------------------------


def _sum(rows: Sequence[Mapping[str, Any]], key: str) -> float:
    return sum(max(0.0, number(row, key) or 0.0) for row in rows)


def _evaluating(rows: Sequence[Mapping[str, Any]]) -> float:
    """Seconds that evaluations took: what `time_total_s` has beyond the iterations and what came between them."""
    totals = [number(row, "time_total_s") for row in rows]
    if None in totals or not any("eval/return_mean" in row for row in rows):
        return 0.0
    known = _sum(rows[1:], "time_this_iter_s") + _sum(rows[1:], f"perf/{BETWEEN}") / 1e3
    return max(0.0, (totals[-1] or 0.0) - (totals[0] or 0.0) - known)


def _share(part: float, phases: Mapping[str, float]) -> float:
    """Of the time in which a worker does something."""
    busy = 1.0 - phases["idle"] if phases else 0.0
    return part / busy if busy > 0 else 0.0


def _key(phase: str, times: Times) -> str:
    """Where the number is in a row."""
    if phase == "evaluation":
        return "time_total_s beyond time_this_iter_s"
    if times.worker and phase in ("env", "forward"):
        return f"perf/worker_{phase} while perf/idle"
    return f"perf/{phase}" + (f" and perf/worker_{phase}" if times.worker and phase == "transfer" else "")
