"""Engines against the Model itself: how far their outputs are off, whether they act alike, how long they take. No torch
here."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from bray import tree
from bray.errors import ExportError
from bray.inference.engine import Engine
from bray.spec import Space

BATCHES = (1, 8, 32, 128)
"""Batch sizes that are timed."""
CLOSE = 0.01
"""A continuous action agrees with another one when they are, on average over its numbers, nearer than this part of
their range."""
RTOL, ATOL = 1e-3, 1e-4
"""How far an output of float32 may be off: rounding in another order, no more."""
_ROWS = 128


@dataclass(frozen=True)
class Report:
    """What was found out about one engine."""

    max_error: float
    mean_error: float
    agreement: float
    """Part of the rows on which it acts as the Model does."""
    latency: dict[int, tuple[float, float]]
    """Batch size -> median and 99th percentile, seconds."""


def verify(
    engine: Engine,
    args: Sequence[Any],
    expected: Any,
    act: Callable[[Any, Any], Any],
    actions: Space,
    seconds: float = 0.2,
) -> Report:
    """`expected`: what the Model answers to `args` (rows `[N, ...]`); `act(outputs, obs)`: greedy actions in units of
    the environment, whose space is `actions`; `seconds`: how long each batch size is timed."""
    got = run(engine, args)
    errors = _errors(got, expected)
    same = agree(actions, act(got, args[0]), act(expected, args[0]))
    latency = {n: time_forward(engine, args, n, seconds) for n in BATCHES}
    return Report(float(errors.max()), float(errors.mean()), float(same.mean()), latency)


def check_close(engine: Engine, args: Sequence[Any], expected: Any, name: str) -> None:
    """Raise ExportError when a float32 engine answers otherwise than the Model, beyond rounding."""
    for (path, a), (_, b) in zip(tree.paths(run(engine, args)), tree.paths(expected), strict=True):
        if not np.allclose(a, b, RTOL, ATOL, equal_nan=True):
            worst = float(np.max(np.abs(a.astype(np.float64) - b)))
            raise ExportError(
                f"{name} answers otherwise than the Model: output {path or 'output'!r} is off by up to {worst:.3g}. "
                "This is a fault of the export; go on with torch and report it."
            )


def run(engine: Engine, args: Sequence[Any]) -> Any:
    """All rows through an engine, some at a time."""
    n = tree.length(args[0])
    return tree.concat([engine.forward(*tree.index(tuple(args), slice(i, i + _ROWS))) for i in range(0, n, _ROWS)])


def follow(engine: Engine, obs: Any, initial_state: Callable[[int], Any], rows: int) -> tuple[Any, Any, Any]:
    """A recurrent Model over recorded observations, `rows` of them at a time, its state carried on: observations, the
    states before them, and its outputs, as rows `[N, ...]` (a rest of fewer than `rows` is left out)."""
    n = tree.length(obs)
    rows = min(rows, n)
    state, states, outputs = initial_state(rows), [], []
    for i in range(0, n - rows + 1, rows):
        states.append(state)
        outputs.append(engine.forward(tree.index(obs, slice(i, i + rows)), state))
        state = outputs[-1]["state"]
    return tree.index(obs, slice(0, rows * len(states))), tree.concat(states), tree.concat(outputs)


def agree(space: Space, a: Any, b: Any) -> np.ndarray:
    """For each row of two batches of actions whether they agree: the same choices, and numbers that are CLOSE.

    The range of a number is that of its box; where that is unbounded, the range of `b` over all rows.
    """
    if space.kind in ("dict", "tuple"):
        keys = space.names if space.kind == "dict" else range(len(space.parts))
        return np.all([agree(s, a[k], b[k]) for k, s in zip(keys, space.parts, strict=True)], axis=0)
    a, b = np.asarray(a), np.asarray(b)
    n = len(b)
    if space.kind != "box":
        return (a == b).reshape(n, -1).all(1)
    a, b = a.reshape(n, -1).astype(np.float64), b.reshape(n, -1).astype(np.float64)
    low, high = (x.reshape(-1) for x in space.bounds())
    bounded = np.isfinite(low) & np.isfinite(high)
    span = np.where(bounded, np.where(bounded, high, 0.0) - np.where(bounded, low, 0.0), b.max(0) - b.min(0))
    return (np.abs(a - b) / np.maximum(span, 1e-6)).mean(1) <= CLOSE


def _errors(got: Any, expected: Any) -> np.ndarray:
    pairs = zip(tree.leaves(got), tree.leaves(expected), strict=True)
    return np.concatenate([np.abs(a.astype(np.float64) - b).ravel() for a, b in pairs])


def time_forward(engine: Engine, args: Sequence[Any], batch: int, seconds: float) -> tuple[float, float]:
    """Median and 99th percentile of forwards of `batch` rows, over at least 5 of them."""
    n = tree.length(args[0])
    inputs = [tree.index(tuple(args), (np.arange(batch) + 7 * k) % n) for k in range(8)]
    for x in inputs[:3]:
        engine.forward(*x)
    times: list[float] = []
    end = time.perf_counter() + seconds
    while len(times) < 5 or (time.perf_counter() < end and len(times) < 2000):
        x = inputs[len(times) % len(inputs)]
        start = time.perf_counter()
        engine.forward(*x)
        times.append(time.perf_counter() - start)
    return float(np.median(times)), float(np.percentile(times, 99))
