"""Buffers whose producers, consumers and shards die, over sockets and shared memory, with processes that are killed."""

import contextlib
import gc
import os
import signal
import threading
import time

import numpy as np
import pytest

from bray.cluster import io
from bray.errors import MissingComponent, Unreachable
from bray.remote.buffer import connection
from bray.remote.buffer.handle import RemoteBuffer, find
from bray.remote.buffer.slabs import Slab, SlabAddress, Window, look_into
from bray.remote.buffer.worker import BufferShard
from tests.buffer_for_tests import child, session_of
from tests.remote.test_remote_buffer import LARGE, sample, wait_until


@pytest.fixture
def session(tmp_path):
    with session_of("sockets", tmp_path) as made:
        yield made


def restart(session, name):
    """As if the process of a shard were killed, and made anew: its samples and its memory are gone, its links break."""
    hosted = session.cluster.hosted(name)
    old = hosted.worker
    new = BufferShard(old.settings, old.index)
    io.run(new.start())
    hosted.worker = new
    for link in list(old.listener.links):
        io.loop().call_soon_threadsafe(link.abort)
    io.run(old.close())


# --- other processes --------------------------------------------------------------------------------------------------


def push_many(start, count, size, drop):
    buffer = find("b")
    for i in range(start, start + count):
        buffer.push(sample(i, size), drop=drop).result(30)
    return os.getpid()


@pytest.mark.parametrize("size", [3, LARGE])
def test_processes_push_and_pop(session, size):
    buffer = RemoteBuffer("b", size=8, num_workers=2)
    children = [child(session, push_many, 100 * k, 40, size, False) for k in range(2)]
    got = [buffer.pop(30) for _ in range(80)]
    assert all((s["x"] == s["i"]).all() for s in got)
    assert sorted(int(s["i"]) for s in got) == [*range(40), *range(100, 140)]
    for process, pipe in children:
        assert pipe.recv() == process.pid
        process.join(10)
    assert buffer.numbers()["dropped"] == 0


def push_forever(size):
    buffer = find("b")
    i = 0
    while True:
        buffer.push(sample(i, size))
        i += 1
        if i % 50 == 0:
            buffer.flush(10)


@pytest.mark.parametrize("size", [3, 400_000])
def test_a_producer_killed_while_it_pushes_leaves_no_half_sample(session, size):
    buffer = RemoteBuffer("b", size=16, num_workers=2)
    for _ in range(3):
        process, _ = child(session, push_forever, size)
        for _ in range(20):
            s = buffer.pop(30)
            assert (s["x"] == s["i"]).all()
        os.kill(process.pid, signal.SIGKILL)
        process.join(10)
    wait_until(lambda: sum(n["links"] for n in buffer.numbers()["shards"]) == 2)  # ours
    with contextlib.suppress(TimeoutError):
        while True:
            s = buffer.pop(0.3)
            assert (s["x"] == s["i"]).all()
    del s
    gc.collect()
    wait_until(lambda: buffer.numbers()["shared_bytes"] == 0)  # also what the killed ones were to write


def hold_batches(count):
    buffer = find("b")
    kept = [buffer.pop(30) for _ in range(count)]
    push_marker = {"x": np.full(LARGE, -len(kept), np.float32), "i": np.int64(-1)}
    find("done").push(push_marker).result(10)
    time.sleep(60)


def test_a_consumer_killed_with_batches_frees_its_memory(session):
    buffer, done = RemoteBuffer("b", size=16, num_workers=1), RemoteBuffer("done", num_workers=1)
    for i in range(8):
        buffer.push(sample(i, LARGE)).result(10)
    process, _ = child(session, hold_batches, 8)
    done.pop(30)
    before = buffer.numbers()["shared_bytes"]
    assert before >= 8 << 17
    os.kill(process.pid, signal.SIGKILL)
    process.join(10)
    wait_until(lambda: buffer.numbers()["shared_bytes"] <= before - (8 << 17))
    buffer.push(sample(9, LARGE)).result(10)
    assert int(buffer.pop(10)["i"]) == 9


# --- shards -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [3, LARGE])
def test_producers_and_consumers_go_on_when_a_shard_dies(session, size, caplog):
    buffer = RemoteBuffer("b", size=64, num_workers=2)
    for i in range(20):
        buffer.push(sample(i, size)).result(10)
    held = buffer.pop(10)
    waiting = session.cluster.hosted("buffer/b/0").worker.numbers()["waiting"]
    restart(session, "buffer/b/0")
    for i in range(20, 60):
        buffer.push(sample(i, size), drop=False).result(10)
    got = set()
    while len(got & set(range(20, 60))) < 40:
        s = buffer.pop(10)
        assert (s["x"] == s["i"]).all()
        got.add(int(s["i"]))
    assert (held["x"] == held["i"]).all()  # memory of the dead shard is there as long as someone looks at it
    assert "buffer/b/0 is gone: about" in caplog.text
    wait_until(lambda: session.cluster.hosted("buffer/b/0").worker.numbers()["links"] == 1)
    numbers = buffer.numbers()
    assert abs(numbers["lost"] - waiting) <= 1
    assert numbers["shards"][0]["pushed"] > 0  # and the new one is used


@pytest.mark.parametrize("size", [3, LARGE])
def test_nothing_that_waits_to_be_sent_is_lost_with_a_shard(session, size):
    """With one shard and drop=False: what has no receipt is sent again."""
    buffer = RemoteBuffer("b", size=4, num_workers=1)
    pushes = [buffer.push(sample(i, size), drop=False) for i in range(12)]
    time.sleep(0.2)
    restart(session, "buffer/b/0")
    got = set()

    def consume():
        while not got >= set(range(4, 12)):  # the first four were in the store
            s = buffer.pop(10)
            assert (s["x"] == s["i"]).all()
            got.add(int(s["i"]))

    consume()
    for p in pushes:
        p.result(10)


def test_a_shard_that_dies_all_the_time(session):
    buffer = RemoteBuffer("b", size=64, num_workers=2)
    stop = threading.Event()
    errors = []

    def produce(k):
        try:
            i = 0
            while not stop.is_set():
                buffer.push(sample(i, (3, LARGE)[i % 2]), drop=bool(k)).result(20)
                i += 1
        except BaseException as e:
            errors.append(e)

    threads = [threading.Thread(target=produce, args=(k,)) for k in range(2)]
    for t in threads:
        t.start()
    end = time.monotonic() + 4.0
    count = 0
    next_kill = time.monotonic() + 0.3
    while time.monotonic() < end:
        s = next(buffer)
        assert (s["x"] == s["i"]).all()
        count += 1
        if time.monotonic() > next_kill:
            restart(session, f"buffer/b/{count % 2}")
            next_kill += 0.3
    stop.set()
    while any(t.is_alive() for t in threads):
        with contextlib.suppress(TimeoutError):
            buffer.pop(0.1)
    assert not errors
    assert count > 50


def test_a_new_shard_is_told_of_the_sources(session):
    buffer = RemoteBuffer("b", num_workers=1)
    buffer.add_source([sample(i) for i in range(5)]).result(10)
    assert [int(s["i"]) for s in buffer] == list(range(5))
    restart(session, "buffer/b/0")
    assert list(buffer) == []  # it has ended, and its successor knows


def test_a_new_shard_is_told_that_others_push(session):
    buffer = RemoteBuffer("b", num_workers=1)
    io.run(session.cluster.hosted("buffer/b/0").worker.source("files", True))
    buffer.push(sample(0)).result(10)
    buffer.pop(10)
    restart(session, "buffer/b/0")
    wait_until(lambda: buffer.numbers()["shards"][0]["links"] == 1)
    io.run(session.cluster.hosted("buffer/b/0").worker.source("files", True))
    with pytest.raises(TimeoutError):  # not Ended
        buffer.pop(0.3)


def test_who_waits_for_a_stopped_buffer_is_told(session, monkeypatch):
    monkeypatch.setattr(connection, "RETRY_S", 0.05)
    buffer, other = RemoteBuffer("b", size=2, num_workers=2), RemoteBuffer("c", num_workers=1)
    late = buffer.push(*(sample(i) for i in range(9)), drop=False)
    names = ["buffer/b/0", "buffer/b/1", "buffer/c/0"]
    threading.Timer(0.3, lambda: [session.cluster.stop(n) for n in names]).start()
    with pytest.raises(Unreachable, match="buffer 'c' has been stopped"):
        other.pop(20)
    with pytest.raises(Unreachable, match="buffer 'b' has been stopped"):
        late.result(20)
    with pytest.raises(Unreachable):
        buffer.push(sample(1))
    with pytest.raises(MissingComponent):
        find("b")


# --- memory -----------------------------------------------------------------------------------------------------------


def test_a_slab_is_seen_through_a_window():
    slab = Slab()
    slot = slab.take(100_000)
    assert slot.size == 1 << 17
    memory = slot.data()
    window = Window(slab.address)
    view = window.data(slot.offset, slot.size)
    view[:5] = 7
    assert (memory[:5] == 7).all()
    slab.close()
    assert (view[:5] == 7).all()
    with pytest.raises(OSError, match="No such file"):
        Window(slab.address)


def test_a_window_shows_a_slab_to_others_after_its_owner_has_closed_it():
    slab = Slab()
    slot = slab.take(100)
    slot.data()[:3] = 5
    window = Window(slab.address)
    slab.close()
    again = look_into(window.address)
    assert again is not None
    assert (again.data(slot.offset, 3) == 5).all()


def test_what_was_lent_to_a_shard_that_died_is_not_overwritten(session):
    buffer = RemoteBuffer("b", size=64, num_workers=1)
    for i in range(8):
        buffer.push(sample(i, LARGE)).result(10)
    held = [buffer.pop(10) for _ in range(8)]
    restart(session, "buffer/b/0")
    for i in range(100, 140):
        buffer.push(sample(i, LARGE), drop=False).result(10)
    assert [int(s["x"][0]) for s in held] == list(range(8))
    assert all((s["x"] == s["i"]).all() for s in held)
    wait_until(lambda: buffer.numbers()["shared_bytes"] > 0)  # and the new samples lie in shared memory again


def test_what_is_no_slab_is_not_looked_into(tmp_path):
    slab = Slab()
    assert look_into(SlabAddress(slab.address.pid, slab.address.fd, b"x" * 16)) is None
    assert look_into(SlabAddress(2**22 + 1, 3, slab.address.nonce)) is None
    with open(tmp_path / "file", "w+") as file:
        assert look_into(SlabAddress(os.getpid(), file.fileno(), b"")) is None
    slab.close()


def test_slots_are_reused_and_free_ones_cost_no_memory():
    slab = Slab()

    def resident():
        return os.stat(f"/proc/self/fd/{slab.address.fd}").st_blocks * 512

    slots = [slab.take(8 << 20) for _ in range(32)]
    assert len({s.offset for s in slots}) == 32
    for slot in slots:
        slot.data()[::4096] = 1
    assert resident() >= 32 << 23
    assert slab.used == 32 << 23
    del slot, slots
    gc.collect()
    assert slab.used == 0
    assert resident() <= (64 << 20) + (1 << 20)
    before = resident()
    slot = slab.take(8 << 20)
    slot.data()[::4096] = 1
    assert resident() == before  # one whose pages are there
