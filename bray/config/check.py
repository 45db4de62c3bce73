"""One value against what its option allows: strict types and limits, and a message that says what was expected."""

from __future__ import annotations

import difflib
import enum
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, Union

from pydantic import BeforeValidator, ConfigDict, PydanticUserError, Strict, TypeAdapter, ValidationError

from bray.config.declare import base, choices, describe, list_item, members, options, show
from bray.errors import ConfigError, did_you_mean

_STRICT = ConfigDict(strict=True, allow_inf_nan=False, arbitrary_types_allowed=True)


class Wrong(Exception):
    """A value that its option does not allow; `mistakes` are (place inside the value, message)."""

    def __init__(self, mistakes: list[tuple[str, str]]):
        self.mistakes = mistakes


def checked(cls: type, name: str, value: Any) -> Any:
    """The value as the field holds it; raises Wrong."""
    try:
        return _adapter(cls, name).validate_python(value)
    except ValidationError as e:
        raise Wrong(list(_mistakes(e, options(cls)[name].hint, value))) from None


def check_fields(made: Any, section: str) -> None:
    """Check a dataclass that Python code made itself, in its `__post_init__`."""
    cls: type = type(made)
    for name in options(cls):
        try:
            checked(cls, name, getattr(made, name))
        except Wrong as e:
            raise ConfigError("; ".join(f"{section}.{name}{at}: {message}" for at, message in e.mistakes)) from None


@lru_cache(maxsize=1024)
def _adapter(cls: type, name: str) -> TypeAdapter[Any]:
    hint = _loosen(options(cls)[name].hint)
    try:
        return TypeAdapter(hint, config=_STRICT)
    except PydanticUserError:  # a dataclass or TypedDict brings a config of its own
        return TypeAdapter(hint)


def _whole(x: Any) -> Any:
    return int(x) if isinstance(x, float) and x.is_integer() else x


def _loosen(hint: Any, numbers: bool = True) -> Any:
    """The hint as we check it: strict, but a list may stand for a tuple, text for a path or an enum, 1e6 for an int."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is Annotated:
        return Annotated[(_loosen(args[0], numbers), *args[1:])]
    if origin in (Union, types.UnionType):
        numbers = not any(base(a) is float for a in args)
        return Union[tuple(_loosen(a, numbers) for a in args)]  # noqa: UP007
    if hint is int and numbers:
        return Annotated[int, BeforeValidator(_whole)]
    inner = tuple(a if a is ... else _loosen(a) for a in args)
    if origin is tuple or hint is tuple:
        return Annotated[tuple[inner] if args else hint, Strict(False)]  # type: ignore[valid-type]
    if origin in (list, dict, set, frozenset, Sequence, Mapping) and args:
        return origin[inner]
    if isinstance(hint, type) and issubclass(hint, (Path, enum.Enum)):
        return Annotated[hint, Strict(False)]
    return hint


def _mistakes(error: ValidationError, hint: Any, value: Any) -> Iterator[tuple[str, str]]:
    """(place inside the value, 'expected ..., got ...') for what pydantic found."""
    found = error.errors(include_url=False)
    item = list_item(hint)
    if item is not None and all(e["loc"] and isinstance(e["loc"][0], int) for e in found):
        for e in found:  # each wrong entry of a list by its index
            yield f"[{e['loc'][0]}]", f"expected {describe(item)}, got {show(e['input'])}"
        return
    for e in found:
        if e["type"] in ("value_error", "assertion_error"):
            message = e["msg"].removeprefix("Value error, ").removeprefix("Assertion failed, ")
            yield "", f"{message}, got {show(value)}"
            return
    inside = found[0]["loc"] if len(found) == 1 and len(members(hint)) == 1 else ()
    if inside:
        place = "".join(f"[{p}]" if isinstance(p, int) else f".{p}" for p in inside)
        yield place, f"{found[0]['msg'][0].lower()}{found[0]['msg'][1:]}, got {show(found[0]['input'])}"
        return
    finite = any(e["type"] == "finite_number" for e in found)
    yield "", f"expected {'a finite number' if finite else describe(hint)}, got {show(value)}{_near(hint, value)}"


def _near(hint: Any, value: Any) -> str:
    """`. Did you mean 'relu'?` where a choice is misspelt."""
    names = [c for m in members(hint) for c in choices(m) if isinstance(c, str)]
    if isinstance(value, str) and difflib.get_close_matches(value, names):
        return "." + did_you_mean(value, names)
    return ""
