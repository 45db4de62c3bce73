"""python -m benchmarks.learning.defaults [TASK ...] [--seeds 0 1 2] [--jobs 2] [--device cpu] [--only ours] [--minutes
N] [--table]

Shipped defaults beside those of Stable-Baselines3: the same environment, steps and seeds, no preset, no wrapper; then
EPISODES greedy episodes with seeds that no training saw. SB3 runs in the environment of benchmarks/install_peers.sh
(`PEERS` names another Python). One JSON line per run goes to defaults.jsonl, where it replaces the line of an earlier
run; --table prints what is there: whether our mean is at least SB3's over the seeds that both have run, and how many
seeds are above the random policy by 5 standard errors.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
OUT = HERE / "defaults.jsonl"
PEERS = os.environ.get("PEERS", str(HERE.parents[1] / ".venv-peers" / "bin" / "python"))
EPISODES = 100
FIRST_SEED = 1_000_000  # of the evaluation episodes

TASKS: dict[str, tuple[str, str, int]] = {
    "ppo-acrobot": ("PPO", "Acrobot-v1", 200_000),
    "ppo-frozenlake": ("PPO", "FrozenLake-v1", 100_000),
    "ppo-taxi": ("PPO", "Taxi-v4", 500_000),
    "ppo-lunarlander": ("PPO", "LunarLander-v3", 500_000),
    "ppo-bipedalwalker": ("PPO", "BipedalWalker-v3", 1_000_000),
    "ppo-minatar-breakout": ("PPO", "MinAtar/Breakout-v1", 1_000_000),
    "ppo-minatar-spaceinvaders": ("PPO", "MinAtar/SpaceInvaders-v1", 1_000_000),
    "a2c-acrobot": ("A2C", "Acrobot-v1", 200_000),
    "a2c-frozenlake": ("A2C", "FrozenLake-v1", 100_000),
    "a2c-taxi": ("A2C", "Taxi-v4", 500_000),
    "a2c-lunarlander": ("A2C", "LunarLander-v3", 500_000),
    "a2c-bipedalwalker": ("A2C", "BipedalWalker-v3", 1_000_000),
    "dqn-acrobot": ("DQN", "Acrobot-v1", 100_000),
    "dqn-lunarlander": ("DQN", "LunarLander-v3", 200_000),
    "sac-mountaincar": ("SAC", "MountainCarContinuous-v0", 50_000),
    "sac-lunarlander": ("SAC", "LunarLanderContinuous-v3", 100_000),
    "td3-halfcheetah": ("TD3", "HalfCheetah-v5", 200_000),
    "td3-hopper": ("TD3", "Hopper-v5", 200_000),
}


def play(env_id: str, act: Any, episodes: int = EPISODES) -> list[float]:
    """The returns of `episodes` episodes, the same ones for all."""
    env, returns = make_env(env_id), []
    for i in range(episodes):
        obs, _ = env.reset(seed=FIRST_SEED + i)
        total, over = 0.0, False
        while not over:
            obs, reward, terminated, truncated, _ = env.step(act(obs, env))
            total, over = total + float(reward), terminated or truncated
        returns.append(total)
    return returns


def make_env(env_id: str) -> Any:
    import gymnasium as gym

    if env_id.startswith("MinAtar/"):
        import minatar.gym

        if env_id not in gym.registry:
            minatar.gym.register_envs()
    return gym.make(env_id)


def ours(run: str, env_id: str, steps: int, seed: int, device: str) -> tuple[list[float], float]:
    from bray.experiment import Experiment

    with tempfile.TemporaryDirectory() as folder:
        config = {} if device == "cpu" else {"device": device}
        exp = Experiment(
            run=run,
            env=env_id,
            path=Path(folder) / "run",
            seed=seed,
            use_preset=False,
            eval_freq=0,
            checkpoint_freq=0,
            config=config,
        )
        start = time.perf_counter()
        for _ in exp.train(stop={"env_steps_total": steps}):
            pass
        seconds = time.perf_counter() - start
        returns = play(env_id, lambda obs, env: exp.policy(obs))
        exp.close()
    return returns, seconds


def sb3(run: str, env_id: str, steps: int, seed: int, device: str) -> tuple[list[float], float]:
    import stable_baselines3

    model = getattr(stable_baselines3, run)("MlpPolicy", make_env(env_id), seed=seed, device=device)
    start = time.perf_counter()
    model.learn(steps)
    seconds = time.perf_counter() - start

    def act(obs: Any, env: Any) -> Any:
        action, _ = model.predict(obs, deterministic=True)
        return action if action.ndim else action.item()

    return play(env_id, act), seconds


def random_policy(run: str, env_id: str, steps: int, seed: int, device: str) -> tuple[list[float], float]:
    def act(obs: Any, env: Any) -> Any:
        return env.action_space.sample()

    return play(env_id, act), 0.0


SIDES = {"ours": ours, "sb3": sb3, "random": random_policy}


def one(side: str, task: str, seed: int, device: str) -> None:
    """In its own process: one training, and its line."""
    import torch

    torch.set_num_threads(1)
    run, env_id, steps = TASKS[task]
    returns, seconds = SIDES[side](run, env_id, steps, seed, device)
    error = statistics.stdev(returns) / math.sqrt(len(returns))
    line = {"task": task, "side": side, "seed": seed, "return": statistics.fmean(returns), "error": error}
    print(json.dumps({**line, "seconds": seconds, "device": device}), flush=True)


def start_one(side: str, task: str, seed: int, device: str, until: float) -> dict[str, Any]:
    """The line of a run in a process of its own; with `unfinished` or `failed` in it where there is no result."""
    line = {"task": task, "side": side, "seed": seed}
    python = PEERS if side == "sb3" else sys.executable
    command = [python, str(Path(__file__)), "--one", side, task, str(seed), "--device", device]
    path = os.pathsep.join([str(HERE.parents[1]), os.environ.get("PYTHONPATH", "")])
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    left = max(1.0, until - time.monotonic())
    try:
        done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=left)
    except subprocess.TimeoutExpired:
        return {**line, "unfinished": True}
    lines = [x for x in done.stdout.splitlines() if x.startswith("{")]
    if done.returncode or not lines:
        return {**line, "failed": done.stderr[-2000:]}
    return json.loads(lines[-1])


def read() -> dict[tuple[str, str, int], dict[str, Any]]:
    lines = map(json.loads, OUT.read_text().splitlines()) if OUT.exists() else ()
    return {(x["task"], x["side"], x["seed"]): x for x in lines}


def write(line: dict[str, Any]) -> None:
    kept = read() | {(line["task"], line["side"], line["seed"]): line}
    OUT.write_text("".join(json.dumps(kept[k]) + "\n" for k in sorted(kept)))


def table() -> str:
    rows = ["| task | steps | Bray | SB3 | random | at least SB3 | above random |", "|---|--:|---|---|--:|---|---|"]
    kept = read()
    for task, (_, _, steps) in TASKS.items():
        sides = {s: [x for k, x in kept.items() if k[:2] == (task, s)] for s in SIDES}
        if not any(sides.values()):
            continue
        told = {s: ", ".join(f"{x['return']:.4g}" for x in lines) for s, lines in sides.items()}
        both = {x["seed"] for x in sides["ours"]} & {x["seed"] for x in sides["sb3"]}
        ours, theirs = ([x["return"] for x in sides[s] if x["seed"] in both] for s in ("ours", "sb3"))
        level = (
            f"{'yes' if statistics.fmean(ours) >= statistics.fmean(theirs) else 'no'}, {len(both)} seeds"
            if both
            else ""
        )
        above = ""
        if sides["random"] and sides["ours"]:
            chance = sides["random"][0]
            better = [
                x["return"] - chance["return"] > 5 * math.hypot(x["error"], chance["error"]) for x in sides["ours"]
            ]
            above = f"{sum(better)} of {len(better)}"
        rows.append(f"| {task} | {steps:,} | {told['ours']} | {told['sb3']} | {told['random']} | {level} | {above} |")
    return "\n".join(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tasks", nargs="*", metavar="TASK", help=f"{', '.join(TASKS)}; none = all")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--jobs", type=int, default=2, help="runs side by side")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--only", choices=SIDES)
    parser.add_argument("--minutes", type=float, default=math.inf, help="what is not done by then is cut off")
    parser.add_argument("--table", action="store_true")
    parser.add_argument("--one", nargs=3, metavar=("SIDE", "TASK", "SEED"), help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one:
        side, task, seed = given.one
        return one(side, task, int(seed), given.device)
    unknown = [t for t in given.tasks if t not in TASKS]
    if unknown:
        parser.error(f"no task {unknown[0]!r}; there are {', '.join(TASKS)}")
    if not given.table:
        until = time.monotonic() + min(60 * given.minutes, 1e6)
        jobs = [
            (s, t, seed) for t in given.tasks or TASKS for seed in given.seeds for s in SIDES if given.only in (None, s)
        ]
        jobs = [j for j in jobs if j[0] != "random" or j[2] == given.seeds[0]]
        if any(side == "sb3" for side, *_ in jobs) and not Path(PEERS).exists():
            parser.error(
                f"SB3 needs {PEERS}: run `bash benchmarks/install_peers.sh`, or name a Python that has it in PEERS, "
                "or --only ours"
            )
        with ThreadPoolExecutor(given.jobs) as pool:
            for run in as_completed([pool.submit(start_one, *job, given.device, until) for job in jobs]):
                line = run.result()
                print(json.dumps(line), flush=True)
                if "return" in line:
                    write(line)
    print(table())


if __name__ == "__main__":
    main()
