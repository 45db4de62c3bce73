"""Batches that fail: engines that raise, and samples that do not fit."""

import asyncio
import traceback

import numpy as np
import pytest

from bray import tree
from bray.errors import BrayError, DataError
from bray.inference.batcher import Batcher
from tests.batcher_for_tests import (  # noqa: F401  (fixtures)
    INLINE,
    LIMIT_S,
    THREAD,
    either_loop,
    no_threads_left,
    sample,
    strict,
    templates,
    total,
)

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
