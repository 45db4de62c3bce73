"""Samples in columns: layouts, chunks, and what is refused."""

from collections import namedtuple

import msgspec
import numpy as np
import pytest

from bray import tree
from bray.errors import DataError
from bray.remote.buffer import messages as m
from bray.remote.buffer.columns import Chunk, join, private, stack
from bray.tree.layout import Layouts, to_bytes

NESTED = {
    "obs": {"image": np.arange(6, dtype=np.uint8).reshape(2, 3), "flags": np.array([True, False])},
    "pair": (np.float32(1.5), [np.int64(7), np.zeros((0, 4), np.float32)]),
    "reward": 0.25,
}


def chunk_of(*samples):
    layouts = Layouts()
    read = [layouts.read(s) for s in samples]
    return stack(read[0][0], [leaves for _, leaves in read])


def message(head, chunk):
    return memoryview(b"".join(map(bytes, m.pack(head, to_bytes(chunk.columns)))))


def through_bytes(chunk):
    body = message(m.Push(chunk.layout.spec, chunk.rows, drop=False), chunk)
    head, start = m.unpack(body, m.Push)
    assert head.drop is False
    layout = Layouts().parse(head.spec)
    return Chunk(layout, layout.columns(body[start:], head.rows), head.rows)


def test_samples_come_back_as_they_were():
    chunk = through_bytes(chunk_of(NESTED, NESTED, NESTED))
    for i in range(3):
        got = chunk.row(i)
        assert tree.equal(got, tree.map(np.asarray, NESTED))
        assert all(isinstance(leaf, np.ndarray) for leaf in tree.leaves(got))
    assert chunk.batch()["obs"]["image"].shape == (3, 2, 3)
    assert chunk.batch()["pair"][1][1].shape == (3, 0, 4)


def test_a_bare_array_is_a_sample():
    chunk = through_bytes(chunk_of(np.arange(3), np.arange(3) + 1))
    np.testing.assert_array_equal(chunk.batch(), [[0, 1, 2], [1, 2, 3]])


def test_what_is_no_plain_array_is_converted():
    import torch

    Point = namedtuple("Point", "x y")
    fortran, big = np.asfortranarray(np.arange(6.0).reshape(2, 3)), np.arange(3, dtype=">i4")
    strided = np.arange(10)[::2]
    sample = {
        "t": torch.ones(2, requires_grad=True),
        "n": Point(1, 2.5),
        "f": fortran,
        "b": big,
        "s": strided,
        "yes": True,
    }
    chunk = through_bytes(chunk_of(sample))
    got = chunk.row(0)
    np.testing.assert_array_equal(got["t"], [1.0, 1.0])
    assert got["n"] == (1, 2.5)
    np.testing.assert_array_equal(got["f"], fortran)
    np.testing.assert_array_equal(got["b"], [0, 1, 2])
    np.testing.assert_array_equal(got["s"], strided)
    assert got["yes"].dtype == bool


@pytest.mark.parametrize(
    ("sample", "message"),
    [
        ({"a": "text"}, "this one holds a str"),
        ({"a": None}, "this one holds a NoneType"),
        (np.array([object()]), "holds an array of dtype object"),
        ({1: 2.0}, r"keys of a tree are strings, got \[1\]"),
    ],
)
def test_what_is_no_sample_is_refused(sample, message):
    with pytest.raises(DataError, match=message):
        Layouts().read(sample)


def test_a_tensor_that_numpy_does_not_know_says_so():
    import torch

    with pytest.raises(DataError, match="bfloat16"):
        Layouts().read({"a": torch.ones(2, dtype=torch.bfloat16)})


def test_layouts_are_looked_at_once_and_told_apart():
    layouts = Layouts()
    first, _ = layouts.read({"a": np.zeros(3), "b": 1})
    again, leaves = layouts.read({"b": 2, "a": np.ones(3)})  # another order of keys is no other structure
    assert again is first
    np.testing.assert_array_equal(leaves[0], np.ones(3))
    for other in (
        {"a": np.zeros(4), "b": 1},
        {"a": np.zeros(3)},
        {"a": np.zeros(3, np.float32), "b": 1},
        [np.zeros(3)],
    ):
        assert layouts.read(other)[0] is not first


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"a": np.zeros(4), "b": 1}, r"^a: expected shape \(3,\), got shape \(4,\)"),
        ({"a": np.zeros(3)}, r"^b: expected shape \(\), got nothing"),
        ({"a": np.zeros(3), "b": 1, "c": 2}, r"^c: expected nothing, got shape \(\)"),
        ({"b": 1, "a": np.zeros(3)}, "another order"),
    ],
)
def test_a_difference_names_the_leaf(other, message):
    first, _ = Layouts().read({"a": np.zeros(3), "b": 1})
    second, _ = Layouts().read(other)
    with pytest.raises(AssertionError, match=message):
        raise AssertionError(first.differs(second))


def test_parts_share_memory_and_joins_do_not():
    chunk = chunk_of(*({"x": np.full(2, i, np.float32)} for i in range(5)))
    part = chunk.part(1, 4)
    assert (part.rows, part.first, part.total) == (3, 1, 5)
    assert part.part(1, 2).first == 2
    part.columns[0][0] = 9
    assert chunk.columns[0][1, 0] == 9
    whole = join([chunk.part(4, 5), chunk.part(0, 2)], private)
    np.testing.assert_array_equal(whole.batch()["x"][:, 0], [4, 0, 9])
    whole.columns[0][:] = 0
    assert chunk.columns[0][4, 0] == 4


def test_a_join_takes_the_wider_dtype():
    ints = chunk_of({"reward": 1}, {"reward": 2})
    floats = chunk_of({"reward": 0.5})
    joined = join([ints, floats], private)
    np.testing.assert_array_equal(joined.batch()["reward"], [1.0, 2.0, 0.5])


@pytest.mark.parametrize(
    "node",
    [
        [],
        {"x": 1},
        {"a": ["O8", [1]]},
        {"a": ["<f4", [-1]]},
        {"a": ["<f4", [1.5]]},
        {"a": ["<f3", [1]]},
        {"a": ["<f4"]},
        {"d": [["k"]]},
        {"d": [[1, {"a": ["<f4", []]}]]},
        {"l": {}},
        {"a": ["<f8", [1 << 39, 64]]},
    ],
)
def test_a_layout_that_is_none_is_refused(node):
    with pytest.raises(DataError):
        Layouts().parse(msgspec.json.encode(node))
    with pytest.raises(DataError, match="no JSON"):
        Layouts().parse(b"\xff{")


def test_a_message_that_announces_more_than_it_holds_is_refused():
    chunk = chunk_of({"x": np.zeros(4)})
    body = message(m.Push(chunk.layout.spec, 1000, drop=True), chunk)
    head, start = m.unpack(body, m.Push)
    with pytest.raises(DataError, match="were announced"):
        chunk.layout.columns(body[start:], head.rows)
    for cut in (2, 20):
        with pytest.raises(DataError, match="ends in its head"):
            m.unpack(body[:cut], m.Push)
    with pytest.raises(DataError, match=r"a message that is none .*different versions"):
        m.unpack(body, m.Answer)
