"""A State as plain data that a page can show: every field with its type, arrays by shape and a small preview."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from bray.serving.episodes import PackedMessage
from bray.serving.state import State
from bray.web.pictures import png

_FIRST = ("input", "output")
_LAST = ("session", "game", "agent", "actor", "tick")
_MOST_ITEMS = 60
_MOST_NODES = 2000
_MOST_TEXT = 2000
_DEPTH = 12
_THUMB = 96  # pixels

Node = dict[str, Any]
"""{"kind", "text"}; containers also have "items" ([key, node] pairs), arrays "preview" and perhaps "png"."""


def describe(state: State) -> list[tuple[str, Node]]:
    """(field, node) pairs: input and output first, then what agents have set, then which tick of which session it
    is."""
    fields = vars(state)
    others = [name for name in fields if name not in _FIRST and name not in _LAST]
    left = [_MOST_NODES]
    return [(name, _node(fields[name], left, 0)) for name in (*_FIRST, *others, *_LAST) if name in fields]


def _node(value: Any, left: list[int], depth: int) -> Node:
    left[0] -= 1
    if isinstance(value, PackedMessage):
        return {"kind": "message", "text": f"{value.type}, {len(value.data)} bytes; its class is not known here"}
    if hasattr(value, "ListFields"):
        kind, items = value.DESCRIPTOR.full_name, [(f.name, _plain(v)) for f, v in value.ListFields()]
        return _container("message", kind, items, left, depth)
    if isinstance(value, Mapping):
        return _container("dict", _count(len(value), "key"), [(str(k), v) for k, v in value.items()], left, depth)
    if isinstance(value, (np.ndarray, np.generic)):
        return _array(np.asarray(value))
    if isinstance(value, (str, bytes)):
        return _text(value)
    if isinstance(value, Sequence):
        if all(isinstance(v, (int, float, bool)) or v is None for v in value) and len(value) <= 16:
            return {"kind": "list", "text": "[" + ", ".join(_number(v) for v in value) + "]"}
        return _container("list", _count(len(value), "item"), [(str(i), v) for i, v in enumerate(value)], left, depth)
    return {"kind": type(value).__name__, "text": _number(value)}


def _container(kind: str, text: str, items: list[tuple[str, Any]], left: list[int], depth: int) -> Node:
    shown: list[tuple[str, Node]] = []
    if depth < _DEPTH:
        for key, value in items[:_MOST_ITEMS]:
            if left[0] <= 0:
                break
            shown.append((key, _node(value, left, depth + 1)))
    node: Node = {"kind": kind, "text": text, "items": shown}
    if len(shown) < len(items):
        node["more"] = len(items) - len(shown)
    return node


def _count(n: int, word: str) -> str:
    return f"{n} {word}{'s' if n != 1 else ''}"


def _plain(value: Any) -> Any:
    """Repeated and map fields of a message as lists and dicts."""
    if isinstance(value, (str, bytes, int, float)) or hasattr(value, "ListFields"):
        return value
    return dict(value) if hasattr(value, "items") else list(value)


def _text(value: str | bytes) -> Node:
    more = "" if len(value) <= _MOST_TEXT else f" … ({len(value)} in all)"
    kind = "text" if isinstance(value, str) else f"{len(value)} bytes"
    return {"kind": kind, "text": repr(value[:_MOST_TEXT]).lstrip("b") + more}


def _number(value: Any, digits: int = 5) -> str:
    return f"{value:.{digits}g}" if isinstance(value, float) else repr(value)[:_MOST_TEXT]


def _array(array: np.ndarray) -> Node:
    kind = f"{array.dtype}{list(array.shape)}"
    if array.ndim == 0:
        return {"kind": str(array.dtype), "text": _number(array.item())}
    text = ""
    if array.size and array.dtype.kind in "biuf":
        low, high = array.min().item(), array.max().item()
        text = _number(low) if low == high else f"{_number(low, 3)} … {_number(high, 3)}"
    preview = np.array2string(array, max_line_width=72, precision=4, threshold=48, edgeitems=2, separator=", ")
    node: Node = {"kind": kind, "text": text, "preview": preview[:_MOST_TEXT]}
    if (thumb := _thumb(array)) is not None:
        node["png"] = base64.b64encode(png(thumb)).decode()
    return node


def _thumb(array: np.ndarray) -> np.ndarray | None:
    """A small picture of an array that looks like one: `[H, W]`, `[H, W, 3]`, or up to 8 of `[H, W]` beside each
    other."""
    if array.dtype.kind not in "biuf" or array.ndim not in (2, 3) or array.size > 1 << 22:
        return None
    if array.ndim == 3 and array.shape[2] != 3:
        if array.shape[0] > 8:
            return None
        array = np.concatenate(list(array), axis=1)
    if min(array.shape[:2]) < 8:
        return None
    step = max(1, max(array.shape[0], array.shape[1] // 4) // _THUMB)
    small = np.nan_to_num(array[::step, ::step].astype(np.float32), posinf=0.0, neginf=0.0)
    low, high = (
        (0.0, 255.0) if array.dtype == np.uint8 and array.max() > 1 else (float(small.min()), float(small.max()))
    )
    grey = ((small - low) * (255 / ((high - low) or 1.0))).astype(np.uint8)
    return grey if grey.ndim == 3 else np.repeat(grey[:, :, None], 3, axis=2)
