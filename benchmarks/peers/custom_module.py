"""The user's own network of the case `ppo-custom-module`: a residual MLP, to which policy and value heads are added."""

import torch
from torch import nn


class ResidualBlock(nn.Module):
    """x + ReLU(LayerNorm(Linear(x)))."""

    def __init__(self, width: int):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(width, width), nn.LayerNorm(width), nn.ReLU())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.layers(x)


class ResidualMLP(nn.Module):
    """[B, num_inputs] -> [B, width]."""

    def __init__(self, num_inputs: int = 4, width: int = 64, blocks: int = 2):
        super().__init__()
        self.num_features = width
        self.layers = nn.Sequential(nn.Linear(num_inputs, width), *(ResidualBlock(width) for _ in range(blocks)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)
