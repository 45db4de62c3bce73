"""A recording must do exactly what the function does, for results and for side effects, or not be used at all."""

import logging
import sys

import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_flatten

from bray.capture import MAX_PROGRAMS, capture, record
from bray.capture.in_place import in_place
from bray.capture.over_ranks import mean_over_ranks, talk_by
from bray.capture.replay import parts_of, replayed
from bray.capture.tape import Op
from bray.optim import Optimizer

pytestmark = pytest.mark.optimizes


def make_step(seed=0, sizes=(4, 8, 2)):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(sizes[0], sizes[1]), nn.Tanh(), nn.Linear(sizes[1], sizes[2]))
    optimizer = Optimizer(model.parameters(), 1e-2, max_grad_norm=0.5)

    def step(batch, index):
        x, y = batch["x"].index_select(0, index), batch["y"].index_select(0, index)
        loss = (model(x) - y).square().mean()
        norm = optimizer.step(loss)
        return {"loss": loss.detach(), "norm": norm}

    return model, optimizer, step


def batch(rows=32):
    g = torch.Generator().manual_seed(1)
    return {"x": torch.randn(rows, 4, generator=g), "y": torch.randn(rows, 2, generator=g)}


def test_training_by_a_recording_equals_training_without():
    (_m1, o1, f1), (_m2, o2, f2) = make_step(), make_step()
    recorded, data = capture(f1), batch()
    for i in range(20):
        index = torch.arange(8) + i % 3
        a, b = recorded(data, index), f2(data, index)
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
    assert recorded.recordings == 1
    torch.testing.assert_close(o1.flat, o2.flat, rtol=1e-5, atol=1e-6)
    assert o1.steps.item() == o2.steps.item() == 20


def test_recording_itself_changes_nothing():
    _model, optimizer, step = make_step()
    recorded = capture(step)
    before = [x.clone() for x in (optimizer.flat, optimizer.m, optimizer.v, optimizer.steps)]
    flat, structure = tree_flatten((batch(), torch.arange(8)))
    assert recorded.program(flat, structure) is not None
    for x, b in zip((optimizer.flat, optimizer.m, optimizer.v, optimizer.steps), before, strict=True):
        assert torch.equal(x, b)


def test_large_tanh_rewrite_keeps_values_and_gradients():
    torch.manual_seed(0)
    w = nn.Parameter(torch.randn(64, 64))

    def f(x):
        y = torch.tanh(x @ w)
        (g,) = torch.autograd.grad(y.square().sum(), w)
        return y.detach(), g

    recorded, x = capture(f), torch.randn(128, 64)
    recorded(x)
    x2 = torch.randn(128, 64)
    torch.testing.assert_close(recorded(x2), f(x2), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("layout", [torch.channels_last, torch.contiguous_format])
@pytest.mark.parametrize(("kernel", "stride"), [((8, 8), (4, 4)), ((3, 2), (1, 2))])
def test_large_convolution_rewrite_keeps_gradients(layout, kernel, stride, monkeypatch):
    monkeypatch.setattr(sys.modules["bray.capture.simplify"], "ARM", True)
    torch.manual_seed(0)
    convs = nn.Sequential(nn.Conv2d(4, 8, kernel, stride), nn.ReLU(), nn.Conv2d(8, 8, 3))
    convs.to(memory_format=layout)

    def f(x):
        y = convs(x.to(memory_format=layout)).square().sum()
        return [g.view(-1) if g.is_contiguous() else g for g in torch.autograd.grad(y, list(convs.parameters()))]

    recorded, x = capture(f), torch.randn(16, 4, 44, 36)
    recorded(x)
    x2 = torch.randn(16, 4, 44, 36)
    torch.testing.assert_close(recorded(x2), f(x2), rtol=1e-4, atol=1e-3)
    assert recorded.recordings == 1


def test_parameters_loaded_later_are_seen():
    model = nn.Linear(3, 2)
    recorded, x = capture(lambda x: model(x).detach()), torch.randn(5, 3)
    recorded(x)
    with torch.no_grad():
        model.weight.fill_(1.0)
        model.bias.zero_()
    torch.testing.assert_close(recorded(x), x.sum(-1, keepdim=True).expand(5, 2))


def test_a_function_that_reads_values_runs_eagerly_and_says_so(caplog):
    def f(x):
        return x * 2 if x.sum() > 0 else x * 3

    recorded = capture(f)
    with caplog.at_level(logging.WARNING, "bray"):
        assert recorded(torch.ones(2)).tolist() == [2, 2]
        assert recorded(-torch.ones(2)).tolist() == [-3, -3]
    assert "is not recorded" in caplog.text
    assert len(caplog.records) == 1


def test_a_function_whose_python_changes_between_calls_is_not_trusted(caplog):
    calls = []

    def f(x):
        calls.append(1)
        return x * len(calls)

    recorded = capture(f)
    with caplog.at_level(logging.WARNING, "bray"):
        assert [recorded(torch.ones(2)).tolist() for _ in range(3)] == [[1, 1], [2, 2], [3, 3]]
    assert "each call changes calls" in caplog.text


def test_random_operations_draw_on_and_recording_leaves_the_generator():
    recorded, x = capture(lambda x: nn.functional.dropout(x, 0.5, training=True)), torch.ones(1000)
    torch.manual_seed(3)
    a, b = recorded(x), recorded(x)
    assert not torch.equal(a, b)
    torch.manual_seed(3)
    assert torch.equal(recorded(x), a)


def test_new_shapes_get_their_own_recording_up_to_a_bound():
    recorded = capture(lambda x: x.cumsum(0))
    for n in range(1, MAX_PROGRAMS + 4):
        assert recorded(torch.ones(n)).tolist() == list(range(1, n + 1))
    assert recorded.recordings == MAX_PROGRAMS


def test_bind_flattens_once_and_equals_a_call():
    _model, _optimizer, step = make_step()
    recorded, data = capture(step), batch()
    bound = recorded.bind(data)
    _m2, _o2, f2 = make_step()
    for n in (8, 8, 5, 8):
        torch.testing.assert_close(bound(torch.arange(n)), f2(data, torch.arange(n)), rtol=1e-5, atol=1e-6)


def test_disabled_is_the_function():
    assert capture(lambda x: {"y": x + 1}, enabled=False)(torch.zeros(2))["y"].tolist() == [1, 1]


@pytest.mark.slow
def test_training_by_a_compiled_recording_equals_training_without():
    """With the C++ compiler of the machine."""
    m1, _, f1 = make_step()
    m2, _, f2 = make_step()
    recorded, data = capture(f1, enabled="compiled"), batch()
    for _ in range(4):
        torch.testing.assert_close(recorded(data, torch.arange(8)), f2(data, torch.arange(8)), rtol=1e-4, atol=1e-5)
    assert recorded.recordings == 1
    for a, b in zip(m1.parameters(), m2.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_what_cannot_be_compiled_is_recorded_and_says_so(monkeypatch, caplog):
    def no_compiler(*_, **__):
        raise RuntimeError("no C++ compiler")

    monkeypatch.setattr(torch, "compile", no_compiler)
    recorded = capture(lambda x: x + 1, enabled="compiled", name="the step")
    assert recorded(torch.zeros(2)).tolist() == [1, 1]
    assert recorded.recordings == 1
    assert "the step is recorded and not compiled: no C++ compiler" in caplog.text


W = torch.randn(3, 3, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    ("fn", "written"),
    [
        (lambda x: torch.relu(torch.addmm(W[0], x, W)) * 2.0, ["mm", "add_.Tensor", "relu_", "mul_.Tensor"]),
        (lambda x: torch.relu(x), ["relu"]),  # the caller's
        (lambda x: torch.relu(W) + x, ["relu", "add_.Tensor"]),  # held
        (lambda x: (y := x @ W, torch.relu(y)), ["mm", "relu"]),  # returned
        (lambda x: (y := x @ W) + torch.relu(y), ["mm", "relu", "add_.Tensor"]),  # read again
        (lambda x: ((y := x @ W).t(), y * 2.0), ["mm", "t", "mul.Tensor"]),  # returned by another name
        (
            lambda x: torch.stack([(v := (y := x @ W).t(), y * 2.0)[1], v]),
            ["mm", "t", "mul.Tensor", "stack"],
        ),  # read so
        (lambda x: (y := x @ W) * y, ["mm", "mul.Tensor"]),  # twice at once
        (lambda x: (y := x @ W) * y.t(), ["mm", "t", "mul.Tensor"]),
        (lambda x: (x @ W)[:1] + x, ["mm", "slice.Tensor", "add.Tensor"]),  # too small
        (lambda x: (x @ W).t() * 2.0, ["mm", "t", "mul.Tensor"]),  # of other strides
        (lambda x: (x @ W)[0] * 2.0, ["mm", "select.int", "mul.Tensor"]),  # a part: the result would keep the whole
        (lambda x: (torch.addmm(W[0], x, W), torch.ones(3)), ["mm", "add_.Tensor"]),  # beside a constant made last
    ],
)
def test_results_are_written_over_what_nobody_reads_again(fn, written):
    x, seen = torch.randn(3, 3), []

    def noted(tape, flat, subject):
        seen.extend(op.func.name().removeprefix("aten::") for op in in_place(tape).ops)
        return replayed(tape, flat)

    program = record(fn, [x], tree_flatten((x,))[1], make=noted)
    assert seen == written
    before = x.clone(), W.clone()
    for _ in range(2):
        for ours, eager in zip(program.run([x]), tree_flatten(fn(x))[0], strict=True):
            torch.testing.assert_close(ours, eager, rtol=0, atol=0)
    assert torch.equal(x, before[0])
    assert torch.equal(W, before[1])


def test_the_gradient_of_a_whole_slice_is_not_written_over_while_a_view_of_it_is_read():
    """Autograd copies it, and a recording leaves that copy out: a view of the copy is one of the gradient itself."""
    start = torch.randn(2, 64, 64, generator=torch.Generator().manual_seed(0))

    def trained(record_it):
        parameters = [x.clone().requires_grad_() for x in start]

        def step(x):
            a, c = (torch.relu(p * 1.0) for p in parameters)
            loss = ((a.t() + c)[:64] * x).mean()
            with torch.no_grad():
                for p, g in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):
                    p.sub_(g * 0.05)
            return loss.detach()

        step = capture(step, enabled=record_it)
        for i in range(50):
            step(start[0].abs() + i)
        return parameters

    for ours, eager in zip(trained(True), trained(False), strict=True):
        torch.testing.assert_close(ours, eager, rtol=0, atol=0)


def test_what_asks_other_ranks_is_between_the_parts_of_a_recording():
    """On a GPU each part is a graph. The parts in their order do what the tape does; here every rank has the double."""
    w = torch.ones(3)

    def step(x):
        mean = mean_over_ranks((x * w).sum(0))
        w.sub_(0.1 * mean)
        return mean_over_ranks(mean + w)

    tape = record(step, *tree_flatten((torch.rand(2, 3),))).tape
    parts = parts_of(tape)
    assert [isinstance(part, Op) for part in parts] == [False, True, False, True, False]
    x = torch.tensor([[1.0, 2.0, 3.0], [0.0, 1.0, 0.0]])
    talk_by(lambda x: 2.0 * x)
    try:
        slots = {0: x} | tape.held
        for part in parts:
            part.run(slots) if isinstance(part, Op) else part(slots)
    finally:
        talk_by(torch.clone)
    mean = torch.tensor([2.0, 6.0, 6.0])
    torch.testing.assert_close(w, 1.0 - 0.1 * mean)
    torch.testing.assert_close(slots[tape.outputs[0]], 2.0 * (mean + w))
