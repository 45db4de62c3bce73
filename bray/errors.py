"""Errors that a user can act on: what was expected, what came, what to do.

BrayError
├── ConfigError        a key, a value or a combination of values that cannot work
│   └── UnknownName    a name that nothing answers to; the nearest one is offered
├── EnvError           an environment raised, hung, or returned what its spaces forbid
├── CheckpointError    a run directory or checkpoint that is missing, truncated or foreign
│   └── DiskFull       one that could not be written for lack of space; what was there before still is
├── Diverged           a training whose weights, losses or actions are no longer finite numbers
├── DataError          bytes or files that are not what they claim to be
├── ExportError        a Model that cannot become an ONNX file, or whose file answers otherwise than the Model
├── Overloaded         more work than there is room for; try again later
├── Ended              a buffer whose sources have ended and whose samples are all read
├── WaitError          a field of the state that an agent waited for, and that no other agent set
├── MissingComponent   a component of the cluster that is not there; those that are, are named
├── ResourceError      more CPUs, GPUs or memory than the cluster has
├── RemoteError        an error of another process that has no class here; its traceback is its text
└── Unreachable        a component that is there and does not answer
    └── LinkLost       a connection that ended before the answer came
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from bray._version import __version__


class BrayError(Exception):
    """Base of all errors that are shown to the user as one message, without a traceback."""


class ConfigError(BrayError):
    """A configuration that cannot work."""

    problems: tuple[ConfigError, ...] = ()
    """The single mistakes, where the message lists several."""


class UnknownName(ConfigError):
    """A name (algorithm, environment, key, metric) that nothing answers to."""

    def __init__(self, kind: str, name: str, known: Iterable[str], where: str = "", hint: str = ""):
        """`hint` stands in place of the nearest names."""
        self.kind, self.name, self.known, self.where, self.hint = kind, name, sorted(set(known)), where, hint
        place = f" ({where})" if where else ""
        super().__init__(f"unknown {kind} {name!r}{place}.{hint or did_you_mean(name, self.known)}")

    def __reduce__(self) -> tuple[type, tuple[str, str, list[str], str, str]]:
        return UnknownName, (self.kind, self.name, self.known, self.where, self.hint)


class EnvError(BrayError):
    """An environment that raised, hung, or broke its own contract."""


class CheckpointError(BrayError):
    """A run directory or checkpoint that cannot be used."""


class DiskFull(CheckpointError):
    """There was no space to write a file. It may be tried again."""


class Diverged(BrayError):
    """A training whose weights, losses or actions are no longer finite numbers."""


class DataError(BrayError):
    """Bytes or files that are not what they claim to be."""


class ExportError(BrayError):
    """A Model that cannot become an ONNX file, or whose file answers otherwise than the Model."""


class StoppedBySignal(SystemExit):
    """A signal that ends the program at once, with its exit code. A `SystemExit` that is no such one comes from code of
    the user."""


class Overloaded(BrayError):
    """More work than there is room for. Nothing was done; it may be tried again."""


class Ended(BrayError):
    """There is nothing more to read, and nothing will come."""


class WaitError(BrayError):
    """An agent waited for a field of the state that did not come."""


class MissingComponent(BrayError):
    """A component that is not there."""

    def __init__(self, kind: str, name: str, known: Iterable[str]):
        self.kind, self.name, self.known = kind, name, sorted(set(known))
        there = ", ".join(repr(n) for n in self.known if n != name) or "none yet"
        if name in self.known:  # some of its processes are, or it came or went between two questions
            what = f"{kind} {name!r} is starting, or ending, and cannot be asked now: try again; others are: {there}."
        else:
            what = f"there is no {kind} {name!r} in this session; there are: {there}."
        super().__init__(what)

    def __reduce__(self) -> tuple[type, tuple[str, str, list[str]]]:
        return MissingComponent, (self.kind, self.name, self.known)


class ResourceError(BrayError):
    """A component asks for more than the cluster has."""


class RemoteError(BrayError):
    """An error of another process whose class is not known here."""


class Unreachable(BrayError):
    """A component that is there and does not answer."""


class LinkLost(Unreachable):
    """A connection ended before the answer came."""


def did_you_mean(name: str, known: Iterable[str], most: int = 12) -> str:
    """The end of an error message: the nearest known names, else a list of what is known."""
    names = list(known)
    folded = {n.lower(): n for n in names}
    near = [folded[n] for n in difflib.get_close_matches(name.lower(), folded, n=3, cutoff=0.6)]
    if near:
        return " Did you mean " + " or ".join(repr(n) for n in near) + "?"
    if not names:
        return ""
    more = f", … ({len(names)} in all)" if len(names) > most else ""
    return " Known: " + ", ".join(sorted(names)[:most]) + more + "."


def how_to_install(extra: str) -> str:
    """The command that adds an extra of Bray. The package index has other software under the name bray, so that no hint
    may send anybody there."""
    command = "make box2d" if extra == "box2d" else f"pip install '.[{extra}]'"  # that one is compiled, with swig
    return f"{command} in Bray's repository, or './bray_rl-{__version__}-py3-none-any.whl[{extra}]' with its wheel"
