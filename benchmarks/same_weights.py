"""python -m benchmarks.same_weights [CASE ...] [--against REV] [--steps 20000] [--seeds 0 1]: does this tree train the
same weights, bit for bit?

Each case is trained by the command line of this tree (with what is not committed yet) and by the one of another commit,
in turn on this machine.
Compared are the tensors of the newest model file and the columns of result.jsonl that both have, without those that
tell the time. Rows of launched runs are written as time passes, and only their weights are compared. Exit code 0: all
equal; 1: something differs, or a training failed.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file

ROOT = Path(__file__).parent.parent
BASE = "fdd0939"
DATA_STEPS = 4_000
"""Of the trajectory files that `--data` and launched trainings learn from."""
LAUNCHED_ENV = "Acrobot-v1"
"""One without a preset: a launched run of fdd0939 knows none, and later ones do."""
LAUNCHED_ROWS = 256
"""Of a batch of the buffer."""
LAUNCHED_SETTINGS: dict[str, dict[str, Any]] = {
    "PPO": {"lr": 1e-3, "gamma": 0.98, "epochs": 4, "minibatches": 4},
    "DQN": {
        "lr": 1e-3,
        "batch_size": 32,
        "learning_starts": 200,
        "train_every": 4,
        "target_period": 50,
        "n_step": 3,
        "prioritized": True,
        "replay_size": 10_000,
    },
}
ENV_STEPS_PER_STEP = {"PPO": LAUNCHED_ROWS // 16, "DQN": 4, "Loss": LAUNCHED_ROWS}
"""Environment steps of a gradient step."""


@dataclass(frozen=True)
class Job:
    """One training: how much, and where."""

    steps: int
    seed: int
    folder: Path
    """The run directory is `run` in it."""
    data: Path
    """Trajectory files, the same for both trees."""


Case = Callable[[Job], list[list[str]]]
"""The commands of `bray` that train a job, one after the other."""


def trains(*words: str) -> Case:
    """`bray train` with these arguments. Presets are those of each tree: a changed preset is a difference."""
    return lambda job: [[*_begin(job), *words, "--steps", str(job.steps)]]


def resumes(*words: str) -> Case:
    """The same, stopped in the middle and resumed."""

    def commands(job: Job) -> list[list[str]]:
        resume = ["train", "--resume", str(job.folder / "run"), "--steps", str(job.steps), "--quiet"]
        return [[*_begin(job), *words, "--steps", str(job.steps // 2)], resume]

    return commands


def learns_from_files(*words: str) -> Case:
    """`bray train --data`: as many gradient steps as would be one for two environment steps."""

    def commands(job: Job) -> list[list[str]]:
        stop = json.dumps({"learner_steps_total": job.steps // 2})
        return [[*_begin(job), *words, "--data", str(job.data), "data.epochs=1000", "--stop", stop]]

    return commands


def launches(trainer: str, resume: bool = False) -> Case:
    """`bray launch` of `benchmarks.launched`, in one process; with `resume` it is stopped in the middle and launched
    again."""

    def commands(job: Job) -> list[list[str]]:
        file = write_launch_file(job.folder, trainer, job.data, job.steps, job.seed)
        words = ["launch", "--config", str(file), "--cluster", "local", "--quiet"]
        half = num_steps(trainer, job.steps // 2)
        return [[*words, f"trainer1.num_steps={half}"], words] if resume else [words]

    return commands


def write_launch_file(folder: Path, trainer: str, data: Path, steps: int, seed: int) -> Path:
    """A launch file, and the module that it names beside it: rows of the files under `data` train in one process, and
    every draw has a seed. `trainer`: the algorithm whose Learner trains, or Loss: `launched.Loss`, on the rows that PPO
    prepares."""
    shutil.copy(ROOT / "benchmarks" / "launched.py", folder / "launched.py")
    algorithm = "PPO" if trainer == "Loss" else trainer
    trains = {"module": "launched", "class": "Loss"} if trainer == "Loss" else {"algo": "algo1"}
    agent = {"kind": "agent", "module": "launched", "class": "Agent", "model": "model1"}
    graph = {
        "project": str(folder),
        "trial": "run",
        "game": {"kind": "config", "files": str(data), "seed": seed},
        "algo1": {
            "kind": "config",
            "algorithm": algorithm,
            "env": LAUNCHED_ENV,
            "settings": LAUNCHED_SETTINGS[algorithm],
        },
        "model1": {"kind": "model", "module": "launched", "local_mode": True},
        "source1": {"kind": "source", "module": "launched"},
        "buffer1": {"kind": "buffer", "sources": ["source1"], "size": 4, "batch_size": LAUNCHED_ROWS, "num_workers": 1},
        "agent1": {**agent, "algo": "algo1", "buffer": "buffer1"},  # it names the algorithm of the rows, and never acts
        "trainer1": {
            "kind": "trainer",
            **trains,
            "model": "model1",
            "buffers": ["buffer1"],
            "num_steps": num_steps(trainer, steps),
        },
    }
    file = folder / "launch.yaml"
    file.write_text(json.dumps(graph, indent=1))  # JSON is YAML
    return file


def num_steps(trainer: str, steps: int) -> int:
    """Gradient steps, for about `steps` environment steps."""
    return max(1, steps // ENV_STEPS_PER_STEP[trainer])


def _begin(job: Job) -> list[str]:
    where = ["--project", str(job.folder), "--trial", "run"]
    return ["train", *where, "--seed", str(job.seed), "--quiet", "save_figure=false", "export_graph_after_s=null"]


_PPO, _DQN = ("--run", "PPO", "--env", "CartPole-v1"), ("--run", "DQN", "--env", "CartPole-v1")
CASES: dict[str, Case] = {
    "ppo": trains(*_PPO),
    "ppo-lstm": trains(*_PPO, "use_lstm=true"),
    "a2c": trains("--run", "A2C", "--env", "CartPole-v1"),
    "dqn": trains(*_DQN, "n_step=1"),
    "dqn-prioritized": trains(*_DQN, "prioritized=true", "n_step=3"),
    "sac": trains("--run", "SAC", "--env", "Pendulum-v1", "learning_starts=1000"),  # its default has changed
    "ppo-workers": trains(*_PPO, "--num-workers", "2"),
    "a2c-workers": trains("--run", "A2C", "--env", "CartPole-v1", "--num-workers", "2"),
    "ppo-resume": resumes(*_PPO),
    "dqn-resume": resumes(*_DQN, "prioritized=true"),
    "dqn-data": learns_from_files("--run", "DQN"),
    "ppo-launch": launches("PPO"),
    "dqn-launch": launches("DQN"),
    "loss-launch": launches("Loss"),
    "launch-resume": launches("DQN", resume=True),
}


@dataclass(frozen=True)
class Trained:
    """What one training left."""

    seconds: float
    weights: str = ""
    """sha256 of the tensors of the newest model file."""
    rows: tuple[dict[str, Any], ...] = ()
    error: str = ""


def train(tree: Path, case: str, job: Job) -> Trained:
    """Train one case with the code under `tree`."""
    start = time.perf_counter()
    commands = CASES[case](job)
    for words in commands:
        error = run_bray(tree, words, job.folder)
        if error:
            return Trained(time.perf_counter() - start, error=error)
    seconds, run = time.perf_counter() - start, job.folder / "run"
    rows: list[dict[str, Any]] = []
    if commands[0][0] != "launch":
        rows = [json.loads(line) for line in (run / "result.jsonl").read_text().splitlines()]
    return Trained(seconds, fingerprint(newest_model(run)), tuple(rows))


def run_bray(tree: Path, words: list[str], cwd: Path) -> str:
    """Run a command of `bray` with the code under `tree`; the last line of its error, empty where it had none."""
    command = [sys.executable, "-m", "bray", *words]
    done = subprocess.run(command, capture_output=True, text=True, env=environment(tree), cwd=cwd)
    if not done.returncode:
        return ""
    return (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]


def make_data(tree: Path, folder: Path) -> Path:
    """Trajectory files of a policy that has learnt little, and plays by chance."""
    run, data = folder / "played" / "run", folder / "data"
    words = ["--run", "PPO", "--env", LAUNCHED_ENV, "--project", str(run.parent), "--trial", run.name, "--quiet"]
    collect = ["collect", str(run), "--act", "sample", "--steps", str(DATA_STEPS), "--out", str(data)]
    for command in (["train", *words, "--steps", "1000", "--seed", "0", "save_figure=false"], collect):
        if error := run_bray(tree, command, folder):
            raise SystemExit(f"bray {command[0]} of {tree} failed: {error}")
    return data


def environment(tree: Path) -> dict[str, str]:
    """`bray` is the one under `tree`. One thread: sums in another order are other sums."""
    env = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    return env | {"PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}


def check_import(tree: Path, cwd: Path) -> None:
    """An installed Bray must not come before the tree that is meant: everything would be equal."""
    code = "import bray; print(bray.__file__)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment(tree), cwd=cwd)
    if not done.stdout.startswith(str(tree) + os.sep):
        raise SystemExit(f"expected bray of {tree}, got {done.stdout.strip() or done.stderr.strip()}")


def newest_model(run: Path) -> Path:
    return max((run / "models").glob("*/*.safetensors"), key=lambda file: int(file.stem))


def fingerprint(file: Path) -> str:
    """sha256 of the names, types, shapes and bytes of a file's tensors (its header may hold other things, like a
    version)."""
    sha = hashlib.sha256()
    for name, x in sorted(load_file(file).items()):
        sha.update(f"{name} {x.dtype} {x.shape} ".encode() + np.ascontiguousarray(x).tobytes())
    return sha.hexdigest()


def deterministic(key: str) -> bool:
    """Whether a column says what was learnt, and not when, where and how fast."""
    told = key in ("date", "pid", "hostname") or key.startswith(("time_", "perf/")) or key.endswith("_per_second")
    return not told


def difference(ours: Trained, theirs: Trained) -> str:
    """The first thing that differs, in words; empty where nothing does."""
    for side, trained in (("this tree", ours), ("the other", theirs)):
        if trained.error:
            return f"{side} failed: {trained.error}"
    if len(ours.rows) != len(theirs.rows):
        return f"{len(ours.rows)} rows of results, the other has {len(theirs.rows)}"
    for i, (a, b) in enumerate(zip(ours.rows, theirs.rows, strict=True), 1):
        for key in sorted(a.keys() & b.keys()):
            if deterministic(key) and json.dumps(a[key]) != json.dumps(b[key]):  # as text: NaN equals NaN
                return f"row {i}: {key} is {a[key]}, the other has {b[key]}"
    return "" if ours.weights == theirs.weights else "the results are equal, the weights are not"


@contextlib.contextmanager
def other_tree(rev: str, folder: Path) -> Iterator[Path]:
    """The files of a commit, as long as they are needed."""
    tree = folder / "other"
    subprocess.run(["git", "worktree", "add", "--quiet", "--detach", str(tree), rev], cwd=ROOT, check=True)
    try:
        yield tree
    finally:
        subprocess.run(["git", "worktree", "remove", "--force", str(tree)], cwd=ROOT, check=True)


def compare(trees: tuple[Path, Path], case: str, job: Job) -> str:
    """Train a case with both trees, one after the other, and print the row of the table; returns the difference."""
    sides = []
    for i, tree in enumerate(trees):
        place = job.folder / f"{case}-{job.seed}-{i}"
        place.mkdir()
        sides.append(train(tree, case, replace(job, folder=place)))
    ours, theirs = sides
    differs = difference(ours, theirs)
    columns = {k for row in ours.rows for k in row if deterministic(k)} & {k for row in theirs.rows for k in row}
    said = [case, str(job.seed), str(len(ours.rows)), str(len(columns)), ours.weights[:12], theirs.weights[:12]]
    print(show([*said, f"{ours.seconds:.0f} s", f"{theirs.seconds:.0f} s", differs or "equal"]), flush=True)
    return differs


def show(cells: list[str]) -> str:
    widths = (15, 4, 5, 7, 12, 12, 7, 7, 0)
    return "  ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)).rstrip()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", help=f"{', '.join(CASES)}; none: all")
    parser.add_argument("--against", default=BASE, metavar="REV", help=f"the other commit (default {BASE})")
    parser.add_argument("--steps", type=int, default=20_000, help="env steps of each training")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--jobs", type=int, default=2, help="trainings at a time, one thread each")
    args = parser.parse_args()
    for case in args.cases:
        if case not in CASES:
            parser.error(f"unknown case {case!r}; known: {', '.join(CASES)}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the worktree is removed
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary).resolve()
        with other_tree(args.against, folder) as other, ThreadPoolExecutor(args.jobs) as pool:
            for tree in (ROOT, other):
                check_import(tree, folder)
            print(show(["case", "seed", "rows", "columns", "weights", args.against[:12], "time", "time", "result"]))
            data = make_data(other, folder)
            work = [(case, Job(args.steps, seed, folder, data)) for case in args.cases or CASES for seed in args.seeds]
            jobs = [pool.submit(compare, (ROOT, other), case, job) for case, job in work]
            try:
                differ = sum(bool(job.result()) for job in jobs)
            except BaseException:
                pool.shutdown(cancel_futures=True)  # those under way end first
                raise
    print(f"{len(work) - differ} of {len(work)} equal to {args.against}, {time.perf_counter() - start:.0f} s")
    return 1 if differ else 0


if __name__ == "__main__":
    sys.exit(main())
