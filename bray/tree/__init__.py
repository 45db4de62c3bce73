"""Trees: nested dicts, lists and tuples of numpy arrays (public name `NestedArray`).

A tree is how observations, actions, model inputs and outputs, batches and trajectories are held everywhere. Shapes are
written time first, `[T, B, ...]`. Dicts keep the order of the first tree given; keys are strings.

`pack` writes a tree as a small JSON header followed by the raw arrays; `unpack` reads it back as views of the bytes,
trusting nothing: no pickle, every length and type is checked before an array is made. `bray.tree.layout` has the parts
of which `pack`, and the messages between processes, are made.
"""

from bray.tree.layout import MAGIC, pack, unpack
from bray.tree.nested import (
    NestedArray,
    as_array,
    as_arrays,
    batch_rows,
    concat,
    difference,
    equal,
    flatten,
    index,
    leaves,
    leaves_like,
    length,
    map,
    nbytes,
    paths,
    split,
    stack,
)

__all__ = [
    "MAGIC",
    "NestedArray",
    "as_array",
    "as_arrays",
    "batch_rows",
    "concat",
    "difference",
    "equal",
    "flatten",
    "index",
    "leaves",
    "leaves_like",
    "length",
    "map",
    "nbytes",
    "pack",
    "paths",
    "split",
    "stack",
    "unpack",
]
