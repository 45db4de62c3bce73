"""What ends a run, and which checkpoint is the best: both are said by keys of the result rows."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from bray.errors import ConfigError, UnknownName
from bray.metrics.rows import SIDE
from bray.metrics.spent import BETWEEN, CPU, PHASES, QUEUED
from bray.train.awaited import CUSTOM, OWN_KEYS, Awaited
from bray.train.config import RunConfig

STOP_ALIASES = {"episode_reward_mean": "episode_return_mean", "timesteps_total": "env_steps_total"}
"""Names that people from RLlib type."""
LIVE_SCORE = "game_return_median"
"""Of rows of live games: the median over games of the mean return of each, so that a game that lies has one vote."""
STOP_COUNTS = ("episodes_total", "env_steps_total", "learner_steps_total", "training_iteration")
"""Stop conditions that count; -1 is no limit."""
STOP_KEYS = (
    "episode_return_mean",
    "episode_return_max",
    "episode_length_mean",
    *STOP_COUNTS,
    "time_total_s",
    "eval/return_mean",
    LIVE_SCORE,
)
ROW_KEYS = (
    *STOP_KEYS,
    "episode_return_min",
    "episodes_this_iter",
    "env_steps_per_second",
    "time_this_iter_s",
    *(f"eval/{k}" for k in ("return_min", "return_max", "return_ci95", "length_mean", "episodes", "env_steps")),
    *(f"perf/{k}" for k in (*PHASES, CPU, QUEUED, BETWEEN)),
)
"""Keys of the rows of every algorithm."""
VOLATILE = ("time_", "perf/", "date", "pid", "hostname")
"""Prefixes of result keys that differ between two runs of one seed (and so does everything `*_per_second`)."""


def check_stop(stop: Mapping[str, Any]) -> dict[str, float]:
    """A stop condition with its aliases resolved, without counts of -1 (no limit); unknown names get the nearest
    one."""
    out: dict[str, float] = {}
    for key, value in stop.items():
        name = STOP_ALIASES.get(key, key)
        if name not in STOP_KEYS and not name.startswith(("loss/", "eval/", SIDE, CUSTOM)):
            raise UnknownName("stop name", key, [*STOP_KEYS, *STOP_ALIASES], "run.stop")
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise ConfigError(f"run.stop.{key}: expected a number, got {value!r}")
        if name in STOP_COUNTS and value == -1:
            continue
        if name in STOP_COUNTS and (value <= 0 or value % 1):
            raise ConfigError(f"run.stop.{key}: expected a whole number > 0, or -1 for no limit, got {value:g}")
        out[name] = value
    return out


def reached(stop: Mapping[str, float], row: Mapping[str, Any] | None) -> dict[str, float]:
    """The stop conditions that hold in a result row, with its values."""
    found = {key: (row or {}).get(key) for key in stop}
    return {key: value for key, value in found.items() if value is not None and value >= stop[key]}


def awaited_of(stop: Mapping[str, float]) -> list[Awaited]:
    """Its keys that a row has to have one day. A preset's goal for evaluations does no harm beside another condition
    where nothing is evaluated."""
    alone = all(key.startswith("eval/") for key in stop)
    return [Awaited(key, "run.stop") for key in stop if alone or not key.startswith("eval/")]


def current(row: Mapping[str, Any]) -> Mapping[str, Any]:
    """A row without an evaluation that is of older weights than those that its iteration ended with."""
    if row.get("eval/env_steps", row.get("env_steps_total")) == row.get("env_steps_total"):
        return row
    return {k: v for k, v in row.items() if not k.startswith("eval/")}


class Score:
    """The score by which checkpoints are compared (`checkpoint_score`); larger is better."""

    def __init__(self, run: RunConfig, live: bool = False):
        own = "eval/return_mean" if run.eval_freq else LIVE_SCORE if live else "episode_return_mean"
        self.name = run.checkpoint_score or own
        self.key = self.name.removeprefix("-")
        self.awaited = Awaited(self.key, "run.checkpoint_score")
        if self.key not in ROW_KEYS and not self.key.startswith((*OWN_KEYS, SIDE, CUSTOM)):
            raise UnknownName("key of a result row", self.key, ROW_KEYS, "run.checkpoint_score")
        if run.eval_parallel and not run.eval_freq:
            raise ConfigError("run.eval_parallel: nothing is evaluated: set eval_freq (--eval-freq N)")
        if self.key.startswith("eval/") and not run.eval_freq:
            raise ConfigError(
                f"run.checkpoint_score is {self.name!r}, but nothing is evaluated: set eval_freq (--eval-freq N)"
            )

    def of(self, row: Mapping[str, Any]) -> float | None:
        """The score of a result row; None where it does not say."""
        value = row.get(self.key)
        if value is None or not math.isfinite(value):
            return None
        return -value if self.name.startswith("-") else value

    best: float | None = None
    """Of the checkpoints so far."""

    def is_better(self, score: float | None) -> bool:
        return score is not None and (self.best is None or score > self.best)
