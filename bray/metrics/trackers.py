"""Rows for Weights & Biases and MLflow: `run.track=[wandb, mlflow]`. Both read their own environment variables
(WANDB_MODE, MLFLOW_TRACKING_URI, ...)."""

from __future__ import annotations

import importlib.util
import inspect
import json
import logging
import math
import os
import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bray.errors import ConfigError, UnknownName
from bray.metrics.rows import ENV_STEPS, Row
from bray.metrics.sinks import Sink
from bray.rundir.files import write_atomic

logger = logging.getLogger("bray")

_TRY_AGAIN = 60.0  # seconds: a training does not wait at every row for a service that does not answer


def _numbers(row: Row) -> dict[str, float]:
    return {k: v for k, v in row.items() if isinstance(v, (int, float)) and not isinstance(v, bool)}


class _Tracker:
    """A run of a tracking service: made with the first row, and found again by a file in the run directory when a
    training is resumed."""

    name: str
    now = staticmethod(time.monotonic)
    _told = False
    _not_before = -math.inf

    def __init__(self, directory: Path, title: str, config: Mapping[str, Any]):
        self.directory, self.title, self.config = directory, title, config
        self._file = directory / f"{self.name}.json"

    def known_id(self) -> str | None:
        return json.loads(self._file.read_text())["id"] if self._file.exists() else None

    def remember(self, run_id: str) -> None:
        write_atomic(self._file, json.dumps({"id": run_id}) + "\n")

    def write(self, row: Row) -> None:
        """A service that fails does not end a training: the first failure is logged, and the service is left alone for
        a minute."""
        if self.now() < self._not_before:
            return
        try:
            self.log(row)
        except Exception as e:
            self._not_before = self.now() + _TRY_AGAIN
            if not self._told:
                logger.warning(
                    "run.track: writing to %s failed, training goes on without it: %s: %s",
                    self.name,
                    type(e).__name__,
                    e,
                )
            self._told = True

    def close(self) -> None:
        try:
            self.end()
        except Exception as e:  # the training is done, and what it learnt is saved
            logger.warning("run.track: ending the run at %s failed: %s: %s", self.name, type(e).__name__, e)

    def log(self, row: Row) -> None:
        raise NotImplementedError

    def end(self) -> None:
        raise NotImplementedError

    def truncate_after(self, iteration: int, env_steps: int | None = None) -> None:
        """Neither service can drop numbers: those of a resumed run lie over what was logged after its checkpoint."""


class WandbSink(_Tracker):
    """A run of the project that WANDB_PROJECT names (else `bray`), with env steps as x axis."""

    name = "wandb"
    _run: Any = None

    def log(self, row: Row) -> None:
        if self._run is None:
            import wandb

            project, known = os.environ.get("WANDB_PROJECT", "bray"), self.known_id()
            # Without it, a second experiment of this process is given the run of the first; older ones know nothing
            # else.
            knows = "create_new" in str(inspect.signature(wandb.init).parameters["reinit"].annotation)
            self._run = wandb.init(
                project=project,
                name=self.title,
                config=dict(self.config),
                dir=self.directory,
                id=known,
                resume="allow",
                reinit="create_new" if knows else None,
            )
            self._run.define_metric("*", step_metric=ENV_STEPS)
            self.remember(self._run.id)
        self._run.log(_numbers(row))

    def end(self) -> None:
        if self._run is not None:
            self._run.finish()


class MlflowSink(_Tracker):
    """A run of the experiment that MLFLOW_EXPERIMENT_NAME names (else `bray`); without MLFLOW_TRACKING_URI in `mlruns`
    beside the run directory."""

    name = "mlflow"
    _client: Any = None
    _id = ""

    def log(self, row: Row) -> None:
        from mlflow.entities import Metric

        if self._client is None:
            self._open()
        steps, now = int(row.get(ENV_STEPS) or 0), int(time.time() * 1000)
        metrics = [Metric(_mlflow_name(k), float(v), now, steps) for k, v in _numbers(row).items()]
        self._client.log_batch(self._id, metrics=metrics)

    def _open(self) -> None:
        from mlflow.tracking import MlflowClient

        os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")  # else mlflow-skinny has no store but a server
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")  # its own defaults stop a training for minutes
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "10")
        uri = os.environ.get("MLFLOW_TRACKING_URI", (self.directory.resolve().parent / "mlruns").as_uri())
        client = MlflowClient(uri)
        self._id = self.known_id() or self._new_run(client)
        self._client = client  # last, so that a failure before leaves none

    def _new_run(self, client: Any) -> str:
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", "bray")
        found = client.get_experiment_by_name(name)
        experiment = found.experiment_id if found else client.create_experiment(name)
        run_id: str = client.create_run(experiment, run_name=self.title).info.run_id
        self.remember(run_id)  # now, because the next line may fail; the next try uses this run
        for key, value in self.config.items():
            client.log_param(run_id, key, str(value)[:500])
        return run_id

    def end(self) -> None:
        if self._client is not None:
            self._client.set_terminated(self._id)


def _mlflow_name(key: str) -> str:
    """A key as MLflow takes it: it refuses the whole row for one odd character, and for a name that is no plain
    path."""
    name = re.sub(r"[^\w./ -]", "_", key.replace("%", "percent"))
    return "/".join(part for part in name.split("/") if part.strip("."))[:250].rstrip("/") or "_"


TRACKERS = {"wandb": (WandbSink, "wandb", "wandb"), "mlflow": (MlflowSink, "mlflow", "mlflow-skinny")}


def make_trackers(
    names: Sequence[str], directory: Path, title: str, config: Sequence[tuple[str, Any, str]]
) -> list[Sink]:
    """The sinks of these names; `config`, rows of (key, value, source), is written down with the run."""
    settings = {key: value for key, value, _ in config}
    sinks: list[Sink] = []
    for name in names:
        if name not in TRACKERS:
            raise UnknownName("tracker", name, TRACKERS, "run.track")
        sink, module, package = TRACKERS[name]
        if importlib.util.find_spec(module) is None:
            raise ConfigError(f"run.track: {name} needs the package {package}: pip install {package}")
        sinks.append(sink(directory, title, settings))
    return sinks
