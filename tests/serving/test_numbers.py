"""Observations read straight from the text of JSON: the same as by way of lists, or the same error."""

import json

import gymnasium as gym
import msgspec
import numpy as np
import pytest

from bray.errors import DataError
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
    "[]", "[[]]", "1", "null", '"text"', "{}", "[1, 2]", "[1, 2, 3]", "[1,2,3,4]", "[[1,2,3]]", "[1, [2], 3]",
    "[1, 2, 3.5]", "[1, 2, null]",
    "[1, 2, true]", "[1e2, 2, 3]", "[-1, 1, 2]", "[1, 2, 40000]", "[1, 2, 123456789012345678901]", '["a", "b", "c"]',
    '{"base64": "AAAA", "dtype": "uint8"}', '{"base64": 3}', "[0.5, 0.25, 1e-300]", "[0.1, 1e22, 123456789.123456789]",
    "[5e-324, 1, 1]",
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


MANY = {
    "uint8": Space.from_gym(gym.spaces.Box(0, 255, (3, 40, 40), np.uint8)),
    "int64": Space.from_gym(gym.spaces.Box(-(1 << 60), 1 << 60, (40, 40), np.int64)),
    "float32": Space.from_gym(gym.spaces.Box(-1e3, 1e3, (40, 40), np.float32)),
    "flags": Space.from_gym(gym.spaces.Box(0, 1, (50, 50), np.bool_)),
}


@pytest.mark.parametrize("kind", MANY)
@pytest.mark.parametrize("indent", [None, 1])
def test_large_arrays_are_read_as_by_way_of_lists(kind, indent):
    space, read = MANY[kind], reader(MANY[kind])
    rng = np.random.default_rng(0)
    for scale in (1, 10, 200):
        value = (
            rng.integers(0, 2 if kind == "flags" else scale + 1, space.shape) / (3 if kind == "float32" else 1)
        ).astype(space.dtype)
        for numbers in (value, -value) if kind in ("int64", "float32") else (value,):
            assert same(read(msgspec.Raw(json.dumps(numbers.tolist(), indent=indent).encode())), numbers)


@pytest.mark.parametrize("wrong", ["null", '"a"', "{}", "[1]", "256", "-1", "0.5", "1e400", "123456789012"])
def test_one_wrong_value_in_a_picture_is_refused(wrong):
    values = ["7"] * 1600
    values[800] = wrong
    rows = [f"[{', '.join(values[i : i + 40])}]" for i in range(0, 1600, 40)]
    with pytest.raises(DataError, match=r"^obs: .*expected"):
        reader(Space.from_gym(gym.spaces.Box(0, 255, (40, 40), np.uint8)))(msgspec.Raw(f"[{', '.join(rows)}]".encode()))


def test_an_array_of_another_shape_is_not_decoded():
    rows = f"[{', '.join(['[1, 2, 3]'] * 2000)}]".encode()
    with pytest.raises(DataError, match="got 22000 bytes of JSON that are something else"):
        reader(Space.from_gym(gym.spaces.Box(0, 255, (3, 2000), np.uint8)))(msgspec.Raw(rows))


def test_decimals_are_rounded_as_python_rounds_them():
    rng = np.random.default_rng(0)
    texts = [f"{x:.{digits}e}" for digits in (1, 6, 9, 15, 17) for x in 10.0 ** rng.uniform(-30, 30, 100)]
    read = reader(Space.from_gym(gym.spaces.Box(-np.inf, np.inf, (500,), np.float64)))
    assert read(msgspec.Raw(f"[{', '.join(texts)}]".encode())).tolist() == [float(x) for x in texts]
