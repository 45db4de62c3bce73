"""python -m benchmarks.learning.recorded [--seeds 0 1 2] [--out DIR]: from recordings to reinforcement.

A script plays 50 episodes of Acrobot into `bray record` over HTTP, as a person's game would. Then, for each seed: BC
learns from these files; PPO goes on from BC, and a penalty that fades keeps it near BC at first; PPO learns from
nothing with the same settings. A score is the number of steps that are left of 500. Goals: BC has 90 % of the player's
score, and PPO from there passes the player in less than half of the steps of PPO from nothing. One line per seed goes
to standard output, the evaluations while PPO learnt to recorded.jsonl in DIR (this folder unless given).
"""

from __future__ import annotations

import argparse
import json
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import torch

from bray import figures
from bray.client import Client
from bray.data import open_data
from bray.experiment import Experiment

GAME, SPACES = "Acrobot-v1", {"obs": "float32[6]", "actions": "3"}
STEPS, EPISODES, LIMIT = 500, 50, 300_000
GRADIENT_STEPS = 2_000
CLONED = {"epochs": 10**6, "eval_episodes": EPISODES}
PLAYED = {"num_envs": 8, "rollout_length": 128, "minibatches": 16, "eval_freq": 2, "eval_episodes": EPISODES}
KEEPS = {"magnet": "start", "magnet_coef": {"kind": "linear", "start": 0.3, "end": 0.0, "steps": 20_000}}


def push(obs: np.ndarray) -> int:
    """The lower link on in the direction in which it swings."""
    return 2 if obs[5] > 0.0 else 0


@contextmanager
def recording(out: Path) -> Iterator[int]:
    """`bray record`; gives its port."""
    words = ["record", "--port", "0", "--obs", SPACES["obs"], "--actions", SPACES["actions"], "--out", str(out)]
    process = subprocess.Popen([sys.executable, "-m", "bray", *words], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield int(process.stdout.readline().partition("127.0.0.1:")[2].partition(",")[0])
    finally:
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=60)


def play_into(port: int) -> list[float]:
    """The returns of the player's episodes."""
    env, returns = gym.make(GAME), list[float]()
    with Client("127.0.0.1", port) as client:
        client.start()
        for seed in range(EPISODES):
            obs, total = env.reset(seed=1000 + seed)[0], 0.0
            said: dict[str, Any] = {"reward": 0.0}
            while not (said.get("terminated") or said.get("truncated")):
                action = client.tick({"obs": obs.tolist(), "action": push(obs), **said})["action"]
                obs, reward, terminated, truncated, _ = env.step(action)
                said = {"reward": float(reward), "terminated": terminated, "truncated": truncated}
                total += reward
            client.tick({"obs": obs.tolist(), **said})
            returns.append(total)
    return returns


def clone(files: Path, seed: int, path: Path) -> float:
    """The mean return of a policy that was cloned."""
    with Experiment("BC", GAME, data=files, path=path, seed=seed, config=CLONED) as exp:
        exp.fit({"learner_steps_total": GRADIENT_STEPS}, progress=False)
        return float(exp.evaluate()["eval/return_mean"])


def passed_after(target: float, seed: int, path: Path, **more: Any) -> tuple[int | None, list[dict[str, Any]]]:
    """The environment steps until an evaluation is above the target, and all evaluations."""
    rows = []
    with Experiment("PPO", GAME, path=path, seed=seed, config={**PLAYED, **more}) as exp:
        for row in exp.train(stop={"env_steps_total": LIMIT}):
            if (got := row.get("eval/return_mean")) is None:
                continue
            rows.append({figures.ENV_STEPS: row[figures.ENV_STEPS], "eval/return_mean": got})
            if got > target:
                return row[figures.ENV_STEPS], rows
    return None, rows


def measure(files: Path, player: float, seed: int, folder: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The line of a seed, and its curves."""
    start, cloned = time.process_time(), folder / f"bc-{seed}"
    got = clone(files, seed, cloned)
    ours, curve = passed_after(player, seed, folder / f"from-bc-{seed}", init_from=str(cloned), **KEEPS)
    nothing, plain = passed_after(player, seed, folder / f"from-nothing-{seed}")
    share = (STEPS + got) / (STEPS + player)
    line = {
        "seed": seed,
        "player": round(player, 1),
        "bc": round(got, 1),
        "bc_share": round(share, 3),
        "ppo_from_bc_steps": ours,
        "ppo_from_nothing_steps": nothing,
        "passed": share >= 0.9 and ours is not None and ours < 0.5 * (nothing or LIMIT),
        "cpu_s": round(time.process_time() - start),
    }
    return line, [{"seed": seed, "from": k, **row} for k, rows in (("bc", curve), ("nothing", plain)) for row in rows]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="*", default=[0, 1, 2])
    parser.add_argument("--out", type=Path, default=Path(__file__).parent)
    args = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name, open(args.out / "recorded.jsonl", "w") as curves:
        files, folder = Path(name) / "demonstrations", Path(name)
        with recording(files) as port:
            player = statistics.fmean(play_into(port))
        print(json.dumps({"episodes": len(open_data(files)), "player": player}), flush=True)
        for seed in args.seeds:
            line, rows = measure(files, player, seed, folder)
            print(json.dumps(line), flush=True)
            curves.writelines(json.dumps(row) + "\n" for row in rows)


if __name__ == "__main__":
    main()
