"""One whole training, measured from outside: a server with its processes, and games that play against it.

A server is a command that prints {"ready": PORT} (and, if it likes, "names" of its processes by id), appends a line
{"time", "rows"} to a file for every update of its trainer, and ends when its standard input is closed. `rows` are
samples that the trainer has learned from. Time and CPU time are taken between two updates, so that the figure does not
depend on where in a rollout the clock was started. Rows must be about as many as the games' ticks meanwhile: more would
be rows that are learned from twice, or that had waited since before. CPU time is that of the server and all its
descendants (for Ray: its daemons and every actor); the games' does not count.
"""

from __future__ import annotations

import contextlib
import json
import select
import struct
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.remote.processes import Known, by_role, end, environment, look
from benchmarks.remote.settings import GAMES, ROOT
from benchmarks.serving.__main__ import family

START_S = 120.0
WARM_UP_UPDATES = 2
WARM_UP_S = 5.0
MOST_ROWS_PER_TICK = 1.15
LONGEST_S = 300.0
POLL_S = 0.02


@contextlib.contextmanager
def server(command: list[str], log: Path) -> Iterator[tuple[subprocess.Popen[str], dict[str, Any]]]:
    """A running server and what it said. At the end it is asked to stop; what is left of it is killed."""
    with open(log, "w") as err:
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=err, text=True, cwd=ROOT, env=environment()
        )
    assert process.stdin is not None
    assert process.stdout is not None
    until = time.monotonic() + START_S
    known: Known = {}
    try:
        while True:
            if select.select([process.stdout], [], [], 1.0)[0]:
                line = process.stdout.readline()
                if line.startswith('{"ready"'):
                    break
            look(process.pid, known)
            if process.poll() is not None or time.monotonic() > until:
                last = "\n".join(log.read_text().splitlines()[-15:])
                raise RuntimeError(f"did not start: {' '.join(command)}\n{last}")
        look(process.pid, known)
        yield process, json.loads(line)
    finally:
        look(process.pid, known)
        process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(20)
        if process.poll() is None:
            process.kill()
        end(known)
        process.wait()


class Games:
    """The games: a process of C++ with a thread for each, which counts its ticks in a file."""

    def __init__(self, port: int, folder: Path):
        self.counts, self.log = folder / "ticks", folder / "games.log"
        program = folder / "games"
        source = [f"-I{ROOT / 'clients' / 'cpp'}", str(Path(__file__).with_name("games.cpp"))]
        subprocess.run(["c++", "-std=c++17", "-O2", "-pthread", *source, "-o", str(program)], check=True)
        with open(self.log, "w") as log:
            self.process = subprocess.Popen([str(program), str(port), str(GAMES), str(self.counts)], stderr=log)

    def ticks(self) -> int:
        return sum(x[0] for x in struct.iter_unpack("<q", self.counts.read_bytes())) if self.counts.exists() else 0

    def check(self) -> None:
        """All games still play."""
        errors = self.log.read_text().splitlines()
        if errors or self.process.poll() is not None:
            raise RuntimeError(f"a game has ended: {errors[-1] if errors else self.process.returncode}")

    def end(self) -> None:
        self.process.kill()
        self.process.wait()


class Moment(NamedTuple):
    """How things stood right after an update."""

    time: float
    updates: int
    rows: int
    ticks: int
    cpu: dict[str, float]
    """Seconds so far, by role."""


class Training:
    """A server that trains while games play against it."""

    def __init__(self, process: subprocess.Popen[str], games: Games, updates: Path, names: dict[str, str]):
        self.process, self.games, self.updates, self.names = process, games, updates, names
        self.until = time.monotonic() + LONGEST_S

    def after(self, count: int, since: Moment | None = None, seconds: float = 0.0) -> Moment:
        """As soon as the trainer has made `count` updates, and `seconds` have passed since that moment."""
        while True:
            lines = whole_lines(self.updates)
            rows = json.loads(lines[-1])["rows"] if lines else 0
            now = time.monotonic()
            if len(lines) >= count and (since is None or now - since.time >= seconds):
                cpu = by_role(family(self.process.pid), self.names)
                return Moment(now, len(lines), rows, self.games.ticks(), cpu)
            if self.process.poll() is not None:
                raise RuntimeError("the server ended during the measurement")
            self.games.check()
            if now > self.until:
                ticks = self.games.ticks()
                raise RuntimeError(
                    f"not a steady state after {LONGEST_S:.0f} s: {len(lines)} updates, {rows} rows, {ticks} ticks"
                )
            count = max(count, len(lines) + 1)
            time.sleep(POLL_S)

    def steady(self) -> Moment:
        """When what has waited for the trainer to start is worked off."""
        now = self.after(WARM_UP_UPDATES)
        while True:
            before, now = now, self.after(now.updates + 1, now, WARM_UP_S)
            if is_steady(before, now):
                return now


def whole_lines(path: Path) -> list[str]:
    """The lines of a file that another process is still writing to; the last may be there in part."""
    return path.read_text().rpartition("\n")[0].splitlines()


def is_steady(first: Moment, last: Moment) -> bool:
    """Whether the trainer has learned no more than was played."""
    return last.rows - first.rows <= MOST_ROWS_PER_TICK * (last.ticks - first.ticks)


def measure(command: list[str], seconds: float) -> dict[str, Any]:
    """Run `command UPDATES_FILE` with the games beside it, for at least `seconds` after the warm-up."""
    with tempfile.TemporaryDirectory(prefix="bray-training-") as name:
        folder = Path(name)
        updates = folder / "updates.jsonl"
        updates.touch()
        with server([*command, str(updates)], folder / "log") as (process, ready):
            games = Games(ready["ready"], folder)
            try:
                going = Training(process, games, updates, ready.get("names", {}))
                first = going.steady()
                last = going.after(first.updates + 1, first, seconds)
            finally:
                games.end()
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.close()
            process.wait(30)
            said = [json.loads(x) for x in (process.stdout.read() or "").splitlines() if x.startswith("{")]
    return result(first, last) | (said[-1] if said else {})


def result(first: Moment, last: Moment) -> dict[str, Any]:
    wall, rows, ticks = last.time - first.time, last.rows - first.rows, last.ticks - first.ticks
    if not is_steady(first, last):
        raise RuntimeError(f"{rows} rows reached the trainer, but the games had only {ticks} ticks: not a steady state")
    cpu = {k: v - first.cpu.get(k, 0.0) for k, v in last.cpu.items()}
    each = {k: round(1e6 * v / rows, 1) for k, v in sorted(cpu.items(), key=lambda x: -x[1])}
    total = sum(cpu.values())
    return {
        "rows_per_cpu_second": round(rows / total, 1),
        "rows_per_second": round(rows / wall, 1),
        "ticks_per_second": round(ticks / wall, 1),
        "cpu_us_per_row": round(1e6 * total / rows, 1),
        "cpu_us_by_process": {k: v for k, v in each.items() if v > 0.0},
        "updates": last.updates - first.updates,
        "rows": rows,
        "ticks": ticks,
        "seconds": round(wall, 2),
    }
