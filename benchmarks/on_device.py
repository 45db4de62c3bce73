"""python -m benchmarks.on_device [CASE ...] [--seconds 15] [--set KEY=VALUE ...]: PPO with environments of tensors,
played where the learner computes, against their forms on the CPU: environment steps/s with learning, where the time
goes, and what was learnt.

Each case is trained twice: with `vector=device`, and with the form that `auto` takes, on the same device and with the
same settings. Windows are the iterations after the first three; the median counts. One JSON line per result.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from typing import Any

import torch
import yaml

import bray

_PICTURES = {"num_envs": 4096, "rollout_length": 32, "epochs": 2, "minibatches": 8, "lr": 1e-3}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "cartpole-preset": ("CartPole-v1", {"num_envs": 4096}),
    "cartpole": ("CartPole-v1", {"num_envs": 4096, "rollout_length": 128, "epochs": 2, "minibatches": 4, "lr": 2e-3}),
    "catch": ("bray/Catch-v0", _PICTURES),
    "breakout": ("bray/Breakout-v0", _PICTURES),
}


def measure(env: str, settings: dict[str, Any], seconds: float, evaluate: bool) -> dict[str, Any]:
    with bray.Experiment(run="PPO", env=env, config={"iteration_steps": 0, **settings}) as experiment:
        rates, rows, began, reached = [], [], time.perf_counter(), None
        training = experiment.training
        while time.perf_counter() - began < seconds:
            start, before = time.perf_counter(), training.env_steps
            row = training.iterate()
            if training.device.type == "cuda":
                torch.cuda.synchronize()
            assert row is not None
            rates.append((training.env_steps - before) / (time.perf_counter() - start))
            rows.append(row)
            if reached is None and (row.get("episode_return_mean") or 0) >= 475:
                reached = round(time.perf_counter() - began, 2)
        split = {k: v for k, v in rows[-1].items() if k.startswith("perf/")}
        score = training.evaluate(20)["eval/return_mean"] if evaluate else None
        return {
            "steps_per_s": round(statistics.median(rates[3:] or rates)),
            "iterations": len(rates),
            "steps": training.env_steps,
            "return_mean": rows[-1].get("episode_return_mean"),
            "s_to_475": reached,
            "greedy": score,
            "split": {k: round(v, 2) for k, v in split.items()},
        }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("cases", nargs="*", default=list(CASES))
    parser.add_argument("--seconds", type=float, default=15.0)
    parser.add_argument("--set", nargs="*", default=[])
    parser.add_argument("--forms", nargs="*", default=["device", "auto"])
    args = parser.parse_args()
    more = {k: yaml.safe_load(v) for k, _, v in (text.partition("=") for text in args.set)}
    device = "cuda" if torch.cuda.is_available() else "cpu"
    for case in args.cases:
        env, settings = CASES[case]
        for form in args.forms:
            found = measure(env, {"device": device, **settings, "vector": form, **more}, args.seconds, form == "device")
            print(json.dumps({"case": case, "form": form, **found}), flush=True)


if __name__ == "__main__":
    main()
