"""What an experiment reads of a run directory beside the checkpoint, as data; and what it writes beside the state."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from bray.config import ConfigSource, Resolved, parse_yaml
from bray.errors import BrayError, CheckpointError
from bray.named import in_script
from bray.rundir import RunDir
from bray.rundir.trust import Answer, check, named, named_by_launch
from bray.spec import EnvSpec
from bray.train.device import resolve_device
from bray.train.local import threads_for
from bray.train.setup import Check, set_up


def read_config(directory: RunDir) -> ConfigSource:
    """`config.yaml` of a run."""
    return parse_yaml(directory.read_text("config.yaml"), str(directory.path / "config.yaml"))


def with_choices(config: Resolved, spec: EnvSpec) -> Resolved:
    """A config as it is written down: what was chosen by rule is said in it, so that a resumed run computes as before
    on any machine."""
    if config["run"].threads is not None:
        return config
    run = replace(config["run"], threads=threads_for(spec, resolve_device(config["run"].device)))
    return Resolved({**config.sections, "run": run}, {**config.provenance, "run.threads": "chosen by rule"})


def changed_by(
    saved: ConfigSource, sources: Sequence[ConfigSource], env: Any, check: Check
) -> tuple[list[ConfigSource], Check]:
    """A saved config with what the caller changes, and the check that is left. What the caller names is the caller's
    own; what is saved is checked by itself, so that a change of an argument, as of `env_config`, makes no stranger of
    it."""
    given = [] if env is None else [ConfigSource("python", {"env": {"id": env}})]
    if given or sources:
        set_up(None, env, [saved], False, False, check)
        check = _nothing_left
    return [saved, *given, *sources], check


def _nothing_left(config: Mapping[str, Any]) -> None:
    pass


def import_check(directory: RunDir, trust: Answer, env: Any = None, plays: bool = True) -> Check:
    """A check that raises where a run's config names code that may not be imported. An `env` given as an object is the
    caller's own; with `plays=False` no environment is made, so its name is not checked."""
    own_env = env is not None and not isinstance(env, str)

    def is_imported(key: str) -> bool:
        return not (key == "env.id" and own_env) and (plays or not key.startswith("env."))

    def check_config(config: Mapping[str, Any]) -> None:
        check(directory.path, [item for item in named(config) if is_imported(item[0])], trust)

    return check_config


def named_in_script(config: Resolved) -> dict[str, str]:
    """{key: name} of what a config names in the script that trains, where no other program finds it."""
    return {key: name for key, name, _ in named(config.to_dict()) if in_script(name)}


def read_launch(directory: RunDir, trust: Answer) -> dict[str, Any] | None:
    """`launch.json` of a run whose network is made by the project's own code, if that may be imported; None where there
    is none."""
    if not (directory.path / "launch.json").exists():
        return None
    launch = directory.read_json("launch.json")
    check(directory.path, named_by_launch(launch), trust)
    return launch


@contextmanager
def made_from(path: Path | None) -> Iterator[None]:
    """Turn an error while building what a run's config describes (too large for this machine, say) into one message
    that names the run."""
    try:
        yield
    except (MemoryError, OverflowError, RuntimeError) as e:
        if path is None or isinstance(e, BrayError):
            raise
        raise CheckpointError(
            f"{path}: what its config.yaml describes cannot be made here ({type(e).__name__}: {str(e)[:200]}). "
            "`--debug` shows where"
        ) from e
