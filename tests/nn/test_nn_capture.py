"""Every kind of model records: forward and gradients as one flat program of tensor operations, equal to eager."""

import pytest
import torch
from torch.func import functional_call
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import tree_flatten, tree_unflatten

from bray import distributions as D
from bray.algos.sac import squashed_sample
from bray.nn import (
    ActorCritic,
    ContinuousQ,
    ModelConfig,
    QNetwork,
    SquashedGaussianActor,
    example_obs,
    update_normalizers,
)
from bray.spec import EnvSpec, Space

pytestmark = pytest.mark.optimizes


def box(*shape):
    return Space("box", shape, "float32", -1.0, 1.0)


def discrete(n, start=0):
    return Space("discrete", (), "int64", n=(n,), start=(start,))


IMAGE = Space("box", (2, 12, 12), "uint8", 0, 255)
MULTI = Space("multi_discrete", (3,), "int64", n=(3, 2, 4), start=(0, 0, 0))
DICT = Space(
    "dict",
    parts=(box(3), IMAGE, discrete(4, 1), MULTI, Space("multi_binary", (3,), "int8")),
    names=("v", "i", "d", "m", "action_mask"),
)
T, B = 3, 4


def record(fn, *args):
    """make_fx with flat inputs, as the learner's program; the result runs on new values of the same shapes."""
    flat, structure = tree_flatten(args)
    program = make_fx(lambda *xs: fn(*tree_unflatten(xs, structure)))(*flat)
    assert not any("_local_scalar_dense" in str(n.target) or "aten.item" in str(n.target) for n in program.graph.nodes)
    return lambda *new: program(*tree_flatten(new)[0])


def check(model, loss_fn, inputs, other):
    """Gradients of `loss_fn(call, inputs)` recorded on `inputs` equal eager ones on `other` (and on other weights)."""
    params = {k: v.detach() for k, v in model.named_parameters()}
    buffers = dict(model.named_buffers())

    def gradients(params, inputs):
        params = {k: v.detach().requires_grad_() for k, v in params.items()}
        loss = loss_fn(lambda *a: functional_call(model, {**params, **buffers}, a), inputs)
        return [loss, *torch.autograd.grad(loss, list(params.values()))]

    program = record(gradients, params, inputs)
    moved = {k: v + 0.01 for k, v in params.items()}
    for got, want in zip(program(moved, other), gradients(moved, other), strict=True):
        torch.testing.assert_close(got, want)
    forward = record(lambda inputs: loss_fn(lambda *a: model(*a), inputs), inputs)
    torch.testing.assert_close(forward(other), loss_fn(model, other))


def obs_batch(space, seed, rows=B):
    g = torch.Generator().manual_seed(seed)

    def fill(x):
        if x.dtype == torch.uint8:
            return torch.randint(0, 256, x.shape, generator=g, dtype=torch.uint8)
        if x.dtype.is_floating_point:
            return torch.randn(x.shape, generator=g)
        return x + torch.randint(0, 2, x.shape, generator=g).to(x.dtype)

    flat, structure = tree_flatten(example_obs(space, rows))
    return tree_unflatten([fill(x) for x in flat], structure)


CONFIGS = {
    "plain": {},
    "shared": {"vf_share_layers": True, "layer_norm": True},
    "normal": {"normalize_observations": True},
    "impala": {"conv_filters": "impala", "conv_features": 16},
    "apart": {"vf_share_layers": False, "conv_filters": [[4, [3, 3], 2], [8, [3, 3], 1]]},
    "resized": {"dim": 8, "zero_mean": True},
    "sigma": {"free_log_std": False},
}
ACTIONS = {
    "discrete": discrete(3),
    "equal": Space("multi_discrete", (2,), "int64", n=(3, 3), start=(0, 0)),
    "multi": MULTI,
    "box": box(2),
    "mixed": Space("dict", parts=(box(2), discrete(3)), names=("a", "b")),
}


@pytest.mark.parametrize(
    ("observation", "action", "config"),
    [
        (box(4), "discrete", "plain"),
        (box(4), "equal", "shared"),
        (box(4), "multi", "normal"),
        (box(4), "box", "plain"),
        (box(4), "mixed", "sigma"),
        (IMAGE, "discrete", "plain"),
        (IMAGE, "discrete", "impala"),
        (IMAGE, "box", "apart"),
        (IMAGE, "discrete", "resized"),
        (DICT, "discrete", "plain"),
        (DICT, "mixed", "apart"),
    ],
)
def test_actor_critic_records(observation, action, config):
    torch.manual_seed(0)
    spec = EnvSpec("x", observation, ACTIONS[action])
    layout = spec.layout
    model = ActorCritic(spec, ModelConfig(**{"conv_features": 16, "fcnet_hiddens": (16, 16), **CONFIGS[config]}))
    if config == "normal":
        update_normalizers(model, torch.randn(100, 4) * 3 + 1)

    def inputs(seed):
        obs = obs_batch(observation, seed)
        act = torch.zeros(B, dtype=torch.int64) if layout.single else torch.ones(B, layout.size)
        mask = torch.ones(B, layout.num_logits, dtype=torch.bool)
        mask[:, -1:] = False
        act = act.long() if layout.discrete else act
        return {"obs": obs, "action": act * (seed % 2), "mask": mask}

    def loss(call, x):
        out = call(x["obs"])
        mask = x["mask"] if layout.num_logits else None
        log_prob, entropy = D.log_prob_entropy(layout, out["dist"], x["action"], mask)
        return (log_prob - 0.01 * entropy + out["value"].square()).mean()

    check(model, loss, inputs(1), inputs(3))


@pytest.mark.parametrize("cell", ["lstm", "gru"])
def test_recurrent_actor_critic_records(cell):
    torch.manual_seed(0)
    spec = EnvSpec("x", box(4), discrete(3))
    model = ActorCritic(spec, ModelConfig(use_lstm=True, recurrent=cell, lstm_cell_size=8, fcnet_hiddens=(8,)))

    class Unroll(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.model = model

        def forward(self, obs, state, first):
            return self.model.unroll(obs, state, first)

    def inputs(seed):
        g = torch.Generator().manual_seed(seed)
        state = {k: torch.randn(v.shape, generator=g) for k, v in model.initial_state(B).items()}
        first = torch.rand(T, B, generator=g) < 0.3
        return {"obs": torch.randn(T, B, 4, generator=g), "state": state, "first": first}

    def loss(call, x):
        out = call(x["obs"], x["state"], x["first"])
        return out["dist"].square().mean() + out["value"].mean() + out["state"]["h"].mean()

    check(Unroll(), loss, inputs(1), inputs(2))
    step = record(lambda obs, state: model(obs, state), torch.zeros(B, 4), model.initial_state(B))
    x = inputs(3)
    got, want = step(x["obs"][0], x["state"]), model(x["obs"][0], x["state"])
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize("options", [{}, {"dueling": True}, {"num_atoms": 5}, {"dueling": True, "num_atoms": 5}])
def test_q_network_records(options):
    torch.manual_seed(0)
    model = QNetwork(EnvSpec("x", DICT, discrete(3)), ModelConfig(conv_features=16, fcnet_hiddens=(16,)), **options)

    def loss(call, x):
        return call(x)["q"].square().mean()

    check(model, loss, obs_batch(DICT, 1), obs_batch(DICT, 2))


def test_sac_models_record():
    torch.manual_seed(0)
    spec = EnvSpec("x", box(4), box(2))
    config = ModelConfig(fcnet_hiddens=(16, 16), fcnet_activation="relu", normalize_observations=True)
    actor, critics = SquashedGaussianActor(spec, config), ContinuousQ(spec, config)

    def actor_loss(call, x):
        action, log_prob = squashed_sample(call(x["obs"])["dist"], x["noise"])
        return (0.2 * log_prob - critics(x["obs"], action).amin(0)).mean()

    def critic_loss(call, x):
        return (call(x["obs"], x["noise"]) - 1.0).square().sum(0).mean()

    batches = [{"obs": torch.randn(B, 4), "noise": torch.randn(B, 2)} for _ in range(2)]
    check(actor, actor_loss, *batches)
    check(critics, critic_loss, *batches)


def test_updated_statistics_reach_a_recorded_program_that_takes_buffers():
    model = ActorCritic(EnvSpec("x", box(4), discrete(2)), ModelConfig(normalize_observations=True))
    state = dict(model.state_dict())
    program = record(lambda s, x: functional_call(model, s, (x,))["value"], state, torch.zeros(B, 4))
    x = torch.randn(B, 4) + 5
    before = program(state, x)
    update_normalizers(model, x)
    torch.testing.assert_close(program(state, x), model(x)["value"])
    assert not torch.allclose(before, model(x)["value"])


def test_a_dense_forward_has_few_operations():
    """Actor and critic, two hidden layers each: 6 products and 4 activations; more is overhead per step."""
    model = ActorCritic(EnvSpec("x", box(4), discrete(2)), ModelConfig(fcnet_activation="relu"))
    program = make_fx(lambda x: model(x))(torch.zeros(B, 4))
    names = [str(n.target) for n in program.graph.nodes if n.op == "call_function"]
    views = ("expand", "unbind", "getitem", "aten.t.", "squeeze", "detach", "select", "unsqueeze")
    work = [n for n in names if not any(v in n for v in views)]
    assert sorted(n.split(".")[1] for n in work) == ["addmm"] * 6 + ["relu"] * 4, names


def test_models_export():
    """torch.export is what the ONNX exporter starts from."""
    model = ActorCritic(EnvSpec("x", DICT, discrete(2)), ModelConfig(conv_features=16, normalize_observations=True))
    obs, other = obs_batch(DICT, 1), obs_batch(DICT, 2)
    exported = torch.export.export(model, (obs,)).module()
    torch.testing.assert_close(exported(other)["dist"], model(other)["dist"], atol=1e-6, rtol=1e-5)
