"""The user's own code by name."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Mapping
from typing import Any

from bray.errors import ConfigError, UnknownName


def in_script(name: str) -> bool:
    """Whether `module:Name` is of the script that runs, or ran, as the main program. Another program has another one of
    that name."""
    return name.partition(":")[0] == "__main__"


def script_hint(name: str) -> str:
    """The end of an error message where `module:Name` is looked for in another program than the script that defines it;
    else nothing."""
    if not in_script(name):
        return ""
    return (
        " It was defined in the script that trained with it, and no other program finds it there: load the run in "
        "that script with bray.Experiment.load, or put it in a module and train with "
        f"my_module:{name.partition(':')[2]}."
    )


def where_looked(module: str, error: BaseException) -> str:
    """The end of an error message where there is no such module; nothing where it is there and its import raised."""
    if not isinstance(error, ModuleNotFoundError) or not f"{module}.".startswith(f"{error.name}."):
        return ""
    installed = "in PYTHONPATH and among what is installed"
    if "" in sys.path or os.getcwd() in sys.path:
        return f". Modules are looked for in the current folder, {installed}"
    return f". Modules are looked for {installed}, not in the current folder"  # a script's folder, or a run directory


def load_named(name: str, kind: str, where: str, known: Mapping[str, Any]) -> Any:
    """What a known short name means, or `module:Name` of the user's own. `kind` and `where` (the config key) are for
    messages."""
    if name in known:
        return known[name]
    module_name, colon, attribute = name.partition(":")
    if not colon:
        raise UnknownName(kind, name, known, where)
    try:
        return getattr(importlib.import_module(module_name), attribute)
    except (ImportError, AttributeError) as e:
        raise ConfigError(
            f"{where}: cannot load {name!r}: {e}{where_looked(module_name, e)}.{script_hint(name)}"
        ) from e
