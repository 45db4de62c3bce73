"""python -m benchmarks.kills [train launch] [--kills 30] [--every 3] [--seed 0] [--cluster ray]: kill trainings at
random moments, resume each, and count what is lost.

A training and all its processes are killed (SIGKILL) a random time after their first result row, every fifth one after
its start; the same command, or `--resume`, continues it. Lost training time is the time of the newest result row minus
that of the newest checkpoint.
Exit code 0: all were resumed, and none lost more than `checkpoint_every_s`. At the end result rows have no gap, and
TensorBoard has each of them.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from dataclasses import dataclass, field
from pathlib import Path

from bray.figures import read_results
from bray.rundir import RunDir
from tests.launch_end_for_tests import FILES

ROOT = Path(__file__).parent.parent
TRAIN = {
    "ppo": ["--run", "PPO", "--env", "CartPole-v1"],
    "ppo-subprocess": ["--run", "PPO", "--env", "CartPole-v1", "vector=subprocess", "num_envs=4", "num_processes=2"],
    "dqn": ["--run", "DQN", "--env", "CartPole-v1", "learning_starts=500", "train_every=16"],
}
"""By turns. The last one keeps rows of its replay in files beside the checkpoints."""
LAUNCH = {
    **FILES,
    "x.yaml": """
        project: runs
        trial: launch
        model1: {kind: model, module: killed.code, local_mode: true, tensorboard_step: true, checkpoint_every_s: EVERY}
        source1: {kind: source, module: killed.code, epoch: 1000}
        buffer1: {kind: buffer, sources: [source1], batch_size: 4, size: 8, num_workers: 1}
        trainer1: {kind: trainer, module: killed.code, class: Trainer, model: model1, buffers: [buffer1],
                   cpus_per_worker: 0.1}
    """,
}


START_S = 300
"""Seconds to the first result row, at most: a Ray on a busy machine takes minutes to start."""


@dataclass
class Case:
    """One run directory, and the commands that start and resume it."""

    name: str
    path: Path
    first: list[str]
    again: list[str]
    kills: int = 0
    failed: list[str] = field(default_factory=list)
    lost: list[float] = field(default_factory=list)
    """Seconds of training, by kill."""

    def start(self, folder: Path) -> subprocess.Popen[str]:
        words = self.again if RunDir(self.path).steps() else self.first
        command = [sys.executable, "-m", "bray", *words]
        env = os.environ | {"PYTHONPATH": f"{ROOT}:{folder}", "KILLED": str(folder), "RAY_ADDRESS": "local"}
        errors = open(folder / f"{self.name}.err", "w")  # noqa: SIM115
        return subprocess.Popen(
            command, cwd=folder, env=env, stdout=subprocess.DEVNULL, stderr=errors, process_group=0, text=True
        )

    def kill_once(self, folder: Path, seconds: float, starting: bool) -> None:
        """Start, wait, kill; then look at what is there. `seconds` count from its first result row, or from its
        start."""
        started = time.time()
        process = self.start(folder)
        rows = self.path / "result.jsonl"
        since = None if not starting or not RunDir(self.path).steps() else time.monotonic()
        least = size_of(rows)
        until = time.monotonic() + START_S
        while time.monotonic() < (until if since is None else since + seconds):
            if process.poll() is not None:
                self.failed.append(f"exit code {process.returncode}: {self.last_words(folder)}")
                return
            size, least = size_of(rows), min(least, size_of(rows))
            if since is None and size > least:  # it first drops rows that are newer than its checkpoint
                since = time.monotonic()
            time.sleep(0.02)
        killed = time.time()
        end_all(process, folder)
        if since is None:
            self.failed.append(f"no result row within {START_S} s: {self.last_words(folder)}")
        self.kills += 1
        self.lost.append(self.behind(started, killed))

    def last_words(self, folder: Path) -> str:
        return (folder / f"{self.name}.err").read_text()[-600:]

    def behind(self, started: float, killed: float) -> float:
        """Seconds of training after the newest checkpoint: what a resumed process has to repeat."""
        try:
            checkpoint = RunDir.open(self.path).load_checkpoint()
        except Exception as e:
            self.failed.append(f"{type(e).__name__}: {e}")
            return 0.0
        rows = read_results(self.path) if (self.path / "result.jsonl").exists() else []
        if not rows:
            return 0.0
        if "time" in checkpoint.state["json"]:
            return max(0.0, rows[-1]["time_total_s"] - checkpoint.state["json"]["time"])
        # A launched run does not tell how long its checkpoint has trained. After its first row it has saved in this
        # process, so the clock does.
        written = (checkpoint.path / "meta.json").stat().st_mtime
        return max(0.0, killed - written) if written > started else 0.0


def size_of(file: Path) -> int:
    return file.stat().st_size if file.exists() else 0


def end_all(process: subprocess.Popen[str], folder: Path) -> None:
    """Kill it and every process that it has started, also in groups of their own."""
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    for entry in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            if f"KILLED={folder}".encode() in Path(f"/proc/{entry}/environ").read_bytes().split(b"\0"):
                os.kill(int(entry), signal.SIGKILL)


def cases(what: str, folder: Path, every: float, cluster: str) -> list[Case]:
    if what == "launch":
        (folder / "killed").mkdir()
        for name, text in LAUNCH.items():
            (folder / "killed" / name).write_text(textwrap.dedent(text).replace("EVERY", str(every)))
        words = ["launch", "--config", "killed/x.yaml", "--cluster", cluster]
        return [Case("launch", folder / "runs" / "launch", words, words)]
    common = ["--stop", '{"time_total_s": 100000}', f"checkpoint_every_s={every}", "save_figure=false", "--quiet"]
    out = []
    for name, words in TRAIN.items():
        first = ["train", *words, "--project", "runs", "--trial", name, *common]
        out.append(Case(name, folder / "runs" / name, first, ["train", "--resume", f"runs/{name}", "--quiet"]))
    return out


def tensorboard_misses(path: Path) -> int:
    """Rows of result.jsonl that TensorBoard does not have."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    if not (path / "tb").exists():
        return len(read_results(path))
    board = EventAccumulator(str(path / "tb"), size_guidance={"scalars": 0})
    board.Reload()
    there = {e.step for e in board.Scalars("env_steps_total")}
    return sum(row["env_steps_total"] not in there for row in read_results(path))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="*", default=["train", "launch"])
    parser.add_argument("--only", help="one of " + ", ".join([*TRAIN, "launch"]))
    parser.add_argument("--kills", type=int, default=30)
    parser.add_argument("--every", type=float, default=3.0, help="checkpoint_every_s")
    parser.add_argument("--most", type=float, default=8.0, help="seconds to the kill, at most")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--cluster", choices=["local", "ray"], default="local", help="of launch; a start on Ray takes 10 to 20 s"
    )
    args = parser.parse_args()
    for what in args.what:
        if what not in ("train", "launch"):
            parser.error(f"expected train or launch, got {what!r}")
    if args.only not in (None, *TRAIN, "launch"):
        parser.error(f"--only: expected one of {', '.join([*TRAIN, 'launch'])}, got {args.only!r}")
    rng, good = random.Random(args.seed), True
    for what in args.what:
        with tempfile.TemporaryDirectory() as temporary:
            folder = Path(temporary)
            chosen = [case for case in cases(what, folder, args.every, args.cluster) if args.only in (None, case.name)]
            for i in range(args.kills):
                chosen[i % len(chosen)].kill_once(folder, rng.uniform(0.0, args.most), starting=i % 5 == 4)
            for case in chosen:
                said = report(case, what)
                good = good and not case.failed and max(case.lost, default=0.0) <= args.every and not said["gaps"]
                print(json.dumps(said), flush=True)
    return 0 if good else 1


def report(case: Case, what: str) -> dict[str, object]:
    numbers = [row["training_iteration"] for row in read_results(case.path)]
    return {
        "what": f"{what} {case.name}",
        "kills": case.kills,
        "did_not_go_on": case.failed,
        "most_lost_s": round(max(case.lost, default=0.0), 2),
        "mean_lost_s": round(sum(case.lost) / max(1, len(case.lost)), 2),
        "rows": len(numbers),
        "gaps": sum(b != a + 1 for a, b in itertools.pairwise(numbers)),
        "rows_tensorboard_misses": tensorboard_misses(case.path) if what == "train" else None,
    }


if __name__ == "__main__":
    sys.exit(main())
