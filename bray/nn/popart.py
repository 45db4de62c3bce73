"""A last layer whose targets may have any scale: PopArt (van Hasselt et al. 2016; Hessel et al. 2019)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from bray.nn.layers import linear


class PopArt(nn.Module):
    """A dense layer `[B, n_in] -> [B, n_out]` in units of returns, learnt in units of their running mean and standard
    deviation.

    The outputs are std * (W x + b) + mean. `update` moves mean and std towards new targets (ART: adaptively rescale
    targets) and changes W and b so that every output stays as it was (POP: preserve outputs precisely). The loss
    compares normalised numbers:

        popart.update(target)                                         # once per batch
        loss = (popart.normalize(popart(x)) - popart.normalize(target)).square().mean()

    `step`: how far the statistics move per update; the first updates count fully (the start at zero is divided out).
    The first one of all leaves W and b alone: nothing was learnt that could be kept, and first outputs of the wrong
    scale would have to be unlearnt. The statistics are buffers, so they are saved, published and exported with the
    layer. Before the first update: mean 0, std 1.
    """

    mean: Tensor
    std: Tensor
    moments: Tensor
    seen: Tensor

    def __init__(self, n_in: int, n_out: int = 1, step: float = 0.01, least: float = 1e-4, gain: float = 1.0):
        super().__init__()
        if not 0.0 < step <= 1.0 or least <= 0.0:
            raise ValueError(f"PopArt needs 0 < step <= 1 and least > 0, got step={step}, least={least}")
        self.layer = linear(n_in, n_out, gain)
        self.n_out, self.step, self.least = n_out, step, least
        self.register_buffer("mean", torch.zeros(n_out))
        self.register_buffer("std", torch.ones(n_out))
        self.register_buffer("moments", torch.zeros(2, n_out, dtype=torch.float64))  # of the targets and their squares
        self.register_buffer(
            "seen", torch.zeros(n_out, dtype=torch.float64)
        )  # the share of `moments` that is not its start

    def forward(self, x: Tensor) -> Tensor:
        return self.denormalize(self.layer(x))

    def normalize(self, value: Tensor) -> Tensor:
        """Values `[..., n_out]` (or `[...]` of a single output) in units of returns -> the units of the loss."""
        return (value - self._like(self.mean, value)) / self._like(self.std, value)

    def denormalize(self, value: Tensor) -> Tensor:
        """The reverse of `normalize`."""
        return torch.addcmul(self._like(self.mean, value), self._like(self.std, value), value)

    def _like(self, statistic: Tensor, value: Tensor) -> Tensor:
        """One number for values without an axis for the outputs."""
        return statistic if value.ndim > 1 or self.n_out > 1 else statistic.squeeze(0)

    @torch.no_grad()
    def update(self, target: Any, weight: Any = None) -> None:
        """Take in targets `[..., n_out]` (`[...]` of a single output); `weight` of the same shape counts a target 0 (a
        dead row, another task) to any number of times. An output without targets stays as it is. No branch on data: it
        can be recorded."""
        x = torch.as_tensor(target, device=self.mean.device).double().reshape(-1, self.n_out)
        w = torch.ones_like(x) if weight is None else torch.as_tensor(weight, device=x.device).double().reshape_as(x)
        total = w.sum(0)
        new = torch.stack([(w * x).sum(0), (w * x.square()).sum(0)]) / total.clamp(min=1e-300)
        move, old = self.step * (total > 0).double(), self.seen > 0
        self.moments.lerp_(new, move.expand_as(new))
        self.seen.lerp_(torch.ones_like(self.seen), move)
        known = self.seen > 0
        first, second = (self.moments / self.seen.clamp(min=1e-300)).unbind(0)
        std = (second - first.square()).clamp(min=0.0).sqrt().clamp(min=self.least)
        mean, std = torch.where(known, first, self.mean.double()), torch.where(known, std, self.std.double())
        scale = torch.where(old, self.std.double() / std, 1.0)
        shift = torch.where(old, (self.mean.double() - mean) / std, 0.0)
        self.layer.weight.data.copy_(self.layer.weight.double() * scale.unsqueeze(1))
        self.layer.bias.data.copy_(self.layer.bias.double() * scale + shift)
        self.mean.copy_(mean)
        self.std.copy_(std)
