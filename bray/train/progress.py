"""What `train` returns and shows: an iterator of result rows, the files they go to, and a picture of them."""

from __future__ import annotations

import base64
import os
import socket
import time
import warnings
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bray.metrics import CsvSink, JsonlSink, Row, Sink, Sinks, TensorBoardSink, duration, short
from bray.rundir import RunDir

_HOSTNAME = socket.gethostname()


class Rows(Iterator[Row]):
    """Result rows; training advances when the next row is requested. Warns if no row ever was."""

    def __init__(self, rows: Generator[Row, None, None]):
        self._rows = rows
        self._begun = False

    def __next__(self) -> Row:
        self._begun = True
        return next(self._rows)

    def close(self) -> None:
        """End the training: what was learnt is saved."""
        self._begun = True
        self._rows.close()

    def __del__(self) -> None:
        if not self._begun:
            warnings.warn(
                "exp.train(...) trains while its rows are asked for, and nobody asked: nothing was trained. Write "
                "`for row in exp.train(...): ...`, or `exp.fit(...)` to train to the end",
                RuntimeWarning,
                stacklevel=2,
            )


_FILMS = {
    ".mp4": '<video controls loop src="data:video/mp4;base64,{}"></video>',
    ".gif": '<img src="data:image/gif;base64,{}">',
}


@dataclass(frozen=True)
class Picture:
    """A file with a picture or a film; notebooks show it where it is the last value of a cell."""

    path: Path

    def _repr_png_(self) -> bytes | None:
        return self.path.read_bytes() if self.path.suffix.lower() == ".png" else None

    def _repr_html_(self) -> str | None:
        tag = _FILMS.get(self.path.suffix.lower())
        return tag.format(base64.b64encode(self.path.read_bytes()).decode()) if tag else None

    def __fspath__(self) -> str:
        return str(self.path)


class LastRow(dict[str, Any]):
    """The last result row of a training, told in one line; notebooks show the learning curve with it."""

    def __init__(self, row: Mapping[str, Any], about: str, curve: Path):
        super().__init__(row)
        self.about, self.curve = about, curve

    def __repr__(self) -> str:
        steps, seconds = short(self.get("env_steps_total")), duration(self.get("time_total_s") or 0.0)
        scores = [f"{key} {short(self[key])}" for key in ("episode_return_mean", "eval/return_mean") if key in self]
        return f"<{self.about}: {', '.join([f'{steps} env steps', *scores, seconds])}; {len(self)} numbers, as a dict>"

    def _repr_png_(self) -> bytes | None:
        return self.curve.read_bytes() if self.curve.exists() else None


def open_sinks(directory: RunDir, more: Sequence[Sink] = (), board: bool = True) -> Sinks:
    """The files of a run that hold its rows, and `more`; TensorBoard's unless another process writes them."""
    # first: after a kill it has every row that result.jsonl has
    files: list[Sink] = [TensorBoardSink(directory.tensorboard)] if board else []
    return Sinks([*files, JsonlSink(directory.result_jsonl), CsvSink(directory.progress_csv), *more])


def when_and_where() -> dict[str, Any]:
    """Of a result row: local time, process and machine."""
    return {"date": time.strftime("%Y-%m-%d %H:%M:%S"), "pid": os.getpid(), "hostname": _HOSTNAME}


def describe(about: str, row: dict[str, Any] | None, place: Path | None, loaded: Path | None = None) -> str:
    """`repr` of an experiment; `loaded`: the checkpoint that its weights come from."""
    steps = f"{short(row.get('env_steps_total'))} env steps" if row else "not trained yet"
    if not row and loaded is not None:
        steps = f"loaded from {loaded}"
    returned = (row or {}).get("episode_return_mean")
    parts = [
        about,
        steps,
        *([] if returned is None else [f"return {short(returned)}"]),
        *([str(place)] if place else []),
    ]
    return f"<Experiment {', '.join(parts)}>"
