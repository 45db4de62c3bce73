"""The one codec of trees: a JSON description of the structure, and columns of raw numbers.

A **Layout** is the structure of a tree: its keys, and dtype and shape of every leaf. Rows of one layout are columns,
one per leaf, each `[rows, ...]`; written down, the columns follow each other, each aligned to a cache line. Files
(`pack`), buffers (`bray.remote.buffer`) and model calls (`bray.remote.model`) differ only in what goes before these
bytes.

    node = {"d": [[key, node], ...]} | {"l": [node, ...]} | {"t": [node, ...]} | {"a": [dtype, shape]}

Nothing is ever unpickled, and every length and type is checked before an array is made.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from typing import Any

import msgspec
import numpy as np

from bray.errors import DataError
from bray.tree import nested
from bray.tree.nested import KINDS, NestedArray, as_array

ALIGN = 64
_DTYPE = re.compile(rf"[<|][{KINDS}]\d{{1,2}}")
_MAX_DEPTH = 64
_MAX_AXES = 32
_MAX_BYTES = 1 << 40
_MAX_HEADER = 1 << 24
_SMALL_HEADER = 1 << 12
_KEEP = 1024  # layouts remembered: parts of episodes have many different lengths

Read = Callable[[Any, list[np.ndarray]], bool]
Build = Callable[[Iterator[Any]], NestedArray]


def aligned(size: int) -> int:
    """The next multiple of ALIGN."""
    return -(-size // ALIGN) * ALIGN


def describe(tree: Any, lead: int = 0, depth: int = 0) -> Any:
    """The description of a tree. The first `lead` axes of every array are left out: 1 for a batch."""
    if depth > _MAX_DEPTH:
        raise DataError(f"a tree may be {_MAX_DEPTH} levels deep, this one is deeper")
    if isinstance(tree, dict):
        if not all(isinstance(k, str) for k in tree):
            raise DataError(f"keys of a tree are strings, got {[k for k in tree if not isinstance(k, str)]}")
        return {"d": [[k, describe(v, lead, depth + 1)] for k, v in tree.items()]}
    if isinstance(tree, (list, tuple)):
        return {"t" if isinstance(tree, tuple) else "l": [describe(v, lead, depth + 1) for v in tree]}
    array = as_array(tree)
    return {"a": [array.dtype.str, list(array.shape[lead:])]}


class Layout:
    """The structure of a tree. Two trees have the same layout when `spec` is the same."""

    __slots__ = ("_end", "dtypes", "paths", "read", "row_bytes", "shapes", "sizes", "spec", "structure", "tree")

    def __init__(self, node: Any):
        """From a description, which is checked: it may come from another process. DataError says what is wrong with
        it."""
        try:
            self.spec: bytes = msgspec.json.encode(node)
        except UnicodeEncodeError as e:
            raise DataError(f"keys of a tree are text that UTF-8 can hold ({e.reason})") from None
        self.dtypes: list[np.dtype] = []
        self.shapes: list[tuple[int, ...]] = []
        self.paths: list[str] = []
        self.sizes: list[int] = []
        """Bytes of each leaf."""
        self._end = 0  # of the arrays so far
        self.read: Read
        """`read(tree, leaves)`: whether the tree has this layout; its leaves are appended."""
        self.tree: Callable[[Sequence[Any]], NestedArray]
        """Leaves, in order, as a tree."""
        self.read, build = self._compile(node, "", 0)
        self.tree = lambda leaves: build(iter(leaves))
        self.row_bytes = sum(self.sizes)
        if self.row_bytes > _MAX_BYTES:
            raise DataError(f"a tree of {self.row_bytes} bytes")
        self.structure = (tuple(self.paths), tuple(self.shapes))
        """What samples of one batch have in common: all but the dtypes."""

    @classmethod
    def parse(cls, spec: bytes) -> Layout:
        """A layout that was written down. DataError completes the sentence 'not a ...: '."""
        try:
            return cls(msgspec.json.decode(spec))
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as e:
            raise DataError(f"its description is no JSON ({e})") from None

    def _compile(self, node: Any, path: str, depth: int) -> tuple[Read, Build]:
        """A node of the description as two functions: tree -> leaves, leaves -> tree."""
        if not isinstance(node, dict) or len(node) != 1 or depth > _MAX_DEPTH:
            raise DataError(f"no description at {path!r}, or more than {_MAX_DEPTH} levels deep")
        ((kind, body),) = node.items()
        if not isinstance(body, list) or kind not in ("a", "d", "l", "t"):
            raise DataError(f"unknown node {str(kind)[:20]!r} at {path!r}")
        if kind == "a":
            return self._leaf(body, path)
        keys: list[Any] = list(range(len(body)))
        if kind == "d":
            if not all(isinstance(p, list) and len(p) == 2 and isinstance(p[0], str) for p in body):
                raise DataError("a dict with keys that are not strings")
            keys, body = [p[0] for p in body], [p[1] for p in body]
            if len(set(keys)) != len(keys):
                raise DataError("a dict with a key twice")
        inner = [
            self._compile(n, f"{path}/{k}" if path else str(k), depth + 1) for k, n in zip(keys, body, strict=True)
        ]
        reads, builds = [r for r, _ in inner], [b for _, b in inner]
        return _dict(keys, reads, builds) if kind == "d" else _list(list if kind == "l" else tuple, reads, builds)

    def _leaf(self, body: list[Any], path: str) -> tuple[Read, Build]:
        if len(body) == 3 and body.pop() != self._end:
            raise DataError(f"an array at another offset than the sizes before it say, at {path!r}")
        good = len(body) == 2 and isinstance(body[0], str) and isinstance(body[1], list)
        if not good or not _DTYPE.fullmatch(body[0]) or len(body[1]) > _MAX_AXES:
            raise DataError(f"an array without dtype and shape at {path!r}")
        if not all(type(n) is int and 0 <= n < _MAX_BYTES for n in body[1]):
            raise DataError(f"an impossible shape at {path!r}")
        try:
            dtype = np.dtype(body[0])
        except TypeError:
            raise DataError(f"no dtype {body[0]!r}") from None
        shape = tuple(body[1])
        self.dtypes.append(dtype)
        self.shapes.append(shape)
        self.paths.append(path)
        self.sizes.append(dtype.itemsize * math.prod(shape))
        self._end += aligned(self.sizes[-1])
        ndarray = np.ndarray

        def read(leaf: Any, out: list[np.ndarray]) -> bool:
            if type(leaf) is not ndarray:
                if isinstance(leaf, (dict, list, tuple)):
                    return False
                leaf = as_array(leaf)
            elif leaf.dtype.byteorder == ">":
                leaf = as_array(leaf)
            if leaf.shape != shape or leaf.dtype != dtype:
                return False
            out.append(leaf)
            return True

        return read, next

    def offsets(self, rows: int) -> tuple[list[int], int]:
        """Where each column of this many rows starts, and where the last one ends."""
        at, starts = 0, []
        for size in self.sizes:
            starts.append(at)
            at += aligned(size * rows)
        return starts, at

    def columns(self, data: Any, rows: int, start: int = 0) -> list[np.ndarray]:
        """The columns that begin at byte `start`, as views `[rows, ...]`."""
        out, at, end = [], start, len(data)
        for dtype, shape, size in zip(self.dtypes, self.shapes, self.sizes):  # noqa: B905 (quicker)
            nbytes = size * rows
            if at + nbytes > end:
                raise DataError(
                    f"{rows} rows of {self.row_bytes} bytes were announced, and {max(0, end - start)} bytes came"
                )
            if nbytes:
                out.append(np.frombuffer(data, dtype, nbytes // dtype.itemsize, at).reshape(rows, *shape))
            else:
                out.append(_empty((rows, *shape), dtype))
            at += nbytes + -nbytes % ALIGN
        return out

    def differs(self, other: Layout) -> str:
        """How another layout's structure differs from this one, for an error message; '' where it does not."""
        if self.structure == other.structure:
            return ""
        mine, theirs = ({p: f"shape {s}" for p, s in zip(x.paths, x.shapes, strict=True)} for x in (self, other))
        order = f"the leaves come in another order: expected {list(mine)}, got {list(theirs)}"
        return nested.difference(mine, theirs) or order


def _empty(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    try:
        return np.empty(shape, dtype)
    except ValueError:  # no bytes, but sides that no array can have
        raise DataError(f"an impossible shape {shape}") from None


def _dict(keys: list[str], reads: list[Read], builds: list[Build]) -> tuple[Read, Build]:
    size, pairs = len(keys), list(zip(keys, reads, strict=True))

    def read(tree: Any, out: list[np.ndarray]) -> bool:
        if not isinstance(tree, dict) or len(tree) != size:
            return False
        for key, read in pairs:  # noqa: SIM110 (twice as fast as a generator)
            if key not in tree or not read(tree[key], out):
                return False
        return True

    return read, lambda leaves: {k: b(leaves) for k, b in zip(keys, builds, strict=True)}


def _list(kind: Any, reads: list[Read], builds: list[Build]) -> tuple[Read, Build]:
    size = len(reads)

    def read(tree: Any, out: list[np.ndarray]) -> bool:
        if not isinstance(tree, kind) or len(tree) != size:
            return False
        return all(read(part, out) for read, part in zip(reads, tree, strict=True))

    return read, lambda leaves: kind([b(leaves) for b in builds])


class Layouts:
    """Layouts that were met before: a structure is looked at once."""

    def __init__(self) -> None:
        self._by_spec: dict[bytes, Layout] = {}
        self._last: Layout | None = None

    def read(self, sample: Any) -> tuple[Layout, list[np.ndarray]]:
        """The layout of a sample, and its leaves in that order. DataError says what no sample can hold."""
        leaves: list[np.ndarray] = []
        last = self._last
        if last is not None and last.read(sample, leaves):
            return last, leaves
        layout = self.parse(Layout(describe(sample)).spec)
        leaves = []
        if not layout.read(sample, leaves):
            raise DataError("a sample whose leaves change while they are read")
        self._last = layout
        return layout, leaves

    def parse(self, spec: bytes) -> Layout:
        """A layout that was written down."""
        layout = self._by_spec.get(spec)
        if layout is None:
            try:
                layout = Layout.parse(spec)
            except DataError as e:
                raise DataError(f"not the layout of a sample: {e}") from None
            if len(self._by_spec) >= _KEEP:
                self._by_spec.clear()
            self._by_spec[spec] = layout
        return layout


def to_bytes(columns: Sequence[np.ndarray]) -> list[Any]:
    """Columns as they are written down: bytes or views of the arrays, each followed by its padding."""
    out: list[Any] = []
    for column in columns:
        if column.nbytes < 4096:  # as quick as a view
            out.append(column.tobytes())
        else:
            out.append(np.ascontiguousarray(column).reshape(-1).view(np.uint8).data)
        if pad := -column.nbytes % ALIGN:
            out.append(bytes(pad))
    return out


# --- files ------------------------------------------------------------------------------------------------------------

MAGIC = b"BRAYTREE"
_HEAD = len(MAGIC) + 8
_parse_again = lru_cache(_KEEP)(Layout.parse)


def pack(tree: NestedArray) -> bytes:
    """A tree as bytes: magic, length of the header, header (the description, each array with its offset), arrays."""
    tree = nested.map(as_array, tree)
    offset = 0

    def place(node: Any) -> None:
        nonlocal offset
        ((kind, body),) = node.items()
        if kind == "a":
            body.append(offset)
            offset += aligned(np.dtype(body[0]).itemsize * math.prod(body[1]))
            return
        for child in body:
            place(child[1] if kind == "d" else child)

    node = describe(tree)
    place(node)
    try:
        header = msgspec.json.encode(node)
    except UnicodeEncodeError as e:
        raise DataError(f"keys of a tree are text that UTF-8 can hold ({e.reason})") from None
    arrays = nested.leaves(tree)
    if len(header) > _MAX_HEADER:
        raise DataError(f"a tree of {len(arrays)} arrays is too large to pack: its header has {len(header)} bytes")
    start = MAGIC + len(header).to_bytes(8, "little") + header
    return b"".join([start, bytes(-len(start) % ALIGN), *to_bytes(arrays)])


def unpack(data: bytes | bytearray | memoryview, copy: bool = False) -> NestedArray:
    """The inverse of `pack`. Arrays are read-only views of `data` unless `copy`. Raises DataError on anything else."""
    view = memoryview(data).cast("B")
    if len(view) < _HEAD or bytes(view[: len(MAGIC)]) != MAGIC:
        raise DataError(f"not a packed tree: it should start with {MAGIC!r}, got {bytes(view[:8])!r}")
    size = int.from_bytes(view[len(MAGIC) : _HEAD], "little")
    if size > _MAX_HEADER or _HEAD + size > len(view):
        raise DataError(f"not a packed tree: header of {size} bytes in {len(view)} bytes of data")
    try:
        layout = (_parse_again if size <= _SMALL_HEADER else Layout.parse)(bytes(view[_HEAD : _HEAD + size]))
        arrays = [c[0, ...] for c in layout.columns(view, 1, aligned(_HEAD + size))]
        for array in arrays:
            if array.dtype.kind == "b" and array.size and array.view(np.uint8).max() > 1:
                raise DataError("a bool array holds bytes other than 0 and 1")
    except DataError as e:
        raise DataError(f"not a packed tree: {e}") from None
    return layout.tree([a.copy() for a in arrays] if copy else arrays)
