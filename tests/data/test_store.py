"""Buffers of plain objects, and the limit of pushing against sampling."""

import math
import subprocess
import sys

import numpy as np
import pytest

import bray
from bray.data import RateLimit, ReplayRing
from bray.errors import ConfigError, DataError


def test_the_tutorial_of_the_prioritized_buffer_runs():
    """The lines of the tutorial, but for the package's name."""
    from bray.data import PrioritizedBuffer

    buffer_ = PrioritizedBuffer(maxlen=10000)

    # add 10 data
    for _ in range(10):
        buffer_.append({"data": "placeholder"})
    data = buffer_.sample(4)  # sample 4 data

    assert data == [{"data": "placeholder"}] * 4
    assert type(data) is list


def test_a_prioritized_buffer_keeps_the_newest_items():
    buffer = bray.PrioritizedBuffer(maxlen=5, seed=0)
    buffer.extend({"n": n} for n in range(8))
    assert len(buffer) == 5
    assert {item["n"] for _ in range(50) for item in buffer.sample(4)} == {3, 4, 5, 6, 7}
    item = {"n": 8, "obs": np.zeros(3), "text": "any object"}
    buffer.append(item)
    assert any(found is item for found in buffer.sample(50))  # the object itself


def test_a_prioritized_buffer_draws_by_priority():
    """P(i) = (|p_i| + eps)^alpha / sum; weights (N P_i)^-beta over the largest; other priorities, other frequencies."""
    buffer = bray.PrioritizedBuffer(20, alpha=0.7, beta=0.5, eps=0.01, seed=0)
    buffer.extend(range(100, 125))  # items 5 to 24 are there, around the end of the ring
    rng = np.random.default_rng(0)
    for _ in range(2):
        priority = rng.normal(size=20) * 3
        buffer.update_priorities(np.arange(5, 25), priority)
        p = (np.abs(priority) + 0.01) ** 0.7
        p /= p.sum()
        drawn = np.array([item for _ in range(200) for item in buffer.sample(500)])
        assert np.abs(np.bincount(drawn - 105, minlength=20) / 1e5 - p).max() < 1e-3
        items, ids, weights = buffer.sample_weighted(16)
        assert items == (ids + 100).tolist()
        raw = (20 * p[ids - 5]) ** -0.5
        np.testing.assert_allclose(weights, raw / raw.max(), rtol=1e-6)
        assert (buffer.sample_weighted(16, beta=0.0)[2] == 1).all()


def test_new_items_get_the_largest_priority_and_overwritten_ones_none():
    buffer = bray.PrioritizedBuffer(3, alpha=1.0, eps=0.0, seed=0)
    buffer.extend("abc")
    _, ids, _ = buffer.sample_weighted(3)
    assert sorted(ids.tolist()) == [0, 1, 2]
    buffer.update_priorities([0, 1, 2], [4.0, 1.0, 1.0])
    buffer.append("d")  # over "a", with priority 4
    buffer.update_priorities([0], [1000.0])  # too late
    drawn = buffer.sample(600)
    assert [drawn.count(x) for x in "abcd"] == [0, 100, 100, 400]


def test_a_replay_buffer_takes_and_gives_transitions_part_by_part():
    """JoyRL's agent: push at every step, sample columns, none twice, the oldest gone first."""
    buffer = bray.ReplayBuffer(100, seed=0)
    for t in range(130):
        state, next_state = np.array([t, 0.5]), np.array([t + 1, 0.5])
        buffer.push(state, t % 2, float(t), next_state, t == 129)
        assert len(buffer) == min(t + 1, 100)
    states, actions, rewards, next_states, dones = buffer.sample(64)
    assert len(set(rewards)) == 64  # without replacement
    np.testing.assert_array_equal(np.array(states)[:, 0], rewards)
    np.testing.assert_array_equal(np.array(next_states)[:, 0], np.array(rewards) + 1)
    assert [r % 2 for r in rewards] == list(actions)
    assert [r == 129 for r in rewards] == list(dones)
    assert sorted(buffer.sample(100)[2]) == list(range(30, 130))  # the oldest 30 were overwritten
    counts = np.zeros(130, int)
    for _ in range(2000):
        counts[np.array(buffer.sample(10)[2], int)] += 1
    assert counts[:30].sum() == 0
    assert abs(((counts[30:] - 200) ** 2 / (200 * 0.9)).sum() - 99) < 4 * math.sqrt(2 * 99)


def test_seeded_buffers_repeat():
    for make in (lambda seed: bray.ReplayBuffer(50, seed=seed), lambda seed: bray.PrioritizedBuffer(50, seed=seed)):
        draws = []
        for seed in (1, 1, 2):
            buffer = make(seed)
            for n in range(50):
                (buffer.push if hasattr(buffer, "push") else buffer.append)(n)
            draws.append(buffer.sample(20))
        assert draws[0] == draws[1] != draws[2]


def test_wrong_use_of_buffers_is_refused():
    buffer = bray.ReplayBuffer(10)
    with pytest.raises(DataError, match="0 are there: got batch_size 1"):
        buffer.sample(1)
    with pytest.raises(DataError, match="at least one part; got 0"):
        buffer.push()
    buffer.push(1, 2)
    with pytest.raises(DataError, match="2 parts, as the first one; got 3"):
        buffer.push(1, 2, 3)
    with pytest.raises(DataError, match="1 are there: got batch_size 2"):
        buffer.sample(2)
    with pytest.raises(ConfigError, match="capacity is at least 1, got 0"):
        bray.ReplayBuffer(0)
    with pytest.raises(ConfigError, match="maxlen is at least 1"):
        bray.PrioritizedBuffer(0)
    with pytest.raises(ConfigError, match="beta is between 0 and 1"):
        bray.PrioritizedBuffer(10, beta=2.0)
    prioritized = bray.PrioritizedBuffer(10, eps=0.0)
    with pytest.raises(DataError, match="empty"):
        prioritized.sample(1)
    prioritized.append({})
    with pytest.raises(DataError, match="at least 1 item"):
        prioritized.sample(0)
    with pytest.raises(DataError, match="one priority per id"):
        prioritized.update_priorities([0], [1.0, 2.0])
    with pytest.raises(DataError, match="nan at position 0"):
        prioritized.update_priorities([0], [math.nan])
    prioritized.update_priorities([0], [0.0])
    with pytest.raises(DataError, match="all priorities are 0"):
        prioritized.sample(1)


def test_the_plain_buffer_needs_no_compiler():
    code = (
        "import sys, bray; b = bray.ReplayBuffer(4); b.push(1, 2); b.sample(1); print([m for m in ('numba', 'torch') "
        "if m in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.strip() == "[]"


# --- pushing against sampling -----------------------------------------------------------------------------------------


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


def test_counts_decay_by_a_hundredth_per_window():
    """Factor 0.01 ** (1 / window) per second, however often one looks."""
    clock = Clock()
    limit = RateLimit(window=30.0, clock=clock)
    limit.pushed(1000)
    limit.sampled(64)
    clock.now += 1.0
    assert limit.counts() == pytest.approx((1000 * 0.01 ** (1 / 30), 64 * 0.01 ** (1 / 30)))
    for _ in range(290):
        clock.now += 0.1
        limit.may_push()
    assert limit.counts() == pytest.approx((10.0, 0.64))
    limit.pushed(5)
    assert limit.counts() == pytest.approx((15.0, 0.64))


def test_actors_wait_while_more_is_pushed_than_allowed():
    clock = Clock()
    limit = RateLimit(most=2.0, window=10.0, clock=clock)
    for _ in range(500):
        assert limit.may_push()  # nothing is drawn yet: the first rows come in freely
        limit.pushed()
    limit.sampled(100)
    assert not limit.may_push()
    clock.now += 3.0
    assert not limit.may_push()  # both counts shrink, their ratio stays
    limit.sampled(64)
    pushed, sampled = limit.counts()
    more = 0
    while limit.may_push():
        limit.pushed()
        more += 1
    assert more == math.floor(2.0 * sampled - pushed) + 1
    clock.now += 100.0  # the learner is gone: what it drew is forgotten
    assert limit.may_push()


def test_the_learner_waits_while_too_little_is_pushed():
    limit = RateLimit(least=0.25, window=10.0, clock=Clock())
    limit.pushed(100)
    draws = 0
    while limit.may_sample():
        limit.sampled(64)
        draws += 64
    assert draws == 448  # the first multiple of 64 beyond 4 draws per row
    limit.pushed(12)
    assert limit.may_sample()


def test_actors_and_a_learner_of_any_pace_keep_the_ratio_and_never_both_wait():
    """Around a replay, the actors ten times faster than the learner and the other way round."""
    rng = np.random.default_rng(0)
    for actors, learner in ((10, 1), (1, 10)):
        clock = Clock()
        limit = RateLimit(least=0.5, most=0.6, window=5.0, clock=clock)
        replay = ReplayRing(1000, 4, {"obs": np.zeros(1, np.float32), "action": np.int64(0)})
        pushed = sampled = 0
        for _ in range(2000):
            clock.now += 0.01
            assert limit.may_push() or limit.may_sample()
            for _ in range(actors):
                if limit.may_push():
                    row = (np.zeros((4, 1), np.float32), np.zeros(4, np.int64), np.zeros(4))
                    replay.add(*row, np.zeros(4, bool), np.zeros(4, bool), np.ones(4, bool))
                    limit.pushed(replay.num_envs)
                    pushed += 4
            for _ in range(learner):
                if limit.may_sample() and len(replay):
                    sampled += len(replay.sample(8, rng)["id"])
                    limit.sampled(8)
        assert 0.49 < pushed / sampled < 0.61
        assert sampled > 10_000


def test_wrong_limits_are_refused():
    for options, message in (
        ({"least": 2.0, "most": 1.0}, "least <= most"),
        ({"least": -1.0}, "least <= most"),
        ({"most": 0.0}, "most > 0"),
        ({"window": 0.0}, "window"),
    ):
        with pytest.raises(ConfigError, match=message):
            RateLimit(**options)
