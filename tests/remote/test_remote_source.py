"""Sources: iterables that fill a buffer."""

import functools
import os
import signal
import threading
import time
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

import bray
from bray.data import write_episodes
from bray.errors import ConfigError, Ended
from bray.remote.buffer.handle import RemoteBuffer
from tests.buffer_for_tests import session_of
from tests.ray_for_tests import opened
from tests.remote.test_remote_buffer import wait_until


@pytest.fixture(params=["local", "sockets"])
def session(request, tmp_path):
    with session_of(request.param, tmp_path) as made:
        yield made


class Numbers:
    """A data set: numbers from `start`, in an array that is written anew for each."""

    def __init__(self, start, count, fail_at=None):
        self.start, self.count, self.fail_at = start, count, fail_at

    def __iter__(self):
        x = np.zeros(4, np.int64)
        for i in range(self.count):
            if i == self.fail_at:
                raise ValueError(f"line {i} of the file is broken")
            x[:] = self.start + i
            yield {"x": x}


@pytest.mark.parametrize("batch_size", [None, 7])
def test_every_item_arrives_epoch_times(session, batch_size):
    buffer = RemoteBuffer("b", size=4, batch_size=batch_size, num_workers=2)
    promise = buffer.add_source(*(Numbers(100 * k, 20) for k in range(3)), epoch=3)
    got = Counter(int(v) for item in buffer for v in np.atleast_2d(item["x"])[:, 0])
    assert got == {100 * k + i: 3 for k in range(3) for i in range(20)}
    assert promise.result(10) is None
    assert buffer.numbers()["dropped"] == 0


def test_an_epoch_in_batches(session):
    buffer = RemoteBuffer("b", size=8, batch_size=32, num_workers=1)
    buffer.add_source([{"i": np.int64(i)} for i in range(100)])
    batches = [b["i"] for b in buffer]
    assert [len(b) for b in batches] == [32, 32, 32, 4]
    np.testing.assert_array_equal(np.concatenate(batches), np.arange(100))  # one reader, one shard: in order


def test_a_source_that_raises_names_itself_and_stops_nothing_else(session, caplog):
    buffer = RemoteBuffer("b", size=4, num_workers=1)
    promise = buffer.add_source(Numbers(0, 10, fail_at=5), Numbers(100, 20), num_workers=1, epoch=2)
    got = Counter(int(item["x"][0]) for item in buffer)
    assert got == {**dict.fromkeys(range(5), 1), **dict.fromkeys(range(100, 120), 2)}
    with pytest.raises(ValueError, match="line 5 of the file is broken") as caught:
        promise.result(10)
    assert any("source 0 (Numbers) of source/b/0 raised" in note for note in caught.value.__notes__)
    assert "source 0 (Numbers) of source/b/0 raised; the others go on" in caplog.text
    assert 'raise ValueError(f"line {i} of the file is broken")' in caplog.text  # the user's own line


def test_samples_that_cannot_be_pushed_are_the_sources_error(session, caplog):
    buffer = RemoteBuffer("b", num_workers=1)
    promise = buffer.add_source([{"a": 1.0}, {"a": "text"}])
    assert [float(s["a"]) for s in buffer] == [1.0]
    with pytest.raises(bray.errors.DataError, match="this one holds a str"):
        promise.result(10)


def test_sources_wait_for_room(session):
    buffer = RemoteBuffer("b", size=4, num_workers=1)
    promise = buffer.add_source(Numbers(0, 2000))
    first = [int(next(buffer)["x"][0]) for _ in range(3)]
    assert first == [0, 1, 2]
    assert not promise.done()
    assert buffer.numbers()["waiting"] <= 4
    assert sum(1 for _ in buffer) == 1997


def test_a_source_that_is_stopped_halfway_does_not_wait_for_room(session):
    """The trainer has ended before it: with two sources a run took ten seconds more to end."""
    buffer = RemoteBuffer("b", size=4, num_workers=1)
    buffer.add_source(Numbers(0, 2000))
    assert int(next(buffer)["x"][0]) == 0
    began = time.monotonic()
    session.end()
    assert time.monotonic() - began < 4.0


def make_sources():
    return [Numbers(100 * k, 5) for k in range(5)]


def test_a_function_makes_the_sources_where_they_are_read(session):
    buffer = RemoteBuffer("b", num_workers=1)
    buffer.add_source(make_sources, num_workers=2)
    assert sorted(session.cluster.names("source/")) == ["source/b/0", "source/b/1"]
    got = Counter(int(item["x"][0]) for item in buffer)
    assert got == {100 * k + i: 1 for k in range(5) for i in range(5)}


def broken_sources():
    raise RuntimeError("no such folder")


def test_a_function_that_raises(session, caplog):
    buffer = RemoteBuffer("b", num_workers=1)
    promise = buffer.add_source(broken_sources, Numbers(0, 3), num_workers=1)
    assert len(list(buffer)) == 3
    with pytest.raises(RuntimeError, match="no such folder"):
        promise.result(10)
    assert "source 0 (broken_sources) of source/b/0 raised" in caplog.text


def test_more_sources_may_follow(session):
    buffer = RemoteBuffer("b", num_workers=1)
    buffer.add_source(Numbers(0, 3), name="first")
    assert len(list(buffer)) == 3
    with pytest.raises(Ended):
        buffer.pop(10)
    buffer.add_source(Numbers(10, 2), name="second")
    assert [int(s["x"][0]) for s in buffer] == [10, 11]
    buffer.add_source(Numbers(20, 1), name="second")
    assert session.cluster.names("source/") == ["source/first/0", "source/second/0", "source/second/1"]


class Slow:
    """Each needs all four to go on: they are read at the same time, or never."""

    barrier = threading.Barrier(4, timeout=20)

    def __iter__(self):
        for i in range(3):
            self.barrier.wait()
            yield {"i": np.int64(i)}


@pytest.mark.parametrize("num_workers", [1, 4])
def test_sources_are_read_in_parallel(session, num_workers):
    buffer = RemoteBuffer("b", num_workers=1)
    buffer.add_source(*(Slow() for _ in range(4)), num_workers=num_workers)
    assert Counter(int(s["i"]) for s in buffer) == {0: 4, 1: 4, 2: 4}


class Loads:
    """A data set whose items are loaded by their number. The first `in_work` have to be in work at once, or it takes
    for ever."""

    count = 24

    def __init__(self, in_work=4, fail_at=None):
        self.in_work, self.fail_at = in_work, fail_at
        self.barrier = threading.Barrier(in_work, timeout=20)

    def __len__(self):
        return self.count

    def __getitem__(self, i):
        if i >= self.count:
            raise IndexError(i)  # as iter() of an object without __iter__ expects it
        if i == self.fail_at:
            raise ValueError(f"file {i} is broken")
        if i < self.in_work:
            self.barrier.wait()
        return {"i": np.int64(i)}

    def __iter__(self):
        return (self[i] for i in range(self.count))


def test_one_source_is_read_by_several_workers_and_keeps_its_order(session):
    buffer = RemoteBuffer("b", size=100, num_workers=2)
    promise = buffer.add_source(Loads(), num_workers=4, epoch=2)
    assert [int(s["i"]) for s in buffer] == [*range(24)] * 2
    assert promise.result(10) is None
    assert session.cluster.names("source/") == [f"source/b/{i}" for i in range(4)]


def test_two_sources_share_the_workers_that_are_left(session):
    buffer = RemoteBuffer("b", size=100, num_workers=1)
    buffer.add_source(Loads(in_work=1), Numbers(100, 5), Loads(in_work=1), num_workers=4)
    got = [int(s["i"]) if "i" in s else int(s["x"][0]) for s in buffer]
    assert Counter(got) == Counter([*range(24)] * 2 + [*range(100, 105)])


def test_a_list_of_functions_is_called_in_parallel_and_in_order(session):
    source = Loads()
    buffer = RemoteBuffer("b", size=100, num_workers=1)
    buffer.add_source([functools.partial(source.__getitem__, i) for i in range(12)], num_workers=4)
    assert [int(s["i"]) for s in buffer] == list(range(12))
    buffer.add_source([functools.partial(Loads(in_work=1).__getitem__, i) for i in range(3)], name="one")
    assert [int(s["i"]) for s in buffer] == [0, 1, 2]


def test_an_item_that_fails_ends_its_source_at_its_place(session):
    buffer = RemoteBuffer("b", size=100, num_workers=1)
    promise = buffer.add_source(Loads(in_work=1, fail_at=9), num_workers=3)
    assert [int(s["i"]) for s in buffer] == list(range(9))
    with pytest.raises(ValueError, match="file 9 is broken"):
        promise.result(10)


def test_an_iterator_is_read_by_one_worker_and_more_are_told_why(session, caplog):
    buffer = RemoteBuffer("b", size=100, num_workers=2)
    buffer.add_source(Numbers(0, 50), num_workers=4)
    assert [int(s["x"][0]) for s in buffer] == list(range(50))  # two shards, and still in order
    assert session.cluster.names("source/") == ["source/b/0"]
    assert "give it __len__ and __getitem__" in caplog.text


@pytest.mark.parametrize(
    ("sources", "kwargs", "message"),
    [
        ((), {}, "at least one source"),
        (({"a": 1},), {}, "source 0: expected an iterable of samples.*got dict"),
        ((3,), {}, "got int"),
        ((iter([1]),), {"epoch": 2}, "list_iterator is an iterator, which can be read once, and epoch is 2"),
        (([1],), {"epoch": 0}, "epoch and num_workers are at least 1, got 0 and None"),
        (([1],), {"num_workers": 0}, "at least 1"),
    ],
)
def test_what_is_no_source(session, sources, kwargs, message):
    with pytest.raises(ConfigError, match=message):
        RemoteBuffer("b", num_workers=1).add_source(*sources, **kwargs)
    assert session.cluster.names("source/") == []


def test_a_reader_that_was_killed_goes_on_where_it_was(session):
    from bray.cluster import io
    from bray.remote.source import SourceReader

    buffer = RemoteBuffer("b", size=1000, num_workers=1)
    shard = session.cluster.hosted("buffer/b/0").worker
    io.run(shard.source("source/b/0", False))
    shard.progress("source/b/0", {"source 0 (Numbers)": (1, 4), "source 1 (Numbers)": (2, 0)})
    sources = [(0, Numbers(0, 10)), (1, Numbers(100, 10))]
    reader = SourceReader("source/b/0", buffer.settings, sources, 2, ["source/b/0"])
    io.run(reader.start())
    io.run(reader.wait(), 20)
    assert [int(s["x"][0]) for s in buffer] == list(range(4, 10))
    assert shard.progress("source/b/0") == {"source 0 (Numbers)": (2, 0), "source 1 (Numbers)": (2, 0)}


def test_episodes_of_a_run_fill_a_buffer(session, tmp_path):
    rng = np.random.default_rng(0)
    episodes = [
        {
            "obs": rng.random((n + 1, 3)).astype(np.float32),
            "action": rng.integers(0, 4, n),
            "reward": rng.random(n).astype(np.float32),
            "terminated": np.arange(n) == n - 1,
            "truncated": np.zeros(n, bool),
        }
        for n in (5, 8, 3)
    ]
    reader = bray.EpisodeReader(write_episodes(tmp_path / "episodes", episodes))
    buffer = RemoteBuffer("b", num_workers=1)
    buffer.add_source(reader, epoch=2)
    lengths = Counter(len(s["reward"]) for s in buffer)
    assert lengths == {5: 2, 8: 2, 3: 2}


class Files:
    """Items of 50 ms, that say in which process they were loaded."""

    def __len__(self):
        return 100

    def __getitem__(self, i):
        time.sleep(0.05)
        return {"i": np.int64(i), "pid": np.int64(os.getpid())}

    def __iter__(self):
        return (self[i] for i in range(len(self)))


@pytest.mark.slow
def test_four_workers_read_one_source_three_times_as_fast_and_leave_no_process(tmp_path):
    speeds, pids = {}, set()
    with opened(tmp_path):
        for workers in (1, 4):
            buffer = RemoteBuffer(f"b{workers}", size=200, num_workers=2)
            buffer.add_source(Files(), num_workers=workers)
            first, began = next(buffer), time.monotonic()
            items = [first, *buffer]
            speeds[workers] = 99 / (time.monotonic() - began)
            assert [int(s["i"]) for s in items] == list(range(100))
            assert len({int(s["pid"]) for s in items}) == workers
            pids |= {int(s["pid"]) for s in items}
    print(speeds)
    assert speeds[4] >= 3 * speeds[1]
    for pid in pids:
        wait_until(lambda pid=pid: not Path(f"/proc/{pid}").exists(), 30)


@pytest.mark.slow
def test_a_worker_that_is_killed_loses_no_item_and_no_order(tmp_path):
    with opened(tmp_path) as made:
        buffer = RemoteBuffer("b", size=200, num_workers=1)
        buffer.add_source(Files(), num_workers=3)
        items = [next(buffer) for _ in range(10)]
        os.kill(made.cluster.pid("source/b/2"), signal.SIGKILL)
        items += list(buffer)
        assert [int(s["i"]) for s in items] == list(range(100))
        assert len({int(s["pid"]) for s in items}) >= 3
