"""Dead units: those that say the same of every observation, and that no gradient moves any more. ReLUs that give zero,
tanh and sigmoids at one end."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from bray import tree
from bray.inference.torch_engine import TorchEngine, is_recurrent

_ENDS: dict[Callable[..., Any], tuple[float, float]] = {
    **dict.fromkeys((F.relu, F.relu_, torch.relu, torch.relu_, Tensor.relu, Tensor.relu_), (0.0, math.inf)),
    **dict.fromkeys((F.tanh, torch.tanh, torch.tanh_, Tensor.tanh, Tensor.tanh_), (-0.99999, 0.99999)),
    **dict.fromkeys((F.sigmoid, torch.sigmoid, torch.sigmoid_, Tensor.sigmoid, Tensor.sigmoid_), (0.00001, 0.99999)),
}
"""Activation -> where it is flat: below the first, above the second. (A critic that follows returns of 100 has most of
its tanh beyond 0.999, and they come back.)"""
_FEWEST = 8  # units of a layer: narrower ones are outputs, which may well be at one end
SAMPLE = 251
"""Observations that are looked at. A prime: no layer is as wide, so the axis of the batch is known by its length."""
SAMPLE_BYTES = 1 << 20


class _Watch(TorchFunctionMode):
    """Keeps what every activation of a forward gives and where it is flat, however the network is written."""

    def __init__(self) -> None:
        super().__init__()
        self.outputs: list[tuple[Tensor, tuple[float, float]]] = []

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        if func in _ENDS and out.dim() > 1:
            self.outputs.append((out, _ENDS[func]))
        return out


def dead_share(model: nn.Module, obs: Any) -> float | None:
    """Share of the units that are dead for all these observations `[N, ...]`, in the layer that has most of them; None
    for a Model without any of these activations."""
    n = tree.length(obs)
    state = (tree.map(np.asarray, model.initial_state(n)),) if is_recurrent(model) else ()  # type: ignore[operator]
    with _Watch() as watch:
        TorchEngine(model, record=False).forward(obs, *state)
    shares = [_dead(out, n, *ends) for out, ends in watch.outputs]
    return max((share for share in shares if share is not None), default=None)


def _dead(out: Tensor, n: int, low: float, high: float) -> float | None:
    """Of one layer: `[N, H]`, `[parts, N, H]` or pictures `[N, C, H, W]`, whose channels are the units."""
    batch = next((i for i, size in enumerate(out.shape) if size == n), None)
    over = [i for i in range(out.dim() - 1) if batch in (None, i)]
    if out.dim() == 4 and batch == 0:
        over = [0, 2, 3]
    flat = (out.amax(over) <= low) | (out.amin(over) >= high)
    return float(flat.float().mean()) if flat.numel() >= _FEWEST else None
