"""The iterators that are stacked on buffers."""

import gc
import threading
import time
import weakref

import numpy as np
import pytest
import torch

from bray import tree
from bray.errors import ConfigError, UnknownName
from bray.remote.buffer.handle import RemoteBuffer
from bray.remote.buffer.iterators import (
    BatchBuffer,
    CallbackBuffer,
    PrefetchBuffer,
    ReuseBuffer,
    SampleBuffer,
    TorchTensorBuffer,
    handle_nested_array,
    make_batch,
)
from tests.ray_for_tests import local_session  # noqa: F401
from tests.remote.test_remote_buffer import wait_until


def items(n, rows=2):
    return [{"x": np.full((rows, 3), i, np.float32)} for i in range(n)]


def test_batches_are_stacked_joined_or_listed():
    data = items(4)
    stacked = list(BatchBuffer(data, 2))
    assert [b["x"].shape for b in stacked] == [(2, 2, 3)] * 2
    joined = list(BatchBuffer(data, 2, kind="concate"))
    assert [b["x"].shape for b in joined] == [(4, 3)] * 2
    np.testing.assert_array_equal(joined[1]["x"][:, 0], [2, 2, 3, 3])
    listed = list(BatchBuffer(data, 2, kind=None))
    assert listed[1][0] is data[2]
    with pytest.raises(UnknownName, match="'concate'"):
        BatchBuffer(data, 2, kind="concat")
    with pytest.raises(ConfigError):
        BatchBuffer(data, 0)


def test_one_epoch_of_a_hundred_transitions_in_batches_of_32():
    data = [{"i": np.int64(i)} for i in range(100)]
    batches = list(BatchBuffer(data, 32))
    assert [len(b["i"]) for b in batches] == [32, 32, 32, 4]
    np.testing.assert_array_equal(np.concatenate([b["i"] for b in batches]), np.arange(100))
    again = [row for b in batches for row in tree.split(b)]  # a batch taken apart is what it was made of
    assert all(tree.equal(a, tree.map(np.asarray, b)) for a, b in zip(again, data, strict=True))


def test_batches_as_tensors():
    array = np.arange(6, dtype=np.float32).reshape(2, 3)
    frozen = np.arange(3)
    frozen.flags.writeable = False
    (got,) = TorchTensorBuffer([{"x": array, "y": (frozen, np.float64(2.5)), "t": torch.ones(1)}], "cpu")
    assert isinstance(got["x"], torch.Tensor)
    assert got["x"].data_ptr() == array.ctypes.data  # no copy
    assert got["y"][1].item() == 2.5
    got["y"][0][0] = 9
    assert frozen[0] == 0
    assert got["t"].item() == 1.0
    assert next(TorchTensorBuffer([np.arange(10)[::2]])).tolist() == [0, 2, 4, 6, 8]


def test_callbacks():
    assert list(CallbackBuffer([1, 2, 3], lambda x: x * 10)) == [10, 20, 30]


def test_buffers_are_mixed_by_weight():
    half = SampleBuffer([ReuseBuffer(["a"]), ReuseBuffer(["b"])], [0.5, 0.5])
    drawn = [next(half) for _ in range(1000)]
    assert abs(drawn.count("a") / 1000 - 0.5) < 0.002
    third = SampleBuffer([ReuseBuffer("a"), ReuseBuffer("b"), ReuseBuffer("c")], [3, 1, 0])
    drawn = [next(third) for _ in range(1000)]
    assert drawn.count("c") == 0
    for n in (10, 100, 1000):  # at any time, not only in the end
        assert abs(drawn[:n].count("a") - 0.75 * n) <= 1
    with pytest.raises(ConfigError, match="one weight per buffer: got 2 buffers and 1 weights"):
        SampleBuffer([[], []], [1.0])
    for weights in ([0.0, 0.0], [-1.0, 2.0], [float("nan"), 1.0]):
        with pytest.raises(ConfigError, match="at least 0, and not all 0"):
            SampleBuffer([[], []], weights)


def test_a_buffer_that_ends_leaves_the_mixture():
    mixed = list(SampleBuffer(["aa", "bbbbbb"], [0.5, 0.5]))
    assert sorted(mixed) == list("aabbbbbb")
    assert mixed[:4].count("a") == 2


def test_a_data_set_starts_over():
    data = ReuseBuffer([1, 2])
    assert [next(data) for _ in range(5)] == [1, 2, 1, 2, 1]
    with pytest.raises(StopIteration):
        next(ReuseBuffer([]))
    data = ReuseBuffer(iter([1, 2]))  # as the first Bray took it: kept in memory
    assert [next(data) for _ in range(5)] == [1, 2, 1, 2, 1]


# --- prefetch ---------------------------------------------------------------------------------------------------------


def prefetch_threads():
    return [t for t in threading.enumerate() if t.name.startswith("prefetch")]


def test_prefetch_runs_ahead_by_so_many():
    made = []

    def source():
        for i in range(10):
            made.append(i)
            yield i

    buffer = PrefetchBuffer(source(), size=3, name="x")
    wait_until(lambda: len(made) == 3)
    time.sleep(0.05)
    assert len(made) == 3
    assert [t.name for t in prefetch_threads()] == ["prefetch x"]
    assert list(buffer) == list(range(10))
    with pytest.raises(StopIteration):
        next(buffer)
    wait_until(lambda: not prefetch_threads())


def test_without_a_size_nothing_is_fetched_ahead():
    source = iter([1, 2, 3])
    buffer = PrefetchBuffer(source, size=0)
    assert next(buffer) == 1
    assert next(source) == 2
    assert not prefetch_threads()
    with pytest.raises(ConfigError):
        PrefetchBuffer([], size=-1)


def test_an_error_in_the_thread_reaches_the_consumer():
    def source():
        yield 1
        yield 2
        raise OSError("the disk is gone")

    buffer = PrefetchBuffer(source(), size=4)
    assert next(buffer) == 1
    assert next(buffer) == 2
    for _ in range(2):
        with pytest.raises(OSError, match="the disk is gone"):
            next(buffer)
    wait_until(lambda: not prefetch_threads())


def test_max_reuse_bounds_how_often_a_batch_is_given_again():
    gate = threading.Semaphore(0)

    def source():
        for i in range(4):
            gate.acquire()
            yield i

    buffer = PrefetchBuffer(source(), size=1, max_reuse=2, name="counted")
    gate.release()
    got = [next(buffer)]
    threading.Timer(0.2, gate.release).start()
    got += [next(buffer), next(buffer), next(buffer)]  # twice again, then it waits for the next one
    assert got == [0, 0, 0, 1]
    gate.release()
    wait_until(lambda: buffer.ready == 1)
    assert next(buffer) == 2  # a new one comes before any reuse
    gate.release()
    wait_until(lambda: buffer.ready == 1)
    assert [next(buffer)] == [3]
    assert buffer.reused == 2
    wait_until(lambda: not any(t.name == "prefetch counted" for t in threading.enumerate()))
    with pytest.raises(StopIteration):
        next(buffer)


def test_closing_ends_the_thread():
    buffer = PrefetchBuffer(ReuseBuffer([1]), size=1)
    next(buffer)
    buffer.close()
    wait_until(lambda: not prefetch_threads())
    with pytest.raises(StopIteration):
        next(buffer)
    forgotten = PrefetchBuffer(ReuseBuffer([1]), size=1)
    gone = weakref.ref(forgotten)
    del forgotten
    gc.collect()
    assert gone() is None
    wait_until(lambda: not prefetch_threads())


@pytest.mark.parametrize("late", [False, True])
def test_closing_ends_a_thread_that_waits_for_a_buffer(local_session, late):  # noqa: F811
    remote = RemoteBuffer("b", batch_size=2, num_workers=1)
    buffer = PrefetchBuffer(BatchBuffer(CallbackBuffer(remote, lambda b: b), 2), size=1)
    if late:
        time.sleep(0.1)
    buffer.close()
    wait_until(lambda: not prefetch_threads())
    remote.push({"i": 1}, {"i": 2})  # and it takes nothing that comes later
    assert list(remote.pop(10)["i"]) == [1, 2]


def test_a_stack_of_all(local_session):  # noqa: F811
    buffers = [RemoteBuffer(name, size=100, batch_size=4, num_workers=1) for name in "ab"]
    for buffer, value in zip(buffers, (0.0, 1.0), strict=True):
        buffer.push(*({"x": np.full(2, value, np.float32)} for _ in range(80)))
    mixed = BatchBuffer(SampleBuffer(buffers, [0.75, 0.25]), 4, kind="concate")
    stacked = PrefetchBuffer(CallbackBuffer(TorchTensorBuffer(mixed, "cpu"), lambda b: b["x"] * 2), size=2)
    got = next(stacked)
    assert got.shape == (16, 2)
    assert got.sum().item() == 2 * 2 * 4
    stacked.close()


def test_trees_by_hand():
    batch = make_batch([{"a": np.ones(2), "b": 1}, {"a": np.zeros(2), "b": 2}])
    assert batch["a"].shape == (2, 2)
    assert batch["b"].tolist() == [1, 2]
    assert handle_nested_array({"a": [1, (2,)]}, lambda x: x + 1) == {"a": [2, (3,)]}
