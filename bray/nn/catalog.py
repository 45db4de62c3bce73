"""Models by name: builds what the `model` section of a config describes."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from bray.errors import ConfigError, UnknownName
from bray.nn.config import ModelConfig as ModelConfig
from bray.nn.encoders import find_class, register
from bray.nn.heads import ActorCritic, ContinuousQ, ImplicitQuantiles, QNetwork, SquashedGaussianActor
from bray.spec import EnvSpec, Space


def register_model(name: str, cls: type, replace: bool = False) -> None:
    """Let configs say `custom_model: name`."""
    register("model", name, cls, replace)


def register_preprocessor(name: str, cls: type, replace: bool = False) -> None:
    """Let configs say `custom_preprocessor: name`."""
    register("preprocessor", name, cls, replace)


_KINDS: dict[str, Any] = {
    "actor_critic": ActorCritic,
    "q": QNetwork,
    "implicit_quantiles": ImplicitQuantiles,
    "squashed_gaussian": SquashedGaussianActor,
    "continuous_q": ContinuousQ,
}


def make_model(kind: str, spec: EnvSpec, config: ModelConfig, **options: Any) -> nn.Module:
    """The model of an algorithm, or the user's `custom_model` in its place (checked on one batch to return what the algorithm
    reads). Kinds: actor_critic, q, implicit_quantiles, squashed_gaussian, continuous_q; `options` go to the class of that kind."""
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
