"""Trees: nested dicts, lists and tuples of numpy arrays (public name `NestedArray`).

A tree is how observations, actions, model inputs and outputs, batches and trajectories are held everywhere. Shapes are
written time first, `[T, B, ...]`. Dicts keep the order of the first tree given; keys are strings.

`pack` writes a tree as a small JSON header followed by the raw arrays; `unpack` reads it back as views of the bytes,
trusting nothing: no pickle, every length and type is checked before an array is made.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec
import numpy as np

from bray.errors import DataError

NestedArray = Any  # dict[str, NestedArray] | list[NestedArray] | tuple[NestedArray, ...] | np.ndarray


def map(fn: Callable[..., Any], tree: NestedArray, *rest: NestedArray) -> NestedArray:
    """Apply `fn` to each leaf (and to the same leaf of every tree in `rest`); the structure stays."""
    if isinstance(tree, dict):
        for r in rest:
            if not isinstance(r, dict) or r.keys() != tree.keys():
                raise ValueError(
                    f"trees differ: keys {list(tree)} against {list(r) if isinstance(r, dict) else type(r)}"
                )
        return {k: map(fn, v, *[r[k] for r in rest]) for k, v in tree.items()}
    if isinstance(tree, (list, tuple)):
        for r in rest:
            if not isinstance(r, (list, tuple)) or len(r) != len(tree):
                got = len(r) if isinstance(r, (list, tuple)) else type(r)
                raise ValueError(f"trees differ: length {len(tree)} against {got}")
        items = [map(fn, v, *[r[i] for r in rest]) for i, v in enumerate(tree)]
        if isinstance(tree, list):
            return items
        return type(tree)(*items) if hasattr(tree, "_fields") else tuple(items)
    return fn(tree, *rest)


def leaves(tree: NestedArray) -> list[Any]:
    """All leaves, in order."""
    return [leaf for _, leaf in paths(tree)]


def paths(tree: NestedArray, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(path, leaf) pairs; a path is keys and positions joined by '/', '' for a bare array."""
    if isinstance(tree, dict):
        items: Any = tree.items()
    elif isinstance(tree, (list, tuple)):
        items = enumerate(tree)
    else:
        yield prefix, tree
        return
    for key, value in items:
        yield from paths(value, f"{prefix}/{key}" if prefix else str(key))


def stack(trees: Sequence[NestedArray], axis: int = 0) -> NestedArray:
    """Many trees of one structure -> one tree with a new axis."""
    return map(lambda *xs: np.stack(xs, axis), trees[0], *trees[1:])


def concat(trees: Sequence[NestedArray], axis: int = 0) -> NestedArray:
    """Many trees of one structure -> one tree, joined along an axis."""
    return map(lambda *xs: np.concatenate(xs, axis), trees[0], *trees[1:])


def split(tree: NestedArray, n: int | None = None) -> list[NestedArray]:
    """The inverse of `stack`: one tree per row of the first axis."""
    n = length(tree) if n is None else n
    return [index(tree, i) for i in range(n)]


def index(tree: NestedArray, i: Any) -> NestedArray:
    """`leaf[i]` for each leaf; `i` is anything numpy takes."""
    return map(lambda x: x[i], tree)


def length(tree: NestedArray) -> int:
    """Rows of the first axis; all leaves must agree."""
    sizes = {len(x) for x in leaves(tree)}
    if len(sizes) != 1:
        raise ValueError(f"leaves of a tree with a common first axis have different lengths: {sorted(sizes)}")
    return sizes.pop()


def flatten(tree: NestedArray, lead: int = 1) -> np.ndarray:
    """All leaves as one float32 array `[..., F]`: `lead` leading axes are kept, the rest is raveled and joined."""
    # the width is worked out here, because numpy cannot guess it (-1) for a batch of no rows
    parts = [
        np.asarray(x, np.float32).reshape(*np.shape(x)[:lead], math.prod(np.shape(x)[lead:])) for x in leaves(tree)
    ]
    return parts[0] if len(parts) == 1 else np.concatenate(parts, -1)


def nbytes(tree: NestedArray) -> int:
    return sum(x.nbytes for x in leaves(tree))


def equal(a: NestedArray, b: NestedArray) -> bool:
    """Same structure, dtypes, shapes and values (NaN equals NaN)."""
    if isinstance(a, dict) or isinstance(b, dict):
        return isinstance(a, dict) and isinstance(b, dict) and list(a) == list(b) and all(equal(a[k], b[k]) for k in a)
    for kind in (list, tuple):
        if isinstance(a, kind) or isinstance(b, kind):
            both = isinstance(a, kind) and isinstance(b, kind) and len(a) == len(b)
            return both and all(equal(x, y) for x, y in zip(a, b, strict=True))
    x, y = np.asarray(a), np.asarray(b)
    return x.dtype == y.dtype and np.array_equal(x, y, equal_nan=x.dtype.kind in "fc")


# --- bytes ------------------------------------------------------------------------------------------------------------

MAGIC = b"BRAYTREE"
_ALIGN = 64  # arrays start on cache lines, so that views of the bytes are as fast as arrays of their own
_KINDS = "biufc"  # bool, int, unsigned, float, complex: plain numbers, never objects
_DTYPE = re.compile(rf"[<|][{_KINDS}]\d{{1,2}}")  # how numpy writes those, little endian
_MAX_HEADER = 1 << 24
_MAX_DEPTH = 64


def pack(tree: NestedArray) -> bytes:
    """A tree as bytes: magic, header length, JSON header (structure, dtypes, shapes, offsets), raw arrays."""
    arrays: list[np.ndarray] = []
    offset = 0

    def describe(node: NestedArray, depth: int) -> Any:
        nonlocal offset
        if depth > _MAX_DEPTH:
            raise DataError(f"a tree may be {_MAX_DEPTH} levels deep, this one is deeper")
        if isinstance(node, dict):
            if not all(isinstance(k, str) for k in node):
                raise DataError(f"keys of a packed tree are strings, got {[k for k in node if not isinstance(k, str)]}")
            return {"d": [[k, describe(v, depth + 1)] for k, v in node.items()]}
        if isinstance(node, (list, tuple)):
            return {"t" if isinstance(node, tuple) else "l": [describe(v, depth + 1) for v in node]}
        array = np.asarray(node)
        if array.dtype.kind not in _KINDS:
            raise DataError(f"a packed tree holds numbers, got an array of dtype {array.dtype}")
        if array.dtype.byteorder == ">":
            array = array.astype(array.dtype.newbyteorder("<"))
        shape = array.shape  # ascontiguousarray makes 0-d arrays 1-d
        array = np.ascontiguousarray(array)
        arrays.append(array)
        at = offset
        offset = -(-(offset + array.nbytes) // _ALIGN) * _ALIGN
        return {"a": [array.dtype.str, list(shape), at]}

    try:
        header = msgspec.json.encode(describe(tree, 0))
    except UnicodeEncodeError as e:
        raise DataError(f"keys of a packed tree are text that UTF-8 can hold ({e.reason})") from None
    if len(header) > _MAX_HEADER:
        raise DataError(f"a tree of {len(arrays)} arrays is too large to pack: its header has {len(header)} bytes")
    start = -(-(len(MAGIC) + 8 + len(header)) // _ALIGN) * _ALIGN
    out = bytearray(start + offset)
    out[: len(MAGIC)] = MAGIC
    out[len(MAGIC) : len(MAGIC) + 8] = len(header).to_bytes(8, "little")
    out[len(MAGIC) + 8 : len(MAGIC) + 8 + len(header)] = header
    at = start
    for array in arrays:
        out[at : at + array.nbytes] = array.reshape(-1).view(np.uint8).data
        at = -(-(at + array.nbytes) // _ALIGN) * _ALIGN
    return bytes(out)


def unpack(data: bytes | bytearray | memoryview, copy: bool = False) -> NestedArray:
    """The inverse of `pack`. Arrays are read-only views of `data` unless `copy`. Raises DataError on anything else."""
    view = memoryview(data).cast("B")
    head = len(MAGIC) + 8
    if len(view) < head or bytes(view[: len(MAGIC)]) != MAGIC:
        raise DataError(f"not a packed tree: it should start with {MAGIC!r}, got {bytes(view[:8])!r}")
    size = int.from_bytes(view[len(MAGIC) : head], "little")
    if size > _MAX_HEADER or head + size > len(view):
        raise DataError(f"not a packed tree: header of {size} bytes in {len(view)} bytes of data")
    try:
        header = msgspec.json.decode(bytes(view[head : head + size]))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as e:
        raise DataError(f"not a packed tree: its header is no JSON ({e})") from None
    start = -(-(head + size) // _ALIGN) * _ALIGN
    end = start

    def build(node: Any, depth: int) -> NestedArray:
        nonlocal end
        if depth > _MAX_DEPTH:
            raise DataError(f"not a packed tree: more than {_MAX_DEPTH} levels deep")
        if not isinstance(node, dict) or len(node) != 1:
            raise DataError("not a packed tree: a node of its header has no single kind")
        ((kind, body),) = node.items()
        if not isinstance(body, list):
            raise DataError("not a packed tree: a node of its header has no content")
        if kind == "d":
            if not all(isinstance(p, list) and len(p) == 2 and isinstance(p[0], str) for p in body):
                raise DataError("not a packed tree: a dict with keys that are not strings")
            if len({p[0] for p in body}) != len(body):
                raise DataError("not a packed tree: a dict with a key twice")
            return {k: build(v, depth + 1) for k, v in body}
        if kind == "l":
            return [build(v, depth + 1) for v in body]
        if kind == "t":
            return tuple(build(v, depth + 1) for v in body)
        if kind == "a":
            array, at = _array(view, start, body)
            if array.nbytes and at < end:  # else a small file could ask for a million copies of its bytes
                raise DataError("not a packed tree: its arrays overlap")
            end = max(end, at + array.nbytes)
            return array.copy() if copy else array
        raise DataError(f"not a packed tree: unknown node {str(kind)[:20]!r}")

    return build(header, 0)


def _array(view: memoryview, start: int, body: list[Any]) -> tuple[np.ndarray, int]:
    try:
        dtype_str, shape, at = body
        dtype = np.dtype(dtype_str) if isinstance(dtype_str, str) and _DTYPE.fullmatch(dtype_str) else None
    except (ValueError, TypeError):
        dtype = None
    if dtype is None:
        raise DataError("not a packed tree: an array with an unknown dtype")
    if not isinstance(shape, list) or len(shape) > 32 or not all(type(n) is int and 0 <= n < 1 << 48 for n in shape):
        raise DataError("not a packed tree: an array with an impossible shape")
    count = math.prod(shape)
    if type(at) is not int or at < 0 or start + at + count * dtype.itemsize > len(view):
        raise DataError(f"not a packed tree: {count} x {dtype} does not fit into {len(view)} bytes of data")
    try:
        array = np.frombuffer(view, dtype, count, start + at).reshape(shape) if count else np.empty(shape, dtype)
    except ValueError:  # no rows, but of more bytes each than there are addresses
        raise DataError("not a packed tree: an array with an impossible shape") from None
    if dtype.kind == "b" and count and array.view(np.uint8).max() > 1:
        raise DataError("not a packed tree: a bool array holds bytes other than 0 and 1")
    return array, start + at
