"""python -m benchmarks.learning CASE... [--seeds 0 1 2] [--jobs N] [--out DIR]
python -m benchmarks.learning CASE... --draw [--out DIR]

For each seed: train with the preset that `bray train` uses, evaluate as we go (mean of 10 greedy episodes on fixed evaluation seeds) and
stop when that mean reaches the reference score, N seeds side by side. Writes CASE.json, CASE.jsonl (the curves), CASE.png and the table in README.md, all beside
this file. --draw makes CASE.png and the table anew from what was recorded.
"""

from __future__ import annotations

import argparse
import functools
import json
import multiprocessing
import platform
import subprocess
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

import bray
from bray import figures
from bray.experiment import Experiment

HERE = Path(__file__).parent


@dataclass(frozen=True)
class Case:
    run: str
    env: str
    target: float
    limit: int
    """Env steps within which the target is to be reached."""
    eval_freq: int
    seeds: int = 5
    config: dict[str, Any] = field(default_factory=dict)
    reach: bool = True
    """False for a control: the same without the one thing that the task is about, which should not reach the target."""


TASKS = "benchmarks.learning.tasks:"
LSTM = {"use_lstm": True, "lstm_cell_size": 64, "fcnet_hiddens": [64]}
CUE = {"num_envs": 16, "rollout_length": 128}
PPO_MASKED = {"num_envs": 8, "rollout_length": 128, "epochs": 4, "minibatches": 4, "lr": 1e-3, "entropy_coef": 0.0}
DQN_MASKED = {
    "lr": 1e-3,
    "train_every": 2,
    "n_step": 3,
    "tau": 0.01,
    "fcnet_hiddens": [128, 128],
    "fcnet_activation": "relu",
}
CHAIN = {"num_envs": 8, "rollout_length": 128}
CAR = {"normalize_observations": False, "normalize_rewards": False}
R2D2_MASKED = {"num_envs": 4, "train_every": 4, "lr": 1e-3, "tau": 0.01, "sequence_length": 16, "burn_in": 4}

CASES = {
    "ppo-cartpole": Case("PPO", "CartPole-v1", 475, 200_000, 5),
    "a2c-cartpole": Case("A2C", "CartPole-v1", 475, 500_000, 50),
    "dqn-cartpole": Case("DQN", "CartPole-v1", 475, 100_000, 2),
    "c51-cartpole": Case("C51", "CartPole-v1", 475, 100_000, 2),
    "qrdqn-cartpole": Case("QR-DQN", "CartPole-v1", 475, 100_000, 2),
    "iqn-cartpole": Case("IQN", "CartPole-v1", 475, 100_000, 2),
    "rainbow-cartpole": Case("Rainbow", "CartPole-v1", 475, 100_000, 2),
    "pqn-cartpole": Case("PQN", "CartPole-v1", 475, 300_000, 2),
    "r2d2-cartpole": Case("R2D2", "CartPole-v1", 475, 300_000, 4),
    "r2d2-cartpole-masked": Case("R2D2", f"{TASKS}MaskedCartPole", 400, 1_000_000, 4, 3, R2D2_MASKED),
    "ppo-cartpole-masked": Case("PPO", f"{TASKS}MaskedCartPole", 400, 1_000_000, 20, 3, {**PPO_MASKED, **LSTM}),
    "dqn-cartpole-masked": Case("DQN", f"{TASKS}MaskedCartPole", 200, 300_000, 4, 3, DQN_MASKED, reach=False),
    "ppo-cue-lstm": Case("PPO", f"{TASKS}Cue", 0.95, 300_000, 10, 3, {**CUE, **LSTM}),
    "ppo-cue-mlp": Case("PPO", f"{TASKS}Cue", 0.95, 300_000, 10, 3, CUE, reach=False),
    "ppo-chain-rnd": Case("PPO", f"{TASKS}Chain", 5, 300_000, 10, 3, {**CHAIN, "rnd": 1.0}),
    "ppo-chain": Case("PPO", f"{TASKS}Chain", 5, 300_000, 10, 3, CHAIN, reach=False),
    "ppo-mountaincar-rnd": Case("PPO", "MountainCar-v0", -110, 500_000, 15, 3, {**CAR, "rnd": 1.0}),
    "ppo-mountaincar": Case("PPO", "MountainCar-v0", -110, 500_000, 15, 3, {**CAR, "rnd": 0.0}, reach=False),
    "sac-pendulum": Case("SAC", "Pendulum-v1", -200, 20_000, 1),
    "ppo-pendulum": Case("PPO", "Pendulum-v1", -250, 300_000, 5, seeds=3),
    "ppo-lunarlander": Case("PPO", "LunarLander-v3", 200, 1_000_000, 10, seeds=3),
}


def train(case: Case, seed: int, path: Path) -> dict[str, Any]:
    """One seed, in one thread; what it took to reach the target."""
    torch.set_num_threads(1)
    stop = {"eval/return_mean": case.target, "env_steps_total": case.limit}
    exp = Experiment(
        run=case.run,
        env=case.env,
        path=path,
        seed=seed,
        eval_freq=case.eval_freq,
        config=case.config,
        checkpoint_freq=0,
    )
    start = time.perf_counter()
    row = list(exp.train(stop=stop))[-1]
    exp.close()
    score = row.get("eval/return_mean")
    return {
        "seed": seed,
        "reached": score is not None and score >= case.target,
        "env_steps": row["env_steps_total"],
        "eval_return_mean": score,
        "eval_return_ci95": row.get("eval/return_ci95"),
        "episode_return_mean": row["episode_return_mean"],
        "seconds": round(time.perf_counter() - start, 1),
    }


def measure(name: str, seeds: list[int] | None, out: Path, jobs: int = 1) -> dict[str, Any]:
    case = CASES[name]
    seeds = list(range(case.seeds)) if seeds is None else seeds
    with tempfile.TemporaryDirectory() as runs:
        paths = [Path(runs) / f"seed-{s}" for s in seeds]
        results = []
        with multiprocessing.get_context("spawn").Pool(jobs) as pool:
            for result in pool.imap(functools.partial(_train, case), zip(seeds, paths, strict=True)):
                print(json.dumps({"case": name, **result}), flush=True)
                results.append(result)
        record_curves(dict(zip(seeds, paths, strict=True)), out / f"{name}.jsonl")
    record = {
        "case": name,
        "command": f"python -m benchmarks.learning {name}",
        "run": case.run,
        "env": case.env,
        "target": case.target,
        "within": case.limit,
        "control": not case.reach,
        "reached": f"{sum(r['reached'] for r in results)} of {len(results)}",
        "date": time.strftime("%Y-%m-%d"),
        "commit": subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, cwd=HERE
        ).stdout.strip(),
        "versions": {"bray": bray.__version__, "torch": torch.__version__, "python": platform.python_version()},
        "machine": platform.machine(),
        "seeds": results,
    }
    (out / f"{name}.json").write_text(json.dumps(record, indent=1) + "\n")
    draw(name, out)
    return record


def _train(case: Case, job: tuple[int, Path]) -> dict[str, Any]:
    return train(case, *job)


def record_curves(runs: dict[int, Path], out: Path) -> None:
    """What a figure needs of each seed's rows: about 200 of them, every evaluation and the last."""
    with open(out, "w") as file:
        for seed, path in runs.items():
            rows = figures.read_results(path)
            every = max(1, len(rows) // 200)
            for i, row in enumerate(rows):
                if i % every == 0 or figures.EVAL in row or i == len(rows) - 1:
                    keys = (figures.ENV_STEPS, figures.TRAIN, figures.EVAL)
                    file.write(json.dumps({"seed": seed, **{k: row[k] for k in keys if k in row}}) + "\n")


def draw(name: str, out: Path) -> None:
    """CASE.png from CASE.jsonl."""
    case, seeds = CASES[name], {}
    for row in figures.read_results(out / f"{name}.jsonl"):
        seeds.setdefault(row["seed"], []).append(json.dumps(row) + "\n")
    with tempfile.TemporaryDirectory() as folder:
        paths = [Path(folder) / f"{seed}.jsonl" for seed in seeds]
        for path, lines in zip(paths, seeds.values(), strict=True):
            path.write_text("".join(lines))
        figures.learning_curve(paths, out / f"{name}.png", f"{case.run} on {case.env}", case.target)


def table(out: Path) -> None:
    """README.md from the recorded JSON files."""
    lines = [
        "# Learning curves",
        "",
        "Each row: the preset of `bray train --run ... --env ...`, trained until the mean of 10 greedy evaluation episodes (fixed seeds)",
        "reaches the target. The command that made a row: `python -m benchmarks.learning CASE`.",
        "",
        "Reaching means once: training stops at the first evaluation at or above the target, so these are steps to a first good evaluation, not",
        "a score that was held. In a picture each seed is a thin line to its own end; the mean and its band go as far as all seeds do, to where the",
        "first one was done (the curves are in CASE.jsonl, `--draw` makes the pictures from them). How the presets were chosen: PPO on CartPole is one of five settings tried on seeds 0-2 or 0-3, which are among the",
        "seeds shown; PPO on Pendulum is one of eight settings tried on seeds 100-109 (the chosen one on all ten) after the first one, which had been",
        "looked at on seeds 0 and 1, had failed on seed 7: with gamma 0.9 it leaned at full torque near the bottom in some episodes (-541). That run of",
        "seed 7 was looked at for the cause; the new setting was then run on seeds 0-2 and 7, with nothing changed after. The others are the first setting",
        "tried, looked at on seed 0 or seeds 0 and 1 (DQN's loss changed from Huber to squared errors after that look). `make test-slow` trains each on",
        "seed 7, on which none was tuned. C51, QR-DQN, IQN, Rainbow and PQN are one of two settings (PQN: three) tried on seeds 100-102 beside DQN's",
        "preset; seeds 0-4 were run once, with nothing changed after.",
        "",
        "| case | algorithm, environment | target | within (steps) | reached | steps needed, per seed | date, commit |",
        "|---|---|--:|--:|---|---|---|",
    ]
    for path in sorted(out.glob("*.json")):
        r = json.loads(path.read_text())
        steps = ", ".join(f"{s['env_steps']:,}" + ("" if s["reached"] else " (not)") for s in r["seeds"])
        control = " (control: should not)" if r.get("control") else ""
        lines.append(
            f"| [{r['case']}]({r['case']}.png) | {r['run']}, {r['env']} | {r['target']}{control} | {r['within']:,} | {r['reached']} | {steps} | {r['date']}, {r['commit']} |"
        )
    readme = out / "README.md"
    _, mark, rest = readme.read_text().partition("\n## ") if readme.exists() else ("", "", "")
    readme.write_text("\n".join(lines) + "\n" + mark + rest)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "cases", nargs="*", choices=[*CASES, []], default=[], help=f"one or more of {', '.join(CASES)}; none: all"
    )
    parser.add_argument("--seeds", type=int, nargs="*", help="default: as many as the case asks for")
    parser.add_argument("--jobs", type=int, default=1, help="seeds trained side by side")
    parser.add_argument("--out", type=Path, default=HERE)
    parser.add_argument("--draw", action="store_true", help="draw what was recorded, train nothing")
    args = parser.parse_args()
    for name in args.cases or CASES:
        if args.draw:
            draw(name, args.out)
            continue
        record = measure(name, args.seeds, args.out, args.jobs)
        print(json.dumps({k: record[k] for k in ("case", "target", "within", "reached")}), flush=True)
    table(args.out)


if __name__ == "__main__":
    main()
