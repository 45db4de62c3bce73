"""What a user's own code is called in a config: networks, preprocessors and terms of the loss, by `module:Name` or a
registered name."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from bray.errors import BrayError, ConfigError, UnknownName
from bray.named import script_hint, where_looked
from bray.nn.config import ModelConfig
from bray.spec import Space

_REGISTERED: dict[str, dict[str, Any]] = {"model": {}, "preprocessor": {}, "loss_term": {}}


def register(kind: str, name: str, made: Any, replace: bool = False) -> None:
    """Give a class or function a short name for the keys `custom_model` (kind "model"), `custom_preprocessor`
    ("preprocessor") and `loss_terms` ("loss_term"). A name that is another one already is refused unless `replace`."""
    if kind not in _REGISTERED:
        raise UnknownName("kind of custom class", kind, _REGISTERED)
    taken = _REGISTERED[kind].get(name, made)
    if taken is not made and not replace:
        raise ConfigError(
            f"register_{kind}: {name!r} is {taken.__module__}:{taken.__qualname__} already and would become "
            f"{made.__module__}:{made.__qualname__}; choose another name, or say replace=True"
        )
    _REGISTERED[kind][name] = made


def find_own(kind: str, name: Any) -> Any:
    """What a config's value names: the thing itself, a registered name, or "module:Name"."""
    if callable(name):
        return name
    key = "loss_terms" if kind == "loss_term" else f"custom_{kind}"
    if name in _REGISTERED[kind]:
        return _REGISTERED[kind][name]
    module_name, _, attribute = str(name).partition(":")
    if not attribute:
        raise UnknownName(key, str(name), _REGISTERED[kind], 'or write "module:Name"')
    try:
        module = importlib.import_module(module_name)
    except ImportError as e:
        looked = where_looked(module_name, e)
        raise ConfigError(f"{key} {name!r}: module {module_name!r} cannot be imported ({e}){looked}") from e
    if not hasattr(module, attribute):
        public = [n for n in dir(module) if not n.startswith("_")]
        raise UnknownName(key, attribute, public, module_name, script_hint(name))
    return getattr(module, attribute)


def example_obs(space: Space, batch_size: int) -> Any:
    """A batch of zeros (first choices) of an observation space, as tensors `[B, ...]`: to record, check or export a
    model."""
    if space.kind == "dict":
        return {name: example_obs(part, batch_size) for name, part in space.items}
    if space.kind == "tuple":
        return tuple(example_obs(part, batch_size) for part in space.parts)
    x = torch.zeros(batch_size, *space.shape, dtype=getattr(torch, space.dtype))
    if space.start:
        x = x + torch.tensor(space.start).reshape(space.shape)
    return x


class Preprocess(nn.Module):
    """A function obs -> obs of tensors `[B, ...]` as a first layer. What it makes of a batch says what the layers
    behind it get."""

    def __init__(self, function: Any, space: Space, options: dict[str, Any]):
        super().__init__()
        self.function, self.options = function, options
        name = getattr(function, "__qualname__", str(function))
        self.space = _space_of(_run(name, self, example_obs(space, 2)), space, name)

    def forward(self, obs: Any) -> Any:
        return self.function(obs, **self.options)


def _run(name: str, call: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """What a preprocessor, or its class, returns; what it raises is one message."""
    try:
        return call(*args, **options)
    except BrayError:
        raise
    except Exception as e:
        raise ConfigError(f"custom_preprocessor {name} raised {type(e).__name__}: {e}") from e


def _space_of(made: Any, space: Space | None, name: str) -> Space:
    """The space of what a preprocessor returned for a batch of 2. A member that it left as it was keeps its space (a
    choice stays a choice)."""
    if isinstance(made, dict):
        parts = {k: _space_of(v, _member(space, k), name) for k, v in made.items()}
        return Space("dict", parts=tuple(parts.values()), names=tuple(map(str, parts)))
    if isinstance(made, (tuple, list)):
        return Space("tuple", parts=tuple(_space_of(v, _member(space, i), name) for i, v in enumerate(made)))
    if not isinstance(made, Tensor) or made.ndim == 0 or made.shape[0] != 2:
        got = list(made.shape) if isinstance(made, Tensor) else type(made).__name__
        raise ConfigError(
            f"custom_preprocessor {name}: expected a tensor [B, ...], or a dict or tuple of them, with a row for each "
            f"row of the observation; for a batch of 2 it returned {got}"
        )
    dtype, shape = str(made.dtype).removeprefix("torch."), tuple(made.shape[1:])
    if space is not None and not space.composite and (space.dtype, tuple(space.shape)) == (dtype, shape):
        return space if not dtype.startswith("float") else Space("box", shape, dtype)
    return Space("box", shape, dtype, *((0, 255) if dtype == "uint8" else ()))


def _member(space: Space | None, key: Any) -> Space | None:
    if space is None or not space.composite:
        return None
    return dict(zip(space.keys, space.parts, strict=True)).get(key)


def make_preprocessor(space: Space, config: ModelConfig) -> nn.Module:
    """The `custom_preprocessor` of a config: a function obs -> obs, or a class (or function of `space`) that makes an
    nn.Module."""
    found = find_own("preprocessor", config.custom_preprocessor)
    if inspect.isfunction(found) and next(iter(inspect.signature(found).parameters), "space") != "space":
        return Preprocess(found, space, config.custom_options)
    made = _run(str(config.custom_preprocessor), found, space, **config.custom_options)
    if not isinstance(made, nn.Module) or not isinstance(getattr(made, "space", None), Space):
        raise ConfigError(
            "a custom_preprocessor is a function obs -> obs, or an nn.Module with an attribute `space` (the "
            f"bray.spec.Space it turns observations into) and forward(obs) -> obs; {config.custom_preprocessor!r} "
            f"made a {type(made).__name__}"
        )
    return made
