"""The `model` section of a config, and the function that builds what it describes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from bray.errors import ConfigError, UnknownName
from bray.nn.encoders import CONV_NAMES, find_class, read_filters, register
from bray.nn.heads import ActorCritic, ContinuousQ, QNetwork, SquashedGaussianActor
from bray.nn.layers import activation, read_layer
from bray.nn.recurrent import CELLS
from bray.spec import EnvSpec, Space

INITS = ("orthogonal", "torch")


@dataclass(frozen=True)
class ModelConfig:
    """What a network looks like. Which keys act depends on the observation: see the table in `bray.nn.encoders`."""

    fcnet_hiddens: tuple[int, ...] = (64, 64)
    """Widths of the dense layers after vector observations, and after the joined features of a Dict or Tuple. (RLlib: 256, 256.)"""
    fcnet_activation: str = "tanh"
    """After each dense layer: relu, tanh, sigmoid, softmax, leakyrelu, elu, silu, gelu, none."""
    conv_filters: Any = None
    """Convolutions for images: [[channels, [kernel height, width], stride], ...], or "nature" (Mnih 2015), "impala" (Espeholt 2018).
    Given filters are padded so that a side n becomes ceil(n / stride), all but the last, as in RLlib. null: a net that fits the size
    (nature from 64 x 64 on)."""
    conv_activation: str = "relu"
    """After each convolution and after the dense layer that follows them."""
    conv_features: int | None = None
    """Width of the dense layer after the convolutions; 0 for none. null: 512, impala 256, none where given filters end in 1 x 1."""
    dim: int | None = None
    """Resize images to dim x dim inside the model (bilinear). null: as they come."""
    zero_mean: bool = False
    """Scale bytes of images to [-1, 1] in place of [0, 1]."""
    free_log_std: bool = True
    """Gaussian actions: log_std is a parameter of its own. False: the network computes it from the observation. (RLlib: False.)"""
    log_std_init: float = 0.0
    """Where log_std starts."""
    vf_share_layers: bool | None = None
    """Policy and value read the same features. null: yes for images and LSTMs, no for dense networks."""
    use_lstm: bool = False
    """Put a recurrent cell between the encoder and the heads."""
    recurrent: str = "lstm"
    """Which cell `use_lstm` means: lstm or gru."""
    lstm_cell_size: int = 256
    """Width of the recurrent state."""
    max_seq_len: int = 20
    """Longest sequence a recurrent model is trained on; longer ones are cut by the learner."""
    normalize_observations: bool = False
    """First layer: subtract the running mean of vector observations of real numbers, divide by their running deviation, clip at 10."""
    layer_norm: bool = False
    """LayerNorm before the activation of each dense layer."""
    init: str = "orthogonal"
    """First weights: orthogonal (gain sqrt 2; policy 0.01, value 1; zero biases) or torch (PyTorch's defaults)."""
    layers: list[dict[str, Any]] | None = None
    """The encoder as a list of {layer_type, layer_dim, activation, ...} in place of fcnet_hiddens and conv_filters. Types: linear,
    noisy_linear (its noise is an input of the model: `bray.nn.noise`), conv2d, pooling, flatten, norm, embed, none."""
    custom_model: Any = None
    """Your model: a class, a name given to `register_model`, or "module:Name"; built as Name(spec, config, **custom_options)."""
    custom_preprocessor: Any = None
    """Your first layer, likewise: Name(space, **custom_options), an nn.Module with `space` (what it turns observations into)."""
    custom_options: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments for custom_model and custom_preprocessor."""

    def __post_init__(self) -> None:
        hiddens = self.fcnet_hiddens
        if not isinstance(hiddens, (list, tuple)) or not all(_natural(n) for n in hiddens):
            raise ConfigError(f"fcnet_hiddens should be a list of positive integers, got {hiddens!r}")
        for key in ("lstm_cell_size", "max_seq_len", *(["dim"] if self.dim is not None else [])):
            if not _natural(getattr(self, key)):
                raise ConfigError(f"{key} should be a positive integer, got {getattr(self, key)!r}")
        if self.conv_features is not None and not (_natural(self.conv_features) or self.conv_features == 0):
            raise ConfigError(f"conv_features should be null, 0 or a positive integer, got {self.conv_features!r}")
        activation(self.fcnet_activation), activation(self.conv_activation)
        for key, known in (("recurrent", CELLS), ("init", INITS)):
            if getattr(self, key) not in known:
                raise UnknownName(f"value of {key}", str(getattr(self, key)), known)
        if isinstance(self.conv_filters, str):
            if self.conv_filters not in CONV_NAMES:
                raise UnknownName("convolution net", self.conv_filters, CONV_NAMES, "conv_filters")
        elif self.conv_filters is not None:
            read_filters(self.conv_filters)
        if self.layers is not None:
            if not isinstance(self.layers, (list, tuple)) or not self.layers:
                raise ConfigError(f"layers should be a list of at least one layer, or null, got {self.layers!r}")
            for i, layer in enumerate(self.layers):
                activation(read_layer(i, layer)[2])


def _natural(n: Any) -> bool:
    return isinstance(n, int) and not isinstance(n, bool) and n > 0


def register_model(name: str, cls: type, replace: bool = False) -> None:
    """Let configs say `custom_model: name`."""
    register("model", name, cls, replace)


def register_preprocessor(name: str, cls: type, replace: bool = False) -> None:
    """Let configs say `custom_preprocessor: name`."""
    register("preprocessor", name, cls, replace)


_KINDS: dict[str, Any] = {
    "actor_critic": ActorCritic,
    "q": QNetwork,
    "squashed_gaussian": SquashedGaussianActor,
    "continuous_q": ContinuousQ,
}


def make_model(kind: str, spec: EnvSpec, config: ModelConfig, **options: Any) -> nn.Module:
    """The model of an algorithm, or the user's `custom_model` in its place (checked on one batch to return what the algorithm
    reads). Kinds: actor_critic, q, squashed_gaussian, continuous_q; `options` go to the class of that kind."""
    if kind not in _KINDS:
        raise UnknownName("kind of model", kind, _KINDS)
    if config.custom_model is None or kind == "continuous_q":  # critics of SAC are private to its Learner
        return _KINDS[kind](spec, config, **options)
    model = find_class("model", config.custom_model)(spec, config, **config.custom_options)
    _check_outputs(model, kind, spec, config)
    return model


def _check_outputs(model: Any, kind: str, spec: EnvSpec, config: ModelConfig) -> None:
    if not isinstance(model, nn.Module):
        raise ConfigError(
            f"custom_model {config.custom_model!r} should make an nn.Module, it made {type(model).__name__}"
        )
    batch = 2
    want = _KINDS[kind].outputs(spec, batch)
    initial_state: Any = getattr(model, "initial_state", None)
    args: list[Any] = [example_obs(spec.observation, batch)]
    if config.use_lstm:
        if initial_state is None:
            raise ConfigError(
                "use_lstm with a custom_model: it needs initial_state(batch_size) and forward(obs, state)"
            )
        args.append(initial_state(batch))
    with torch.no_grad():
        out = model(*args)
    got = {k: tuple(getattr(v, "shape", ())) for k, v in out.items()} if isinstance(out, dict) else type(out).__name__
    if not isinstance(got, dict) or any(got.get(k) != shape for k, shape in want.items()):
        raise ConfigError(
            f"custom_model {config.custom_model!r} should return a dict with {want} for a batch of {batch}, got {got}"
        )
    if config.use_lstm and "state" not in out:
        raise ConfigError(f"use_lstm with a custom_model: its outputs need 'state', got {sorted(out)}")


def example_obs(space: Space, batch_size: int) -> Any:
    """A batch of zeros (first choices) of an observation space, as tensors `[B, ...]`: to record, check or export a model."""
    if space.kind == "dict":
        return {name: example_obs(part, batch_size) for name, part in space.items}
    if space.kind == "tuple":
        return tuple(example_obs(part, batch_size) for part in space.parts)
    x = torch.zeros(batch_size, *space.shape, dtype=getattr(torch, space.dtype))
    if space.start:
        x = x + torch.tensor(space.start).reshape(space.shape)
    return x
