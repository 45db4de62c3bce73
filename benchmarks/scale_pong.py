"""python -m benchmarks.scale_pong [--env ALE/Pong-v5] [--seeds 0 1] [--minutes 5] [--target 18] [--out DIR] [--runs DIR] [KEY=VALUE ...]

How soon APPO plays an Atari game well on a machine with a GPU and 16 cores: 256 environments in local processes, central inference, greedy evaluations of 10 episodes beside
the training. Ends a seed at `--target`, or after `--minutes`. One JSON line per evaluation and per seed; OUT/NAME.jsonl and OUT/NAME.png hold the curves over the steps, after each seed.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import yaml

from bray import figures
from bray.errors import ConfigError
from bray.experiment import Experiment

HERE = Path(__file__).parent
SETTINGS: dict[str, Any] = {
    "device": "cuda",
    "num_workers": 16,
    "num_envs": 16,
    "inference": "central",
    "vector": "native",
    "rollout_length": 64,
    "batch_envs": 64,
    "epochs": 3,
    "minibatches": 16,
    "lr": {"start": 5e-4, "end": 3e-5, "steps": 5_000_000},
    "clip": 0.1,
    "clip_rewards": True,
    "eval_parallel": True,
    "iteration_steps": 65_536,
    "export_graph_after_s": None,
}


def train(env: str, seed: int, seconds: float, target: float, settings: dict[str, Any], path: Path) -> dict[str, Any]:
    """One seed; seconds count from the first environment step, evaluations included."""
    exp = Experiment(
        "APPO", env, path=path, seed=seed, use_preset=False, eval_freq=8, checkpoint_freq=0, config=settings
    )
    stop = {"time_total_s": seconds, "eval/return_mean": target}
    reached, row, seen = None, {}, None
    start = time.perf_counter()
    for row in exp.train(stop=stop):
        value = row.get("eval/return_mean")
        if value is not None and row.get("eval/env_steps") != seen:
            seen = row.get("eval/env_steps")
            line = {
                "seed": seed,
                "seconds": time.perf_counter() - start,
                "steps": row["env_steps_total"],
                "eval": value,
            }
            tell(**line, training=row["episode_return_mean"], lag=row.get("workers/policy_lag"))
            if value >= target:
                reached = line["seconds"]
                break
    took = time.perf_counter() - start
    exp.close()
    return {
        "seed": seed,
        "reached_after_s": reached,
        "steps": row["env_steps_total"],
        "steps_per_s": row["env_steps_total"] / took,
    }


def tell(**line: Any) -> None:
    print(json.dumps({k: round(v, 2) if isinstance(v, float) else v for k, v in line.items()}), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("settings", nargs="*", metavar="KEY=VALUE")
    parser.add_argument("--env", default="ALE/Pong-v5")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--target", type=float, default=18.0)
    parser.add_argument("--out", type=Path, default=HERE / "learning")
    parser.add_argument(
        "--runs", type=Path, help="keep the run directories here: `bray plot` draws one that was cut off"
    )
    given = parser.parse_args()
    settings = SETTINGS | {k: yaml.safe_load(v) for k, _, v in (x.partition("=") for x in given.settings)}
    name = given.env.split("/")[-1].split("-")[0].lower() + "-gpu"
    with tempfile.TemporaryDirectory() as folder:
        runs: list[Path] = []
        for seed in given.seeds:
            runs.append((given.runs or Path(folder)) / f"{name}-{seed}")
            try:
                tell(**train(given.env, seed, 60 * given.minutes, given.target, settings, runs[-1]))
            except ConfigError as e:
                sys.exit(f"error: {e}")
            (given.out / f"{name}.jsonl").write_text("".join(curve(run) for run in runs))
            figures.learning_curve(runs, given.out / f"{name}.png", f"APPO on {given.env}", given.target)


def curve(run: Path) -> str:
    """A line for every row of a run, whose name ends with its seed."""
    keys = (figures.ENV_STEPS, figures.TRAIN, figures.EVAL, "time_total_s")
    rows = [{k: row[k] for k in keys if k in row} for row in figures.read_results(run)]
    return "".join(json.dumps({"seed": int(run.name.rsplit("-", 1)[1]), **row}) + "\n" for row in rows)


if __name__ == "__main__":
    main()
