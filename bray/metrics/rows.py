"""Rows of results, and the statistics of episodes in them."""

from __future__ import annotations

import math
import sys
from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from bray.errors import ConfigError, DataError
from bray.rundir.files import plain

ITERATION = "training_iteration"
"""The key that numbers the rows of a run."""
ENV_STEPS = "env_steps_total"
"""The key that is the x axis of a curve, where something is played."""
GRADIENT_STEPS = "learner_steps_total"
OF_FILES = "data/episodes"
"""Only in rows of runs that learn from files."""
NAN_METRICS = "nan_metrics"
HEALTH = "health"
"""The key that names what has looked wrong so far; rows of a run that looks sound do not have it."""

RATING, RATING_CI = "league/rating", "league/rating_ci95"
"""How strong a policy is that plays itself, on Elo's scale, and half the width of its 95 % interval."""

SIDE = "side/"
"""Begins the keys of one of several policies: `side/NAME/loss/policy_loss`."""

Row = dict[str, Any]


def side_key(side: str, key: str) -> str:
    return f"{SIDE}{side}/{key}"


def without_side(key: str) -> str:
    """What a key is in a run with one policy."""
    return key.split("/", 2)[-1] if key.startswith(SIDE) else key


def from_files(row: Mapping[str, Any]) -> bool:
    """Whether a run learns from files alone: it plays nothing, and its curve is over gradient steps."""
    return OF_FILES in row and not row.get("episodes_total")


def number(row: Mapping[str, Any], key: str) -> float | None:
    """A finite number of a row; None where it has none."""
    value = row.get(key)
    return float(value) if isinstance(value, (int, float)) and abs(value) < 1e300 else None


def flatten_row(values: Mapping[str, Any]) -> Row:
    """Nested results as one flat row of Python scalars: keys joined by '/', NaN and infinity as None and listed."""
    row: Row = {}
    bad: list[str] = list(values.get(NAN_METRICS) or [])

    def add(key: str, value: Any) -> None:
        if isinstance(value, Mapping):
            for k, v in value.items():
                add(f"{key}/{k}", v)
            return
        row[key] = scalar = _scalar(value)
        if isinstance(scalar, (int, float)) and not abs(scalar) <= sys.float_info.max:  # whole numbers may be larger
            bad.append(key)
            row[key] = None

    for key, value in values.items():
        if key != NAN_METRICS:
            add(str(key), value)
    if bad:
        row[NAN_METRICS] = list(dict.fromkeys(bad))
    return row


def _scalar(value: Any) -> Any:
    """A number (numpy's and torch's included), text, None or a list of them."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (list, tuple)):
        return plain(value)
    if getattr(value, "ndim", None) == 0 or (hasattr(value, "numel") and value.numel() == 1):
        return value.item()
    return plain(value) if hasattr(value, "tolist") else str(value)


def pretty_print(result: Mapping[str, Any]) -> str:
    """A result as YAML text, without its config."""
    import yaml

    values = plain({k: v for k, v in result.items() if k != "config"})
    return yaml.safe_dump(values, default_flow_style=False, sort_keys=False, allow_unicode=True)


class EpisodeStats:
    """Returns and lengths of the last `window` finished episodes. Until one has finished, the statistics are None."""

    def __init__(self, window: int = 100):
        if window < 1:
            raise ConfigError(f"episode statistics need a window >= 1, got {window}")
        self.window = window
        self._returns: deque[float] = deque(maxlen=window)
        self._lengths: deque[int] = deque(maxlen=window)
        self.total = 0
        self.this_iter = 0

    def add(self, return_: float, length: int) -> None:
        """A finished episode: its raw return and the number of its steps."""
        self.add_returns([return_])
        self.add_lengths([length])

    def add_returns(self, returns: Iterable[float], finished: int | None = None) -> None:
        """Returns of episodes whose lengths come by themselves, or never. `finished`: how many episodes have ended,
        where `returns` has only the newest of them."""
        before = list(map(float, returns))
        count = len(before) if finished is None else finished
        self._returns.extend(before)
        self.total += count
        self.this_iter += count

    def add_lengths(self, lengths: Iterable[float]) -> None:
        self._lengths.extend(int(length) for length in lengths)

    @property
    def return_mean(self) -> float | None:
        """Of the window; may be asked in any thread."""
        returns = list(self._returns)
        return math.fsum(returns) / len(returns) if returns else None

    def row(self) -> Row:
        """The statistics; the count of this iteration starts anew."""
        returns, lengths = self._returns, self._lengths
        out: Row = {
            "episode_return_mean": self.return_mean,
            "episode_return_min": min(returns) if returns else None,
            "episode_return_max": max(returns) if returns else None,
            "episode_length_mean": sum(lengths) / len(lengths) if lengths else None,
            "episodes_total": self.total,
            "episodes_this_iter": self.this_iter,
        }
        self.this_iter = 0
        return flatten_row(out)

    def get_state(self) -> dict[str, np.ndarray]:
        """Everything, as a tree."""
        return {
            "returns": np.array(self._returns, np.float64),
            "lengths": np.array(self._lengths, np.int64),
            "total": np.asarray(self.total),
            "this_iter": np.asarray(self.this_iter),
        }

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Go on from `get_state`."""
        try:
            returns, lengths = np.asarray(state["returns"]).tolist(), np.asarray(state["lengths"]).tolist()
            total, this_iter = int(state["total"]), int(state["this_iter"])
        except (KeyError, TypeError, ValueError) as e:
            raise DataError(f"not the state of episode statistics ({type(e).__name__}: {e})") from None
        if total < len(returns):
            raise DataError(
                f"not the state of episode statistics: {len(returns)} returns, {len(lengths)} lengths of {total}"
            )
        self._returns = deque(returns, self.window)
        self._lengths = deque(lengths, self.window)
        self.total, self.this_iter = total, this_iter
