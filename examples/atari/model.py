"""The network. What it sees has a batch dimension; whoever calls `await model.forward(obs)` neither gives nor gets
one."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class AtariModel(nn.Module):
    """Pictures `[B, pictures, height, width]` in bytes -> value `[B]`, logits `[B, actions]`."""

    def __init__(self, shape: tuple[int, ...] = (4, 42, 42), num_actions: int = 6):
        super().__init__()
        channels, height, _ = shape
        layers: list[nn.Module] = []
        while height > 7:
            layers += [nn.Conv2d(channels, 32, 3, stride=2, padding=1), nn.ReLU()]
            channels, height = 32, (height + 1) // 2
        layers += [nn.Conv2d(channels, 32, 3, padding=1), nn.ReLU(), nn.Flatten()]
        self.pictures = nn.Sequential(*layers)
        features = self.pictures(torch.zeros(1, *shape)).shape[1]
        self.body = nn.Sequential(nn.Linear(features, 256), nn.ReLU())
        self.value = nn.Linear(256, 1)
        self.logits = nn.Linear(256, num_actions)
        nn.init.orthogonal_(self.logits.weight, 0.01)

    def forward(self, obs: Tensor) -> tuple[Tensor, Tensor]:
        x = self.body(self.pictures(obs.float() / 255.0))
        return self.value(x).squeeze(-1), self.logits(x)
