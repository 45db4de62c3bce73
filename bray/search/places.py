"""Where the runs of a study are: processes of this machine or of a Ray cluster, each with one run at a time."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import wait
from typing import Any, Protocol, TypeVar

from bray.cluster.machine import Machine
from bray.envs.process import Child, Lost, portable, unpack
from bray.errors import ConfigError, ResourceError
from bray.search.runner import Runner, TrialEnd, TrialRun, serve

_LOADS = "bray.search.runner"
_LOOK_S = 5.0  # seconds between two looks at runs of a cluster


@dataclass(frozen=True)
class Resources:
    """What one run is given, and how many run at once."""

    cpus: float = 1.0
    gpus: float = 0.0
    parallel: int | None = None
    """None: as many as there is room for."""
    address: str | None = None
    """Of a Ray cluster."""

    def __post_init__(self) -> None:
        if self.cpus <= 0 or self.gpus < 0 or (self.parallel is not None and self.parallel < 1):
            raise ConfigError(
                "a run is given CPUs > 0 and GPUs >= 0, and at least one runs at a time: got cpus_per_trial="
                f"{self.cpus:g}, gpus_per_trial={self.gpus:g}, parallel={self.parallel}"
            )


class TrialPlaces(Protocol):
    """Processes with one run at a time. Each has `send`, `receive`, which raises Lost where it died, and `give_up`,
    which ends it and says how it ended."""

    count: int
    """How many there may be."""

    def start(self, job: TrialRun) -> Any: ...
    def wait(self, busy: Sequence[Any]) -> list[Any]: ...
    def close(self) -> None: ...


def make_places(wants: Resources, cluster: str) -> TrialPlaces:
    return RayPlaces(wants) if cluster == "ray" else LocalPlaces(wants)


# --- this machine -----------------------------------------------------------------------------------------------------


class LocalPlaces:
    """Processes of this machine, each with its share of the GPUs."""

    def __init__(self, wants: Resources):
        machine = Machine.look()
        gpus = len(machine.gpus)
        for asked, there, what in ((wants.cpus, machine.cpus, "CPUs"), (wants.gpus, gpus, "GPUs")):
            if asked > there:
                raise ResourceError(
                    f"a run is to have {asked:g} {what}, and this machine has {there}: ask for less "
                    f"(--{what.lower()}-per-trial), or place runs on a cluster (--cluster ray)"
                )
        room = _room(machine.cpus, gpus, wants)
        self.count = room if wants.parallel is None else wants.parallel
        self._free = [_visible(slot, gpus, wants.gpus) for slot in range(self.count)]
        self._all: list[LocalPlace] = []

    def start(self, job: TrialRun) -> LocalPlace:
        """A process that can take this job, and others like it."""
        self._all.append(LocalPlace(self, self._free.pop(0), job))
        return self._all[-1]

    def wait(self, busy: Sequence[LocalPlace]) -> list[LocalPlace]:
        ready = set(wait([place.conn for place in busy]))
        return [place for place in busy if place.conn in ready]

    def left(self, place: LocalPlace) -> None:
        """Its GPUs are free again."""
        self._all.remove(place)
        self._free.append(place.environ)

    def close(self) -> None:
        for place in self._all:
            place.child.kill()  # a run is written so that it may end at any moment


class LocalPlace:
    """A process of this machine."""

    def __init__(self, places: LocalPlaces, environ: dict[str, str], job: TrialRun):
        self._places, self.environ = places, environ
        self.child = Child(serve, (environ,), "bray-trial", _LOADS, needs_main=portable(job)[1])
        self.child.started()

    @property
    def conn(self) -> Any:
        return self.child.conn

    def send(self, job: TrialRun) -> None:
        self.child.send(portable(job)[0])

    def receive(self) -> TrialEnd:
        return unpack(self.child.receive(None))[0]

    def give_up(self) -> str:
        self._places.left(self)
        self.child.kill()
        return self.child.end


def _room(cpus: float, gpus: float, wants: Resources) -> int:
    """How many runs fit on a machine."""
    by_cpu = int(cpus / wants.cpus)
    return min(by_cpu, int(gpus / wants.gpus)) if wants.gpus else by_cpu


def _visible(slot: int, gpus: int, each: float) -> dict[str, str]:
    """The GPUs of one of several runs: some of its own, or one that it shares."""
    if not each:
        return {}
    first = slot * math.ceil(each) if each >= 1 else int(slot * each)
    shown = [str((first + i) % gpus) for i in range(math.ceil(each))]
    return {"CUDA_VISIBLE_DEVICES": ",".join(shown)}


# --- a Ray cluster ----------------------------------------------------------------------------------------------------


class RayPlaces:
    """Processes that Ray places on any node; the directory of the study is on a disk that all of them share."""

    def __init__(self, wants: Resources):
        from bray.cluster.ray_start import running_nodes
        from bray.cluster.ray_workers import RayWorkers  # it imports Ray

        machine = Machine.look()
        nodes = [] if wants.address else running_nodes()
        rooms = [_room(n.cpus, n.gpus, wants) for n in nodes] or [_room(machine.cpus, len(machine.gpus), wants)]
        self.count = wants.parallel or max(1, sum(rooms))
        settings: dict[str, Any] = {"address": wants.address} if wants.address else {"num_cpus": machine.cpus}
        self._workers = RayWorkers("trial", self.count, wants.cpus, wants.gpus, "run", settings)

    def start(self, job: TrialRun) -> RayPlace:
        worker = self._workers.start(Runner)
        worker.started()
        return RayPlace(worker)

    def wait(self, busy: Sequence[RayPlace]) -> list[RayPlace]:
        asked = {place.worker: place for place in busy}
        while not (ready := self._workers.wait(list(asked), _LOOK_S)):
            pass
        return [asked[worker] for worker in ready]

    def close(self) -> None:
        self._workers.close()


class RayPlace:
    """A process of a Ray cluster."""

    def __init__(self, worker: Any):
        self.worker = worker

    def send(self, job: TrialRun) -> None:
        self.worker.send("run", portable(job)[0])

    def receive(self) -> TrialEnd:
        return self.worker.receive(None)

    def give_up(self) -> str:
        return str(self.worker.kill())


# --- jobs at places ---------------------------------------------------------------------------------------------------

Ticket = TypeVar("Ticket")
_LIVES = 2  # a run whose process dies is begun that often, the second time from its checkpoint


class TrialCrew:
    """Places that are started when they are needed, and wait for more when they are not."""

    def __init__(self, places: TrialPlaces):
        self._places, self._idle = places, list[Any]()

    def work(
        self, take: Callable[[], tuple[Ticket, TrialRun] | None], done: Callable[[Ticket, TrialEnd], None]
    ) -> None:
        """Run the jobs that `take` gives, until it has none and all are done."""
        busy: dict[Any, tuple[Ticket, TrialRun, int]] = {}
        again: list[tuple[Ticket, TrialRun, int]] = []
        while True:
            while len(busy) < self._places.count:
                found = None if again else take()
                if not again and found is None:
                    break
                item = again.pop() if found is None else (*found, _LIVES)
                busy[self._begin(item[1])] = item
            if not busy:
                return
            for place in self._places.wait(list(busy)):
                ticket, job, lives = busy.pop(place)
                try:
                    outcome = place.receive()
                    self._idle.append(place)
                except Lost:
                    end = place.give_up()
                    if lives > 1:
                        again.append((ticket, job, lives - 1))
                        continue
                    outcome = TrialEnd(error=f"its process died, {_LIVES} times ({end})")
                done(ticket, outcome)

    def _begin(self, job: TrialRun) -> Any:
        while self._idle:
            place = self._idle.pop()
            try:
                place.send(job)
                return place
            except Lost:  # meanwhile
                place.give_up()
        place = self._places.start(job)
        place.send(job)
        return place
