"""What a dataclass declares: its options, each with type, limits, default and the docstring under it."""

from __future__ import annotations

import ast
import dataclasses
import enum
import inspect
import itertools
import json
import math
import sys
import textwrap
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Annotated, Any, Literal, Union

import annotated_types

Count = Annotated[int, annotated_types.Gt(0)]
Whole = Annotated[int, annotated_types.Ge(0)]
Amount = Annotated[float, annotated_types.Ge(0)]
Positive = Annotated[float, annotated_types.Gt(0)]
Share = Annotated[float, annotated_types.Interval(ge=0, le=1)]
Port = Annotated[int, annotated_types.Interval(ge=0, le=65535)]
Name = Annotated[str, annotated_types.MinLen(1)]


@dataclass(frozen=True)
class ScheduleIn:
    """Whether all values of a schedule written as a dict (`bray.schedules`) are in a range."""

    low: float
    high: float = math.inf

    def __call__(self, schedule: dict[str, Any]) -> bool:
        points = schedule.get("points")
        pairs = points if isinstance(points, (list, tuple)) else []
        values = [
            schedule.get("start"),
            schedule.get("end"),
            *(p[1] for p in pairs if isinstance(p, list) and len(p) == 2),
        ]
        return all(self.low <= v <= self.high for v in values if isinstance(v, (int, float)))

    def __str__(self) -> str:
        return f"a schedule of numbers >= {self.low:g}" + ("" if math.isinf(self.high) else f" and <= {self.high:g}")


RateSchedule = Positive | Annotated[dict[str, Any], annotated_types.Predicate(ScheduleIn(0.0))]
"""A learning rate: a number, or a schedule, which may end at 0."""
AmountSchedule = Amount | Annotated[dict[str, Any], annotated_types.Predicate(ScheduleIn(0.0))]
"""A weight in a loss: a number or a schedule."""
ShareSchedule = Share | Annotated[dict[str, Any], annotated_types.Predicate(ScheduleIn(0.0, 1.0))]
"""A probability or a weight in [0, 1]: a number or a schedule."""


@dataclass(frozen=True)
class Flag:
    """In a field's `Annotated`: the option is a command-line flag too. Its help is the first sentence of the field's
    docstring."""

    names: str = ""
    """Spellings, like "-f,--yaml"; empty = the field's name with dashes."""
    metavar: str = ""
    """What the help shows for the value; empty = by the type."""
    panel: str = ""
    """Title of the group in the help that starts with this flag; empty = the group goes on."""
    parse: Callable[[Any], Any] | None = None
    """From what was typed to the value."""
    argument: bool = False
    """A word without dashes: `bray eval RUN_DIR`."""
    hidden: bool = False
    help: str = ""
    """Its text, where the first sentence of the docstring would mislead on a command line."""


@dataclass(frozen=True)
class Excludes:
    """In a field's `Annotated`: where this option is set, the other one of the same section has no effect."""

    other: str


@dataclass(frozen=True)
class Needs:
    """In a field's `Annotated`: this option has no effect unless the other one of the same section is set."""

    other: str


@dataclass(frozen=True)
class Secret:
    """In a field's `Annotated`: what is never written (`bray.config.secrets`)."""

    inside: bool = False
    """Not all of it: entries that look like secrets."""


@dataclass(frozen=True)
class Option:
    """One field of a dataclass."""

    name: str
    hint: Any
    """Its type, with the limits written in `Annotated`."""
    field: dataclasses.Field[Any]
    doc: str
    """The docstring under it, in one line."""

    @property
    def key(self) -> str:
        """As it is written in files: `class_` is `class`."""
        return "class" if self.name == "class_" else self.name

    @property
    def required(self) -> bool:
        return self.field.default is MISSING and self.field.default_factory is MISSING

    @property
    def default(self) -> Any:
        if self.field.default_factory is not MISSING:
            return self.field.default_factory()
        return None if self.required else self.field.default

    @property
    def nested(self) -> type | None:
        """The dataclass of a field that is one (or is one or None)."""
        found = members(self.hint)
        only = found[0] if len(found) == 1 else None
        return only if isinstance(only, type) and dataclasses.is_dataclass(only) else None

    @property
    def takes_any_key(self) -> bool:
        """dict, Mapping, or one of them or None."""
        found = members(self.hint)
        return len(found) == 1 and (typing.get_origin(found[0]) or found[0]) in (dict, Mapping)

    @property
    def flag(self) -> Flag | None:
        return next((m for m in reversed(self.metadata) if isinstance(m, Flag)), None)

    @cached_property
    def metadata(self) -> list[Any]:
        """What `Annotated` says of the field, or of the members of its union."""
        return [m for hint in (*typing.get_args(base(self.hint)), self.hint) for m in metadata(hint)]


@lru_cache(maxsize=256)
def options(cls: type) -> dict[str, Option]:
    """field name -> Option, for the fields of a dataclass that its constructor takes."""
    if not dataclasses.is_dataclass(cls):
        raise TypeError(f"a config section is a dataclass, got {cls!r}")
    hints, docs = typing.get_type_hints(cls, include_extras=True), _field_docs(cls)
    return {
        f.name: Option(f.name, hints[f.name], f, " ".join(docs.get(f.name, "").split()))
        for f in dataclasses.fields(cls)
        if f.init
    }


def _field_docs(cls: type) -> dict[str, str]:
    """field -> the docstring written under it, base classes included."""
    docs: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        if not dataclasses.is_dataclass(base):
            continue
        try:
            parsed = ast.parse(textwrap.dedent(inspect.getsource(base))).body[0]
        except (OSError, TypeError, SyntaxError):  # made without a source file
            continue
        for first, second in itertools.pairwise(parsed.body if isinstance(parsed, ast.ClassDef) else []):
            match first, second:
                case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                    docs[name] = text
    return docs


def values_of(made: Any, cls: type) -> dict[str, Any]:
    """The options that `cls` declares, of an object that has them (and others)."""
    return {name: getattr(made, name) for name in options(cls)}


def about(cls: type) -> str:
    """The docstring of a dataclass, in one line. Where it has none (`dataclass` puts the signature there) its file's
    first line tells, as for an algorithm's Config."""
    text = cls.__doc__ or ""
    if text.startswith(f"{cls.__name__}("):
        text = (sys.modules[cls.__module__].__doc__ or "").partition("\n")[0].partition("   ")[0]
    return " ".join(text.split())


def all_keys(cls: type, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Option]]:
    """(path, option) of every key, nested ones after the one that holds them."""
    for option in options(cls).values():
        here = (*path, option.name)
        yield here, option
        if option.nested:
            yield from all_keys(option.nested, here)


# --- types ------------------------------------------------------------------------------------------------------------


def base(hint: Any) -> Any:
    """A type without Annotated around it."""
    while typing.get_origin(hint) is Annotated:
        hint = typing.get_args(hint)[0]
    return hint


def members(hint: Any) -> tuple[Any, ...]:
    """The members of a union (one for any other type), without None."""
    hint = base(hint)
    if typing.get_origin(hint) in (Union, types.UnionType):
        return tuple(m for a in typing.get_args(hint) if a is not type(None) for m in members(a))
    return (hint,)


def metadata(hint: Any) -> list[Any]:
    """What `Annotated` says beside the type, limits one by one."""
    out: list[Any] = []
    while typing.get_origin(hint) is Annotated:
        hint, *extra = typing.get_args(hint)
        for item in extra:
            grouped = isinstance(item, annotated_types.GroupedMetadata)
            out += list(item) if grouped else getattr(item, "metadata", [item])  # pydantic's Field holds several
    return out


def choices(hint: Any) -> list[Any]:
    """The values of a Literal or an Enum."""
    if typing.get_origin(hint) is Literal:
        return list(typing.get_args(hint))
    return [m.value for m in hint] if isinstance(hint, type) and issubclass(hint, enum.Enum) else []


_WORDS: dict[Any, str] = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "text",
    Path: "a path",
    Any: "anything",
    type(None): "null",
    **dict.fromkeys((list, tuple, set, Sequence), "a list"),
    **dict.fromkeys((dict, Mapping), "keys and values"),
}
_ALONE = ", the only choice"
_PLURALS = {int: "whole numbers", float: "numbers", str: "texts"}


def describe(hint: Any) -> str:
    """A type in words: 'a number > 0', 'a list of whole numbers', \"'a' or 'b'\"."""
    for m in metadata(hint):
        if isinstance(m, annotated_types.Predicate) and isinstance(m.func, ScheduleIn):
            return str(m.func)
    limits = [word for m in metadata(hint) if (word := _limit(m))]
    hint = base(hint)
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (Union, types.UnionType):
        return " or ".join(dict.fromkeys(describe(a).removesuffix(_ALONE) for a in args))
    if named := choices(hint):
        shown = [show(v) for v in named]
        return " or ".join([", ".join(shown[:-1]), shown[-1]]) if len(shown) > 1 else f"{shown[0]}{_ALONE}"
    if dataclasses.is_dataclass(hint):
        return "keys and values"
    word = _WORDS.get(origin or hint) or str(getattr(hint, "__name__", hint))
    if word == "a list" and origin is tuple and args and ... not in args:
        word = f"a list of {len(args)} values"
    elif word == "a list" and (inner := list_item(hint)) is not None and base(inner) in _PLURALS:
        of_each = [_limit(m) for m in metadata(inner)] if base(inner) in (int, float) else []
        word = " ".join([f"a list of {_PLURALS[base(inner)]}", *filter(None, of_each)])
    return " and ".join([f"{word} {limits[0]}", *limits[1:]]) if limits else word


def list_item(hint: Any) -> Any:
    """The type of every entry of a list; None where it is no list or says nothing of them."""
    found = members(hint)
    origin, args = typing.get_origin(found[0]), [a for a in typing.get_args(found[0]) if a is not ...]
    return args[0] if len(found) == 1 and origin in (list, tuple, Sequence) and len(args) == 1 else None


def _limit(m: Any) -> str:
    match m:
        case annotated_types.Gt(limit):
            return f"> {limit}"
        case annotated_types.Ge(limit):
            return f">= {limit}"
        case annotated_types.Lt(limit):
            return f"< {limit}"
        case annotated_types.Le(limit):
            return f"<= {limit}"
        case annotated_types.MultipleOf(limit):
            return f"divisible by {limit}"
        case annotated_types.MinLen(limit) if limit:
            return f"of length >= {limit}"
        case annotated_types.MaxLen(limit):
            return f"of length <= {limit}"
    return ""


def show(value: Any) -> str:
    """A value in a message."""
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
