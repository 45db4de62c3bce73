"""Stores and shards, without links: what is kept, who waits, and that draws over shards are those of one store."""

import math
import threading

import numpy as np
import pytest

from bray.data import PrioritizedBuffer
from bray.errors import ConfigError, DataError, UnknownName
from bray.remote.buffer import messages as m
from bray.remote.buffer.columns import join, private, stack
from bray.remote.buffer.settings import BufferSettings
from bray.remote.buffer.stores import Queue, Ring, split, weigh
from bray.remote.buffer.worker import BufferShard
from bray.tree.layout import Layouts

LAYOUTS = Layouts()


def chunk(*values, key="x"):
    read = [LAYOUTS.read({key: np.float64(v)}) for v in values]
    return stack(read[0][0], [leaves for _, leaves in read])


def values(pieces):
    return [float(v) for p in pieces for v in p.columns[0]]


def test_a_queue_gives_batches_in_order():
    queue = Queue(100, 3)
    queue.put(chunk(0, 1))
    assert not queue.has(ended=False)
    queue.put(chunk(2, 3, 4, 5))
    assert values(queue.take(1)) == [0, 1, 2]
    assert values(queue.take(1)) == [3, 4, 5]
    queue.put(chunk(6))
    assert not queue.has(ended=False)
    assert queue.has(ended=True)
    assert values(queue.take(1)) == [6]
    assert (queue.rows, queue.nbytes) == (0, 0)


def test_a_queue_drops_the_oldest_rows():
    queue = Queue(4, None)
    queue.put(chunk(0, 1, 2, 3))
    assert queue.room == 0
    queue.drop(3)
    assert queue.room == 3
    assert values(queue.take(10)) == [3]


def test_single_samples_are_given_by_layout():
    queue = Queue(10, None)
    queue.put(chunk(0, 1))
    queue.put(chunk(2))
    queue.put(chunk(3, key="y"))
    assert values(queue.take(2)) == [0, 1]
    assert values(queue.take(5)) == [2]
    assert values(queue.take(5)) == [3]


def test_samples_of_one_batch_look_alike():
    queue = Queue(10, 2)
    queue.check(chunk(0).layout)
    with pytest.raises(DataError, match=r"batch_size 2 have the same keys.*x: expected shape \(\), got nothing"):
        queue.check(chunk(0, key="y").layout)
    Queue(10, None).check(chunk(0, key="y").layout)


# --- rings ------------------------------------------------------------------------------------------------------------


def ring_draw(ring, at):
    return ring.draw(np.asarray(at, float), private).batch()


def test_a_ring_keeps_the_newest_rows():
    ring = Ring(5, prioritized=False)
    ring.put(chunk(0, 1, 2))
    ring.put(chunk(3, 4, 5, 6))
    assert ring.rows == 5
    got = ring_draw(ring, (np.arange(5) + 0.5) / 5)
    assert sorted(got["x"]) == [2, 3, 4, 5, 6]
    ring.put(chunk(*range(7, 20)))
    assert sorted(ring_draw(ring, (np.arange(5) + 0.5) / 5)["x"]) == [15, 16, 17, 18, 19]


@pytest.mark.parametrize("prioritized", [False, True])
def test_ids_name_rows_and_their_lap(prioritized):
    ring = Ring(4, prioritized)
    ring.put(chunk(0, 1, 2, 3, 4, 5))
    got = ring_draw(ring, (np.arange(4) + 0.5) / 4)
    first = ring.first_generation
    assert {int(x): tuple(i) for x, i in zip(got["x"], got["id"], strict=True)} == {
        2: (first, 2),
        3: (first, 3),
        4: (first + 1, 0),
        5: (first + 1, 1),
    }
    ring.put(chunk(6, 7))
    assert set(ring_draw(ring, (np.arange(4) + 0.5) / 4)["id"][:, 0]) == {first + 1}


def test_priorities_of_overwritten_rows_are_ignored_and_counted():
    ring = Ring(4, True, alpha=1.0, eps=0.0)
    ring.put(chunk(0, 1, 2, 3))
    ids = ring_draw(ring, (np.arange(4) + 0.5) / 4)["id"]
    ids = ids[np.argsort(ids[:, 1])]
    ring.put(chunk(4, 5))
    ring.set_priorities(ids, np.array([10.0, 20.0, 30.0, 40.0]))
    assert ring.late == 2
    assert ring.mass == 1 + 1 + 30 + 40
    assert ring.largest == 40
    ring.set_priorities(np.array([[ring.generation, 99], [ring.generation, -1], [0, 0]]), np.ones(3))
    assert ring.late == 5
    ring.put(chunk(6))
    assert ring.mass == 1 + 1 + 40 + 40  # new rows get the largest so far


def test_ids_of_a_shard_that_died_are_not_taken_for_those_of_its_successor():
    old, new = Ring(4, True), Ring(4, True)
    for ring in (old, new):
        ring.put(chunk(0, 1, 2, 3))
    new.set_priorities(ring_draw(old, [0.1, 0.6])["id"], np.array([50.0, 60.0]))
    assert new.late == 2
    assert new.mass == 4.0


@pytest.mark.parametrize("prioritized", [False, True])
def test_rows_retire_after_max_reuse_draws(prioritized):
    ring = Ring(6, prioritized, max_reuse=2)
    ring.put(chunk(*range(6)))
    rng = np.random.default_rng(0)
    counts = dict.fromkeys(range(6), 0)
    draws = 0
    while ring.mass > 0:
        x = ring_draw(ring, np.sort(rng.random(1)))["x"]
        counts[int(x[0])] += 1
        draws += 1
        assert draws <= 12
    assert set(counts.values()) == {2}
    ring.put(chunk(6, 7))  # over two that have retired
    assert ring.mass > 0
    assert set(ring_draw(ring, [0.2, 0.7])["x"]) == {6, 7}


def test_a_ring_takes_what_fits_its_columns():
    ring = Ring(4, False)
    first = LAYOUTS.read({"x": np.float32(1), "n": np.int64(1)})[0]
    ring.check(first)
    ring.put(stack(first, [LAYOUTS.read({"x": np.float32(1), "n": np.int64(1)})[1]]))
    narrow = LAYOUTS.read({"x": np.float64(2.5), "n": np.int32(3)})
    ring.check(narrow[0])
    ring.put(stack(narrow[0], [narrow[1]]))
    assert ring_draw(ring, [0.9])["x"] == np.float32(2.5)
    with pytest.raises(DataError, match="'n' holds int64 since the first sample, got float64"):
        ring.check(LAYOUTS.read({"x": np.float32(1), "n": 1.5})[0])
    with pytest.raises(DataError, match="same keys and shapes"):
        ring.check(LAYOUTS.read({"x": np.zeros(2, np.float32), "n": 1})[0])


def test_a_ring_holds_dicts_without_the_keys_that_it_adds():
    with pytest.raises(DataError, match="are dicts"):
        Ring(4, False).check(LAYOUTS.read([1.0])[0])
    with pytest.raises(DataError, match="'weight' is what the draws of this store add"):
        Ring(4, False).check(LAYOUTS.read({"weight": 1.0})[0])


# --- draws over shards are those of one store -------------------------------------------------------------------------


def prepared(num_shards, n, priorities, alpha):
    """Rows 0..n-1 dealt to shards, with these priorities."""
    rings = [Ring(n, True, alpha=alpha, eps=1e-3) for _ in range(num_shards)]
    for i in range(n):
        rings[i % num_shards].put(chunk(i))
    for s, ring in enumerate(rings):
        got = ring_draw(ring, (np.arange(ring.rows) + 0.5) / ring.rows)
        ring.set_priorities(got["id"], priorities[got["x"].astype(int)])
        ring.set_priorities(got["id"], priorities[got["x"].astype(int)])
        assert len(set(got["x"])) == len(range(s, n, num_shards))
    return rings


def draw_all(rings, batch_size, rng, beta):
    """What a Sampler does."""
    masses = np.array([r.mass for r in rings])
    places = split(masses, batch_size, rng)
    pieces = [r.draw(at, private) for r, at in zip(rings, places, strict=True) if len(at)]
    out = join(pieces, private).batch()
    return out["x"].astype(int), weigh(out["weight"] / masses.sum(), sum(r.rows for r in rings), beta), out["weight"]


@pytest.mark.parametrize("num_shards", [1, 2, 3])
def test_draws_over_shards_follow_the_priorities_of_all(num_shards):
    n, batch_size, batches, alpha = 40, 32, 1500, 0.7
    priorities = np.random.default_rng(1).exponential(size=n) + 0.05
    rings = prepared(num_shards, n, priorities, alpha)
    p = (priorities + 1e-3) ** alpha
    p /= p.sum()
    rng = np.random.default_rng(2)
    single = PrioritizedBuffer(n, alpha=alpha, eps=1e-3, seed=3)
    single.extend(range(n))
    single.update_priorities(np.arange(n), priorities)
    counts, alone = np.zeros(n), np.zeros(n)
    for _ in range(batches):
        x, _, _ = draw_all(rings, batch_size, rng, 0.4)
        np.add.at(counts, x, 1)
        np.add.at(alone, single.sample(batch_size), 1)
    total = batch_size * batches
    critical = 76.0  # chi-square, 39 degrees of freedom: 0.9996
    assert ((counts - total * p) ** 2 / (total * p)).sum() < critical
    assert ((alone - total * p) ** 2 / (total * p)).sum() < critical
    # as even as those of one tree: a draw falls into each part of the whole mass, so counts vary less than independent
    # ones would
    assert abs(counts - total * p).max() <= 4 * math.sqrt(total * p.max())


@pytest.mark.parametrize("num_shards", [1, 2, 3])
def test_importance_weights_use_the_sum_over_all_shards(num_shards):
    n, beta, alpha = 30, 0.6, 0.5
    priorities = np.random.default_rng(4).exponential(size=n) + 0.1
    rings = prepared(num_shards, n, priorities, alpha)
    x, weight, mass = draw_all(rings, 16, np.random.default_rng(5), beta)
    p = (priorities + 1e-3) ** alpha
    p /= p.sum()
    expected = (n * p[x]) ** -beta
    np.testing.assert_allclose(weight, expected / expected.max(), rtol=1e-5)
    np.testing.assert_allclose(mass, (priorities[x] + 1e-3) ** alpha)
    single = PrioritizedBuffer(n, alpha=alpha, beta=beta, eps=1e-3, seed=6)
    single.extend(range(n))
    single.update_priorities(np.arange(n), priorities)
    items, _, theirs = single.sample_weighted(16)
    expected = (n * p[np.array(items)]) ** -beta
    np.testing.assert_allclose(theirs, expected / expected.max(), rtol=1e-5)


def test_new_priorities_change_the_draws():
    rings = prepared(2, 10, np.ones(10), 1.0)
    got = ring_draw(rings[0], (np.arange(5) + 0.5) / 5)
    rings[0].set_priorities(got["id"], np.where(got["x"] == 4, 100.0, 1e-6))
    x, _, _ = draw_all(rings, 1000, np.random.default_rng(0), 0.4)
    assert (x == 4).mean() == pytest.approx(100 / 105, abs=0.01)


def test_a_split_leaves_out_what_is_empty():
    places = split(np.array([0.0, 2.0, 0.0, 1.0, 0.0]), 300, np.random.default_rng(0))
    assert [len(p) for p in places] == [0, 200, 0, 100, 0]
    assert all(((p >= 0) & (p < 1)).all() and (np.diff(p) >= 0).all() for p in places)


# --- shards -----------------------------------------------------------------------------------------------------------


class Box:
    """What a shard gave, or was done with."""

    def __init__(self):
        self.got, self.errors, self.kinds = [], [], []

    def give(self, kind, pieces, facts):
        self.kinds.append(kind)
        self.got.append(values(pieces))

    def done(self, error):
        self.errors.append(error)


def shard(**settings):
    settings = {"size": 4, "batch_size": 2, "num_workers": 1, **settings}
    return BufferShard(BufferSettings("b", **settings), 0)


def test_a_full_queue_drops_its_oldest_samples():
    s, box = shard(), Box()
    s.push(chunk(*range(6)), True, box.done)
    s.push(chunk(6, 7, 8), True, box.done)
    assert s.numbers()["waiting"] == 8
    assert s.numbers()["dropped"] == 1
    s.push(chunk(*range(10, 40)), True, box.done)
    assert s.numbers()["dropped"] == 1 + 8 + 22
    for _ in range(4):
        s.pop(1, box.give)
    assert box.got == [[32, 33], [34, 35], [36, 37], [38, 39]]
    assert box.errors == [None] * 3


def test_pushes_wait_for_room_and_enter_in_order():
    s, box = shard(), Box()
    done = []
    for i in range(0, 16, 4):
        s.push(chunk(*range(i, i + 4)), False, lambda e, i=i: done.append(i))
    assert done == [0, 4]
    assert s.behind == 8
    s.pop(1, box.give)
    assert done == [0, 4]  # half of the third is in
    s.pop(1, box.give)
    assert done == [0, 4, 8]
    for _ in range(6):
        s.pop(1, box.give)
    assert [x for batch in box.got for x in batch] == list(range(16))
    assert done == [0, 4, 8, 12]
    assert (
        s.numbers() | {"pushed": 16, "popped": 16, "dropped": 0, "waiting": 0, "behind": 0, "bytes": 0} == s.numbers()
    )


def test_a_push_larger_than_the_queue_gets_through():
    s, box = shard(size=1), Box()
    s.push(chunk(*range(7)), False, box.done)
    for _ in range(3):
        s.pop(1, box.give)
    assert box.got == [[0, 1], [2, 3], [4, 5]]
    assert box.errors == [None]


def test_who_asks_first_is_served_first():
    s = shard()
    order = []
    for name in "abc":
        s.pop(1, lambda kind, pieces, facts, name=name: order.append((name, values(pieces))), consumer=name)
    s.push(chunk(0, 1, 2, 3, 4), True, lambda e: None)
    assert order == [("a", [0, 1]), ("b", [2, 3])]
    s.withdraw("c")
    assert order[2] == ("c", [])
    s.push(chunk(5), True, lambda e: None)
    s.pop(1, lambda kind, pieces, facts: order.append(("d", values(pieces))))
    assert order[3] == ("d", [4, 5])


def test_single_samples_are_shared_among_readers():
    s, box = shard(batch_size=None, size=100), Box()
    s.pop(1, box.give, "other")
    s.push(chunk(*range(9)), True, box.done)
    s.pop(1000, box.give, "me")
    assert box.got == [[0], [1, 2, 3, 4]]  # half of what is there


def test_samples_that_do_not_fit_are_refused_and_nothing_else_is():
    s, box = shard(), Box()
    s.push(chunk(0, 1), False, box.done)
    s.push(chunk(2, key="y"), False, box.done)
    s.push(chunk(3, 4), False, box.done)
    assert [type(e) for e in box.errors] == [type(None), DataError, type(None)]
    assert s.numbers()["waiting"] == 4


def run(coroutine):
    import asyncio

    return asyncio.run(coroutine)


def test_a_buffer_ends_when_its_sources_have():
    s, box = shard(batch_size=4), Box()
    run(s.source("a", False))
    run(s.source("b", False))
    s.push(chunk(0, 1, 2), False, box.done, source="a")
    s.pop(1, box.give)
    s.pop(1, box.give)
    run(s.source("a", True))
    assert box.got == []
    run(s.source("b", True))
    assert box.got == [[0, 1, 2], []]
    assert box.kinds == [m.ROWS, m.ENDED]
    run(s.source("c", False))  # and begins anew
    s.pop(1, box.give)
    assert len(box.got) == 2


def test_a_buffer_to_which_others_push_does_not_end():
    s, box = shard(batch_size=4), Box()
    run(s.source("a", False))
    s.push(chunk(0), True, box.done)
    run(s.source("a", True))
    s.pop(1, box.give)
    assert box.got == []


def test_draws_wait_until_something_is_there():
    s, box = shard(store="prioritized"), Box()
    s.draw(np.empty(0), True, 1.0, box.give)
    assert box.kinds == []
    s.draw(np.empty(0), False, 1.0, box.give)
    s.draw(np.array([0.5]), True, 1.0, box.give)  # waits for the limits, and there are none
    assert box.kinds == [m.NOTHING, m.NOTHING]
    s.push(chunk(3), True, box.done)
    assert box.kinds == [m.NOTHING] * 3
    s.draw(np.array([0.5]), True, 1.0, box.give)
    assert box.got == [[], [], [], [3]]
    with pytest.raises(ConfigError, match="popped, not drawn from"):
        shard().draw(np.empty(0), False, 1.0, box.give)
    with pytest.raises(ConfigError, match="a queue has no priorities"):
        shard().set_priorities(np.empty((0, 2), int), np.empty(0))


def test_the_largest_priority_of_other_shards_is_what_new_rows_get():
    s, box = shard(store="prioritized"), Box()
    s.draw(np.empty(0), False, 25.0, box.give)
    s.push(chunk(1, 2), True, box.done)
    assert s.numbers()["mass"] == 50.0


def test_draws_and_pushes_wait_for_each_other():
    s = shard(store="uniform", size=100, pushed_per_sampled=(0.5, 2.0))
    done, drawn = [], []
    s.push(chunk(0, 1), False, done.append)
    s.draw(np.array([0.1, 0.2, 0.6, 0.8]), True, 1.0, lambda *a: drawn.append(a))
    assert len(drawn) == 1  # one call may overshoot
    s.draw(np.array([0.5]), True, 1.0, lambda *a: drawn.append(a))
    assert len(drawn) == 1  # 2 pushed for 4 drawn is the least, and a little of it has faded
    s.push(chunk(2, 3), False, done.append)
    assert len(drawn) == 2
    for i in range(8):
        s.push(chunk(i), False, done.append)
    assert len(done) < 10  # more than twice as many as were drawn
    s.push(chunk(9), True, done.append)  # who may be dropped does not wait
    before = len(done)
    s.draw(np.array([0.1, 0.2, 0.3, 0.4]), True, 1.0, lambda *a: drawn.append(a))
    assert len(done) > before


def test_a_shard_may_be_used_from_many_threads():
    s = shard(batch_size=None, size=50)
    got, done = [], threading.Semaphore(0)

    def produce(k):
        for i in range(200):
            event = threading.Event()
            s.push(chunk(1000 * k + i), False, lambda e, event=event: event.set())
            event.wait(10)

    def consume():
        for _ in range(200):
            event = threading.Event()

            def give(kind, pieces, facts, event=event):
                got.extend(values(pieces))
                event.set()

            s.pop(1, give, threading.get_ident())
            event.wait(10)
        done.release()

    threads = [threading.Thread(target=produce, args=(k,)) for k in range(4)]
    threads += [threading.Thread(target=consume) for _ in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(20)
    assert sorted(got) == sorted(1000 * k + i for k in range(4) for i in range(200))


# --- settings ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"store": "que"}, UnknownName, "'queue'"),
        ({"size": 0}, ConfigError, "size is a whole number of at least 1, got 0"),
        ({"batch_size": 1.5}, ConfigError, "batch_size is a whole number"),
        ({"density": 0}, ConfigError, "density is the percentage"),
        ({"store": "uniform"}, ConfigError, "draws batches: give batch_size"),
        ({"max_reuse": 3}, ConfigError, "a queue gives each sample once"),
        ({"store": "uniform", "batch_size": 2, "max_reuse": 0}, ConfigError, "max_reuse is between 1"),
        ({"store": "prioritized", "batch_size": 2, "beta": 2.0}, ConfigError, "beta is between 0"),
        ({"store": "uniform", "batch_size": 2, "pushed_per_sampled": (2.0, 1.0)}, ConfigError, "least <= most"),
    ],
)
def test_settings_that_cannot_work(settings, error, message):
    with pytest.raises(error, match=message):
        BufferSettings("b", **settings)
    with pytest.raises(ConfigError, match="has no '/'"):
        BufferSettings("a/b")


@pytest.mark.parametrize(("size", "workers", "capacities"), [(5, 2, [30, 20]), (1, 3, [10]), (7, 3, [30, 20, 20])])
def test_shards_hold_size_batches_together(size, workers, capacities):
    settings = BufferSettings("b", size=size, batch_size=10, num_workers=workers)
    assert [settings.capacity(i) for i in range(settings.shards)] == capacities
