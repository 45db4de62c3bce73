"""The games: many of them, each a session with the service that `bray launch` started.

    python -m template.gamecore --port 8000 --games 32                  # the grid game
    python -m template.gamecore --port 8000 --games 8 --game atari      # Pong
    python -m template.gamecore --games 64 --processes 2 --seconds 60

Each game has a thread of its own, which waits for its agent's answer most of the time. A game needs nothing of Bray but
its client, which is the standard library alone.
"""

from __future__ import annotations

import argparse
import base64
import multiprocessing
import threading
import time
from collections import deque
from typing import Any

import numpy as np

from bray.client import Client, ClientError
from template.games import make_game

EPISODES = 10  # of one session


class Games:
    """Some games, and what has come of them."""

    def __init__(self, game: str, host: str, port: int, tcp: bool = False):
        self.game, self.host, self.port, self.tcp = game, host, port, tcp
        self.over = threading.Event()
        self.ticks = self.episodes = 0
        self.returns: deque[float] = deque(maxlen=200)
        self.trouble = ""  # what went wrong last, since it was reported
        self._count = threading.Lock()

    def play(self, seed: int) -> None:
        """Session after session until it is over. A service that is not there (yet, or any more) is tried again."""
        env = make_game(self.game)
        while not self.over.is_set():
            try:
                with Client(self.host, self.port, tcp=self.tcp) as client:
                    client.start()
                    for _ in range(EPISODES):
                        self.episode(client, env, seed)
                        seed += 1_000_003
            except ClientError as e:
                self.trouble = str(e)
                self.over.wait(1.0)

    def episode(self, client: Client, env: Any, seed: int) -> None:
        """The reward goes with the observation that came after it. The last tick has the final observation; its answer
        does nothing."""
        obs, _ = env.reset(seed=seed)
        reward, terminated, truncated, total = 0.0, False, False, 0.0
        while not self.over.is_set():
            tick = {"obs": array(obs), "reward": reward, "terminated": terminated, "truncated": truncated}
            action = client.tick(tick)["action"]
            with self._count:
                self.ticks += 1
            if terminated or truncated:
                with self._count:
                    self.episodes += 1
                    self.returns.append(total)
                return
            obs, reward, terminated, truncated, _ = env.step(action)
            reward = float(reward)
            total += reward


def array(x: np.ndarray) -> dict[str, str]:
    """An array as JSON: its bytes in base64 are shorter than its numbers, and quicker to read."""
    return {"base64": base64.b64encode(np.ascontiguousarray(x)).decode(), "dtype": x.dtype.name}


def run(games: Games, number: int, seconds: float, seed: int = 0, report: float = 5.0) -> None:
    """Play `number` games side by side for so many seconds (0 = until Ctrl-C)."""
    threads = [threading.Thread(target=games.play, args=(seed + i,), daemon=True) for i in range(number)]
    for thread in threads:
        thread.start()
    start = now = time.monotonic()
    ticks = 0
    try:
        while not seconds or now - start < seconds:
            games.over.wait(min(report, seconds or report))
            ticks, rate, now = games.ticks, (games.ticks - ticks) / (time.monotonic() - now), time.monotonic()
            mean = f"{np.mean(games.returns):.3f}" if games.returns else "none yet"
            print(f"{now - start:5.0f} s  {games.episodes:,} episodes  {rate:,.0f} ticks/s  return {mean}", flush=True)
            if games.trouble:
                print(f"        {games.trouble} They try again.", flush=True)
                games.trouble = ""
    except KeyboardInterrupt:
        pass
    games.over.set()
    for thread in threads:
        thread.join(5.0)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m template.gamecore", description="Play games against a service.")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--games", type=int, default=32, help="sessions at once")
    parser.add_argument("--processes", type=int, default=1, help="processes that share the games")
    parser.add_argument("--game", default="grid", help="grid, atari or atari:Breakout")
    parser.add_argument("--seconds", type=float, default=0.0, help="0 = until Ctrl-C")
    parser.add_argument("--tcp", action="store_true", help="framed TCP in place of HTTP (use_tcp: true)")
    a = parser.parse_args(arguments)
    if a.games < 1 or a.processes < 1:
        parser.error(f"expected at least one game and one process, got --games {a.games} --processes {a.processes}")
    share = [a.games // a.processes + (i < a.games % a.processes) for i in range(a.processes)]
    others = [
        multiprocessing.Process(
            target=run, args=(Games(a.game, a.host, a.port, a.tcp), n, a.seconds, 1000 * i), daemon=True
        )
        for i, n in enumerate(share[1:], 1)
    ]
    for process in others:
        process.start()
    run(Games(a.game, a.host, a.port, a.tcp), share[0], a.seconds)
    for process in others:
        process.join(10.0)


if __name__ == "__main__":
    main()
