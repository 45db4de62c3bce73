"""One run's directory: made or opened, written by one process at a time."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import stat
from collections.abc import Mapping
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

import msgspec

from bray.errors import CheckpointError, UnknownName
from bray.rundir.checkpoints import META, Checkpoint, Checkpoints, safe_name, several
from bray.rundir.files import to_json, write_atomic, writing
from bray.rundir.log import logger
from bray.rundir.reader import read_dict, read_text
from bray.rundir.trust import named, named_by_launch, remember

TRAINER_JSON = "trainer.json"
"""Which trainer of a launched run has its checkpoints here."""
_SIGNS = ("config.yaml", "result.jsonl", "params.json", "checkpoints", "models")  # any of these makes a directory a run
_FOLDERS = ("figures", "videos", "trajectories", "episodes", "replay")
_OF_POLICY = ("spec.json", "policy.json")
_locks: dict[Path, int] = {}  # directories this process writes to


def default_run_dir(env: str, algo: str, now: datetime | None = None, root: str | Path = "runs") -> Path:
    """`runs/<env>/<algo>-<time>`, with '/' in names as '-'."""
    env, algo = (re.sub(r"[^\w.+=-]+", "-", name).strip("-.") or "run" for name in (env, algo))
    return new_run_dir(Path(root) / env, algo, now)


def new_run_dir(folder: Path, algo: str, now: datetime | None = None) -> Path:
    """`<folder>/<algo>-<time>`; a second run in the same second gets '-2'."""
    path = folder / f"{algo}-{(now or datetime.now()):%Y%m%d-%H%M%S}"
    out, n = path, 1
    while out.exists():
        n += 1
        out = path.with_name(f"{path.name}-{n}")
    return out


class _Policy(msgspec.Struct):
    """What is read of `policy.json`."""

    model: str = "default"
    rule: str | None = None
    settings: dict[str, float] = {}
    epsilon: float = 0.0
    recurrent: bool = False
    algorithm: str | None = None


class RunDir(Checkpoints):
    """One run's directory. `create` one to write, `open` one to read."""

    def __init__(self, path: str | Path):
        super().__init__(path)
        self.result_jsonl, self.progress_csv = self.path / "result.jsonl", self.path / "progress.csv"
        self.tensorboard, self.log = self.path / "tb", self.path / "bray.log"

    @classmethod
    def create(cls, path: str | Path, resume: bool = False) -> RunDir:
        """A new run directory, to write into; `resume` takes one that is there and removes what a kill left half done.
        A run is never written over another one, and never by two processes at once."""
        path = Path(path)
        if resume:
            run = cls.open(path)
            run.refuse_links()
            run.lock()
            run.recover()
            return run
        run, found = cls(path), cls.signs_of_free(path)
        with writing(path, "nothing was changed"):
            run.checkpoints.mkdir(parents=True, exist_ok=True)
        run.lock()
        if found:
            run.refuse_links()
            run.recover()
        return run

    @classmethod
    def signs_of_free(cls, path: Path) -> list[str]:
        """Refuse a path where no new run can begin; what a run that ended before its first checkpoint left there."""
        if path.exists() and not path.is_dir():
            raise CheckpointError(f"{path} is a file: expected the name of a new directory")
        found = _signs(path)
        if found and not cls(path).is_blank():
            raise CheckpointError(
                f"{path} already holds a run ({', '.join(found)}). Go on with it by --resume {path}, or choose "
                f"another --trial (in Python: Experiment.resume({str(path)!r}), or another path=)."
            )
        return found

    def is_blank(self) -> bool:
        """Whether a run ended before its first checkpoint, so that nothing is lost where another one begins here."""
        rows, others = self.result_jsonl, ("params.json", TRAINER_JSON)  # of other kinds of runs
        if (
            (self.path / ".lock").resolve() in _locks
            or not self.checkpoints.is_dir()
            or any((self.path / name).exists() for name in others)
        ):
            return False
        return not (self.steps() or any(self.models.glob("*/*")) or (rows.exists() and rows.stat().st_size))

    @classmethod
    def open(cls, path: str | Path) -> RunDir:
        """An existing run directory, to read; nothing in it is changed, so a run may be read while it is trained.
        `RUN_DIR/models/NAME` is one of its policies, where it has several."""
        path = Path(path)
        if path.exists() and not path.is_dir():
            raise CheckpointError(f"{path} is a file: expected a run directory, or one of its checkpoints/STEP")
        if not path.is_dir():
            raise CheckpointError(f"{path}: there is no such run directory")
        if Path(os.path.abspath(path)).parent.name == "models" and (path / "config.yaml").exists():
            return PolicyDir(path)
        if not _signs(path):
            inside = [p.name for p in sorted(path.iterdir()) if p.is_dir() and _signs(p)]
            hint = f" There are runs in it: {', '.join(inside[:6])}." if inside else ""
            run = Path(os.path.normpath(path / "../.."))  # without following `latest`
            if (path / META).exists() and (run / "checkpoints" / path.name).exists():
                hint = f" It is a checkpoint of the run {run}: give that, and --checkpoint {path.name}."
            raise CheckpointError(f"{path} is not a run directory: expected config.yaml or checkpoints/ in it.{hint}")
        return cls(path)

    def refuse_links(self) -> None:
        """Raise for a directory with a link or a pipe among what is written: the next row would land elsewhere, or
        nowhere."""
        for folder in (self.path, self.checkpoints, self.models):
            for path in folder.glob("*"):
                kind, ours = path.lstat().st_mode, path.name in ("latest", "best") or path.name.startswith(".new-")
                if not ours and not (stat.S_ISREG(kind) or stat.S_ISDIR(kind)):
                    raise CheckpointError(
                        f"{path} is a link, a pipe or a device: a run is written to plain files inside of its "
                        "directory only, put one there"
                    )

    def lock(self, doing: str = "training", other: str = "--trial (in Python: another path=)") -> None:
        """One process writes. The lock goes with the process, however it ends. `other`: how to name another place."""
        path = (self.path / ".lock").resolve()
        if path in _locks:
            return
        with writing(path, "nothing was changed"):
            fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as e:
            os.close(fd)
            if e.errno in (errno.EACCES, errno.EAGAIN):
                raise CheckpointError(
                    f"{self.path}: another process is {doing} here. Wait for it, or choose another {other}."
                ) from None
            logger.warning("%s: this file system has no locks; take care that one process trains here", self.path)
            return
        _locks[path] = fd

    def close(self) -> None:
        """Let another process write to the directory."""
        fd = _locks.pop((self.path / ".lock").resolve(), None)
        if fd is not None:
            os.close(fd)

    def __repr__(self) -> str:
        return f"RunDir({str(self.path)!r})"

    def folder(self, name: str) -> Path:
        """`figures`, `videos`, `trajectories`, `episodes` or `replay`, made when first asked for."""
        if name not in _FOLDERS:
            raise UnknownName("folder of a run directory", name, _FOLDERS)
        out = self.path / name
        if out.is_symlink():
            raise CheckpointError(f"{out} is a link: {name} are written inside of the run directory only")
        with writing(out, "the rest of the run is kept"):
            out.mkdir(parents=True, exist_ok=True)
        return out

    # --- what was run

    def write_config(self, config: Any) -> None:
        """`config.yaml` and `params.json` of a `config.Resolved`, without secrets. What they ask for is the user's
        own, and trusted from now on."""
        write_atomic(self.path / "config.yaml", config.to_yaml())
        self.write_json("params.json", config.to_dict())
        remember(named(config.to_dict(), self.path))

    def write_launch(self, model: str, config: Mapping[str, Any]) -> None:
        """`launch.json`: the launch file whose project makes the network of a model, without secrets. It is trusted
        from now on."""
        launch = {"model": model, "config": dict(config)}
        self.write_json("launch.json", launch)
        remember(named_by_launch(self.read_json("launch.json")))

    def write_json(self, name: str, value: Any) -> None:
        """A JSON file in the run directory, sorted and indented: `spec.json`, `policy.json`, ..."""
        write_atomic(self.path / name, to_json(value))

    def write_spec(self, spec: Any) -> None:
        """`spec.json` of a `spec.EnvSpec`."""
        self.write_json("spec.json", spec.to_json())

    def write_policy(self, policy: Mapping[str, Any]) -> None:
        """`policy.json`: what turns model outputs into actions when served."""
        self.write_json("policy.json", policy)

    def read_json(self, name: str) -> dict[str, Any]:
        """A JSON object of the run directory."""
        if name in _OF_POLICY and not (self.path / name).exists():
            self.refuse_several()
        return read_dict(name, self.path)

    def read_text(self, name: str) -> str:
        """A text file of the run directory."""
        return read_text(name, self.path)

    def read_policy(self) -> dict[str, Any]:
        """`policy.json`, with the types that it was written with."""
        about = self.read_json("policy.json")
        try:
            safe_name(msgspec.convert(about, _Policy).model)
        except (msgspec.ValidationError, CheckpointError) as e:
            raise CheckpointError(f"{self.path / 'policy.json'}: {e}") from None
        return about

    def policies(self) -> list[str]:
        """The names of the policies of a run with several; of others none."""
        return sorted(path.parent.name for path in self.models.glob("*/config.yaml"))

    @property
    def whole(self) -> Path:
        """The directory of the run, of which this may be one policy."""
        return self.path

    def policy_folder(self, name: str) -> PolicyDir:
        """The directory of one of several policies."""
        return PolicyDir(self.model_folder(name))

    def refuse_several(self) -> None:
        """Raise where one policy is wanted and the run has several."""
        if policies := self.policies():
            raise several(self.path, policies)

    def model_name(self) -> str:
        """The name under which the run keeps the weights that are served: `default`, or a launched model's."""
        return self.read_policy().get("model", "default") if (self.path / "policy.json").exists() else "default"

    def refuse_old_launch(self) -> None:
        """Raise for a run that `bray launch` made before it left what others need."""
        if not (self.path / "spec.json").exists() and (self.path / "master.state").exists():
            raise CheckpointError(
                f"{self.path} was made by `bray launch` of an older Bray, which did not write down what its games "
                "look like. Start a trial with its weights, by `bray launch` with its file and `checkpoint: "
                f"{self.path}/models/NAME/STEP.safetensors` of the model; what that makes can be served, evaluated "
                "and exported"
            )


class PolicyDir(RunDir):
    """One of the policies of a run with several, to read: like the directory of a run that has this one alone. Its
    checkpoints are those of the run; here they are called by the version of this policy.

    models/NAME/{config.yaml, spec.json, policy.json, graph.onnx, STEP.safetensors}
    """

    def __init__(self, path: str | Path):
        super().__init__(path)
        self.name = safe_name(Path(os.path.abspath(path)).name)
        self._run = RunDir(Path(os.path.normpath(self.path / "../..")))
        self.models, self.checkpoints = self.path.parent, self._run.checkpoints

    def policies(self) -> list[str]:
        return []

    @property
    def whole(self) -> Path:
        return self._run.path

    def model_name(self) -> str:
        return self.name

    def read_policy(self) -> dict[str, Any]:
        return super().read_policy() | {"model": self.name}

    def _by_version(self) -> dict[int, int]:
        """The newest checkpoint with each version of the policy."""
        found = {}
        for step in self._run.steps():
            with contextlib.suppress(CheckpointError):
                found[self._version(step)] = step
        return found

    def _version(self, step: int) -> int:
        versions = self._run.versions_of(step)
        if self.name not in versions:
            raise UnknownName("policy", self.name, versions, f"checkpoint {step} of {self._run.path}")
        return versions[self.name]

    def steps(self) -> list[int]:
        return sorted(self._by_version())

    def load_checkpoint(self, which: str | int = "latest") -> Checkpoint:
        if str(which).isdecimal():
            known = self._by_version()
            if int(which) not in known:
                raise UnknownName("checkpoint", str(which), [str(step) for step in known], str(self.path))
            which = known[int(which)]
        found = self._run.load_checkpoint(which)
        arrays = found.state["arrays"]
        arrays["observations"] = arrays.get("observations", {}).get(self.name, {})
        return replace(found, step=self._version(found.step), name=self.name)

    def pointer(self, which: str) -> int | None:
        step = self._run.pointer(which)
        return None if step is None else self._version(step)


def _signs(path: Path) -> list[str]:
    """What shows that a directory is a run."""
    return [name for name in _SIGNS if (path / name).exists()]
