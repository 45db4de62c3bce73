"""python -m benchmarks.league: what a league costs that has grown: CPU of drawing a match and of counting its result,
of a restart from its log, and peak memory.

10,000 snapshots of one main player, an exploiter of it and one of the league; a million results of these three against
anybody, as a league draws matches, or with --any of any two, so that almost every game is the first of its pair.
"""

from __future__ import annotations

import argparse
import resource
import tempfile
import time
from pathlib import Path

import numpy as np

from bray.league import League, Outcome, ResultLog, make_players
from bray.league.log import Event

KINDS = {name: {"kind": name, "snapshot_every": 1} for name in ("main", "main_exploiter", "league_exploiter")}
AGENTS = ["first", "second"]


def write_log(path: Path, players: int, results: int, any_two: bool) -> None:
    """Snapshots of three players in turn; then results."""
    rng, log, names = np.random.default_rng(0), ResultLog(path), list(KINDS)
    for i in range(players):
        names.append(f"{names[i % 3]}@{i}")
        log.add(Event(snapshot=names[-1], steps=i))
    firsts = rng.integers(len(names) if any_two else len(KINDS), size=results).tolist()
    pairs = zip(firsts, rng.integers(len(names), size=results).tolist(), strict=True)
    scores = rng.integers(-1, 2, results).tolist()
    for i, ((a, b), score) in enumerate(zip(pairs, scores, strict=True)):
        seats = dict(zip(AGENTS, (names[a], names[b]), strict=True))
        log.add(Event(id=i, seats=seats, returns=dict(zip(AGENTS, (score, -score), strict=True)), length=20))
    log.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--players", type=int, default=10_000)
    parser.add_argument("--results", type=int, default=1_000_000)
    parser.add_argument("--matches", type=int, default=300)
    parser.add_argument("--any", action="store_true", help="results of any two players")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "log.jsonl"
        write_log(path, given.players, given.results, given.any)
        league, rng = League(make_players(KINDS), AGENTS, ResultLog(path)), np.random.default_rng(0)
        began = time.process_time()
        league.restart()
        restart = time.process_time() - began
        drawn, counted = [], []
        for _ in range(given.matches):
            began = time.process_time()
            job = league.job(rng)
            drawn.append(time.process_time() - began)
            league.finish(Outcome(job.id, dict.fromkeys(AGENTS, 0.0), 20))
            counted.append(time.process_time() - began - drawn[-1])
        size = path.stat().st_size
    grown = f"{given.players:,} players, {given.results:,} results, {league.payoff.pairs:,} pairs"
    print(f"{grown}, log of {size / 1e6:.0f} MB")
    print(f"restart from the log     {restart:6.2f} s of CPU")
    print(f"match drawn              {1e3 * np.mean(drawn):6.2f} ms, {1e3 * np.max(drawn):.2f} at most")
    print(f"result counted           {1e3 * np.mean(counted):6.2f} ms, {1e3 * np.max(counted):.2f} at most")
    print(f"peak memory              {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3:6.0f} MB")


if __name__ == "__main__":
    main()
