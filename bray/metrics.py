"""Numbers of a run: collected within an iteration, flattened to one row, written to sinks.

A **row** is a flat dict of scalars (`loss/policy`, `perf/env`, `episode_return_mean`). It never holds NaN or infinity: such a value
becomes None and its name is listed under `nan_metrics`. With no finished episode the episode statistics are None.

A sink is anything with `write(row)`, `truncate_after(iteration, env_steps)` and `close()`. On resume, `truncate_after` drops what a
killed run wrote after its last checkpoint, so that the files of a resumed run equal those of one never interrupted.
"""

from __future__ import annotations

import contextlib
import csv
import errno
import io
import json
import math
import os
import signal
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Protocol

import numpy as np

from bray.errors import CheckpointError, ConfigError, DataError

ITERATION = "training_iteration"
"""The key that numbers the rows of a run."""
ENV_STEPS = "env_steps_total"
"""The key that is the x axis of every curve."""
NAN_METRICS = "nan_metrics"

Row = dict[str, Any]


def flatten_row(values: Mapping[str, Any]) -> Row:
    """Nested results as one flat row of Python scalars: keys joined by '/', NaN and infinity as None and listed."""
    row: Row = {}
    bad: list[str] = list(values.get(NAN_METRICS) or [])

    def add(key: str, value: Any) -> None:
        if isinstance(value, Mapping):
            for k, v in value.items():
                add(f"{key}/{k}", v)
            return
        value = _scalar(value)
        if isinstance(value, float) and not math.isfinite(value):
            bad.append(key)
            value = None
        row[key] = value

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
        items = [_scalar(v) for v in value]
        return [None if isinstance(v, float) and not math.isfinite(v) else v for v in items]
    if getattr(value, "ndim", None) == 0 or isinstance(value, np.generic):
        return value.item()
    if hasattr(value, "numel") and value.numel() == 1:
        return value.item()
    if isinstance(value, np.ndarray):
        return _scalar(value.tolist())
    return str(value)


# --- collecting ---------------------------------------------------------------------------------------------------------


class Metric(Protocol):
    """A metric of your own: `update` takes what is reported, `compute` gives a number (or a dict of them), `reset` starts anew."""

    def update(self, value: Any) -> None: ...
    def compute(self) -> Any: ...
    def reset(self) -> None: ...


class Metrics:
    """What happens within one iteration. `row()` gives it as flat scalars and starts the next iteration; counters go on."""

    def __init__(self) -> None:
        self._means: dict[str, list[float]] = {}  # name -> [weighted sum, weight]
        self._counts: dict[str, float] = {}
        self._timers: dict[str, float] = {}
        self._samples: dict[str, tuple[list[np.ndarray], tuple[float, ...]]] = {}
        self._values: dict[str, Any] = {}
        self._custom: dict[str, Metric] = {}

    def mean(self, name: str, value: Any, weight: float = 1.0) -> None:
        """The weighted mean of everything reported in the iteration; a value may be an array."""
        entry = self._means.setdefault(name, [0.0, 0.0])
        if isinstance(value, np.ndarray) and value.ndim:
            if value.size == 0:
                return
            value, weight = float(value.mean(dtype=np.float64)), weight * value.size
        if weight < 0:
            raise ConfigError(f"metric {name!r}: expected a weight >= 0, got {weight}")
        if weight:
            entry[0] += float(value) * weight
            entry[1] += weight

    def count(self, name: str, n: float = 1) -> None:
        """A total over the whole run."""
        self._counts[name] = self._counts.get(name, 0) + n

    def counter(self, name: str) -> float:
        """The present total of a counter; 0 if nothing was counted."""
        return self._counts.get(name, 0)

    def value(self, name: str, x: Any) -> None:
        """The last value reported in the iteration."""
        self._values[name] = x

    def percentiles(self, name: str, values: Any, at: Sequence[float] = (50, 99)) -> None:
        """`<name>_p50`, `<name>_p99`, ... over everything reported in the iteration."""
        if not all(0 <= p <= 100 for p in at):
            raise ConfigError(f"metric {name!r}: percentiles lie within 0..100, got {tuple(at)}")
        chunks, _ = self._samples.setdefault(name, ([], tuple(at)))
        chunks.append(np.asarray(values, np.float64).ravel().copy())

    @contextlib.contextmanager
    def timer(self, name: str) -> Iterator[None]:
        """Milliseconds spent inside, summed over the iteration, as `perf/<name>`."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self._timers[name] = self._timers.get(name, 0.0) + (time.perf_counter() - start) * 1e3

    def custom(self, name: str, metric: Metric) -> Metric:
        """Add a metric object of your own; `row()` computes and resets it."""
        for method in ("update", "compute", "reset"):
            if not callable(getattr(metric, method, None)):
                raise ConfigError(
                    f"metric {name!r}: expected an object with update, compute and reset, {method} is missing"
                )
        self._custom[name] = metric
        return metric

    def update(self, name: str, value: Any) -> None:
        """Report to a metric object."""
        self._custom[name].update(value)

    def row(self) -> Row:
        """The iteration as flat scalars. Everything but counters starts anew."""
        out: dict[str, Any] = dict(self._counts)
        out |= {k: total / weight for k, (total, weight) in self._means.items() if weight}
        out |= self._values
        for name, (chunks, at) in self._samples.items():
            joined = np.concatenate(chunks)
            quantiles = np.percentile(joined, at) if joined.size else [None] * len(at)
            out |= {f"{name}_p{p:g}": q for p, q in zip(at, quantiles, strict=True)}
        for name, metric in self._custom.items():
            out[name] = metric.compute()
            metric.reset()
        out |= {f"perf/{k}": ms for k, ms in self._timers.items()}
        for store in (self._means, self._values, self._samples, self._timers):
            store.clear()
        return flatten_row(out)

    def get_state(self) -> dict[str, Any]:
        """Counters as a tree, for checkpoints."""
        return {"counters": {k: np.asarray(v) for k, v in self._counts.items()}}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Counters go on from a checkpoint's."""
        try:
            self._counts = {k: np.asarray(v).item() for k, v in state["counters"].items()}
        except (KeyError, AttributeError, ValueError) as e:
            raise DataError(f"not the state of metrics: expected counters ({type(e).__name__}: {e})") from None


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
        """Returns of episodes whose lengths come by themselves, or never. `finished`: how many episodes have ended, where `returns` has
        only the newest of them."""
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
            "episode_return_mean": math.fsum(returns) / len(returns) if returns else None,
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


class Timer:
    """`with Timer() as t: ...; t.seconds`. `sync` (torch.cuda.synchronize) is called at both ends, to time work on a device."""

    def __init__(self, sync: Callable[[], Any] | None = None):
        self._sync = sync
        self.seconds = 0.0

    def __enter__(self) -> Timer:
        if self._sync:
            self._sync()
        self._start = time.perf_counter()
        return self

    def __exit__(self, *exc: object) -> None:
        if self._sync:
            self._sync()
        self.seconds = time.perf_counter() - self._start


class Watchdog:
    """`with Watchdog(30): ...` raises TimeoutError inside when it takes longer. Main thread and POSIX only (SIGALRM)."""

    def __init__(self, seconds: float, what: str = "this"):
        if not seconds > 0:
            raise ConfigError(f"a watchdog needs a time > 0 s, got {seconds}")
        self.seconds, self.what = seconds, what

    def __enter__(self) -> Watchdog:
        if threading.current_thread() is not threading.main_thread():
            raise ConfigError("a watchdog works in the main thread only: signals arrive there")
        self._old = signal.signal(signal.SIGALRM, self._bark)
        signal.setitimer(signal.ITIMER_REAL, self.seconds)
        return self

    def _bark(self, signum: int, frame: FrameType | None) -> None:
        raise TimeoutError(f"{self.what} took longer than {self.seconds:g} s")

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, self._old)


# --- sinks --------------------------------------------------------------------------------------------------------------


class Sink(Protocol):
    """Where rows go."""

    def write(self, row: Row) -> None: ...
    def truncate_after(self, iteration: int, env_steps: int | None = None) -> None: ...
    def close(self) -> None: ...


class Sinks:
    """Rows to several sinks. One that fails (a full disk) does not keep the row from the others; then a clear error is raised."""

    def __init__(self, sinks: Iterable[Sink]):
        self.sinks = list(sinks)

    def write(self, row: Mapping[str, Any]) -> None:
        flat = flatten_row(row)
        self._each(lambda sink: sink.write(flat), "write a row")

    def truncate_after(self, iteration: int, env_steps: int | None = None) -> None:
        """Drop what came after the checkpoint of `iteration`, before going on from it."""
        self._each(lambda sink: sink.truncate_after(iteration, env_steps), "drop rows newer than the checkpoint")

    def close(self) -> None:
        self._each(lambda sink: sink.close(), "close")

    def _each(self, do: Callable[[Sink], None], what: str) -> None:
        failed: list[tuple[Sink, Exception]] = []
        for sink in self.sinks:
            try:
                do(sink)
            except Exception as e:
                failed.append((sink, e))
        if failed:
            sink, error = failed[0]
            if not isinstance(error, OSError):
                raise error
            path = getattr(sink, "path", "")
            full = "the disk is full" if error.errno in (errno.ENOSPC, errno.EDQUOT) else str(error)
            raise CheckpointError(
                f"{type(sink).__name__} could not {what} ({path}): {full}. Rows written before are kept."
            ) from error

    def __enter__(self) -> Sinks:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class _LineFile:
    """A text file that grows by whole lines: a line that cannot be written leaves no half line behind."""

    def __init__(self, path: str | Path):
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file = open(self.path, "ab")  # noqa: SIM115
        self._drop_half_line()

    def _drop_half_line(self) -> None:
        """A kill can leave half a line at the end; a reader would trip over it."""
        data = self.path.read_bytes()
        end = data.rfind(b"\n") + 1
        if end != len(data):
            self.truncate(end)

    def append(self, line: bytes) -> None:
        end = self.path.stat().st_size
        try:
            self._file.write(line)
            self._file.flush()
        except OSError:
            with contextlib.suppress(OSError):
                self._file.close()  # its buffer still holds the line
            os.truncate(self.path, end)
            self._file = open(self.path, "ab")  # noqa: SIM115
            raise

    def truncate(self, size: int) -> None:
        self._file.flush()
        os.truncate(self.path, size)
        self._file.close()
        self._file = open(self.path, "ab")  # noqa: SIM115

    def replace(self, data: bytes) -> None:
        """New content for the whole file, or the old one."""
        from bray.rundir import write_atomic

        self._file.close()
        try:
            write_atomic(self.path, data)
        finally:
            self._file = open(self.path, "ab")  # noqa: SIM115

    def close(self) -> None:
        if not self._file.closed:
            self._file.close()


class JsonlSink:
    """`result.jsonl`: one line of JSON per iteration, on disk when `write` returns."""

    def __init__(self, path: str | Path):
        self.path = Path(path)
        self._out = _LineFile(path)

    def write(self, row: Row) -> None:
        self._out.append(json.dumps(flatten_row(row), allow_nan=False).encode() + b"\n")

    def truncate_after(self, iteration: int, env_steps: int | None = None) -> None:
        end = 0
        for number, line in enumerate(self.path.read_bytes().splitlines(keepends=True), 1):
            try:
                newer = json.loads(line)[ITERATION] > iteration
            except (ValueError, KeyError, TypeError):
                raise DataError(f"{self.path}:{number}: expected a row with {ITERATION!r}, got {line[:60]!r}") from None
            if newer:
                break
            end += len(line)
        self._out.truncate(end)

    def close(self) -> None:
        self._out.close()


class CsvSink:
    """`progress.csv`: a column per key. When a new key appears the file is rewritten, atomically, with one column more."""

    def __init__(self, path: str | Path):
        self.path = Path(path)
        self._out = _LineFile(path)
        rows = self._read()
        self._header: list[str] = rows[0] if rows else []

    def _read(self) -> list[list[str]]:
        with open(self.path, newline="", encoding="utf-8") as f:
            return list(csv.reader(f))

    @staticmethod
    def _line(cells: Iterable[Any]) -> str:
        out = io.StringIO()
        csv.writer(out, lineterminator="\n").writerow(
            ["" if c is None else json.dumps(c) if isinstance(c, (list, dict)) else c for c in cells]
        )
        return out.getvalue()

    def _rewrite(self, header: list[str], rows: Iterable[Sequence[str]]) -> None:
        width = len(header)
        lines = [header, *([*r, *[""] * (width - len(r))] for r in rows)] if header else []
        self._out.replace("".join(self._line(x) for x in lines).encode())
        self._header = header

    def write(self, row: Row) -> None:
        row = {k: v.replace("\n", " ") if isinstance(v, str) else v for k, v in flatten_row(row).items()}
        new = [k for k in row if k not in self._header]
        if new:
            self._rewrite([*self._header, *new], self._read()[1:])
        self._out.append(self._line(row.get(k) for k in self._header).encode())

    def truncate_after(self, iteration: int, env_steps: int | None = None) -> None:
        rows = self._read()
        if not rows:
            return
        if ITERATION not in self._header:
            raise DataError(f"{self.path}: expected a column {ITERATION!r}, got {', '.join(self._header)}")
        at = self._header.index(ITERATION)
        # columns stay even if only dropped rows filled them: the same keys will come again, in the same order
        self._rewrite(
            self._header, [r for r in rows[1:] if len(r) > at and r[at].isdigit() and int(r[at]) <= iteration]
        )

    def close(self) -> None:
        self._out.close()


class TensorBoardSink:
    """TensorBoard events: tags are the row's keys, x is `env_steps_total`. Written with TensorBoard's own protobufs, without torch."""

    def __init__(self, dir: str | Path, flush_s: float = 2.0):
        self.path = Path(dir)
        self._flush_s = flush_s
        self._flushed = time.monotonic()
        self._file: io.BufferedWriter | None = None

    def _event(self, **fields: Any) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.tensorflow_stub.pywrap_tensorflow import masked_crc32c

        if self._file is None:
            self.path.mkdir(parents=True, exist_ok=True)
            stamp = time.time_ns()  # files are read in the order of their names
            name = f"events.out.tfevents.{stamp // 10**9:010d}.{socket.gethostname()}.{os.getpid()}.{stamp % 10**9:09d}"
            self._file = open(self.path / name, "wb")  # noqa: SIM115
            self._event(file_version="brain.Event:2")
        data = Event(wall_time=time.time(), **fields).SerializeToString()
        head = struct.pack("<Q", len(data))
        crc = struct.pack("<I", masked_crc32c(head)), struct.pack("<I", masked_crc32c(data))
        self._file.write(head + crc[0] + data + crc[1])

    def write(self, row: Row) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary

        numbers = {k: v for k, v in flatten_row(row).items() if isinstance(v, (int, float))}
        step = int(numbers.get(ENV_STEPS, numbers.get(ITERATION, 0)))
        self.put(step, Summary(value=[Summary.Value(tag=k, simple_value=v) for k, v in numbers.items()]))

    def put(self, step: int, summary: Any) -> None:
        """A Summary of TensorBoard's own, of any kind."""
        self._event(step=step, summary=summary)
        if time.monotonic() - self._flushed >= self._flush_s:
            self.flush()

    def put_graph(self, graph: bytes) -> None:
        """A GraphDef, as bytes."""
        self._event(graph_def=graph)
        self.flush()

    def flush(self) -> None:
        if self._file is not None:
            self._file.flush()
        self._flushed = time.monotonic()

    def truncate_after(self, iteration: int, env_steps: int | None = None) -> None:
        """Event files only grow: a START mark tells TensorBoard to forget the steps after it."""
        from tensorboard.compat.proto.event_pb2 import SessionLog

        if env_steps is not None and self.path.is_dir():
            self._event(step=env_steps + 1, session_log=SessionLog(status=SessionLog.START))
            self.flush()

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


# --- the terminal -------------------------------------------------------------------------------------------------------


def short(x: Any) -> str:
    """A number for people: 12,345 · 0.0123 · 1.2e-05 · – for None."""
    if x is None:
        return "–"
    if isinstance(x, (bool, str, list)):
        return str(x)
    if isinstance(x, int) or (float(x).is_integer() and abs(x) < 1e15):
        return f"{int(x):,}"
    size = abs(x)
    if size >= 1000:
        return f"{x:,.0f}"
    if size >= 10:
        return f"{x:.1f}"
    return f"{x:.3f}" if size >= 0.01 else f"{x:.2g}"


def duration(seconds: float) -> str:
    """1:02:03, 2:03 or 3.4 s."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, s = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{s:02}" if hours else f"{minutes}:{s:02}"


class TerminalSink:
    """Progress for people: a live table in a terminal, else one line every `every` seconds."""

    def __init__(
        self,
        title: str = "",
        stop: Mapping[str, float] | None = None,
        console: Any = None,
        every: float = 5.0,
        clock: Callable[[], float] = time.monotonic,
    ):
        from rich.console import Console

        self.console = console or Console()
        self.title, self.stop, self.every, self._clock = title, dict(stop or {}), every, clock
        self._first: dict[str, float] = {}
        self._last: Row | None = None
        self._shown: Row | None = None
        self._at = -math.inf
        self._live: Any = None

    def progress(self, row: Row) -> float | None:
        """How near the run is to the first of its stop conditions to come, 0..1; None without one."""
        done = []
        for key, target in self.stop.items():
            x = row.get(key)
            if isinstance(x, (int, float)) and isinstance(target, (int, float)):
                # totals start at 0; a return starts wherever the first agent's was
                start = 0.0 if "total" in key or key == ITERATION else self._first.setdefault(key, float(x))
                done.append(1.0 if x >= target else (x - start) / (target - start))
        return min(1.0, max(0.0, *done)) if done else 0.0 if self.stop else None

    def write(self, row: Row) -> None:
        row = flatten_row(row)
        self._last, now = row, self._clock()
        fraction = self.progress(row)
        wait = 0.1 if self.console.is_terminal else self.every
        if now - self._at < wait:
            return
        self._at, self._shown = now, row
        if self.console.is_terminal:
            if self._live is None:
                from rich.live import Live

                self._live = Live(console=self.console, auto_refresh=False)
                self._live.start()
            self._live.update(self._table(row, fraction), refresh=True)
        else:
            self.console.print(self._text(row, fraction), markup=False, highlight=False, soft_wrap=True)

    def _text(self, row: Row, fraction: float | None) -> str:
        parts = [f"iter {short(row.get(ITERATION))}", f"steps {short(row.get(ENV_STEPS))}"]
        if row.get("env_steps_per_second") is not None:
            parts.append(f"{short(round(row['env_steps_per_second']))}/s")
        if row.get("episode_return_mean") is None:
            parts.append("no finished episode yet")
        else:
            parts += [f"return {short(row['episode_return_mean'])}", f"length {short(row.get('episode_length_mean'))}"]
        parts += [f"{k} {short(v)}" for k, v in _main(row)]
        if row.get("time_total_s") is not None:
            parts.append(duration(row["time_total_s"]))
        if fraction is not None:
            parts.append(f"{fraction:.0%}")
        if row.get(NAN_METRICS):
            parts.append("NOT A NUMBER: " + ", ".join(row[NAN_METRICS]))
        return "  ".join(parts)

    def _table(self, row: Row, fraction: float | None) -> Any:
        from rich.console import Group
        from rich.panel import Panel
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        grid = Table.grid(padding=(0, 3))
        for justify in ("left", "right", "left", "right"):
            grid.add_column(justify=justify)
        ranged = row.get("episode_return_min"), row.get("episode_return_max")
        returned = short(row.get("episode_return_mean"))
        if row.get("episode_return_mean") is None:
            returned = "no finished episode yet"
        elif None not in ranged:
            returned += f"  ({short(ranged[0])} … {short(ranged[1])})"
        speed = row.get("env_steps_per_second")
        cells = [
            ("iteration", short(row.get(ITERATION))),
            ("return", returned),
            ("env steps", short(row.get(ENV_STEPS))),
            ("episode length", short(row.get("episode_length_mean"))),
            ("steps/s", short(None if speed is None else round(speed))),
            ("time", duration(row.get("time_total_s") or 0.0)),
            *((k, short(v)) for k, v in _main(row)),
        ]
        for i in range(0, len(cells), 2):
            (a, x), (b, y) = cells[i], cells[i + 1] if i + 1 < len(cells) else ("", "")
            grid.add_row(Text(a, "dim"), Text(x, "bold"), Text(b, "dim"), Text(y, "bold"))
        parts: list[Any] = [grid]
        if fraction is not None:
            goal = ", ".join(f"{k} {short(v)}" for k, v in self.stop.items())
            bar = Table.grid(padding=(0, 2))
            bar.add_row(ProgressBar(total=1.0, completed=fraction, width=36), Text(f"{fraction:.0%} of {goal}", "dim"))
            parts += [Text(), bar]
        if row.get(NAN_METRICS):
            parts.append(Text("not a number: " + ", ".join(row[NAN_METRICS]), "bold red"))
        return Panel(Group(*parts), title=Text(self.title), title_align="left", expand=False, border_style="dim")

    def truncate_after(self, iteration: int, env_steps: int | None = None) -> None:
        """What was printed stays printed; the next row is shown at once."""
        self._at = -math.inf

    def close(self) -> None:
        """Show the last row if it was not, and leave the terminal as it was."""
        if self._last is not None and self._shown is not self._last:
            self._at = -math.inf
            self.write(self._last)
        if self._live is not None:
            self._live.stop()
            self._live = None


def _main(row: Row, most: int = 6) -> list[tuple[str, Any]]:
    """The numbers worth a place on the screen besides the fixed ones: evaluation first, then losses."""
    keys = [k for k in row if k.startswith("eval/") and k.endswith("mean")] + [k for k in row if k.startswith("loss/")]
    return [(k, row[k]) for k in keys if isinstance(row[k], (int, float))][:most]


def pretty_print(result: Mapping[str, Any]) -> str:
    """A result as YAML text, without its config."""
    import yaml

    def plain(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {str(k): plain(v) for k, v in value.items()}
        value = _scalar(value)
        return None if isinstance(value, float) and not math.isfinite(value) else value

    return yaml.safe_dump(
        {str(k): plain(v) for k, v in result.items() if k != "config"},
        default_flow_style=False,
        sort_keys=False,
        allow_unicode=True,
    )
