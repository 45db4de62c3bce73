"""Numbers of a run: flattened to one row per iteration, written to sinks.

A **row** is a flat dict of scalars (`loss/policy`, `perf/env`, `episode_return_mean`). It never holds NaN or infinity:
such a value becomes None and its name is listed under `nan_metrics`. With no finished episode the episode statistics
are None.

A sink is anything with `write(row)`, `truncate_after(iteration, env_steps)` and `close()`. On resume, `truncate_after`
drops what a killed run wrote after its last checkpoint, so that the files of a resumed run equal those of one never
interrupted.
"""

from bray.metrics.rows import (
    ENV_STEPS,
    HEALTH,
    ITERATION,
    NAN_METRICS,
    EpisodeStats,
    Row,
    flatten_row,
    number,
    pretty_print,
)
from bray.metrics.sinks import CsvSink, JsonlSink, Sink, Sinks, TensorBoardSink
from bray.metrics.terminal import TerminalSink, duration, short
from bray.metrics.timing import Timer, Watchdog

__all__ = [
    "ENV_STEPS",
    "HEALTH",
    "ITERATION",
    "NAN_METRICS",
    "CsvSink",
    "EpisodeStats",
    "JsonlSink",
    "Row",
    "Sink",
    "Sinks",
    "TensorBoardSink",
    "TerminalSink",
    "Timer",
    "Watchdog",
    "duration",
    "flatten_row",
    "number",
    "pretty_print",
    "short",
]
