"""Estimators of what a policy is worth by another one's episodes, against loops over single numbers."""

import numpy as np
import pytest

from bray.rl import off_policy

GAMMA = 0.9


def columns(seed=0, n=7, most=6):
    """Episodes of different lengths, filled up."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, most + 1, n)
    valid = np.arange(lengths.max()) < lengths[:, None]
    reward, q, v = (np.where(valid, rng.normal(size=valid.shape), 0.0) for _ in range(3))
    ratio = np.where(valid, rng.uniform(0.0, 2.5, valid.shape), 1.0)
    return lengths, reward, ratio, q, v


def products(lengths, ratio):
    """w_t of each episode, which stays as it is behind the end."""
    out = np.zeros_like(ratio)
    for i in range(len(lengths)):
        w = 1.0
        for t in range(ratio.shape[1]):
            w *= ratio[i, t] if t < lengths[i] else 1.0
            out[i, t] = w
    return out


def test_importance_sampling_equals_a_loop():
    lengths, reward, ratio, _, _ = columns()
    w, total = products(lengths, ratio), 0.0
    for i, length in enumerate(lengths):
        for t in range(length):
            total += GAMMA**t * w[i, t] * reward[i, t]
    found = off_policy.importance_sampling(reward, ratio, GAMMA, np.random.default_rng(0))
    assert found.value == pytest.approx(total / len(lengths), rel=1e-12)
    assert found.low < found.value < found.high


def test_weighted_importance_sampling_equals_a_loop():
    lengths, reward, ratio, _, _ = columns()
    w, total = products(lengths, ratio), 0.0
    for t in range(ratio.shape[1]):
        total += GAMMA**t * sum(w[i, t] * reward[i, t] for i in range(len(lengths))) / sum(w[:, t])
    found = off_policy.weighted_importance_sampling(reward, ratio, GAMMA, np.random.default_rng(0))
    assert found.value == pytest.approx(total, rel=1e-12)


def test_doubly_robust_equals_a_loop():
    lengths, reward, ratio, q, v = columns()
    total = 0.0
    for i, length in enumerate(lengths):
        value = 0.0
        for t in reversed(range(length)):
            value = v[i, t] + ratio[i, t] * (reward[i, t] + GAMMA * value - q[i, t])
        total += value
    found = off_policy.doubly_robust(reward, ratio, q, v, GAMMA, np.random.default_rng(0))
    assert found.value == pytest.approx(total / len(lengths), rel=1e-12)


def test_weighted_doubly_robust_equals_a_loop():
    lengths, reward, ratio, q, v = columns()
    w, n, total = products(lengths, ratio), len(lengths), 0.0
    for t in range(ratio.shape[1]):
        for i in range(n):
            share = w[i, t] / sum(w[:, t])
            before = 1.0 / n if t == 0 else w[i, t - 1] / sum(w[:, t - 1])
            total += GAMMA**t * (share * (reward[i, t] - q[i, t]) + before * v[i, t])
    found = off_policy.weighted_doubly_robust(reward, ratio, q, v, GAMMA, np.random.default_rng(0))
    assert found.value == pytest.approx(total, rel=1e-12)


def test_values_that_are_right_leave_no_variance():
    """With r + gamma v' = q on every row, doubly robust is v of the start, whatever the ratios."""
    rng = np.random.default_rng(1)
    reward, v = rng.normal(size=(9, 5)), rng.normal(size=(9, 5))
    v[:, 0] = 3.0
    q = reward + GAMMA * np.concatenate([v[:, 1:], np.zeros((9, 1))], 1)
    ratio = rng.uniform(0, 3, (9, 5))
    for of in (off_policy.doubly_robust, off_policy.weighted_doubly_robust):
        found = of(reward, ratio, q, v, GAMMA, np.random.default_rng(0))
        assert found.value == pytest.approx(3.0, rel=1e-9)
        assert found.high - found.low < 1e-9


def test_nobody_did_what_the_policy_would_do():
    reward, ratio = np.ones((3, 2)), np.zeros((3, 2))
    found = off_policy.weighted_importance_sampling(reward, ratio, GAMMA, np.random.default_rng(0))
    assert found == (0.0, 0.0, 0.0)


def chain(seed, episodes=300):
    """Random play on a chain of three states: action 1 goes right, 0 stays; leaving it on the right is worth 1."""
    rng, out = np.random.default_rng(seed), []
    for _ in range(episodes):
        state, rows = 0, []
        while state < 3:
            action = int(rng.random() < 0.5)
            after = state + action
            rows.append((state, action, float(after == 3), after))
            state = after
        out.append(rows)
    return out


def test_fitted_q_of_a_chain_is_its_value():
    """A policy that goes right with probability 0.8: V(s) = p (r + gamma V(s + 1)) / (1 - (1 - p) gamma)."""
    p, data = 0.8, chain(0)
    value = [0.0] * 4
    for s in (2, 1, 0):
        value[s] = p * ((s == 2) + GAMMA * value[s + 1]) / (1 - (1 - p) * GAMMA)

    def expected(s):
        return np.concatenate([(1 - p) * np.eye(4)[s], p * np.eye(4)[s]])

    rows = [(i, *row) for i, episode in enumerate(data) for row in episode]
    x = np.array([np.eye(8)[4 * a + s] for _, s, a, _, _ in rows])
    x_next = np.array([expected(after) for *_, after in rows])
    discount = np.array([GAMMA * (after < 3) for *_, after in rows])
    start = np.array([expected(0) for _ in data])
    reward, episode = np.array([r for *_, r, _ in rows]), np.array([row[0] for row in rows])
    fit = off_policy.fitted(x, x_next, reward, discount, episode, start)
    found = off_policy.fitted_q_evaluation(fit, 100, np.random.default_rng(0), 20)
    assert found.value == pytest.approx(value[0], rel=0.02)  # the ridge makes it a little smaller
    w = off_policy.fitted_q(fit, np.ones(len(data)), 100, ridge=1e-6)
    for s in range(3):
        assert expected(s) @ w == pytest.approx(value[s], rel=1e-3)


def test_intervals_hold_the_true_value_as_often_as_they_say():
    """The chain again, by importance sampling: 95 of 100 data sets, but for chance."""
    p, inside = 0.8, 0
    value = 0.0
    for s in (2, 1, 0):
        value = p * ((s == 2) + GAMMA * value) / (1 - (1 - p) * GAMMA)
    for seed in range(100):
        data = chain(seed, 60)
        most = max(map(len, data))
        reward, ratio = np.zeros((60, most)), np.ones((60, most))
        for i, rows in enumerate(data):
            for t, (_, a, r, _) in enumerate(rows):
                reward[i, t], ratio[i, t] = r, (p if a else 1 - p) / 0.5
        found = off_policy.importance_sampling(reward, ratio, GAMMA, np.random.default_rng(seed))
        inside += found.low <= value <= found.high
    assert inside >= 88
