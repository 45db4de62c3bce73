"""Schedules: a number that changes with the step count. Written in configs as a number or as a small dict.

`{"kind": "linear", "start": 1.0, "end": 0.05, "steps": 10000}` goes from start to end in `steps`, then stays;
`{"kind": "exp", "start": 0.95, "end": 0.01, "decay": 500}` is end + (start - end) * exp(-step / decay);
`{"kind": "piecewise", "points": [[0, 1.0], [1000, 0.1]]}` joins points by lines and stays at the last one.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

from bray.errors import ConfigError, UnknownName

Schedule = float | dict[str, Any]
"""What a config field holds."""

_KEYS = {"linear": ("start", "end", "steps"), "exp": ("start", "end", "decay"), "piecewise": ("points",)}


def make_schedule(schedule: Schedule) -> Callable[[int], float]:
    """A config's number or dict as a function of the step."""
    if isinstance(schedule, (int, float)) and not isinstance(schedule, bool):
        value = _number("constant", "the value", schedule)
        return lambda step: value
    if not isinstance(schedule, dict):
        raise ConfigError(f"a schedule is a number or a dict with 'kind', got {schedule!r}")
    kind = schedule.get("kind", "linear")
    if not isinstance(kind, str) or kind not in _KEYS:
        raise UnknownName("schedule kind", str(kind), _KEYS)
    for key in schedule:
        if key != "kind" and key not in _KEYS[kind]:
            raise UnknownName(f"key of a {kind} schedule", str(key), _KEYS[kind])
    missing = [k for k in _KEYS[kind] if k not in schedule]
    if missing:
        raise ConfigError(f"a {kind} schedule needs {', '.join(_KEYS[kind])}; {', '.join(missing)} missing")
    if kind == "piecewise":
        points = schedule["points"]
        listed = isinstance(points, (list, tuple))
        if not listed or not all(isinstance(p, (list, tuple)) and len(p) == 2 for p in points):
            raise ConfigError(f"the points of a piecewise schedule are pairs [step, value], got {points!r}")
        pairs = [(_number(kind, "points", x), _number(kind, "points", y)) for x, y in points]
        if not pairs or any(b[0] <= a[0] for a, b in itertools.pairwise(pairs)):
            raise ConfigError(f"the points of a piecewise schedule have growing steps, got {points}")
        return lambda step: _between(pairs, step)
    start, end, length = (_number(kind, key, schedule[key]) for key in _KEYS[kind])
    if length < 0 or (kind == "exp" and length == 0):
        raise ConfigError(f"the {_KEYS[kind][2]} of a schedule of kind {kind} cannot be {length:g}")
    if kind == "linear":
        return lambda step: start + (end - start) * min(1.0, step / length) if length > 0 else end
    return lambda step: end + (start - end) * math.exp(-step / length)


def _number(kind: str, key: str, x: Any) -> float:
    if isinstance(x, bool) or not isinstance(x, (int, float)) or not math.isfinite(x):
        raise ConfigError(f"{key} of a {kind} schedule: expected a number, got {x!r}")
    return float(x)


def _between(points: list[tuple[float, float]], step: int) -> float:
    """Linear between points, constant outside."""
    if step <= points[0][0]:
        return points[0][1]
    for (x0, y0), (x1, y1) in itertools.pairwise(points):
        if step <= x1:
            return y0 + (y1 - y0) * (step - x0) / (x1 - x0)
    return points[-1][1]
