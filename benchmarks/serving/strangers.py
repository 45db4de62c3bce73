"""python -m benchmarks.serving.strangers [--messages 1000000 | --minutes 90] [--workers 2] [--disturb] [--seed 0]:
strangers at a served policy.

A policy with a Dict observation, a mask and two kinds of numbers is served by `bray serve` in processes of its own,
over HTTP and framed TCP. Strangers know the protocol: each follows a state of its own (which of its sessions run) and
says what the reply must be. A third of them are rude: pipelined requests, lengths that lie, bytes cut, flipped and
doubled. Beside them a few games play properly. What must hold:

- every reply is a documented one, and the expected one where the message leaves no doubt; never 500
- the games' actions are those of the policy asked alone: nobody gets another session's answer, and nobody else can tick
  or end their sessions
- the games see no error, and their slowest ticks stay within `--slowest`
- memory stays within `--memory` MB above the start, and comes back; so do connections, sessions and file descriptors

--live: the same for a training from live games (`strangers_live.py`).
With --disturb, workers are killed and stopped in turn, and the disk of the recordings is full half of the time; games
then start again after 404, 503 and 504.
One JSON line a minute, one at the end. Exit code 1: something did not hold.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
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
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np

from benchmarks.serving.stranger_clients import TOKEN, Game, Place, Stranger

ROOT = Path(__file__).parent.parent.parent
STRANGERS, GAMES = 12, 4


class Rooms(gym.Env):
    """An observation of every kind that games send; the reward is for the largest number of the map."""

    observation_space = gym.spaces.Dict(
        {
            "map": gym.spaces.Box(0.0, 1.0, (3, 3), np.float32),
            "kind": gym.spaces.Discrete(5),
            "flags": gym.spaces.MultiBinary(4),
            "picture": gym.spaces.Box(0, 255, (1, 8, 8), np.uint8),
            "action_mask": gym.spaces.Box(0, 1, (5,), np.int8),
        }
    )
    action_space = gym.spaces.Discrete(5)

    def _obs(self) -> dict[str, Any]:
        sample = self.observation_space.sample()
        sample["action_mask"][self.np_random.integers(5)] = 1
        return sample

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.observation_space.seed(seed)
        self.t = 0
        return self._obs(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.t += 1
        return self._obs(), float(action == 0), self.t >= 20, False, {}


# --- the service ------------------------------------------------------------------------------------------------------


def trained(folder: Path) -> Path:
    """A run directory with a policy that has learnt a little."""
    run = folder / "rooms"
    words = ["--run", "PPO", "--env", "benchmarks.serving.strangers:Rooms", "--steps", "2000"]
    command = [
        sys.executable,
        "-m",
        "bray",
        "train",
        *words,
        "--project",
        str(folder),
        "--trial",
        "rooms",
        "num_envs=4",
    ]
    subprocess.run(command, check=True, capture_output=True, cwd=ROOT)
    return run


def alone(run: Path) -> Callable[[dict[str, Any]], int]:
    """The policy, asked in this process."""
    from bray import Experiment

    experiment = Experiment.load(run)

    def action(obs: dict[str, Any]) -> int:
        picture = obs["picture"]
        if isinstance(picture, dict):
            picture = np.frombuffer(base64.b64decode(picture["base64"]), np.uint8).reshape(1, 8, 8)
        spaces = Rooms.observation_space.spaces
        values = {k: np.asarray(picture if k == "picture" else v, spaces[k].dtype) for k, v in obs.items()}
        return int(experiment.policy(values))

    return action


class Service:
    """`bray serve` in processes of its own."""

    def __init__(self, run: Path, args: argparse.Namespace, record: Path | None):
        command = [sys.executable, "-m", "bray", "serve", str(run), "--port", "0", "--admin-port", "0"]
        command += ["--workers", str(args.workers), "--sessions", "200", *args.options]
        command += ["--record", str(record)] if record else []
        self.log = open(args.log, "w") if args.log else subprocess.DEVNULL  # noqa: SIM115
        env = os.environ | {"BRAY_TOKEN": TOKEN, "PYTHONPATH": str(ROOT)}
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=self.log, text=True, env=env, cwd=ROOT)
        assert self.process.stdout is not None
        self.port = self.admin = 0
        for line in self.process.stdout:
            if found := re.search(r"http://[^:/]+:(\d+)/metrics", line):
                self.admin = int(found[1])
            if found := re.search(r"serving .* on \S+:(\d+)", line):
                self.port = int(found[1])
                break
        if not self.port:
            raise SystemExit(f"`{' '.join(command)}` did not start")
        threading.Thread(target=self.process.stdout.read, daemon=True).start()  # a full pipe would stop it

    def close(self) -> None:
        for worker in self.workers():
            tell(worker, signal.SIGCONT)
        self.process.terminate()
        try:
            self.process.wait(30)
        finally:
            self.process.kill()

    def workers(self) -> list[int]:
        pid = self.process.pid
        return [int(x) for x in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]

    def sizes(self) -> dict[str, float]:
        """Megabytes and open files of all its processes."""
        memory = files = 0
        for pid in [self.process.pid, *self.workers()]:
            with contextlib.suppress(OSError):  # it has just ended
                memory += int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
                files += len(os.listdir(f"/proc/{pid}/fd"))
        return {"mb": round(memory / 1e6, 1), "files": files}


def tell(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


async def disturb(service: Service, place: Place, seed: int, disk: Path | None) -> None:
    """Kill a worker, stop one for a while, fill the disk of the recordings and empty it: one of them every 20 s."""
    rng = random.Random(f"disturb-{seed}")
    while not place.over:
        await asyncio.sleep(20.0)
        workers = service.workers()
        if not workers or place.over:
            continue
        worker, how = rng.choice(workers), rng.choice(["kill", "stop", "stop", "disk"])
        place.sent[f"({how})"] += 1
        if how == "kill":
            tell(worker, signal.SIGKILL)
        elif how == "stop":
            tell(worker, signal.SIGSTOP)
            await asyncio.sleep(rng.choice([0.5, 3.0, 12.0]))
            tell(worker, signal.SIGCONT)
        if how == "disk" and disk is not None:
            fill(disk)
            await asyncio.sleep(10.0)
            empty(disk)
            for old in sorted(disk.rglob("*.rec"), key=os.path.getmtime)[:-50]:
                old.unlink(missing_ok=True)


def fill(disk: Path) -> None:
    """To the last byte."""
    with contextlib.suppress(OSError), open(disk / "filler", "ab", buffering=0) as f:
        while True:
            f.write(bytes(1 << 20))


def empty(disk: Path) -> None:
    (disk / "filler").unlink(missing_ok=True)


async def watch(service: Service, place: Place, args: argparse.Namespace, base: dict[str, float]) -> None:
    """One line a minute; ends everything when enough was said, memory is out of bounds or the service is gone."""
    began = said = time.monotonic()
    while not place.over:
        await asyncio.sleep(0.5)
        now, size = time.monotonic(), await asyncio.to_thread(service.sizes)
        if size["mb"] > base["mb"] + args.memory:
            place.blame(f"{size['mb']} MB, {base['mb']} MB at the start")
        if service.process.poll() is not None:
            place.blame(f"the service ended with {service.process.returncode}")
        enough = now - began > 60 * args.minutes if args.minutes else place.messages >= args.messages
        place.over = enough or len(place.wrong) >= 20 or service.process.poll() is not None
        if now - said > 60.0 or place.over:
            said = now
            print(json.dumps({"minute": round((now - began) / 60, 1), "messages": place.messages} | size), flush=True)


async def settle(service: Service, place: Place, args: argparse.Namespace, base: dict[str, float]) -> dict[str, float]:
    """What is left when everybody has gone: sizes come back to what they were."""
    size: dict[str, float] = {}
    for _ in range(60):
        await asyncio.sleep(1.0)
        size = await asyncio.to_thread(service.sizes)
        if size["mb"] < base["mb"] + args.memory / 4 and size["files"] <= base["files"] + 8:
            return size
    place.blame(f"left behind: {size}, at the start {base}")
    return size


async def run(args: argparse.Namespace) -> int:
    with tempfile.TemporaryDirectory(prefix="bray-strangers-") as folder, contextlib.ExitStack() as stack:
        directory = trained(Path(folder))
        disk = stack.enter_context(small_disk(Path(folder) / "disk")) if args.disturb else None
        service = Service(directory, args, disk)
        stack.callback(service.close)
        place = Place(service.port, "--session-secrets" in args.options, "--tcp" in args.options, args.disturb)
        policy = alone(directory)
        games = [Game(place, i, args.seed, policy) for i in range(GAMES)]
        strangers = [Stranger(place, i, args.seed) for i in range(STRANGERS)]
        await warm_up(games, place)
        base = service.sizes()
        tasks = [watch(service, place, args, base), *(x.live() for x in strangers), *(x.play() for x in games)]
        tasks += [disturb(service, place, args.seed, disk)] if args.disturb else []
        await asyncio.gather(*tasks)
        size = await settle(service, place, args, base)
    ticks = np.array(place.ticks) * 1000.0
    slowest = float(ticks.max())
    if slowest > 1000.0 * args.slowest and not args.disturb:
        place.blame(f"the slowest tick of a game took {slowest:.0f} ms")
    summary = {
        "messages": place.messages,
        "sent": dict(place.sent.most_common()),
        "statuses": {str(k): v for k, v in sorted(place.statuses.items())},
        "game_ticks": len(ticks),
        "p50_ms": round(float(np.percentile(ticks, 50)), 2),
        "p99_ms": round(float(np.percentile(ticks, 99)), 2),
        "slowest_ms": round(slowest, 1),
        "restarts": place.restarts,
        "start": base,
        "end": size,
        "wrong": place.wrong,
    }
    print(json.dumps(summary))
    print(f"{place.messages:,} messages, {len(place.wrong)} violations")
    return 1 if place.wrong else 0


async def warm_up(games: list[Game], place: Place) -> None:
    """The first ticks of a worker make its buffers: they are no growth."""
    plays = asyncio.gather(*(g.play() for g in games))
    await asyncio.sleep(5.0)
    place.over = True
    await plays
    place.over = False
    place.ticks.clear()


@contextlib.contextmanager
def small_disk(path: Path) -> Iterator[Path | None]:
    """32 MB that can be filled; None where this user may not mount one."""
    path.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=32m", "tmpfs", str(path)], capture_output=True)
    try:
        yield path if mounted.returncode == 0 else None
    finally:
        if mounted.returncode == 0:
            subprocess.run(["umount", "-l", str(path)], check=False)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--messages", type=int, help="1,000,000; 300,000 for each seed with --live")
    parser.add_argument("--minutes", type=float, default=0.0, help="instead of a number of messages")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--memory", type=float, default=300.0, help="MB that the service may grow by")
    parser.add_argument("--slowest", type=float, default=2.0, help="seconds that a game's tick may take")
    parser.add_argument("--disturb", action="store_true")
    parser.add_argument("--live", action="store_true", help="at `bray train --live` instead of `bray serve`")
    parser.add_argument("--seeds", type=int, default=5, help="with --live: from --seed on")
    parser.add_argument("--pace", type=float, default=0.0, help="with --live --minutes: seconds between two messages")
    parser.add_argument("--log", help="file for what the service logs")
    parser.add_argument("options", nargs="*", help="for `bray serve`, after --: --tcp, or --session-secrets")
    args = parser.parse_args()
    args.messages = args.messages or (300_000 if args.live else 1_000_000)
    if args.live:
        from benchmarks.serving import strangers_live

        return strangers_live.main(args)
    return asyncio.run(run(args))


if __name__ == "__main__":
    sys.exit(main())
