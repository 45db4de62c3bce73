"""Where values come from: YAML, JSON and Python files, `--config` JSON, and `key=value` on the command line."""

from __future__ import annotations

import json
import re
import runpy
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from bray.config.declare import show
from bray.errors import ConfigError

Key = tuple[str, ...]

_MAX_NODES = 100_000  # a YAML file whose aliases unfold to more than this is an attack, not a config
_MAX_DEPTH = 64


@dataclass
class ConfigSource:
    """Values from one place. `values` is nested by section and/or holds bare keys; `lines` and `texts` locate single
    keys."""

    name: str
    """"default", "preset cartpole_ppo", "--config", "command line", "python" or a file's path."""
    values: dict[str, Any]
    lines: dict[Key, int] | None = None
    """Line numbers of keys, for files."""
    texts: dict[Key, str] | None = None
    """`key=value` or `--flag value` as typed, for the command line."""

    def where(self, key: Key) -> str:
        """The place of a key (or of the nearest key around it) for messages and provenance."""
        for end in range(len(key), 0, -1):
            if self.texts and key[:end] in self.texts:
                return f"{self.texts[key[:end]]} on the {self.name}"
            if self.lines and key[:end] in self.lines:
                return f"{self.name}:{self.lines[key[:end]]}"
        return self.name


class Dotted(dict):
    """A dict that `a.b=1` made: it changes one entry of a field, where a written-out dict may replace the field."""


def nest(path: Sequence[str], value: Any) -> Any:
    """`value` inside a Dotted for each part of the path."""
    for part in reversed(path):
        value = Dotted({part: value})
    return value


# --- YAML -------------------------------------------------------------------------------------------------------------

_TAG = "tag:yaml.org,2002:"
SCALARS = {  # YAML 1.2's rules: PyYAML's own read 1e-3 as text, 010 as 8, 1:30 as 90 and 2024-01-01 as a date
    "bool": (r"true|True|TRUE|false|False|FALSE", "tTfF"),
    "int": (r"[-+]?[0-9][0-9_]*|0x[0-9a-fA-F_]+|0o[0-7_]+|0b[01_]+", "-+0123456789"),
    "float": (
        r"[-+]?(?:[0-9][0-9_]*(?:\.[0-9_]*)?|\.[0-9][0-9_]*)(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)",
        "-+0123456789.",
    ),
    "null": (r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    "merge": (r"<<", "<"),
}
"""What text without quotes is: a pattern, and the characters it can begin with."""
_SAFE_TAGS = {_TAG + t for t in ("map", "seq", "str", *SCALARS)}


class _Loader(yaml.SafeLoader):
    """A safe loader with the scalar rules above."""


def _yaml_float(text: str) -> float:
    return float(text.replace("_", "").lower().replace(".inf", "inf").replace(".nan", "nan"))


def _yaml_int(text: str) -> int:
    text = text.replace("_", "")
    return int(text, 0 if text[:2] in ("0x", "0o", "0b") else 10)


_Loader.yaml_implicit_resolvers = {}
for _name, (_pattern, _first) in SCALARS.items():
    _Loader.add_implicit_resolver(_TAG + _name, re.compile(f"^(?:{_pattern})$"), list(_first))
_Loader.add_constructor(_TAG + "float", lambda loader, node: _yaml_float(loader.construct_scalar(node)))
_Loader.add_constructor(_TAG + "int", lambda loader, node: _yaml_int(loader.construct_scalar(node)))


class _YamlReader:
    """YAML nodes as plain data; notes the line of each key. Tags that would make objects are refused."""

    def __init__(self, name: str, loader: _Loader):
        self.name, self.loader = name, loader
        self.lines: dict[Key, int] = {}
        self.count = 0

    def build(self, node: yaml.Node, path: Key = ()) -> Any:
        self.count += 1
        if self.count > _MAX_NODES or len(path) > _MAX_DEPTH:
            raise self.error(
                node, f"a config may hold {_MAX_NODES} values nested {_MAX_DEPTH} deep, this one holds more"
            )
        if node.tag not in _SAFE_TAGS:
            raise self.error(node, f"expected plain data (numbers, text, lists, mappings), got the tag {node.tag!r}")
        if isinstance(node, yaml.MappingNode):
            return self.mapping(node, path)
        if isinstance(node, yaml.SequenceNode):
            self.lines.update({(*path, str(i)): v.start_mark.line + 1 for i, v in enumerate(node.value)})
            return [self.build(v, (*path, str(i))) for i, v in enumerate(node.value)]
        return self.loader.construct_object(node, deep=True)

    def mapping(self, node: yaml.MappingNode, path: Key) -> dict[str, Any]:
        out: dict[str, Any] = {}
        merged: dict[str, Any] = {}
        own: dict[Key, int] = {}  # noted last, so that a key that overrides a merged one keeps its own line
        for key_node, value_node in node.value:
            if not isinstance(key_node, yaml.ScalarNode):
                raise self.error(key_node, "expected a key that is text, got a list or a mapping")
            if key_node.tag == _TAG + "merge":
                parts = value_node.value if isinstance(value_node, yaml.SequenceNode) else [value_node]
                if not all(isinstance(p, yaml.MappingNode) for p in parts):
                    raise self.error(key_node, "expected a mapping (or a list of them) after '<<'")
                for part in parts:  # of several, the first that has a key wins
                    merged = self.build(part, path) | merged
                continue
            key = key_node.value
            if key in out:
                raise self.error(key_node, f"the key {key!r} is given twice")
            out[key] = self.build(value_node, (*path, key))
            own[(*path, key)] = key_node.start_mark.line + 1
        self.lines.update(own)
        return merged | out

    def error(self, node: yaml.Node, message: str) -> ConfigError:
        return ConfigError(f"{self.name}:{node.start_mark.line + 1}: {message}")


def read_yaml(text: str, name: str) -> tuple[Any, dict[Key, int]]:
    """YAML text as plain data, and the line of each key."""
    loader = None
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        reader = _YamlReader(name, loader)
        return (None if node is None else reader.build(node)), reader.lines
    except yaml.MarkedYAMLError as e:
        mark = e.problem_mark or e.context_mark
        line = f":{mark.line + 1}" if mark else ""
        said = ", ".join(part for part in (e.context, e.problem) if part)
        raise ConfigError(f"{name}{line}: not YAML: {said}") from None
    except RecursionError:
        raise ConfigError(f"{name}: not YAML a config can hold: nested without end") from None
    except (yaml.YAMLError, ValueError) as e:
        raise ConfigError(f"{name}: not YAML: {e}") from None
    finally:
        if loader is not None:
            loader.dispose()


# --- sources ----------------------------------------------------------------------------------------------------------


def load_yaml(path: str | Path) -> ConfigSource:
    """A YAML file; keys remember their lines."""
    return parse_yaml(_read_text(path), str(path))


def parse_yaml(text: str, name: str) -> ConfigSource:
    """The text of a YAML file; keys remember their lines."""
    values, lines = read_yaml(text, name)
    return ConfigSource(name, _mapping(values, name), lines)


def parse_json(text: str, name: str = "--config") -> ConfigSource:
    """`--config '{"lr": 1e-3}'`."""

    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        seen: dict[str, Any] = {}
        for key, value in items:
            if key in seen:
                raise ConfigError(f"{name}: the key {key!r} is given twice")
            seen[key] = value
        return seen

    def constant(word: str) -> Any:
        raise ConfigError(f"{name}: expected JSON, which has no {word}")

    try:
        values = json.loads(text, object_pairs_hook=pairs, parse_constant=constant)
    except json.JSONDecodeError as e:
        pair = re.fullmatch(r"([\w/]+)=([\d.e+-]+)", text.strip())
        example = f'{{"{pair[1]}": {pair[2]}}}' if pair else '{"KEY": VALUE}'
        raise ConfigError(
            f"{name}: not JSON: {e.msg} at line {e.lineno}, column {e.colno}: {text[:60]!r}. Write it as {name} "
            f"'{example}'"
        ) from None
    except RecursionError:
        raise ConfigError(f"{name}: not JSON a config can hold: nested too deep") from None
    return ConfigSource(name, _mapping(values, name))


def parse_assignments(items: Sequence[str], name: str = "command line") -> ConfigSource:
    """`lr=1e-3 model.fcnet_hiddens=[64,64] env.env_config.level=3`: dotted keys, values written as in YAML."""
    values: dict[str, Any] = {}
    texts: dict[Key, str] = {}
    for item in items:
        dotted, equals, text = item.partition("=")
        path = tuple(dotted.strip().split("."))
        if not equals or not all(path):
            raise ConfigError(f"expected key=value on the {name}, got {item!r}")
        try:
            value, _ = read_yaml(text, f"{item} on the {name}")
        except ConfigError:
            if text.lstrip()[:1] in tuple("[{'\""):
                raise
            value = text  # text that YAML would read as a sign of its own: *, &, %, @, "a: b: c"
        node = values
        for part in path[:-1]:
            inner = node.setdefault(part, Dotted())
            if not isinstance(inner, dict):
                raise ConfigError(f"{item} on the {name}: {part!r} was set to {show(inner)} before, it has no keys")
            node = inner
        node[path[-1]] = value
        texts[path] = item
    return ConfigSource(name, values, texts=texts)


def load_config(path: str | Path) -> ConfigSource:
    """A config file by its suffix: .yaml/.yml, .json, or .py with a dict named `config` (or `main_config`), which is
    run."""
    suffix = Path(path).suffix.lower()
    if suffix in (".yaml", ".yml"):
        return load_yaml(path)
    if suffix == ".json":
        return parse_json(_read_text(path), str(path))
    if suffix == ".py":
        _read_text(path)  # the same message for a missing file
        names = runpy.run_path(str(path))
        for name in ("config", "main_config"):
            if isinstance(names.get(name), dict):
                return ConfigSource(str(path), names[name])
        raise ConfigError(f"{path}: expected a dict named 'config' in it, there is none")
    raise ConfigError(f"{path}: expected a .yaml, .json or .py file")


def _mapping(values: Any, name: str) -> dict[str, Any]:
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise ConfigError(f"{name}: expected keys and values, got {show(values)}")
    return values


def _read_text(path: str | Path) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(f"{path}: there is no such file") from None
    except (OSError, UnicodeDecodeError) as e:
        raise ConfigError(f"{path}: cannot be read ({e})") from None
