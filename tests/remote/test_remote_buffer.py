"""RemoteBuffer, the same for shards of this process and for shards that are reached through sockets and shared
memory."""

import asyncio
import gc
import logging
import os
import pickle
import threading
import time
import warnings

import numpy as np
import pytest

from bray import tree
from bray.cluster import io
from bray.errors import ConfigError, DataError, Ended, MissingComponent, Overloaded, Unreachable
from bray.remote.buffer import columns, connection, reader, slabs, writer
from bray.remote.buffer.columns import Queue
from bray.remote.buffer.handle import RemoteBuffer, pop, push
from bray.remote.buffer.iterators import PrefetchBuffer
from bray.remote.buffer.worker import BufferShard
from tests.buffer_for_tests import session_of


@pytest.fixture(params=["local", "sockets"])
def session(request, tmp_path):
    with session_of(request.param, tmp_path) as made:
        yield made


on_sockets = pytest.mark.parametrize("session", ["sockets"], indirect=True)


def sample(i, size=3):
    return {"x": np.full(size, i, np.float32), "i": np.int64(i)}


LARGE = 20_000  # floats: 80 KB, which go through shared memory


def drain(buffer, n, timeout=10.0):
    out = [buffer.pop(timeout) for _ in range(n)]
    with pytest.raises(TimeoutError, match="nothing came from buffer 'b' in 0"):
        buffer.pop(0.1)
    return out


def wait_until(condition, timeout=60.0):
    end = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


@pytest.mark.parametrize("size", [3, LARGE])
def test_samples_come_out_as_they_went_in(session, size):
    buffer = RemoteBuffer("b", num_workers=2)
    given = [sample(i, size) for i in range(10)]
    buffer.push(*given).result(10)
    got = sorted(drain(buffer, 10), key=lambda s: s["i"])
    assert all(tree.equal(a, tree.map(np.asarray, b)) for a, b in zip(got, given, strict=True))


@pytest.mark.parametrize("size", [3, LARGE])
def test_batches_are_trees_of_arrays_that_may_be_written(session, size):
    buffer = RemoteBuffer("b", batch_size=4, num_workers=1)
    buffer.push(*(sample(i, size) for i in range(9))).result(10)
    first, second = drain(buffer, 2)
    assert first["x"].shape == (4, size)
    assert [*first["i"], *second["i"]] == list(range(8))
    for batch in (first, second):
        assert all(leaf.flags.writeable for leaf in tree.leaves(batch))
        assert (batch["x"] == batch["i"][:, None]).all()
    first["x"][:] = -1
    assert (second["x"][:, 0] == second["i"]).all()


@pytest.mark.parametrize("size", [3, LARGE])
def test_a_push_has_taken_what_it_needs_when_it_returns(session, size):
    buffer = RemoteBuffer("b", num_workers=1)
    x = np.zeros(size, np.float32)
    pushes = []
    for i in range(8):
        x[:] = i
        pushes.append(buffer.push({"x": x}))
    x[:] = -1
    for p in pushes:
        p.result(10)
    assert [float(s["x"][0]) for s in drain(buffer, 8)] == list(range(8))


def test_structures_of_all_kinds(session):
    buffer = RemoteBuffer("b", num_workers=1)
    given = [np.arange(3), (1, [2.5, {"a": True}]), {"x": np.zeros((0, 3))}, np.zeros(5), {"t": np.ones((2, 2), ">f4")}]
    buffer.push(*given).result(10)
    got = drain(buffer, 5)
    assert got[1] == (1, [2.5, {"a": True}])
    assert got[2]["x"].shape == (0, 3)
    np.testing.assert_array_equal(got[4]["t"], np.ones((2, 2)))


def test_what_cannot_be_pushed_is_refused_at_once_and_as_a_whole(session):
    buffer = RemoteBuffer("b", batch_size=2, num_workers=1)
    with pytest.raises(DataError, match="this one holds a str"):
        buffer.push({"a": 1.0}, {"a": "no"})
    buffer.push({"a": 1.0}).result(10)
    with pytest.raises(DataError, match=r"a: expected shape \(\), got shape \(2,\)"):
        buffer.push({"a": np.zeros(2)})
    buffer.push({"a": 2}).result(10)  # another dtype is no other structure
    (batch,) = drain(buffer, 1)
    np.testing.assert_array_equal(batch["a"], [1.0, 2.0])


@pytest.mark.parametrize("size", [3, LARGE])
def test_a_full_queue_drops_its_oldest_samples(session, size):
    buffer = RemoteBuffer("b", size=4, batch_size=2, num_workers=1)
    for i in range(20):
        buffer.push(sample(i, size)).result(10)
    numbers = buffer.numbers()
    assert (numbers["pushed"], numbers["dropped"], numbers["waiting"]) == (20, 12, 8)
    assert numbers["bytes"] == 8 * (4 * size + 8)
    assert [int(i) for b in drain(buffer, 4) for i in b["i"]] == list(range(12, 20))
    assert buffer.numbers()["popped"] == 8


def test_a_push_without_drop_waits_for_room(session):
    buffer = RemoteBuffer("b", size=4, num_workers=1)
    for i in range(4):
        buffer.push(sample(i), drop=False).result(10)
    pushes = {i: buffer.push(sample(i), drop=False) for i in range(4, 10)}
    with pytest.raises(TimeoutError, match="have not arrived"):
        pushes[9].result(0.2)
    assert not pushes[9].done()
    assert [int(buffer.pop(10)["i"]) for _ in range(10)] == list(range(10))
    pushes[9].result(10)
    assert buffer.numbers()["dropped"] == 0


@pytest.mark.parametrize("size", [3, LARGE])
def test_nothing_is_lost_without_drop_under_four_producers_and_two_consumers(session, size):
    buffer = RemoteBuffer("b", size=8, batch_size=None, num_workers=2)
    count = 300 if size == 3 else 60

    def produce(k):
        async def main():
            for i in range(count):
                await buffer.push(sample(1000 * k + i, size), drop=False)

        asyncio.run(main())

    got = []

    def consume():
        while True:
            try:
                s = buffer.pop(2.0)
            except TimeoutError:
                return
            assert (s["x"] == s["i"]).all()
            got.append(int(s["i"]))

    threads = [threading.Thread(target=produce, args=(k,)) for k in range(4)]
    threads += [threading.Thread(target=consume) for _ in range(2)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(60)
    assert sorted(got) == sorted(1000 * k + i for k in range(4) for i in range(count))


def test_pushes_that_nobody_awaits_are_bounded(session, monkeypatch):
    monkeypatch.setattr(writer, "MAX_SAMPLES", 50)
    buffer = RemoteBuffer("b", size=4, num_workers=1)
    taken = 0

    def push_all():
        nonlocal taken
        for i in range(10_000):
            buffer.push(sample(i), drop=False)
            taken += 1

    with pytest.raises(Overloaded, match=r"wait for room in buffer 'b'.*Await the pushes"):
        push_all()
    assert taken < 5000
    assert [int(buffer.pop(10)["i"]) for _ in range(taken)] == list(
        range(taken)
    )  # none of those that were taken is lost


def test_a_batch_is_pushed_as_its_rows_would_be(session):
    """Small rows in columns, large ones each for itself; mixed with single samples, whose layout they share."""
    buffer = RemoteBuffer("b", size=4, batch_size=10, num_workers=1)
    batch = {"x": np.arange(24).reshape(8, 3), "n": {"y": np.arange(8, dtype=np.float32)}}
    buffer.push({"x": np.full(3, -1), "n": {"y": np.float32(-1)}}, drop=False).result(10)
    buffer.push_batch(batch, drop=False).result(10)
    buffer.push({"x": np.full(3, -2), "n": {"y": np.float32(-2)}}, drop=False).result(10)
    got = buffer.pop(10)
    assert got["x"].tolist() == [[-1] * 3, *batch["x"].tolist(), [-2] * 3]
    assert got["n"]["y"].tolist() == [-1, *range(8), -2]
    assert got["x"].dtype == np.int64
    assert got["n"]["y"].dtype == np.float32
    with pytest.raises(DataError, match="same keys and shapes"):
        buffer.push_batch({"x": np.zeros((2, 4)), "n": {"y": np.zeros(2)}})

    large = RemoteBuffer("large", size=4, batch_size=3, num_workers=1)
    pictures = np.arange(3 * 20000, dtype=np.float32).reshape(3, 20000)
    large.push_batch(pictures, drop=False).result(10)
    assert np.array_equal(large.pop(10), pictures)

    two = RemoteBuffer("two", size=20, num_workers=2)
    two.push_batch(np.arange(9), drop=False).result(10)
    assert sorted(int(two.pop(10)) for _ in range(9)) == list(range(9))
    for wrong in ({"a": np.zeros(2), "b": np.zeros(3)}, {"a": 1.0}, {"a": np.zeros((0, 2))}):
        with pytest.raises(DataError, match=r"a batch needs arrays \[B, ...\] with the same B >= 1"):
            two.push_batch(wrong)


@pytest.mark.parametrize("session", ["local"], indirect=True)
@pytest.mark.parametrize("whole", [False, True])
def test_a_push_as_large_as_the_buffer_finds_the_room_of_all_shards(session, whole):
    for name, size in (("b", 40), ("c", 2)):
        buffer = RemoteBuffer(name, size=size, num_workers=2)
        buffer.push_batch(np.arange(size)) if whole else buffer.push(*range(size))
        assert buffer.numbers()["dropped"] == 0
        assert sorted(int(buffer.pop(10)) for _ in range(size)) == list(range(size))


def test_pushes_may_be_forgotten(session):
    buffer = RemoteBuffer("b", num_workers=1)

    async def main():
        for i in range(100):
            buffer.push(sample(i))
        await asyncio.sleep(0)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        asyncio.run(main())
        gc.collect()
    buffer.flush(10)
    assert sorted(int(s["i"]) for s in drain(buffer, 100)) == list(range(100))


def test_an_error_of_a_forgotten_push_is_logged(session, caplog):
    buffer = RemoteBuffer("b", batch_size=2, num_workers=1)
    buffer.push({"a": 1.0}).result(10)
    # as another process: it has not seen the first sample
    other = type(connection.connection(buffer.settings))(buffer.settings, session)
    other.writer.push(({"a": np.zeros(2)},), drop=True)
    wait_until(lambda: "did not arrive" in caplog.text)
    assert "a: expected shape (), got shape (2,)" in caplog.text
    with pytest.raises(DataError, match="expected shape"):
        other.writer.push(({"a": np.zeros(2)},), drop=True).result(10)
    other.close()


def test_a_cancelled_push_harms_no_other(session):
    buffer = RemoteBuffer("b", size=2, num_workers=1)

    async def main():
        buffer.push(sample(0), sample(1))
        first = buffer.push(sample(2), drop=False)
        second = asyncio.ensure_future(_awaited(buffer.push(sample(3), drop=False)))
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(_awaited(first), 0.05)
        for _ in range(4):
            await buffer.pop_async(10)
        await asyncio.wait_for(second, 10)

    asyncio.run(main())


async def _awaited(x):
    return await x


def test_pop_in_a_coroutine_does_not_hold_up_its_loop(session):
    buffer = RemoteBuffer("b", num_workers=2)

    async def main():
        waiting = [asyncio.create_task(buffer.pop_async(10)) for _ in range(3)]
        ticks = 0
        while ticks < 5:
            await asyncio.sleep(0.001)
            ticks += 1
        buffer.push(*(sample(i) for i in range(3)))
        assert sorted([int(s["i"]) for s in await asyncio.gather(*waiting)]) == [0, 1, 2]
        with pytest.raises(TimeoutError):
            await buffer.pop_async(0.05)

    asyncio.run(main())


def test_what_comes_for_a_cancelled_pop_is_not_lost(session):
    buffer = RemoteBuffer("b", num_workers=1)

    async def main():
        task = asyncio.create_task(buffer.pop_async())
        await asyncio.sleep(0.05)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        for i in range(3):
            await buffer.push(sample(i))
        return [int((await buffer.pop_async(10))["i"]) for _ in range(3)]

    assert asyncio.run(main()) == [0, 1, 2]


def test_a_pop_that_timed_out_takes_nothing(session):
    buffer = RemoteBuffer("b", num_workers=2)
    for _ in range(3):
        with pytest.raises(TimeoutError):
            buffer.pop(0.02)
    buffer.push(*(sample(i) for i in range(6))).result(10)
    assert sorted(int(s["i"]) for s in drain(buffer, 6)) == list(range(6))


def test_iteration_in_a_coroutine(session):
    buffer = RemoteBuffer("b", num_workers=1)
    buffer.push(*(sample(i) for i in range(5)))

    async def main():
        got = []
        async for s in buffer:
            got.append(int(s["i"]))
            if len(got) == 5:
                return got

    assert asyncio.run(main()) == list(range(5))


def test_next_waits_for_what_comes(session):
    buffer = RemoteBuffer("b", batch_size=2, num_workers=1)
    timer = threading.Timer(0.1, lambda: buffer.push(*(sample(i) for i in range(4))))
    timer.start()
    assert list(next(buffer)["i"]) == [0, 1]
    assert list(next(iter(buffer))["i"]) == [2, 3]


# --- finding ----------------------------------------------------------------------------------------------------------


def test_buffers_are_found_by_name(session):
    made = RemoteBuffer("b", size=3, batch_size=2, num_workers=2, density=50)
    found = RemoteBuffer("b")
    same = RemoteBuffer("b", 3, 2, 2, 50)
    sent = pickle.loads(pickle.dumps(made))
    assert made.settings == found.settings == same.settings == sent.settings
    assert repr(sent) == "RemoteBuffer('b')"
    assert len(pickle.dumps(made)) < 500
    sent.push(sample(0), sample(1), sample(2), sample(3)).result(10)
    assert found.numbers()["pushed"] == 4
    with pytest.raises(ConfigError, match=r"there with other settings: size=3 \(not 4\), batch_size=2 \(not None\)"):
        RemoteBuffer("b", size=4)


def test_push_and_pop_by_name(session):
    RemoteBuffer("b", num_workers=1)
    push("b", sample(1), sample(2)).result(10)
    assert [int(pop("b", 10)["i"]) for _ in range(2)] == [1, 2]
    with pytest.raises(MissingComponent, match="there is no buffer 'c' in this session; there are: 'b'"):
        push("c", sample(1))
    with pytest.raises(MissingComponent):
        pop("c")


def test_numbers_count_per_shard(session):
    buffer = RemoteBuffer("b", size=100, num_workers=3)
    for i in range(30):
        buffer.push(sample(i)).result(10)
    numbers = buffer.numbers()
    assert numbers["pushed"] == numbers["waiting"] == 30
    assert [s["shard"] for s in numbers["shards"]] == [0, 1, 2]
    assert all(s["pushed"] == 10 for s in numbers["shards"])  # in turn


@pytest.mark.parametrize("key", ["store", "alpha", "beta", "eps", "max_reuse", "pushed_per_sampled"])
def test_who_asks_for_replay_is_told_what_to_write(session, key):
    with pytest.raises(ConfigError, match=rf"buffer 'b': {key}: it is gone, .*replay_size.*PrioritizedBuffer.*handle"):
        RemoteBuffer("b", batch_size=2, **{key: "uniform"})
    with pytest.raises(ConfigError, match="buffer 'b': store: it is gone"):
        RemoteBuffer("b", 4, 2, 1, 100, "prioritized")
    assert RemoteBuffer("b", size=4, store="queue").settings == RemoteBuffer("b").settings


def test_an_ended_buffer_says_so(session):
    buffer = RemoteBuffer("b", batch_size=2, num_workers=2)
    promise = buffer.add_source([sample(0), sample(1), sample(2)])
    got = sorted(int(i) for batch in buffer for i in batch["i"])
    assert got == [0, 1, 2]
    promise.result(10)
    with pytest.raises(Ended, match="all sources of buffer 'b' have ended"):
        buffer.pop(10)
    with pytest.raises(StopIteration):
        next(buffer)


# --- memory -----------------------------------------------------------------------------------------------------------


@on_sockets
def test_large_samples_go_through_shared_memory_and_free_it(session):
    buffer = RemoteBuffer("b", size=16, num_workers=1)
    for i in range(8):
        buffer.push(sample(i, LARGE)).result(10)
    assert buffer.numbers()["shared_bytes"] >= 8 << 17
    kept = [buffer.pop(10) for _ in range(8)]
    view = kept[3]["x"][10:20]
    del kept
    gc.collect()
    assert float(view[0]) == 3.0
    wait_until(lambda: buffer.numbers()["shared_bytes"] == 1 << 17)  # the one that is held
    for i in range(8):
        buffer.push(sample(100 + i, LARGE)).result(10)
    assert (view == 3.0).all()  # nobody wrote where it lies


@on_sockets
def test_memory_is_bounded_when_samples_are_dropped(session):
    buffer = RemoteBuffer("b", size=4, num_workers=2)
    most = 0
    for i in range(200):
        buffer.push(sample(i, LARGE))
        if i % 20 == 0:
            buffer.flush(10)
            most = max(most, buffer.numbers()["shared_bytes"])
    buffer.flush(10)
    assert most <= (4 + 2) << 17  # what waits, and what is just being freed
    assert buffer.numbers()["pushed"] + buffer.numbers()["dropped"] >= 200


@on_sockets
@pytest.mark.parametrize("size", [3, LARGE])
def test_what_is_pushed_while_no_shard_answers_is_bounded(session, monkeypatch, size):
    monkeypatch.setattr(writer, "MAX_SAMPLES", 20)
    monkeypatch.setattr(writer, "MAX_BYTES", 100 * 80_000)
    opening = BufferShard.opening
    monkeypatch.setattr(BufferShard, "opening", lambda self: (_ for _ in ()).throw(Unreachable("it is busy")))
    buffer = RemoteBuffer("b", size=1000, num_workers=1)
    for i in range(200):
        if size == 3 and i % 5 == 0:
            buffer.push({"other": i})  # what waits is dropped message by message: make several
        buffer.push(sample(i, size))
    assert 150 <= buffer.numbers()["dropped"] < 240
    with pytest.raises(Overloaded):
        [buffer.push(sample(i, size), drop=False) for i in range(30)]
    monkeypatch.setattr(BufferShard, "opening", opening)
    buffer.flush(10)
    left = [buffer.pop(10) for _ in range(buffer.numbers()["waiting"])]
    assert int(left[-1]["i"]) in (199, *range(30))


@on_sockets
def test_a_forked_process_has_connections_of_its_own(session):
    buffer = RemoteBuffer("b", num_workers=1)
    buffer.push(sample(0)).result(10)
    pid = os.fork()
    if not pid:
        buffer.push(sample(1), sample(2, LARGE)).result(10)
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
    buffer.push(sample(3)).result(10)
    got = [buffer.pop(10) for _ in range(4)]
    assert sorted(int(s["i"]) for s in got) == [0, 1, 2, 3]


@on_sockets
def test_shared_memory_is_free_when_its_samples_are(session):
    buffer = RemoteBuffer("b", size=4, num_workers=1)
    buffer.push(sample(0, LARGE)).result(10)
    buffer.pop(10)
    gc.collect()
    wait_until(lambda: buffer.numbers()["shared_bytes"] == 0)
    buffer.push(sample(1, LARGE)).result(10)
    assert int(buffer.pop(10)["i"]) == 1


@on_sockets
def test_samples_of_all_sizes_arrive(session):
    buffer = RemoteBuffer("b", size=1000, num_workers=2)
    rng = np.random.default_rng(0)
    sizes = rng.integers(1, 300_000, 60)
    for i, n in enumerate(sizes):
        buffer.push(sample(i, int(n)))
    got = {}
    for _ in sizes:
        s = buffer.pop(10)
        got[int(s["i"])] = s["x"].copy()
    assert all((got[i] == i).all() and len(got[i]) == n for i, n in enumerate(sizes))


@on_sockets
def test_an_iteration_that_pauses_leaves_the_rest_to_others(session, monkeypatch):
    monkeypatch.setattr(reader, "PAUSE_S", 0.2)
    buffer = RemoteBuffer("b", size=100, num_workers=2)
    buffer.push(sample(0)).result(10)
    assert int(next(buffer)["i"]) == 0
    asking = lambda: sum(shard["asking"] for shard in buffer.numbers()["shards"])  # noqa: E731
    wait_until(lambda: asking() >= 2)  # it asks for more
    wait_until(lambda: asking() == 0)  # and withdraws
    buffer.push(*(sample(i) for i in range(1, 9))).result(10)
    assert buffer.numbers()["waiting"] == 8
    assert sorted(int(next(buffer)["i"]) for _ in range(8)) == list(range(1, 9))


@on_sockets
def test_small_samples_travel_together(session, monkeypatch):
    """A message for many: else a hundred bytes cost as much as a hundred thousand."""
    chunks, put = [], Queue.put
    monkeypatch.setattr(Queue, "put", lambda queue, chunk: (chunks.append(chunk.rows), put(queue, chunk)))
    buffer = RemoteBuffer("b", size=10_000, num_workers=1)
    for i in range(2000):
        buffer.push(sample(i))
    buffer.flush(10)
    assert sum(chunks) == 2000
    assert len(chunks) < 400
    assert [int(buffer.pop(10)["i"]) for _ in range(2000)] == list(range(2000))  # one shard, one producer: in order


@on_sockets
def test_without_shared_memory_samples_go_through_the_socket(session, monkeypatch):
    def no_window(address):  # as on another machine
        raise OSError

    monkeypatch.setattr(slabs, "Window", no_window)
    for name, kwargs in (("b", {}), ("c", {"batch_size": 2})):
        buffer = RemoteBuffer(name, num_workers=1, **kwargs)
        buffer.push(*(sample(i, LARGE) for i in range(4))).result(10)
        assert buffer.numbers()["shared_bytes"] == 0
        got = buffer.pop(10)
        assert (got["x"].reshape(-1, LARGE)[:, 0] == got["i"]).all()
        got["x"][:] = 0


@on_sockets
def test_a_consumer_that_keeps_too_much_gets_copies(session, monkeypatch):
    from bray.remote.buffer import worker

    monkeypatch.setattr(worker, "MAX_LEASED", 3 << 17)
    buffer = RemoteBuffer("b", size=16, num_workers=1)
    for i in range(8):
        buffer.push(sample(i, LARGE)).result(10)
    kept = [buffer.pop(10) for _ in range(8)]
    assert [int(s["i"]) for s in kept] == list(range(8))
    assert all((s["x"] == s["i"]).all() for s in kept)
    assert buffer.numbers()["shared_bytes"] <= 8 << 17


@on_sockets
@pytest.mark.parametrize(("density", "links"), [(100, 4), (50, 2), (1, 1)])
def test_density_is_the_part_of_the_shards_that_a_producer_connects_to(session, density, links):
    buffer = RemoteBuffer("b", size=400, num_workers=4, density=density)
    for i in range(40):
        buffer.push(sample(i)).result(10)
    shards = buffer.numbers()["shards"]
    assert sum(s["links"] for s in shards) == links
    assert sum(s["pushed"] > 0 for s in shards) == links
    got = {int(buffer.pop(10)["i"]) for _ in range(40)}  # consumers reach all
    assert got == set(range(40))
    assert all(s["links"] == 1 for s in buffer.numbers()["shards"])


@on_sockets
def test_producers_spread_over_the_shards(session):
    settings = RemoteBuffer("b", num_workers=4, density=25).settings
    links = [columns.Port() for _ in range(4)]
    assert {writer.Writer(settings, links, here=False).order[0] for _ in range(200)} == set(links)


def test_a_consumer_that_has_ended_takes_nothing_more(session):
    buffer = RemoteBuffer("b", size=8, batch_size=1, num_workers=1)
    ahead = PrefetchBuffer(buffer, size=1)
    buffer.push(sample(0))
    assert int(next(ahead)["i"][0]) == 0
    ahead.close()
    for i in range(3):
        buffer.push(sample(i)).result(10)
    assert buffer.numbers()["waiting"] == 3


def test_waiting_on_the_io_loop_is_told_what_to_do(session):
    buffer = RemoteBuffer("b", num_workers=1)

    async def wrong():
        return buffer.pop(1.0)

    async def right():
        await buffer.push(sample(5))
        return await buffer.pop_async(10)

    async def make():
        return RemoteBuffer("new")

    async def add():
        return buffer.add_source([sample(0)])

    with pytest.raises(RuntimeError, match=r"await pop_async\(\)"):
        io.run(wrong(), 10)
    if session.cluster.kind == "local":  # else the shards are other processes
        assert io.run(make(), 10).name == "new"
    with pytest.raises(RuntimeError, match="sources are added by the main program"):
        io.run(add(), 10)
    assert int(io.run(right(), 10)["i"]) == 5


def test_session_end_sends_what_was_pushed(tmp_path, caplog):
    caplog.set_level(logging.WARNING)
    with session_of("sockets", tmp_path) as session:
        buffer = RemoteBuffer("b", size=10_000, num_workers=1)
        shard = session.cluster.hosted("buffer/b/0").worker
        for i in range(3000):
            buffer.push(sample(i))
    assert shard.pushed == 3000
    assert "have not arrived" not in caplog.text
