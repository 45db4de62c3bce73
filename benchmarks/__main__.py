"""python -m benchmarks training|replay|inference|batcher|startup [CASE ...] [--repeat 5] [--seconds 10]: ours and the
peers in one run, medians.

`bash benchmarks/install_peers.sh` makes the peers' own environment first; without it only our side is measured. One
JSON line per measurement, then one per case with the ratio of our median to the fastest peer's. Results go into
RESULTS.md by hand, with the date, because a busy machine makes them worthless.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks import batcher, inference, ours

HERE = Path(__file__).parent
PEER_PYTHON = HERE.parent / ".venv-peers" / "bin" / "python"

TRAINING: dict[str, list[list[str]]] = {
    "ppo-cartpole": [["sb3.py"], ["cleanrl_style.py"], ["pufferlib_ppo.py"]],
    "ppo-acrobot": [["sb3.py"], ["cleanrl_style.py"], ["pufferlib_ppo.py"]],
    "ppo-cartpole-256relu": [["sb3.py"], ["cleanrl_style.py"], ["pufferlib_ppo.py"]],
    "ppo-dict-lstm": [["sb3_contrib_train.py"], ["cleanrl_style.py"], ["pufferlib_ppo.py"]],
    "ppo-custom-module": [["sb3.py"], ["cleanrl_style.py"], ["pufferlib_ppo.py"]],
    "ppo-pong": [["sb3.py"], ["cleanrl_style.py", "--env", "ale"], ["pufferlib_ppo.py"]],
    "a2c-cartpole": [["sb3.py"]],
    "pg-cartpole": [["tianshou_train.py"]],
    "pqn-cartpole": [["cleanrl_style.py"]],
    "dqn-cartpole": [["sb3.py"], ["cleanrl_style.py"]],
    "qrdqn-cartpole": [["sb3_contrib_train.py"]],
    "c51-cartpole": [["cleanrl_style.py"], ["tianshou_train.py"]],
    "iqn-cartpole": [["tianshou_train.py"]],
    "rainbow-cartpole": [["tianshou_train.py"]],
    "r2d2-cartpole": [["tianshou_train.py"]],
    "ars-cartpole": [["sb3_contrib_train.py"]],
    "es-cartpole": [["sb3_contrib_train.py"]],
    "sac-discrete-cartpole": [["tianshou_train.py"]],
    "sac-pendulum": [["sb3.py"], ["cleanrl_style.py"]],
    "td3-pendulum": [["sb3.py"]],
    "ddpg-pendulum": [["sb3.py"]],
    "crossq-pendulum": [["sb3_contrib_train.py"]],
}
REPLAY = {
    "replay-84": [["tianshou_replay.py"], ["cpprb_replay.py"]],
    "replay-frames": [
        ["tianshou_replay.py"],
        ["tianshou_replay.py", "--variant", "compact"],
        ["cpprb_replay.py", "--variant", "compact"],
    ],
}


def call(command: list[str], case: str) -> dict[str, Any] | None:
    """Run one measurement; its JSON line, printed as it comes, or None with its error."""
    env = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    threads = "2" if "pong" in case else "1"  # torch.set_num_threads does not reach the BLAS of every build
    env |= {"OMP_NUM_THREADS": threads, "OPENBLAS_NUM_THREADS": threads}
    done = subprocess.run(command, capture_output=True, text=True, env=env, cwd=HERE.parent)
    lines = [x for x in done.stdout.splitlines() if x.startswith("{")]
    if done.returncode or not lines:
        print(
            json.dumps(
                {"case": case, "failed": command[1:], "error": (done.stderr.strip().splitlines() or ["no output"])[-1]}
            ),
            flush=True,
        )
        return None
    print(lines[-1], flush=True)
    return json.loads(lines[-1])


def compare(
    cases: dict[str, list[list[str]]], names: list[str], mine: Any, key: str, repeat: int, seconds: float
) -> None:
    """Ours and each peer in turn, `repeat` times, so that a busy minute hits all alike."""
    for case in names or cases:
        rates: dict[str, list[float]] = {}
        per_cpu: dict[str, list[float]] = {}  # by second on a core: what can be read where others share the machine
        for _ in range(repeat):
            commands = [("bray", [sys.executable, *mine(case, seconds)])]
            if PEER_PYTHON.exists():
                for script, *options in cases[case]:
                    label = script.removesuffix(".py") + "".join(f" {o}" for o in options if not o.startswith("-"))
                    commands.append(
                        (
                            label,
                            [str(PEER_PYTHON), f"benchmarks/peers/{script}", case, *options, "--seconds", str(seconds)],
                        )
                    )
            for label, command in commands:
                result = call(command, case)
                if result is not None:
                    rates.setdefault(label, []).append(result[key])
                    if result.get("cpu_seconds"):
                        per_cpu.setdefault(label, []).append(result["env_steps"] / result["cpu_seconds"])
        summary: dict[str, Any] = {"case": case, "measure": key, **beside_fastest(rates)}
        if per_cpu:
            summary["per_cpu_second"] = beside_fastest(per_cpu)
        summary |= {"repeat": repeat, "machine": platform.machine()}
        print(json.dumps(summary), flush=True)


def beside_fastest(rates: dict[str, list[float]]) -> dict[str, Any]:
    """Medians, and the ratio of ours to the fastest peer's."""
    medians = {k: round(statistics.median(v), 1) for k, v in rates.items()}
    peers = {k: v for k, v in medians.items() if k != "bray"}
    if not peers or "bray" not in medians:
        return {"medians": medians}
    best = max(peers, key=lambda k: peers[k])
    return {"medians": medians, "fastest_peer": best, "ratio": round(medians["bray"] / peers[best], 2)}


def engines(names: list[str], repeat: int, seconds: float) -> None:
    """Our engines against torch eager, microseconds of one forward; and against each other."""
    for case in names or inference.CASES:
        command = [sys.executable, "-m", "benchmarks.inference", case, "--seconds", str(seconds)]
        runs = [r["us"] for r in (call(command, case) for _ in range(repeat)) if r is not None]
        if not runs:
            continue
        us = {name: {b: statistics.median(r[name][b] for r in runs) for b in times} for name, times in runs[0].items()}
        pairs = {"onnx against torch eager": ("torch eager", "onnx"), "int8 against onnx": ("onnx", "int8")}
        ratios = {k: {b: round(us[slow][b] / us[fast][b], 2) for b in us[slow]} for k, (slow, fast) in pairs.items()}
        summary = {"case": case, "median_us": us, "times_faster": ratios, "repeat": repeat}
        print(json.dumps(summary | {"machine": platform.machine()}), flush=True)


def batching(names: list[str], repeat: int, seconds: float) -> None:
    """Our batcher against one forward per caller and against a timer, by the number of callers."""
    for case in names or batcher.CASES:
        command = [sys.executable, "-m", "benchmarks.batcher", case, "--seconds", str(seconds)]
        runs = [r for r in (call(command, case) for _ in range(repeat)) if r is not None]
        if not runs:
            continue
        summary: dict[str, Any] = {"case": case}
        for key in ("forwards_per_s", "cpu_us", "p50_us", "p99_us"):
            summary[key] = {
                n: {way: statistics.median(r[key][n][way] for r in runs) for way in ways}
                for n, ways in runs[0][key].items()
            }
        rates = summary["forwards_per_s"]
        ratios = {n: {way: round(x["bray"] / x[way], 2) for way in x if way != "bray"} for n, x in rates.items()}
        summary |= {"ratio": ratios, "repeat": repeat, "machine": platform.machine()}
        print(json.dumps(summary), flush=True)


def startup(repeat: int) -> None:
    """Seconds from the command line to the first learner update (`bray train` with the CartPole preset)."""
    bray = Path(sys.executable).with_name("bray")
    times = []
    for _ in range(repeat):
        with tempfile.TemporaryDirectory() as d:
            command = [
                bray,
                "train",
                "--run",
                "PPO",
                "--env",
                "CartPole-v1",
                "--project",
                d,
                "--trial",
                "t",
                "--stop",
                '{"training_iteration": 1}',
            ]
            start = time.time()
            subprocess.run([*command, "--quiet"], check=True, capture_output=True)
            first = (Path(d) / "t" / "result.jsonl").stat()
            row = json.loads((Path(d) / "t" / "result.jsonl").read_text().splitlines()[0])
            times.append(first.st_mtime - start)
            print(
                json.dumps(
                    {
                        "case": "startup",
                        "seconds_to_first_update": round(times[-1], 2),
                        "iteration_s": row["time_this_iter_s"],
                    }
                ),
                flush=True,
            )
    print(json.dumps({"case": "startup", "median_s": round(statistics.median(times), 2), "repeat": repeat}), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["training", "replay", "inference", "batcher", "startup"])
    parser.add_argument(
        "cases",
        nargs="*",
        help=f"training: {', '.join(TRAINING)}; replay: {', '.join(REPLAY)}; inference, batcher: "
        f"{', '.join(inference.CASES)}; none: all",
    )
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=10.0)
    args = parser.parse_args()
    known: dict[str, Any] = {
        "training": {**TRAINING, **{c: [] for c in ours.CASES if c not in TRAINING}},
        "replay": REPLAY,
        "inference": inference.CASES,
        "batcher": batcher.CASES,
        "startup": {},
    }[args.what]
    for case in args.cases:
        if case not in known:
            parser.error(f"unknown case {case!r}; known: {', '.join(known)}")
    if args.what == "startup":
        startup(args.repeat)
    elif args.what == "inference":
        engines(args.cases, args.repeat, args.seconds)
    elif args.what == "batcher":
        batching(args.cases, args.repeat, args.seconds)
    elif args.what == "training":
        compare(
            known,
            args.cases or list(TRAINING),
            lambda c, s: ["-m", "benchmarks.ours", c, "--seconds", str(s)],
            "env_steps_per_second",
            args.repeat,
            args.seconds,
        )
    else:
        compare(
            REPLAY,
            args.cases,
            lambda c, s: ["-m", "benchmarks.replay", c, "--seconds", str(s / 4)],
            "cycle_per_s",
            args.repeat,
            args.seconds,
        )


if __name__ == "__main__":
    main()
