"""`bray schema`: every key that can be set, as tables or as JSON Schema."""

from __future__ import annotations

import json
from typing import Any

from rich.text import Text

from bray.cli.flags import load
from bray.cli.options import Schema
from bray.cli.show import key_table, put, say
from bray.config.declare import about
from bray.config.schema import json_schema
from bray.errors import UnknownName
from bray.launch.schema import schema as launch_schema
from bray.launch.settings import KINDS, LaunchSettings

SECTIONS: dict[str, Any] = {
    "run": "bray.train.config:RunConfig",
    "env": "bray.envs.config:EnvConfig",
    "model": "bray.nn.catalog:ModelConfig",
    "live": "bray.train.config:LiveConfig",
    "data": "bray.train.config:DataConfig",
    "serve.service": "bray.serving.config:ServiceConfig",
    "serve.model": "bray.serving.config:ServedModelConfig",
    "launch.top": LaunchSettings,
    **{f"launch.{kind}": cls for kind, cls in KINDS.items()},
}
"""Everything but the algorithms: sections of a run, of `bray serve`, and kinds of components in launch files."""


def schema(options: Schema) -> int:
    """Print what `options.name` names; without a name, the JSON Schema of launch files."""
    if options.name is None:
        print(json.dumps(launch_schema(), indent=2, ensure_ascii=False))
        return 0
    found = find_sections(options.name)
    if options.json:
        made: Any = {name: json_schema(cls) for name, cls in found.items()}
        print(json.dumps(made if len(made) > 1 else made.popitem()[1], indent=2, ensure_ascii=False))
        return 0
    for name, cls in found.items():
        say(Text.assemble((name, "bold"), ": ", about(cls).removeprefix(f"{name}: ")))
        put(key_table(cls))
        say("")
    return 0


def find_sections(name: str) -> dict[str, Any]:
    """name -> dataclass: `run`, `PPO`, `launch.buffer`; a part of a name finds all that have it (`serve`, `buffer`,
    `model`)."""
    found = {known: path for known, path in SECTIONS.items() if name == known or name in known.split(".")}
    if found:
        return {known: load(path) if isinstance(path, str) else path for known, path in found.items()}
    from bray.algos import ALGORITHMS, algo_name, get_algo

    if ":" not in name and algo_name(name) not in ALGORITHMS:
        parts = [part for known in SECTIONS for part in known.split(".")]
        raise UnknownName("name", name, [*parts, *ALGORITHMS])
    return {algo_name(name): get_algo(name).Config}
