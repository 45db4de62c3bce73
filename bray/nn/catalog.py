"""Models by name: builds what the `model` section of a config describes."""

from __future__ import annotations

from typing import Any

from torch import nn

from bray.errors import ConfigError, UnknownName
from bray.nn.config import ModelConfig as ModelConfig
from bray.nn.custom import make_custom
from bray.nn.heads import (
    Actor,
    ActorCritic,
    CategoricalActor,
    ContinuousQ,
    DeterministicActor,
    DiscreteQ,
    ImplicitQuantiles,
    QNetwork,
    SquashedGaussianActor,
    StateValue,
)
from bray.nn.own import example_obs as example_obs, register
from bray.spec import EnvSpec


def register_model(name: str, cls: type, replace: bool = False) -> None:
    """Let configs say `custom_model: name`."""
    register("model", name, cls, replace)


def register_preprocessor(name: str, cls: Any, replace: bool = False) -> None:
    """Let configs say `custom_preprocessor: name`."""
    register("preprocessor", name, cls, replace)


def register_loss_term(name: str, function: Any, replace: bool = False) -> None:
    """Let configs say `loss_terms: {name: weight}`."""
    register("loss_term", name, function, replace)


_KINDS: dict[str, Any] = {
    "actor_critic": ActorCritic,
    "actor": Actor,
    "q": QNetwork,
    "implicit_quantiles": ImplicitQuantiles,
    "squashed_gaussian": SquashedGaussianActor,
    "deterministic": DeterministicActor,
    "categorical": CategoricalActor,
    "continuous_q": ContinuousQ,
    "discrete_q": DiscreteQ,
    "state_value": StateValue,
}
_CRITICS = ("continuous_q", "discrete_q", "state_value")
"""Private to a Learner: a `custom_model` does not take their place."""


def make_model(kind: str, spec: EnvSpec, config: ModelConfig, memory: bool | None = None, **options: Any) -> nn.Module:
    """The model of an algorithm, or the user's `custom_model` in its place (checked on one batch to return what the
    algorithm reads). Kinds: actor_critic, actor, q, implicit_quantiles, squashed_gaussian, deterministic,
    categorical; continuous_q, discrete_q, state_value; `options` go to the class of that kind. `memory`: whether the
    algorithm trains a network of this kind that has one; most of an actor_critic or an actor do, and of no other
    kind."""
    if kind not in _KINDS:
        raise UnknownName("kind of model", kind, _KINDS)
    if config.custom_model is None or kind in _CRITICS:
        return _KINDS[kind](spec, config, **options)
    if kind == "implicit_quantiles" or options.get("num_atoms", 1) > 1:
        raise ConfigError(
            "custom_model takes the place of networks that give action values or a policy; this algorithm learns "
            "distributions of returns with a head of its own. Describe the layers before it by `layers`, or use DQN "
            "or PQN"
        )
    for name in ("dueling", "noisy"):
        if options.get(name):
            raise ConfigError(
                f"custom_model and {name}=true exclude each other: custom_model is the whole network, and {name} "
                f"describes the last layers of ours. Set {name}=false, or describe the layers before the last ones by "
                "`layers`"
            )
    memory = kind in ("actor_critic", "actor") if memory is None else memory
    return make_custom(kind, _KINDS[kind].outputs(spec, 2), spec, config, memory)
