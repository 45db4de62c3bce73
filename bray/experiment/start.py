"""A run that starts with the weights of another one."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np

from bray.algos import ALGORITHMS, get_algo
from bray.errors import CheckpointError, UnknownName
from bray.experiment.saved import read_config
from bray.rundir import RunDir
from bray.rundir.weights import WeightReport, match_weights
from bray.train.driver import Driver

logger = logging.getLogger("bray")

_SHOWN = 8


def start_with(
    training: Driver, path: str | Path, which: str | int, names: Mapping[str, str], partial: bool
) -> WeightReport:
    """Give a training the weights of another run, and say what it took."""
    directory, which = find_start(path, which)
    checkpoint, wanted = directory.load_checkpoint(which), training.weights()
    report = fit(wanted, checkpoint.weights, names, partial, str(path))
    level = logging.INFO if len(report.weights) == len(wanted) else logging.WARNING
    logger.log(level, "%s", describe(report, wanted, str(path)))
    algo, untrained = learnt_by(directory)
    for output in untrained:
        logger.info("%s: %s does not train the %s, which starts fresh", path, algo, output)
    training.start_with({**wanted, **report.weights})
    return report


def find_start(path: str | Path, which: str | int = "latest") -> tuple[RunDir, str | int]:
    """The run and the checkpoint that a run directory, or the directory of one of its checkpoints, names."""
    path = Path(path)
    run = Path(os.path.normpath(path / "../.."))  # without following `latest`
    if path.is_dir() and path.parent.name == "checkpoints" and not (path / "config.yaml").exists():
        return RunDir.open(run), path.name
    return RunDir.open(path), which


def learnt_by(directory: RunDir) -> tuple[str, tuple[str, ...]]:
    """The algorithm of a run, and the outputs of its Model that it left as they began; of one of a user's own nothing
    is known, whose code is not imported for that."""
    path = directory.path / "config.yaml"
    run = read_config(directory).values.get("run") if path.is_file() else None
    name = str(run.get("algorithm")) if isinstance(run, dict) else ""
    ours = str(ALGORITHMS.get(name)).startswith("bray.")
    return name, get_algo(name).Learner.untrained if ours else ()


def fit(
    wanted: Mapping[str, np.ndarray], got: Mapping[str, np.ndarray], names: Mapping[str, str], partial: bool, where: str
) -> WeightReport:
    """Which of the weights `got` a model takes that wants `wanted`. `names`: beginnings of names, ours to theirs;
    without any, all names are the same. What does not fit raises, or is left out if `partial`; nothing that fits raises
    in any case."""
    asked = wanted if not names else {k: v for k, v in wanted.items() if any(_under(k, new) for new in names)}
    theirs = got if not names else _renamed(wanted, got, names, where)
    report = match_weights(asked, theirs, strict=False)
    if report.exact or (partial and report.weights):
        return report
    what_fits = "" if partial else ", or what fits (--init-partial)"
    raise CheckpointError(
        f"{where}: the weights do not fit the model, and none was loaded: {report}. Take a part of them (--init-map "
        f"NEW=OLD){what_fits}"
    )


def describe(report: WeightReport, wanted: Mapping[str, np.ndarray], where: str) -> str:
    """What was loaded, what was left and why, in one message."""
    loaded = _list(_grouped(report.weights, wanted))
    said = [f"{where}: loaded {len(report.weights)} of the model's {len(wanted)} tensors ({loaded})"]
    other = [name for name in wanted if name not in report.weights and name not in report.missing]
    other = [name for name in other if not any(text.startswith(f"{name} (") for text in report.mismatched)]
    for why, left in (
        ("of another shape", report.mismatched),
        ("not in that run", _grouped(report.missing, wanted)),
        ("not asked for", _grouped(other, wanted)),
    ):
        if left:
            said.append(f"left as they start, {why}: {_list(left)}")
    if report.redundant:
        said.append(f"not taken, the model has none: {_list(report.redundant)}")
    return "; ".join(said)


def _renamed(
    wanted: Mapping[str, np.ndarray], got: Mapping[str, np.ndarray], names: Mapping[str, str], where: str
) -> dict[str, np.ndarray]:
    out: dict[str, np.ndarray] = {}
    for new, old in names.items():
        for prefix, weights, place in ((new, wanted, "of this model"), (old, got, f"of {where}")):
            if not any(_under(name, prefix) for name in weights):
                raise UnknownName(f"weights {place}", prefix, _beginnings(weights), "init_map")
        out |= {_join(new, name.removeprefix(old).lstrip(".")): x for name, x in got.items() if _under(name, old)}
    return out


def _under(name: str, prefix: str) -> bool:
    return not prefix or name == prefix or name.startswith(prefix + ".")


def _join(prefix: str, rest: str) -> str:
    return ".".join(part for part in (prefix, rest) if part)


def _beginnings(weights: Mapping[str, np.ndarray]) -> list[str]:
    """All names and beginnings of names."""
    parts = [name.split(".") for name in weights]
    return list(dict.fromkeys(".".join(p[:i]) for p in parts for i in range(1, len(p) + 1)))


def _grouped(names: Iterable[str], wanted: Mapping[str, np.ndarray]) -> list[str]:
    """Names, but `policy.*` where all of a part of the model are there."""
    out: dict[str, None] = {}
    for name in (found := list(names)):
        part = name.partition(".")[0]
        members = [other for other in wanted if _under(other, part)]
        out[f"{part}.*" if len(members) > 1 and set(members) <= set(found) else name] = None
    return list(out)


def _list(names: list[str]) -> str:
    return ", ".join(names[:_SHOWN]) + (f", ... ({len(names)})" if len(names) > _SHOWN else "")
