"""python -m benchmarks.anchors spread|speaker [--episodes N]: what the ends of the scale of a game of mpe2 are: the
team's return of random play, and of scripts. Needs `.[multiagent]`.

spread    simple_spread (3 agents, 25 steps). Script: each agent gets a landmark so that the way of all together is
          shortest, and goes there.
speaker   simple_speaker_listener (25 steps). Scripts: the listener goes to the middle of the landmarks, which is the
          best that it can do without a word; or to the one that the speaker sees.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable
from typing import Any

import numpy as np

from bray.envs.config import EnvConfig
from bray.envs.make import make_env

AGENTS = 3
"""Of simple_spread."""
TEAMS = {
    "spread": ("pettingzoo:mpe2.simple_spread_v3", [f"agent_{i}" for i in range(AGENTS)]),
    "speaker": ("pettingzoo:mpe2.simple_speaker_listener_v4", ["speaker_0", "listener_0"]),
}
"""Game -> its id and members."""
PUSHES = np.array([[0, 0], [-1, 0], [1, 0], [0, -1], [0, 1]], float)
"""What each action pushes towards."""
DAMPING, PUSH, SECONDS = 0.25, 5.0, 0.1
"""Of its: velocity = velocity (1 - damping) + push * seconds, place += velocity * seconds."""
Choose = Callable[[np.ndarray], list[int]]
"""The team's observation -> its actions."""


def towards(velocity: np.ndarray, way: np.ndarray) -> int:
    """The action that brings an agent nearest to the end of its way, two steps ahead."""
    best = []
    for first in PUSHES:
        v1 = velocity * (1 - DAMPING) + PUSH * first * SECONDS
        left = way - v1 * SECONDS
        after = [np.linalg.norm(left - (v1 * (1 - DAMPING) + PUSH * p * SECONDS) * SECONDS) for p in PUSHES]
        best.append(min(after) + 0.1 * np.linalg.norm(left))
    return int(np.argmin(best))


def share_out(obs: np.ndarray) -> Choose:
    """To each agent the landmark for which the sum of the ways is shortest, as the game begins."""
    landmarks = slice(4, 4 + 2 * AGENTS)
    ways = np.linalg.norm(obs[:, landmarks].reshape(AGENTS, AGENTS, 2), axis=-1)
    targets = min(itertools.permutations(range(AGENTS)), key=lambda p: sum(ways[i, k] for i, k in enumerate(p)))
    return lambda obs: [
        towards(agent[:2], agent[landmarks].reshape(AGENTS, 2)[k]) for agent, k in zip(obs, targets, strict=True)
    ]


def to_the_middle(obs: np.ndarray) -> Choose:
    return lambda obs: [0, towards(obs[1, :2], obs[1, 2:8].reshape(3, 2).mean(0))]


def to_the_goal(obs: np.ndarray) -> Choose:
    return lambda obs: [0, towards(obs[1, :2], obs[1, 2:8].reshape(3, 2)[int(np.argmax(obs[0, :3]))])]


SCRIPTS: dict[str, dict[str, Callable[[np.ndarray], Choose]]] = {
    "spread": {"script": share_out},
    "speaker": {"without a word": to_the_middle, "told the goal": to_the_goal},
}


def returns(game: str, episodes: int, seed: int, begin: Callable[[np.ndarray], Choose]) -> np.ndarray:
    """The team's return of each episode; `begin(first observation)` is who plays it."""
    env_id, members = TEAMS[game]
    env: Any = make_env(EnvConfig(id=env_id, teams={"team": members}))
    totals = []
    for episode in range(episodes):
        obs, _ = env.reset(seed=seed + episode)
        choose, total, ended = begin(obs["obs"]), 0.0, False
        while not ended:
            obs, reward, terminated, truncated, _ = env.step(np.array(choose(obs["obs"])))
            total, ended = total + float(reward), terminated or truncated
        totals.append(total)
    return np.array(totals)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("game", choices=list(TEAMS))
    parser.add_argument("--episodes", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    rng, choices = np.random.default_rng(given.seed), {"spread": [5, 5, 5], "speaker": [3, 5]}[given.game]
    random: dict[str, Any] = {"random": lambda obs: lambda obs: rng.integers(choices).tolist()}
    for name, begin in (random | SCRIPTS[given.game]).items():
        got = returns(given.game, given.episodes, given.seed, begin)
        print(f"{name}: {got.mean():.1f} +- {got.std(ddof=1) / len(got) ** 0.5:.1f} over {len(got)} episodes")


if __name__ == "__main__":
    main()
