"""The master: adds up the numbers of all processes of a session, and holds their shared values.

It writes TensorBoard's events and a row of `result.jsonl` every few seconds, and answers `query` and Prometheus.
Totals, values and counters are saved in the run directory (`master.state`): a master that is killed resumes from there.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import math
import threading
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from bray.cluster.protocol import Member
from bray.cluster.session import session
from bray.config.secrets import hide_launch
from bray.errors import BrayError, DataError, MissingComponent, UnknownName
from bray.http_server import HttpServer, Reply, Request, listening
from bray.limited_log import OncePer
from bray.metrics import ENV_STEPS, ITERATION, CsvSink, EpisodeStats, JsonlSink, Sinks, TensorBoardSink
from bray.rundir import RunDir, pack_state, unpack_state, write_atomic

logger = logging.getLogger("bray.remote")

WINDOW = 60.0
"""Seconds of a time window."""
EVERY = 5.0
"""Seconds between two rows."""
_STEP_TIMEOUT = 3.0
LAST = 100
"""Single values kept of a number for which a kind of LAST_KINDS is asked."""
LAST_KINDS = ("last_100_avg", "last_100_min", "last_100_max")
KINDS = ("sum", "cnt", "avg", "time_window_sum", "time_window_cnt", "time_window_avg", *LAST_KINDS)
_DEFAULT = "time_window_avg"
EPISODE_RETURN, EPISODE_LENGTH = "episode_return", "episode_length"
KEPT = (EPISODE_RETURN, EPISODE_LENGTH)
"""Numbers whose last values are always kept. In result rows they are what `bray train` writes: statistics of the last
100 episodes, whatever their labels."""
_ENV_STEPS = "env_steps"

Labels = tuple[tuple[str, str], ...]
Key = tuple[str, Labels]


@dataclass
class Merged:
    """Values of one number, added up."""

    sum: float = 0.0
    cnt: int = 0
    desc: dict[str, str] = field(default_factory=dict)
    values: deque[float] = field(default_factory=lambda: deque(maxlen=LAST))
    """The newest of them, oldest first; empty where only sums are asked for."""

    def add(self, other: Merged) -> None:
        self.sum += other.sum
        self.cnt += other.cnt
        self.desc |= other.desc
        self.values += other.values


class Series:
    """One number over time: totals, what came in the last WINDOW seconds, and the last LAST values where they are asked
    for."""

    def __init__(self, total: Merged):
        self.total = total
        self._window: deque[tuple[float, float, int]] = deque()  # (when, sum, cnt)

    def add(self, merged: Merged, now: float) -> None:
        self.total.add(merged)
        self._window.append((now, merged.sum, merged.cnt))

    @property
    def default(self) -> str:
        """The kind that is written under the number's own name."""
        return "last_100_avg" if self.total.values else _DEFAULT

    def numbers(self, now: float) -> dict[str, float | None]:
        """All KINDS."""
        while self._window and self._window[0][0] < now - WINDOW:
            self._window.popleft()
        t, values = self.total, self.total.values
        recent, count = sum(w[1] for w in self._window), sum(w[2] for w in self._window)
        return {
            "sum": t.sum,
            "cnt": float(t.cnt),
            "avg": t.sum / t.cnt if t.cnt else None,
            "time_window_sum": recent,
            "time_window_cnt": float(count),
            "time_window_avg": recent / count if count else None,
            "last_100_avg": math.fsum(values) / len(values) if values else None,
            "last_100_min": min(values, default=None),
            "last_100_max": max(values, default=None),
        }


class Master:
    """Plain object; `start` starts its timer and its Prometheus page."""

    def __init__(self, path: str, port: int = 0):
        self._path = Path(path)
        self._state = self._path / "master.state"
        self._port = port
        self._lock = threading.Lock()
        self._series: dict[Key, Series] = {}
        self._values: dict[str, Any] = {}
        self._unsaved: set[str] = set()  # keys of values that a restart forgets
        self._counters: dict[str, int] = {}
        self._episodes = EpisodeStats(LAST)
        self._model: str | None = None
        self._last_step: int | None = None  # the newest known step of that model
        self._step_is_final = False
        self._seconds, self._rows, self._since = 0.0, 0, time.monotonic()
        self._dirty = self._rows_elsewhere = False
        self._pending: list[tuple[bytes, int | None]] = []  # summaries
        self._once = OncePer()
        self._restore()
        self._board = TensorBoardSink(RunDir(path).tensorboard)
        self._sinks = Sinks([JsonlSink(self._path / "result.jsonl"), CsvSink(self._path / "progress.csv")])

    async def start(self) -> None:
        self._http = HttpServer(self._page)
        await self._http.listen(listening("127.0.0.1", self._port, "choose another metrics_port"))
        self._ticking = asyncio.ensure_future(self._tick())

    async def close(self) -> None:
        self._ticking.cancel()
        self._close()  # not in a thread: there are none when the interpreter ends

    def _close(self) -> None:
        self._http.close()
        for end in (self._row, self._save, self._board.close, self._sinks.close):
            try:
                end()
                self._rows_elsewhere = False  # a session without a trainer may come next
            except (BrayError, OSError) as e:
                logger.error("the master could not write its last numbers: %s", e)

    async def _tick(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(EVERY)
            try:
                await loop.run_in_executor(None, self._row)
                await loop.run_in_executor(None, self._save)
            except (BrayError, OSError) as e:
                if self._once.due():
                    logger.warning("the master could not write its numbers and will retry: %s", e)
            except Exception:
                logger.exception("the master could not write its numbers and will retry")

    # --- numbers ------------------------------------------------------------------------------------------------------

    def merged(self, rows: Mapping[Key, Merged]) -> None:
        now = time.monotonic()
        with self._lock:
            for key, merged in rows.items():
                if key not in self._series:
                    self._series[key] = Series(Merged())
                self._series[key].add(merged, now)
                if key[0] == EPISODE_RETURN:
                    self._episodes.add_returns(merged.values, merged.cnt)
                elif key[0] == EPISODE_LENGTH:
                    self._episodes.add_lengths(merged.values)
            self._dirty = True

    def query(self, name: str, kind: str = _DEFAULT, labels: Labels = ()) -> float | None:
        with self._lock:
            found = self._series.get((name, labels))
            if found is None:
                raise UnknownName("number", _tag(name, labels), [_tag(*key) for key in self._series], "bray.query")
            if kind not in KINDS:
                raise UnknownName("kind of number", kind, KINDS)
            return found.numbers(time.monotonic())[kind]

    def numbers(self) -> dict[str, dict[str, float | None]]:
        """All kinds of all numbers, by name."""
        with self._lock:
            return {_tag(*key): series.numbers(time.monotonic()) for key, series in self._series.items()}

    def reported(self) -> dict[str, Any]:
        """What agents and other processes have reported, for the row of the trainer that asks. From now on that one
        writes the rows; those of TensorBoard stay here."""
        self._rows_elsewhere = True
        with self._lock:
            row, _ = self._numbers_now(time.monotonic(), trainers=False)
            return row | (self._episodes.row() if self._episodes.total else {})

    def _elapsed(self) -> float:
        return self._seconds + time.monotonic() - self._since

    def _learner_step(self) -> int | None:
        """The step of the model that was chosen for the x axis; None where there is none, or it does not answer."""
        if self._model is None:
            return None
        if not self._step_is_final:
            try:
                keeper = session().cluster.find(f"model/{self._model}")
                self._last_step = keeper.call("step", timeout=_STEP_TIMEOUT).result()
            except BrayError as e:
                if self._once.due():
                    logger.warning("the step of model %r is unknown and left out of a row: %s", self._model, e)
                return None
        return self._last_step

    def _x(self) -> int:
        """Of TensorBoard's next points: the newest known step of the chosen model, else seconds."""
        return int(self._elapsed()) if self._model is None else self._last_step or 0

    async def training_has_ended(self) -> None:
        """The trainers have stopped: fetch the final step of the model while the model still runs."""
        if self._model is not None and not self._step_is_final:
            with contextlib.suppress(
                MissingComponent
            ):  # it was chosen when this trial ran before, and is not there now
                self._last_step = (
                    await session().cluster.find(f"model/{self._model}").call("step", timeout=_STEP_TIMEOUT)
                )
            self._step_is_final = True

    def _row(self) -> None:
        """A row of the results, and TensorBoard's points."""
        from tensorboard.compat.proto.summary_pb2 import Summary

        now = time.monotonic()
        with self._lock:
            if not self._dirty:
                return
            self._dirty = False
            pending, self._pending = self._pending, []
            row, points = self._numbers_now(now)
            if self._episodes.total:
                episodes = self._episodes.row()
                row |= episodes
                points |= {k: v for k, v in episodes.items() if k.startswith("episode_") and v is not None}
        step = self._learner_step()
        self._rows += 1
        head: dict[str, Any] = {ITERATION: self._rows, "time_total_s": self._elapsed()}
        if step is not None:
            head["learner_steps_total"] = step
        try:  # first: after a kill TensorBoard has every row that result.jsonl has
            for summary, at in pending:
                self._board.put(self._x() if at is None else at, Summary.FromString(summary))
            values = [Summary.Value(tag=tag, simple_value=value) for tag, value in points.items()]
            self._board.put(self._x(), Summary(value=values))
            self._board.flush()
        finally:
            if points and not self._rows_elsewhere:
                self._sinks.write(head | row)

    def _numbers_now(self, now: float, trainers: bool = True) -> tuple[dict[str, Any], dict[str, float]]:
        """(a row, TensorBoard's points by tag), without the episodes, and without what `trainers` reported. The lock is
        held."""
        row: dict[str, Any] = {}
        points: dict[str, float] = {}
        steps: list[dict[str, Any]] = []
        for (name, labels), series in self._series.items():
            if not trainers and "trainer" in dict(labels):
                continue
            tag, numbers = _tag(name, labels), series.numbers(now)
            if name == _ENV_STEPS:
                steps.append(numbers)
            elif name not in KEPT and (value := numbers[series.default]) is not None:
                row[tag] = value
            for kind in series.total.desc or (series.default,):
                if (value := numbers[kind]) is not None:
                    points[tag if kind == series.default else f"{tag}/{kind}"] = value
        if steps:
            row[ENV_STEPS] = int(sum(n["sum"] for n in steps))
            recent = sum(n["time_window_sum"] for n in steps)
            row["env_steps_per_second"] = recent / min(WINDOW, max(1.0, self._elapsed()))
        return row, points

    def prometheus(self) -> str:
        lines: list[str] = []
        with self._lock:
            known = sorted(self._series.items())
        last = None
        for (name, labels), series in known:
            base = "bray_" + "".join(c if c.isalnum() and c.isascii() else "_" for c in name)
            if base != last:
                text = next(iter(series.total.desc.values()), name).replace("\\", "\\\\").replace("\n", " ")
                lines += [f"# HELP {base} {text}", f"# TYPE {base} summary"]
                last = base
            text = "{" + ",".join(f"{k}={json.dumps(v)}" for k, v in labels) + "}" if labels else ""
            lines += [f"{base}_sum{text} {series.total.sum:.10g}", f"{base}_count{text} {series.total.cnt}"]
        lines += [
            "# HELP bray_seconds_total Seconds since the session began.",
            "# TYPE bray_seconds_total counter",
            f"bray_seconds_total {self._elapsed():.1f}",
        ]
        return "\n".join(lines) + "\n"

    async def _page(self, request: Request) -> Reply:
        found = request.path == "/metrics"
        body = await asyncio.to_thread(self.prometheus) if found else "expected /metrics\n"
        return Reply(200 if found else 404, body.encode(), "text/plain; version=0.0.4")

    def metrics_port(self) -> int:
        return self._http.port

    # --- TensorBoard --------------------------------------------------------------------------------------------------

    def set_tensorboard_step(self, model: str | None) -> None:
        self._model, self._last_step, self._step_is_final = model, None, False
        self._save()

    def add_summary(self, summary: bytes, step: int | None) -> None:
        """A Summary, as bytes (an image, a video, a histogram, a scalar). It is written with the next row."""
        with self._lock:
            self._pending.append((summary, step))
            self._dirty = True

    def add_histogram(self, tag: str, values: np.ndarray, step: int | None = None, bins: int = 30) -> None:
        """Of finite values. It is made here: importing TensorBoard would keep the games of another process waiting."""
        from tensorboard.compat.proto.summary_pb2 import HistogramProto, Summary

        counts, edges = np.histogram(values, bins=bins)
        made = HistogramProto(
            min=values.min(), max=values.max(), num=values.size, sum=values.sum(), sum_squares=(values * values).sum(),
            bucket_limit=edges[1:].tolist(), bucket=counts.tolist(),
        )  # fmt: skip
        self.add_summary(Summary(value=[Summary.Value(tag=tag, histo=made)]).SerializeToString(), step)

    def add_graph(self, graph: bytes) -> None:
        self._board.put_graph(graph)

    # --- shared values ------------------------------------------------------------------------------------------------

    def set(self, key: str, value: Any) -> None:
        with self._lock:
            self._values[key] = value
            self._unsaved.discard(key)
            try:
                pack_state(value)
            except DataError as e:
                self._unsaved.add(key)
                logger.warning("bray.set(%r): a master that is restarted forgets this value (%s)", key, e)
        self._save()

    def get(self, key: str, default: Any = None) -> Any:
        return self._values.get(key, default)

    def register(self, key: str) -> int:
        """0 for the first who asks with this key, 1 for the next, and so on."""
        with self._lock:
            number = self._counters.get(key, 0)
            self._counters[key] = number + 1
        self._save()
        return number

    # --- members ------------------------------------------------------------------------------------------------------

    async def start_member(
        self, name: str, cls: type, args: tuple[Any, ...], resources: dict[str, Any], kwargs: dict[str, Any]
    ) -> Member:
        """Start a member for a process that may end before the session does."""
        return await asyncio.to_thread(session().cluster.start, name, cls, *args, **resources, **kwargs)

    # --- what survives a restart --------------------------------------------------------------------------------------

    def _save(self) -> None:
        with self._lock:
            state = {
                "series": [
                    [name, [list(x) for x in labels], t.sum, t.cnt, dict(t.desc), list(t.values)]
                    for (name, labels), t in ((key, series.total) for key, series in self._series.items())
                ],
                "episodes": self._episodes.get_state(),
                "values": {
                    k: hide_launch(v) if k == "config" and isinstance(v, dict) else v
                    for k, v in self._values.items()
                    if k not in self._unsaved
                },
                "counters": dict(self._counters),
                "model": self._model,
                "seconds": self._elapsed(),
                "rows": self._rows,
                "rows_elsewhere": self._rows_elsewhere,
            }
            write_atomic(self._state, pack_state(state))

    def _restore(self) -> None:
        if not self._state.exists():
            return
        try:
            state = unpack_state(self._state.read_bytes())
            for name, labels, total, count, desc, *values in state["series"]:
                merged = Merged(total, count, desc, deque(*values, maxlen=LAST))
                self._series[name, tuple((k, v) for k, v in labels)] = Series(merged)
            if "episodes" in state:  # older trials have none
                self._episodes.set_state(state["episodes"])
            self._values, self._counters = state["values"], state["counters"]
            self._model, self._seconds, self._rows = state["model"], state["seconds"], state["rows"]
            self._rows_elsewhere = state.get("rows_elsewhere", False)
        except (DataError, KeyError, TypeError, ValueError) as e:
            logger.error("%s is damaged and set aside; the master starts from zero: %s", self._state, e)
            self._state.rename(self._state.with_suffix(".damaged"))


def _tag(name: str, labels: Labels) -> str:
    return name + ("{" + ",".join(f"{k}={v}" for k, v in labels) + "}" if labels else "")
