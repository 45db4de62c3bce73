"""What a game says of a tick, by the spaces of a spec: an observation, and maybe a mask of legal choices beside it."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np

from bray import tree
from bray.errors import ConfigError, DataError
from bray.serving.values import reader
from bray.spec import ACTION_MASK, EnvSpec, Space

_decode_object = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
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
