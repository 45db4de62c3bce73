"""A forward of a few rows is played on numpy arrays; what cannot be is played by torch, with the same results."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils import _pytree as pytree

from bray.capture import capture
from bray.inference.torch_engine import TorchEngine

pytestmark = pytest.mark.optimizes


def recorded(fn, *args):
    with torch.no_grad():
        return capture(fn, arrays=True).program(list(args), pytree.tree_structure(args))


class Net(nn.Module):
    def __init__(self, width=32, act=torch.relu):
        super().__init__()
        torch.manual_seed(1)
        self.a, self.b, self.act = nn.Linear(5, width), nn.Linear(width, 3), act

    def forward(self, x):
        return {"q": self.b(self.act(self.a(x)))}


FUNCTIONS = {
    "relu": torch.relu,
    "tanh": torch.tanh,
    "sigmoid": lambda x: torch.sigmoid(40.0 * x),
    "softmax": lambda x: x.reshape(3, 2, 3).softmax(-1) @ torch.arange(3.0),
    "layer norm": lambda x: F.layer_norm(x, (6,), torch.arange(6.0), torch.full((6,), 0.5)),
    "clamp": lambda x: x.clamp(-0.5, 0.2) + x.clamp(max=0.0),
    "split": lambda x: torch.cat([x.chunk(2, -1)[1], *x.split([1, 2, 3], 1)[:2]], 1),
    "dueling": lambda x: x.chunk(2, 1)[0] - x.mean(1, keepdim=True),
    "one hot": lambda x: (x.unsqueeze(2) == x.unsqueeze(1)).float(),
    "arithmetic": lambda x: torch.addcmul(x, x.sign(), x.abs().sqrt()) / 2.0 - x,
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_an_operation_on_arrays_gives_what_torch_gives(name):
    x = torch.randn(3, 6, generator=torch.Generator().manual_seed(2))
    expected = FUNCTIONS[name](x)
    program = recorded(FUNCTIONS[name], x)
    assert program.on_arrays is not None
    np.testing.assert_allclose(program.on_arrays([x.numpy()])[0], expected.numpy(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(program.run([x])[0], expected)


@pytest.mark.parametrize("rows", [1, 8])
def test_layers_by_a_float64_loop(rows):
    net, x = Net(), np.random.default_rng(0).standard_normal((rows, 5)).astype(np.float32)
    w = {k: v.detach().double().numpy() for k, v in net.named_parameters()}
    expected = np.zeros((rows, 3))
    for i in range(rows):
        hidden = [max(0.0, sum(x[i, k] * w["a.weight"][j, k] for k in range(5)) + w["a.bias"][j]) for j in range(32)]
        for j in range(3):
            expected[i, j] = sum(hidden[k] * w["b.weight"][j, k] for k in range(32)) + w["b.bias"][j]
    np.testing.assert_allclose(TorchEngine(net).forward(x)["q"], expected, rtol=1e-5, atol=1e-6)


def test_a_row_does_not_depend_on_the_others_of_its_batch():
    engine, x = TorchEngine(Net()), np.random.default_rng(0).standard_normal((9, 5)).astype(np.float32)
    together = engine.forward(x)["q"]
    for i in range(9):
        np.testing.assert_array_equal(engine.forward(x[i : i + 1])["q"][0], together[i])


def test_weights_that_change_in_place_are_seen_and_results_are_the_callers():
    net, x = Net(), np.ones((2, 5), np.float32)
    engine = TorchEngine(net)
    before = engine.forward(x)["q"]
    kept = before.copy()
    with torch.no_grad():
        net.b.bias += 1.0
    np.testing.assert_allclose(engine.forward(x)["q"], before + 1.0, rtol=1e-5)
    np.testing.assert_array_equal(before, kept)


def test_memory_of_an_lstm_cell_goes_through_arrays():
    torch.manual_seed(0)
    cell, x, h, c = nn.LSTMCell(4, 8), torch.randn(2, 4), torch.randn(2, 8), torch.randn(2, 8)
    program = recorded(lambda x, h, c: cell(x, (h, c)), x, h, c)
    got, expected = program.run([x, h, c]), cell(x, (h, c))
    torch.testing.assert_close(got, [e.detach() for e in expected])


@pytest.mark.parametrize(
    ("net", "rows"),
    [(Net(width=4096), 64), (Net(act=F.gelu), 2), (Net(act=F.softplus), 2)],
    ids=["large", "gelu", "other"],
)
def test_what_arrays_cannot_do_or_not_faster_is_left_to_torch(net, rows):
    x = torch.randn(rows, 5)
    program = recorded(net, x)
    assert program.on_arrays is None
    with torch.no_grad():
        torch.testing.assert_close(program.run([x])[0], net(x)["q"])


def test_another_type_of_number_raises_as_the_model_does():
    engine, x = TorchEngine(Net()), np.ones((2, 5), np.float32)
    engine.forward(x)
    with pytest.raises(RuntimeError, match="dtype"):
        engine.forward(x.astype(np.float64))


def test_rows_that_do_not_lie_one_after_the_other_or_may_not_be_written_to():
    engine, x = TorchEngine(Net()), np.random.default_rng(0).standard_normal((4, 10)).astype(np.float32)
    expected = engine.forward(np.ascontiguousarray(x[:, ::2]))["q"]
    np.testing.assert_array_equal(engine.forward(x[:, ::2])["q"], expected)
    frozen = np.ascontiguousarray(x[:, ::2])
    frozen.flags.writeable = False
    np.testing.assert_array_equal(engine.forward(frozen)["q"], expected)
