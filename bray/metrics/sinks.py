"""Where rows go: result.jsonl, progress.csv, TensorBoard."""

from __future__ import annotations

import contextlib
import csv
import errno
import io
import json
import logging
import os
import socket
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from bray.errors import CheckpointError, DataError, DiskFull
from bray.metrics.rows import ENV_STEPS, ITERATION, Row, flatten_row
from bray.rundir.files import DISK_FULL, write_atomic, writing

logger = logging.getLogger("bray")

_MOST_LATE = 100_000  # rows kept in memory while a disk is full, about 100 MB
_FLUSH_S = 2.0


class Sink(Protocol):
    """Where rows go."""

    def write(self, row: Row) -> None: ...
    def truncate_after(self, iteration: int, env_steps: int | None = None) -> None: ...
    def close(self) -> None: ...


class Sinks:
    """Rows to several sinks. One that fails does not keep the row from the others; then a clear error is raised. Where
    it is DiskFull the rows that are missing are kept, and written with the next one."""

    def __init__(self, sinks: Iterable[Sink]):
        self.sinks = list(sinks)
        self._late: list[deque[Row]] = [deque() for _ in self.sinks]

    def write(self, row: Mapping[str, Any]) -> None:
        flat = flatten_row(row)
        for late in self._late:
            late.append(flat)
        self._each(_write_late, "write a row")

    def truncate_after(self, iteration: int, env_steps: int | None = None) -> None:
        """Drop what came after the checkpoint of `iteration`, before going on from it."""
        self._each(lambda sink, _: sink.truncate_after(iteration, env_steps), "drop rows newer than the checkpoint")

    def close(self) -> None:
        try:
            self._each(_write_late, "write the last rows")
        finally:
            self._each(lambda sink, _: sink.close(), "close")

    def _each(self, do: Callable[[Sink, deque[Row]], None], what: str) -> None:
        failed: list[tuple[Sink, Exception]] = []
        for sink, late in zip(self.sinks, self._late, strict=True):
            try:
                do(sink, late)
            except Exception as e:
                failed.append((sink, e))
        if failed:
            sink, error = failed[0]
            if not isinstance(error, OSError):
                raise error
            path = getattr(sink, "path", "")
            full = error.errno in DISK_FULL
            why = "the disk is full. Free some space" if full else str(error)
            kind = DiskFull if full else CheckpointError
            raise kind(
                f"{type(sink).__name__} could not {what} ({path}): {why}. Rows written before are kept."
            ) from error

    def __enter__(self) -> Sinks:
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        try:
            self.close()
        except CheckpointError as e:
            if kind is None:
                raise
            logger.error("%s", e)  # beside the error that ends the run


def _write_late(sink: Sink, late: deque[Row]) -> None:
    while late:
        row = late.popleft()
        try:
            sink.write(row)
        except (DiskFull, OSError) as e:
            if isinstance(e, DiskFull) or e.errno in DISK_FULL:
                late.appendleft(row)
            if len(late) > _MOST_LATE:
                raise CheckpointError(f"{len(late):,} rows could not be written: {e}") from e
            raise


class _LineFile:
    """A sink's text file, which grows by whole lines: a line that cannot be written leaves no half line behind."""

    def __init__(self, path: str | Path):
        self.path = Path(path)
        with writing(self.path, "nothing was changed"):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._open()
            data = self.path.read_bytes()
            self._truncate(data.rfind(b"\n") + 1)  # a kill can leave half a line at the end

    def _open(self) -> None:
        self._file = open(self.path, "ab")  # noqa: SIM115

    def _append(self, line: str) -> None:
        end = self.path.stat().st_size
        try:
            self._file.write(line.encode())
            self._file.flush()
        except OSError:
            with contextlib.suppress(OSError):
                self._file.close()  # its buffer still holds the line
            os.truncate(self.path, end)
            self._open()
            raise

    def _truncate(self, size: int) -> None:
        self._file.close()
        os.truncate(self.path, size)
        self._open()

    def _replace(self, text: str) -> None:
        """New content for the whole file, or the old one."""
        self._file.close()
        try:
            write_atomic(self.path, text)
        finally:
            self._open()

    def close(self) -> None:
        self._file.close()


class JsonlSink(_LineFile):
    """`result.jsonl`: one line of JSON per iteration, on disk when `write` returns."""

    def write(self, row: Row) -> None:
        self._append(json.dumps(flatten_row(row), allow_nan=False) + "\n")

    def truncate_after(self, iteration: int, env_steps: int | None = None) -> None:
        end = 0
        for number, line in enumerate(self.path.read_bytes().splitlines(keepends=True), 1):
            try:
                newer = json.loads(line)[ITERATION] > iteration
            except (ValueError, KeyError, TypeError, RecursionError):
                raise DataError(f"{self.path}:{number}: expected a row with {ITERATION!r}, got {line[:60]!r}") from None
            if newer:
                break
            end += len(line)
        self._truncate(end)


class CsvSink(_LineFile):
    """`progress.csv`: a column per key. When a new key appears the file is rewritten, atomically, with one column
    more."""

    def __init__(self, path: str | Path):
        super().__init__(path)
        self._header: list[str] = next(iter(self._read()), [])

    def _read(self) -> list[list[str]]:
        try:
            with open(self.path, newline="", encoding="utf-8") as f:
                return list(csv.reader(f))
        except (csv.Error, UnicodeDecodeError) as e:
            raise DataError(f"{self.path}: expected the rows of a run, it cannot be read ({e}): put it aside") from None

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
        self._replace("".join(self._line(x) for x in lines))
        self._header = header

    def write(self, row: Row) -> None:
        row = {k: v.replace("\n", " ") if isinstance(v, str) else v for k, v in flatten_row(row).items()}
        new = [k for k in row if k not in self._header]
        if new:
            self._rewrite([*self._header, *new], self._read()[1:])
        self._append(self._line(row.get(k) for k in self._header))

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


class TensorBoardSink:
    """TensorBoard events: tags are the row's keys, x is `env_steps_total`. A row is on disk when `write` returns, other
    summaries a little later.
    Written with TensorBoard's own protobufs, without torch."""

    def __init__(self, dir: str | Path):
        self.path = Path(dir)
        self._flushed = time.monotonic()
        self._file: Any = None
        self._size = 0
        self._events = io.BytesIO()  # not in the file yet

    def _event(self, **fields: Any) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.summary.writer.record_writer import RecordWriter

        if self._file is None:
            self.path.mkdir(parents=True, exist_ok=True)
            stamp = time.time_ns()  # files are read in the order of their names
            name = f"events.out.tfevents.{stamp // 10**9:010d}.{socket.gethostname()}.{os.getpid()}.{stamp % 10**9:09d}"
            self._file, self._size = open(self.path / name, "ab", buffering=0), 0  # noqa: SIM115
            self._event(file_version="brain.Event:2")
        RecordWriter(self._events).write(Event(wall_time=time.time(), **fields).SerializeToString())

    def write(self, row: Row) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary

        numbers = {k: v for k, v in flatten_row(row).items() if isinstance(v, (int, float))}
        step = int(numbers.get(ENV_STEPS, numbers.get(ITERATION, 0)))
        self.put(step, Summary(value=[Summary.Value(tag=k, simple_value=v) for k, v in numbers.items()]))
        self.flush()

    def put(self, step: int, summary: Any) -> None:
        """A Summary of TensorBoard's own, of any kind."""
        self._event(step=step, summary=summary)
        if time.monotonic() - self._flushed >= _FLUSH_S:
            self.flush()

    def put_graph(self, graph: bytes) -> None:
        """A GraphDef, as bytes."""
        self._event(graph_def=graph)
        self.flush()

    def flush(self) -> None:
        """Everything to the file, or nothing and an error; then another file is begun."""
        data, self._events = self._events.getvalue(), io.BytesIO()
        self._flushed = time.monotonic()
        if self._file is None or not data:
            return
        try:
            if self._file.write(data) != len(data):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            self._size += len(data)
        except OSError:
            with contextlib.suppress(OSError):
                os.truncate(self._file.name, self._size)
            self._file.close()
            self._file = None
            raise

    def truncate_after(self, iteration: int, env_steps: int | None = None) -> None:
        """Event files only grow: a START mark tells TensorBoard to forget the steps after it."""
        from tensorboard.compat.proto.event_pb2 import SessionLog

        if env_steps is not None and self.path.is_dir():
            self._event(step=env_steps + 1, session_log=SessionLog(status=SessionLog.START))
            self.flush()

    def close(self) -> None:
        if self._file is not None:
            self.flush()
            self._file.close()
            self._file = None
