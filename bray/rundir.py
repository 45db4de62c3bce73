"""A run directory: everything a run leaves behind, written so that a kill at any moment leaves the previous state readable.

    config.yaml params.json spec.json policy.json      what was run
    result.jsonl progress.csv tb/ bray.log             what happened
    models/<name>/<step>.safetensors                   weights (step = learner steps = model version)
    checkpoints/<step>/ {state.tree, meta.json, model.safetensors}   with `latest` and `best`
    episodes/ trajectories/ videos/ figures/           what was made of it

A file is written beside its place, synced and renamed; a checkpoint is a directory made the same way. `meta.json` holds the checksums
of the other files and of itself: a truncated or foreign checkpoint is refused, never half loaded and never replaced by another one
behind the user's back. Nothing is ever unpickled.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import logging
import math
import os
import re
import secrets
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.numpy
from safetensors import SafetensorError

from bray import tree
from bray._version import __version__
from bray.errors import CheckpointError, DataError, UnknownName

FORMAT = 1
"""Version of the checkpoint layout; a newer one is refused."""

_KIND = "bray checkpoint"
_STATE, _META, _WEIGHTS = "state.tree", "meta.json", "model.safetensors"
_MARKS = ("config.yaml", "result.jsonl", "params.json", "checkpoints", "models")  # any of these makes a directory a run
_FULL = (errno.ENOSPC, errno.EDQUOT)


# --- files --------------------------------------------------------------------------------------------------------------


def write_atomic(path: str | Path, data: bytes | str) -> None:
    """Write a whole file or nothing: a temporary file beside it, synced, then renamed over it."""
    path = Path(path)
    temp = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _write_synced(temp, data.encode() if isinstance(data, str) else data)
        os.replace(temp, path)
        _sync_dir(path.parent)
    except BaseException as e:
        with contextlib.suppress(OSError):
            os.unlink(temp)
        if isinstance(e, OSError):
            raise _explain(e, path, "the previous file is kept") from e
        raise


def _write_synced(path: Path, data: bytes) -> None:
    with open(path, "xb") as f:
        f.write(data)
        f.flush()
        os.fsync(f.fileno())


def _sync_dir(path: Path) -> None:
    """A rename is on disk only when its directory is."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _explain(e: OSError, path: Path, kept: str) -> CheckpointError:
    if e.errno in _FULL:
        return CheckpointError(f"disk full while writing {path}: {kept}. Free some space and go on with --resume.")
    return CheckpointError(f"could not write {path} ({e.strerror or e}): {kept}.")


def read_json(path: str | Path) -> Any:
    """JSON from a run directory; CheckpointError when it is missing or broken."""
    try:
        return json.loads(Path(path).read_bytes())
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing") from None
    except (OSError, ValueError, RecursionError) as e:
        raise CheckpointError(f"{path}: expected JSON, it cannot be read ({e})") from None


def _json(value: Any) -> str:
    """Sorted and indented JSON; not a number is written as null."""

    def plain(x: Any) -> Any:
        if isinstance(x, Mapping):
            return {str(k): plain(v) for k, v in x.items()}
        if isinstance(x, (list, tuple)):
            return [plain(v) for v in x]
        if isinstance(x, (np.generic, np.ndarray)):
            return plain(x.tolist())
        if isinstance(x, float) and not math.isfinite(x):
            return None
        if isinstance(x, Path):
            return str(x)
        return x

    try:
        return json.dumps(plain(value), indent=2, sort_keys=True, ensure_ascii=False) + "\n"
    except (TypeError, ValueError, RecursionError) as e:
        raise DataError(f"expected plain data to write as JSON: {e}") from None


# --- trainer state ------------------------------------------------------------------------------------------------------

_BYTES, _PLAIN, _INTS = "$bytes", "$json", "$ints"  # how leaves that are no arrays lie in a packed tree


def pack_state(state: Any) -> bytes:
    """Trainer state as bytes: a tree whose leaves are arrays, bytes, text, None or numbers (of any size: random states)."""

    def encode(node: Any, path: str) -> Any:
        if isinstance(node, dict):
            if node and all(type(k) is int for k in node):
                return {_INTS: {str(k): encode(v, f"{path}/{k}") for k, v in node.items()}}
            for k in node:
                if not isinstance(k, str) or k in (_BYTES, _PLAIN, _INTS):
                    raise DataError(f"trainer state at {path or '/'}: expected keys that are text, got {k!r}")
            return {k: encode(v, f"{path}/{k}") for k, v in node.items()}
        if isinstance(node, (list, tuple)):
            items = [encode(v, f"{path}/{i}") for i, v in enumerate(node)]
            return items if isinstance(node, list) else tuple(items)
        if isinstance(node, (bytes, bytearray, memoryview)):
            return {_BYTES: np.frombuffer(node, np.uint8)}
        if node is None or (isinstance(node, (bool, int, float, str)) and not isinstance(node, np.generic)):
            return {_PLAIN: np.frombuffer(json.dumps(node).encode(), np.uint8)}
        if isinstance(node, (np.ndarray, np.generic)):
            return node
        raise DataError(
            f"trainer state at {path or '/'}: expected arrays, numbers, text or bytes, got {type(node).__name__}"
        )

    return tree.pack(encode(state, ""))


def unpack_state(data: bytes) -> Any:
    """The inverse of `pack_state`; arrays are writable copies."""

    def decode(node: Any) -> Any:
        if isinstance(node, dict):
            if len(node) == 1:
                ((key, value),) = node.items()
                if key == _BYTES:
                    return np.asarray(value).tobytes()
                if key == _PLAIN:
                    return json.loads(np.asarray(value).tobytes())
                if key == _INTS:
                    return {int(k): decode(v) for k, v in value.items()}
            return {k: decode(v) for k, v in node.items()}
        if isinstance(node, (list, tuple)):
            items = [decode(v) for v in node]
            return items if isinstance(node, list) else tuple(items)
        return node

    try:
        return decode(tree.unpack(data, copy=True))
    except (ValueError, AttributeError) as e:
        raise DataError(f"not a trainer state ({e})") from None


# --- weights ------------------------------------------------------------------------------------------------------------


@dataclass
class WeightReport:
    """How weights fit a model: what is `missing` in them, `redundant`, or of another shape or type (`mismatched`)."""

    weights: dict[str, np.ndarray]
    """The ones that fit."""
    missing: list[str] = field(default_factory=list)
    redundant: list[str] = field(default_factory=list)
    mismatched: list[str] = field(default_factory=list)

    @property
    def exact(self) -> bool:
        return not (self.missing or self.redundant or self.mismatched)

    def __str__(self) -> str:
        parts = [f"{len(self.weights)} tensors fit"]
        for word in ("missing", "redundant", "mismatched"):
            names = getattr(self, word)
            if names:
                parts.append(f"{word}: " + ", ".join(names[:6]) + (f", … ({len(names)})" if len(names) > 6 else ""))
        return "; ".join(parts)


def match_weights(
    wanted: Mapping[str, np.ndarray],
    got: Mapping[str, np.ndarray],
    strict: bool = True,
    add_prefix: str = "",
    remove_prefix: str = "",
    skip: Sequence[str] = (),
) -> WeightReport:
    """The weights of `got` that fit a model that wants `wanted`. Strict: anything that does not fit raises; else it is reported.
    Prefixes of names can be removed and added, and names that start with one of `skip` are left out."""
    renamed = {}
    for name, array in got.items():
        name = add_prefix + name.removeprefix(remove_prefix)
        if not name.startswith(tuple(skip)) or not skip:
            renamed[name] = array
    report = WeightReport({})
    for name, want in wanted.items():
        if name not in renamed:
            report.missing.append(name)
        elif renamed[name].shape != want.shape or renamed[name].dtype != want.dtype:
            have = renamed[name]
            report.mismatched.append(
                f"{name} (expected {want.dtype}{list(want.shape)}, got {have.dtype}{list(have.shape)})"
            )
        else:
            report.weights[name] = renamed[name]
    report.redundant = [n for n in renamed if n not in wanted]
    if strict and not report.exact:
        raise CheckpointError(f"these weights belong to another model: {report}")
    return report


def read_weights(path: str | Path) -> dict[str, np.ndarray]:
    """A safetensors file as arrays."""
    try:
        return safetensors.numpy.load(Path(path).read_bytes())
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing") from None
    except (OSError, SafetensorError, ValueError, KeyError) as e:
        raise CheckpointError(f"{path}: expected a safetensors file, it cannot be read ({e})") from None


def _pack_weights(weights: Mapping[str, np.ndarray]) -> bytes:
    for name, array in weights.items():
        if not isinstance(array, np.ndarray) or array.dtype.kind not in "biuf":
            got = getattr(array, "dtype", type(array).__name__)
            raise DataError(f"weight {name!r}: expected a numpy array of numbers, got {got}")
    return safetensors.numpy.save({k: np.ascontiguousarray(v).reshape(v.shape) for k, v in weights.items()})


# --- the directory ------------------------------------------------------------------------------------------------------


@dataclass
class Checkpoint:
    """A checkpoint that was read and found intact."""

    step: int
    weights: dict[str, np.ndarray]
    state: Any
    meta: dict[str, Any]
    path: Path
    name: str = "default"


def default_run_dir(env: str, algo: str, now: datetime | None = None, root: str | Path = "runs") -> Path:
    """`runs/<env>/<algo>-<time>`, with '/' in names as '-'; a second run in the same second gets '-2'."""
    env, algo = (re.sub(r"[^\w.+=-]+", "-", name).strip("-.") or "run" for name in (env, algo))
    path = Path(root) / env / f"{algo}-{(now or datetime.now()):%Y%m%d-%H%M%S}"
    out, n = path, 1
    while out.exists():
        n += 1
        out = path.with_name(f"{path.name}-{n}")
    return out


_locks: dict[Path, int] = {}  # directories this process writes to


class RunDir:
    """One run's directory. `create` one to write, `open` one to read."""

    def __init__(self, path: str | Path):
        self.path = Path(path)

    @classmethod
    def create(cls, path: str | Path, resume: bool = False) -> RunDir:
        """A new run directory, to write into; `resume` takes one that is there and removes what a kill left half done.
        A run is never written over another one, and never by two processes at once."""
        path = Path(path)
        if resume:
            run = cls.open(path)
            run.lock()
            run._recover()
            return run
        if path.exists() and not path.is_dir():
            raise CheckpointError(f"{path} is a file: expected the name of a new directory")
        found = [m for m in _MARKS if (path / m).exists()]
        if found:
            raise CheckpointError(
                f"{path} already holds a run ({', '.join(found)}). Go on with it by --resume {path}, or choose another --trial."
            )
        try:
            (path / "checkpoints").mkdir(parents=True, exist_ok=True)
        except OSError as e:
            raise _explain(e, path, "nothing was changed") from e
        run = cls(path)
        run.lock()
        return run

    @classmethod
    def open(cls, path: str | Path) -> RunDir:
        """An existing run directory, to read; nothing in it is changed, so a run may be read while it is trained."""
        path = Path(path)
        if not path.is_dir():
            raise CheckpointError(f"{path}: there is no such run directory")
        if not any((path / m).exists() for m in _MARKS):
            inside = [p.name for p in sorted(path.iterdir()) if p.is_dir() and any((p / m).exists() for m in _MARKS)]
            hint = f" There are runs in it: {', '.join(inside[:6])}." if inside else ""
            run = Path(os.path.normpath(path / "../.."))  # without following `latest`
            if (path / _META).exists() and (run / "checkpoints" / path.name).exists():
                hint = f" It is a checkpoint of the run {run}: give that, and --checkpoint {path.name}."
            raise CheckpointError(f"{path} is not a run directory: expected config.yaml or checkpoints/ in it.{hint}")
        return cls(path)

    def lock(self, doing: str = "training") -> None:
        """One process writes. The lock goes with the process, however it ends."""
        path = (self.path / ".lock").resolve()
        if path in _locks:
            return
        fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as e:
            os.close(fd)
            if e.errno in (errno.EACCES, errno.EAGAIN):
                raise CheckpointError(
                    f"{self.path}: another process is {doing} here. Wait for it, or choose another --trial."
                ) from None
            logger.warning("%s: this file system has no locks; take care that one process trains here", self.path)
            return
        _locks[path] = fd

    def close(self) -> None:
        """Give the directory free for another process to write."""
        fd = _locks.pop((self.path / ".lock").resolve(), None)
        if fd is not None:
            os.close(fd)

    def __repr__(self) -> str:
        return f"RunDir({str(self.path)!r})"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def models(self) -> Path:
        return self.path / "models"

    @property
    def result_jsonl(self) -> Path:
        return self.path / "result.jsonl"

    @property
    def progress_csv(self) -> Path:
        return self.path / "progress.csv"

    @property
    def tensorboard(self) -> Path:
        return self.path / "tb"

    @property
    def log(self) -> Path:
        return self.path / "bray.log"

    def folder(self, name: str) -> Path:
        """`figures`, `videos`, `trajectories`, `episodes` or `replay`, made when first asked for."""
        known = ("figures", "videos", "trajectories", "episodes", "replay")
        if name not in known:
            raise UnknownName("folder of a run directory", name, known)
        out = self.path / name
        out.mkdir(parents=True, exist_ok=True)
        return out

    # --- what was run

    def write_config(self, config: Any) -> None:
        """`config.yaml` and `params.json` of a `config.Resolved`."""
        write_atomic(self.path / "config.yaml", config.to_yaml())
        write_atomic(self.path / "params.json", _json(config.to_dict()))

    def write_json(self, name: str, value: Any) -> None:
        """A JSON file in the run directory, sorted and indented: `spec.json`, `policy.json`, ..."""
        write_atomic(self.path / name, _json(value))

    def write_spec(self, spec: Any) -> None:
        """`spec.json` of a `spec.EnvSpec`."""
        self.write_json("spec.json", spec.to_json())

    def write_policy(self, policy: Mapping[str, Any]) -> None:
        """`policy.json`: what turns model outputs into actions when served."""
        self.write_json("policy.json", policy)

    def read_json(self, name: str) -> Any:
        """A JSON file of the run directory."""
        return read_json(self.path / name)

    # --- model versions

    def refuse_old_launch(self) -> None:
        """Raise for a run that `bray launch` made before it left what others need."""
        if not (self.path / "spec.json").exists() and (self.path / "master.state").exists():
            raise CheckpointError(
                f"{self.path} was made by `bray launch` of an older Bray, which did not write down what its games look like. Start a trial with its "
                f"weights, by `bray launch` with its file and `checkpoint: {self.path}/models/NAME/STEP.safetensors` of the model; what that makes can be "
                "served, evaluated and exported"
            )

    def model_name(self) -> str:
        """The name under which the run keeps the weights that are served: `default`, or a launched model's."""
        try:
            return str(self.read_json("policy.json").get("model", "default"))
        except CheckpointError:
            return "default"

    def weights_path(self, step: int, name: str = "default") -> Path:
        return self.models / _safe_name(name) / f"{_step(step)}.safetensors"

    def save_weights(self, step: int, weights: Mapping[str, np.ndarray], name: str = "default") -> Path:
        """Publish a model version without a checkpoint."""
        path = self.weights_path(step, name)
        write_atomic(path, _pack_weights(weights))
        return path

    def load_weights(self, step: int, name: str = "default") -> dict[str, np.ndarray]:
        """A published model version."""
        return read_weights(self.weights_path(step, name))

    def versions(self, name: str = "default") -> list[int]:
        """Published versions of a model, oldest first."""
        folder = self.models / _safe_name(name)
        return sorted(int(p.stem) for p in folder.glob("*.safetensors") if p.stem.isdigit())

    def protect(self, step: int, name: str = "default", on: bool = True) -> None:
        """Keep a version (cloned, being served) and its checkpoint from retention; `on=False` gives it free."""
        mark = self.weights_path(step, name).with_suffix(".keep")
        if on:
            write_atomic(mark, "")
        else:
            mark.unlink(missing_ok=True)

    def is_protected(self, step: int, name: str = "default") -> bool:
        return self.weights_path(step, name).with_suffix(".keep").exists()

    # --- checkpoints

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
        """The step that `latest` or `best` names; None when there is none yet."""
        link = self.checkpoints / which
        try:
            text = os.readlink(link) if link.is_symlink() else link.read_text().strip()
        except FileNotFoundError:
            return None
        except (OSError, UnicodeDecodeError) as e:
            raise CheckpointError(f"{link}: expected the name of a checkpoint, it cannot be read ({e})") from None
        if not text.isdigit():
            raise CheckpointError(f"{link}: expected the number of a checkpoint, got {text[:40]!r}")
        return int(text)

    def _point(self, which: str, step: int) -> None:
        link = self.checkpoints / which
        temp = self.checkpoints / f".{which}.{secrets.token_hex(4)}.tmp"
        try:
            os.symlink(str(step), temp)
        except (OSError, NotImplementedError) as e:
            if isinstance(e, OSError) and e.errno in _FULL:
                raise
            write_atomic(link, f"{step}\n")  # a file system without links
            return
        try:
            os.replace(temp, link)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(temp)
            raise
        _sync_dir(self.checkpoints)

    def save_checkpoint(
        self,
        step: int,
        weights: Mapping[str, np.ndarray],
        state: Any,
        meta: Mapping[str, Any] | None = None,
        name: str = "default",
        best: bool = False,
        keep: int | None = None,
    ) -> Path:
        """Write a checkpoint and make it `latest` (and `best`). Of all checkpoints, `keep` remain besides latest, best and protected
        ones. On any failure the previous checkpoint is intact and still `latest`."""
        if keep is not None and keep < 1:
            raise CheckpointError(f"expected to keep at least 1 checkpoint, got keep={keep}")
        model, packed = _pack_weights(weights), pack_state(state)  # refused before anything is written
        head = {
            "kind": _KIND,
            "format": FORMAT,
            "bray": __version__,
            "step": _step(step),
            "name": _safe_name(name),
            "files": {_STATE: _checksum(packed), _WEIGHTS: _checksum(model)},
            "meta": json.loads(_json(dict(meta or {}))),
        }
        head["sha256"] = _own_checksum(head)
        final = self.checkpoints / str(step)
        temp = self.checkpoints / f".new-{step}-{secrets.token_hex(4)}"
        weights_path = self.weights_path(step, name)
        published = weights_path.exists()
        try:
            write_atomic(weights_path, model)
            temp.mkdir(parents=True)
            _write_synced(temp / _STATE, packed)
            _link(weights_path, temp / _WEIGHTS, model)
            _write_synced(temp / _META, _json(head).encode())
            _sync_dir(temp)
            old = self._put(temp, final)
            self._point("latest", step)
            if best:
                self._point("best", step)
            if old is not None:
                shutil.rmtree(old, ignore_errors=True)
        except BaseException as e:
            shutil.rmtree(temp, ignore_errors=True)
            if not published and not final.exists():
                with contextlib.suppress(OSError):
                    weights_path.unlink(missing_ok=True)
            if isinstance(e, OSError):
                raise _explain(e, final, "the previous checkpoint is kept") from e
            raise
        if keep is not None:
            self._retain(step, keep)
        return final

    def _put(self, temp: Path, final: Path) -> Path | None:
        """Rename a finished checkpoint to its place; one of the same step moves aside first (`_recover` knows)."""
        old = None
        if final.exists():
            old = self.checkpoints / f".old-{final.name}-{secrets.token_hex(4)}"
            os.rename(final, old)
        try:
            os.rename(temp, final)
        except BaseException:
            if old is not None:
                os.rename(old, final)
            raise
        _sync_dir(self.checkpoints)
        return old

    def _recover(self) -> None:
        """Finish or undo what a kill interrupted: put back a checkpoint that was moved aside, remove unfinished files."""
        if not self.checkpoints.is_dir():
            return
        try:
            for path in sorted(self.checkpoints.iterdir()):
                moved = re.fullmatch(r"\.old-(\d+)-\w+", path.name)
                if moved and not (self.checkpoints / moved[1]).exists():
                    os.rename(path, self.checkpoints / moved[1])
                elif moved or re.fullmatch(r"\.(new|gone)-\d+-\w+", path.name):
                    shutil.rmtree(path, ignore_errors=True)
            for folder in (self.path, self.checkpoints, *self.models.glob("*")):
                for path in folder.glob(".*.tmp"):
                    path.unlink(missing_ok=True)
        except PermissionError:
            logger.debug("%s is read only: leftovers of an interrupted write stay", self.path)
        except OSError as e:
            raise CheckpointError(f"{self.path}: cannot be put in order after an interrupted write ({e})") from e

    def _retain(self, step: int, keep: int) -> None:
        """Delete all but `keep` checkpoints, oldest first; those newer than `step` belong to a future that was given up."""
        safe = {self.pointer("latest"), self.pointer("best")}
        order = sorted(self.steps(), key=lambda s: (s <= step, s), reverse=True)
        doomed = []
        for s in order[keep:]:
            name = self._model_of(s)
            if s not in safe and name is not None and not self.is_protected(s, name):
                doomed.append((s, name))
        for s, name in doomed:
            gone = self.checkpoints / f".gone-{s}-{secrets.token_hex(4)}"
            try:
                os.rename(self.checkpoints / str(s), gone)  # first out of sight: a kill leaves no half checkpoint
                shutil.rmtree(gone, ignore_errors=True)
                self.weights_path(s, name).unlink(missing_ok=True)
            except OSError as e:
                raise _explain(e, gone, "old checkpoints could not be deleted, new ones are safe") from e

    def _model_of(self, step: int) -> str | None:
        """The model's name in a checkpoint; None when it is damaged (then it is left alone)."""
        try:
            return str(self._head(step)["name"])
        except CheckpointError:
            return None

    def load_checkpoint(self, which: str | int = "latest") -> Checkpoint:
        """Read and verify a checkpoint: "latest", "best" or a step. A damaged one is refused, and an intact one is named."""
        step = self._which(which)
        try:
            return self._read(step)
        except CheckpointError as e:
            intact = next((s for s in reversed(self.steps()) if s != step and self.is_intact(s)), None)
            hint = f"The newest intact one is {intact}." if intact is not None else "No other one is intact."
            raise CheckpointError(f"checkpoint {which!r} of {self.path} is damaged: {e} {hint}") from None

    def _which(self, which: str | int) -> int:
        if isinstance(which, str) and not which.isdigit():
            if which not in ("latest", "best"):
                raise UnknownName("checkpoint", which, ["latest", "best", *[str(s) for s in self.steps()]])
            step = self.pointer(which)
            if step is None:
                known = ", ".join(str(s) for s in self.steps()[-8:])
                raise CheckpointError(
                    f"{self.path} has no {which} checkpoint." + (f" There are: {known}." if known else "")
                )
            return step
        if int(which) not in self.steps():
            raise UnknownName("checkpoint", str(which), [str(s) for s in self.steps()], str(self.path))
        return int(which)

    def is_intact(self, step: int) -> bool:
        """Whether a checkpoint can be read; its files are verified."""
        try:
            self._read(step)
        except CheckpointError:
            return False
        return True

    def _head(self, step: int) -> dict[str, Any]:
        """`meta.json`, checked."""
        path = self._find(step)
        if not path.is_dir():
            raise CheckpointError(f"{path} is missing.")
        head = read_json(path / _META)
        if not isinstance(head, dict) or head.get("kind") != _KIND:
            raise CheckpointError(f"{path / _META}: expected a {_KIND}, got something else.")
        if head.get("format") != FORMAT:
            raise CheckpointError(
                f"{path / _META}: expected checkpoint format {FORMAT}, got {head.get('format')!r} (written by Bray {head.get('bray')}; "
                f"this is Bray {__version__})."
            )
        if head.get("sha256") != _own_checksum(head):
            raise CheckpointError(f"{path / _META}: it was changed after it was written (checksum).")
        if head.get("step") != step:
            raise CheckpointError(
                f"{path / _META}: expected step {step}, got {head.get('step')!r}: a foreign checkpoint."
            )
        return head

    def _read(self, step: int) -> Checkpoint:
        head, path = self._head(step), self._find(step)
        data = {}
        for name, want in head["files"].items():
            try:
                data[name] = (path / name).read_bytes()
            except FileNotFoundError:
                raise CheckpointError(f"{path / name} is missing.") from None
            except OSError as e:
                raise CheckpointError(f"{path / name} cannot be read ({e}).") from None
            if len(data[name]) != want["bytes"]:
                raise CheckpointError(
                    f"{path / name}: expected {want['bytes']} bytes, got {len(data[name])}: truncated or foreign."
                )
            if _checksum(data[name]) != want:
                raise CheckpointError(f"{path / name}: its content was changed after it was written (checksum).")
        try:
            weights = safetensors.numpy.load(data[_WEIGHTS])
            state = unpack_state(data[_STATE])
        except (SafetensorError, DataError, KeyError) as e:
            raise CheckpointError(f"{path}: {e}.") from None
        return Checkpoint(int(head["step"]), weights, state, head["meta"], path, head["name"])


def _step(step: int) -> int:
    if isinstance(step, bool) or not isinstance(step, (int, np.integer)) or step < 0:
        raise CheckpointError(f"expected a step that is a whole number >= 0, got {step!r}")
    return int(step)


def _safe_name(name: str) -> str:
    """A model's name is a directory: no way out of it."""
    if not re.fullmatch(r"\w[\w.+-]*", name):
        raise CheckpointError(f"expected a model name of letters, digits, '_', '-', '+' and '.', got {name!r}")
    return name


def _checksum(data: bytes) -> dict[str, Any]:
    return {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}


def _own_checksum(head: Mapping[str, Any]) -> str:
    rest = {k: v for k, v in head.items() if k != "sha256"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()


def _link(source: Path, target: Path, data: bytes) -> None:
    """A hard link, or a copy where the file system has none."""
    try:
        os.link(source, target)
    except OSError as e:
        if e.errno in _FULL:
            raise
        _write_synced(target, data)


# --- the log ------------------------------------------------------------------------------------------------------------

logger = logging.getLogger("bray")

_LEVELS = {"DEBUG": 10, "INFO": 20, "WARN": 30, "WARNING": 30, "ERROR": 40}


class _LogFile(logging.FileHandler):
    def close(self) -> None:
        logger.removeHandler(self)
        super().close()


def log_to(path: str | Path, level: str = "INFO") -> logging.Handler:
    """Write the "bray" logger to a file (appending); `handler.close()` ends it."""
    if level.upper() not in _LEVELS:
        raise UnknownName("log level", level, _LEVELS)
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    handler = _LogFile(path, encoding="utf-8")
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)-7s %(message)s"))
    handler.setLevel(_LEVELS[level.upper()])
    logger.addHandler(handler)
    if logger.level == logging.NOTSET or logger.level > handler.level:
        logger.setLevel(handler.level)
    return handler


@contextlib.contextmanager
def logging_to(path: str | Path, level: str = "INFO") -> Iterator[logging.Handler]:
    """`log_to` for the length of a block."""
    handler = log_to(path, level)
    try:
        yield handler
    finally:
        handler.close()
