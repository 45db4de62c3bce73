"""`bray runs`: the runs below a directory, as a table."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

from rich.text import Text

from bray.cli.options import Runs
from bray.cli.show import plain_table, put, say
from bray.errors import BrayError, ConfigError
from bray.experiment.saved import read_config
from bray.metrics import HEALTH, short
from bray.rundir import RunDir
from bray.rundir.reader import open_plain, read_dict

_MOST_DEEP = 4  # folders below the one that is named
_TAIL = 1 << 16  # bytes: the last row of result.jsonl is in there


class RunSummary(NamedTuple):
    """What the table says of a run."""

    path: Path
    algorithm: str
    env: str
    seed: int | None
    steps: int | None
    best: float | None
    """Return of its best checkpoint."""
    when: float
    """Unix time of its newest result."""
    trouble: str = ""
    health: str = ""
    """What has looked wrong in it."""


def runs(options: Runs) -> int:
    """A table of all runs below a directory, the newest last."""
    found = sorted((read_run(path) for path in find_runs(options.path)), key=lambda run: run.when)
    if not found:
        raise ConfigError(
            f"{options.path}: there is no run in it; `bray train` writes to runs/, --project says otherwise"
        )
    wrong = ["looks wrong"] if any(run.health for run in found) else []
    table = plain_table("run", "algorithm", "env", ">seed", ">steps", ">best", "when", *wrong)
    for run in found:
        when = datetime.fromtimestamp(run.when).strftime("%Y-%m-%d %H:%M")
        numbers = [short(x) for x in (run.seed, run.steps, run.best)]
        shown = [run.algorithm, run.env, *numbers] if not run.trouble else [Text(run.trouble, "yellow"), *[""] * 4]
        table.add_row(Text(str(run.path), "bold"), *shown, when, *(Text(run.health, "yellow") for _ in wrong))
    put(table)
    say(
        f"\n{len(found)} run{'s' if len(found) > 1 else ''}. `bray plot RUN ...` draws them, `bray eval RUN` plays "
        "one.",
        "dim",
    )
    return 0


def find_runs(root: Path) -> Iterator[Path]:
    """The run directories at and below a directory; what is inside of a run is not looked at."""
    if not root.is_dir():
        raise ConfigError(f"{root}: there is no such directory")
    for folder, inside, files in os.walk(root):
        path = Path(folder)
        if "config.yaml" in files or "result.jsonl" in files:
            inside.clear()
            yield path
        deep = len(path.relative_to(root).parts)
        inside[:] = [] if deep >= _MOST_DEEP else sorted(name for name in inside if not name.startswith("."))


def read_run(path: Path) -> RunSummary:
    """Its facts, from files that are small; one that cannot be read is named in `trouble`."""
    times = [os.lstat(path / name).st_mtime for name in ("result.jsonl", "config.yaml") if (path / name).exists()]
    when = times[0] if times else 0.0
    try:
        return _read(path, when)
    except (BrayError, OSError, ValueError, TypeError) as e:
        return RunSummary(path, "", "", None, None, None, when, f"cannot be read: {e}".partition("\n")[0])


def _read(path: Path, when: float) -> RunSummary:
    directory = RunDir.open(path)
    latest, best = (_meta(directory, which) for which in ("latest", "best"))
    config = read_config(directory).values if (path / "config.yaml").exists() else {}
    run, env = config.get("run") or {}, config.get("env") or {}
    score, last = best.get("eval/return_mean"), _last_row(path)
    return RunSummary(
        path,
        str(run.get("algorithm") or latest.get("algorithm") or "–"),
        str(env.get("id") or latest.get("env") or "–"),
        run.get("seed", latest.get("seed")),
        last.get("env_steps_total", latest.get("env_steps_total")),
        best.get("episode_return_mean") if score is None else score,
        when,
        health=str(last.get(HEALTH) or ""),
    )


def _meta(directory: RunDir, which: str) -> dict[str, Any]:
    """What a checkpoint says of itself; nothing where there is none."""
    step = directory.pointer(which)
    if step is None:
        return {}
    return read_dict(Path("checkpoints") / str(step) / "meta.json", directory.path).get("meta") or {}


def _last_row(path: Path) -> dict[str, Any]:
    """The newest whole row of result.jsonl; empty where there is none."""
    rows = newest_rows(path, _TAIL)
    return rows[-1] if rows else {}


def newest_rows(path: Path, most_bytes: int) -> list[dict[str, Any]]:
    """The whole rows in the last so many bytes of result.jsonl; none where there is no such file."""
    if not (path / "result.jsonl").exists():
        return []
    with open_plain("result.jsonl", path) as file:
        start = max(0, os.fstat(file.fileno()).st_size - most_bytes)
        file.seek(start)
        lines = file.read(most_bytes).split(b"\n")[1 if start else 0 : -1]
    try:
        rows = [json.loads(line) for line in lines]
    except RecursionError:
        raise ValueError("brackets in brackets, too deep") from None
    return [row for row in rows if isinstance(row, dict)]
