"""python -m benchmarks.trace_files tick|sample|ppo: how much of the package a reader passes who follows one thing
through it.

tick     files that a game's tick passes in `bray serve RUN_DIR`, from the socket to the action and back
sample   files that a live game's sample passes, from the socket to the end of the learner's update: in the template's
         graph in one process, and in `bray train --live` where there is one
ppo      lines of the files that explain PPO

What runs is traced, in every thread, after a warm-up: imports and set-up do not count, nor do functions that run while
no game plays (timers).
For a sample the games are halted until the learner has nothing to do; the trace then goes from their next tick to the
end of the first update.
A recorded update is replayed without Python, so what ran inside `Learner.update` while it was recorded is named apart.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import bray

ROOT = Path(__file__).parent.parent
PACKAGE = str(Path(bray.__file__).parent) + os.sep

PPO = (
    "bray.algos.ppo",
    "bray.algos.base",
    "bray.algos.rows",
    "bray.act.rules",
    "bray.rl.losses",
    "bray.rl.returns",
    "bray.distributions",
    "bray.optim",
    "bray.schedules",
)
"""What one reads to understand PPO. One that has moved is looked up here."""
LIVE = ["train", "--run", "PPO", "--live", "--obs", "float32[4]", "--actions", "2"]
"""Games of four numbers and two actions that train an agent, by `bray train`."""
WARM_UP = 8
"""Updates of the learner before the trace begins."""
ROUNDS = 3
"""Traces from a tick to the end of an update."""
QUIET = 2.0
"""Seconds without an update after which the learner is taken to wait."""
IDLE = 12.0
"""Seconds for which is looked at what runs while no game plays: longer than the slowest timer, the result rows of every
10 s."""
PATIENCE = 180.0
"""Seconds until a trace that does not come to its end is given up."""


# --- the tracer -------------------------------------------------------------------------------------------------------


class Tracer:
    """Functions of the package that are called, or return, while one of `calls` and `idle` is filled."""

    def __init__(self) -> None:
        self.calls: dict[tuple[str, str, str], None] = {}
        """(thread, file, function), in the order in which they are first seen."""
        self.idle: dict[tuple[str, str, str], None] = {}
        """The same, seen while no game played."""
        self.recorded: dict[str, None] = {}
        """Files whose functions ran inside `Learner.update` while nothing was traced."""
        self.updates = 0
        """Returns of `Learner.update`."""
        self.last_update = 0.0
        self._into: dict[tuple[str, str, str], None] | None = None
        self._until_update = False
        self._updating = threading.local()

    def __enter__(self) -> Tracer:
        """Look at this thread, and at those that are started from now on."""
        threading.setprofile(self._event)
        sys.setprofile(self._event)
        return self

    def __exit__(self, *exc: object) -> None:
        threading.setprofile(None)
        sys.setprofile(None)
        self._into = None

    def start(self, into: dict[tuple[str, str, str], None], until_update: bool = False) -> None:
        """Trace until `stop`, or until an update of the learner is at its end."""
        self._until_update = until_update
        self._into = into

    def stop(self) -> None:
        self._into = None

    @property
    def on(self) -> bool:
        return self._into is not None

    def _event(self, frame: FrameType, event: str, arg: Any) -> None:
        if event not in ("call", "return") or not frame.f_code.co_filename.startswith(PACKAGE):
            return
        code = frame.f_code
        if code.co_qualname == "Learner.update":
            self._updating.now = event == "call"
        into = self._into
        if into is not None:  # a return too: the call may be older than the trace
            into[threading.current_thread().name, *where(code)] = None
        elif getattr(self._updating, "now", False):
            self.recorded[where(code)[0]] = None
        if code.co_qualname == "Learner.update" and event == "return":
            self.updates, self.last_update = self.updates + 1, time.monotonic()
            if self._until_update:
                self._into = None

    def report(self, label: str) -> list[str]:
        """Print the files with their threads and functions; returns the files."""
        timers = {(file, function) for _, file, function in self.idle}
        files: dict[str, tuple[dict[str, None], dict[str, None]]] = {}
        for thread, file, function in self.calls:
            if (file, function) not in timers:
                threads, functions = files.setdefault(file, ({}, {}))
                threads[thread], functions[function] = None, None
        for i, (file, (threads, functions)) in enumerate(files.items(), 1):
            print(f"{i:3}  {file}  [{', '.join(threads)}]\n       {', '.join(functions)}")
        folders = Counter(file.split("/")[1] for file in files)
        print(f"{label}: {len(files)} files of bray/ ({', '.join(f'{n} {name}' for name, n in folders.most_common())})")
        for file in {file: None for file in self.recorded if file not in files}:
            print(f"  and inside Learner.update while it was recorded: {file}")
        for file in {file: None for _, file, _ in self.calls if file not in files}:
            print(f"  not counted, runs also while no game plays: {file}")
        return list(files)


def where(code: CodeType) -> tuple[str, str]:
    return "bray/" + code.co_filename[len(PACKAGE) :].replace(os.sep, "/"), code.co_qualname


# --- a game, with the standard library alone --------------------------------------------------------------------------


class Game:
    """One session over HTTP."""

    def __init__(self, port: int, name: str):
        self.connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
        self.name = name
        self.step("start", b"")

    def step(self, kind: str, body: bytes) -> bytes:
        self.connection.request("POST", "/step", body, {"session": self.name, "step_kind": kind})
        reply = self.connection.getresponse()
        data = reply.read()
        if reply.status != 200:
            raise RuntimeError(f"{kind}: {reply.status} {data[:200]!r}")
        return data

    def tick(self, **state: Any) -> Any:
        return json.loads(self.step("tick", json.dumps(state).encode()))["action"]


def play(port: int, name: str) -> None:
    """Episodes of 20 ticks without end: action 1 is worth something."""
    game, reward = Game(port, name), 0.0
    while True:
        for t in range(20):
            action = game.tick(obs=[0.01 * t, 0.0, 0.1, 0.0], reward=reward, terminated=t == 19, truncated=False)
            reward = float(action == 1) if t < 19 else 0.0


def play_games(port: int, games: int = 8) -> None:
    """Some games, as soon as a service is there."""
    while not listens(port):
        time.sleep(0.1)
    threads = [threading.Thread(target=play, args=(port, f"game-{i}"), daemon=True) for i in range(games)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


# --- what is traced ---------------------------------------------------------------------------------------------------


def trace_tick(ticks: int = 20, warm_up: int = 50, idle: float = 1.5, **settings: Any) -> list[str]:
    """The files of some ticks of a real server in this process; `settings` are those of `bray serve`."""
    with tempfile.TemporaryDirectory() as folder, Tracer() as tracer:
        exp = bray.Experiment(
            run="PPO", env="CartPole-v1", path=Path(folder) / "run", fcnet_hiddens=[8], save_figure=False
        )
        for _ in exp.train(stop={"training_iteration": 1}):
            pass
        with contextlib.closing(exp), exp.serve(port=0, block=False, **settings) as server:
            game, obs = Game(server.port, "game-1"), [0.0, 0.0, 0.05, 0.0]
            for _ in range(warm_up):
                game.tick(obs=obs)
            tracer.start(tracer.idle)
            time.sleep(idle)
            tracer.start(tracer.calls)
            for _ in range(ticks):
                game.tick(obs=obs)
            tracer.stop()
    tracer.recorded.clear()  # that was the training
    return tracer.report("tick, bray serve")


def trace_command(words: list[str], games: list[str], label: str) -> list[str]:
    """The files of samples in a command that trains on live games. It runs in this thread and is ended by Ctrl-C; the
    games play in another process, so that their client is not counted."""
    from bray.cli.main import main

    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen([sys.executable, *games], env=env, cwd=ROOT, stdout=subprocess.DEVNULL)
    try:
        with Tracer() as tracer:
            traced = threading.Event()
            threading.Thread(target=trace_samples, args=(tracer, process, traced), daemon=True).start()
            with contextlib.redirect_stdout(sys.stderr):
                code = main(words)
    finally:
        process.kill()
        process.wait()
    if not traced.is_set():
        raise SystemExit(f"{label}: nothing was traced: {tracer.updates} updates, exit code {code}")
    return tracer.report(label)


def trace_samples(tracer: Tracer, games: subprocess.Popen[bytes], traced: threading.Event) -> None:
    """Trace samples of halted games that go on; then end the command."""
    try:
        wait_until(lambda: tracer.updates >= WARM_UP)
        for i in range(ROUNDS):
            games.send_signal(signal.SIGSTOP)
            wait_until(lambda: time.monotonic() - tracer.last_update > QUIET)
            tracer.start(tracer.idle)
            time.sleep(QUIET if i else IDLE)
            tracer.start(tracer.calls, until_update=True)
            games.send_signal(signal.SIGCONT)
            wait_until(lambda: not tracer.on)
        traced.set()
    finally:
        games.kill()  # first: they would say that the service is gone
        os.kill(os.getpid(), signal.SIGINT)


def wait_until(happened: Callable[[], bool]) -> None:
    end = time.monotonic() + PATIENCE
    while not happened():
        if time.monotonic() > end:
            raise TimeoutError(f"it did not happen in {PATIENCE:.0f} s")
        time.sleep(0.01)


def trace_launched() -> list[str]:
    """The template's graph in one process, with its own games."""
    port = free_port()
    games = ["-m", "template.gamecore", "--port", str(port), "--games", "8"]
    with tempfile.TemporaryDirectory() as folder:
        words = ["launch", "--config", str(ROOT / "template" / "rl.yaml"), "--cluster", "local", "--project", folder]
        words += ["--trial", "run", f"actor1.port={port}", "buffer1.batch_size=64"]
        return trace_command(words, games, "sample, the template's graph")


def trace_live() -> list[str]:
    """`bray train --live`, where this tree has it."""
    asked = subprocess.run([sys.executable, "-m", "bray", "train", "--help"], capture_output=True, text=True, cwd=ROOT)
    if "--live" not in asked.stdout:
        print("sample, bray train --live: this tree does not have it")
        return []
    port = free_port()
    games = ["-m", "benchmarks.trace_files", "play", "--port", str(port)]
    with tempfile.TemporaryDirectory() as folder:
        words = [*LIVE, "--port", str(port), "--project", folder, "--trial", "run", "--quiet"]
        return trace_command(words, games, "sample, bray train --live")


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def listens(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
        return True
    return False


def count_ppo() -> int:
    """The lines of PPO's files, all and without blank ones."""
    total = filled = 0
    print("lines  non-blank")
    for name in PPO:
        found = importlib.util.find_spec(name)
        if found is None or found.origin is None:
            raise SystemExit(
                f"there is no module {name}: has it moved? Say where in PPO at the top of {Path(__file__).name}"
            )
        lines = Path(found.origin).read_text().splitlines()
        some = sum(bool(line.strip()) for line in lines)
        print(f"{len(lines):5}  {some:9}  {name.replace('.', '/')}.py")
        total, filled = total + len(lines), filled + some
    print(f"ppo: {total} lines, {filled} of them not blank, in {len(PPO)} files")
    return total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["tick", "sample", "ppo", "play"])
    parser.add_argument("--port", type=int, help="play: games without end against this port")
    parser.add_argument("--only", choices=["launched", "live"], help="sample: one of the two, in this process")
    args = parser.parse_args()
    if args.what == "tick":
        trace_tick()
    elif args.what == "ppo":
        count_ppo()
    elif args.what == "play":
        play_games(args.port)
    elif args.only:
        {"launched": trace_launched, "live": trace_live}[args.only]()
    else:  # each in a process of its own: threads of one must not be seen by the other
        for only in ("launched", "live"):
            command = [sys.executable, "-m", "benchmarks.trace_files", "sample", "--only", only]
            subprocess.run(command, check=True, cwd=ROOT)


if __name__ == "__main__":
    main()
