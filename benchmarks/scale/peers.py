"""Bray's IMPALA and APPO beside a peer's, by turns: the parts `rllib` and `sample-factory` of
`python -m benchmarks.scale`.

Cases and settings: `benchmarks/peers/async_cases.py`, one table for both sides.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.peers import async_cases as cases
from bray import Experiment

SCRIPTS = {"rllib": "rllib_async.py", "sample-factory": "sample_factory_appo.py"}
LEAST = {"rllib": 3.0, "sample-factory": 1.0}
"""Times the peer's steps/s."""

Line = dict[str, Any]


def config_of(case: cases.Case) -> dict[str, Any]:
    """The settings of a case, by Bray's names."""
    config = {
        "num_workers": cases.WORKERS,
        "num_envs": cases.ENVS,
        "rollout_length": case.length,
        "lr": case.lr,
        "gamma": cases.GAMMA,
        "entropy_coef": cases.ENTROPY_COEF,
        "value_coef": cases.VALUE_COEF,
        "max_grad_norm": cases.MAX_GRAD_NORM,
        "fcnet_hiddens": list(cases.HIDDEN),
    }
    if case.run == "APPO":
        config |= {
            "lambda_": cases.LAMBDA,
            "clip": cases.CLIP,
            "epochs": cases.EPOCHS,
            "minibatches": cases.MINIBATCHES,
        }
    if case.pictures:
        config |= {"clip_rewards": True, "conv_filters": "nature"}
        config |= {"env.atari.frame_stack": cases.FRAMES, "env.atari.repeat_action_probability": 0.0}
    return config


def ours(name: str, seconds: float, until: float | None, seed: int) -> Line:
    """What the script of a peer prints, of Bray."""
    case = cases.CASES[name]
    watch = cases.Watch(seconds, until)
    exp = Experiment(case.run, case.env, use_preset=False, config={"seed": seed, **config_of(case)})
    try:
        done = False
        while not done:
            row = exp.training.iterate()
            steps = exp.training.env_steps
            done = watch.tick(steps, case.passes * steps, row and row["episode_return_mean"])
        return watch.line()
    finally:
        exp.close()


def theirs(peer: str, python: str, name: str, seconds: float, until: float | None, seed: int) -> Line:
    """What the script of the peer prints, last."""
    script = Path(cases.__file__).parent / SCRIPTS[peer]
    words = [python, str(script), name, "--seconds", str(seconds), "--seed", str(seed)]
    words += [] if until is None else ["--until", str(until)]
    done = subprocess.run(words, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(words)} failed: {done.stderr.strip()[-800:]}")
    line: Line = json.loads(done.stdout.splitlines()[-1])
    return line


def by_turns(args: argparse.Namespace, name: str) -> tuple[list[Line], list[Line]]:
    """Repeats of a case, each with a seed of its own; which side goes first alternates, so that a change of the
    machine's load meets both."""
    mine: list[Line] = []
    other: list[Line] = []
    for i in range(args.repeat):
        asked = name, args.seconds, args.until, args.seed + i
        turns = [(mine, partial(ours, *asked)), (other, partial(theirs, args.what, args.peer, *asked))]
        for lines, measure in turns[:: -1 if i % 2 else 1]:
            lines.append(measure())
    return mine, other


def show(name: str, lines: list[Line], until: float | None) -> float:
    """One line of the table: the median, and all of them. Runs that did not get there count with the seconds that they
    had."""
    key, digits = ("steps_per_second", 0) if until is None else ("seconds", 1)
    middle = statistics.median(line[key] for line in lines)
    missed = "" if until is None or all(line["reached"] for line in lines) else ", not all reached"
    unit = "steps/s" if until is None else f"s to a return of {until:g}{missed}"
    passes = statistics.median(line["passes"] for line in lines)
    each = ", ".join(f"{line[key]:,.{digits}f}" for line in lines)
    print(f"{name:32} {middle:10,.{digits}f} {unit}, each learnt from {passes:.1f} times   ({each})", flush=True)
    return middle


def compare(args: argparse.Namespace) -> bool:
    """Measure both sides. True: ours has LEAST times the peer's steps/s or, with `--until`, reaches the return
    sooner."""
    peer, good = args.what, True
    for name in args.cases or [c for c in cases.CASES if peer == "rllib" or c.startswith("appo")]:
        mine, other = by_turns(args, name)
        a, b = show(f"{name}, Bray", mine, args.until), show(f"{name}, {peer}", other, args.until)
        times, least = (a / b, LEAST[peer]) if args.until is None else (b / a, 1.0)
        print(f"{'':32} {times:10.2f} times as fast; at least {least:g}", flush=True)
        good = good and times >= least and all(line["reached"] or args.until is None for line in mine)
    return good
