"""`bray export`: the Model of a run as ONNX files, checked against torch, with a table of what each costs."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from bray import tree
from bray.act import GREEDY, TRAINED, Policy, Tick
from bray.cli.options import Export
from bray.cli.show import facts, log_shown, plain_table, put, say, terminal, trusting
from bray.config import ConfigSource
from bray.errors import ConfigError, ExportError
from bray.experiment import Experiment
from bray.inference.engine import Engine
from bray.inference.export import export_onnx
from bray.inference.graph import with_constant_weights
from bray.inference.onnx_engine import OnnxEngine
from bray.inference.proof import SAMPLES, WEIGHTS, Proof, write_export
from bray.inference.quantize import quantize as to_int8
from bray.inference.torch_engine import TorchEngine
from bray.inference.verify import BATCHES, Report, check_close, follow, run, verify
from bray.rundir import Checkpoint, RunDir
from bray.rundir.weights import pack_weights

GRAPH, MODEL, INT8 = "graph.onnx", "model.onnx", "model.int8.onnx"
_RANDOM_ROWS = 256


@log_shown()
def export(options: Export) -> int:
    """Export, verify, write, say; returns the exit code."""
    path, quantize, min_agreement = options.path, options.quantize, options.min_agreement
    run = RunDir.open(path)
    run.refuse_old_launch()
    saved = run.load_checkpoint(options.checkpoint)
    cpu = ConfigSource("bray export", {"run": {"device": "cpu"}})  # a run of a GPU is exported anywhere
    exp = Experiment.load(path, saved.step, sources=[cpu], trust=trusting(options), plays=False)
    torch.set_num_threads(1)
    folder = run.model_folder(saved.name)
    console = terminal()
    exporter = _Exporter(exp, saved, quantize)
    with console.status("exporting"):
        files, proof = exporter.float32()
        reports: dict[str, Report] = exporter.reports()
        int8 = None
        if quantize:
            int8 = to_int8(files[MODEL], exporter.args)
            engine = OnnxEngine(int8)
            reports["int8"] = exporter.judge(engine)
    refused = int8 is not None and reports["int8"].agreement < min_agreement
    if int8 is None or refused:
        (folder / INT8).unlink(missing_ok=True)  # one of an earlier export has other weights
    else:
        files, proof = {**files, INT8: int8}, proof.with_int8(engine)
    write_export(folder, files, proof)
    sizes = {"onnx": len(files[MODEL]), "onnx, weights as inputs": len(files[GRAPH])}
    if int8 is not None:
        sizes["int8"] = len(int8)
    say(f"{exp.config['run'].algorithm} on {exp.env_id}, checkpoint {saved.step}", "bold")
    _table(reports, sizes, exporter.rows, exporter.recorded)
    if int8 is not None and reports["int8"].latency[1][0] >= reports["onnx"].latency[1][0]:
        say(f"int8 is slower here: serve fp32 ({MODEL})", "yellow")
    if refused:
        raise ExportError(
            f"{INT8} is not written: in int8 {reports['int8'].agreement:.1%} of {exporter.rows:,} greedy actions are "
            f"the Model's own, at least {min_agreement:.1%} are asked for (--min-agreement). {MODEL} is there: serve "
            "that."
        )
    names = [GRAPH, MODEL, *([INT8] if int8 is not None else []), SAMPLES]
    if not exp.served.policy.acts_by_rule():
        say(f"they hold the network alone: {_kept_out(exp.served.policy)}, and is served with --engine torch", "yellow")
    facts([(name.rpartition(".")[0], folder / name) for name in names])
    exp.close()
    return 0


def _kept_out(policy: Policy) -> str:
    return "the search needs the game" if policy.simulations is not None else "its Policy acts in a way of its own"


class _Exporter:
    """A run's Model, what it is asked with, and what it answers."""

    def __init__(self, exp: Experiment, saved: Checkpoint, needs_recorded: bool):
        served = exp.served
        self.policy, self.spec, self.saved = served.policy, served.spec, saved
        self.outputs = (*self.policy.served_outputs, *(["state"] if served.recurrent else []))
        self.model = TorchEngine(served.model, self.outputs)
        obs = saved.state["arrays"]["observations"].get("obs")
        self.recorded = obs is not None
        if obs is None:
            if needs_recorded:
                raise ConfigError(
                    f"--quantize needs observations to calibrate on, and checkpoint {saved.step} has recorded none: "
                    "it was saved before the first iteration. Train on, or name another --checkpoint."
                )
            rng = np.random.default_rng(0)
            samples = [self.spec.observation.sample(rng) for _ in range(_RANDOM_ROWS)]
            obs = tree.map(np.asarray, tree.stack(samples))
        if served.initial_state is None:
            self.args: tuple[Any, ...] = (obs,)
            self.expected = run(self.model, self.args)
        else:
            obs, states, self.expected = follow(self.model, obs, served.initial_state, exp.config["env"].num_envs)
            self.args = (obs, states)
        self.rows = tree.length(obs)
        self.engines: dict[str, Engine] = {}

    def float32(self) -> tuple[dict[str, bytes], Proof]:
        """The files without int8, after a check that they answer like the Model, and the proof of them."""
        weights, step = self.saved.weights, self.saved.step
        graph = export_onnx(self.model.model, self.args, self.outputs, step)
        constant = with_constant_weights(graph, weights, step)
        bound = OnnxEngine(graph)
        bound.set_weights(weights)
        self.engines = {"torch": self.model, "onnx": OnnxEngine(constant), "onnx, weights as inputs": bound}
        check_close(self.engines["onnx"], self.args, self.expected, MODEL)
        check_close(bound, self.args, self.expected, GRAPH)
        files = {GRAPH: graph, WEIGHTS: pack_weights(weights), MODEL: constant}
        return files, Proof.make(self.args, self.expected, self.engines["onnx"], step)

    def reports(self) -> dict[str, Report]:
        return {name: self.judge(engine) for name, engine in self.engines.items()}

    def judge(self, engine: Engine) -> Report:
        return verify(engine, self.args, self.expected, self._act, self.spec.action)

    def _act(self, outputs: Any, obs: Any) -> Any:
        return self.policy.act(outputs, Tick(obs), None, GREEDY, TRAINED)[0]


def _table(reports: dict[str, Report], sizes: dict[str, int], rows: int, recorded: bool) -> None:
    table = plain_table(
        "engine", ">size", ">max error", ">mean error", ">same action", *(f">batch {n}" for n in BATCHES)
    )
    for name, r in reports.items():
        size = f"{sizes[name] / 1e3:,.1f} kB" if name in sizes else "–"
        times = [f"{1e6 * median:,.0f} / {1e6 * p99:,.0f}" for median, p99 in r.latency.values()]
        table.add_row(name, size, f"{r.max_error:.1e}", f"{r.mean_error:.1e}", f"{r.agreement:.1%}", *times)
    put(table)
    kind = "recorded" if recorded else "random"
    say(f"against torch on {rows:,} {kind} observations; µs, median / 99th percentile, one thread", "dim")
