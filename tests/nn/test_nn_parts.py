"""Parts of networks, each against a float64 loop: residual blocks, merges, attention over entities, scatter, GTrXL,
embeddings."""

import math

import numpy as np
import pytest
import torch
from torch import nn

from bray.capture import capture
from bray.errors import ConfigError, UnknownName
from bray.inference.export import export_onnx
from bray.inference.onnx_engine import OnnxEngine
from bray.nn import (
    ActorCritic,
    Bilinear,
    ContinuousQ,
    EntityEncoder,
    FiLM,
    Gate,
    GRUGate,
    GTrXL,
    Merge,
    ModelConfig,
    ResidualConv,
    ResidualMLP,
    Scatter,
    SelfAttention,
    make_encoder,
)
from bray.nn.gtrxl import Layer
from bray.spec import EnvSpec, Space

DISCRETE = Space("discrete", (), "int64", n=(3,), start=(0,))


def box(*shape):
    return Space("box", shape, "float32", -1.0, 1.0)


def randn(*shape):
    return torch.randn(shape, dtype=torch.float64)


def made(cls, *args, **options):
    """A part in float64 with all its weights random (some start at zero)."""
    torch.manual_seed(0)
    part = cls(*args, **options).double()
    for p in part.parameters():
        nn.init.normal_(p, std=0.5)
    return part


def weights(part):
    return {name: p.detach().numpy() for name, p in part.named_parameters()}


def close(got, want):
    np.testing.assert_allclose(got.detach().numpy(), want, rtol=1e-10, atol=1e-10)


def all_learn(part, *args):
    out = part(*args)
    (out[0] if isinstance(out, tuple) else out).square().sum().backward()
    assert [name for name, p in part.named_parameters() if p.grad is None or not p.grad.abs().sum()] == []


def sigmoid(x):
    return 1.0 / (1.0 + np.exp(-x))


def layer_norm(x, weight, bias):
    return (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-5) * weight + bias


# --- residual blocks --------------------------------------------------------------------------------------------------


def slow_conv(x, weight, bias):
    padded = np.pad(x, ((0, 0), (0, 0), (1, 1), (1, 1)))
    out = np.zeros_like(x)
    for b, o, i, j in np.ndindex(out.shape):
        out[b, o, i, j] = (padded[b, :, i : i + 3, j : j + 3] * weight[o]).sum() + bias[o]
    return out


def test_a_residual_block_of_convolutions_equals_a_loop():
    part, x = made(ResidualConv, 2), randn(2, 2, 4, 3)
    w, n = weights(part), x.numpy()
    inner = np.maximum(slow_conv(np.maximum(n, 0), w["a.weight"], w["a.bias"]), 0)
    close(part(x), n + slow_conv(inner, w["b.weight"], w["b.bias"]))
    all_learn(part, x)


@pytest.mark.parametrize(("hidden", "norm"), [(0, "none"), (7, "layernorm")])
def test_a_dense_residual_block_equals_its_formula(hidden, norm):
    part, x = made(ResidualMLP, 3, "tanh", hidden, norm), randn(5, 3)
    w, n = weights(part), x.numpy()
    h = layer_norm(n, w["norm.weight"], w["norm.bias"]) if norm == "layernorm" else n
    close(part(x), n + np.tanh(h @ w["a.weight"].T + w["a.bias"]) @ w["b.weight"].T + w["b.bias"])
    all_learn(part, x)


RESIDUAL = {"layer_type": "residual"}


def test_a_list_of_layers_names_residual_blocks():
    dense = make_encoder(
        box(4), ModelConfig(layers=[{"layer_type": "linear", "layer_dim": 8}, {**RESIDUAL, "hidden": 16}])
    )
    assert dense(torch.randn(2, 4)).shape == (2, 8)
    picture = [{"layer_type": "conv2d", "layer_dim": 4, "kernel_size": 3}, RESIDUAL, {"layer_type": "flatten"}]
    assert make_encoder(box(2, 8, 8), ModelConfig(layers=picture))(torch.randn(2, 2, 8, 8)).shape == (2, 4 * 36)
    kinds = [type(m) for e in (dense, make_encoder(box(2, 8, 8), ModelConfig(layers=picture))) for m in e.modules()]
    assert ResidualMLP in kinds
    assert ResidualConv in kinds


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        ({**RESIDUAL, "activation": "rellu"}, "Did you mean 'relu'"),
        ({**RESIDUAL, "norm_type": "batch"}, "unknown norm type 'batch'"),
        ({**RESIDUAL, "hidden": -3}, "positive integer"),
        ({**RESIDUAL, "width": 3}, "unknown key of a residual layer"),
    ],
)
def test_wrong_residual_blocks_are_refused(layer, message):
    with pytest.raises(ConfigError, match=message):
        make_encoder(box(4), ModelConfig(layers=[layer]))


# --- merges -----------------------------------------------------------------------------------------------------------


def test_film_equals_its_formula_for_vectors_and_pictures():
    part, c = made(FiLM, 3, 2), randn(4, 2)
    w = weights(part)
    scale, shift = np.split(c.numpy() @ w["layer.weight"].T + w["layer.bias"], 2, axis=1)
    for x in (randn(4, 3), randn(4, 3, 5, 2)):
        lead = (slice(None), slice(None), *[None] * (x.ndim - 2))
        close(part(x, c), (1 + scale[lead]) * x.numpy() + shift[lead])
    all_learn(part, randn(4, 3), c)


def test_film_starts_as_the_identity():
    x = torch.randn(4, 3)
    assert torch.equal(FiLM(3, 2)(x, torch.randn(4, 2)), x)


def test_bilinear_equals_a_loop():
    part, x, y = made(Bilinear, 3, 2, 4), randn(5, 3), randn(5, 2)
    w, want = weights(part), np.zeros((5, 4))
    for b, o, i, j in np.ndindex(5, 4, 3, 2):
        want[b, o] += x[b, i] * w["weight"][o, i, j] * y[b, j]
    close(part(x, y), want + w["bias"])
    all_learn(part, x, y)


def test_bilinear_of_a_rank_is_a_bilinear_form():
    part, x, y = made(Bilinear, 3, 2, 4, rank=6), randn(5, 3), randn(5, 2)
    w = weights(part)
    middle = (x.numpy() @ w["first.weight"].T + w["first.bias"]) * (y.numpy() @ w["second.weight"].T + w["second.bias"])
    close(part(x, y), middle @ w["out.weight"].T + w["out.bias"])
    all_learn(part, x, y)


def test_a_gate_equals_a_loop_and_starts_with_the_mean():
    part, inputs = made(Gate, [3, 2], 4), (randn(5, 3), randn(5, 2))
    w, joined = weights(part), np.concatenate([x.numpy() for x in inputs], 1)
    scores = joined @ w["gates.weight"].T + w["gates.bias"]
    want = np.zeros((5, 4))
    for b, o in np.ndindex(5, 4):
        e = [math.exp(scores[b, k * 4 + o]) for k in range(2)]
        for k, x in enumerate(inputs):
            value = x[b].numpy() @ w[f"projections.{k}.weight"][o] + w[f"projections.{k}.bias"][o]
            want[b, o] += e[k] / sum(e) * value
    close(part(*inputs), want)
    all_learn(part, *inputs)
    start = Gate([3, 2], 4).double()
    values = [layer(x) for layer, x in zip(start.projections, inputs, strict=True)]
    torch.testing.assert_close(start(*inputs), (values[0] + values[1]) / 2)


PAIR = Space("dict", parts=(box(4), box(3)), names=("a", "b"))


@pytest.mark.parametrize("kind", ["film", "bilinear", "gate"])
def test_a_config_names_how_members_are_merged(kind):
    torch.manual_seed(0)
    encoder = make_encoder(PAIR, ModelConfig(merge=kind, fcnet_hiddens=(16, 8)))
    obs = {"a": torch.randn(5, 4), "b": torch.randn(5, 3)}
    assert encoder.features(obs).shape == (5, 16)
    all_learn(encoder, obs)
    if kind != "film":  # which begins as the identity
        other = {**obs, "b": torch.randn(5, 3)}
        assert not torch.allclose(encoder(obs), encoder(other))
    critic = ContinuousQ(EnvSpec("x", PAIR, box(2)), ModelConfig(merge=kind))
    assert critic(obs, torch.randn(5, 2)).shape == (2, 5)


def test_a_merge_of_one_kind_is_known():
    with pytest.raises(ConfigError, match="Did you mean 'film'"):
        ModelConfig(merge="flim")
    with pytest.raises(UnknownName):
        Merge("x", [1, 2], 3)


# --- entities ---------------------------------------------------------------------------------------------------------


def test_attention_equals_a_loop_over_what_is_there():
    part, x = made(SelfAttention, 6, 2), randn(3, 4, 6)
    mask = torch.tensor([[1, 1, 1, 1], [1, 0, 1, 0], [0, 0, 1, 0]]).bool()
    w, n = weights(part), x.numpy()
    qkv = n @ w["qkv.weight"].T + w["qkv.bias"]
    q, k, v = (qkv[..., i * 6 : (i + 1) * 6] for i in range(3))
    joined = np.zeros((3, 4, 6))
    for b in range(3):
        there = [i for i in range(4) if mask[b, i]]
        for i in range(4):
            for h in (slice(0, 3), slice(3, 6)):
                e = [math.exp(q[b, i, h] @ k[b, j, h] / math.sqrt(3)) for j in there]
                joined[b, i, h] = sum(a / sum(e) * v[b, j, h] for a, j in zip(e, there, strict=True))
    close(part(x, mask), joined @ w["out.weight"].T + w["out.bias"])
    all_learn(part, x, mask)


def test_entities_have_no_order_and_absent_ones_do_not_matter():
    part, x = made(EntityEncoder, 5, 8, heads=2, layers=2), randn(3, 6, 5)
    mask = torch.tensor([[1, 1, 1, 1, 1, 1], [1, 1, 0, 1, 0, 0], [0, 1, 0, 0, 0, 0]]).bool()
    order = torch.randperm(6)
    out = part(x, mask)
    assert out.shape == (3, part.out_features)
    torch.testing.assert_close(part(x[:, order], mask[:, order]), out)
    torch.testing.assert_close(part(torch.where(mask.unsqueeze(2), x, 99.0), mask), out)
    torch.testing.assert_close(part(x[1:2, [0, 1, 3]]), out[1:2])  # the same as a shorter list
    assert not torch.allclose(part(x[:, :1], mask[:, :1])[0], out[0])
    all_learn(part, x, mask)


def test_no_entity_at_all_is_zero_and_has_no_nan():
    part, x = made(EntityEncoder, 5, 8), randn(2, 4, 5).requires_grad_()
    out = part(x, torch.zeros(2, 4, dtype=torch.bool))
    assert not out.any()
    out.sum().backward()
    assert all(p.grad.isfinite().all() for p in part.parameters() if p.grad is not None)


@pytest.mark.parametrize("overlap", ["add", "cover"])
def test_scatter_equals_a_loop(overlap):
    torch.manual_seed(0)
    each, place = randn(3, 7, 2), torch.rand(3, 7, 2, dtype=torch.float64) * 5 - 1
    mask = torch.rand(3, 7) < 0.7
    want = np.zeros((3, 2, 3, 4))
    for b, n in np.ndindex(3, 7):
        if mask[b, n]:
            i = min(max(round(place[b, n, 0].item()), 0), 2)
            j = min(max(round(place[b, n, 1].item()), 0), 3)
            want[b, :, i, j] = each[b, n].numpy() + (want[b, :, i, j] if overlap == "add" else 0)
    part = Scatter(3, 4, overlap)
    close(part(each, place, mask), want)
    each.requires_grad_()
    part(each, place, mask).sum().backward()
    assert (each.grad[~mask] == 0).all()
    assert each.grad[mask].any()


def test_a_wrong_overlap_is_refused():
    with pytest.raises(UnknownName):
        Scatter(3, 4, "max")


UNITS = Space(
    "dict",
    parts=(box(5, 4), Space("multi_binary", (5,), "int8"), Space("box", (1, 8, 8), "uint8", 0, 255), box(3)),
    names=("units", "there", "screen", "me"),
)


def units(rows, seed=0):
    g = torch.Generator().manual_seed(seed)
    return {
        "units": torch.rand(rows, 5, 4, generator=g) * 7,
        "there": torch.randint(0, 2, (rows, 5), generator=g, dtype=torch.int8),
        "screen": torch.randint(0, 256, (rows, 1, 8, 8), generator=g, dtype=torch.uint8),
        "me": torch.randn(rows, 3, generator=g),
    }


def test_a_config_names_lists_of_entities():
    torch.manual_seed(0)
    encoder, obs = make_encoder(UNITS, ModelConfig(entities={"units": "there"}, entity_width=8)), units(4)
    out = encoder(obs)
    order = torch.randperm(5)
    turned = {**obs, "units": obs["units"][:, order], "there": obs["there"][:, order]}
    torch.testing.assert_close(encoder(turned), out)
    moved = {**obs, "units": obs["units"] + 10.0 * (obs["there"] == 0).unsqueeze(2)}
    torch.testing.assert_close(encoder(moved), out)
    assert not torch.allclose(encoder({**obs, "there": 1 - obs["there"]}), out)
    all_learn(encoder, obs)


def test_an_observation_that_is_a_list_itself():
    torch.manual_seed(0)
    x = torch.randn(3, 5, 4)
    x[:, 3:] = 0.0
    by_zeros = make_encoder(box(5, 4), ModelConfig(entities={"obs": "zeros"}))
    torch.testing.assert_close(by_zeros(x.flip(1)), by_zeros(x))
    everything = make_encoder(box(5, 4), ModelConfig(entities={"obs": None}))
    everything.load_state_dict(by_zeros.state_dict())
    assert not torch.allclose(everything(x), by_zeros(x))
    torch.testing.assert_close(everything(x[:, :3]), by_zeros(x))


def test_entities_are_drawn_onto_a_picture():
    """Moving one moves the picture's features; moving an absent one does not."""
    torch.manual_seed(0)
    how = {"mask": "there", "onto": "screen", "at": [0, 1]}
    encoder, obs = make_encoder(UNITS, ModelConfig(entities={"units": how}, entity_width=8, conv_features=16)), units(2)
    assert encoder.features.stems[1].input(obs["screen"]).shape == (2, 1, 8, 8)
    obs["there"] = torch.tensor([[1, 0, 0, 0, 0], [0, 0, 0, 0, 0]], dtype=torch.int8)
    for i, changes in ((0, True), (1, False)):
        moved = {**obs, "units": obs["units"].clone()}
        moved["units"][:, i, 0] = (moved["units"][:, i, 0] + 3) % 7
        assert torch.allclose(encoder(obs)[0], encoder(moved)[0]) is not changes
        torch.testing.assert_close(encoder(obs)[1], encoder(moved)[1])
    all_learn(encoder, units(4))


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"entities": {"unit": "there"}}, "unknown member of the observation 'unit'.*Did you mean 'units'"),
        ({"entities": {"units": "their"}}, "Did you mean 'there'"),
        ({"entities": {"units": "me"}}, r"should have one number for each of the things of units \[5, 4\]"),
        ({"entities": {"me": None}}, r"me should be a Box \[things, features\], it is box \[3\]"),
        ({"entities": {"units": {"onto": "screen"}}}, "entities.units should be the name of a mask"),
        ({"entities": {"units": {"onto": "me", "at": [0, 1]}}}, "unknown picture 'me'"),
        ({"entities": {"units": {"onto": "screen", "at": [0, 4]}}}, "expected features 0 to 3 of units"),
        ({"entities": {"units": {"onto": "screen", "at": [0, 1]}}, "dim": 4}, "leave out `dim`"),
        ({"entities": {"units": 3}}, "entities.units should be the name of a mask"),
        ({"entities": {"units": "there"}, "attention_heads": 5}, "attention_heads=5 does not divide the width 64"),
    ],
)
def test_entities_that_do_not_fit_are_refused(keys, message):
    with pytest.raises(ConfigError, match=message):
        make_encoder(UNITS, ModelConfig(**keys))


# --- choices ----------------------------------------------------------------------------------------------------------


def test_embeddings_look_up_a_vector_for_each_choice():
    torch.manual_seed(0)
    many = Space("multi_discrete", (2,), "int64", n=(3, 4), start=(1, 0))
    encoder = make_encoder(many, ModelConfig(embedding_dim=5, fcnet_hiddens=()))
    table = encoder.features.stems[0].table.weight
    out = encoder(torch.tensor([[1, 0], [3, 2]]))
    torch.testing.assert_close(out, torch.stack([table[[0, 3]].flatten(), table[[2, 5]].flatten()]))
    out.sum().backward()
    assert (table.grad[[0, 2, 3, 5]] == 1).all()
    assert (table.grad[[1, 4, 6]] == 0).all()
    one = make_encoder(Space("discrete", (), "int64", n=(6,), start=(2,)), ModelConfig(embedding_dim=4))
    assert one(torch.tensor([2, 7])).shape == (2, 64)


# --- a transformer over time ------------------------------------------------------------------------------------------


def test_the_gate_equals_its_formula():
    part, x, y = made(GRUGate, 3), randn(4, 3), randn(4, 3)
    w, n, m = weights(part), x.numpy(), y.numpy()
    wr, wz, wg = np.split(m @ w["of_y.weight"].T + w["of_y.bias"], 3, 1)
    ur, uz = np.split(n @ w["of_x.weight"].T, 2, 1)
    z, r = sigmoid(wz + uz), sigmoid(wr + ur)
    close(part(x, y), (1 - z) * n + z * np.tanh(wg + (r * n) @ w["of_rx.weight"].T))
    all_learn(part, x, y)


def test_a_layer_equals_a_loop():
    torch.manual_seed(0)
    size, heads, window, steps = 6, 2, 3, 2
    part, rows = made(Layer, size, heads), randn(2, window + steps, size)
    waves, visible = randn(window + 1, size), torch.rand(2, steps, window + steps) < 0.6
    visible[:, torch.arange(steps), window + torch.arange(steps)] = True
    distances = torch.tensor([[3, 2, 1, 0, 0], [3, 3, 2, 1, 0]])
    w, n = weights(part), rows.numpy()
    seen = layer_norm(n, w["norm.weight"], w["norm.bias"])
    q = seen[:, -steps:] @ w["query.weight"].T + w["query.bias"]
    k, v = np.split(seen @ w["key_value.weight"].T + w["key_value.bias"], 2, 2)
    far = waves.numpy() @ w["distance.weight"].T
    y = np.zeros((2, steps, size))
    for b, t, h in np.ndindex(2, steps, heads):
        at = slice(3 * h, 3 * h + 3)
        e = {}
        for j in range(window + steps):
            if visible[b, t, j]:
                content = (q[b, t, at] + w["content_bias"][h, 0]) @ k[b, j, at]
                distance = (q[b, t, at] + w["distance_bias"][h, 0]) @ far[distances[t, j], at]
                e[j] = math.exp((content + distance) / math.sqrt(3))
        y[b, t, at] = sum(a / sum(e.values()) * v[b, j, at] for j, a in e.items())
    y = np.maximum(y @ w["out.weight"].T + w["out.bias"], 0)
    x = part.gate(rows[:, -steps:], torch.from_numpy(y)).detach().numpy()
    h = layer_norm(x, w["norm_dense.weight"], w["norm_dense.bias"])
    h = np.maximum(h @ w["dense.0.weight"].T + w["dense.0.bias"], 0) @ w["dense.2.weight"].T + w["dense.2.bias"]
    want = part.gate_dense(torch.from_numpy(x), torch.from_numpy(np.maximum(h, 0)))
    close(part(rows, steps, visible, distances, waves), want.detach().numpy())


class Same(nn.Module):
    out_features = 3

    def forward(self, x):
        return x


def gtrxl(window=4, layers=2):
    torch.manual_seed(0)
    return GTrXL(Same(), size=8, window=window, layers=layers, heads=2).double()


def walk(core, obs, first):
    state, out = core.initial_state(obs.shape[1]), []
    for t in range(len(obs)):
        state = {k: v * (1.0 - first[t].double()).reshape(-1, *[1] * (v.ndim - 1)) for k, v in state.items()}
        x, state = core(obs[t], state)
        out.append(x)
    return torch.stack(out), state


@pytest.mark.parametrize("window", [1, 4, 20])
def test_a_sequence_is_its_steps_also_over_episodes(window):
    core, obs = gtrxl(window), randn(11, 3, 3)
    first = torch.rand(11, 3) < 0.2
    first[0, 1] = True
    want, last = walk(core, obs, first)
    got, state = core.unroll(obs, core.initial_state(3), first)
    close(got, want.detach().numpy())
    middle, carried = core.unroll(
        obs[:4], core.initial_state(3), first[:4]
    )  # cut into pieces, with the state between them
    rest, end = core.unroll(obs[4:], carried, first[4:])
    close(torch.cat([middle, rest]), want.detach().numpy())
    for key in last:
        close(state[key], last[key].detach().numpy())
        close(end[key], last[key].detach().numpy())


def test_it_sees_its_window_and_no_further_and_not_the_last_episode():
    core, obs = gtrxl(window=3, layers=1), randn(8, 1, 3).requires_grad_()
    first = torch.zeros(8, 1)
    core.unroll(obs, core.initial_state(1), first)[0][6].sum().backward()
    assert [bool(g.any()) for g in obs.grad] == [False] * 3 + [True] * 4 + [False]
    obs.grad = None
    first[5] = 1
    core.unroll(obs, core.initial_state(1), first)[0][6].sum().backward()
    assert [bool(g.any()) for g in obs.grad] == [False] * 5 + [True] * 2 + [False]
    all_learn(core, randn(4, 3), {k: v + 1 for k, v in core.initial_state(4).items()})


def test_a_config_names_it():
    spec = EnvSpec("x", box(3), DISCRETE)
    keys = {"use_lstm": True, "recurrent": "gtrxl", "lstm_cell_size": 8, "attention_window": 5, "attention_heads": 2}
    model = ActorCritic(spec, ModelConfig(**keys, attention_layers=3))
    assert {k: tuple(v.shape) for k, v in model.initial_state(2).items()} == {"rows": (2, 5, 24), "there": (2, 5)}
    out = model.unroll(torch.randn(6, 2, 3), model.initial_state(2), torch.zeros(6, 2))
    assert out["dist"].shape == (6, 2, 3)
    with pytest.raises(ConfigError, match="Did you mean 'gtrxl'"):
        ModelConfig(recurrent="gtrx")


# --- recorded and exported --------------------------------------------------------------------------------------------

EVERYTHING = {
    "entities": {"units": {"mask": "there", "onto": "screen", "at": [0, 1]}},
    "entity_width": 8,
    "conv_features": 16,
    "fcnet_hiddens": (16,),
    "merge": "gate",
    "embedding_dim": 4,
    "use_lstm": True,
    "recurrent": "gtrxl",
    "lstm_cell_size": 8,
    "attention_window": 4,
}


def everything():
    torch.manual_seed(0)
    space = Space("dict", parts=(*UNITS.parts, DISCRETE), names=(*UNITS.names, "kind"))
    return ActorCritic(EnvSpec("x", space, DISCRETE), ModelConfig(**EVERYTHING))


def with_kind(obs):
    return {**obs, "kind": torch.arange(len(obs["me"])) % 3}


@pytest.mark.optimizes
def test_all_of_it_is_recorded_with_its_gradients():
    model, steps = everything(), 3

    def gradients(obs, state, first):
        out = model.unroll(obs, state, first)
        return torch.autograd.grad(out["dist"].square().mean() + out["value"].mean(), list(model.parameters()))

    recorded = capture(gradients)
    for seed in range(3):
        flat = with_kind(units(steps * 2, seed))
        obs = {k: v.unflatten(0, (steps, 2)) for k, v in flat.items()}
        args = (obs, {k: v + 1 for k, v in model.initial_state(2).items()}, torch.tensor([[0, 0], [0, 1], [0, 0]]))
        for got, want in zip(recorded(*args), gradients(*args), strict=True):
            torch.testing.assert_close(got, want)
    assert recorded.recordings == 1


@pytest.mark.slow
def test_all_of_it_is_exported():
    model = everything()
    obs, state = with_kind(units(2)), model.initial_state(2)
    data = export_onnx(model, [obs, state])
    engine = OnnxEngine(data)
    engine.set_weights({k: v.numpy() for k, v in model.state_dict().items()})
    for rows in (1, 3):
        obs = with_kind(units(rows, seed=7))
        state = {k: torch.rand_like(v) for k, v in model.initial_state(rows).items()}
        want = model(obs, state)
        got = engine.forward({k: v.numpy() for k, v in obs.items()}, {k: v.numpy() for k, v in state.items()})
        for key in ("dist", "value"):
            np.testing.assert_allclose(got[key], want[key].detach().numpy(), atol=1e-5)
        for key in state:
            np.testing.assert_allclose(got["state"][key], want["state"][key].detach().numpy(), atol=1e-5)
