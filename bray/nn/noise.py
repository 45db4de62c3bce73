"""Random numbers that a Model takes as an input, and the noisy layers that use them (Fortunato 2018).

A Model that wants random numbers declares `draws`, a dict of names to shapes, and takes as its last argument a dict of
those tensors, standard normal. There is one draw for the whole batch, so they have no batch dimension. Without the
argument the noise is zero. The caller of the Model draws the numbers: noise kept in buffers would be saved and
published with the weights, and nobody would know when it changes.

    model.draws                                              # {"noise": (132,)}
    draws = bray.act.standard_normals(model.draws, rng)      # numpy, as observations are
    engine.forward(obs, draws)                               # noisy; a recurrent one: forward(obs, state, draws)
    engine.forward(obs)                                      # the mean weights: greedy, exported, served

A Model of your own with noisy layers has `self.draws = noise_shapes(self)` at the end of its `__init__`, and runs its
layers inside `with with_noise(self, draws):`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bray.errors import DataError

Shapes = dict[str, tuple[int, ...]]
Draws = Mapping[str, Tensor]
NOISE = "noise"

_CURRENT: ContextVar[dict[NoisyLinear, tuple[Tensor, Tensor]]] = ContextVar("noise of layers")


class NoisyLinear(nn.Module):
    """A dense layer with learned, factorised Gaussian noise on its weights: `weight + weight_sigma * outer(f(b), f(a))`
    and `bias + bias_sigma * f(b)`, for normal `a [in]`, `b [out]` and f(x) = sign(x) sqrt|x|. Outside `with_noise` the
    noise is zero."""

    def __init__(self, n_in: int, n_out: int, sigma0: float = 0.5):
        super().__init__()
        bound = 1.0 / math.sqrt(n_in)
        self.weight = nn.Parameter(torch.empty(n_out, n_in).uniform_(-bound, bound))
        self.bias = nn.Parameter(torch.empty(n_out).uniform_(-bound, bound))
        self.weight_sigma = nn.Parameter(torch.full((n_out, n_in), sigma0 * bound))
        self.bias_sigma = nn.Parameter(torch.full((n_out,), sigma0 * bound))

    def forward(self, x: Tensor) -> Tensor:
        mean = F.linear(x, self.weight, self.bias)
        noise = _CURRENT.get({}).get(self)
        if noise is None:
            return mean
        noise_in, noise_out = noise
        # The noisy weight matrix is never formed: it is W x + f(b) W_sigma (f(a) x).
        return torch.addcmul(mean, F.linear(x * noise_in, self.weight_sigma, self.bias_sigma), noise_out)


def _sizes(model: nn.Module) -> dict[NoisyLinear, list[int]]:
    """How many numbers each noisy layer takes: for its inputs and for its outputs."""
    return {m: list(m.weight.shape[::-1]) for m in model.modules() if isinstance(m, NoisyLinear)}


def noise_shapes(model: nn.Module) -> Shapes:
    """The `draws` of a Model that has noisy layers, anywhere in it: one vector for all of them; empty without such
    layers."""
    n = sum(sum(sizes) for sizes in _sizes(model).values())
    return {NOISE: (n,)} if n else {}


@contextmanager
def with_noise(model: nn.Module, draws: Draws | None) -> Iterator[None]:
    """Inside the block, the noisy layers of a Model use these draws (None: zero noise), in this thread only."""
    layers = _sizes(model) if draws else {}
    if not draws or (not layers and NOISE not in draws):  # other draws may be for the Model itself
        yield
        return
    noise, n = draws.get(NOISE), sum(map(sum, layers.values()))
    if noise is None or noise.shape != (n,):
        got = sorted(draws) if noise is None else list(noise.shape)
        raise DataError(f"the draws of {type(model).__name__} should be {{{NOISE!r}: [{n}]}}, got {got}")
    scaled = noise.sign() * noise.abs().sqrt()
    parts = iter(scaled.split([n for sizes in layers.values() for n in sizes]))
    token = _CURRENT.set({layer: (next(parts), next(parts)) for layer in layers})
    try:
        yield
    finally:
        _CURRENT.reset(token)
