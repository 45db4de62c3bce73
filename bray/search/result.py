"""What a study has found: the best settings as a preset, how good they are on seeds that nothing was chosen by, and
pictures."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from bray import figures
from bray.config import Resolved
from bray.config.resolved import yaml_flow
from bray.errors import BrayError
from bray.metrics import short
from bray.metrics.stats import interval, iqm
from bray.rundir import write_atomic
from bray.search.space import LAYER
from bray.search.study import Study, TrialScore
from bray.train.live import ID as LIVE
from bray.train.offline import ID as FILES

_ELSEWHERE = ("run.algorithm", "run.stop", "run.seed", "env.id")  # in a preset, not under `config`


@dataclass(frozen=True)
class Fresh:
    """Scores of the best settings, and of those without what was searched, on the same fresh seeds."""

    best: list[float]
    before: list[float]

    @property
    def better(self) -> int:
        """Seeds on which the best settings score more."""
        return sum(a > b for a, b in zip(self.best, self.before, strict=False))


@dataclass
class Result:
    """What `bray.tune` returns."""

    path: Path
    trials: list[TrialScore]
    sign: float = 1.0
    """-1 where a smaller number is the better one: scores are larger where better."""
    importances: dict[str, float] = field(default_factory=dict)
    fresh: Fresh | None = None

    @property
    def best(self) -> TrialScore:
        """The trial with the highest score of those that came to their end."""
        done = [t for t in self.trials if t.state == "complete"]
        if not done:
            failed = [t for t in self.trials if t.state == "failed"]
            why = f": {failed[0].error}" if failed else ""
            raise BrayError(f"{self.path}: none of {len(self.trials)} trials came to its end{why}")
        return max(done, key=lambda t: (t.score if t.score is not None else -float("inf"), -t.number))

    @property
    def best_config(self) -> dict[str, Any]:
        """The values of the best trial."""
        return dict(self.best.values)

    @property
    def preset(self) -> Path:
        """The best settings as a file for `bray train -f`."""
        return self.path / "best.yaml"

    def get_best_config(self, metric: str | None = None, mode: str | None = None) -> dict[str, Any]:
        """As RLlib's analysis has it; the metric and the mode are those of the search."""
        return self.best_config

    def __repr__(self) -> str:
        return f"<study {self.path}: {len(self.trials)} trials, best {short(self.sign * (self.best.score or 0.0))}>"


def write_result(result: Result, study: Study, title: str) -> None:
    """The table and the pictures."""
    dimensions = study.space.dimensions
    rows = [asdict(t) for t in result.trials]
    names = [d.name for d in dimensions]
    text = io.StringIO()
    out = csv.writer(text)
    out.writerow(["trial", "state", "score", "steps", *names, "scores", "parent", "error"])
    for t in rows:
        values = [t["values"].get(name, "") for name in names]
        out.writerow([t["number"], t["state"], t["score"], t["steps"], *values, t["scores"], t["parent"], t["error"]])
    write_atomic(result.path / "trials.csv", text.getvalue())
    scored = [t for t in result.trials if t.score is not None and len(t.values) == len(names)]
    if scored:
        axes = [figures.Axis(d.name, d.log, [yaml_flow(v) for v in d.values]) for d in dimensions]
        lines = [[yaml_flow(t.values[d.name]) if d.values else t.values[d.name] for d in dimensions] for t in scored]
        figures.parallel_coordinates(
            axes,
            lines,
            [result.sign * (t.score or 0.0) for t in scored],
            [t.state == "complete" for t in scored],
            result.path / "figures" / "parallel_coordinates.png",
            title,
        )
    if result.importances:
        figures.bars(result.importances, result.path / "figures" / "importances.png", "What the score depends on")


def write_preset(result: Result, config: Resolved, without: Resolved, said: Sequence[str]) -> None:
    """`best.yaml`: all that somebody chose, and what would be other without a word. `without`: the config of `bray
    train` with no more than the names of algorithm and environment."""
    run, env = config["run"], config["env"]
    stop = {key: int(value) if float(value).is_integer() else value for key, value in run.stop.items()}
    named = [] if env.id in (FILES, LIVE) else [f"env: {yaml_flow(env.id)}"]
    lines = [*(f"# {line}" for line in said), f"run: {yaml_flow(run.algorithm)}", *named]
    lines += [f"stop: {yaml_flow(stop)}", "config:"]
    plain, other = config.to_dict(), without.to_dict()
    for section in sorted(plain, key=lambda section: section != "algo"):
        for key, value in plain[section].items():
            whole = f"{section}.{key}"
            same = value == other.get(section, {}).get(key, value)
            places = {p for k, p in config.provenance.items() if f"{k}.".startswith(f"{whole}.")}
            chosen = any(p not in ("default", LAYER) and not p.startswith("defaults of ") for p in places)
            if whole not in _ELSEWHERE and (chosen or not (same or LAYER in places)):
                lines.append(f"  {key if section == 'algo' else whole}: {yaml_flow(value)}")
    write_atomic(result.preset, "\n".join(lines) + "\n")


def middle(scores: Sequence[float], sign: float) -> str:
    """`455 [420, 480]`: interquartile mean and its 95 % interval."""
    shown = [sign * s for s in scores]
    low, high = interval(shown)
    return f"{short(float(iqm(shown)))} [{short(low)}, {short(high)}]"


def optimism(result: Result) -> str:
    """By how much the best trial's score was luck, in words; empty where nobody looked."""
    if result.fresh is None or not result.fresh.best or result.best.score is None:
        return ""
    said, fresh = result.sign * result.best.score, result.sign * float(iqm(result.fresh.best))
    lost = result.sign * (said - fresh)
    part = f" ({abs(lost / said):.0%})" if said else ""
    what = f"{abs(lost):.3g}{part} too good" if lost > 0 else "not too good"
    return f"the search said {short(said)}, which was {what}"
