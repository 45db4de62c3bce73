"""Losses over distributions of returns, soft values, traces of ACER and the like: against independent float64 loops and
by hand."""

import inspect
import itertools
import math
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from bray.rl import losses, returns, transforms

few = settings(max_examples=25, deadline=None)
sizes = given(seed=st.integers(0, 2**32 - 1), batch=st.integers(1, 5), n=st.integers(2, 7))


def tensor(x):
    return torch.from_numpy(np.asarray(x))


def close(got, want):
    np.testing.assert_allclose(np.asarray(got), want, rtol=1e-9, atol=1e-9)


# Distributions of returns


def slow_project(probs, support, reward, discount):
    """C51's algorithm 1, atom by atom."""
    low, high, k = support[0], support[-1], len(support)
    spacing = (high - low) / (k - 1)
    out = np.zeros_like(probs)
    for b in range(len(probs)):
        for j in range(k):
            place = (min(max(reward[b] + discount[b] * support[j], low), high) - low) / spacing
            below, above = math.floor(place), math.ceil(place)
            if below == above:
                out[b, below] += probs[b, j]
            else:
                out[b, below] += probs[b, j] * (above - place)
                out[b, above] += probs[b, j] * (place - below)
    return out


@sizes
@few
def test_projection_equals_the_papers_loop(seed, batch, n):
    rng = np.random.default_rng(seed)
    probs, support = rng.dirichlet(np.ones(n), batch), np.linspace(-2.0, 3.0, n)
    reward, discount = rng.normal(size=batch) * 2, rng.choice([0.0, 0.9, 1.0], batch)
    got = losses.project(*(tensor(x) for x in (probs, support, reward, discount)))
    close(got, slow_project(probs, support, reward, discount))
    close(got.sum(-1), np.ones(batch))


def test_projection_by_hand():
    """Atoms 0, 1, 2. Nothing moves; moved half an atom up; a terminal reward of 1; beyond the end."""
    probs, support = torch.tensor([[0.2, 0.3, 0.5]] * 4), torch.tensor([0.0, 1.0, 2.0])
    got = losses.project(probs, support, torch.tensor([0.0, 0.5, 1.0, 9.0]), torch.tensor([1.0, 1.0, 0.0, 1.0]))
    want = [[0.2, 0.3, 0.5], [0.1, 0.25, 0.65], [0.0, 1.0, 0.0], [0.0, 0.0, 1.0]]
    np.testing.assert_allclose(got, want, atol=1e-6)


@sizes
@few
def test_quantile_loss_equals_a_loop(seed, batch, n):
    rng = np.random.default_rng(seed)
    theta, tau, target = rng.normal(size=(batch, n)), rng.random((batch, n)), rng.normal(size=(batch, n + 1)) * 2
    for kappa in (0.0, 0.5, 1.0):
        want = np.zeros(batch)
        for b in range(batch):
            for i in range(n):
                for j in range(n + 1):
                    u = target[b, j] - theta[b, i]
                    if kappa == 0.0:
                        size = abs(u)
                    else:
                        size = 0.5 * u * u / kappa if abs(u) <= kappa else abs(u) - 0.5 * kappa
                    want[b] += abs(tau[b, i] - (u < 0)) * size / (n + 1)
        close(losses.quantile_huber(tensor(theta), tensor(tau), tensor(target), kappa), want)


def test_quantile_regression_finds_the_quantiles():
    """The least loss for many draws lies at the quantiles asked for."""
    draws = torch.linspace(0.0, 1.0, 1001, dtype=torch.float64)[None]
    theta = torch.full((1, 3), 0.5, dtype=torch.float64, requires_grad=True)
    tau = torch.tensor([[0.1, 0.5, 0.9]], dtype=torch.float64)
    for _ in range(300):
        (gradient,) = torch.autograd.grad(losses.quantile_huber(theta, tau, draws, 0.0).sum(), theta)
        theta = (theta - 0.02 * gradient).detach().requires_grad_()
    np.testing.assert_allclose(theta.detach(), tau, atol=0.02)


@sizes
@few
def test_gradient_of_fractions_is_that_of_the_wasserstein_distance(seed, batch, n):
    """For a quantile function that grows (here F(t) = t^2) the gradient is 2 F(tau_i) - F(middle_i) -
    F(middle_{i-1})."""
    inner = np.sort(np.random.default_rng(seed).random((batch, n - 1)), -1)
    edges = np.concatenate([np.zeros((batch, 1)), inner, np.ones((batch, 1))], 1)
    middle = (edges[:, 1:] + edges[:, :-1]) / 2
    tau = tensor(inner).requires_grad_()
    losses.fraction_loss(tau, tensor(inner**2), tensor(middle**2)).sum().backward()
    close(tau.grad, 2 * inner**2 - middle[:, :-1] ** 2 - middle[:, 1:] ** 2)


def test_fractions_where_quantiles_do_not_grow():
    """F(tau) = 1 lies below both neighbours' 3 and 2: left is 1 - 3, turned round, right 1 - 2."""
    tau = torch.tensor([[0.5]], requires_grad=True)
    losses.fraction_loss(tau, torch.tensor([[1.0]]), torch.tensor([[3.0, 2.0]])).sum().backward()
    assert tau.grad.item() == 2.0 - 1.0


def test_distribution_of_the_action_taken():
    x = torch.arange(12.0).reshape(2, 3, 2)
    assert losses.select_action(x, torch.tensor([2, 0])).tolist() == [[4.0, 5.0], [6.0, 7.0]]


def test_categorical_loss_is_least_at_the_target():
    target = torch.tensor([[0.2, 0.3, 0.5]], dtype=torch.float64)
    entropy = -(target * target.log()).sum()
    assert losses.categorical_loss(target.log(), target).item() == pytest.approx(entropy.item())
    assert losses.categorical_loss(torch.zeros(1, 3, dtype=torch.float64), target).item() == pytest.approx(math.log(3))


# Soft and rescaled values


@sizes
@few
def test_soft_value_and_munchausen_bonus_equal_their_definitions(seed, batch, n):
    rng = np.random.default_rng(seed)
    q, action, tau = rng.normal(size=(batch, n)), rng.integers(n, size=batch), 0.3
    policy = np.exp(q / tau) / np.exp(q / tau).sum(-1, keepdims=True)
    close(losses.soft_value(tensor(q), tau), (policy * (q - tau * np.log(policy))).sum(-1))
    bonus = 0.9 * np.clip(tau * np.log(policy[np.arange(batch), action]), -1.0, 0.0)
    close(losses.munchausen_bonus(tensor(q), tensor(action), tau), bonus)


def test_actions_that_are_not_allowed_have_no_soft_value():
    q = torch.tensor([[1.0, -torch.inf, 1.0]])
    assert losses.soft_value(q, 0.5).item() == pytest.approx(1.0 + 0.5 * math.log(2))


@sizes
@few
def test_rescaled_td_error_equals_a_loop(seed, batch, n):
    rng = np.random.default_rng(seed)
    q, reward, q_next = rng.normal(size=(3, batch))
    discount = rng.choice([0.0, 0.97], batch)

    def h(x):
        return math.copysign(math.sqrt(abs(x) + 1) - 1, x) + 0.01 * x

    def inverse(y):
        low, high = -1e6, 1e6  # by bisection: h grows
        for _ in range(100):
            middle = (low + high) / 2
            low, high = (middle, high) if h(middle) < y else (low, middle)
        return (low + high) / 2

    want = [q[b] - h(reward[b] + discount[b] * inverse(q_next[b])) for b in range(batch)]
    got = losses.rescaled_td_error(*(tensor(x) for x in (q, reward, discount, q_next)), 0.01)
    np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("eps", [0.0, 1e-3, 1e-2])
def test_maps_of_values_invert_each_other(eps):
    x = np.concatenate([-np.logspace(-4, 4, 50), [0.0], np.logspace(-4, 4, 50)])
    close(transforms.unrescale(transforms.rescale(x, eps), eps), x)
    close(transforms.unrescale(transforms.rescale(tensor(x), eps), eps), x)
    close(transforms.symexp(transforms.symlog(x)), x)
    close(transforms.symexp(transforms.symlog(tensor(x))), x)


def test_maps_of_values_by_hand():
    assert transforms.rescale(torch.tensor([3.0, -8.0]), 0.5).tolist() == [2.5, -6.0]
    assert transforms.symlog(np.array([math.e - 1, 0.0])).tolist() == [1.0, 0.0]


# Risk


@pytest.mark.parametrize(
    ("risk", "eta"), [("neutral", 0.0), ("cpw", 0.71), ("pow", 2.0), ("pow", -2.0), ("wang", 0.75)]
)
def test_risk_maps_grow_from_zero_to_one(risk, eta):
    tau = np.linspace(0.0, 1.0, 101)
    got = transforms.distort(tau, risk, eta)
    assert got[0] == pytest.approx(0.0)
    assert got[-1] == pytest.approx(1.0)
    assert (np.diff(got) > 0).all()
    np.testing.assert_allclose(transforms.distort(tensor(tau), risk, eta), got)


def test_risk_maps_by_hand():
    half = np.array([0.5])
    assert transforms.distort(half, "cvar", 0.25).tolist() == [0.125]
    assert transforms.distort(half, "pow", 1.0).tolist() == pytest.approx([math.sqrt(0.5)])
    assert transforms.distort(half, "pow", -1.0).tolist() == pytest.approx([1 - math.sqrt(0.5)])
    assert transforms.distort(half, "wang", 1.0).tolist() == pytest.approx([0.5 * (1 + math.erf(1 / math.sqrt(2)))])
    assert transforms.distort(half, "cpw", 0.71).tolist() == pytest.approx([0.5**0.71 / (2 * 0.5**0.71) ** (1 / 0.71)])
    with pytest.raises(ValueError, match="risk should be one of neutral, cpw, cvar, pow, wang, got 'bold'"):
        transforms.distort(half, "bold")


# Policies


def test_estimates_of_kl():
    """k3 never is negative; means over many draws come near the KL; they vanish for equal policies."""
    generator = torch.Generator().manual_seed(0)
    p, q = torch.tensor([0.5, 0.3, 0.2]).log(), torch.tensor([0.4, 0.4, 0.2]).log()
    action = torch.multinomial(p.exp(), 200_000, replacement=True, generator=generator)
    exact = (p.exp() * (p - q)).sum().item()
    for kind in ("k1", "k2", "k3"):
        estimate = losses.kl_estimate(p[action], q[action], kind)
        assert estimate.mean().item() == pytest.approx(exact, rel=0.1)
        assert not losses.kl_estimate(p, p, kind).any()
    assert (losses.kl_estimate(p[action], q[action]) >= 0).all()
    with pytest.raises(ValueError, match="kind should be k1, k2 or k3, got 'k4'"):
        losses.kl_estimate(p, q, "k4")


def test_counterfactual_advantage():
    q = torch.tensor([[1.0, 3.0], [2.0, 2.0]], requires_grad=True)
    probs = torch.tensor([[0.25, 0.75], [0.9, 0.1]])
    got = losses.counterfactual_advantage(q, probs, torch.tensor([1, 0]))
    assert got.tolist() == [0.5, 0.0]
    assert not got.requires_grad


@sizes
@few
def test_acer_equals_a_loop(seed, batch, n):
    rng = np.random.default_rng(seed)
    logits, behaviour, q = rng.normal(size=(3, batch, n))
    mu, action, q_ret, c = (
        np.exp(behaviour) / np.exp(behaviour).sum(-1, keepdims=True),
        rng.integers(n, size=batch),
        rng.normal(size=batch),
        1.2,
    )
    want = np.zeros(batch)
    for b in range(batch):
        pi = np.exp(logits[b]) / np.exp(logits[b]).sum()
        rho, v = pi / mu[b], float(pi @ q[b])
        want[b] -= min(c, rho[action[b]]) * math.log(pi[action[b]]) * (q_ret[b] - v)
        for a in range(n):
            want[b] -= max(0.0, 1 - c / rho[a]) * pi[a] * math.log(pi[a]) * (q[b, a] - v)
    got = losses.acer_policy(*(tensor(x) for x in (logits, np.log(mu), action, q, q_ret)), c)
    close(got, want)


def test_acer_of_actions_that_are_not_allowed_is_that_of_the_others():
    g = torch.Generator().manual_seed(0)
    logits, behaviour, q = torch.randn(3, 5, 4, generator=g, dtype=torch.float64)
    action, q_ret = torch.randint(3, (5,), generator=g), torch.randn(5, generator=g, dtype=torch.float64)
    three = losses.acer_policy(logits[:, :3], behaviour[:, :3].log_softmax(-1), action, q[:, :3], q_ret, 0.5)
    logits[:, 3] = behaviour[:, 3] = q[:, 3] = -torch.inf
    logits.requires_grad_()
    four = losses.acer_policy(logits, behaviour.log_softmax(-1), action, q, q_ret, 0.5)
    torch.testing.assert_close(four, three)
    four.sum().backward()
    assert logits.grad.isfinite().all()


def test_trust_region_leaves_small_steps_alone():
    g, k = torch.tensor([[1.0, 0.0], [3.0, 4.0]]), torch.tensor([[0.0, 1.0], [1.0, 0.0]])
    got = losses.trust_region(g, k, 1.0)
    assert got.tolist() == [[1.0, 0.0], [1.0, 4.0]]  # k.g is 0, and 3 brought down to 1


@sizes
@few
def test_margin_loss_equals_a_loop(seed, batch, n):
    rng = np.random.default_rng(seed)
    q, action = rng.normal(size=(batch, n)), rng.integers(n, size=batch)
    want = [max(q[b, a] + 0.8 * (a != action[b]) for a in range(n)) - q[b, action[b]] for b in range(batch)]
    close(losses.margin_loss(tensor(q), tensor(action)), want)


# Labels and pairs


def log_softmax(row):
    return [x - math.log(sum(math.exp(y) for y in row)) for x in row]


@sizes
@few
def test_losses_of_labels_equal_a_loop(seed, batch, n):
    rng = np.random.default_rng(seed)
    logits, label = rng.normal(size=(batch, n)) * 3, rng.integers(n, size=batch)
    smooth, focal = np.zeros(batch), np.zeros(batch)
    for b in range(batch):
        logp = log_softmax(logits[b])
        for k in range(n):
            smooth[b] -= ((0.8 if k == label[b] else 0.0) + 0.2 / n) * logp[k]
        focal[b] = -((1 - math.exp(logp[label[b]])) ** 1.5) * logp[label[b]]
    close(losses.smoothed_cross_entropy(tensor(logits), tensor(label), 0.2), smooth)
    close(losses.focal(tensor(logits), tensor(label), 1.5), focal)


def test_losses_of_labels_without_their_option_are_the_cross_entropy():
    logits, label = torch.randn(6, 4, dtype=torch.float64), torch.tensor([0, 1, 2, 3, 3, 0])
    plain = torch.nn.functional.cross_entropy(logits, label, reduction="none")
    torch.testing.assert_close(losses.smoothed_cross_entropy(logits, label, 0.0), plain)
    torch.testing.assert_close(losses.focal(logits, label, 0.0), plain)


def test_a_certain_label_has_a_focal_loss_of_zero_with_a_gradient():
    logits = torch.tensor([[90.0, 0.0], [0.0, 90.0]], requires_grad=True)
    loss = losses.focal(logits, torch.tensor([0, 0]))
    assert loss.tolist() == [0.0, 90.0]
    loss.sum().backward()
    assert logits.grad.isfinite().all()
    losses.focal(logits, torch.tensor([0, 1]), 0.5).sum().backward()  # a power below 1, of nothing
    assert logits.grad.isfinite().all()


@sizes
@few
def test_the_contrastive_loss_equals_a_loop(seed, batch, n):
    rng = np.random.default_rng(seed)
    x, y = rng.normal(size=(2, batch, n))
    want = []
    for i in range(batch):
        row = [x[i] @ y[j] / np.linalg.norm(x[i]) / np.linalg.norm(y[j]) / 0.5 for j in range(batch)]
        want.append(-log_softmax(row)[i])
    close(losses.contrastive(tensor(x), tensor(y), 0.5), want)


def test_pairs_that_belong_together_cost_nothing_and_guessing_costs_log_b():
    x = torch.eye(4)
    assert losses.contrastive(x, x, 0.01).max() < 1e-6
    torch.testing.assert_close(losses.contrastive(x, torch.ones(4, 4)), torch.full((4,), math.log(4.0)))


@sizes
@few
def test_labels_are_matched_as_by_trying_all_orders(seed, batch, n):
    rng = np.random.default_rng(seed)
    logits, label = rng.normal(size=(batch, n)) * 2, rng.integers(n, size=batch)

    def loss(order):
        return sum(-log_softmax(logits[k])[order[k]] for k in range(batch))

    want = min(loss(order) for order in itertools.permutations(label))
    got = losses.match_labels(tensor(logits), tensor(label)).tolist()
    assert sorted(got) == sorted(label.tolist())
    assert math.isclose(loss(got), want, rel_tol=1e-9)


@sizes
@few
def test_kl_of_categoricals_equals_a_loop(seed, batch, n):
    rng = np.random.default_rng(seed)
    a, b = rng.normal(size=(2, batch, n))
    want = []
    for i in range(batch):
        p, q = log_softmax(a[i]), log_softmax(b[i])
        want.append(sum(math.exp(x) * (x - y) for x, y in zip(p, q, strict=True)))
    close(losses.categorical_kl(tensor(a), tensor(b)), want)
    close(losses.categorical_kl(tensor(a), tensor(a)), np.zeros(batch))


def test_noise_that_remembers():
    """By hand, and its standard deviation in the long run: sigma^2 dt / (1 - (1 - theta dt)^2)."""
    got = transforms.ornstein_uhlenbeck(np.array([2.0]), np.array([1.0]), mu=1.0, sigma=0.4, theta=0.5, dt=0.25)
    close(got, [2.0 - 0.125 + 0.2])
    rng, x = np.random.default_rng(0), np.zeros(4000)
    for _ in range(400):
        x = transforms.ornstein_uhlenbeck(x, rng.standard_normal(4000), sigma=0.3, theta=1.0, dt=0.05)
    assert math.isclose(x.std(), 0.3 * math.sqrt(0.05 / (1 - 0.95**2)), rel_tol=0.05)


# All of them


@pytest.mark.parametrize("module", [losses, returns, transforms], ids=lambda m: m.__name__.rpartition(".")[2])
def test_every_function_is_described_and_tested(module):
    tests = "".join(path.read_text() for path in sorted(Path(__file__).parents[1].rglob("test_*.py")))
    named = set(re.findall(r"\b(\w+)[(,]|\"(\w+)\"", tests))
    named = {name for names in named for name in names}
    found = {n: f for n, f in vars(module).items() if inspect.isfunction(f) and f.__module__ == module.__name__}
    public = {n: f for n, f in found.items() if not n.startswith("_")}
    assert [n for n, f in public.items() if not inspect.getdoc(f)] == []
    assert sorted(public.keys() - named) == []
