"""Master services: numbers, pictures and values of all processes, and what a restart of the master keeps."""

import asyncio
import os
import signal
import threading
import time
import urllib.request

import numpy as np
import pytest
import torch

from bray.errors import ConfigError, DataError, UnknownName, Unreachable
from bray.remote import master
from bray.remote.master import handle
from tests.ray_for_tests import opened


class Talker:
    """Another process that says things."""

    def merge(self, name, values, **labels):
        for v in values:
            master.merge(name, v, **labels)
        master.flush()

    def take(self, key):
        return master.register(key)

    def read(self, key):
        return master.get(key)

    def pid(self):
        return os.getpid()


@pytest.fixture(scope="module", params=["local", "ray"])
def session(request, tmp_path_factory):
    with opened(tmp_path_factory.mktemp(request.param), request.param) as made:
        made.cluster.start("talker/a", Talker)
        yield made


on_ray = pytest.mark.parametrize("session", ["ray"], indirect=True)


def talker(session):
    return session.cluster.find("talker/a")


def test_numbers_of_several_processes_add_up(session):
    talker(session).call("merge", "loss", [1.0, 2.0]).result()
    master.merge("loss", torch.tensor(6.0), desc={"avg": "the loss", "time_window_avg": "of late"})
    assert master.query("loss") == 3.0
    assert master.query("loss", "sum") == 9.0
    assert master.query("loss", "cnt") == 3
    assert master.query("loss", "time_window_sum") == 9.0


def test_single_episodes_of_several_processes_reach_the_master(session):
    talker(session).call("merge", "episode_return", range(60), agent="a").result()
    for value in range(60, 120):
        master.merge("episode_return", value, agent="a")
    assert master.query("episode_return", "last_100_avg", agent="a") == 69.5  # of 20 .. 119
    assert master.query("episode_return", "last_100_min", agent="a") == 20.0
    assert master.query("episode_return", "avg", agent="a") == 59.5


def test_labels_tell_numbers_apart(session):
    master.merge("hits", 1, map="a")
    master.merge("hits", 5, map="b")
    assert master.query("hits", map="b") == 5.0
    with pytest.raises(UnknownName, match=r"hits\{map=c\}.*Did you mean 'hits\{map="):
        master.query("hits", map="c")
    with pytest.raises(UnknownName, match="unknown kind of number 'median'"):
        master.query("hits", "median", map="a")
    with pytest.raises(UnknownName, match="Did you mean 'avg'"):
        master.merge("hits", 1, desc={"average": "x"})


def test_numbers_arrive_without_being_flushed(session):
    master.merge("quiet", 3.0)
    deadline = time.monotonic() + 10
    found = None
    while found is None and time.monotonic() < deadline:
        time.sleep(0.1)
        found = session.cluster.find("master").call("numbers").result().get("quiet")
    assert found["sum"] == 3.0


def test_a_query_waits_for_all_that_is_under_way(session, monkeypatch):
    """Also where the master is slow to answer the first message and quick to answer the second."""
    monkeypatch.setattr(handle, "SEND_EVERY", 0.05)
    member, slow = type(session.cluster.find("master")), [0.8]
    quick = member.call

    def call(self, method, *args, **kwargs):
        return late(self, *args, **kwargs) if method == "merged" and slow else quick(self, method, *args, **kwargs)

    async def late(self, *args, **kwargs):
        await asyncio.sleep(slow.pop())
        await quick(self, "merged", *args, **kwargs)

    monkeypatch.setattr(member, "call", call)
    master.merge("late", 1.0)
    time.sleep(0.2)  # it is under way
    master.merge("late", 2.0)
    time.sleep(0.2)
    assert not slow
    assert master.query("late", "sum") == 3.0


def test_what_is_not_a_number_is_left_out(session, caplog):
    master.merge("odd", float("nan"))
    master.merge("odd", 1.0)
    assert master.query("odd", "cnt") == 1


def test_threads_lose_nothing(session):
    def work():
        for _ in range(2000):
            master.merge("threads", 1)

    threads = [threading.Thread(target=work) for _ in range(4)]
    [t.start() for t in threads]
    [t.join() for t in threads]
    assert master.query("threads", "sum") == 8000


def test_shared_values(session):
    master.set("config", {"network": {"layers": [64, 64]}, "w": np.arange(3)})
    assert talker(session).call("read", "config").result()["network"] == {"layers": [64, 64]}
    assert master.get("nothing") is None
    assert master.get("nothing", 7) == 7


def test_register_gives_each_a_number(session):
    assert [master.register("rank"), talker(session).call("take", "rank").result(), master.register("rank")] == [
        0,
        1,
        2,
    ]
    assert master.register("other") == 0


def test_prometheus(session):
    master.merge("reward/win", 2.5, desc={"sum": "won"}, map='a"b')
    master.flush()
    port = session.cluster.find("master").call("metrics_port").result()
    text = urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10).read().decode()
    assert 'bray_reward_win_sum{map="a\\"b"} 2.5' in text
    assert 'bray_reward_win_count{map="a\\"b"} 1' in text
    assert "# TYPE bray_reward_win summary" in text


def test_metric_leaves_out_what_is_beyond_its_bounds(session, caplog):
    metric = master.Metric("bounded", up_bound=10, low_bound=0, max_samples=4, print_report=True)
    with caplog.at_level("INFO", "bray"):
        for value in (1, 2, 3, 99, 4):
            metric.merge(value)
    assert master.query("bounded", "sum") == 10
    assert master.query("bounded/outside", "sum") == 1
    assert (metric.count, metric.outside) == (4, 1)
    assert "bounded: mean 2.5" in caplog.text
    with pytest.raises(ConfigError, match="max_samples"):
        master.Metric("bounded", max_samples=0)


@pytest.mark.parametrize("kind", [list, np.array, torch.tensor])
def test_an_array_counts_as_its_values(session, kind):
    name = f"array/{kind.__name__}"
    master.merge(name, kind([[1.0, 2.0], [3.0, 6.0]]), {"last_100_max": "largest"})
    master.merge(name, 8)
    assert [master.query(name, k) for k in ("cnt", "sum", "avg", "last_100_max")] == [5, 20, 4, 8]


def test_what_is_no_number_is_refused_with_its_type(session):
    with pytest.raises(DataError, match="expected a number, an array or a tensor of numbers, got dict"):
        master.merge("odd", {"a": 1})


def test_metric_of_arrays_has_percentiles(session):
    metric = master.Metric("logits", up_bound=99, max_samples=50)
    metric.merge(np.arange(60.0).reshape(6, 10))  # the first 50 are published, 10 wait
    metric.merge(torch.full((3,), 100.0))
    assert (metric.count, metric.outside) == (60, 3)
    shown = {k: master.query(f"logits/{k}", "avg") for k in ("max", "min", "p50", "p90", "outside")}
    assert shown == {"max": 49, "min": 0, "p50": 24.5, "p90": pytest.approx(44.1), "outside": 1}
    assert master.query("logits", "avg") == 29.5
    assert master.query("logits/outside", "sum") == 3


@on_ray
def test_a_killed_master_keeps_totals_values_and_counters(session):
    master.merge("kept", 4.0)
    assert master.query("kept", "sum") == 4.0
    master.set("kept", "value")
    before = master.register("kept")
    member = session.cluster.find("master")
    member.call("_save").result()
    pid = session.cluster.pid("master")
    os.kill(pid, signal.SIGKILL)
    while os.path.exists(f"/proc/{pid}/exe"):  # what it still counts now, it would take with it
        time.sleep(0.01)
    master.merge("kept", 1.0)
    for left in reversed(range(5)):  # a busy machine starts it slowly
        try:
            assert master.get("kept") == "value"
            break
        except Unreachable:
            assert left
    assert master.query("kept", "sum") == 5.0
    assert master.register("kept") == before + 1
