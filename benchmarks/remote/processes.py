"""Processes that are measured: their environment, their CPU time by role, and their end."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import tempfile
import time
from pathlib import Path

from benchmarks.remote.settings import ROOT
from benchmarks.serving.__main__ import cpu_seconds, family

Known = dict[int, str]
"""Process id -> when it was started (so that a number that is used again is not mistaken for it)."""


def environment() -> dict[str, str]:
    """Ours, with bytecode and one BLAS thread; Ray's authentication off on all sides."""
    env = {k: v for k, v in os.environ.items() if k not in ("PYTHONDONTWRITEBYTECODE", "RAY_ADDRESS")}
    threads = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    return env | threads | {"RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "disabled"}


def _started(pid: int) -> str | None:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[19]
    except (FileNotFoundError, ProcessLookupError):
        return None


def look(pid: int, known: Known) -> None:
    """Remember a process and its descendants."""
    for p in family(pid):
        started = _started(p)
        if started is not None:
            known[p] = started


def end(known: Known) -> None:
    """Kill those of them that are still there."""
    for pid, started in known.items():
        if _started(pid) == started:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def run(command: list[str], timeout: float) -> tuple[int, str, str]:
    """Exit status, output and errors of a command; nothing that it started is left behind."""
    known: Known = {}
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment(), stdin=subprocess.DEVNULL, stdout=out, stderr=err
        )
        until = time.monotonic() + timeout
        try:
            while process.poll() is None and time.monotonic() < until:
                look(process.pid, known)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(1.0)
        finally:
            if process.poll() is None:
                process.kill()
            end(known)
            process.wait()
        out.seek(0)
        err.seek(0)
        return process.returncode, out.read(), err.read()


def by_role(pids: list[int], names: dict[str, str] | None = None) -> dict[str, float]:
    """CPU seconds of processes by what they are: as `names` (by process id) has it, or as Ray does, which names them
    after an actor's class."""
    seconds: dict[str, float] = {}
    for pid in pids:
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            words = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            name = (names or {}).get(str(pid)) or _role(words)
            seconds[name] = seconds.get(name, 0.0) + cpu_seconds([pid])
    return seconds


def _role(words: str) -> str:
    actor = re.match(r"ray::([\w/.-]+)", words)
    if actor:
        return actor[1].split(".")[0]
    if "relay.py" in words:
        return "gateway"
    return "launcher" if "benchmarks.remote" in words else "Ray's daemons"
