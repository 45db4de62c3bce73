"""Small functions for networks, and operations on gradients: by hand and against loops."""

import math
from collections import namedtuple

import numpy as np
import pytest
import torch
from torch import nn

from bray import tree
from bray.nn import binary_encode, gumbel_softmax, one_hot, soft_argmax, to_arrays, to_tensors
from bray.optim import Optimizer, without_conflicts

Pair = namedtuple("Pair", "a b")


def test_one_hot_and_binary_digits_by_hand():
    assert one_hot(torch.tensor([[2, 0], [3, -1]]), 3).tolist() == [[[0, 0, 1], [1, 0, 0]], [[0, 0, 0], [0, 0, 0]]]
    assert binary_encode(torch.tensor([5, 0, 9, -2]), 3).tolist() == [[1, 0, 1], [0, 0, 0], [1, 1, 1], [0, 0, 0]]


def test_digits_of_all_numbers():
    for x in range(64):
        assert binary_encode(torch.tensor(x), 6).tolist() == [float(c) for c in f"{x:06b}"]


def test_soft_argmax_equals_a_loop_and_finds_a_peak():
    x = torch.randn(2, 3, 4, dtype=torch.float64, requires_grad=True)
    got = soft_argmax(x)
    for b in range(2):
        e = np.exp(x[b].detach().numpy())
        want = [sum(e[i, j] * (i, j)[k] for i in range(3) for j in range(4)) / e.sum() for k in range(2)]
        np.testing.assert_allclose(got[b].detach().numpy(), want)
    got.sum().backward()
    assert x.grad.abs().sum() > 0
    peak = torch.zeros(5, 6)
    peak[3, 1] = 100.0
    assert soft_argmax(peak).tolist() == [3.0, 1.0]


def test_gumbel_softmax_equals_its_formula_and_draws_by_probability():
    torch.manual_seed(0)
    logits, u = torch.randn(4, 3, dtype=torch.float64), torch.rand(4, 3, dtype=torch.float64)
    e = np.exp((logits.numpy() - np.log(-np.log(u.numpy()))) / 0.5)
    np.testing.assert_allclose(gumbel_softmax(logits, u, 0.5).numpy(), e / e.sum(-1, keepdims=True))
    logits = torch.tensor([0.0, math.log(3.0)]).expand(20_000, 2).requires_grad_()
    drawn = gumbel_softmax(logits, torch.rand(20_000, 2).clamp(1e-6, 1 - 1e-6), hard=True)
    assert set(drawn.detach().flatten().tolist()) == {0.0, 1.0}
    assert drawn[:, 1].mean().item() == pytest.approx(0.75, abs=0.02)
    (grad,) = torch.autograd.grad(drawn[:, 1].sum(), logits)
    assert grad.abs().sum() > 0


def test_trees_go_to_tensors_and_back():
    data = {"x": [np.arange(3), Pair(np.ones(2, np.float32), np.float64(0.5))], "y": (np.int8([1]), True)}
    there = to_tensors(data, dtype=torch.float64)
    assert there["x"][1].a.dtype == torch.float64
    assert there["x"][0].dtype == torch.int64
    back = to_arrays(there)
    assert isinstance(back["x"][1], Pair)
    for (path, a), (_, b) in zip(tree.paths(data), tree.paths(back), strict=True):
        np.testing.assert_array_equal(a, b, err_msg=path)


# --- gradients --------------------------------------------------------------------------------------------------------


def test_a_gradient_beyond_the_bound_is_ignored():
    p = nn.Parameter(torch.zeros(2))
    optimizer = Optimizer([p], 1.0, kind="sgd", ignore_grad_norm=5.0)
    assert optimizer.step((p * torch.tensor([3.0, 4.1])).sum()).item() == pytest.approx(math.hypot(3.0, 4.1))
    assert p.tolist() == [0.0, 0.0]
    optimizer.step((p * torch.tensor([3.0, 4.0])).sum())
    assert p.tolist() == [-3.0, -4.0]


def slow_pcgrad(gradients, order):
    out = np.zeros(gradients.shape[1])
    for i, g in enumerate(gradients):
        g = g.copy()
        for j in order:
            h = gradients[j]
            if j != i and g @ h < 0:
                g = g - (g @ h) / (h @ h) * h
        out += g
    return out


def test_conflicts_of_gradients_are_taken_out():
    rng = np.random.default_rng(0)
    for _ in range(10):
        gradients, order = rng.normal(size=(4, 3)), rng.permutation(4)
        got = without_conflicts(torch.from_numpy(gradients), torch.from_numpy(order))
        np.testing.assert_allclose(got.numpy(), slow_pcgrad(gradients, order))
    agree = torch.tensor([[1.0, 0.0], [1.0, 1.0]])
    assert without_conflicts(agree).tolist() == [2.0, 1.0]
    against = torch.tensor([[1.0, 0.0], [-1.0, 1.0]])
    assert without_conflicts(against).tolist() == [0.5, 1.5]
