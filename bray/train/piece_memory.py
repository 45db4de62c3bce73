"""The arrays of pieces in memory that two processes share: a sampler writes what it has played, the process that learns
reads it in place.

A memory is a file with places for what is played at a time. How the arrays lie in a place is told where that has
changed; pieces that do not fit get a larger file, and views of the one before hold as long as somebody has them."""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bray import tree
from bray.data.piece import COLUMNS, Piece
from bray.tree.shared import places

PLACES = 3
"""One that is lent to the process that learns, and two that its sampler may have been asked for."""
MORE = 1.5
"""A file that takes the place of a smaller one is so many times as large as what has to fit."""


@dataclass
class Written:
    """Where pieces are. They are without their arrays."""

    pieces: list[Piece]
    place: int
    layout: list[dict[str, Any]] | None
    """Of the arrays of each piece in a place; None: as before."""
    file: tuple[str, int] | None
    """A new file and the bytes of its places; None: as before."""


class PieceWriter:
    """In a sampler. `path`: the files begin with it."""

    def __init__(self, path: Path):
        self._path, self._files = path, 0
        self._memory: Any = None
        self._size = self._next = 0
        self._layout: list[dict[str, Any]] | None = None
        self._shapes: Any = None
        self._views: list[Any] = []

    def write(self, pieces: Sequence[Piece]) -> Written:
        """Copy the arrays of pieces to the next place."""
        columns = [_columns(piece) for piece in pieces]
        shapes = [(x.shape, x.dtype) for x in tree.leaves(columns)]
        layout = file = None
        if shapes != self._shapes or self._layout is None or [*map(set, columns)] != [*map(set, self._layout)]:
            found, size = places(tree.leaves(columns))
            each = iter(found)
            layout = self._layout = tree.map(lambda _: next(each), columns)
            if size > self._size:
                file = self._make(size)
            self._shapes, self._views = shapes, _views(self._memory, self._size, layout)
        place, self._next = self._next, (self._next + 1) % PLACES
        tree.map(_copy, self._views[place], columns)
        nothing: dict[str, Any] = dict.fromkeys(COLUMNS)
        return Written([replace(piece, **nothing) for piece in pieces], place, layout, file)

    def _make(self, size: int) -> tuple[str, int]:
        self._size = size if self._memory is None else int(MORE * size)
        path = self._path.with_name(f"{self._path.name}-{self._files}")
        self._files += 1
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(handle, "r+b") as file:
            os.posix_fallocate(file.fileno(), 0, PLACES * self._size)
            self._memory = mmap.mmap(file.fileno(), PLACES * self._size)
        return path.name, self._size


class PieceReader:
    """In the process that learns. It gives the path, so that it can take the files away whatever becomes of the
    sampler."""

    def __init__(self, path: Path):
        self._path = path
        self._memory: Any = None
        self._size = 0
        self._views: list[Any] = []

    def read(self, written: Written) -> list[Piece]:
        """The pieces, with arrays that the sampler writes over when it plays the third time from now."""
        if written.file is not None:
            name, self._size = written.file
            path = self._path.with_name(name)
            with path.open("r+b") as file:
                self._memory = mmap.mmap(file.fileno(), PLACES * self._size)
            path.unlink()  # nobody else opens it any more
        if written.layout is not None:
            self._views = _views(self._memory, self._size, written.layout)
        return [
            replace(piece, **arrays) for piece, arrays in zip(written.pieces, self._views[written.place], strict=True)
        ]

    def remove(self) -> None:
        """Files of a sampler whose answers were not read."""
        for path in self._path.parent.glob(f"{self._path.name}-*"):
            path.unlink(missing_ok=True)


def _columns(piece: Piece) -> dict[str, Any]:
    return {name: value for name in COLUMNS if (value := getattr(piece, name)) is not None}


def _views(memory: Any, size: int, layout: list[dict[str, Any]]) -> list[Any]:
    """The arrays in each place."""
    return [tree.map(lambda place, at=at: place.of(memory, at), layout) for at in range(0, PLACES * size, size)]


def _copy(to: Any, of: Any) -> None:
    to[...] = of
