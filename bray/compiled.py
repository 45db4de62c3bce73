"""Compiled loops: one decorator, so that each of them is cached where this user may write, and works where nothing can
be written."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, TypeVar

import numba

F = TypeVar("F", bound=Callable[..., Any])
logger = logging.getLogger("bray")
_told: list[str] = []


def compiled(function: F, **options: Any) -> F:
    """`function` as machine code, made when it is first called and kept on disk: beside the package, else in the user's
    cache."""
    try:
        return numba.njit(cache=True, nogil=True, **options)(function)
    except RuntimeError as e:  # how numba says that it may write in neither
        if not _told:
            _told.append(str(e))
            logger.warning(
                "compiled loops are not kept (set NUMBA_CACHE_DIR to a directory you may write to): every start "
                "compiles them anew, which takes seconds"
            )
        return numba.njit(nogil=True, **options)(function)
