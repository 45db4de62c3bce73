"""python -m benchmarks.spread_anchors [--episodes N]: what the ends of the scale of simple_spread (mpe2, 3 agents, 25
steps) are: the team's return of random play, and of a script that gives each agent a landmark so that the way of all
together is shortest, and goes there. Needs `.[multiagent]`.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable

import numpy as np

from bray.envs.config import EnvConfig
from bray.envs.make import make_env

ENV, AGENTS = "pettingzoo:mpe2.simple_spread_v3", 3
PUSHES = np.array([[0, 0], [-1, 0], [1, 0], [0, -1], [0, 1]], float)
"""What each action pushes towards."""
DAMPING, PUSH, SECONDS = 0.25, 5.0, 0.1
"""Of its: velocity = velocity (1 - damping) + push * seconds, place += velocity * seconds."""


def scripted(obs: np.ndarray, targets: list[int]) -> list[int]:
    """The action of each agent that brings it nearest to its landmark, two steps ahead."""
    actions = []
    for agent, target in zip(obs, targets, strict=True):
        velocity, way = agent[:2], agent[4 + 2 * target : 6 + 2 * target]
        best = []
        for first in PUSHES:
            v1 = velocity * (1 - DAMPING) + PUSH * first * SECONDS
            left = way - v1 * SECONDS
            after = [np.linalg.norm(left - (v1 * (1 - DAMPING) + PUSH * p * SECONDS) * SECONDS) for p in PUSHES]
            best.append(min(after) + 0.1 * np.linalg.norm(left))
        actions.append(int(np.argmin(best)))
    return actions


def assignment(obs: np.ndarray) -> list[int]:
    """The landmark of each agent for which the sum of the ways is shortest."""
    ways = np.linalg.norm(obs[:, 4 : 4 + 2 * AGENTS].reshape(AGENTS, AGENTS, 2), axis=-1)
    return list(min(itertools.permutations(range(AGENTS)), key=lambda p: sum(ways[i, k] for i, k in enumerate(p))))


def returns(episodes: int, seed: int, choose: Callable[[np.ndarray, list[int]], list[int]]) -> np.ndarray:
    """The team's return of each episode."""
    teams = {"team": [f"agent_{i}" for i in range(AGENTS)]}
    env = make_env(EnvConfig(id=ENV, teams=teams))
    totals = []
    for episode in range(episodes):
        obs, _ = env.reset(seed=seed + episode)
        targets, total, ended = assignment(obs["obs"]), 0.0, False
        while not ended:
            obs, reward, terminated, truncated, _ = env.step(np.array(choose(obs["obs"], targets)))
            total, ended = total + float(reward), terminated or truncated
        totals.append(total)
    return np.array(totals)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--episodes", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    rng = np.random.default_rng(given.seed)
    for name, choose in (("random", lambda obs, targets: rng.integers(5, size=AGENTS).tolist()), ("script", scripted)):
        got = returns(given.episodes, given.seed, choose)
        print(f"{name}: {got.mean():.1f} +- {got.std(ddof=1) / len(got) ** 0.5:.1f} over {len(got)} episodes")


if __name__ == "__main__":
    main()
