"""Callers that give up, batchers that are closed, threads and loops that end."""

import asyncio
import gc
import subprocess
import sys
import threading
import weakref

import numpy as np
import pytest
import uvloop

from bray.errors import BrayError
from bray.inference import batcher as module
from bray.inference.batcher import Batcher
from tests.batcher_for_tests import (  # noqa: F401  (fixtures)
    INLINE,
    LIMIT_S,
    THREAD,
    Doubler,
    batcher_threads,
    check,
    either_loop,
    no_threads_left,
    sample,
    shut,
    turns,
    until,
    worker_thread,
)

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
            await until(lambda: not batcher_threads())
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
    """The loop ends while a forward runs and others wait: the thread ends quietly, and what is left can be closed
    elsewhere."""
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
