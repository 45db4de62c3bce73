"""Slow copies of networks that others learn towards (DQN, SAC)."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from bray.optim import Optimizer, flatten_parameters


class Target:
    """A slow copy of a module whose parameters are the first of an Optimizer's: `follow` averages (Polyak), `copy`
    copies. Both copy buffers, such as the statistics that the weights of PopArt are measured in."""

    def __init__(self, module: nn.Module, optimizer: Optimizer, tau: float = 1.0):
        params = list(dict.fromkeys(module.parameters()))
        if [id(p) for p in params] != [id(p) for p in optimizer.params[: len(params)]]:
            raise ValueError("a target copies the first parameters of one optimizer, in order")
        self.module = copy.deepcopy(module).requires_grad_(False)
        self.tau = tau
        self._flat = flatten_parameters(list(dict.fromkeys(self.module.parameters())))
        self._source = optimizer.flat[: len(self._flat)]
        self._buffers = list(self.module.buffers()), list(module.buffers())

    def __call__(self, *args: Any) -> Any:
        return self.module(*args)

    @torch.no_grad()
    def follow(self) -> None:
        """target += tau * (source - target)."""
        self._flat.lerp_(self._source, self.tau)
        self._copy_buffers()

    @torch.no_grad()
    def copy(self) -> None:
        """target = source."""
        self._flat.copy_(self._source)
        self._copy_buffers()

    def _copy_buffers(self) -> None:
        if self._buffers[0]:
            torch._foreach_copy_(*self._buffers)

    def state_dict(self) -> dict[str, Tensor]:
        return self.module.state_dict()

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        self.module.load_state_dict(state)
