"""What a tick costs a PolicyAgent: python -m benchmarks.remote.ticks [--games 1 8 32] [--ticks 20000]     one JSON line
each

First the observation alone: the grid's 245 numbers in JSON, read straight from the text and by way of lists, as long
ago. Then whole ticks, from the bytes of a request to the bytes of the reply (no sockets), for so many games that ask
together: CPU time of the process per tick.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import tempfile
import time
import timeit
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.remote.settings import EPISODE_LENGTH, PPO, say

GRAPH_S = 60.0


def messages() -> list[bytes]:
    from template.games.grid import GridEnv

    game = GridEnv()
    obs, _ = game.reset(seed=0)
    out = []
    for i in range(200):
        tick = {"obs": obs.tolist(), "reward": -0.01, "terminated": False, "truncated": False}
        out.append(json.dumps(tick).encode())
        obs, *_ = game.step(i % 4)
    return out


def reading(message: bytes) -> dict[str, Any]:
    import msgspec

    from bray.serving.values import reader
    from bray.spec import Space
    from template.games.grid import GridEnv

    read = reader(Space.from_gym(GridEnv.observation_space))
    text = msgspec.Raw(json.dumps(json.loads(message)["obs"]).encode())

    def microseconds(fn: Callable[[], Any]) -> float:
        fn()
        return round(1e6 * min(timeit.repeat(fn, number=2000, repeat=5)) / 2000, 1)

    by_text = microseconds(lambda: read(text))
    by_lists = microseconds(lambda: read(msgspec.json.decode(text)))
    return {"case": "observation", "from_text_us": by_text, "by_lists_us": by_lists}


class Rows:
    """A buffer that counts."""

    pushed = 0

    def push_batch(self, batch: dict[str, Any]) -> None:
        self.pushed += len(batch["action"])


def playing(games: int, ticks: int, sent: list[bytes]) -> dict[str, Any]:
    import uvloop

    import bray
    from bray.launch.build import build
    from bray.launch.graph import load
    from bray.remote.model.client import client_of
    from bray.serving.agent import AgentActor

    file = Path(__file__).with_name("training.yaml")
    shared = [f"ppo.settings.{k}={v}" for k, v in PPO.items()] + ["actor1.enable=false", "trainer1.enable=false"]
    buffer = Rows()

    async def play(actor: AgentActor, first: int, count: int) -> None:
        for i in range(count):
            await actor.tick(sent[(first + i) % len(sent)])  # type: ignore[misc]

    async def main(config: Any) -> float:
        actors = [
            AgentActor({"agent1": bray.PolicyAgent}, config, episode_length=EPISODE_LENGTH, serialize="json")
            for _ in range(games)
        ]
        for i, actor in enumerate(actors):
            await actor.start(f"game{i}", b"")
        end = time.monotonic() + GRAPH_S
        model = config["agent1"]["model"]
        await play(actors[0], 0, 10)
        while client_of(model.name).served.engine != "onnx":
            await play(actors[0], 0, 10)
            assert time.monotonic() < end, "the ONNX graph was not made in a minute"
        count = ticks // games
        await asyncio.gather(*[play(actor, i, count // 4) for i, actor in enumerate(actors)])
        start = time.process_time()
        await asyncio.gather(*[play(actor, i, count) for i, actor in enumerate(actors)])
        return (time.process_time() - start) / (count * games)

    with tempfile.TemporaryDirectory() as project:
        graph = load(file, shared, project=project)
        session = bray.init(graph.settings.project, graph.settings.trial, cluster="local")
        try:
            build(graph, session)
            agent = {"algo": "ppo", "model": bray.RemoteModel("model1"), "buffer": buffer}
            seconds = uvloop.run(main({"mode": "train", "ppo": graph.config["ppo"], "agent1": agent}))
        finally:
            bray.shutdown()
    return {"case": "ticks", "games": games, "cpu_us": round(1e6 * seconds, 1), "rows_pushed": buffer.pushed}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--games", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--ticks", type=int, default=20000)
    args = parser.parse_args()
    if min(args.games) < 1 or args.ticks < 4 * max(args.games):
        parser.error(
            f"expected at least one game and four ticks of each, got --games {args.games} --ticks {args.ticks}"
        )
    os.environ.setdefault("BENCH_UPDATES", os.devnull)
    sent = messages()
    say(reading(sent[0]))
    for games in args.games:
        say(playing(games, args.ticks, sent))


if __name__ == "__main__":
    main()
