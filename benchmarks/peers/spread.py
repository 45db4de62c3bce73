"""What is the same for every library that trains shared PPO on simple_spread (mpe2): the settings, the environments,
which time themselves, and the turns in which their processes are measured.

An agent's step is one decision of one agent.
"""

import json
import sys
import time
from types import SimpleNamespace

import torch
from mpe2 import simple_spread_v3

GAMES = 64
AGENTS = 3
STEPS = 25
"""Of each game between two updates: a whole one. So 4,800 rows."""
MINIBATCH = 600
own = SimpleNamespace(cpu=0.0, wall=0.0, decisions=0)
"""What the environments have taken themselves."""


def make_parallel():
    """A game whose agents act at once."""
    return _timed(simple_spread_v3.parallel_env(), AGENTS, ("reset", "step"))


def make_turns():
    """The same game, whose agents act in turns (PettingZoo's AEC)."""
    return _timed(simple_spread_v3.env(), 1, ("reset", "step", "last"))


def _timed(env, decisions: int, names: tuple[str, ...]):
    for name in names:
        setattr(env, name, _timed_call(getattr(env, name), decisions if name == "step" else 0))
    return env


def _timed_call(function, decisions: int):
    def call(*args, **kwargs):
        wall, cpu = time.perf_counter(), time.thread_time()
        out = function(*args, **kwargs)
        own.cpu += time.thread_time() - cpu
        own.wall += time.perf_counter() - wall
        own.decisions += decisions
        return out

    return call


class Turns:
    """A process that is measured by turns with others: each line of its input begins a turn of so many seconds of CPU
    time, and a JSON line ends it."""

    def __init__(self) -> None:
        torch.set_num_threads(1)
        self._await()

    def _await(self) -> None:
        line = sys.stdin.readline()
        if not line:
            raise SystemExit
        self._left = float(line)
        self._start = self._now()

    def _now(self) -> dict:
        cpu, wall = time.process_time(), time.perf_counter()
        return {"decisions": own.decisions, "cpu": cpu, "wall": wall, "env_cpu": own.cpu, "env_wall": own.wall}

    def tick(self, mean_return: float) -> None:
        """Call after every iteration; it returns when the process shall go on."""
        now = self._now()
        if now["cpu"] - self._start["cpu"] < self._left:
            return
        spent = {name: value - self._start[name] for name, value in now.items()}
        print(json.dumps({**spent, "return": float(mean_return)}), flush=True)
        self._await()
