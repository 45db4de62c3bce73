"""What a model is: its settings, and an example of what it takes."""

from __future__ import annotations

import copy
import logging
import traceback
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import numpy as np

from bray import tree
from bray.config.check import check_fields
from bray.errors import ConfigError, DataError, UnknownName
from bray.inference import rows
from bray.remote.model.options import ModelOptions

logger = logging.getLogger("bray.remote")

Example = tuple[tuple[Any, ...], dict[str, Any]]
"""Positional and keyword arguments of a Model, trees of arrays `[B, ...]`."""


@dataclass(frozen=True)
class Definition(ModelOptions):
    """The settings of a RemoteModel, and what its Model takes. The Model itself travels beside it."""

    name: str
    """Also of its directory in the run directory: models/NAME."""
    example: Example | None = None
    """What the Model was found to take; None when no arguments were given."""
    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    """Of this definition: another one of the same name is another model."""

    def __post_init__(self) -> None:
        check_fields(self, f"model {self.name!r}")
        if self.use_onnx is not None and self.example is None:
            raise ConfigError(
                f"model {self.name!r}: use_onnx={self.use_onnx!r} needs forward_args, an example of what the Model "
                "takes"
            )

    @property
    def is_local(self) -> bool:
        """The process that asks has the engine."""
        return self.local_mode or self.num_workers == 0

    @property
    def on_gpu(self) -> bool:
        """Its workers have GPUs; then they run torch, whatever `use_onnx` says."""
        return self.gpus_per_worker > 0 and not self.is_local

    @property
    def args(self) -> tuple[Any, ...]:
        """The example as an engine takes it: keyword arguments are one more argument, a dict."""
        assert self.example is not None
        args, kwargs = self.example
        return (*args, kwargs) if kwargs else args

    @property
    def has_kwargs(self) -> bool:
        return self.example is not None and bool(self.example[1])

    def engine_args(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
        """The arguments of a forward as an engine takes them."""
        if kwargs and not self.has_kwargs:
            raise ConfigError(
                f"model {self.name!r} was defined without keyword arguments, this forward has {', '.join(kwargs)}: "
                "give RemoteModel(..., forward_kwargs=...) an example of them, or pass them by position"
            )
        return (*args, kwargs) if self.has_kwargs else args

    def explain(self, error: Exception, args: tuple[Any, ...], batch: bool) -> None:
        """After an error: note in it where the engine's arguments differ from the example."""
        if self.example is None:
            return
        try:
            given = tree.as_arrays(args)
            expected = tree.index(self.args, 0)
            given = tree.index(given, 0) if batch else given
            if rows.signature(expected) != rows.signature(given):
                error.add_note(
                    f"model {self.name!r} was defined with other arguments (numbered from 0): "
                    f"{rows.difference(expected, given)}"
                )
        except Exception:  # not a tree of arrays at all, and the error itself says so
            logger.debug("arguments of a forward that failed", exc_info=True)

    def frozen(self, name: str) -> Definition:
        """The definition of a clone."""
        return replace(self, name=name, checkpoint=None, id=uuid.uuid4().hex)


def check_settings(name: str, settings: Mapping[str, Any]) -> None:
    known = [f.name for f in fields(ModelOptions)]
    for key in settings:
        if key not in known:
            raise UnknownName("setting", key, known, f"model {name!r}")


# --- the example ------------------------------------------------------------------------------------------------------


def find_example(model: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Example | None:
    """The arguments with a batch dimension, which they may have or not: the Model is run both ways to see which it
    takes. Where both work, they count as a batch."""
    if not args and not kwargs:
        return None
    given = tree.as_arrays((tuple(args), dict(kwargs)))
    as_sample = tree.map(lambda x: x[None], given)
    module = copy.deepcopy(model).cpu().eval()
    batch, batch_error = _try(module, given)
    sample, sample_error = _try(module, as_sample)
    if not batch and not sample:
        raise ConfigError(
            f"{type(model).__name__} does not run with these forward_args, neither as a batch nor as one sample.\n"
            f"As a batch, {_shapes(given)}:\n{batch_error}\nAs one sample, {_shapes(as_sample)}:\n{sample_error}"
        )
    if batch == sample == 2:
        logger.info(
            "%s takes its forward_args with and without a batch dimension: they count as a batch", type(model).__name__
        )
    return given if batch >= sample else as_sample


def _try(module: Any, given: Example) -> tuple[int, str]:
    """How many of two runs worked, with as many rows as given and with twice as many, and the error of the one that did
    not."""
    worked = 0
    try:
        count = tree.batch_rows((*given[0], given[1]))
        _run(module, given, count)
        worked = 1
        _run(module, tree.map(lambda x: np.concatenate([x, x]), given), 2 * count)
        return 2, ""
    except DataError as e:
        return worked, f"  {e}"
    except Exception as e:
        return worked, _trace(e)


def _trace(error: Exception) -> str:
    """Where the Model's own code was, and what went wrong."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if "torch" not in Path(f.filename).parts]
    lines = [*traceback.format_list(frames[2:]), *traceback.format_exception_only(error)]  # the first two are ours
    return "".join(f"  {line}\n" for text in lines for line in text.rstrip().splitlines())


def _run(module: Any, given: Example, count: int) -> None:
    import torch

    args, kwargs = tree.map(lambda x: torch.from_numpy(np.array(x)), given)
    with torch.no_grad(), torch.random.fork_rng(devices=[]):  # the caller's random numbers stay as they are
        outputs = module(*args, **kwargs)
    for path, x in tree.paths(outputs):
        if not isinstance(x, torch.Tensor):
            raise DataError(
                f"output {path or 'output'!r} is a {type(x).__name__}, expected tensors in a tensor, tuple, list or "
                "dict"
            )
        if not x.shape or x.shape[0] != count:
            raise DataError(
                f"output {path or 'output'!r} has shape {list(x.shape)}: expected one row for each of {count}"
            )


def _shapes(given: Example) -> str:
    args, kwargs = given
    return ", ".join(f"{path}: {x.dtype}{list(x.shape)}" for path, x in tree.paths({**dict(enumerate(args)), **kwargs}))


# --- the Model --------------------------------------------------------------------------------------------------------


def with_kwargs(module: Any) -> Any:
    """A Model whose last argument is a dict of its keyword arguments. Its weights keep their names."""
    kind = type(module)

    def forward(self: Any, *args: Any) -> Any:
        *positional, named = args
        return kind.forward(self, *positional, **named)

    module.__class__ = type(kind.__name__, (kind,), {"forward": forward, "__module__": kind.__module__})
    return module
