"""int8: near the Model on what it was calibrated on, bytes in without a detour, float32 where rounding would decide."""

import numpy as np
import onnx
import pytest
import torch
from onnx import numpy_helper

from bray import tree
from bray.errors import DataError, ExportError
from bray.inference.export import export_onnx
from bray.inference.graph import read_signature, with_constant_weights
from bray.inference.onnx_engine import OnnxEngine
from bray.inference.quantize import quantize
from bray.inference.torch_engine import TorchEngine
from bray.nn import ModelConfig, make_model
from bray.spec import EnvSpec, Space

BOX = Space("box", (6,), "float32")
PICTURE = Space("box", (4, 40, 40), "uint8", 0, 255)
CHOICE = Space("discrete", (), "int64", n=(5,), start=(0,))


def exported_model(observation, args, outputs=("dist",), **model):
    """(a Model, its graph with weights as inputs)."""
    torch.manual_seed(0)
    made = make_model("actor_critic", EnvSpec("x", observation, CHOICE), ModelConfig(**model))
    with torch.no_grad():
        for name, p in made.named_parameters():
            if name in ("head.weight", "policy.weight"):
                p.mul_(100.0)  # a policy that has made up its mind
    return made, export_onnx(made, args, outputs, step=4)


def export(observation, args, outputs=("dist",), **model):
    made, graph = exported_model(observation, args, outputs, **model)
    return made, with_constant_weights(graph, {k: v.numpy().copy() for k, v in made.state_dict().items()})


def pictures(rows, seed=0):
    """Squares on black."""
    rng = np.random.default_rng(seed)
    out = np.zeros((rows, 4, 40, 40), np.uint8)
    for picture in out.reshape(-1, 40, 40):
        for _ in range(3):
            y, x = rng.integers(0, 32, 2)
            picture[y : y + 8, x : x + 8] = rng.integers(50, 250)
    return out


@pytest.fixture(scope="module")
def seeing():
    """(model, float32 file, int8 file) of a convolution net."""
    obs = pictures(64)
    model, float32 = export(PICTURE, [obs], conv_features=64)
    return model, float32, quantize(float32, [obs])


def layer_kinds(data):
    """Operation of each layer -> "int8" when its weights are bytes, else "float32"."""
    graph = onnx.load_model_from_string(data).graph
    scaled = {n.output[0] for n in graph.node if n.op_type == "DequantizeLinear"}
    layers = [n for n in graph.node if n.op_type in ("Conv", "Gemm", "MatMul")]
    return [(n.op_type, "int8" if n.input[1] in scaled else "float32") for n in layers]


def test_convolutions_in_int8(seeing):
    model, float32, int8 = seeing
    obs = pictures(64, seed=1)
    want, got = TorchEngine(model, ("dist",)).forward(obs)["dist"], OnnxEngine(int8).forward(obs)["dist"]
    assert got.dtype == np.float32
    assert got.shape == want.shape
    assert 0 < np.abs(got - want).max() < 0.1 * np.ptp(want)
    assert (got.argmax(1) == want.argmax(1)).mean() > 0.9
    assert len(int8) < 0.4 * len(float32)
    assert layer_kinds(int8) == [("Conv", "int8")] * 3 + [("Gemm", "int8"), ("Gemm", "float32")]
    for rows in (1, 3):
        np.testing.assert_allclose(OnnxEngine(int8).forward(obs[:rows])["dist"], got[:rows], atol=1e-5)


def test_bytes_enter_the_first_convolution_as_they_are(seeing):
    graph = onnx.load_model_from_string(seeing[2]).graph
    (reader,) = [n for n in graph.node if "obs" in n.input]
    assert reader.op_type == "DequantizeLinear"
    assert not {"Cast", "Mul"} & {n.op_type for n in graph.node}


def test_it_says_what_it_is(seeing):
    _, float32, int8 = seeing
    before, after = (read_signature(onnx.load_model_from_string(x)) for x in (float32, int8))
    assert (after.precision, after.weights, after.step) == ("int8", "constant", 4)
    assert (after.inputs, after.outputs) == (before.inputs, before.outputs)
    with pytest.raises(DataError, match="float32 graph"):
        quantize(int8, [pictures(2)])


def test_dense_layers_that_read_observations_stay_float32():
    rng = np.random.default_rng(0)
    obs = (rng.normal(size=(256, 6)) * [100.0, 10.0, 1.0, 0.1, 0.01, 1.0]).astype(np.float32)
    model, float32 = export(BOX, [obs], fcnet_hiddens=(32, 32))
    int8 = quantize(float32, [obs])
    assert layer_kinds(int8) == [("Gemm", "float32"), ("Gemm", "int8"), ("Gemm", "float32")]
    want, got = TorchEngine(model, ("dist",)).forward(obs)["dist"], OnnxEngine(int8).forward(obs)["dist"]
    assert np.abs(got - want).max() < 0.05 * np.ptp(want)


def int8_layers(data):
    """(operation, weights `[outputs, inputs]`) of the layers that compute in int8."""
    graph = onnx.load_model_from_string(data).graph
    values = {x.name: numpy_helper.to_array(x) for x in graph.initializer}
    stored = {n.output[0]: values.get(n.input[0]) for n in graph.node if n.op_type == "DequantizeLinear"}
    for node in graph.node:
        weights = stored.get(node.input[1]) if node.op_type in ("Conv", "Gemm", "MatMul") else None
        if weights is not None:
            transposed = node.op_type == "Conv" or any(a.name == "transB" and a.i for a in node.attribute)
            yield node.op_type, weights.reshape(len(weights), -1) if transposed else weights.T


def without_vnni(inputs, weights):
    """Unsigned bytes `[N, K]` times `[M, K]` as x86 CPUs without VNNI multiply: the sum of two products has 16 bits and
    stays at their ends (vpmaddubsw); the sums of those have 32."""
    pad = inputs.shape[1] % 2
    x = np.pad(inputs, ((0, 0), (0, pad))).astype(np.int32)
    w = np.pad(weights, ((0, 0), (0, pad))).astype(np.int32)
    pairs = x[:, None, 0::2] * w[:, 0::2] + x[:, None, 1::2] * w[:, 1::2]
    return pairs.clip(-(2**15), 2**15 - 1).sum(2)


def exactly(inputs, weights):
    return inputs.astype(np.int32) @ weights.astype(np.int32).T


def test_no_cpu_overflows_the_sum_of_two_products(seeing):
    """With weights of 8 bits, CPUs without VNNI chose another action in one of ten states."""
    obs = np.random.default_rng(0).normal(size=(64, 6)).astype(np.float32)
    dense = quantize(export(BOX, [obs], fcnet_hiddens=(64, 64, 64))[1], [obs])
    layers = [*int8_layers(seeing[2]), *int8_layers(dense)]
    assert [kind for kind, _ in layers] == ["Conv"] * 3 + ["Gemm"] * 3
    for kind, weights in layers:
        assert weights.dtype == np.int8
        assert np.abs(weights.astype(int)).max() > 32  # of the range that is left, not much is wasted
        some = np.random.default_rng(1).integers(0, 256, (8, weights.shape[1]), np.uint8)
        np.testing.assert_array_equal(without_vnni(some, weights), exactly(some, weights), err_msg=kind)
        # In whatever order a kernel takes the inputs, it is not worse than this: the weights of an output sorted, so
        # that the largest meet, and inputs of 255 wherever the weight has one sign.
        found = False
        for row in np.sort(weights)[:16, None]:
            worst = np.concatenate([np.where(row > 0, 255, 0), np.where(row < 0, 255, 0)]).astype(np.uint8)
            np.testing.assert_array_equal(without_vnni(worst, row), exactly(worst, row), err_msg=kind)
            wide = np.clip(2 * row.astype(int), -127, 127)  # as without reduce_range
            found = found or bool((without_vnni(worst, wide) != exactly(worst, wide)).any())
        assert found, "this model of a CPU sees no overflow"


def test_a_model_without_inner_layers_has_nothing_to_quantize():
    obs = np.random.default_rng(0).normal(size=(8, 6)).astype(np.float32)
    with pytest.raises(ExportError, match="nothing to quantize"):
        quantize(export(BOX, [obs], fcnet_hiddens=(8,))[1], [obs])


def test_memory_and_several_inputs():
    rng = np.random.default_rng(0)
    space = Space("dict", names=("eye", "body"), parts=(PICTURE, BOX))
    obs = {"eye": pictures(48), "body": rng.normal(size=(48, 6)).astype(np.float32)}
    state = {k: rng.uniform(-1, 1, (48, 16)).astype(np.float32) for k in ("h", "c")}
    model, float32 = export(
        space, [obs, state], ("dist", "state"), conv_features=32, fcnet_hiddens=(32,), use_lstm=True, lstm_cell_size=16
    )
    int8 = quantize(float32, [obs, state])
    assert ("Conv", "int8") in layer_kinds(int8)
    want, got = TorchEngine(model, ("dist", "state")).forward(obs, state), OnnxEngine(int8).forward(obs, state)
    assert [p for p, _ in tree.paths(got)] == [p for p, _ in tree.paths(want)]
    for a, b in zip(tree.leaves(got), tree.leaves(want), strict=True):
        assert np.abs(a - b).max() < 0.1 * np.ptp(b)
