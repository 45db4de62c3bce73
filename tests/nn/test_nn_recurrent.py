"""Recurrent models: unrolled equals step by step, episode starts forget, and the cells are the known ones."""

import pytest
import torch

from bray.errors import ConfigError, UnknownName
from bray.nn import ActorCritic, ModelConfig, QNetwork, Recurrent, make_encoder
from bray.spec import EnvSpec, Space

BOX = Space("box", (3,), "float32")
SPEC = EnvSpec("x", BOX, Space("discrete", (), "int64", n=(4,), start=(0,)))
T, B = 6, 5


def build(cls, cell, observation=BOX):
    torch.manual_seed(0)
    config = ModelConfig(use_lstm=True, recurrent=cell, lstm_cell_size=16, fcnet_hiddens=(8,))
    return cls(EnvSpec("x", observation, SPEC.action), config)


@pytest.mark.parametrize("cell", ["lstm", "gru"])
@pytest.mark.parametrize("cls", [ActorCritic, QNetwork])
def test_unroll_equals_single_steps_with_carried_state(cls, cell):
    model = build(cls, cell)
    obs = torch.randn(T, B, 3)
    state = {k: torch.randn_like(v) for k, v in model.initial_state(B).items()}
    out = model.unroll(obs, state, torch.zeros(T, B, dtype=torch.bool))
    for t in range(T):
        step = model(obs[t], state)
        state = step["state"]
        for key in step.keys() - {"state"}:
            torch.testing.assert_close(out[key][t], step[key], atol=1e-6, rtol=0)
    for key, value in state.items():
        torch.testing.assert_close(out["state"][key], value, atol=1e-6, rtol=0)


@pytest.mark.parametrize("cell", ["lstm", "gru"])
def test_episode_starts_forget_what_came_before(cell):
    model = build(ActorCritic, cell)
    obs = torch.randn(T, B, 3)
    first = torch.zeros(T, B, dtype=torch.bool)
    first[2, 1] = first[4, 3] = first[0, 0] = True
    state = {k: torch.ones_like(v) for k, v in model.initial_state(B).items()}
    out = model.unroll(obs, state, first)["value"]
    for b, starts in ((0, [0]), (1, [0, 2]), (3, [0, 4])):  # each episode alone
        for start, end in zip(starts, [*starts[1:], T], strict=True):
            fresh = start > 0 or b == 0
            alone = model.initial_state(1) if fresh else {k: v[b : b + 1] for k, v in state.items()}
            part = model.unroll(obs[start:end, b : b + 1], alone, torch.zeros(end - start, 1, dtype=torch.bool))
            torch.testing.assert_close(out[start:end, b], part["value"][:, 0], atol=1e-6, rtol=0)
    assert not torch.allclose(out, model.unroll(obs, state, torch.zeros_like(first))["value"], atol=1e-4)


@pytest.mark.parametrize("cell", ["lstm", "gru"])
def test_cells_equal_torch_cells(cell):
    encoder = make_encoder(BOX, ModelConfig(fcnet_hiddens=(7,)))
    ours = Recurrent(encoder, cell, 5)
    torch.nn.init.normal_(ours.project.bias)
    theirs = {"lstm": torch.nn.LSTMCell, "gru": torch.nn.GRUCell}[cell](7, 5)
    order = [0, 1, 3, 2] if cell == "lstm" else [0, 1, 2]  # torch's LSTM: input, forget, cell, output
    with torch.no_grad():
        for mine, name in (
            (ours.project.weight, "weight_ih"),
            (ours.hidden.t(), "weight_hh"),
            (ours.project.bias, "bias_ih"),
        ):
            blocks = mine.chunk(len(order), 0)
            getattr(theirs, name).copy_(torch.cat([blocks[i] for i in order]))
        theirs.bias_hh.zero_()
        if cell == "gru":
            torch.nn.init.normal_(ours.hidden_bias)
            theirs.bias_hh[10:] = ours.hidden_bias
    obs = torch.randn(4, 3)
    state = {k: torch.randn_like(v) for k, v in ours.initial_state(4).items()}
    out, new = ours(obs, state)
    if cell == "lstm":
        h, c = theirs(encoder(obs), (state["h"], state["c"]))
        torch.testing.assert_close(new["c"], c)
    else:
        h = theirs(encoder(obs), state["h"])
    torch.testing.assert_close(out, h)
    torch.testing.assert_close(new["h"], h)


def test_keys_change_the_cell():
    lstm, gru = build(ActorCritic, "lstm"), build(ActorCritic, "gru")
    assert set(lstm.initial_state(2)) == {"h", "c"}
    assert set(gru.initial_state(2)) == {"h"}
    assert lstm.initial_state(2)["h"].shape == (2, 16)
    # encoder 3*8+8; lstm 8*64+64 and 16*64; head 16*5+5
    assert sum(p.numel() for p in lstm.parameters()) == 32 + 576 + 1024 + 85
    # gru: 8*48+48, 16*48, bias of the candidate 16
    assert sum(p.numel() for p in gru.parameters()) == 32 + 432 + 768 + 16 + 85
    wide = ActorCritic(SPEC, ModelConfig(use_lstm=True, lstm_cell_size=32))
    assert wide.initial_state(1)["c"].shape == (1, 32)
    assert ActorCritic(SPEC, ModelConfig()).initial_state(3) == {}


def test_dict_observations_unroll():
    space = Space("dict", parts=(BOX, Space("box", (1, 8, 8), "uint8", 0, 255)), names=("v", "image"))
    model = build(ActorCritic, "lstm", space)
    obs = {"v": torch.randn(T, B, 3), "image": torch.randint(0, 256, (T, B, 1, 8, 8), dtype=torch.uint8)}
    first = torch.zeros(T, B, dtype=torch.bool)
    assert model.unroll(obs, model.initial_state(B), first)["dist"].shape == (T, B, 4)


def test_what_cannot_work_is_refused():
    with pytest.raises(ConfigError, match="vf_share_layers"):
        ActorCritic(SPEC, ModelConfig(use_lstm=True, vf_share_layers=False))
    with pytest.raises(UnknownName, match="lstm"):
        ModelConfig(recurrent="lstmm")
    model = ActorCritic(SPEC, ModelConfig())
    with pytest.raises(ConfigError, match="use_lstm"):
        model.unroll(torch.zeros(1, 1, 3), {}, torch.zeros(1, 1, dtype=torch.bool))
