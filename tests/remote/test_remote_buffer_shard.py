"""Queues and shards, without links: what is kept, and who waits."""

import threading

import numpy as np
import pytest

from bray.errors import ConfigError, DataError
from bray.remote.buffer import messages as m
from bray.remote.buffer.columns import Queue, read_batch
from bray.remote.buffer.options import BufferDefinition
from bray.remote.buffer.worker import BufferShard
from bray.tree.layout import Layouts

LAYOUTS = Layouts()


def chunk(*values, key="x"):
    return read_batch({key: np.array(values, np.float64)}, LAYOUTS)


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
    return BufferShard(BufferDefinition("b", **settings), 0)


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
    ("settings", "message"),
    [
        ({"size": 0}, r"buffer 'b'\.size: expected a whole number > 0, got 0"),
        ({"batch_size": 1.5}, "batch_size: expected a whole number > 0 or null, got 1.5"),
        ({"density": 0}, "density: expected a whole number >= 1 and <= 100, got 0"),
    ],
)
def test_settings_that_cannot_work(settings, message):
    with pytest.raises(ConfigError, match=message):
        BufferDefinition("b", **settings)
    with pytest.raises(ConfigError, match="has no '/'"):
        BufferDefinition("a/b")


@pytest.mark.parametrize(("size", "workers", "capacities"), [(5, 2, [30, 20]), (1, 3, [10]), (7, 3, [30, 20, 20])])
def test_shards_hold_size_batches_together(size, workers, capacities):
    settings = BufferDefinition("b", size=size, batch_size=10, num_workers=workers)
    assert [settings.capacity(i) for i in range(settings.shards)] == capacities
