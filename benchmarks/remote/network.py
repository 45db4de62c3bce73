"""The network of the grid training, the same for both sides: plain PyTorch, built by our catalog as `custom_model`."""

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.remote.settings import GRID_ACTIONS, GRID_OBS, HIDDEN


def layers(outputs: int, gain: float) -> nn.Sequential:
    sizes = [int(torch.tensor(GRID_OBS).prod()), *HIDDEN]
    parts: list[nn.Module] = []
    for i, o in pairwise(sizes):
        parts += [nn.Linear(i, o), nn.Tanh()]
    parts.append(nn.Linear(sizes[-1], outputs))
    for part in parts:
        if isinstance(part, nn.Linear):
            nn.init.orthogonal_(part.weight, gain if part is parts[-1] else 2**0.5)
            nn.init.zeros_(part.bias)
    return nn.Sequential(*parts)


class GridNet(nn.Module):
    """obs uint8 [B, 5, 7, 7] -> {"dist": logits [B, 4], "value": [B]}."""

    def __init__(self, spec: Any = None, config: Any = None):
        super().__init__()
        self.policy, self.critic = layers(GRID_ACTIONS, 0.01), layers(1, 1.0)

    def forward(self, obs: Tensor) -> dict[str, Tensor]:
        x = obs.flatten(1).float()
        return {"dist": self.policy(x), "value": self.critic(x).squeeze(-1)}
