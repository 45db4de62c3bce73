"""Where demonstrations come from: episodes that `bray collect` or `bray record` wrote."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

import bray

EVAL_EVERY = 10  # each so many-th episode is kept for evaluation


class Demonstrations(Iterable[bray.NestedArray]):
    """The moves of some episodes, in a new order each time: `{"obs": [...], "action": ...}`."""

    def __init__(self, path: str, part: int, parts: int, evaluation: bool = False):
        self.path, self.part, self.parts, self.evaluation = path, part, parts, evaluation

    def __iter__(self) -> Iterator[bray.NestedArray]:
        """May be called several times; each call starts from the beginning."""
        reader = bray.EpisodeReader(self.path)
        mine = [i for i in range(len(reader)) if (i % EVAL_EVERY == 0) == self.evaluation][self.part :: self.parts]
        episodes = [reader[i] for i in mine]
        obs = np.concatenate([e["obs"][:-1] for e in episodes])  # the last observation of an episode has no move
        action = np.concatenate([e["action"] for e in episodes])
        for i in np.random.default_rng().permutation(len(action)):
            yield {"obs": obs[i], "action": action[i]}


def build_source(name: str, config: dict[str, Any]) -> list[Iterable[bray.NestedArray]]:
    """
    Args:
        name: the source's name in the launch file; `config[name]` is its section.
        config: the whole file.
    Returns:
        Data sets that are read side by side: the more there are, the more are read at once.
    """
    return [Demonstrations(config["demonstrations"]["path"], part, 2) for part in range(2)]


def build_eval_source(name: str, config: dict[str, Any]) -> list[Iterable[bray.NestedArray]]:
    return [Demonstrations(config["demonstrations"]["path"], 0, 1, evaluation=True)]
