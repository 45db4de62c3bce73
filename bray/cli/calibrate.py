"""`bray calibrate`: how fast a training is here with each way to place it, and a file that later runs go by."""

from __future__ import annotations

import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from rich.text import Text

from bray.algos import algo_name
from bray.cli.options import Calibrate
from bray.cli.show import facts, log_shown, plain_table, put, say
from bray.config import parse_assignments
from bray.config.resolved import yaml_flow
from bray.errors import BrayError, ConfigError
from bray.experiment import Experiment
from bray.metrics import short
from bray.train.fit import AUTO, Choice, fit, placements
from bray.train.settle import look, machine_file, machine_id

BETTER = 1.1
"""How much faster than the rule's choice another one has to be."""
_WARM = 0.4  # of the seconds of a placement: it starts and records in them
_PATIENCE = 10
_SOON = 500  # steps until an algorithm that replays begins to learn


def calibrate(options: Calibrate) -> int:
    """A table, and the file; 1 where nothing could be measured."""
    name = algo_name(options.run)
    if options.seconds <= 0:
        raise ConfigError(f"--seconds: expected a number > 0, got {options.seconds:g}")
    with log_shown("error"):
        exp = _experiment(options, {})
        run, env = exp.config["run"], exp.config["env"]
        if pinned := [key for key in ("device", "num_workers", "inference") if getattr(run, key) != AUTO]:
            whence = exp.config.provenance[f"run.{pinned[0]}"]
            raise ConfigError(
                f"bray calibrate tries what auto chooses, and {', '.join(f'run.{key}' for key in pinned)} is set "
                f"({whence}): leave it out, or set it to auto"
            )
        out = machine_file(name, exp.env_id) if options.out is None else options.out
        if options.out is not None and not out.absolute().parent.is_dir():
            raise ConfigError(f"--out {out}: there is no directory {out.absolute().parent}")
        exp.check_env()
        about, _ = look(exp.algo, exp.config, exp.spec_of, {}, whole=True)
        chosen = fit(about)
        say(f"{name} on {exp.env_id}, {env.num_envs} environments: {machine_id()}", "bold")
        table, rates = plain_table("", "placement", "steps/s", "a step of the environment", "an update"), {}
        for choice in placements(about):
            row = _try(options, choice)
            mark = "auto" if _same(choice, chosen) else ""
            if isinstance(row, str):
                table.add_row(mark, _words(choice), Text(row, "red"), "", "")
                continue
            rates[choice] = row["steps"]
            table.add_row(mark, _words(choice), short(row["steps"]), f"{row['env']:.3g} ms", f"{row['update']:.3g} ms")
        put(table)
    if not rates:
        say("no placement ran: nothing was written", "red")
        return 1
    best = max(rates, key=lambda choice: rates[choice])
    ours = next((choice for choice in rates if _same(choice, chosen)), best)
    if rates[best] < BETTER * rates[ours]:
        best = ours
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(_file(options, name, exp.env_id, best, rates[best]))
    used = "by runs of these on this machine" if options.out is None else f"by bray train -f {out}"
    facts([("best", _words(best)), ("written to", out), ("used", used)])
    return 0


def _experiment(options: Calibrate, config: dict[str, Any], path: Path | None = None) -> Experiment:
    sources = [parse_assignments(options.keys)] if options.keys else []
    return Experiment(algo_name(options.run), options.env, sources=sources, config=config, path=path)


def _try(options: Calibrate, choice: Choice) -> dict[str, float] | str:
    """Steps per second, and milliseconds of a step of all environments and of a gradient step; or why it does not
    run."""
    config: dict[str, Any] = choice.settings() | {"iteration_steps": 0, "export_graph_after_s": None}
    before = torch.get_num_threads()
    try:
        with tempfile.TemporaryDirectory() as folder:
            exp = _experiment(options, config, Path(folder) / "run")
            if hasattr(exp.config["algo"], "learning_starts"):
                exp.config.sections["algo"] = replace(exp.config["algo"], learning_starts=_SOON)
            try:
                return _measured(exp.training, options.seconds)
            finally:
                exp.close()
    except (BrayError, RuntimeError) as e:
        return f"does not run: {str(e).splitlines()[0][:80]}"
    finally:
        torch.set_num_threads(before)


def _measured(training: Any, seconds: float) -> dict[str, float] | str:
    start = time.perf_counter()
    while time.perf_counter() - start < _WARM * seconds or not training.learner.steps:
        training.iterate()
        if not training.learner.steps and time.perf_counter() - start > _PATIENCE * seconds:
            return f"has not learnt anything after {_PATIENCE * seconds:.0f} s: give more --seconds"
    begin, steps, updates, spent = time.perf_counter(), training.env_steps, training.steps, {"env": 0.0, "learn": 0.0}
    while (took := time.perf_counter() - begin) < seconds:
        row = training.iterate()
        for phase in spent:
            spent[phase] += row[f"perf/{phase}"] + row.get(f"perf/worker_{phase}", 0.0)
    played, learnt = training.env_steps - steps, training.steps - updates
    return {"steps": played / took, "env": spent["env"] / max(1, played), "update": spent["learn"] / max(1, learnt)}


def _same(a: Choice, b: Choice) -> bool:
    return (a.device, a.num_workers, a.inference, a.threads) == (b.device, b.num_workers, b.inference, b.threads)


def _words(choice: Choice) -> str:
    said = str(choice).partition(": ")[0]
    return said if choice.threads is None else f"{said}, {choice.threads} thread{'s' if choice.threads > 1 else ''}"


def _file(options: Calibrate, name: str, env: str, best: Choice, rate: float) -> str:
    """A run as a file, of this machine. What was typed beside is in it too."""
    values = [f"  {key}: {yaml_flow(value)}" for key, value in best.settings().items()]
    typed = [f"  {key}: {value}" for key, _, value in (item.partition("=") for item in options.keys or ())]
    typed = [line for line in typed if line.split(":")[0].strip() not in ("num_envs", "env.num_envs")]
    head = f"# bray calibrate {env} --run {name}: {rate:,.0f} steps/s on {machine_id()}"
    return "\n".join([head, f"run: {name}", f"env: {yaml_flow(env)}", "config:", *values, *typed, ""])
