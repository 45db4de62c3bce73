"""The key and the door: a small game in plain numpy.

. . . # . . .      Seven by seven cells, a wall down the middle with one door in it. The agent (A) starts in the left
. A . # . . .      room, where a key (K) lies; the goal (G) is in the right room. Without the key the door is a wall.
. . . # . G .
. . . D . . .      Moves: up, down, left, right. Each move costs 0.01. The key is worth 0.5; the goal is worth 0.5 and
. . . # . . .      ends the game. After 100 moves the game is cut.
. K . # . . .
. . . # . . .      The best return is 1 - 0.01 x (moves to the key, to the door, to the goal): 0.892 on average.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import gymnasium as gym
import numpy as np

SIZE = 7
WALL = 3  # the column of the wall
DOOR = (3, WALL)
MOVES = ((-1, 0), (1, 0), (0, -1), (0, 1))
PLANES = ("wall", "agent", "key", "door", "goal")
LIMIT = 100


class GridEnv(gym.Env):
    """The observation is one picture per thing (PLANES), uint8 `[5, 7, 7]`: 255 where it is, else 0. A key that was
    taken and a door that is open are in no picture."""

    observation_space = gym.spaces.Box(0, 255, (len(PLANES), SIZE, SIZE), np.uint8)
    action_space = gym.spaces.Discrete(len(MOVES))

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[np.ndarray, dict[str, Any]]:
        super().reset(seed=seed)
        agent, key = self.np_random.choice(SIZE * WALL, 2, replace=False).tolist()
        goal = int(self.np_random.integers(SIZE * (SIZE - WALL - 1)))
        self.agent, self.key = divmod(agent, WALL), divmod(key, WALL)
        self.goal = (goal // (SIZE - WALL - 1), WALL + 1 + goal % (SIZE - WALL - 1))
        self.has_key, self.moves = False, 0
        return self.look(), {}

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        row, column = self.agent[0] + MOVES[action][0], self.agent[1] + MOVES[action][1]
        if self.is_free(row, column):
            self.agent = (row, column)
        self.moves += 1
        reward = -0.01
        if self.agent == self.key and not self.has_key:
            self.has_key = True
            reward += 0.5
        won = self.agent == self.goal
        if won:
            reward += 0.5
        return self.look(), reward, won, not won and self.moves == LIMIT, {}

    def is_free(self, row: int, column: int) -> bool:
        inside = 0 <= row < SIZE and 0 <= column < SIZE
        return inside and (column != WALL or ((row, column) == DOOR and self.has_key))

    def look(self) -> np.ndarray:
        obs = np.zeros((len(PLANES), SIZE, SIZE), np.uint8)
        wall, agent, key, door, goal = obs
        wall[:, WALL], wall[DOOR] = 255, 0
        agent[self.agent] = goal[self.goal] = 255
        if not self.has_key:
            key[self.key] = door[DOOR] = 255
        return obs

    def best_return(self) -> float:
        """What the best player makes of this game, asked at its start. Nothing stands in the way inside a room, so the
        shortest way between two things is as many moves as they are rows and columns apart."""
        way = [self.agent, self.key, DOOR, self.goal]
        return 1.0 - 0.01 * sum(abs(a - c) + abs(b - d) for (a, b), (c, d) in pairwise(way))
