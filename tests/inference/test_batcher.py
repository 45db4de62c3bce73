"""The rules of the batcher, each with an engine that shows whether it is kept. Both event loops; no test waits for a
clock to be fast."""

import asyncio
import threading

import numpy as np
import pytest

from bray.errors import BrayError, ConfigError, DataError, Overloaded
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
    until,
)

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
