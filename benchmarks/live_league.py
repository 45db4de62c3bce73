"""python -m benchmarks.live_league [--games 32] [--seconds 300] [--kills 20] [--tcp] [--workers N]: a league over the
wire, or on rollout workers.

Three players learn in one `bray train --live`, beside their snapshots. Two processes play games of Nim, and each agent
of a match has a connection of its own. With --workers N the N rollout workers of one `bray train` play them instead.
With --kills the training (league, learners and service), or a process of games or a worker, is killed (SIGKILL) at
random moments; a training is started again with `--resume`, and it starts workers again itself.

Exit code 0: each result that a game was told counts is in the log once, as the game told it, and none that does not;
numbers of matches are unique; the payoff of a second reading equals a count of the log's lines; no snapshot that a
checkpoint knows has changed; after every kill results came again; and the players that learn are rated above their
first snapshots by more than both intervals.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections import Counter
from pathlib import Path
from typing import Any

from bray.client import Client, ClientError
from bray.envs.agent_games import Nim
from bray.figures import read_results
from bray.league import IN_RUN, League, PlayerRef, read_league
from bray.rundir import RunDir

ROOT = Path(__file__).parent.parent
PLAYERS = {"main": {"player": "main"}, "second": {"player": "main"}, "naive": {"player": "self_play"}}
CONFIG: dict[str, Any] = {
    "run": "PPO",
    "env": "bray.envs.agent_games:Nim",
    "live": {"rows": 256, "wait_s": 5.0},
    "self_play": {"snapshot_every": 4000, "pool": 10},
    "policies": PLAYERS,
    "rollout_length": 8,
    "lr": 2e-3,
    "gamma": 1.0,
    "epochs": 4,
    "minibatches": 4,
    "entropy_coef": 0.01,
    "threads": 1,
    "device": "cpu",
    "iteration_steps": 2000,
    "checkpoint_every_s": 5.0,
    "save_figure": False,
    "fcnet_hiddens": [64, 64],
}
PROCESSES = 2
"""Of games."""
ON_WORKERS: dict[str, Any] = {"env": "bray.envs.agent_games:Nim", "num_envs": 8, "max_worker_restarts": 1000}
START_S = 300
"""Seconds until something has come back after a kill, at most."""


# --- games ------------------------------------------------------------------------------------------------------------


def play(port: int, games: int, told: Path, tcp: bool) -> None:
    """Games until this process is ended; what each was told of its result goes to a file, a line each."""
    lock = threading.Lock()

    def one() -> None:
        with open(told, "a") as file:
            while True:
                with contextlib.suppress(ClientError):  # the service is away: the next match has another name
                    match = play_match(port, tcp)
                    with lock:
                        file.write(json.dumps(match) + "\n")
                        file.flush()
                    continue
                time.sleep(0.2)

    threads = [threading.Thread(target=one) for _ in range(games)]
    for thread in threads:
        thread.start()


def play_match(port: int, tcp: bool) -> dict[str, Any]:
    game, name = Nim(), str(uuid.uuid4())
    with contextlib.ExitStack() as stack:
        clients = {
            agent: stack.enter_context(Client("127.0.0.1", port, tcp=tcp, retries=0)) for agent in game.possible_agents
        }
        seats = {agent: client.start(name, agent, {}) for agent, client in clients.items()}
        seen, paid = game.reset()[0], dict.fromkeys(clients, 0.0)
        over = False
        while not over:
            ((agent, obs),) = seen.items()
            body = {"obs": obs["obs"].tolist(), "action_mask": obs["action_mask"].tolist(), "reward": 0.0}
            action = clients[agent].tick(body)["action"]
            seen, paid, terminated, _, _ = game.step({agent: action})
            over = terminated["__all__"]
        for agent, client in clients.items():
            last = {key: x.tolist() for key, x in seen[agent].items()}
            last["action_mask"] = [1, 1, 1]  # none of them is played
            client.tick({**last, "reward": paid[agent], "terminated": True})
        ends = [client.end({"returns": paid}) for client in clients.values()]
    return {
        "id": seats["first"]["match"],
        "seats": {agent: seat["player"] for agent, seat in seats.items()},
        "returns": paid,
        "counts": ends[-1]["counts"],
    }


# --- processes --------------------------------------------------------------------------------------------------------


class Processes:
    """The training, and processes of games, where it has no workers."""

    def __init__(self, folder: Path, games: int, tcp: bool, workers: int):
        self.folder, self.games, self.tcp, self.workers = folder, games, tcp, workers
        self.run, self.told = folder / "runs" / "league", folder / "told.jsonl"
        self.told.touch()
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        config = {**CONFIG, "live": {**CONFIG["live"], "port": self.port, "use_tcp": tcp}}
        if workers:
            config = {k: v for k, v in CONFIG.items() if k != "live"} | {**ON_WORKERS, "num_workers": workers}
        (folder / "league.yaml").write_text(json.dumps(config))  # which is YAML too
        self.training = self._train()
        self.games_of = [self._play() for _ in range(0 if workers else PROCESSES)]

    def _start(self, *words: object) -> subprocess.Popen[bytes]:
        paths = os.pathsep.join(filter(None, [f"{ROOT}", os.environ.get("PYTHONPATH")]))
        env = os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
        with open(self.folder / "errors.txt", "a") as errors:
            command = [sys.executable, "-m", *map(str, words)]
            return subprocess.Popen(command, cwd=self.folder, env=env, stdout=errors, stderr=errors)

    def _train(self) -> subprocess.Popen[bytes]:
        if (self.run / "checkpoints").exists():
            return self._start("bray", "train", "--resume", self.run, "--quiet")
        live = [] if self.workers else ["--live"]
        words = ["-f", "league.yaml", "--project", "runs", "--trial", "league", "--quiet", "--steps", "1000000000"]
        return self._start("bray", "train", *live, *words)

    def _play(self) -> subprocess.Popen[bytes]:
        words = ["--play", self.port, "--games", self.games // PROCESSES, *(["--tcp"] if self.tcp else [])]
        return self._start("benchmarks.live_league", *words, "--told", self.told)

    def kill(self, what: str, rng: random.Random) -> None:
        if what == "worker":
            os.kill(rng.choice(self._rollout_workers()), signal.SIGKILL)
            return
        i = rng.randrange(PROCESSES)
        process = self.training if what == "training" else self.games_of[i]
        process.kill()
        process.wait()
        if what == "training":
            self.training = self._train()
        else:
            self.games_of[i] = self._play()

    def _rollout_workers(self) -> list[int]:
        """Of the training that runs: processes that have the memory in which it is given rows."""
        until, memory, found = time.monotonic() + START_S, f"/bray-rollout-{self.training.pid}-", list[int]()
        while not found and time.monotonic() < until:
            for entry in filter(str.isdigit, os.listdir("/proc")):
                with contextlib.suppress(OSError):
                    if int(entry) != self.training.pid and memory in Path(f"/proc/{entry}/maps").read_text():
                        found.append(int(entry))
            time.sleep(0.1)
        return found

    def of_checkpoint(self) -> set[str]:
        """The files of snapshots that the newest checkpoint knows: a training that is resumed in rounds plays again
        what came after it, as if nothing had happened."""
        (source,) = RunDir.open(self.run).load_checkpoint().state["json"]["sources"]
        lines = (self.run / IN_RUN).read_bytes()[: int(source["league"]["offset"])].splitlines()
        frozen = [event["snapshot"].split("@") for event in map(json.loads, lines) if "snapshot" in event]
        return {f"models/{side}/{step}.safetensors" for side, step in frozen}

    def results(self) -> list[dict[str, Any]]:
        """Whole lines of the log that are results."""
        path = self.run / IN_RUN
        lines = path.read_text().split("\n")[:-1] if path.exists() else []
        return [event for event in map(json.loads, lines) if "id" in event]

    def more_than(self, results: int) -> bool:
        """Whether there are more results within the time that a start may take."""
        until = time.monotonic() + START_S
        while len(self.results()) <= results:
            if time.monotonic() > until or self.training.poll() is not None:
                return False
            time.sleep(0.1)
        return True

    def counted(self) -> dict[str, int]:
        """What the newest row of numbers says."""
        row = read_results(self.run)[-1]
        return {key: row[key] for key in ("episodes_total", "env_steps_total", "workers/restarts")}

    def snapshots(self) -> dict[str, str]:
        """Hashes of the files that the log names."""
        found = read_league(self.run / IN_RUN) if (self.run / IN_RUN).exists() else None
        refs = [] if found is None else found.past()
        files = [self.run / "models" / ref.side / f"{ref.step}.safetensors" for ref in refs]
        return {str(f.relative_to(self.run)): hashlib.sha256(f.read_bytes()).hexdigest() for f in files if f.exists()}

    def close(self) -> None:
        for process in self.games_of:
            process.kill()
            process.wait()
        self.training.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.training.wait(60)
        self.training.kill()
        self.training.wait()


# --- what is found ----------------------------------------------------------------------------------------------------


def differences(results: list[dict[str, Any]], told: list[dict[str, Any]], found: League) -> list[str]:
    """What is wrong with a log, in words."""
    wrong = []
    ids = Counter(event["id"] for event in results)
    if twice := [id for id, n in ids.items() if n > 1]:
        wrong.append(f"{len(twice)} results are there twice")
    logged = {event["id"]: (event["seats"], event["returns"]) for event in results}
    lost = [m for m in told if m["counts"] and logged.get(m["id"]) != (m["seats"], m["returns"])]
    if lost:
        wrong.append(f"{len(lost)} results that games were told count are not in the log as they were told")
    if late := [m for m in told if m["counts"] is False and m["id"] in logged]:
        wrong.append(f"{len(late)} results count that games were told do not")
    met: Counter[frozenset[str]] = Counter()
    won: Counter[tuple[str, str]] = Counter()
    for event in results:
        (one, a), (other, b) = event["seats"].items()
        if a != b:
            met[frozenset((a, b))] += 1
            won[(a, b) if event["returns"][one] > event["returns"][other] else (b, a)] += 1
    for pair, games in met.items():
        a, b = sorted(pair)
        record = found.record(PlayerRef.parse(a), PlayerRef.parse(b))
        if record.games != games or (record.wins > 0) != (won[a, b] > 0) or (record.losses > 0) != (won[b, a] > 0):
            wrong.append(f"{a} and {b} have played {games} games, and the payoff has {record}")
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--games", type=int, default=32)
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--kills", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0, help="of the kills")
    parser.add_argument("--tcp", action="store_true")
    parser.add_argument("--workers", type=int, default=0, help="rollout workers that play, in place of live games")
    parser.add_argument("--any-rating", action="store_true", help="too short for the ratings to rise")
    parser.add_argument("--play", type=int, help=argparse.SUPPRESS)  # the port, for a process of games
    parser.add_argument("--told", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.play is not None:
        play(given.play, given.games, given.told, given.tcp)
        return 0
    rng, wrong = random.Random(given.seed), []
    with tempfile.TemporaryDirectory() as folder:
        at_work = Processes(Path(folder), given.games, given.tcp, given.workers)
        began, kills = time.monotonic(), Counter[str]()
        try:
            if not at_work.more_than(0):
                wrong.append("no result came")
            hashes: dict[str, str] = {}
            for _ in range(given.kills if not wrong else 0):
                time.sleep(rng.uniform(0.0, 2.0 * given.seconds / given.kills))
                what = rng.choice(
                    ["training", "worker", "worker"] if given.workers else ["training", "training", "games"]
                )
                kills[what] += 1
                at_work.kill(what, rng)
                there = at_work.snapshots()
                wrong += [f"{name} has changed" for name, digest in hashes.items() if there.get(name) != digest]
                known = at_work.of_checkpoint() if given.workers else there.keys()
                hashes |= {name: there[name] for name in there.keys() & known}
                if not at_work.more_than(len(at_work.results())):
                    wrong.append(f"no result came after kill {kills.total()}, of {what}")
                    break
            time.sleep(max(0.0, given.seconds - (time.monotonic() - began)))
        finally:
            at_work.close()
        if not (at_work.run / IN_RUN).exists():
            print((Path(folder) / "errors.txt").read_text()[-3000:], file=sys.stderr)
            return 1
        seconds, results = time.monotonic() - began, at_work.results()
        told = [json.loads(line) for line in at_work.told.read_text().split("\n")[:-1] if line.endswith("}")]
        found = read_league(at_work.run / IN_RUN)
        wrong += differences(results, told, found)
        there = at_work.snapshots()
        wrong += [f"{name} has changed" for name, digest in hashes.items() if there.get(name) != digest]
        ratings = {}
        for name in PLAYERS:
            now, first = found.rating(PlayerRef(name)), found.rating(found.past(name)[0])
            ratings[name] = {"first": [first.elo, first.half], "now": [now.elo, now.half]}
            if now.elo - now.half <= first.elo + first.half and not given.any_rating:
                wrong.append(f"the rating of {name} has not risen: {first.elo:.0f} to {now.elo:.0f}")
        said = {
            "games": 8 * given.workers or given.games,
            "seconds": round(seconds),
            "kills": dict(kills),
            "results": len(results),
            "told": Counter(str(m["counts"]) for m in told),
            **(at_work.counted() if given.workers else {}),
            "not told": len(results) - sum(m["counts"] is True for m in told),
            "snapshots": len(there),
            "ratings": {n: {k: [round(x) for x in v] for k, v in one.items()} for n, one in ratings.items()},
            "wrong": wrong,
        }
        print(json.dumps(said), flush=True)
        if wrong:
            print((Path(folder) / "errors.txt").read_text()[-3000:], file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
