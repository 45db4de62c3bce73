"""Attention: lists of things of any order as one vector, and things drawn onto a map.   B batch, N entities, D width, H
heads.

Recorded and exported like the rest. `mask [B, N]` is True where there is
an entity; what stands in the other rows changes nothing.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bray.errors import ConfigError, UnknownName
from bray.nn.layers import ResidualMLP, linear

HIDDEN = -1e9
"""What is added to the score of a key that must not be seen; finite, so that a row that sees nothing has no NaN."""
OVERLAPS = ("add", "cover")


def heads_of(width: int, heads: int) -> int:
    """The width of one head; refuses one that is no whole number."""
    if width % heads:
        raise ConfigError(
            f"attention_heads={heads} does not divide the width {width}: choose one of "
            f"{[n for n in (1, 2, 4, 8, 16) if width % n == 0]}, or another width"
        )
    return width // heads


def attend(scores: Tensor, value: Tensor, visible: Tensor) -> Tensor:
    """softmax(scores) value over the keys that are visible: `[B, H, Q, K]`, `[B, H, K, d]`, bool `[B, 1, Q or 1, K]` ->
    `[B, Q, H d]`."""
    weight = scores.masked_fill(~visible, HIDDEN).softmax(-1)
    return (weight @ value).transpose(1, 2).flatten(2)


class SelfAttention(nn.Module):
    """Multi-head attention of entities to each other (Vaswani et al. 2017): `x [B, N, D]`, `mask [B, N]` ->
    `[B, N, D]`."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads, self.size = heads, heads_of(width, heads)
        self.qkv, self.out = linear(width, 3 * width, 1.0), linear(width, width, 1.0)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(2, (3, self.heads, self.size)).permute(2, 0, 3, 1, 4).unbind(0)
        # One kernel: products of many small matrices take 6 to 15 times as long on CPUs without MKL (gradients, 8 to 32
        # entities).
        hidden = (
            torch.zeros_like(x[:, :, 0]).masked_fill(~mask, HIDDEN)[:, None, None, :].expand(-1, -1, x.shape[1], -1)
        )
        out = F.scaled_dot_product_attention(q, k, v, hidden)
        return self.out(out.transpose(1, 2).flatten(2))


class EntityEncoder(nn.Module):
    """A list of things `[B, N, F]` as one vector `[B, 2 D]` that does not depend on their order: a dense layer,
    `layers` of attention among the entities with a residual block behind each (normalised first), then the mean and the
    largest of each feature over those that are there.
    Without any entity: zeros."""

    def __init__(self, n_features: int, width: int = 64, heads: int = 4, layers: int = 1):
        super().__init__()
        self.embed = linear(n_features, width)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(layers))
        self.attention = nn.ModuleList(SelfAttention(width, heads) for _ in range(layers))
        self.blocks = nn.ModuleList(ResidualMLP(width, hidden=2 * width, norm="layernorm") for _ in range(layers))
        self.width, self.out_features = width, 2 * width

    def each(self, entities: Tensor, mask: Tensor) -> Tensor:
        """An embedding of every entity, which knows of the others: `[B, N, D]`, zeros where there is none."""
        x = torch.relu(self.embed(entities))
        for norm, attention, block in zip(self.norms, self.attention, self.blocks, strict=True):
            x = block(x + attention(norm(x), mask))
        return x * mask.unsqueeze(2)

    def pool(self, each: Tensor, mask: Tensor) -> Tensor:
        """Embeddings `[B, N, D]` as one vector `[B, 2 D]`."""
        count = mask.to(each.dtype).sum(1, keepdim=True)
        largest = each.masked_fill(~mask.unsqueeze(2), HIDDEN).amax(1)
        return torch.cat([each.sum(1) / count.clamp(min=1.0), torch.where(count > 0, largest, 0.0)], 1)

    def forward(self, entities: Tensor, mask: Tensor | None = None) -> Tensor:
        mask = entities.new_ones(entities.shape[:2], dtype=torch.bool) if mask is None else mask.bool()
        return self.pool(self.each(entities, mask), mask)


class Scatter(nn.Module):
    """Entities onto a map: each embedding `[B, N, D]` is laid at its place `[B, N, 2]` (row, column, in cells; rounded,
    kept on the map) -> `[B, D, height, width]` (AlphaStar's scatter connection). Where several meet, `add` sums them
    and `cover` shows the last."""

    def __init__(self, height: int, width: int, overlap: str = "add"):
        super().__init__()
        if overlap not in OVERLAPS:
            raise UnknownName("overlap", overlap, OVERLAPS, "Scatter")
        self.height, self.width, self.overlap = height, width, overlap

    def forward(self, each: Tensor, place: Tensor, mask: Tensor | None = None) -> Tensor:
        row = place[..., 0].round().clamp(0, self.height - 1)
        column = place[..., 1].round().clamp(0, self.width - 1)
        cell = (row * self.width + column).long()
        if mask is not None:
            each = each * mask.unsqueeze(2)
        if self.overlap == "cover":
            there = torch.ones_like(cell, dtype=torch.bool) if mask is None else mask.bool()
            same = (cell.unsqueeze(2) == cell.unsqueeze(1)) & there.unsqueeze(
                1
            )  # [B, N, N]: the second is where the first is
            each = each * ~same.triu(1).any(2, keepdim=True)
        flat = each.new_zeros(each.shape[0], each.shape[2], self.height * self.width)
        flat = flat.scatter_add(2, cell.unsqueeze(1).expand(-1, each.shape[2], -1), each.transpose(1, 2))
        return flat.unflatten(2, (self.height, self.width))
