"""Calls of the user's functions (`foreach_env`, `foreach_worker`) that are made again with an environment or a worker
that replaces another."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any


class ReplayedCalls:
    """The calls, in the order in which they were last made. One from the same place in the user's code replaces the
    earlier one, so the list stays short; one from another place is kept beside it."""

    def __init__(self) -> None:
        self._calls: dict[Any, Any] = {}

    def add(self, fn: Any, call: Any, method: str = "foreach_env") -> None:
        """`call`: what to keep for it."""
        source = method, _source(fn)
        self._calls.pop(source, None)
        self._calls[source] = call

    def __iter__(self) -> Iterator[Any]:
        return iter(self._calls.values())


def _source(fn: Any) -> Any:
    """Where a function is written."""
    code = getattr(getattr(fn, "func", fn), "__code__", None)  # a partial has its function inside
    return type(fn) if code is None else (code.co_filename, code.co_firstlineno, code.co_code, code.co_names)
