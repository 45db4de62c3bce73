"""The user's own code by name."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

from bray.errors import ConfigError, UnknownName


def load_named(name: str, kind: str, where: str, known: Mapping[str, Any]) -> Any:
    """What a known short name means, or `module:Name` of the user's own. `kind` and `where` (the config key) are for messages."""
    if name in known:
        return known[name]
    module_name, colon, attribute = name.partition(":")
    if not colon:
        raise UnknownName(kind, name, known, where)
    try:
        return getattr(importlib.import_module(module_name), attribute)
    except (ImportError, AttributeError) as e:
        raise ConfigError(f"{where}: cannot load {name!r}: {e}") from e
