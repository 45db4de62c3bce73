"""python -m benchmarks.fit [CASE ...] [--seconds 20] [--set KEY=VALUE ...]: what `auto` reaches against settings made
by hand, with nothing given but the algorithm and the environment (and its preset).

Each setting trains in a process of its own: until it has learnt for some seconds, then for `--seconds` in windows of
two seconds. One JSON line per setting: the median of the windows in environment steps/s, and what was chosen; then one
per case: `auto` against the best by hand. Settings that need a GPU are left out where PyTorch finds none.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import yaml

from bray.train.machine import cores

WARM_S, WINDOW_S = 8.0, 2.0
CPU = {"device": "cpu", "num_workers": 0}
CUDA = {"device": "cuda", "num_workers": 0}
CENTRAL = {"device": "cuda", "num_workers": 16, "num_envs": 16, "inference": "central", "vector": "native"}
OF_SAC: dict[str, dict[str, Any]] = {
    "cpu, one thread": {**CPU, "threads": 1},
    "cpu, all threads": {**CPU, "threads": cores()},
    "cuda": CUDA,
    "cuda, a worker": {"device": "cuda", "num_workers": 1},
    "cuda, two workers": {"device": "cuda", "num_workers": 2},
}
CASES: dict[str, tuple[str, str, dict[str, dict[str, Any]]]] = {
    "appo-pong": ("APPO", "ALE/Pong-v5", {"16 workers, central": CENTRAL}),
    "ppo-pong": ("PPO", "ALE/Pong-v5", {"one process, cuda": CUDA, "16 workers, central": {**CENTRAL, "num_envs": 8}}),
    "ppo-cartpole": ("PPO", "CartPole-v1", {"cpu": CPU, "cuda": CUDA}),
    "sac-pendulum": ("SAC", "Pendulum-v1", OF_SAC),
    "sac-halfcheetah": ("SAC", "HalfCheetah-v5", OF_SAC),
}


def measure(case: str, name: str, seconds: float, more: dict[str, Any]) -> dict[str, Any]:
    """Steps per second of one setting, in this process."""
    import torch

    import bray

    run, env, by_hand = CASES[case]
    settings = {"iteration_steps": 0, "export_graph_after_s": None, **by_hand.get(name, {}), **more}
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        exp = bray.Experiment(run, env, config=settings, path=Path(folder) / "run")
        training = exp.training
        made = time.perf_counter() - start
        row: dict[str, Any] = {}
        while not training.learner.steps or time.perf_counter() - start < made + WARM_S:
            row = training.iterate() or row
        windows: list[float] = []
        end = time.perf_counter() + seconds
        while time.perf_counter() < end:
            since, steps = time.perf_counter(), training.env_steps
            while time.perf_counter() - since < WINDOW_S:
                row = training.iterate() or row
            windows.append((training.env_steps - steps) / (time.perf_counter() - since))
        chosen = exp.config["run"]
        told = {
            "case": case,
            "settings": name,
            "steps_per_s": round(statistics.median(windows), 1),
            "lowest": round(min(windows), 1),
            "highest": round(max(windows), 1),
            "start_s": round(made, 1),
            "device": str(training.device),
            "num_workers": chosen.workers,
            "num_envs": exp.config["env"].num_envs,
            "inference": chosen.inference,
            "threads": torch.get_num_threads(),
            "why": str(exp.choice) if exp.choice else "",
            "perf_ms": {k[5:]: round(v, 1) for k, v in row.items() if k.startswith("perf/") and "/" not in k[5:]},
        }
        exp.close()
    return told


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", metavar="CASE", help=", ".join(CASES))
    parser.add_argument("--seconds", type=float, default=20.0, help="of each setting, after it is warm")
    parser.add_argument("--only", nargs="*", metavar="SETTINGS", help="names of settings, e.g. auto")
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", help="for all of them")
    given = parser.parse_args()
    unknown = [case for case in given.cases if case not in CASES]
    if unknown:
        parser.error(f"no case {unknown[0]!r}; there are {', '.join(CASES)}")
    more = {k: yaml.safe_load(v) for k, _, v in (x.partition("=") for x in given.set)}
    if given.only and len(given.cases) == 1 and len(given.only) == 1:
        print(json.dumps(measure(given.cases[0], given.only[0], given.seconds, more)), flush=True)
        return
    import torch

    has_gpu = torch.cuda.is_available()
    gpu = torch.cuda.get_device_name() if has_gpu else None
    print(json.dumps({"cores": cores(), "gpu": gpu, "torch": torch.__version__, "seconds": given.seconds}), flush=True)
    for case in given.cases or CASES:
        names = ["auto", *(n for n, s in CASES[case][2].items() if has_gpu or s.get("device") != "cuda")]
        rates: dict[str, float] = {}
        for name in [n for n in names if not given.only or n in given.only]:
            command = [sys.executable, "-m", "benchmarks.fit", case, "--seconds", str(given.seconds), "--only", name]
            ran = subprocess.run([*command, "--set", *given.set], stdout=subprocess.PIPE, text=True)
            print(
                ran.stdout.strip() or json.dumps({"case": case, "settings": name, "failed": ran.returncode}), flush=True
            )
            if ran.returncode == 0:
                rates[name] = json.loads(ran.stdout.strip().splitlines()[-1])["steps_per_s"]
        others = {name: rate for name, rate in rates.items() if name != "auto"}
        if "auto" in rates and others:
            best = max(others, key=lambda name: others[name])
            told = {"case": case, "auto": rates["auto"], "best": best, "by_hand": others[best]}
            print(json.dumps(told | {"ratio": round(rates["auto"] / others[best], 3)}), flush=True)


if __name__ == "__main__":
    main()
