"""Terms of a user's own in the loss of the Model (`model.loss_terms`), for every algorithm: none of them knows of it.

The optimizer of the Model's weights adds them to whatever loss it is given, from a forward of their own over the rows
of the gradient step.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from bray.algos.packing import FLOATS
from bray.errors import ConfigError
from bray.nn.own import find_own
from bray.optim import Optimizer

MOST = 64
"""Numbers that all terms together may report."""


class Terms:
    """The loss terms of a Model, and the mean of each number that they reported in this iteration."""

    def __init__(self, weights: Mapping[str, float], model: nn.Module, parts: Mapping[str, Any]):
        self.model, self.weights = model, weights
        self.functions = {name: find_own("loss_term", name) for name in weights}
        self._reported_by: dict[str, str] = {}  # number of a row -> term
        for name in weights:
            self._claim(_short(name), name)
        self.optimizer = _optimizer_of(model, parts)
        self.names: list[str] = []
        """Of the numbers, in the order of `_sums`; known after the first gradient step."""
        self._sums = torch.zeros(MOST + 1, dtype=torch.float64, device=next(model.parameters()).device)

    @contextmanager
    def added(self, batch: Mapping[str, Any]) -> Iterator[None]:
        """Inside the block, the optimizer's losses have these terms, for the rows of this batch."""
        self.optimizer.extra = partial(self._loss, batch)
        try:
            yield
        finally:
            self.optimizer.extra = None

    def _loss(self, batch: Mapping[str, Any]) -> Tensor:
        columns = _columns(batch)
        outputs = self._outputs(columns)
        total = columns["weight"].new_zeros(())
        numbers: dict[str, Tensor] = {}
        for name, function in self.functions.items():
            value, more = self._ask(name, function, columns, outputs)
            total = total + self.weights[name] * value
            for number, tensor in ((_short(name), value), *more.items()):
                self._claim(number, name)
                numbers[number] = tensor
        self._note(numbers)
        return total

    def _outputs(self, batch: dict[str, Any]) -> dict[str, Any]:
        if "first" in batch and "state" in batch:
            return self.model.unroll(batch["obs"], batch["state"], batch["first"])  # type: ignore[operator]
        return self.model(batch["obs"])

    def _ask(
        self, name: str, function: Any, batch: dict[str, Any], outputs: dict[str, Any]
    ) -> tuple[Tensor, dict[str, Any]]:
        """A term's value, a number, and the numbers that it reports."""
        try:
            made = function(batch, outputs, self.model)
        except Exception as e:
            raise ConfigError(f"loss_terms: {name}(batch, outputs, model) raised {type(e).__name__}: {e}") from e
        value, more = made if isinstance(made, tuple) and len(made) == 2 else (made, {})
        weight = batch["weight"]
        if isinstance(value, Tensor) and value.shape == weight.shape:
            value = (weight * value).sum() / weight.sum().clamp(min=1e-8)  # rows between two episodes have the weight 0
        wrong = (
            [k for k, v in more.items() if not isinstance(v, Tensor) or v.numel() != 1]
            if isinstance(more, dict)
            else [more]
        )
        if not isinstance(value, Tensor) or value.numel() != 1 or wrong:
            raise ConfigError(
                f"loss_terms: {name} should return a tensor of one number, or of one per row {list(weight.shape)}, "
                f"and may return a dict of tensors of one number beside it; got {_show(made)}"
            )
        return value.reshape(()), more

    def _claim(self, number: str, name: str) -> None:
        """A number of a row is of one term."""
        if (other := self._reported_by.setdefault(number, name)) != name:
            raise ConfigError(
                f"loss_terms: {other} and {name} both report loss/{number}: give one of them another name, or another "
                "name to its number"
            )

    def require_free(self, names: Collection[str]) -> None:
        """ConfigError where a term reports a number that has the name of one of the algorithm's own."""
        for number, name in self._reported_by.items():
            if number in names:
                raise ConfigError(
                    f"loss_terms: {name} reports loss/{number}, which the algorithm reports too: give the term, or "
                    "its number, another name"
                )

    def _note(self, numbers: dict[str, Tensor]) -> None:
        if not self.names:
            if len(numbers) > MOST:
                raise ConfigError(f"loss_terms: at most {MOST} numbers can be reported, got {len(numbers)}")
            self.names.extend(numbers)
        with torch.no_grad():
            values = [numbers[name].detach().double().reshape(()) for name in self.names]
            self._sums[: len(values)] += torch.stack(values)
            self._sums[MOST] += 1.0

    def numbers(self) -> dict[str, float]:
        """Means over the gradient steps since the last call."""
        *sums, count = self._sums.tolist()
        self._sums.zero_()
        return {name: total / count for name, total in zip(self.names, sums, strict=False)} if count else {}


def _short(name: str) -> str:
    """A term's name in rows: without its module."""
    return name.rpartition(":")[2]


def _optimizer_of(model: nn.Module, parts: Mapping[str, Any]) -> Optimizer:
    mine = {id(p) for p in model.parameters()}
    for part in parts.values():
        if isinstance(part, Optimizer) and mine <= {id(p) for p in part.params}:
            return part
    raise ConfigError("loss_terms: this algorithm has no loss of its Model to which a term could be added")


def _columns(batch: Mapping[str, Any]) -> dict[str, Any]:
    """A batch by the names of its columns, also where those of single floats are packed."""
    columns = {k: v for k, v in batch.items() if k != "floats"}
    return columns | dict(zip(FLOATS, batch["floats"].unbind(0), strict=True)) if "floats" in batch else columns


def _show(made: Any) -> str:
    if isinstance(made, tuple):
        return "(" + ", ".join(map(_show, made)) + ")"
    if isinstance(made, dict):
        return "{" + ", ".join(f"{k!r}: {_show(v)}" for k, v in made.items()) + "}"
    return f"a tensor {list(made.shape)}" if isinstance(made, Tensor) else type(made).__name__
