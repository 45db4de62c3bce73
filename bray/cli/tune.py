"""`bray tune`: a line for each trial that is over, then what was found."""

from __future__ import annotations

import shlex
from typing import Any

from rich.text import Text

from bray.algos import algo_name
from bray.cli.options import Tune
from bray.cli.show import facts, log_shown, plain_table, put, say
from bray.config import ConfigSource, parse_json
from bray.config.resolved import yaml_flow
from bray.config.runfile import load_run_file
from bray.errors import ConfigError
from bray.metrics import short
from bray.search.places import Resources
from bray.search.space import typed
from bray.search.tune import Search

_SHOWN = 10  # trials in the table


def tune(options: Tune) -> int:
    """Search, or go on with a search; 0 when it came to its end."""
    if options.address is not None and options.cluster != "ray":
        raise ConfigError(f"--address {options.address} is of a Ray cluster: add --cluster ray")
    with log_shown("error" if options.quiet else "warning"):
        search = Search(
            None if options.run is None else algo_name(options.run),
            options.env,
            _sources(options),
            name=options.name,
            use_preset=not options.no_preset,
            project=options.project,
            steps=options.steps,
            stop=None if options.stop is None else parse_json(options.stop, "--stop").values,
            trials=options.trials,
            num_seeds=options.num_seeds,
            seed=options.seed,
            scheduler=options.scheduler,
            sampler=options.sampler,
            storage=options.storage,
            fresh_seeds=options.fresh_seeds,
            cluster=options.cluster,
            resources=Resources(
                options.cpus_per_trial, options.gpus_per_trial, options.parallel, address=options.address
            ),
        )
        if not options.quiet:
            _head(search)
        try:
            result = search.run((lambda *_: None) if options.quiet else _Lines(search.sign))
        except KeyboardInterrupt:
            say("\nstopped: all trials are kept, and the same command goes on", "yellow")
            raise
        _tell(search, result)
    return 0


def _sources(options: Tune) -> list[ConfigSource]:
    """File < --config < key=value, as of `bray train`."""
    out = []
    if options.file is not None:
        out.append(load_run_file(options.file))
    if options.config is not None:
        out.append(parse_json(options.config))
    return [*out, typed(options.keys)] if options.keys else out


def _head(search: Search) -> None:
    plan = search.plan
    goal = " or ".join(f"{k} {short(v)}" for k, v in plan.stop.items())
    seeds = f", {plan.num_seeds} seeds each" if plan.num_seeds > 1 else ""
    say(f"{search.about}: study {plan.name}", "bold")
    facts(
        [
            *((d.name, str(d)) for d in search.space.dimensions),
            ("a run ends", f"at {goal}{seeds}"),
            ("scheduler", plan.scheduler or "none: every run goes to its end"),
            ("writes to", search.root),
        ]
    )


class _Lines:
    """`12 of 64  trial 12  487.1  lr=0.0031 gamma=0.99`."""

    def __init__(self, sign: float):
        self._sign, self._over = sign, 0

    def __call__(self, finding: Any, total: int) -> None:
        self._over += 1
        score = short(None if finding.score is None else self._sign * finding.score)
        how = {"complete": "", "stopped": f"  stopped at {short(finding.steps)} steps"}.get(
            finding.state, f"  failed: {finding.error}"
        )
        style = {"failed": "red", "stopped": "dim"}.get(finding.state, "")
        values = " ".join(f"{k}={_value(v)}" for k, v in finding.values.items())
        say(f"{self._over:>4} of {total}  trial {finding.number:<4} {score:>8}  {values}{how}", style)


def _value(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else yaml_flow(value)


def _tell(search: Search, result: Any) -> None:
    from bray.search.result import middle, optimism

    names = [d.name for d in search.space.dimensions]
    done = sorted((t for t in result.trials if t.state == "complete"), key=lambda t: (-t.score, t.number))
    table = plain_table("", ">trial", ">score", ">worst seed", ">best seed", ">steps", *(f">{name}" for name in names))
    for i, t in enumerate(done[:_SHOWN]):
        ends = [search.sign * s for s in t.scores] or [0.0]
        cells = [short(search.sign * t.score), short(min(ends)), short(max(ends)), short(t.steps)]
        values = [_value(t.values[name]) for name in names]
        table.add_row(Text("best" if i == 0 else "", "green"), str(t.number), *cells, *values)
    say()
    put(table)
    states = [t.state for t in result.trials]
    counts = [(state, states.count(state)) for state in ("complete", "stopped", "failed")]
    said = ", ".join(f"{n} {state}" for state, n in counts if n)
    failed = next((t for t in result.trials if t.state == "failed"), None)
    rows: list[tuple[str, Any]] = [("trials", said + (f" (trial {failed.number}: {failed.error})" if failed else ""))]
    if result.fresh is not None and result.fresh.best:
        fresh = result.fresh
        rows.append(("fresh seeds", f"{middle(fresh.best, search.sign)}: {optimism(result)}"))
        if fresh.before:
            rows.append(
                (
                    "before",
                    f"{middle(fresh.before, search.sign)} without what was searched: the best settings are better on "
                    f"{fresh.better} of {len(fresh.best)} fresh seeds",
                )
            )
    if result.importances:
        rows.append(("it depends on", ", ".join(f"{k} {v:.0%}" for k, v in result.importances.items())))
    rows += [("table", search.root / "trials.csv"), ("pictures", search.root / "figures")]
    facts([*rows, ("train with it", f"bray train -f {shlex.quote(str(result.preset))}")])
