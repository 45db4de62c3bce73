"""Models: an encoder and the heads that algorithms read.

All return dicts: `ActorCritic` {"dist", "value"}, `QNetwork` {"q"} (and {"logits"} or {"quantiles"}),
`ImplicitQuantiles` {"q"}, `Actor`, `SquashedGaussianActor` and `CategoricalActor` {"dist"}, `DeterministicActor`
{"mu"}. With `use_lstm` the first two and `Actor` take and return a state. With noisy layers they take draws
(`bray.nn.noise`) after the observation and the state. Action masks are not applied here but beside the environment and
in losses, so that an exported model is the same for both.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from bray.errors import ConfigError
from bray.nn.config import ModelConfig
from bray.nn.encoders import Encoder, Features, make_encoder, sees_image
from bray.nn.gtrxl import GTrXL, Memory
from bray.nn.layers import HIDDEN_GAIN, Towers, activation, joint_linear, linear
from bray.nn.noise import Draws, NoisyLinear, Shapes, noise_shapes, with_noise
from bray.nn.recurrent import Recurrent, State
from bray.rl.transforms import distort
from bray.spec import EnvSpec

FRACTIONS = "fractions"
POLICY_GAIN, VALUE_GAIN = 0.01, 1.0
LOG_STD_MIN, LOG_STD_MAX = -5.0, 2.0


class Headed(nn.Module):
    """Base of our models: `core` encodes observations to features, `heads` computes the outputs from them."""

    @staticmethod
    def outputs(spec: EnvSpec, batch: int) -> Shapes:
        """Shapes of the outputs that algorithms read, for a batch; a `custom_model` must return the same."""
        return {}

    def __init__(self, core: nn.Module):
        super().__init__()
        self.core = core
        self.recurrent = isinstance(core, Memory)

    def heads(self, x: Tensor) -> dict[str, Any]:
        raise NotImplementedError

    @property
    def draws(self) -> Shapes:
        """The random numbers that its noisy layers take; empty for most models."""
        return noise_shapes(self)

    def forward(self, obs: Any, state: State | None = None, draws: Draws | None = None) -> dict[str, Any]:
        """obs tree `[B, ...]` (and the state before it, if recurrent) -> outputs `[B, ...]` (and the state after). A
        model without memory takes its draws as the second argument."""
        if not self.recurrent:
            with with_noise(self, state if draws is None else draws):
                return self.heads(self.core(obs))
        with with_noise(self, draws):
            x, state = self.core(obs, state)
            return {**self.heads(x), "state": state}

    def initial_state(self, batch_size: int) -> State:
        """Zeros for each of `batch_size` environments; an empty dict for a model without memory."""
        return self.core.initial_state(batch_size) if isinstance(self.core, Memory) else {}

    def unroll(self, obs: Any, state: State, first: Tensor, draws: Draws | None = None) -> dict[str, Any]:
        """obs `[T, B, ...]`, state before row 0, `first [T, B]` (episode starts: state zeroed) -> outputs `[T, B, ...]`
        and the last state. One draw of noise is for all T rows."""
        if not isinstance(self.core, Memory):
            raise ConfigError("unroll() is for recurrent models: set use_lstm, or call the model on rows")
        with with_noise(self, draws):
            x, state = self.core.unroll(obs, state, first)
            outputs = self.heads(x.flatten(0, 1))
        return {**{k: v.unflatten(0, first.shape) for k, v in outputs.items()}, "state": state}


def _core(spec: EnvSpec, config: ModelConfig) -> Encoder | Memory:
    encoder = make_encoder(spec.observation, config)
    if not config.use_lstm:
        return encoder
    if config.recurrent == "gtrxl":
        sizes = (config.attention_window, config.attention_layers, config.attention_heads)
        return GTrXL(encoder, config.lstm_cell_size, *sizes)
    return Recurrent(encoder, config.recurrent, config.lstm_cell_size, config.recurrent_norm)


class TwoEncoders(nn.Module):
    """Separate encoders for the policy and the value; not one batched product, so that acting computes the first one
    only."""

    def __init__(self, spec: EnvSpec, config: ModelConfig):
        super().__init__()
        self.encoders = nn.ModuleList(make_encoder(spec.observation, config) for _ in range(2))
        self.out_features: int = self.encoders[0].out_features  # type: ignore[assignment]

    def forward(self, obs: Any) -> tuple[Tensor, Tensor]:
        return self.encoders[0](obs), self.encoders[1](obs)


def shares_layers(spec: EnvSpec, config: ModelConfig) -> bool:
    """Whether policy and value use the same features: as `vf_share_layers` says, or if it is None for images and
    LSTMs."""
    if config.use_lstm:
        if config.vf_share_layers is False:
            raise ConfigError("use_lstm needs vf_share_layers: true or null: policy and value read the same memory")
        return True
    if config.vf_share_layers is not None:
        return config.vf_share_layers
    return sees_image(spec.observation, config)


class ActorCritic(Headed):
    """obs -> {"dist": [B, layout.num_params], "value": [B]}.

    Gaussian parts have their mean from the network and their log_std from a parameter of its own (`free_log_std`) or
    from the network too. The policy's last layer starts 100 times smaller than the value's: the first policy is near
    uniform.
    """

    @staticmethod
    def outputs(spec: EnvSpec, batch: int) -> Shapes:
        return {"dist": (batch, spec.layout.num_params), "value": (batch,)}

    has_value = True

    def __init__(self, spec: EnvSpec, config: ModelConfig):
        shared = not self.has_value or shares_layers(spec, config)
        if shared:
            core: nn.Module = _core(spec, config)
        else:
            core = TwoEncoders(spec, config)
        super().__init__(core)
        self.shared = shared
        layout = spec.layout
        self.parts = layout.parts
        self.free = config.free_log_std and not layout.discrete
        dims = sum(p.n for p in layout.parts if p.kind == "gaussian")
        self.num_outputs = layout.num_params - (dims if self.free else 0)
        features = int(core.out_features)  # type: ignore[arg-type]
        if not self.has_value:
            self.policy = linear(features, self.num_outputs, POLICY_GAIN, config.init)
        elif shared:
            self.head = joint_linear(features, [self.num_outputs, 1], [POLICY_GAIN, VALUE_GAIN], config.init)
        else:
            self.policy = linear(features, self.num_outputs, POLICY_GAIN, config.init)
            self.value = linear(features, 1, VALUE_GAIN, config.init)
        if self.free:
            self.log_std = nn.Parameter(torch.full((dims,), float(config.log_std_init)))
        elif dims and config.log_std_init:
            bias = (self.head if shared and self.has_value else self.policy).bias
            with torch.no_grad():
                for part in layout.parts:
                    if part.kind == "gaussian":
                        bias[part.param.start + part.n : part.param.stop] += config.log_std_init

    def heads(self, x: Any) -> dict[str, Tensor]:
        if not self.has_value:
            out = self.policy(x)
            return {"dist": self._with_log_std(out) if self.free else out}
        if self.shared:
            out, value = self.head(x).split([self.num_outputs, 1], 1)
        else:
            out, value = self.policy(x[0]), self.value(x[1])
        return {"dist": self._with_log_std(out) if self.free else out, "value": value.squeeze(1)}

    def _with_log_std(self, out: Tensor) -> Tensor:
        log_std = self.log_std.expand(out.shape[0], -1)
        if len(self.parts) == 1:
            return torch.cat([out, log_std], 1)
        pieces, at, at_std = [], 0, 0
        for part in self.parts:
            pieces.append(out[:, at : at + part.n])
            at += part.n
            if part.kind == "gaussian":
                pieces.append(log_std[:, at_std : at_std + part.n])
                at_std += part.n
        return torch.cat(pieces, 1)


class Actor(ActorCritic):
    """obs -> {"dist": [B, layout.num_params]}: an `ActorCritic` without a value."""

    has_value = False

    @staticmethod
    def outputs(spec: EnvSpec, batch: int) -> Shapes:
        return {"dist": (batch, spec.layout.num_params)}


class StateValue(nn.Module):
    """What a critic sees, the global state beside the observation where the game declares one -> value `[B]`."""

    def __init__(self, spec: EnvSpec, config: ModelConfig):
        super().__init__()
        self.core = make_encoder(spec.given, config)
        self.value = linear(int(self.core.out_features), 1, VALUE_GAIN, config.init)

    def forward(self, obs: Any) -> Tensor:
        return self.value(self.core(obs)).squeeze(1)


class QNetwork(Headed):
    """obs -> {"q": [B, N]}. With `num_atoms` > 1 a distribution of returns per action, and q is its mean: {"logits":
    [B, N, K]} over the atoms of `support`, or without a support {"quantiles": [B, N, K]}.

    `dueling`: one hidden layer per stream, as wide as the features; then Q = V + A - mean of A. `noisy`: these layers
    have noisy weights.
    """

    support: Tensor

    @staticmethod
    def outputs(spec: EnvSpec, batch: int) -> Shapes:
        return {"q": (batch, spec.num_actions)}

    def __init__(
        self,
        spec: EnvSpec,
        config: ModelConfig,
        dueling: bool = False,
        num_atoms: int = 1,
        support: tuple[float, float] | None = None,
        noisy: bool = False,
    ):
        if num_atoms < 1 or (support is not None and not support[0] < support[1]):
            raise ConfigError(
                f"num_atoms should be at least 1 and support grow, got num_atoms={num_atoms}, support={support}"
            )
        super().__init__(_core(spec, config))
        self.n, self.atoms, self.dueling = spec.num_actions, num_atoms, dueling
        features = int(self.core.out_features)  # type: ignore[arg-type]

        def dense(n_in: int, n_out: int, gain: float) -> nn.Module:
            return NoisyLinear(n_in, n_out) if noisy else linear(n_in, n_out, gain, config.init)

        if dueling:
            self.streams = dense(features, 2 * features, HIDDEN_GAIN)
            self.act = activation(config.conv_activation if _only_image(self.core) else config.fcnet_activation)
            self.advantage = dense(features, self.n * num_atoms, VALUE_GAIN)
            self.value = dense(features, num_atoms, VALUE_GAIN)
        else:
            self.head = dense(features, self.n * num_atoms, VALUE_GAIN)
        self.categorical = support is not None
        if support is not None:
            self.register_buffer("support", torch.linspace(*support, num_atoms))

    def heads(self, x: Tensor) -> dict[str, Tensor]:
        if self.dueling:
            a, v = self.act(self.streams(x)).chunk(2, 1)
            a, v = self.advantage(a), self.value(v)
            if self.atoms > 1:
                a, v = a.unflatten(1, (self.n, self.atoms)), v.unsqueeze(1)
            out = a + (v - a.mean(1, keepdim=True))
        else:
            out = self.head(x)
            if self.atoms > 1:
                out = out.unflatten(1, (self.n, self.atoms))
        if self.atoms == 1:
            return {"q": out}
        if not self.categorical:
            return {"q": out.mean(-1), "quantiles": out}
        return {"q": out.softmax(-1) @ self.support, "logits": out}


class ImplicitQuantiles(Headed):
    """obs -> {"q": [B, N]}: the mean of the return's quantiles at `num_fractions` fractions, one in each of as many
    equal intervals (IQN, Dabney et al. 2018). Where in its interval each lies is drawn (`draws`); without draws in the
    middle.

    Features of the observation times an embedding of the fraction, relu(sum_i cos(pi i tau) w_i + b), go through the
    last layer.
    `risk`, `eta`: how fractions are distorted when it acts (`bray.rl.transforms.distort`).
    """

    frequencies: Tensor
    lows: Tensor

    @staticmethod
    def outputs(spec: EnvSpec, batch: int) -> Shapes:
        return {"q": (batch, spec.num_actions)}

    def __init__(
        self,
        spec: EnvSpec,
        config: ModelConfig,
        noisy: bool = False,
        num_fractions: int = 32,
        num_cosines: int = 64,
        risk: str = "neutral",
        eta: float = 0.71,
    ):
        super().__init__(_core(spec, config))
        features = int(self.core.out_features)  # type: ignore[arg-type]
        self.num_fractions, self.risk, self.eta = num_fractions, risk, eta
        self.embed = linear(num_cosines, features, HIDDEN_GAIN, config.init)
        if noisy:
            self.head: nn.Module = NoisyLinear(features, spec.num_actions)
        else:
            self.head = linear(features, spec.num_actions, VALUE_GAIN, config.init)
        self.register_buffer("frequencies", math.pi * torch.arange(1, num_cosines + 1), persistent=False)
        self.register_buffer("lows", torch.arange(num_fractions) / num_fractions, persistent=False)

    @property
    def draws(self) -> Shapes:
        return noise_shapes(self) | {FRACTIONS: (self.num_fractions,)}

    def forward(self, obs: Any, draws: Draws | None = None) -> dict[str, Tensor]:  # type: ignore[override]
        places = torch.special.ndtr(draws[FRACTIONS]) if draws else torch.full_like(self.lows, 0.5)
        tau = distort(self.lows + places / self.num_fractions, self.risk, self.eta)
        return {"q": self.quantiles(obs, tau.unsqueeze(0), draws).mean(-1)}

    def quantiles(self, obs: Any, tau: Tensor, draws: Draws | None = None) -> Tensor:
        """`tau [B, K]`, or `[1, K]` for all rows -> quantiles of the return of each action `[B, N, K]`."""
        with with_noise(self, draws):
            x = self.core(obs)
            cosines = torch.cos(tau.unsqueeze(-1) * self.frequencies)
            embedding = torch.relu(self.embed(cosines))
            return self.head(x.unsqueeze(1) * embedding).transpose(1, 2)


def _only_image(core: nn.Module) -> bool:
    encoder = core.encoder if isinstance(core, Memory) else core
    return isinstance(encoder, Encoder) and encoder.has_image and encoder.trunk is None


class SquashedGaussianActor(Headed):
    """obs -> {"dist": [B, 2D]}: mean and log_std (kept in [-5, 2]) of the normal whose tanh is the action (SAC)."""

    @staticmethod
    def outputs(spec: EnvSpec, batch: int) -> Shapes:
        return {"dist": (batch, 2 * spec.layout.size)}

    def __init__(self, spec: EnvSpec, config: ModelConfig):
        size = _continuous(spec)
        if config.use_lstm:
            raise ConfigError("SquashedGaussianActor has no memory: use_lstm must be false")
        super().__init__(make_encoder(spec.observation, config))
        self.head = linear(int(self.core.out_features), 2 * size, POLICY_GAIN, config.init)  # type: ignore[arg-type]
        if config.log_std_init:
            with torch.no_grad():
                self.head.bias[size:] += config.log_std_init

    def heads(self, x: Tensor) -> dict[str, Tensor]:
        mean, log_std = self.head(x).chunk(2, 1)
        return {"dist": torch.cat([mean, log_std.clamp(LOG_STD_MIN, LOG_STD_MAX)], 1)}


class DeterministicActor(Headed):
    """obs -> {"mu": [B, D]}: the action itself, in [-1, 1] (DDPG, TD3)."""

    @staticmethod
    def outputs(spec: EnvSpec, batch: int) -> Shapes:
        return {"mu": (batch, spec.layout.size)}

    def __init__(self, spec: EnvSpec, config: ModelConfig):
        size = _continuous(spec)
        if config.use_lstm:
            raise ConfigError("DeterministicActor has no memory: use_lstm must be false")
        super().__init__(make_encoder(spec.observation, config))
        self.head = linear(int(self.core.out_features), size, POLICY_GAIN, config.init)  # type: ignore[arg-type]

    def heads(self, x: Tensor) -> dict[str, Tensor]:
        return {"mu": torch.tanh(self.head(x))}


class CategoricalActor(Headed):
    """obs -> {"dist": [B, N]}: logits of N choices (SAC for discrete actions)."""

    @staticmethod
    def outputs(spec: EnvSpec, batch: int) -> Shapes:
        return {"dist": (batch, spec.num_actions)}

    def __init__(self, spec: EnvSpec, config: ModelConfig):
        if config.use_lstm:
            raise ConfigError("CategoricalActor has no memory: use_lstm must be false")
        super().__init__(make_encoder(spec.observation, config))
        self.head = linear(int(self.core.out_features), spec.num_actions, POLICY_GAIN, config.init)  # type: ignore[arg-type]

    def heads(self, x: Tensor) -> dict[str, Tensor]:
        return {"dist": self.head(x)}


class _Critics(nn.Module):
    """`n` critics on the features of an observation, evaluated together. An image's convolutions are shared."""

    def __init__(self, spec: EnvSpec, config: ModelConfig, n: int, extra: int, out: int, batch_norm: bool = False):
        super().__init__()
        if config.layers is not None:
            raise ConfigError("'layers' describes no critic; use fcnet_hiddens and conv_filters")
        self.features = Features(spec.observation, config)
        self.towers = Towers(
            n,
            self.features.out_features + extra,
            config.fcnet_hiddens,
            config.fcnet_activation,
            config.layer_norm,
            config.init,
            out=out,
            out_gain=VALUE_GAIN,
            batch_norm=batch_norm,
        )


class DiscreteQ(_Critics):
    """obs -> values of the N actions by `n` critics `[n, B, N]`."""

    def __init__(self, spec: EnvSpec, config: ModelConfig, n: int = 2):
        super().__init__(spec, config, n, 0, spec.num_actions)

    def forward(self, obs: Any) -> Tensor:
        return self.towers(self.features(obs))


class ContinuousQ(_Critics):
    """(obs, action [B, D]) -> values of `n` critics `[n, B]`; `first`: of the first ones alone. With `batch_norm`
    (CrossQ) every dense layer has a `BatchRenorm` before it, which `learn` lets learn."""

    def __init__(self, spec: EnvSpec, config: ModelConfig, n: int = 2, batch_norm: bool = False):
        super().__init__(spec, config, n, _continuous(spec), 1, batch_norm)

    def forward(self, obs: Any, action: Tensor, first: int | None = None, learn: bool = False) -> Tensor:
        return self.towers(torch.cat([self.features(obs), action], 1), first, learn).squeeze(2)

    def of_many(self, obs: Any, actions: Tensor) -> Tensor:
        """Values of S actions at each observation: `actions [S, B, D]` -> `[n, S, B]`."""
        x = self.features(obs).expand(len(actions), -1, -1)
        x = torch.cat([x, actions, torch.ones_like(actions[..., :1])], 2)
        return self.towers(x.flatten(0, 1), ones=True).squeeze(2).unflatten(1, actions.shape[:2])


def _continuous(spec: EnvSpec) -> int:
    if not spec.layout.continuous:
        raise ConfigError(f"this algorithm needs continuous (Box) actions, {spec.id} has {spec.action.kind}")
    return spec.layout.size
