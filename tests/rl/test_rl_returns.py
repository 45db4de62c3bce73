"""Returns and traces over `[T, B]` against independent float64 loops, numbers worked by hand, and what must hold of
them."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from bray.rl import returns

GAMMA, LAMBDA = 0.9, 0.8
FLAGS = ("terminated", "truncated", "valid")


def columns(seed, steps, batch):
    """Random episodes under the rule of pieces: the row behind an end holds the final observation and is not valid."""
    rng = np.random.default_rng(seed)
    ends = rng.random((steps, batch)) < 0.2
    for t in range(1, steps):
        ends[t] &= ~ends[t - 1]
    cut, valid = rng.random((steps, batch)) < 0.5, np.ones((steps, batch), bool)
    valid[1:] = ~ends[:-1]
    return {
        "value": rng.normal(size=(steps + 1, batch)),
        "reward": rng.normal(size=(steps, batch)),
        "terminated": ends & ~cut,
        "truncated": ends & cut,
        "valid": valid,
    }


def ratios(c, seed):
    return np.exp(np.random.default_rng(seed + 1).normal(size=c["reward"].shape))


def loop(c, step):
    """G[t, b] for each valid row, from the back: step(t, b, v_next, following) where `following` is None behind the
    last step of an episode or of the piece, else the index of the next row."""
    steps, batch = c["reward"].shape
    out = np.full((steps, batch), np.nan)
    for b in range(batch):
        for t in reversed(range(steps)):
            if c["valid"][t, b]:
                v_next = 0.0 if c["terminated"][t, b] else c["value"][t + 1, b]
                last = c["terminated"][t, b] or c["truncated"][t, b] or t + 1 == steps
                out[t, b] = step(t, b, v_next, None if last else t + 1, out)
    return out


def slow_lambda(c, lambda_of):
    def step(t, b, v_next, following, out):
        lam = lambda_of(t, b)
        mixed = v_next if following is None else (1 - lam) * v_next + lam * out[following, b]
        return c["reward"][t, b] + GAMMA * mixed

    return loop(c, step)


def slow_n_step(c, n):
    steps, batch = c["reward"].shape
    out = np.full((steps, batch), np.nan)
    for t, b in np.argwhere(c["valid"]):
        total, scale, k = 0.0, 1.0, t
        while True:
            total += scale * c["reward"][k, b]
            scale *= GAMMA
            if c["terminated"][k, b]:
                break
            k += 1
            if c["truncated"][k - 1, b] or k == steps or k - t == n:
                total += scale * c["value"][k, b]
                break
        out[t, b] = total
    return out


def slow_vtrace(c, ratio, rho_clip, c_clip, pg_clip, lam):
    def step(t, b, v_next, following, out):
        rho, trace = min(rho_clip, ratio[t, b]), lam * min(c_clip, ratio[t, b])
        delta = rho * (c["reward"][t, b] + GAMMA * v_next - c["value"][t, b])
        more = 0.0 if following is None else GAMMA * trace * (out[following, b] - v_next)
        return c["value"][t, b] + delta + more

    vs = loop(c, step)

    def gain(t, b, v_next, following, out):
        vs_next = v_next if following is None else vs[following, b]
        return min(pg_clip, ratio[t, b]) * (c["reward"][t, b] + GAMMA * vs_next - c["value"][t, b])

    return vs, loop(c, gain)


def slow_retrace(c, q, ratio, lam):
    def step(t, b, v_next, following, out):
        correction = 0.0
        if following is not None:
            correction = lam * min(1.0, ratio[following, b]) * (out[following, b] - q[following, b])
        return c["reward"][t, b] + GAMMA * (v_next + correction)

    return loop(c, step)


def better_than_expected(c):
    def lambda_of(t, b):
        behind = [i for i in range(t + 1, len(c["reward"])) if c["valid"][i, b]]
        if not behind:
            return 1.0
        i = behind[0]
        v_next = 0.0 if c["terminated"][i, b] else c["value"][i + 1, b]
        return float(c["reward"][i, b] + GAMMA * v_next >= c["value"][i, b])

    return lambda_of


def both(function, c, *args, **options):
    """The function on numpy arrays and on tensors, its inputs unchanged after it; the two results agree."""
    before = {k: v.copy() for k, v in c.items()}
    ours = function(*c.values(), *args, **options)
    for k in c:
        np.testing.assert_array_equal(c[k], before[k])

    def torched(x):
        return torch.from_numpy(x) if isinstance(x, np.ndarray) else x

    theirs = function(*(torched(x) for x in c.values()), *(torched(x) for x in args), **options)
    for a, b in zip(
        ours if isinstance(ours, tuple) else [ours], theirs if isinstance(theirs, tuple) else [theirs], strict=True
    ):
        np.testing.assert_allclose(a, b.numpy(), rtol=1e-9, atol=1e-9)
    return ours


def equal_where_valid(got, want, c):
    np.testing.assert_allclose(got[c["valid"]], want[c["valid"]], rtol=1e-9, atol=1e-9)


shapes = given(seed=st.integers(0, 2**32 - 1), steps=st.integers(1, 33), batch=st.integers(1, 4))
few = settings(max_examples=25, deadline=None)


@shapes
@few
def test_lambda_returns_equal_a_loop(seed, steps, batch):
    c = columns(seed, steps, batch)
    equal_where_valid(both(returns.lambda_returns, c, GAMMA, LAMBDA), slow_lambda(c, lambda t, b: LAMBDA), c)
    per_row = np.random.default_rng(seed).random((steps, batch))
    got = both(returns.lambda_returns, c, GAMMA, per_row)
    equal_where_valid(got, slow_lambda(c, lambda t, b: per_row[t, b]), c)


@shapes
@few
def test_gae_of_tensors_equals_that_of_arrays(seed, steps, batch):
    c = columns(seed, steps, batch)
    want = returns.gae(*c.values(), GAMMA, LAMBDA)  # summed in float64, kept in float32
    got = returns.gae(*(torch.from_numpy(x) for x in c.values()), GAMMA, LAMBDA)
    np.testing.assert_allclose(got.numpy(), want, rtol=1e-5, atol=1e-6)


@shapes
@few
def test_n_step_returns_equal_a_loop(seed, steps, batch):
    c = columns(seed, steps, batch)
    for n in (1, 3, steps):
        equal_where_valid(both(returns.n_step_returns, c, GAMMA, n), slow_n_step(c, n), c)


@shapes
@few
def test_vtrace_equals_a_loop(seed, steps, batch):
    c = columns(seed, steps, batch)
    ratio = ratios(c, seed)
    for clips in ((1.0, 1.0, 1.0), (2.0, 0.7, 1.5)):
        got = both(returns.vtrace, c, ratio, GAMMA, LAMBDA, *clips)
        target, advantage = slow_vtrace(c, ratio, *clips, LAMBDA)
        equal_where_valid(got.target, target, c)
        equal_where_valid(got.advantage, advantage, c)
        assert not got.advantage[~c["valid"]].any()


@shapes
@few
def test_retrace_equals_a_loop(seed, steps, batch):
    c = columns(seed, steps, batch)
    ratio, q = ratios(c, seed), np.random.default_rng(seed + 2).normal(size=c["reward"].shape)
    got = both(returns.retrace, {"q": q} | c, ratio, GAMMA, LAMBDA)
    equal_where_valid(got, slow_retrace(c, q, ratio, LAMBDA), c)
    np.testing.assert_array_equal(got[~c["valid"]], q[~c["valid"]])


@shapes
@few
def test_upgo_returns_equal_a_loop(seed, steps, batch):
    c = columns(seed, steps, batch)
    equal_where_valid(both(returns.upgo_returns, c, GAMMA), slow_lambda(c, better_than_expected(c)), c)


def one_column(**given_columns):
    c = {k: np.array(v, np.float64)[:, None] for k, v in given_columns.items() if k in ("value", "reward")}
    steps = len(c["reward"])
    for flag in FLAGS:
        c[flag] = np.array(given_columns.get(flag, [flag == "valid"] * steps), bool)[:, None]
    return c


def test_returns_by_hand():
    """gamma 0.5; rewards 1, 2, 4; values 8, 6, 10, 16. One step: 1+3, 2+5, 4+8. Two: 1+1+2.5, 2+2+4, 4+8. All:
    1+0.5(2+0.5*12), 2+6, 12."""
    c = one_column(value=[8, 6, 10, 16], reward=[1, 2, 4])
    assert returns.n_step_returns(*c.values(), 0.5, 1).ravel().tolist() == [4, 7, 12]
    assert returns.n_step_returns(*c.values(), 0.5, 2).ravel().tolist() == [4.5, 8, 12]
    assert returns.lambda_returns(*c.values(), 0.5, 1.0).ravel().tolist() == [5, 8, 12]
    # Better than expected at row 1 (2 + 5 >= 6) and at row 2 (4 + 8 >= 10): both are followed.
    assert returns.upgo_returns(*c.values(), 0.5).ravel().tolist() == [5, 8, 12]
    worse = one_column(value=[8, 9, 10, 16], reward=[1, 2, 4])  # 2 + 5 < 9: row 0 stops at V
    assert returns.upgo_returns(*worse.values(), 0.5).ravel().tolist() == [5.5, 8, 12]


def test_termination_ends_what_truncation_continues():
    ended = one_column(value=[8, 6, 10], reward=[1, 2], terminated=[False, True])
    cut = one_column(value=[8, 6, 10], reward=[1, 2], truncated=[False, True])
    assert returns.lambda_returns(*ended.values(), 0.5, 1.0).ravel().tolist() == [2, 2]
    assert returns.lambda_returns(*cut.values(), 0.5, 1.0).ravel().tolist() == [4.5, 7]
    assert returns.n_step_returns(*ended.values(), 0.5, 5).ravel().tolist() == [2, 2]
    assert returns.n_step_returns(*cut.values(), 0.5, 5).ravel().tolist() == [4.5, 7]


@shapes
@few
def test_vtrace_on_policy_with_lambda_one_is_the_return(seed, steps, batch):
    c = columns(seed, steps, batch)
    got = returns.vtrace(*c.values(), np.ones((steps, batch)), GAMMA)
    equal_where_valid(got.target, returns.n_step_returns(*c.values(), GAMMA, steps), c)
    equal_where_valid(got.advantage, got.target - c["value"][:-1], c)


@shapes
@few
def test_lambda_zero_is_one_step_and_lambda_one_all_of_them(seed, steps, batch):
    c = columns(seed, steps, batch)
    for lambda_, n in ((0.0, 1), (1.0, steps)):
        got = returns.lambda_returns(*c.values(), GAMMA, lambda_)
        equal_where_valid(got, returns.n_step_returns(*c.values(), GAMMA, n), c)


FUNCTIONS = {
    "lambda_returns": lambda c, ratio, q: returns.lambda_returns(*c.values(), GAMMA, LAMBDA),
    "n_step_returns": lambda c, ratio, q: returns.n_step_returns(*c.values(), GAMMA, 3),
    "vtrace": lambda c, ratio, q: returns.vtrace(*c.values(), ratio, GAMMA).target,
    "retrace": lambda c, ratio, q: returns.retrace(q, *c.values(), ratio, GAMMA),
    "upgo_returns": lambda c, ratio, q: returns.upgo_returns(*c.values(), GAMMA),
}


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("how", ["terminated", "truncated"])
def test_two_episodes_in_one_trace_equal_two_traces(name, how):
    function, rng = FUNCTIONS[name], np.random.default_rng(7)
    c = one_column(value=rng.normal(size=9), reward=rng.normal(size=8))
    c[how][3], c["valid"][4] = True, False
    ratio, q = np.exp(rng.normal(size=(8, 1))), rng.normal(size=(8, 1))
    first = {k: v[: 5 if k == "value" else 4] for k, v in c.items()}
    second = {k: v[5:] for k, v in c.items()}
    whole = function(c, ratio, q)
    np.testing.assert_allclose(whole[:4], function(first, ratio[:4], q[:4]))
    np.testing.assert_allclose(whole[5:], function(second, ratio[5:], q[5:]))


@pytest.mark.parametrize("name", ["lambda_returns", "vtrace", "upgo_returns"])
def test_rows_that_wait_change_nothing(name):
    """A row that repeats the observation of the next step, as of an environment that others wait for, is passed
    over."""
    function, rng = FUNCTIONS[name], np.random.default_rng(8)
    c = one_column(value=rng.normal(size=6), reward=rng.normal(size=5))
    ratio = np.exp(rng.normal(size=(5, 1)))
    at = np.array([0, 1, 1, 1, 2, 3, 4])
    waiting = {k: v[np.append(at, 5) if k == "value" else at] for k, v in c.items()}
    waiting["valid"] = np.array([True, False, False, True, True, True, True])[:, None]
    got = function(waiting, ratio[at], None)
    np.testing.assert_allclose(got[waiting["valid"]], function(c, ratio, None).ravel())


def test_standardised_rows_of_which_none_counts_are_zero():
    got = returns.standardize(np.full((2, 3), 7.0), np.zeros((2, 3), bool))
    assert got.tolist() == [[0.0] * 3] * 2
    assert got.dtype == np.float32


def test_gradients_flow_through_tensors():
    x = torch.randn(7, 2, dtype=torch.float64, requires_grad=True)
    decay = torch.rand(7, 2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(returns.discounted_sum, (x, decay))


def test_a_value_for_every_row_and_one_behind_is_asked_for():
    c = one_column(value=[1, 2], reward=[1, 2])
    for function in FUNCTIONS.values():
        with pytest.raises(ValueError, match="value needs one row more than reward, got 2 and 2"):
            function(c, np.ones((2, 1)), np.ones((2, 1)))
