"""python -m benchmarks.scale_pong [--auto] [--run APPO ...] [--env ALE/Pong-v5] [--seeds 0 1] [--minutes 6]
[--within 7.8] [--target RETURN] [--out DIR] [--draw] [KEY=VALUE ...]

How well APPO plays an Atari game after minutes on a machine with a GPU and 16 cores, with the settings of the preset
for Pong: 256 environments in local processes, central inference.
`--auto --run APPO` (or PPO, IMPALA, several in turn) trains as `bray train --run APPO --env ENV` does, with nothing
else given: the preset, and what is chosen for this machine.

Seeds train one after the other, each on the whole machine, for at most `--minutes`, counted from before the
environments are made, and all of them for at most `--within`. Between two iterations there are greedy evaluations of 10
episodes: rarely, and often once the training is near the target. A seed ends when an evaluation and 16 more episodes
reach the target, or with its time; then its last weights play 16 episodes. One JSON line per evaluation and per seed.
OUT/NAME.jsonl and OUT/NAME.png hold the curves over the steps, OUT/NAME-scores.jsonl a line per seed; they are written
with every evaluation, so that a run that is cut off leaves what it had. `--draw` makes the pictures of such files, on a
machine with Matplotlib.
"""

from __future__ import annotations

import argparse
import importlib.util
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
}
ASIDE: dict[str, Any] = {
    "iteration_steps": 65_536,
    "eval_freq": 0,
    "checkpoint_freq": 0,
    "export_graph_after_s": None,
    "save_figure": False,
}
"""No word of the machine, or of how to learn."""
LOOK_S, NEAR_LOOK_S, NEAR = 45.0, 12.0, 2.5
"""Seconds between evaluations; those near the target, in return."""
OTHERS = 70_000
"""Seed of episodes that no evaluation of the training had."""
END_S = 30.0
"""Kept for the last episodes of a seed."""
KEYS = (figures.ENV_STEPS, figures.TRAIN, "episodes_total", "time_total_s")


def settings() -> dict[str, Any]:
    """Those of this machine, and how to learn: as the preset for Pong says, whatever the game."""
    tuned = runfile.preset("APPO", "ALE/Pong-v5")
    assert tuned is not None
    return {k: v for k, v in tuned.values.items() if k not in ("run", "env", "stop")} | MACHINE


class Curves:
    """Of the seeds of one algorithm: files in a folder, and rows to draw."""

    def __init__(self, out: Path, name: str, title: str, target: float | None):
        self.out, self.name, self.title, self.target = out, name, title, target
        self.rows: dict[int, list[dict[str, Any]]] = {}
        self.scores: list[dict[str, Any]] = []

    def write(self) -> None:
        self.out.mkdir(parents=True, exist_ok=True)
        lines = [json.dumps({"seed": seed, **row}) + "\n" for seed, rows in self.rows.items() for row in rows]
        (self.out / f"{self.name}.jsonl").write_text("".join(lines))
        (self.out / f"{self.name}-scores.jsonl").write_text("".join(json.dumps(x) + "\n" for x in self.scores))
        if importlib.util.find_spec("matplotlib"):
            self.draw()

    def draw(self) -> None:
        each: dict[int, list[str]] = {}
        for line in (self.out / f"{self.name}.jsonl").read_text().splitlines(keepends=True):
            each.setdefault(json.loads(line)["seed"], []).append(line)
        with tempfile.TemporaryDirectory() as folder:
            files = [Path(folder) / f"{seed}.jsonl" for seed in each]
            for file, lines in zip(files, each.values(), strict=True):
                file.write_text("".join(lines))
            figures.learning_curve(files, self.out / f"{self.name}.png", self.title, self.target)


def train(
    run: str, env: str, seed: int, seconds: float, config: dict[str, Any], auto: bool, curves: Curves
) -> dict[str, Any]:
    """One seed. `reached_after_s` is when the evaluation came that reached the target, `steps_per_s` are those from the
    first row to the last without evaluations, `final` is what the last weights reach in episodes of their own."""
    start, target = time.perf_counter(), curves.target
    rows = curves.rows[seed] = []
    with tempfile.TemporaryDirectory() as folder:
        exp = Experiment(run, env, path=Path(folder) / "run", seed=seed, use_preset=auto, config=ASIDE | config)
        exp.settle()
        tell(run=run, seed=seed, auto=str(exp.choice))
        reached, final, first, looked, looking_s = None, None, None, time.perf_counter(), 0.0
        for row in exp.train({"time_total_s": 2 * seconds}):
            after = time.perf_counter() - start
            steps, training = row[figures.ENV_STEPS], row.get(figures.TRAIN)
            first = first or (after, steps)
            played = {k: row[k] for k in KEYS if k in row}
            rows.append(played)
            near = target is not None and training is not None and training >= target - NEAR
            since = time.perf_counter() - looked
            if since >= (NEAR_LOOK_S if near else LOOK_S) and after < seconds:
                began = time.perf_counter()
                found = exp.evaluate(10)
                value = found[figures.EVAL]
                played |= {figures.EVAL: value, figures.EVAL_CI: found[figures.EVAL_CI], figures.EVAL_STEPS: steps}
                now = time.perf_counter() - start
                tell(run=run, seed=seed, seconds=now, steps=steps, eval=value, training=training)
                if target is not None and value >= target:
                    reached, final = now, exp.evaluate(16, seed=OTHERS)
                    if final[figures.EVAL] < target:
                        reached, final = None, None
                curves.write()
                looked = time.perf_counter()
                looking_s += looked - began
            if final is not None or after >= seconds:
                break
        final = final or exp.evaluate(16, seed=OTHERS)
        exp.close()
    took = after - first[0] - looking_s if first else 0.0
    score = {
        "run": run,
        "env": env,
        "seed": seed,
        "reached_after_s": reached,
        "trained_s": after,
        "steps": steps,
        "steps_per_s": (steps - first[1]) / took if first and took > 0 else None,
        "final": final[figures.EVAL],
        "final_ci95": final[figures.EVAL_CI],
        "auto": str(exp.choice) if auto else "",
    }
    curves.scores.append(score)
    curves.write()
    return score


def tell(**line: Any) -> None:
    print(json.dumps({k: round(v, 2) if isinstance(v, float) else v for k, v in line.items()}), flush=True)


def main() -> None:
    started = time.perf_counter()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("settings", nargs="*", metavar="KEY=VALUE")
    parser.add_argument("--auto", action="store_true", help="with nothing given but the algorithm and the game")
    parser.add_argument("--run", nargs="+", default=["APPO"], metavar="ALGO")
    parser.add_argument("--env", default="ALE/Pong-v5")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--minutes", type=float, default=6.0, help="of a seed, at most")
    parser.add_argument("--within", type=float, default=7.8, help="minutes of all seeds together, at most")
    parser.add_argument("--target", type=float, metavar="RETURN", help="a seed ends when it is reached")
    parser.add_argument("--draw", action="store_true", help="pictures of the files in --out, and nothing else")
    parser.add_argument("--out", type=Path, default=HERE / "learning")
    given = parser.parse_args()
    config = ({} if given.auto else settings()) | {
        k: yaml.safe_load(v) for k, _, v in (x.partition("=") for x in given.settings)
    }
    game = given.env.split("/")[-1].split("-")[0].lower()
    for run in given.run:
        name = f"{game}-{run.lower()}-auto" if given.auto else f"{game}-gpu"
        curves = Curves(given.out, name, f"{run} on {given.env}", given.target)
        if given.draw:
            curves.draw()
            continue
        for seed in given.seeds:
            left = 60 * given.within - (time.perf_counter() - started) - END_S
            if left <= 0:
                tell(run=run, seed=seed, left_out=f"{given.within} minutes are over")
                continue
            try:
                tell(**train(run, given.env, seed, min(60 * given.minutes, left), config, given.auto, curves))
            except ConfigError as e:
                sys.exit(f"error: {e}")


if __name__ == "__main__":
    main()
