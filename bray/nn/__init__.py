"""Networks: encoders for every kind of observation, heads for every kind of algorithm."""

from bray.nn.catalog import ModelConfig, example_obs, make_model, register_model, register_preprocessor
from bray.nn.encoders import Encoder, make_encoder
from bray.nn.heads import ActorCritic, ContinuousQ, QNetwork, SquashedGaussianActor
from bray.nn.layers import MLP, Towers
from bray.nn.noise import NoisyLinear, noise_shapes, with_noise
from bray.nn.normalize import RunningNorm, update_normalizers
from bray.nn.popart import PopArt
from bray.nn.recurrent import Recurrent

__all__ = [
    "MLP",
    "ActorCritic",
    "ContinuousQ",
    "Encoder",
    "ModelConfig",
    "NoisyLinear",
    "PopArt",
    "QNetwork",
    "Recurrent",
    "RunningNorm",
    "SquashedGaussianActor",
    "Towers",
    "example_obs",
    "make_encoder",
    "make_model",
    "noise_shapes",
    "register_model",
    "register_preprocessor",
    "update_normalizers",
    "with_noise",
]
