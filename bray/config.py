"""Typed configs that say where each value came from.

A run's config has sections (`run`, `env`, `model`, `algo`), each a small dataclass that lives beside what it configures.
Values arrive in **sources** (defaults, a preset, a YAML file, `--config` JSON, `key=value`, Python); `resolve` merges them in
order, checks every value against the dataclass and remembers where it came from:

    resolved = resolve({"algo": ppo.Config, "run": RunConfig}, [load_yaml("run.yaml"), parse_assignments(["lr=1e-3"])])
    resolved["algo"].lr               # 0.001
    resolved.provenance["algo.lr"]    # "lr=1e-3 on the command line"

A bare key (`lr`) goes to the one section that has such a field; `algo.lr` always works. Dict fields (`env_config`) take any inner
keys and are merged deeply; every other field is replaced as a whole. All mistakes are reported together, each with its place.
"""

from __future__ import annotations

import ast
import dataclasses
import difflib
import enum
import inspect
import itertools
import json
import math
import re
import runpy
import textwrap
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, Literal, Union

import annotated_types
import numpy as np
import yaml
from pydantic import BeforeValidator, ConfigDict, PydanticUserError, Strict, TypeAdapter, ValidationError
from pydantic.fields import FieldInfo

from bray.errors import ConfigError, UnknownName, did_you_mean

Key = tuple[str, ...]

_MAX_NODES = 100_000  # a YAML file whose aliases unfold to more than this is an attack, not a config
_MAX_DEPTH = 64


@dataclass
class Source:
    """Values from one place. `values` is nested by section and/or holds bare keys; `lines` and `texts` locate single keys."""

    name: str
    """"default", "preset cartpole_ppo", "--config", "command line", "python" or a file's path."""
    values: dict[str, Any]
    lines: dict[Key, int] | None = None
    """Line numbers of keys, for files."""
    texts: dict[Key, str] | None = None
    """`key=value` as typed, for the command line."""

    def where(self, key: Key) -> str:
        """The place of a key (or of the nearest key around it) for messages and provenance."""
        for end in range(len(key), 0, -1):
            if self.texts and key[:end] in self.texts:
                return f"{self.texts[key[:end]]} on the {self.name}"
            if self.lines and key[:end] in self.lines:
                return f"{self.name}:{self.lines[key[:end]]}"
        return self.name


class _Dotted(dict):
    """A dict that `a.b=1` made: it changes one entry of a field, where a written-out dict may replace the field."""


# --- YAML ---------------------------------------------------------------------------------------------------------------

_SCALARS = (  # YAML 1.2's rules: PyYAML's own read 1e-3 as text, 010 as 8, 1:30 as 90 and 2024-01-01 as a date
    ("tag:yaml.org,2002:bool", re.compile(r"^(?:true|True|TRUE|false|False|FALSE)$"), "tTfF"),
    (
        "tag:yaml.org,2002:int",
        re.compile(r"^(?:[-+]?[0-9][0-9_]*|0x[0-9a-fA-F_]+|0o[0-7_]+|0b[01_]+)$"),
        "-+0123456789",
    ),
    (
        "tag:yaml.org,2002:float",
        re.compile(
            r"^(?:[-+]?(?:[0-9][0-9_]*\.?[0-9_]*|\.[0-9][0-9_]*)(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$"
        ),
        "-+0123456789.",
    ),
    ("tag:yaml.org,2002:null", re.compile(r"^(?:~|null|Null|NULL|)$"), ["~", "n", "N", ""]),
    ("tag:yaml.org,2002:merge", re.compile(r"^(?:<<)$"), "<"),
)
_MERGE = "tag:yaml.org,2002:merge"
_SAFE_TAGS = {f"tag:yaml.org,2002:{t}" for t in ("map", "seq", "str", "int", "float", "bool", "null", "merge")}


class _Loader(yaml.SafeLoader):
    """A safe loader with the scalar rules above."""


_Loader.yaml_implicit_resolvers = {}
for _tag, _pattern, _first in _SCALARS:
    _Loader.add_implicit_resolver(_tag, _pattern, list(_first))


def _yaml_float(text: str) -> float:
    text = text.replace("_", "").lower()
    return float(text.replace(".inf", "inf").replace(".nan", "nan"))


def _yaml_int(text: str) -> int:
    text = text.replace("_", "")
    return int(text, 0 if text[:2] in ("0x", "0o", "0b") else 10)


_Loader.add_constructor("tag:yaml.org,2002:float", lambda loader, node: _yaml_float(loader.construct_scalar(node)))
_Loader.add_constructor("tag:yaml.org,2002:int", lambda loader, node: _yaml_int(loader.construct_scalar(node)))


def _read_yaml(text: str, name: str) -> tuple[Any, dict[Key, int]]:
    """YAML text as plain data, and the line of each key."""
    lines: dict[Key, int] = {}
    count = 0

    def fail(node: yaml.Node, message: str) -> ConfigError:
        return ConfigError(f"{name}:{node.start_mark.line + 1}: {message}")

    def build(node: yaml.Node, path: Key) -> Any:
        nonlocal count
        count += 1
        if count > _MAX_NODES or len(path) > _MAX_DEPTH:
            raise fail(node, f"a config may hold {_MAX_NODES} values nested {_MAX_DEPTH} deep, this one holds more")
        if node.tag not in _SAFE_TAGS:
            raise fail(node, f"expected plain data (numbers, text, lists, mappings), got the tag {node.tag!r}")
        if isinstance(node, yaml.MappingNode):
            out: dict[str, Any] = {}
            merged: dict[str, Any] = {}
            own: dict[Key, int] = {}  # noted last, so that a key that overrides a merged one keeps its own line
            for key_node, value_node in node.value:
                if not isinstance(key_node, yaml.ScalarNode):
                    raise fail(key_node, "expected a key that is text, got a list or a mapping")
                if key_node.tag == _MERGE:
                    parts = value_node.value if isinstance(value_node, yaml.SequenceNode) else [value_node]
                    if not all(isinstance(p, yaml.MappingNode) for p in parts):
                        raise fail(key_node, "expected a mapping (or a list of them) after '<<'")
                    for part in parts:  # of several, the first that has a key wins
                        merged = build(part, path) | merged
                    continue
                key = key_node.value
                if key in out:
                    raise fail(key_node, f"the key {key!r} is given twice")
                out[key] = build(value_node, (*path, key))
                own[(*path, key)] = key_node.start_mark.line + 1
            lines.update(own)
            return merged | out
        if isinstance(node, yaml.SequenceNode):
            lines.update({(*path, str(i)): v.start_mark.line + 1 for i, v in enumerate(node.value)})
            return [build(v, (*path, str(i))) for i, v in enumerate(node.value)]
        assert loader is not None
        return loader.construct_object(node, deep=True)

    loader = None
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        return (None if node is None else build(node, ())), lines
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


def _mapping(values: Any, name: str) -> dict[str, Any]:
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise ConfigError(f"{name}: expected keys and values, got {_show(values)}")
    return values


def _read_text(path: str | Path) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(f"{path}: there is no such file") from None
    except (OSError, UnicodeDecodeError) as e:
        raise ConfigError(f"{path}: cannot be read ({e})") from None


def load_yaml(path: str | Path) -> Source:
    """A YAML file; keys remember their lines. Plain data only: tags that would make objects are refused."""
    values, lines = _read_yaml(_read_text(path), str(path))
    return Source(str(path), _mapping(values, str(path)), lines)


def parse_json(text: str, name: str = "--config") -> Source:
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
        raise ConfigError(f"{name}: not JSON: {e.msg} at line {e.lineno}, column {e.colno}: {text[:60]!r}") from None
    except RecursionError:
        raise ConfigError(f"{name}: not JSON a config can hold: nested too deep") from None
    return Source(name, _mapping(values, name))


def parse_assignments(items: Sequence[str], name: str = "command line") -> Source:
    """`lr=1e-3 model.fcnet_hiddens=[64,64] env.env_config.level=3`: dotted keys, values written as in YAML."""
    values: dict[str, Any] = {}
    texts: dict[Key, str] = {}
    for item in items:
        dotted, equals, text = item.partition("=")
        path = tuple(dotted.strip().split("."))
        if not equals or not all(path):
            raise ConfigError(f"expected key=value on the {name}, got {item!r}")
        try:
            value, _ = _read_yaml(text, f"{item} on the {name}")
        except ConfigError:
            if text.lstrip()[:1] in tuple("[{'\""):
                raise
            value = text  # text that YAML would read as a sign of its own: *, &, %, @, "a: b: c"
        node = values
        for part in path[:-1]:
            inner = node.setdefault(part, _Dotted())
            if not isinstance(inner, dict):
                raise ConfigError(f"{item} on the {name}: {part!r} was set to {_show(inner)} before, it has no keys")
            node = inner
        node[path[-1]] = value
        texts[path] = item
    return Source(name, values, texts=texts)


def load_config(path: str | Path) -> Source:
    """A config file by its suffix: .yaml/.yml, .json, or .py with a dict named `config` (or `main_config`), which is run."""
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
                return Source(str(path), names[name])
        raise ConfigError(f"{path}: expected a dict named 'config' in it, there is none")
    raise ConfigError(f"{path}: expected a .yaml, .json or .py file")


# --- what the dataclasses allow -------------------------------------------------------------------------------------------

_STRICT = ConfigDict(strict=True, allow_inf_nan=False, arbitrary_types_allowed=True)


def _base(hint: Any) -> Any:
    """A type without Annotated around it."""
    while typing.get_origin(hint) is Annotated:
        hint = typing.get_args(hint)[0]
    return hint


def _members(hint: Any) -> tuple[Any, ...]:
    """The members of a union (one for any other type), without None."""
    hint = _base(hint)
    if typing.get_origin(hint) in (Union, types.UnionType):
        return tuple(m for a in typing.get_args(hint) if a is not type(None) for m in _members(a))
    return (hint,)


def _nested(hint: Any) -> type | None:
    """The dataclass of a field that is one (or is one or None)."""
    members = _members(hint)
    return (
        members[0]
        if len(members) == 1 and isinstance(members[0], type) and dataclasses.is_dataclass(members[0])
        else None
    )


def _is_dict(hint: Any) -> bool:
    """A field that takes any keys: dict, Mapping, or one of them or None."""
    members = _members(hint)
    return len(members) == 1 and (typing.get_origin(members[0]) or members[0]) in (dict, Mapping)


def _whole(x: Any) -> Any:
    return int(x) if isinstance(x, float) and x.is_integer() else x


def _loosen(hint: Any, numbers: bool = True) -> Any:
    """The hint as we check it: strict, but a list may stand for a tuple, text for a path or an enum, 1e6 for an int."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is Annotated:
        return Annotated[(_loosen(args[0], numbers), *args[1:])]
    if origin in (Union, types.UnionType):
        numbers = not any(_base(a) is float for a in args)
        return Union[tuple(_loosen(a, numbers) for a in args)]  # noqa: UP007
    if hint is int and numbers:
        return Annotated[int, BeforeValidator(_whole)]
    if origin is tuple or hint is tuple:
        inner = tuple[tuple(a if a is ... else _loosen(a) for a in args)] if args else hint  # type: ignore[misc]
        return Annotated[inner, Strict(False)]
    if origin in (list, dict, set, frozenset, Sequence, Mapping) and args:
        return origin[tuple(a if a is ... else _loosen(a) for a in args)]
    if isinstance(hint, type) and issubclass(hint, (Path, enum.Enum)):
        return Annotated[hint, Strict(False)]
    return hint


@lru_cache(maxsize=256)
def _fields(cls: type) -> dict[str, Any]:
    """Init fields of a dataclass and their types, with the limits written in `Annotated`."""
    if not dataclasses.is_dataclass(cls):
        raise TypeError(f"a config section is a dataclass, got {cls!r}")
    hints = typing.get_type_hints(cls, include_extras=True)
    return {f.name: hints[f.name] for f in dataclasses.fields(cls) if f.init}


@lru_cache(maxsize=1024)
def _adapter(cls: type, name: str) -> TypeAdapter[Any]:
    hint = _loosen(_fields(cls)[name])
    try:
        return TypeAdapter(hint, config=_STRICT)
    except PydanticUserError:  # a dataclass or TypedDict brings a config of its own
        return TypeAdapter(hint)


@lru_cache(maxsize=256)
def field_docs(cls: type) -> dict[str, str]:
    """field -> the docstring written under it (base classes included); what `--help` and the docs show."""
    docs: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        if not dataclasses.is_dataclass(base):
            continue
        try:
            tree = ast.parse(textwrap.dedent(inspect.getsource(base)))
        except (OSError, TypeError, SyntaxError):  # made without a source file
            continue
        body = tree.body[0].body if isinstance(tree.body[0], ast.ClassDef) else []
        for first, second in itertools.pairwise(body):
            if (
                isinstance(first, ast.AnnAssign)
                and isinstance(first.target, ast.Name)
                and isinstance(second, ast.Expr)
                and isinstance(second.value, ast.Constant)
                and isinstance(second.value.value, str)
            ):
                docs[first.target.id] = inspect.cleandoc(second.value.value)
    return docs


# --- messages -------------------------------------------------------------------------------------------------------------


def _show(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


_WORDS: dict[Any, str] = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "text",
    list: "a list",
    tuple: "a list",
    Sequence: "a list",
    set: "a list",
    dict: "keys and values",
    Mapping: "keys and values",
    type(None): "null",
}


def _describe(hint: Any) -> str:
    """A type in words: 'a number > 0', 'a list of whole numbers', \"'a' or 'b'\"."""
    limits: list[str] = []
    while typing.get_origin(hint) is Annotated:
        hint, *extra = typing.get_args(hint)
        for item in extra:
            limits += [w for m in (item.metadata if isinstance(item, FieldInfo) else [item]) for w in _limit(m)]
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (Union, types.UnionType):
        return " or ".join(dict.fromkeys(_describe(a) for a in args))
    if origin is Literal:
        return _choices(args)
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return _choices([m.value for m in hint])
    word = _WORDS.get(origin or hint) or ("a path" if hint is Path else str(getattr(hint, "__name__", hint)))
    inner = [a for a in args if a is not ...]
    if word == "a list" and origin is tuple and inner and ... not in args:
        word = f"a list of {len(inner)} values"
    elif word == "a list" and len(inner) == 1 and _base(inner[0]) in (int, float, str):
        word = "a list of " + {int: "whole numbers", float: "numbers", str: "texts"}[_base(inner[0])]
    return " and ".join([f"{word} {limits[0]}", *limits[1:]]) if limits else word


def _limit(m: Any) -> Iterator[str]:
    for kind, sign in (
        (annotated_types.Gt, ">"),
        (annotated_types.Ge, ">="),
        (annotated_types.Lt, "<"),
        (annotated_types.Le, "<="),
    ):
        if isinstance(m, kind):
            yield f"{sign} {getattr(m, kind.__name__.lower())}"
    if isinstance(m, annotated_types.MultipleOf):
        yield f"divisible by {m.multiple_of}"
    if isinstance(m, annotated_types.MinLen) and m.min_length:
        yield f"of length >= {m.min_length}"
    if isinstance(m, annotated_types.MaxLen) and m.max_length is not None:
        yield f"of length <= {m.max_length}"


def _choices(values: Sequence[Any]) -> str:
    shown = [_show(v) for v in values]
    return " or ".join([", ".join(shown[:-1]), shown[-1]]) if len(shown) > 1 else f"{shown[0]}, the only choice"


def _mistakes(error: ValidationError, hint: Any, value: Any) -> Iterator[tuple[str, str]]:
    """(place inside the value, 'expected ..., got ...') for what pydantic found."""
    items = error.errors(include_url=False, include_context=True)
    inner_type = _fields_of_list(hint)
    if inner_type is not None and all(e["loc"] and isinstance(e["loc"][0], int) for e in items):
        for e in items:  # each wrong entry of a list by its place
            yield f"[{e['loc'][0]}]", f"expected {_describe(inner_type)}, got {_show(e['input'])}"
        return
    custom = [e["msg"] for e in items if e["type"] in ("value_error", "assertion_error")]
    if custom:
        yield "", f"{custom[0].removeprefix('Value error, ').removeprefix('Assertion failed, ')}, got {_show(value)}"
        return
    finite = "a finite number" if any(e["type"] == "finite_number" for e in items) else ""
    near = ""
    if isinstance(value, str):
        names = [c for m in _members(hint) for c in _choice_names(m)]
        near = did_you_mean(value, names) if names and difflib.get_close_matches(value, names) else ""
    deep = items[0]["loc"] if len(items) == 1 and len(_members(hint)) == 1 else ()
    place = "".join(f"[{p}]" if isinstance(p, int) else f".{p}" for p in deep)
    if deep and place:
        yield place, f"{items[0]['msg'][0].lower()}{items[0]['msg'][1:]}, got {_show(items[0]['input'])}"
    else:
        yield "", f"expected {finite or _describe(hint)}, got {_show(value)}{'.' + near if near else ''}"


def _choice_names(hint: Any) -> list[str]:
    if typing.get_origin(hint) is Literal:
        return [a for a in typing.get_args(hint) if isinstance(a, str)]
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return [m.value for m in hint if isinstance(m.value, str)]
    return []


def _fields_of_list(hint: Any) -> Any:
    members = _members(hint)
    origin, args = typing.get_origin(members[0]), typing.get_args(members[0])
    if len(members) == 1 and origin in (list, tuple, Sequence) and [a for a in args if a is not ...][1:] == []:
        return args[0] if args else None
    return None


# --- merging --------------------------------------------------------------------------------------------------------------


class _Merger:
    """Sources poured one after another into {section: {field: value}}, with places and mistakes."""

    def __init__(self, sections: Mapping[str, type]):
        self.sections = sections
        self.values: dict[str, dict[str, Any]] = {s: {} for s in sections}
        self.places: dict[Key, str] = {}
        self.raw: dict[Key, str] = {}  # what was typed on the command line, for text fields
        self.problems: list[ConfigError] = []
        self.owners: dict[str, list[str]] = {}  # bare key -> sections that have it
        for section, cls in sections.items():
            for name in _fields(cls):
                self.owners.setdefault(name, []).append(section)

    def add(self, source: Source) -> None:
        self.seen: dict[Key, str] = {}
        for key, value in source.values.items():
            path = tuple(str(key).split("."))
            for part in reversed(path[1:]):  # "algo.lr" written as one key of a file
                value = _Dotted({part: value})
            self.route(source, path[0], value, (str(key),) if len(path) > 1 and not source.texts else path[:1])

    def route(self, source: Source, key: str, value: Any, at: Key) -> None:
        """A top-level key: a section, or a field of the one section that has it."""
        owners = self.owners.get(key, [])
        if key in self.sections and (isinstance(value, dict) or not owners):
            if value is None:
                return  # a section with nothing under it
            if not isinstance(value, dict):
                self.mistake(key, source.where(at), f"{key} is a section: expected keys and values, got {_show(value)}")
                return
            self.merge(source, self.sections[key], self.values[key], (key,), value, at)
        elif len(owners) == 1:
            section = owners[0]
            at_value = {key: value}
            self.merge(source, self.sections[section], self.values[section], (section,), at_value, at[:-1], bare=at)
        elif owners:
            spelled = " or ".join(f"{s}.{key}" for s in owners)
            self.mistake(key, source.where(at), f"{' and '.join(owners)} both have such a key; write {spelled}")
        else:
            leaf = key
            while isinstance(value, _Dotted) and len(value) == 1:
                ((part, value),) = value.items()
                leaf, at = f"{leaf}.{part}", (*at, part)
            self.problems.append(UnknownName("key", leaf, self.known(leaf), source.where(at)))

    def merge(
        self,
        source: Source,
        cls: type,
        into: dict[str, Any],
        path: Key,
        values: dict[str, Any],
        at: Key,
        bare: Key = (),
    ) -> None:
        """Values of a dataclass (a section or a nested one); `path` names them in the config, `at` in their source."""
        hints = _fields(cls)
        for key, value in values.items():
            key = str(key)
            if "." in key and key not in hints:  # dotted keys inside a section of a file
                head, _, rest = key.partition(".")
                self.merge(source, cls, into, path, {head: _Dotted({rest: value})}, at, bare=bare or (*at, key))
                continue
            here, there = (*path, key), bare or (*at, key)
            if key not in hints:
                dotted = ".".join(here)
                self.problems.append(UnknownName("key", dotted, self.known(dotted), source.where(there)))
                continue
            nested, hint = _nested(hints[key]), hints[key]
            if nested and isinstance(value, dict):
                inner = into.get(key)
                into[key] = inner if isinstance(inner, dict) else {}
                self.merge(source, nested, into[key], here, value, there)
                continue
            if here in self.seen and not isinstance(
                value, _Dotted
            ):  # `lr` and `algo.lr` in one place: neither is "later"
                self.mistake(".".join(here), self.seen[here], f"given twice, also at {source.where(there)}")
                continue
            self.seen[here] = source.where(there)
            if isinstance(value, dict) and (_is_dict(hint) or isinstance(value, _Dotted)):
                default = _default(cls, key)
                old = into.get(key, _plain(default) if isinstance(default, dict) else {})
                into[key] = self.deep(source, old if isinstance(old, dict) else {}, value, here, there)
                continue
            self.places = {k: v for k, v in self.places.items() if k[: len(here)] != here}
            into[key] = _plain(value)
            self.places[here] = source.where(there)
            text = (source.texts or {}).get(there)
            if text is not None:
                self.raw[here] = text.partition("=")[2].strip()

    def deep(self, source: Source, old: dict[str, Any], new: dict[str, Any], path: Key, at: Key) -> dict[str, Any]:
        out = dict(old)
        if not new:
            self.places.setdefault(path, source.where(at))
        for key, value in new.items():
            here, there = (*path, str(key)), (*at, str(key))
            if isinstance(value, dict):
                inner = out.get(key)
                out[key] = self.deep(source, inner if isinstance(inner, dict) else {}, value, here, there)
            else:
                self.places = {k: v for k, v in self.places.items() if k[: len(here)] != here}
                out[key] = _plain(value)
                self.places[here] = source.where(there)
        return out

    def mistake(self, key: str, place: str, message: str) -> None:
        self.problems.append(ConfigError(f"{key} ({place}): {message}" if place else f"{key}: {message}"))

    def known(self, name: str) -> list[str]:
        """Keys to look for the nearest one in: dotted ones for a dotted name, else bare ones and nested ones of that name."""
        dotted = [".".join(p) for s, cls in self.sections.items() for p in _all_keys(cls, (s,))]
        if "." in name:
            near = [k for k in self.owners if difflib.SequenceMatcher(None, k, name.rpartition(".")[2]).ratio() > 0.8]
            return dotted + near
        deep = [d for d in dotted if d.count(".") > 1 and difflib.get_close_matches(name, [d.rpartition(".")[2]])]
        bare = [*self.owners, *self.sections]
        return deep if deep and not difflib.get_close_matches(name, bare) else bare

    def build(self, cls: type, values: dict[str, Any], path: Key) -> Any:
        """The dataclass instance, or None with the mistakes noted."""
        before = len(self.problems)
        hints, out = _fields(cls), {}
        for name, value in values.items():
            here = (*path, name)
            nested = _nested(hints[name])
            if nested and isinstance(value, dict):
                default = _default(cls, name)
                base = {f: getattr(default, f) for f in _fields(nested)} if isinstance(default, nested) else {}
                out[name] = self.build(nested, {**base, **value}, here)
                continue
            try:
                out[name] = _adapter(cls, name).validate_python(value)
            except ValidationError as e:
                if here in self.raw and str in _members(hints[name]):  # name=007: text that YAML read as a number
                    out[name] = self.raw[here]
                    continue
                for inside, message in _mistakes(e, hints[name], value):
                    self.mistake(".".join(here) + inside, self.place(here), message)
        for f in dataclasses.fields(cls):
            needed = f.init and f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING
            if needed and f.name not in values:
                self.mistake(".".join((*path, f.name)), "", f"expected {_describe(hints[f.name])}, none was given")
        if len(self.problems) > before:
            return None
        try:
            made = cls(**out)
            if callable(getattr(made, "check", None)):
                made.check()
            return made
        except UnknownName as e:
            self.problems.append(e)
        except (ConfigError, ValueError) as e:
            self.mistake(".".join(path), "", str(e))
        return None

    def place(self, key: Key) -> str:
        """Where a value came from; several places inside a dict are joined."""
        if key in self.places:
            return self.places[key]
        inside = [v for k, v in self.places.items() if k[: len(key)] == key]
        return ", ".join(dict.fromkeys(inside)) or "default"


def _default(cls: type, name: str) -> Any:
    f = next(f for f in dataclasses.fields(cls) if f.name == name)
    if f.default_factory is not dataclasses.MISSING:
        return f.default_factory()
    return None if f.default is dataclasses.MISSING else f.default


def _plain(value: Any) -> Any:
    """A copy of our own, with numpy's numbers (from notebooks and sweeps) as Python's. Objects stay the same ones."""
    if isinstance(value, np.generic):
        return value.item()
    if type(value) in (dict, _Dotted):
        return {k: _plain(v) for k, v in value.items()}
    return [_plain(v) for v in value] if type(value) is list else value


def _all_keys(cls: type, path: Key) -> Iterator[Key]:
    for name, hint in _fields(cls).items():
        nested = _nested(hint)
        yield (*path, name)
        if nested:
            yield from _all_keys(nested, (*path, name))


def resolve(sections: Mapping[str, type], sources: Sequence[Source]) -> Resolved:
    """Merge sources (later ones win), check every value, and build the section dataclasses.

    Raises UnknownName for one unknown key, else ConfigError that lists every mistake with its place.
    """
    merger = _Merger(sections)
    for source in sources:
        merger.add(source)
    built = {s: merger.build(cls, merger.values[s], (s,)) for s, cls in sections.items()}
    if len(merger.problems) == 1:
        raise merger.problems[0]
    if merger.problems:
        listed = "\n  ".join(dict.fromkeys(str(p) for p in merger.problems))
        error = ConfigError(f"{len(merger.problems)} mistakes in the config:\n  {listed}")
        error.problems = tuple(merger.problems)
        raise error
    provenance: dict[str, str] = {}
    for section, value in built.items():
        for key in _leaves(to_plain(value), (section,)):
            provenance[".".join(key)] = next(
                (merger.places[key[:n]] for n in range(len(key), 1, -1) if key[:n] in merger.places), "default"
            )
    return Resolved(built, provenance)


def _leaves(value: Any, path: Key) -> Iterator[Key]:
    if isinstance(value, dict) and value:
        for key, inner in value.items():
            yield from _leaves(inner, (*path, str(key)))
    elif len(path) > 1:
        yield path


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
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, np.generic):
        return value.item()
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, type) or callable(value):
        return f"{getattr(value, '__module__', '?')}:{getattr(value, '__qualname__', type(value).__qualname__)}"
    return str(value)


@dataclass
class Resolved:
    """A checked config: `resolved["algo"].lr`, and where each value came from."""

    sections: dict[str, Any]
    provenance: dict[str, str]

    def __getitem__(self, section: str) -> Any:
        if section not in self.sections:
            raise UnknownName("config section", section, self.sections)
        return self.sections[section]

    def to_dict(self) -> dict[str, Any]:
        """Plain data, nested by section: `params.json`."""
        return {name: to_plain(value) for name, value in self.sections.items()}

    def rows(self) -> list[tuple[str, Any, str]]:
        """(key, value, where it came from) for every value."""
        data = self.to_dict()
        out = []
        for key in (k for s, v in data.items() for k in _leaves(v, (s,))):
            value: Any = data
            for part in key:
                value = value[part]
            out.append((".".join(key), value, self.provenance.get(".".join(key), "default")))
        return out

    def to_yaml(self) -> str:
        """`config.yaml`: loads back to the same config; a comment after each value says where it came from."""
        lines: list[tuple[str, str]] = []

        def emit(value: Any, path: Key) -> None:
            indent = "  " * (len(path) - 1)
            key = f"{indent}{_yaml_scalar(path[-1])}:"
            if isinstance(value, dict) and (value or len(path) == 1):
                lines.append((key if value else f"{key} {{}}", ""))
                for k, v in value.items():
                    emit(v, (*path, k))
            else:
                lines.append((f"{key} {_yaml_flow(value)}", self.provenance.get(".".join(path), "default")))

        for section, value in self.to_dict().items():
            emit(value, (section,))
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
            table.add_row(Text(key), Text(_yaml_flow(value), style=style), Text(where, style="dim"))
        return table


def _yaml_flow(value: Any) -> str:
    """A value on one line, as our loader reads it back."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_yaml_scalar(k)}: {_yaml_flow(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(_yaml_flow(v) for v in value) + "]"
    if isinstance(value, str):
        return _yaml_scalar(value)
    if isinstance(value, float) and not math.isfinite(value):
        return ".nan" if math.isnan(value) else ".inf" if value > 0 else "-.inf"
    return json.dumps(value)


_PLAIN_TEXT = re.compile(r"[A-Za-z_./][\w./+-]*(?::[A-Za-z_][\w.]*)?", re.ASCII)


def _yaml_scalar(text: str) -> str:
    if _PLAIN_TEXT.fullmatch(text) and not any(p.match(text) for _, p, _ in _SCALARS):
        return text
    quoted = json.dumps(text, ensure_ascii=False)
    # line breaks of YAML that JSON leaves alone, and what a YAML reader refuses unescaped
    return re.sub("[\x7f-\x9f\u2028\u2029\ufeff\ufffe\uffff\ud800-\udfff]", lambda m: f"\\u{ord(m[0]):04x}", quoted)
