"""Plain torch actor-critics of the PPO cases, for the peers that take any module (the others build their own)."""

import torch
from custom_module import ResidualMLP
from torch import nn


def layer_init(layer: nn.Module, gain: float = 2**0.5) -> nn.Module:
    nn.init.orthogonal_(layer.weight, gain)
    nn.init.zeros_(layer.bias)
    return layer


def mlp(num_inputs: int, hidden: tuple[int, ...], num_outputs: int, activation, gain: float) -> nn.Sequential:
    layers = []
    for width in hidden:
        layers += [layer_init(nn.Linear(num_inputs, width)), activation()]
        num_inputs = width
    return nn.Sequential(*layers, layer_init(nn.Linear(num_inputs, num_outputs), gain))


class SeparateMLPs(nn.Module):
    """A policy network and a value network that share nothing. [B, D] -> logits [B, A], values [B]."""

    def __init__(self, num_inputs: int, num_actions: int, hidden=(64, 64), activation=nn.Tanh):
        super().__init__()
        self.actor = mlp(num_inputs, hidden, num_actions, activation, gain=0.01)
        self.critic = mlp(num_inputs, hidden, 1, activation, gain=1.0)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.actor(x), self.value(x)

    def value(self, x: torch.Tensor) -> torch.Tensor:
        return self.critic(x).squeeze(-1)


class SharedTrunk(nn.Module):
    """A trunk with a policy head and a value head. [B, ...] -> logits [B, A], values [B]."""

    def __init__(self, trunk: nn.Module, num_features: int, num_actions: int):
        super().__init__()
        self.trunk = trunk
        self.policy_head = layer_init(nn.Linear(num_features, num_actions), 0.01)
        self.value_head = layer_init(nn.Linear(num_features, 1), 1.0)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        features = self.trunk(x)
        return self.policy_head(features), self.value_head(features).squeeze(-1)

    def value(self, x: torch.Tensor) -> torch.Tensor:
        return self.value_head(self.trunk(x)).squeeze(-1)


class NatureCNN(nn.Module):
    """uint8 [B, 4, 84, 84] -> [B, 512] (Mnih 2015)."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            layer_init(nn.Conv2d(4, 32, 8, stride=4)),
            nn.ReLU(),
            layer_init(nn.Conv2d(32, 64, 4, stride=2)),
            nn.ReLU(),
            layer_init(nn.Conv2d(64, 64, 3, stride=1)),
            nn.ReLU(),
            nn.Flatten(),
            layer_init(nn.Linear(64 * 7 * 7, 512)),
            nn.ReLU(),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x / 255.0)


def actor_critic(case: str, observation_space, num_actions: int) -> nn.Module:
    """The network of a feed-forward PPO case."""
    if case == "ppo-pong":
        return SharedTrunk(NatureCNN(), 512, num_actions)
    num_inputs = observation_space.shape[0]
    if case == "ppo-custom-module":
        trunk = ResidualMLP(num_inputs)
        return SharedTrunk(trunk, trunk.num_features, num_actions)
    if case == "ppo-cartpole-256relu":
        return SeparateMLPs(num_inputs, num_actions, (256, 256), nn.ReLU)
    return SeparateMLPs(num_inputs, num_actions)
