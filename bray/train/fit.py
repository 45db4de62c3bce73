"""Where a training plays and computes, when its settings say `auto`: a pure function of facts about the machine, the
algorithm and the environment.

It places the environments that were asked for and changes nothing else: what one update learns from is the same
wherever they play. Constants are orders of magnitude, so that two machines of a kind choose alike; `bray calibrate`
measures instead. docs/scaling.md tells the rule with what was measured.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

AUTO = "auto"
PLACES = ("device", "num_workers", "inference", "threads")
"""Keys of the `run` section that may be `auto`."""
GPU_NEEDS_GIB = 2.0
"""Free memory below which a GPU counts as full."""
WORKER_CORES = 4
"""Cores from which workers may get some: with fewer they take them from the process that learns."""
SLOW_ROUND_MS = 1.0
"""A step of all environments from which it pays to play while the learner learns."""
LOCKSTEP_GAIN = 1.2
"""A worker of an algorithm that replays has to make a training so much faster by the estimate below: it acts with
weights that are a round older."""
CENTRAL_FLOPS = 1e6
"""Of the forward of a row, from which a worker's core takes longer for it than for a question."""
GPU_GAIN = 1.3
"""A GPU has to be so much faster by the estimate below: its times for small work vary most."""
_CORE_FLOPS, _GPU_FLOPS = 2.5e10, 1e13
"""Products of float32 per second, as they are reached in updates of a few hundred rows."""
_SHARED = 0.5  # of a core's speed, where an update uses several
_CALL_S = {"cpu": 3e-5, "cuda": 1.5e-4}  # a forward without its arithmetic: on a GPU a copy there and one back
_STEP_S = {"cpu": 4e-4, "cuda": 5e-4}  # a recorded gradient step without its arithmetic


@dataclass(frozen=True)
class Gpu:
    """One that this process may use."""

    name: str
    index: int = 0
    free_gib: float | None = None
    """None = it is not known."""
    users: tuple[str, ...] = ()
    """Processes that hold its memory, in words."""

    @property
    def full(self) -> bool:
        return self.free_gib is not None and self.free_gib < GPU_NEEDS_GIB

    def __str__(self) -> str:
        held = f", held by {', '.join(self.users)}" if self.users else ""
        return f"{self.name} has {self.free_gib:.1f} GiB free{held}" if self.free_gib is not None else self.name


@dataclass(frozen=True)
class Work:
    """What the network has to compute."""

    row_flops: float = 0.0
    """Of the forward of a row, for acting."""
    learnt_flops: float = 0.0
    """Of the forward of a row in an update."""
    rows_learnt: float = 1.0
    """Rows of gradient steps for each environment step."""
    gradient_steps: float = 0.0
    """For each environment step."""

    def seconds(self, device: Literal["cpu", "cuda"], num_envs: int, cores: int) -> float:
        """For an environment step, about: acting and learning."""
        speed = _GPU_FLOPS if device == "cuda" else _CORE_FLOPS * (cores * _SHARED if cores > 1 else 1.0)
        products = self.row_flops + 3.0 * self.rows_learnt * self.learnt_flops
        return products / speed + _CALL_S[device] / num_envs + _STEP_S[device] * self.gradient_steps

    def overlap(self, num_envs: int, step_ms: float) -> float:
        """How much faster a training on a GPU is where a core plays meanwhile."""
        products = 3.0 * self.rows_learnt * self.learnt_flops / _GPU_FLOPS
        learning = products + _STEP_S["cuda"] * self.gradient_steps
        here = self.row_flops / _GPU_FLOPS + _CALL_S["cuda"] / num_envs + 1e-3 * step_ms
        there = self.row_flops / _CORE_FLOPS + _CALL_S["cpu"] / num_envs + 1e-3 * step_ms
        return (learning + here) / max(learning, there)


@dataclass(frozen=True)
class Facts:
    """What a choice rests on."""

    cores: int
    num_envs: int
    """Of all processes together."""
    plays: Literal["rounds", "asynchronous", "replay", "alone"] = "rounds"
    """How the algorithm takes rows: from the newest weights; from older ones while it learns; from a replay; or it
    cannot have workers."""
    gpu: Gpu | None = None
    no_gpu: str = ""
    """Why a GPU that is here cannot be used."""
    work: Work = field(default_factory=Work)
    pictures: bool = False
    step_ms: float = 0.0
    """Of one environment, in bands."""
    sleeps: bool = False
    """Whether a step waits more than it computes."""
    tensors: bool = False
    """Whether environments are of tensors, which are played where the learner computes."""
    splits: str = ""
    """Why the environments cannot be dealt out to workers; empty where they can."""
    draws: bool = False
    """Whether the Model takes random numbers, so that central inference is refused."""
    given: Mapping[str, Any] = field(default_factory=dict)
    """Values that were pinned, of those that could be auto."""


@dataclass(frozen=True)
class Choice:
    """Settings, and why."""

    device: str
    num_workers: int
    inference: Literal["worker", "central"]
    num_envs: int
    """Of each worker, or of the one process."""
    why: str
    num_processes: int | None = None
    """Of environments that sleep, so that all of them do so at the same time."""
    threads: int | None = None
    """None = by the rule of the device."""
    lockstep: bool = False
    """Whether workers play one round ahead of what is learnt from."""

    def settings(self) -> dict[str, Any]:
        """As keys of a config."""
        keys = ("device", "num_workers", "num_envs", "inference", "threads")
        settings = {key: value for key in keys if (value := getattr(self, key)) is not None}
        return settings | ({"lockstep": True} if self.lockstep else {})

    def __str__(self) -> str:
        n = self.num_envs
        each = f"{n} environment{'s' if n > 1 else ''}"
        workers = f"{self.num_workers} worker{'s' if self.num_workers > 1 else ''}"
        where = f"{workers} with {each} each" if self.num_workers else f"{each} in this process"
        how = f", {self.inference} inference" if self.num_workers else ""
        how += ", a round ahead" if self.lockstep else ""
        return f"device={self.device}, {where}{how}: {self.why}"


def fit(facts: Facts) -> Choice:
    """Where to compute and who plays. What is given stays as it is."""
    given = facts.given
    device, about_device = (given["device"], "") if "device" in given else _device(facts)
    on_gpu = str(device).startswith("cuda")
    workers, about_workers = 0, ""
    if "num_workers" in given:
        workers, each = given["num_workers"], facts.num_envs
    else:
        workers, about_workers = _workers(facts, on_gpu)
        each = facts.num_envs // max(1, workers)
    central = workers > 0 and on_gpu and facts.work.row_flops >= CENTRAL_FLOPS and not facts.draws
    inference: Any = given.get("inference") or ("central" if central else "worker")
    asleep = facts.sleeps and not workers and facts.num_envs > facts.cores
    why = "; ".join(about for about in (about_device, about_workers) if about) or "as given"
    lockstep = facts.plays == "replay" and workers > 0 and "num_workers" not in given
    return Choice(device, workers, inference, each, why, facts.num_envs if asleep else None, lockstep=lockstep)


def _device(facts: Facts) -> tuple[str, str]:
    what = "pictures" if facts.pictures else "a small network"
    if facts.gpu is None:
        return "cpu", facts.no_gpu or "no GPU"
    name = "cuda" if not facts.gpu.index else f"cuda:{facts.gpu.index}"
    if facts.tensors:
        return (name, f"environments of tensors, {facts.gpu.name}") if not facts.gpu.full else ("cpu", str(facts.gpu))
    cores = facts.cores if facts.pictures else 1  # as threads are chosen
    here, there = facts.work.seconds("cpu", facts.num_envs, cores), facts.work.seconds("cuda", facts.num_envs, 1)
    if here < GPU_GAIN * there:
        return "cpu", f"{what}, of which a GPU would take about as long"
    if facts.gpu.full:
        return "cpu", f"the GPU is full: {facts.gpu}"
    return name, f"{'pictures' if facts.pictures else 'a large network'}, {facts.gpu.name}"


def _workers(facts: Facts, on_gpu: bool) -> tuple[int, str]:
    """How many, and why. Rollouts of the newest weights are played by the one process, whose environments may have
    processes or threads of their own: that changes nothing of what is learnt."""
    slow = facts.num_envs * facts.step_ms >= SLOW_ROUND_MS
    if _overlaps(facts) and on_gpu and facts.work.overlap(facts.num_envs, facts.step_ms) >= LOCKSTEP_GAIN:
        return 1, "it plays while the GPU learns"
    if facts.plays != "asynchronous" or facts.splits or facts.tensors:
        return 0, ""
    if facts.cores < WORKER_CORES:
        return 0, f"{facts.cores} core{'s' if facts.cores > 1 else ''}"
    if not slow:
        return 0, "environments that cost little"
    network_s = facts.work.seconds("cpu", facts.num_envs, 1)
    if not on_gpu and network_s > 2e-3 * facts.step_ms:
        return 0, "the network needs the cores more than the environments do"
    most = facts.num_envs if facts.sleeps else facts.cores if on_gpu else facts.cores - 1
    workers = dealt(facts.num_envs, min(most, facts.num_envs))
    return (workers, f"{facts.cores} cores") if workers > 1 else (0, "environments that cannot be dealt out evenly")


def _overlaps(facts: Facts) -> bool:
    """Whether a worker may play while a GPU learns, one round ahead."""
    alone = bool(facts.splits) or facts.tensors or facts.pictures
    return facts.plays == "replay" and not alone and facts.cores >= WORKER_CORES


def placements(facts: Facts) -> list[Choice]:
    """What may be compared for a training: everything that learns the same; the rule's own is the first. Players that
    play on while the learner learns are tried for algorithms that are made for it."""
    found, n, cores = [fit(facts)], facts.num_envs, facts.cores
    shares = {dealt(n, most) for most in (cores, cores // 2, n if facts.sleeps else 1)} - {1}
    shared = [] if facts.splits or facts.tensors or facts.plays not in ("rounds", "asynchronous") else sorted(shares)
    devices = ["cpu", "cuda"] if facts.gpu is not None and not facts.gpu.full else ["cpu"]
    for device in devices:
        by_rule = cores if facts.pictures else 1
        threads = [None, *sorted({1, cores} - {by_rule})] if device == "cpu" else [None]
        found += [Choice(device, 0, "worker", n, "tried", found[0].num_processes, count) for count in threads]
        if device == "cuda" and _overlaps(facts):
            found.append(Choice(device, 1, "worker", n, "tried", lockstep=True))
        for workers in shared:
            found.append(Choice(device, workers, "worker", n // workers, "tried"))
            if device == "cuda" and not facts.draws:
                found.append(Choice(device, workers, "central", n // workers, "tried"))
    first = {(c.device, c.num_workers, c.inference, c.threads): c for c in reversed(found)}
    return [c for c in found if first[c.device, c.num_workers, c.inference, c.threads] is c]


def dealt(num_envs: int, most: int) -> int:
    """The largest number of workers, at most so many, that divides the environments."""
    return max(w for w in range(1, max(1, most) + 1) if num_envs % w == 0)


def banded(step_ms: float) -> float:
    """A measured time as one of 0.01, 0.03, 0.1, 0.3, 1, ...: the nearest, so that two measurements agree."""
    if step_ms <= 0.01:
        return 0.0
    half = round(2.0 * math.log10(step_ms))
    return round((1.0 if half % 2 == 0 else 3.0) * 10.0 ** (half // 2), 9)
