"""`bray export`: the files, the table, what is refused; and the files without torch."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from bray import tree
from bray.cli import export as command
from bray.cli.main import main
from bray.experiment import Experiment
from bray.inference.onnx_engine import OnnxEngine
from bray.rundir import RunDir

HERE = Path(__file__).parents[1]
TINY = ["--quiet", "--no-preset", "rollout_length=32", "num_envs=4", "minibatches=1", "epochs=1"]


def train(folder, *words):
    path = folder / "t"
    arguments = ["--project", str(folder), "--trial", "t", *words]
    assert main(["train", *arguments]) == 0
    return path


@pytest.fixture(scope="module")
def cartpole(tmp_path_factory):
    """A run with two checkpoints, not exported yet."""
    folder = tmp_path_factory.mktemp("cartpole")
    words = ["--run", "PPO", "--env", "CartPole-v1", "--stop", '{"training_iteration": 4}', "--checkpoint-freq", "2"]
    return train(folder, *words, *TINY)


def rows_of(printed):
    """The table's rows by engine: (size, max error, mean error, same action)."""
    lines = [line for line in printed.splitlines() if line.startswith(("torch  ", "onnx  ", "onnx, weights", "int8  "))]
    out = {}
    for line in lines:
        name, *cells = [c.strip() for c in line.split("  ") if c.strip()]
        out[name] = cells
    return out


def test_export_writes_files_that_answer_like_the_checkpoint(cartpole, capsys):
    _, first, last = RunDir.open(cartpole).steps()
    assert main(["export", str(cartpole), "--quantize", "--min-agreement", "0.5"]) == 0
    printed = capsys.readouterr()
    assert printed.err == ""
    assert f"PPO on CartPole-v1, checkpoint {last}" in printed.out
    rows = rows_of(printed.out)
    assert list(rows) == ["torch", "onnx", "onnx, weights as inputs", "int8"]
    assert rows["torch"][1:4] == ["0.0e+00", "0.0e+00", "100.0%"]
    assert rows["onnx"][3] == rows["onnx, weights as inputs"][3] == "100.0%"
    assert float(rows["onnx"][1]) < 1e-5
    assert 1e-5 < float(rows["int8"][1]) < 1
    assert all(len(cells) == 8 and cells[4:][0].count("/") == 1 for cells in rows.values())
    assert "132 recorded observations" in printed.out

    folder = cartpole / "models" / "default"
    samples = tree.unpack((folder / "samples.tree").read_bytes())
    (obs,) = samples["inputs"]
    assert len(obs) == 32
    exp = Experiment.load(cartpole)
    np.testing.assert_allclose(samples["outputs"]["dist"], exp.served.engine.forward(obs.copy())["dist"], atol=1e-6)
    for name, step, kind, precision in (
        ("model.onnx", last, "constant", "float32"),
        ("graph.onnx", last, "inputs", "float32"),
        ("model.int8.onnx", last, "constant", "int8"),
    ):
        engine = OnnxEngine(folder / name)
        assert (engine.step, engine.signature.weights, engine.signature.precision) == (step, kind, precision)
        if kind == "inputs":
            engine.set_weights(RunDir.open(cartpole).load_weights(last))
        off = np.abs(engine.forward(obs)["dist"] - samples["outputs"]["dist"]).max()
        assert off < (1e-5 if precision == "float32" else 1e-2)
    exp.close()

    # another checkpoint: the int8 file of this one would not fit it
    assert main(["export", str(cartpole), "--checkpoint", str(first)]) == 0
    assert OnnxEngine(folder / "model.onnx").step == first
    assert not (folder / "model.int8.onnx").exists()
    assert not list(folder.glob("*.tmp"))


def test_a_graph_fits_every_checkpoint_of_its_run(cartpole):
    run = RunDir.open(cartpole)
    steps = run.steps()
    first = steps[1]
    assert main(["export", str(cartpole), "--checkpoint", str(first)]) == 0
    engine = OnnxEngine(cartpole / "models" / "default" / "graph.onnx")
    obs = np.random.default_rng(0).normal(size=(7, 4)).astype(np.float32)
    for step in steps:
        exp = Experiment.load(cartpole, step)
        engine.set_weights(run.load_weights(step))
        np.testing.assert_allclose(engine.forward(obs)["dist"], exp.served.engine.forward(obs)["dist"], atol=1e-6)
        exp.close()


def test_int8_that_acts_otherwise_is_refused_with_the_number(cartpole, capsys, monkeypatch):
    class Contrary:
        def __init__(self, data):
            self.engine = OnnxEngine(data)

        def forward(self, *args):
            return {"dist": -self.engine.forward(*args)["dist"]}

    monkeypatch.setattr(command, "OnnxEngine", lambda d: Contrary(d) if b'"int8"' in d else OnnxEngine(d))
    folder = cartpole / "models" / "default"
    (folder / "model.int8.onnx").write_bytes(b"of an earlier export")
    assert main(["export", str(cartpole), "--quantize"]) == 2
    printed = capsys.readouterr()
    agreement = rows_of(printed.out)["int8"][3]
    assert float(agreement[:-1]) < 99
    assert printed.err.startswith(f"error: model.int8.onnx is not written: in int8 {agreement} of 132 greedy actions")
    assert "at least 99.0% are asked for" in printed.err
    assert not (folder / "model.int8.onnx").exists()
    assert (folder / "model.onnx").exists()


def test_slower_int8_is_said(cartpole, capsys, monkeypatch):
    real = command.verify

    def timed(engine, *args):
        report = real(engine, *args)
        int8 = isinstance(engine, OnnxEngine) and engine.signature.precision == "int8"
        latency = dict.fromkeys(report.latency, (2.0 if int8 else 1.0, 3.0))
        return type(report)(report.max_error, report.mean_error, report.agreement, latency)

    monkeypatch.setattr(command, "verify", timed)
    assert main(["export", str(cartpole), "--quantize", "--min-agreement", "0"]) == 0
    assert "int8 is slower here: serve fp32" in capsys.readouterr().out


def test_continuous_actions_and_replay(tmp_path, capsys):
    words = ["--run", "SAC", "--env", "Pendulum-v1", "--stop", '{"env_steps_total": 400}', "--quiet", "--no-preset"]
    path = train(
        tmp_path,
        *words,
        "learning_starts=100",
        "fcnet_hiddens=[16,16]",
        "num_envs=4",
        "batch_size=16",
        "train_every=16",
    )
    assert main(["export", str(path), "--quantize", "--min-agreement", "0.5"]) == 0
    rows = rows_of(capsys.readouterr().out)
    assert rows["onnx"][3] == "100.0%"
    assert float(rows["int8"][3][:-1]) > 50


def test_memory_and_nested_observations(tmp_path, capsys):
    words = ["--run", "PPO", "--env", "envs_for_tests:Composite", "--stop", '{"training_iteration": 2}', *TINY]
    path = train(tmp_path, *words, "use_lstm=true", "lstm_cell_size=8", "max_seq_len=8")
    assert main(["export", str(path)]) == 0
    printed = capsys.readouterr().out
    assert rows_of(printed)["onnx, weights as inputs"][3] == "100.0%"
    assert "132 recorded" in printed
    engine = OnnxEngine(path / "models" / "default" / "model.onnx")
    samples = tree.unpack((path / "models" / "default" / "samples.tree").read_bytes())
    obs, state = samples["inputs"]
    assert np.abs(state["h"]).max() > 0  # states as they come up in a game, not only the first
    got = engine.forward(obs, state)
    for a, b in zip(tree.leaves(got), tree.leaves(samples["outputs"]), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)


def test_without_recorded_observations(tmp_path, capsys):
    exp = Experiment(run="PPO", env="CartPole-v1", path=tmp_path / "t", num_envs=2)
    exp.save()
    exp.close()
    assert main(["export", str(tmp_path / "t"), "--quantize"]) == 2
    assert "needs observations to calibrate on" in capsys.readouterr().err
    assert not list((tmp_path / "t" / "models" / "default").glob("*.onnx"))
    assert main(["export", str(tmp_path / "t")]) == 0
    assert "256 random observations" in capsys.readouterr().out


class Eigen(nn.Module):
    """A custom model with an operation that ONNX has not."""

    def __init__(self, spec, config):
        super().__init__()
        self.layer = nn.Linear(4, 2)

    def forward(self, obs):
        x = self.layer(obs)
        return {"dist": torch.linalg.eigvals(x.unsqueeze(1).expand(-1, 2, 2)).real.float(), "value": x[:, 0]}


def test_a_model_that_has_no_graph(tmp_path, capsys):
    exp = Experiment(
        run="PPO",
        env="CartPole-v1",
        path=tmp_path / "t",
        num_envs=2,
        custom_model="test_inference_cli:Eigen",
        record=False,
    )
    exp.save()
    exp.close()
    assert main(["export", str(tmp_path / "t")]) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: the Model cannot be exported: the operation aten.linalg_eig has no form in ONNX")
    assert "test_inference_cli.py" in err
    assert err.count("\n") == 1
    assert not list((tmp_path / "t" / "models" / "default").glob("*.onnx"))


WITHOUT_TORCH = """
import sys

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("torch", "ray", "gymnasium"):
            raise ImportError(f"{name} is not here")

sys.meta_path.insert(0, Blocker())
import numpy as np
from pathlib import Path
from bray import tree
from bray.inference import engine, graph, quantize, verify
from bray.inference.onnx_engine import OnnxEngine
from bray.rundir import RunDir

path, step = Path(sys.argv[1]), int(sys.argv[2])
folder = path / "models" / "default"
samples = tree.unpack((folder / "samples.tree").read_bytes())
weights = RunDir.open(path).load_weights(step)
bound = OnnxEngine(folder / "graph.onnx")
bound.set_weights(weights)
for made in (bound, bound.with_weights(weights, step), OnnxEngine(folder / "model.onnx")):
    np.testing.assert_allclose(made.forward(*samples["inputs"])["dist"], samples["outputs"]["dist"], atol=1e-6)
int8 = OnnxEngine(quantize.quantize((folder / "model.onnx").read_bytes(), samples["inputs"]))
assert verify.run(int8, samples["inputs"])["dist"].shape == samples["outputs"]["dist"].shape
assert not {"torch", "ray", "gymnasium"} & set(sys.modules)
try:
    import torch
except ImportError:
    print("done without torch")
"""


def test_engines_without_torch(cartpole):
    assert main(["export", str(cartpole)]) == 0
    step = RunDir.open(cartpole).steps()[-1]
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH, str(cartpole), str(step)], capture_output=True, text=True, cwd=HERE.parent
    )
    assert done.stdout.strip() == "done without torch", done.stderr


def test_inference_itself_needs_neither_torch_nor_onnxruntime():
    code = (
        "import sys, bray.inference, bray.inference.engine, bray.inference.graph, bray.inference.verify; print([m for "
        "m in ('torch', 'onnxruntime', 'onnx', 'ray') if m in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=HERE.parent)
    assert out.stdout.strip() == "[]"
