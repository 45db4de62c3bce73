"""Building blocks: activations, initialised layers, stacked MLPs, and nets written as a list of layers.

Everything here is recorded by `capture` with fixed shapes and replayed without Python, so a forward has no branch on
data and as few tensor operations as it can. Weights are drawn from torch's global generator: seed it and a net is
reproducible.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bray.errors import ConfigError, UnknownName
from bray.nn.noise import NoisyLinear

Activation = Callable[[Tensor], Tensor]
NORMS = ("none", "layernorm")


def _identity(x: Tensor) -> Tensor:
    return x


ACTIVATIONS: dict[str, Activation] = {
    "relu": F.relu,
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "softmax": lambda x: torch.softmax(x, -1),
    "leakyrelu": F.leaky_relu,
    "elu": F.elu,
    "silu": F.silu,
    "gelu": F.gelu,
    "none": _identity,
}
_OTHER_NAMES = {"leaky_relu": "leakyrelu", "swish": "silu", "linear": "none", "identity": "none"}


def activation(name: str | None) -> Activation:
    """The function behind a name of a config; None is "none"."""
    key = (name or "none").lower()
    key = _OTHER_NAMES.get(key, key)
    if key not in ACTIVATIONS:
        raise UnknownName("activation", str(name), ACTIVATIONS)
    return ACTIVATIONS[key]


HIDDEN_GAIN = math.sqrt(2.0)
"""Gain of orthogonal weights before an activation."""


def init_layer(layer: nn.Linear | nn.Conv2d, gain: float, init: str = "orthogonal") -> Any:
    """Orthogonal weights of this gain and zero biases; `init="torch"` leaves what PyTorch drew. Returns the layer."""
    if init == "orthogonal":
        nn.init.orthogonal_(layer.weight, gain)
        if layer.bias is not None:
            nn.init.zeros_(layer.bias)
    return layer


def linear(n_in: int, n_out: int, gain: float = HIDDEN_GAIN, init: str = "orthogonal") -> nn.Linear:
    """A dense layer, initialised."""
    return init_layer(nn.Linear(n_in, n_out), gain, init)


def joint_linear(n_in: int, sizes: Sequence[int], gains: Sequence[float], init: str = "orthogonal") -> nn.Linear:
    """Several heads on the same features as one dense layer (one matrix product), each head's rows with its own
    gain."""
    layer = nn.Linear(n_in, sum(sizes))
    if init == "orthogonal":
        nn.init.zeros_(layer.bias)
        with torch.no_grad():
            for rows, gain in zip(layer.weight.split(list(sizes)), gains, strict=True):
                nn.init.orthogonal_(rows, gain)
    return layer


class MLP(nn.Module):
    """Dense layers with an activation after each: `[B, F] -> [B, hiddens[-1]]`; no hidden layer means no change."""

    def __init__(
        self,
        n_in: int,
        hiddens: Sequence[int],
        activation_name: str = "tanh",
        layer_norm: bool = False,
        init: str = "orthogonal",
    ):
        super().__init__()
        sizes = [n_in, *hiddens]
        self.layers = nn.ModuleList(linear(i, o, init=init) for i, o in itertools.pairwise(sizes))
        self.norms = nn.ModuleList(nn.LayerNorm(h) for h in hiddens) if layer_norm else None
        self.act = activation(activation_name)
        self.out_features = sizes[-1]

    def forward(self, x: Tensor) -> Tensor:
        for i, layer in enumerate(self.layers):
            x = layer(x)
            if self.norms is not None:
                x = self.norms[i](x)
            x = self.act(x)
        return x


class ResidualConv(nn.Module):
    """x + conv(act(conv(act(x)))), both 3 x 3: `[B, C, H, W] -> [B, C, H, W]` (Espeholt et al. 2018, after He et al.
    2016)."""

    def __init__(self, channels: int, act: str = "relu", init: str = "orthogonal"):
        super().__init__()
        self.act = activation(act)
        self.a = init_layer(nn.Conv2d(channels, channels, 3, padding=1), HIDDEN_GAIN, init)
        self.b = init_layer(nn.Conv2d(channels, channels, 3, padding=1), HIDDEN_GAIN, init)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.b(self.act(self.a(self.act(x))))


class ResidualMLP(nn.Module):
    """x + W2 act(W1 norm(x)): `[..., F] -> [..., F]`; the hidden layer is `hidden` wide (0: as wide as the input)."""

    def __init__(self, features: int, act: str = "relu", hidden: int = 0, norm: str = "none", init: str = "orthogonal"):
        super().__init__()
        if norm not in NORMS:
            raise UnknownName("norm type", norm, NORMS, "residual")
        self.act = activation(act)
        self.norm = nn.LayerNorm(features) if norm == "layernorm" else None
        self.a = linear(features, hidden or features, init=init)
        self.b = linear(hidden or features, features, init=init)

    def forward(self, x: Tensor) -> Tensor:
        h = x if self.norm is None else self.norm(x)
        return x + self.b(self.act(self.a(h)))


class Towers(nn.Module):
    """`n` MLPs of one shape on the same input, or each on its own, evaluated together: `[B, F]` or `[n, B, F]` ->
    `[n, B, out]`.

    One batched product per layer, weights `[n, in, out]`. Two critics of 256 x 256 at batch 256, recorded, one thread
    of a Neoverse N1: forward 2.5 ms, with gradients 7.7 ms (separate layers: 2.7 and 7.8; with oneDNN 6.8-8.6 against
    7.0-10.0).
    Gradients of an actor and a critic of 64 x 64 are 69 operations in place of 102. `out`: a last layer without
    activation.
    """

    def __init__(
        self,
        n: int,
        n_in: int,
        hiddens: Sequence[int],
        activation_name: str = "tanh",
        layer_norm: bool = False,
        init: str = "orthogonal",
        out: int | None = None,
        out_gain: float = 1.0,
        batch_norm: bool = False,
    ):
        super().__init__()
        self.n, self.num_hidden, self.act = n, len(hiddens), activation(activation_name)
        sizes = [n_in, *hiddens, *([] if out is None else [out])]
        self.weights, self.biases = nn.ParameterList(), nn.ParameterList()
        for k, (i, o) in enumerate(itertools.pairwise(sizes)):
            gain = HIDDEN_GAIN if k < len(hiddens) else out_gain
            layers = [linear(i, o, gain, init) for _ in range(n)]
            self.weights.append(nn.Parameter(torch.stack([x.weight.detach().t() for x in layers]).contiguous()))
            self.biases.append(nn.Parameter(torch.stack([x.bias.detach()[None] for x in layers])))
        self.layer_norm = layer_norm
        self.norm_weights, self.norm_biases = nn.ParameterList(), nn.ParameterList()
        if layer_norm:
            self.norm_weights.extend(nn.Parameter(torch.ones(n, 1, h)) for h in hiddens)
            self.norm_biases.extend(nn.Parameter(torch.zeros(n, 1, h)) for h in hiddens)
        self.batch_norms = nn.ModuleList(BatchRenorm(n, size) for size in sizes[:-1]) if batch_norm else None
        self.out_features = sizes[-1]

    def forward(self, x: Tensor, first: int | None = None, learn: bool = False, ones: bool = False) -> Tensor:
        """first: the first MLPs alone. learn: batch norms normalise by this batch, and their running statistics follow
        it. ones: behind its features, x has a column of ones, for the biases of the first layer: where rows are many
        and features few, a bias costs a pass over the outputs, and one over their gradients."""
        x = x.expand(first or self.n, *x.shape) if x.ndim == 2 else x
        for k, (weight, bias) in enumerate(zip(self.weights, self.biases, strict=True)):
            if self.batch_norms is not None:
                x = self.batch_norms[k](x, learn)
            if ones and k == 0:
                x = torch.bmm(x, torch.cat([weight, bias], 1)[:first])
            else:
                x = torch.baddbmm(bias[:first], x, weight[:first])
            if k < self.num_hidden:
                if self.layer_norm:
                    norm = F.layer_norm(x, (weight.shape[-1],))
                    x = torch.addcmul(self.norm_biases[k][:first], norm, self.norm_weights[k][:first])
                x = self.act(x)
        return x


class BatchRenorm(nn.Module):
    """Batch renormalisation (Ioffe 2017) of `[n, B, H]` over B, with scale and shift of their own for each of n
    networks.

    With `learn` a batch is normalised by its own mean and variance. After `warmup` such batches these are corrected
    towards the running ones, by a factor within 1/`r_max` ... `r_max` and a shift within `d_max`, so that a batch is
    seen as it is without `learn`: by the running statistics.
    """

    mean: Tensor
    var: Tensor
    batches: Tensor

    def __init__(
        self, n: int, size: int, momentum: float = 0.01, warmup: int = 100_000, r_max: float = 3.0, d_max: float = 5.0
    ):
        super().__init__()
        self.momentum, self.warmup, self.r_max, self.d_max, self.eps = momentum, warmup, r_max, d_max, 1e-3
        self.weight, self.bias = nn.Parameter(torch.ones(n, 1, size)), nn.Parameter(torch.zeros(n, 1, size))
        self.register_buffer("mean", torch.zeros(n, 1, size))
        self.register_buffer("var", torch.ones(n, 1, size))
        self.register_buffer("batches", torch.zeros(()))

    def forward(self, x: Tensor, learn: bool = False) -> Tensor:
        n, batch, _ = x.shape
        if not learn:
            scale = self.weight[:n] * torch.rsqrt(self.var[:n] + self.eps)
            return torch.addcmul(self.bias[:n] - self.mean[:n] * scale, x, scale)
        r, d = self._correct(x.detach())
        weight, bias = self.weight * r, self.bias + self.weight * d
        # As one batch of n * H columns: PyTorch's own kernel, gradients included, takes a seventh of the time of the
        # formula in tensors.
        x = x.transpose(0, 1).reshape(batch, -1)
        x = F.batch_norm(x, None, None, weight.reshape(-1), bias.reshape(-1), True, 0.0, self.eps)
        return x.view(batch, n, -1).transpose(0, 1)

    @torch.no_grad()
    def _correct(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Factor and shift of renormalisation; the running statistics then follow the batch."""
        ones = x.new_full((1, 1, 1), 1.0 / x.shape[1]).expand(len(x), 1, x.shape[1])
        mean = torch.bmm(ones, x)  # products with ones: sums over the middle dimension are slow
        var = (torch.bmm(ones, x * x) - mean * mean).clamp(min=0.0)
        inverse, warm = torch.rsqrt(self.var + self.eps), self.batches >= self.warmup
        r = (torch.sqrt(var + self.eps) * inverse).clamp(1.0 / self.r_max, self.r_max)
        d = ((mean - self.mean) * inverse).clamp(-self.d_max, self.d_max)
        r, d = torch.where(warm, r, torch.ones_like(r)), torch.where(warm, d, torch.zeros_like(d))
        self.mean.lerp_(mean, self.momentum)
        self.var.lerp_(var, self.momentum)
        self.batches.add_(1.0)
        return r, d


def conv_out(size: int, kernel: int, stride: int, padding: int) -> int:
    """Length of one side after a convolution or pooling."""
    return (size + 2 * padding - kernel) // stride + 1


# --- nets written as a list of layers ---------------------------------------------------------------------------------

_LAYER_KEYS: dict[str, dict[str, Any]] = {  # key -> default; ... = required
    "linear": {"layer_dim": ...},
    "noisy_linear": {"layer_dim": ..., "sigma_init": 0.5},
    "conv2d": {"layer_dim": ..., "kernel_size": ..., "stride": 1, "padding": 0},
    "residual": {"hidden": 0, "norm_type": "none"},
    "pooling": {"pooling_type": "max2d", "kernel_size": 2, "stride": None, "padding": 0},
    "flatten": {},
    "norm": {"norm_type": "layernorm"},
    "embed": {"layer_dim": ...},
    "none": {},
}
_LAYER_ALIASES = {"layer_size": "layer_dim", "out_channel": "layer_dim", "embedding_dim": "layer_dim"}


class LayerStack(nn.Module):
    """A net from a list of `{layer_type, layer_dim, activation, ...}`; input sizes are worked out from the first to the
    last.

    `in_shape`: of one sample, `(F,)` or `(C, H, W)`; `classes`: for a Discrete observation, how many an `embed` may
    look up.
    """

    def __init__(
        self,
        in_shape: tuple[int, ...],
        layers: Sequence[dict[str, Any]],
        init: str = "orthogonal",
        classes: int | None = None,
    ):
        super().__init__()
        if not layers:
            raise ConfigError("'layers' is empty: give at least one layer, or null for the default net")
        self.layers = nn.ModuleList()
        self.acts: list[Activation] = []
        shape: tuple[int, ...] = tuple(in_shape)
        for i, layer in enumerate(layers):
            kind, options, act = read_layer(i, layer)
            if kind == "embed":
                if i or classes is None:
                    raise ConfigError(f"layers[{i}]: embed is the first layer of a Discrete observation, nothing else")
                dim = _dim(i, options["layer_dim"])
                self.layers.append(nn.Embedding(classes, dim))
                shape = (dim,)
            else:
                module, shape = _build_layer(i, kind, options, shape, init)
                self.layers.append(module)
            self.acts.append(activation(act))
        self.embeds = isinstance(self.layers[0], nn.Embedding)
        self.flatten = len(shape) != 1
        self.out_features = math.prod(shape)

    def forward(self, x: Tensor) -> Tensor:
        for layer, act in zip(self.layers, self.acts, strict=True):
            x = act(layer(x))
        return x.flatten(1) if self.flatten else x


def read_layer(i: int, layer: Any) -> tuple[str, dict[str, Any], str | None]:
    if not isinstance(layer, dict) or "layer_type" not in layer:
        raise ConfigError(f"layers[{i}] should be a dict with 'layer_type', got {layer!r}")
    kind = str(layer["layer_type"]).lower()
    if kind not in _LAYER_KEYS:
        raise UnknownName("layer type", kind, _LAYER_KEYS, f"layers[{i}]")
    known = _LAYER_KEYS[kind]
    options = dict(known)
    for key, value in layer.items():
        name = _LAYER_ALIASES.get(key, key)
        if name in known:
            options[name] = value
        elif name not in ("layer_type", "activation"):
            raise UnknownName(f"key of a {kind} layer", key, [*known, "activation"], f"layers[{i}]")
    missing = [k for k, v in options.items() if v is ...]
    if missing:
        raise ConfigError(f"layers[{i}]: a {kind} layer needs {', '.join(missing)}, got {layer!r}")
    if kind == "residual":  # its activation is inside
        activation(layer.get("activation", "relu"))
        return kind, {**options, "activation": layer.get("activation", "relu")}, None
    return kind, options, layer.get("activation")


def _dim(i: int, value: Any) -> int:
    """A width, written as 256 or as [256]."""
    dim = value[0] if isinstance(value, (list, tuple)) and len(value) == 1 else value
    if not isinstance(dim, int) or isinstance(dim, bool) or dim < 1:
        raise ConfigError(f"layers[{i}]: a width is a positive integer or a list of one, got {value!r}")
    return dim


def _pair(i: int, value: Any, least: int = 1) -> tuple[int, int]:
    pair = (value, value) if isinstance(value, int) else tuple(value)
    if len(pair) != 2 or any(not isinstance(v, int) or v < least for v in pair):
        raise ConfigError(f"layers[{i}]: expected an integer of at least {least} or a pair of them, got {value!r}")
    return pair


def _build_layer(
    i: int, kind: str, options: dict[str, Any], shape: tuple[int, ...], init: str
) -> tuple[nn.Module, tuple[int, ...]]:
    if kind == "none":
        return nn.Identity(), shape
    if kind == "flatten":
        return nn.Flatten(1), (math.prod(shape),)
    if kind in ("linear", "noisy_linear"):
        dim, n_in = _dim(i, options["layer_dim"]), math.prod(shape)
        layer: nn.Module = (
            linear(n_in, dim, init=init) if kind == "linear" else NoisyLinear(n_in, dim, options["sigma_init"])
        )
        return (nn.Sequential(nn.Flatten(1), layer) if len(shape) != 1 else layer), (dim,)
    if kind == "residual" and len(shape) == 3:
        if options["hidden"] or options["norm_type"] != "none":
            raise ConfigError(f"layers[{i}]: a residual block of convolutions has no hidden width and no norm")
        return ResidualConv(shape[0], options["activation"], init), shape
    if kind == "residual":
        features, hidden = math.prod(shape), options["hidden"] and _dim(i, options["hidden"])
        return ResidualMLP(features, options["activation"], hidden, str(options["norm_type"]), init), (features,)
    if kind == "norm":
        if options["norm_type"] != "layernorm":
            raise UnknownName("norm type", str(options["norm_type"]), ["layernorm"], f"layers[{i}]")
        return nn.LayerNorm(shape), shape
    if len(shape) != 3:
        raise ConfigError(f"layers[{i}]: {kind} needs an image [C, H, W], but gets an input of shape {list(shape)}")
    kernel, padding = _pair(i, options["kernel_size"]), _pair(i, options["padding"], 0)
    stride = kernel if options["stride"] is None else _pair(i, options["stride"])
    h, w = (conv_out(*a) for a in zip(shape[1:], kernel, stride, padding, strict=True))
    if h < 1 or w < 1:
        raise ConfigError(f"layers[{i}]: a kernel of {kernel} does not fit the input of {shape[1:]}; make it smaller")
    if kind == "conv2d":
        dim = _dim(i, options["layer_dim"])
        return init_layer(nn.Conv2d(shape[0], dim, kernel, stride, padding), HIDDEN_GAIN, init), (dim, h, w)
    pools: dict[str, type[nn.MaxPool2d] | type[nn.AvgPool2d]] = {"max2d": nn.MaxPool2d, "avg2d": nn.AvgPool2d}
    if options["pooling_type"] not in pools:
        raise UnknownName("pooling type", str(options["pooling_type"]), pools, f"layers[{i}]")
    return pools[options["pooling_type"]](kernel, stride, padding), (shape[0], h, w)
