"""What is never written: passwords, tokens and keys. Run directories, trackers, tables and logs have `HIDDEN` in their
place, and where a run goes on they are given again, on the command line or by an environment variable.

An option says of itself that it is one (`declare.Secret`). Entries of `env_config`, of arguments and of launch files
are told by their names (`api_key`, `password`, `auth_token`; not `token_file`, which is a path) and by addresses with a
password in them. Numbers are hidden where they are passwords or keys; `max_tokens: 5` is not.
"""

from __future__ import annotations

import enum
import os
import re
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

from bray.config.declare import Secret, options
from bray.errors import ConfigError

HIDDEN = "(a secret, not written)"
"""Stands where a secret was."""
VARIABLE = "BRAY_SECRET_"
"""`BRAY_SECRET_API_KEY` is the value of a hidden entry `api_key`."""
_WORDS = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")
_TEXTS = frozenset(["token", "tokens", "secret", "secrets"])  # a number that is called so counts something
_PASSWORDS = frozenset(["password", "passwords", "passwd", "pwd", "passphrase", "credential", "credentials", "apikey"])
_KEYS = frozenset(["api", "access", "private", "secret", "auth", "signing", "encryption"])  # before `key`
_WHERE = frozenset(["file", "path", "dir", "name", "names", "env"])  # what is called so says where a secret is
_LOGIN = re.compile(r"://[^/@\s]*:[^/@\s]+@")  # https://user:password@host
_SPACE = re.compile(r"(u?int|float|bool)\d*\[")  # an observation may be called `tokens`


class Kind(enum.IntEnum):
    """What is secret of a value."""

    NOTHING, TEXTS, ALL = range(3)


def kind_of(name: str) -> Kind:
    """What is secret of a value that is called so."""
    words = [word.lower() for word in _WORDS.findall(name)]
    if not words or words[-1] in _WHERE:
        return Kind.NOTHING
    is_key = any(a in _KEYS and b in ("key", "keys") for a, b in pairwise(words))
    if is_key or not _PASSWORDS.isdisjoint(words):
        return Kind.ALL
    return Kind.NOTHING if _TEXTS.isdisjoint(words) else Kind.TEXTS


def hide(value: Any, secret: Kind = Kind.NOTHING) -> Any:
    """A copy of plain data without what is secret of it, and without entries that look like secrets."""
    if isinstance(value, Mapping):
        outer = Kind.ALL if secret == Kind.ALL else Kind.NOTHING  # `token: {type: embed}` is a part of something
        return {k: hide(v, max(outer, kind_of(str(k)))) for k, v in value.items()}
    if type(value) in (list, tuple):
        return type(value)(hide(v, secret) for v in value)
    if isinstance(value, str):
        is_space = secret == Kind.TEXTS and _SPACE.match(value)
        return HIDDEN if (secret and value and not is_space) or _LOGIN.search(value) else value
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return HIDDEN if (is_number and secret == Kind.ALL) or (isinstance(value, bytes) and secret) else value


def hide_launch(config: Mapping[str, Any]) -> dict[str, Any]:
    """A launch file, by the names of its components, without its secrets."""
    return {name: hide(section) for name, section in config.items()}


def hide_section(kind: type, values: Mapping[str, Any]) -> dict[str, Any]:
    """The plain data of a config section, without its secrets."""
    rules = {name: next((m for m in o.metadata if isinstance(m, Secret)), None) for name, o in options(kind).items()}
    return {
        k: v if (rule := rules.get(k)) is None else hide(v, Kind.NOTHING if rule.inside else Kind.ALL)
        for k, v in values.items()
    }


def give_again(values: Any, path: tuple[str, ...] = ()) -> Any:
    """A copy of what was read of a run directory, with the environment's values where secrets were hidden."""
    if isinstance(values, Mapping):
        return {k: give_again(v, (*path, str(k))) for k, v in values.items()}
    if isinstance(values, list):
        return [give_again(v, path) for v in values]
    return os.environ.get(_variable(path), values) if values == HIDDEN and path else values


def refuse_hidden(plain: Any, where: str, path: tuple[str, ...] = ()) -> None:
    """Raise for the first secret that was not given again."""
    if isinstance(plain, Mapping):
        for key, value in plain.items():
            refuse_hidden(value, where, (*path, str(key)))
    elif isinstance(plain, (list, tuple)):
        for value in plain:
            refuse_hidden(value, where, path)
    elif isinstance(plain, str) and plain == HIDDEN:
        key = ".".join(path)
        raise ConfigError(
            f"{where}: {key} is a secret, and secrets are not written to run directories: give it again, on the "
            f"command line ({key}=...) or in the environment ({_variable(path)})"
        )


def _variable(path: tuple[str, ...]) -> str:
    return VARIABLE + re.sub(r"\W", "_", path[-1]).upper()
