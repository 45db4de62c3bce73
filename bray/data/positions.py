"""Positions of games that have ended, each with the game's outcome for who decided there."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from bray import tree
from bray.data.episodes import Episodes
from bray.data.experience import Batch, Replay
from bray.data.piece import Piece
from bray.data.reservoir import Newest
from bray.errors import ConfigError
from bray.tree import NestedArray


class Positions(Replay):
    """The newest `size` positions, drawn again and again: `obs`, the columns that the Policy kept (`extras`), and the
    `outcome`, the sum of what was paid from there to the end of the game. Games under way wait for their end."""

    def __init__(self, size: int, batch_size: int, **options: Any):
        super().__init__(size, batch_size, gamma=1.0, **options)
        self._games, self._kept_rows = Episodes(1), Newest(size)

    def check_live(self) -> None:
        raise ConfigError(
            "this algorithm searches the game that it plays, and a live game cannot be copied: train it in an "
            "environment (--env)"
        )

    def add(self, piece: Piece) -> None:
        self._due += int(np.count_nonzero(piece.valid))
        self._games.add(piece)
        for game in self._games.take():
            outcome = game["reward"][::-1].cumsum(dtype=np.float64)[::-1].astype(np.float32)
            obs = tree.map(lambda x: x[:-1], game["obs"])
            self._kept_rows.add({"obs": obs, "outcome": outcome, **game["extras"]}, self.rng)

    def __len__(self) -> int:
        return len(self._kept_rows)

    def _draw(self, beta: float) -> dict[str, NestedArray]:
        drawn: Any = self._kept_rows.sample(self.batch_size, self.rng)
        return {**drawn, "id": None}

    def feedback(self, batch: Batch, priorities: np.ndarray | None, version: int) -> None:
        self._version = version

    def cut(self) -> None:
        self._games.cut()

    def wait_reason(self) -> str:
        return (
            f"{len(self):,} positions of games that have ended are there; learning starts after "
            f"{self.learning_starts:,} environment steps (learning_starts) and with a batch of {self.least:,} "
            "(batch_size)"
        )

    def numbers(self) -> dict[str, float]:
        return {"size": len(self)}

    def newest_obs(self, rows: int) -> NestedArray | None:
        newest: Any = self._kept_rows.newest(rows)
        return None if newest is None else newest["obs"]

    @property
    def nbytes(self) -> int:
        return self._kept_rows.nbytes

    def get_state(self, directory: Path | None) -> dict[str, Any]:
        state, games = super().get_state(directory), self._games.get_state(directory)
        state["arrays"]["games"], state["json"]["games"] = games["arrays"], games["json"]
        if directory is not None:
            state["arrays"]["positions"] = self._kept_rows.get_state()
        return {**state, "exact": directory is not None or not len(self)}

    def set_state(self, state: Mapping[str, Any], directory: Path | None) -> bool:
        super().set_state(state, directory)
        arrays = state["arrays"]
        self._games.set_state({"arrays": arrays.get("games", {}), "json": state["json"]["games"]}, directory)
        if "positions" in arrays:
            self._kept_rows.set_state(arrays["positions"])
        return "positions" in arrays
