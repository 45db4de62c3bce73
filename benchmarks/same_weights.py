"""python -m benchmarks.same_weights [CASE ...] [--against REV] [--steps 20000] [--seeds 0 1]: does this tree train the
same weights, bit for bit?

Each case is trained by the command line of this tree (with what is not committed yet) and by the one of another commit,
in turn on this machine.
Compared are the tensors of the newest model file and the columns of result.jsonl that both have, without those that
tell the time. Exit code 0: all equal; 1: something differs, or a training failed.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file

ROOT = Path(__file__).parent.parent
BASE = "f9b96a5"
CASES: dict[str, list[str]] = {
    "ppo": ["--run", "PPO", "--env", "CartPole-v1"],
    "ppo-lstm": ["--run", "PPO", "--env", "CartPole-v1", "use_lstm=true"],
    "a2c": ["--run", "A2C", "--env", "CartPole-v1"],
    "dqn": ["--run", "DQN", "--env", "CartPole-v1", "n_step=1"],
    "dqn-prioritized": ["--run", "DQN", "--env", "CartPole-v1", "prioritized=true", "n_step=3"],
    "sac": ["--run", "SAC", "--env", "Pendulum-v1"],
}
"""The arguments of `bray train`. Presets are those of each tree: a changed preset is a difference."""


@dataclass(frozen=True)
class Trained:
    """What one training left."""

    seconds: float
    weights: str = ""
    """sha256 of the tensors of the newest model file."""
    rows: tuple[dict[str, Any], ...] = ()
    error: str = ""


def train(tree: Path, case: str, steps: int, seed: int, folder: Path) -> Trained:
    """Train one case with the code under `tree`."""
    words = [*CASES[case], "--steps", str(steps), "--seed", str(seed), "--project", str(folder), "--trial", "run"]
    start = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-m", "bray", "train", *words, "--quiet", "save_figure=false"],
        capture_output=True,
        text=True,
        env=environment(tree),
        cwd=folder,
    )
    seconds = time.perf_counter() - start
    if done.returncode:
        return Trained(seconds, error=(done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1])
    rows = tuple(json.loads(line) for line in (folder / "run" / "result.jsonl").read_text().splitlines())
    return Trained(seconds, fingerprint(newest_model(folder / "run")), rows)


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
    return max((run / "models" / "default").glob("*.safetensors"), key=lambda file: int(file.stem))


def fingerprint(file: Path) -> str:
    """sha256 of the names, types, shapes and bytes of a file's tensors (its header may hold other things, like a
    version)."""
    sha = hashlib.sha256()
    for name, x in sorted(load_file(file).items()):
        sha.update(f"{name} {x.dtype} {x.shape} ".encode() + np.ascontiguousarray(x).tobytes())
    return sha.hexdigest()


def deterministic(key: str) -> bool:
    return not key.startswith(("time_", "perf/")) and not key.endswith("_per_second")


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


def compare(trees: tuple[Path, Path], case: str, steps: int, seed: int, folder: Path) -> str:
    """Train a case with both trees, one after the other, and print the row of the table; returns the difference."""
    sides = []
    for i, tree in enumerate(trees):
        place = folder / f"{case}-{seed}-{i}"
        place.mkdir()
        sides.append(train(tree, case, steps, seed, place))
    ours, theirs = sides
    differs = difference(ours, theirs)
    columns = {k for row in ours.rows for k in row if deterministic(k)} & {k for row in theirs.rows for k in row}
    said = [case, str(seed), str(len(ours.rows)), str(len(columns)), ours.weights[:12], theirs.weights[:12]]
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
            work = [(case, seed) for case in args.cases or CASES for seed in args.seeds]
            jobs = [pool.submit(compare, (ROOT, other), case, args.steps, seed, folder) for case, seed in work]
            try:
                differ = sum(bool(job.result()) for job in jobs)
            except BaseException:
                pool.shutdown(cancel_futures=True)  # those under way end first
                raise
    print(f"{len(work) - differ} of {len(work)} equal to {args.against}, {time.perf_counter() - start:.0f} s")
    return 1 if differ else 0


if __name__ == "__main__":
    sys.exit(main())
