"""What can be set, told from the declarations: tables for people, JSON Schema for editors."""

from __future__ import annotations

import json
from typing import Any, NamedTuple

from pydantic import PydanticUserError, TypeAdapter

from bray.config.declare import Option, about, describe, options
from bray.config.resolved import to_plain


class Row(NamedTuple):
    """One key."""

    key: str
    type: str
    """In words: "a number > 0"."""
    default: str
    """As JSON, or "required"."""
    doc: str


def rows(cls: type, prefix: str = "") -> list[Row]:
    """Every key of a dataclass; nested keys are dotted and follow the key that holds them."""
    out = []
    for option in options(cls).values():
        key = prefix + option.key
        out.append(Row(key, describe(option.hint), _default(option), option.doc))
        if option.nested:
            out += rows(option.nested, f"{key}.")
    return out


def _default(option: Option) -> str:
    if option.required:
        return "required"
    if option.nested and option.default is not None:
        return "{}"  # its keys follow, each with its own default
    return json.dumps(to_plain(option.default), ensure_ascii=False)


def markdown(cls: type) -> str:
    """The table of a dataclass for the docs."""
    lines = ["| key | type | default | what it does |", "|---|---|---|---|"]
    for row in rows(cls):
        default = row.default if row.default == "required" else f"`{row.default}`"
        cells = [f"`{row.key}`", row.type, default, row.doc]
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines)


def json_schema(cls: type, null_is_default: bool = False) -> dict[str, Any]:
    """JSON Schema (draft 2020-12) of a dataclass. `null_is_default`: null may stand for every default."""
    properties: dict[str, Any] = {}
    for option in options(cls).values():
        value = _value(option, null_is_default)
        if not option.required:
            value |= {"default": to_plain(option.default)}
        properties[option.key] = {"description": option.doc, **value}
    return {
        "type": "object",
        "description": about(cls),
        "properties": properties,
        "required": [option.key for option in options(cls).values() if option.required],
        "additionalProperties": False,
    }


def _value(option: Option, null_is_default: bool) -> dict[str, Any]:
    if option.nested:
        value = json_schema(option.nested, null_is_default)
    else:
        try:
            value = TypeAdapter(option.hint).json_schema()
        except PydanticUserError:  # an object of Python: JSON has nothing like it
            value = {}
    takes_null = not option.required and (null_is_default or option.default is None)
    if not takes_null or not value or {"type": "null"} in value.get("anyOf", ()):
        return value
    return {"anyOf": [*value.get("anyOf", [value]), {"type": "null"}]}
