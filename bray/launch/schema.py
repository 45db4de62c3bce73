"""The JSON Schema of launch files: what an editor needs to complete keys, show their texts and mark mistakes."""

from __future__ import annotations

from typing import Any

from bray.config.schema import json_schema
from bray.launch.settings import KINDS, ActorSettings, LaunchSettings


def schema() -> dict[str, Any]:
    """JSON Schema (draft 2020-12) of a launch file."""
    kind = {"enum": list(KINDS), "description": "What the component is."}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "Bray launch file",
        **json_schema(LaunchSettings, null_is_default=True),
        "description": "A run as a graph of named components: `bray launch --config FILE`.",
        "additionalProperties": {
            "type": "object",
            "description": "A component: its kind, and the keys of that kind.",
            "properties": {"kind": kind},
            "required": ["kind"],
            "allOf": [
                {"if": {"properties": {"kind": {"const": k}}, "required": ["kind"]}, "then": {"$ref": f"#/$defs/{k}"}}
                for k in KINDS
            ],
        },
        "$defs": {k: _component(k, cls) for k, cls in KINDS.items()},
    }


def _component(kind: str, cls: Any) -> dict[str, Any]:
    out = json_schema(cls, null_is_default=True)
    out["properties"] = {"kind": {"const": kind}, **out["properties"]}
    if cls is ActorSettings:  # keys of the user's own where the Actor is the user's own
        del out["additionalProperties"]
        closed = {"properties": dict.fromkeys(out["properties"], True), "additionalProperties": False}
        return {**out, "if": {"properties": {"module": {"type": "string"}}, "required": ["module"]}, "else": closed}
    out["additionalProperties"] = cls.FREE
    return out
