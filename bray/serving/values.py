"""What a game sends in a tick and gets back, as JSON, by the spaces of a spec: observations, masks of legal choices,
actions."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np

from bray import tree
from bray.errors import ConfigError, DataError
from bray.serving.bounds import Bounds
from bray.serving.messages import MAX_JSON
from bray.serving.numbers import has_structure, read_numbers, structure
from bray.spec import ACTION_MASK, EnvSpec, Space

ReadValue = Callable[[Any], Any]
_SHOWN = (
    1 << 12
)  # bytes; what does not fit is decoded for the message only up to this size: decoded it may be thirty times as large
_SMALL = 512  # bytes of text below which an array's numbers are decoded into lists
_NUMBER, _BASE64, _BESIDE = 26, 11, 1 << 16
"""The most bytes of a number in text and in base64 (a double), and of all that is sent beside the arrays."""
_decode_any = msgspec.json.Decoder().decode


class TooMuchText(DataError):
    """An array that is written out in more bytes than are taken."""


class _Base64(msgspec.Struct, forbid_unknown_fields=True):
    """An array as its bytes, in little-endian order."""

    base64: bytes  # which is how msgspec writes and reads them: twice as fast as binascii
    dtype: str | msgspec.UnsetType = msgspec.UNSET
    shape: list[int] | msgspec.UnsetType = msgspec.UNSET


_decode_base64 = msgspec.json.Decoder(_Base64).decode


def body_limit(spec: EnvSpec, max_json: int = MAX_JSON) -> int:
    """Bytes that a tick of this spec could need, in any form that is taken."""
    leaves = [*_leaf_sizes(spec.observation), spec.layout.num_logits]
    return _BESIDE + sum(max(min(_NUMBER * n, max_json), _BASE64 * n) for n in leaves)


def _leaf_sizes(space: Space) -> list[int]:
    if space.composite:
        return [n for part in space.parts for n in _leaf_sizes(part)]
    return [math.prod(space.shape)]


def reader(space: Space, where: str = "obs", max_json: int = MAX_JSON, largest: float = math.inf) -> ReadValue:
    """A function from decoded JSON (or numpy) to one observation: arrays of the space's shape and type. An array may
    also be sent as `{"base64": "...", "dtype": "float32"}`, its raw bytes in little-endian order. What does not fit
    raises DataError, and so does a float beyond the size `largest`.

    JSON that is not decoded yet (`msgspec.Raw`) is read by the space: its numbers go straight into the array, and what
    cannot be a member is refused before it is decoded."""
    if space.kind == "dict":
        parts = {name: reader(part, f"{where}.{name}", max_json, largest) for name, part in space.items}
        split = splitter(space.names)

        def read_dict(value: Any) -> dict[str, Any]:
            if type(value) is msgspec.Raw:
                value = _split(value, split, where, f"an object with the keys {sorted(parts)}")
            if not isinstance(value, dict) or value.keys() != parts.keys():
                got = sorted(map(str, value)) if isinstance(value, dict) else _kind(value)
                raise DataError(f"{where}: expected an object with the keys {sorted(parts)}, got {got}")
            return {name: read(value[name]) for name, read in parts.items()}

        return read_dict
    if space.kind == "tuple":
        items = [reader(part, f"{where}[{i}]", max_json, largest) for i, part in enumerate(space.parts)]
        split_tuple = msgspec.json.Decoder(tuple[(msgspec.Raw,) * len(items)]).decode  # type: ignore[misc]

        def read_tuple(value: Any) -> tuple[Any, ...]:
            if type(value) is msgspec.Raw:
                value = _split(value, split_tuple, where, f"a list of {len(items)} parts")
            if not isinstance(value, (list, tuple)) or len(value) != len(items):
                got = f"{len(value)}" if isinstance(value, (list, tuple)) else _kind(value)
                raise DataError(f"{where}: expected a list of {len(items)} parts, got {got}")
            return tuple(read(x) for read, x in zip(items, value, strict=True))

        return read_tuple
    return _array_reader(space, where, max_json, largest)


def splitter(names: tuple[str, ...], others: bool = False) -> Callable[[Any], dict[str, msgspec.Raw]]:
    """A function from the text of an object to the texts of its members; those of other names raise ValueError, or are
    left out."""
    fields = [(f"f{i}", msgspec.Raw | msgspec.UnsetType, msgspec.UNSET) for i in range(len(names))]
    rename = {f"f{i}": name for i, name in enumerate(names)}
    members = msgspec.defstruct("Members", fields, rename=rename, forbid_unknown_fields=not others)
    decode = msgspec.json.Decoder(members).decode

    def split(text: Any) -> dict[str, msgspec.Raw]:
        found = msgspec.structs.astuple(decode(text))
        return {name: x for name, x in zip(names, found, strict=True) if x is not msgspec.UNSET}

    return split


def _split(value: msgspec.Raw, split: Callable[[Any], Any], where: str, expected: str) -> Any:
    try:
        return split(value)
    except (ValueError, RecursionError):  # something else: the reader says what it expected
        return _shown(value, where, expected)


def _shown(value: msgspec.Raw, where: str, expected: str) -> Any:
    """What does not fit, decoded for the message, where it is small."""
    size = memoryview(value).nbytes
    if size > _SHOWN:
        raise DataError(f"{where}: expected {expected}, got {size} bytes of JSON that are something else")
    return _decode(value, where)


def _decode(value: Any, where: str) -> Any:
    try:
        return _decode_any(value)
    except (ValueError, RecursionError) as e:
        raise DataError(f"{where}: {e}; expected JSON that fits the space") from None


def _array_reader(space: Space, where: str, max_json: int, largest: float) -> ReadValue:
    whole = space.kind in ("discrete", "multi_discrete")
    dtype = np.dtype(np.int64 if whole else space.dtype)
    shape = tuple(space.shape)
    low = np.reshape(space.start, shape) if whole and space.start else np.zeros(shape, np.int64)
    high = low + np.reshape(space.n, shape) if whole else None
    floats = dtype.kind == "f"
    limits = None if floats or whole or dtype.kind == "b" else (np.iinfo(dtype).min, np.iinfo(dtype).max)
    limited = floats and largest < np.finfo(dtype).max
    size = math.prod(shape)
    expected = structure(shape) if size <= max_json else b""  # more cannot be written in max_json bytes
    decode_small = _small_decoder(len(shape))

    def read_text(value: msgspec.Raw) -> np.ndarray | None:
        """The array that is written there; None where there is none of this shape."""
        text = bytes(value)
        if len(text) > max_json:
            raise TooMuchText(
                f"{where}: expected at most {max_json} bytes of JSON (max_json), got {len(text)}: "
                'send {"base64": ..., "dtype": ...} instead'
            )
        if not has_structure(text, expected):
            return None
        try:
            x = read_numbers(text, dtype)
        except (ValueError, OverflowError) as e:  # more digits than anything holds
            raise DataError(f"{where}: {e}; expected numbers") from None
        return None if x is None else checked(x.reshape(shape))

    def read(value: Any) -> np.ndarray:
        if type(value) is msgspec.Raw:
            small = decode_small(value)
            if small is not None:
                return fitted(small)
            if memoryview(value)[0] == _BRACE:
                value = _encoded(value, where)
            else:
                x = read_text(value) if size else None
                if x is not None:
                    return x
                value = _shown(value, where, f"numbers of shape {list(shape)}")
        if type(value) is dict:
            value = _from_base64(value, dtype, shape, where)
        if _has_text(value):
            raise DataError(f"{where}: expected numbers of shape {list(shape)}, got {_kind(value)}")
        return fitted(value)

    def fitted(value: Any) -> np.ndarray:
        """Numbers in lists, or an array of them."""
        try:
            x = np.array(value, dtype if floats else None)
        except (ValueError, TypeError, OverflowError):
            raise DataError(f"{where}: expected numbers of shape {list(shape)}, got {_kind(value)}") from None
        if x.shape != shape:
            raise DataError(f"{where}: expected shape {list(shape)}, got {list(x.shape)}")
        return checked(x)

    def checked(x: np.ndarray) -> np.ndarray:
        """Numbers of the right shape as members of the space."""
        if floats:
            fine = np.abs(x) <= largest if limited else np.isfinite(x)
            if np.count_nonzero(fine) != size:  # twice as fast as `all`
                wrong = x.ravel()[~fine.ravel()][0]
                what = f"numbers up to {largest:g} in size (obs_range)" if np.isfinite(wrong) else "finite numbers"
                raise DataError(f"{where}: expected {what}, got {wrong}")
            return x
        if x.dtype != dtype:
            if x.dtype.kind not in "biu" and not (x.dtype.kind == "f" and np.array_equal(x, np.rint(x))):
                raise DataError(f"{where}: expected whole numbers, got {_numbers(x)}")
            if limits is not None and x.size and not (limits[0] <= x.min() and x.max() <= limits[1]):
                raise DataError(f"{where}: expected {dtype} ({limits[0]} to {limits[1]}), got {x.min()} to {x.max()}")
            x = x.astype(dtype)
        if high is not None and not ((low <= x) & (x < high)).all():
            raise DataError(f"{where}: expected {_range(low, high)}, got {_numbers(x)}")
        return x

    return read


_BRACE = ord("{")  # of an array in base64


def _small_decoder(depth: int) -> Callable[[msgspec.Raw], Any]:
    """A function from the text of a small array to its lists: that is quicker where there are few numbers. None for
    anything else."""
    kind: Any = float | int | bool
    for _ in range(depth):
        kind = list[kind]
    decode = msgspec.json.Decoder(kind).decode

    def decode_small(value: msgspec.Raw) -> Any:
        if memoryview(value).nbytes > _SMALL:
            return None
        try:
            return decode(value)
        except (ValueError, RecursionError):
            return None

    return decode_small


def _encoded(value: msgspec.Raw, where: str) -> Any:
    """An array in base64 as a dict; anything else that stands in braces, decoded for the message."""
    try:
        sent = _decode_base64(value)
    except (ValueError, RecursionError):
        return _shown(value, where, "{base64, dtype, shape}")
    found = {"base64": sent.base64, "dtype": sent.dtype, "shape": sent.shape}
    return {k: v for k, v in found.items() if v is not msgspec.UNSET}


def _from_base64(value: dict[str, Any], dtype: np.dtype, shape: tuple[int, ...], where: str) -> np.ndarray:
    text = value.get("base64")
    if not isinstance(text, (str, bytes)) or not value.keys() <= {"base64", "dtype", "shape"}:
        raise DataError(
            f"{where}: expected a list of numbers or {{base64, dtype, shape}}, got the keys {sorted(map(str, value))}"
        )
    sent = value["dtype"] if "dtype" in value else dtype.name  # noqa: SIM401 - numpy takes a while to name a dtype
    try:
        raw = text if isinstance(text, bytes) else msgspec.convert(text, bytes)
        if not isinstance(sent, str) or not sent.isalnum():  # numpy reads more into a text than a name
            raise TypeError("no such dtype")
        kind = np.dtype(sent)
        if kind.kind not in "biuf":
            raise TypeError("no numbers")
        return np.frombuffer(raw, kind.newbyteorder("<")).reshape(value.get("shape", shape))
    except (ValueError, TypeError) as e:
        raise DataError(f"{where}: expected base64 of {sent} numbers of shape {list(shape)} ({e})") from None


def _has_text(value: Any) -> bool:
    """Whether a text stands where a number belongs: numpy would read it, or make an array of texts, each as wide as the
    widest."""
    if isinstance(value, (list, tuple)):
        return any(map(_has_text, value))
    return isinstance(value, (str, bytes))


def _numbers(x: np.ndarray) -> str:
    """Numbers fit for a message."""
    return str(x.tolist()) if x.size <= 16 else f"{x.ravel()[:16].tolist()} ..."


def _range(low: np.ndarray, high: np.ndarray) -> str:
    if low.size == 1:
        return f"{int(low.min())} to {int(high.max()) - 1}"
    return f"values from {low.tolist()} to {(high - 1).tolist()}"


def _kind(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return "a list that is not one array of numbers"
    if isinstance(value, np.ndarray):
        return f"an array of {value.dtype}, shape {list(value.shape)}"
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


# --- observations with masks ------------------------------------------------------------------------------------------

OBS = "obs"


def masked_spec(id: str, observation: Space, action: Space) -> EnvSpec:
    """The spec of a game that may send `action_mask` beside `obs`: both are one observation, so that whoever learns
    sees the mask too."""
    spec = EnvSpec(id, observation, action)
    choices = spec.layout.num_logits
    if observation.kind == "dict" and OBS in observation.names:
        raise ConfigError(f"a part of the observation cannot be named {OBS!r}: that is the name of all of it")
    if not choices or (observation.kind == "dict" and ACTION_MASK in observation.names):
        return spec
    mask = Space("multi_binary", (choices,), "int8")
    return EnvSpec(id, Space("dict", names=(OBS, ACTION_MASK), parts=(observation, mask)), action)


class Observations:
    """Reads ticks: `read(obs, action_mask) -> (observation, mask or None)`. JSON that is not decoded yet
    (`msgspec.Raw`) is read fastest."""

    def __init__(
        self, spec: EnvSpec, max_json: int = MAX_JSON, bounds: Bounds | None = None, largest: float = math.inf
    ):
        """bounds: refuse what is outside of them; largest: and numbers beyond this size"""
        self.spec, self.layout = spec, spec.layout
        self.bounds = bounds or None
        if self.bounds is None:
            self.read = self._read  # type: ignore[method-assign]
        space = spec.observation
        self.all_legal = np.ones(self.layout.num_logits, np.bool_)
        self.masked = bool(len(self.all_legal))
        """Whether there are choices that a mask could forbid."""
        self.in_obs = space.kind == "dict" and ACTION_MASK in space.names
        """Whether the mask is a part of the observation."""
        self._beside = self.in_obs and set(space.names) == {OBS, ACTION_MASK}
        self._ones = np.ones(self.layout.num_logits, np.int8)
        self._split = splitter(space.names) if space.kind == "dict" else None
        self._read_obs = reader(space, OBS, max_json, largest)
        part = space.parts[space.names.index(OBS)] if self._beside else None
        self._read_part = None if part is None else reader(part, OBS, max_json, largest)
        self._read_flat = reader(Space("multi_binary", self.all_legal.shape, "int8"), ACTION_MASK)
        parts = _choices(spec.action)
        self._read_parts = None if parts is None or parts.kind == "multi_binary" else reader(parts, ACTION_MASK)
        ends = np.cumsum([p.n for p in self.layout.parts if p.kind == "categorical"]).tolist()
        self._choices = [slice(a, b) for a, b in zip([0, *ends], ends, strict=False)]  # of each part, in a mask

    def read(self, obs: Any, mask: Any = None) -> tuple[Any, np.ndarray | None]:
        found = self._read(obs, mask)
        if self.bounds is not None and (outside := self.bounds.outside(found[0])) is not None:
            raise DataError(f"expected an observation of its space, got {outside}")
        return found

    def _read(self, obs: Any, mask: Any = None) -> tuple[Any, np.ndarray | None]:
        if mask is msgspec.UNSET or (type(mask) is msgspec.Raw and mask == _NULL):
            mask = None
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
        parts = obs
        if type(obs) is msgspec.Raw:
            try:
                parts = self._split(obs) if self._split is not None else None
            except (ValueError, RecursionError):
                parts = None
        if not isinstance(parts, dict):
            return obs  # the reader says what it expected
        if mask is not None:
            return {**parts, ACTION_MASK: self._mask(mask).astype(np.int8)}
        return parts if ACTION_MASK in parts else {**parts, ACTION_MASK: self._ones}

    def _mask(self, value: Any) -> np.ndarray:
        """A mask as it was sent (flat, or in the parts of a composite action) -> one bool per choice."""
        if self._read_parts is not None and _in_parts(value):
            leaves = tree.leaves(self._read_parts(value))
            return self._legal(np.concatenate([leaf.ravel() for leaf in leaves]) > 0)
        return self._legal(self._read_flat(value) > 0)

    def _legal(self, mask: np.ndarray) -> np.ndarray:
        if len(mask) == len(self.all_legal) and not all(mask[part].any() for part in self._choices):
            raise DataError(f"{ACTION_MASK}: expected at least one legal action for every choice, got none")
        return mask


_NULL = msgspec.Raw(b"null")
_whole = splitter((OBS, ACTION_MASK), others=True)


def _has_obs(value: Any) -> bool:
    """Whether it is a whole observation of `masked_spec`, and not the part of that name."""
    if type(value) is not msgspec.Raw:
        return isinstance(value, dict) and OBS in value
    if memoryview(value)[0] != _BRACE:
        return False
    try:
        return OBS in _whole(value)
    except (ValueError, RecursionError):
        return False


def _in_parts(mask: Any) -> bool:
    """Whether a mask was sent in the parts of a composite action: an object that is not base64, or a list of lists or
    objects."""
    if type(mask) is not msgspec.Raw:
        if isinstance(mask, list):
            return bool(mask) and isinstance(mask[0], (list, dict))
        return isinstance(mask, dict) and "base64" not in mask
    text = memoryview(mask)
    if text[0] == _BRACE:
        try:
            _decode_base64(mask)
        except (ValueError, RecursionError):
            return True
        return False
    return bytes(text[:64]).strip(b" \t\r\n")[1:].lstrip(b" \t\r\n")[:1] in (b"[", b"{")


def _choices(action: Space) -> Space | None:
    """The space of an action's mask in parts: 0 or 1 for every choice, in the shape of the action; None where there are
    none."""
    if action.kind in ("dict", "tuple"):
        found = {name: part for name, space in action.items if (part := _choices(space)) is not None}
        names = tuple(found) if action.kind == "dict" else ()
        return Space(action.kind, names=names, parts=tuple(found.values())) if found else None
    if action.kind == "box":
        return None
    n = sum(action.n) if action.n else 2 * int(np.prod(action.shape, dtype=int))
    return Space("multi_binary", (n,), "int8")
