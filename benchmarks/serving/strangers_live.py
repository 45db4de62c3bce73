"""python -m benchmarks.serving.strangers --live [--messages 300000] [--seeds 5] [--minutes 60]: strangers at a training
from live games.

`bray train --live` in a process of its own; honest games that play for a reward; and strangers beside them, who send
what no game may send (rewards of 1e20, observations that are not numbers, half a body), lies that are within all bounds
(rewards of 1e5, every episode won), and bytes that are no request. For each seed the games first learn alone, then
with the strangers. What must hold:

- every reply is a documented one, and the expected one where the message leaves no doubt; never 500
- the honest games see no error
- they reach the same return with the strangers as alone, and the service ends with exit code 0

With --minutes: one such training for so long, whose learner raises now and then and whose disk (a small one that is
mounted for it, which takes root) is full now and then. The honest games see no error, and the memory at the end is
within 5 % of that at minute 15. --pace 0.1: every client waits 0.1 s between messages.
One JSON line for each run. Exit code 1: something did not hold.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.serving.stranger_clients import (
    MESSAGE_TIMEOUT_S,
    OK,
    TOKEN,
    WRONG,
    Place,
    Stranger,
    http,
    read_http,
)
from benchmarks.serving.strangers import ROOT, empty, fill, small_disk

THRESHOLD = 7.5
"""Of eight ticks, each worth 1; chance is 4."""
GAMES, STRANGERS = 8, 6
SETTINGS = ["lr=3e-3", "rows=512", "rollout_length=32", "epochs=4", "minibatches=4", "iteration_steps=0"]
MOST_STEPS = 200_000
_LOOK_S = 0.5

TROUBLED = """
import itertools, sys
from bray.algos import ppo
from bray.cli.main import main

update, count = ppo.Learner.update, itertools.count(1)

def sometimes(*args):
    if next(count) % 20 == 0:
        raise RuntimeError("a learner that raises now and then")
    return update(*args)

ppo.Learner.update = sometimes
sys.exit(main(sys.argv[1:]))
"""
"""A training whose learner raises."""
GROWTH = 1.05
"""Of the memory at minute 15, at most."""


class Training:
    """`bray train --live` in a process of its own."""

    def __init__(self, folder: Path, seed: int, troubled: bool = False, log: str | None = None):
        words = ["train", "--run", "PPO", "--live", "--port", "0", "--obs", "float32[2]", "--actions", "2"]
        words += [
            "--seed",
            str(seed),
            "--project",
            str(folder),
            "--trial",
            "live",
            "export_graph_after_s=null",
            *SETTINGS,
        ]
        start = ["-c", TROUBLED] if troubled else ["-m", "bray"]
        words += ["checkpoint_every_s=10"] if troubled else []
        env = os.environ | {"BRAY_TOKEN": TOKEN, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1", "COLUMNS": "200"}
        self._log = open(log, "a") if log else subprocess.DEVNULL  # noqa: SIM115
        self.process = subprocess.Popen(
            [sys.executable, *start, *words], stdout=subprocess.PIPE, stderr=self._log, text=True, env=env, cwd=ROOT
        )
        assert self.process.stdout is not None
        self.port = self.admin = 0
        for line in self.process.stdout:
            if found := re.search(r"POST http://[^:/]+:(\d+)/step", line):
                self.port = int(found[1])
            if found := re.search(r"http://[^:/]+:(\d+)/training", line):
                self.admin = int(found[1])
                break
        if not self.admin:
            raise SystemExit("`bray train --live` did not start")
        threading.Thread(target=self.process.stdout.read, daemon=True).start()  # a full pipe would stop it

    def megabytes(self) -> float:
        pages = int(Path(f"/proc/{self.process.pid}/statm").read_text().split()[1])
        return round(pages * os.sysconf("SC_PAGE_SIZE") / 1e6, 1)

    def close(self) -> int:
        """Its exit code."""
        self.process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(60)
        self.process.kill()
        return self.process.wait()


def page(admin: int) -> dict[str, Any]:
    """What the training says of itself."""
    with urllib.request.urlopen(f"http://127.0.0.1:{admin}/training", timeout=30) as reply:
        return dict(json.load(reply))


# --- who calls --------------------------------------------------------------------------------------------------------


class LiveStranger(Stranger):
    """Knows the protocol of a training, and sends what spoils it where it can. Every third one hardly makes a mistake:
    it plays on, and lies. (And every third one is rude.)"""

    def _message(self) -> tuple[str, str, str, bytes, str, str, set[int]]:
        rng, mine = self.rng, list(self.running)
        fresh = f"stranger-{self.number}-{rng.randrange(1 << 40)}"
        p = rng.random()
        if not mine:
            return "start", "start", fresh, b"", "", TOKEN, {200, 429}
        own = rng.choice(mine)
        if self.number % 3 == 1 and p < 0.97:
            return "lie", "tick", own, lie(rng), "", TOKEN, OK
        if p < 0.05:
            return "start again", "start", own, b"", "", TOKEN, {409}
        if p < 0.40:
            return "out of range", "tick", own, out_of_range(rng), "", TOKEN, {400}
        if p < 0.65:
            return "malformed", "tick", own, malformed(rng), "", TOKEN, {200, 400}
        if p < 0.85:
            return "lie", "tick", own, lie(rng), "", TOKEN, OK
        if p < 0.90:
            return "tick of nobody", "tick", fresh, lie(rng), "", TOKEN, {404}
        if p < 0.94:
            return "wrong token", "tick", own, lie(rng), "", rng.choice(["", "wrong", TOKEN + "x"]), {401}
        if p < 0.96:
            return "wrong kind", rng.choice(["tock", "START!", "9"]), own, lie(rng), "", TOKEN, {400}
        return "end", rng.choice(["end", "stop"]), own, b"", "", TOKEN, OK


def tick(rng: random.Random, **more: Any) -> dict[str, Any]:
    return {"obs": [rng.choice([-1.0, 1.0]), 1.0], "reward": 0.5, "terminated": False, "truncated": False, **more}


def lie(rng: random.Random) -> bytes:
    """Within all bounds, and not true."""
    reward = rng.choice([1e5, -1e5, 9.9e5, -1e6, 100.0, 9.0])
    return json.dumps(tick(rng, reward=reward, terminated=rng.random() < 0.2)).encode()


def out_of_range(rng: random.Random) -> bytes:
    """Numbers that no game may send."""
    wrong: dict[str, Any] = rng.choice(
        [
            {"reward": rng.choice([1e20, -1e7, 3e38, 1e39, 1000001, -(2**63)])},
            {"obs": [rng.choice([1e30, -2e9, 3e38, 1e39]), 1.0]},
            {"obs": [1.0] * rng.choice([0, 1, 3, 500])},
            {"terminated": rng.choice([2, "true", [], -1])},
        ]
    )
    text = json.dumps(tick(rng, **wrong))
    return rng.choice(
        [text, text, json.dumps(tick(rng)).replace("0.5", rng.choice(["NaN", "1e400", "-Infinity"]))]
    ).encode()


def malformed(rng: random.Random) -> bytes:
    """A tick's body with a value that is right nowhere, a name that nobody knows, or its end missing."""
    how = rng.randrange(4)
    if how == 0:
        return json.dumps(tick(rng, **{rng.choice(["obs", "reward", "truncated"]): rng.choice(WRONG)(rng)})).encode()
    if how == 1:
        return json.dumps(tick(rng, **{rng.choice(["rewards", "done", "x" * 3000]): 1})).encode()
    if how == 2:
        return b"[" * rng.choice([10, 5000]) + json.dumps(tick(rng)).encode()
    text = json.dumps(tick(rng)).encode()
    return text[: rng.randrange(len(text))]


class HonestGame:
    """Eight ticks of a number each; saying its sign is worth 1."""

    def __init__(self, place: Place, number: int, seed: int):
        self.place, self.rng, self.name = place, random.Random(f"honest-{seed}-{number}"), f"honest-{number}"

    async def play(self) -> None:
        while not self.place.over:
            try:
                async with self.place.connection() as (reader, writer):
                    await self._ask(reader, writer, "start")
                    while not self.place.over:
                        await self._episode(reader, writer)
                    await self._ask(reader, writer, "end")
            except (OSError, asyncio.IncompleteReadError, TimeoutError, Refused) as e:
                self.place.blame(f"{self.name}: {e!r}")
                self.name += "x"
                await asyncio.sleep(0.2)

    async def _ask(self, reader: Any, writer: Any, kind: str, body: Any = None) -> Any:
        before = time.perf_counter()
        writer.write(http(kind, self.name, b"" if body is None else json.dumps(body).encode()))
        reply = await asyncio.wait_for(read_http(reader), MESSAGE_TIMEOUT_S)
        self.place.ticks.append(time.perf_counter() - before)
        await asyncio.sleep(self.place.pace)
        if reply.status != 200:
            raise Refused(f"{kind} was answered with {reply.status} {reply.body[:100]!r}")
        return json.loads(reply.body) if kind == "tick" else None

    async def _episode(self, reader: Any, writer: Any) -> None:
        reward = 0.0
        for i in range(9):
            obs = [self.rng.choice([-1.0, 1.0]), 1.0]
            said = await self._ask(reader, writer, "tick", {"obs": obs, "reward": reward, "terminated": i == 8})
            reward = float((said["action"] == 1) == (obs[0] > 0))


class Refused(Exception):
    """A game was not answered as it should be."""


# --- runs -------------------------------------------------------------------------------------------------------------


async def visit(
    port: int,
    admin: int,
    seed: int,
    messages: int,
    threshold: float = THRESHOLD,
    pace: float = 0.0,
    over: Callable[[Place, dict[str, Any]], bool] | None = None,
) -> tuple[Place, dict[str, Any]]:
    """Games, and strangers until they have sent so many messages (0: without any), at a training; until the games have
    reached the threshold too, or `over` says so. What happened, and what the training says in the end."""
    place = Place(port, secrets=False, tcp=False, disturb=False, pace=pace)
    games = [HonestGame(place, i, seed) for i in range(GAMES)]
    strangers = [LiveStranger(place, i, seed) for i in range(STRANGERS if messages else 0)]
    leaving = Place(port, secrets=False, tcp=False, disturb=False, pace=pace)  # strangers leave first
    for stranger in strangers:
        stranger.place = leaving
    said: dict[str, Any] = {}
    first: dict[str, Any] = {}

    async def watch() -> None:
        began = time.monotonic()
        while not place.over:
            await asyncio.sleep(_LOOK_S)
            try:
                said.update(await asyncio.to_thread(page, admin))
            except OSError as e:
                place.blame(f"/training was not answered: {e!r}")
                place.over = leaving.over = len(place.wrong) >= 20 or not said
                continue
            if not first and (said["game_return_median"] or 0.0) >= threshold:
                first.update(steps=said["env_steps_total"], seconds=round(time.monotonic() - began, 1))
            leaving.over = leaving.messages >= messages
            enough = bool(first) or said["env_steps_total"] > MOST_STEPS
            place.over = len(leaving.wrong) >= 20 or (over(place, said) if over else leaving.over and enough)
            leaving.over = leaving.over or place.over

    await asyncio.gather(watch(), *(x.play() for x in games), *(x.live() for x in strangers))
    place.sent, place.statuses = leaving.sent, leaving.statuses
    place.wrong += leaving.wrong
    return place, {**said, "reached": dict(first)}


def run_once(seed: int, messages: int, log: str | None) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="bray-strangers-") as folder:
        training = Training(Path(folder), seed, log=log)
        code, start = None, training.megabytes()
        try:
            place, said = asyncio.run(visit(training.port, training.admin, seed, messages))
            end = training.megabytes()
        finally:
            code = training.close()
    ticks = sorted(place.ticks)
    if code != 0:
        place.blame(f"`bray train --live` ended with exit code {code}")
    if not said["reached"]:
        place.blame(f"the games did not reach {THRESHOLD} in {said['env_steps_total']} steps")
    return {
        "seed": seed,
        "messages": place.messages,
        "reached": said["reached"],
        "sent": dict(place.sent.most_common()),
        "statuses": {str(k): v for k, v in sorted(place.statuses.items())},
        "game_ticks": len(ticks),
        "p99_ms": round(1e3 * ticks[int(0.99 * len(ticks))], 1) if ticks else None,
        "rows_left_out": said["rows_left_out"],
        "updates_undone": said["updates_undone"],
        "mb": [start, end],
        "wrong": place.wrong,
    }


def soak(minutes: float, pace: float, log: str | None) -> dict[str, Any]:
    """One training, for so long, with a learner that raises and a disk that is full now and then."""
    samples: dict[str, float] = {}
    with tempfile.TemporaryDirectory(prefix="bray-strangers-") as folder, small_disk(Path(folder) / "disk") as disk:
        if disk is None:
            raise SystemExit("a disk that is full now and then is mounted for it, which takes root")
        training = Training(disk, 0, True, log)
        began = said_at = time.monotonic()
        troubles: Counter[str] = Counter()
        learner = ""

        def over(place: Place, said: dict[str, Any]) -> bool:
            nonlocal said_at, learner
            now = time.monotonic()
            minute = (now - began) / 60
            if int(minute) % 4 == 1:
                fill(disk)
            else:
                empty(disk)
            if said["learner"] != learner:
                learner = said["learner"]
                troubles[learner[:60]] += 1
            if minute >= min(15.0, minutes / 4):
                samples.setdefault("mb_at_15", training.megabytes())
            if now - said_at > 60.0:
                said_at = now
                row = {"minute": round(minute, 1), "mb": training.megabytes(), "game_ticks": len(place.ticks)}
                row |= {"failed": sum(troubles.values()) - troubles["learns"], "wrong": len(place.wrong)}
                keys = ("env_steps_total", "learner", "game_return_median")
                print(json.dumps(row | {k: said[k] for k in keys}), flush=True)
            return minute >= minutes or training.process.poll() is not None

        try:
            visited = visit(training.port, training.admin, 0, sys.maxsize, pace=pace, over=over)
            place, said = asyncio.run(visited)
            samples["mb_at_the_end"] = training.megabytes()
            empty(disk)
        finally:
            code = training.close()
    if code != 0:
        place.blame(f"`bray train --live` ended with exit code {code}")
    if samples["mb_at_the_end"] > GROWTH * samples["mb_at_15"]:
        place.blame(f"memory grew by more than {GROWTH - 1:.0%} after minute 15")
    return {
        "minutes": round((time.monotonic() - began) / 60, 1),
        "messages": place.messages,
        **samples,
        "learner": dict(troubles),
        "game_return_median": said["game_return_median"],
        "game_ticks": len(place.ticks),
        "wrong": place.wrong,
    }


def main(args: argparse.Namespace) -> int:
    if args.minutes:
        row = soak(args.minutes, args.pace, args.log)
        print(json.dumps(row), flush=True)
        print(f"{row['messages']:,} messages in {row['minutes']} minutes, {len(row['wrong'])} violations")
        return 1 if row["wrong"] else 0
    runs = []
    for seed in range(args.seed, args.seed + args.seeds):
        for messages in (0, args.messages):
            runs.append(run_once(seed, messages, args.log))
            print(json.dumps(runs[-1]), flush=True)
    alone, beside = (
        [bool(r["reached"]) for r in runs if bool(r["messages"]) == with_them] for with_them in (False, True)
    )
    violations = sum(len(r["wrong"]) for r in runs)
    print(
        f"{sum(r['messages'] for r in runs):,} messages, {violations} violations; {THRESHOLD} reached alone by "
        f"{sum(alone)} of {len(alone)} seeds, with strangers by {sum(beside)} of {len(beside)}"
    )
    return 1 if violations else 0
