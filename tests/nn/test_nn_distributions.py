"""bray.distributions against torch.distributions and against plain float64 loops."""

import math

import numpy as np
import pytest
import torch
from torch.distributions import Categorical, Independent, Normal, TanhTransform, TransformedDistribution

from bray import distributions as D
from bray.algos.sac import squashed_sample
from bray.rl.draws import draw_rows as compiled_draws
from bray.spec import ActionLayout, Space


def discrete(n):
    return Space("discrete", (), "int64", n=(n,), start=(0,))


def multi(*n):
    return Space("multi_discrete", (len(n),), "int64", n=n, start=(0,) * len(n))


def box(n):
    return Space("box", (n,), "float32", -1.0, 1.0)


SPACES = {
    "discrete": discrete(5),
    "multi_equal": multi(3, 3, 3),
    "multi": multi(2, 4, 3),
    "binary": Space("multi_binary", (3,), "int8"),
    "box": box(4),
    "dict": Space("dict", parts=(box(2), discrete(3), multi(2, 4), box(1)), names=("a", "b", "c", "d")),
}
LAYOUTS = {k: ActionLayout(s) for k, s in SPACES.items()}


def example(layout, rows=7, seed=0, mask=False):
    g = torch.Generator().manual_seed(seed)
    dist = torch.randn(rows, layout.num_params, generator=g)
    allowed = torch.ones(rows, layout.num_logits, dtype=torch.bool)
    if mask:
        allowed = torch.rand(rows, layout.num_logits, generator=g) < 0.6
    columns, at = [], 0
    for part in layout.parts:
        if part.kind == "categorical":
            legal = allowed[:, at : at + part.n]
            legal[:, 0] |= ~legal.any(1)  # at least one legal choice
            columns.append(torch.multinomial(legal.float(), 1, generator=g).float())
            at += part.n
        else:
            columns.append(torch.randn(rows, part.n, generator=g))
    action = torch.cat(columns, 1)
    if layout.discrete:
        action = action.long()
    if layout.single:
        action = action[:, 0]
    return dist, action, allowed if mask else None


def by_hand(layout, dist, action, mask):
    """log_prob and entropy in float64, number by number."""
    out = np.zeros((2, len(dist)))
    action = action.reshape(len(dist), -1)
    for b in range(len(dist)):
        at = 0
        for part in layout.parts:
            p = dist[b, part.param].astype(np.float64)
            a = action[b, part.action].astype(np.float64)
            if part.kind == "categorical":
                legal = [j for j in range(part.n) if mask is None or mask[b, at + j]]
                at += part.n
                zp = sum(math.exp(p[j]) for j in legal)
                probs = {j: math.exp(p[j]) / zp for j in legal}
                out[0, b] += math.log(probs[int(a[0])])
                out[1, b] -= sum(x * math.log(x) for x in probs.values())
            else:
                for i in range(part.n):
                    m, s = p[i], math.exp(p[part.n + i])
                    out[0, b] += -0.5 * ((a[i] - m) / s) ** 2 - math.log(s) - 0.5 * math.log(2 * math.pi)
                    out[1, b] += 0.5 * math.log(2 * math.pi * math.e) + math.log(s)
    return out


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("masked", [False, True])
def test_formulas_equal_a_float64_loop(name, masked):
    layout = LAYOUTS[name]
    dist, action, mask = example(layout, mask=masked)
    want = by_hand(layout, dist.numpy(), action.numpy(), None if mask is None else mask.numpy())
    log_prob, entropy = D.log_prob_entropy(layout, dist, action, mask)
    assert log_prob.shape == entropy.shape == (7,)
    np.testing.assert_allclose(log_prob, want[0], rtol=1e-6, atol=2e-5)
    np.testing.assert_allclose(entropy, want[1], rtol=1e-6, atol=2e-5)


@pytest.mark.parametrize("name", LAYOUTS)
def test_leading_axes_are_kept(name):
    layout = LAYOUTS[name]
    dist, action, mask = example(layout, rows=6, mask=True)
    flat = D.log_prob_entropy(layout, dist, action, mask)
    folded = D.log_prob_entropy(layout, *(x.unflatten(0, (2, 3)) for x in (dist, action, mask)))
    for x, y in zip(flat, folded, strict=True):
        assert torch.equal(y, x.unflatten(0, (2, 3)))


def test_equal_torch_distributions():
    layout = LAYOUTS["discrete"]
    dist, action, _ = example(layout)
    p = Categorical(logits=dist)
    torch.testing.assert_close(D.log_prob_entropy(layout, dist, action), (p.log_prob(action), p.entropy()))
    layout = LAYOUTS["box"]
    dist, action, _ = example(layout)
    p = Independent(Normal(dist[:, :4], dist[:, 4:].exp()), 1)
    torch.testing.assert_close(D.log_prob_entropy(layout, dist, action), (p.log_prob(action), p.entropy()))


@pytest.mark.parametrize("name", ["discrete", "multi_equal", "multi", "dict"])
def test_masked_choices_have_no_probability_and_no_gradient(name):
    layout = LAYOUTS[name]
    dist, action, mask = example(layout, mask=True)
    dist.requires_grad_()
    loss = sum(D.log_prob_entropy(layout, dist, action, mask)).sum()
    (grad,) = torch.autograd.grad(loss, dist)
    at = 0
    for part in layout.parts:
        if part.kind == "categorical":
            legal = mask[:, at : at + part.n]
            at += part.n
            assert (grad[:, part.param][~legal] == 0).all()
            for choice in range(part.n):  # each masked choice, asked for, has probability exactly 0
                rows = ~legal[:, choice]
                asked = action.clone()
                if layout.single:
                    asked[rows] = choice
                else:
                    asked[rows, part.action] = choice
                assert (D.log_prob_entropy(layout, dist, asked, mask)[0][rows].exp() == 0).all()
    assert torch.isfinite(grad).all()
    assert grad.abs().sum() > 0


def test_a_row_without_legal_choice_stays_finite():
    layout = LAYOUTS["discrete"]
    mask = torch.zeros(1, 5, dtype=torch.bool)
    assert D.log_prob_entropy(layout, torch.randn(1, 5), torch.zeros(1, dtype=torch.int64), mask)[
        1
    ].item() == pytest.approx(math.log(5), abs=1e-6)


def test_most_likely_actions():
    def best(name, *dist, mask=None):
        mask = None if mask is None else np.array([mask])
        return D.sample(LAYOUTS[name], np.array([dist], np.float32), None, mask)[0]

    assert best("discrete", 0, 3, 1, 2, 0).tolist() == [1]
    assert best("discrete", 0, 3, 1, 2, 0, mask=[True, False, True, True, True]).tolist() == [3]
    equal = best("multi_equal", 0, 1, 0, 2, 0, 0, 0, 0, 5)
    assert equal.tolist() == [[1, 0, 2]]
    assert equal.dtype == np.int64
    assert best("multi", 0, 1, 0, 0, 0, 9, 4, 0, 0).tolist() == [[1, 3, 0]]
    mixed = best("dict", 0.5, -0.5, 0, 0, 1, 2, 0, 7, 6, 0, 0, 0, 1, 0.25, 0)
    assert mixed.tolist() == [[0.5, -0.5, 1, 0, 3, 0.25]]


def test_a_distribution_of_ones_own_is_one_class(monkeypatch):
    """A Laplace in place of the Gaussian: drawn, and learnt from, by its registration alone."""

    class Laplace:
        masked = False

        def draw(self, params, rng, mask):
            mean, log_scale = np.split(params, 2, -1)
            noise = rng.laplace(size=mean.shape)
            return mean + np.exp(log_scale) * noise, (-abs(noise) - log_scale - math.log(2.0)).sum(-1)

        def read(self, params, mask):
            return params.chunk(2, -1)

        def log_prob(self, params, action):
            mean, log_scale = params
            return (-(action - mean).abs() * (-log_scale).exp() - log_scale - math.log(2.0)).sum(-1)

        def entropy(self, params):
            return (params[1] + 1.0 + math.log(2.0)).sum(-1)

    monkeypatch.setitem(D.DISTRIBUTIONS, "gaussian", Laplace())
    dist, _, _ = example(LAYOUTS["box"])
    action, logp = D.sample(LAYOUTS["box"], dist.numpy(), np.random.default_rng(0))
    log_prob, entropy = D.log_prob_entropy(LAYOUTS["box"], dist, torch.from_numpy(action))
    reference = Independent(torch.distributions.Laplace(dist[:, :4], dist[:, 4:].exp()), 1)
    torch.testing.assert_close(log_prob, reference.log_prob(torch.from_numpy(action)))
    torch.testing.assert_close(entropy, reference.entropy())
    np.testing.assert_allclose(logp, log_prob, rtol=1e-4, atol=1e-4)


def test_squashed_sample_equals_a_transformed_normal():
    g = torch.Generator().manual_seed(0)
    dist = torch.cat([torch.randn(50, 3, generator=g), torch.randn(50, 3, generator=g) * 0.5], 1).double()
    noise = torch.randn(50, 3, generator=g).double()
    action, log_prob = squashed_sample(dist, noise)
    reference = Independent(
        TransformedDistribution(Normal(dist[:, :3], dist[:, 3:].exp()), TanhTransform(cache_size=1)), 1
    )
    torch.testing.assert_close(action, torch.tanh(dist[:, :3] + dist[:, 3:].exp() * noise))
    torch.testing.assert_close(log_prob, reference.log_prob(action), atol=1e-6, rtol=1e-6)


def test_squashed_log_prob_is_right_where_tanh_is_flat():
    # u = 20: 1 - tanh(u)^2 is 0 in float32, but log(1 - tanh(u)^2) = 2 log 2 - 2u (to 1e-17) is not -inf
    dist = torch.tensor([[20.0, 0.0]], requires_grad=True)
    action, log_prob = squashed_sample(dist, torch.zeros(1, 1))
    assert action.item() == 1.0
    assert log_prob.item() == pytest.approx(-0.5 * math.log(2 * math.pi) - (2 * math.log(2) - 40.0), abs=1e-4)
    (grad,) = torch.autograd.grad(log_prob.sum(), dist)
    assert grad[0].tolist() == pytest.approx([2.0, -1.0], abs=1e-5)


# --- a service draws without compiled code ----------------------------------------------------------------------------


@pytest.mark.parametrize("scale", [0.1, 1.0, 30.0, 300.0])
@pytest.mark.parametrize("how", ["drawn", "drawn with a mask", "most likely", "most likely with a mask"])
def test_a_service_draws_what_training_draws_bit_for_bit(how, scale):
    rng = np.random.default_rng(0)
    for n in (1, 2, 5, 18, 200):
        logits = np.round(scale * rng.standard_normal((64, n)), 2).astype(np.float32)  # some are equal
        u = rng.random(64) if "drawn" in how else None
        mask = rng.random((64, n)) < 0.4 if "mask" in how else None  # in some rows nothing is legal
        (action, logp), (trained, trained_logp) = D.draw_rows(logits, u, mask), compiled_draws(logits, u, mask)
        assert (action.dtype, action.tobytes()) == (trained.dtype, trained.tobytes())
        assert logp.dtype == trained_logp.dtype
        if u is None:
            np.testing.assert_allclose(logp, trained_logp, 1e-5, 1e-5)
        else:
            assert logp.tobytes() == trained_logp.tobytes()


@pytest.mark.parametrize("rows", [1, 64])  # the most likely of many are found by numpy
@pytest.mark.parametrize("low", [-2e9, -3e38, -np.inf])
def test_the_most_likely_choice_is_legal_however_low_its_logit(low, rows):
    logits = np.tile(np.array([5.0, 2.0, low, low, 1.0], np.float32), (rows, 1))
    mask = np.tile([False, False, True, True, False], (rows, 1))
    for draw in (D.draw_rows, compiled_draws):
        assert set(draw(logits, None, mask)[0].tolist()) == {2}


@pytest.mark.parametrize("masked", [False, True])
def test_the_divergence_of_two_heads_equals_a_float64_loop(masked):
    layout = LAYOUTS["dict"]
    dist, _, mask = example(layout, mask=masked)
    other = example(layout, seed=1)[0]
    want = np.zeros(len(dist))
    for b in range(len(dist)):
        at = 0
        for part in layout.parts:
            p, q = (x[b, part.param].numpy().astype(np.float64) for x in (dist, other))
            if part.kind == "categorical":
                legal = [j for j in range(part.n) if mask is None or mask[b, at + j]]
                at += part.n
                zp, zq = (sum(math.exp(x[j]) for j in legal) for x in (p, q))
                want[b] += sum(math.exp(p[j]) / zp * (p[j] - math.log(zp) - q[j] + math.log(zq)) for j in legal)
            else:
                ours, its = (Normal(torch.tensor(x[: part.n]), torch.tensor(x[part.n :]).exp()) for x in (p, q))
                want[b] += float(torch.distributions.kl_divergence(ours, its).sum())
    np.testing.assert_allclose(D.kl(layout, dist, other, mask), want, rtol=1e-5, atol=1e-5)
    _, entropy = D.log_prob_entropy(LAYOUTS["discrete"], *example(LAYOUTS["discrete"])[:2])
    dist = example(LAYOUTS["discrete"])[0]
    uniform = D.kl(LAYOUTS["discrete"], dist, torch.zeros_like(dist))
    torch.testing.assert_close(uniform, math.log(5) - entropy)
