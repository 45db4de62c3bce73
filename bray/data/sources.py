"""Data sets as people have them, read an episode at a time.

    ours        *.episodes              `bray collect` writes them (`files.py`)
    npz         *.npz                   columns, one episode behind the other (`flat.py`)
    D4RL        *.hdf5                  the same (`hdf5.py`)
    Minari      main_data.hdf5          a group for each episode, metadata.json beside it (`hdf5.py`)
    RLlib       output-*.json           JSON lines (`rllib.py`)

Nothing is unpickled or run: a pickle is refused, an array of objects too. A file is opened by what it begins with.
"""

from __future__ import annotations

import glob
import logging
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from bray.data.files import SUFFIX, Episode, EpisodeReader, check_columns
from bray.errors import CheckpointError, ConfigError, DataError
from bray.rundir.reader import open_plain
from bray.spec import ACTION_MASK, GLOBAL_STATE, EnvSpec, Space, parse_space
from bray.tree.nested import KINDS, NestedArray

logger = logging.getLogger("bray")

SUFFIXES = (SUFFIX, ".npz", ".hdf5", ".h5", ".json", ".jsonl")
_PICKLES = (".pkl", ".pickle", ".npy", ".pt", ".pth", ".joblib")
_HINT = (
    "write the episodes again with `bray collect ... --format bray`, or as numbers: np.savez(FILE, obs=, action=, "
    "reward=, terminated=, truncated=)"
)


class EpisodeSource(Protocol):
    """Episodes in some form of files. Opening reads what says where they are; `source[i]` reads one."""

    @property
    def spec(self) -> EnvSpec | None:
        """The spaces, where the files say them."""

    @property
    def steps(self) -> np.ndarray:
        """Transitions of each episode."""

    @property
    def notes(self) -> list[str]:
        """What the files do not say, and how that is read."""

    def __len__(self) -> int: ...

    def __getitem__(self, i: int) -> Episode: ...

    def where(self, i: int) -> str:
        """File and episode, for messages."""


class DataSet(Sequence[Episode]):
    """The episodes of several sources that are of one kind of game. Each is checked against the spaces as it is read,
    and has their types; what is wrong with one is said with its file, episode and step. With `skip_broken` such
    episodes are counted in `broken`, and left out by `read` and by iteration."""

    def __init__(self, sources: Sequence[EpisodeSource], spec: EnvSpec | None = None, skip_broken: bool = False):
        self.sources, self.skip_broken = list(sources), skip_broken
        self.spec = common_spec(self.sources) if spec is None else spec
        self.steps = np.concatenate([np.asarray(source.steps, np.int64) for source in self.sources])
        self._starts = np.cumsum([0, *(len(source) for source in self.sources)])
        self.all_legal = False
        """Whether observations may lack their `action_mask`, as those of live games may: every choice is legal then."""
        self.broken: dict[int, str] = {}
        """What is wrong with episodes that were read, by their numbers."""

    @property
    def notes(self) -> list[str]:
        return [note for source in self.sources for note in source.notes]

    def __len__(self) -> int:
        return len(self.steps)

    def __getitem__(self, i: Any) -> Any:
        source, at = self._find(i)
        try:
            episode = source[at]
            if self.all_legal and self.spec is not None:
                episode = with_mask(episode, self.spec)
            return episode if self.spec is None else fitted(episode, self.spec)
        except DataError as e:
            where = source.where(at)
            raise DataError(str(e) if where in str(e) else f"{where}: {e}") from None

    def read(self, i: int) -> Episode | None:
        """Episode i, or None where it is broken and such are to be left out."""
        try:
            episode: Episode = self[i]
            return episode
        except DataError as e:
            if not self.skip_broken:
                raise DataError(f"{e}. --skip-broken leaves such episodes out, and counts them") from None
            if i not in self.broken:
                logger.warning("left out: %s", e)
            self.broken[i] = str(e)
            return None

    def __iter__(self) -> Iterator[Episode]:
        return (episode for i in range(len(self)) if (episode := self.read(i)) is not None)

    def where(self, i: int) -> str:
        source, at = self._find(i)
        return source.where(at)

    def _find(self, i: int) -> tuple[EpisodeSource, int]:
        if not 0 <= i < len(self):
            raise IndexError(i)
        k = int(np.searchsorted(self._starts, i, "right")) - 1
        return self.sources[k], i - int(self._starts[k])


def open_data(pattern: str | Path | Sequence[str], spec: EnvSpec | None = None, skip_broken: bool = False) -> DataSet:
    """The data set that a directory, a file or a pattern names, or several. `spec`: its spaces, where they are known;
    else those that the files say, if they do. With `skip_broken` files that cannot be opened, and those of other
    spaces than the first one, count as `broken`, too, with numbers below 0."""
    patterns = [pattern] if isinstance(pattern, (str, Path)) else pattern
    sources: list[EpisodeSource] = []
    known: list[EpisodeSource] = []  # one that says its spaces
    broken: list[str] = []
    for kind, files in _by_kind([file for one in patterns for file in find_files(one)], broken, skip_broken):
        try:
            source = _open(files, kind)
            if spec is None and common_spec([*known, source]) is not None:
                known = known or [source]
            sources.append(source)
        except (DataError, CheckpointError) as e:
            if not skip_broken:
                raise
            broken.append(str(e))
    if broken and not sources:
        raise DataError(broken[0])
    for why in broken:
        logger.warning("left out: %s", why)
    data = DataSet(sources, spec, skip_broken)
    data.broken = {-1 - i: why for i, why in enumerate(broken)}
    return data


def _by_kind(files: Sequence[Path], broken: list[str], skip_broken: bool) -> list[tuple[str, list[Path]]]:
    """Kinds, and files that make one source: ours of a folder together, unless one of them may be left out."""
    groups: dict[Path, list[Path]] = {}
    others = []
    for file in files:
        try:
            kind = _kind(file)
        except DataError as e:
            if not skip_broken:
                raise
            broken.append(str(e))
            continue
        if kind == "ours":
            groups.setdefault(file if skip_broken else file.parent, []).append(file)
        else:
            others.append((kind, [file]))
    return [*(("ours", group) for group in groups.values()), *others]


def find_files(pattern: str | Path) -> list[Path]:
    """The files that a directory, a file or a pattern names."""
    folder = Path(pattern)
    if folder.is_dir():
        inside = [p for p in sorted(folder.iterdir()) if p.suffix in SUFFIXES and not p.name.endswith("spec.json")]
        found = [p for p in inside if p.suffix != ".json" or p.name.startswith("output-")]
        if not found and (folder / "data" / "main_data.hdf5").is_file():
            found = [folder / "data" / "main_data.hdf5"]  # Minari's own folder
        if not found and (pickled := [p for p in sorted(folder.iterdir()) if p.suffix in _PICKLES]):
            found = pickled[:1]  # to say what is wrong with it
    elif folder.exists():
        found = [folder]
    else:
        found = [Path(p) for p in sorted(glob.glob(str(pattern), recursive=True))]
    if not found:
        raise ConfigError(
            f"{pattern}: expected a directory, a file or a pattern of files of episodes "
            f"({', '.join('*' + s for s in SUFFIXES)}), found none"
        )
    return found


def _kind(path: Path) -> str:
    """What a file is, by its first bytes."""
    try:
        with open_plain(path) as f:
            head = f.read(8)
    except CheckpointError as e:
        raise DataError(str(e)) from None
    if head == b"BRAYEPIS":
        return "ours"
    if head == b"\x89HDF\r\n\x1a\n":
        return "hdf5"
    if head[:4] == b"PK\x03\x04" and path.suffix not in (".pt", ".pth"):
        return "npz"
    if head[:1] == b"{" and path.suffix in (".json", ".jsonl"):
        return "rllib"
    if path.suffix in _PICKLES or head[:1] == b"\x80":
        raise DataError(f"{path} is a pickle, and whoever reads one runs what is in it: {_HINT}")
    raise DataError(
        f"{path} is no file of episodes: expected Bray's own ({SUFFIX}), npz, HDF5 of Minari or D4RL, or RLlib's JSON "
        f"lines, and it begins with {head!r}"
    )


def _open(paths: list[Path], kind: str) -> EpisodeSource:
    if kind == "ours":
        return EpisodeReader(paths)
    (path,) = paths
    if kind == "npz":
        from bray.data.flat import open_npz

        return open_npz(path)
    if kind == "hdf5":
        from bray.data.hdf5 import open_hdf5

        return open_hdf5(path)
    from bray.data.rllib import JsonSource

    return JsonSource(path)


# --- spaces -----------------------------------------------------------------------------------------------------------


def given_spec(obs: Any, actions: Any) -> EnvSpec:
    """The spaces as people write them (`bray.spec.parse_space`)."""
    if obs is None or actions is None:
        raise ConfigError("the spaces of files are given as a pair: --obs 'float32[4]' --actions 2")
    return EnvSpec("files", parse_space(obs), parse_space(actions))


def common_spec(sources: Iterable[EpisodeSource]) -> EnvSpec | None:
    """The spaces of all sources that say theirs."""
    known: tuple[EnvSpec, str] | None = None
    for source in sources:
        if (spec := source.spec) is None or not len(source):
            continue
        where = source.where(0).rpartition(", episode")[0]
        if known is None:
            known = spec, where
        if name := differing(known[0], spec):
            mine, theirs = getattr(known[0], name), getattr(spec, name)
            raise DataError(
                f"two data sets with different spaces: {name}s of {known[1]} are {shown(mine)}, those of {where} "
                f"{shown(theirs)}. Learn from one of them, or name those that are right with --obs and --actions"
            )
    return None if known is None else known[0]


def differing(a: EnvSpec, b: EnvSpec) -> str:
    """Which spaces of two games are not the same, "observation" or "action"; empty where episodes of both can be learnt
    from together. Bounds of observations may differ, for nothing is held to them: a recorded game has none."""

    def unbounded(space: Space) -> Space:
        return replace(space, low=None, high=None, parts=tuple(map(unbounded, space.parts)))

    if unbounded(a.observation) != unbounded(b.observation):
        return "observation"
    return "" if a.action == b.action else "action"


def guess(episode: Episode) -> tuple[str, str]:
    """What --obs and --actions might be, by what an episode holds: to propose, not to go by."""

    def words(x: Any) -> str:
        if isinstance(x, dict):
            return "{" + ", ".join(f'"{k}": "{words(v)}"' for k, v in x.items()) + "}"
        return f"{np.asarray(x).dtype}[{','.join(map(str, np.shape(x)[1:]))}]"

    action = episode["action"]
    if isinstance(action, np.ndarray) and action.dtype.kind in "iu" and action.size // max(1, len(action)) == 1:
        return words(episode["obs"]), str(int(action.max(initial=0)) + 1)
    return words(episode["obs"]), words(action) + ("" if isinstance(action, dict) else " -1..1")


def shown(space: Space) -> str:
    """A space in a few words."""
    if space.kind == "box":
        low, high = (x.min() if i == 0 else x.max() for i, x in enumerate(space.bounds())) if space.shape else (0, 0)
        bounds = f" {low:g}..{high:g}" if np.isfinite([low, high]).all() else ""
        return f"{space.dtype}[{','.join(map(str, space.shape))}]{bounds}"
    if space.composite:
        return "{" + ", ".join(f"{name}: {shown(part)}" for name, part in space.items) + "}"
    if space.kind == "multi_binary":
        return f"{int(np.prod(space.shape))} bits"
    start = f" from {space.start[0]}" if space.start and any(space.start) else ""
    return f"{space.kind.replace('_', ' ')} {','.join(map(str, space.n))}{start}"


def with_mask(episode: Episode, spec: EnvSpec) -> Episode:
    """With the `action_mask` that its spaces have beside `obs`, where it has none."""
    steps, obs = check_columns(episode), episode["obs"]
    if set(spec.observation.names) != {"obs", ACTION_MASK} or (isinstance(obs, dict) and ACTION_MASK in obs):
        return episode
    (mask,) = (part for name, part in spec.observation.items if name == ACTION_MASK)
    legal = np.ones((steps + 1, *mask.shape), mask.dtype)
    return {**episode, "obs": {"obs": obs, ACTION_MASK: legal}}


def fitted(episode: Episode, spec: EnvSpec) -> Episode:
    """The episode with the types of the spaces. DataError, with the step, where it cannot be one of such a game."""
    steps = check_columns(episode)
    if not steps:
        raise DataError("it has no steps")
    obs = episode["obs"]
    whole = spec.global_state is not None and isinstance(obs, dict) and GLOBAL_STATE in obs
    reward = np.asarray(episode["reward"])
    _check_finite(reward, "reward")
    ended = np.asarray(episode["terminated"]).astype(bool) | np.asarray(episode["truncated"]).astype(bool)
    if len(early := np.flatnonzero(ended[:-1])):
        raise DataError(f"step {early[0]} ends it, and {steps - 1 - early[0]} more steps follow")
    return {
        **episode,
        "obs": _fit(spec.given if whole else spec.observation, obs, "obs"),
        "action": _fit(spec.action, episode["action"], "action", bounded=True),
        "reward": reward.astype(np.float32),
        "terminated": np.asarray(episode["terminated"]).astype(bool),
        "truncated": np.asarray(episode["truncated"]).astype(bool),
    }


def _fit(space: Space, x: NestedArray, name: str, bounded: bool = False) -> NestedArray:
    if space.composite:
        wanted = list(space.names) if space.kind == "dict" else list(range(len(space.parts)))
        got = list(x) if isinstance(x, dict) else list(range(len(x))) if isinstance(x, (tuple, list)) else None
        if got is None or set(got) != set(wanted):
            have = "an array" if got is None else f"the parts {got}"
            raise DataError(f"{name} of all its steps: expected the parts {wanted}, got {have}")
        return space.join(
            _fit(part, x[key], f"{name}/{key}", bounded) for key, part in zip(space.keys, space.parts, strict=True)
        )
    if isinstance(x, (dict, tuple, list)):
        raise DataError(f"{name}: expected {shown(space)}, got the parts {list(x) if isinstance(x, dict) else len(x)}")
    array = np.asarray(x)
    if array.shape[1:] != space.shape:
        if array.shape[1:] != (1,) or space.shape:  # single numbers are often stored as rows of one
            raise DataError(f"{name}: expected {shown(space)}, got rows of shape {list(array.shape[1:])}")
        array = array[:, 0]
    _check_finite(array, name)
    dtype = np.dtype(space.dtype)
    cast = array if array.dtype == dtype else _cast(array, dtype, name)
    if space.kind in ("discrete", "multi_discrete"):
        low = np.reshape(space.start, space.shape)
        _check_inside(cast, low, low + np.reshape(space.n, space.shape) - 1, name, space)
    elif space.kind == "multi_binary":
        _check_inside(cast, 0, 1, name, space)
    elif bounded:
        low, high = space.bounds()
        slack = 1e-5 * np.where(np.isfinite(high - low), high - low, 0.0)  # files round
        _check_inside(cast, low - slack, high + slack, name, space)
    return cast


def _cast(array: np.ndarray, dtype: np.dtype, name: str) -> np.ndarray:
    with np.errstate(all="ignore"):
        cast = array.astype(dtype)
        same = np.isfinite(cast) if dtype.kind == "f" else cast == array
    if not same.all():
        step = int(np.argwhere(~same)[0][0])
        raise DataError(f"step {step}: {name} has numbers that {dtype} does not hold, such as {array[~same].flat[0]}")
    return cast


def _check_finite(x: np.ndarray, name: str) -> None:
    if x.dtype.kind not in KINDS or x.dtype.kind == "c":
        raise DataError(f"{name} holds {x.dtype}, not real numbers")
    if x.dtype.kind == "f" and not np.isfinite(x.sum()):  # quicker than a look at each; a sum may overflow
        finite = np.isfinite(x)
        if not finite.all():
            step = int(np.argwhere(~finite)[0][0])
            raise DataError(f"step {step}: {name} is {x[~finite].flat[0]}")


def _check_inside(x: np.ndarray, low: Any, high: Any, name: str, space: Space) -> None:
    if (outside := (x < low) | (x > high)).any():
        step = int(np.argwhere(outside)[0][0])
        raise DataError(f"step {step}: {name} {x[step].tolist()} is outside of {shown(space)}")
