"""Made-up trainings that something holds up: what the advisor says of each, and how much faster each is when its first
advice is followed.

Each case trains for `--seconds`. The advisor reads its rows, as `bray doctor RUN_DIR` does; the case then trains again
with the first change that it advises. `said` has to be `expected`. Steps per second are those of the time in which the
process that learns did not queue for a core (`perf/queued`), nor a worker while it waited for them, so that a busy
machine distorts them less; gains of `num_workers` still need cores that nobody else uses.

`--auto` leaves out where they play and compute: environments are those of all workers together, and `auto` places them.
What is advised then shows what it missed: the last line counts the cases in which the first change that learns the same
gives less than 1.2 times.

    python -m benchmarks.advice [CASE ...] [--seconds 20] [--auto]
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from torch import Tensor, nn

import bray
from benchmarks import one_of
from bray.diagnosis.bottleneck import Finding, Machine, Times, find_bottleneck
from bray.train.machine import this_machine


class Plain(gym.Env):
    """Observations of a few numbers, episodes of 100 steps; a step takes as long as it is told."""

    def __init__(self, sleep_ms: float = 0.0, spin_ms: float = 0.0, shape: tuple[int, ...] = (4,)):
        self.observation_space = gym.spaces.Box(0, 255, tuple(shape), np.uint8 if len(shape) > 1 else np.float32)
        self.action_space = gym.spaces.Discrete(2)
        self._sleep, self._spin = sleep_ms / 1e3, spin_ms / 1e3
        self._obs, self._steps = self.observation_space.sample(), 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[np.ndarray, dict[str, Any]]:
        super().reset(seed=seed)
        self._steps = 0
        return self._obs, {}

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        if self._sleep:
            time.sleep(self._sleep)
        end = time.thread_time() + self._spin  # seconds on a core
        while time.thread_time() < end:
            pass
        self._steps += 1
        return self._obs, float(action), False, self._steps >= 100, {}


class Corner(nn.Module):
    """Looks at a few pixels of a picture, so that nearly all that happens to it is that it is copied."""

    def __init__(self, spec: Any, config: Any):
        super().__init__()
        self.policy, self.value = nn.Linear(8, spec.layout.num_params), nn.Linear(8, 1)

    def forward(self, obs: Tensor) -> dict[str, Tensor]:
        x = obs[:, 0, 0, :8].float()
        return {"dist": self.policy(x), "value": self.value(x).squeeze(1)}


class Frozen(Corner):
    """With a large table that is not trained: weights that are given to the workers again and again."""

    def __init__(self, spec: Any, config: Any):
        super().__init__(spec, config)
        self.register_buffer("table", torch.zeros(16_000_000))

    def forward(self, obs: Tensor) -> dict[str, Tensor]:
        x = torch.cat([obs, obs], 1) + self.table[:8]
        return {"dist": self.policy(x), "value": self.value(x).squeeze(1)}


@dataclass(frozen=True)
class Case:
    expected: str
    config: dict[str, Any]
    env: dict[str, Any] = field(default_factory=dict)
    run: str = "PPO"


_SMALL = {"num_envs": 8, "rollout_length": 64, "epochs": 1, "minibatches": 1, "iteration_steps": 0}
_REPLAY = {"num_envs": 1, "learning_starts": 200, "iteration_steps": 200}
_COPIED = {"num_envs": 1, "num_workers": 8, "rollout_length": 32, "iteration_steps": 0}
CASES = {
    "env-sleeps": Case("env-bound", {**_SMALL, "rollout_length": 16}, {"sleep_ms": 5.0}),
    "env-computes": Case("env-bound", _SMALL, {"spin_ms": 0.5}),
    "network": Case("inference-bound", {**_REPLAY, "train_every": 1024, "fcnet_hiddens": [1024, 1024]}, run="DQN"),
    "epochs": Case("learner-bound", {**_SMALL, "epochs": 10, "minibatches": 16}),
    "replay": Case("learner-bound", {**_REPLAY, "train_every": 1}, run="DQN"),
    "pictures": Case(
        "transfer-bound", {**_COPIED, "custom_model": "benchmarks.advice:Corner"}, {"shape": [4, 128, 128]}, "A2C"
    ),
    "table": Case(
        "transfer-bound", {**_COPIED, "num_workers": 2, "custom_model": "benchmarks.advice:Frozen"}, run="A2C"
    ),
}


_AUTO = "auto"
_LITTLE = 1.2


def experiment(case: Case, path: Path, changes: dict[str, Any] | None = None, auto: bool = False) -> bray.Experiment:
    config: dict[str, Any] = {"env_config": case.env, "save_figure": False, "export_graph_after_s": None}
    if auto:
        total = case.config["num_envs"] * case.config.get("num_workers", 1)
        config |= {**case.config, "num_workers": _AUTO, "num_envs": total, **(changes or {})}
    else:
        here = {"vector": "inprocess", "device": "cpu", "num_workers": 0, "inference": "worker"}
        config |= {**here, **case.config, **(changes or {})}
    return bray.Experiment(case.run, "benchmarks.advice:Plain", use_preset=False, config=config, path=path)


def train(
    case: Case, seconds: float, machine: Machine, changes: dict[str, Any] | None = None, auto: bool = False
) -> tuple[Finding | None, float]:
    """Train for `seconds`: what the advisor says, and the steps per second."""
    with tempfile.TemporaryDirectory() as folder:
        exp = experiment(case, Path(folder) / "run", changes, auto)
        rows = list(exp.train({"time_total_s": seconds}))
        options = {k: v for name in ("run", "model", "env", "algo") for k, v in vars(exp.config[name]).items()}
        exp.close()
    times = Times.of(rows)
    return find_bottleneck(times, options, machine) if times is not None else None, _rate(rows)


def _rate(rows: list[dict[str, Any]]) -> float:
    """Steps per second without the wait for a core, the median of the rows but for the first."""

    def rate(row: dict[str, Any]) -> float:
        seconds: float = row["time_this_iter_s"]
        played = sum(row.get(f"perf/worker_{phase}", 0.0) for phase in ("env", "forward", "transfer", "other"))
        queued = row["perf/queued"]
        if played:  # while it waits for workers, they queue
            queued += row["perf/idle"] * min(1.0, row.get("perf/worker_queued", 0.0) / played)
        return row["env_steps_per_second"] * seconds / max(0.1 * seconds, seconds - queued / 1e3)

    return statistics.median(rate(row) for row in rows[1:] or rows)


def follow(name: str, seconds: float, machine: Machine, auto: bool = False) -> dict[str, Any]:
    """A case, what is said of it, and what each change gives."""
    case = CASES[name]
    found, before = train(case, seconds, machine, auto=auto)
    assert found is not None
    result: dict[str, Any] = {"case": name, "expected": case.expected, "said": found.name, "text": str(found)}
    result |= {"steps_per_s": round(before), "followed": []}
    for change in found.changes:
        _, after = train(case, seconds, machine, change.keys, auto)
        gain = {"measured": round(after / before, 2), "at_most": round(change.gain, 2), "same": change.same}
        result["followed"].append({"keys": change.keys, "steps_per_s": round(after), **gain})
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", type=one_of(CASES), metavar="CASE", help=", ".join(CASES))
    parser.add_argument("--seconds", type=float, default=20.0, help="of each training")
    parser.add_argument("--auto", action="store_true", help="let auto place them")
    arguments = parser.parse_args()
    little, names = 0, arguments.cases or list(CASES)
    for name in names:
        told = follow(name, arguments.seconds, this_machine(), arguments.auto)
        print(json.dumps(told), flush=True)
        same = [change["measured"] for change in told["followed"] if change["same"]]
        little += not same or same[0] < _LITTLE
    if arguments.auto:
        print(json.dumps({"cases": len(names), f"gain less than {_LITTLE} times": little}), flush=True)


if __name__ == "__main__":
    main()
