"""One run of a trial, or its next part, in a process that was started for this: many runs pass through it, and what
starts and imports cost is paid once."""

from __future__ import annotations

import logging
import os
import pickle
import shutil
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

from bray.config import ConfigSource
from bray.envs.process import STOP
from bray.errors import BrayError
from bray.experiment import Experiment
from bray.rundir import RunDir
from bray.rundir.trust import named, remember
from bray.train.goals import Score, current, reached

ERROR = "error.txt"
"""In the directory of a run that failed: the traceback."""


@dataclass(frozen=True)
class TrialRun:
    """Train this run until it stops."""

    path: Path
    made_of: dict[str, Any]
    """`run`, `env` and `use_preset` of an Experiment."""
    sources: Sequence[ConfigSource]
    changes: Sequence[ConfigSource]
    """What is other than in the run directory, where there is one already."""
    stop: dict[str, float]
    ends: dict[str, float]
    """When the run is over: `stop` may be of a part of it."""


class TrialEnd(NamedTuple):
    """What came of a job."""

    score: float | None = None
    """By the run's `checkpoint_score`; larger is better."""
    steps: int = 0
    over: bool = False
    """The run is at its end, and not only this part of it."""
    error: str = ""


def begun(path: Path) -> bool:
    """Whether a run directory holds a checkpoint to go on from. One that a kill left without any is removed: it is of
    this study, and nothing was learnt in it."""
    if not path.is_dir():
        return False
    run = RunDir(path)
    if run.steps():
        return True
    run.lock()
    run.close()
    shutil.rmtree(path)
    return False


def run_job(job: TrialRun) -> TrialEnd:
    """Begin the run or go on with it. What it raises is its outcome: one trial ends no study."""
    try:
        return _trained(job)
    except (Exception, SystemExit) as e:
        if job.path.is_dir():
            (job.path / ERROR).write_text(traceback.format_exc())
        text = str(e) if isinstance(e, BrayError) else f"{type(e).__name__}: {e}"
        return TrialEnd(error=text.strip().splitlines()[-1] if text.strip() else type(e).__name__)


def _trained(job: TrialRun) -> TrialEnd:
    goes_on = begun(job.path)
    exp = Experiment(sources=job.sources, path=job.path, **job.made_of)
    if goes_on:
        remember(named(exp.config.to_dict(), job.path))  # on another machine than the one where it began, too
        env = job.made_of["env"]
        exp = Experiment.resume(job.path, job.changes, env=None if isinstance(env, str) else env)
    with exp:
        for _ in exp.train(job.stop, show=False):
            pass
        row, score = exp.last_row or {}, Score(exp.config["run"])
        value, steps = score.of(current(row)), int(row.get("env_steps_total") or 0)
        if value is None:
            return TrialEnd(error=f"after {steps:,} steps no row had {score.key}, by which runs are compared")
        return TrialEnd(value, steps, bool(reached(job.ends, row)))


class Runner:
    """What a process holds that runs jobs."""

    def run(self, job: bytes) -> TrialEnd:
        return run_job(pickle.loads(job))  # from the process that started this one, and nowhere else

    def close(self) -> None:
        """Nothing is left between two jobs."""


def serve(conn: Connection, environ: dict[str, str]) -> None:
    """Run jobs until told to stop."""
    os.environ.update(environ)
    logging.getLogger("bray").addHandler(logging.NullHandler())  # a run has its bray.log; many would talk at once
    runner = Runner()
    conn.send(("ok", None, []))
    while (message := conn.recv_bytes()) != STOP:
        conn.send(("ok", runner.run(message), []))
