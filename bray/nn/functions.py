"""Small functions of tensors that networks of one's own are written with. None looks at values in Python, so all can be
recorded and exported."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from bray import tree
from bray.spec import ActionLayout


def one_hot(x: Tensor, n: int) -> Tensor:
    """Choices 0 ... n - 1 `[...]` as float32 `[..., n]`; other numbers give zeros."""
    return (x.unsqueeze(-1) == torch.arange(n, device=x.device)).float()


def action_features(layout: ActionLayout, action: Tensor) -> Tensor:
    """Flat actions `[N, D]` as numbers for a network `[N, F]`: choices one-hot."""
    parts = [(part, action[:, part.action]) for part in layout.parts]
    return torch.cat([one_hot(x[:, 0], part.n) if part.kind == "categorical" else x.float() for part, x in parts], 1)


def binary_encode(x: Tensor, bits: int) -> Tensor:
    """Whole numbers `[...]` as their binary digits `[..., bits]`, the highest first, float32; what is below 0 or above
    2^bits - 1 counts as those."""
    x = x.clamp(0, 2**bits - 1).long().unsqueeze(-1)
    places = 2 ** torch.arange(bits - 1, -1, -1, device=x.device)
    return (torch.div(x, places, rounding_mode="floor") % 2).float()


def soft_argmax(x: Tensor) -> Tensor:
    """Where a map is largest, with a gradient: the mean place (row, column) under a softmax over all cells.
    `[..., H, W]` -> `[..., 2]` (Levine et al. 2016: spatial softmax)."""
    weight = x.flatten(-2).softmax(-1).unflatten(-1, x.shape[-2:])
    rows, columns = (torch.arange(n, device=x.device, dtype=x.dtype) for n in x.shape[-2:])
    return torch.stack([weight.sum(-1) @ rows, weight.sum(-2) @ columns], -1)


def gumbel_softmax(logits: Tensor, uniform: Tensor, temperature: float = 1.0, hard: bool = False) -> Tensor:
    """A draw from softmax(logits) with a gradient (Jang et al. 2017): softmax((logits - log(-log u)) / temperature),
    `u` uniform in (0, 1) and of the shape of the logits. `hard`: one-hot, with the gradient of the soft one."""
    soft = ((logits - (-uniform.log()).log()) / temperature).softmax(-1)
    if not hard:
        return soft
    return one_hot(soft.argmax(-1), logits.shape[-1]).to(soft) + (soft - soft.detach())


def to_tensors(data: Any, device: Any = None, dtype: torch.dtype | None = None) -> Any:
    """A tree (dicts, lists, tuples, namedtuples) of arrays and numbers as tensors; `dtype` for those of real
    numbers."""

    def convert(x: Any) -> Tensor:
        tensor = torch.as_tensor(x, device=device)
        return tensor.to(dtype) if dtype is not None and tensor.is_floating_point() else tensor

    return tree.map(convert, data)


def to_arrays(data: Any) -> Any:
    """A tree of tensors as numpy arrays."""
    return tree.map(lambda x: x.detach().cpu().numpy() if isinstance(x, Tensor) else np.asarray(x), data)
