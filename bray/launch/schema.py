"""The JSON Schema of launch files: what an editor needs to complete keys, show their texts and mark mistakes."""

from __future__ import annotations

import dataclasses
import typing
from typing import Any

from pydantic import TypeAdapter

from bray.config import field_docs, to_plain
from bray.launch.settings import KINDS, ActorSettings, LaunchSettings


def schema() -> dict[str, Any]:
    """JSON Schema (draft 2020-12) of a launch file."""
    kind = {"enum": list(KINDS), "description": "What the component is."}
    top = _object(LaunchSettings)
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "Bray launch file",
        "description": "A run as a graph of named components: `bray launch --config FILE`.",
        **top,
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
    out = _object(cls)
    out["properties"] = {"kind": {"const": kind}, **out["properties"]}
    if cls is ActorSettings:  # keys of the user's own where the Actor is the user's own
        del out["additionalProperties"]
        closed = {"properties": dict.fromkeys(out["properties"], True), "additionalProperties": False}
        return {**out, "if": {"properties": {"module": {"type": "string"}}, "required": ["module"]}, "else": closed}
    if cls.FREE:
        out["additionalProperties"] = True
    return out


def _object(cls: Any) -> dict[str, Any]:
    """A dataclass of the settings: null stands for a default everywhere."""
    hints, docs = typing.get_type_hints(cls, include_extras=True), field_docs(cls)
    properties: dict[str, Any] = {}
    required = []
    for f in dataclasses.fields(cls):
        key = "class" if f.name == "class_" else f.name
        value = _value(hints[f.name])
        if f.default is dataclasses.MISSING:
            required.append(key)
        else:
            value = {**_or_null(value), "default": to_plain(f.default)}
        properties[key] = {"description": " ".join(docs[f.name].split()), **value}
    return {
        "type": "object",
        "description": " ".join((cls.__doc__ or "").split()),
        "properties": properties,
        "required": required,
        "additionalProperties": False,
    }


def _value(hint: Any) -> dict[str, Any]:
    nested = [a for a in (hint, *typing.get_args(hint)) if isinstance(a, type) and dataclasses.is_dataclass(a)]
    return _object(nested[0]) if nested else TypeAdapter(hint).json_schema()


def _or_null(value: dict[str, Any]) -> dict[str, Any]:
    options = value.get("anyOf", [value])
    return value if {"type": "null"} in options else {"anyOf": [*options, {"type": "null"}]}
