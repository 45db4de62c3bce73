"""The flat optimizer against PyTorch's own, and targets by hand."""

import pytest
import torch
from torch import nn

from bray.errors import CheckpointError, UnknownName
from bray.nn.popart import PopArt
from bray.optim import Optimizer
from bray.target import Target


def pair(seed=0):
    torch.manual_seed(seed)
    a = nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 2))
    b = nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 2))
    b.load_state_dict(a.state_dict())
    return a.double(), b.double()


@pytest.mark.parametrize(
    ("kind", "options", "make"),
    [
        ("adam", {}, lambda p: torch.optim.Adam(p, 1e-2)),
        ("adam", {"eps": 1e-5}, lambda p: torch.optim.Adam(p, 1e-2, eps=1e-5)),
        ("adam", {"weight_decay": 0.1}, lambda p: torch.optim.AdamW(p, 1e-2, weight_decay=0.1)),
        ("rmsprop", {"betas": (0.9, 0.99)}, lambda p: torch.optim.RMSprop(p, 1e-2, alpha=0.99, eps=1e-8)),
        ("sgd", {}, lambda p: torch.optim.SGD(p, 1e-2)),
    ],
)
def test_steps_equal_pytorch(kind, options, make):
    mine, theirs = pair()
    optimizer, reference = (
        Optimizer(mine.parameters(), 1e-2, kind=kind, max_grad_norm=0.5, **options),
        make(theirs.parameters()),
    )
    for i in range(30):
        x = torch.randn(16, 3, generator=torch.Generator().manual_seed(i), dtype=torch.float64)
        norm = optimizer.step(mine(x).pow(2).sum())
        reference.zero_grad()
        theirs(x).pow(2).sum().backward()
        expected = nn.utils.clip_grad_norm_(theirs.parameters(), 0.5)
        reference.step()
        torch.testing.assert_close(norm, expected, rtol=1e-5, atol=1e-7)
    for p, q in zip(mine.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-7)


def test_unused_and_tied_parameters():
    layer = nn.Linear(2, 2, bias=False)
    unused = nn.Parameter(torch.ones(3))
    optimizer = Optimizer([layer.weight, layer.weight, unused], 0.1, kind="sgd")
    assert optimizer.flat.numel() == 7
    optimizer.step(layer(torch.ones(1, 2)).sum())
    assert unused.tolist() == [1, 1, 1]


def test_unknown_kind_names_the_nearest():
    with pytest.raises(UnknownName, match="'adam'"):
        Optimizer([nn.Parameter(torch.ones(1))], 0.1, kind="adm")


def test_state_of_another_network_is_refused():
    a, _ = pair()
    small = Optimizer([nn.Parameter(torch.ones(1))], 0.1)
    with pytest.raises(CheckpointError, match="another network"):
        Optimizer(a.parameters(), 0.1).load_state_dict(small.state_dict())


def test_target_copies_and_follows():
    a, _ = pair()
    optimizer = Optimizer(a.parameters(), 0.1)
    target = Target(a, optimizer, tau=0.25)
    start = target.module[0].weight.clone()
    with torch.no_grad():
        optimizer.flat.add_(1.0)
    assert torch.equal(target.module[0].weight, start)
    target.follow()
    torch.testing.assert_close(target.module[0].weight, start + 0.25)
    target.copy()
    assert torch.equal(target.module[0].weight, a[0].weight)
    assert not any(p.requires_grad for p in target.module.parameters())


@pytest.mark.parametrize("how", ["copy", "follow"])
def test_a_target_has_the_statistics_that_weights_are_measured_in(how):
    net, x = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), PopArt(8, 1, step=0.1)), torch.randn(5, 3)
    target = Target(net, Optimizer(net.parameters(), 0.1))
    net[2].update(1000.0 + 100.0 * torch.randn(64))
    getattr(target, how)()
    torch.testing.assert_close(target(x), net(x))


def test_each_entry_of_a_gradient_can_be_clamped():
    """As tutorials write it: `param.grad.data.clamp_(-1, 1)`."""
    p = nn.Parameter(torch.tensor([0.0, 0.0]))
    Optimizer([p], 0.1, kind="sgd", max_grad_value=1.0).step((p * torch.tensor([5.0, -0.5])).sum())
    torch.testing.assert_close(p.detach(), torch.tensor([-0.1, 0.05]))
