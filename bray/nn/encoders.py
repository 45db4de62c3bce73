"""Encoders: an observation tree of any Space -> features `[B, F]`.

Each leaf of the observation has a *stem*, and the stems' outputs are joined:

| leaf                                | stem                                                                           |
|-------------------------------------|--------------------------------------------------------------------------------|
| box of rank 3, uint8 box of rank 2  | convolutions: `conv_filters`, or a net that fits the size; uint8 is divided by 255 |
| any other box                       | flattened to float32; uint8 bounded by 255 is divided by 255; RunningNorm if asked |
| discrete, multi_discrete            | one-hot                                                                        |
| multi_binary                        | flattened to float32                                                           |

Unless the observation is one image, the dense layers `fcnet_hiddens` follow. An image is `[C, H, W]` or `[H, W, C]`: the two
equal sides are taken for height and width, else the smaller of the first and last axis for the channels.
The member `action_mask` of a Dict is for the Policy and never enters a network.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bray import tree
from bray.errors import ConfigError, UnknownName
from bray.nn.config import CONV_NAMES, Filter, ModelConfig, read_filters
from bray.nn.layers import HIDDEN_GAIN, MLP, LayerStack, activation, conv_out, init_layer, linear
from bray.nn.normalize import RunningNorm
from bray.spec import ACTION_MASK, Space

NATURE: list[Filter] = [(32, (8, 8), 4), (64, (4, 4), 2), (64, (3, 3), 1)]
"""The convolutions of Mnih 2015, without padding: 84 x 84 -> 64 x 7 x 7."""
IMPALA = (16, 32, 32)
"""Channels of the residual sections of Espeholt 2018."""


def default_filters(height: int, width: int) -> tuple[list[Filter], str]:
    """Default convolutions (and their padding) for an image size; sides shrink from 84 to 7, 42 to 7, 24 to 4, 10 to 8."""
    side = min(height, width)
    if side >= 64:
        return NATURE, "valid"
    if side >= 36:
        return [(32, (4, 4), 2), (64, (4, 4), 2), (64, (3, 3), 1)], "valid"
    if side >= 12:
        return [(32, (3, 3), 2), (64, (3, 3), 2), (64, (3, 3), 1)], "same"
    kernel = (min(3, height), min(3, width))
    return [(16, kernel, 1), (32, kernel, 1)], "same"


class Convs(nn.Module):
    """Convolutions in a row, `[B, C, H, W] -> [B, F]`. With padding "same" all but the last are padded so that a side of n
    becomes ceil(n / stride); the last one is not, so that a kernel of the remaining size makes 1 x 1 of it."""

    def __init__(
        self,
        shape: tuple[int, int, int],
        filters: Sequence[Filter],
        act: str,
        padding: str = "same",
        init: str = "orthogonal",
    ):
        super().__init__()
        self.act = activation(act)
        self.convs = nn.ModuleList()
        self.pads: list[tuple[int, int, int, int] | None] = []
        channels, *sides = shape
        for i, (out, kernel, stride) in enumerate(filters):
            before = [0, 0]
            after = [0, 0]
            if padding == "same" and i < len(filters) - 1:
                for d, (n, k) in enumerate(zip(sides, kernel, strict=True)):
                    total = max((math.ceil(n / stride) - 1) * stride + k - n, 0)
                    before[d], after[d] = total // 2, total - total // 2
            if before == after:
                self.pads.append(None)
            else:  # one more on the far side: torch pads both sides alike, so this is an operation of its own
                self.pads.append((before[1], after[1], before[0], after[0]))
                sides = [n + b + a for n, b, a in zip(sides, before, after, strict=True)]
                before = [0, 0]
            new = [conv_out(n, k, stride, p) for n, k, p in zip(sides, kernel, before, strict=True)]
            if min(new) < 1:
                raise ConfigError(
                    f"conv_filters[{i}]: a kernel of {list(kernel)} does not fit the {sides[0]} x {sides[1]} that reach it "
                    f"from an image of {shape[1]} x {shape[2]}. Use smaller kernels or strides, or conv_filters: null."
                )
            conv = nn.Conv2d(channels, out, kernel, stride, (before[0], before[1]))
            self.convs.append(init_layer(conv, HIDDEN_GAIN, init))
            channels, sides = out, new
        self.out_shape = (channels, sides[0], sides[1])
        self.out_features = math.prod(self.out_shape)

    def forward(self, x: Tensor) -> Tensor:
        for conv, pad in zip(self.convs, self.pads, strict=True):
            if pad is not None:
                x = F.pad(x, pad)
            x = self.act(conv(x))
        return x.flatten(1)


class _Residual(nn.Module):
    def __init__(self, channels: int, act: str, init: str):
        super().__init__()
        self.act = activation(act)
        self.a = init_layer(nn.Conv2d(channels, channels, 3, padding=1), HIDDEN_GAIN, init)
        self.b = init_layer(nn.Conv2d(channels, channels, 3, padding=1), HIDDEN_GAIN, init)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.b(self.act(self.a(self.act(x))))


class Impala(nn.Module):
    """The residual network of Espeholt 2018, `[B, C, H, W] -> [B, F]`: three sections of a convolution, a pooling that halves
    the sides, and two residual blocks."""

    def __init__(self, shape: tuple[int, int, int], act: str, init: str = "orthogonal"):
        super().__init__()
        self.act = activation(act)
        sections: list[nn.Module] = []
        channels, h, w = shape
        for out in IMPALA:
            sections += [init_layer(nn.Conv2d(channels, out, 3, padding=1), HIDDEN_GAIN, init), nn.MaxPool2d(3, 2, 1)]
            sections += [_Residual(out, act, init) for _ in range(2)]
            channels, h, w = out, -(-h // 2), -(-w // 2)
        self.sections = nn.Sequential(*sections)
        self.out_shape = (channels, h, w)
        self.out_features = channels * h * w

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.sections(x)).flatten(1)


class ImageInput(nn.Module):
    """An image leaf as float32 `[B, C, H, W]`: axes in order, uint8 scaled, resized to `dim` if that is asked for."""

    def __init__(self, space: Space, config: ModelConfig):
        super().__init__()
        a, b, c = space.shape if len(space.shape) == 3 else (1, *space.shape)
        self.add_channel = len(space.shape) == 2
        self.channels_last = b != c and (a == b or c < a)
        channels, h, w = (c, a, b) if self.channels_last else (a, b, c)
        self.bytes = space.dtype == "uint8"
        self.zero_mean = config.zero_mean and self.bytes
        self.scale = 2 / 255 if self.zero_mean else 1 / 255
        self.size = (config.dim, config.dim) if config.dim and (h, w) != (config.dim, config.dim) else None
        self.out_shape = (channels, *(self.size or (h, w)))

    def forward(self, x: Tensor) -> Tensor:
        if self.add_channel:
            x = x.unsqueeze(1)
        if self.channels_last:
            x = x.permute(0, 3, 1, 2)
        # Channels last: convolutions are 1.2x faster so. Straight to the precision they run in: pictures are large, passes over them cost.
        kind = x.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else torch.float32
        x = x.to(dtype, memory_format=torch.channels_last)
        if self.bytes:
            x = x * self.scale
        if self.zero_mean:
            x = x - 1.0
        if self.size is not None:
            x = F.interpolate(x, self.size, mode="bilinear")
        return x


class ImageStem(nn.Module):
    """Convolutions and, unless given filters end in 1 x 1, a dense layer of `conv_features`."""

    def __init__(self, space: Space, config: ModelConfig):
        super().__init__()
        self.input = ImageInput(space, config)
        shape, act, init = self.input.out_shape, config.conv_activation, config.init
        width = config.conv_features
        if config.conv_filters == "impala":
            self.convs: Convs | Impala = Impala(shape, act, init)
            width = width or 256
        elif config.conv_filters == "nature":
            self.convs = Convs(shape, NATURE, act, "valid", init)
        elif isinstance(config.conv_filters, str):
            raise UnknownName("convolution net", config.conv_filters, CONV_NAMES, "conv_filters")
        elif config.conv_filters is None:
            filters, padding = default_filters(*shape[1:])
            self.convs = Convs(shape, filters, act, padding, init)
        else:
            self.convs = Convs(shape, read_filters(config.conv_filters), act, "same", init)
            if self.convs.out_shape[1:] == (1, 1) and width is None:
                width = 0
        width = 512 if width is None else width
        self.dense = linear(self.convs.out_features, width, init=init) if width else None
        self.norm = nn.LayerNorm(width) if width and config.layer_norm else None
        self.act = activation(act)
        self.out_features = width or self.convs.out_features

    def forward(self, x: Tensor) -> Tensor:
        x = self.convs(self.input(x))
        if self.dense is not None:
            x = self.dense(x)
            if self.norm is not None:
                x = self.norm(x)
            x = self.act(x)
        return x


class VectorStem(nn.Module):
    """A box (or multi_binary) as a float32 vector, normalised if that is asked for and it is one of real numbers."""

    def __init__(self, space: Space, normalize: bool):
        super().__init__()
        self.rank = len(space.shape)
        self.out_features = math.prod(space.shape)
        self.bytes = space.dtype == "uint8" and space.high == 255
        self.norm = RunningNorm((self.out_features,)) if normalize and space.dtype.startswith("float") else None

    def forward(self, x: Tensor) -> Tensor:
        if self.rank == 0:
            x = x.unsqueeze(1)
        elif self.rank > 1:
            x = x.flatten(1)
        x = x * (1 / 255) if self.bytes else x.float()
        return x if self.norm is None else self.norm(x)


class OneHotStem(nn.Module):
    """Choices as one-hot vectors, joined. No `F.one_hot`: it looks at the data to check it, which cannot be recorded."""

    values: Tensor
    columns: Tensor

    def __init__(self, space: Space):
        super().__init__()
        self.rank = len(space.shape)
        self.out_features = sum(space.n)
        self.single = len(space.n) == 1
        values = [s + i for n, s in zip(space.n, space.start, strict=True) for i in range(n)]
        columns = [k for k, n in enumerate(space.n) for _ in range(n)]
        self.register_buffer("values", torch.tensor(values), persistent=False)
        self.register_buffer("columns", torch.tensor(columns), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.rank == 0:
            x = x.unsqueeze(1)
        elif self.rank > 1:
            x = x.flatten(1)
        if not self.single:
            x = x.index_select(1, self.columns)
        return (x == self.values).float()


def is_image(space: Space, config: ModelConfig) -> bool:
    """Whether a leaf is treated as an image: rank 3, or rank 2 with uint8 values or with `conv_filters`."""
    if space.kind != "box" or (config.layers is not None and not _conv_layers(config)):
        return False
    return len(space.shape) == 3 or (
        len(space.shape) == 2
        and (space.dtype == "uint8" or config.conv_filters is not None or config.layers is not None)
    )


def sees_image(space: Space, config: ModelConfig) -> bool:
    """Whether any leaf of an observation goes through convolutions."""
    if config.custom_preprocessor is not None:
        space = _make_preprocessor(space, config).space  # type: ignore[assignment]
    return any(is_image(leaf, config) for _, leaf in obs_leaves(space))


def _conv_layers(config: ModelConfig) -> bool:
    """Whether a list of layers starts with one that needs an image."""
    first = (config.layers or [{}])[0]
    return isinstance(first, dict) and str(first.get("layer_type")).lower() in ("conv2d", "pooling")


def obs_leaves(space: Space, prefix: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Space]]:
    """(keys, leaf space) of all members that enter a network, in order; not the top-level action mask."""
    if space.kind in ("dict", "tuple"):
        for i, (name, part) in enumerate(space.items):
            if prefix or name != ACTION_MASK or space.kind == "tuple":
                yield from obs_leaves(part, (*prefix, name if space.kind == "dict" else i))
    else:
        yield prefix, space


def _leaf(obs: Any, keys: tuple[Any, ...]) -> Any:
    for key in keys:
        obs = obs[key]
    return obs


class Features(nn.Module):
    """All leaves of an observation through their stems, joined: obs tree -> `[B, F]`."""

    def __init__(self, space: Space, config: ModelConfig):
        super().__init__()
        self.preprocessor: nn.Module | None = None
        self.raw_space = space
        if config.custom_preprocessor is not None:
            self.preprocessor = _make_preprocessor(space, config)
            space = self.preprocessor.space  # type: ignore[assignment]  # checked to be a Space
        self.space = space
        self.leaves = tuple(obs_leaves(space))
        if not self.leaves:
            raise ConfigError(f"the observation has no member to learn from besides {ACTION_MASK!r}: {space.names}")
        self.stems = nn.ModuleList()
        for keys, leaf in self.leaves:
            if leaf.kind in ("discrete", "multi_discrete"):
                self.stems.append(OneHotStem(leaf))
            elif is_image(leaf, config):
                self.stems.append(ImageStem(leaf, config))
            elif leaf.kind in ("box", "multi_binary"):
                self.stems.append(VectorStem(leaf, config.normalize_observations))
            else:
                where = "/".join(map(str, keys)) or "the observation"
                raise ConfigError(f"{where} has kind {leaf.kind!r}, which no encoder takes; convert it to a Box")
        self.has_image = any(isinstance(stem, ImageStem) for stem in self.stems)
        self.only_image = self.has_image and len(self.stems) == 1
        self.out_features: int = sum(stem.out_features for stem in self.stems)  # type: ignore[misc]

    def forward(self, obs: Any) -> Tensor:
        if self.preprocessor is not None:
            obs = self.preprocessor(obs)
        parts = [stem(_leaf(obs, keys)) for (keys, _), stem in zip(self.leaves, self.stems, strict=True)]
        return parts[0] if len(parts) == 1 else torch.cat(parts, 1)

    def update_norms(self, obs: Any, weight: Any = None) -> None:
        """Show a batch of raw observations `[..., leaf shape]` to the RunningNorm of each leaf that has one."""
        if self.preprocessor is not None:
            leaves = [(_leaf(obs, keys), space) for keys, space in obs_leaves(self.raw_space)]
            lead = leaves[0][0].ndim - len(leaves[0][1].shape)
            device = next(self.buffers(), torch.empty(0)).device
            with torch.no_grad():
                flat = tree.map(lambda x: torch.as_tensor(x, device=device).flatten(0, lead - 1), obs)
                obs = self.preprocessor(flat)
        for (keys, _), stem in zip(self.leaves, self.stems, strict=True):
            if isinstance(stem, VectorStem) and stem.norm is not None:
                stem.norm.update(_leaf(obs, keys), weight)


class Encoder(nn.Module):
    """Features, then dense layers: obs tree -> `[B, out_features]`."""

    def __init__(self, space: Space, config: ModelConfig):
        super().__init__()
        self.input: nn.Module | None = None  # set when a list of layers takes the leaf itself: an image or an index
        self.offset = 0
        self.features: Features | None = None
        trunk: nn.Module | None = None
        if config.layers is not None:
            leaves = list(obs_leaves(space))
            leaf = leaves[0][1] if leaves else space
            embeds = str(config.layers[0].get("layer_type")).lower() == "embed" if config.layers else False
            if _conv_layers(config) or embeds:
                if (
                    len(leaves) != 1
                    or not (is_image(leaf, config) or leaf.kind == "discrete")
                    or config.custom_preprocessor
                ):
                    raise ConfigError(
                        f"'layers' that start with {config.layers[0]['layer_type']} need an observation that is one "
                        f"{'Discrete' if embeds else 'image'}, got {space.kind} of shape {list(space.shape)}"
                    )
                self.keys = leaves[0][0]
                if leaf.kind == "discrete":
                    self.offset = leaf.start[0]
                    trunk = LayerStack((), config.layers, config.init, classes=leaf.n[0])
                else:
                    self.input = ImageInput(leaf, config)
                    trunk = LayerStack(self.input.out_shape, config.layers, config.init)
            else:
                self.features = Features(space, config)
                trunk = LayerStack((self.features.out_features,), config.layers, config.init)
        else:
            self.features = Features(space, config)
            if not self.features.only_image:
                n = self.features.out_features
                trunk = MLP(n, config.fcnet_hiddens, config.fcnet_activation, config.layer_norm, config.init)
        self.trunk = trunk
        self.has_image = self.input is not None or (self.features is not None and self.features.has_image)
        last: Any = self.features if trunk is None else trunk
        self.out_features: int = last.out_features

    def forward(self, obs: Any) -> Tensor:
        if self.features is not None:
            x = self.features(obs)
        else:
            x = _leaf(obs, self.keys)
            if self.input is not None:
                x = self.input(x)
            elif self.offset:
                x = x - self.offset
        return x if self.trunk is None else self.trunk(x)


def make_encoder(space: Space, config: ModelConfig) -> Encoder:
    """The encoder of an observation space: obs tree `[B, ...]` -> `[B, encoder.out_features]`."""
    return Encoder(space, config)


# --- the user's own classes -------------------------------------------------------------------------------------------

_REGISTERED: dict[str, dict[str, type]] = {"model": {}, "preprocessor": {}}


def register(kind: str, name: str, cls: type, replace: bool = False) -> None:
    """Give a class a short name for the keys `custom_model` (kind "model") and `custom_preprocessor` ("preprocessor"). A name that is
    another class already is refused unless `replace`."""
    if kind not in _REGISTERED:
        raise UnknownName("kind of custom class", kind, _REGISTERED)
    taken = _REGISTERED[kind].get(name, cls)
    if taken is not cls and not replace:
        raise ConfigError(
            f"register_{kind}: {name!r} is {taken.__module__}:{taken.__qualname__} already and would become "
            f"{cls.__module__}:{cls.__qualname__}; choose another name, or say replace=True"
        )
    _REGISTERED[kind][name] = cls


def find_class(kind: str, name: Any) -> Any:
    """The class behind a config's `custom_*` value: a class, a registered name, or "module:Name"."""
    if callable(name):
        return name
    if name in _REGISTERED[kind]:
        return _REGISTERED[kind][name]
    module_name, _, attribute = str(name).partition(":")
    if not attribute:
        raise UnknownName(f"custom_{kind}", str(name), _REGISTERED[kind], 'or write "module:Name"')
    try:
        module = importlib.import_module(module_name)
    except ImportError as e:
        raise ConfigError(f"custom_{kind} {name!r}: module {module_name!r} cannot be imported ({e})") from e
    if not hasattr(module, attribute):
        raise UnknownName(f"custom_{kind}", attribute, [n for n in dir(module) if not n.startswith("_")], module_name)
    return getattr(module, attribute)


def _make_preprocessor(space: Space, config: ModelConfig) -> nn.Module:
    made = find_class("preprocessor", config.custom_preprocessor)(space, **config.custom_options)
    if not isinstance(made, nn.Module) or not isinstance(getattr(made, "space", None), Space):
        raise ConfigError(
            "a custom_preprocessor is an nn.Module with an attribute `space` (the bray.spec.Space it turns observations "
            f"into) and forward(obs) -> obs; {config.custom_preprocessor!r} made a {type(made).__name__}"
        )
    return made
