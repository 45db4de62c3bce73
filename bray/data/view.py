"""A part of a replay's history, sampled as the replay is."""

from __future__ import annotations

import numpy as np

from bray.data.ring_sampling import SampledRing
from bray.errors import ConfigError
from bray.tree import NestedArray


class View:
    """Some rows of a replay (`ReplayRing.view`). It stores nothing: rows added to the replay show up here, draws count
    there, and new priorities go there. A draw looks at all rows of the part."""

    def __init__(self, replay: SampledRing, rows: slice):
        if rows.step not in (None, 1):
            raise ConfigError(f"a view is a run of rows, so its slice has no step; got {rows}")
        self.replay, self.rows = replay, rows

    def __len__(self) -> int:
        """Transitions that can be sampled."""
        return len(self.ids())

    def ids(self) -> np.ndarray:
        """Their ids, oldest first."""
        return self.replay.ids(self._within())

    def sample(self, batch_size: int, rng: np.random.Generator, beta: float | None = None) -> dict[str, NestedArray]:
        """As `ReplayRing.sample`. N-step windows may reach beyond the view."""
        return self.replay.sample(batch_size, rng, beta, self._within())

    def sample_sequences(
        self, batch_size: int, length: int, burn_in: int, rng: np.random.Generator, beta: float | None = None
    ) -> dict[str, NestedArray]:
        """As `ReplayRing.sample_sequences`; the sequences lie inside the view."""
        return self.replay.sample_sequences(batch_size, length, burn_in, rng, beta, self._within())

    def sample_groups(
        self, batch_size: int, rng: np.random.Generator, by: str = "episode", length: int | None = None
    ) -> dict[str, NestedArray]:
        """As `ReplayRing.sample_groups`, of the transitions inside the view."""
        return self.replay.sample_groups(batch_size, rng, by, length, self._within())

    def update_priorities(self, id: np.ndarray, priority: np.ndarray) -> None:
        """As `ReplayRing.update_priorities`."""
        self.replay.update_priorities(id, priority)

    def _within(self) -> tuple[int, int]:
        n = self.replay.num_envs
        low, high = self.replay.id_range()
        rows = range(low // n, high // n)[self.rows]
        return rows.start * n, rows.stop * n
