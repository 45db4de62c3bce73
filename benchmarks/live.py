"""python -m benchmarks.live [--repeat 3] [--seconds 20]: rows learnt per CPU second, `bray train --live` beside the
launched graph in one process.

Both train the same network with the same PPO, in one thread, from the same 32 games (template.gamecore, the grid, over
HTTP, in a process of their own). CPU time is the server's and its children's alone, between two rows of its
result.jsonl, after a warm-up. One JSON line per measurement, then medians and the ratio.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from benchmarks.serving.__main__ import cpu_seconds, family, free_port
from template.models.model1 import Model1

ROOT = Path(__file__).parent.parent
ROWS, GAMES = 1024, 32
STEPS_PER_ROLLOUT = 16  # 4 epochs of 4 minibatches
WARM_UP_ROLLOUTS = 12
LONGEST_S = 240.0


class Network(nn.Module):
    """The template's network, for observations with a mask beside them."""

    def __init__(self, spec: Any, config: Any):
        super().__init__()
        self.body = Model1(list(spec.observation.parts[0].shape), spec.num_actions)

    def forward(self, obs: dict[str, Tensor]) -> dict[str, Tensor]:
        return self.body(obs["obs"])


def live(port: int, folder: Path) -> tuple[list[str], Path]:
    words = ["train", "--run", "PPO", "--live", "--port", str(port), "--obs", "uint8[5,7,7]", "--actions", "4"]
    words += ["--project", str(folder), "--trial", "t", "--quiet", "lr=2e-3", "entropy_coef=0.01", f"live.rows={ROWS}"]
    words += ["epochs=4", "minibatches=4"]
    return [*words, "wait_s=5", "custom_model=benchmarks.live:Network"], folder / "t"


def launched(port: int, folder: Path) -> tuple[list[str], Path]:
    words = ["launch", "--config", str(ROOT / "template" / "rl.yaml"), "--cluster", "local", "--project", str(folder)]
    return [*words, "--trial", "t", f"actor1.port={port}"], folder / "t"


SIDES = {"live": live, "launched": launched}


def measure(side: str, seconds: float) -> dict[str, Any]:
    """Rows, CPU and wall time between two rows of result.jsonl, at least `seconds` apart."""
    with tempfile.TemporaryDirectory(prefix="bray-live-") as name:
        folder, port = Path(name), free_port()
        words, run = SIDES[side](port, folder)
        environment = os.environ | {
            "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": "1",
        }  # a launched trainer takes all cores
        with open(folder / "log", "w") as log:
            server = subprocess.Popen(
                [sys.executable, "-m", "bray", *words], cwd=folder, env=environment, stdout=log, stderr=log
            )
        games = subprocess.Popen(
            [sys.executable, "-m", "template.gamecore", "--port", str(port), "--games", str(GAMES)],
            cwd=folder, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        try:
            first = _moment(server, run, STEPS_PER_ROLLOUT * WARM_UP_ROLLOUTS, folder)
            last = _moment(server, run, first["learner_steps_total"] + 1, folder, first["time"] + seconds)
        finally:
            games.kill()
            games.wait()
            server.send_signal(signal.SIGTERM)
            try:
                server.wait(30)
            except subprocess.TimeoutExpired:
                server.kill()
                server.wait()
    rollouts = (last["learner_steps_total"] - first["learner_steps_total"]) / STEPS_PER_ROLLOUT
    # a rollout of live games has a dead row at the end of each episode and piece: only steps count
    rows = last["env_steps_total"] - first["env_steps_total"] if side == "live" else rollouts * ROWS
    cpu, wall = last["cpu"] - first["cpu"], last["time"] - first["time"]
    return {
        "side": side,
        "rows_per_cpu_second": round(rows / cpu, 1),
        "rows_per_second": round(rows / wall, 1),
        "rollouts": rollouts,
        "cpu_us_per_row": round(1e6 * cpu / rows, 1),
        "seconds": round(wall, 1),
        "return": last.get("episode_return_mean"),
    }


def _moment(
    server: subprocess.Popen[bytes], run: Path, steps: int, folder: Path, not_before: float = 0.0
) -> dict[str, Any]:
    """Wait for a row of result.jsonl with at least `steps` gradient steps; that row, and the server's CPU time then."""
    path, until = run / "result.jsonl", time.monotonic() + LONGEST_S
    seen = path.stat().st_size if path.exists() else 0
    while time.monotonic() < until and server.poll() is None:
        time.sleep(0.02)
        if not path.exists() or path.stat().st_size == seen:
            continue
        now, cpu = time.monotonic(), cpu_seconds(family(server.pid))
        seen = path.stat().st_size
        lines = path.read_text().rpartition("\n")[0].splitlines()
        row = json.loads(lines[-1]) if lines else {}
        if row.get("learner_steps_total", 0) >= steps and now >= not_before:
            return {**row, "time": now, "cpu": cpu}
    raise RuntimeError(f"no measurement after {LONGEST_S:.0f} s:\n{(folder / 'log').read_text()[-3000:]}")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.live", description=__doc__)
    parser.add_argument("--side", action="append", dest="sides", choices=list(SIDES), help="one of them alone")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=20.0)
    a = parser.parse_args()
    rates: dict[str, list[float]] = {side: [] for side in a.sides or SIDES}
    for _ in range(a.repeat):
        for side in rates:
            result = measure(side, a.seconds)
            print(json.dumps(result), flush=True)
            rates[side].append(result["rows_per_cpu_second"])
    medians = {side: statistics.median(x) for side, x in rates.items()}
    if len(medians) == 2:
        medians["ratio"] = round(medians["live"] / medians["launched"], 3)
    print(json.dumps({"rows_per_cpu_second": medians}), flush=True)


if __name__ == "__main__":
    main()
