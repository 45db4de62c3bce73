"""Buffers and sources on a real Ray: shards, producers, consumers and readers are processes, and some are killed."""

import asyncio
import contextlib
import os
import signal
import threading
import time
from collections import Counter

import numpy as np
import pytest

from bray.errors import ConfigError
from bray.remote.buffer.handle import RemoteBuffer, find
from tests.ray_for_tests import ray_session  # noqa: F401
from tests.remote.test_remote_buffer import LARGE, sample, wait_until


class Player:
    """A member that pushes and pops, as actors and trainers do."""

    def __init__(self, buffer=None):
        self.buffer = buffer
        self.kept = []

    async def push(self, start, count, size, drop=False):
        """On the io loop of its process."""
        buffer = self.buffer or RemoteBuffer("b")
        for i in range(start, start + count):
            await buffer.push(sample(i, size), drop=drop)
        return os.getpid()

    async def pop(self, count):
        return [int((await self.buffer.pop_async(30))["i"]) for _ in range(count)]

    async def keep(self, count):
        self.kept += [await self.buffer.pop_async(30) for _ in range(count)]
        return os.getpid()

    def push_from_threads(self, count, size):
        def run(k):
            for i in range(count):
                self.buffer.push(sample(1000 * k + i, size), drop=False).result(30)

        threads = [threading.Thread(target=run, args=(k,)) for k in range(2)]
        for t in threads:
            t.start()
        for t in threads:
            t.join()


class Numbers:
    """A data set that says where it is read."""

    def __init__(self, start, count, fail_at=None, pause=0.0):
        self.start, self.count, self.fail_at, self.pause = start, count, fail_at, pause

    def __iter__(self):
        for i in range(self.count):
            if i == self.fail_at:
                raise ValueError(f"line {i} of the file is broken")
            if self.pause:
                time.sleep(self.pause)
            yield {"i": np.int64(self.start + i), "pid": np.int64(os.getpid())}


@pytest.fixture(scope="module")
def players(ray_session):  # noqa: F811
    RemoteBuffer("b", size=32, num_workers=2)
    names = [f"player/{i}" for i in range(2)]
    return [ray_session.cluster.start(n, Player, None if i else find("b")) for i, n in enumerate(names)]


@pytest.mark.parametrize("size", [3, LARGE])
def test_members_push_and_this_process_pops(players, size):
    buffer = find("b")
    calls = [p.call("push", 100 * i, 30, size) for i, p in enumerate(players)]
    got = [buffer.pop(30) for _ in range(60)]
    assert len({c.result() for c in calls} | {os.getpid()}) == 3
    assert all((s["x"] == s["i"]).all() for s in got)
    assert sorted(int(s["i"]) for s in got) == [*range(30), *range(100, 130)]
    numbers = buffer.numbers()
    assert numbers["dropped"] == numbers["lost"] == 0

    def every_shard_has_had_some():  # who pushes before all its links are up sends to those that are
        if not all(s["pushed"] > 0 for s in buffer.numbers()["shards"]):
            players[0].call("push", 0, 1, size).result()
            buffer.pop(30)
            return False
        return True

    wait_until(every_shard_has_had_some)


def test_this_process_pushes_and_members_pop(players):
    buffer = find("b")
    calls = [players[0].call("pop", 20)]

    async def main():
        for i in range(40):
            buffer.push(sample(i), drop=False)
        await buffer.push(sample(40), drop=False)

    pushing = threading.Thread(target=lambda: asyncio.run(main()))
    pushing.start()
    got = calls[0].result()
    got += [int(buffer.pop(30)["i"]) for _ in range(21)]
    pushing.join(10)
    assert sorted(got) == list(range(41))


def test_a_buffer_is_made_once(ray_session, players):  # noqa: F811
    assert RemoteBuffer("b").settings.size == 32
    with pytest.raises(ConfigError, match=r"size=32 \(not 33\)"):
        RemoteBuffer("b", size=33, num_workers=2)
    made = []
    threads = [threading.Thread(target=lambda: made.append(RemoteBuffer("twice", num_workers=1))) for _ in range(2)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(60)
    assert len(made) == 2
    made[0].push(sample(1)).result(10)
    assert int(made[1].pop(10)["i"]) == 1
    ray_session.cluster.stop("buffer/twice/0")


def test_a_killed_shard_comes_back_and_nobody_waits_for_it(ray_session, players, caplog):  # noqa: F811
    buffer = find("b")
    stop = threading.Event()
    pushed, errors = Counter(), []

    def produce(drop):
        i = 0
        try:
            while not stop.is_set():
                buffer.push(sample(i, (3, LARGE)[i % 2]), drop=drop).result(30)
                pushed[drop] += 1
                i += 1
        except BaseException as e:
            errors.append(e)

    threads = [threading.Thread(target=produce, args=(d,)) for d in (False, True)]
    for t in threads:
        t.start()
    for _ in range(50):
        buffer.pop(30)
    old = buffer.numbers()["shards"][0]["pid"]
    os.kill(old, signal.SIGKILL)
    killed = time.monotonic()
    longest, last, asked = 0.0, killed, killed
    while time.monotonic() < killed + 120:
        s = buffer.pop(30)
        assert (s["x"] == s["i"]).all()
        now = time.monotonic()
        longest, last = max(longest, now - last), now
        if now > asked + 0.5:
            asked = now
            shards = buffer.numbers(timeout=2.0)["shards"]  # without those that do not answer
            last = time.monotonic()
            if any(s["shard"] == 0 and s["pid"] != old and s["pushed"] > 10 for s in shards):
                break
    recovered = time.monotonic() - killed
    stop.set()
    while any(t.is_alive() for t in threads):
        with contextlib.suppress(TimeoutError):
            buffer.pop(0.1)
    assert not errors
    assert recovered < 120
    assert longest < 20  # the other shard went on: a pop that waited for this one would have waited for 30 s and failed
    assert "buffer/b/0 is gone: " in caplog.text
    print(f"recovered in {recovered:.1f} s, longest wait {longest:.2f} s, lost about {buffer.numbers()['lost']}")
    with contextlib.suppress(TimeoutError):
        while True:
            buffer.pop(0.5)


def test_a_killed_consumer_frees_what_it_held(ray_session, players):  # noqa: F811
    buffer = find("b")
    holder = ray_session.cluster.start("player/holder", Player, buffer)
    for i in range(8):
        buffer.push(sample(i, LARGE)).result(10)
    pid = holder.call("keep", 6).result()
    before = buffer.numbers()["shared_bytes"]
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: buffer.numbers()["shared_bytes"] <= before - (6 << 17))
    assert buffer.numbers()["waiting"] <= 2
    with contextlib.suppress(TimeoutError):
        while True:
            buffer.pop(0.5)


def test_sources_are_read_in_processes_of_their_own(ray_session):  # noqa: F811
    buffer = RemoteBuffer("s", size=4, batch_size=8, num_workers=1)
    promise = buffer.add_source(Numbers(0, 20), Numbers(100, 20, fail_at=7), epoch=3, num_workers=2)
    rows = [(int(i), int(p)) for batch in buffer for i, p in zip(batch["i"], batch["pid"], strict=True)]
    assert Counter(i for i, _ in rows) == {**dict.fromkeys(range(20), 3), **dict.fromkeys(range(100, 107), 1)}
    pids = {p for _, p in rows}
    assert len(pids) == 2
    assert os.getpid() not in pids
    with pytest.raises(ValueError, match="line 7 of the file is broken") as caught:
        promise.result(30)
    notes = "\n".join(caught.value.__notes__)
    assert "source 1 (Numbers) of source/s/1 raised" in notes
    assert "raised in source/s/1 (pid " in notes
    assert 'raise ValueError(f"line {i} of the file is broken")' in notes
    with pytest.raises(ConfigError, match="cannot be sent to another process"):
        buffer.add_source(x for x in [1])


def test_a_killed_reader_goes_on_where_it_was(ray_session):  # noqa: F811
    buffer = RemoteBuffer("k", size=1000, num_workers=1)
    promise = buffer.add_source(Numbers(0, 300, pause=0.01))
    got = [next(buffer) for _ in range(150)]
    os.kill(int(got[0]["pid"]), signal.SIGKILL)
    got += list(buffer)
    counts = Counter(int(s["i"]) for s in got)
    assert set(counts) == set(range(300))
    assert max(counts.values()) <= 2
    assert len(got) < 300 + 290  # it did not begin anew
    assert len({int(s["pid"]) for s in got}) == 2
    promise.result(30)
