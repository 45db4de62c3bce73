"""A reservoir: of all rows that ever came, each has the same chance to be among those that are kept (Vitter 1985)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from bray import tree
from bray.data.experience import Replay
from bray.data.piece import Piece
from bray.errors import CheckpointError, ConfigError
from bray.tree import NestedArray

KEEP = "keep"
"""The column of a piece that says which rows go to the reservoir."""


class Reservoir:
    """`size` rows at most, drawn one by one."""

    def __init__(self, size: int):
        self.size, self.seen = size, 0
        self._rows: NestedArray | None = None

    def __len__(self) -> int:
        return min(self.seen, self.size)

    def add(self, rows: NestedArray, rng: np.random.Generator) -> None:
        """Rows `[N, ...]`, copied: the k-th that comes takes a random place of k, if there is such a place."""
        if not (count := tree.length(rows)):
            return
        if self._rows is None:
            self._rows = tree.map(lambda x: np.zeros((self.size, *x.shape[1:]), x.dtype), rows)
        place = self._places(self.seen + np.arange(count), rng)
        kept = np.flatnonzero(place < self.size)
        tree.map(lambda to, of: to.__setitem__(place[kept], of[kept]), self._rows, rows)
        self.seen += count

    def _places(self, before: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        """Where rows go, by how many came before each; none from `size` on."""
        places: np.ndarray = np.where(before < self.size, before, rng.integers(before + 1))
        return places

    def sample(self, count: int, rng: np.random.Generator) -> NestedArray:
        index = rng.integers(len(self), size=count)
        return tree.map(lambda x: x[index], self._rows)

    @property
    def nbytes(self) -> int:
        return 0 if self._rows is None else tree.nbytes(self._rows)

    def get_state(self) -> dict[str, Any]:
        rows = {} if self._rows is None else tree.map(lambda x: x[: len(self)].copy(), self._rows)
        return {"seen": np.int64(self.seen), "rows": rows}

    def set_state(self, state: Mapping[str, Any]) -> None:
        seen, rows = int(state["seen"]), state["rows"]
        self.seen, self._rows = 0, None
        lengths = {len(x) for x in tree.leaves(rows)}
        if lengths != ({min(seen, self.size)} if seen else set()):
            raise CheckpointError(
                f"the checkpoint's reservoir has {sorted(lengths)} rows of {seen:,} that came, expected "
                f"{min(seen, self.size):,}: it was made with another reservoir_size"
            )
        if seen:
            self.add(rows, np.random.default_rng(0))
            self.seen = seen


class Newest(Reservoir):
    """The `size` rows that came last."""

    def add(self, rows: NestedArray, rng: np.random.Generator) -> None:
        """Rows `[N, ...]`, copied over the oldest."""
        super().add(tree.map(lambda x: x[-self.size :], rows), rng)

    def newest(self, count: int) -> NestedArray | None:
        """The rows that came last, at most so many."""
        index = (self.seen - 1 - np.arange(min(count, len(self)))) % self.size
        return tree.map(lambda x: x[index], self._rows) if len(index) else None

    def _places(self, before: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        return before % self.size


class Reservoirs(Replay):
    """A Replay of all rows, and a reservoir of those whose column `keep` is true. A batch has as many rows of each;
    those of the reservoir, `obs` and `action`, are its `kept`."""

    def __init__(self, size: int, batch_size: int, *, reservoir_size: int, **options: Any):
        super().__init__(size, batch_size, **options)
        self.reservoir = Reservoir(reservoir_size)

    def check_live(self) -> None:
        raise ConfigError(
            "this algorithm says at the start of a game how an agent plays it, and live games come and go: train it in "
            "an environment (--env)"
        )

    def add(self, piece: Piece) -> None:
        super().add(piece)
        kept = piece.valid & piece.extras[KEEP]
        obs = tree.map(lambda x: x[:-1][kept], piece.obs)
        self.reservoir.add({"obs": obs, "action": piece.action[kept]}, self.rng)

    def _kept(self, piece: Piece) -> dict[str, NestedArray]:
        return {name: x for name, x in piece.extras.items() if name != KEEP}

    def _ready(self) -> bool:
        return super()._ready() and len(self.reservoir) > 0

    def _draw(self, beta: float) -> dict[str, NestedArray]:
        return {**super()._draw(beta), "kept": self.reservoir.sample(self.batch_size, self.rng)}

    @property
    def nbytes(self) -> int:
        return super().nbytes + self.reservoir.nbytes

    def get_state(self, directory: Path | None) -> dict[str, Any]:
        state = super().get_state(directory)
        if state["json"]["rows"]:
            state["arrays"]["reservoir"] = self.reservoir.get_state()
        return state

    def set_state(self, state: Mapping[str, Any], directory: Path | None) -> bool:
        exact = super().set_state(state, directory)
        if "reservoir" in state["arrays"]:
            self.reservoir.set_state(state["arrays"]["reservoir"])
        return exact
