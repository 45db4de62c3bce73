"""Trainer state as bytes: a packed tree in which leaves that are no arrays are arrays of bytes under a key that names
their kind."""

from __future__ import annotations

import json
from typing import Any

import numpy as np

from bray import tree
from bray.errors import DataError

_BYTES, _JSON, _INT_KEYS = "$bytes", "$json", "$ints"


def pack_state(state: Any) -> bytes:
    """A tree whose leaves are arrays, bytes, text, None or numbers (of any size: random states)."""
    return tree.pack(_encode(state, ""))


def _encode(node: Any, path: str) -> Any:
    if isinstance(node, dict):
        if node and all(type(k) is int for k in node):
            return {_INT_KEYS: {str(k): _encode(v, f"{path}/{k}") for k, v in node.items()}}
        for k in node:
            if not isinstance(k, str) or k in (_BYTES, _JSON, _INT_KEYS):
                raise DataError(f"trainer state at {path or '/'}: expected keys that are text, got {k!r}")
        return {k: _encode(v, f"{path}/{k}") for k, v in node.items()}
    if isinstance(node, (list, tuple)):
        items = [_encode(v, f"{path}/{i}") for i, v in enumerate(node)]
        return items if isinstance(node, list) else tuple(items)
    if isinstance(node, (bytes, bytearray, memoryview)):
        return {_BYTES: np.frombuffer(node, np.uint8)}
    if isinstance(node, (np.ndarray, np.generic)):
        return node
    if node is None or isinstance(node, (bool, int, float, str)):
        return {_JSON: np.frombuffer(json.dumps(node).encode(), np.uint8)}
    raise DataError(
        f"trainer state at {path or '/'}: expected arrays, numbers, text or bytes, got {type(node).__name__}"
    )


def unpack_state(data: bytes) -> Any:
    """The inverse of `pack_state`; arrays are writable copies."""
    try:
        return _decode(tree.unpack(data, copy=True))
    except (ValueError, AttributeError, RecursionError) as e:
        raise DataError(f"not a trainer state ({e})") from None


def _decode(node: Any) -> Any:
    if isinstance(node, (list, tuple)):
        items = [_decode(v) for v in node]
        return items if isinstance(node, list) else tuple(items)
    if not isinstance(node, dict):
        return node
    if len(node) == 1:
        ((key, value),) = node.items()
        if key == _BYTES:
            return np.asarray(value).tobytes()
        if key == _JSON:
            return json.loads(np.asarray(value).tobytes())
        if key == _INT_KEYS:
            return {int(k): _decode(v) for k, v in value.items()}
    return {k: _decode(v) for k, v in node.items()}
