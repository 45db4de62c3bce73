"""`bray plot`: learning curves of one or several runs on one picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bray import figures
from bray.cli.options import Plot
from bray.cli.runs import find_runs
from bray.cli.show import facts, say
from bray.errors import ConfigError
from bray.experiment.saved import read_config
from bray.rundir import RunDir

_OF_THE_LOOK = ("run.algorithm", "env.id")
_MOST_KEYS = 3  # named in a label


def plot(options: Plot) -> int:
    """Draw the curves; runs that differ in nothing but their seed are one curve, with the mean and a band."""
    paths = list(dict.fromkeys(path for root in options.runs for path in _expand(root)))
    title, groups = group(paths)
    out = options.out or (
        RunDir(paths[0]).folder("figures") / "learning_curve.png" if len(paths) == 1 else Path("learning_curves.png")
    )
    if len(groups) == 1:
        figures.learning_curve(paths, out, title, options.threshold)
    else:
        figures.overlay(groups, out, title, options.threshold)
    if not options.quiet:
        facts([(label, ", ".join(str(p) for p in dirs)) for label, dirs in groups.items()])
    say(str(out))
    return 0


def _expand(root: Path) -> list[Path]:
    found = list(find_runs(root)) if root.is_dir() else []
    if not found:
        raise ConfigError(f"{root}: expected a run directory, or a directory with runs in it. `bray runs` lists them")
    return found


def group(paths: Sequence[Path]) -> tuple[str, dict[str, list[Path]]]:
    """A title, and label -> the runs that differ in nothing but their seed (and in how long they went and what they
    wrote)."""
    configs = {path: _settings(path) for path in paths}
    same: dict[tuple[Any, ...], list[Path]] = {}
    for path, settings in configs.items():
        same.setdefault(tuple(sorted(settings.items())), []).append(path)
    kinds = [dict(kind) for kind in same]
    keys = sorted({k for kind in kinds for k in kind} - set(_OF_THE_LOOK))
    algorithms, envs = ({kind.get(key, "") for kind in kinds} for key in _OF_THE_LOOK)
    labels = []
    for kind in kinds:
        alike = [k for k in kinds if all(k.get(key) == kind.get(key) for key in _OF_THE_LOOK)]
        differ = [key for key in keys if len({k.get(key) for k in alike}) > 1]
        said = [f"{key.partition('.')[2]}={kind.get(key)}" for key in differ[:_MOST_KEYS]]
        named = [kind.get("run.algorithm", "run"), *([f"on {kind.get('env.id')}"] if len(envs) > 1 else [])]
        labels.append(" ".join([*named, *said]))
    groups = dict(zip(_unlike(labels), same.values(), strict=True))
    what = " and ".join(sorted(filter(None, algorithms))) if len(algorithms) < 4 else f"{len(algorithms)} algorithms"
    where = next(iter(envs)) if len(envs) == 1 else f"{len(envs)} environments"
    return (f"{what} on {where}" if where else ""), groups


def _unlike(labels: list[str]) -> list[str]:
    """With a number where two are the same."""
    return [
        label if labels.count(label) == 1 else f"{label} ({labels[:i].count(label) + 1})"
        for i, label in enumerate(labels)
    ]


def _settings(path: Path) -> dict[str, str]:
    """What decides how a run learns, as text by key; its name where it says nothing."""
    if not (path / "config.yaml").exists():
        return {"run.algorithm": path.name}
    values = read_config(RunDir.open(path)).values
    found = {f"{section}.{key}": _text(value) for section, part in values.items() for key, value in part.items()}
    return {k: v for k, v in found.items() if k in _OF_THE_LOOK or not k.startswith("run.")}


def _text(value: Any) -> str:
    """A value in a label; a schedule by its kind and ends."""
    if isinstance(value, dict) and {"start", "end"} <= value.keys():
        return f"{value['start']:g}→{value['end']:g}"
    return str(value)
