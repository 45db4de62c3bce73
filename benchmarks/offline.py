"""python -m benchmarks.offline CASE... [--peer PYTHON] [--steps 20000] [--seeds 0 1 2 3 4] [--device cuda [--compiled]]
python -m benchmarks.offline CASE... --peer PYTHON --speed [--turns 5] [--device cuda [--compiled]]

Bray beside d3rlpy 2.8 on the same files (`benchmarks.learning.demos`): scores after --steps gradient steps, of ten
greedy episodes on the same seeds, in points (0 = random play, 100 = the script that made the good half of the data),
both sides at the same time; or with --speed the gradient steps in a second, by turns, one thread each: a CPU second, or
with --device cuda one of the clock. --compiled: with `compile_graph=True` on their side. --peer is a Python that has
d3rlpy 2.8.1 and our torch, in an environment of its own: it wants gymnasium 1.0; without it, our scores alone.

Both sides have networks of 256 x 256, batches of 256 and a discount of 0.99; all else are the defaults of each.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import torch

from benchmarks import one_of
from benchmarks.learning import demos
from bray.act import Clock
from bray.data.files import EpisodeReader
from bray.experiment import Experiment

SCRIPT = Path(__file__).parent / "peers" / "d3rlpy_train.py"
CARTPOLE, PENDULUM = ("CartPole-v1", "cartpole-replay"), ("Pendulum-v1", "pendulum-mixed")
CASES = {
    "bc-cartpole": ("BC", *CARTPOLE),
    "iql-pendulum": ("IQL", *PENDULUM),
    "td3bc-pendulum": ("TD3+BC", *PENDULUM),
    "cql-pendulum": ("CQL", *PENDULUM),
    "bc-pendulum": ("BC", *PENDULUM),
    "cql-cartpole": ("CQL-Discrete", *CARTPOLE),
    "td3bc-hopper": ("TD3+BC", "Hopper-v5", "hopper-replay"),
}
"""Algorithm, environment, data set."""
POINTS = {"CartPole-v1": (22.0, 500.0), "Pendulum-v1": (-1208.0, -139.0), "Hopper-v5": (-20.3, 3234.3)}
"""Mean return of random play, and of the script; Hopper's are those of D4RL (Fu et al. 2020)."""
SAME = {"batch_size": 256, "fcnet_hiddens": [256, 256], "fcnet_activation": "relu", "epochs": 10**6}
EPISODES = range(10_000, 10_010)
TURN = 50
"""Gradient steps of a turn."""


def synchronized() -> float:
    """The time when all is done that the GPU was asked for."""
    torch.cuda.synchronize()
    return time.perf_counter()


def page_faults() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


class Ours:
    """A run of ours that does as it is told."""

    def __init__(self, run: str, env: str, files: Path, seed: int, device: str, folder: Path):
        gamma = {} if run == "BC" else {"gamma": 0.99}
        config = {**SAME, **gamma, "threads": 1, "save_figure": False, "device": device}
        self.clock = time.process_time if device == "cpu" else synchronized
        self.exp = Experiment(run, env, data=files, path=folder / f"run-{seed}", seed=seed, config=config)
        self.env = gym.make(env)
        side = self.exp.training.side
        self.experience, self.learner = side.experience, side.learner
        while self.experience.newest_obs(1) is None:  # the files are still being read
            self.exp.training.gather()

    def steps(self, count: int) -> float:
        start = self.clock()
        for _ in range(count):
            batch = self.experience.next(Clock())
            assert batch is not None
            self.learner.update(self.learner.prepare(batch.data), Clock())
        return self.clock() - start

    def play(self, seeds: range) -> list[float]:
        return [self._episode(seed) for seed in seeds]

    def _episode(self, seed: int) -> float:
        obs, total, ended = self.env.reset(seed=seed)[0], 0.0, False
        while not ended:
            obs, reward, *flags, _ = self.env.step(self.exp.policy(np.asarray(obs, np.float32)))
            total, ended = total + float(reward), any(flags)
        return total


class Peer:
    """The same of d3rlpy, in its own process."""

    def __init__(self, python: str, run: str, env: str, rows: Path, seed: int, device: str, compiled: bool):
        words = [python, str(SCRIPT), run, env, str(rows), str(seed), device, "compiled" if compiled else "as it is"]
        environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | {"OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(
            words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )
        self.answer()

    def answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("{"):
                answer: dict[str, Any] = json.loads(line)
                return answer
        raise SystemExit(f"{self.process.args} ended with {self.process.wait()}")

    def ask(self, words: str) -> None:
        assert self.process.stdin is not None
        print(words, file=self.process.stdin, flush=True)

    def steps(self, count: int) -> float:
        self.ask(f"steps {count}")
        return float(self.answer()["seconds"])

    def play(self, seeds: range) -> list[float]:
        self.ask(f"play {' '.join(map(str, seeds))}")
        return list(self.answer()["returns"])


def as_npz(files: Path, out: Path) -> Path:
    """The data set in the columns of d3rlpy."""
    episodes = list(EpisodeReader(files))
    columns = {
        "observations": np.concatenate([e["obs"][:-1] for e in episodes]),
        **{f"{k}s": np.concatenate([e[k] for e in episodes]) for k in ("action", "reward")},
        "terminals": np.concatenate([e["terminated"] for e in episodes]).astype(np.float32),
        "timeouts": np.concatenate([e["truncated"] for e in episodes]).astype(np.float32),
    }
    np.savez(out, **columns)
    return out


@contextmanager
def sides(case: str, python: str | None, seed: int, device: str, compiled: bool) -> Iterator[tuple[Ours, Peer | None]]:
    run, env, data = CASES[case]
    files = demos.made(data)
    with tempfile.TemporaryDirectory() as folder:
        peer = None
        if python is not None:
            peer = Peer(python, run, env, as_npz(files, Path(folder) / "rows.npz"), seed, device, compiled)
        try:
            yield Ours(run, env, files, seed, device, Path(folder)), peer
        finally:
            if peer is not None:
                peer.process.kill()
                peer.process.wait()


def speed(case: str, python: str, turns: int, device: str, compiled: bool) -> dict[str, Any]:
    """Gradient steps in a second, and page faults in each of ours: medians of the turns, after one to warm up."""
    with sides(case, python, 0, device, compiled) as both:
        rates, faults = [], []
        for _ in range(turns + 1):
            before = page_faults()
            rates.append([TURN / side.steps(TURN) for side in both if side is not None])
            faults.append((page_faults() - before) / TURN)
        rates, faults = rates[1:], faults[1:]
    ours, theirs = np.median(rates, 0).tolist()
    ratio = float(np.median([mine / other for mine, other in rates]))
    rounded = {"bray": round(ours, 1), "d3rlpy": round(theirs, 1), "ratio": round(ratio, 2)}
    rounded["page faults"] = round(float(np.median(faults)))
    return {"case": case, "device": device, **rounded}


def score(case: str, python: str | None, steps: int, seeds: list[int], device: str, compiled: bool) -> dict[str, Any]:
    """Points of each seed, and how far our mean is above d3rlpy's."""
    low, high = POINTS[CASES[case][1]]
    points: dict[str, list[float]] = {}
    for seed in seeds:
        with sides(case, python, seed, device, compiled) as (ours, peer):
            if peer is not None:
                peer.ask(f"steps {steps}")
            ours.steps(steps)
            found = {"bray": ours.play(EPISODES)}
            if peer is not None:
                peer.answer()
                found["d3rlpy"] = peer.play(EPISODES)
        for name, returns in found.items():
            points.setdefault(name, []).append(round(100.0 * (float(np.mean(returns)) - low) / (high - low), 1))
        print(json.dumps({"case": case, "seed": seed, **{name: x[-1] for name, x in points.items()}}), flush=True)
    means = [float(np.mean(x)) for x in points.values()]
    above = {"above": round(means[0] - means[1], 1)} if python else {"mean": round(means[0], 1)}
    return {"case": case, "steps": steps, "device": device, **points, **above}


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", type=one_of(CASES), metavar="CASE")
    parser.add_argument("--peer", help="a Python that has d3rlpy")
    parser.add_argument("--steps", type=int, default=20_000)
    parser.add_argument("--seeds", type=int, nargs="*", default=[0, 1, 2, 3, 4])
    parser.add_argument("--speed", action="store_true")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--compiled", action="store_true")
    args = parser.parse_args(argv)
    if args.speed and args.peer is None:
        parser.error("--speed compares: it needs --peer PYTHON")
    torch.set_num_threads(1)
    for case in args.cases or CASES:
        if args.speed:
            found = speed(case, args.peer, args.turns, args.device, args.compiled)
        else:
            found = score(case, args.peer, args.steps, args.seeds, args.device, args.compiled)
        print(json.dumps(found), flush=True)


if __name__ == "__main__":
    sys.exit(main())
