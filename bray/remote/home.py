"""What a run has on a Ray cluster (`run.cluster: ray`): samplers of rollout workers (a `Home` for `bray.train.workers`)
or other learners (a `Crew` for `bray.train.learners`)."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from bray.act import Clock
from bray.cluster.feed import StoreFeed
from bray.cluster.job import own_address
from bray.cluster.ray_workers import RayWorker, RayWorkers
from bray.train.config import RunConfig
from bray.train.learners import JoinedLearner
from bray.train.sampler import SamplerPlan, make_sampler


class RayHome:
    """Where samplers live: processes that Ray places on any node. Weights and pieces go through its object store."""

    def __init__(self, run: RunConfig):
        cpus, gpus = run.num_cpus_per_worker, run.num_gpus_per_worker
        self._workers = RayWorkers("rollout", run.workers, cpus, gpus, "play", ray_settings(run))
        self._feed = StoreFeed(self._workers.put)

    def start(self, plan: SamplerPlan) -> RayWorker:
        """Begin to start a sampler; `started` waits for it."""
        return self._workers.start(partial(make_sampler, plan), replaces=plan.life > 0)

    def publish(self, weights: Callable[[], Mapping[str, np.ndarray]], clock: Clock) -> Any:
        """Weights for samplers to come; what `play` is given for them."""
        return self._feed.publish(weights, clock)

    def wait(self, workers: Sequence[RayWorker], timeout: float) -> list[RayWorker]:
        return self._workers.wait(workers, timeout)

    def close(self) -> None:
        self._workers.close()


class RayCrew:
    """Where other learners live: processes that Ray places on any node, each with its games beside it. They find the
    first one, and each other, by their addresses."""

    def __init__(self, run: RunConfig):
        cpus, gpus = run.num_cpus_per_worker, 0.0 if run.device == "cpu" else 1.0
        self._workers = RayWorkers("learner", run.num_learners - 1, cpus, gpus, "learn", ray_settings(run))
        self.address = own_address()

    def start(self, make: Callable[[], JoinedLearner], again: bool) -> RayWorker:
        return self._workers.start(make, replaces=again)

    def close(self) -> None:
        self._workers.close()


def ray_settings(run: RunConfig) -> dict[str, Any]:
    """What `ray.init` is told: an address, or how large a Ray of our own is. Its CPUs are not counted: environments may
    wait more than they compute."""
    if run.address is not None:
        return {"address": run.address}
    asked = math.ceil(run.workers * run.num_cpus_per_worker)
    settings: dict[str, Any] = {"num_cpus": max(8, 4 * (os.cpu_count() or 1), asked)}
    if run.object_store_mb is not None:
        settings["object_store_memory"] = run.object_store_mb << 20
    return settings
