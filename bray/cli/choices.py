"""What a run chooses by rule, and how long a gradient step takes on this machine with each of the choices."""

from __future__ import annotations

import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import torch

from bray.experiment import Experiment
from bray.train.machine import this_machine


class Pictures(gym.Env):
    """Noise in the form of an Atari game, without end."""

    observation_space = gym.spaces.Box(0, 255, (4, 84, 84), np.uint8)
    action_space = gym.spaces.Discrete(6)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self._obs = self.np_random.integers(0, 256, (4, 84, 84), np.uint8)
        return self._obs, {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        return self._obs, 0.0, False, False, {}


@dataclass(frozen=True)
class Way:
    """Settings, and how long a gradient step of PPO takes with them."""

    keys: dict[str, Any]
    seconds: float
    threads: int
    device: str = "cpu"

    def __str__(self) -> str:
        how = {False: "eager", True: "recorded"}.get(self.keys.get("record", True), "compiled")
        where = "on the GPU" if self.device != "cpu" else f"{self.threads} thread{'s' if self.threads > 1 else ''}"
        return f"{how}, {where}: {1e3 * self.seconds:.3g} ms"

    @property
    def typed(self) -> str:
        return " ".join(f"{k}={str(v).lower()}" for k, v in self.keys.items())


def time_choices(env: Any, seconds: float) -> list[Way]:
    """Each way to compute, for about so many seconds; the first is what a run does by itself."""
    machine, before = this_machine(), torch.get_num_threads()
    try:
        chosen = _measure(env, {}, seconds)
        others: list[dict[str, Any]] = [{"record": False}]
        others += [{"threads": n} for n in sorted({1, machine.cores} - {chosen.threads})]
        if chosen.device != "cpu":
            others = [{"record": False}, {"record": "compiled"}, {"device": "cpu"}]
        elif machine.gpus:
            others += [{"device": "cuda"}, *({"device": "cuda", "record": r} for r in (False, "compiled"))]
        return [chosen, *(_measure(env, keys, seconds) for keys in others)]
    finally:
        torch.set_num_threads(before)


def _measure(env: Any, keys: dict[str, Any], seconds: float) -> Way:
    """A gradient step of 32 rows: the median over rollouts, without the first, in which it is recorded."""
    rollouts = {"num_envs": 8, "rollout_length": 8, "epochs": 1, "minibatches": 2, "iteration_steps": 0}
    with tempfile.TemporaryDirectory() as folder:
        exp = Experiment("PPO", env, use_preset=False, path=Path(folder) / "run", config={**rollouts, **keys})
        exp.training.iterate()
        took: list[float] = []
        end = time.monotonic() + seconds
        while not took or time.monotonic() < end:
            before = exp.training.steps
            row = exp.training.iterate()
            assert row is not None
            took.append(row["perf/learn"] / 1e3 / (exp.training.steps - before))
        device = exp.training.device.type
        exp.close()
    return Way(keys, statistics.median(took), torch.get_num_threads(), device)
