"""Episodes of rollouts as files: what `bray collect` plays, and what is played while training (`run.output`)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from bray import tree
from bray.data.files import Episode, EpisodeWriter

_NO_END = 1 << 40  # episodes: files roll by their size


def as_episode(rows: list[dict[str, Any]], final: Any) -> Episode:
    """The rows of an episode, and its final observation."""
    out: Episode = {k: tree.stack([r[k] for r in rows]) for k in rows[0] if k != "obs"}
    return {"obs": tree.stack([*(r["obs"] for r in rows), final]), **out}


class EpisodeRows:
    """Rows of environments that step together, until their episodes end. One that is under way when it is first seen is
    left out."""

    def __init__(self) -> None:
        self._rows: dict[int, list[dict[str, Any]]] = {}

    def add(self, columns: Mapping[str, Any], rows: np.ndarray, first: np.ndarray) -> None:
        """A step of these environments; `first` where an episode begins."""
        for b in np.flatnonzero(rows).tolist():
            if first[b]:
                self._rows[b] = []
            if b in self._rows:
                self._rows[b].append(tree.map(lambda x, b=b: np.array(x[b]), dict(columns)))

    def end(self, b: int, obs: Any, cut: bool = False) -> Episode | None:
        """The episode of environment b, whose final observation is in `obs`; `cut`: it would have gone on."""
        rows = self._rows.pop(b, None)
        if not rows:
            return None
        if cut:
            rows[-1]["truncated"] = np.array(True)
        return as_episode(rows, tree.map(lambda x: np.array(x[b]), obs))


class EpisodeOutput:
    """Files `DIR/worker-N-00000.episodes`, of the whole episodes of a rollout, with rewards as the environment gave
    them."""

    def __init__(self, folder: str, worker: int, first_env: int, file_mb: int):
        name = f"worker-{worker}" + (f"-envs-{first_env}" if first_env else "")
        self._writer = EpisodeWriter(Path(folder) / name, _NO_END, file_mb * 1_000_000)
        self._rows = EpisodeRows()

    def add(self, step: Any, reward: np.ndarray, ended: list[int], obs: Any) -> None:
        """A step of a Rollout; `obs` are the observations behind it."""
        columns = {name: getattr(step, name) for name in ("obs", "action", "terminated", "truncated")}
        if "logp" in step.extras:
            columns["logp"] = step.extras["logp"]
        self._rows.add({**columns, "reward": reward}, step.valid, step.first)
        for b in ended:
            if (episode := self._rows.end(b, obs)) is not None:
                self._writer.write(episode)

    def close(self) -> None:
        """Finish the last file; episodes under way are left out."""
        self._writer.close()
