"""Learning from more transitions than fit into memory: how fast files of ours are read, in how little of it.

    python -m benchmarks.data                    # 4 GB of transitions, a process limited to 1 GB
    python -m benchmarks.data --gb 1 --keep      # smaller, and the files stay for the next time

Prints MB of transitions (observation, next observation, action, reward) a second for an epoch that is drawn in batches
of 256 in seeded random order, in seconds of CPU and by the clock, the most memory that was used, and whether a second
process that went on in the middle of the epoch drew the same rows.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from bray import tree
from bray.data import Dataset, EndOfData, EpisodeWriter, open_data
from bray.rundir import RunDir
from bray.spec import EnvSpec, Space
from bray.train.source import FileSource

WIDTH, STEPS, BATCH = 64, 1000, 256
SPEC = EnvSpec("noise", Space("box", (WIDTH,)), Space("box", (8,), "float32", -1.0, 1.0))
ROW = 4 * (2 * WIDTH + 8 + 1)  # bytes of a transition, as a learner sees it
PART = 256_000_000


def make(folder: Path, gb: float) -> None:
    """Episodes of noise, which no compression makes smaller."""
    rng = np.random.default_rng(0)
    with EpisodeWriter(folder / "episodes", 100) as writer:
        for _ in range(int(gb * 1e9 / (ROW * STEPS))):
            writer.write(
                {
                    "obs": rng.standard_normal((STEPS + 1, WIDTH), np.float32),
                    "action": rng.uniform(-1, 1, (STEPS, 8)).astype(np.float32),
                    "reward": rng.standard_normal(STEPS, np.float32),
                    "terminated": np.arange(STEPS) == STEPS - 1,
                    "truncated": np.zeros(STEPS, bool),
                }
            )
    RunDir(folder).write_spec(SPEC)


def read(folder: Path, limit: int, stop: int, state: Path, resumed: bool) -> None:
    """An epoch, or the rest of it from a saved state; prints what it took."""
    start_memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    source = FileSource(open_data(folder), SPEC.layout, reads_itself=True)
    data = Dataset(BATCH, epochs=1)
    data.seed(5)
    data.read_from(source, PART)
    if resumed:
        saved = tree.unpack(state.read_bytes())
        data.set_state({"arrays": saved, "json": json.loads(state.with_suffix(".json").read_text())}, None)
    cpu, clock, rows, digest = time.process_time(), time.monotonic(), 0, hashlib.sha256()
    data.complete()
    try:
        while (batch := data.next(None)) is not None:
            rows += batch.rows
            if resumed or rows >= stop * BATCH:
                digest.update(batch.data["reward"].tobytes())
            if not resumed and rows == (stop - 1) * BATCH:
                now = data.get_state(None)
                state.write_bytes(tree.pack(now["arrays"]))
                state.with_suffix(".json").write_text(json.dumps(now["json"]))
    except EndOfData:
        pass
    cpu, clock = time.process_time() - cpu, time.monotonic() - clock
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    print(json.dumps({"rows": rows, "cpu": cpu, "clock": clock, "digest": digest.hexdigest(), "kb": memory,
                      "kb_before": start_memory, "count": data.count}))  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gb", type=float, default=4.0)
    parser.add_argument("--limit-mb", type=int, default=1000)
    parser.add_argument("--dir", type=Path, default=Path(tempfile.gettempdir()) / "bray-data")
    parser.add_argument("--keep", action="store_true")
    parser.add_argument("--child", choices=["whole", "rest"], help=argparse.SUPPRESS)
    options = parser.parse_args()
    state = options.dir / "state.tree"
    files = options.dir / "files"
    stop = int(options.gb * 1e9 / ROW / BATCH * 0.6)
    if options.child:
        read(files, options.limit_mb * 1_000_000, stop, state, options.child == "rest")
        return
    if not files.exists():
        make(files, options.gb)
    found = []
    for child in ("whole", "rest"):
        words = [sys.executable, "-m", "benchmarks.data", "--child", child, "--gb", str(options.gb)]
        words += ["--limit-mb", str(options.limit_mb), "--dir", str(options.dir)]
        found.append(
            json.loads(subprocess.run(words, check=True, capture_output=True, text=True).stdout.splitlines()[-1])
        )
    whole, rest = found
    mb = whole["count"] * ROW / 1e6
    print(f"{whole['count']:,} transitions, {mb:,.0f} MB, batches of {BATCH}")
    print(f"{mb / whole['cpu']:,.0f} MB/s of CPU time, {mb / whole['clock']:,.0f} MB/s by the clock")
    print(f"{whole['kb'] / 1e3:,.0f} MB of memory at most, {whole['kb_before'] / 1e3:,.0f} MB before reading began")
    same = "the same" if whole["digest"] == rest["digest"] else "OTHER"
    print(f"resumed in a second process at row {stop * BATCH:,}: {same} rows as without a break")
    if not options.keep:
        for path in sorted(files.iterdir()):
            path.unlink()
        files.rmdir()


if __name__ == "__main__":
    main()
