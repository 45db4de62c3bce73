"""Sources: where pieces of trajectory come from. A piece is the same thing from all of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from bray import tree
from bray.act import Clock
from bray.data.experience import Counts, EndOfData
from bray.data.piece import Piece
from bray.data.sources import DataSet, open_data
from bray.envs.vector import VecEnv
from bray.errors import ConfigError
from bray.spec import ActionLayout
from bray.train.callbacks import CallbackList


@dataclass(frozen=True)
class RolloutWorker:
    """What a function of `foreach_worker` is given: what plays in one process."""

    index: int
    """From 1; 0 is the process that learns."""
    envs: tuple[VecEnv, ...]
    """All of its environments together, or a part for each of its groups (`run.env_groups`)."""
    model: Any
    """Its copy of the Model; in the process that learns, the one that is trained. None where the Model is computed
    there for all."""
    policies: tuple[Any, ...]
    """What chooses actions, for each of `envs`."""

    def foreach_env(self, fn: Callable[[Any], Any]) -> list[Any]:
        return [result for env in self.envs for result in env.foreach_env(fn)]


class Source:
    """The contract, with defaults."""

    exact = False
    """Whether it is asked in the learner's own thread and shares its parameters, so that a run can be repeated bit for
    bit."""

    def gather(self, timeout: float = 0.0) -> tuple[list[Piece], Counts]:
        """What has come, waiting at most so long; nothing may have. Raises EndOfData when nothing will."""
        raise NotImplementedError

    def publish(self, side: str, weights: Callable[[], Mapping[str, np.ndarray]], clock: Clock) -> None:
        """A side has new weights; a source that does not share the parameters asks for them and copies them. One in
        whose games this side does not act leaves them."""

    def limit_episodes(self, left: int | None) -> None:
        """Count so many more episodes and no others; None = all."""

    def wait_reason(self) -> str:
        """Why nothing comes, in words; empty where something does."""
        return ""

    def seconds(self) -> dict[str, float]:
        """Time that the process that learns spent here since the last call, by phase (`train/spent.py`)."""
        return {}

    def learns(self, piece: Piece, version: int) -> None:
        """A learner of this version begins with a piece, where each is learnt from once."""

    def numbers(self) -> dict[str, float]:
        """Of its own, for the result rows."""
        return {}

    def watch(self, callbacks: CallbackList) -> None:
        """Tell callbacks of every episode's start, steps and end."""
        if callbacks.watches:
            raise ConfigError(
                "callbacks of episodes (on_episode_start, _step, _end) need environments that Bray steps, not live "
                "games or files; an Agent of the games has its own on_episode (docs/serving.md)"
            )

    def foreach_env(self, fn: Callable[[Any], Any]) -> list[Any]:
        """`fn(env)` for every environment; what it returned, in their order."""
        raise ConfigError("foreach_env needs environments that Bray steps, not live games or files")

    def foreach_worker(self, fn: Callable[[RolloutWorker], Any]) -> list[Any]:
        """`fn(worker)` in every process that plays; what it returned, in their order."""
        raise ConfigError("foreach_worker needs environments that Bray steps, not live games or files")

    def get_state(self, midway: bool = False) -> dict[str, Any]:
        """{"arrays": tree, "json": plain data}. `midway`: in an iteration that was cut short; what was played of it may
        be lost, and so whoever goes on begins new episodes."""
        return {"arrays": {}, "json": {}}

    def set_state(self, state: dict[str, Any], clock: Clock) -> bool:
        """Go on; returns whether that is exact."""
        return False

    def rewind(self) -> None:
        """After `set_state`: the experience has kept no rows, bring them again."""

    def close(self) -> None: ...


class FileSource(Source):
    """Files of episodes (`bray.data.open_data`), an episode at a time, once. Files hold actions in the environment's
    units; with the `layout` of its action space they become what a learner wants. `reads_itself`: an experience asks
    for the episodes that it needs (`read`), and none come by themselves. `rewards`: what is learnt from instead of
    those in the files."""

    exact = True

    def __init__(
        self,
        files: Sequence[Any] | str | Path,
        layout: ActionLayout | None = None,
        reads_itself: bool = False,
        rewards: Callable[[np.ndarray], np.ndarray] | None = None,
    ):
        self._layout, self._reads_itself, self._rewards = layout, reads_itself, rewards
        self._reader: Any = open_data(files) if isinstance(files, (str, Path)) else files
        if isinstance(self._reader, DataSet) and len(self._reader):
            self._reader.read(0)  # files of another game are refused before a run writes anything
        self._at = self._told = 0
        self._returns: dict[int, float] = {}  # by episode

    @property
    def steps(self) -> np.ndarray:
        steps: np.ndarray = self._reader.steps
        return steps

    def read(self, i: int) -> Piece | None:
        """Episode i, unless it is left out."""
        episode = self._reader.read(i) if isinstance(self._reader, DataSet) else self._reader[i]
        if episode is None:
            return None
        self._returns[i] = float(np.sum(episode["reward"], dtype=np.float64))
        if self._rewards is not None:
            episode = {**episode, "reward": self._rewards(episode["reward"])}
        return episode_piece(episode, i, self._layout)

    def gather(self, timeout: float = 0.0) -> tuple[list[Piece], Counts]:
        if self._at >= len(self._reader):
            raise EndOfData("all files of episodes are read")
        start, self._at = self._at, len(self._reader) if self._reads_itself else self._at + 1
        pieces = [] if self._reads_itself or (piece := self.read(start)) is None else [piece]
        new = slice(max(start, self._told), self._at)  # counted once
        return pieces, Counts(int(self.steps[new].sum()))

    def numbers(self) -> dict[str, float]:
        """Of the episodes in the files: whoever learns from them did not play them, so they are not counted as its."""
        returns = self._returns.values()
        out = {"data/episodes": len(returns)} | ({"data/return_mean": sum(returns) / len(returns)} if returns else {})
        return out | ({"data/broken": len(broken)} if (broken := getattr(self._reader, "broken", {})) else {})

    def get_state(self, midway: bool = False) -> dict[str, Any]:
        return {"arrays": {}, "json": {"episodes": max(self._at, self._told)}}

    def set_state(self, state: dict[str, Any], clock: Clock) -> bool:
        self._at = self._told = int(state["json"]["episodes"])
        return True

    def rewind(self) -> None:
        self._at = 0  # these episodes are read again, but not counted again


def episode_piece(episode: Mapping[str, Any], stream: int = 0, layout: ActionLayout | None = None) -> Piece:
    """An episode of a trajectory file as a piece of one game."""
    n = len(episode["reward"])
    if layout is not None:
        episode = {**episode, "action": layout.from_env(episode["action"])}

    def column(x: Any) -> Any:
        return tree.map(lambda leaf: np.asarray(leaf)[:, None], x)

    first = np.zeros((n + 1, 1), bool)
    first[0] = True
    names = ("obs", "action", "reward", "terminated", "truncated")
    return Piece(
        **{k: column(episode[k]) for k in names},
        valid=np.ones((n, 1), bool),
        first=first,
        extras={k: column(tree.index(v, slice(0, n))) for k, v in episode.items() if k not in names},
        stream=np.array([stream]),
    )
