"""python -m benchmarks.learning.early [ALGORITHM ...] [--envs ID ...] [--seeds 0 1 2] [--at 5000 10000 20000]
[--jobs N] [--only ours|sb3] [--set KEY=VALUE ...]
python -m benchmarks.learning.early --table FILE ...

How soon SAC, TD3 and CrossQ learn with their shipped defaults, beside those of Stable-Baselines3: each run is a process
with one thread that plays EPISODES greedy episodes, on seeds that no training saw, after each number of --at.
One JSON line per run goes to standard output, the table of all to standard error; --table makes it of lines that were
kept. SB3 runs where this Python can import it (that of benchmarks/install_peers.sh can, with --only sb3); its SAC
stands beside our CrossQ too.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import multiprocessing
import statistics
import sys
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

from benchmarks.learning.defaults import make_env, play

EPISODES = 20
AT = [5_000, 10_000, 20_000]
BESIDE = {"SAC": "SAC", "TD3": "TD3", "CrossQ": "SAC"}
"""Ours, and SB3's."""
ENVS = ["InvertedPendulum-v5", "Pendulum-v1", "Hopper-v5"]


def ours(run: str, env_id: str, seed: int, at: list[int], assignments: list[str]) -> dict[int, float]:
    from bray.config import parse_assignments
    from bray.experiment import Experiment

    exp = Experiment(
        run=run,
        env=env_id,
        seed=seed,
        use_preset=False,
        eval_freq=0,
        checkpoint_freq=0,
        config=dict(parse_assignments(assignments).values),
    )
    returns = {}
    for steps in sorted(at):
        for _ in exp.train(stop={"env_steps_total": steps}):
            pass
        found = play(env_id, lambda obs, env: exp.policy(obs), EPISODES)
        returns[steps] = statistics.fmean(found)
        print(json.dumps([run, env_id, seed, " ".join(assignments), returns]), file=sys.stderr, flush=True)
    exp.close()
    return returns


def sb3(run: str, env_id: str, seed: int, at: list[int], assignments: list[str]) -> dict[int, float]:
    import stable_baselines3
    from stable_baselines3.common.callbacks import BaseCallback

    returns = {}

    class Evaluate(BaseCallback):
        def _on_step(self) -> bool:
            if self.num_timesteps in at:
                found = play(env_id, lambda obs, env: self.model.predict(obs, deterministic=True)[0], EPISODES)
                returns[self.num_timesteps] = statistics.fmean(found)
            return True

    model = getattr(stable_baselines3, BESIDE[run])("MlpPolicy", make_env(env_id), seed=seed, device="cpu")
    model.learn(max(at), callback=Evaluate())
    return returns


SIDES = {"ours": ours, "sb3": sb3}


def one(side: str, run: str, env_id: str, seed: int, at: list[int], assignments: list[str]) -> dict[str, Any]:
    """In a process of its own: one training, and its line."""
    import torch

    torch.set_num_threads(1)
    start = time.perf_counter()
    returns = SIDES[side](run, env_id, seed, at, assignments)
    line = {"side": side, "run": run if side == "ours" else BESIDE[run], "env": env_id, "seed": seed}
    return {**line, "set": assignments, "returns": returns, "seconds": round(time.perf_counter() - start, 1)}


def table(lines: list[dict[str, Any]]) -> str:
    """Per environment and algorithm the mean over the seeds at each step, and the seeds."""
    groups: dict[tuple[str, ...], list[dict[str, Any]]] = {}
    for line in lines:
        groups.setdefault((line["env"], line["run"], line["side"], " ".join(line["set"])), []).append(line)
    at = sorted({int(step) for line in lines for step in line["returns"]})
    rows = ["| environment | algorithm | " + " | ".join(f"{step:,}" for step in at) + " |"]
    rows.append("|---|---|" + "---|" * len(at))
    for (env, run, side, assignments), group in sorted(groups.items()):
        cells = []
        for step in at:
            found = [r for line in group for s, r in line["returns"].items() if int(s) == step]
            seeds = ", ".join(f"{r:.4g}" for r in found)
            cells.append(f"{statistics.fmean(found):.4g} ({seeds})" if found else "")
        name = f"{run} of {'Bray' if side == 'ours' else 'SB3'} {assignments}".rstrip()
        rows.append(f"| {env} | {name} | {' | '.join(cells)} |")
    return "\n".join(rows)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("algorithms", nargs="*", choices=[*BESIDE, []], metavar="ALGORITHM", default=[])
    parser.add_argument("--envs", nargs="+", default=ENVS)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--at", type=int, nargs="+", default=AT, help="environment steps, whole thousands")
    parser.add_argument("--jobs", type=int, default=2, help="runs side by side")
    parser.add_argument("--only", choices=SIDES)
    parser.add_argument("--set", nargs="+", default=[], metavar="KEY=VALUE", help="in place of our defaults")
    parser.add_argument("--table", nargs="+", type=Path, metavar="FILE")
    given = parser.parse_args(argv)
    if given.table:
        print(table([json.loads(line) for path in given.table for line in path.read_text().splitlines()]))
        return
    sides = [given.only] if given.only else list(SIDES)
    if "sb3" in sides and importlib.util.find_spec("stable_baselines3") is None:
        if given.only:
            parser.error("this Python has no stable_baselines3 (benchmarks/install_peers.sh makes one that has)")
        print("no stable_baselines3 in this Python: ours alone", file=sys.stderr)
        sides.remove("sb3")
    runs = given.algorithms or list(BESIDE)
    jobs = [(side, run, env, seed) for seed in given.seeds for env in given.envs for run in runs for side in sides]
    jobs = [job for job in jobs if job[0] == "ours" or job[1] != "CrossQ" or "SAC" not in runs]  # SAC runs once
    lines = []
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(given.jobs, context, max_tasks_per_child=1) as pool:
        for done in as_completed([pool.submit(one, *job, given.at, given.set) for job in jobs]):
            lines.append(json.loads(json.dumps(done.result())))
            print(json.dumps(lines[-1]), flush=True)
    print(table(lines), file=sys.stderr)


if __name__ == "__main__":
    # By its name: what processes are handed cannot be looked up in `__main__`.
    from benchmarks.learning.early import main as named_main

    named_main()
