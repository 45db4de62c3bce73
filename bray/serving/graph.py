"""A run's `graph.onnx`, exported in a process of its own: torch does not come along into a service, nor the exporter
into a training, whose random numbers and memory stay its own."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from bray.errors import ConfigError

logger = logging.getLogger("bray.serving")

# A pipe that closes without a word means that whoever asked for the graph is dead.
_CODE = """
import os, sys, threading
def end_with_parent():
    if not os.read(0, 1):
        os._exit(3)
threading.Thread(target=end_with_parent, daemon=True).start()
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
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=said, **options)


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
        self.process: subprocess.Popen[bytes] | None = None
        """What is under way."""

    def tend(self, trained_s: float) -> None:
        """Begin when it is time, and look whether it failed; called after every iteration."""
        if self.process is not None:
            self._look()
        elif self._after_s is not None and trained_s >= self._after_s:
            self._after_s = None
            one_thread = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
            self.process = _start(self._path, self._said, env=one_thread, preexec_fn=_be_nice)

    def _look(self) -> None:
        if self.process is not None and self.process.poll() is not None:
            if self.process.returncode > 0:
                logger.warning(
                    "graph.onnx could not be written (%s): elsewhere this run is served with --engine torch --trust",
                    _last_line(self._said),
                )
            self.process = None

    def close(self, goes_on: bool) -> None:
        """The training is over: an export that is under way finishes by itself, or is left out."""
        self._look()
        if self.process is not None:
            assert self.process.stdin is not None
            if goes_on:
                with suppress(BrokenPipeError):  # it ended just now
                    self.process.stdin.write(b"g")
                    self.process.stdin.flush()
                _going_on.append(self.process)
            else:
                self.process.kill()
                self.process.wait()
            self.process.stdin.close()
        self._said.close()


_going_on: list[subprocess.Popen[bytes]] = []  # nobody waits for them


def _be_nice() -> None:
    os.nice(10)
