"""Encoders: an observation tree of any Space -> features `[B, F]`.

Each leaf of the observation has a *stem*, and the stems' outputs are joined (`merge`):

| leaf                                | stem                                                                           |
|-------------------------------------|--------------------------------------------------------------------------------|
| box of rank 3 or 4, uint8 box of rank 2 | convolutions: `conv_filters`, or a net that fits the size; RunningNorm if
asked, else uint8 is divided by its upper bound | | any other box                       | flattened to float32; uint8
bounded by 255 is divided by 255; RunningNorm if asked | | box named in `entities`             | attention among its
rows, and its mask                                         | | discrete, multi_discrete            | one-hot, or learnt
vectors (`embedding_dim`)                                   |
| multi_binary                        | flattened to float32                                                           |

Unless the observation is one image, the dense layers `fcnet_hiddens` follow. An image is `[C, H, W]` or `[H, W, C]`:
the two equal sides are taken for height and width, else the smaller of the first and last axis for the channels.
Stacked images (`env.frame_stack`) have one axis more, the first; theirs are channels of one.
The member `action_mask` of a Dict is for the Policy and never enters a network.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bray import tree
from bray.errors import ConfigError, UnknownName
from bray.nn.config import CONV_NAMES, Entities, Filter, ModelConfig, read_entities, read_filters
from bray.nn.layers import HIDDEN_GAIN, MLP, LayerStack, ResidualConv, activation, conv_out, init_layer, linear
from bray.nn.merge import Merge
from bray.nn.normalize import RunningNorm
from bray.nn.own import make_preprocessor
from bray.nn.stems import DRAWN, EmbeddingStem, EntityStem
from bray.spec import ACTION_MASK, Space

NATURE: list[Filter] = [(32, (8, 8), 4), (64, (4, 4), 2), (64, (3, 3), 1)]
"""The convolutions of Mnih 2015, without padding: 84 x 84 -> 64 x 7 x 7."""
DENSE = 512
"""Width of the dense layer behind them."""
IMPALA = (16, 32, 32)
"""Channels of the residual sections of Espeholt 2018."""
PIXEL_CLIP = 5.0
"""Where normalised pixels end, in standard deviations: one that hardly ever changes would be huge when it does (Burda
2018)."""


def default_filters(height: int, width: int) -> tuple[list[Filter], str, int]:
    """Default convolutions, their padding and the width of the dense layer behind them, for an image size; sides shrink
    from 84 to 7, 42 to 7, 24 to 4, 10 to 8. Boards of a few cells get the network that came with MinAtar (Young & Tian
    2019)."""
    side = min(height, width)
    if side >= 64:
        return NATURE, "valid", DENSE
    if side >= 36:
        return [(32, (4, 4), 2), (64, (4, 4), 2), (64, (3, 3), 1)], "valid", DENSE
    if side >= 12:
        return [(32, (3, 3), 2), (64, (3, 3), 2), (64, (3, 3), 1)], "same", DENSE
    return [(16, (min(3, height), min(3, width)), 1)], "valid", 128


class Convs(nn.Module):
    """Convolutions in a row, `[B, C, H, W] -> [B, F]`. With padding "same" all but the last are padded so that a side
    of n becomes ceil(n / stride); the last one is not, so that a kernel of the remaining size makes 1 x 1 of it."""

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
                    f"conv_filters[{i}]: a kernel of {list(kernel)} does not fit the {sides[0]} x {sides[1]} that "
                    f"reach it from an image of {shape[1]} x {shape[2]}. Use smaller kernels or strides, or "
                    "conv_filters: null."
                )
            conv = nn.Conv2d(channels, out, kernel, stride, (before[0], before[1]))
            self.convs.append(init_layer(conv, HIDDEN_GAIN, init))
            channels, sides = out, new
        self.out_shape = (channels, sides[0], sides[1])
        self.out_features = math.prod(self.out_shape)
        _, kernel, stride = filters[0]
        fits = self.pads[0] is None and not any(n % stride for n in (*kernel, *shape[1:]))
        self.block = stride if fits and padding == "valid" else 1
        """The side of the `blocks` over which the first layer has stride 1; 1 = its stride does not divide its kernel
        and the picture."""

    def forward(self, x: Tensor, scale: float = 1.0, block: int = 1) -> Tensor:
        """Of `scale * x`: the few weights of the first layer are multiplied, not the many pixels. block: x comes in
        such `blocks`."""
        for i, (conv, pad) in enumerate(zip(self.convs, self.pads, strict=True)):
            assert isinstance(conv, nn.Conv2d)
            if pad is not None:
                x = F.pad(x, pad)
            if i == 0 and block > 1:
                x = self.act(F.conv2d(x, blocks(conv.weight * scale, block), conv.bias))
            elif i == 0 and scale != 1.0:
                x = self.act(F.conv2d(x, conv.weight * scale, conv.bias, conv.stride, conv.padding))
            else:
                x = self.act(conv(x))
        return x.flatten(1)


def blocks(x: Tensor, side: int) -> Tensor:
    """`[B, C, H, W] -> [B, side * C * side, H / side, W / side]`, channels last in memory: the pixels of each block as
    channels of one.

    A convolution whose stride divides its kernel is one of stride 1 between the blocks of both. GPUs are faster at
    that: four channels are too few for their matrix units."""
    b, c, h, w = x.shape
    rows, columns = h // side, w // side
    if x.dtype == torch.uint8 and side == 4 and x.is_contiguous() and x.storage_offset() % 4 == 0:
        words = x.view(torch.int32)  # four bytes that stay together move as one number
        x = words.view(b, c, rows, side, columns).permute(0, 2, 4, 3, 1).contiguous().view(torch.uint8)
    else:
        x = x.reshape(b, c, rows, side, columns, side).permute(0, 2, 4, 3, 1, 5)
    return x.reshape(b, rows, columns, -1).permute(0, 3, 1, 2)


class Impala(nn.Module):
    """The residual network of Espeholt 2018, `[B, C, H, W] -> [B, F]`: three sections of a convolution, a pooling that
    halves the sides, and two residual blocks."""

    def __init__(self, shape: tuple[int, int, int], act: str, init: str = "orthogonal"):
        super().__init__()
        self.act = activation(act)
        sections: list[nn.Module] = []
        channels, h, w = shape
        for out in IMPALA:
            sections += [init_layer(nn.Conv2d(channels, out, 3, padding=1), HIDDEN_GAIN, init), nn.MaxPool2d(3, 2, 1)]
            sections += [ResidualConv(out, act, init) for _ in range(2)]
            channels, h, w = out, -(-h // 2), -(-w // 2)
        self.sections = nn.Sequential(*sections)
        self.out_shape = (channels, h, w)
        self.out_features = channels * h * w

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.sections(x)).flatten(1)


class ImageInput(nn.Module):
    """An image leaf as float32 `[B, C, H, W]`: each pixel normalised if that is asked for, else uint8 scaled; axes in
    order; resized to `dim` if that is asked for."""

    def __init__(self, space: Space, config: ModelConfig):
        super().__init__()
        a, b, c = space.shape[-3:] if len(space.shape) > 2 else (1, *space.shape)
        self.add_channel = len(space.shape) == 2
        self.stack = space.shape[0] if len(space.shape) == 4 else None
        self.channels_last = b != c and (a == b or c < a)
        channels, h, w = (c, a, b) if self.channels_last else (a, b, c)
        is_bytes = space.dtype == "uint8"
        largest = float(space.bounds()[1].max()) if is_bytes else 1.0
        largest = largest if 0.0 < largest < 255.0 else 255.0
        self.norm = RunningNorm(space.shape, PIXEL_CLIP) if config.normalize_observations else None
        if self.norm is not None and is_bytes:  # until there are statistics: as if all values were as frequent
            self.norm.shift.fill_(largest / 2)
            self.norm.scale.fill_(math.sqrt(12) / largest)
        self.bytes = is_bytes and self.norm is None
        self.zero_mean = config.zero_mean and self.bytes
        self.scale = (2.0 if self.zero_mean else 1.0) / largest
        self.size = (config.dim, config.dim) if config.dim and (h, w) != (config.dim, config.dim) else None
        self.out_shape = (channels * (self.stack or 1), *(self.size or (h, w)))
        self.plain = False
        """Without the layouts of memory with which convolutions are faster: `torch.vmap` takes none of them."""

    def forward(self, x: Tensor, scaled: bool = True, block: int = 1) -> Tensor:
        """With scaled=False bytes stay numbers up to 255, and the caller multiplies by `scale`. block: as `blocks` of
        this side."""
        if self.norm is not None:
            x = self.norm(x)
        if self.add_channel:
            x = x.unsqueeze(1)
        if self.channels_last:
            x = x.movedim(-1, -3)
        if self.stack is not None:
            x = x.flatten(1, 2)
        if block > 1:
            x = blocks(x, block)
        # Channels last: convolutions are 1.2x faster so. Straight to the precision they run in: pictures are large,
        # passes over them cost.
        kind = x.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else torch.float32
        x = x.to(dtype) if self.plain else x.to(dtype, memory_format=torch.channels_last)
        if self.bytes and scaled:
            x = x * self.scale
        if self.zero_mean:
            x = x - 1.0
        if self.size is not None:
            x = F.interpolate(x, self.size, mode="bilinear")
        return x


class ImageStem(nn.Module):
    """Convolutions and, unless given filters end in 1 x 1, a dense layer of `conv_features`. `drawn`: channels that
    come beside the picture's."""

    def __init__(self, space: Space, config: ModelConfig, drawn: int = 0):
        super().__init__()
        self.input = ImageInput(space, config)
        channels, *sides = self.input.out_shape
        shape, act, init = (channels + drawn, sides[0], sides[1]), config.conv_activation, config.init
        width = config.conv_features
        if config.conv_filters == "impala":
            self.convs: Convs | Impala = Impala(shape, act, init)
            width = width or 256
        elif config.conv_filters == "nature":
            self.convs = Convs(shape, NATURE, act, "valid", init)
        elif isinstance(config.conv_filters, str):
            raise UnknownName("convolution net", config.conv_filters, CONV_NAMES, "conv_filters")
        elif config.conv_filters is None:
            filters, padding, features = default_filters(*shape[1:])
            self.convs = Convs(shape, filters, act, padding, init)
            width = features if width is None else width
        else:
            self.convs = Convs(shape, read_filters(config.conv_filters), act, "same", init)
            if self.convs.out_shape[1:] == (1, 1) and width is None:
                width = 0
        self.folds = isinstance(self.convs, Convs) and self.input.bytes and not self.input.zero_mean
        width = DENSE if width is None else width
        self.dense = linear(self.convs.out_features, width, init=init) if width else None
        self.norm = nn.LayerNorm(width) if width and config.layer_norm else None
        self.act = activation(act)
        self.out_features = width or self.convs.out_features

    def forward(self, x: Tensor, *drawn: Tensor) -> Tensor:
        if drawn or not isinstance(self.convs, Convs):
            x = self.convs(torch.cat([self.input(x), *drawn], 1))
        else:
            block = self.convs.block if x.is_cuda and self.input.size is None and not self.input.plain else 1
            scale = self.input.scale if self.folds else 1.0
            x = self.convs(self.input(x, scaled=not self.folds, block=block), scale, block)
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
    """Choices as one-hot vectors, joined. No `F.one_hot`: it looks at the data to check it, which cannot be
    recorded."""

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
    """Whether a leaf is treated as an image: rank 3, rank 4 (several, stacked), or rank 2 with uint8 values or with
    `conv_filters`."""
    if space.kind != "box" or (config.layers is not None and not _conv_layers(config)):
        return False
    return len(space.shape) in (3, 4) or (
        len(space.shape) == 2
        and (space.dtype == "uint8" or config.conv_filters is not None or config.layers is not None)
    )


def sees_image(space: Space, config: ModelConfig) -> bool:
    """Whether any leaf of an observation goes through convolutions."""
    if config.custom_preprocessor is not None:
        space = make_preprocessor(space, config).space  # type: ignore[assignment]
    return any(is_image(leaf, config) for keys, leaf in obs_leaves(space) if _name(keys) not in (config.entities or {}))


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


def _name(keys: tuple[Any, ...]) -> str:
    """How a config names a member: `units`, `enemy/units`, `0`; `obs` for an observation that is no Dict or Tuple."""
    return "/".join(map(str, keys)) or "obs"


def _leaf(obs: Any, keys: tuple[Any, ...]) -> Any:
    for key in keys:
        obs = obs[key]
    return obs


def _without(items: list[Any], i: int) -> list[Any]:
    return [*items[:i], *items[i + 1 :]]


def _read_entities(space: Space, config: ModelConfig) -> tuple[dict[str, Entities], dict[str, tuple[Any, ...]]]:
    """The lists of things by name, and where the masks of those that have one are."""
    leaves = {_name(keys): (keys, leaf) for keys, leaf in obs_leaves(space)}
    found = {name: read_entities(name, how) for name, how in (config.entities or {}).items()}
    masks: dict[str, tuple[Any, ...]] = {}
    for name, how in found.items():
        if name not in leaves:
            raise UnknownName("member of the observation", name, leaves, "entities")
        if how.mask is None or how.mask == "zeros":
            continue
        if how.mask not in leaves:
            raise UnknownName("member of the observation", how.mask, leaves, f"entities.{name}")
        keys, leaf = leaves[how.mask]
        if leaf.shape != leaves[name][1].shape[:1]:
            raise ConfigError(
                f"entities.{name}: the mask {how.mask} should have one number for each of the things of {name} "
                f"{list(leaves[name][1].shape)}, it has the shape {list(leaf.shape)}"
            )
        masks[name] = keys
    return found, masks


class Features(nn.Module):
    """All leaves of an observation through their stems, joined: obs tree -> `[B, F]`."""

    def __init__(self, space: Space, config: ModelConfig):
        super().__init__()
        self.preprocessor: nn.Module | None = None
        self.raw_space = space
        if config.custom_preprocessor is not None:
            self.preprocessor = make_preprocessor(space, config)
            space = self.preprocessor.space  # type: ignore[assignment]  # checked to be a Space
        self.space = space
        entities, self.masks = _read_entities(space, config)
        masks = {_name(keys) for keys in self.masks.values()}
        self.leaves = tuple(item for item in obs_leaves(space) if _name(item[0]) not in masks)
        if not self.leaves:
            raise ConfigError(f"the observation has no member to learn from besides {ACTION_MASK!r}: {space.names}")
        self.names = [_name(keys) for keys, _ in self.leaves]
        self.onto = {name: how.onto for name, how in entities.items() if how.onto is not None}
        self.stems = nn.ModuleList(
            self._stem(name, leaf, entities, config) for name, (_, leaf) in zip(self.names, self.leaves, strict=True)
        )
        # lists of things first: pictures may show them
        self.order = sorted(range(len(self.stems)), key=lambda i: not isinstance(self.stems[i], EntityStem))
        self.has_image = any(isinstance(stem, ImageStem) for stem in self.stems)
        self.only_image = self.has_image and len(self.stems) == 1
        sizes: list[int] = [stem.out_features for stem in self.stems]  # type: ignore[misc]
        self.main = next((i for i, stem in enumerate(self.stems) if isinstance(stem, ImageStem)), 0)
        self.merge: Merge | None = None
        if config.merge != "concat" and len(sizes) > 1:
            width = (*config.fcnet_hiddens, 64)[0]
            self.merge = Merge(config.merge, [sizes[self.main], *_without(sizes, self.main)], width)
        self.out_features: int = sum(sizes) if self.merge is None else self.merge.out_features

    def _stem(self, name: str, leaf: Space, entities: dict[str, Entities], config: ModelConfig) -> nn.Module:
        if name in entities:
            return EntityStem(name, leaf, entities[name], config, self._picture(name, entities[name], config))
        if leaf.kind in ("discrete", "multi_discrete"):
            return OneHotStem(leaf) if config.embedding_dim is None else EmbeddingStem(leaf, config.embedding_dim)
        if is_image(leaf, config):
            return ImageStem(leaf, config, DRAWN * list(self.onto.values()).count(name))
        if leaf.kind in ("box", "multi_binary"):
            return VectorStem(leaf, config.normalize_observations)
        where = "the observation" if name == "obs" else name
        raise ConfigError(f"{where} has kind {leaf.kind!r}, which no encoder takes; convert it to a Box")

    def _picture(self, name: str, how: Entities, config: ModelConfig) -> tuple[int, ...] | None:
        """Shape `[C, H, W]` of the picture that a list of things is drawn onto."""
        if how.onto is None:
            return None
        pictures = {n: leaf for n, (_, leaf) in zip(self.names, self.leaves, strict=True) if is_image(leaf, config)}
        if how.onto not in pictures:
            raise UnknownName("picture", how.onto, pictures, f"entities.{name}.onto")
        if config.dim is not None:
            raise ConfigError(f"entities.{name}.onto: places are cells of the picture as it comes; leave out `dim`")
        return ImageInput(pictures[how.onto], config).out_shape

    def forward(self, obs: Any) -> Tensor:
        if self.preprocessor is not None:
            obs = self.preprocessor(obs)
        parts: list[Any] = [None] * len(self.stems)
        drawn: dict[str, list[Tensor]] = {}
        for i in self.order:
            name, stem, x = self.names[i], self.stems[i], _leaf(obs, self.leaves[i][0])
            if not isinstance(stem, EntityStem):
                parts[i] = stem(x, *drawn.get(name, ()))
                continue
            parts[i], channels = stem(x, _leaf(obs, self.masks[name]) if name in self.masks else None)
            if channels is not None:
                drawn.setdefault(self.onto[name], []).append(channels)
        if self.merge is not None:
            return self.merge(parts[self.main], *_without(parts, self.main))
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
            norm = (
                stem.norm if isinstance(stem, VectorStem) else stem.input.norm if isinstance(stem, ImageStem) else None
            )
            if norm is not None:
                norm.update(_leaf(obs, keys), weight)


class Encoder(nn.Module):
    """Features, then dense layers: obs tree -> `[B, out_features]`."""

    def __init__(self, space: Space, config: ModelConfig):
        super().__init__()
        self.input: ImageInput | None = None  # set when a list of layers takes the leaf itself: an image or an index
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

    def update_norms(self, obs: Any, weight: Any = None) -> None:
        """As that of `Features`, for the image that a list of layers takes."""
        if self.input is not None and self.input.norm is not None:
            self.input.norm.update(_leaf(obs, self.keys), weight)

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
