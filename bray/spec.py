"""What an environment looks like to an agent: spaces as plain data, and the flat layout of composite actions.

`EnvSpec` is written to `spec.json` in a run directory, so that serving and exporting need no environment package.

An **ActionLayout** flattens any action space into *parts*, in the order of the space:

| space            | parts                              | distribution parameters                      | flat action
                   |
|------------------|------------------------------------|----------------------------------------------|----------------------|
| Discrete(n)      | one categorical                    | n logits                                     | one index (from
                   0)   |
| MultiDiscrete    | one categorical per entry          | n_i logits each                              | one index each
                   |
| MultiBinary(n)   | n categoricals of 2                | 2 logits each                                | n values 0/1
                   |
| Box(shape)       | one Gaussian of prod(shape)        | mean, then log_std, prod(shape) each         | prod(shape)
                   floats   |
| Dict, Tuple      | the parts of its members, in order | one after another                            | one after
another    |

A flat action of a bounded box is in units of [-1, 1]; `to_env` scales it to the bounds, so that one exploration noise
fits all games.

So a Model's distribution head is one array `[..., layout.num_params]`, an action inside the learner is one array
(`[...]` for a single Discrete, else `[..., layout.size]`), and `to_env` makes what the environment expects.
"""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import Any

import msgspec
import numpy as np

from bray.errors import ConfigError, DataError

ACTION_MASK = "action_mask"
"""The observation key whose array says which discrete choices are legal (1) or not (0); never fed to an encoder."""
GLOBAL_STATE = "global_state"
"""The observation key of a state of the whole game, where the environment declares `global_state_space`: for critics
and mixers alone. Elsewhere a key of that name is one like any other."""
MOVES = "moves"
"""The observation key of the actions that led to it, where `env.moves` is set: for policies that search the game."""


_KINDS = ("box", "discrete", "multi_discrete", "multi_binary", "dict", "tuple")
_MOST_ELEMENTS = 1 << 24  # of a space in a file: numbers, or choices
_NO_BOUND = (float(np.finfo(np.float32).min), float(np.finfo(np.float32).max))


Bound = int | float | tuple[int | float, ...] | None


@dataclass(frozen=True)
class Space:
    """One space as data. `kind`: box, discrete, multi_discrete, multi_binary, dict, tuple."""

    kind: str
    shape: tuple[int, ...] = ()
    dtype: str = "float32"
    low: Bound = None  # box: one number (all equal) or a raveled tuple; None = unbounded
    high: Bound = None
    n: tuple[int, ...] = ()  # discrete: (n,); multi_discrete: sizes, raveled
    start: tuple[int, ...] = ()  # discrete: (start,)
    parts: tuple[Space, ...] = ()  # dict, tuple
    names: tuple[str, ...] = ()  # dict

    @property
    def composite(self) -> bool:
        """A dict or tuple of other spaces."""
        return self.kind in ("dict", "tuple")

    @property
    def keys(self) -> Sequence[Any]:
        """The keys of a dict space, the positions of a tuple space."""
        return self.names if self.kind == "dict" else range(len(self.parts))

    @property
    def items(self) -> Iterator[tuple[str, Space]]:
        return zip(map(str, self.keys), self.parts, strict=True)

    def join(self, members: Iterable[Any]) -> Any:
        """One value per part -> the dict or tuple of them."""
        return dict(zip(self.names, members, strict=True)) if self.kind == "dict" else tuple(members)

    def bounds(self) -> tuple[np.ndarray, np.ndarray]:
        """low and high of a box as float arrays of its shape, infinite where there is none."""
        low = np.full(self.shape, -np.inf)
        high = np.full(self.shape, np.inf)
        for array, bound in ((low, self.low), (high, self.high)):
            if bound is not None:
                array[...] = np.reshape(bound, self.shape) if isinstance(bound, tuple) else bound
        low[low <= _NO_BOUND[0]], high[high >= _NO_BOUND[1]] = -np.inf, np.inf
        return low, high

    def to_json(self) -> dict[str, Any]:
        out: dict[str, Any] = {"kind": self.kind}
        if not self.composite:
            out |= {"shape": list(self.shape), "dtype": self.dtype}
        if self.kind == "box":
            out |= {"low": self.low, "high": self.high}
        if self.n:
            out |= {"n": list(self.n), "start": list(self.start)}
        if self.parts:
            out["parts"] = [p.to_json() for p in self.parts]
        if self.names:
            out["names"] = list(self.names)
        return out

    @staticmethod
    def from_json(d: dict[str, Any]) -> Space:
        try:
            space = msgspec.convert(d, Space)
            space._check()
            return space
        except (msgspec.ValidationError, TypeError, ValueError) as e:
            raise DataError(f"not a space: {str(d)[:80]} ({e})") from None

    def _check(self) -> None:
        """Raise ValueError if this came from a file and no environment could have such a space."""
        count = math.prod(self.shape)
        if self.kind not in _KINDS:
            raise ValueError(f"expected a kind of {', '.join(_KINDS)}")
        if min(self.shape, default=0) < 0 or count > _MOST_ELEMENTS:
            raise ValueError("expected a shape of whole numbers")
        if np.dtype(self.dtype).kind not in "biuf":
            raise ValueError(f"expected a type of numbers, got {self.dtype[:20]!r}")
        for bound in (self.low, self.high):
            if isinstance(bound, tuple) and len(bound) != count:
                raise ValueError(f"expected {count} bounds, got {len(bound)}")
        choices = {"discrete": 1, "multi_discrete": count}.get(self.kind, 0)
        if len(self.n) != choices or len(self.start) != choices:
            raise ValueError(
                f"expected {choices} numbers of choices and starts, got {len(self.n)} and {len(self.start)}"
            )
        if min(self.n, default=1) < 1 or sum(self.n) > _MOST_ELEMENTS:
            raise ValueError(f"expected numbers of choices > 0, and no more than {_MOST_ELEMENTS:,} in all")
        if len(self.names) != (len(self.parts) if self.kind == "dict" else 0):
            raise ValueError("expected one name for each part")
        for part in self.parts:
            part._check()

    @staticmethod
    def from_gym(space: Any) -> Space:
        """A Gymnasium (or old gym) space as data."""
        kind = type(space).__name__
        if kind == "Box":
            return Space("box", tuple(space.shape), space.dtype.name, _bound(space.low), _bound(space.high))
        if kind == "Discrete":
            return Space("discrete", (), "int64", n=(int(space.n),), start=(int(getattr(space, "start", 0)),))
        if kind == "MultiDiscrete":
            n = tuple(int(x) for x in np.ravel(space.nvec))
            start = tuple(int(x) for x in np.ravel(getattr(space, "start", np.zeros(len(n)))))
            return Space("multi_discrete", tuple(space.shape), "int64", n=n, start=start)
        if kind == "MultiBinary":
            return Space("multi_binary", tuple(space.shape), "int8")
        if kind == "Dict":
            names = tuple(space.spaces)
            return Space("dict", parts=tuple(Space.from_gym(space[k]) for k in names), names=names)
        if kind == "Tuple":
            return Space("tuple", parts=tuple(Space.from_gym(s) for s in space.spaces))
        raise ConfigError(
            f"spaces of kind {kind} are not supported: Box, Discrete, MultiDiscrete, MultiBinary, Dict and Tuple are. "
            "Convert it in a wrapper of your environment, or leave it out of a Dict observation with "
            "env.drop_obs=[...]."
        )

    def sample(self, rng: np.random.Generator) -> Any:
        """A random member, in environment units; unbounded boxes are drawn from a normal distribution."""
        if self.composite:
            return self.join(s.sample(rng) for s in self.parts)
        if self.kind == "discrete":
            return np.int64(self.start[0] + rng.integers(self.n[0]))
        if self.kind == "multi_discrete":
            return (rng.integers(self.n) + np.asarray(self.start)).reshape(self.shape)
        if self.kind == "multi_binary":
            return rng.integers(0, 2, self.shape, dtype=np.int8)
        low, high = self.bounds()
        bounded = np.isfinite(low) & np.isfinite(high)
        low, high = np.where(bounded, low, -1.0), np.where(bounded, high, 1.0)
        dtype = np.dtype(self.dtype)
        if dtype.kind in "iu":
            drawn = np.uint64 if dtype == np.uint64 else np.int64
            return rng.integers(low, np.minimum(high, _top(dtype)), dtype=drawn, endpoint=True).astype(dtype)
        return np.where(bounded, rng.uniform(low, high), rng.normal(size=self.shape)).astype(dtype)


def _bound(x: np.ndarray) -> Any:
    """A box's bound as JSON data: None when infinite everywhere, one number when all equal, else a raveled tuple."""
    x = np.asarray(x)
    x = x.astype(np.int8) if x.dtype == bool else x
    if not np.isfinite(x).any():
        return None
    if x.size and (x == x.flat[0]).all():
        return x.flat[0].item()
    return tuple(np.clip(x.astype(np.float64), *_NO_BOUND).ravel().tolist())  # JSON has no infinity


_BOX = re.compile(r"\s*(\w+)\s*\[([\d\s,]*)\]\s*(?:(\S+?)\s*\.\.\s*(\S+))?\s*")
_SPACE_EXAMPLES = (
    "float32[6], 'float32[2] -1..1', uint8[4,84,84], 3 (three choices) or 3,2 (two choices of three and two)"
)


def parse_space(text: Any) -> Space:
    """A space as people write it: `float32[6]`, `float32[2] -1..1`, `uint8[4,84,84]`; `3` is a choice of three, `3,2`
    two choices; a dict of such (or JSON of one) is a dict of spaces."""
    if isinstance(text, str) and text.lstrip().startswith("{"):
        try:
            text = json.loads(text)
        except ValueError as e:
            raise ConfigError(f"expected a JSON object of spaces like {_SPACE_EXAMPLES}; got {text!r} ({e})") from None
    if isinstance(text, dict):
        if not text:
            raise ConfigError(f"expected a space like {_SPACE_EXAMPLES}; got an empty object")
        return Space("dict", names=tuple(map(str, text)), parts=tuple(parse_space(v) for v in text.values()))
    words = str(text).strip()
    try:
        if (found := _BOX.fullmatch(words)) is not None:
            dtype = np.dtype(found[1])
            shape = tuple(int(n) for n in found[2].split(",") if n.strip())
            if dtype.kind not in "fiu" or min(shape, default=1) < 1:
                raise ValueError
            low, high = (None if x is None else float(x) for x in found.groups()[2:])
            if dtype.kind in "iu" and low is None:
                low, high = (int(x) for x in (np.iinfo(dtype).min, np.iinfo(dtype).max))
            if low is not None and high is not None and low >= high:
                raise ValueError
            return Space("box", shape, dtype.name, low, high)
        sizes = tuple(int(n) for n in words.split(","))
        if min(sizes) < 1:
            raise ValueError
    except (TypeError, ValueError):
        raise ConfigError(f"expected a space like {_SPACE_EXAMPLES}; got {text!r}") from None
    if len(sizes) == 1:
        return Space("discrete", (), "int64", n=sizes, start=(0,))
    return Space("multi_discrete", (len(sizes),), "int64", n=sizes, start=(0,) * len(sizes))


def _top(dtype: np.dtype) -> float:
    """The largest float that a type of integers holds: its own largest number, as a float, may be one beyond it."""
    top = float(np.iinfo(dtype).max)
    return top if int(top) <= np.iinfo(dtype).max else float(np.nextafter(top, 0.0))


@lru_cache(maxsize=256)
def _box(space: Space) -> tuple[np.ndarray, ...]:
    """low, high, where both are finite, and there: low and the width of the box."""
    low, high = (x.reshape(-1) for x in space.bounds())
    if np.dtype(space.dtype).kind in "iu":
        high = np.minimum(high, _top(np.dtype(space.dtype)))
    bounded = np.isfinite(low) & np.isfinite(high)
    origin = np.where(bounded, low, 0.0)
    return low, high, bounded, origin, np.where(bounded, high, 1.0) - origin


@dataclass(frozen=True)
class ActionPart:
    """One factor of a composite action: `size` columns of the flat action, `num_params` distribution parameters."""

    kind: str  # "categorical" | "gaussian"
    n: int  # categorical: choices; gaussian: dimensions
    param: slice
    action: slice
    start: int = 0  # categorical: the first choice's number in the environment


@dataclass(frozen=True)
class ActionLayout:
    """How an action space lies flat; see the module's table."""

    space: Space
    parts: tuple[ActionPart, ...] = field(init=False)

    def __post_init__(self) -> None:
        parts: list[ActionPart] = []
        p = a = 0

        def add(kind: str, n: int, start: int = 0) -> None:
            nonlocal p, a
            num_params, size = (n, 1) if kind == "categorical" else (2 * n, n)
            parts.append(ActionPart(kind, n, slice(p, p + num_params), slice(a, a + size), start))
            p, a = p + num_params, a + size

        def walk(space: Space) -> None:
            if space.composite:
                for part in space.parts:
                    walk(part)
            elif space.kind in ("discrete", "multi_discrete"):
                for n, start in zip(space.n, space.start, strict=True):
                    add("categorical", n, start)
            elif space.kind == "multi_binary":
                for _ in range(int(np.prod(space.shape, dtype=int))):
                    add("categorical", 2)
            elif space.kind == "box":
                add("gaussian", int(np.prod(space.shape, dtype=int)))
            else:
                raise ConfigError(f"expected an action space of a kind of {', '.join(_KINDS)}, got {space.kind!r}")

        walk(self.space)
        if not a:
            raise ConfigError("expected an action space with something to choose, got an empty one")
        object.__setattr__(self, "parts", tuple(parts))

    @cached_property
    def num_params(self) -> int:
        return self.parts[-1].param.stop

    @cached_property
    def size(self) -> int:
        return self.parts[-1].action.stop

    @cached_property
    def num_logits(self) -> int:
        """Length of a flat action mask: one entry per choice of every categorical part."""
        return sum(p.n for p in self.parts if p.kind == "categorical")

    @cached_property
    def discrete(self) -> bool:
        """All parts categorical."""
        return all(p.kind == "categorical" for p in self.parts)

    @cached_property
    def continuous(self) -> bool:
        """All parts Gaussian."""
        return all(p.kind == "gaussian" for p in self.parts)

    @cached_property
    def single(self) -> bool:
        """One plain Discrete: actions have no last axis."""
        return self.space.kind == "discrete"

    @cached_property
    def dtype(self) -> np.dtype:
        return np.dtype(np.int64 if self.discrete else np.float32)

    @cached_property
    def shape(self) -> tuple[int, ...]:
        return () if self.single else (self.size,)

    def bounds(self) -> tuple[np.ndarray, np.ndarray]:
        """low and high of a flat continuous action in the environment's units, infinite where there is none."""

        def boxes(space: Space) -> Iterator[Space]:
            yield from itertools.chain.from_iterable(map(boxes, space.parts)) if space.composite else (space,)

        pairs = [tuple(x.ravel() for x in box.bounds()) for box in boxes(self.space)]
        low, high = (np.concatenate(x) for x in zip(*pairs, strict=True))
        return low, high

    def mask(self, obs: Any) -> np.ndarray | None:
        """The flat action mask `[B, num_logits]` in a batch of observations (bool), or None. A composite action's mask
        may be given flat or as a tree: by the names of a Dict, else in the order of the parts."""
        if not isinstance(obs, dict) or ACTION_MASK not in obs:
            return None
        leaves = [
            (x if hasattr(x, "reshape") else np.asarray(x)).reshape(len(x), -1)
            for x in _mask_leaves(self.space, obs[ACTION_MASK])
        ]
        return (leaves[0] if len(leaves) == 1 else np.concatenate(leaves, -1)) > 0.5

    def legal(self, obs: Any) -> np.ndarray | None:
        """`mask` for those who learn. They also see observations in which nobody acts, such as those behind the end of
        an episode; where nothing is legal in one, everything counts, so that no value is infinite."""
        mask, at = self.mask(obs), 0
        if mask is None:
            return None
        for part in (p for p in self.parts if p.kind == "categorical"):
            choices = mask[:, at : at + part.n]
            choices |= ~choices.any(-1, keepdims=True)
            at += part.n
        return mask

    def to_env(self, action: np.ndarray) -> Any:
        """Flat actions `[B, size]` (or `[B]`) -> a batch of actions as the environment takes them."""
        if self.space.kind == "discrete":
            return action + self.space.start[0] if self.space.start[0] else action
        used = 0

        def build(space: Space) -> Any:
            nonlocal used
            if space.composite:
                return space.join(build(part) for part in space.parts)
            width = len(space.n) if space.n else math.prod(space.shape)
            x = action[:, used : used + width]
            used += width
            if space.n:
                x = x.astype(np.int64) + np.asarray(space.start)
            elif space.kind == "box":
                low, high, bounded, origin, span = _box(space)
                x = np.where(bounded, origin + (np.clip(x, -1.0, 1.0) + 1.0) * 0.5 * span, x)
                x = np.clip(x, low, high)  # rounding must not leave the box by a hair
                if np.dtype(space.dtype).kind in "iu":
                    x = np.rint(x)
            return x.reshape(len(x), *space.shape).astype(space.dtype, copy=False)

        return build(self.space)

    def from_env(self, action: Any) -> np.ndarray:
        """The inverse of `to_env`: actions as the environment takes them, flat, as a learner wants them."""
        columns: list[np.ndarray] = []

        def walk(space: Space, x: Any) -> None:
            if space.parts:
                for i, (name, part) in enumerate(space.items):
                    walk(part, x[name if space.kind == "dict" else i])
                return
            flat = np.asarray(x).reshape(len(x), -1)
            if space.n:
                flat = flat - np.asarray(space.start)
            elif space.kind == "box":
                low, high = (bound.reshape(-1) for bound in space.bounds())
                bounded = np.isfinite(low) & np.isfinite(high) & (low < high)
                low, width = np.where(bounded, low, 0.0), np.where(bounded, high, 1.0) - np.where(bounded, low, 0.0)
                flat = np.where(bounded, 2.0 * (flat - low) / width - 1.0, flat)
            columns.append(flat)

        walk(self.space, action)
        out = np.concatenate(columns, 1).astype(self.dtype)
        return out[:, 0] if self.single else out


def _mask_leaves(space: Space | None, mask: Any) -> Iterator[Any]:
    """The arrays of a mask in the order of the parts of the action."""
    parts = list(space.parts) if space is not None and space.composite else []
    if isinstance(mask, dict):
        if space is not None and space.names:
            if unknown := [name for name in mask if name not in space.names]:
                raise ConfigError(
                    f"{ACTION_MASK} has {unknown}, the action has {list(space.names)}: name its parts alike"
                )
            parts = [part for name, part in zip(space.names, parts, strict=True) if name in mask]
            mask = [mask[name] for name in space.names if name in mask]
        else:
            mask = list(mask.values())
    if not isinstance(mask, (list, tuple)):
        yield mask
        return
    for part, inner in zip(parts if len(parts) == len(mask) else [None] * len(mask), mask, strict=True):
        yield from _mask_leaves(part, inner)


@dataclass(frozen=True)
class EnvSpec:
    """What a Model, a Policy and a server need to know of an environment."""

    id: str
    observation: Space
    action: Space
    max_episode_steps: int | None = None
    preprocessing: dict[str, Any] = field(default_factory=dict)
    """What the environment side did to the raw game before the agent sees it (frame stack, resize, ...), for the
    record."""
    global_state: Space | None = None
    """What the environment gives beside the observation, as its key `global_state`: learners see it, and neither the
    Model that acts nor a service does."""
    team: tuple[str, ...] = ()
    """The agents that are joined into this one (`env.teams`): row i of observations and actions is of the i-th."""
    sides: dict[str, SideSpec] = field(default_factory=dict)
    """Of a game of several agents (`bray/envs/table.py`): what each side sees and does. Not in files, which are of one
    policy each."""
    agents: tuple[str, ...] = ()
    """Of such a game, by their numbers."""
    game: Any = field(default=None, compare=False, repr=False)
    """Makes the game, where `env.moves` is set: for policies that search it. Not in files."""

    @cached_property
    def given(self) -> Space:
        """The observation as the environment gives it, with the global state where there is one."""
        if self.global_state is None:
            return self.observation
        seen = self.observation
        return replace(seen, names=(*seen.names, GLOBAL_STATE), parts=(*seen.parts, self.global_state))

    def acting(self, obs: Any) -> Any:
        """What of an observation that the environment gives those see who act."""
        return obs if self.global_state is None else {k: x for k, x in obs.items() if k != GLOBAL_STATE}

    @cached_property
    def layout(self) -> ActionLayout:
        return ActionLayout(self.action)

    @property
    def num_actions(self) -> int:
        """Choices of a plain Discrete action space."""
        if self.action.kind != "discrete":
            raise ConfigError(f"this algorithm needs a Discrete action space, {self.id} has {self.action.kind}")
        return self.action.n[0]

    @property
    def frame_stack(self) -> int | None:
        """How many frames an observation stacks, when the preprocessing says so and they come first."""
        stack = self.preprocessing.get("frame_stack") or self.preprocessing.get("atari", {}).get("frame_stack")
        space = self.observation
        return stack if stack and stack > 1 and space.kind == "box" and space.shape[0] == stack else None

    def to_json(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "observation": self.observation.to_json(),
            "action": self.action.to_json(),
            "max_episode_steps": self.max_episode_steps,
            "preprocessing": self.preprocessing,
            **({} if self.global_state is None else {"global_state": self.global_state.to_json()}),
            **({"team": list(self.team)} if self.team else {}),
        }

    @staticmethod
    def from_json(d: dict[str, Any]) -> EnvSpec:
        try:
            observation, action = Space.from_json(d["observation"]), Space.from_json(d["action"])
            state = None if d.get("global_state") is None else Space.from_json(d["global_state"])
            team = tuple(map(str, d.get("team", ())))
            limit, done = d.get("max_episode_steps"), d.get("preprocessing", {})
            return EnvSpec(d["id"], observation, action, limit, done, state, team)
        except (KeyError, TypeError) as e:
            raise DataError(f"not an environment spec ({type(e).__name__}: {e})") from None


@dataclass(frozen=True)
class SideSpec:
    """One side of a game of several agents."""

    spec: EnvSpec
    """Of one seat."""
    seats: int
    """Most agents of this side in one game."""
