"""Population based training (Jaderberg et al. 2017): the worst quarter of a population goes on from copies of the best,
weights, optimizer and all, with settings near theirs."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path

import numpy as np

_QUARTER = 4
_OWN = (".lock", "tb", "figures", "videos")


def exploits(values: Mapping[int, float], rng: np.random.Generator) -> list[tuple[int, int]]:
    """(who ends, from whom another one begins in its place), of the members' numbers and scores."""
    ranked = sorted(values, key=lambda number: (values[number], -number))
    few = max(1, len(ranked) // _QUARTER) if len(ranked) > 1 else 0
    best = ranked[len(ranked) - few :]
    return [(loser, int(rng.choice(best))) for loser in ranked[:few]]


def copy_runs(parent: Path, child: Path) -> None:
    """All runs of a trial, as they are at a rung; nothing where they were copied already. A kill leaves no half of
    it."""
    if child.exists():
        return
    part = child.with_name(f".{child.name}.new")
    shutil.rmtree(part, ignore_errors=True)
    shutil.copytree(parent, part, symlinks=True, ignore=shutil.ignore_patterns(*_OWN))
    part.rename(child)
