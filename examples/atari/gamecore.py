"""The game's side: each thread plays one game after the other, and asks the service what to do.

    python -m examples.atari.gamecore --port 8000 --games 8                   # Pong
    python -m examples.atari.gamecore --port 8000 --games 8 --game Breakout
    python -m examples.atari.gamecore --port 8000 --games 32 --game grid      # a small game that is learnt in a minute

A session is one game: `start`, a `tick` per decision, `end`. What the bodies hold is agreed between this file and
actor.py: the reward of the previous action, whether the game is over, and the observation as bytes.
"""

from __future__ import annotations

import argparse
import struct
import threading
import time
from collections import deque

import gymnasium as gym
import numpy as np

from bray.client import Client, ClientError

HEAD = struct.Struct("<f??")  # reward, terminated, truncated; the observation follows


def make_game(game: str) -> gym.Env:
    """Observations uint8: `[4, 42, 42]` of an Atari game, `[5, 7, 7]` of the grid."""
    if game == "grid":
        from template.games.grid import GridEnv

        return GridEnv()
    from bray.envs.config import AtariConfig, EnvConfig
    from bray.envs.make import make_env

    return make_env(EnvConfig(id=f"ALE/{game}-v5", atari=AtariConfig(size=42)))


def pack(obs: np.ndarray, reward: float = 0.0, terminated: bool = False, truncated: bool = False) -> bytes:
    return HEAD.pack(reward, terminated, truncated) + obs.tobytes()


class Games:
    """Some games, and what has come of them."""

    def __init__(self, game: str, host: str, port: int):
        self.game, self.host, self.port = game, host, port
        self.over = threading.Event()
        self.ticks = 0
        self.returns: deque[float] = deque(maxlen=200)
        self.trouble = ""

    def play(self, seed: int) -> None:
        env = make_game(self.game)
        client = Client(self.host, self.port)
        while not self.over.is_set():
            try:
                self.episode(client, env, seed)
            except ClientError as e:  # the service is not there, or this session is lost: the next game will tell
                self.trouble = str(e)
                self.over.wait(1.0)
            seed += 1_000_003
        client.close()

    def episode(self, client: Client, env: gym.Env, seed: int) -> None:
        obs, _ = env.reset(seed=seed)
        reward, total, terminated, truncated = 0.0, 0.0, False, False
        client.start()
        while not self.over.is_set():
            action = int(client.tick(pack(obs, reward)))
            self.ticks += 1
            obs, reward, terminated, truncated, _ = env.step(action)
            reward = float(reward)
            total += reward
            if terminated or truncated:
                self.returns.append(total)
                break
        client.end(pack(obs, reward, terminated, truncated))


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m examples.atari.gamecore")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--games", type=int, default=8)
    parser.add_argument("--game", default="Pong", help="Pong, Breakout, ... or grid")
    parser.add_argument("--seconds", type=float, default=0.0, help="0 = until Ctrl-C")
    a = parser.parse_args(arguments)
    games = Games(a.game, a.host, a.port)
    threads = [threading.Thread(target=games.play, args=(i,), daemon=True) for i in range(a.games)]
    for thread in threads:
        thread.start()
    start, ticks = time.monotonic(), 0
    try:
        while not a.seconds or time.monotonic() - start < a.seconds:
            time.sleep(5.0)
            mean = f"{np.mean(games.returns):.2f}" if games.returns else "none yet"
            print(
                f"{time.monotonic() - start:5.0f} s  {(games.ticks - ticks) / 5.0:,.0f} ticks/s  return {mean}",
                flush=True,
            )
            ticks = games.ticks
            if games.trouble:
                print(f"        {games.trouble}", flush=True)
                games.trouble = ""
    except KeyboardInterrupt:
        pass
    games.over.set()
    for thread in threads:
        thread.join(5.0)


if __name__ == "__main__":
    main()
