"""The mathematics against independent float64 loops and against numbers worked by hand."""

import math

import numpy as np
import pytest
import torch

from bray import distributions
from bray.act.epsilon_greedy import epsilon_greedy
from bray.rl import losses, returns
from bray.spec import ActionLayout, Space

DISCRETE3 = ActionLayout(Space("discrete", n=(3,), start=(0,)))
MULTI = ActionLayout(Space("multi_discrete", (2,), "int64", n=(2, 3), start=(0, 0)))
BOX2 = ActionLayout(Space("box", (2,), "float32", -1.0, 1.0))
MIXED = ActionLayout(
    Space(
        "dict",
        parts=(Space("discrete", n=(3,), start=(0,)), Space("box", (2,), "float32", -1.0, 1.0)),
        names=("a", "b"),
    )
)


def slow_gae(value, reward, terminated, truncated, valid, gamma, lam):
    """By the definition: A_t = sum_k (gamma lam)^k delta_{t+k}, k running to the end of t's own episode."""
    steps, batch = reward.shape
    out = np.zeros((steps, batch))
    for b in range(batch):
        for t in range(steps):
            if not valid[t, b]:
                continue
            scale, k = 1.0, t
            while True:
                if not valid[k, b]:  # a row that waits is no step: the next one holds the same observation
                    k += 1
                    if k == steps:
                        break
                    continue
                v_next = 0.0 if terminated[k, b] else float(value[k + 1, b])
                out[t, b] += scale * (float(reward[k, b]) + gamma * v_next - float(value[k, b]))
                if terminated[k, b] or truncated[k, b] or k + 1 == steps:
                    break
                scale *= gamma * lam
                k += 1
    return out


@pytest.mark.parametrize("seed", range(5))
def test_gae_equals_its_definition(seed):
    rng = np.random.default_rng(seed)
    steps, batch = 40, 6
    value = rng.normal(size=(steps + 1, batch)).astype(np.float32)
    reward = rng.normal(size=(steps, batch)).astype(np.float32)
    end = rng.random((steps, batch)) < 0.15
    cut = rng.random((steps, batch)) < 0.5
    terminated, truncated = end & ~cut, end & cut
    valid = np.ones((steps, batch), bool)
    valid[1:] = ~end[:-1]  # the row after an end is dead
    terminated &= valid
    truncated &= valid
    valid[1:] = ~(terminated | truncated)[:-1]
    got = returns.gae(value, reward, terminated, truncated, valid, 0.97, 0.9)
    np.testing.assert_allclose(
        got, slow_gae(value, reward, terminated, truncated, valid, 0.97, 0.9), rtol=1e-4, atol=1e-5
    )


def test_gae_by_hand():
    """Two steps, gamma 0.5, lambda 0.5. Terminated: A1 = 2 - 3 = -1, A0 = 1 + 0.5*3 - 2 + 0.25*(-1) = 0.25.
    Truncated with a final value 4: A1 = 2 + 0.5*4 - 3 = 1, A0 = 0.5 + 0.25*1 = 0.75."""
    value = np.array([[2.0], [3.0], [4.0]], np.float32)
    reward = np.array([[1.0], [2.0]], np.float32)
    no, last, valid = np.zeros((2, 1), bool), np.array([[False], [True]]), np.ones((2, 1), bool)
    assert returns.gae(value, reward, last, no, valid, 0.5, 0.5).ravel().tolist() == [0.25, -1.0]
    assert returns.gae(value, reward, no, last, valid, 0.5, 0.5).ravel().tolist() == [0.75, 1.0]


def test_gae_two_episodes_in_one_trace_equal_two_traces():
    rng = np.random.default_rng(0)
    value, reward = rng.normal(size=(9, 1)).astype(np.float32), rng.normal(size=(8, 1)).astype(np.float32)
    no, valid = np.zeros((8, 1), bool), np.ones((8, 1), bool)
    truncated = no.copy()
    truncated[3] = True
    valid[4] = False
    whole = returns.gae(value, reward, no, truncated, valid, 0.9, 0.8)
    first = returns.gae(value[:5], reward[:4], no[:4], truncated[:4], valid[:4], 0.9, 0.8)
    second = returns.gae(value[5:], reward[5:], no[5:], no[5:], valid[5:], 0.9, 0.8)
    np.testing.assert_allclose(whole, np.concatenate([first, [[0.0]], second]), rtol=1e-6)


def waiting_rows(rng, column, most=3):
    """Where each row of one environment comes from when up to `most` waiting rows are put before each (and before the
    last value)."""
    return np.concatenate([np.full(1 + rng.integers(0, most + 1), t) for t in range(column)])


@pytest.mark.parametrize("seed", range(5))
def test_gae_sees_through_rows_that_wait(seed):
    """An environment that is waited for gives the advantages that it gives when nobody waits: also where its next
    episode is waited for (several dead rows), where it ends while others wait, and where the last rows of the rollout
    wait."""
    rng = np.random.default_rng(seed)
    steps = 30
    value, reward = rng.normal(size=(steps + 1, 1)).astype(np.float32), rng.normal(size=(steps, 1)).astype(np.float32)
    ends = np.array([[i in (4, 9, 17, 26)] for i in range(steps)])  # each is followed by a dead row
    cut = rng.random((steps, 1)) < 0.5
    terminated, truncated, valid = ends & ~cut, ends & cut, np.ones((steps, 1), bool)
    valid[1:] = ~ends[:-1]
    plain = returns.gae(value, reward, terminated, truncated, valid, 0.97, 0.9)

    at = waiting_rows(rng, steps + 1)
    at = at[: np.flatnonzero(at == steps)[-1] + 1]  # value rows; those of the rest are one fewer
    assert len(at) > 1.5 * steps
    rows = at[:-1]
    here = np.append(rows[:-1] != rows[1:], rows[-1] != steps)  # the result comes in the last of equal rows
    here &= rows < steps
    rows = np.minimum(rows, steps - 1)
    there = here[:, None]
    inserted = (
        value[at],
        np.where(there, reward[rows], 0.0).astype(np.float32),
        terminated[rows] & there,
        truncated[rows] & there,
        valid[rows] & there,
    )
    got = returns.gae(*inserted, 0.97, 0.9)
    np.testing.assert_array_equal(got[here], plain)
    assert (got[~here] == 0.0).all()
    np.testing.assert_allclose(got, slow_gae(*inserted, 0.97, 0.9), rtol=1e-4, atol=1e-5)


def test_gae_needs_one_more_value():
    with pytest.raises(ValueError, match="one row more"):
        returns.gae(np.zeros((3, 1)), np.zeros((3, 1)), *[np.zeros((3, 1), bool)] * 3, 0.9, 0.9)


def test_categorical_draws_follow_the_softmax():
    rng = np.random.default_rng(0)
    logits = np.tile(np.array([[1.0, 0.0, -1.0]], np.float32), (100_000, 1))
    action, logp = distributions.sample(DISCRETE3, logits, rng)
    p = np.exp(logits[0].astype(np.float64))
    p /= p.sum()
    observed = np.bincount(action, minlength=3)
    assert ((observed - 1e5 * p) ** 2 / (1e5 * p)).sum() < 18.4  # chi-square, 2 degrees of freedom, p = 0.0001
    np.testing.assert_allclose(logp, np.log(p)[action], rtol=1e-5)


def test_masked_actions_are_never_drawn_and_greedy_is_the_best_legal_one():
    rng = np.random.default_rng(0)
    logits = np.tile(np.array([[9.0, 0.0, 1.0]], np.float32), (1000, 1))
    mask = np.tile(np.array([[False, True, True]]), (1000, 1))
    action, logp = distributions.sample(DISCRETE3, logits, rng, mask)
    assert set(action) == {1, 2}
    np.testing.assert_allclose(logp[action == 2][0], -math.log1p(math.exp(-1)), rtol=1e-5)
    assert distributions.sample(DISCRETE3, logits[:1], None, mask[:1])[0].tolist() == [2]
    assert distributions.sample(DISCRETE3, logits[:1], None)[0].tolist() == [0]


@pytest.mark.parametrize("layout", [MULTI, BOX2, MIXED], ids=["multi", "box", "mixed"])
def test_log_probability_of_a_draw_equals_the_learners(layout):

    rng = np.random.default_rng(1)
    dist = rng.normal(size=(64, layout.num_params)).astype(np.float32)
    action, logp = distributions.sample(layout, dist, rng)
    theirs = distributions.log_prob_entropy(layout, torch.from_numpy(dist), torch.from_numpy(action))[0]
    np.testing.assert_allclose(logp, theirs.numpy(), rtol=1e-4, atol=1e-4)
    assert action.shape == (64, layout.size)
    assert action.dtype == layout.dtype


def test_per_part_masks():
    rng = np.random.default_rng(0)
    dist = np.zeros((500, 5), np.float32)
    mask = np.tile(np.array([[True, False, False, True, True]]), (500, 1))
    action, _ = distributions.sample(MULTI, dist, rng, mask)
    assert set(action[:, 0]) == {0}
    assert set(action[:, 1]) == {1, 2}


def test_epsilon_greedy_explores_per_row_and_respects_masks():
    rng = np.random.default_rng(0)
    q = np.tile(np.array([[0.0, 3.0, 1.0, 2.0]]), (20_000, 1))
    action = epsilon_greedy(q, 0.4, rng)
    assert abs((action == 1).mean() - (0.6 + 0.1)) < 0.015
    mask = np.tile(np.array([[True, False, False, True]]), (20_000, 1))
    action = epsilon_greedy(q, 0.4, rng, mask)
    assert set(action) == {0, 3}
    assert abs((action == 3).mean() - 0.8) < 0.015
    assert set(epsilon_greedy(q, 0.4, None)) == {1}


def test_ppo_clip_by_hand():
    logp_old = torch.zeros(4)
    logp = torch.log(torch.tensor([1.5, 1.5, 0.5, 0.5]))
    advantage = torch.tensor([2.0, -2.0, 2.0, -2.0])
    loss, ratio = losses.ppo_clip(logp, logp_old, advantage, 0.2)
    torch.testing.assert_close(loss, torch.tensor([-2.4, 3.0, -1.0, 1.6]))
    torch.testing.assert_close(ratio, torch.tensor([1.5, 1.5, 0.5, 0.5]))
    torch.testing.assert_close(losses.clipped_surrogate(ratio, advantage, 0.2), loss)
    # dual clip bounds the loss at -c A for negative advantages only
    far = torch.log(torch.tensor([10.0, 10.0]))
    loss, _ = losses.ppo_clip(far, torch.zeros(2), torch.tensor([1.0, -1.0]), 0.2, dual_clip=3.0)
    torch.testing.assert_close(loss, torch.tensor([-1.2, 3.0]))


def test_value_loss_takes_the_larger_of_clipped_and_not():
    value, target, old = torch.tensor([2.0, 0.1]), torch.tensor([0.0, 1.0]), torch.tensor([0.0, 0.0])
    torch.testing.assert_close(losses.value_loss(value, target), torch.tensor([2.0, 0.405]))
    torch.testing.assert_close(losses.value_loss(value, target, old, 0.2), torch.tensor([2.0, 0.405]))
    torch.testing.assert_close(
        losses.value_loss(torch.tensor([1.0]), torch.tensor([1.0]), torch.tensor([0.0]), 0.2), torch.tensor([0.32])
    )


def test_standardize_ignores_dead_rows():
    x = np.array([1.0, 2.0, 3.0, 1e6], np.float32)
    z = returns.standardize(x, np.array([True, True, True, False]))
    np.testing.assert_allclose(z[:3], [-1.2247449, 0.0, 1.2247449], rtol=1e-5)


@pytest.mark.parametrize("value", [0.1, 0.7, 3.3, -100.3])
def test_standardize_of_numbers_that_are_equal_but_for_rounding_is_zero(value):
    x = np.full(997, value, np.float32)
    assert not returns.standardize(x, np.ones(997, bool)).any()
    x[:500] = np.nextafter(x[0], np.float32(1e9))
    assert not returns.standardize(x, np.ones(997, bool)).any()
    x[:500] = 1.001 * x[0]
    assert returns.standardize(x, np.ones(997, bool)).std() == pytest.approx(1.0, rel=1e-3)


def test_td_error_and_huber():
    error = losses.td_error(
        torch.tensor([1.0, 1.0]), torch.tensor([0.5, 3.0]), torch.tensor([0.9, 0.0]), torch.tensor([2.0, 7.0])
    )
    torch.testing.assert_close(error, torch.tensor([-1.3, -2.0]))
    torch.testing.assert_close(losses.huber(torch.tensor([0.5, -3.0])), torch.tensor([0.125, 2.5]))


def test_td_target_carries_no_gradient():
    q_next = torch.tensor([2.0], requires_grad=True)
    q = torch.tensor([1.0], requires_grad=True)
    losses.td_error(q, torch.tensor([0.0]), torch.tensor([1.0]), q_next).sum().backward()
    assert q_next.grad is None
