"""Dead units: ReLUs that give zero for every observation, so that no gradient reaches their weights any more."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from bray import tree
from bray.inference.torch_engine import TorchEngine, is_recurrent

_RELUS: set[Callable[..., Any]] = {F.relu, F.relu_, torch.relu, torch.relu_, Tensor.relu, Tensor.relu_}
SAMPLE = 251
"""Observations that are looked at. A prime: no layer is as wide, so the axis of the batch is known by its length."""
SAMPLE_BYTES = 1 << 20


class _Watch(TorchFunctionMode):
    """Keeps what every ReLU of a forward gives, however the network is written."""

    def __init__(self) -> None:
        super().__init__()
        self.outputs: list[Tensor] = []

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        if func in _RELUS:
            self.outputs.append(out)
        return out


def dead_share(model: nn.Module, obs: Any) -> float | None:
    """Share of the units that are zero for all these observations `[N, ...]`, in the layer that has most of them; None for a Model without ReLUs."""
    n = tree.length(obs)
    state = (tree.map(np.asarray, model.initial_state(n)),) if is_recurrent(model) else ()  # type: ignore[operator]
    with _Watch() as watch:
        TorchEngine(model, record=False).forward(obs, *state)
    return max((_dead(out, n) for out in watch.outputs), default=None)


def _dead(out: Tensor, n: int) -> float:
    """Of one layer: `[N, H]`, `[parts, N, H]` or pictures `[N, C, H, W]`, whose channels are the units."""
    batch = next((i for i, size in enumerate(out.shape) if size == n), None)
    over = [i for i in range(out.dim() - 1) if batch in (None, i)]
    if out.dim() == 4 and batch == 0:
        over = [0, 2, 3]
    return float((out.amax(over) <= 0).float().mean()) if over else 0.0
