"""Trees: the operations by number, packing round trips, and bytes that lie."""

import json
import random
import tracemalloc
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from hypothesis.extra import numpy as hnp

from bray import tree
from bray.errors import DataError


def sample_tree():
    return {
        "obs": {"image": np.arange(24, dtype=np.uint8).reshape(2, 3, 4), "pos": np.float32([[0.5], [1.5]])},
        "action": (np.array([1, 2]), [np.array([True, False])]),
        "empty": {},
        "none": np.zeros((0, 3), np.float16),
    }


def test_map_keeps_structure_and_meets_leaves_of_several_trees():
    a, b = {"x": [np.array(1), (np.array(2),)]}, {"x": [np.array(10), (np.array(20),)]}
    out = tree.map(lambda x, y: int(x + y), a, b)
    assert out == {"x": [11, (22,)]}

    class Point(NamedTuple):
        x: int
        y: int

    assert tree.map(lambda v: v + 1, Point(1, 2)) == Point(2, 3)


@pytest.mark.parametrize(
    ("a", "b"),
    [
        ({"x": 1}, {"x": 1, "y": 2}),
        ({"x": 1, "y": 2}, {"x": 1}),
        ({"x": 1}, [1]),
        ([1, 2], [1]),
        ((1, 2), np.array([1, 2])),
    ],
)
def test_map_refuses_trees_of_different_structure(a, b):
    with pytest.raises(ValueError, match="trees differ"):
        tree.map(lambda x, y: x, a, b)


def test_paths_and_leaves():
    assert [p for p, _ in tree.paths({"a": [1, {"b": 2}], "c": (3,)})] == ["a/0", "a/1/b", "c/0"]
    assert tree.leaves({"a": [1, {"b": 2}], "c": (3,)}) == [1, 2, 3]
    assert list(tree.paths(7)) == [("", 7)]


def test_stack_split_concat_index_length():
    rows = [{"a": np.array([i, i + 1])} for i in range(3)]
    stacked = tree.stack(rows)
    assert stacked["a"].tolist() == [[0, 1], [1, 2], [2, 3]]
    assert all(tree.equal(x, y) for x, y in zip(tree.split(stacked), rows, strict=True))
    assert tree.stack(rows, axis=1)["a"].tolist() == [[0, 1, 2], [1, 2, 3]]
    assert tree.concat(rows)["a"].tolist() == [0, 1, 1, 2, 2, 3]
    assert tree.index(stacked, 1)["a"].tolist() == [1, 2]
    assert tree.length(stacked) == 3
    with pytest.raises(ValueError, match=r"different lengths: \[2, 3\]"):
        tree.length({"a": np.zeros(2), "b": np.zeros(3)})


def test_flatten_joins_leaves_in_order():
    t = {"a": np.arange(4).reshape(2, 2), "b": np.array([9, 8], np.uint8)}
    flat = tree.flatten(t)
    assert flat.dtype == np.float32
    assert flat.tolist() == [[0, 1, 9], [2, 3, 8]]
    assert tree.flatten({"a": np.zeros((2, 3, 4, 5))}, lead=2).shape == (2, 3, 20)
    assert tree.flatten({"a": np.zeros((0, 3)), "b": np.zeros((0, 2, 2))}).shape == (0, 7)


def test_equal_sees_dtype_structure_and_nan():
    assert tree.equal({"a": np.float32([1, np.nan])}, {"a": np.float32([1, np.nan])})
    assert not tree.equal({"a": np.float32([1])}, {"a": np.float64([1])})
    assert not tree.equal([np.ones(1)], (np.ones(1),))
    assert not tree.equal({}, [])
    assert not tree.equal({"0": np.ones(1)}, [np.ones(1)])
    assert not tree.equal(np.ones(2), np.ones((1, 2)))


def test_nbytes():
    assert tree.nbytes(sample_tree()) == 24 + 8 + 16 + 2


# --- pack and unpack


def test_pack_round_trip_and_views():
    t = sample_tree()
    data = tree.pack(t)
    assert isinstance(data, bytes)
    back = tree.unpack(data)
    assert tree.equal(back, t)
    assert not back["obs"]["image"].flags.writeable  # a view of the bytes
    copy = tree.unpack(data, copy=True)
    copy["obs"]["image"][0] = 7
    assert tree.equal(tree.unpack(data), t)
    assert tree.equal(tree.unpack(memoryview(bytearray(data))), t)


def test_pack_normalises_byte_order_and_strides():
    t = {"big": np.arange(3, dtype=">i4"), "strided": np.arange(12).reshape(3, 4)[:, ::2], "scalar": np.float64(2.5)}
    back = tree.unpack(tree.pack(t))
    assert back["big"].dtype == np.dtype("<i4")
    assert back["big"].tolist() == [0, 1, 2]
    assert back["strided"].tolist() == [[0, 2], [4, 6], [8, 10]]
    assert back["scalar"].shape == ()
    assert back["scalar"] == 2.5


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"a": np.array(["x"])}, "arrays of numbers"),
        ({"a": np.array([None])}, "arrays of numbers"),
        ({"a": None}, "arrays of numbers"),
        ({"a": np.zeros(1, "M8[s]")}, "arrays of numbers"),
        ({1: np.zeros(1)}, "keys of a tree are strings, got"),
        ({"\ud800": np.zeros(1)}, "UTF-8"),
    ],
)
def test_pack_refuses_what_is_no_tree_of_numbers(bad, message):
    with pytest.raises(DataError, match=message):
        tree.pack(bad)


def test_depth_is_limited_both_ways():
    deep = np.zeros(1)
    for _ in range(64):
        deep = [deep]
    assert tree.equal(tree.unpack(tree.pack(deep)), deep)
    with pytest.raises(DataError, match="64 levels"):
        tree.pack([deep])
    header = b'{"l":[' * 200 + b"]}" * 200
    with pytest.raises(DataError, match="not a packed tree"):
        tree.unpack(forge(header))
    header = b'{"l":[' * 100_000 + b"]}" * 100_000
    with pytest.raises(DataError, match="not a packed tree"):
        tree.unpack(forge(header))


arrays = st.sampled_from(["?", "i1", "u1", "i2", "u4", "i8", "f2", "f4", "f8", "c8"]).flatmap(
    lambda d: hnp.arrays(np.dtype(d), hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=4))
)
keys = st.text(st.characters(exclude_categories=("Cs",)), max_size=6)
trees = st.recursive(
    arrays,
    lambda inner: (
        st.dictionaries(keys, inner, max_size=4) | st.lists(inner, max_size=4) | st.lists(inner, max_size=3).map(tuple)
    ),
    max_leaves=8,
)


@settings(max_examples=150, deadline=None)
@given(trees)
def test_every_tree_survives_packing(t):
    data = tree.pack(t)
    assert tree.equal(tree.unpack(data), t)
    assert tree.equal(tree.unpack(data, copy=True), t)
    assert tree.pack(tree.unpack(data)) == data  # one tree, one encoding


# --- bytes that lie


def forge(header: bytes | dict, body: bytes = b"") -> bytes:
    """Bytes with a header of our choice."""
    if isinstance(header, dict):
        header = json.dumps(header).encode()
    head = tree.MAGIC + len(header).to_bytes(8, "little") + header
    return head + b"\0" * (-len(head) % 64) + body


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"BRAY",
        b"PK\x03\x04" + b"\0" * 100,
        tree.MAGIC,
        tree.MAGIC + b"\xff" * 8,
        tree.MAGIC + (1 << 62).to_bytes(8, "little") + b"{}",
        forge(b"not json"),
        forge(b"\xff\xfe"),
        forge({}),
        forge({"a": 1}),
        forge({"x": []}),
        forge({"a": ["<f4", [2]]}),
        forge({"a": ["<f4", [2], 0]}, b"\0" * 7),
        forge({"a": ["<f4", [2], -4]}, b"\0" * 64),
        forge({"a": ["<f4", [-1], 0]}, b"\0" * 64),
        forge({"a": ["<f4", [True], 0]}, b"\0" * 64),
        forge({"a": ["<f4", [1.0], 0]}, b"\0" * 64),
        forge({"a": ["<f4", [1 << 60, 1 << 60], 0]}, b"\0" * 64),
        forge({"a": ["<f4", [0, 1 << 47, 1 << 47], 0]}),
        forge({"a": ["<f4", [0] * 33, 0]}),
        forge({"a": ["<f4", [0] + [1 << 47] * 31, 0]}),
        forge({"a": ["O", [1], 0]}, b"\0" * 64),
        forge({"a": ["|O", [1], 0]}, b"\0" * 64),
        forge({"a": ["V4", [1], 0]}, b"\0" * 64),
        forge({"a": ["i4,i4", [1], 0]}, b"\0" * 64),
        forge({"a": ["S4", [1], 0]}, b"\0" * 64),
        forge({"a": [4, [1], 0]}, b"\0" * 64),
        forge({"a": ["?", [2], 0]}, b"\x01\x07" + b"\0" * 62),
        forge({"d": [["k", {"l": []}], ["k", {"l": []}]]}),
        forge({"d": [[1, {"l": []}]]}),
        forge({"d": ["ab"]}),
        forge({"l": {"a": 1}}),
        forge({"l": [{"a": ["<f4", [4], 0]}, {"a": ["<f4", [4], 0]}]}, b"\0" * 64),  # the same bytes twice
    ],
)
def test_hostile_bytes_are_refused(data):
    with pytest.raises(DataError, match="not a packed tree"):
        tree.unpack(data)
    with pytest.raises(DataError, match="not a packed tree"):
        tree.unpack(data, copy=True)


def test_a_small_file_cannot_ask_for_a_lot_of_memory():
    body = b"\0" * 4096
    node = {"a": ["|u1", [4096], 0]}
    data = forge({"l": [node] * 20_000}, body)
    tracemalloc.start()
    try:
        with pytest.raises(DataError, match="at another offset"):
            tree.unpack(data, copy=True)
        assert tracemalloc.get_traced_memory()[1] < 40 << 20  # the decoded header, not 20,000 copies
    finally:
        tracemalloc.stop()


def test_six_thousand_mutations_give_a_tree_or_a_data_error():
    rng = random.Random(7)
    originals = [tree.pack(sample_tree()), tree.pack(np.arange(5.0)), tree.pack([{"a": np.ones((2, 2), bool)}, ()])]
    refused = 0
    tracemalloc.start()
    try:
        for i in range(6000):
            data = bytearray(originals[i % 3])
            header = 16 + int.from_bytes(data[8:16], "little")
            for _ in range(rng.choice((1, 1, 2, 5))):
                kind = rng.randrange(5)
                at = rng.randrange(header if rng.random() < 0.8 else len(data))
                if kind == 0:
                    data[at] ^= 1 << rng.randrange(8)
                elif kind == 1:
                    data[at] = rng.choice(b'0123456789-[]{}",:atdl<>|fiubOVS\x00\xff')
                elif kind == 2:
                    del data[at : at + rng.randrange(1, 9)]
                elif kind == 3:
                    data[at:at] = bytes(rng.choice(b'0189[]{}",') for _ in range(rng.randrange(1, 9)))
                else:
                    del data[rng.randrange(len(data)) :]
                if len(data) < header or not data:
                    break
            try:
                out = tree.unpack(bytes(data), copy=i % 2 == 0)
            except DataError:
                refused += 1
                continue
            for leaf in tree.leaves(out):  # what came out is a tree of numbers, small as its bytes
                assert isinstance(leaf, np.ndarray)
                assert leaf.dtype.kind in "biufc"
                assert leaf.nbytes <= len(data)
        assert tracemalloc.get_traced_memory()[1] < 20 << 20
    finally:
        tracemalloc.stop()
    assert 3000 < refused < 6000
