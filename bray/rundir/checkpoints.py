"""Checkpoints and model versions of a run: written whole, checked when read, deleted when old."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import secrets
import shutil
from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np

from bray._version import __version__
from bray.errors import CheckpointError, DataError, UnknownName
from bray.rundir.files import DISK_FULL, link_or_copy, sync_dir, to_json, write_atomic, write_error, write_synced
from bray.rundir.log import logger
from bray.rundir.reader import changed, check_seal, most_bytes, read_dict, read_plain
from bray.rundir.state import pack_state, unpack_state
from bray.rundir.weights import pack_weights, unpack_weights

FORMAT = 1
"""Version of the checkpoint layout; a newer one is refused."""

META = "meta.json"
_KIND = "bray checkpoint"
_STATE, _WEIGHTS = "state.tree", "model.safetensors"


class _File(msgspec.Struct):
    """A file of a checkpoint, as it was written."""

    bytes: int
    sha256: str


class _Head(msgspec.Struct):
    """`meta.json`."""

    step: int
    name: str
    files: dict[str, _File]
    meta: dict[str, Any]
    steps: dict[str, int] = {}
    """The version of each policy, where a run has several: `step` is an iteration then."""

    @property
    def versions(self) -> dict[str, int]:
        """By model."""
        return self.steps or {self.name: self.step}

    def file(self, name: str) -> str:
        """The file in the checkpoint that holds the weights of a model."""
        return f"{name}.safetensors" if self.steps else _WEIGHTS


class Model(NamedTuple):
    """Weights of one of the policies of a run, and their version."""

    step: int
    weights: Mapping[str, np.ndarray]


@dataclass
class Checkpoint:
    """A checkpoint that was read and found intact."""

    step: int
    models: dict[str, Model]
    """By the names of the policies; most runs have one."""
    state: Any
    meta: dict[str, Any]
    path: Path
    name: str = "default"

    @property
    def weights(self) -> Mapping[str, np.ndarray]:
        """Of the policy of the run."""
        if self.name not in self.models:
            raise several(self.path.parents[1], self.models)
        return self.models[self.name].weights


class Checkpoints:
    """The folders `checkpoints/` and `models/` of a run directory.

    In `checkpoints/`, a directory that is being written is `.new-STEP-x`, one that makes room for another of the same
    step is `.old-STEP-x`, and one that is being deleted is `.gone-STEP-x`; `recover` finishes or undoes what a kill
    left so."""

    def __init__(self, path: str | Path):
        self.path = Path(path)
        self.checkpoints, self.models = self.path / "checkpoints", self.path / "models"

    # --- model versions

    def model_folder(self, name: str = "default") -> Path:
        """The folder of a model, to write into; whatever a link there leads to is not of this run."""
        folder = self.models / safe_name(name)
        for path in (self.models, folder):
            if path.is_symlink():
                raise CheckpointError(f"{path} is a link: models are written inside of the run directory only")
        return folder

    def weights_path(self, step: int, name: str = "default") -> Path:
        return self.models / safe_name(name) / f"{_step(step)}.safetensors"

    def save_weights(self, step: int, weights: Mapping[str, np.ndarray], name: str = "default") -> Path:
        """Publish a model version without a checkpoint."""
        path = self.weights_path(step, name)
        write_atomic(path, pack_weights(weights))
        return path

    def load_weights(self, step: int, name: str = "default") -> dict[str, np.ndarray]:
        """A published model version: intact, as far as it or its checkpoint carries a checksum, and finite."""
        path = self.weights_path(step, name)
        data = self._read_plain(path, most_bytes())
        if not check_seal(data, path):
            self._check_by_checkpoint(step, name, data)
        return unpack_weights(data, path)

    def _check_by_checkpoint(self, step: int, name: str, data: bytes) -> None:
        """Weights of an older Bray carry no checksum; the checkpoint of their step does, where there is one."""
        try:
            head = self._head(step)
        except CheckpointError:
            return
        if head.name == name and not head.steps and head.files[_WEIGHTS] != _checksum(data):
            raise changed(self.weights_path(step, name))

    def versions(self, name: str = "default") -> list[int]:
        """Published versions of a model, oldest first."""
        folder = self.models / safe_name(name)
        return sorted(int(p.stem) for p in folder.glob("*.safetensors") if p.stem.isdecimal())

    def protect(self, step: int, name: str = "default", on: bool = True) -> None:
        """Keep a version (cloned, being served) and its checkpoint from retention; `on=False` releases it."""
        mark = self.model_folder(name) / f"{_step(step)}.keep"
        if on:
            write_atomic(mark, "")
        else:
            mark.unlink(missing_ok=True)

    def is_protected(self, step: int, name: str = "default") -> bool:
        return self.weights_path(step, name).with_suffix(".keep").exists()

    # --- which checkpoints there are

    def steps(self) -> list[int]:
        """Steps of all checkpoints, oldest first."""
        if not self.checkpoints.is_dir():
            return []
        found = (re.fullmatch(r"(\d+)|\.old-(\d+)-\w+", p.name) for p in self.checkpoints.iterdir() if p.is_dir())
        return sorted({int(m[1] or m[2]) for m in found if m})

    def _find(self, step: int) -> Path:
        """A checkpoint's directory; while one of the same step takes its place, it is the one moved aside."""
        path = self.checkpoints / str(step)
        return path if path.is_dir() else next(iter(sorted(self.checkpoints.glob(f".old-{step}-*"))), path)

    def pointer(self, which: str) -> int | None:
        """The step that `latest` or `best` names; None when there is none yet. A kill may leave the first checkpoint
        before `latest` names it."""
        link = self.checkpoints / which
        try:
            if not os.path.lexists(link):
                return max(self.steps(), default=None) if which == "latest" else None
            if link.is_symlink():
                text = os.readlink(link)
            elif link.is_dir():  # in a copy or an archive that followed the link
                text = str(read_dict((link / META).relative_to(self.path), self.path).get("step"))
            else:
                text = self._read_plain(link, 64).decode().strip()
        except FileNotFoundError:
            return None
        except (OSError, UnicodeDecodeError) as e:
            raise CheckpointError(f"{link}: expected the name of a checkpoint, it cannot be read ({e})") from None
        if not re.fullmatch(r"[0-9]{1,18}", text):
            raise CheckpointError(f"{link}: expected the number of a checkpoint, got {text[:40]!r}")
        return int(text)

    def _read_plain(self, path: Path, most: int) -> bytes:
        return read_plain(path.relative_to(self.path), self.path, most)

    def _point(self, which: str, step: int) -> None:
        link = self.checkpoints / which
        if link.is_dir() and not link.is_symlink():  # see `pointer`
            copied = self._temporary("gone", step)
            os.rename(link, copied)
            shutil.rmtree(copied, ignore_errors=True)
        temp = self._temporary("new", step)
        try:
            os.symlink(str(step), temp)
        except (OSError, NotImplementedError) as e:
            if isinstance(e, OSError) and e.errno in DISK_FULL:
                raise
            write_atomic(link, f"{step}\n")  # a file system without links
            return
        try:
            os.replace(temp, link)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(temp)
            raise
        sync_dir(self.checkpoints)

    def _temporary(self, what: str, step: int) -> Path:
        return self.checkpoints / f".{what}-{step}-{secrets.token_hex(4)}"

    # --- writing

    def save_checkpoint(
        self,
        step: int,
        weights: Mapping[str, np.ndarray] | Mapping[str, Model],
        state: Any,
        meta: Mapping[str, Any] | None = None,
        name: str = "default",
        best: bool = False,
        keep: int | None = None,
        keep_best: int = 1,
        spare: Set[int] = frozenset(),
    ) -> Path:
        """Write a checkpoint and make it `latest` (and `best`). Of all checkpoints, the newest `keep` remain besides
        latest, best and protected ones, those of `spare`, and the `keep_best` whose meta has the highest `score` (by
        the same `score_by`). On any failure the previous checkpoint is intact and still `latest`.

        `weights`: of the model `name`, whose version `step` is; or a `Model` for each of several policies, and then
        `step` is the number of the iteration."""
        if keep is not None and keep < 1:
            raise CheckpointError(f"expected to keep at least 1 checkpoint, got keep={keep}")
        several = {k: v for k, v in weights.items() if isinstance(v, Model)}
        models = several or {name: Model(step, weights)}  # type: ignore[arg-type]
        steps = {safe_name(k): _step(model.step) for k, model in several.items()}
        about = _Head(_step(step), safe_name(name), {}, json.loads(to_json(dict(meta or {}))), steps)
        # refused before anything is written
        files = {about.file(k): pack_weights(model.weights) for k, model in models.items()}
        packed = pack_state(state)
        about.files = {_STATE: _checksum(packed), **{file: _checksum(data) for file, data in files.items()}}
        head = {"kind": _KIND, "format": FORMAT, "bray": __version__, **msgspec.to_builtins(about)}
        if not steps:
            del head["steps"]
        head["sha256"] = _own_checksum(head)
        final, temp = self.checkpoints / str(step), self._temporary("new", step)
        places = {about.file(k): self.weights_path(model.step, k) for k, model in models.items()}
        new = [path for path in places.values() if not path.exists()]
        try:
            for file, data in files.items():
                if places[file] in new or not steps or places[file].read_bytes() != data:  # one that does not learn
                    write_atomic(places[file], data)
            temp.mkdir(parents=True)
            write_synced(temp / _STATE, packed)
            for file, data in files.items():
                link_or_copy(places[file], temp / file, data)
            write_synced(temp / META, to_json(head).encode())
            sync_dir(temp)
            old = self._put(temp, final)
            self._point("latest", step)
            if best:
                self._point("best", step)
            if old is not None:
                shutil.rmtree(old, ignore_errors=True)
        except BaseException as e:
            shutil.rmtree(temp, ignore_errors=True)
            if not final.exists():
                for path in new:
                    with contextlib.suppress(OSError):
                        path.unlink(missing_ok=True)
            if isinstance(e, OSError):
                raise write_error(e, final, "the previous checkpoint is kept") from e
            raise
        if keep is not None:
            self._retain(step, keep, self._best(head["meta"], keep_best) | spare)
        return final

    def rate(self, step: int, meta: Mapping[str, Any], best: bool) -> None:
        """Add to the meta of a checkpoint what became known of it later, and make it `best` if it is. What is not there
        any more is left alone."""
        path = self._find(step) / META
        if not path.exists():
            return
        self._head(step)  # checked
        head = read_dict(path.relative_to(self.path), self.path)
        head["meta"] |= json.loads(to_json(dict(meta)))
        head["sha256"] = _own_checksum(head)
        try:
            write_atomic(path, to_json(head))
            if best:
                self._point("best", step)
        except OSError as e:
            raise write_error(e, path, "the checkpoint itself is safe") from e

    def _put(self, temp: Path, final: Path) -> Path | None:
        """Rename a finished checkpoint to its place; one of the same step moves aside first and is returned."""
        old = None
        if final.exists():
            old = self._temporary("old", int(final.name))
            os.rename(final, old)
        try:
            os.rename(temp, final)
        except BaseException:
            if old is not None:
                os.rename(old, final)
            raise
        sync_dir(self.checkpoints)
        return old

    def recover(self) -> None:
        """Finish or undo what a kill interrupted: put back a checkpoint that was moved aside, remove unfinished
        files."""
        if not self.checkpoints.is_dir():
            return
        try:
            for path in sorted(self.checkpoints.iterdir()):
                left = re.fullmatch(r"\.(new|old|gone)-(\d+)-\w+", path.name)
                if left and left[1] == "old" and not (self.checkpoints / left[2]).exists():
                    os.rename(path, self.checkpoints / left[2])
                elif left and path.is_symlink():
                    path.unlink()
                elif left:
                    shutil.rmtree(path, ignore_errors=True)
            for folder in (self.path, self.checkpoints, *self.models.glob("*")):
                for path in folder.glob(".*.tmp"):
                    path.unlink(missing_ok=True)
        except PermissionError:
            logger.debug("%s is read only: leftovers of an interrupted write stay", self.path)
        except OSError as e:
            raise CheckpointError(f"{self.path}: cannot be put in order after an interrupted write ({e})") from e

    def _best(self, newest: Mapping[str, Any], count: int) -> set[int]:
        """The steps of the checkpoints with the highest scores; of one, `best` is the record."""
        scores: dict[int, float] = {}
        for step in self.steps() if count > 1 else ():
            with contextlib.suppress(CheckpointError):
                meta = self._head(step).meta
                if meta.get("score_by") == newest.get("score_by") and isinstance(meta.get("score"), (int, float)):
                    scores[step] = meta["score"]
        return set(sorted(scores, key=lambda s: (scores[s], s), reverse=True)[:count])

    def _retain(self, step: int, keep: int, best: set[int]) -> None:
        """Delete all but `keep` checkpoints, oldest first; those newer than `step` belong to a future that was given
        up. A damaged one is left alone."""
        safe = {self.pointer("latest"), self.pointer("best"), *best}
        there = sorted(self.steps(), key=lambda s: (s <= step, s), reverse=True)
        heads: dict[int, _Head] = {}
        for one in there if len(there) > keep else ():
            with contextlib.suppress(CheckpointError):
                heads[one] = self._head(one)
        for old in [s for s in there[keep:] if s in heads and s not in safe]:
            versions = heads[old].versions
            if any(self.is_protected(version, name) for name, version in versions.items()):
                continue
            del heads[old]
            # of a policy that does not learn, all checkpoints have the same version
            used = [pair for head in heads.values() if head.steps for pair in head.versions.items()]
            gone = self._temporary("gone", old)
            # in this order a kill leaves a whole checkpoint, which goes with the next one, or nothing that `recover`
            # does not remove
            try:
                for name, version in versions.items():
                    if (name, version) not in used:
                        self.weights_path(version, name).unlink(missing_ok=True)
                os.rename(self.checkpoints / str(old), gone)
                shutil.rmtree(gone, ignore_errors=True)
            except OSError as e:
                raise write_error(e, gone, "old checkpoints could not be deleted, new ones are safe") from e

    # --- reading

    def load_checkpoint(self, which: str | int = "latest") -> Checkpoint:
        """Read and verify a checkpoint: "latest", "best" or a step. A damaged one is refused, and an intact one is
        named."""
        step = self._which(which)
        try:
            return self._read(step)
        except CheckpointError as e:
            intact = next((s for s in reversed(self.steps()) if s != step and self.is_intact(s)), None)
            hint = f"The newest intact one is {intact}." if intact is not None else "No other one is intact."
            raise CheckpointError(
                f"checkpoint {which!r} of {self.path} cannot be used: {str(e).rstrip('.')}. {hint}"
            ) from None

    def _which(self, which: str | int) -> int:
        known = [str(s) for s in self.steps()]
        if str(which).isdecimal():
            if str(int(which)) not in known:
                raise UnknownName("checkpoint", str(which), known, str(self.path))
            return int(which)
        if which not in ("latest", "best"):
            raise UnknownName("checkpoint", str(which), ["latest", "best", *known])
        step = self.pointer(which)
        if step is None:
            there = f" There are: {', '.join(known[-8:])}." if known else " Start it again as it was begun."
            raise CheckpointError(f"{self.path} has no {which} checkpoint.{there}")
        return step

    def is_intact(self, step: int) -> bool:
        """Whether a checkpoint can be read; its files are verified."""
        with contextlib.suppress(CheckpointError):
            self._read(step)
            return True
        return False

    def _head(self, step: int) -> _Head:
        """`meta.json`, checked."""
        folder = self._find(step)
        if not folder.is_dir():
            raise CheckpointError(f"{folder} is missing.")
        path = folder / META
        read = read_dict(path.relative_to(self.path), self.path)
        if read.get("kind") != _KIND:
            raise CheckpointError(f"{path}: expected a {_KIND}, got something else.")
        if read.get("format") != FORMAT:
            raise CheckpointError(
                f"{path}: expected checkpoint format {FORMAT}, got {read.get('format')!r} (written by Bray "
                f"{read.get('bray')}; this is Bray {__version__})."
            )
        if read.get("sha256") != _own_checksum(read):
            raise changed(path)
        try:
            head = msgspec.convert(read, _Head)
        except msgspec.ValidationError as e:
            raise CheckpointError(f"{path}: {e}.") from None
        for name in (head.name, *head.steps):
            safe_name(name)
        if head.step != step:
            raise CheckpointError(f"{path}: expected step {step}, got {head.step!r}: a foreign checkpoint.")
        expected = [_STATE, *(head.file(name) for name in head.versions)]
        if head.files.keys() != set(expected) or min(head.versions.values()) < 0:
            raise CheckpointError(
                f"{path}: expected the checksums of {' and '.join(expected)}, got {str(list(head.files))[:80]}."
            )
        return head

    def versions_of(self, step: int) -> dict[str, int]:
        """The version of each policy in a checkpoint."""
        return self._head(step).versions

    def load_state(self, step: int) -> Any:
        """The training state of a checkpoint, without its weights."""
        return self._read_state(self._head(step), self._find(step))

    def _read(self, step: int) -> Checkpoint:
        head, folder = self._head(step), self._find(step)
        models = {
            name: Model(version, unpack_weights(self._read_checked(path := folder / head.file(name), head), path))
            for name, version in head.versions.items()
        }
        return Checkpoint(head.step, models, self._read_state(head, folder), head.meta, folder, head.name)

    def _read_state(self, head: _Head, folder: Path) -> Any:
        data = self._read_checked(folder / _STATE, head)
        try:
            return unpack_state(data)
        except DataError as e:
            raise CheckpointError(f"{folder}: {e}.") from None

    def _read_checked(self, path: Path, head: _Head) -> bytes:
        """The bytes of a file of a checkpoint, whose size and checksum are as they were when it was written."""
        want = head.files[path.name]
        data = self._read_plain(path, most_bytes())
        if len(data) != want.bytes:
            raise CheckpointError(f"{path}: expected {want.bytes} bytes, got {len(data)}: truncated or foreign.")
        if _checksum(data) != want:
            raise changed(path)
        return data


def several(path: Path, names: Iterable[str]) -> CheckpointError:
    """Of a run with several policies, where one is wanted."""
    found = [str(path / "models" / name) for name in names]
    return CheckpointError(f"{path} has several policies, say which one: {' or '.join(found)}")


def _step(step: int) -> int:
    if isinstance(step, bool) or not isinstance(step, (int, np.integer)) or step < 0:
        raise CheckpointError(f"expected a step that is a whole number >= 0, got {step!r}")
    return int(step)


def safe_name(name: str) -> str:
    """A model's name is a directory: no way out of it."""
    if not re.fullmatch(r"\w[\w.+-]*", name):
        raise CheckpointError(f"expected a model name of letters, digits, '_', '-', '+' and '.', got {name!r}")
    return name


def _checksum(data: bytes) -> _File:
    return _File(len(data), hashlib.sha256(data).hexdigest())


def _own_checksum(head: Mapping[str, Any]) -> str:
    rest = {k: v for k, v in head.items() if k != "sha256"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()
