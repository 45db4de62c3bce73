"""python -m benchmarks.cluster [ppo] [learners] [tune] [--seconds 10]: a Ray cluster of four simulated nodes, of which
one leaves (all its processes are killed) and another one joins while work is under way.

    ppo        PPO with four workers, whose environments sleep 5 ms: steps/s before, without the node, with another
    learners   two learners, one of them on the node that leaves: steps are counted without a gap, both have the same
               weights at the end
    tune       eight trials, four at a time: each is finished, once

The nodes share the cores of this machine: rates say that all play again, and not what more cores bring.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import bray

NODE: dict[str, Any] = {"num_cpus": 2, "object_store_memory": 80 << 20, "include_dashboard": False}
_PATIENCE_S = 600.0


@contextmanager
def four_nodes(head_cpus: int = 2) -> Iterator[tuple[Any, list[Any]]]:
    """(cluster, its nodes without the first one), which nobody else finds."""
    import ray
    from ray.cluster_utils import Cluster

    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    os.environ |= {"RAY_AUTH_MODE": "disabled", "RAY_worker_niceness": "0"}
    os.environ["RAY_TMPDIR"] = folder = tempfile.mkdtemp(prefix="ray-")  # short: Ray's sockets are in it
    made = Cluster(initialize_head=True, head_node_args={**NODE, "num_cpus": head_cpus})
    try:
        yield made, [made.add_node(**NODE) for _ in range(3)]
    finally:
        ray.shutdown()
        made.shutdown()
        shutil.rmtree(folder, ignore_errors=True)


def say(case: str, **found: Any) -> None:
    print(json.dumps({"case": case, **found}), flush=True)


def pace(training: Any, seconds: float) -> float:
    """Environment steps per second."""
    start, steps = time.perf_counter(), training.totals.env_steps
    while time.perf_counter() - start < seconds:
        training.iterate()
    return round((training.totals.env_steps - steps) / (time.perf_counter() - start), 1)


def until(training: Any, holds: Any) -> float:
    """Seconds until something holds of a row."""
    start = time.perf_counter()
    while not holds(training.iterate()):
        if time.perf_counter() - start > _PATIENCE_S:
            raise SystemExit(f"nothing has changed for {_PATIENCE_S:g} s")
    return round(time.perf_counter() - start, 1)


def raylet_of(process: int) -> int:
    """Ray's process on a worker's node has started the worker."""
    return int(Path(f"/proc/{process}/stat").read_text().rpartition(") ")[2].split()[1])


def raylets(node: Any) -> list[int]:
    return [about.process.pid for about in node.all_processes["raylet"]]


def node_of(_: Any) -> str:
    import ray

    return str(ray.get_runtime_context().get_node_id())


def ppo(seconds: float) -> None:
    config = {"num_envs": 2, "num_workers": 4, "rollout_length": 32, "minibatches": 2, "epochs": 2, "device": "cpu"}
    with four_nodes() as (cluster, nodes):
        more = {"address": cluster.address, "vector": "inprocess", "threads": 1, "export_graph_after_s": None}
        with bray.Experiment("PPO", "benchmarks.scale.envs:Sleep", use_preset=False, config={**config, **more}) as exp:
            training = exp.training
            training.iterate()
            before, places = pace(training, seconds), len(set(exp.foreach_worker(node_of)))
            where = exp.foreach_worker(node_of)
            leaving = next(node for node in nodes if node.node_id in where)
            steps, lost = training.totals.env_steps, where.count(leaving.node_id)
            cluster.remove_node(leaving, allow_graceful=False)
            pause = until(training, lambda row: row["workers/restarts"] >= lost)
            without = pace(training, seconds)
            cluster.add_node(**NODE)
            after = pace(training, seconds)
            say(
                "ppo", steps_per_s_before=before, nodes_with_workers=places, workers_lost=lost, pause_s=pause,
                without=without, with_another=after, recovered=round(after / before, 2),
                steps_went_on=training.totals.env_steps > steps, restarts=training.sources[0].restarts,
            )  # fmt: skip


def learners(seconds: float) -> None:
    config = {"num_envs": 2, "num_learners": 2, "rollout_length": 32, "minibatches": 2, "epochs": 2, "device": "cpu"}
    with four_nodes(head_cpus=0) as (cluster, nodes):
        more = {"address": cluster.address, "vector": "inprocess", "threads": 1, "export_graph_after_s": None}
        with bray.Experiment("PPO", "benchmarks.scale.envs:Sleep", use_preset=False, config={**config, **more}) as exp:
            training = exp.training
            training.iterate()
            before = pace(training, seconds)
            leaving = next(node for node in nodes if raylet_of(training.process_ids[0]) in raylets(node))
            steps, updates, start = training.totals.env_steps, training.learner.steps, time.perf_counter()
            cluster.remove_node(leaving, allow_graceful=False)
            training.iterate()
            pause = round(time.perf_counter() - start, 1)
            without = pace(training, seconds)
            cluster.add_node(**NODE)
            after = pace(training, seconds)
            say(
                "learners", steps_per_s_before=before, pause_s=pause, without=without,
                with_another=after, recovered=round(after / before, 2), all_agree=training.agree,
                restarts=training.restarts, steps_went_on=training.totals.env_steps > steps,
                updates_went_on=training.learner.steps > updates,
            )  # fmt: skip


def tune(seconds: float) -> None:
    with four_nodes() as (cluster, nodes), tempfile.TemporaryDirectory() as folder:
        rates = ",".join(f"{10.0 ** -(2 + i / 4):.5f}" for i in range(8))
        keys = [f"lr={rates}", "num_envs=2", "rollout_length=32", "minibatches=2", "epochs=2", "checkpoint_every_s=1"]
        where = ["--cluster", "ray", "--address", cluster.address, "--parallel", "4", "--project", folder]
        what = ["--run", "PPO", "--env", "CartPole-v1", "--name", "s", "--steps", "4000", "--fresh-seeds", "0"]
        study = subprocess.Popen([sys.executable, "-m", "bray", "tune", *what, *where, *keys])
        start = time.perf_counter()
        try:
            while len(begun := list(Path(folder).glob("s/trial-*/seed-0/checkpoints/latest"))) < 2:
                if study.poll() is not None or time.perf_counter() - start > _PATIENCE_S:
                    raise SystemExit(f"{len(begun)} of 4 trials have a checkpoint after {_PATIENCE_S:g} s")
                time.sleep(0.2)
            cluster.remove_node(nodes[0], allow_graceful=False)
            time.sleep(seconds)
            cluster.add_node(**NODE)
            running = study.poll() is None
            study.wait(_PATIENCE_S)
        finally:
            study.kill()
            study.wait()
        took = round(time.perf_counter() - start, 1)
        with open(Path(folder) / "s" / "trials.csv", newline="") as file:
            rows = list(csv.DictReader(file))
        complete, numbers = [row["state"] for row in rows].count("complete"), {row["lr"] for row in rows}
        say(
            "tune", trials=len(rows), complete=complete, settings=len(numbers), seconds=took,
            changed_while_at_work=running,
        )  # fmt: skip


CASES = {"ppo": ppo, "learners": learners, "tune": tune}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"{', '.join(CASES)}; all without any")
    parser.add_argument("--seconds", type=float, default=10.0, help="of each measurement")
    given = parser.parse_args()
    if unknown := set(given.cases) - set(CASES):
        parser.error(f"{', '.join(sorted(unknown))}: expected some of {', '.join(CASES)}")
    for case in given.cases or CASES:
        CASES[case](given.seconds)


if __name__ == "__main__":
    main()
