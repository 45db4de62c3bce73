"""`bray doctor RUN_DIR`: where the time of a run goes, and what to change. The directory is data: nothing that it names
is imported."""

from __future__ import annotations

import json
import platform
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.text import Text

from bray.cli.runs import newest_rows
from bray.cli.show import plain_table, put, say
from bray.diagnosis.bottleneck import Finding, Machine, Times, find_bottleneck
from bray.diagnosis.symptoms import SECTIONS
from bray.errors import ConfigError, DataError
from bray.experiment.saved import read_config
from bray.metrics import duration
from bray.rundir import RunDir
from bray.train.machine import this_machine

_MOST = 1 << 22  # bytes of the newest rows: more than a thousand


def examine(path: Path, as_json: bool) -> int:
    """Say where the time of a run goes."""
    directory = RunDir.open(path)
    try:
        rows = newest_rows(directory.path, _MOST)
    except ValueError as e:
        raise DataError(f"{path / 'result.jsonl'}: expected lines of JSON ({e})") from None
    times = Times.of(rows)
    if times is None:
        raise ConfigError(
            f"{path}: its rows do not say where the time goes. They do after the second iteration of `bray train`, "
            "not for `bray launch`"
        )
    options, machine = _options(directory), this_machine()
    found = find_bottleneck(times, options, machine)
    if as_json:
        print(json.dumps(_report(times, found, machine), indent=2))
        return 0
    _show(times, found, f"{options.get('algorithm', 'a run')} on {options.get('id', 'its environment')}", len(rows))
    host = rows[-1].get("hostname")
    if host not in (None, platform.node()):
        say(f"\nIt ran on another machine; the advice is for this one, with {machine.cores} cores.", "dim")
    return 0


def _options(directory: RunDir) -> dict[str, Any]:
    """The settings of a run by name, as they are written."""
    if not (directory.path / "config.yaml").exists():
        return {}
    config = read_config(directory).values
    if policies := directory.policies():  # each has settings of its own
        of = {name: read_config(directory.policy_folder(name)).values for name in policies}
        named = (f"{name} {(values.get('run') or {}).get('algorithm')}" for name, values in of.items())
        config = {"run": {**config["run"], "algorithm": ", ".join(named)}, "env": config["env"]}
    sections = [config[name] for name in ("run", *SECTIONS) if isinstance(config.get(name), dict)]
    return {str(k): v for section in sections for k, v in section.items()}


def _report(times: Times, found: Finding, machine: Machine) -> dict[str, Any]:
    found_ = asdict(found) | {"text": str(found)}
    return {**asdict(times), "wall": times.wall, "machine": asdict(machine), "finding": found_}


def _show(times: Times, found: Finding, title: str, rows: int) -> None:
    say(f"{title}: {duration(times.seconds)} of training in {rows} rows\n", "dim")
    phases = list(times.learner)
    table = plain_table("process", *(f">{phase}" for phase in phases), ">on a core", ">queued")
    processes = [("learner", times.learner, times.learner_cores)]
    if times.worker:
        processes.append((f"{len(times.worker_idle)} workers", times.worker, times.worker_cores))
    for name, spent, cores in processes:
        shares = [spent.get(phase, 0.0) for phase in phases] + [cores.get(k, 0.0) for k in ("cpu", "queued")]
        table.add_row(name, *(f"{share:.0%}" for share in shares))
    put(table)
    if times.worker_idle:
        say("idle: " + ", ".join(f"worker {w} {share:.0%}" for w, share in times.worker_idle.items()), "dim")
    say()
    say(Text(f"{found.name}: ", "bold") + Text(str(found).partition(": ")[2]))
