"""Observations and actions as JSON, by the spaces of a spec: what a game sends and what it gets back."""

from __future__ import annotations

import base64
import binascii
import math
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np

from bray.errors import DataError
from bray.serving.numbers import read_numbers
from bray.spec import Space

Reader = Callable[[Any], Any]
_decode_any = msgspec.json.Decoder().decode
_decode_object = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_decode_list = msgspec.json.Decoder(list[msgspec.Raw]).decode


def reader(space: Space, where: str = "obs") -> Reader:
    """A function from decoded JSON (or numpy) to one observation: arrays of the space's shape and type. An array may also be sent as
    `{"base64": "...", "dtype": "float32"}`, its raw bytes in little-endian order. What does not fit raises DataError.

    JSON that is not decoded yet (`msgspec.Raw`) is read several times faster: its numbers go straight into the array."""
    if space.kind == "dict":
        parts = {name: reader(part, f"{where}.{name}") for name, part in space.items}

        def read_dict(value: Any) -> dict[str, Any]:
            if type(value) is msgspec.Raw:
                value = _parts(value, _decode_object, where)
            if not isinstance(value, dict) or value.keys() != parts.keys():
                got = sorted(map(str, value)) if isinstance(value, dict) else _kind(value)
                raise DataError(f"{where}: expected an object with the keys {sorted(parts)}, got {got}")
            return {name: read(value[name]) for name, read in parts.items()}

        return read_dict
    if space.kind == "tuple":
        items = [reader(part, f"{where}[{i}]") for i, part in enumerate(space.parts)]

        def read_tuple(value: Any) -> tuple[Any, ...]:
            if type(value) is msgspec.Raw:
                value = _parts(value, _decode_list, where)
            if not isinstance(value, (list, tuple)) or len(value) != len(items):
                got = f"{len(value)}" if isinstance(value, (list, tuple)) else _kind(value)
                raise DataError(f"{where}: expected a list of {len(items)} parts, got {got}")
            return tuple(read(x) for read, x in zip(items, value, strict=True))

        return read_tuple
    return _array_reader(space, where)


def _parts(value: msgspec.Raw, decode: Callable[[msgspec.Raw], Any], where: str) -> Any:
    try:
        return decode(value)
    except (ValueError, RecursionError):  # something else: the reader says what it expected
        return _decode(value, where)


def _decode(value: msgspec.Raw, where: str) -> Any:
    try:
        return _decode_any(value)
    except (ValueError, RecursionError) as e:
        raise DataError(f"{where}: {e}") from None


def _array_reader(space: Space, where: str) -> Reader:
    whole = space.kind in ("discrete", "multi_discrete")
    dtype = np.dtype(np.int64 if whole else space.dtype)
    shape = tuple(space.shape)
    low = np.reshape(space.start, shape) if whole and space.start else np.zeros(shape, np.int64)
    high = low + np.reshape(space.n, shape) if whole else None
    floats = dtype.kind == "f"
    limits = None if floats or whole or dtype.kind == "b" else (np.iinfo(dtype).min, np.iinfo(dtype).max)
    sizes, size = np.array(shape, np.int64), math.prod(shape)
    least, most = (-math.inf, math.inf) if floats else limits or _INT64

    def read_text(value: msgspec.Raw) -> np.ndarray | None:
        """The array that is written there, if it is plainly that: None for anything out of the ordinary."""
        flat = np.empty(size, np.float64 if floats else np.int64)
        if not read_numbers(np.frombuffer(value, np.uint8), sizes, not floats, least, most, flat):
            return None
        x = flat.astype(dtype).reshape(shape)
        return x if high is None or ((low <= x) & (x < high)).all() else None

    has_text = size > 0 and dtype in _WRITTEN

    def read(value: Any) -> np.ndarray:
        if type(value) is msgspec.Raw:
            x = read_text(value) if has_text and memoryview(value)[0] != _BRACE else None
            if x is not None:
                return x
            value = _decode(value, where)
        if type(value) is dict:
            value = _from_base64(value, dtype, shape, where)
        try:
            x = np.array(value, dtype if floats else None)
        except (ValueError, TypeError, OverflowError):
            raise DataError(f"{where}: expected numbers of shape {list(shape)}, got {_kind(value)}") from None
        if x.shape != shape:
            raise DataError(f"{where}: expected shape {list(shape)}, got {list(x.shape)}")
        if floats:
            if not np.isfinite(x).all():
                raise DataError(f"{where}: expected finite numbers, got {x.ravel()[~np.isfinite(x.ravel())][0]}")
            return x
        if x.dtype != dtype:
            if x.dtype.kind not in "biu" and not (x.dtype.kind == "f" and np.array_equal(x, np.rint(x))):
                raise DataError(f"{where}: expected whole numbers, got {_kind(value)}")
            if limits is not None and x.size and not (limits[0] <= x.min() and x.max() <= limits[1]):
                raise DataError(f"{where}: expected {dtype} ({limits[0]} to {limits[1]}), got {x.min()} to {x.max()}")
            x = x.astype(dtype)
        if high is not None and not ((low <= x) & (x < high)).all():
            raise DataError(f"{where}: expected {_range(low, high)}, got {x.tolist()}")
        return x

    return read


_BRACE = ord("{")  # of an array in base64
_INT64 = (-(1 << 63), (1 << 63) - 1)
_WRITTEN = [np.dtype(x) for x in ("f4", "f8", "i1", "i2", "i4", "i8", "u1", "u2", "u4")]
"""Whose numbers are read from text; those of other types are few."""


def _from_base64(value: dict[str, Any], dtype: np.dtype, shape: tuple[int, ...], where: str) -> np.ndarray:
    text = value.get("base64")
    if not isinstance(text, str) or not value.keys() <= {"base64", "dtype", "shape"}:
        raise DataError(
            f"{where}: expected a list of numbers or {{base64, dtype, shape}}, got the keys {sorted(map(str, value))}"
        )
    sent = value["dtype"] if "dtype" in value else dtype.name  # noqa: SIM401 - numpy takes a while to name a dtype
    try:
        raw = base64.b64decode(text, validate=True)
        if not isinstance(sent, str) or not sent.isalnum():  # numpy reads more into a text than a name
            raise TypeError("no such dtype")
        kind = np.dtype(sent)
        if kind.kind not in "biuf":
            raise TypeError("no numbers")
        return np.frombuffer(raw, kind.newbyteorder("<")).reshape(value.get("shape", shape))
    except (binascii.Error, ValueError, TypeError) as e:
        raise DataError(f"{where}: expected base64 of {sent} numbers of shape {list(shape)} ({e})") from None


def _range(low: np.ndarray, high: np.ndarray) -> str:
    if low.size == 1:
        return f"{int(low.min())} to {int(high.max()) - 1}"
    return f"values from {low.tolist()} to {(high - 1).tolist()}"


def _kind(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return "a list that is not one array of numbers"
    if isinstance(value, np.ndarray):
        return f"{value.dtype} numbers that are not"
    return (
        "nothing"
        if value is None
        else f"{str(value)[:40]!r}"
        if isinstance(value, (str, int, float, bool))
        else type(value).__name__
    )


def plain(value: Any) -> Any:
    """One action (a tree of arrays) as JSON takes it."""
    if isinstance(value, dict):
        return {k: plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(v) for v in value]
    return value.tolist() if isinstance(value, (np.ndarray, np.generic)) else value
