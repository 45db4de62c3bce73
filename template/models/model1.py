"""The network that is trained and served."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn


class Model1(nn.Module):
    """Pictures `[B, planes, height, width]` in bytes -> `dist`, a logit for each action, and `value`, what the game is
    worth."""

    def __init__(self, state_space: list[int], action_space: int):
        super().__init__()
        planes, height, _ = state_space
        layers: list[nn.Module] = []
        while height > 7:  # large pictures shrink first
            layers += [nn.Conv2d(planes, 32, 3, stride=2, padding=1), nn.ReLU()]
            planes, height = 32, (height + 1) // 2
        layers += [nn.Conv2d(planes, 16, 3, padding=1), nn.ReLU(), nn.Flatten()]
        self.pictures = nn.Sequential(*layers)
        features = self.pictures(torch.zeros(1, *state_space)).shape[1]
        self.body = nn.Sequential(nn.Linear(features, 64), nn.ReLU())
        self.dist = nn.Linear(64, action_space)
        self.value = nn.Linear(64, 1)
        nn.init.orthogonal_(self.dist.weight, 0.01)  # all actions are equally likely at first

    def forward(self, obs: Tensor) -> dict[str, Tensor]:
        x = self.body(self.pictures(obs.float() / 255.0))
        return {"dist": self.dist(x), "value": self.value(x).squeeze(-1)}


def build_model(name: str, config: dict[str, Any]) -> tuple[nn.Module, tuple[np.ndarray, ...]]:
    """
    Args:
        name: the model's name in the launch file; `config[name]` is its section.
        config: the whole file.
    Returns:
        The model, and arguments it can be called with (a batch of one).
    """
    network = config["network"]
    model = Model1(network["state_space"], network["action_space"])
    return model, (np.zeros((1, *network["state_space"]), np.uint8),)
