"""Where an experiment runs, writes and plays."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from bray.errors import ConfigError
from bray.rundir import new_run_dir
from bray.train.config import RunConfig
from bray.train.live import ID as LIVE
from bray.train.offline import ID as FILES
from bray.train.setup import on_ray
from bray.train.workers import Home


def home_of(run: RunConfig) -> Callable[[], Home] | None:
    """What makes the place where rollout workers live; None = processes of this machine."""
    if not on_ray(run):
        return None
    from bray.remote.home import RayHome  # it imports Ray

    return partial(RayHome, run)


def crew_of(run: RunConfig) -> Callable[[], Any] | None:
    """What makes the place where other learners live; None = processes of this machine."""
    if not on_ray(run):
        return None
    from bray.remote.home import RayCrew  # it imports Ray

    return partial(RayCrew, run)


def run_path(path: str | Path | None, project: str | Path | None, trial: str | None, algo: str) -> Path | None:
    """The run directory that was asked for; None: a new one under runs/."""
    if path is None and not project and not trial:
        return None
    if path is not None and (project or trial):
        raise ConfigError("give either a path or project and trial, not both")
    if path is not None:
        return Path(path)
    folder = Path(project or "runs")
    return folder / trial if trial else new_run_dir(folder, algo)


def check_playable(env: str) -> None:
    """Refuse a run that has no environment to play in."""
    if env == FILES:
        raise ConfigError(
            "this run learnt from files and has no environment to play in; `bray train --data ... --env ENV` names "
            "one to play in afterwards"
        )
    if env == LIVE:
        raise ConfigError(
            "this run learnt from live games and has no environment to play in: `bray serve RUN_DIR` answers its "
            "games. A run of `bray train --live --env module:Class`, in place of --obs and --actions, can be played "
            "by Bray too"
        )
