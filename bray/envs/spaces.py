"""How members of a space lie in a batch: joining, checking and splitting batches of observations and actions."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from bray.errors import ConfigError, EnvError
from bray.spec import ACTION_MASK, GLOBAL_STATE, ActionLayout, EnvSpec, Space
from bray.tree import NestedArray


class BadValue(Exception):
    """What an environment returned is not what its space says; whoever knows env and step makes an EnvError of it."""


class Leaf(NamedTuple):
    """One array of a space."""

    name: str
    """As in messages: observation['camera'][0]."""
    keys: tuple[Any, ...]
    space: Space

    def of(self, batch: NestedArray) -> Any:
        """This array in a batch."""
        for key in self.keys:
            batch = batch[key]
        return batch


def leaves(space: Space, name: str = "observation", keys: tuple[Any, ...] = ()) -> Iterator[Leaf]:
    """The arrays of a space, in order."""
    if not space.composite:
        yield Leaf(name, keys, space)
    for key, part in zip(space.keys, space.parts, strict=True):
        yield from leaves(part, f"{name}[{key!r}]", (*keys, key))


def empty_batch(space: Space, num_envs: int) -> NestedArray:
    """An empty batch `[B, ...]` of the space."""
    if space.composite:
        return space.join(empty_batch(part, num_envs) for part in space.parts)
    return np.empty((num_envs, *space.shape), space.dtype)


def spec_from_gym(
    name: str,
    observation: Any,
    action: Any,
    limit: int | None,
    preprocessing: dict[str, Any],
    global_state: bool = False,
    team: tuple[str, ...] = (),
) -> EnvSpec:
    """The EnvSpec of an environment with these spaces of Gymnasium; those that no training could use are refused.
    `global_state`: whether the environment declares one, which is then a key of its observation."""
    given, state = _computable(Space.from_gym(observation)), None
    if global_state:
        given, state = _apart(given)
    return usable(EnvSpec(name, given, Space.from_gym(action), limit, preprocessing, state, team))


def _apart(given: Space) -> tuple[Space, Space]:
    """The observation of those who act, and the global state beside it."""
    parts = dict(given.items) if given.kind == "dict" else {}
    state = parts.pop(GLOBAL_STATE, None)
    if state is None or state.composite or not parts:
        raise ConfigError(
            f"the environment declares global_state_space, so its observation is a Dict with the array "
            f"{GLOBAL_STATE!r} and what its agents see; got {given.names or given.kind}. env.flatten_obs and wrappers "
            "that change observations take it away: leave them out"
        )
    return replace(given, names=tuple(parts), parts=tuple(parts.values())), state


def usable(spec: EnvSpec) -> EnvSpec:
    """The spec, where a training could use it; else ConfigError. For environments and for live games alike."""
    for leaf in leaves(spec.given):
        if 0 in leaf.space.shape:
            raise ConfigError(f"{leaf.name} has no elements, its shape is {leaf.space.shape}")
    mask, choices = spec.layout.mask(empty_batch(spec.observation, 1)), spec.layout.num_logits
    if mask is not None and mask.shape[1] != choices:
        raise ConfigError(
            f"{ACTION_MASK} has {mask.shape[1]} entries, the action space has {choices} choices: one entry per "
            "choice of every discrete part, in the order of the space"
        )
    return spec


def _computable(space: Space) -> Space:
    """Floats of other sizes than 32 and 64 bits as float32: compiled loops and networks have no others."""
    if space.composite:
        return replace(space, parts=tuple(map(_computable, space.parts)))
    other = np.dtype(space.dtype).kind == "f" and space.dtype not in ("float32", "float64")
    return replace(space, dtype="float32") if other else space


# --- observations into a batch ----------------------------------------------------------------------------------------


def gatherer(space: Space, cast: bool = False) -> Callable[[list[Any]], NestedArray | None]:
    """A function that joins a list of observations into a batch in one call per array, or gives None where one of them
    may not fit its space (then `writer` says which, or casts it). A wrong type shows in the type of the joined array.
    With `cast` other types of numbers are cast here, for environments that are known to return them."""
    if space.composite:
        return _composite_gatherer(space, cast)
    shape, dtype, array = space.shape, np.dtype(space.dtype), np.array
    cast = cast and space.kind == "box"

    def gather(rows: list[Any]) -> np.ndarray | None:
        try:
            out = array(rows)
        except ValueError:  # shapes differ
            return None
        if out.dtype == dtype and out.shape[1:] == shape:
            return out
        return cast_numbers(out, dtype) if cast and out.shape[1:] == shape else None

    return gather


def cast_numbers(value: np.ndarray, dtype: np.dtype) -> np.ndarray | None:
    """Numbers as the declared type, where that only rounds them: any number as a float, integers as integers that hold
    them. Else None."""
    kind = value.dtype.kind
    if dtype.kind == "f":
        return value.astype(dtype) if kind in "biuf" else None
    if dtype.kind not in "iu" or kind not in "biu":
        return None
    info = np.iinfo(dtype)
    fits = not value.size or (int(value.min()) >= info.min and int(value.max()) <= info.max)
    return value.astype(dtype) if fits else None


def _composite_gatherer(space: Space, cast: bool) -> Callable[[list[Any]], NestedArray | None]:
    parts = [(key, gatherer(part, cast)) for key, part in zip(space.keys, space.parts, strict=True)]
    kind, size = dict if space.kind == "dict" else tuple, len(parts)

    def gather(rows: list[Any]) -> NestedArray | None:
        if any(not isinstance(row, kind) or len(row) != size for row in rows):
            return None
        try:
            columns = [part([row[key] for row in rows]) for key, part in parts]
        except KeyError:
            return None
        return None if any(column is None for column in columns) else space.join(columns)

    return gather


Writer = Callable[[Any, int, Any], None]
OnCast = Callable[[str], None]


def writer(space: Space, strict: bool, on_cast: OnCast | None = None, name: str = "observation") -> Writer:
    """A function `write(batch, i, value)`. `strict` refuses other shapes than the space's, and other dtypes unless
    their numbers fit the declared one; then they are cast and `on_cast` is told. Not strict: everything is cast that
    numpy casts."""
    if space.composite:
        return _composite_writer(space, strict, on_cast, name)
    if space.kind != "discrete":
        return _array_writer(space, strict, on_cast, name)

    def write(batch: Any, i: int, value: Any) -> None:
        if strict and (
            isinstance(value, (bool, float)) or np.shape(value) != () or np.asarray(value).dtype.kind not in "iu"
        ):
            raise BadValue(f"{name} is an integer (Discrete), got {_short(value)}")
        batch[i] = value

    return write


def _array_writer(space: Space, strict: bool, on_cast: OnCast | None, name: str) -> Writer:
    shape, dtype, is_box = space.shape, np.dtype(space.dtype), space.kind == "box"

    def write(batch: Any, i: int, value: Any) -> None:
        if type(value) is np.ndarray and value.shape == shape and value.dtype == dtype:  # the usual case
            batch[i] = value
            return
        if np.shape(value) != shape:
            raise BadValue(f"{name} has shape {shape} in its space, got {np.shape(value)}: {_short(value)}")
        if strict and not isinstance(value, np.generic | np.ndarray):
            raise BadValue(f"{name} is an array of {dtype}, got a {type(value).__name__}: {_short(value)}")
        if strict and is_box and value.dtype != dtype:
            given = value.dtype
            value = cast_numbers(np.asarray(value), dtype)
            if value is None:
                raise BadValue(
                    f"{name} has dtype {dtype} in its space, got {given}: use .astype(np.{dtype}) or correct the space"
                )
            if on_cast is not None:
                on_cast(f"{name} has dtype {dtype} in its space and comes as {given}: it is cast to {dtype}")
        if strict and not is_box and value.dtype.kind not in "iub":
            raise BadValue(f"{name} holds integers, got {value.dtype}: {_short(value)}")
        batch[i] = value

    return write


def _composite_writer(space: Space, strict: bool, on_cast: OnCast | None, name: str) -> Writer:
    parts = [
        (key, writer(part, strict, on_cast, f"{name}[{key!r}]"))
        for key, part in zip(space.keys, space.parts, strict=True)
    ]
    names, size = set(space.names), len(parts)

    def write_dict(batch: Any, i: int, value: Any) -> None:
        if not isinstance(value, Mapping) or not names <= set(value):
            got = sorted(value) if isinstance(value, Mapping) else type(value).__name__
            raise BadValue(f"{name} is a dict with {sorted(names)}, got {got}")
        if strict and len(value) != size:
            raise BadValue(f"{name} has keys its space does not have: {sorted(set(value) - names)}")
        for key, part in parts:
            part(batch[key], i, value[key])

    def write_tuple(batch: Any, i: int, value: Any) -> None:
        if not isinstance(value, (tuple, list)) or len(value) != size:
            raise BadValue(f"{name} is a tuple of {size}, got {_short(value)}")
        for key, part in parts:
            part(batch[key], i, value[key])

    return write_dict if space.kind == "dict" else write_tuple


def _short(value: Any) -> str:
    text = repr(value).replace("\n", " ")
    return text if len(text) <= 160 else text[:157] + "..."


# --- actions out of a batch -------------------------------------------------------------------------------------------


def caster(space: Space, num_envs: int) -> Callable[[Any], NestedArray]:
    """A function that copies a batch of actions into the space's dtypes; a wrong shape is refused."""
    if space.composite:
        parts = [(key, caster(part, num_envs)) for key, part in zip(space.keys, space.parts, strict=True)]
        return lambda actions: space.join(part(actions[key]) for key, part in parts)
    shape, dtype, array = (num_envs, *space.shape), np.dtype(space.dtype), np.array

    def cast(actions: Any) -> np.ndarray:
        out = array(actions, dtype)
        if out.shape != shape:
            raise EnvError(f"actions have shape {shape}, got {out.shape}")
        return out

    return cast


def splitter(space: Space) -> Callable[[NestedArray], list[Any]]:
    """A function that makes a list of single actions of a batch; those of a Discrete are plain ints."""
    if space.composite:
        parts = [(key, splitter(part)) for key, part in zip(space.keys, space.parts, strict=True)]
        return lambda batch: [space.join(row) for row in zip(*(part(batch[key]) for key, part in parts), strict=True)]
    if space.kind == "discrete":
        return lambda batch: batch.tolist()
    return lambda batch: list(batch.copy())  # a copy: an environment may clip its action in place


# --- the check --------------------------------------------------------------------------------------------------------


_ROUNDING = float(np.finfo(np.float32).eps)


class BatchCheck:
    """Finds what is not finite or outside its space in a batch of observations: one compiled pass per array. With the
    `layout` of the actions also masks that forbid every choice."""

    def __init__(self, space: Space, layout: ActionLayout | None = None, bounds: bool = True):
        self._layout = layout if ACTION_MASK in space.names else None
        bounded = [(leaf, _bounds(leaf.space, bounds)) for leaf in leaves(space)]
        self._leaves = [(leaf, *bounds) for leaf, bounds in bounded if bounds is not None]
        if self._leaves:
            from bray.envs._kernels import first_outside

            self._kernel = first_outside

    @property
    def masks(self) -> bool:
        """Whether there are masks to look at."""
        return self._layout is not None

    @staticmethod
    def of(spec: EnvSpec, bounds: bool = True) -> BatchCheck:
        """`bounds`: whether floats should lie within theirs; they should be finite in any case."""
        return BatchCheck(spec.given, spec.layout if ACTION_MASK in spec.observation.names else None, bounds)

    def first_bad(self, batch: NestedArray) -> tuple[int, str] | None:
        """(environment, what is wrong) of the first value outside its space; None where there is none."""
        for leaf, low, high in self._leaves:
            array = leaf.of(batch)
            at = self._kernel(array.reshape(-1), low, high)
            if at >= 0:
                i, j = divmod(int(at), low.size)
                value, shape = array.reshape(-1)[at], leaf.space.shape
                where = f"{leaf.name}{list(map(int, np.unravel_index(j, shape)))}" if shape else leaf.name
                least, most = _declared(leaf.space, low, high)
                outside = f", outside its space [{least[j]}, {most[j]}]" if np.isfinite(value) else ""
                return i, f"{where} is {value}{outside}, in {_short(array[i])}"
        return None

    def first_blocked(self, batch: NestedArray, dead: Any = None) -> tuple[int, str] | None:
        """(environment, what is wrong) of the first whose mask leaves no choice; those that are `dead` need none."""
        layout = self._layout
        mask = None if layout is None else layout.mask(batch)
        if layout is None or mask is None:
            return None
        choices, at = [p for p in layout.parts if p.kind == "categorical"], 0
        for k, part in enumerate(choices):
            free = mask[:, at : at + part.n].any(1)
            at += part.n
            blocked = np.flatnonzero(~free if dead is None else ~(free | dead))
            if blocked.size:
                which = f"every choice of action part {k}" if len(choices) > 1 else "every choice"
                return int(blocked[0]), f"{ACTION_MASK} forbids {which}: leave at least one legal, or end the episode"
        return None


def _declared(space: Space, low: np.ndarray, high: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The bounds as the space has them, for messages; those of floats are checked with a tolerance."""
    if np.dtype(space.dtype).kind != "f":
        return low, high
    low, high = (x.reshape(-1).astype(space.dtype) for x in space.bounds())
    return low, high


def _bounds(space: Space, declared: bool) -> tuple[np.ndarray, np.ndarray] | None:
    """Lowest and highest allowed value of every element, in the space's dtype; None where every value of the dtype is a
    member. Floats may lie outside by the rounding error of float32: an environment that computes in [0, 1] also returns
    1.0000000000000002. Those whose bounds are not to be taken as `declared` should be finite."""
    dtype, size = np.dtype(space.dtype), math.prod(space.shape)
    if space.kind == "multi_binary":
        return np.zeros(size, dtype), np.ones(size, dtype)
    if space.kind != "box":
        low = np.asarray(space.start, dtype)
        return low, low + np.asarray(space.n, dtype) - 1
    if dtype.kind not in "iuf" or not size:
        return None
    low, high = (x.reshape(-1) for x in space.bounds())
    if dtype.kind == "f":
        if not declared:
            low, high = np.full(size, -np.inf), np.full(size, np.inf)
        low, high = low - _ROUNDING * np.maximum(np.abs(low), 1.0), high + _ROUNDING * np.maximum(np.abs(high), 1.0)
        info: Any = np.finfo(dtype)
        return np.maximum(low, float(info.min)).astype(dtype), np.minimum(high, float(info.max)).astype(dtype)
    info = np.iinfo(dtype)
    if (low <= info.min).all() and (high >= info.max).all():
        return None
    # in whole numbers: float64 cannot hold the ends of 64-bit integers
    low = np.array([info.min if x <= info.min else int(x) for x in low], dtype)
    return low, np.array([info.max if x >= info.max else int(x) for x in high], dtype)
