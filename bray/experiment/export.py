"""The graph of a run as a file: what serving it elsewhere needs beside the weights."""

from __future__ import annotations

from pathlib import Path

from bray import rundir
from bray.config import ConfigSource
from bray.experiment.experiment import Experiment
from bray.experiment.policy import random_observations
from bray.rundir import RunDir
from bray.rundir.trust import Answer


def export_graph(path: str | Path, trust: Answer = False) -> Path:
    """Write a run's `models/default/graph.onnx`: what a service without torch needs beside the weights."""
    from bray.inference.export import export_onnx

    run = RunDir.open(path)
    cpu = ConfigSource("export", {"run": {"device": "cpu"}})
    served = Experiment.load(path, sources=[cpu], trust=trust, plays=False).served
    obs = random_observations(served.spec, 2)
    args = (obs,) if served.initial_state is None else (obs, served.initial_state(2))
    file = run.model_folder(run.model_name()) / "graph.onnx"
    rundir.write_atomic(file, rundir.seal(export_onnx(served.model, args, served.outputs)))
    return file
