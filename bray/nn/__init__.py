"""Networks: encoders for every kind of observation, heads for every kind of algorithm, and the parts that both are made
of.

A **Model** is an `nn.Module` that returns a dict of named outputs:

    model(obs) -> {"dist": [B, P], "value": [B]}         `dist` is laid out by `bray.spec.ActionLayout`, one rule for
                                                         discrete, multi-discrete, continuous and composite actions
    model(obs) -> {"q": [B, N]}                          for Q-learning
    model(obs, state) -> {..., "state": tree}            with a memory: it also has `initial_state(B)`, and
    model.unroll(obs, state, first) -> outputs           over `[T, B, ...]`, the state zeroed where `first [T, B]`

One that wants random numbers declares `draws` (`noise.py`). The Model is what is published, exported and served;
targets and extra critics are the Learner's own.
"""

from bray.nn.attention import EntityEncoder, Scatter, SelfAttention
from bray.nn.catalog import (
    ModelConfig,
    example_obs,
    make_model,
    register_loss_term,
    register_model,
    register_preprocessor,
)
from bray.nn.encoders import Encoder, make_encoder
from bray.nn.functions import binary_encode, gumbel_softmax, one_hot, soft_argmax, to_arrays, to_tensors
from bray.nn.gtrxl import GRUGate, GTrXL
from bray.nn.heads import ActorCritic, ContinuousQ, QNetwork, SquashedGaussianActor
from bray.nn.layers import MLP, ResidualConv, ResidualMLP, Towers
from bray.nn.merge import Bilinear, FiLM, Gate, Merge
from bray.nn.noise import NoisyLinear, noise_shapes, with_noise
from bray.nn.normalize import RunningNorm, update_normalizers
from bray.nn.popart import PopArt
from bray.nn.recurrent import Recurrent

__all__ = [
    "MLP",
    "ActorCritic",
    "Bilinear",
    "ContinuousQ",
    "Encoder",
    "EntityEncoder",
    "FiLM",
    "GRUGate",
    "GTrXL",
    "Gate",
    "Merge",
    "ModelConfig",
    "NoisyLinear",
    "PopArt",
    "QNetwork",
    "Recurrent",
    "ResidualConv",
    "ResidualMLP",
    "RunningNorm",
    "Scatter",
    "SelfAttention",
    "SquashedGaussianActor",
    "Towers",
    "binary_encode",
    "example_obs",
    "gumbel_softmax",
    "make_encoder",
    "make_model",
    "noise_shapes",
    "one_hot",
    "register_loss_term",
    "register_model",
    "register_preprocessor",
    "soft_argmax",
    "to_arrays",
    "to_tensors",
    "update_normalizers",
    "with_noise",
]
