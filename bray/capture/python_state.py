"""What a function may change besides tensors: attributes of modules, variables it closes over, generators of random
numbers.

A recording (`bray.capture`) replays tensor operations only. So whoever makes one must know whether the function changes
anything else, and put it back, because making a recording calls the function several times where its caller asked for
one call.
"""

from __future__ import annotations

import functools
import random
import types
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

_PLAIN = (bool, int, float, complex, str, bytes, type(None))
_CONTAINERS = (list, dict, set, deque, np.ndarray)
_GENERATORS = (np.random.Generator, np.random.RandomState, random.Random, torch.Generator)
_HOOKS = vars(nn.Module()).keys() - {"_parameters", "_buffers", "_modules"}  # a forward does not set these
_MOST_ITEMS = 1000  # longer containers are data (a replay, a dataset), not the state of a network
_MOST_DEPTH = 2  # learner -> target -> its module


@dataclass
class _Location:
    """Something that can be read (as a copy) and written."""

    name: str
    read: Callable[[], Any]
    write: Callable[[Any], Any]
    keyed: bool = False
    """What is read is a dict whose keys are names that a reader of the message knows."""
    before: Any = None

    def changes(self) -> list[str]:
        """Names of what is not as it was before."""
        before, now = self.before, self.read()
        if _same(before, now):
            return []
        if not self.keyed:
            return [self.name]
        keys = [k for k in before | now if k not in before or k not in now or not _same(before[k], now[k])]
        return [f"{self.name}.{k}" for k in keys]


class PythonState:
    """The Python state that `fn` can reach, as it is now.

    Looked at are: all attributes of the modules it uses (and their containers and generators), plain values of an
    object that it is a method of, variables of its closure and what they hold, globals that it names, and the
    generators of `random` and `numpy.random`. Not what it reaches by other ways (files, C extensions)."""

    def __init__(self, fn: Callable[..., Any]):
        self._places = list(_Search().places(fn))
        for place in self._places:
            place.before = place.read()

    def changed(self) -> list[str]:
        """Names of what is not as it was."""
        return [name for p in self._places for name in p.changes()]

    def restore(self) -> None:
        """Put everything back."""
        for p in self._places:
            if not _same(p.before, p.read()):
                p.write(p.before)


def _same(a: Any, b: Any) -> bool:
    """Same contents; for tensors and objects: the same one (what is inside is looked at elsewhere)."""
    if a is b:
        return True
    if type(a) is not type(b):
        return False
    if isinstance(a, np.ndarray):
        return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(_same(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(_same, a, b))
    if isinstance(a, float):
        return a == b or (a != a and b != b)
    return isinstance(a, (*_PLAIN, set, np.generic)) and bool(a == b)


class _Search:
    """Walks from a function to whatever holds state, each thing once."""

    def __init__(self) -> None:
        self._seen: set[int] = set()

    def places(self, fn: Any) -> Iterator[_Location]:
        yield _Location("random", random.getstate, random.setstate)
        yield _Location("numpy.random", lambda: np.random.get_state(legacy=False), np.random.set_state)
        yield from self._visit("", fn, 0)

    def _visit(self, name: str, x: Any, depth: int) -> Iterator[_Location]:
        if id(x) in self._seen or isinstance(x, (*_PLAIN, Tensor, type, types.ModuleType)):
            return
        self._seen.add(id(x))
        if isinstance(x, nn.Module):
            yield from self._module(x)
        elif isinstance(x, _CONTAINERS):
            yield from self._container(name, x, depth)
        elif isinstance(x, _GENERATORS):
            yield _generator(name, x)
        elif isinstance(x, tuple):
            yield from self._items(name, enumerate(x), depth)
        elif isinstance(x, types.FunctionType):
            yield from self._function(x, depth)
        elif isinstance(x, types.MethodType):
            yield from self._visit(name, x.__func__, depth)
            yield from self._visit(type(x.__self__).__name__, x.__self__, depth)
        elif isinstance(x, functools.partial):
            yield from self._items(name, enumerate((x.func, *x.args, *x.keywords.values())), depth)
        elif hasattr(x, "__dict__") and not getattr(x, "holds_recordings", False):
            yield from self._object(name or type(x).__name__, x, depth)

    def _items(self, name: str, items: Any, depth: int) -> Iterator[_Location]:
        for key, x in items:
            yield from self._visit(f"{name}[{key!r}]", x, depth)

    def _container(self, name: str, x: Any, depth: int) -> Iterator[_Location]:
        if isinstance(x, np.ndarray):
            if x.flags.writeable:
                yield _Location(name, x.copy, functools.partial(x.__setitem__, ...))
            return
        if len(x) > _MOST_ITEMS:
            return
        yield _Location(name, functools.partial(_copied, x), functools.partial(_refill, x), isinstance(x, dict))
        if not isinstance(x, set):
            yield from self._items(name, list(x.items() if isinstance(x, dict) else enumerate(x)), depth)

    def _function(self, fn: types.FunctionType, depth: int) -> Iterator[_Location]:
        for name, cell in zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=True):
            yield _Location(name, functools.partial(_cell_contents, cell), functools.partial(_fill_cell, cell))
            yield from self._visit(name, _cell_contents(cell), depth)
        for x in (*(fn.__defaults__ or ()), *(fn.__kwdefaults__ or {}).values()):
            yield from self._visit(type(x).__name__, x, depth)
        for name in fn.__code__.co_names:
            x = fn.__globals__.get(name)
            if isinstance(x, _PLAIN) and name in fn.__globals__:
                read = functools.partial(fn.__globals__.get, name)
                yield _Location(name, read, functools.partial(fn.__globals__.__setitem__, name))
            elif isinstance(x, (nn.Module, *_CONTAINERS, *_GENERATORS)):
                yield from self._visit(name, x, depth)

    def _module(self, module: nn.Module) -> Iterator[_Location]:
        parts = [(path, m) for path, m in module.named_modules() if m is module or id(m) not in self._seen]
        self._seen.update(id(m) for _, m in parts)  # before any of them is met without its path
        for path, m in parts:
            label = ".".join(filter(None, (type(module).__name__, path)))
            attributes = vars(m)
            yield _Location(label, functools.partial(_copied, attributes), functools.partial(_refill, attributes), True)
            for key, x in list(attributes.items()):
                if key not in _HOOKS and isinstance(x, (*_CONTAINERS, *_GENERATORS)):
                    name = label if key in ("_parameters", "_buffers") else f"{label}.{key}"
                    yield from self._visit(name, x, _MOST_DEPTH)
            if not type(m).__module__.startswith("torch."):
                yield from self._visit("", type(m).forward, _MOST_DEPTH)

    def _object(self, name: str, x: Any, depth: int) -> Iterator[_Location]:
        """The plain values of an object that the function itself holds. Further away, and in its containers, only
        modules are looked for: those objects may belong to other threads."""
        attributes = vars(x)
        for key, value in list(attributes.items()):
            label = f"{name}.{key}"
            if isinstance(value, _PLAIN):
                if depth == 0:
                    read = functools.partial(attributes.get, key)
                    yield _Location(label, read, functools.partial(attributes.__setitem__, key))
            elif isinstance(value, (list, dict)):
                items = list(value.items() if isinstance(value, dict) else enumerate(value))[:_MOST_ITEMS]
                yield from self._items(label, [(k, v) for k, v in items if isinstance(v, nn.Module)], depth)
            elif depth < _MOST_DEPTH and not isinstance(value, (*_CONTAINERS, *_GENERATORS)):
                yield from self._visit(label, value, depth + 1)


def _copied(x: Any) -> Any:
    return list(x) if isinstance(x, deque) else x.copy()


def _refill(x: Any, before: Any) -> None:
    if isinstance(x, dict):
        for key in x.keys() - before.keys():
            del x[key]
        x.update(before)
    elif isinstance(x, list):
        x[:] = before
    else:
        x.clear()
        x.update(before) if isinstance(x, set) else x.extend(before)


_EMPTY = object()


def _cell_contents(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # a variable that has no value yet
        return _EMPTY


def _fill_cell(cell: Any, value: Any) -> None:
    if value is not _EMPTY:
        cell.cell_contents = value


def _generator(name: str, x: Any) -> _Location:
    if isinstance(x, np.random.Generator):
        return _Location(name, lambda: x.bit_generator.state, lambda s: setattr(x.bit_generator, "state", s))
    if isinstance(x, np.random.RandomState):
        return _Location(name, lambda: x.get_state(legacy=False), x.set_state)
    if isinstance(x, torch.Generator):
        return _Location(name, lambda: x.get_state().numpy(), lambda s: x.set_state(torch.from_numpy(s)))
    return _Location(name, x.getstate, x.setstate)
