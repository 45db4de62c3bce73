"""VecEnv: many environments stepped at once, under one autoreset rule (next step; see docs/architecture.md).

Also here, because every form shares them: episode seeds, how a space's members lie in a batch, the check of a batch of
observations, and how random generators are written to a checkpoint.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import numpy as np

from bray.errors import CheckpointError, EnvError
from bray.spec import EnvSpec, Space
from bray.tree import NestedArray

Infos = list[dict[str, Any]] | None
StepResult = tuple[NestedArray, np.ndarray, np.ndarray, np.ndarray, Infos]

LIFE_LOST = "life_lost"
"""An info key: `terminated` is meant for the learner only, the episode goes on and is not reset."""


def episode_seed(seed: int, env: int, episode: int) -> int:
    """The seed of episode `episode` of environment `env`: a pure function, so that an episode can be played again."""
    x = 0
    for part in (seed, env, episode):  # splitmix64 of each in turn; numpy's SeedSequence would cost 20 times as much
        x = (x + part + 0x9E3779B97F4A7C15) & _WORD
        x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _WORD
        x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _WORD
        x ^= x >> 31
    return x >> 32


_WORD = (1 << 64) - 1


class VecEnv(ABC):
    """`num_envs` environments, one step at a time.

    After a step with terminated or truncated (a lost life aside) `dead` is True: the observation just returned is the episode's
    last, the next action of that environment is ignored, and that next step returns the first observation of a new
    episode with reward 0.

    Where `waits`, a step may return before every environment is ready. The result of one that is `waiting` has not come: its row
    repeats its last observation with reward 0 and no flags, and its next action is ignored, for the last one is still under
    way. The step in which the result comes returns it. An environment whose next episode has not begun yet stays `dead`.
    """

    num_envs: int
    spec: EnvSpec
    dead: np.ndarray
    """bool[B]: the next action is ignored. A new array after each step."""
    exact: bool = True
    """Whether the last `set_state` restored everything (before one: whether it can)."""
    restarts: int = 0
    """Environments rebuilt because they raised, died or hung."""
    waits: bool = False
    """Whether `waiting` may ever be True."""

    @property
    def waiting(self) -> np.ndarray:
        """bool[B]: the result of the last action has not come. A new array after each step."""
        return np.zeros(self.num_envs, bool)

    @abstractmethod
    def reset(self, seed: int | None = None) -> NestedArray:
        """The first observations. With a seed: episode 0 of that seed; without: the next episodes."""

    @abstractmethod
    def step(self, actions: NestedArray) -> StepResult:
        """obs, reward float32[B], terminated bool[B], truncated bool[B], infos (a list of dicts, or None when all are empty)."""

    @abstractmethod
    def get_state(self) -> dict[str, Any]:
        """{"arrays": tree of arrays, "json": plain data}: all that `set_state` needs to go on exactly."""

    @abstractmethod
    def set_state(self, state: dict[str, Any]) -> NestedArray:
        """Go on from `get_state`; returns the current observations and sets `exact`."""

    def render(self) -> np.ndarray | None:
        """A picture of the first environment, where it can draw itself."""
        return None

    def close(self) -> None:  # noqa: B027  native forms may hold nothing
        """Free windows, processes and memory."""

    def __enter__(self) -> VecEnv:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


# --- how members of a space lie in a batch ----------------------------------------------------------------------------


class BadValue(Exception):
    """What an environment returned is not what its space says; whoever knows env and step makes an EnvError of it."""


def _dtype(space: Space) -> np.dtype:
    return np.dtype(np.int64 if space.kind in ("discrete", "multi_discrete") else space.dtype)


def allocator(space: Space, num_envs: int) -> Callable[[], NestedArray]:
    """A function that makes an empty batch `[B, ...]` of the space."""
    if space.kind == "dict":
        parts = {k: allocator(s, num_envs) for k, s in space.items}
        return lambda: {k: f() for k, f in parts.items()}
    if space.kind == "tuple":
        members = [allocator(s, num_envs) for s in space.parts]
        return lambda: tuple(f() for f in members)
    shape, dtype, empty = (num_envs, *space.shape), _dtype(space), np.empty
    return lambda: empty(shape, dtype)


Writer = Callable[[Any, int, Any], None]


def writer(space: Space, strict: bool, path: str = "observation") -> Writer:
    """A function `write(batch, i, value)`; `strict` refuses other shapes and dtypes than the space's, else they are cast."""
    if space.kind == "dict":
        return _dict_writer(space, strict, path)
    if space.kind == "tuple":
        return _tuple_writer(space, strict, path)
    if space.kind == "box" or space.shape:
        return _array_writer(space, strict, path)

    def write_int(batch: Any, i: int, value: Any) -> None:
        if strict and (
            isinstance(value, (bool, float)) or np.shape(value) != () or np.asarray(value).dtype.kind not in "iu"
        ):
            raise BadValue(f"{path} is an integer (Discrete), got {_short(value)}")
        batch[i] = value

    return write_int


def _array_writer(space: Space, strict: bool, path: str) -> Writer:
    shape, dtype, ndarray = space.shape, _dtype(space), np.ndarray
    exact_dtype = space.kind == "box"

    def write(batch: Any, i: int, value: Any) -> None:
        if type(value) is ndarray and value.shape == shape and value.dtype == dtype:
            batch[i] = value
            return
        if np.shape(value) != shape:
            raise BadValue(f"{path} has shape {shape} in its space, got {np.shape(value)}: {_short(value)}")
        kind = np.asarray(value).dtype
        if strict and not isinstance(value, np.generic | ndarray):
            raise BadValue(f"{path} is an array of {dtype}, got a {type(value).__name__}: {_short(value)}")
        if strict and ((exact_dtype and kind != dtype) or kind.kind not in "biufc"):
            raise BadValue(
                f"{path} has dtype {dtype} in its space, got {kind}: use .astype(np.{dtype}) or correct the space"
            )
        if strict and not exact_dtype and kind.kind not in "iub":
            raise BadValue(f"{path} holds integers, got {kind}: {_short(value)}")
        batch[i] = value

    return write


def _dict_writer(space: Space, strict: bool, path: str) -> Writer:
    parts = [(k, writer(s, strict, f"{path}[{k!r}]")) for k, s in space.items]
    names = set(space.names)

    def write(batch: Any, i: int, value: Any) -> None:
        try:
            for name, part in parts:
                part(batch[name], i, value[name])
        except (KeyError, TypeError, IndexError):
            if isinstance(value, dict) and names <= set(value):
                raise
            got = sorted(value) if isinstance(value, dict) else type(value).__name__
            raise BadValue(f"{path} is a dict with {sorted(names)}, got {got}") from None
        if strict and len(value) != len(names):
            raise BadValue(f"{path} has keys its space does not have: {sorted(set(value) - names)}")

    return write


def _tuple_writer(space: Space, strict: bool, path: str) -> Writer:
    parts = [writer(s, strict, f"{path}[{k}]") for k, s in enumerate(space.parts)]

    def write(batch: Any, i: int, value: Any) -> None:
        if not isinstance(value, (tuple, list)) or len(value) != len(parts):
            raise BadValue(f"{path} is a tuple of {len(parts)}, got {_short(value)}")
        for k, part in enumerate(parts):
            part(batch[k], i, value[k])

    return write


def gatherer(space: Space) -> Callable[[list[Any]], NestedArray | None]:
    """A function that joins a list of observations into a batch in one call per array, or gives None where one of them may
    not fit its space (then `writer` says which, or casts it). A wrong type shows in the type of the joined array."""
    if space.kind == "dict":
        parts = [(k, gatherer(s)) for k, s in space.items]

        def gather_dict(rows: list[Any]) -> NestedArray | None:
            out = {}
            try:
                for name, part in parts:
                    out[name] = part([row[name] for row in rows])
            except (KeyError, TypeError, IndexError):
                return None
            if any(v is None for v in out.values()) or any(len(row) != len(parts) for row in rows):
                return None
            return out

        return gather_dict
    if space.kind == "tuple":
        members = [gatherer(s) for s in space.parts]

        def gather_tuple(rows: list[Any]) -> NestedArray | None:
            if any(type(row) is not tuple or len(row) != len(members) for row in rows):
                return None
            out = tuple(part([row[k] for row in rows]) for k, part in enumerate(members))
            return None if any(v is None for v in out) else out

        return gather_tuple
    shape, dtype, array = space.shape, _dtype(space), np.array

    def gather(rows: list[Any]) -> np.ndarray | None:
        try:
            out = array(rows)
        except ValueError:  # shapes differ
            return None
        return out if out.dtype == dtype and out.shape[1:] == shape else None

    return gather


def _short(value: Any) -> str:
    text = repr(value).replace("\n", " ")
    return text if len(text) <= 160 else text[:157] + "..."


class Actions:
    """A batch of actions cast to the space's types, and the single actions in it."""

    def __init__(self, space: Space, num_envs: int):
        self.space, self.num_envs = space, num_envs
        self.cast = self._caster(space)
        """actions -> an own copy of the batch in the space's dtypes; a wrong shape is refused."""
        self.rows = self._splitter(space)
        """such a batch -> a list of `num_envs` actions; integers of a Discrete are plain ints."""

    def _caster(self, space: Space) -> Callable[[Any], Any]:
        if space.kind == "dict":
            parts = {k: self._caster(s) for k, s in space.items}
            return lambda a: {k: f(a[k]) for k, f in parts.items()}
        if space.kind == "tuple":
            members = [self._caster(s) for s in space.parts]
            return lambda a: tuple(f(x) for f, x in zip(members, a, strict=True))
        shape, dtype, array = (self.num_envs, *space.shape), _dtype(space), np.array

        def cast(a: Any) -> np.ndarray:
            out = array(a, dtype)
            if out.shape != shape:
                raise EnvError(f"actions have shape {shape}, got {out.shape}")
            return out

        return cast

    def _splitter(self, space: Space) -> Callable[[Any], list[Any]]:
        if space.kind == "dict":
            parts = [(k, self._splitter(s)) for k, s in space.items]
            names = [k for k, _ in parts]

            def split_dict(a: Any) -> list[Any]:
                columns = [f(a[k]) for k, f in parts]
                return [dict(zip(names, row, strict=True)) for row in zip(*columns, strict=True)]

            return split_dict
        if space.kind == "tuple":
            members = [self._splitter(s) for s in space.parts]
            return lambda a: list(zip(*[f(x) for f, x in zip(members, a, strict=True)], strict=True))
        if not space.shape and space.kind != "box":
            return lambda a: a.tolist()
        return lambda a: list(a.copy())  # a copy: an environment may clip its action in place


# --- the check --------------------------------------------------------------------------------------------------------


class BatchCheck:
    """Finds what is not finite or outside its space in a batch of observations: one compiled pass per array."""

    def __init__(self, space: Space, num_envs: int):
        self._leaves: list[tuple[str, tuple[str | int, ...], np.ndarray, np.ndarray, Any]] = []
        self._num_envs = num_envs
        self._collect(space, "observation", ())
        if self._leaves:
            from bray.envs._kernels import first_outside

            self._kernel = first_outside
        single = len(self._leaves) == 1 and not self._leaves[0][1]
        self.ok: Callable[[NestedArray], bool] = self._ok_single if single else self._ok_tree

    def _collect(self, space: Space, path: str, keys: tuple[str | int, ...]) -> None:
        if space.kind in ("dict", "tuple"):
            for position, (name, part) in enumerate(space.items):
                key: str | int = name if space.kind == "dict" else position
                self._collect(part, f"{path}[{key!r}]", (*keys, key))
            return
        dtype = _dtype(space)
        if space.kind == "box":
            if dtype.kind not in "iuf" or 0 in space.shape:
                return
            low, high = (x.reshape(-1) for x in space.bounds())
            info: Any = np.finfo(dtype) if dtype.kind == "f" else np.iinfo(dtype)
            if dtype.kind != "f" and (low <= info.min).all() and (high >= info.max).all():
                return  # every value of the type is a member
            low, high = np.maximum(low, float(info.min)), np.minimum(high, float(info.max))
            if dtype.kind != "f":  # float64 cannot hold the ends of 64-bit integers
                low = np.array([info.min if x <= float(info.min) else int(x) for x in low])
                high = np.array([info.max if x >= float(info.max) else int(x) for x in high])
        elif space.kind == "multi_binary":
            low, high = np.zeros(math.prod(space.shape)), np.ones(math.prod(space.shape))
        else:
            low = np.asarray(space.start)
            high = low + np.asarray(space.n) - 1
        self._leaves.append((path, keys, low.astype(dtype), high.astype(dtype), space))

    def _ok_single(self, batch: NestedArray) -> bool:
        _, _, low, high, _ = self._leaves[0]
        return self._kernel(batch.reshape(-1), low, high) < 0

    def _ok_tree(self, batch: NestedArray) -> bool:
        for _, keys, low, high, _ in self._leaves:
            leaf = batch
            for key in keys:
                leaf = leaf[key]
            if self._kernel(leaf.reshape(-1), low, high) >= 0:
                return False
        return True

    def explain(self, batch: NestedArray) -> tuple[int, str]:
        """(environment, what is wrong) for a batch that is not ok."""
        for path, keys, low, high, space in self._leaves:
            leaf = batch
            for key in keys:
                leaf = leaf[key]
            at = self._kernel(leaf.reshape(-1), low, high)
            if at >= 0:
                i, j = divmod(int(at), low.size)
                value = leaf.reshape(-1)[at]
                where = f"{path}{list(map(int, np.unravel_index(j, space.shape)))}" if space.shape else path
                if not np.isfinite(value):
                    return i, f"{where} is {value}, in {_short(leaf[i])}"
                return i, f"{where} is {value}, outside its space [{low[j]}, {high[j]}], in {_short(leaf[i])}"
        raise ValueError("the batch is ok")


# --- random generators in a checkpoint --------------------------------------------------------------------------------


def rng_to_json(rng: np.random.Generator) -> dict[str, Any]:
    """A generator's state as JSON data; integers as text, for they are wider than 64 bits."""

    def plain(x: Any) -> Any:
        if isinstance(x, dict):
            return {k: plain(v) for k, v in x.items()}
        if isinstance(x, np.ndarray):
            return {"array": [str(v) for v in x.tolist()], "dtype": x.dtype.str}
        return {"int": str(int(x))} if isinstance(x, (int, np.integer)) else x

    return plain(rng.bit_generator.state)


def rng_from_json(rng: np.random.Generator, state: dict[str, Any]) -> None:
    """Put a state of `rng_to_json` into a generator of the same kind."""

    def back(x: Any) -> Any:
        if isinstance(x, dict) and set(x) == {"int"}:
            return int(x["int"])
        if isinstance(x, dict) and set(x) == {"array", "dtype"}:
            return np.array([int(v) for v in x["array"]], np.dtype(x["dtype"]))
        return {k: back(v) for k, v in x.items()} if isinstance(x, dict) else x

    try:
        rng.bit_generator.state = back(state)
    except (ValueError, TypeError, KeyError) as e:
        raise CheckpointError(f"not the state of a random generator {type(rng.bit_generator).__name__}: {e}") from None


def check_state(state: Any, form: str, num_envs: int) -> tuple[NestedArray, dict[str, Any]]:
    """The two halves of a state, once it is clear that it belongs to this form and number of environments."""
    try:
        arrays, json = state["arrays"], state["json"]
        got = (json["form"], json["num_envs"])
    except (KeyError, TypeError) as e:
        raise CheckpointError(f"not the state of environments: {type(e).__name__}: {e}") from None
    if got != (form, num_envs):
        raise CheckpointError(
            f"the state is of {got[1]} environments in the form {got[0]!r}, these are {num_envs} in the form {form!r}: "
            "resume with the same env.vector and env.num_envs"
        )
    return arrays, json
