"""What a game sends in a tick and gets back, as JSON, by the spaces of a spec: observations, masks of legal choices, actions."""

from __future__ import annotations

import base64
import binascii
import math
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np

from bray import tree
from bray.errors import ConfigError, DataError
from bray.serving.numbers import read_numbers
from bray.spec import ACTION_MASK, EnvSpec, Space

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


# --- observations with masks ----------------------------------------------------------------------------------------------

OBS = "obs"


def masked_spec(id: str, observation: Space, action: Space) -> EnvSpec:
    """The spec of a game that may send `action_mask` beside `obs`: both are one observation, so that whoever learns sees the mask too."""
    spec = EnvSpec(id, observation, action)
    choices = spec.layout.num_logits
    if observation.kind == "dict" and OBS in observation.names:
        raise ConfigError(f"a part of the observation cannot be named {OBS!r}: that is the name of all of it")
    if not choices or (observation.kind == "dict" and ACTION_MASK in observation.names):
        return spec
    mask = Space("multi_binary", (choices,), "int8")
    return EnvSpec(id, Space("dict", names=(OBS, ACTION_MASK), parts=(observation, mask)), action)


class Observations:
    """Reads ticks: `read(obs, action_mask) -> (observation, mask or None)`. JSON that is not decoded yet (`msgspec.Raw`) is read fastest."""

    def __init__(self, spec: EnvSpec):
        self.spec, self.layout = spec, spec.layout
        space = spec.observation
        self.all_legal = np.ones(self.layout.num_logits, np.bool_)
        self.masked = bool(len(self.all_legal))
        """Whether there are choices that a mask could forbid."""
        self.in_obs = space.kind == "dict" and ACTION_MASK in space.names
        """Whether the mask is a part of the observation."""
        self._beside = self.in_obs and set(space.names) == {OBS, ACTION_MASK}
        self._ones = np.ones(self.layout.num_logits, np.int8)
        self._read_obs = reader(space)
        self._read_part = reader(space.parts[space.names.index(OBS)]) if self._beside else None
        self._read_flat = reader(Space("multi_binary", self.all_legal.shape, "int8"), ACTION_MASK)
        parts = _choices(spec.action)
        self._read_parts = None if parts is None or parts.kind == "multi_binary" else reader(parts, ACTION_MASK)
        ends = np.cumsum([p.n for p in self.layout.parts if p.kind == "categorical"]).tolist()
        self._choices = [slice(a, b) for a, b in zip([0, *ends], ends, strict=False)]  # of each part, in a mask

    def read(self, obs: Any, mask: Any = None) -> tuple[Any, np.ndarray | None]:
        if type(mask) is msgspec.Raw:
            mask = msgspec.json.decode(mask)
        if not self.in_obs:
            x = self._read_obs(obs)
            return x, None if mask is None or not self.masked else self._mask(mask)
        if self._read_part is not None and not _has_obs(
            obs
        ):  # what games send: most of the time there is no more to it
            legal = self.all_legal if mask is None else self._mask(mask)
            bits = self._ones if mask is None else legal.astype(np.int8)
            return {OBS: self._read_part(obs), ACTION_MASK: bits}, legal
        x = self._read_obs(self._joined(obs, mask))
        return x, self._legal(self.layout.mask(tree.map(lambda leaf: leaf[None], x))[0])  # type: ignore[index]

    def _joined(self, obs: Any, mask: Any) -> Any:
        """One object with the mask in it, also where that came beside the observation or not at all."""
        if mask is None and not self._beside:
            return obs
        parts = _object(obs)
        if parts is None:
            return obs  # the reader says what it expected
        if mask is not None:
            return {**parts, ACTION_MASK: self._mask(mask).astype(np.int8)}
        return parts if ACTION_MASK in parts else {**parts, ACTION_MASK: self._ones}

    def _mask(self, value: Any) -> np.ndarray:
        """A mask as it was sent (flat, or in the parts of a composite action) -> one bool per choice."""
        parts = isinstance(value, dict) and "base64" not in value
        if isinstance(value, list) and value and self._read_parts is not None:
            parts = isinstance(value[0], (list, dict))
        if parts and self._read_parts is not None:
            leaves = tree.leaves(self._read_parts(value))
            return self._legal(np.concatenate([leaf.ravel() for leaf in leaves]) > 0)
        return self._legal(self._read_flat(value) > 0)

    def _legal(self, mask: np.ndarray) -> np.ndarray:
        if len(mask) == len(self.all_legal) and not all(mask[part].any() for part in self._choices):
            raise DataError(f"{ACTION_MASK}: expected at least one legal action for every choice, got none")
        return mask


def _object(value: Any) -> dict[str, Any] | None:
    """The parts of an object, also of one that is not decoded yet; None for anything else."""
    if type(value) is msgspec.Raw:
        try:
            return _decode_object(value)
        except (ValueError, RecursionError):
            return None
    return value if isinstance(value, dict) else None


def _has_obs(value: Any) -> bool:
    """Whether it is a whole observation of `masked_spec`, and not the part of that name."""
    parts = _object(value)
    return parts is not None and OBS in parts


def _choices(action: Space) -> Space | None:
    """The space of an action's mask in parts: 0 or 1 for every choice, in the shape of the action; None where there are none."""
    if action.kind in ("dict", "tuple"):
        found = {name: part for name, space in action.items if (part := _choices(space)) is not None}
        names = tuple(found) if action.kind == "dict" else ()
        return Space(action.kind, names=names, parts=tuple(found.values())) if found else None
    if action.kind == "box":
        return None
    n = sum(action.n) if action.n else 2 * int(np.prod(action.shape, dtype=int))
    return Space("multi_binary", (n,), "int8")
