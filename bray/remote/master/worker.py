"""The master: what all processes of a session count, say and keep together ends here.

It writes TensorBoard's events and a row of `result.jsonl` every few seconds, answers `query` and Prometheus, and holds shared values. Totals,
values and counters are kept in the run directory (`master.state`): a master that is killed goes on where it was.
"""

from __future__ import annotations

import asyncio
import json
import logging
import threading
import time
from collections import deque
from collections.abc import Iterable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from bray.errors import BrayError, DataError, UnknownName
from bray.metrics import ENV_STEPS, ITERATION, CsvSink, JsonlSink, Sinks, TensorBoardSink
from bray.rundir import RunDir, pack_state, unpack_state, write_atomic

logger = logging.getLogger("bray.remote")

WINDOW = 60.0
"""Seconds of a time window."""
EVERY = 5.0
"""Seconds between two rows."""
KINDS = ("sum", "cnt", "avg", "time_window_sum", "time_window_cnt", "time_window_avg")
_DEFAULT = "time_window_avg"
_ROW_NAMES = {
    "env_steps": ENV_STEPS,
    "episode_return": "episode_return_mean",
    "episode_length": "episode_length_mean",
}
"""Numbers that go by the name that `bray train` gives them, over all labels, so that figures and stop conditions are the same."""

Labels = tuple[tuple[str, str], ...]
Merged = tuple[str, Labels, float, int, dict[str, str]]
"""(name, labels, sum, count, desc) of a while in one process."""


class Series:
    """One number over time: totals, and what came in the last WINDOW seconds."""

    def __init__(self, sum: float = 0.0, cnt: int = 0, desc: dict[str, str] | None = None):
        self.sum, self.cnt, self.desc = sum, cnt, desc or {}
        self._window: deque[tuple[float, float, int]] = deque()

    def add(self, sum: float, cnt: int, now: float) -> None:
        self.sum += sum
        self.cnt += cnt
        self._window.append((now, sum, cnt))

    def get(self, kind: str, now: float) -> float | None:
        while self._window and self._window[0][0] < now - WINDOW:
            self._window.popleft()
        if kind == "sum":
            return self.sum
        if kind == "cnt":
            return float(self.cnt)
        if kind == "avg":
            return self.sum / self.cnt if self.cnt else None
        total, count = sum(w[1] for w in self._window), sum(w[2] for w in self._window)
        if kind == "time_window_sum":
            return total
        if kind == "time_window_cnt":
            return float(count)
        if kind == "time_window_avg":
            return total / count if count else None
        raise UnknownName("kind of number", kind, KINDS)


class Master:
    """Plain object; `start` opens its clock and its Prometheus page."""

    def __init__(self, path: str, port: int = 0, every: float = EVERY):
        self._path = Path(path)
        self._state = self._path / "master.state"
        self._port, self._every = port, every
        self._lock = threading.Lock()
        self._series: dict[tuple[str, Labels], Series] = {}
        self._values: dict[str, Any] = {}
        self._lost: set[str] = set()  # keys of values that a restart forgets
        self._counters: dict[str, int] = {}
        self._model: str | None = None
        self._seconds, self._rows, self._since = 0.0, 0, time.monotonic()
        self._dirty = False
        self._pending: list[tuple[bytes, int | None]] = []  # summaries
        self._restore()
        self._board = TensorBoardSink(RunDir(path).tensorboard)
        self._sinks = Sinks([JsonlSink(self._path / "result.jsonl"), CsvSink(self._path / "progress.csv")])

    async def start(self) -> None:
        self._http = _serve_metrics(self, self._port)
        self._ticking = asyncio.ensure_future(self._tick())

    async def close(self) -> None:
        self._ticking.cancel()
        await asyncio.get_running_loop().run_in_executor(None, self._last)

    def _last(self) -> None:
        self._http.shutdown()
        self._http.server_close()
        self._row()
        self._save()
        self._board.close()
        self._sinks.close()

    async def _tick(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(self._every)
            try:
                await loop.run_in_executor(None, self._row)
                await loop.run_in_executor(None, self._save)
            except Exception:
                logger.exception("the master could not write its numbers; it goes on")

    # --- numbers ------------------------------------------------------------------------------------------------------

    def merged(self, rows: Iterable[Merged]) -> None:
        now = time.monotonic()
        with self._lock:
            for name, labels, total, count, desc in rows:
                series = self._series.setdefault((name, labels), Series())
                series.desc.update(desc)
                series.add(total, count, now)
            self._dirty = True

    def query(self, name: str, kind: str = _DEFAULT, labels: Labels = ()) -> float | None:
        with self._lock:
            found = self._series.get((name, labels))
            if found is None:
                raise UnknownName("number", _tag(name, labels), [_tag(*key) for key in self._series], "bray.query")
            return found.get(kind, time.monotonic())

    def numbers(self) -> dict[str, dict[str, float | None]]:
        """All that is known, by name."""
        now = time.monotonic()
        with self._lock:
            return {_tag(*key): {k: s.get(k, now) for k in KINDS} for key, s in self._series.items()}

    def _elapsed(self) -> float:
        return self._seconds + time.monotonic() - self._since

    def _step(self) -> int:
        """x of the next points: the model's step where one was chosen, else seconds."""
        if self._model is None:
            return int(self._elapsed())
        from bray.remote.model.handle import RemoteModel

        return RemoteModel(self._model).step

    def _row(self) -> None:
        """A row of the results, and TensorBoard's points."""
        from tensorboard.compat.proto.summary_pb2 import Summary

        now = time.monotonic()
        with self._lock:
            if not self._dirty:
                return
            self._dirty = False
            pending, self._pending = self._pending, []
            known = [
                (name, labels, dict(s.desc), {k: s.get(k, now) for k in KINDS})
                for (name, labels), s in self._series.items()
            ]
        try:
            step = self._step()
        except BrayError as e:
            logger.warning("TensorBoard's x axis is the step of model %r, which cannot be asked: %s", self._model, e)
            step = int(self._elapsed())
        self._rows += 1
        row: dict[str, Any] = {ITERATION: self._rows, "time_total_s": self._elapsed()}
        if self._model is not None:
            row["learner_steps_total"] = step
        values = []
        together: dict[str, list[dict[str, Any]]] = {}  # numbers of one name, whatever their labels
        for name, labels, desc, numbers in known:
            together.setdefault(name, []).append(numbers)
            tag = _tag(name, labels)
            if numbers[_DEFAULT] is not None and name not in _ROW_NAMES:
                row[tag] = numbers[_DEFAULT]
            for kind in desc or (_DEFAULT,):
                if numbers[kind] is not None:
                    point = tag if kind == _DEFAULT else f"{tag}/{kind}"
                    values.append(Summary.Value(tag=point, simple_value=numbers[kind]))
        for name, key in _ROW_NAMES.items():
            of = together.get(name, ())
            total, count = (sum(n[kind] for n in of) for kind in ("time_window_sum", "time_window_cnt"))
            if name == "env_steps" and of:
                row[key] = int(sum(n["sum"] for n in of))
                row["env_steps_per_second"] = total / min(WINDOW, max(1.0, self._elapsed()))
            elif count:
                row[key] = total / count
        if values:
            self._sinks.write(row)
        for summary, at in pending:
            self._board.put(step if at is None else at, Summary.FromString(summary))
        self._board.put(step, Summary(value=values))
        self._board.flush()

    def prometheus(self) -> str:
        lines: list[str] = []
        with self._lock:
            known = sorted(self._series.items())
        last = None
        for (name, labels), series in known:
            base = "bray_" + "".join(c if c.isalnum() and c.isascii() else "_" for c in name)
            if base != last:
                text = next(iter(series.desc.values()), name).replace("\\", "\\\\").replace("\n", " ")
                lines += [f"# HELP {base} {text}", f"# TYPE {base} summary"]
                last = base
            said = ",".join(f"{k}={json.dumps(v)}" for k, v in labels)
            said = f"{{{said}}}" if said else ""
            lines += [f"{base}_sum{said} {series.sum:.10g}", f"{base}_count{said} {series.cnt}"]
        lines += ["# TYPE bray_seconds_total counter", f"bray_seconds_total {self._elapsed():.1f}"]
        return "\n".join(lines) + "\n"

    def metrics_port(self) -> int:
        return self._http.server_address[1]

    # --- TensorBoard --------------------------------------------------------------------------------------------------

    def set_tensorboard_step(self, model: str | None) -> None:
        self._model = model
        self._save()

    def add_summary(self, summary: bytes, step: int | None) -> None:
        """A Summary, as bytes: images, videos, histograms, single scalars. It is written with the next row."""
        with self._lock:
            self._pending.append((summary, step))
            self._dirty = True

    def add_graph(self, graph: bytes) -> None:
        self._board.put_graph(graph)

    # --- shared values ------------------------------------------------------------------------------------------------

    def set(self, key: str, value: Any) -> None:
        with self._lock:
            self._values[key] = value
            self._lost.discard(key)
            try:
                pack_state(value)
            except DataError as e:
                self._lost.add(key)
                logger.warning("bray.set(%r): a master that is restarted forgets this value (%s)", key, e)
        self._save()

    def get(self, key: str, default: Any = None) -> Any:
        return self._values.get(key, default)

    def keys(self) -> list[str]:
        return sorted(self._values)

    def register(self, key: str) -> int:
        """0 for the first who asks with this key, 1 for the next, and so on."""
        with self._lock:
            number = self._counters.get(key, 0)
            self._counters[key] = number + 1
        self._save()
        return number

    # --- what survives ------------------------------------------------------------------------------------------------

    def _save(self) -> None:
        with self._lock:
            state = {
                "series": [
                    [n, [list(x) for x in ls], s.sum, s.cnt, dict(s.desc)] for (n, ls), s in self._series.items()
                ],
                "values": {k: v for k, v in self._values.items() if k not in self._lost},
                "counters": dict(self._counters),
                "model": self._model,
                "seconds": self._elapsed(),
                "rows": self._rows,
            }
            write_atomic(self._state, pack_state(state))

    def _restore(self) -> None:
        if not self._state.exists():
            return
        try:
            state = unpack_state(self._state.read_bytes())
            for name, labels, total, count, desc in state["series"]:
                self._series[name, tuple((k, v) for k, v in labels)] = Series(total, count, desc)
            self._values, self._counters = state["values"], state["counters"]
            self._model, self._seconds, self._rows = state["model"], state["seconds"], state["rows"]
        except (DataError, KeyError, TypeError, ValueError) as e:
            logger.error("%s is damaged and left alone; the master starts anew: %s", self._state, e)
            self._state.rename(self._state.with_suffix(".damaged"))


def _tag(name: str, labels: Labels) -> str:
    return name + ("{" + ",".join(f"{k}={v}" for k, v in labels) + "}" if labels else "")


def _serve_metrics(master: Master, port: int) -> ThreadingHTTPServer:
    class Page(BaseHTTPRequestHandler):
        timeout = 10.0

        def do_GET(self) -> None:
            found = self.path.split("?")[0] == "/metrics"
            body = (master.prometheus() if found else "expected /metrics\n").encode()
            self.send_response(200 if found else 404)
            self.send_header("Content-Type", "text/plain; version=0.0.4")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            """Prometheus asks every few seconds: not worth a line."""

    server = ThreadingHTTPServer(("127.0.0.1", port), Page)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, name="bray-metrics", daemon=True).start()
    return server
