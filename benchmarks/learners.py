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
import faulthandler
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

import bray
from bray.metrics.spent import PHASES

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


def on_cores(processes: Iterable[int]) -> float:
    """Seconds of CPU that they have had."""
    seconds = 0.0
    for process in processes:
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
        seconds += (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return seconds


def say(what: str) -> None:
    print(f"  {time.monotonic() - _BEGAN:6.1f} s  {what}", file=sys.stderr, flush=True)


_BEGAN = time.monotonic()


def train(settings: dict[str, Any], env: str, seconds: float, path: str) -> None:
    """In a process of its own: its last words are steps per second and CPU milliseconds per step. What it says before
    is where it is."""
    faulthandler.register(signal.SIGUSR1)
    say(f"{settings['num_learners']} learners, record={settings.get('record', True)}")
    with bray.Experiment("PPO", env, use_preset=False, seed=1, config=settings, path=path) as exp:
        rows = exp.train()
        for number in range(2):
            next(rows)
            say(f"iteration {number + 1}, {exp.last_row['env_steps_total']} steps")  # recorded by now
        if settings["device"] == "cuda":
            parts = [x.reshape(-1).astype(float) for x in exp.training.weights().values()]
            np.save(path + ".npy", np.concatenate(parts))
            recorded, agree = exp.training.learner.is_recorded, getattr(exp.training, "agree", True)
            say(f"{'recorded' if recorded else 'eager'}, {'all agree' if agree else 'ranks differ'}")
        processes = [os.getpid(), *getattr(exp.training, "process_ids", [])]
        start, cpu, steps = time.perf_counter(), on_cores(processes), exp.last_row["env_steps_total"]
        seen = [next(rows)]
        while time.perf_counter() - start < seconds:
            seen.append(next(rows))
        steps = seen[-1]["env_steps_total"] - steps
        seconds = time.perf_counter() - start
        spent = {phase: statistics.median(row[f"perf/{phase}"] for row in seen) for phase in PHASES}
        say("ms of an iteration of the first: " + ", ".join(f"{phase} {ms:.0f}" for phase, ms in spent.items()))
        print(steps / seconds, 1000 * (on_cores(processes) - cpu) / steps, flush=True)
        rows.close()


def run(
    settings: dict[str, Any], seconds: float, env: str, path: str, limit: float, copies: int = 1
) -> tuple[float, float]:
    """Steps per second of one training, or of several that know nothing of each other, and CPU milliseconds per step.
    One that takes longer than `limit` seconds says where all its processes are, and the program ends."""
    end, found, processes = time.monotonic() + limit, [], []
    for number in range(copies):
        told = json.dumps([{**SETTINGS, **settings}, env, seconds, f"{path}{number or ''}"])
        command = [sys.executable, "-m", "benchmarks.learners", "--one", told]
        processes.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
    for process in processes:
        try:
            said, _ = process.communicate(timeout=end - time.monotonic())
        except subprocess.TimeoutExpired:
            print(f"{settings}: more than {limit:g} s", file=sys.stderr, flush=True)
            stuck = [member for first in processes for member in members(first.pid)]
            for member in stuck:
                print(where(member), file=sys.stderr, flush=True)
            for member in stuck:
                with suppress(ProcessLookupError):
                    os.kill(member, signal.SIGKILL)
            sys.exit(1)
        if process.returncode:
            sys.exit(f"{settings}: it ended with {process.returncode}, see above")
        found.append([float(x) for x in said.split()[-2:]])
    return sum(speed for speed, _ in found), statistics.mean(cpu for _, cpu in found)


def members(first: int) -> list[int]:
    """A process and all below it."""
    parents = {}
    for folder in Path("/proc").iterdir():
        with suppress(OSError, ValueError):
            parents[int(folder.name)] = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
    found = [first]
    for member in found:
        found += [child for child, parent in parents.items() if parent == member]
    return found


def where(process: int) -> str:
    """What each thread of a process does: the first one has been told to write that to its stderr at SIGUSR1, others
    (`bray/envs/process.py`) to a file."""
    files = [Path(f"/proc/{process}/fd/{name}") for name in os.listdir(f"/proc/{process}/fd")]
    traces = [file for file in files if "/bray-learner-" in os.readlink(file)]
    if not traces and "benchmarks.learners\0--one" not in Path(f"/proc/{process}/cmdline").read_text():
        return ""
    os.kill(process, signal.SIGUSR1)
    time.sleep(1.0)
    return f"--- process {process}\n" + "".join(file.read_text() for file in traces)


def measure_gpu(seconds: float, env: str, limit: float) -> None:
    """See the module."""
    weights: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="bray-learners-") as folder:
        for case, learners, record in (("one", 1, True), ("two eager", 2, False), ("two recorded", 2, True)):
            settings = {"num_learners": learners, "threads": 4, "device": "cuda", "record": record}
            speed, cpu = run(settings, seconds, env, f"{folder}/{case}", limit)
            weights[case] = np.load(f"{folder}/{case}.npy")
            print(json.dumps({"case": case, "steps_per_s": round(speed, 1), "cpu_ms": round(cpu, 3)}), flush=True)
    apart = float(np.abs(weights["two recorded"] - weights["two eager"]).max())
    moved = float(np.abs(weights["one"] - weights["two eager"]).max())
    print(json.dumps({"recorded_and_eager_differ_at_most": apart, "one_and_two_differ_at_most": moved}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", default=["1x1", "1x2", "2x1"], metavar="LEARNERSxTHREADS")
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--env", default="ALE/Pong-v5")
    parser.add_argument("--gpu", action="store_true")
    parser.add_argument("--limit", type=float, default=300.0, help="seconds of a case: then it says where it is")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one:
        train(*json.loads(given.one))
        return
    if given.gpu:
        measure_gpu(given.seconds, given.env, given.limit)
        return
    found: dict[str, list[tuple[float, float]]] = {case: [] for case in given.cases}
    for _ in range(given.repeat):
        for case in given.cases:
            learners, threads, copies = map(int, re.fullmatch(r"(\d+)x(\d+)(?:\*(\d+))?", case).groups("1"))
            with tempfile.TemporaryDirectory(prefix="bray-learners-") as folder:
                settings = {"num_learners": learners, "threads": threads}
                found[case].append(run(settings, given.seconds, given.env, f"{folder}/run", given.limit, copies))
            say("{}: {:.1f} steps/s, {:.3f} ms of CPU a step".format(case, *found[case][-1]))
    medians = {case: [statistics.median(x) for x in zip(*each, strict=True)] for case, each in found.items()}
    best = max(
        (speed for case, (speed, _) in medians.items() if case.startswith("1x") and "*" not in case),
        default=float("nan"),
    )
    for case, (speed, cpu) in medians.items():
        ratio = round(speed / best, 3)
        print(json.dumps({"case": case, "steps_per_s": round(speed, 1), "to_best": ratio, "cpu_ms": round(cpu, 3)}))


if __name__ == "__main__":
    main()
