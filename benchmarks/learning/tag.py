"""python -m benchmarks.learning.tag [--seeds 0 1 2] [--out DIR]: hunters and their prey that learn from each other.

simple_tag (mpe2): three hunters decide by one policy, the prey, which is faster, by another, both by PPO. Then who has
learnt plays against who plays at random. Goals, in standard errors of the difference, at least 5: hunters catch a
random prey more often than random hunters do, and the prey loses less to the hunters than a random one. The returns of
each agent while they learnt go to tag.jsonl, and those of the first seed to tag.png, in DIR (this folder unless given).
"""

from __future__ import annotations

import argparse
import json
import math
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

import bray
from benchmarks.learning.games import of
from bray import figures
from bray.envs.outside_games import PettingZoo

GAME = "mpe2.simple_tag_v3"
STEPS, GAMES = 100_000, 240
SETTINGS: dict[str, Any] = {
    "num_envs": 32,
    "rollout_length": 50,
    "minibatches": 8,
    "lr": 7e-4,
    "normalize_value": True,
    "max_grad_norm": 10.0,
}
"""Those of the preset for simple_spread."""
Play = Callable[[Any], Any]


def learn(seed: int, path: Path) -> dict[str, Any]:
    made = {"policies": {"hunters": {"run": "PPO"}, "prey": {"run": "PPO"}}, **SETTINGS}
    mapping = {"adversary_*": "hunters", "agent_0": "prey"}
    with bray.Experiment("PPO", f"pettingzoo:{GAME}", path=path, seed=seed, policy_mapping=mapping, **made) as exp:
        row = exp.fit({"env_steps_total": STEPS}, progress=False)
    rng = np.random.default_rng(seed)
    hunters, prey = (of(f"{path}/models/{name}") for name in ("hunters", "prey"))

    def at_random(seen: Any) -> int:
        return int(rng.integers(5))

    plays = {
        "random, random": chase(at_random, at_random),
        "hunters, random": chase(hunters, at_random),
        "random, prey": chase(at_random, prey),
        "hunters, prey": chase(hunters, prey),
    }
    better = {
        "hunters_better_by": errors(plays["hunters, random"][:, 0], plays["random, random"][:, 0]),
        "prey_better_by": errors(plays["hunters, prey"][:, 1], plays["hunters, random"][:, 1]),
    }
    means = {who: got.mean(0).round(1).tolist() for who, got in plays.items()}
    passed = min(better.values()) >= 5.0
    return {"hunter_and_prey_got": means, **better, "agent_steps": row["agent_steps_total"], "passed": passed}


def chase(hunters: Play, prey: Play) -> np.ndarray:
    """What a hunter and the prey got in each game."""
    game = PettingZoo(GAME)()
    players = {name: prey if name == "agent_0" else hunters for name in game.possible_agents}
    totals = np.zeros((GAMES, 2))
    for i in range(GAMES):
        obs, _ = game.reset(seed=1_000 + i)
        while game.agents:
            obs, rewards, *_ = game.step({agent: int(players[agent]({"obs": seen})) for agent, seen in obs.items()})
            totals[i] += rewards["adversary_0"], rewards["agent_0"]
    return totals


def errors(got: np.ndarray, other: np.ndarray) -> float:
    """By how many standard errors the mean of `got` is above that of `other`."""
    error = math.sqrt(got.var(ddof=1) / len(got) + other.var(ddof=1) / len(other))
    return round(float((got.mean() - other.mean()) / error), 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="*", default=[0, 1, 2])
    parser.add_argument("--out", type=Path, default=Path(__file__).parent)
    args = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder, open(args.out / "tag.jsonl", "w") as curves:
        for seed in args.seeds:
            start, path = time.process_time(), Path(folder) / str(seed)
            found = learn(seed, path)
            print(json.dumps({"seed": seed, **found, "cpu_s": round(time.process_time() - start)}), flush=True)
            for row in figures.read_results(path):
                kept = {k: v for k, v in row.items() if k in (figures.ENV_STEPS, figures.TRAIN) or k[:6] == "agent/"}
                curves.write(json.dumps({"seed": seed, **kept}) + "\n")
            if seed == args.seeds[0]:
                figures.learning_curve(path, args.out / "tag.png", f"PPO on {GAME}, a policy for each side")


if __name__ == "__main__":
    main()
