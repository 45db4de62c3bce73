"""The graph of a run as a file: what serving it elsewhere needs beside the weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from bray.config import ConfigSource
from bray.experiment.experiment import Experiment
from bray.experiment.policy import random_observations
from bray.rundir import RunDir
from bray.rundir.trust import Answer
from bray.rundir.weights import pack_weights

_ROWS, _AT_A_TIME = 32, 4


def export_graph(path: str | Path, trust: Answer = False) -> Path:
    """Write a run's `models/default/graph.onnx`, or that of each of its policies: what a service without torch needs
    beside the weights. With it go the
    weights of today and samples, by which whoever loads it finds out whether it answers as it does here."""
    from bray.inference.export import export_onnx
    from bray.inference.onnx_engine import OnnxEngine
    from bray.inference.proof import WEIGHTS, Proof, write_export
    from bray.inference.torch_engine import TorchEngine
    from bray.inference.verify import check_close, follow, run as run_engine

    run = RunDir.open(path)
    if policies := run.policies():
        written = [export_graph(run.policy_folder(name).path, trust) for name in policies]
        return written[0]
    cpu = ConfigSource("export", {"run": {"device": "cpu"}})
    exp = Experiment.load(path, sources=[cpu], trust=trust, plays=False)
    assert exp.loaded is not None
    served, step = exp.served, exp.loaded[1]
    model = TorchEngine(served.model, served.outputs, record=False)
    obs = random_observations(served.spec, _ROWS)
    args: tuple[Any, ...] = (obs,)
    if served.initial_state is None:
        expected = run_engine(model, args)
    else:
        obs, states, expected = follow(model, obs, served.initial_state, _AT_A_TIME)
        args = (obs, states)
    graph = export_onnx(served.model, args, served.outputs, step)
    weights = {k: v.detach().numpy() for k, v in served.model.state_dict().items()}
    engine = OnnxEngine(graph).with_weights(weights, step)
    check_close(engine, args, expected, "graph.onnx")
    proof, folder = Proof.make(args, expected, engine, step), run.model_folder(run.model_name())
    write_export(folder, {"graph.onnx": graph, WEIGHTS: pack_weights(weights)}, proof)
    return folder / "graph.onnx"
