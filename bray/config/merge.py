"""Sources merged in order into checked dataclasses."""

from __future__ import annotations

import difflib
import keyword
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from bray.config.check import Wrong, checked
from bray.config.declare import all_keys, describe, members, options, show
from bray.config.hints import hint
from bray.config.resolved import Resolved, leaves, to_plain
from bray.config.sources import ConfigSource, Dotted, Key, nest
from bray.errors import ConfigError, UnknownName


def resolve(
    sections: Mapping[str, type],
    sources: Sequence[ConfigSource],
    elsewhere: Callable[[str], str] = lambda key: "",
    null_is_default: bool = False,
) -> Resolved:
    """Merge sources (later ones win), check every value, and build the section dataclasses.

    Raises UnknownName for one unknown key, else ConfigError that lists every mistake with its place. `elsewhere`: the
    end of the message about a key that is known, but not here; empty for others. `null_is_default`: a null takes back
    what earlier sources gave, unless the option takes a null itself.
    """
    merger = _Merger(sections, elsewhere)
    merger.null_is_default = null_is_default
    for source in sources:
        merger.add(source)
    built = {section: merger.build(cls, merger.values[section], (section,)) for section, cls in sections.items()}
    if len(merger.problems) == 1:
        raise merger.problems[0]
    if merger.problems:
        listed = "\n  ".join(dict.fromkeys(str(p) for p in merger.problems))
        error = ConfigError(f"{len(merger.problems)} mistakes in the config:\n  {listed}")
        error.problems = tuple(merger.problems)
        raise error
    keys = [key for section, value in built.items() for key, _ in leaves(to_plain(value), (section,))]
    return Resolved(built, {".".join(key): merger.origin(key) for key in keys})


def _field_name(key: str) -> str:
    """A word of Python cannot be the name of a field, which then has an underscore: `lambda` is `lambda_`."""
    return f"{key}_" if keyword.iskeyword(key) else key


class _Merger:
    """Collects {section: {field: value}}, the place of each value, and mistakes.

    `path` is always where a value stands in the config, `at` how its source spells that.
    """

    null_is_default = False

    def __init__(self, sections: Mapping[str, type], elsewhere: Callable[[str], str]):
        self.sections, self.elsewhere = sections, elsewhere
        self.values: dict[str, dict[str, Any]] = {s: {} for s in sections}
        self.places: dict[Key, str] = {}
        self.typed: dict[Key, str] = {}  # values as text, where they come from the command line
        self.problems: list[ConfigError] = []
        self.owners: dict[str, list[str]] = {}  # bare key -> sections that have it
        for section, cls in sections.items():
            for name in options(cls):
                self.owners.setdefault(name, []).append(section)

    # --- values -------------------------------------------------------------------------------------------------------

    def add(self, source: ConfigSource) -> None:
        self.source = source
        self.seen: dict[Key, str] = {}  # what this source has set
        for key, value in source.values.items():
            head, *rest = str(key).split(".")  # "algo.lr" written as one key of a file
            self.add_top(head, nest(rest, value), (str(key),))

    def add_top(self, key: str, value: Any, at: Key) -> None:
        """A top-level key: a section, or a field of the one section that has it."""
        key = _field_name(key)
        owners = self.owners.get(key, [])
        if key in self.sections and (isinstance(value, dict) or not owners):
            if isinstance(value, dict):
                self.add_fields(self.sections[key], self.values[key], (key,), value, at)
            elif value is not None:  # null: a section with nothing under it
                self.mistake((key,), f"{key} is a section: expected keys and values, got {show(value)}", at)
        elif len(owners) == 1:
            self.add_field(self.sections[owners[0]], self.values[owners[0]], (owners[0], key), value, at)
        elif owners:
            spelled = " or ".join(f"{s}.{key}" for s in owners)
            self.mistake((key,), f"{' and '.join(owners)} both have such a key; write {spelled}", at)
        else:
            path: Key = (key,)
            while isinstance(value, Dotted) and len(value) == 1:
                ((part, value),) = value.items()
                path, at = (*path, part), (*at, part)
            self.unknown(path, at)

    def add_fields(self, cls: type, into: dict[str, Any], path: Key, values: dict[str, Any], at: Key) -> None:
        """Values of a section or of a nested dataclass."""
        for key, value in values.items():
            head, *rest = [str(key)] if key in options(cls) else str(key).split(".")
            self.add_field(cls, into, (*path, head), nest(rest, value), (*at, str(key)))

    def add_field(self, cls: type, into: dict[str, Any], path: Key, value: Any, at: Key) -> None:
        name, where = _field_name(path[-1]), self.source.where(at)
        path = (*path[:-1], name)
        option = options(cls).get(name)
        if option is None:
            self.unknown(path, at)
        elif value is None and self.null_is_default and type(None) not in typing.get_args(option.hint):
            into.pop(name, None)
        elif option.nested and isinstance(value, dict):
            inner = into.get(name)
            into[name] = inner if isinstance(inner, dict) else {}
            self.add_fields(option.nested, into[name], path, value, at)
        elif path in self.seen and not isinstance(value, Dotted):  # `lr` and `algo.lr`: neither is the later one
            self.mistake(path, f"given twice, also at {where}", place=self.seen[path])
        elif isinstance(value, dict) and (option.takes_any_key or isinstance(value, Dotted)):
            self.seen[path] = where
            default = option.default
            old = into.get(name, _copy(default) if isinstance(default, dict) else {})
            into[name] = self.merged(old, value, path, at)
        else:
            self.seen[path] = where
            into[name] = self.placed(value, path, at)
            if at in (self.source.texts or {}):
                self.typed[path] = self.source.texts[at].partition("=")[2].strip()  # type: ignore[index]

    def merged(self, old: Any, new: dict[str, Any], path: Key, at: Key) -> dict[str, Any]:
        """A dict with a newer one over it, key by key."""
        out = dict(old) if isinstance(old, dict) else {}
        if not new:
            self.places.setdefault(path, self.source.where(at))
        for key, value in new.items():
            here, there = (*path, str(key)), (*at, str(key))
            nested = isinstance(value, dict)
            out[key] = self.merged(out.get(key), value, here, there) if nested else self.placed(value, here, there)
        return out

    def placed(self, value: Any, path: Key, at: Key) -> Any:
        """A copy of the value; its place replaces those of what was there before."""
        self.places = {k: v for k, v in self.places.items() if k[: len(path)] != path}
        self.places[path] = self.source.where(at)
        return _copy(value)

    # --- mistakes -----------------------------------------------------------------------------------------------------

    def mistake(self, path: Key, message: str, at: Key = (), place: str = "") -> None:
        place = place or (self.source.where(at) if at else "")
        key = ".".join(path)
        self.problems.append(ConfigError(f"{key} ({place}): {message}" if place else f"{key}: {message}"))

    def unknown(self, path: Key, at: Key) -> None:
        name, key = ".".join(path), path[-1]
        told = hint(key)
        if not told and len(path) > 1 and path[0] not in self.sections and key in self.owners:  # theirs, not ours
            told = " In Bray it is " + " or ".join(f"{owner}.{key}" for owner in self.owners[key]) + "."
        told = told or self.elsewhere(key)
        self.problems.append(UnknownName("key", name, self.near_keys(path), self.source.where(at), told))

    def near_keys(self, path: Key) -> list[str]:
        """Keys to look for the nearest one in: dotted ones for a dotted name, else bare ones, or nested ones of that
        name."""
        found = [p for section, cls in self.sections.items() for p, _ in all_keys(cls, (section,))]
        name, bare = path[-1], [*self.owners, *self.sections]
        if len(path) > 1:
            near = [k for k in self.owners if difflib.SequenceMatcher(None, k, name).ratio() > 0.8]
            return [".".join(p) for p in found] + near
        nested = [".".join(p) for p in found if len(p) > 2 and difflib.get_close_matches(name, p[-1:])]
        return nested if nested and not difflib.get_close_matches(name, bare) else bare

    # --- the result ---------------------------------------------------------------------------------------------------

    def build(self, cls: type, values: dict[str, Any], path: Key) -> Any:
        """The dataclass instance, or None with the mistakes noted."""
        before = len(self.problems)
        out = {name: self.built_field(cls, value, (*path, name)) for name, value in values.items()}
        for option in options(cls).values():
            if option.required and option.name not in values:
                self.mistake((*path, option.name), f"expected {describe(option.hint)}, none was given")
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
            self.mistake(path, str(e))
        return None

    def built_field(self, cls: type, value: Any, path: Key) -> Any:
        option = options(cls)[path[-1]]
        if option.nested and isinstance(value, dict):
            default = option.default
            known = {n: getattr(default, n) for n in options(option.nested)} if default is not None else {}
            return self.build(option.nested, {**known, **value}, path)
        try:
            return checked(cls, option.name, value)
        except Wrong as e:
            if path in self.typed and str in members(option.hint):  # name=007: text that YAML read as a number
                return self.typed[path]
            for inside, message in e.mistakes:
                self.mistake((*path[:-1], path[-1] + inside), message, place=self.place(path))
            return None

    def place(self, path: Key) -> str:
        """Where a value came from; several places inside a dict are joined."""
        inside = [v for k, v in self.places.items() if k[: len(path)] == path]
        return self.places.get(path) or ", ".join(dict.fromkeys(inside)) or "default"

    def origin(self, path: Key) -> str:
        """The place of a value, or of the nearest one that holds it."""
        return next((self.places[path[:n]] for n in range(len(path), 1, -1) if path[:n] in self.places), "default")


def _copy(value: Any) -> Any:
    """A copy of our own, with numpy's numbers (from notebooks and sweeps) as Python's. Objects stay the same ones."""
    if isinstance(value, np.generic):
        return value.item()
    if type(value) in (dict, Dotted):
        return {k: _copy(v) for k, v in value.items()}
    return [_copy(v) for v in value] if type(value) is list else value
