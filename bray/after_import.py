"""Calls a function with a module once it is imported: at once where it is."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

Then = Callable[[ModuleType], None]


def after_import(name: str, then: Then) -> None:
    if name in sys.modules:
        then(sys.modules[name])
    else:
        _FINDER.waiting[name] = then


class _Finder(MetaPathFinder):
    """Asked by `import` first."""

    def __init__(self) -> None:
        self.waiting: dict[str, Then] = {}

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        then = self.waiting.get(fullname)
        spec = None if then is None else PathFinder.find_spec(fullname, path)
        if then is not None and spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_then(module: ModuleType) -> None:
                execute(module)
                then(module)

            spec.loader.exec_module = execute_and_then  # type: ignore[method-assign]
        return spec


_FINDER = _Finder()
sys.meta_path.insert(0, _FINDER)
