"""Observation normalisation as a layer: the statistics are buffers, so they are saved, published and exported with
it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor, nn

PART = {"cpu": 1 << 21, "cuda": 1 << 25}
"""Numbers that are taken in at a time: pictures in float64 are large, and the part of a CPU should stay in its
cache."""


class RunningNorm(nn.Module):
    """`clip((x - mean) / sqrt(var + eps), -clip, clip)` with the mean and (population) variance of all rows seen so
    far.

    `update` is called by whoever drives training, never by `forward`. Statistics are float64; `shift` and `scale` are
    what the forward reads, written in place so that recorded programs see the change. Until the first update: no
    change, unless its owner has filled them.
    """

    mean: Tensor
    var: Tensor
    count: Tensor
    shift: Tensor
    scale: Tensor

    over_ranks: Callable[[Tensor], Tensor] | None = None
    """The mean over the ranks that train together, where there are several: each takes in the rows of all."""

    def __init__(self, shape: tuple[int, ...], clip: float = 10.0, eps: float = 1e-8):
        super().__init__()
        self.shape, self.clip, self.eps = tuple(shape), clip, eps
        self.register_buffer("mean", torch.zeros(shape, dtype=torch.float64))
        self.register_buffer("var", torch.ones(shape, dtype=torch.float64))
        self.register_buffer("count", torch.zeros((), dtype=torch.float64))
        self.register_buffer("shift", torch.zeros(shape))
        self.register_buffer("scale", torch.ones(shape))

    def forward(self, x: Tensor) -> Tensor:
        if x.dtype == torch.bool:
            x = x.float()
        return ((x - self.shift) * self.scale).clamp(-self.clip, self.clip)

    @torch.no_grad()
    def update(self, batch: Any, weight: Any = None) -> None:
        """Take in rows `[..., *shape]`; `weight [...]` counts a row 0 (a dead row) to any number of times."""
        x = torch.as_tensor(batch, device=self.mean.device).reshape(-1, *self.shape)
        if weight is None:
            w = torch.ones(len(x), dtype=torch.float64, device=x.device)
        else:
            w = torch.as_tensor(weight, device=x.device).double().reshape(-1)
            if len(w) != len(x):
                raise ValueError(f"weight should have one entry for each of {len(x)} rows, got {len(w)}")
        size = PART["cuda" if x.is_cuda else "cpu"]
        if x.numel() <= size:
            self._take_in(x, w)
            return
        rows = max(1, size // self.mean.numel())
        for part, counts in zip(x.split(rows), w.split(rows), strict=True):
            self._take_in(part, counts)

    def _take_in(self, x: Tensor, w: Tensor) -> None:
        total = w.sum()
        flat = x.double().reshape(len(x), -1)
        share = w / total.clamp(min=1e-300)  # all rows dead: merge() adds nothing
        mean = share @ flat
        var = share @ (flat - mean).square_()
        if self.over_ranks is not None:
            total, mean, var = self._of_all(total, mean, var)
        self.merge(mean.reshape(self.shape), var.reshape(self.shape), total)

    def _of_all(self, count: Tensor, mean: Tensor, var: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The same of the rows of all ranks. (The count is the mean of theirs: all counts here are.)"""
        assert self.over_ranks is not None
        n, sums = self.over_ranks(torch.cat([count.reshape(1), count * mean])).tensor_split([1])
        middle = sums / n.clamp(min=1e-300)
        spread = self.over_ranks(count * (var + (mean - middle).square())) / n.clamp(min=1e-300)
        return n[0], middle, spread

    def standardize(self, x: Any) -> Any:
        """`(x - mean) / sqrt(var + eps)`, unclipped, for numbers beside a network: an array, or a tensor where the
        statistics are."""
        if isinstance(x, Tensor):
            return ((x - self.mean) / (self.var + self.eps).sqrt()).float()
        return ((x - self.mean.cpu().numpy()) / self._deviation).astype(np.float32)

    def restore(self, x: Any) -> Any:
        """The inverse of `standardize`."""
        if isinstance(x, Tensor):
            return (x * (self.var + self.eps).sqrt() + self.mean).float()
        return (x * self._deviation + self.mean.cpu().numpy()).astype(np.float32)

    @property
    def _deviation(self) -> np.ndarray:
        return (self.var + self.eps).sqrt().cpu().numpy()

    @torch.no_grad()
    def merge(self, mean: Tensor, var: Tensor, count: Tensor | float) -> None:
        """Join with the statistics of other rows, exactly as if those had been seen here (Chan 1979)."""
        n = torch.as_tensor(count, dtype=torch.float64, device=self.mean.device)
        total = self.count + n
        if total <= 0:
            return
        delta = mean.to(self.mean) - self.mean
        m2 = self.var * self.count + var.to(self.var) * n + delta.square() * (self.count * n / total)
        self.mean += delta * (n / total)
        self.var.copy_(m2 / total)
        self.count.copy_(total)
        self.shift.copy_(self.mean)
        self.scale.copy_((self.var + self.eps).rsqrt())


def update_normalizers(model: nn.Module, obs: Any, weight: Any = None) -> None:
    """Show a batch of raw observations (arrays or tensors `[..., leaf shape]`) to every RunningNorm of a model."""
    if model not in _normalizing:
        # bray.nn.encoders.Features, or a module of yours; looked up once, because off-policy learners call this every
        # step
        found = [m for m in model.modules() if hasattr(m, "update_norms")]
        _normalizing[model] = [m for m in found if any(isinstance(x, RunningNorm) for x in m.modules())]
    for module in _normalizing[model]:
        module.update_norms(obs, weight)  # type: ignore[operator]


_normalizing: WeakKeyDictionary[nn.Module, list[nn.Module]] = WeakKeyDictionary()
