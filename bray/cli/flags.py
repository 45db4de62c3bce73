"""Dataclasses as commands of Typer."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any

import annotated_types
import typer
from typer.core import TyperCommand

from bray.cli.options import SECTIONS, SHOWN, Options
from bray.config import ConfigSource
from bray.config.declare import Flag, Option, choices, list_item, members, options

_METAVARS = {int: "N", float: "X"}


class Command(TyperCommand):
    """A command whose help is plain text, its flags under the titles of their groups. Typer's own boxes import all of
    Rich, which takes longer than everything else that `bray --help` does."""

    def format_options(self, ctx: typer.Context, formatter: Any) -> None:  # type: ignore[override]
        groups: dict[str, list[tuple[str, str]]] = {}
        for param in self.get_params(ctx):
            if record := param.get_help_record(ctx):
                argument = param.param_type_name == "argument"
                title = "Arguments" if argument else getattr(param, "rich_help_panel", None) or "Options"
                groups.setdefault(title, []).append(record)
        for title, records in sorted(groups.items(), key=lambda group: group[0] == "Options"):
            with formatter.section(title):
                formatter.write_dl(records)


def load(path: str) -> Any:
    """What `module:name` names."""
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)


def make_function(name: str, cls: type[Options], function: str) -> Callable[..., int]:
    """A function with a parameter for each flag. It calls `function` with the options, and a ConfigSource of the config
    keys that were set."""
    own, settings = list(_own(cls)), list(_settings(name))

    def call(**given: Any) -> int:
        made = cls(**{option.name: given[option.name] for option, _ in own})
        more = [_source(settings, given)] if settings else []
        return load(function)(made, *more)

    parameters = [_parameter(option.name, option, panel) for option, panel in own]
    for section, option in settings:
        parameters.append(_parameter(f"{section}_{option.name}", option, SECTIONS[name][section][1], config_key=True))
    shown_last = {option.name for option, panel in own if panel == SHOWN}
    parameters.sort(key=lambda p: (p.default is not inspect.Parameter.empty, p.name in shown_last))
    call.__name__, call.__doc__ = name, inspect.getdoc(cls)
    call.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    call.__annotations__ = {p.name: p.annotation for p in parameters}
    return call


def _source(settings: list[tuple[str, Option]], given: dict[str, Any]) -> ConfigSource:
    values: dict[str, Any] = {}
    texts: dict[tuple[str, ...], str] = {}
    for section, option in settings:
        value, flag = given[f"{section}_{option.name}"], option.flag or Flag()
        if value is not None and value is not False and value != []:  # 0 is a value
            parsed = value if flag.parse is None else flag.parse(value)
            values.setdefault(section, {})[option.name] = parsed
            texts[section, option.name] = _spellings(option)[-1] + ("" if value is True else f" {value}")
    return ConfigSource("command line", values, texts=texts)


def _own(cls: type) -> Iterator[tuple[Option, str | None]]:
    """The options of a command, each with the title of its group."""
    panel = None
    for option in sorted(options(cls).values(), key=lambda o: o.name in options(Options)):
        flag = option.flag or Flag()
        panel = flag.panel or (None if option.name in options(Options) else panel)
        yield option, panel


def _settings(command: str) -> list[tuple[str, Option]]:
    """(section, option) of the flags that set keys of a config."""
    found = [(section, load(path)) for section, (path, _) in SECTIONS.get(command, {}).items()]
    return [(section, option) for section, cls in found for option in options(cls).values() if option.flag is not None]


def _spellings(option: Option) -> list[str]:
    flag = option.flag or Flag()
    return flag.names.split(",") if flag.names else ["--" + option.name.replace("_", "-")]


def _parameter(name: str, option: Option, panel: str | None, config_key: bool = False) -> inspect.Parameter:
    flag = option.flag or Flag()
    kind, limits = _typer_type(option)
    default = inspect.Parameter.empty if option.required else option.default
    help_text = option.doc
    if config_key:  # None: not given, so that the file and the preset decide
        help_text = flag.help or _short_help(option)
        kind, default, limits = (kind, False, {}) if kind is bool else (kind | None, None, {})
    if flag.argument:
        info: Any = typer.Argument(metavar=flag.metavar, help=help_text, show_default=False)
    else:
        metavar = flag.metavar or _METAVARS.get(_plain(option))
        info = typer.Option(
            *_spellings(option), metavar=metavar, help=help_text, rich_help_panel=panel, hidden=flag.hidden, **limits
        )  # fmt: skip
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, info])


def _plain(option: Option) -> Any:
    """The type of what is typed once."""
    found = members(option.hint)
    item = list_item(option.hint)
    return members(item)[0] if item is not None else found[0]


def _typer_type(option: Option) -> tuple[Any, dict[str, Any]]:
    """The type that Typer reads, and the limits it checks."""
    plain = _plain(option)
    alike = len(members(option.hint)) == 1  # else `auto` or a number: what was typed is checked with the config
    kind: Any = plain if alike and (plain in (int, float, bool, Path) or choices(plain)) else str
    if list_item(option.hint) is not None or (option.flag and option.flag.parse and option.takes_any_key):
        kind = list[kind]
    limits: dict[str, Any] = {}
    for m in option.metadata if kind is not str else ():
        match m:
            case annotated_types.Ge(limit):
                limits["min"] = limit
            case annotated_types.Gt(limit):  # of whole numbers
                limits["min"] = int(limit) + 1  # type: ignore[call-overload]
            case annotated_types.Le(limit):
                limits["max"] = limit
    return (kind | None if not option.required and option.default is None else kind), limits


def _short_help(option: Option) -> str:
    """The first sentence of the docstring, and the default where that is a word or a number."""
    text = option.doc.partition(". ")[0].partition("; null = ")[0].rstrip(".") + "."
    default = option.default
    shown = isinstance(default, (int, float, str)) and not isinstance(default, bool) and default != ""
    return f"{text} Default: {default}." if shown else text
