"""Grid games that play over HTTP until they are ended: python -m benchmarks.remote.games PORT [--games 8] [--seed 0] [--count FILE]

One thread per game, each with a session and a connection of its own (the standard-library client). The messages are those of
`bray.PolicyAgent`: {"obs", "reward", "terminated", "truncated"} per tick, {"action"} back; the tick that ends an episode carries its final
observation, and the next one begins another. The number of ticks so far is written to FILE, eight bytes per game.
"""

from __future__ import annotations

import argparse
import mmap
import struct
import threading
from pathlib import Path

from bray.client import Client
from template.games.grid import GridEnv


def play(port: int, seed: int, counts: mmap.mmap, place: int) -> None:
    game = GridEnv()
    obs, _ = game.reset(seed=seed)
    reward, terminated, truncated, ticks = 0.0, False, False, 0
    with Client("127.0.0.1", port, timeout=60) as client:
        client.start(f"grid{seed}")
        while True:
            state = {"obs": obs.tolist(), "reward": reward, "terminated": terminated, "truncated": truncated}
            action = client.tick(state)["action"]
            ticks += 1
            struct.pack_into("<q", counts, place, ticks)
            if terminated or truncated:
                obs, _ = game.reset()
                reward, terminated, truncated = 0.0, False, False
            else:
                obs, reward, terminated, truncated, _ = game.step(action)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("port", type=int)
    parser.add_argument("--games", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=Path, required=True)
    args = parser.parse_args()
    with open(args.count, "wb+") as f:
        f.truncate(8 * args.games)
        counts = mmap.mmap(f.fileno(), 8 * args.games)
    threads = [
        threading.Thread(target=play, args=(args.port, args.seed + i, counts, 8 * i), daemon=True)
        for i in range(args.games)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


if __name__ == "__main__":
    main()
