"""What the tests of the batcher share: both event loops, an engine with a memory, a look at threads."""

import asyncio
import gc
import threading
import time

import numpy as np
import pytest
import uvloop

from bray import tree
from bray.inference import rows

INLINE, THREAD = float("inf"), 0.0  # values of inline_below that force the place (after the first forward)
LIMIT_S = 120  # nothing here takes a tenth of it


@pytest.fixture(name="run", params=[asyncio.run, uvloop.run], ids=["asyncio", "uvloop"])
def either_loop(request):
    """Run a coroutine function in either loop; a caller who waits forever is a failure, not a hang."""

    def go(main):
        async def bounded():
            return await asyncio.wait_for(main(), LIMIT_S)

        return request.param(bounded())

    return go


_before: set[threading.Thread] = set()


def batcher_threads():
    """Threads of the batchers of this test; tests of other files may have left theirs to the collector."""
    return [t for t in threading.enumerate() if t.name == "bray-batcher" and t not in _before]


@pytest.fixture(autouse=True)
def no_threads_left():
    _before.clear()
    _before.update(threading.enumerate())
    yield
    ours = batcher_threads()
    end = time.monotonic() + LIMIT_S / 4
    while any(t.is_alive() for t in ours) and time.monotonic() < end:
        gc.collect()
        time.sleep(0.001)
    assert not [t for t in ours if t.is_alive()]


class Doubler:
    """y = 2 x, and a memory: batch sizes, rows, threads, and whether two forwards ever ran at once."""

    def __init__(self, seconds=0.0):
        self.seconds = seconds
        self.batches: list[np.ndarray] = []
        self.threads: list[int] = []
        self.overlapped = False
        self._inside = threading.Lock()
        self.gate = threading.Event()
        self.gate.set()
        self.started = threading.Event()

    @property
    def sizes(self):
        return [len(x) for x in self.batches]

    def __call__(self, x):
        if not self._inside.acquire(blocking=False):
            self.overlapped = True
            raise AssertionError("two forwards at once")
        try:
            self.batches.append(np.array(x))
            self.threads.append(threading.get_ident())
            self.started.set()
            if not self.gate.wait(LIMIT_S):
                raise AssertionError("the gate stayed shut")
            if self.seconds:
                time.sleep(self.seconds)
            return {"y": x * 2, "sum": x.reshape(len(x), -1).sum(1)}
        finally:
            self._inside.release()


def sample(i, width=3, dtype=np.float32):
    return np.full(width, i, dtype)


async def turns(n=5):
    for _ in range(n):
        await asyncio.sleep(0)


async def until(condition):
    """Let the loop turn until something is so."""
    while not condition():
        await asyncio.sleep(0.001)


def worker_thread():
    """The thread of the only batcher that has one."""
    (thread,) = batcher_threads()
    return thread


def templates():
    """How many kinds of samples are remembered, by all batchers."""
    gc.collect()
    return sum(type(o) is rows.Template for o in gc.get_objects())


async def shut(batcher, fn):
    """Close the gate and let one sample into the engine: from now on the others have to wait."""
    fn.gate.clear()
    fn.started.clear()
    first = batcher.submit(sample(-1))
    await until(fn.started.is_set)
    return first


def check(row, i, width=3):
    assert row["y"].tolist() == [2.0 * i] * width
    assert row["sum"] == i * width


def total(*args):
    """A lenient engine: it takes whatever has a first dimension, and adds it all up."""
    leaves = tree.leaves(args)
    return {"total": sum(x.reshape(len(x), -1).sum(1) for x in leaves).astype(np.float64)}


def strict(x):
    if x.shape[1:] != (3,):
        raise ValueError(f"width 3, not {x.shape[1:]}")
    return {"total": x.sum(1)}
