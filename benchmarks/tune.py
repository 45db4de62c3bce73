"""python -m benchmarks.tune [--peers PYTHON] [--trials 64] [--peer-trials 64] [--steps 10240] [--parallel 2]
python -m benchmarks.tune --held-out CartPole-v1 Acrobot-v1 [--trials 16] [--steps 15000]

Seconds of CPU, of all processes together, that `bray tune` and RLlib with Ray Tune take for short trials of PPO on
CartPole: 8 environments, rollouts of 128, 8 epochs of 8 minibatches, the same network, learning rates drawn at random.
PYTHON: an interpreter with ray[rllib] (dm-tree, lz4, ormsgpack, gymnasium 1.2.2). Seconds on a clock would tell of what
else runs on the machine.

`--held-out`: whether the best settings of a search are better than the defaults of PPO on four seeds that nothing was
chosen by.
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import bray

HERE = Path(__file__).parent
_MARK = "BRAY_BENCHMARK_OF"
_EVERY = 0.25  # seconds between two looks at the processes: at most so much of each is missed


def cpu_of(command: list[str]) -> tuple[float, str]:
    """Seconds of CPU of a command with all that it starts, wherever those end up, and the last line that it says."""
    mark = secrets.token_hex(8)
    seen: dict[tuple[int, str], float] = {}
    with tempfile.TemporaryFile("w+") as said:
        environ = {**os.environ, _MARK: mark, "OMP_NUM_THREADS": "1"}
        environ.pop("PYTHONDONTWRITEBYTECODE", None)
        with subprocess.Popen(command, stdout=said, env=environ, cwd=HERE.parent) as process:
            while process.poll() is None:
                _look(mark, seen)
                time.sleep(_EVERY)
        if process.returncode:
            raise SystemExit(f"{' '.join(command[:3])} ended with {process.returncode}")
        said.seek(0)
        last = said.read().strip().splitlines()[-1]
    return sum(seen.values()), last


def _look(mark: str, seen: dict[tuple[int, str], float]) -> None:
    """Note what each process with this mark has used until now."""
    wanted, tick = f"{_MARK}={mark}".encode(), os.sysconf("SC_CLK_TCK")
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        try:
            if wanted not in (folder / "environ").read_bytes():
                continue
            fields = (folder / "stat").read_text().rpartition(") ")[2].split()
        except OSError:  # it has ended
            continue
        seen[int(folder.name), fields[19]] = (int(fields[11]) + int(fields[12])) / tick


def ours(trials: int, steps: int, parallel: int) -> dict[str, float]:
    settings = [
        "lr=1e-4..1e-2:log",
        "num_envs=8",
        "rollout_length=128",
        "epochs=8",
        "minibatches=8",
        "entropy_coef=0.0",
    ]
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "bray", "tune", "--run", "PPO", "--env", "CartPole-v1", "--no-preset"]
        command += [*settings, "--name", "s", "--project", folder, "--trials", str(trials), "--steps", str(steps)]
        seconds, _ = cpu_of([*command, "--sampler", "random", "--fresh-seeds", "0", "--parallel", str(parallel)])
        done = (Path(folder) / "s" / "trials.csv").read_text().count(",complete,")
    return {"trials": done, "cpu_s": round(seconds, 1), "cpu_s_per_trial": round(seconds / done, 2)}


def theirs(python: str, trials: int, steps: int, parallel: int) -> dict[str, float]:
    script = [python, str(HERE / "peers" / "rllib_tune.py"), str(trials), str(steps), str(parallel)]
    seconds, last = cpu_of(script)
    done = json.loads(last)["trials"]
    return {"trials": done, "cpu_s": round(seconds, 1), "cpu_s_per_trial": round(seconds / done, 2)}


def held_out(env: str, trials: int, steps: int, parallel: int) -> dict[str, Any]:
    space = {"lr": "1e-4..1e-2:log", "gamma": bray.tune.choice([0.95, 0.98, 0.99]), "epochs": "2..16"}
    with tempfile.TemporaryDirectory() as folder:
        found = bray.tune(
            run="PPO",
            env=env,
            name="s",
            project=folder,
            use_preset=False,
            config=space,
            trials=trials,
            steps=steps,
            seed=100,
            parallel=parallel,
        )
    best, before = ([round(x, 1) for x in scores] for scores in (found.fresh.best, found.fresh.before))
    better = sum(a > b for a, b in zip(best, before, strict=True))
    return {"env": env, "config": found.best_config, "best": best, "default": before, "better_on": better}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", help="an interpreter with RLlib; without it, ours alone")
    parser.add_argument("--trials", type=int, default=64)
    parser.add_argument("--peer-trials", type=int, default=64)
    parser.add_argument("--steps", type=int, default=10_240)
    parser.add_argument("--parallel", type=int, default=2)
    parser.add_argument("--held-out", nargs="+", default=[], metavar="ENV")
    args = parser.parse_args()
    if args.held_out:
        for env in args.held_out:
            print(json.dumps(held_out(env, args.trials, args.steps, args.parallel)), flush=True)
        return
    found = {"bray": ours(args.trials, args.steps, args.parallel)}
    print(json.dumps(found), flush=True)
    if args.peers:
        found["rllib"] = theirs(args.peers, args.peer_trials, args.steps, args.parallel)
        ratio = found["rllib"]["cpu_s_per_trial"] / found["bray"]["cpu_s_per_trial"]
        print(json.dumps({**found, "times": round(ratio, 1)}))


if __name__ == "__main__":
    main()
