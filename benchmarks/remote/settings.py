"""The numbers that both sides of a comparison share. Standard library and NumPy only: the peers' environment reads it
too."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).parent.parent.parent

# --- forward: an MLP of two layers of 64 ------------------------------------------------------------------------------
OBS = 8
ACTIONS = 4
LOCAL_CALLERS = 32
REMOTE_CALLERS = 64
LARGEST_BATCH = 64

# --- buffer: trajectories and small samples ---------------------------------------------------------------------------
PRODUCERS = 4
STEPS = 128


def trajectory(seed: int) -> dict[str, np.ndarray]:
    """128 steps in columns: 3.6 MB."""
    rng = np.random.default_rng(seed)
    return {
        "obs": rng.random((STEPS, 4, 42, 42), np.float32),
        "action": rng.integers(0, 9, STEPS),
        "reward": rng.random(STEPS, np.float32),
        "logp": rng.random(STEPS, np.float32),
    }


def picture(seed: int) -> dict[str, np.ndarray]:
    """One step with a stack of four frames: 28 KB."""
    rng = np.random.default_rng(seed)
    return {
        "obs": rng.integers(0, 255, (4, 84, 84), np.uint8),
        "action": rng.integers(0, 9, ()),
        "reward": rng.random((), np.float32),
    }


def small_sample(seed: int) -> dict[str, np.ndarray]:
    """One step: 100 B of numbers."""
    rng = np.random.default_rng(seed)
    return {
        "obs": rng.random(20, np.float32),
        "action": rng.integers(0, 9, ()),
        "reward": rng.random((), np.float32),
        "logp": rng.random((), np.float32),
        "value": rng.random((), np.float32),
    }


def size(sample: dict[str, np.ndarray]) -> int:
    return sum(np.asarray(x).nbytes for x in sample.values())


# --- publish ----------------------------------------------------------------------------------------------------------
PUBLISH_WORKERS = 8
PUBLISH_BYTES = 5 << 20

# --- training: 32 grid games over HTTP --------------------------------------------------------------------------------
GAMES = 32
WORKERS = 2
"""Processes that answer games: `num_workers` of the original's template."""
EPISODE_LENGTH = 128
"""Ticks per trajectory that an Actor pushes."""
ROWS = GAMES * EPISODE_LENGTH
"""Rows per PPO update: a trajectory of each game."""
PPO: dict[str, Any] = {
    "epochs": 4,
    "minibatches": 4,
    "lr": 3e-4,
    "gamma": 0.99,
    "lambda_": 0.95,
    "clip": 0.2,
    "entropy_coef": 0.01,
    "value_coef": 0.5,
    "max_grad_norm": 0.5,
    "adam_eps": 1e-5,
}
GRID_OBS = (5, 7, 7)
GRID_ACTIONS = 4
HIDDEN = (64, 64)
"""Tanh layers of the policy, and of the value, each their own."""


def say(row: dict[str, Any]) -> None:
    print(json.dumps(row), flush=True)
