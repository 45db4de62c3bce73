"""ReplayRing: what is sampled, how often, and with which numbers. The reference is a plain loop over the whole
history."""

import subprocess
import sys

import numpy as np
import pytest

from bray.data import ReplayRing
from bray.data.prioritized import SumTree
from bray.errors import ConfigError, DataError, UnknownName

GAMMA = 0.9


class Stream:
    """Rows of B environments under the next-step autoreset rule, with every row ever made kept in lists."""

    def __init__(self, num_envs: int, seed: int, end: float = 0.2, frames: str | None = None):
        self.rng, self.n, self.end, self.padding = np.random.default_rng(seed), num_envs, end, frames
        self.rows: list[dict] = []
        self.dead = np.zeros(num_envs, bool)
        self.first = np.ones(num_envs, bool)
        self.stack = np.zeros((num_envs, 4, 3, 2), np.uint8)

    def obs(self) -> np.ndarray:
        if self.padding is None:
            t = len(self.rows)
            return np.array([[t, b, t * 100 + b] for b in range(self.n)], np.float32)
        frames = self.rng.integers(1, 255, (self.n, 3, 2), np.uint8)
        self.stack = np.concatenate([self.stack[:, 1:], frames[:, None]], 1)
        for b in np.flatnonzero(self.first):
            padding = self.padding if self.padding != "mixed" else str(self.rng.choice(["zeros", "repeat", "real"]))
            if padding == "zeros":
                self.stack[b, :-1] = 0
            elif padding == "repeat":
                self.stack[b, :-1] = frames[b]
            else:
                self.stack[b, :-1] = self.rng.integers(0, 255, (3, 3, 2), np.uint8)
        return self.stack.copy()

    def next(self) -> dict:
        n, rng = self.n, self.rng
        valid = ~self.dead
        ends = valid & (rng.random(n) < self.end)
        terminated = ends & (rng.random(n) < 0.5)
        row = {
            "obs": self.obs(),
            "action": rng.integers(0, 5, n),
            "reward": np.where(valid, rng.normal(size=n), 0).astype(np.float32),
            "terminated": terminated,
            "truncated": ends & ~terminated,
            "valid": valid,
            "logp": rng.normal(size=(n, 2)).astype(np.float32),
        }
        self.rows.append({**row, "first": self.first.copy()})
        self.dead, self.first = ends, ~valid
        return row

    def sampleable(self, window: int) -> set[int]:
        newest = len(self.rows) - 1
        times = range(max(0, newest - window), newest)
        return {t * self.n + b for t in times for b in range(self.n) if self.rows[t]["valid"][b]}

    def expected(self, id: int, n_step: int) -> tuple[float, float, np.ndarray]:
        """n-step reward, discount and bootstrap observation of a transition, in float64."""
        t, b = divmod(id, self.n)
        total, discount = 0.0, 1.0
        for _ in range(n_step):
            if t == len(self.rows) - 1:
                break
            total += discount * float(self.rows[t]["reward"][b])
            discount *= GAMMA
            t += 1
            if self.rows[t - 1]["terminated"][b]:
                discount = 0.0
            if self.rows[t - 1]["terminated"][b] or self.rows[t - 1]["truncated"][b]:
                break
        return total, discount, self.rows[t]["obs"][b]


def make(stream: Stream, capacity: int, **options) -> ReplayRing:
    obs = np.zeros(3, np.float32) if stream.padding is None else np.zeros((4, 3, 2), np.uint8)
    example = {"obs": obs, "action": np.int64(0), "logp": np.zeros(2, np.float32)}
    return ReplayRing(capacity, stream.n, example, gamma=GAMMA, **options)


def fill(replay: ReplayRing, rows: int, end: tuple = ()) -> None:
    """One environment, observation t at row t, no episode ends but at the given rows."""
    no = np.zeros(1, bool)
    for t in range(rows):
        obs, valid = np.full((1, 1), t, np.float32), np.array([t - 1 not in end])
        replay.add(obs, np.zeros(1, np.int64), np.ones(1), np.array([t in end]), no, valid)


def plain(capacity: int, **options) -> ReplayRing:
    return ReplayRing(capacity, 1, {"obs": np.zeros(1, np.float32), "action": np.int64(0)}, **options)


@pytest.mark.parametrize("prioritized", [False, True])
@pytest.mark.parametrize("n_step", [1, 3, 7])
@pytest.mark.parametrize("num_envs", [1, 3])
def test_samples_equal_a_loop_over_the_history(num_envs, n_step, prioritized):
    """Before and after wrap-around, with dead rows, truncation inside windows, and windows that reach the newest
    row."""
    stream = Stream(num_envs, seed=n_step * 10 + num_envs)
    replay = make(stream, 40, n_step=n_step, prioritized=prioritized)
    rng = np.random.default_rng(0)
    for t in range(150):
        replay.add(**stream.next())
        if t % 13 and t not in (1, 2, 40, 41):
            continue
        good = stream.sampleable(replay.window)
        assert len(replay) == len(good)
        if not good:
            with pytest.raises(DataError, match="no transition to sample"):
                replay.sample(1, rng)
            continue
        batch = replay.sample(600, rng)
        assert set(batch["id"].tolist()) == good  # 600 draws of at most 42
        for id, i in zip(*np.unique(batch["id"], return_index=True), strict=True):
            row, b = stream.rows[id // num_envs], id % num_envs
            reward, discount, bootstrap = stream.expected(id, n_step)
            assert batch["reward"][i] == pytest.approx(reward, rel=1e-6, abs=1e-6)
            assert batch["discount"][i] == pytest.approx(discount, rel=1e-6)
            np.testing.assert_array_equal(batch["next_obs"][i], bootstrap)
            np.testing.assert_array_equal(batch["obs"][i], row["obs"][b])
            np.testing.assert_array_equal(batch["logp"][i], row["logp"][b])
            assert batch["action"][i] == row["action"][b]
        assert {k: batch[k].dtype for k in ("reward", "discount", "weight", "id")} == {
            "reward": np.float32,
            "discount": np.float32,
            "weight": np.float32,
            "id": np.int64,
        }


def test_tail_of_a_truncated_episode_bootstraps_with_the_rewards_it_summed():
    """Four transitions, n = 3, gamma 0.5, cut by a time limit: the second one sums three rewards (1 + 2/2 + 3/4), looks
    at the last observation, and discounts it by 0.125. (DI-engine's adder says 0.25.)"""
    replay = plain(10, gamma=0.5, n_step=3)
    for t in range(5):
        flags = (np.zeros(1, bool), np.array([t == 3]), np.array([t < 4]))
        replay.add(np.full((1, 1), t, np.float32), np.zeros(1, np.int64), np.full(1, float(t)), *flags)
    batch = replay.sample(200, np.random.default_rng(0))
    table = {
        int(i): (float(r), float(d), float(o))
        for i, r, d, o in zip(batch["id"], batch["reward"], batch["discount"], batch["next_obs"][:, 0], strict=True)
    }
    assert table == {0: (0 + 0.5 + 0.5, 0.125, 3), 1: (1 + 1 + 0.75, 0.125, 4), 2: (2 + 1.5, 0.25, 4), 3: (3, 0.5, 4)}


def test_terminated_rows_do_not_bootstrap():
    replay = plain(10, gamma=0.5, n_step=3)
    fill(replay, 5, end=(2,))
    assert len(replay) == 3
    batch = replay.sample(100, np.random.default_rng(0))
    assert set(batch["discount"].tolist()) == {0.0}
    assert set(batch["reward"].tolist()) == {1.75, 1.5, 1.0}


def chi_square(counts: np.ndarray, p: np.ndarray) -> float:
    """How many standard deviations the statistic lies above its mean."""
    expected = counts.sum() * p
    statistic = float(((counts - expected) ** 2 / expected).sum())
    freedom = len(p) - 1
    return (statistic - freedom) / np.sqrt(2 * freedom)


def test_uniform_draws_are_uniform_over_the_valid_rows():
    stream = Stream(2, seed=5, end=0.4)
    replay = make(stream, 100)
    for _ in range(120):
        replay.add(**stream.next())
    good = sorted(stream.sampleable(replay.window))
    ids = np.concatenate([replay.sample(1000, np.random.default_rng(i))["id"] for i in range(100)])
    values, counts = np.unique(ids, return_counts=True)
    assert values.tolist() == good
    assert abs(chi_square(counts, np.full(len(good), 1 / len(good)))) < 4


def test_prioritized_draws_follow_the_priorities():
    """P(i) = (|p_i| + eps)^alpha / sum, 1e5 draws; other priorities, other frequencies."""
    replay = plain(50, prioritized=True, alpha=0.7, eps=0.01)
    fill(replay, 51)
    rng = np.random.default_rng(1)
    for _ in range(2):
        priority = rng.normal(size=50) * 3
        replay.update_priorities(np.arange(50), priority)
        p = (np.abs(priority) + 0.01) ** 0.7
        p /= p.sum()
        # one draw a batch is one draw from P; stratified batches vary less than independent draws would
        ids = np.concatenate([replay.sample(1, rng)["id"] for _ in range(20_000)])
        assert abs(chi_square(np.bincount(ids, minlength=50), p)) < 4
        ids = np.concatenate([replay.sample(500, rng)["id"] for _ in range(200)])
        assert chi_square(np.bincount(ids, minlength=50), p) < 4
        assert np.abs(np.bincount(ids, minlength=50) / 1e5 - p).max() < 1e-3


def test_importance_weights_equal_the_formula():
    """(N P_i)^-beta over the largest of the batch; uniform replay has ones."""
    replay = plain(30, prioritized=True, alpha=0.6, beta=0.4, eps=1e-5)
    fill(replay, 31)
    priority = np.linspace(0.1, 5, 30)
    replay.update_priorities(np.arange(30), priority)
    p = (priority + 1e-5) ** 0.6
    p /= p.sum()
    for beta in (None, 0.0, 1.0):
        batch = replay.sample(16, np.random.default_rng(2), beta=beta)
        raw = (30 * p[batch["id"]]) ** -(0.4 if beta is None else beta)
        np.testing.assert_allclose(batch["weight"], raw / raw.max(), rtol=1e-6)
    uniform = plain(30)
    fill(uniform, 31)
    assert (uniform.sample(16, np.random.default_rng(2))["weight"] == 1).all()


def priorities(replay):
    """Of every stored row, as a checkpoint would hold them."""
    return replay.get_state()["priority"].tolist()


def test_new_rows_get_the_largest_priority_and_the_newest_none():
    replay = plain(4, prioritized=True, alpha=1.0, eps=0.0)
    fill(replay, 3)
    replay.update_priorities([0, 1], [5.0, 0.5])
    fill(replay, 1)
    assert priorities(replay) == [5.0, 0.5, 5.0, 0.0]
    fill(replay, 2)  # row 0 is overwritten by the newest one
    assert priorities(replay) == [0.0, 0.5, 5.0, 5.0, 5.0]


def test_priorities_of_overwritten_rows_are_ignored_and_counted():
    replay = plain(4, prioritized=True, alpha=1.0, eps=0.0)
    fill(replay, 5)
    old = replay.sample(64, np.random.default_rng(0))["id"]
    fill(replay, 3)  # ids 0, 1, 2 are gone
    changed = priorities(replay)
    replay.update_priorities(old, np.where(old < 3, 100.0, 0.25))
    assert replay.late_updates == int((old < 3).sum()) > 0
    changed[3] = 0.25
    assert priorities(replay) == changed
    assert replay.max_priority == 1.0


def test_rows_retire_after_max_use():
    for prioritized in (False, True):
        replay = plain(20, max_use=3, prioritized=prioritized)
        fill(replay, 21)
        rng = np.random.default_rng(0)
        drawn = np.zeros(20, int)
        while len(replay):
            id = int(replay.sample(1, rng)["id"][0])
            drawn[id] += 1
            if prioritized:
                replay.update_priorities([id], [9.0])  # must not bring a retired row back
        assert drawn.tolist() == [3] * 20
        with pytest.raises(DataError, match="no transition"):
            replay.sample(1, rng)
        fill(replay, 2)
        assert len(replay) == 2
        assert set(replay.sample(4, rng)["id"].tolist()) <= {20, 21}


@pytest.mark.parametrize("prioritized", [False, True])
def test_rows_that_came_max_staleness_versions_ago_are_not_sampled(prioritized):
    """A learner that publishes at its own pace: what can be drawn is what a loop over the history says, at every
    moment."""
    stream, rng = Stream(2, seed=4), np.random.default_rng(0)
    replay = make(stream, 60, max_staleness=5, prioritized=prioritized)
    came, version, few = [], 0, 0
    for _ in range(300):
        came.append(version)
        replay.add(**stream.next())
        if rng.random() < 0.4:
            version += int(rng.choice([1, 1, 1, 2, 9]))
            replay.advance(version)
        good = sorted(id for id in stream.sampleable(replay.window) if version - came[id // 2] < 5)
        few += len(good) < len(stream.sampleable(replay.window))
        assert replay.ids().tolist() == good
        assert len(replay) == len(good)
        if good:
            batch = replay.sample(400, rng)
            assert set(batch["id"].tolist()) == set(good)
            if prioritized:
                replay.update_priorities(batch["id"], rng.uniform(0.5, 1.0, 400))
        elif len(stream.rows) > 1:
            with pytest.raises(DataError, match="max_staleness leave none"):
                replay.sample(1, rng)
    assert few > 100
    if prioritized:
        before = replay.late_updates
        replay.update_priorities([min(stream.sampleable(replay.window))], [9.0])
        assert replay.late_updates == before + 1  # a stale row stays away
    with pytest.raises(DataError, match="only grow"):
        replay.advance(version - 1)


def test_sequences_leave_out_stale_rows():
    replay = plain(100, max_staleness=1)
    fill(replay, 20)
    replay.advance(1)
    fill(replay, 8)
    starts = replay.sample_sequences(200, 4, 0, np.random.default_rng(0))["id"][0]
    assert sorted(set(starts.tolist())) == [20, 21, 22, 23]


def test_the_monitor_says_how_used_how_stale_and_how_important_the_drawn_rows_are():
    replay = plain(4, prioritized=True, alpha=1.0, eps=0.0, monitor=True)
    rng = np.random.default_rng(0)
    assert replay.stats() == {}
    fill(replay, 3)
    replay.advance(10)
    fill(replay, 2)  # rows 0, 1 and 2 came with version 0, row 3 with version 10
    replay.update_priorities(np.arange(4), [0.0, 0.0, 2.0, 6.0])
    batch = replay.sample(8, rng)  # stratified: row 2 twice, row 3 six times
    assert np.bincount(batch["id"]).tolist() == [0, 0, 2, 6]
    assert replay.stats() == {
        "use_mean": (2 * 2 + 6 * 6) / 8,
        "use_max": 6.0,
        "staleness_mean": 10 * 2 / 8,
        "staleness_max": 10.0,
        "priority_mean": (2 * 2.0 + 6 * 6.0) / 8,
        "priority_max": 6.0,
    }
    assert replay.stats() == {}
    replay.update_priorities(np.arange(4), [0.0, 0.0, 1.0, 0.0])
    replay.advance(12)
    replay.sample(3, rng)
    replay.take([0, 1, 2, 3])  # to look is not to draw
    assert replay.stats() == {
        "use_mean": 5.0,
        "use_max": 5.0,
        "staleness_mean": 12.0,
        "staleness_max": 12.0,
        "priority_mean": 1.0,
        "priority_max": 1.0,
    }
    fill(replay, 6)  # all rows are new
    replay.sample(1, rng)
    assert replay.stats()["use_max"] == 1.0
    with pytest.raises(ConfigError, match="monitor=True"):
        plain(4).stats()


def test_the_monitor_looks_at_one_batch_of_sixteen():
    replay = plain(50, monitor=True)
    fill(replay, 51)
    rng = np.random.default_rng(0)
    uses, seen = np.zeros(50, int), []
    for i in range(40):
        ids = replay.sample(10, rng)["id"]
        np.add.at(uses, ids, 1)
        if i in (0, 16, 32):
            seen.append(uses[ids])
    stats = replay.stats()
    assert stats["use_mean"] == pytest.approx(np.mean(seen))
    assert stats["use_max"] == np.max(seen)
    assert "priority_mean" not in stats


# --- parts of the history ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("frames", [None, "mixed"])
@pytest.mark.parametrize("n_step", [1, 3])
def test_transitions_are_taken_by_id(n_step, frames):
    stream = Stream(2, seed=3, frames=frames)
    replay = make(stream, 40, n_step=n_step, max_use=1, frame_stack=4 if frames else None)
    for _ in range(60):
        replay.add(**stream.next())
    ids = replay.ids()
    assert ids.tolist() == sorted(stream.sampleable(replay.window))
    mixed = np.random.default_rng(0).permutation(ids)
    taken = replay.take(mixed)
    assert taken["id"].tolist() == mixed.tolist()
    for i, id in enumerate(mixed):
        reward, discount, bootstrap = stream.expected(id, n_step)
        assert taken["reward"][i] == pytest.approx(reward, rel=1e-6, abs=1e-6)
        assert taken["discount"][i] == pytest.approx(discount, rel=1e-6)
        np.testing.assert_array_equal(taken["next_obs"][i], bootstrap)
        np.testing.assert_array_equal(taken["obs"][i], stream.rows[id // 2]["obs"][id % 2])
    assert len(replay) == len(ids)  # not a draw
    drawn = replay.sample(8, np.random.default_rng(1))
    again = replay.take(drawn["id"])
    assert all((drawn[k] == again[k]).all() for k in drawn)
    assert replay.newest(1000)["id"].tolist() == ids.tolist()  # used up or not
    assert replay.newest(7)["id"].tolist() == ids[-7:].tolist()
    dead = next(t * 2 + b for t in range(45, 59) for b in range(2) if not stream.rows[t]["valid"][b])
    for wrong in (0, 59 * 2, dead, -1):
        with pytest.raises(DataError, match=f"transition {wrong} is not in the replay"):
            replay.take([int(ids[0]), wrong])


def test_a_view_draws_from_its_part_of_the_history_and_shares_the_storage():
    stream, rng = Stream(2, seed=6), np.random.default_rng(0)
    replay = make(stream, 60)
    newest, oldest = replay.view(slice(-10, None)), replay.view(slice(0, 5))
    for _ in range(80):
        replay.add(**stream.next())
        rows = len(stream.rows)
        good = [id for id in sorted(stream.sampleable(replay.window)) if id // 2 >= rows - 1 - 10]
        assert newest.ids().tolist() == good
        assert len(newest) == len(good)
        if good:
            batch = newest.sample(200, rng)
            assert set(batch["id"].tolist()) == set(good)
            i = int(batch["id"].argmax())
            np.testing.assert_array_equal(batch["next_obs"][i], stream.expected(batch["id"][i], 1)[2])
    first = len(stream.rows) - 1 - replay.window
    assert {id // 2 for id in oldest.sample(200, rng)["id"].tolist()} <= set(range(first, first + 5))
    everything = replay.view(slice(None))
    a, b = (x.sample(30, np.random.default_rng(1)) for x in (everything, replay))
    assert all((a[k] == b[k]).all() for k in a)
    starts = newest.sample_sequences(300, 4, 1, rng)["id"][0] // 2
    assert (starts.min(), starts.max()) == (
        69,
        74,
    )  # rows 69 to 78, and 79 is the newest: the last one's last observation
    with pytest.raises(DataError, match="no transition"):
        replay.view(slice(5, 5)).sample(1, rng)
    with pytest.raises(ConfigError, match="no step"):
        replay.view(slice(0, 10, 2))


def test_views_of_a_prioritized_replay_draw_by_priority_and_count_use():
    replay = plain(50, prioritized=True, alpha=0.7, eps=0.01, beta=0.5, max_use=100_000)
    fill(replay, 71)  # rows 20 to 69, around the end of the ring
    rng = np.random.default_rng(1)
    view = replay.view(slice(-30, None))
    priority = rng.normal(size=30) * 3
    view.update_priorities(np.arange(40, 70), priority)
    p = (np.abs(priority) + 0.01) ** 0.7
    p /= p.sum()
    ids = np.concatenate([view.sample(1, rng)["id"] for _ in range(10_000)])
    assert abs(chi_square(np.bincount(ids - 40, minlength=30), p)) < 4
    batch = view.sample(16, rng)
    raw = p[batch["id"] - 40] ** -0.5
    np.testing.assert_allclose(batch["weight"], raw / raw.max(), rtol=1e-6)
    counted = replay.get_state()["uses"][np.arange(20, 70) % 51]
    assert counted[:20].tolist() == [0] * 20
    np.testing.assert_array_equal(counted[20:], np.bincount(np.append(ids, batch["id"]) - 40, minlength=30))
    replay.update_priorities(np.arange(40, 70), np.zeros(30))
    assert (view.sample(8, rng)["id"] >= 40).all()


@pytest.mark.parametrize("frames", [None, "mixed"])
def test_groups_are_whole_episodes(frames):
    stream, rng = Stream(3, seed=8, end=0.15, frames=frames), np.random.default_rng(0)
    replay = make(stream, 90, frame_stack=4 if frames else None)
    episode, number = np.zeros(3, int), {}
    for t in range(100):
        row = stream.next()
        replay.add(**row)
        episode += stream.rows[-1]["first"]
        number |= {t * 3 + b: (b, int(episode[b])) for b in range(3)}
    expected: dict = {}
    for id in sorted(stream.sampleable(replay.window)):
        expected.setdefault(number[id], []).append(id)
    seen = set()
    for _ in range(60):
        batch = replay.sample_groups(5, rng)
        assert batch["valid"].shape == batch["reward"].shape == batch["id"].shape
        assert batch["valid"].sum(0).max() == len(batch["valid"])  # as long as the longest one
        drawn = [tuple(batch["id"][batch["valid"][:, i], i].tolist()) for i in range(5)]
        assert all(list(ids) == expected[number[ids[0]]] for ids in drawn)
        assert len(set(drawn)) == 5
        seen |= set(drawn)
        t, i = np.argwhere(batch["valid"])[rng.integers(batch["valid"].sum())]
        id = int(batch["id"][t, i])
        np.testing.assert_array_equal(batch["obs"][t, i], stream.rows[id // 3]["obs"][id % 3])
        np.testing.assert_array_equal(batch["next_obs"][t, i], stream.expected(id, 1)[2])
        assert (batch["id"][~batch["valid"]] == -1).all()
        for key in ("obs", "next_obs", "action", "reward", "discount", "logp", "weight"):
            assert not batch[key][~batch["valid"]].any(), key
    assert len(seen) == len(expected)
    with pytest.raises(DataError, match=f"have {len(expected)}, got 1000"):
        replay.sample_groups(1000, rng)


def test_groups_by_an_extra_in_runs_of_a_length():
    """Rows of four tasks, mixed: a run holds neighbours of one task only, from anywhere in it; short groups are filled
    up."""
    example = {"obs": np.zeros(1, np.float32), "action": np.int64(0), "task": np.int64(0), "name": np.zeros(2)}
    replay = ReplayRing(100, 1, example, max_use=200)
    no, yes = np.zeros(1, bool), np.ones(1, bool)
    tasks = [7 if t % 2 else (5 if t % 4 else 9) for t in range(40)] + [3, 3, 0]
    for t, task in enumerate(tasks):
        row = (np.full((1, 1), t, np.float32), np.zeros(1, np.int64), np.ones(1), no, no, yes)
        replay.add(*row, task=np.array([task]), name=np.zeros((1, 2)))
    groups = {task: [t for t in range(42) if tasks[t] == task] for task in (3, 5, 7, 9)}
    rng = np.random.default_rng(0)
    starts = set()
    for i in range(200):
        batch = (replay if i % 2 else replay.view(slice(None))).sample_groups(4, rng, by="task", length=6)
        assert sorted(batch["task"][0].tolist()) == [3, 5, 7, 9]
        for j in range(4):
            ids, task = batch["id"][batch["valid"][:, j], j].tolist(), int(batch["task"][0, j])
            at = groups[task].index(ids[0])
            assert ids == groups[task][at : at + 6]
            assert batch["valid"][:, j].tolist() == [k < 2 or task != 3 for k in range(6)]
            starts.add((task, at))
    assert starts == {(task, at) for task in groups for at in range(max(1, len(groups[task]) - 5))}
    assert not {40, 41} & set(replay.ids().tolist())  # drawn 200 times
    assert {0, 1, 2} <= set(replay.ids().tolist())
    with pytest.raises(UnknownName, match="Did you mean 'task'"):
        replay.sample_groups(1, rng, by="taks")
    with pytest.raises(ConfigError, match="one integer per row"):
        replay.sample_groups(1, rng, by="name")
    with pytest.raises(ConfigError, match="length >= 1"):
        replay.sample_groups(1, rng, length=0)


def test_few_good_rows_among_many_are_found():
    """Almost all rows retired: the sampler must not draw again and again."""
    replay = plain(1000, max_use=1)
    fill(replay, 1001)
    rng = np.random.default_rng(0)
    while len(replay) > 40:
        replay.sample(20, rng)
    left = len(replay)
    ids = replay.sample(20_000, rng)["id"]
    assert len(set(ids.tolist())) == left
    assert abs(chi_square(np.unique(ids, return_counts=True)[1], np.full(left, 1 / left))) < 4


def test_samples_belong_to_the_caller():
    replay = plain(8, prioritized=True)
    fill(replay, 9)
    rng = np.random.default_rng(0)
    kept = replay.sample(32, rng)
    copy = {k: v.copy() for k, v in kept.items()}
    fill(replay, 9)
    replay.sample(32, rng)
    assert all((kept[k] == copy[k]).all() for k in kept)


# --- frame stacks -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n_step", [1, 3])
@pytest.mark.parametrize("padding", ["zeros", "repeat", "real", "mixed"])
@pytest.mark.parametrize("num_envs", [1, 2])
def test_frame_stacks_are_rebuilt_exactly(num_envs, padding, n_step):
    """The same stream into a replay of whole stacks and one of frames: the same samples, at all times."""
    stream = Stream(num_envs, seed=3, end=0.25, frames=padding)
    whole = make(stream, 30, n_step=n_step)
    frames = make(stream, 30, n_step=n_step, frame_stack=4)
    for t in range(120):
        row = stream.next()
        whole.add(**row)
        frames.add(**row)
        if t % 7 == 0 and len(whole):
            assert len(frames) == len(whole)
            a, b = (r.sample(64, np.random.default_rng(t)) for r in (whole, frames))
            for key in a:
                np.testing.assert_array_equal(a[key], b[key], err_msg=key)
            if n_step == 1:
                assert np.shares_memory(b["obs"], b["next_obs"])  # one gather, two views
        if t > 20 and t % 7 == 0:
            a, b = (r.sample_sequences(16, 5, 2, np.random.default_rng(t)) for r in (whole, frames))
            for key in a:
                np.testing.assert_array_equal(a[key], b[key], err_msg=key)
    assert (frames.nbytes > make(stream, 30, n_step=n_step, frame_stack=4).nbytes) == (padding in ("real", "mixed"))


def test_a_stack_that_does_not_continue_the_last_one_is_refused():
    stream = Stream(3, seed=0, end=0.0, frames="zeros")
    replay = make(stream, 30, frame_stack=4)
    for _ in range(5):
        replay.add(**stream.next())
    row = stream.next()
    row["obs"][2, 1, 0, 0] ^= 1
    with pytest.raises(DataError, match="environment 2"):
        replay.add(**row)
    row["obs"][2, 1, 0, 0] ^= 1
    replay.add(**row)  # the refused row left nothing behind
    assert replay.steps == 6
    with pytest.raises(DataError, match=r"expected uint8 \(3, 4, 3, 2\), got uint8 \(3, 3, 3, 2\)"):
        replay.add(**{**stream.next(), "obs": row["obs"][:, 1:]})


def test_kept_frames_are_given_back():
    """Real frames before episode starts take room only while their rows are stored."""
    stream = Stream(2, seed=1, end=0.3, frames="real")
    replay = make(stream, 20, frame_stack=4)
    sizes = []
    for _ in range(400):
        replay.add(**stream.next())
        sizes.append(replay.nbytes)
    assert sizes[0] < sizes[60] == sizes[-1]


def test_frames_take_a_third_of_the_memory_of_stacks():
    example = {"obs": np.zeros((4, 84, 84), np.uint8), "action": np.int64(0)}
    replay = ReplayRing(1000, 1, example, prioritized=True, frame_stack=4)
    assert replay.nbytes < 1000 * 2 * 4 * 7056 / 3
    assert replay.nbytes < 1.02 * 1000 * (7056 + 8 + 4 + 1)


def test_frame_stack_wants_one_array_of_that_many_frames():
    with pytest.raises(ConfigError, match=r"shape \[4, ...\]"):
        ReplayRing(10, 1, {"obs": np.zeros((3, 84, 84), np.uint8), "action": np.int64(0)}, frame_stack=4)
    with pytest.raises(ConfigError, match="one array"):
        ReplayRing(10, 1, {"obs": {"a": np.zeros((4, 2))}, "action": np.int64(0)}, frame_stack=4)


# --- sequences --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prioritized", [False, True])
def test_sequences_are_runs_of_one_environment(prioritized):
    stream = Stream(3, seed=7)
    example = {
        "obs": np.zeros(3, np.float32),
        "action": np.int64(0),
        "logp": np.zeros(2, np.float32),
        "state": np.zeros(1),
    }
    replay = ReplayRing(90, 3, example, prioritized=prioritized)
    for t in range(70):
        row = stream.next()
        replay.add(**row, state=row["obs"][:, 2:].astype(np.float64) + 0.5)
        if t not in (8, 25, 69):
            continue
        batch = replay.sample_sequences(400, length=5, burn_in=3, rng=np.random.default_rng(t))
        start, env = batch["obs"][0, :, 0].astype(int), batch["obs"][0, :, 1].astype(int)
        oldest = max(0, t - replay.window)
        assert start.min() == oldest
        assert start.max() == t - 8  # obs of row 8 of the last one is the newest row
        assert batch["obs"].shape == (9, 400, 3)
        assert batch["first"].shape == (9, 400)
        for i in range(60):
            for j in range(8):
                row, b = stream.rows[start[i] + j], env[i]
                for key in ("action", "reward", "terminated", "truncated", "valid", "logp", "first", "obs"):
                    np.testing.assert_array_equal(batch[key][j, i], row[key][b], err_msg=key)
                assert batch["id"][j, i] == (start[i] + j) * 3 + b
            np.testing.assert_array_equal(batch["obs"][8, i], stream.rows[start[i] + 8]["obs"][env[i]])
            assert batch["first"][8, i] == stream.rows[start[i] + 8]["first"][env[i]]
        np.testing.assert_array_equal(batch["state"], batch["obs"][0, :, 2:] + 0.5)


def test_prioritized_sequences_start_learning_at_the_drawn_row():
    replay = plain(60, prioritized=True, alpha=1.0, eps=0.0)
    fill(replay, 61)
    replay.update_priorities(np.arange(60), np.where(np.isin(np.arange(60), (1, 2, 30, 59)), 1.0, 0.0))
    batch = replay.sample_sequences(300, length=4, burn_in=2, rng=np.random.default_rng(0))
    assert sorted(set(batch["anchor"].tolist())) == [2, 30]  # nothing is before row 0, and too little behind 59
    np.testing.assert_array_equal(batch["anchor"], batch["id"][2])
    replay.update_priorities(batch["id"][2:], np.full((4, 300), 7.0))
    assert [i for i, p in enumerate(priorities(replay)) if p == 7.0] == [2, 3, 4, 5, 30, 31, 32, 33]


def test_weights_undo_the_priorities_of_sequences():
    """Also at both ends, where fewer rows can begin one."""
    replay, count = plain(60, prioritized=True, alpha=1.0, eps=0.0), np.zeros(61)
    fill(replay, 61)
    replay.update_priorities(np.arange(60), 1.0 + np.arange(60) % 5)
    for seed in range(400):
        batch = replay.sample_sequences(64, length=8, burn_in=4, rng=np.random.default_rng(seed), beta=1.0)
        np.add.at(count, batch["id"][4], batch["weight"] / batch["weight"].max())
    starts = count[4:53]  # rows 4 to 52 have four rows before them and eight to learn
    assert count.sum() == pytest.approx(starts.sum())
    assert (abs(starts / starts.mean() - 1) < 0.25).all()


def test_sequences_whose_rows_can_begin_none_are_those_of_dead_rows():
    replay = plain(60, prioritized=True)
    fill(replay, 6, end=(2,))
    batch = replay.sample_sequences(8, length=2, burn_in=3, rng=np.random.default_rng(0))
    assert set(batch["anchor"].tolist()) == {3}
    assert batch["valid"][3:].tolist() == [[False] * 8, [True] * 8]


def test_behind_a_gap_a_sequence_has_the_state_that_is_stored_there():
    """Pieces of five rows and their last observation, as of a game far away: the episode goes on from one to the
    next."""
    example = {"obs": np.zeros(1, np.float32), "action": np.int64(0), "state": np.float32(0)}
    replay, no = ReplayRing(200, 1, example), np.zeros(1, bool)
    for t in range(60):
        obs, valid = np.full((1, 1), t, np.float32), np.array([t % 6 != 5])
        columns = (obs, np.zeros(1, np.int64), np.ones(1), no, no, valid)
        replay.add(*columns, first=np.array([t == 0]), state=np.array([t], np.float32))
    batch = replay.sample_sequences(400, length=4, burn_in=2, rng=np.random.default_rng(0))
    start = batch["id"][0]
    np.testing.assert_array_equal(batch["state"], start)
    assert batch["first"].sum() == np.count_nonzero(start == 0)  # the rest goes on
    for i, at in enumerate(start):
        gap = next(t for t in range(at, at + 6) if t % 6 == 5)
        assert at % 6 not in (4, 5) or at >= 52  # the burn-in would cross the gap; the last ones cannot begin later
        np.testing.assert_array_equal(batch["valid"][:, i], np.arange(at, at + 6) < gap)


def test_too_short_a_replay_for_sequences_says_so():
    replay = plain(60)
    fill(replay, 6)
    assert replay.sample_sequences(2, 5, 0, np.random.default_rng(0))["reward"].shape == (5, 2)
    with pytest.raises(DataError, match="sequences of 6 rows need 7 rows, the replay has 6"):
        replay.sample_sequences(2, 5, 1, np.random.default_rng(0))


# --- the rest ---------------------------------------------------------------------------------------------------------


def test_cut_ends_what_was_running():
    """After cut() the newest row is a final observation: sampled by none, a bootstrap for its predecessor."""
    replay = plain(20, gamma=0.5, n_step=3)
    fill(replay, 3)
    replay.cut()
    fill(replay, 3)
    assert len(replay) == 4
    batch = replay.sample(100, np.random.default_rng(0))
    columns = (batch[k] for k in ("id", "reward", "discount", "next_obs"))
    table = {int(i): (float(r), float(d), float(o[0])) for i, r, d, o in zip(*columns, strict=True)}
    assert table == {0: (1.5, 0.25, 2), 1: (1, 0.5, 2), 3: (1.5, 0.25, 2), 4: (1, 0.5, 2)}
    sequence = replay.sample_sequences(50, 5, 0, np.random.default_rng(0))
    assert sequence["first"][:, 0].tolist() == [True, False, False, True, False, False]
    assert sequence["valid"][:, 0].tolist() == [True, True, False, True, True]


def test_memory_stays_near_the_raw_bytes():
    """Each observation once: at most 1.15 times obs + action + reward + three flags, trees of priorities apart."""
    for num_envs in (1, 16):
        example = {"obs": np.zeros(84, np.float32), "action": np.int64(0)}
        raw = 20_000 * (84 * 4 + 8 + 4 + 3)
        assert ReplayRing(20_000, num_envs, example).nbytes < 1.15 * raw
        assert ReplayRing(20_000, num_envs, example, n_step=3, prioritized=True).nbytes < 1.15 * raw + 16 * 20_000


def test_trees_of_observations_and_actions():
    example = {
        "obs": {"pixels": np.zeros((2, 2), np.uint8), "rest": (np.zeros(3, np.float32), np.int64(0))},
        "action": {"move": np.zeros(2, np.float32), "jump": np.int64(0)},
    }
    replay = ReplayRing(10, 2, example)
    for t in range(4):
        obs = {"pixels": np.full((2, 2, 2), t, np.uint8), "rest": (np.full((2, 3), t, np.float32), np.array([t, t]))}
        action = {"move": np.full((2, 2), t, np.float32), "jump": np.array([t, -t])}
        replay.add(obs, action, np.zeros(2), np.zeros(2, bool), np.zeros(2, bool), np.ones(2, bool))
    batch = replay.sample(20, np.random.default_rng(0))
    t = batch["id"] // 2
    np.testing.assert_array_equal(batch["obs"]["rest"][1], t)
    np.testing.assert_array_equal(batch["next_obs"]["pixels"][:, 1, 1], t + 1)
    np.testing.assert_array_equal(batch["action"]["jump"], np.where(batch["id"] % 2, -t, t))
    assert isinstance(batch["obs"]["rest"], tuple)


def test_observations_in_files_sample_the_same(tmp_path):
    stream = Stream(2, seed=0)
    memory, files = make(stream, 30), make(stream, 30, directory=tmp_path / "columns")
    for _ in range(50):
        row = stream.next()
        memory.add(**row)
        files.add(**row)
    assert (tmp_path / "columns" / "obs-0.column").stat().st_size == 16 * 2 * 12
    a, b = (r.sample(40, np.random.default_rng(0)) for r in (memory, files))
    assert all((a[k] == b[k]).all() for k in a)


def test_wrong_rows_are_refused_and_leave_nothing_behind():
    stream = Stream(2, seed=0)
    replay = make(stream, 10)
    for _ in range(12):
        replay.add(**stream.next())
    before = replay.get_state()
    row = stream.next()
    wrong = [
        ({"obs": row["obs"][:1]}, DataError, r"'obs': expected shape \(2, 3\), got \(1, 3\)"),
        ({"obs": {"a": row["obs"]}}, DataError, "one array, got a dict"),
        ({"action": row["action"] + 0.5}, DataError, "holds int64, got float64"),
        ({"reward": np.zeros((2, 1))}, DataError, "'reward'"),
        ({"valid": True}, DataError, r"'valid': expected shape \(2,\), got \(\)"),
        ({"logpp": row["logp"]}, UnknownName, "Did you mean 'logp'"),
    ]
    for change, error, message in wrong:
        with pytest.raises(error, match=message):
            replay.add(**{**row, **change})
    with pytest.raises(DataError, match="logp missing"):
        replay.add(**{k: v for k, v in row.items() if k != "logp"})
    after = replay.get_state()
    assert all(np.array_equal(before["rows"][k], after["rows"][k]) for k in before["rows"])
    assert replay.steps == 12


def test_an_end_without_its_final_observation_is_refused():
    """A vector environment that resets in the same step would put the next episode's start where the final observation
    belongs."""
    row = {
        "obs": np.zeros((2, 1), np.float32),
        "action": np.zeros(2, np.int64),
        "reward": np.zeros(2),
        "terminated": np.zeros(2, bool),
    }
    replay = ReplayRing(10, 2, {"obs": np.zeros(1, np.float32), "action": np.int64(0)})
    replay.add(**row, truncated=np.array([False, True]), valid=np.ones(2, bool))
    with pytest.raises(DataError, match="environment 1: its episode ended"):
        replay.add(**row, truncated=np.zeros(2, bool), valid=np.ones(2, bool))
    again = ReplayRing(10, 2, {"obs": np.zeros(1, np.float32), "action": np.int64(0)})
    again.set_state(replay.get_state())
    with pytest.raises(DataError, match="environment 1: its episode ended"):
        again.add(**row, truncated=np.zeros(2, bool), valid=np.ones(2, bool))
    again.cut()  # environments were made anew
    again.add(**row, truncated=np.zeros(2, bool), valid=np.ones(2, bool))
    replay.add(**row, truncated=np.zeros(2, bool), valid=np.array([True, False]))
    replay.add(**row, truncated=np.zeros(2, bool), valid=np.ones(2, bool))
    assert (len(replay), len(again)) == (3, 0)


def test_wrong_settings_and_priorities_are_refused():
    example = {"obs": np.zeros(1), "action": np.int64(0)}
    for options, message in (
        ({"capacity": 0}, "capacity"),
        ({"n_step": 0}, "n_step"),
        ({"gamma": 1.5}, "gamma"),
        ({"beta": -1.0}, "beta"),
        ({"max_use": 0}, "max_use"),
        ({"max_staleness": 0}, "max_staleness"),
        ({"example": {"obs": np.zeros(1)}}, "'action'"),
        ({"example": {**example, "reward": np.zeros(1)}}, "'reward'"),
        ({"example": {"obs": np.array(["a"]), "action": np.int64(0)}}, "numbers"),
    ):
        with pytest.raises(ConfigError, match=message):
            ReplayRing(**{"capacity": 10, "num_envs": 1, "example": example, **options})
    replay = plain(10, prioritized=True)
    fill(replay, 5)
    before = priorities(replay)
    with pytest.raises(DataError, match="nan at position 1"):
        replay.update_priorities([0, 1], [2.0, np.nan])
    with pytest.raises(DataError, match="one priority per id"):
        replay.update_priorities([0, 1], [2.0])
    assert priorities(replay) == before
    zeros = plain(10, prioritized=True, eps=0.0)
    fill(zeros, 3)
    zeros.update_priorities([0, 1], [0.0, 0.0])
    with pytest.raises(DataError, match="all priorities are 0"):
        zeros.sample(1, np.random.default_rng(0))
    with pytest.raises(ConfigError, match="prioritized=True"):
        plain(10).update_priorities([0], [1.0])


def test_uniform_replay_needs_neither_numba_nor_torch():
    """Compiling costs seconds at the first use; who does not need it does not pay."""
    code = """
import sys, numpy as np
from bray.data import ReplayRing
r = ReplayRing(10, 1, {"obs": np.zeros(1), "action": np.int64(0)})
for _ in range(3):
    r.add(np.zeros((1, 1)), np.zeros(1, int), np.zeros(1), np.zeros(1, bool), np.zeros(1, bool), np.ones(1, bool))
r.sample(4, np.random.default_rng(0)); r.sample_sequences(2, 1, 0, np.random.default_rng(0))
print([m for m in ("numba", "torch") if m in sys.modules])
"""
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.strip() == "[]"


# --- the tree ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 2, 7, 8, 9, 63, 64, 65, 513, 5000])
def test_sum_tree_finds_the_slot_of_every_point(size):
    """Against a cumulative sum, with many zeros; slots of priority 0 are never drawn, not even at the very end."""
    rng = np.random.default_rng(size)
    tree = SumTree(size)
    p = np.where(rng.random(size) < 0.6, 0.0, rng.random(size) ** 4)
    p[rng.integers(size)] = 0.3
    tree.leaves[:] = p
    tree.rebuild()
    assert tree.total == pytest.approx(p.sum(), rel=1e-12)
    u = rng.random(2000)
    u[-1], u[0] = 1.0, 0.0  # the two ends of the total
    _, slots, _ = tree.draw(u, 0.5, size)
    assert (p[slots] > 0).all()
    expected = np.searchsorted(np.cumsum(p), (np.arange(2000) + u)[:-1] / 2000 * p.sum(), side="right")
    assert (slots[:-1] == expected).mean() > 0.999  # rounding may move a point to the neighbour
    some = np.unique(rng.integers(0, size, 20))
    tree.set(some, 2.0)
    grown = tree.tree.copy()
    tree.rebuild()
    np.testing.assert_array_equal(tree.tree, grown)  # a pure function of the leaves
    assert tree.nbytes <= 16 * size + 256


def test_a_lost_life_ends_the_return_but_not_the_episode():
    """terminated with a valid row after it: discount 0, n-step sums stop there, and the next row is sampled like any
    other."""
    replay = ReplayRing(100, 1, {"obs": np.zeros(1, np.float32), "action": np.int64(0)}, n_step=3, gamma=0.5)
    no, yes, one = np.zeros(1, bool), np.ones(1, bool), np.ones(1, np.float32)
    for t in range(8):
        replay.add(np.full((1, 1), t, np.float32), np.zeros(1, np.int64), one, yes if t == 3 else no, no, yes)
    batch = replay.sample(500, np.random.default_rng(0))
    got = {int(o): (r, d) for o, r, d in zip(batch["obs"][:, 0], batch["reward"], batch["discount"], strict=True)}
    assert got[2] == (1.5, 0.0)  # 1 + 0.5, then the life is lost
    assert got[3] == (1.0, 0.0)
    assert got[4] == (1.75, 0.125)
