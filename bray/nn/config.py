"""The `model` section of a config."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any

from annotated_types import Interval

from bray.config.check import check_fields
from bray.config.declare import Count, Needs, Secret, Whole
from bray.errors import ConfigError, UnknownName
from bray.nn.layers import activation, read_layer
from bray.nn.merge import MERGES
from bray.nn.recurrent import CELLS

CONV_NAMES = ("nature", "impala")
Filter = tuple[int, tuple[int, int], int]  # channels out, kernel, stride
INITS = ("orthogonal", "torch")


@dataclass(frozen=True)
class ModelConfig:
    """What a network looks like. Which keys have an effect depends on the observation: see the table in
    `bray.nn.encoders`."""

    fcnet_hiddens: tuple[Count, ...] = (64, 64)
    """Widths of the dense layers after vector observations, and after the joined features of a Dict or Tuple. (RLlib:
    256, 256.)"""
    fcnet_activation: str = "tanh"
    """After each dense layer: relu, tanh, sigmoid, softmax, leakyrelu, elu, silu, gelu, none."""
    conv_filters: Any = None
    """Convolutions for images: [[channels, [kernel height, width], stride], ...], or "nature" (Mnih 2015), "impala"
    (Espeholt 2018).
    Given filters are padded so that a side n becomes ceil(n / stride), all but the last, as in RLlib. null: a net that
    fits the size (nature from 64 x 64 on)."""
    conv_activation: str = "relu"
    """After each convolution and after the dense layer that follows them."""
    conv_features: Whole | None = None
    """Width of the dense layer after the convolutions; 0 for none. null: 512, impala 256, 128 for images below 12
    pixels a side, none where given filters end in 1 x 1."""
    dim: Count | None = None
    """Resize images to dim x dim inside the model (bilinear). null: as they come."""
    zero_mean: bool = False
    """Scale bytes of images to [-1, 1] in place of [0, 1]."""
    free_log_std: bool = True
    """Gaussian actions: log_std is a parameter of its own. False: the network computes it from the observation. (RLlib:
    False.)"""
    log_std_init: Annotated[float, Interval(ge=-20, le=20)] = 0.0
    """Where log_std starts."""
    vf_share_layers: bool | None = None
    """Policy and value read the same features. null: yes for images and LSTMs, no for dense networks."""
    use_lstm: bool = False
    """Put a recurrent cell between the encoder and the heads: a policy with memory."""
    recurrent: Annotated[str, Needs("use_lstm")] = "lstm"
    """Which memory `use_lstm` means: lstm, gru, or gtrxl (a gated transformer over the last `attention_window`
    steps)."""
    lstm_cell_size: Count = 256
    """Width of the recurrent state; of each of its rows with gtrxl."""
    attention_window: Count = 32
    """Past steps that recurrent: gtrxl sees; its state is that many rows."""
    attention_layers: Count = 1
    """Layers of attention: over time (recurrent: gtrxl) and among the things of `entities`."""
    attention_heads: Count = 4
    """Heads of each layer of attention; they divide its width."""
    entities: dict[str, Any] | None = None
    """Members of the observation that are lists of things, Box [things, features], encoded by attention so that their
    order does not matter:
    {units: units_mask} names the member that is 1 where there is a thing; {units: zeros} takes rows of zeros for
    absent, {units: null} all for present. {units: {mask: units_mask, onto: screen, at: [0, 1]}} also draws each onto
    the picture `screen`, at the row and column that its features 0 and 1 say. An observation that is such a list itself
    is called obs."""
    entity_width: Count = 64
    """Width of the embedding of each thing of `entities`."""
    merge: str = "concat"
    """How the members of a Dict or Tuple are joined: concat, film (the others modulate the first, a picture where there
    is one), bilinear (products of features), gate (weights that all members choose). All but concat give a vector as
    wide as the first of fcnet_hiddens."""
    embedding_dim: Count | None = None
    """Discrete and MultiDiscrete observations: a learnt vector of this width for each choice. null: one-hot."""
    recurrent_norm: bool = False
    """LayerNorm inside the recurrent cell (Ba et al. 2016)."""
    max_seq_len: Count = 32
    """Longest sequence a recurrent model is trained on (PPO, A2C): rollouts are cut into equal sequences of the longest
    length up to this that divides `rollout_length`; a warning says so where that is less. (RLlib: 20.)"""
    normalize_observations: bool = False
    """Standardise observations by their running mean and standard deviation (Gymnasium: NormalizeObservation): vectors
    of real numbers, clipped at 10, and each pixel of pictures, clipped at 5, instead of dividing by 255 (`zero_mean`).
    In pictures whose background stands still, what moves then stands out."""
    layer_norm: bool = False
    """LayerNorm before the activation of each dense layer."""
    init: str = "orthogonal"
    """First weights: orthogonal (gain sqrt 2; policy 0.01, value 1; zero biases) or torch (PyTorch's defaults)."""
    layers: list[dict[str, Any]] | None = None
    """The encoder as a list of {layer_type, layer_dim, activation, ...} in place of fcnet_hiddens and conv_filters.
    Types: linear, noisy_linear (its noise is an input of the model: `bray.nn.noise`), conv2d, residual (dense or 3 x 3,
    by what it gets), pooling, flatten, norm, embed, none."""
    custom_model: Any = None
    """Your network: "module:Name", a class, an instance, or a name given to `register_model`. Built as Name(spec,
    config, **custom_options), or as Name(obs_dim, act_dim) where its parameters are called like that; see
    docs/networks.md."""
    custom_preprocessor: Any = None
    """Your first layer, named in the same ways: a function obs -> obs of tensors [B, ...], or Name(space,
    **custom_options), an nn.Module whose attribute `space` describes its outputs. It is a part of the Model: training,
    evaluation, serving and the exported graph have it alike."""
    custom_options: Annotated[dict[str, Any], Secret(inside=True)] = field(default_factory=dict)
    """Keyword arguments for custom_model and custom_preprocessor."""
    loss_terms: dict[str, float] = field(default_factory=dict)
    """Terms of your own in the loss of the Model, each with its weight: {"module:function": 0.1}. function(batch,
    outputs, model) returns a number, or one per row, or a pair of that and a dict of numbers for the result rows
    (`loss/NAME`). Weight 0: numbers only."""

    def __post_init__(self) -> None:
        check_fields(self, "model")
        activation(self.fcnet_activation), activation(self.conv_activation)
        for key, known in (("recurrent", (*CELLS, "gtrxl")), ("init", INITS), ("merge", MERGES)):
            if getattr(self, key) not in known:
                raise UnknownName(f"value of {key}", str(getattr(self, key)), known)
        if isinstance(self.conv_filters, str):
            if self.conv_filters not in CONV_NAMES:
                raise UnknownName("convolution net", self.conv_filters, CONV_NAMES, "conv_filters")
        elif self.conv_filters is not None:
            read_filters(self.conv_filters)
        for name, how in (self.entities or {}).items():
            read_entities(name, how)
        if self.layers is not None:
            if not isinstance(self.layers, (list, tuple)) or not self.layers:
                raise ConfigError(f"layers should be a list of at least one layer, or null, got {self.layers!r}")
            for i, layer in enumerate(self.layers):
                activation(read_layer(i, layer)[2])


@dataclass(frozen=True)
class Entities:
    """What `entities` says of one member."""

    mask: str | None = None
    """The member that is 1 where there is a thing; "zeros": rows of zeros are absent; None: all are there."""
    onto: str | None = None
    """The picture that each is drawn onto."""
    at: tuple[int, int] | None = None
    """The features that say where, in cells of the picture: row, column."""


def read_entities(name: str, how: Any) -> Entities:
    """An entry of `entities`, checked."""
    if how is None or isinstance(how, str):
        return Entities(how)
    wrong = ConfigError(
        f"entities.{name} should be the name of a mask, zeros, null, or {{mask: ..., onto: picture, at: [row feature, "
        f"column feature]}}, got {how!r}"
    )
    if not isinstance(how, dict) or not how.keys() <= {"mask", "onto", "at"} or ("onto" in how) != ("at" in how):
        raise wrong
    at = how.get("at")
    if at is not None and not (
        isinstance(at, (list, tuple)) and len(at) == 2 and all(type(i) is int and i >= 0 for i in at)
    ):
        raise wrong
    return Entities(how.get("mask"), how.get("onto"), None if at is None else (at[0], at[1]))


def read_filters(filters: Any) -> list[Filter]:
    """`[[channels, [kernel height, width], stride], ...]` checked; a kernel may be one number."""
    out: list[Filter] = []
    for i, entry in enumerate(filters if isinstance(filters, (list, tuple)) else [filters]):
        ok = isinstance(entry, (list, tuple)) and len(entry) == 3
        if ok:
            channels, kernel, stride = entry
            kernel = (kernel, kernel) if isinstance(kernel, int) else kernel
            ok = isinstance(kernel, (list, tuple)) and len(kernel) == 2
            ok = ok and all(
                isinstance(n, int) and not isinstance(n, bool) and n > 0 for n in (channels, stride, *kernel)
            )
        if not ok:
            raise ConfigError(
                f"conv_filters[{i}] should be [channels, [kernel height, kernel width], stride], like [16, [8, 8], 4], "
                f"got {entry!r}. Or name a net: {', '.join(CONV_NAMES)}."
            )
        out.append((channels, (kernel[0], kernel[1]), stride))
    if not out:
        raise ConfigError("conv_filters is empty: give at least one filter, or null for a net that fits the image")
    return out
