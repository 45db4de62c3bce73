"""HDF5 files of episodes: Minari's, with a group for each, and D4RL's, with columns of all.

Of a file are read its own arrays of numbers alone: links to other files, arrays that lie in other files and objects are
refused.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from bray.data.files import Episode, Unchanged, check_columns, check_size, check_squeezed
from bray.data.flat import FlatSource
from bray.errors import CheckpointError, ConfigError, DataError, how_to_install
from bray.rundir.files import write_atomic
from bray.rundir.reader import read_dict
from bray.spec import EnvSpec, Space
from bray.tree.nested import KINDS, NestedArray

MAIN, ABOUT = "main_data.hdf5", "metadata.json"
VERSION = "0.5.4"
"""Of Minari, whose layout is written."""
_TO_OURS = {
    "obs": "observations",
    "action": "actions",
    "reward": "rewards",
    "terminated": "terminations",
    "truncated": "truncations",
}
_MOST_GROUPS = 1 << 20


def h5() -> Any:
    try:
        import h5py
    except ModuleNotFoundError:
        raise ConfigError(f"HDF5 files need h5py, which is not installed: {how_to_install('data')}") from None
    return h5py


def open_hdf5(path: Path) -> MinariSource | FlatSource:
    """Minari's layout where there are groups episode_0, ..., else D4RL's."""
    h5py = h5()
    try:
        file = h5py.File(path, "r")
        if "episode_0" in list(file) or (path.name == MAIN and (path.parent / ABOUT).exists()):
            return MinariSource(path, file)
        return FlatSource(path, dict(_arrays(file, path)))
    except (OSError, RuntimeError, KeyError, ValueError, MemoryError) as e:
        raise DataError(f"{path} cannot be read as HDF5 ({str(e).splitlines()[0]})") from None


def _arrays(group: Any, path: Path, prefix: str = "", depth: int = 0) -> Iterator[tuple[str, Any]]:
    """The arrays of numbers of a group and those in it, by path."""
    h5py = h5()
    if depth > 8 or len(group) > _MOST_GROUPS:
        raise DataError(f"{path}: {prefix or '/'} is too deep or has too many parts to be a data set")
    for name in group:
        where = f"{prefix}{name}"
        item = _own(group, name, f"{path}: {where}")
        if isinstance(item, h5py.Group):
            yield from _arrays(item, path, f"{where}/", depth + 1)
        elif isinstance(item, h5py.Dataset):
            if item.is_virtual or item.external:
                raise DataError(f"{path}: {where} lies in another file, which is not read: copy the array there")
            if item.dtype.kind in KINDS:
                try:
                    check_squeezed(item.dtype.itemsize * math.prod(item.chunks or ()), item.id.get_storage_size())
                except DataError as e:
                    raise DataError(f"{path}: {where} is stored in parts: {e}") from None
                yield where, item


def _own(group: Any, name: str, where: str) -> Any:
    """What a group has under a name itself; what is looked at is the link alone, before it leads anywhere."""
    if group.id.links.get_info(name.encode()).type != h5().h5l.TYPE_HARD:
        raise DataError(f"{where} is a link to elsewhere, which is not followed: copy the array there")
    return group[name]


class MinariSource:
    """Minari's layout: group episode_i with observations (T + 1 rows), actions, rewards, terminations, truncations."""

    def __init__(self, path: Path, file: Any):
        self._file, self._h5, self.notes = Unchanged(path), file, list[str]()
        numbered = {name.removeprefix("episode_"): name for name in file}
        if not all(number.isdecimal() and len(number) < 19 for number in numbered):
            raise DataError(f"{path}: expected groups episode_0, episode_1, ... and nothing else")
        self._groups = [numbered[number] for number in sorted(numbered, key=int)]
        self.steps = np.array([self._count(name) for name in self._groups], np.int64)
        self.spec = self._spec(path)

    def _count(self, name: str) -> int:
        try:
            rewards = _own(self._group(name), "rewards", name)
        except (DataError, KeyError):  # said when it is read
            return 0
        return int(rewards.shape[0]) if len(getattr(rewards, "shape", None) or ()) == 1 else 0

    def _group(self, name: str) -> Any:
        group = _own(self._h5, name, f"{self._file.path}: {name}")
        if not isinstance(group, h5().Group):
            raise DataError(f"{self._file.path}: {name} is no group with the columns of an episode")
        return group

    def _spec(self, path: Path) -> EnvSpec | None:
        about: dict[str, Any] = {}
        if (path.parent / ABOUT).is_file():
            try:
                about = read_dict(path.parent / ABOUT)
            except CheckpointError as e:
                raise DataError(str(e)) from None
        given = [about.get(k) or self._h5.attrs.get(k) for k in ("observation_space", "action_space")]
        if not all(isinstance(x, str) for x in given):
            return None
        try:
            observation, action = (space_of(json.loads(x)) for x in given)
        except (ValueError, KeyError, TypeError, RecursionError, DataError) as e:
            raise DataError(f"{path}: its spaces cannot be read ({e})") from None
        return EnvSpec(str(about.get("dataset_id", "files")), observation, action)

    def __len__(self) -> int:
        return len(self._groups)

    def where(self, i: int) -> str:
        return f"{self._file.path}, episode {self._groups[i].removeprefix('episode_')}"

    def __getitem__(self, i: int) -> Episode:
        try:
            arrays = dict(_arrays(self._group(self._groups[i]), self._file.path))
            wanted = {k: x for k, x in arrays.items() if k.partition("/")[0] in _TO_OURS.values()}
            size = sum(x.dtype.itemsize * int(np.prod(x.shape)) for x in wanted.values())
            check_size(size, sum(x.id.get_storage_size() for x in wanted.values()))
            read = {k: x[()] for k, x in wanted.items()}
            self._file.check()
        except (OSError, RuntimeError, KeyError, ValueError, MemoryError) as e:
            raise DataError(f"{self.where(i)} cannot be read ({str(e).splitlines()[0]})") from None
        episode: Episode = {}
        for ours, theirs in _TO_OURS.items():
            below = {k.removeprefix(f"{theirs}/"): x for k, x in read.items() if k.startswith(f"{theirs}/")}
            if theirs in read:
                episode[ours] = read[theirs]
            elif below:
                episode[ours] = _nested(below)
        if self.spec is not None:
            for name, space in (("obs", self.spec.observation), ("action", self.spec.action)):
                _refuse_jpeg(space, episode.get(name), name)
        check_columns(episode)
        return episode


def _nested(arrays: Mapping[str, Any]) -> NestedArray:
    """Arrays by path as dicts; `_index_0`, ... as a tuple."""
    names: dict[str, dict[str, Any]] = {}
    for path, x in arrays.items():
        name, _, rest = path.partition("/")
        names.setdefault(name, {})[rest] = x
    out = {name: inside[""] if "" in inside else _nested(inside) for name, inside in names.items()}
    if all(name.startswith("_index_") for name in out):
        return tuple(out[f"_index_{i}"] for i in range(len(out)))
    return out


def _refuse_jpeg(space: Space, x: Any, name: str) -> None:
    if space.kind == "box" and len(space.shape) == 3 and isinstance(x, np.ndarray) and x.ndim < 4:
        raise DataError(f"{name} are pictures packed as JPEG: write them with jpeg_encoding=False (Minari 0.5.3 on)")


# --- spaces and writing -----------------------------------------------------------------------------------------------


def space_of(given: Mapping[str, Any]) -> Space:
    """A space as Minari writes it."""
    kind = given["type"]
    if kind == "Box":
        bounds = [_bound(given[k]) for k in ("low", "high")]
        made: dict[str, Any] = {"kind": "box", "shape": given["shape"], "dtype": given["dtype"]}
        made |= {"low": bounds[0], "high": bounds[1]}
    elif kind == "Discrete":
        made = {"kind": "discrete", "dtype": "int64", "n": [given["n"]], "start": [given.get("start", 0)]}
    elif kind == "MultiDiscrete":
        n = np.asarray(given["nvec"])
        start = np.broadcast_to(given.get("start", 0), n.shape)
        made = {"kind": "multi_discrete", "shape": list(n.shape), "dtype": "int64"}
        made |= {"n": n.ravel().tolist(), "start": start.ravel().tolist()}
    elif kind == "MultiBinary":
        shape = given["n"] if isinstance(given["n"], list) else [given["n"]]
        made = {"kind": "multi_binary", "shape": shape, "dtype": "int8"}
    elif kind == "Dict":
        inside = given["subspaces"]
        made = {"kind": "dict", "names": list(inside), "parts": [space_of(x).to_json() for x in inside.values()]}
    elif kind == "Tuple":
        made = {"kind": "tuple", "parts": [space_of(x).to_json() for x in given["subspaces"]]}
    else:
        raise DataError(f"spaces of kind {kind!r} are not learnt from")
    return Space.from_json(made)


def _bound(given: Any) -> Any:
    x = np.asarray(given, np.float64)
    if not np.isfinite(x).any():
        return None
    biggest = float(np.finfo(np.float32).max)
    flat = np.clip(x, -biggest, biggest).ravel()
    return float(flat[0]) if (flat == flat[0]).all() else tuple(flat.tolist())


def space_to_minari(space: Space) -> dict[str, Any]:
    """The inverse of `space_of`."""
    if space.kind == "box":
        low, high = (x.tolist() for x in space.bounds())
        return {"type": "Box", "dtype": space.dtype, "shape": list(space.shape), "low": low, "high": high}
    if space.kind == "discrete":
        return {"type": "Discrete", "dtype": "int64", "start": space.start[0], "n": space.n[0]}
    if space.kind == "multi_discrete":
        n, start = (np.reshape(x, space.shape).tolist() for x in (space.n, space.start))
        return {"type": "MultiDiscrete", "dtype": "int64", "nvec": n, "start": start}
    if space.kind == "multi_binary":
        return {"type": "MultiBinary", "n": space.shape[0] if len(space.shape) == 1 else list(space.shape)}
    inside = {name: space_to_minari(part) for name, part in space.items}
    if space.kind == "dict":
        return {"type": "Dict", "subspaces": inside}
    return {"type": "Tuple", "subspaces": list(inside.values())}


class MinariWriter:
    """Writes one data set of Minari: DIR/data/main_data.hdf5 and metadata.json beside it. It has its name only when it
    is whole."""

    def __init__(self, out: Path, spec: EnvSpec):
        self.folder, self.spec = out / "data", spec
        if (self.folder / MAIN).exists():
            raise ConfigError(f"{self.folder} holds a data set already: choose another directory")
        self.folder.mkdir(parents=True, exist_ok=True)
        self._temporary = self.folder / f"{MAIN}.tmp"
        self._h5 = h5().File(self._temporary, "w", track_order=True)
        self._episodes = self._steps = 0

    def write(self, episode: Episode) -> None:
        steps = check_columns(episode)
        group = self._h5.create_group(f"episode_{self._episodes}")
        group.attrs["id"], group.attrs["total_steps"] = self._episodes, steps
        for ours, theirs in _TO_OURS.items():
            _put(group, theirs, episode[ours])
        self._episodes, self._steps = self._episodes + 1, self._steps + steps

    def __enter__(self) -> MinariWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Finish: the episodes written so far are complete."""
        self._h5.close()
        path = self.folder / MAIN
        self._temporary.replace(path)
        about = {
            "dataset_id": f"bray/{''.join(c if c.isalnum() else '-' for c in self.spec.id).lower()}-v0",
            "minari_version": VERSION,
            "data_format": "hdf5",
            "jpeg_encoding": False,
            "total_episodes": self._episodes,
            "total_steps": self._steps,
            "dataset_size": round(path.stat().st_size / 1e6, 1),
            "observation_space": json.dumps(space_to_minari(self.spec.observation)),
            "action_space": json.dumps(space_to_minari(self.spec.action)),
        }
        write_atomic(self.folder / ABOUT, json.dumps(about, indent=1))


def _put(group: Any, name: str, x: NestedArray) -> None:
    if isinstance(x, (dict, tuple, list)):
        inside = group.create_group(name)
        for key, part in x.items() if isinstance(x, dict) else ((f"_index_{i}", part) for i, part in enumerate(x)):
            _put(inside, key, part)
        return
    options: dict[str, Any] = {"compression": "gzip", "compression_opts": 1} if len(x) else {}
    group.create_dataset(name, data=x, maxshape=(None, *x.shape[1:]), chunks=True, **options)
