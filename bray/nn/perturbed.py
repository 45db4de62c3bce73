"""A Model whose weights differ from game to game: each row of a batch is answered by weights moved by a vector of its
own."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils._pytree import tree_map

from bray.nn.encoders import ImageInput
from bray.nn.noise import NOISE, Shapes


class Perturbed(nn.Module):
    """`model(obs)` is the net itself; `model(obs, {"noise": [B, P]})` answers row b with the weights moved by noise[b].

    The P weights are those that `output` depends on: a value head beside a policy does not count."""

    def __init__(self, net: nn.Module, example: Any, output: str = "dist"):
        super().__init__()
        self.net, self.output = net, output
        for module in net.modules():
            if isinstance(module, ImageInput):
                module.plain = True
        named = dict(net.named_parameters())
        grads = torch.autograd.grad(net(example)[output].sum(), list(named.values()), allow_unused=True)
        self.names = [name for name, grad in zip(named, grads, strict=True) if grad is not None]
        self.draws: Shapes = {NOISE: (sum(p.numel() for p in self.moved_parameters()),)}

    def moved_parameters(self) -> list[nn.Parameter]:
        named = dict(self.net.named_parameters())
        return [named[name] for name in self.names]

    def forward(self, obs: Any, draws: dict[str, Tensor] | None = None) -> dict[str, Any]:
        if draws is None:
            return self.net(obs)
        return torch.vmap(self._one)(draws[NOISE], obs)

    def _one(self, noise: Tensor, obs: Any) -> dict[str, Any]:
        """One row."""
        parameters = self.moved_parameters()
        parts = noise.split([p.numel() for p in parameters])
        moved = {n: p + x.view_as(p) for n, p, x in zip(self.names, parameters, parts, strict=True)}
        outputs = functional_call(self.net, moved, (tree_map(lambda x: x.unsqueeze(0), obs),))
        return {self.output: outputs[self.output].squeeze(0)}
