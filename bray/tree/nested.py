"""Functions on trees that need no description of them: map, stack, split, compare."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from bray.errors import DataError

KINDS = "biufc"  # bool, int, unsigned, float, complex: plain numbers, never objects
NestedArray = Any  # dict[str, NestedArray] | list[NestedArray] | tuple[NestedArray, ...] | np.ndarray


def as_array(leaf: Any) -> np.ndarray:
    """A leaf as an array in little-endian byte order: arrays as they are, numbers, and tensors of torch."""
    if hasattr(leaf, "detach"):
        try:
            leaf = leaf.detach().cpu().numpy()
        except TypeError as e:  # a dtype that numpy does not have
            raise DataError(f"a tensor of {leaf.dtype} cannot become a numpy array ({e}): convert it first") from None
    array = np.asarray(leaf)
    if array.dtype.kind not in KINDS:
        what = f"an array of dtype {array.dtype}" if isinstance(leaf, np.ndarray) else f"a {type(leaf).__name__}"
        raise DataError(f"expected a tree (dict, list, tuple) of arrays of numbers, this one holds {what}")
    return array.astype(array.dtype.newbyteorder("<")) if array.dtype.byteorder == ">" else array


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


def as_arrays(tree: NestedArray) -> NestedArray:
    """The same with arrays as leaves. Raises DataError if it holds anything but numbers."""
    return map(as_array, tree)


def leaves(tree: NestedArray) -> list[Any]:
    """All leaves, in order."""
    return [leaf for _, leaf in paths(tree)]


def leaves_like(structure: Any, value: Any) -> list[Any]:
    """The leaves of `value` in the order of `structure`: a dict may hold its keys in any order, and more of them. Parts
    whose structure is None are left out."""
    out: list[Any] = []
    _gather(structure, value, out)
    return out


def _gather(structure: Any, value: Any, out: list[Any], where: str = "") -> None:
    if structure is None:
        return
    if isinstance(structure, dict):
        if not isinstance(value, Mapping) or not structure.keys() <= value.keys():
            got = sorted(value) if isinstance(value, Mapping) else type(value).__name__
            raise DataError(f"{where or 'an input'}: expected a dict with the keys {sorted(structure)}, got {got}")
        for key, part in structure.items():
            _gather(part, value[key], out, f"{where}/{key}" if where else key)
    elif isinstance(structure, (list, tuple)):
        if not isinstance(value, (list, tuple)) or len(value) != len(structure):
            have = len(value) if isinstance(value, (list, tuple)) else type(value).__name__
            raise DataError(f"{where or 'inputs'}: expected {len(structure)} parts, got {have}")
        for i, part in enumerate(structure):
            _gather(part, value[i], out, f"{where}/{i}" if where else str(i))
    else:
        out.append(value)


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


def batch_rows(batch: NestedArray) -> int:
    """Rows of a batch of arrays `[B, ...]`. Raises DataError where they have no common B, or none at all."""
    sizes = {x.shape[:1] for x in leaves(batch)}
    if len(sizes) != 1 or not (size := sizes.pop()) or not size[0]:
        got = ", ".join(f"{path}: {list(x.shape)}" for path, x in paths(batch)) or "no arrays"
        raise DataError(f"a batch needs arrays [B, ...] with the same B >= 1, got shapes {got}")
    return size[0]


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


def difference(expected: dict[str, str], got: dict[str, str], most: int = 3) -> str:
    """Where two structures differ, for an error message: 'obs: expected float32[8], got float32[9]'. Both are given as
    path -> description of the leaf; '' where they are equal."""
    different = [
        f"{path or 'the sample'}: expected {expected.get(path, 'nothing')}, got {got.get(path, 'nothing')}"
        for path in {**expected, **got}
        if expected.get(path) != got.get(path)
    ]
    more = f" (and {len(different) - most} more)" if len(different) > most else ""
    return "; ".join(different[:most]) + more
