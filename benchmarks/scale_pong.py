"""python -m benchmarks.scale_pong [--auto] [--run APPO] [--env ALE/Pong-v5] [--seeds 0 1] [--minutes 5] [--target
RETURN] [--out DIR] [--runs DIR] [KEY=VALUE ...]

How well APPO plays an Atari game after minutes on a machine with a GPU and 16 cores, with the settings of the preset
for Pong: 256 environments in local processes, central inference, greedy evaluations of 10 episodes beside the training.
A seed is trained for `--minutes`, counted from before the environments are made; then its last weights play 16 greedy
episodes.
`--auto --run APPO` (or PPO, IMPALA) trains as `bray train --run APPO --env ENV` does, with nothing else given but the
evaluations: the preset, and what is chosen for this machine.
One JSON line per evaluation and per seed; OUT/NAME.jsonl and OUT/NAME.png hold the curves over the steps, after each
seed.
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
from bray.config import runfile
from bray.errors import ConfigError
from bray.experiment import Experiment

HERE = Path(__file__).parent
MACHINE: dict[str, Any] = {
    "device": "cuda",
    "num_workers": 16,
    "num_envs": 16,
    "inference": "central",
    "vector": "native",
    "eval_parallel": True,
    "iteration_steps": 65_536,
    "export_graph_after_s": None,
}


def settings() -> dict[str, Any]:
    """Those of this machine, and how to learn: as the preset for Pong says, whatever the game."""
    tuned = runfile.preset("APPO", "ALE/Pong-v5")
    assert tuned is not None
    return {k: v for k, v in tuned.values.items() if k not in ("run", "env", "stop")} | MACHINE


AUTO: dict[str, Any] = {"eval_parallel": True, "iteration_steps": 65_536, "export_graph_after_s": None}
"""What `--auto` gives: no word of the machine, or of how to learn."""


def train(
    run: str, env: str, seed: int, seconds: float, target: float | None, config: dict[str, Any], path: Path, auto: bool
) -> dict[str, Any]:
    """One seed. `reached_after_s` is when the first evaluation at or above the target came, the `steps_per_s` are those
    between the first and the last evaluation, `final` is what the last weights reach."""
    start = time.perf_counter()
    looks = {"eval_freq": 4 if auto else 8, "checkpoint_freq": 0}
    exp = Experiment(run, env, path=path, seed=seed, use_preset=auto, config=looks | config)
    if auto:
        exp.settle()
        tell(seed=seed, auto=str(exp.choice))
    came: list[tuple[float, int]] = []
    reached, row, seen = None, {}, None
    for row in exp.train({"time_total_s": 2 * seconds}):
        after = time.perf_counter() - start
        value = row.get("eval/return_mean")
        if value is not None and row.get("eval/env_steps") != seen:
            seen = row.get("eval/env_steps")
            came.append((after, row["env_steps_total"]))
            if reached is None and target is not None and value >= target:
                reached = after
            told = {"steps": row["env_steps_total"], "eval": value, "of_steps": seen}
            tell(seed=seed, seconds=after, **told, training=row["episode_return_mean"])
        if after >= seconds:
            break
    final = exp.evaluate(16)
    exp.close()
    (first, from_steps), (last, to_steps) = (
        (came[0], came[-1]) if len(came) > 1 else ((0.0, 0), (after, row["env_steps_total"]))
    )
    return {
        "seed": seed,
        "reached_after_s": reached,
        "trained_s": after,
        "steps": row["env_steps_total"],
        "steps_per_s": (to_steps - from_steps) / (last - first),
        "final": final["eval/return_mean"],
        "final_ci95": final["eval/return_ci95"],
    }


def tell(**line: Any) -> None:
    print(json.dumps({k: round(v, 2) if isinstance(v, float) else v for k, v in line.items()}), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("settings", nargs="*", metavar="KEY=VALUE")
    parser.add_argument("--auto", action="store_true", help="with nothing given but the algorithm and the game")
    parser.add_argument("--run", default="APPO", metavar="ALGO")
    parser.add_argument("--env", default="ALE/Pong-v5")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--target", type=float, metavar="RETURN", help="tell when an evaluation reaches it")
    parser.add_argument("--out", type=Path, default=HERE / "learning")
    parser.add_argument(
        "--runs", type=Path, help="keep the run directories here: `bray plot` draws one that was cut off"
    )
    given = parser.parse_args()
    config = (AUTO if given.auto else settings()) | {
        k: yaml.safe_load(v) for k, _, v in (x.partition("=") for x in given.settings)
    }
    name = given.env.split("/")[-1].split("-")[0].lower() + (f"-{given.run.lower()}-auto" if given.auto else "-gpu")
    with tempfile.TemporaryDirectory() as folder:
        runs: list[Path] = []
        for seed in given.seeds:
            runs.append((given.runs or Path(folder)) / f"{name}-{seed}")
            try:
                seconds = 60 * given.minutes
                tell(**train(given.run, given.env, seed, seconds, given.target, config, runs[-1], given.auto))
            except ConfigError as e:
                sys.exit(f"error: {e}")
            (given.out / f"{name}.jsonl").write_text("".join(curve(run) for run in runs))
            figures.learning_curve(runs, given.out / f"{name}.png", f"{given.run} on {given.env}", given.target)


def curve(run: Path) -> str:
    """A line for every row of a run, whose name ends with its seed."""
    keys = (figures.ENV_STEPS, figures.TRAIN, figures.EVAL, figures.EVAL_CI, figures.EVAL_STEPS, "time_total_s")
    rows = [{k: row[k] for k in keys if k in row} for row in figures.read_results(run)]
    return "".join(json.dumps({"seed": int(run.name.rsplit("-", 1)[1]), **row}) + "\n" for row in rows)


if __name__ == "__main__":
    main()
