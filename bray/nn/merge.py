"""Several inputs as one vector: FiLM, bilinear, gating.   B batch, F features of an input, O outputs.

`Merge` does it for any number of inputs and is what the key `merge` of a config names; the layers that it is made of
stand alone too.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from bray.errors import UnknownName
from bray.nn.layers import linear

MERGES = ("concat", "film", "bilinear", "gate")


class FiLM(nn.Module):
    """(1 + scale(c)) x + shift(c), scale and shift dense layers of a condition c (Perez et al. 2018). They start at
    zero: x as it is.

    `x [B, F]`, or a picture `[B, F, H, W]` whose channels are modulated; `condition [B, C]` -> the shape of x.
    """

    def __init__(self, features: int, condition: int):
        super().__init__()
        self.layer = nn.Linear(condition, 2 * features)
        nn.init.zeros_(self.layer.weight)
        nn.init.zeros_(self.layer.bias)

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        scale, shift = (y.reshape(*y.shape, *[1] * (x.ndim - 2)) for y in self.layer(condition).chunk(2, 1))
        return torch.addcmul(x + shift, scale, x)


class Bilinear(nn.Module):
    """x' W_o y + b_o for every output o: `[B, F1], [B, F2] -> [B, O]`. With a `rank` r the form of Kim et al. 2017, P
    (U x * V y) + b with r numbers in between: (F1 + F2 + O) r weights in place of F1 F2 O."""

    def __init__(self, n_first: int, n_second: int, n_out: int, rank: int | None = None):
        super().__init__()
        self.rank = rank
        if rank is None:
            self.weight = nn.Parameter(torch.randn(n_out, n_first, n_second) / (n_first * n_second) ** 0.5)
            self.bias = nn.Parameter(torch.zeros(n_out))
        else:
            self.first, self.second = linear(n_first, rank, 1.0), linear(n_second, rank, 1.0)
            self.out = linear(rank, n_out, 1.0)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        if self.rank is not None:
            return self.out(self.first(x) * self.second(y))
        return torch.einsum("bi,oij,bj->bo", x, self.weight, y) + self.bias


class Gate(nn.Module):
    """Inputs `[B, F_k]`, each made O wide, summed with weights that all of them choose together: a softmax over the
    inputs for every output (the vector gating of AlphaStar, Vinyals et al. 2019). -> `[B, O]`. The weights start
    equal."""

    def __init__(self, sizes: Sequence[int], n_out: int):
        super().__init__()
        self.n_out = n_out
        self.projections = nn.ModuleList(linear(n, n_out, 1.0) for n in sizes)
        self.gates = nn.Linear(sum(sizes), len(sizes) * n_out)
        nn.init.zeros_(self.gates.weight)
        nn.init.zeros_(self.gates.bias)

    def forward(self, *inputs: Tensor) -> Tensor:
        values = torch.stack([layer(x) for layer, x in zip(self.projections, inputs, strict=True)], 1)
        gates = self.gates(torch.cat(inputs, 1)).unflatten(1, (len(inputs), self.n_out)).softmax(1)
        return (gates * values).sum(1)


class Merge(nn.Module):
    """Inputs `[B, F_k]` as one `[B, width]`; `concat` puts them side by side and ignores `width`.

    film: the first input, made `width` wide, is modulated by each of the others in turn. bilinear: the same with
    products of rank `width`.
    gate: see `Gate`.
    """

    def __init__(self, kind: str, sizes: Sequence[int], width: int):
        super().__init__()
        if kind not in MERGES:
            raise UnknownName("merge", kind, MERGES)
        self.kind = kind
        self.out_features = sum(sizes) if kind == "concat" else width
        self.parts = nn.ModuleList()
        if kind == "gate":
            self.gate = Gate(sizes, width)
        elif kind != "concat":
            self.first = linear(sizes[0], width, 1.0)
            make = FiLM if kind == "film" else lambda n, m: Bilinear(n, m, n, rank=n)
            self.parts.extend(make(width, n) for n in sizes[1:])

    def forward(self, *inputs: Tensor) -> Tensor:
        if self.kind == "concat":
            return torch.cat(inputs, 1)
        if self.kind == "gate":
            return self.gate(*inputs)
        x = self.first(inputs[0])
        for part, other in zip(self.parts, inputs[1:], strict=True):
            x = part(x, other)
        return x
