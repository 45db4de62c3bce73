"""python -m benchmarks.learning.noise: what white and pink random actions reach before anything is learnt, by
`random_hold`.

MountainCarContinuous: on how many of 20 seeds the goal is reached at least once in 5,000 steps. HalfCheetah: the share
of 5,000 steps on its back, for 6 seeds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import gymnasium as gym
import numpy as np

from bray.act.squashed import random_actions

STEPS = 5_000


def played(env_id: str, seed: int, hold: int) -> Iterator[tuple[Any, bool]]:
    """(observation, whether the episode has ended at its goal) after each step."""
    env, rng = gym.make(env_id), np.random.default_rng(seed)
    env.reset(seed=seed)
    for step in range(STEPS):
        (action,) = random_actions(rng, step, hold, 1, env.action_space.shape[0])
        obs, _, terminated, truncated, _ = env.step(action)
        yield obs, terminated
        if terminated or truncated:
            env.reset()
    env.close()


def goals(seed: int, hold: int) -> float:
    return float(any(ended for _, ended in played("MountainCarContinuous-v0", seed, hold)))


def on_its_back(seed: int, hold: int) -> float:
    angles = np.array([obs[1] for obs, _ in played("HalfCheetah-v5", seed, hold)])
    return float((np.abs((angles + np.pi) % (2 * np.pi) - np.pi) > 2.0).mean())


def main() -> None:
    looks: dict[str, tuple[Callable[[int, int], float], int]] = {
        "MountainCarContinuous, seeds that reach the goal": (goals, 20),
        "HalfCheetah, share of steps on its back": (on_its_back, 6),
    }
    for name, (look, seeds) in looks.items():
        for hold in (1, 4, 32):
            found = [look(seed, hold) for seed in range(seeds)]
            print(f"{name}: random_hold {hold:2}: mean {np.mean(found):.2f} of {seeds} seeds", flush=True)


if __name__ == "__main__":
    main()
