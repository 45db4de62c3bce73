"""Observations read straight from the text of JSON: the same as by way of lists, or the same error."""

import json

import gymnasium as gym
import msgspec
import numpy as np
import pytest

from bray.errors import DataError
from bray.serving.numbers import read_numbers
from bray.serving.values import reader
from bray.spec import Space

BOX = {
    "uint8": gym.spaces.Box(0, 255, (2, 3, 2), np.uint8),
    "int16": gym.spaces.Box(-1000, 1000, (5,), np.int16),
    "int64": gym.spaces.Box(-(1 << 60), 1 << 60, (3,), np.int64),
    "float32": gym.spaces.Box(-1e3, 1e3, (2, 4), np.float32),
    "float64": gym.spaces.Box(-1e3, 1e3, (3,), np.float64),
    "number": gym.spaces.Box(-1e3, 1e3, (), np.float32),
    "flags": gym.spaces.Box(0, 1, (3,), np.bool_),
    "discrete": gym.spaces.Discrete(5, start=2),
    "choices": gym.spaces.MultiDiscrete([2, 3]),
    "dict": gym.spaces.Dict({"a": gym.spaces.Box(-1, 1, (2,), np.float32), "b": gym.spaces.Discrete(3)}),
    "tuple": gym.spaces.Tuple([gym.spaces.Box(-1, 1, (2,), np.float32), gym.spaces.Discrete(3)]),
}


def outcome(read, value):
    try:
        return read(value)
    except DataError as e:
        return str(e)


def same(a, b):
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, tuple):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, str):
        return a == b
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


def plain(x):
    if isinstance(x, dict):
        return {k: plain(v) for k, v in x.items()}
    return [plain(v) for v in x] if isinstance(x, tuple) else np.asarray(x).tolist()


@pytest.mark.parametrize("kind", BOX)
def test_samples_are_read_as_by_way_of_lists(kind):
    space = BOX[kind]
    space.seed(0)
    read = reader(Space.from_gym(space))
    for i in range(50):
        value = plain(space.sample())
        text = json.dumps(value, indent=None if i % 2 else 1).encode()
        assert same(read(msgspec.Raw(text)), read(value))


WRONG = [
    "[]", "[[]]", "1", "null", '"text"', "{}", "[1, 2]", "[1, 2, 3]", "[1,2,3,4]", "[[1,2,3]]", "[1, [2], 3]", "[1, 2, 3.5]", "[1, 2, null]",
    "[1, 2, true]", "[1e2, 2, 3]", "[-1, 1, 2]", "[1, 2, 40000]", "[1, 2, 123456789012345678901]", '["a", "b", "c"]',
    '{"base64": "AAAA", "dtype": "uint8"}', '{"base64": 3}', "[0.5, 0.25, 1e-300]", "[0.1, 1e22, 123456789.123456789]", "[5e-324, 1, 1]",
]  # fmt: skip


@pytest.mark.parametrize("text", WRONG)
@pytest.mark.parametrize(
    "kind", ["int16", "int64", "float64", "flags", "number", "discrete", "choices", "dict", "tuple"]
)
def test_whatever_comes_has_the_same_outcome(kind, text):
    read = reader(Space.from_gym(BOX[kind]))
    assert same(outcome(read, msgspec.Raw(text.encode())), outcome(read, json.loads(text)))


def test_numbers_that_nothing_holds_are_refused():
    with pytest.raises(DataError, match="obs: Number out of range"):
        reader(Space.from_gym(BOX["float64"]))(msgspec.Raw(b"[1, 2, -1e400]"))


def test_text_that_is_no_text_is_refused():
    with pytest.raises(DataError, match="obs: "):
        reader(Space.from_gym(BOX["dict"]))(msgspec.Raw(b'{"\xff": 1}'))


def numbers_of(text, size=3, integers=False):
    out = np.zeros(size, np.int64 if integers else np.float64)
    text, shape, most = np.frombuffer(text.encode(), np.uint8), np.array([size]), 1 << 62 if integers else np.inf
    return out.tolist() if read_numbers(text, shape, integers, -most, most, out) else None


def test_decimals_are_rounded_as_python_rounds_them():
    rng = np.random.default_rng(0)
    fast = 0
    for digits in (1, 3, 6, 9, 12, 15, 17):
        for exponent in ("", "e-7", "E+12", "e22", "e-30"):
            values = [f"{x:.{digits}g}".replace("e", "") + exponent for x in rng.standard_normal(3)]
            values = [v for v in values if v.count("e") + v.count("E") <= 1]
            got = numbers_of(f"[{', '.join(values)}]", len(values))
            if got is not None:
                fast += 1
                assert got == [float(v) for v in values]
    assert fast > 15
    assert numbers_of("[0.00000000000000000001, -0.5, 100000000000000]") == [1e-20, -0.5, 1e14]
    assert numbers_of("[-0.0, 1, 1]") is None  # its sign would be lost
    assert numbers_of("[9007199254740992.5, 1, 1]") is None  # more digits than a double has
    assert numbers_of("[1, 2, 3]") == [1.0, 2.0, 3.0]


@pytest.mark.parametrize("integers", [True, False])
@pytest.mark.parametrize(
    "text",
    ["[1,2,3", "[1,2,3]]", "[1,2,3] 4", "[1,2,03]", "[1,2,-]", "[1,2,+3]", "[1,,3]", "1,2,3]", "[1 2,3]", "", "[", "[1,2,3,]"],
)  # fmt: skip
def test_what_is_no_array_is_left_to_others(text, integers):
    assert numbers_of(text, integers=integers) is None


def test_text_that_ends_anywhere_is_refused():
    whole = "[-12.5e-3, 0.25, 7]"
    assert numbers_of(whole) == [-0.0125, 0.25, 7.0]
    assert all(numbers_of(whole[:i]) is None for i in range(len(whole)))
    assert all(numbers_of("[12, -3, 4]"[:i], integers=True) is None for i in range(10))
