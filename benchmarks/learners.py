"""python -m benchmarks.learners [--cases 1x1 1x2 2x1] [--seconds 20] [--repeat 3] [--env ID]: what several learners
gain.

A case is learners x threads of each: PPO with a wide network of convolutions on Pong, 8 environments and a batch of 512
rows for each learner; by turns, each a process (and its children) of its own. Environment steps per second of wall
time, all learners together: medians, and the ratio to the best of one learner. CPU milliseconds per step, of all
processes, say what is spent where other programs take cores.

`--env benchmarks.serving.capacity:Pictures` needs no ALE.

`--gpu`: on one GPU, which all share: one learner, two that run their updates eagerly, and two that record them as CUDA
graphs with the all-reduce between; also whether these two have learnt the same, and whether all ranks agree.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from typing import Any

SETTINGS: dict[str, Any] = {
    "device": "cpu",
    "num_workers": 0,
    "num_envs": 8,
    "rollout_length": 64,
    "epochs": 2,
    "minibatches": 4,
    "conv_filters": [[64, 8, 4], [128, 4, 2], [128, 3, 1]],
    "fcnet_hiddens": [512],
    "checkpoint_freq": 0,
    "eval_freq": 0,
    "export_graph_after_s": None,
}
_RUN = """
import json, os, sys, time
import bray

def on_cores(processes):
    seconds = 0.0
    for process in processes:
        with open(f"/proc/{process}/stat") as file:
            fields = file.read().rpartition(")")[2].split()
        seconds += (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return seconds

if __name__ == "__main__":
    settings, env, seconds, path = json.loads(sys.argv[1])
    if settings["device"] == "cuda":
        from bray.train.learners import LearnersTraining
        LearnersTraining.records_on_gpus = True  # where `record` says so
    with bray.Experiment("PPO", env, use_preset=False, seed=1, config=settings, path=path) as exp:
        rows = exp.train()
        next(rows), next(rows)  # recorded by now
        if settings["device"] == "cuda":
            import numpy
            weights = numpy.concatenate([x.reshape(-1).astype(float) for x in exp.training.weights().values()])
            numpy.save(path + ".npy", weights)
            recorded, agree = exp.training.learner.is_recorded, getattr(exp.training, "agree", True)
            print("recorded" if recorded else "eager", "all agree" if agree else "ranks differ", file=sys.stderr)
        processes = [os.getpid(), *getattr(exp.training, "process_ids", [])]
        start, cpu, steps = time.perf_counter(), on_cores(processes), exp.last_row["env_steps_total"]
        row = next(rows)
        while time.perf_counter() - start < seconds:
            row = next(rows)
        steps = row["env_steps_total"] - steps
        seconds = time.perf_counter() - start
        print(steps / seconds, 1000 * (on_cores(processes) - cpu) / steps)
        rows.close()
"""


def run(settings: dict[str, Any], seconds: float, env: str, path: str) -> tuple[float, float, str]:
    """Steps per second of one training, CPU milliseconds per step, and what it said."""
    told = json.dumps([{**SETTINGS, **settings}, env, seconds, path])
    done = subprocess.run([sys.executable, "-c", _RUN, told], capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{settings}: {done.stderr.strip()[-2000:]}")
    speed, cpu = map(float, done.stdout.split()[-2:])
    return speed, cpu, done.stderr.strip()


def measure(learners: int, threads: int, seconds: float, env: str) -> tuple[float, float]:
    with tempfile.TemporaryDirectory(prefix="bray-learners-") as folder:
        return run({"num_learners": learners, "threads": threads}, seconds, env, f"{folder}/run")[:2]


def measure_gpu(seconds: float, env: str) -> None:
    """See the module."""
    import numpy as np

    weights: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="bray-learners-") as folder:
        for case, learners, record in (("one", 1, True), ("two eager", 2, False), ("two recorded", 2, True)):
            settings = {"num_learners": learners, "threads": 4, "device": "cuda", "record": record}
            speed, cpu, said = run(settings, seconds, env, f"{folder}/{case}")
            weights[case] = np.load(f"{folder}/{case}.npy")
            print(json.dumps({"case": case, "steps_per_s": round(speed, 1), "cpu_ms": cpu, "said": said}), flush=True)
    apart = np.abs(weights["two recorded"] - weights["two eager"])
    moved = np.abs(weights["one"] - weights["two eager"]).max()
    print(json.dumps({"recorded_and_eager_differ_at_most": apart.max(), "one_and_two_differ_at_most": moved}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", default=["1x1", "1x2", "2x1"], metavar="LEARNERSxTHREADS")
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--env", default="ALE/Pong-v5")
    parser.add_argument("--gpu", action="store_true")
    given = parser.parse_args()
    if given.gpu:
        measure_gpu(given.seconds, given.env)
        return
    found: dict[str, list[tuple[float, float]]] = {case: [] for case in given.cases}
    for _ in range(given.repeat):
        for case in given.cases:
            found[case].append(measure(*map(int, case.split("x")), given.seconds, given.env))
            print(f"  {case}: {found[case][-1][0]:.1f} steps/s", file=sys.stderr, flush=True)
    medians = {case: [statistics.median(x) for x in zip(*each, strict=True)] for case, each in found.items()}
    best = max((speed for case, (speed, _) in medians.items() if case.startswith("1x")), default=float("nan"))
    for case, (speed, cpu) in medians.items():
        print(json.dumps({"case": case, "steps_per_s": round(speed, 1), "to_best": speed / best, "cpu_ms": cpu}))


if __name__ == "__main__":
    main()
