"""The games of a league: matches side by side, in which each agent has a session of its own with the service.

bray launch --config template/league.yaml                # the league
python -m template.matches --port 8000 --games 32         # in another terminal: its games
"""

from __future__ import annotations

import argparse
import threading
import time
import uuid
from collections import Counter
from contextlib import ExitStack
from typing import Any

from bray.client import Client, ClientError
from template.games.sticks import Sticks

AGAIN_S = 0.5
"""Seconds after which a service that is away is tried again."""


class Matches:
    """Matches that are played, and what has come of them."""

    def __init__(self, host: str, port: int, tcp: bool = False):
        self.host, self.port, self.tcp = host, port, tcp
        self.over = threading.Event()
        self.told: Counter[str] = Counter()
        """Results, by whether they count."""
        self.trouble = ""
        self._lock = threading.Lock()

    def play(self) -> None:
        """Match after match until it is over."""
        env = Sticks()
        while not self.over.is_set():
            try:
                match = self.match(env)
                with self._lock:
                    self.keep(match)
            except ClientError as e:
                self.trouble = str(e)
                self.over.wait(AGAIN_S)

    def match(self, env: Any) -> dict[str, Any]:
        """A match from its start to its end, under a name that no other has."""
        name = str(uuid.uuid4())
        with ExitStack() as stack:
            made = (Client(self.host, self.port, tcp=self.tcp, retries=0) for _ in env.possible_agents)
            clients = dict(zip(env.possible_agents, map(stack.enter_context, made), strict=True))
            seats = {agent: client.start(name, agent, {}) for agent, client in clients.items()}
            owed, returns, over = dict.fromkeys(clients, 0.0), dict.fromkeys(clients, 0.0), False
            last, seen = {}, env.reset()[0]
            while not over:
                actions = {}
                for agent, obs in seen.items():  # those who act now
                    actions[agent] = clients[agent].tick({"obs": obs.tolist(), "reward": owed[agent]})["action"]
                    owed[agent] = 0.0
                last |= seen
                seen, rewards, terminated, truncated, _ = env.step(actions)
                for agent, reward in rewards.items():
                    owed[agent] += reward
                    returns[agent] += reward
                over = terminated["__all__"] or truncated["__all__"]
            last |= seen
            for agent, client in clients.items():
                if agent in last:  # else it never had a turn
                    end = {"terminated": terminated["__all__"], "truncated": truncated["__all__"]}
                    client.tick({"obs": last[agent].tolist(), "reward": owed[agent], **end})
            ends = [client.end({"returns": returns}) for client in clients.values()]
        players = {agent: seat["player"] for agent, seat in seats.items()}
        return {"id": seats[env.possible_agents[0]]["match"], "seats": players, "returns": returns, **ends[-1]}

    def keep(self, match: dict[str, Any]) -> None:
        self.told["count" if match["counts"] else match.get("why", "do not count")] += 1


def run(matches: Matches, number: int, seconds: float, report: float = 5.0) -> None:
    """Play `number` matches side by side for so many seconds (0 = until Ctrl-C)."""
    threads = [threading.Thread(target=matches.play, daemon=True) for _ in range(number)]
    for thread in threads:
        thread.start()
    start = time.monotonic()
    try:
        while not seconds or time.monotonic() - start < seconds:
            matches.over.wait(min(report, seconds or report))
            said = ", ".join(f"{n:,} {why}" for why, n in matches.told.items()) or "no result yet"
            print(f"{time.monotonic() - start:5.0f} s  {said}  {matches.trouble}", flush=True)
            matches.trouble = ""
    except KeyboardInterrupt:
        pass
    matches.over.set()
    for thread in threads:
        thread.join(5.0)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m template.matches", description="Play matches of a league.")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--games", type=int, default=32, help="matches at once")
    parser.add_argument("--seconds", type=float, default=0.0, help="0 = until Ctrl-C")
    parser.add_argument("--tcp", action="store_true", help="framed TCP in place of HTTP (live.use_tcp: true)")
    a = parser.parse_args(arguments)
    run(Matches(a.host, a.port, a.tcp), a.games, a.seconds)


if __name__ == "__main__":
    main()
