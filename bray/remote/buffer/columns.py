"""Samples in columns: what the samples of a buffer look like, and rows of them that travel and wait together.

A **Layout** is the structure of a sample: its keys, and dtype and shape of every leaf. A **Chunk** is some rows of one layout, each leaf a
column `[rows, ...]`. Written down, the columns of a chunk follow each other, each on a cache line of its own; the layout stands beside
them as a line of JSON. Nothing is ever unpickled.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy as np

from bray import tree
from bray.errors import DataError
from bray.tree import NestedArray

_ALIGN = 64
_KINDS = "biufc"  # bool, int, unsigned, float, complex: plain numbers, never objects
_DTYPE = re.compile(rf"[<|][{_KINDS}]\d{{1,2}}")
_MAX_DEPTH = 64
_MAX_BYTES = 1 << 40
_KEEP = 1024  # layouts remembered: pieces of episodes have as many lengths as there are

_ZEROS = bytes(_ALIGN)

Read = Callable[[Any, list[np.ndarray]], bool]


def to_array(leaf: Any) -> np.ndarray:
    """A leaf as an array: numpy arrays as they are, numbers, and tensors of torch."""
    if hasattr(leaf, "detach"):
        try:
            leaf = leaf.detach().cpu().numpy()
        except TypeError as e:  # a dtype that numpy does not have
            raise DataError(f"a tensor of {leaf.dtype} cannot become a numpy array ({e}): convert it first") from None
    array = np.asarray(leaf)
    if array.dtype.kind not in _KINDS:
        what = f"dtype {array.dtype}" if isinstance(leaf, np.ndarray) else type(leaf).__name__
        raise DataError(f"a sample is a tree (dict, list, tuple) of numpy arrays and numbers; got a leaf of {what}")
    return array.astype(array.dtype.newbyteorder("<")) if array.dtype.byteorder == ">" else array


class Layout:
    """The structure of a sample. Two samples have the same layout when `spec` is the same."""

    __slots__ = ("dtypes", "paths", "read", "row_bytes", "shapes", "sizes", "spec", "structure", "tree")

    def __init__(self, node: Any):
        self.spec: bytes = msgspec.json.encode(node)
        self.dtypes: list[np.dtype] = []
        self.shapes: list[tuple[int, ...]] = []
        self.paths: list[str] = []
        self.read: Read
        """`read(sample, leaves)`: whether the sample has this layout; its leaves are appended."""
        self.tree: Callable[[Sequence[Any]], NestedArray]
        """Leaves, in order, as a tree."""
        self.read, build = _compile(node, self, "", 0)
        self.tree = lambda leaves: build(iter(leaves))
        self.sizes = [d.itemsize * math.prod(s) for d, s in zip(self.dtypes, self.shapes, strict=True)]
        """Bytes of each leaf."""
        self.row_bytes = sum(self.sizes)
        if self.row_bytes > _MAX_BYTES:
            raise DataError(f"a sample of {self.row_bytes} bytes")
        self.structure = (tuple(self.paths), tuple(self.shapes))
        """What samples of one batch have in common: all but the dtypes."""

    def offsets(self, rows: int) -> tuple[list[int], int]:
        """Where each column of so many rows starts, and where the last one ends."""
        at, starts = 0, []
        for size in self.sizes:
            starts.append(at)
            at += -(-size * rows // _ALIGN) * _ALIGN
        return starts, at

    def columns(self, data: Any, rows: int, start: int = 0) -> list[np.ndarray]:
        """The columns that are written at `start` of some bytes, as views of these."""
        out = []
        starts, end = self.offsets(rows)
        if start + end > len(data):
            raise DataError(f"{rows} samples of {self.row_bytes} bytes were announced, and {len(data) - start} came")
        for at, dtype, shape in zip(starts, self.dtypes, self.shapes, strict=True):
            if not (count := rows * math.prod(shape)):
                out.append(np.empty((rows, *shape), dtype))
            else:
                out.append(np.frombuffer(data, dtype, count, start + at).reshape(rows, *shape))
        return out

    def differs(self, other: Layout) -> str:
        """How another layout's structure differs from this one, for an error message; '' where it does not."""
        if self.structure == other.structure:
            return ""
        mine = dict(zip(self.paths, self.shapes, strict=True))
        theirs = dict(zip(other.paths, other.shapes, strict=True))
        for path in [*mine, *theirs]:
            if mine.get(path) != theirs.get(path):
                where = repr(path) if path else "the sample"
                return f"{where}: expected {_shape(mine.get(path))}, got {_shape(theirs.get(path))}"
        return f"the leaves come in another order: expected {list(mine)}, got {list(theirs)}"


def _shape(shape: tuple[int, ...] | None) -> str:
    return "nothing there" if shape is None else f"shape {shape}"


def _compile(node: Any, layout: Layout, path: str, depth: int) -> tuple[Read, Callable[[Any], NestedArray]]:
    """A node of the JSON as two functions: tree -> leaves, leaves -> tree. The node is checked as it came from another process."""
    if not isinstance(node, dict) or len(node) != 1 or depth > _MAX_DEPTH:
        raise DataError(f"not the layout of a sample: at {path!r}, or more than {_MAX_DEPTH} levels deep")
    ((kind, body),) = node.items()
    if kind == "a":
        return _leaf(body, layout, path)
    if kind not in ("d", "l", "t") or not isinstance(body, list):
        raise DataError(f"not the layout of a sample: unknown kind {str(kind)[:20]!r}")
    keys: list[Any] = list(range(len(body)))
    if kind == "d":
        if not all(isinstance(p, list) and len(p) == 2 and isinstance(p[0], str) for p in body):
            raise DataError("not the layout of a sample: a dict with keys that are not strings")
        keys, body = [p[0] for p in body], [p[1] for p in body]
    made = [_compile(n, layout, f"{path}/{k}" if path else str(k), depth + 1) for k, n in zip(keys, body, strict=True)]
    builds = [b for _, b in made]
    reads = [r for r, _ in made]
    size = len(reads)
    if kind == "d":
        pairs = list(zip(keys, reads, strict=True))

        def read_dict(sample: Any, out: list[np.ndarray]) -> bool:
            if not isinstance(sample, dict) or len(sample) != size:
                return False
            for key, read in pairs:  # noqa: SIM110 (half as fast as a generator)
                if key not in sample or not read(sample[key], out):
                    return False
            return True

        return read_dict, lambda leaves: {k: b(leaves) for k, b in zip(keys, builds, strict=True)}
    sort: Any = list if kind == "l" else tuple

    def read_list(sample: Any, out: list[np.ndarray]) -> bool:
        if not isinstance(sample, sort) or len(sample) != size:
            return False
        return all(read(part, out) for read, part in zip(reads, sample, strict=True))

    return read_list, lambda leaves: sort([b(leaves) for b in builds])


def _leaf(body: Any, layout: Layout, path: str) -> tuple[Read, Callable[[Any], NestedArray]]:
    good = isinstance(body, list) and len(body) == 2 and isinstance(body[0], str) and isinstance(body[1], list)
    if not good or not _DTYPE.fullmatch(body[0]) or len(body[1]) > 32:
        raise DataError(f"not the layout of a sample: a leaf at {path!r} without dtype and shape")
    if not all(type(n) is int and 0 <= n < 1 << 40 for n in body[1]):
        raise DataError(f"not the layout of a sample: an impossible shape at {path!r}")
    try:
        dtype = np.dtype(body[0])
    except TypeError:
        raise DataError(f"not the layout of a sample: no dtype {body[0]!r}") from None
    shape = tuple(body[1])
    layout.dtypes.append(dtype)
    layout.shapes.append(shape)
    layout.paths.append(path)
    ndarray = np.ndarray

    def read(leaf: Any, out: list[np.ndarray]) -> bool:
        if type(leaf) is not ndarray:
            if isinstance(leaf, (dict, list, tuple)):
                return False
            leaf = to_array(leaf)
        elif leaf.dtype.byteorder == ">":
            leaf = to_array(leaf)
        if leaf.shape != shape or leaf.dtype != dtype:
            return False
        out.append(leaf)
        return True

    return read, next


def _describe(sample: Any, depth: int = 0) -> Any:
    if depth > _MAX_DEPTH:
        raise DataError(f"a sample may be {_MAX_DEPTH} levels deep, this one is deeper")
    if isinstance(sample, dict):
        if not all(isinstance(k, str) for k in sample):
            raise DataError(f"keys of a sample are strings, got {[k for k in sample if not isinstance(k, str)]}")
        return {"d": [[k, _describe(v, depth + 1)] for k, v in sample.items()]}
    if isinstance(sample, (list, tuple)):
        return {"t" if isinstance(sample, tuple) else "l": [_describe(v, depth + 1) for v in sample]}
    array = to_array(sample)
    return {"a": [array.dtype.str, list(array.shape)]}


class Layouts:
    """Layouts already met: a structure is looked at once."""

    def __init__(self) -> None:
        self._by_spec: dict[bytes, Layout] = {}
        self._last: Layout | None = None

    def read(self, sample: Any) -> tuple[Layout, list[np.ndarray]]:
        """The layout of a sample, and its leaves in that order. DataError says what no sample can hold."""
        leaves: list[np.ndarray] = []
        last = self._last
        if last is not None and last.read(sample, leaves):
            return last, leaves
        layout = self.parse(msgspec.json.encode(_describe(sample)))
        leaves = []
        if not layout.read(sample, leaves):
            raise DataError("a sample whose leaves change while they are read")
        self._last = layout
        return layout, leaves

    def read_batch(self, batch: Any) -> Chunk:
        """A tree `[N, ...]` as rows."""
        leaves = list(tree.paths(batch))
        columns = {path: to_array(leaf) for path, leaf in leaves}
        if len(columns) != len(leaves):
            raise DataError("a batch with two arrays of the same path: a key of a sample may not contain '/'")
        rows = {len(c) if c.ndim else -1 for c in columns.values()}
        if len(rows) != 1 or -1 in rows:
            shapes = {path: c.shape for path, c in columns.items()}
            raise DataError(f"the arrays of a batch have the same number of rows, one per sample; got shapes {shapes}")
        (count,) = rows
        if not count:
            raise DataError("expected a batch of samples, got one without rows")
        layout, _ = self.read(tree.map(lambda leaf: to_array(leaf)[0, ...], batch))
        return Chunk(layout, [columns[path] for path in layout.paths], count)

    def parse(self, spec: bytes) -> Layout:
        """A layout that was written down."""
        layout = self._by_spec.get(spec)
        if layout is None:
            try:
                layout = Layout(msgspec.json.decode(spec))
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as e:
                raise DataError(f"not the layout of a sample: no JSON ({e})") from None
            if len(self._by_spec) >= _KEEP:
                self._by_spec.clear()
            self._by_spec[spec] = layout
        return layout


class Chunk:
    """Rows of one layout. `held` is what keeps their memory: a slot of shared memory, or nothing."""

    __slots__ = ("columns", "first", "held", "layout", "rows", "total")

    def __init__(self, layout: Layout, columns: list[np.ndarray], rows: int, held: Any = None):
        self.layout, self.columns, self.rows, self.held = layout, columns, rows, held
        self.first, self.total = 0, rows  # these rows lie behind so many others, in memory of so many

    @property
    def nbytes(self) -> int:
        return self.layout.row_bytes * self.rows

    def part(self, first: int, end: int) -> Chunk:
        """Some of the rows, in the same memory."""
        if first == 0 and end == self.rows:
            return self
        part = Chunk(self.layout, [c[first:end] for c in self.columns], end - first, self.held)
        part.first, part.total = self.first + first, self.total
        return part

    def batch(self) -> NestedArray:
        """All rows as one tree `[rows, ...]`."""
        return self.layout.tree(self.columns)

    def pieces(self) -> list[Any]:
        """The columns as they are written down."""
        out: list[Any] = []
        for column in self.columns:
            data = np.ascontiguousarray(column).reshape(-1).view(np.uint8).data if column.size else b""
            out.append(data)
            if pad := -len(data) % _ALIGN:
                out.append(_ZEROS[:pad])
        return out

    def row(self, i: int) -> NestedArray:
        """One row as the sample that was pushed."""
        return self.layout.tree([c[i, ...] for c in self.columns])


def private(nbytes: int) -> tuple[Any, Any]:
    """Memory of this process, for `join`."""
    return np.empty(nbytes, np.uint8), None


def join(chunks: Sequence[Chunk], memory: Callable[[int], tuple[Any, Any]]) -> Chunk:
    """Several chunks of one structure as one, in memory of its own: `memory(nbytes)` gives a writable buffer, and what keeps it.
    Where dtypes differ the wider one is taken, as numpy does."""
    layout, rows = _common([c.layout for c in chunks]), sum(c.rows for c in chunks)
    data, held = memory(layout.offsets(rows)[1])
    columns = layout.columns(data, rows)
    for i, column in enumerate(columns):
        np.concatenate([c.columns[i] for c in chunks], out=column, casting="unsafe")
    return Chunk(layout, columns, rows, held)


def _common(layouts: list[Layout]) -> Layout:
    first = layouts[0]
    if all(x is first or x.spec == first.spec for x in layouts):
        return first
    leaves = [np.empty(s, np.result_type(*d)) for s, *d in zip(first.shapes, *(x.dtypes for x in layouts), strict=True)]
    return Layout(_describe(first.tree(leaves)))


def stack(layout: Layout, rows: Sequence[list[np.ndarray]]) -> Chunk:
    """Samples, given by their leaves, as one chunk in memory of its own."""
    if len(rows) == 1:
        return Chunk(layout, [np.array(leaf)[None] for leaf in rows[0]], 1)
    return Chunk(layout, [np.stack(leaves) for leaves in zip(*rows, strict=True)], len(rows))
