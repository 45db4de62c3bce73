"""Stems for lists of things and for choices: what `bray.nn.encoders` puts before the dense layers if the config says
so."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor, nn

from bray.errors import ConfigError
from bray.nn.attention import EntityEncoder, Scatter
from bray.nn.config import Entities, ModelConfig
from bray.nn.layers import linear
from bray.spec import Space

DRAWN = 16
"""Channels that a list of things adds to the picture it is drawn onto."""


class EntityStem(nn.Module):
    """A list of things `[B, N, F]` by attention; and, where it is drawn onto a picture, the channels that it adds to
    that."""

    def __init__(self, name: str, space: Space, how: Entities, config: ModelConfig, picture: tuple[int, ...] | None):
        super().__init__()
        if space.kind != "box" or len(space.shape) != 2:
            raise ConfigError(
                f"entities: {name} should be a Box [things, features], it is {space.kind} {list(space.shape)}"
            )
        if how.at is not None and max(how.at) >= space.shape[1]:
            raise ConfigError(
                f"entities.{name}.at: expected features 0 to {space.shape[1] - 1} of {name}, got {list(how.at)}"
            )
        self.zeros, self.at = how.mask == "zeros", how.at
        self.encoder = EntityEncoder(
            space.shape[1], config.entity_width, config.attention_heads, config.attention_layers
        )
        self.out_features = self.encoder.out_features
        if picture is not None:
            self.scatter, self.thin = Scatter(picture[1], picture[2]), linear(config.entity_width, DRAWN)

    def forward(self, x: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """-> features `[B, 2 D]`, and channels `[B, 16, height, width]` for the picture or None."""
        x = x.float()
        if self.zeros:
            mask = (x != 0.0).any(2)
        mask = x.new_ones(x.shape[:2], dtype=torch.bool) if mask is None else mask > 0
        each = self.encoder.each(x, mask)
        drawn = None if self.at is None else self.scatter(torch.relu(self.thin(each)), x[..., list(self.at)], mask)
        return self.encoder.pool(each, mask), drawn


class EmbeddingStem(nn.Module):
    """Choices as learnt vectors, joined: `[B]` or `[B, K]` -> `[B, K * width]`; each column has vectors of its own."""

    shift: Tensor

    def __init__(self, space: Space, width: int):
        super().__init__()
        self.rank = len(space.shape)
        self.table = nn.Embedding(sum(space.n), width)
        begins = itertools.accumulate(space.n[:-1], initial=0)
        shift = [begin - start for begin, start in zip(begins, space.start, strict=True)]
        self.register_buffer("shift", torch.tensor(shift), persistent=False)
        self.out_features = len(space.n) * width

    def forward(self, x: Tensor) -> Tensor:
        x = x.unsqueeze(1) if self.rank == 0 else x.flatten(1)
        return self.table(x + self.shift).flatten(1)
