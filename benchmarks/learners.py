"""python -m benchmarks.learners [--learners 1 2] [--threads 1 2] [--seconds 20] [--repeat 3]: what several learners
gain.

PPO with a wide network of convolutions on Pong, 8 environments and a batch of 512 rows for each learner: one learner
with each number of threads, and several with one thread each, by turns, each a process (and its children) of its own.
Environment steps per second of wall time, all learners together: medians, and the ratio to the best of one learner.
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
import json, sys, time
import bray
if __name__ == "__main__":
    settings, seconds, path = json.loads(sys.argv[1])
    with bray.Experiment("PPO", "ALE/Pong-v5", use_preset=False, seed=1, config=settings, path=path) as exp:
        rows = exp.train()
        next(rows), next(rows)  # recorded by now
        start, steps = time.perf_counter(), exp.last_row["env_steps_total"]
        while time.perf_counter() - start < seconds:
            row = next(rows)
        print((row["env_steps_total"] - steps) / (time.perf_counter() - start))
"""


def measure(learners: int, threads: int, seconds: float) -> float:
    """Steps per second of one training."""
    with tempfile.TemporaryDirectory(prefix="bray-learners-") as folder:
        told = json.dumps([{**SETTINGS, "num_learners": learners, "threads": threads}, seconds, f"{folder}/run"])
        done = subprocess.run([sys.executable, "-c", _RUN, told], capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{learners} learners, {threads} threads: {done.stderr.strip()[-400:]}")
    return float(done.stdout.split()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--learners", type=int, nargs="+", default=[2])
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--repeat", type=int, default=3)
    given = parser.parse_args()
    cases = [(1, threads) for threads in given.threads] + [(learners, 1) for learners in given.learners]
    found: dict[tuple[int, int], list[float]] = {case: [] for case in cases}
    for _ in range(given.repeat):
        for case in cases:
            found[case].append(measure(*case, given.seconds))
    medians = {case: statistics.median(speeds) for case, speeds in found.items()}
    best = max(speed for (learners, _), speed in medians.items() if learners == 1)
    for (learners, threads), speed in medians.items():
        each = " ".join(f"{s:.0f}" for s in found[learners, threads])
        print(
            json.dumps({"learners": learners, "threads": threads, "steps_per_s": round(speed), "ratio": speed / best})
        )
        print(f"  {each}", file=sys.stderr)


if __name__ == "__main__":
    main()
