"""What a graph answered where it was exported, it answers wherever it is loaded, or it is refused."""

import json
import re
from pathlib import Path

import numpy as np
import pytest

from bray import tree
from bray.errors import CheckpointError
from bray.inference.graph import with_constant_weights
from bray.inference.onnx_engine import OnnxEngine
from bray.inference.proof import SAMPLES, WEIGHTS, Proof, prove, write_export
from bray.inference.quantize import quantize
from bray.inference.torch_engine import TorchEngine
from bray.inference.verify import run
from bray.rundir import seal
from bray.rundir.weights import pack_weights
from tests.inference.test_inference_quantize import BOX, exported_model

FILES = ("graph.onnx", "model.onnx", "model.int8.onnx")
DOCS = Path(__file__).parents[2] / "docs" / "serving.md"


@pytest.fixture(scope="module")
def made():
    """(the files of an export, their proof)."""
    obs = np.random.default_rng(0).normal(size=(64, 6)).astype(np.float32)
    model, graph = exported_model(BOX, [obs], fcnet_hiddens=(16, 16))
    weights = {k: v.numpy().copy() for k, v in model.state_dict().items()}
    constant = with_constant_weights(graph, weights, 4)
    int8 = quantize(constant, [obs])
    files = {"graph.onnx": graph, WEIGHTS: pack_weights(weights), "model.onnx": constant, "model.int8.onnx": int8}
    proof = Proof.make((obs,), run(TorchEngine(model, ("dist",)), (obs,)), OnnxEngine(constant), 4)
    return files, proof.with_int8(OnnxEngine(int8))


@pytest.fixture
def folder(made, tmp_path):
    write_export(tmp_path, *made)
    return tmp_path


def break_engines(monkeypatch, by):
    """ONNX Runtime as it would be with a fault."""
    real = OnnxEngine.forward
    monkeypatch.setattr(OnnxEngine, "forward", lambda self, *args: tree.map(by, real(self, *args)))


@pytest.mark.parametrize("name", FILES)
def test_an_export_answers_as_it_did(folder, name, caplog):
    OnnxEngine(folder / name)
    OnnxEngine(Path(name), root=folder)
    assert not caplog.records


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize(
    "fault",
    [lambda x: 1.5 * x, lambda x: x[::-1], lambda x: np.where(x > 0, np.nan, x), lambda x: x[:, :1]],
    ids=["too large", "rows mixed up", "NaN", "another shape"],
)
def test_an_engine_that_answers_otherwise_is_refused_with_both_numbers(folder, name, fault, monkeypatch):
    break_engines(monkeypatch, fault)
    with pytest.raises(CheckpointError) as refused:
        OnnxEngine(folder / name)
    said = str(refused.value)
    off, allowed = re.search(r"Output 'dist' is off by (\S+), at most (\S+) was expected", said).groups()
    assert not float(off) <= float(allowed) < 1
    assert str(folder / name) in said
    assert re.search(r"Here: ONNX Runtime \d\S+ \(CPUExecutionProvider\), \w+, .+ There: ONNX Runtime \d", said)
    assert ("int8" if "int8" in name else "float32") in said


@pytest.mark.parametrize("name", FILES)
def test_rounding_is_no_fault(folder, name, monkeypatch):
    break_engines(monkeypatch, lambda x: x * np.float32(1 + 1e-4) - np.float32(1e-5))
    OnnxEngine(folder / name)


def test_int8_may_be_off_by_what_it_costs_and_float32_by_rounding(made):
    _, proof = made
    outputs, allowed = proof.outputs, {k: v["dist"] for k, v in proof.tolerance.items()}
    cost = np.abs(outputs["int8"]["dist"] - outputs["float32"]["dist"]).max()
    largest = np.abs(outputs["float32"]["dist"]).max()
    assert cost < allowed["int8"] < 2 * cost
    assert allowed["float32"] < 2e-3 * largest < cost


def test_an_export_without_a_proof_is_used_and_that_is_said_once(folder, caplog):
    samples = tree.unpack((folder / SAMPLES).read_bytes())
    del samples["about"]
    (folder / SAMPLES).write_bytes(tree.pack(samples))  # as 0.1 and 0.2 wrote it
    for _ in range(2):
        OnnxEngine(folder / "model.onnx")
    (folder / SAMPLES).unlink()
    OnnxEngine(folder / "graph.onnx")
    assert [r.getMessage().partition(":")[0] for r in caplog.records] == [
        str(folder / "model.onnx"),
        str(folder / "graph.onnx"),
    ]
    assert all("without a proof: `bray export` writes one" in r.getMessage() for r in caplog.records)


def test_samples_of_another_export_prove_nothing(made, folder, caplog, monkeypatch):
    """As a kill between two files leaves them."""
    files, proof = made
    (folder / SAMPLES).write_bytes(proof.pack({**files, "model.onnx": b"another one"}))
    break_engines(monkeypatch, np.negative)
    OnnxEngine(folder / "model.onnx")
    assert "samples.tree of another export" in caplog.text


def test_a_flipped_bit_of_the_samples_is_found(folder):
    good = (folder / SAMPLES).read_bytes()
    for at in np.random.default_rng(0).integers(0, 8 * len(good), 60):
        data = bytearray(good)
        data[at // 8] ^= 1 << at % 8
        (folder / SAMPLES).write_bytes(data)
        with pytest.raises(CheckpointError, match=r"samples\.tree"):
            OnnxEngine(folder / "model.onnx")


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda s, about: s.update(inputs=(np.zeros((100_000, 6), np.float32),)), "same number of rows"),
        (lambda s, about: s.update(inputs=[*s["inputs"]]), "same number of rows"),
        (lambda s, about: about["tolerance"]["float32"].clear(), "a tolerance for each output"),
        (lambda s, about: about["tolerance"].update(int8={"dist": "much"}), "Expected `float`"),
        (lambda s, about: about.pop("step"), "step"),
        (lambda s, about: s.update(inputs=np.zeros((), np.float32)), "expected samples"),
    ],
    ids=["many rows", "a list", "no tolerance", "text", "no step", "no rows"],
)
def test_samples_that_somebody_made_up_are_refused(folder, change, why):
    samples = tree.unpack((folder / SAMPLES).read_bytes())
    about = json.loads(samples["about"].tobytes())
    change(samples, about)
    about["checksum"] = "bray-sha256:" + "0" * 64
    samples["about"] = np.frombuffer(json.dumps(about).encode(), np.uint8)
    (folder / SAMPLES).write_bytes(seal(tree.pack(samples)))
    with pytest.raises(CheckpointError, match=why):
        OnnxEngine(folder / "model.onnx")


def test_a_graph_is_proved_with_the_weights_of_its_export(folder):
    (folder / WEIGHTS).unlink()
    with pytest.raises(CheckpointError, match=r"graph\.weights is missing"):
        OnnxEngine(folder / "graph.onnx")
    OnnxEngine(folder / "model.onnx")


def test_an_int8_engine_without_int8_outputs_is_refused(made):
    files, proof = made
    without = Proof(proof.inputs, {"float32": proof.outputs["float32"]}, proof.tolerance, 4, "")
    with pytest.raises(CheckpointError, match="no outputs in int8"):
        prove(OnnxEngine(files["model.int8.onnx"]), without, "it")


def test_a_program_without_bray_proves_a_graph_too(folder, monkeypatch, capsys):
    """The code of docs/serving.md, as it stands there."""
    code = re.search(r"```python\n(# without Bray.*?)```", DOCS.read_text(), re.S)[1]
    assert "bray" not in re.sub(r"#.*|\"bray\"|BRAYTREE", "", code)
    monkeypatch.chdir(folder)
    exec(compile(code, str(DOCS), "exec"), {})
    assert re.fullmatch(r"dist: off by \d\S*, at most \d\S*\n", capsys.readouterr().out)
    wrong = (folder / "model.onnx").read_bytes()
    (folder / "model.onnx").write_bytes(wrong.replace(b"Tanh", b"Relu"))
    with pytest.raises(AssertionError):
        exec(compile(code, str(DOCS), "exec"), {})
