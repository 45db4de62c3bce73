"""A checked config, as objects, plain data, `config.yaml` and a table."""

from __future__ import annotations

import dataclasses
import enum
import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from bray.config.secrets import hide_section
from bray.config.sources import SCALARS, Key
from bray.errors import UnknownName


def to_plain(value: Any) -> Any:
    """Config values as JSON data: dataclasses as dicts, tuples as lists, classes and functions as `module:Name`."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: to_plain(getattr(value, f.name)) for f in dataclasses.fields(value) if f.init}
    if isinstance(value, Mapping):
        return {str(k): to_plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [to_plain(v) for v in value]
    if isinstance(value, enum.Enum):
        return to_plain(value.value)
    if isinstance(value, (np.ndarray, np.generic)):
        return value.tolist()
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if callable(value):
        return f"{getattr(value, '__module__', '?')}:{getattr(value, '__qualname__', type(value).__qualname__)}"
    return str(value)


def leaves(value: Any, path: Key) -> Iterator[tuple[Key, Any]]:
    """(key, value) of everything below a section that holds no further keys."""
    if isinstance(value, dict) and value:
        for key, inner in value.items():
            yield from leaves(inner, (*path, str(key)))
    elif len(path) > 1:
        yield path, value


@dataclass
class Resolved:
    """A checked config: `resolved["algo"].lr`, and where each value came from."""

    sections: dict[str, Any]
    provenance: dict[str, str]

    def __getitem__(self, section: str) -> Any:
        if section not in self.sections:
            raise UnknownName("config section", section, self.sections)
        return self.sections[section]

    def options(self, *sections: str) -> dict[str, Any]:
        """The values of these sections, by their names alone."""
        return {key: value for section in sections for key, value in vars(self[section]).items()}

    def to_plain(self) -> dict[str, Any]:
        """Plain data, nested by section, with secrets: to look at, not to write."""
        return {name: to_plain(value) for name, value in self.sections.items()}

    def to_dict(self) -> dict[str, Any]:
        """Plain data, nested by section, without secrets: `params.json`."""
        return {name: hide_section(type(self.sections[name]), values) for name, values in self.to_plain().items()}

    def _places(self) -> dict[str, str]:
        """Where each value came from. Of what was typed with a secret in it, the key alone is shown."""
        both = [list(leaves(values, ())) for values in (self.to_plain(), self.to_dict())]
        hidden = {".".join(key) for (key, value), (_, shown) in zip(*both, strict=True) if value != shown}
        typed = {self.provenance.get(key, "") for key in hidden}
        return {
            key: re.sub(r"^([^\s=]+).* on the ", r"\1 on the ", place, flags=re.DOTALL) if place in typed else place
            for key, place in self.provenance.items()
        }

    def rows(self) -> list[tuple[str, Any, str]]:
        """(key, value, where it came from) for every value; without secrets."""
        found = [pair for section, values in self.to_dict().items() for pair in leaves(values, (section,))]
        places = self._places()
        return [(".".join(k), v, places.get(".".join(k), "default")) for k, v in found]

    def to_yaml(self) -> str:
        """`config.yaml`: loads back to the same config, but for secrets; a comment after each value says where it came
        from."""
        lines = list(_yaml_lines(self.to_dict(), (), self._places()))
        width = min(60, max((len(text) for text, where in lines if where), default=0))
        return "".join(
            f"{text:<{width}}  # {' '.join(where.splitlines())}\n" if where else f"{text}\n" for text, where in lines
        )

    def table(self) -> Any:
        """A rich Table for `--print-config`; values that were set stand out from defaults."""
        from rich.table import Table
        from rich.text import Text

        table = Table(box=None, pad_edge=False, header_style="bold")
        for column in ("key", "value", "from"):
            table.add_column(column, overflow="fold")
        for key, value, where in self.rows():
            style = "dim" if where == "default" else "bold"
            table.add_row(Text(key), Text(yaml_flow(value), style=style), Text(where, style="dim"))
        return table


def _yaml_lines(values: dict[str, Any], path: Key, places: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    for name, value in values.items():
        here = (*path, name)
        key = f"{'  ' * len(path)}{_yaml_scalar(name)}:"
        if isinstance(value, dict) and (value or not path):
            yield key if value else f"{key} {{}}", ""
            yield from _yaml_lines(value, here, places)
        else:
            yield f"{key} {yaml_flow(value)}", places.get(".".join(here), "default")


def yaml_flow(value: Any) -> str:
    """A value on one line, as our loader reads it back."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_yaml_scalar(k)}: {yaml_flow(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(yaml_flow(v) for v in value) + "]"
    if isinstance(value, str):
        return _yaml_scalar(value)
    if isinstance(value, float) and not math.isfinite(value):
        return ".nan" if math.isnan(value) else ".inf" if value > 0 else "-.inf"
    return json.dumps(value)


_PLAIN_TEXT = re.compile(r"[A-Za-z_./][\w./+-]*(?::[A-Za-z_][\w.]*)?", re.ASCII)
_NOT_TEXT = re.compile("|".join(pattern for pattern, _ in SCALARS.values()))
_ESCAPED = re.compile("[\x7f-\x9f\u2028\u2029\ufeff\ufffe\uffff\ud800-\udfff]")
"""Line breaks of YAML that JSON leaves alone, and what a YAML reader refuses unescaped."""


def _yaml_scalar(text: str) -> str:
    if _PLAIN_TEXT.fullmatch(text) and not _NOT_TEXT.fullmatch(text):
        return text
    return _ESCAPED.sub(lambda m: f"\\u{ord(m[0]):04x}", json.dumps(text, ensure_ascii=False))
