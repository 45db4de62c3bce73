"""The rules of the batcher, each with an engine that shows whether it is kept. Both event loops; no test waits for a clock to be fast."""

import asyncio
import collections
import gc
import subprocess
import sys
import threading
import time
import traceback
import weakref

import numpy as np
import pytest
import uvloop

from bray import tree
from bray.errors import BrayError, ConfigError, DataError, Overloaded
from bray.inference import batcher as module, rows
from bray.inference.batcher import Batcher

INLINE, THREAD = float("inf"), 0.0  # values of inline_below that force the place (after the first forward)
LIMIT_S = 20  # nothing here takes a tenth of it


@pytest.fixture(params=[asyncio.run, uvloop.run], ids=["asyncio", "uvloop"])
def run(request):
    """Run a coroutine function in either loop; a caller who waits forever is a failure, not a hang."""

    def go(main):
        async def bounded():
            return await asyncio.wait_for(main(), LIMIT_S)

        return request.param(bounded())

    return go


@pytest.fixture(autouse=True)
def no_threads_left():
    yield
    ours = [t for t in threading.enumerate() if t.name == "bray-batcher"]
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
    (thread,) = [t for t in threading.enumerate() if t.name == "bray-batcher"]
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


# --- when a batch starts ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("inline_below", [INLINE, THREAD], ids=["inline", "thread"])
def test_samples_of_one_turn_share_a_batch_and_each_gets_its_own_row(run, inline_below):
    fn = Doubler()

    async def main():
        b = Batcher(fn, inline_below=inline_below)
        check(await b.submit(sample(7)), 7)
        for n in (5, 1, 32):
            for i, row in enumerate(await asyncio.gather(*[b.submit(sample(i)) for i in range(n)])):
                check(row, i)
        await b.close()

    run(main)
    assert fn.sizes == [1, 5, 1, 32]
    assert len(set(fn.threads[1:])) == 1
    assert (fn.threads[1] == threading.get_ident()) == (inline_below == INLINE)


def test_an_idle_batcher_never_waits_for_more(run):
    fn = Doubler()

    async def main():
        b = Batcher(fn, inline_below=INLINE)
        await b.submit(sample(0))
        a = b.submit(sample(1))
        await asyncio.sleep(0)  # the rest of this turn: the batch starts after it
        await asyncio.sleep(0)
        c = b.submit(sample(2))
        check(await a, 1)
        check(await c, 2)
        await b.close()

    run(main)
    assert fn.sizes == [1, 1, 1]


@pytest.mark.parametrize(("largest", "sizes"), [(32, [1, 10]), (4, [1, 4, 4, 2])])
def test_samples_accumulate_while_a_batch_runs_then_all_are_taken_in_order(run, largest, sizes):
    fn = Doubler()

    async def main():
        b = Batcher(fn, max_batch_size=largest, inline_below=THREAD)
        first = await shut(b, fn)
        waiting = []
        for i in range(10):
            waiting.append(b.submit(sample(i)))
            await turns(2)
        assert b.stats["queue"] == 10
        assert not first.done()
        fn.gate.set()
        for i, row in enumerate(await asyncio.gather(*waiting)):
            check(row, i)
        check(await first, -1)
        await b.close()

    run(main)
    assert fn.sizes == sizes
    assert np.concatenate(fn.batches)[1:, 0].tolist() == list(range(10))


def test_max_wait_gathers_a_fuller_batch(run):
    fn = Doubler()

    async def main():
        b = Batcher(fn, max_batch_size=3, max_wait=0.5, inline_below=INLINE)
        a = b.submit(sample(1))
        await turns()
        c = b.submit(sample(2))
        await turns()
        assert fn.sizes == []  # it waits
        check(await a, 1)
        check(await c, 2)
        await b.close()

    run(main)
    assert fn.sizes == [2]


def test_a_full_batch_does_not_wait_and_neither_do_leftovers(run):
    fn = Doubler()

    async def main():
        b = Batcher(fn, max_batch_size=3, max_wait=3600.0, inline_below=INLINE)
        await asyncio.gather(*[b.submit(sample(i)) for i in range(3)])
        futures = []
        for i in range(3):
            futures.append(b.submit(sample(i)))
            await turns(2)
        for i, row in enumerate(await asyncio.gather(*futures)):
            check(row, i)
        for i, row in enumerate(await asyncio.gather(*[b.submit(sample(i)) for i in range(5)])):
            check(row, i)  # the two that a full batch left over are not kept waiting again
        assert len((await b.submit_batch(np.zeros((2, 3), np.float32)))["y"]) == 2  # nothing could make it fuller
        lonely = b.submit(sample(3))
        await turns()
        assert not lonely.done()
        await b.close()
        with pytest.raises(BrayError, match="closed while this caller waited"):
            await lonely

    run(main)
    assert fn.sizes == [3, 3, 3, 2, 2]


# --- the bounded queue ------------------------------------------------------------------------------------------------


def test_a_full_queue_refuses_at_once_and_says_what_to_do(run):
    fn = Doubler()

    async def main():
        b = Batcher(fn, max_queue=3, inline_below=THREAD)
        first = await shut(b, fn)
        waiting = [b.submit(sample(i)) for i in range(3)]
        for submit in (b.submit, lambda x: b.submit_batch(x[None])):
            with pytest.raises(Overloaded, match=r"3 callers wait.*max_queue is 3.*raise max_queue"):
                submit(sample(9))
        waiting[1].cancel()  # who gave up makes room
        waiting.append(b.submit(sample(3)))
        with pytest.raises(Overloaded):
            b.submit(sample(9))
        fn.gate.set()
        check(await first, -1)
        for i in (0, 2, 3):
            check(await waiting[i], i)
        check(await b.submit(sample(4)), 4)  # there is room again
        await b.close()

    run(main)
    assert 9 not in np.concatenate(fn.batches)


# --- padding ----------------------------------------------------------------------------------------------------------


def test_batches_are_padded_to_the_next_size_with_a_repeated_row_and_results_are_cut(run):
    fn = Doubler()

    async def main():
        b = Batcher(fn, max_batch_size=8, pad_to=(8, 1, 4), inline_below=INLINE)
        for n in (1, 2, 4, 5):
            out = await asyncio.gather(*[b.submit(sample(i + 1)) for i in range(n)])
            assert len(out) == n
            for i, row in enumerate(out):
                check(row, i + 1)
        whole = await b.submit_batch(np.arange(10, dtype=np.float32)[:, None])
        assert whole["y"][:, 0].tolist() == [2.0 * i for i in range(10)]
        assert whole["sum"].shape == (10,)
        assert b.stats["samples"] == 1 + 2 + 4 + 5 + 10  # padding does not count
        await b.close()

    run(main)
    assert fn.sizes == [1, 4, 4, 8, 8, 4]
    assert fn.batches[1][:, 0].tolist() == [1, 2, 2, 2]
    assert fn.batches[3][:, 0].tolist() == [1, 2, 3, 4, 5, 5, 5, 5]
    assert fn.batches[5][:, 0].tolist() == [8, 9, 9, 9]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"pad_to": (1, 8)}, r"pad_to=\(1, 8\) has no size for a batch of max_batch_size=32: add 32"),
        ({"pad_to": (0, 32)}, "pad_to"),
        ({"max_batch_size": 0}, "max_batch_size >= 1.*max_batch_size=0"),
        ({"max_queue": 0}, "max_queue >= 1"),
        ({"max_wait": -1.0}, "max_wait >= 0"),
    ],
)
def test_options_that_cannot_work_are_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        Batcher(Doubler(), **options)


# --- engine errors ----------------------------------------------------------------------------------------------------


class Odd(Exception):
    """An exception whose constructor wants something else than its args."""

    def __init__(self, what, *, code):
        super().__init__(f"odd {what}")
        self.code = code


ERRORS = [
    ValueError("no"),
    Odd("one", code=3),
    KeyError("k"),
    OSError(2, "gone", "file"),
    UnicodeDecodeError("utf-8", b"x", 0, 1, "bad"),
]


@pytest.mark.parametrize("inline_below", [INLINE, THREAD], ids=["inline", "thread"])
@pytest.mark.parametrize("error", ERRORS, ids=lambda e: type(e).__name__)
def test_an_engine_error_reaches_every_caller_of_its_batch_and_nobody_else(run, inline_below, error):
    calls = []

    def breaking_engine(x):
        calls.append(len(x))
        if len(calls) == 2:
            raise error
        return x

    async def main():
        b = Batcher(breaking_engine, inline_below=inline_below)
        await b.submit(sample(0))
        caught = await asyncio.gather(*[b.submit(sample(i)) for i in range(4)], return_exceptions=True)
        assert [type(e) for e in caught] == [type(error)] * 4
        assert {str(e) for e in caught} == {str(error)}
        for e in caught:
            assert getattr(e, "code", None) == getattr(error, "code", None)
            assert "breaking_engine" in "".join(traceback.format_exception(e))
        if not isinstance(error, (OSError, UnicodeDecodeError)):  # those cannot be copied
            assert len({id(e) for e in caught}) == 4
        assert (await b.submit(sample(5))).tolist() == [5, 5, 5]
        await b.close()

    run(main)
    assert calls == [1, 4, 1]


@pytest.mark.parametrize("kind", [SystemExit, KeyboardInterrupt, StopIteration, asyncio.CancelledError])
def test_what_would_end_a_thread_or_a_loop_is_an_error_for_the_callers_only(run, kind):
    def engine(x):
        if x[0, 0] == 1:
            raise kind("out")
        return x

    async def main():
        b = Batcher(engine, inline_below=THREAD)
        caught = await asyncio.gather(b.submit(sample(1)), b.submit(sample(1)), return_exceptions=True)
        assert [type(e) for e in caught] == [BrayError, BrayError]
        assert all(f"the engine raised {kind.__name__}" in str(e) and type(e.__cause__) is kind for e in caught)
        assert (await b.submit(sample(2))).tolist() == [2, 2, 2]
        await b.close()

    run(main)


def test_ctrl_c_in_an_inline_forward_ends_the_loop_and_fails_the_callers(run):
    waiting = []

    def engine(x):
        if x[0, 0] == 1:
            raise KeyboardInterrupt
        return x

    b = Batcher(engine, inline_below=INLINE)

    async def main():
        await b.submit(sample(0))
        waiting.extend([b.submit(sample(1)), b.submit(sample(1))])
        await asyncio.sleep(LIMIT_S)

    with pytest.raises(KeyboardInterrupt):
        run(main)
    assert all("KeyboardInterrupt" in str(f.exception()) for f in waiting)
    asyncio.run(b.close())


@pytest.mark.parametrize(
    ("outputs", "message"),
    [
        (lambda x: x[:-1], r"batch of 4 and returned 3 rows; each output needs one row per sample"),
        (lambda x: {"a": x, "b": {"c": x[:1]}}, r"batch of 4 and returned 1 rows for output 'b/c'"),
        (lambda x: (x, x[:0]), r"returned 0 rows for output '1'"),
        (lambda x: np.concatenate([x, x]), r"batch of 4 and returned 8 rows"),
        (lambda x: {"a": x, "loss": x.mean()}, r"a float32 without a batch dimension for output 'loss'"),
        (lambda x: None, r"a NoneType without a batch dimension"),
        (lambda x: {"a": x, "n": 4}, r"a int without a batch dimension for output 'n'"),
    ],
    ids=["short", "nested", "none", "many", "scalar", "nothing", "int"],
)
def test_an_engine_that_returns_the_wrong_number_of_rows_is_named(run, outputs, message):
    async def main():
        b = Batcher(outputs)
        caught = await asyncio.gather(*[b.submit(sample(i)) for i in range(4)], return_exceptions=True)
        assert len(caught) == 4
        for e in caught:
            with pytest.raises(BrayError, match=message):
                raise e
        with pytest.raises(BrayError, match=message):
            await b.submit_batch(np.zeros((4, 3), np.float32))
        await b.close()

    run(main)


# --- samples that do not fit ------------------------------------------------------------------------------------------


def total(*args):
    """A lenient engine: it takes whatever has a first dimension, and adds it all up."""
    leaves = tree.leaves(args)
    return {"total": sum(x.reshape(len(x), -1).sum(1) for x in leaves).astype(np.float64)}


OBS = {"position": np.ones(3, np.float32), "mask": np.ones(2, bool)}


@pytest.mark.parametrize(
    ("good", "bad", "message"),
    [
        (np.ones(3, np.float32), np.ones(4, np.float32), r"0: expected float32\[3\], got float32\[4\]"),
        (np.ones(3, np.float32), np.ones((3, 1), np.float32), r"expected float32\[3\], got float32\[3, 1\]"),
        (np.ones((2, 3), np.float32), np.ones((2, 4), np.float32), r"expected float32\[2, 3\], got float32\[2, 4\]"),
        (np.ones((2, 3), np.float32), np.ones((3, 3), np.float32), r"expected float32\[2, 3\], got float32\[3, 3\]"),
        (np.ones(3, np.float32), np.ones(3, np.float64), r"expected float32\[3\], got float64\[3\]"),
        (np.ones(3, np.float32), np.float32(1), r"expected float32\[3\], got float32\[\]"),
        (np.float32(1), np.ones(1, np.float32), r"expected float32\[\], got float32\[1\]"),
        (np.int64(1), 1.5, r"expected int64\[\], got float64\[\]"),
        (OBS, {**OBS, "mask": np.ones(3, bool)}, r"0/mask: expected bool\[2\], got bool\[3\]"),
        (OBS, {"position": OBS["position"]}, r"0/mask: expected bool\[2\], got nothing"),
        (OBS, {**OBS, "more": np.ones(1)}, r"0/more: expected nothing, got float64\[1\]"),
        (OBS, np.ones(3, np.float32), r"0/position: expected float32\[3\], got nothing"),
        ((np.ones(3), np.ones(3)), np.ones((2, 3)), r"0/0: expected float64\[3\], got nothing"),
        ((np.ones(3),), [np.ones(3)], r"other dicts, lists and tuples"),
        (np.ones(3, np.float32), "text", r"arrays of numbers, this one holds a str"),
        (np.ones(3, np.float32), np.array([object()] * 3), r"arrays of numbers"),
        (np.ones(3, np.float32), [[1.0], [1.0, 2.0]], r"expected float32\[3\], got nothing"),
    ],
    ids=lambda x: "",
)
@pytest.mark.parametrize("known", ["by majority", "by experience", "by declaration"])
def test_a_sample_that_does_not_fit_fails_its_own_caller_only(run, good, bad, message, known):
    expected = total(tree.map(lambda x: np.asarray(x)[None], good))["total"][0]

    async def main():
        b = Batcher(total, template=(good,) if known == "by declaration" else None)
        if known == "by experience":
            assert (await b.submit(good))["total"] == expected
        mixed = [good, bad, good, good, bad, good] if known == "by majority" else [bad, bad, good, bad, good, bad]
        futures = [b.submit(x) for x in mixed]
        for x, result in zip(mixed, await asyncio.gather(*futures, return_exceptions=True), strict=True):
            if x is bad:
                with pytest.raises(DataError, match=message):
                    raise result
            else:
                assert result["total"] == expected
        if known == "by declaration":
            with pytest.raises(DataError, match=message):
                await b.submit(bad)
            with pytest.raises(DataError, match=message):
                b.call(bad)
        assert (await b.submit(good))["total"] == expected
        await b.close()

    run(main)


def test_two_bad_samples_whose_sizes_make_up_for_each_other_do_not_shift_the_others(run):
    async def main():
        b = Batcher(total)
        await b.submit(sample(1))
        samples = [sample(1), sample(10, 2), sample(100, 4), sample(1000)]
        out = await asyncio.gather(*[b.submit(x) for x in (*samples, sample(1))], return_exceptions=True)
        assert [getattr(x, "args", x) and type(x) for x in out] == [dict, DataError, DataError, dict, dict]
        assert [out[0]["total"], out[3]["total"]] == [3, 3000]
        await b.close()

    run(main)


def test_a_batch_of_another_kind_is_not_forced_into_the_shape_of_the_last(run):
    async def main():
        b = Batcher(lambda x: x)
        for shape in ((2, 3, 4), (2, 4, 3), (3, 2, 4), (24,), (2, 3, 4)):
            x = np.arange(24.0).reshape(shape)
            for row in await asyncio.gather(b.submit(x), b.submit(x)):
                np.testing.assert_array_equal(row, x)
        await b.close()

    run(main)


def test_a_wrong_number_of_arguments_fails_its_own_caller_only(run):
    async def main():
        b = Batcher(total)
        good = [b.submit(sample(1), sample(2)) for _ in range(3)]
        bad = [b.submit(sample(1)), b.submit(sample(1), sample(2), sample(3)), b.submit()]
        assert [x["total"] for x in await asyncio.gather(*good)] == [9, 9, 9]
        for e, message in zip(
            await asyncio.gather(*bad, return_exceptions=True),
            (r"1: expected float32\[3\], got nothing", r"2: expected nothing, got float32\[3\]", "0: expected"),
            strict=True,
        ):
            with pytest.raises(DataError, match=message):
                raise e
        await b.close()

    run(main)


def strict(x):
    if x.shape[1:] != (3,):
        raise ValueError(f"width 3, not {x.shape[1:]}")
    return {"total": x.sum(1)}


def test_before_anything_was_answered_the_engine_says_which_kind_is_right(run):
    """The majority may be the wrong ones; those who are right get their answer all the same."""

    async def main():
        b = Batcher(strict)
        out = await asyncio.gather(
            *[b.submit(x) for x in (sample(1, 4), sample(1, 4), sample(1, 4), sample(1), sample(1, 5))],
            return_exceptions=True,
        )
        assert [type(x) for x in out] == [ValueError, ValueError, ValueError, dict, DataError]
        assert out[3]["total"] == 3
        assert "expected float32[3], got float32[5]" in str(out[4])
        # from now on it is known, however many are wrong
        out = await asyncio.gather(
            *[b.submit(x) for x in (sample(1, 4), sample(1, 4), sample(2))], return_exceptions=True
        )
        assert [type(x) for x in out] == [DataError, DataError, dict]
        await b.close()

    run(main)


def test_one_odd_sample_that_a_lenient_engine_answered_does_not_become_the_rule(run):
    before = templates()

    async def main():
        b = Batcher(total)
        await asyncio.gather(*[b.submit(sample(1)) for _ in range(3)])
        assert (await b.submit(sample(1, 5)))["total"] == 5  # alone, the engine decides
        out = await asyncio.gather(b.submit(sample(1, 5)), b.submit(sample(1)), return_exceptions=True)
        assert [type(x) for x in out] == [DataError, dict]
        for width in range(6, 40):  # and nobody can fill the memory with kinds
            await b.submit(sample(1, width))
        assert templates() - before <= 17
        out = await asyncio.gather(b.submit(sample(1, 7)), b.submit(sample(1)), return_exceptions=True)
        assert [type(x) for x in out] == [DataError, dict]
        await b.close()

    run(main)


def test_an_error_of_the_engine_in_a_mixed_batch_goes_to_those_who_fit(run):
    def engine(x):
        if x.shape[1:] == (3,) and x[0, 0] == 9:
            raise ValueError("nine")
        return x

    async def main():
        b = Batcher(engine)
        await b.submit(sample(1))
        out = await asyncio.gather(*[b.submit(x) for x in (sample(9), sample(9, 4), sample(9))], return_exceptions=True)
        assert [type(x) for x in out] == [ValueError, DataError, ValueError]
        await b.close()

    run(main)


# --- cancelling -------------------------------------------------------------------------------------------------------


def test_who_is_cancelled_while_waiting_is_skipped(run):
    fn = Doubler()

    async def main():
        b = Batcher(fn, inline_below=THREAD)
        first = await shut(b, fn)
        waiting = [b.submit(sample(i)) for i in range(5)]
        for i in (0, 3):
            waiting[i].cancel()
        fn.gate.set()
        for i in (1, 2, 4):
            check(await waiting[i], i)
        await first
        gone = [b.submit(sample(7)) for _ in range(3)]
        for f in gone:
            f.cancel()
        await turns()
        check(await b.submit(sample(8)), 8)  # a batch of nobody was not run, and did not stop the next
        await b.close()

    run(main)
    assert [x[:, 0].tolist() for x in fn.batches] == [[-1], [1, 2, 4], [8]]


def test_who_is_cancelled_during_the_forward_harms_nobody(run):
    fn = Doubler()

    async def main():
        b = Batcher(fn, inline_below=THREAD)
        fn.gate.clear()
        futures = [b.submit(sample(i)) for i in range(4)]

        async def caller():
            return await futures[2]

        task = asyncio.ensure_future(caller())
        await until(fn.started.is_set)
        futures[0].cancel()
        task.cancel()
        await turns()
        fn.gate.set()
        check(await futures[1], 1)
        check(await futures[3], 3)
        assert futures[0].cancelled()
        assert futures[2].cancelled()
        check(await b.submit(sample(5)), 5)
        await b.close()

    run(main)


def test_callers_of_a_failing_batch_may_be_cancelled_too(run):
    def engine(x):
        raise ValueError("no")

    async def main():
        b = Batcher(engine)
        a, c = b.submit(sample(1)), b.submit(sample(2))
        a.cancel()
        with pytest.raises(ValueError, match="no"):
            await c
        await b.close()

    run(main)


# --- closing, dying ---------------------------------------------------------------------------------------------------


def test_close_fails_those_who_wait_answers_those_who_run_and_ends_the_thread(run):
    fn = Doubler()

    async def main():
        b = Batcher(fn, max_batch_size=2, inline_below=THREAD)
        first = await shut(b, fn)
        waiting = [b.submit(sample(i)) for i in range(3)] + [b.submit_batch(np.zeros((5, 3), np.float32))]
        thread = worker_thread()
        closing = [asyncio.ensure_future(b.close()), asyncio.ensure_future(b.close())]
        await turns()
        for f in waiting:
            with pytest.raises(BrayError, match="closed while this caller waited"):
                await f
        assert not closing[0].done()  # it waits for the running batch
        with pytest.raises(BrayError, match="closed"):
            b.submit(sample(1))
        with pytest.raises(BrayError, match="closed"):
            b.submit_batch(sample(1)[None])
        with pytest.raises(BrayError, match="closed"):
            b.call(sample(1))
        fn.gate.set()
        await asyncio.gather(*closing)
        check(await first, -1)
        await b.close()  # again: nothing happens
        await asyncio.to_thread(thread.join, LIMIT_S)
        assert not thread.is_alive()
        assert b.stats["queue"] == 0

    run(main)
    assert fn.sizes == [1]


def test_close_gives_up_a_forward_that_hangs(run):
    fn = Doubler()

    async def main():
        b = Batcher(fn, inline_below=THREAD)
        first = await shut(b, fn)
        await b.close(timeout=0.05)
        with pytest.raises(BrayError, match=r"did not end within 0.05 s"):
            await first
        fn.gate.set()  # it comes back when nobody wants to know any more
        await asyncio.sleep(0.05)

    run(main)


def test_a_batcher_that_was_never_used_can_be_closed(run):
    async def main():
        await Batcher(Doubler()).close()

    run(main)


def test_a_batch_that_is_about_to_start_is_closed_too(run):
    fn = Doubler()

    async def main():
        b = Batcher(fn, inline_below=INLINE)
        await b.submit(sample(0))
        late = b.submit(sample(1))
        await b.close()
        with pytest.raises(BrayError, match="closed while this caller waited"):
            await late
        await turns()

    run(main)
    assert fn.sizes == [1]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_callers_of_a_thread_that_dies_get_an_error_and_the_next_get_a_new_thread(run, monkeypatch):
    monkeypatch.setattr(module, "WATCH_S", 0.05)
    fn = Doubler()

    def no_memory(*args):
        raise MemoryError

    async def main():
        b = Batcher(fn, inline_below=THREAD)
        with monkeypatch.context() as m:  # its thread cannot say that it is done, and dies
            m.setattr(asyncio.get_running_loop(), "call_soon_threadsafe", no_memory, raising=False)
            lost = [b.submit(sample(2)), b.submit(sample(3))]
            await until(lambda: fn.sizes)
            await until(lambda: not any(t.name == "bray-batcher" for t in threading.enumerate()))
        late = b.submit(sample(4))
        for f in lost:
            with pytest.raises(BrayError, match="thread that ran the forward has died"):
                await f
        check(await late, 4)
        five = await shut(b, fn)
        six = b.submit(sample(6))
        await turns()
        assert not five.done()
        fn.gate.set()
        check(await five, -1)
        check(await six, 6)
        # one that dies between two batches is replaced before anybody notices
        thread = worker_thread()
        thread.jobs.put(None)
        await until(lambda: not thread.is_alive())
        check(await b.submit(sample(7)), 7)
        await b.close()

    run(main)
    assert fn.sizes == [2, 1, 1, 1, 1]
    assert not fn.overlapped


def test_no_thread_to_be_had_is_an_error_for_the_callers(run, monkeypatch):
    fn = Doubler()

    async def main():
        b = Batcher(fn, inline_below=THREAD)

        def start(self):
            raise RuntimeError("can't start new thread")

        with monkeypatch.context() as m:
            m.setattr(threading.Thread, "start", start)
            with pytest.raises(RuntimeError, match="can't start new thread"):
                await b.submit(sample(1))
        check(await b.submit(sample(2)), 2)
        await b.close()

    run(main)


@pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def test_a_loop_that_goes_away_leaves_nobody_behind(new_loop):
    """The loop ends while a forward runs and others wait: the thread ends quietly, and what is left can be closed elsewhere."""
    fn = Doubler()
    b = Batcher(fn, inline_below=THREAD)
    loop = new_loop()
    futures = []

    async def main():
        futures.append(await shut(b, fn))
        futures.append(b.submit(sample(1)))

    loop.run_until_complete(main())
    loop.close()
    thread = worker_thread()
    fn.gate.set()
    asyncio.run(b.close())
    thread.join(LIMIT_S)
    assert not thread.is_alive()
    assert all(isinstance(f.exception(), BrayError) for f in futures)


def test_asyncio_run_ends_while_a_forward_runs(run):
    fn = Doubler()
    seen = []

    async def main():
        b = Batcher(fn, inline_below=THREAD)

        async def caller():
            try:
                await b.submit(sample(1))
            except asyncio.CancelledError:
                seen.append("cancelled")
                raise

        fn.gate.clear()
        keep = [asyncio.ensure_future(caller()) for _ in range(3)]
        await until(fn.started.is_set)
        assert len(keep) == 3

    run(main)
    fn.gate.set()
    assert seen == ["cancelled"] * 3


def test_a_batcher_belongs_to_one_loop(run):
    b = Batcher(Doubler(), inline_below=THREAD)

    async def use():
        check(await b.submit(sample(1)), 1)
        with pytest.raises(BrayError, match=r"one event loop.*a thread without a loop; call\(\) works anywhere"):
            await asyncio.to_thread(b.submit, sample(1))
        check(await asyncio.to_thread(b.call, sample(2)), 2)

    async def another():
        with pytest.raises(BrayError, match="another loop"):
            b.submit(sample(1))
        await b.close()

    with pytest.raises(BrayError, match="a thread without a loop"):
        b.submit(sample(1))
    run(use)
    run(another)


def test_a_forgotten_batcher_takes_its_thread_with_it(run, monkeypatch):
    monkeypatch.setattr(module, "WATCH_S", 0.01)

    async def main():
        b = Batcher(Doubler(), inline_below=THREAD)
        await b.submit(sample(1))
        thread, gone = worker_thread(), weakref.ref(b)
        del b
        await until(lambda: gc.collect() is not None and gone() is None)
        await asyncio.to_thread(thread.join, LIMIT_S)
        assert not thread.is_alive()

    run(main)


def test_a_process_that_ends_lets_a_running_forward_end_and_does_not_wait_for_one_that_hangs(tmp_path):
    """A thread that is in an engine's C++ when the interpreter goes aborts the process."""
    code = """
import asyncio, pathlib, sys, time
import numpy as np
from bray.inference import batcher
batcher._EXIT_S = 5.0 if sys.argv[2] == "0.5" else 0.1
done = pathlib.Path(sys.argv[1])
def engine(x):
    time.sleep(float(sys.argv[2]))
    done.touch()
    return x
async def main():
    global b
    b = batcher.Batcher(engine)
    b.submit(np.zeros(1))
    await asyncio.sleep(0.1)
asyncio.run(main())
"""
    for seconds, ended in (("0.5", True), ("60", False)):
        done = tmp_path / seconds
        subprocess.run([sys.executable, "-c", code, str(done), seconds], check=True, timeout=LIMIT_S)
        assert done.exists() == ended


# --- inline or in the thread ------------------------------------------------------------------------------------------


def test_the_measured_time_decides_and_changes_back_and_forth(run):
    fn = Doubler()
    here = threading.get_ident()

    async def main():
        b = Batcher(fn, max_batch_size=4, inline_below=0.005)
        order = []

        async def burst(n):
            futures = [b.submit(sample(i)) for i in range(n)]
            for i, f in enumerate(futures):
                f.add_done_callback(lambda _, i=i: order.append(i))
            for i, row in enumerate(await asyncio.gather(*futures)):
                check(row, i)
            await turns(1)
            assert order == list(range(n))
            order.clear()

        await burst(1)
        assert fn.threads == [fn.threads[0]] != [here]  # unknown: not in the loop
        for seconds, inline in ((0.0, True), (0.02, False), (0.0, True), (0.02, False)):
            fn.seconds = seconds
            for _ in range(200):
                await burst(9)
                if b.stats["inline"] == inline:
                    break
            assert b.stats["inline"] == inline
            fn.threads.clear()
            await burst(4)
            assert (fn.threads[0] == here) == inline
        await b.close()

    run(main)
    assert not fn.overlapped


def test_one_slow_forward_alone_does_not_leave_the_loop(run):
    fn = Doubler()

    async def main():
        b = Batcher(fn, inline_below=0.01)
        while not b.stats["inline"] or fn.sizes[-5:] != [1] * 5:
            await b.submit(sample(1))
        fn.seconds = 0.1  # the core was taken away, say
        await b.submit(sample(1))
        assert b.stats["forward_s"] > 0.09
        fn.seconds = 0.0
        assert b.stats["inline"]
        fn.seconds = 0.1  # twice is no accident
        await b.submit(sample(1))
        await b.submit(sample(1))
        assert not b.stats["inline"]
        await b.close()

    run(main)


def test_while_somebody_else_holds_the_lock_the_loop_goes_on(run):
    fn = Doubler()

    async def main():
        b = Batcher(fn, inline_below=INLINE)
        await b.submit(sample(0))
        taken, free, in_time = threading.Event(), threading.Event(), []

        def hold():
            with b.lock:
                taken.set()
                in_time.append(free.wait(LIMIT_S / 4))

        holder = threading.Thread(target=hold)
        holder.start()
        await until(taken.is_set)
        waiting = b.submit(sample(1))
        for _ in range(5):
            await asyncio.sleep(0.001)  # the loop turns
        assert not waiting.done()
        late = b.submit(sample(2))
        free.set()
        check(await waiting, 1)
        check(await late, 2)
        await asyncio.to_thread(holder.join, LIMIT_S)
        assert in_time == [True]
        await b.close()

    run(main)
    assert fn.sizes == [1, 1, 1]


# --- batches of one's own ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("inline_below", [INLINE, THREAD], ids=["inline", "thread"])
def test_whole_batches_run_in_their_turn_in_parts_or_with_other_whole_batches(run, inline_below):
    fn = Doubler()

    async def main():
        b = Batcher(fn, max_batch_size=4, inline_below=inline_below)
        await b.submit(sample(0))
        done = []
        whole = np.arange(10, dtype=np.float32)[:, None].repeat(3, 1)
        futures = [
            b.submit(sample(100)),
            b.submit(sample(101)),
            b.submit_batch(whole),
            b.submit(sample(102)),
            b.submit_batch(whole[:2]),
            b.submit_batch(whole[:1]),
            b.submit(sample(103)),
            b.submit(sample(104)),
        ]
        for i, f in enumerate(futures):
            f.add_done_callback(lambda _, i=i: done.append(i))
        out = await asyncio.gather(*futures)
        for i, x in ((0, 100), (1, 101), (3, 102), (6, 103), (7, 104)):
            check(out[i], x)
        assert out[2]["y"].shape == (10, 3)
        assert out[2]["y"][:, 0].tolist() == [2 * i for i in range(10)]
        assert out[2]["sum"].tolist() == [3 * i for i in range(10)]
        assert out[4]["y"].shape == (2, 3)
        await turns(1)
        assert done == list(range(8))
        gone = b.submit_batch(whole)
        gone.cancel()
        check(await b.submit(sample(1)), 1)
        await b.close()

    run(main)
    assert fn.sizes == [1, 2, 4, 4, 2, 1, 3, 2, 1]


def test_whole_batches_share_a_forward_only_where_they_are_alike_and_one_that_fails_harms_no_other(run):
    sizes = []

    def fn(x):
        sizes.append(len(x))
        if (x < 0).any():
            raise ValueError("negative")
        return x * 2

    async def main():
        b = Batcher(fn, max_batch_size=8, inline_below=THREAD)
        asked = [np.full((2, 3), v) for v in (1.0, 2.0, -1.0, 3.0)] + [
            np.ones((2, 4)),
            np.ones((7, 4)),
            np.ones((2, 4)),
        ]
        out = await asyncio.gather(*[b.submit_batch(x) for x in asked], return_exceptions=True)
        for x, y in zip(asked, out, strict=True):
            if (x < 0).any():
                assert isinstance(y, ValueError)
            else:
                assert np.array_equal(y, 2 * x)
        await b.close()

    run(main)
    assert sizes == [
        8,
        2,
        2,
        2,
        2,
        2,
        7,
        2,
    ]  # together, then each alone since that failed; other kinds, and what is too much


def test_a_large_batch_of_quick_forwards_does_not_block_the_loop(run):
    fn = Doubler()

    async def main():
        b = Batcher(fn, max_batch_size=1, inline_below=0.02)
        while not b.stats["inline"]:
            await b.submit(sample(1))
        fn.threads.clear()
        await b.submit_batch(np.zeros((100_000 // 10, 3), np.float32))
        assert fn.threads[0] != threading.get_ident()
        await b.close()

    run(main)


def test_batches_without_common_rows_are_refused_at_once(run):
    async def main():
        b = Batcher(total)
        for args in ((np.zeros((2, 3)), np.zeros((3, 3))), (np.zeros((0, 3)),), (np.float32(1),), ({},), ()):
            with pytest.raises(DataError, match=r"arrays \[B, ...\] with the same B >= 1"):
                b.submit_batch(*args)
            with pytest.raises(DataError, match="same B"):
                b.call(*args, batch=True)
        await b.close()

    run(main)


def test_callers_learn_the_step_of_their_batch(run):
    fn = Doubler()
    steps = iter(range(10, 20))

    async def main():
        b = Batcher(fn, inline_below=THREAD, step=lambda: next(steps))
        first = b.submit(sample(1), with_step=True)
        plain = b.submit(sample(2))
        row, step = await first
        check(row, 1)
        assert step == 10
        check(await plain, 2)
        out, step = await b.submit_batch(np.zeros((2, 3), np.float32), with_step=True)
        assert (len(out["y"]), step) == (2, 11)
        assert b.call(sample(3), with_step=True)[1] == 12
        await b.close()

    run(main)


# --- without a loop, many threads ---------------------------------------------------------------------------------------


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


# --- anything in any order ----------------------------------------------------------------------------------------------


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


# --- stacking and splitting -----------------------------------------------------------------------------------------------

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
    template = rows.Template(rows.as_arrays(example))
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
    """Other strides, byte order, key order, read-only memory, numpy scalars and tensors: the same numbers, the same sample."""
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
