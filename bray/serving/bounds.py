"""Observations outside the bounds of their space: a game that sends pixels from 0 to 255 to a policy that was trained
on 0 to 1 is answered, and plays badly; nothing else would tell."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from typing import Any

import numpy as np

from bray.limited_log import OncePer
from bray.spec import Space

logger = logging.getLogger("bray.serving")


class Bounds:
    """The bounds of a space, where it has any that its types do not have already. False when it has none."""

    def __init__(self, space: Space):
        self._leaves = list(_bounded(space, ()))
        self._limits = [_limited_columns(low, high) for _, low, high in self._leaves]

    def __bool__(self) -> bool:
        return bool(self._leaves)

    def outside(self, obs: Any) -> str | None:
        """What of an observation, or of a batch of them, is outside: the first such value; None = nothing."""
        for keys, low, high in self._leaves:
            x = _part(obs, keys)
            flat = x.reshape(-1, low.size)
            if np.count_nonzero((flat < low) | (flat > high)):
                return _first(flat, keys, low, high)
        return None

    def rows_outside(self, batch: Any) -> int:
        """How many observations of a batch are outside."""
        rows = None
        for (keys, low, high), limits in zip(self._leaves, self._limits, strict=True):
            x = _part(batch, keys)
            x = x.reshape(len(x), -1)
            if not _all_inside(x, low, high, limits):
                outside = ((x < low) | (x > high)).any(1)
                rows = outside if rows is None else rows | outside
        return 0 if rows is None else int(np.count_nonzero(rows))


_SMALL = 64  # numbers of a batch up to which plain Python is quicker than numpy


def _all_inside(x: np.ndarray, low: np.ndarray, high: np.ndarray, limits: list[tuple[int, Any, Any]]) -> bool:
    """As good as always: the quickest way to know it. `limits` are those of the columns that have any."""
    if x.size <= _SMALL:
        return all(least <= row[j] <= most for row in x.tolist() for j, least, most in limits)
    inside: np.ndarray = np.maximum(np.minimum(x, high), low)
    return inside.tobytes() == x.tobytes()


class OutsideCount:
    """Counts the observations outside their space, and logs a line a minute at most."""

    def __init__(self, model: str, bounds: Bounds):
        self.total = 0
        self._model, self._bounds = model, bounds
        self._once = OncePer()
        self._logged = 0  # how many the log has told of

    def then(self, forward: Callable[..., Any], obs: Any, *more: Any) -> Any:
        """Count, and go on to the model."""
        self.count(obs)
        return forward(obs, *more)

    def count(self, batch: Any) -> None:
        rows = self._bounds.rows_outside(batch)
        if rows:
            self.total += rows
            if self._once.due():
                self._log(self._bounds.outside(batch))

    def _log(self, first: str | None) -> None:
        logger.warning(
            "model %s: observations outside their space: %d since the last such line, now %s. They are answered; "
            "check_obs=refuse refuses them",
            self._model,
            self.total - self._logged,
            first,
        )
        self._logged = self.total


def _bounded(space: Space, keys: tuple[Any, ...]) -> Any:
    """(keys, low, high) of each array with bounds. The ranges of choices are checked where they are read."""
    if space.composite:
        for key, part in zip(space.keys, space.parts, strict=True):
            yield from _bounded(part, (*keys, key))
    elif space.kind == "multi_binary":
        n = math.prod(space.shape)
        yield keys, np.zeros(n, np.int8), np.ones(n, np.int8)
    elif space.kind == "box" and np.dtype(space.dtype).kind in "iuf" and math.prod(space.shape) > 0:
        low, high = _limits(space)
        info: Any = np.finfo(low.dtype) if low.dtype.kind == "f" else np.iinfo(low.dtype)
        if (low > info.min).any() or (high < info.max).any():
            yield keys, low, high


def _limited_columns(low: np.ndarray, high: np.ndarray) -> list[tuple[int, Any, Any]]:
    """(column, least, most) where a type's own range is narrowed."""
    info: Any = np.finfo(low.dtype) if low.dtype.kind == "f" else np.iinfo(low.dtype)
    columns = enumerate(zip(low.tolist(), high.tolist(), strict=True))
    return [(j, least, most) for j, (least, most) in columns if least > info.min or most < info.max]


def _limits(space: Space) -> tuple[np.ndarray, np.ndarray]:
    """Bounds in the space's own type, flat."""
    dtype = np.dtype(space.dtype)
    info: Any = np.finfo(dtype) if dtype.kind == "f" else np.iinfo(dtype)
    out = []
    for bound, none in zip(space.bounds(), (info.min, info.max), strict=True):
        # in whole numbers: float64 cannot hold the ends of 64-bit integers
        values = [none if not info.min < x < info.max else dtype.type(x) for x in np.ravel(bound).tolist()]
        out.append(np.array(values, dtype))
    return out[0], out[1]


def _part(obs: Any, keys: tuple[Any, ...]) -> Any:
    for key in keys:
        obs = obs[key]
    return obs


def _first(x: np.ndarray, keys: tuple[Any, ...], low: np.ndarray, high: np.ndarray) -> str:
    i, j = divmod(int(np.argmax((x < low) | (x > high))), low.size)
    return f"{'.'.join(map(str, ('obs', *keys)))}: {x[i, j]:g} is not from {low[j]:g} to {high[j]:g}"
