"""The batcher asked from many threads and in any order; stacking and splitting."""

import asyncio
import collections
import threading
import time

import numpy as np
import pytest

from bray import tree
from bray.errors import BrayError, DataError, Overloaded
from bray.inference import rows
from bray.inference.batcher import Batcher
from tests.batcher_for_tests import (  # noqa: F401  (fixtures)
    INLINE,
    LIMIT_S,
    THREAD,
    Doubler,
    check,
    either_loop,
    no_threads_left,
    sample,
    shut,
    strict,
    total,
    turns,
)

# --- without a loop, many threads -------------------------------------------------------------------------------------


def test_call_works_in_any_thread_beside_the_loop_and_never_two_at_once(run):
    fn = Doubler()
    wrong = []

    async def main():
        b = Batcher(fn, max_batch_size=8, inline_below=0.002)
        stop = threading.Event()

        def caller(i):
            k = 0
            while not stop.is_set():
                row, whole = b.call(sample(i)), b.call(np.full((3, 3), k, np.float32), batch=True)
                if row["sum"] != 3 * i or whole["y"].shape != (3, 3):
                    wrong.append((row, whole))
                k += 1

        threads = [threading.Thread(target=caller, args=(i,)) for i in range(3)]
        for t in threads:
            t.start()
        try:
            for round in range(60):
                for i, row in enumerate(await asyncio.gather(*[b.submit(sample(i)) for i in range(round % 9 + 1)])):
                    check(row, i)
        finally:
            stop.set()
            for t in threads:
                await asyncio.to_thread(t.join, LIMIT_S)
        await b.close()

    run(main)
    assert not fn.overlapped
    assert not wrong


def test_call_raises_what_the_engine_raises():
    b = Batcher(strict)
    with pytest.raises(ValueError, match="width 3"):
        b.call(sample(1, 4))
    assert b.call(sample(1))["total"] == 3


def test_statistics_count_what_happened(run):
    fn = Doubler()

    async def main():
        b = Batcher(fn, inline_below=THREAD)
        assert b.stats == {
            "batches": 0, "samples": 0, "mean_batch_size": 0.0, "queue": 0, "forward_s": None, "inline": False,
        }  # fmt: skip
        fn.seconds = 0.01
        await shut(b, fn)
        waiting = [b.submit(sample(i)) for i in range(5)]
        assert b.stats["queue"] == 5
        fn.gate.set()
        await asyncio.gather(*waiting)
        stats = b.stats
        assert (stats["batches"], stats["samples"], stats["mean_batch_size"], stats["queue"]) == (2, 6, 3.0, 0)
        assert 0.01 <= stats["forward_s"] < 5
        await b.close()

    run(main)


# --- anything in any order --------------------------------------------------------------------------------------------


class Whimsical:
    """y = 2 x after a random while; fails for batches that contain a multiple of 13."""

    def __init__(self, rng):
        self.rng, self.inside, self.overlapped = rng, threading.Lock(), False

    def __call__(self, x):
        if not self.inside.acquire(blocking=False):
            self.overlapped = True
            raise AssertionError("two forwards at once")
        try:
            pause = self.rng.choice([0.0, 0.0, 0.0002, 0.002])
            if pause:
                time.sleep(pause)
            if (x[:, 0] % 13 == 0).any():
                raise ValueError("thirteen")
            return (x * 2, {"first": x[:, 0]})
        finally:
            self.inside.release()


@pytest.mark.parametrize("seed", range(30))
def test_any_order_of_submit_cancel_and_close_leaves_nobody_waiting(run, seed):
    rng = np.random.default_rng(seed)
    fn = Whimsical(np.random.default_rng(seed + 1000))
    sizes = (4, 8) if seed % 3 == 0 else ()

    async def main():
        b = Batcher(
            fn,
            max_batch_size=int(rng.integers(1, 9)) if not sizes else 8,
            max_wait=float(rng.choice([0.0, 0.0, 0.001])),
            max_queue=int(rng.integers(3, 60)),
            pad_to=sizes,
            inline_below=float(rng.choice([0.0, 5e-4, INLINE])),
            template=(sample(0),) if seed % 2 else None,
        )
        futures: list[tuple[str, int, asyncio.Future]] = []
        done: list[int] = []
        refused = 0
        closing = None
        for i in range(1, 400):
            kind = rng.choice(["one", "one", "one", "batch", "bad", "cancel", "turn", "turn", "sleep", "call"])
            if kind == "cancel" and futures:
                futures[int(rng.integers(len(futures)))][2].cancel()
            elif kind == "turn":
                await asyncio.sleep(0)
            elif kind == "sleep":
                await asyncio.sleep(0.001)
            elif kind == "call" and closing is None and i % 13 and i % 5 == 0:
                np.testing.assert_array_equal(b.call(sample(i))[0], sample(2 * i))
            elif kind in ("one", "batch", "bad"):
                try:
                    if kind == "batch":
                        f = b.submit_batch(np.full((int(rng.integers(1, 20)), 3), i, np.float32))
                    else:
                        f = b.submit(sample(i, 4 if kind == "bad" else 3))
                except Overloaded:
                    refused += 1
                except BrayError:
                    assert closing is not None
                else:
                    f.add_done_callback(lambda f, i=i: f.cancelled() or f.exception() or done.append(i))
                    futures.append((kind, i, f))
            if closing is None and seed % 4 == 0 and i == 300:
                closing = asyncio.ensure_future(b.close())
        await asyncio.wait([f for _, _, f in futures], timeout=LIMIT_S)  # nobody waits forever
        counts = collections.Counter()
        for kind, i, f in futures:
            assert f.done()
            if f.cancelled():
                counts["cancelled"] += 1
            elif (e := f.exception()) is not None:
                counts[type(e).__name__] += 1
                if isinstance(e, DataError):
                    # without a template the first kind to be answered may be the odd one
                    assert kind == "bad" or (kind == "one" and not seed % 2)
                elif isinstance(e, ValueError):
                    assert str(e) == "thirteen"
                else:
                    assert type(e) is BrayError
                    assert closing is not None
            else:
                counts["answered"] += 1
                y, rest = f.result()
                assert set(np.ravel(y)) == {2.0 * i}
                assert set(np.ravel(rest["first"])) == {float(i)}
                assert i % 13
                if kind == "bad":
                    assert not seed % 2
        await turns(2)
        assert done == sorted(done)  # answers come in the order of the calls
        assert counts["answered"] >= 1
        assert b.stats["queue"] == 0
        await (closing or b.close())
        return refused

    run(main)
    assert not fn.overlapped


# --- stacking and splitting -------------------------------------------------------------------------------------------

Pair = collections.namedtuple("Pair", "a b")


def random_tree(rng, depth=0):
    kind = rng.choice(["leaf", "leaf", "dict", "tuple", "list", "pair"]) if depth < 3 else "leaf"
    if kind == "dict":
        return {k: random_tree(rng, depth + 1) for k in "xyz"[: rng.integers(1, 4)]}
    if kind in ("tuple", "list"):
        return {"tuple": tuple, "list": list}[kind](random_tree(rng, depth + 1) for _ in range(rng.integers(1, 3)))
    if kind == "pair":
        return Pair(random_tree(rng, depth + 1), random_tree(rng, depth + 1))
    shape = tuple(rng.integers(0, 4, rng.integers(0, 4)))
    return np.asarray(rng.integers(0, 100, shape)).astype(rng.choice(["float32", "uint8", "int64", "bool", "float16"]))


@pytest.mark.parametrize("seed", range(60))
def test_stacking_is_np_stack_and_splitting_its_inverse(seed):
    rng = np.random.default_rng(seed)
    example = random_tree(rng), random_tree(rng)
    template = rows.Template(tree.as_arrays(example))
    for n in (1, 2, 7):
        samples = [
            tree.map(lambda x: np.asarray(rng.permutation(x.ravel()).reshape(x.shape)), example) for _ in range(n)
        ]
        batch = tuple(template.stack(samples))
        assert tree.equal(batch, tree.stack(samples))
        for i, row in enumerate(rows.split(batch, n, n)):
            assert tree.equal(tree.map(np.asarray, row), samples[i])
        assert len(rows.split(batch, n, n - 1)) == n - 1
        assert type(batch[0]) is type(example[0])


def test_odd_arrays_of_the_right_kind_fit(run):
    """Other strides, byte order, key order, read-only memory, numpy scalars and tensors: the same numbers, the same
    sample."""
    grid = np.arange(12, dtype=np.float32).reshape(3, 4)
    read_only = np.frombuffer(np.ones(3, np.float32).tobytes(), np.float32)

    async def main():
        b = Batcher(lambda x, y: (x["a"], x["b"], y))
        vectors = [grid[:, 1], grid[:, 1].astype(">f4"), grid[::-1, 2][::-1], read_only, np.ma.array(grid[:, 3])]
        futures = [
            b.submit({"b": np.float64(i), "a": v} if i % 2 else {"a": v, "b": np.array(float(i))}, np.int64(i))
            for i, v in enumerate(vectors)
        ]
        for i, (v, f) in enumerate(zip(vectors, futures, strict=True)):
            x, s, y = await f
            np.testing.assert_array_equal(x, v)
            assert x.dtype == np.float32
            assert (s, y) == (i, i)
        await b.close()

    run(main)


def test_a_batch_is_run_at_once_where_that_takes_a_moment():
    fn = Doubler()
    b = Batcher(fn, max_batch_size=4, step=lambda: 7)
    x = np.arange(3.0)[:, None]
    assert b.run_now((x,), 3) is None  # how long it takes is not known
    b.call(x, batch=True)
    y, step = b.run_now((x,), 3)
    assert (y["y"].ravel().tolist(), step) == ([0.0, 2.0, 4.0], 7)
    assert b.run_now((np.zeros((5, 1)),), 5) is None  # more than a batch
    with b.lock:
        assert b.run_now((x,), 3) is None  # another forward runs
    fn.seconds = 0.05  # from now on its forwards take long
    for _ in range(2):
        b.call(x, batch=True)
    assert b.run_now((x,), 3) is None
