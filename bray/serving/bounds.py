"""Observations outside the bounds of their space: a game that sends pixels from 0 to 255 to a policy that was trained on 0 to 1 is answered,
and plays badly; nothing else would tell."""

from __future__ import annotations

import logging
import math
import time
from typing import Any

import numpy as np

from bray.spec import Space

logger = logging.getLogger("bray.serving")

_LOG_EVERY_S = 60.0


class Bounds:
    """The bounds of a space, where it has any that its types do not have already. False when it has none."""

    def __init__(self, space: Space):
        self._leaves = list(_bounded(space, ()))

    def __bool__(self) -> bool:
        return bool(self._leaves)

    def outside(self, obs: Any) -> str | None:
        """What of an observation, or of a batch of them, is outside: the first such value; None = nothing."""
        for keys, low, high in self._leaves:
            x = _part(obs, keys)
            if np.count_nonzero((x < low) | (x > high)):
                return _first(x, keys, low, high)
        return None

    def rows_outside(self, batch: Any) -> int:
        """How many observations of a batch are outside."""
        rows: Any = False
        for keys, low, high in self._leaves:
            x = _part(batch, keys)
            rows = rows | ((x < low) | (x > high)).reshape(len(x), -1).any(axis=1)
        return int(np.count_nonzero(rows))


class OutsideCount:
    """Counts the observations outside their space, and logs a line a minute at most."""

    def __init__(self, model: str, bounds: Bounds):
        self.total = 0
        self._model, self._bounds = model, bounds
        self._logged_at = -float("inf")
        self._logged = 0  # how many the log has told of

    def count(self, batch: Any) -> None:
        first = self._bounds.outside(batch)
        if first is None:
            return
        self.total += self._bounds.rows_outside(batch)
        now = time.monotonic()
        if now - self._logged_at >= _LOG_EVERY_S:
            more = self.total - self._logged
            self._logged_at, self._logged = now, self.total
            logger.warning(
                "model %s: %d observations outside their space, now %s. They are answered; check_obs=refuse refuses them",
                self._model,
                more,
                first,
            )


def _bounded(space: Space, keys: tuple[Any, ...]) -> Any:
    """(keys, low, high) of each array with bounds. The ranges of choices are checked where they are read."""
    if space.composite:
        for key, part in zip(space.keys, space.parts, strict=True):
            yield from _bounded(part, (*keys, key))
    elif space.kind == "multi_binary":
        yield keys, np.int8(0), np.int8(1)
    elif space.kind == "box" and np.dtype(space.dtype).kind in "iuf" and math.prod(space.shape):
        low, high = _limits(space)
        info: Any = np.finfo(space.dtype) if low.dtype.kind == "f" else np.iinfo(space.dtype)
        if (low > info.min).any() or (high < info.max).any():
            yield keys, low, high


def _limits(space: Space) -> tuple[np.ndarray, np.ndarray]:
    """Bounds in the space's own type; one that is the same everywhere as a single number."""
    dtype = np.dtype(space.dtype)
    info: Any = np.finfo(dtype) if dtype.kind == "f" else np.iinfo(dtype)
    out = []
    for bound, none in zip(space.bounds(), (info.min, info.max), strict=True):
        # in whole numbers: float64 cannot hold the ends of 64-bit integers
        values = [none if not info.min < x < info.max else dtype.type(x) for x in np.ravel(bound).tolist()]
        out.append(np.array(values, dtype).reshape(space.shape) if len(set(values)) > 1 else dtype.type(values[0]))
    return out[0], out[1]


def _part(obs: Any, keys: tuple[Any, ...]) -> Any:
    for key in keys:
        obs = obs[key]
    return obs


def _first(x: np.ndarray, keys: tuple[Any, ...], low: Any, high: Any) -> str:
    at = np.unravel_index(int(np.argmax((x < low) | (x > high))), x.shape)
    low, high = (np.broadcast_to(bound, x.shape)[at] for bound in (low, high))
    return f"{'.'.join(map(str, ('obs', *keys)))}: {x[at]} is not from {low} to {high}"
