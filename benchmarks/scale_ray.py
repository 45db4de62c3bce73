"""How far rollout workers on a Ray cluster would go: inputs measured on this machine, and formulas with them for 10,
100 and 1,000 nodes.

    python -m benchmarks.scale_ray [cartpole] [pong] [--cores 16] [--link 10] [--learner SAMPLES_S]

docs/scaling.md explains the columns. Inputs are measured, the tables are extrapolated.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import numpy as np

CASES: dict[str, dict[str, Any]] = {
    "cartpole": {"env": "CartPole-v1", "num_envs": 8, "vector": "inprocess"},
    "pong": {"env": "ALE/Pong-v5", "num_envs": 8},
}
ROWS = 128
PPO = {"rollout_length": ROWS, "epochs": 4, "minibatches": 4, "threads": 1, "iteration_steps": 0}
NODES = (10, 100, 1000)
RAY = {"address": "local", "num_cpus": 4, "object_store_memory": 300 << 20, "include_dashboard": False}
GBIT = 1e9 / 8


class Inputs(NamedTuple):
    """What one machine says."""

    bytes_per_sample: float
    samples_s_core: float
    """Environment and forward, by CPU time: other work on the machine changes little."""
    learner_samples_s: float
    """Samples learnt per second of CPU time, all epochs of the algorithm."""
    store_bytes_s: float
    """Rows from two workers through the object store into the learner's own memory."""
    weight_bytes: float
    broadcast_s: float
    """From `publish` until two workers of this machine have answered that they have the weights."""


class Reach(NamedTuple):
    """Of a cluster. All but the last are samples per second."""

    rollout: float
    network: float
    store: float
    learner: float
    broadcast_s: float

    @property
    def samples_s(self) -> float:
        return min(self[:4])

    @property
    def bound(self) -> str:
        """What limits it."""
        return min(self._fields[:4], key=lambda name: getattr(self, name))


def reach(inputs: Inputs, nodes: int, cores: int, link: float) -> Reach:
    """`nodes` machines with `cores` workers each, and a learner with a machine and a link of `link` bytes/s of its own.
    In the worst case that link sends the weights to each node; Ray lets nodes pass them on."""
    return Reach(
        nodes * cores * inputs.samples_s_core,
        link / inputs.bytes_per_sample,
        inputs.store_bytes_s / inputs.bytes_per_sample,
        inputs.learner_samples_s,
        inputs.broadcast_s + nodes * inputs.weight_bytes / link,
    )


def enough(inputs: Inputs, cores: int, link: float) -> int:
    """Nodes after which more do not help."""
    limits = reach(inputs, 1, cores, link)
    return math.ceil(min(limits[1:4]) / limits.rollout)


# --- measuring --------------------------------------------------------------------------------------------------------


class Holder:
    """In a worker: takes weights, gives a piece."""

    def __init__(self, piece: Any):
        self._piece = piece

    def take(self, weights: Mapping[str, np.ndarray]) -> float:
        return float(sum(x.sum() for x in weights.values()))  # each byte is read

    def give(self) -> Any:
        return self._piece

    def close(self) -> None:
        pass


def per_second(function: Callable[[], Any], seconds: float, clock: Callable[[], float] = time.perf_counter) -> float:
    function()
    calls, start = 0, clock()
    while (spent := clock() - start) < seconds:
        function()
        calls += 1
    return calls / spent


def measure(case: str, seconds: float = 4.0) -> Inputs:
    import bray
    from bray.train.sampler import Sampler, SamplerPlan

    config = {**PPO, **CASES[case]}
    exp = bray.Experiment(run="PPO", env=config.pop("env"), use_preset=False, config=config)
    exp.training.iterate()  # records the update
    start = time.process_time()
    exp.training.iterate()
    both = time.process_time() - start
    samples = config["num_envs"] * ROWS
    weights = {k: v.detach().cpu().numpy().copy() for k, v in exp.training.model.state_dict().items()}
    exp.close()
    c = exp.config
    plan = SamplerPlan(exp.algo, c["run"], c["env"], c["model"], c["algo"], index=1, rows=ROWS, state_every=ROWS)
    player = Sampler(plan)
    rate = per_second(lambda: player.play(weights, (0, 0)), seconds, time.process_time) * samples
    learner = samples / max(1e-9, both - samples / rate)
    piece = player.play(weights, (0, 0)).piece
    player.close()
    size = piece_bytes(piece)
    store, broadcast = through_ray(piece, weights, seconds)
    return Inputs(size / samples, rate, learner, store * size, sum(x.nbytes for x in weights.values()), broadcast)


def piece_bytes(piece: Any) -> int:
    from bray import tree
    from bray.data.piece import COLUMNS

    columns = [getattr(piece, name) for name in COLUMNS if getattr(piece, name) is not None]
    return sum(leaf.nbytes for column in columns for leaf in tree.leaves(column))


def through_ray(piece: Any, weights: Mapping[str, np.ndarray], seconds: float) -> tuple[float, float]:
    """(pieces per second from two workers, seconds of a broadcast to both)"""
    from bray.cluster.ray_workers import RayWorkers
    from bray.data.piece import side_by_side

    home = RayWorkers("figures", 2, 1, 0, "", RAY)
    try:
        workers = [home.start(partial(Holder, piece)) for _ in range(2)]
        for worker in workers:
            worker.started()

        def broadcast() -> None:
            ref = home.put(weights)
            for worker in workers:
                worker.send("take", ref)
            for worker in workers:
                worker.receive(None)

        times = 1 / per_second(broadcast, seconds)
        for worker in workers:
            worker.send("give")

        def take_two() -> None:
            for worker in workers:
                worker.send("give")  # two questions under way
            side_by_side([worker.receive(None) for worker in workers])

        return 2 * per_second(take_two, seconds), times
    finally:
        for worker in workers:
            worker.close()
        home.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("cases", nargs="*", default=list(CASES), metavar="|".join(CASES))
    parser.add_argument("--cores", type=int, default=16, help="of a node")
    parser.add_argument("--link", type=float, default=10.0, help="of the learner, Gbit/s")
    parser.add_argument("--learner", type=float, help="samples/s of a faster learner, measured elsewhere")
    parser.add_argument("--seconds", type=float, default=4.0, help="per number")
    options = parser.parse_args()
    for case in options.cases:
        inputs = measure(case, options.seconds)
        print(f"\n{case}: measured on this machine")
        for name, value in inputs._asdict().items():
            print(f"  {name:18} {value:,.4g}" if value < 100 else f"  {name:18} {value:,.0f}")
        if options.learner:
            inputs = inputs._replace(learner_samples_s=options.learner)
        print(f"{case}: extrapolated to nodes of {options.cores} cores, a link of {options.link:g} Gbit/s")
        print(
            "| nodes | rollout/s | network/s | store/s | learner/s | broadcast | bound by "
            "|\n|--:|--:|--:|--:|--:|--:|---|"
        )
        for nodes in NODES:
            r = reach(inputs, nodes, options.cores, options.link * GBIT)
            row = " | ".join(f"{x:,.0f}" for x in r[:4])
            print(f"| {nodes:,} | {row} | {r.broadcast_s:,.3f} s | {r.bound} |")
        print(f"more nodes than {enough(inputs, options.cores, options.link * GBIT)} do not help")


if __name__ == "__main__":
    main()
