"""A run's `graph.onnx`, exported in a process of its own: torch does not come along into a service, nor the exporter
into a training, whose random numbers and memory stay its own."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from bray.errors import ConfigError

logger = logging.getLogger("bray.serving")

_TURN_S = 0.25  # between two looks at who hurries
_SILENT_S = 5.0  # of waiting, before it is said

_CODE = """
import sys
from bray.errors import BrayError, ExportError
from bray.experiment import export_graph
try:
    export_graph(sys.argv[1], trust=sys.argv[2:] == ["trust"])
except BrayError as e:
    print(str(e).replace(chr(10), " "), file=sys.stderr)
    sys.exit(1 if isinstance(e, ExportError) else 2)
"""
_NOT_MADE = 2  # exit code: the model could not even be made, so that no other engine would help


def export_graph(path: Path, trust: bool = False) -> None:
    """Write a run's `graph.onnx`, and wait for it."""
    logger.info("%s has no graph.onnx yet: exporting it", path)
    with tempfile.TemporaryFile() as said:
        if code := _start(path, said, trust).wait():
            why = f"{path}: the model could not be exported ({_last_line(said)})"
            raise ConfigError(
                why if code == _NOT_MADE else f"{why}: run `bray export {path}`, or serve it with --engine torch"
            )


def _start(path: Path, said: IO[bytes], trust: bool = False, **options: Any) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-c", _CODE, str(path), *(["trust"] if trust else [])]
    return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=said, **options)


def _last_line(said: IO[bytes]) -> str:
    said.seek(0)
    return (said.read().decode(errors="replace").strip().splitlines() or ["no reason given"])[-1]


class GraphExport:
    """Writes the graph of a run that is being trained, once, beside the training. What cannot be exported is said
    once."""

    def __init__(self, path: Path, after_s: float | None):
        """after_s: seconds of training before it begins; None: never."""
        self._path, self._after_s = path, after_s
        self._said = tempfile.TemporaryFile()  # noqa: SIM115  closed by `close`
        self._process: subprocess.Popen[bytes] | None = None

    def tend(self, trained_s: float) -> None:
        """Begin when it is time, and look whether it failed; called after every iteration."""
        if self._process is not None:
            self._look()
        elif self._after_s is not None and trained_s >= self._after_s:
            self._after_s = None
            one_thread = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
            self._process = _start(self._path, self._said, env=one_thread, preexec_fn=_be_nice)

    def _look(self) -> None:
        if self._process is not None and self._process.poll() is not None:
            if self._process.returncode > 0:
                logger.warning(
                    "graph.onnx could not be written (%s): elsewhere this run is served with --engine torch --trust",
                    _last_line(self._said),
                )
            self._process = None

    def close(self, wait_s: float, hurries: Callable[[], bool]) -> None:
        """Wait until it has finished, `wait_s` at most; end it as soon as `hurries` says so."""
        if self._process is not None:
            waited, turn = 0.0, min(_TURN_S, wait_s)
            while self._process.poll() is None and waited < wait_s and not hurries():
                with suppress(subprocess.TimeoutExpired):
                    self._process.wait(turn)
                waited += turn
                if waited == _SILENT_S:
                    logger.warning("waiting for graph.onnx, at most %g s; Ctrl-C leaves it out", wait_s)
            if self._process.poll() is None:
                if wait_s:
                    logger.warning(
                        "graph.onnx was not written within %g s: `bray export %s` writes it", waited, self._path
                    )
                self._process.kill()
                self._process.wait()
            self._look()
        self._said.close()


def _be_nice() -> None:
    os.nice(10)
