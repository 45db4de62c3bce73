"""python -m benchmarks.scale sleep | overhead | faults | rllib --peer PYTHON | sample-factory --peer PYTHON

sleep      environment steps/s of an environment that sleeps 5 ms, with 1, 8 and 32 workers (IMPALA): at least 7 and 26
           times those of one
overhead   ALE/Pong-v5 with one worker against none, by turns (PPO in rounds, and IMPALA): at most 10 % slower
faults     kills a random worker (SIGKILL) every 10 s for 2 minutes: the run continues, solves CartPole-v1 and counts
           the restarts
rllib      IMPALA and APPO with two workers of eight environments, CartPole-v1 and ALE/Pong-v5 (`--cases`), by turns
           with RLlib's in the Python `--peer`: at least 3 times its steps/s; with `--until 150` the seconds to that
           mean return, with `--repeat` seeds from `--seed` on: fewer than RLlib's
sample-factory   the same for APPO beside Sample Factory's (`benchmarks/install_sample_factory.sh` makes its Python): at
                 least its steps/s

Each figure is the median of `--repeat` windows of `--seconds`. Exit code 0: what is said above holds.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import signal
import statistics
import sys
import time
from typing import Any

from benchmarks.peers.async_cases import CASES
from benchmarks.scale import peers
from bray import Experiment

SMALL = {"fcnet_hiddens": [16], "export_graph_after_s": None}


def rates(run: str, env: str, seconds: float, repeat: int, **config: Any) -> list[float]:
    """Environment steps/s of several windows of one training, after its first iterations."""
    exp = Experiment(run, env, use_preset=False, config={"threads": 1, **config})
    try:
        training = exp.training
        for _ in range(3):
            training.iterate()
        found = []
        for _ in range(repeat):
            start, steps = time.perf_counter(), training.env_steps
            while time.perf_counter() - start < seconds:
                training.iterate()
            found.append((training.env_steps - steps) / (time.perf_counter() - start))
        return found
    finally:
        exp.close()


def show(name: str, found: list[float]) -> float:
    middle = statistics.median(found)
    print(f"{name:24} {middle:10,.0f} steps/s   ({', '.join(f'{x:,.0f}' for x in found)})", flush=True)
    return middle


def sleep(args: argparse.Namespace) -> bool:
    config = {**SMALL, "num_envs": 1, "rollout_length": 20, "iteration_steps": 100}
    alone, good = 0.0, True
    for workers, least in ((1, 1.0), (8, 7.0), (32, 26.0)):
        config |= {"num_workers": workers, "batch_envs": min(workers, 8)}
        rate = show(
            f"{workers} workers", rates("IMPALA", "benchmarks.scale.envs:Sleep", args.seconds, args.repeat, **config)
        )
        alone = alone or rate
        print(f"{'':24} {rate / alone:10.1f} times one worker; at least {least:g}", flush=True)
        good = good and rate / alone >= least
    return good


def overhead(args: argparse.Namespace) -> bool:
    """Windows by turns, so that a change of the machine's load meets both."""
    good = True
    for run, config in (("PPO", {"rollout_length": 32, "epochs": 1, "minibatches": 4}), ("IMPALA", {})):
        found: dict[int, list[float]] = {0: [], 1: []}
        for _ in range(args.repeat):
            for workers in found:
                more = {**config, "num_envs": 8, "num_workers": workers, "iteration_steps": 0}
                found[workers] += rates(run, "ALE/Pong-v5", args.seconds, 1, **more)
        none, one = (show(f"{run}, {workers} workers", found[workers]) for workers in found)
        print(f"{'':24} {100 * (1 - one / none):+9.1f} % slower; at most 10", flush=True)
        good = good and one >= 0.9 * none
    return good


def faults(args: argparse.Namespace) -> bool:
    exp = Experiment(args.run, "CartPole-v1", config={"num_workers": 2, "seed": args.seed, "threads": 1})
    training, rng, kills, best = exp.training, random.Random(args.seed), 0, 0.0
    start = time.monotonic()
    try:
        while (now := time.monotonic() - start) < args.last or (best < 475 and now < args.last + 120):
            row = training.iterate()
            if kills < min(now, args.last) // args.every:
                with contextlib.suppress(ProcessLookupError):  # one that is being replaced
                    os.kill(rng.choice(training.sources[0].process_ids), signal.SIGKILL)  # type: ignore[attr-defined]
                kills += 1
                best = max(best, training.evaluate(10)["eval/return_mean"])
                print(f"{now:6.0f} s  kill {kills}  {training.env_steps:,} steps  greedy return {best:.0f}", flush=True)
    finally:
        exp.close()
    assert row is not None
    restarts = int(row["workers/restarts"])
    print(f"{kills} killed, {restarts} restarts counted, {training.env_steps:,} steps, best greedy return {best:.0f}")
    return best >= 475 and 0 < restarts <= kills


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scale", description=__doc__)
    parser.add_argument("what", choices=("sleep", "overhead", "faults", *peers.SCRIPTS))
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--peer", default=sys.executable, help="a Python with ray[rllib], or with sample-factory")
    parser.add_argument("--cases", nargs="+", choices=CASES, help="of `rllib` and `sample-factory`; all unless given")
    parser.add_argument(
        "--until", type=float, help="of `rllib` and `sample-factory`: the seconds to this return, `--seconds` at most"
    )
    parser.add_argument("--run", default="IMPALA", help="algorithm of `faults`")
    parser.add_argument("--every", type=float, default=10.0, help="seconds between two kills")
    parser.add_argument("--last", type=float, default=120.0, help="seconds of kills")
    parser.add_argument("--seed", type=int, default=100)
    args = parser.parse_args()
    part = peers.compare if args.what in peers.SCRIPTS else globals()[args.what]
    return 0 if part(args) else 1


if __name__ == "__main__":
    sys.exit(main())
