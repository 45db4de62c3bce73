"""`make demo`: train an agent in seconds, judge it, film it, then serve it and play games against it. The same as

bray train --run PPO --env CartPole-v1 --project demo --trial <time> --render
bray serve demo/<time>          # and a game that plays against it: play_games below
"""

import sys
import time
from pathlib import Path

import gymnasium as gym
import numpy as np

import bray
from bray.cli.options import Train
from bray.cli.train import train
from bray.errors import BrayError

GAMES = 20


def play_games(port: int, games: int = GAMES) -> tuple[list[float], list[float]]:
    """CartPole as a game that knows nothing of Bray but the address of its service: returns, and seconds per tick."""
    env = gym.make("CartPole-v1")
    returns, seconds = [], []
    for game in range(games):
        obs, _ = env.reset(seed=1000 + game)
        client = bray.Client(port=port)
        client.start()
        total, over = 0.0, False
        while not over:
            began = time.perf_counter()
            reply = client.tick({"obs": obs.tolist()})
            seconds.append(time.perf_counter() - began)
            obs, reward, terminated, truncated, _ = env.step(reply["action"])
            total, over = total + float(reward), terminated or truncated
        client.end()
        returns.append(total)
    env.close()
    return returns, seconds


def main() -> int:
    trial = time.strftime("%Y%m%d-%H%M%S")
    path = Path("demo") / trial
    try:
        code = train(Train(run="PPO", env="CartPole-v1", project=Path("demo"), trial=trial, render=True))
        if code != 0:
            return code
        with bray.Experiment.load(path).serve(port=0, admin_port=0, block=False) as server:
            returns, seconds = play_games(server.port)
    except BrayError as e:
        print(f"error: {e}", file=sys.stderr)
        return 2
    p50, p99 = np.quantile(seconds, (0.5, 0.99)) * 1e3
    print(
        f"served over HTTP: {GAMES} games, mean return {np.mean(returns):.1f}; {len(seconds):,} ticks, p50 {p50:.2f} "
        f"ms, p99 {p99:.2f} ms"
    )
    print(f"next: bray serve {path}    bray export {path} --quantize    bray train --run DQN --env CartPole-v1")
    return 0


if __name__ == "__main__":
    sys.exit(main())
