"""Options: declared once as a dataclass, given in many places, checked, and traced to where each value came from.

A run's config has sections (`run`, `env`, `model`, `algo`), each a small dataclass that lives beside what it
configures, with a docstring under each field. Values come from **sources** (defaults, a preset, a YAML file, `--config`
JSON, flags, `key=value`, Python); `resolve` merges them in order, checks every value against the dataclass and
remembers where it came from:

    resolved = resolve({"algo": ppo.Config, "run": RunConfig}, [load_yaml("run.yaml"), parse_assignments(["lr=1e-3"])])
    resolved["algo"].lr               # 0.001
    resolved.provenance["algo.lr"]    # "lr=1e-3 on the command line"

A bare key (`lr`) goes to the one section that has such a field; `algo.lr` always works. Dict fields (`env_config`) take
any inner keys and are merged deeply; every other field is replaced as a whole. All mistakes are reported together, each
with its place.

declare.py   what a dataclass declares       check.py     one value against its option
sources.py   files, JSON and key=value       runfile.py   a run as a file, and presets
merge.py     sources -> Resolved             resolved.py  the result, and config.yaml
schema.py    tables and JSON Schema
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bray.config.declare import Flag, Option, options
    from bray.config.merge import resolve
    from bray.config.resolved import Resolved, to_plain
    from bray.config.sources import (
        ConfigSource,
        load_config,
        load_yaml,
        parse_assignments,
        parse_json,
        parse_yaml,
        read_yaml,
    )

__all__ = [
    "ConfigSource",
    "Flag",
    "Option",
    "Resolved",
    "load_config",
    "load_yaml",
    "options",
    "parse_assignments",
    "parse_json",
    "parse_yaml",
    "read_yaml",
    "resolve",
    "to_plain",
]

_HOMES = {
    **dict.fromkeys(("Flag", "Option", "options"), "declare"),
    **dict.fromkeys(("Resolved", "to_plain"), "resolved"),
    "resolve": "merge",
}


def __getattr__(name: str) -> Any:
    """Imported when it is used: a command line that only declares its flags needs neither pydantic nor numpy."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES.get(name, 'sources')}"), name)
