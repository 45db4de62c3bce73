"""What a run directory may import. A directory from elsewhere is data: a module that it names is imported only where
the user allows it.

Code that this user's own runs named (when they were written), or that was allowed once, is remembered by a checksum of
the name and the arguments it is called with, in `$XDG_STATE_HOME/bray/trusted` (`~/.local/state/bray/trusted`), a line
each. What a name means is decided by the import path of the process, never by the directory.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from bray.errors import CheckpointError
from bray.rundir.log import logger

Asked = tuple[str, str, Any]
"""(the key that names it, its name, its arguments)"""
Answer = bool | Callable[[str], bool]
"""Whether to import what is not trusted yet, or who is asked that."""
_WRITES_FILES = ("RecordVideo",)  # a wrapper of Gymnasium, to a directory of its arguments


class UntrustedRun(CheckpointError):
    """A run directory that names code nobody has allowed."""


def named(config: Mapping[str, Any]) -> list[Asked]:
    """What a config, as plain data by section, asks to import beside the installed algorithms and environments."""
    return [(key, name, arguments) for key, name, arguments in _named(config) if isinstance(name, str)]


def _named(config: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    run, env, model = (config.get(k) or {} for k in ("run", "env", "model"))
    if _is_path(run.get("algorithm")):
        yield "run.algorithm", run["algorithm"], None
    for callback in run.get("callbacks") or ():
        name = callback.get("name") if isinstance(callback, Mapping) else callback
        if _is_path(name):
            yield "run.callbacks", name, callback
    name = env.get("id")
    if _is_path(name) or str(name).startswith("GymV"):  # adapters of old gym import what their arguments name
        yield "env.id", name, [env.get("env_config"), env.get("per_env")]
    for module in env.get("import_modules") or ():
        yield "env.import_modules", module, None
    for wrapper in env.get("wrappers") or ():
        name = wrapper.get("name") if isinstance(wrapper, Mapping) else wrapper
        if _is_path(name) or name in _WRITES_FILES:
            yield "env.wrappers", name, wrapper
    for key in ("custom_model", "custom_preprocessor"):
        if _is_path(model.get(key)):
            yield f"model.{key}", model[key], model.get("custom_options")
    for name in model.get("loss_terms") or ():
        if _is_path(name):
            yield "model.loss_terms", name, None


def _is_path(name: Any) -> bool:
    return isinstance(name, str) and ":" in name


def named_by_launch(launch: Mapping[str, Any]) -> list[Asked]:
    """What `launch.json` asks to import: the module of the model's network, which gets the whole launch file."""
    return [("launch.json", module_of(launch), launch)]


def module_of(launch: Mapping[str, Any]) -> str:
    """The module that makes the network of a launched run."""
    try:
        module = launch["config"][launch["model"]]["module"]
    except (KeyError, TypeError):
        module = None
    if not isinstance(module, str):
        raise CheckpointError("launch.json: expected the launch file of this run, with the module of its model")
    return module


def check(path: Path, asked: list[Asked], answer: Answer = False) -> None:
    """Raise UntrustedRun unless everything that is asked for is trusted; `answer` decides on what is not, and is
    remembered."""
    known = _remembered() if asked else set()
    new = [item for item in asked if _checksum(item) not in known]
    if not new:
        return
    what = ", ".join(dict.fromkeys(f"{name!r} ({key})" for key, name, _ in new))
    yes = answer(f"{path} asks to import and run {what}, on this machine, as you.") if callable(answer) else answer
    if not yes:
        raise UntrustedRun(
            f"{path} asks to import and run {what}. It was not made here by you, so nothing was imported: look at "
            "what it is, and allow it with --trust (in Python: trust=True)"
        )
    remember(new)


def remember(asked: list[Asked]) -> None:
    """Trust this from now on, also in later processes. Where that cannot be written down, it holds for this process."""
    known = _remembered() if asked else set()
    new = {_checksum(item): item for item in asked if _checksum(item) not in known}
    if not new:
        return
    _HERE.update(new)
    try:
        file = _file()
        file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        lines = "".join(f"{digest} {json.dumps([key, name])}\n" for digest, (key, name, _) in new.items())
        with open(file, "a", opener=lambda p, flags: os.open(p, flags | os.O_NOFOLLOW, 0o600)) as f:
            f.write(lines)
    except (OSError, RuntimeError) as e:  # RuntimeError: a user without a home
        logger.debug("what is trusted could not be written down: %s", e)


_HERE: set[str] = set()  # trusted in this process


def _file() -> Path:
    base = os.environ.get("XDG_STATE_HOME", "")
    return (Path(base) if os.path.isabs(base) else Path.home() / ".local" / "state") / "bray" / "trusted"


def _remembered() -> set[str]:
    try:
        with open(_file(), "rb") as f:
            about = os.fstat(f.fileno())
            if about.st_uid != os.getuid() or about.st_mode & stat.S_IWOTH:
                return _HERE  # somebody else may have written it
            return _HERE | {line[:64].decode("ascii", "replace") for line in f}
    except (OSError, RuntimeError):
        return _HERE


def _checksum(item: Asked) -> str:
    return hashlib.sha256(json.dumps(item, sort_keys=True, default=str).encode()).hexdigest()
