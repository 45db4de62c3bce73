"""Two levels: python examples/hierarchy.py [--steps 200000]

Four rooms, a key in one corner and a chest in another, in other corners in each game. The top level sees where they are
and says which corner to go to. The low level sees its place and that corner alone, and walks: its episode begins with
each goal and ends when the goal is reached, or when its patience is at an end. Then the top level decides again, and
has earned what was found meanwhile. Both are agents of one game that act one after the other, each with a policy.
"""

from __future__ import annotations

import argparse
from typing import Any

import numpy as np
from gymnasium import spaces

import bray

SIDE, MIDDLE = 7, 3
CORNERS = ((0, 0), (0, SIDE - 1), (SIDE - 1, 0), (SIDE - 1, SIDE - 1))
DOORS = ((MIDDLE, 1), (MIDDLE, 5), (1, MIDDLE), (5, MIDDLE))
MOVES = ((-1, 0), (1, 0), (0, -1), (0, 1))
FREE = [(y, x) for y in range(SIDE) for x in range(SIDE) if MIDDLE not in (y, x) or (y, x) in DOORS]


class Rooms(bray.MultiAgentEnv):
    """`top` is paid 1 for the chest, opened with the key, and 0.05 less for each of its decisions, of which two are
    enough. `low` is paid 1 for each goal that it reaches, and 0.02 less for each step."""

    def __init__(self, patience: int = 24, length: int = 120):
        self.possible_agents = ["top", "low"]
        self.observation_spaces = {
            "top": spaces.Box(0.0, 1.0, (SIDE * SIDE + 2 * len(CORNERS) + 1,), np.float32),
            "low": spaces.Box(0.0, 1.0, (SIDE * SIDE + len(CORNERS),), np.float32),
        }
        self.action_spaces = {"top": spaces.Discrete(len(CORNERS)), "low": spaces.Discrete(len(MOVES))}
        self.patience, self.length = patience, length
        self.rng = np.random.default_rng()

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        if seed is not None:
            self.rng = np.random.default_rng(seed)
        self.key, self.chest = map(int, self.rng.permutation(len(CORNERS))[:2])
        self.at = FREE[int(self.rng.integers(len(FREE)))]
        self.goal = self.walked = self.t = 0
        self.has_key = False
        return {"top": self.see("top")}, {}

    def see(self, agent: str) -> np.ndarray:
        place, corners = np.zeros(SIDE * SIDE, np.float32), np.eye(len(CORNERS), dtype=np.float32)
        place[self.at[0] * SIDE + self.at[1]] = 1.0
        if agent == "low":
            return np.concatenate([place, corners[self.goal]])
        return np.concatenate([place, corners[self.key], corners[self.chest], [np.float32(self.has_key)]])

    def step(self, actions: dict[str, Any]) -> Any:
        return self.set_goal(int(actions["top"])) if "top" in actions else self.walk(MOVES[int(actions["low"])])

    def set_goal(self, corner: int) -> Any:
        self.goal, self.walked, self.t = corner, 0, self.t + 1
        cut = self.t >= self.length
        follows = "top" if self.at == CORNERS[corner] else "low"  # there already: nobody has to walk
        return {follows: self.see(follows)}, {"top": -0.05}, {"__all__": False}, {"__all__": cut}, {}

    def walk(self, move: tuple[int, int]) -> Any:
        to = self.at[0] + move[0], self.at[1] + move[1]
        self.at = to if to in FREE else self.at
        self.walked, self.t = self.walked + 1, self.t + 1
        self.has_key |= self.at == CORNERS[self.key]
        opened, reached = self.has_key and self.at == CORNERS[self.chest], self.at == CORNERS[self.goal]
        obs = {"low": self.see("low")}
        ends = {"low": reached, "__all__": opened}
        cut = {"low": self.walked >= self.patience and not reached, "__all__": self.t >= self.length and not opened}
        if ends["low"] or cut["low"] or opened or cut["__all__"]:
            obs["top"] = self.see("top")
        return obs, {"low": float(reached) - 0.02, "top": float(opened)}, ends, cut, {}


LEVELS = {
    "top": {"config": {"gamma": 0.95, "entropy_coef": 0.02, "rollout_length": 128}},
    "low": {"config": {"gamma": 0.95, "entropy_coef": 0.01, "rollout_length": 128}},
}
SETTINGS = {"num_envs": 16, "epochs": 4, "minibatches": 4, "lr": 1e-3}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200_000)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    with bray.Experiment("PPO", Rooms, policies=LEVELS, seed=args.seed, **SETTINGS) as exp:
        exp.fit({"env_steps_total": args.steps})
        found = exp.evaluate(100)
    print(f"greedy returns: top {found['eval/agent/top']:.2f} (two decisions: 0.90), low {found['eval/agent/low']:.2f}")


if __name__ == "__main__":
    main()
