"""Noise is an input of a Model: new draws give new outputs, recorded too; no draws give the mean weights, as
exported."""

import copy
import math

import numpy as np
import onnx
import pytest
import torch
from torch import nn

from bray.act import TRAINED, Tick, decide_now, standard_normals
from bray.capture import capture
from bray.errors import DataError
from bray.experiment import Experiment
from bray.inference.export import export_onnx
from bray.inference.onnx_engine import OnnxEngine
from bray.inference.torch_engine import TorchEngine
from bray.nn import ModelConfig, NoisyLinear, make_model, noise_shapes, with_noise
from bray.optim import Optimizer
from bray.spec import EnvSpec, Space

VECTOR = Space("box", (4,), "float32", -2.0, 2.0)
IMAGE = Space("box", (2, 8, 8), "uint8", 0, 255)
CHOICE = Space("discrete", (), "int64", n=(3,), start=(0,))
ARM = Space("box", (2,), "float32", -2.0, 2.0)
NOISY = [
    {"layer_type": "noisy_linear", "layer_dim": 16, "activation": "tanh"},
    {"layer_type": "noisy_linear", "layer_dim": 8, "activation": "relu"},
]
ON_IMAGE = [{"layer_type": "conv2d", "layer_dim": 2, "kernel_size": 3, "activation": "relu"}, NOISY[0]]
ONE = 4 + 16 + 16 + 8  # numbers for one encoder of two layers

CASES = {  # model, numbers it draws
    "two-encoders": (lambda: model("actor_critic"), 2 * ONE),
    "shared": (lambda: model("actor_critic", vf_share_layers=True), ONE),
    "q": (lambda: model("q"), ONE),
    "sac": (lambda: model("squashed_gaussian", action=ARM), ONE),
    "image": (lambda: model("q", IMAGE, layers=ON_IMAGE), 2 * 6 * 6 + 16),
    "lstm": (lambda: model("actor_critic", use_lstm=True, lstm_cell_size=8), ONE),
    "head": (lambda: with_noisy_head(model("q", layers=None)), 64 + 3),
}


def model(kind, observation=VECTOR, action=CHOICE, **config):
    torch.manual_seed(0)
    return make_model(kind, EnvSpec("x", observation, action), ModelConfig(**{"layers": NOISY, **config}))


def with_noisy_head(q):
    q.head = NoisyLinear(64, 3)
    return q


def arguments(m, rows, seed=0):
    rng = np.random.default_rng(seed)
    first = m.core.encoder if m.recurrent else m.core
    shape = IMAGE.shape if getattr(first, "input", None) is not None else VECTOR.shape
    obs = rng.integers(0, 256, (rows, *shape), np.uint8) if len(shape) == 3 else rng.normal(size=(rows, *shape))
    state = [{k: v.numpy() for k, v in m.initial_state(rows).items()}] if m.recurrent else []
    return [obs.astype(np.uint8 if len(shape) == 3 else np.float32), *state]


def draws(m, seed):
    return standard_normals(m.draws, np.random.default_rng(seed))


def differ(a, b):
    return any(not np.allclose(a[k], b[k]) for k in a if k != "state")


def tensors(x):
    return {k: torch.from_numpy(v) for k, v in x.items()}


def test_the_layer_is_the_formula_and_has_no_buffers():
    torch.manual_seed(0)
    layer, x = NoisyLinear(4, 3), torch.randn(5, 4)
    mean = x @ layer.weight.t() + layer.bias
    torch.testing.assert_close(layer(x), mean)
    noise = torch.randn(7)
    scaled = noise.sign() * noise.abs().sqrt()
    w = layer.weight + layer.weight_sigma * torch.outer(scaled[4:], scaled[:4])
    b = layer.bias + layer.bias_sigma * scaled[4:]
    with with_noise(layer, {"noise": noise}):
        torch.testing.assert_close(layer(x), x @ w.t() + b)
        torch.testing.assert_close(copy.deepcopy(layer)(x), mean)  # another layer's noise is not this one's
    torch.testing.assert_close(layer(x), mean)
    assert sorted(layer.state_dict()) == ["bias", "bias_sigma", "weight", "weight_sigma"]
    assert layer.weight_sigma[0, 0].item() == pytest.approx(0.5 / math.sqrt(4))


def test_draws_are_standard_normal_and_as_declared():
    made = standard_normals({"noise": (20000,), "tau": (2, 3)}, np.random.default_rng(0))
    assert {k: (v.shape, v.dtype) for k, v in made.items()} == {
        "noise": ((20000,), np.float32),
        "tau": ((2, 3), np.float32),
    }
    assert made["noise"].mean() == pytest.approx(0.0, abs=0.03)
    assert made["noise"].std() == pytest.approx(1.0, abs=0.03)


def test_models_without_noisy_layers_draw_nothing():
    assert model("q", layers=None).draws == {}
    assert noise_shapes(nn.Linear(2, 2)) == {}


@pytest.mark.parametrize("record", [True, False])
@pytest.mark.parametrize("case", CASES)
def test_outputs_follow_the_draws_and_without_are_the_mean_weights(case, record):
    m, n = CASES[case][0](), CASES[case][1]
    assert m.draws == {"noise": (n,)}
    engine = TorchEngine(m, record=record)
    for rows in (1, 3):
        args = arguments(m, rows)
        quiet, zero = engine.forward(*args), engine.forward(*args, {"noise": np.zeros(n, np.float32)})
        assert not differ(quiet, zero)
        a, b = engine.forward(*args, draws(m, 1)), engine.forward(*args, draws(m, 2))
        assert differ(a, quiet)
        assert differ(a, b)
        assert not differ(a, engine.forward(*args, draws(m, 1)))
        assert not differ(quiet, engine.forward(*args))
    assert engine.is_recorded == record


def test_one_draw_is_for_the_whole_batch():
    m = CASES["q"][0]()
    (obs,) = arguments(m, 6)
    whole = TorchEngine(m).forward(obs, draws(m, 1))["q"]
    parts = [TorchEngine(m).forward(obs[i : i + 2], draws(m, 1))["q"] for i in range(0, 6, 2)]
    np.testing.assert_allclose(whole, np.concatenate(parts), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("case", ["two-encoders", "lstm", "image", "head"])
def test_the_exported_graph_has_the_mean_weights(case):
    m = CASES[case][0]()
    args = arguments(m, 3)
    graph = export_onnx(m, args)
    names = [x.name for x in onnx.load_model_from_string(graph).graph.input]
    assert not any("noise" in name or "sigma" in name for name in names)
    engine = OnnxEngine(graph)
    engine.set_weights({k: v.numpy() for k, v in m.state_dict().items()})
    got, want = engine.forward(*args), TorchEngine(m).forward(*args)
    for key in want.keys() - {"state"}:
        np.testing.assert_allclose(got[key], want[key], rtol=1e-4, atol=1e-5)


@pytest.mark.optimizes
def test_a_recorded_step_sees_new_noise_and_moves_sigma():
    pairs = []
    for record in (True, False):
        m = CASES["q"][0]()
        optimizer = Optimizer(m.parameters(), 1e-2)
        sigma = m.core.trunk.layers[0].weight_sigma.detach().clone()

        def step(obs, noise, m=m, optimizer=optimizer):
            loss = (m(obs, noise)["q"] - 1.0).square().mean()
            return {"loss": loss.detach(), "norm": optimizer.step(loss)}

        captured = capture(step, enabled=record)
        obs = torch.from_numpy(arguments(m, 8)[0])
        pairs.append([captured(obs, tensors(draws(m, i))) for i in range(10)])
        assert captured.recordings == record
        assert not torch.equal(m.core.trunk.layers[0].weight_sigma, sigma)
        pairs[-1].append(optimizer.flat)
    torch.testing.assert_close(*pairs, rtol=1e-4, atol=1e-5)


def test_gradients_reach_every_sigma_and_only_with_noise():
    m = CASES["two-encoders"][0]()
    obs = torch.from_numpy(arguments(m, 8)[0])

    def gradients(*more):
        m.zero_grad()
        out = m(obs, *more)
        (out["dist"].square().sum() + out["value"].square().sum()).backward()
        return {k: v.grad for k, v in m.named_parameters() if "sigma" in k}

    assert all(g is not None and g.abs().sum() > 0 for g in gradients(tensors(draws(m, 1))).values())
    assert all(g is None for g in gradients().values())


def test_a_sequence_has_one_draw_and_equals_its_steps():
    m = CASES["lstm"][0]()
    noise = tensors(draws(m, 1))
    obs, first = torch.randn(5, 2, 4), torch.zeros(5, 2, dtype=torch.bool)
    whole = m.unroll(obs, m.initial_state(2), first, noise)
    state = m.initial_state(2)
    for t in range(5):
        out = m(obs[t], state, noise)
        state = out["state"]
        torch.testing.assert_close(out["dist"], whole["dist"][t])
    assert not torch.allclose(m.unroll(obs, m.initial_state(2), first)["dist"], whole["dist"])


def test_draws_of_another_shape_are_refused():
    m = CASES["q"][0]()
    obs = torch.zeros(1, 4)
    with pytest.raises(DataError, match=rf"draws of QNetwork should be \{{'noise': \[{ONE}\]\}}, got \[3\]"):
        m(obs, {"noise": torch.zeros(3)})
    with pytest.raises(DataError, match=r"got \['tau'\]"):
        m(obs, {"tau": torch.zeros(3)})


@pytest.mark.parametrize("run", ["DQN", "PPO"])
def test_training_draws_noise_while_acting_and_learning(run):
    """With the same observation and no other exploration, sampled actions vary and greedy ones do not; sigma moves."""
    noisy = [{"layer_type": "noisy_linear", "layer_dim": [32], "activation": "relu", "sigma_init": 3.0}]
    own = (
        {"epsilon": 0.0, "learning_starts": 50, "train_every": 1}
        if run == "DQN"
        else {"rollout_length": 32, "minibatches": 4}
    )
    exp = Experiment(run, "CartPole-v1", use_preset=False, config={"layers": noisy, "num_envs": 1, "seed": 0, **own})
    sigma = lambda: {k: v.clone() for k, v in exp.training.model.state_dict().items() if "sigma" in k}  # noqa: E731
    before = sigma()
    assert before
    exp.training.iterate()
    exp.training.iterate()
    moved = [not torch.equal(v, before[k]) for k, v in sigma().items()]
    assert any(moved)
    obs = [0.01, 0.0, 0.02, 0.0]
    values = []
    engine, policy = exp.training.rollout.engine, exp.training.policy
    rng = np.random.default_rng(0)
    for _ in range(20):
        tick = Tick(np.array([obs], np.float32))
        decision = decide_now(policy.decide(tick, None, rng, "sample", TRAINED), engine.forward)
        values.append(decision.outputs[policy.reads[0]].tobytes())
    assert len(set(values)) == 20
    assert len({int(exp.policy(obs)) for _ in range(20)}) == 1
    if run == "DQN":  # epsilon is 0: only the noise explores
        assert len({int(exp.policy(obs, act="sample")) for _ in range(60)}) == 2
    exp.close()
