"""Which keys of a config are searched. A value anywhere in it may stand for several: `1e-5..1e-2:log`, `{grid_search:
[64, 128]}`; on the command line also `0.95,0.99`."""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product
from typing import Any

import numpy as np

from bray.config import ConfigSource, Option, Resolved, options, parse_assignments, read_yaml
from bray.config.declare import describe, members
from bray.config.resolved import yaml_flow
from bray.config.sources import Key, nest
from bray.errors import BrayError, ConfigError, UnknownName

_NUMBER = r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?"
_RANGE = re.compile(rf"\s*({_NUMBER})\.\.({_NUMBER})(:log)?\s*")
LAYER = "study"
"""Name of the sources with what every run of a study has."""
LISTS = ("grid_search", "choice")
RANGES = ("uniform", "loguniform")
_RESAMPLED = 0.25  # of the keys of an explored trial; the others move
_MOVES = (0.8, 1.2)
_PLACED = ("run.seed", "run.threads")  # of a run; a study may go on with other ones

Probe = Callable[[Sequence[ConfigSource]], Resolved]
"""The config that sources make; raises where it cannot work."""


@dataclass(frozen=True)
class Dimension:
    """One key that is searched: some values, or a range of numbers."""

    path: Key
    """As it is written."""
    where: str
    """What was written, and where: unlike that of every other one."""
    values: tuple[Any, ...] = ()
    """None: it is a range."""
    low: float = 0.0
    high: float = 0.0
    log: bool = False
    grid: bool = False
    """Each value is tried as often as every other one."""
    key: str = ""
    """Where it stands in the config."""
    whole: bool = False

    @property
    def name(self) -> str:
        return ".".join(self.path)

    def __str__(self) -> str:
        if self.values:
            return f"{'grid ' if self.grid else ''}{yaml_flow(list(self.values))}"
        return f"{self.low:g}..{self.high:g}{':log' if self.log else ''}"

    @property
    def probes(self) -> tuple[Any, ...]:
        """Values that all have to work: each, or the ends."""
        ends = (self.low, self.high)
        return self.values or (tuple(int(x) if x.is_integer() else x for x in ends) if self.whole else ends)

    def source(self, value: Any) -> ConfigSource:
        """The key with one value."""
        return ConfigSource(self.where, nest(self.path, value))

    def suggest(self, trial: Any) -> Any:
        """A value for a trial of Optuna; one that it has already stays."""
        if self.values:
            return self.from_plain(trial.suggest_categorical(self.name, [yaml_flow(v) for v in self.values]))
        if self.whole:
            return trial.suggest_int(self.name, int(self.low), int(self.high), log=self.log)
        return trial.suggest_float(self.name, self.low, self.high, log=self.log)

    def plain(self, value: Any) -> Any:
        """A value as Optuna keeps it: of a list, which may hold anything, as text."""
        return yaml_flow(value) if self.values else value

    def from_plain(self, value: Any) -> Any:
        return next(v for v in self.values if yaml_flow(v) == value) if self.values else value

    def explore(self, value: Any, rng: np.random.Generator) -> Any:
        """Another value near this one, or now and then any (Jaderberg et al. 2017)."""
        anew, up = rng.random() < _RESAMPLED, int(rng.integers(2))
        if self.values:
            at = self.values.index(value) + (1 if up else -1)
            at = int(rng.integers(len(self.values))) if anew else min(max(at, 0), len(self.values) - 1)
            return self.values[at]
        if anew:
            low, high = (math.log(self.low), math.log(self.high)) if self.log else (self.low, self.high)
            drawn = float(rng.uniform(low, high))
            moved = math.exp(drawn) if self.log else drawn
        else:
            moved = value * _MOVES[up]
            if self.whole and round(moved) == value:
                moved = value + (1 if up else -1)
        moved = min(max(moved, self.low), self.high)
        return round(moved) if self.whole else float(moved)


def typed(items: Sequence[str], name: str = "command line") -> ConfigSource:
    """`lr=1e-5..1e-2:log gamma=0.95,0.99`, as `parse_assignments` takes it, where commas outside of brackets part
    values."""
    source = parse_assignments([_listed(item) for item in items], name)
    texts = {tuple(item.partition("=")[0].strip().split(".")): item for item in items}
    return replace(source, texts=texts)


def _listed(item: str) -> str:
    key, equals, text = item.partition("=")
    try:
        values, _ = read_yaml(f"[{text}]", item)
    except ConfigError:
        return item
    return f"{key}{equals}{{choice: [{text}]}}" if len(values) > 1 else item


def _searched(value: Any, path: Key, where: str) -> Dimension | None:
    """What a value of a config stands for, if it stands for several."""
    if isinstance(value, str) and (match := _RANGE.fullmatch(value)):
        return _range(float(match[1]), float(match[2]), bool(match[3]), path, where)
    if not isinstance(value, Mapping) or len(value) != 1:
        return None
    ((kind, given),) = value.items()
    if kind in LISTS:
        if not isinstance(given, (list, tuple)) or not given:
            raise ConfigError(f"{where}: {kind} takes a list of values, got {given!r}")
        once = tuple(v for i, v in enumerate(given) if v not in given[:i])
        return Dimension(path, where, once, grid=kind == "grid_search")
    if kind in RANGES:
        if not isinstance(given, (list, tuple)) or len(given) != 2 or not all(_is_number(x) for x in given):
            raise ConfigError(f"{where}: {kind} takes two numbers, [low, high], got {given!r}")
        return _range(float(given[0]), float(given[1]), kind == "loguniform", path, where)
    return None


def _is_number(x: Any) -> bool:
    return isinstance(x, (int, float)) and not isinstance(x, bool)


def _range(low: float, high: float, log: bool, path: Key, where: str) -> Dimension:
    if not low < high:
        raise ConfigError(f"{where}: a range goes from the smaller number to the larger one, got {low:g} and {high:g}")
    if log and low <= 0:
        raise ConfigError(f"{where}: a logarithmic range begins above 0, got {low:g}")
    return Dimension(path, where, low=low, high=high, log=log)


def _taken_out(source: ConfigSource) -> tuple[ConfigSource, list[Dimension]]:
    """A source without what is searched in it, and that."""
    found: list[Dimension] = []

    def rest(values: dict[str, Any], path: Key) -> dict[str, Any]:
        out = type(values)()  # `a.b=1` makes a dict of another type
        for key, value in values.items():
            here = (*path, key)
            where = source.where(here)
            if not (source.texts and here in source.texts):
                where = f"{'.'.join(here)}={_shown(value)} in {where}"
            if dimension := _searched(value, tuple(".".join(here).split(".")), where):
                found.append(dimension)
            elif not isinstance(value, dict) or not value:
                out[key] = value
            elif inner := rest(value, here):  # one that held nothing else is left out
                out[key] = inner
        return out

    return replace(source, values=rest(source.values, ())), found


def _shown(value: Any) -> str:
    return yaml_flow(value) if isinstance(value, (str, dict)) else str(value)


@dataclass
class Space:
    """The keys that are searched, and everything else that a run is made of."""

    dimensions: list[Dimension]
    layers: list[ConfigSource | Dimension] = field(repr=False)
    """In their order; those dimensions whose key a later one sets do nothing."""
    fixed: dict[str, Any] = field(repr=False)
    """All other keys, as plain data: what makes another study of it."""

    def sources(self, values: Mapping[str, Any] | None) -> list[ConfigSource]:
        """What a run with these values is made of; with None, one without what is searched."""
        out = [layer for layer in self.layers if isinstance(layer, ConfigSource) or values is not None]
        return [s if isinstance(s, ConfigSource) else s.source((values or {}).get(s.name, s.probes[0])) for s in out]

    def changes(self, values: Mapping[str, Any]) -> list[ConfigSource]:
        """The searched keys alone."""
        return [d.source(values[d.name]) for d in self.dimensions]

    def combinations(self, grid_only: bool) -> list[dict[str, Any]]:
        """Of all values of the dimensions that have some, or of those that are a grid."""
        listed = [d for d in self.dimensions if d.grid or (d.values and not grid_only)]
        return [dict(zip([d.name for d in listed], row, strict=True)) for row in product(*(d.values for d in listed))]

    @property
    def listed(self) -> bool:
        """Whether there is no range in it."""
        return all(d.values for d in self.dimensions)


def make_space(sources: Sequence[ConfigSource], probe: Probe) -> Space:
    """Find what is searched in sources, and see that every value works."""
    layers: list[ConfigSource | Dimension] = []
    for source in sources:
        plain, found = _taken_out(source)
        layers += [plain, *found]
    space = Space([], layers, {})
    written = [layer for layer in layers if isinstance(layer, Dimension)]
    try:
        config = probe(space.sources({}))
    except UnknownName:
        raise
    except ConfigError:
        _refuse_text(written, partial(probe, space.sources(None)))
        raise
    for dimension in written:
        keys = [key for key, place in config.provenance.items() if place == dimension.where]
        if keys:
            space.dimensions.append(_typed(dimension, keys[0], config))
    if not space.dimensions:
        raise ConfigError(
            "there is nothing to search: give a key a range (lr=1e-5..1e-2:log) or several values (gamma=0.95,0.99); "
            "in a file {grid_search: [0.95, 0.99]}"
        )
    known = {d.where: d for d in space.dimensions}
    space.layers = [known.get(x.where, x) if isinstance(x, Dimension) else x for x in layers]
    with _said_once():
        for dimension in space.dimensions:
            for value in dimension.probes:
                probe(space.sources({dimension.name: value}))
    searched = {d.key for d in space.dimensions}
    every = ((f"{section}.{key}", v) for section, values in config.to_dict().items() for key, v in values.items())
    space.fixed = {key: v for key, v in every if key not in {*searched, *_PLACED}}
    return space


def _typed(dimension: Dimension, key: str, config: Resolved) -> Dimension:
    """With its place in the config, and whether its numbers are whole."""
    section, *parts = key.split(".")
    kind: Any = type(config[section])
    option = _option(kind, parts)
    if option is None:  # a key of the environment, or of a network: as it is written
        whole = not dimension.values and dimension.low.is_integer() and dimension.high.is_integer()
        return replace(dimension, key=f"{section}.{parts[0]}", whole=whole and not dimension.log)
    kinds = members(option.hint)
    return replace(dimension, key=f"{section}.{parts[0]}", whole=int in kinds and float not in kinds)


def _option(cls: Any, parts: Sequence[str]) -> Option | None:
    """What is declared of a key; None where any key may stand."""
    option = options(cls).get(parts[0])
    if option is not None and option.nested and parts[1:]:
        return _option(option.nested, parts[1:])
    return None if option is None or option.takes_any_key else option


def _refuse_text(written: Sequence[Dimension], make: Callable[[], Resolved]) -> None:
    """Raise where a range is given to what takes no number. `make`: the config without what is searched."""
    try:
        sections: dict[str, Any] = {name: type(values) for name, values in make().sections.items()}
    except BrayError:
        return
    for d in written:
        owned = [(s, d.path) for s, cls in sections.items() if d.path[0] in options(cls)]
        for section, parts in [(d.path[0], d.path[1:])] if d.path[0] in sections and d.path[1:] else owned:
            option = _option(sections[section], parts)
            if not d.values and option is not None and not {int, float} & set(members(option.hint)):
                raise ConfigError(
                    f"{d.name} ({d.where}): a range is for numbers, and {section}.{'.'.join(parts)} is "
                    f"{describe(option.hint)}: list its values instead"
                )


@contextmanager
def _said_once() -> Iterator[None]:
    """Warnings about a config were shown when it was made first."""
    logger = logging.getLogger("bray")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)
