"""Functions of the user that were called with each environment: one that takes the place of another is told them
too."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any


class Told:
    """The functions, in the order of their last calls. A call from the same place in the user's code replaces the
    earlier one, so the list stays short; a call from another place leaves it there."""

    def __init__(self) -> None:
        self._told: dict[Any, Any] = {}

    def add(self, fn: Any, told: Any, method: str = "foreach_env") -> None:
        """`told`: what to keep for it."""
        place = method, _place(fn)
        self._told.pop(place, None)
        self._told[place] = told

    def __iter__(self) -> Iterator[Any]:
        return iter(self._told.values())


def _place(fn: Any) -> Any:
    """Where a function is written."""
    code = getattr(getattr(fn, "func", fn), "__code__", None)  # a partial has its function inside
    return type(fn) if code is None else (code.co_filename, code.co_firstlineno, code.co_code, code.co_names)
