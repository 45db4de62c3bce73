"""python -m benchmarks.connect_four [--minutes 8] [--seed 0] [--network small|large] [--cores N] [--out DIR]: PPO
learns Connect Four by self-play, and meets players that it has never learnt from.

Goals, of 200 greedy games against each, seats in turn: 98 % won against random play, 70 % against a player that wins
where it can and blocks where it must, one move ahead, 90 % against its own first snapshot; and ratings that rise: no
snapshot is rated below an earlier one by more than both intervals. A draw is a half.

Writes connect-four.jsonl (each evaluation on the way, then what came of it), connect-four-ratings.png, -payoff.png and
-opponents.png.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

import bray
from bray.cli.main import main as bray_command
from bray.league import IN_RUN, read_league

HERE = Path(__file__).parent
BOT = "benchmarks.connect_four:one_ply"
GOALS = {"random": 0.98, BOT: 0.70, "first": 0.90}
NETWORKS: dict[str, dict[str, Any]] = {
    "small": {},
    "large": {"conv_filters": [[48, [3, 3], 1], [64, [3, 3], 1]], "conv_features": 256},
}
SETTINGS: dict[str, Any] = {
    "num_envs": 128,
    "rollout_length": 32,
    "epochs": 3,
    "minibatches": 8,
    "lr": {"kind": "linear", "start": 1e-3, "end": 1e-4, "steps": 2_000_000},
    "gamma": 1.0,
    "lambda_": 0.9,
    "entropy_coef": 0.01,
    "self_play": {"pool": 20, "newest": 0.6, "snapshot_every": 100_000, "opponents": list(GOALS)},
    "iteration_steps": 20_000,
    "eval_freq": 5,
    "eval_episodes": 50,
}
ROWS, COLUMNS = 6, 7


def one_ply(obs: Any, rng: np.random.Generator) -> int:
    """Wins where it can, else blocks where it must, else any column that is not full."""
    stones = np.asarray(obs["obs"])[:2] > 0.5
    legal = np.flatnonzero(obs["action_mask"])
    me = 0 if stones[0].sum() == stones[1].sum() else 1
    height = stones.any(0).sum(0)
    for side in (me, 1 - me):
        for column in legal:
            if four_with(stones[side], int(height[column]), int(column)):
                return int(column)
    return int(rng.choice(legal))


def four_with(stones: np.ndarray, row: int, column: int) -> bool:
    """Whether one more stone here makes four in a row."""
    for down, right in ((0, 1), (1, 0), (1, 1), (1, -1)):
        run = 1
        for sign in (1, -1):
            r, c = row + sign * down, column + sign * right
            while 0 <= r < ROWS and 0 <= c < COLUMNS and stones[r, c]:
                run, r, c = run + 1, r + sign * down, c + sign * right
        if run >= 4:
            return True
    return False


def rises(path: Path) -> bool:
    """No snapshot is rated below an earlier one by more than both intervals."""
    found = read_league(path / IN_RUN)
    ratings = [found.rating(ref) for ref in found.past()]
    return all(
        later.elo + later.half >= earlier.elo - earlier.half
        for i, earlier in enumerate(ratings)
        for later in ratings[i + 1 :]
    )


def points(row: Any, name: str) -> float:
    return float(row[f"eval/{name}/win"] + 0.5 * row[f"eval/{name}/draw"])


def train(path: Path, seed: int, minutes: float, network: str, cores: int) -> dict[str, Any]:
    torch.set_num_threads(1)
    start, curve = time.process_time(), []
    play = {"vector": "subprocess", "num_processes": cores - 1} if cores > 1 else {"vector": "inprocess"}
    settings = {**SETTINGS, **NETWORKS[network], **play}
    with bray.Experiment("PPO", "openspiel:connect_four", path=path, seed=seed, **settings) as exp:
        for row in exp.train({"time_total_s": 60 * minutes}):
            if row.get("eval/return_mean") is not None:
                at = {"env_steps": row["env_steps_total"], "rating": round(row["league/rating"])}
                curve.append(at | {name: round(points(row, name), 3) for name in GOALS})
                print(json.dumps(curve[-1]), flush=True)
        steps, spent = row["env_steps_total"], time.process_time() - start
        final = exp.training.evaluate(200)
        exp.save()
    found = {name: {k: final[f"eval/{name}/{k}"] for k in ("win", "draw", "loss")} for name in GOALS}
    risen = rises(path)
    return {
        "seed": seed,
        "network": network,
        "settings": settings,
        "env_steps": steps,
        "cpu_s": round(spent),
        "found": found,
        "ratings_rise": risen,
        "passed": risen and all(points(final, name) >= goal for name, goal in GOALS.items()),
        "curve": curve,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=8.0, help="of training")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--network", choices=list(NETWORKS), default="small")
    parser.add_argument("--cores", type=int, default=1, help="one learns and decides, the others step games")
    parser.add_argument("--out", type=Path, default=HERE / "learning")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "connect-four"
        record = train(path, args.seed, args.minutes, args.network, args.cores)
        lines = [*record.pop("curve"), record]
        (args.out / "connect-four.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
        print(json.dumps({k: v for k, v in record.items() if k != "settings"}))
        bray_command(["league", str(path), "--plot"])
        for picture in (path / "figures").glob("*.png"):
            shutil.copy(picture, args.out / f"connect-four-{picture.name}")


if __name__ == "__main__":
    main()
