"""Every kind of Model as an ONNX graph: the same answers as torch, any batch size, weights inside or as inputs; and
what is said of Models that have no such graph."""

from functools import cache
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from torch import nn

from bray import tree
from bray.algos import get_algo
from bray.errors import CheckpointError, ConfigError, DataError, ExportError
from bray.inference.export import export_onnx
from bray.inference.graph import Signature, read_signature, with_constant_weights, write_signature
from bray.inference.onnx_engine import OnnxEngine
from bray.inference.torch_engine import TorchEngine, is_recurrent
from bray.nn import ModelConfig, QNetwork, update_normalizers
from bray.spec import EnvSpec, Space

BOX = Space("box", (4,), "float32", -2.0, 2.0)
PICTURE = Space("box", (4, 84, 84), "uint8", 0, 255)
CHOICE = Space("discrete", (), "int64", n=(3,), start=(0,))
CHOICES = Space("multi_discrete", (2,), "int64", n=(3, 4), start=(1, 0))
ARM = Space("box", (2,), "float32", -2.0, 2.0)
NESTED = Space(
    "dict",
    names=("position", "inner", "action_mask"),
    parts=(
        BOX,
        Space("dict", names=("kind", "flags"), parts=(CHOICE, Space("multi_binary", (3,), "int8"))),
        Space("box", (3,), "int8", 0, 1),
    ),
)
PAIR = Space(
    "tuple", parts=(BOX, CHOICES, Space("tuple", parts=(Space("discrete", (), "int64", n=(5,), start=(2,)), BOX)))
)
BOTH = Space("dict", names=("move", "aim"), parts=(CHOICE, ARM))


def model_of(algo, observation, action=CHOICE, options=None, **model):
    """(model, spec, names of the outputs that the policy acts by)."""
    algo = get_algo(algo)
    config, spec = algo.Config(**(options or {})), EnvSpec("x", observation, action)
    torch.manual_seed(1)
    made = algo.make_model(config, spec, ModelConfig(**model))
    return made, spec, algo.Policy(config, spec).reads


def observations(space, rows, seed=0):
    rng = np.random.default_rng(seed)
    return tree.map(np.asarray, tree.stack([space.sample(rng) for _ in range(rows)]))


def args_of(model, space, rows, seed=0):
    obs = observations(space, rows, seed)
    if not is_recurrent(model):
        return [obs]
    rng = np.random.default_rng(seed + 1)
    return [
        obs,
        tree.map(
            lambda x: rng.uniform(-1, 1, x.shape).astype(np.float32), tree.map(np.asarray, model.initial_state(rows))
        ),
    ]


def weights_of(model):
    return {k: v.detach().numpy().copy() for k, v in model.state_dict().items()}


def assert_alike(got, expected, tolerance=2e-5):
    assert [p for p, _ in tree.paths(got)] == [p for p, _ in tree.paths(expected)]
    for (path, a), b in zip(tree.paths(got), tree.leaves(expected), strict=True):
        assert (a.dtype, a.shape) == (b.dtype, b.shape), path
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=tolerance, err_msg=path)


CASES = {
    "ppo-mlp": lambda: model_of("PPO", BOX),
    "a2c-normalized": lambda: model_of("A2C", BOX, normalize_observations=True, layer_norm=True),
    "ppo-nature": lambda: model_of("PPO", PICTURE),
    "appo-nature-normalized": lambda: model_of("APPO", PICTURE, normalize_observations=True),
    "a2c-impala": lambda: model_of("A2C", Space("box", (32, 32, 3), "uint8", 0, 255), conv_filters="impala"),
    "ppo-resized": lambda: model_of("PPO", Space("box", (40, 30), "uint8", 0, 255), dim=20, zero_mean=True),
    "ppo-same-padding": lambda: model_of("PPO", Space("box", (15, 15, 2), "float32", 0, 1)),
    "ppo-dict": lambda: model_of("PPO", NESTED),
    "a2c-tuple": lambda: model_of("A2C", PAIR, CHOICES),
    "ppo-gaussian": lambda: model_of("PPO", BOX, ARM),
    "ppo-composite": lambda: model_of("PPO", BOX, BOTH, free_log_std=False, fcnet_activation="gelu"),
    "ppo-lstm": lambda: model_of("PPO", NESTED, use_lstm=True, lstm_cell_size=16),
    "a2c-gru": lambda: model_of("A2C", BOX, use_lstm=True, recurrent="gru", lstm_cell_size=16),
    "ppo-lstm-norm": lambda: model_of("PPO", BOX, use_lstm=True, recurrent_norm=True, lstm_cell_size=8),
    "r2d2-gru-norm": lambda: model_of(
        "R2D2", BOX, CHOICE, use_lstm=True, recurrent="gru", recurrent_norm=True, lstm_cell_size=8
    ),
    "ppo-lstm-picture": lambda: model_of("PPO", PICTURE, use_lstm=True, lstm_cell_size=8, conv_features=32),
    "dqn-mlp": lambda: model_of("DQN", Space("discrete", (), "int64", n=(7,), start=(3,))),
    "dqn-dueling": lambda: model_of("DQN", NESTED, options={"dueling": True}),
    "dqn-dueling-nature": lambda: model_of("DQN", PICTURE, options={"dueling": True}),
    "iqn": lambda: model_of("IQN", BOX, CHOICE),
    "rainbow": lambda: model_of("Rainbow", BOX, CHOICE),
    "sac": lambda: model_of("SAC", BOX, ARM, log_std_init=0.5),
    "sac-dict": lambda: model_of("SAC", NESTED, ARM, normalize_observations=True),
    "ppo-layers": lambda: model_of(
        "PPO",
        Space("box", (3, 16, 16), "uint8", 0, 255),
        layers=[
            {"layer_type": "conv2d", "layer_dim": 8, "kernel_size": 3, "activation": "elu"},
            {"layer_type": "pooling", "pooling_type": "avg2d"},
            {"layer_type": "flatten"},
            {"layer_type": "norm"},
            {"layer_type": "noisy_linear", "layer_dim": 16, "activation": "silu"},
        ],
    ),
    "dqn-embedding": lambda: model_of(
        "DQN",
        Space("discrete", (), "int64", n=(7,), start=(3,)),
        layers=[
            {"layer_type": "embed", "layer_dim": 8},
            {"layer_type": "linear", "layer_dim": 8, "activation": "relu"},
        ],
    ),
    "atoms": lambda: (
        QNetwork(EnvSpec("x", BOX, CHOICE), ModelConfig(), dueling=True, num_atoms=5, support=(0.0, 1.0)),
        EnvSpec("x", BOX, CHOICE),
        ("q", "logits"),
    ),
    "quantiles": lambda: (
        QNetwork(EnvSpec("x", BOX, CHOICE), ModelConfig(), num_atoms=5),
        EnvSpec("x", BOX, CHOICE),
        ("q", "quantiles"),
    ),
}


@cache
def exported(case):
    """(model, spec, names of the outputs, file of the graph), made once: an export takes seconds."""
    model, spec, outputs = CASES[case]()
    for seed in range(3):
        update_normalizers(model, observations(spec.observation, 16, 10 + seed), np.ones(16, np.float32))
    if is_recurrent(model):
        outputs = (*outputs, "state")
    return model, spec, outputs, export_onnx(model, args_of(model, spec.observation, 1), outputs, step=5)


@pytest.mark.parametrize("case", CASES)
def test_graph_answers_like_the_model(case):
    model, spec, outputs, graph = exported(case)
    bound = OnnxEngine(graph)
    bound.set_weights(weights_of(model))
    constant = bound.with_weights(weights_of(model), step=6)
    assert (bound.step, constant.step) == (5, 6)
    expected = TorchEngine(model, outputs, record=False)
    for rows in (1, 3, 32):
        args = args_of(model, spec.observation, rows, seed=rows)
        want = expected.forward(*args)
        assert set(want) == set(outputs)
        assert_alike(bound.forward(*args), want)
        assert_alike(constant.forward(*args), want)


@pytest.fixture(scope="module")
def small():
    """(model, its graph with all outputs)."""
    model, spec, _ = model_of("PPO", BOX)
    model.train()
    before = weights_of(model)
    graph = export_onnx(model, [observations(spec.observation, 2)], step=3)
    assert model.training
    assert tree.equal(weights_of(model), before)
    return model, graph


def test_weights_take_effect_at_once(small):
    model, graph = small
    other, _, _ = model_of("PPO", BOX)
    with torch.no_grad():
        for p in other.parameters():
            p.add_(torch.randn_like(p) * 0.1)
    engine, obs = OnnxEngine(graph), observations(BOX, 5)
    with pytest.raises(ConfigError, match="set_weights"):
        engine.forward(obs)
    for m in (model, other, model):
        engine.set_weights(weights_of(m))
        assert_alike(engine.forward(obs), TorchEngine(m, record=False).forward(obs))
    mine = weights_of(model)
    engine.set_weights(mine)
    for array in mine.values():
        array += 1.0  # the engine has its own copy
    assert_alike(engine.forward(obs), TorchEngine(model, record=False).forward(obs))


def test_foreign_weights_are_refused_and_the_old_ones_stay(small):
    model, graph = small
    weights, obs = weights_of(model), observations(BOX, 2)
    engine = OnnxEngine(graph)
    engine.set_weights(weights)
    with pytest.raises(CheckpointError, match=r"policy\.bias: expected float32\[3\], got none"):
        engine.set_weights({k: v for k, v in weights.items() if k != "policy.bias"})
    with pytest.raises(CheckpointError, match=r"policy\.bias: expected float32\[3\], got float32\[4\]"):
        engine.with_weights(weights | {"policy.bias": np.zeros(4, np.float32)})
    with pytest.raises(CheckpointError, match="got float64"):
        engine.set_weights({k: v.astype(np.float64) for k, v in weights.items()})
    assert_alike(engine.forward(obs), TorchEngine(model, record=False).forward(obs))
    with pytest.raises(ConfigError, match="constants"):
        engine.with_weights(weights).set_weights(weights)
    with pytest.raises(ConfigError, match="constants"):
        engine.with_weights(weights).with_weights(weights)


def test_only_what_the_outputs_need_is_in_the_graph():
    model, _, _, graph = exported("ppo-dict")
    graph = onnx.load_model_from_string(graph)
    names = [x.name for x in graph.graph.input]
    assert names[:3] == ["obs/position", "obs/inner/kind", "obs/inner/flags"]
    assert "obs/action_mask" not in names
    assert not any(n.startswith(("value", "core.encoders.1")) for n in names)
    assert set(names[3:]) <= set(model.state_dict())
    assert [x.name for x in graph.graph.output] == ["dist"]
    assert read_signature(graph).inputs == (
        {"position": "obs/position", "inner": {"kind": "obs/inner/kind", "flags": "obs/inner/flags"}},
    )


def test_a_mask_may_be_missing_and_keys_in_any_order():
    model, _, outputs, graph = exported("ppo-dict")
    engine = OnnxEngine(graph)
    engine.set_weights(weights_of(model))
    obs = observations(NESTED, 4)
    want = engine.forward(obs)
    shuffled = {
        "inner": {"flags": obs["inner"]["flags"], "kind": obs["inner"]["kind"]},
        "position": obs["position"],
    }
    assert_alike(engine.forward(shuffled), want)
    recorded = TorchEngine(model, outputs)
    assert_alike(recorded.forward(obs), want)
    assert_alike(recorded.forward({"action_mask": obs["action_mask"], **shuffled}), want)
    with pytest.raises(DataError, match=r"expected a dict with the keys \['inner', 'position'\], got \['position'\]"):
        engine.forward({"position": obs["position"]})


def test_state_goes_in_and_out():
    model, _, _, graph = exported("ppo-lstm")
    signature = OnnxEngine(graph).signature
    assert signature.inputs[1] == {"h": "state/h", "c": "state/c"}
    assert signature.outputs == {"dist": "dist", "state": {"h": "next/state/h", "c": "next/state/c"}}
    engine = OnnxEngine(with_constant_weights(graph, weights_of(model)))
    torch_engine = TorchEngine(model, ("dist", "state"))
    state = theirs = tree.map(np.asarray, model.initial_state(3))
    for t in range(5):
        obs = observations(NESTED, 3, seed=t)
        out, want = engine.forward(obs, state), torch_engine.forward(obs, theirs)
        assert_alike(out, want)
        state, theirs = out["state"], want["state"]
    assert np.abs(state["h"]).max() > 0
    with pytest.raises(DataError, match="expected 2 parts, got 1"):
        engine.forward(obs)


class Tuples(nn.Module):
    """Takes three arguments, returns no dict."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 3)

    def forward(self, a, b, c):
        x = self.layer(a) + b["x"][0]
        return x, [x.sum(1), c * 2]


class Bare(nn.Module):
    def forward(self, a):
        return a * 2


def test_any_number_of_arguments_and_any_tree_of_outputs():
    args = [np.ones((4, 2), np.float32), {"x": (np.ones((4, 3), np.float32),)}, np.arange(4)]
    model = Tuples()
    engine = OnnxEngine(export_onnx(model, args))
    engine.set_weights(weights_of(model))
    assert engine.signature.inputs == ("obs", {"x": ("state/x/0",)}, "arg2")
    assert engine.signature.outputs == ("output/0", ["output/1/0", "output/1/1"])
    for record in (False, True):
        torch_engine = TorchEngine(model, record=record)
        got = torch_engine.forward(*args)
        assert isinstance(got, tuple)
        assert isinstance(got[1], list)
        assert_alike(engine.forward(*args), got)
    bare = OnnxEngine(export_onnx(Bare(), args[:1]))
    assert bare.signature.weights == "inputs"
    np.testing.assert_array_equal(bare.forward(args[0]), 2 * args[0])
    np.testing.assert_array_equal(TorchEngine(Bare()).forward(args[0]), 2 * args[0])


def test_torch_engine_takes_weights():
    model, _, _ = model_of("PPO", BOX)
    other, _, _ = model_of("PPO", BOX)
    with torch.no_grad():
        other.policy.weight.add_(1.0)
    engine, obs = TorchEngine(model), observations(BOX, 4)
    before = engine.forward(obs)["dist"].copy()
    engine.set_weights(weights_of(other))
    after = engine.forward(obs)
    assert np.abs(after["dist"] - before).max() > 0.01
    assert_alike(after, TorchEngine(other, record=False).forward(obs))
    with pytest.raises(CheckpointError, match=r"policy\.bias"):
        engine.set_weights({k: v for k, v in weights_of(other).items() if k != "policy.bias"})


def test_wrong_inputs_are_named(small):
    model, graph = small
    bound = OnnxEngine(graph)
    bound.set_weights(weights_of(model))
    for engine in (bound, bound.with_weights(weights_of(model))):
        with pytest.raises(DataError, match=r"input 'obs': expected float32\[batch, 4\], got float64\[2, 4\]"):
            engine.forward(np.zeros((2, 4)))
        with pytest.raises(DataError, match=r"input 'obs': expected float32\[batch, 4\], got float32\[4\]"):
            engine.forward(np.zeros(4, np.float32))
        obs = observations(BOX, 6)
        want = engine.forward(obs)
        assert_alike(engine.forward(np.asfortranarray(obs)), want)
        assert_alike(engine.forward(np.repeat(obs, 2, 0)[::2]), want)


def test_rows_of_all_inputs_must_agree():
    model, _, _, graph = exported("a2c-gru")
    engine = OnnxEngine(with_constant_weights(graph, weights_of(model)))
    obs, state = args_of(model, BOX, 3)
    with pytest.raises(DataError, match="the same number of rows"):
        engine.forward(obs[:2], state)


def test_files_that_are_not_ours(tmp_path, small):
    _, graph = small
    with pytest.raises(CheckpointError, match=r"none\.onnx is missing: `bray export` writes it"):
        OnnxEngine(tmp_path / "none.onnx")
    (tmp_path / "bad.onnx").write_bytes(graph[: len(graph) // 2])
    with pytest.raises(DataError, match=r"bad\.onnx: expected an ONNX file"):
        OnnxEngine(tmp_path / "bad.onnx")
    foreign = onnx.load_model_from_string(graph)
    del foreign.metadata_props[:]
    with pytest.raises(DataError, match="bray export"):
        OnnxEngine(foreign.SerializeToString())
    later = foreign
    later.metadata_props.add(key="bray", value='{"format": 2}')
    with pytest.raises(DataError, match="format 2"):
        OnnxEngine(later.SerializeToString())
    later.metadata_props[0].value = '{"format": 1, "inputs": 3}'
    with pytest.raises(DataError, match="cannot be read"):
        OnnxEngine(later.SerializeToString())


def test_signature_survives_its_file():
    signature = Signature(
        ({"a": "obs/a", "b": ("obs/b/0", None)}, ["x"], None), ({"q": "q"}, []), 9, "constant", "int8"
    )
    assert Signature.from_json(signature.to_json()) == signature
    model = onnx.ModelProto()
    write_signature(model, signature)
    assert read_signature(model) == signature


def test_graph_holds_neither_weights_nor_paths_of_this_machine():
    for case in ("ppo-nature", "ppo-dict"):
        graph = exported(case)[-1]
        assert len(graph) < 8000
        assert b".py" not in graph
        assert str(Path.cwd()).encode() not in graph


# --- Models that have no graph ----------------------------------------------------------------------------------------


class Mine(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 2)


class Branches(Mine):
    def forward(self, x):
        if x.sum() > 0:
            return {"dist": self.layer(x)}
        return {"dist": -self.layer(x)}


class Eigen(Mine):
    def forward(self, x):
        square = self.layer(x).unsqueeze(1).expand(-1, 2, 2)
        return {"dist": torch.linalg.eigvals(square).real}


class FixedBatch(Mine):
    def forward(self, x):
        return {"dist": self.layer(x).view(2, 2)}


class FewerRows(Mine):
    def forward(self, x):
        return {"dist": self.layer(x)[x[:, 0] > 0]}


class NoTensor(Mine):
    def forward(self, x):
        return {"dist": self.layer(x), "name": "mine"}


class Fails(Mine):
    def forward(self, x):
        raise ValueError("no such thing")


@pytest.mark.parametrize(
    ("cls", "message"),
    [
        (Branches, r"goes another way for other values of a tensor.*test_inference_export\.py:\d+: if x\.sum\(\) > 0"),
        (Eigen, r"operation aten\.linalg_eig has no form in ONNX, at test_inference_export\.py:\d+: .*eigvals"),
        (FixedBatch, "one batch size only"),
        (FewerRows, "output 'dist' has not one row for each row"),
        (NoTensor, "name is a str"),
        (Fails, r"raised ValueError: no such thing, at test_inference_export\.py"),
    ],
)
def test_a_model_without_a_graph_says_why(cls, message, capfd):
    with pytest.raises(ExportError, match=message) as e:
        export_onnx(cls(), [np.zeros((2, 4), np.float32)])
    assert "\n" not in str(e.value)
    assert capfd.readouterr() == ("", "")


def test_a_missing_output_is_named(small):
    model, _ = small
    with pytest.raises(ExportError, match="no output 'q', it has: dist, value"):
        export_onnx(model, [observations(BOX, 2)], ("q",))
