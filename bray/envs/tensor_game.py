"""A game in torch, of which many are played at once on one device."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from bray import tree
from bray.envs.vector import episode_seed

_A, _C = 6364136223846793005, 1442695040888963407  # Knuth's linear congruential generator of 64 bits


class Game:
    """A game in torch, of which `num_envs` are played at once. Subclasses say

        begin(u)              the state of new episodes from random numbers u [B, random_numbers] in [0, 1)
        move(state, action)   -> state, reward [B], terminated [B]
        see(state)            the observation

    where a state is a tensor `[B, ...]` or a dict of such, and no Python depends on their values: the step is recorded.
    Time limits, resets by our own rule, random numbers and the state of a resume are done here. Random numbers are a
    function of seed, environment and episode alone, the same on every device.
    """

    single_observation_space: Any
    single_action_space: Any
    random_numbers = 1
    max_episode_steps: int | None = None
    plays_tensors = True
    metadata = {"autoreset_mode": "next_step"}  # noqa: RUF012

    def __init__(self, num_envs: int, device: Any = "cpu", max_episode_steps: int | None = None):
        self.num_envs, self.device = num_envs, torch.device(device)
        if max_episode_steps is not None:
            self.max_episode_steps = max_episode_steps if max_episode_steps > 0 else None
        self.steps = torch.zeros(num_envs, dtype=torch.int32, device=self.device)
        self.dead = torch.zeros(num_envs, dtype=torch.bool, device=self.device)
        self.state: Any = None
        self._a, self._c = (torch.tensor(x, device=self.device) for x in (_A, _C))

    def begin(self, u: Tensor) -> Any:
        raise NotImplementedError

    def move(self, state: Any, action: Tensor) -> tuple[Any, Tensor, Tensor]:
        raise NotImplementedError

    def see(self, state: Any) -> Any:
        return state

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        if seed is not None or self.state is None:
            numbers = range(self.num_envs), range(self.random_numbers)
            seeds = [
                [episode_seed(seed or 0, i, j) << 32 | episode_seed(i, seed or 0, j) for j in numbers[1]]
                for i in numbers[0]
            ]
            self.random = torch.from_numpy(np.array(seeds, np.uint64).view(np.int64)).to(self.device)
        else:
            self.random = torch.addcmul(self._c, self.random, self._a)
        self.state = tree.map(torch.clone, self.begin(_uniform(self.random)))
        self.steps.zero_()
        self.dead.zero_()
        return self.see(self.state), {}

    def step(self, action: Tensor) -> tuple[Any, Tensor, Tensor, Tensor, dict[str, Any]]:
        dead, limit = self.dead, self.max_episode_steps
        self.random.copy_(torch.where(dead[:, None], torch.addcmul(self._c, self.random, self._a), self.random))
        begun = self.begin(_uniform(self.random))
        moved, reward, terminated = self.move(self.state, action)

        def put(mine: Tensor, begun: Tensor, moved: Tensor) -> None:
            mine.copy_(torch.where(dead.reshape(-1, *[1] * (mine.dim() - 1)), begun, moved))

        tree.map(put, self.state, begun, moved)
        alive = ~dead
        self.steps.add_(1).mul_(alive)
        reward, terminated = reward * alive, terminated & alive
        truncated = torch.zeros_like(dead) if limit is None else (self.steps >= limit) & ~terminated
        self.dead.copy_(terminated | truncated)
        return self.see(self.state), reward.float(), terminated, truncated, {}

    def get_state(self) -> dict[str, Any]:
        """All that the next step depends on, as tensors: what `set_state` takes."""
        return {"state": self.state, "steps": self.steps, "dead": self.dead, "random": self.random}

    def set_state(self, state: dict[str, Any]) -> Any:
        """Go on from `get_state`; returns the observation."""
        mine = self.get_state() if self.state is not None else self.reset(seed=0) and self.get_state()
        tree.map(lambda x, y: x.copy_(y), mine, state)
        return self.see(self.state)


def _uniform(random: Tensor) -> Tensor:
    """In [0, 1), float64: its upper 53 bits."""
    return (random >> 11).double() * 2.0**-53 + 0.5
