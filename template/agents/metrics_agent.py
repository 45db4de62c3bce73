"""An agent that decides nothing: it watches the others and says what it sees to TensorBoard."""

from __future__ import annotations

from typing import Any

import numpy as np

import bray


class MetricsAgent(bray.Agent):
    watches = True  # what goes wrong here is logged, and stops no game
    late_input = True  # it reads no state.input, so that need not be decoded for it

    def __init__(self, name: str, config: dict[str, Any], state: bray.State):
        self.name = name
        self.value = bray.Metric("agent/value", up_bound=100.0, low_bound=-100.0)  # beyond these something is wrong

    async def on_tick(self, state: bray.State) -> None:
        outputs = await state.wait("outputs")  # agent1 sets it; the order of the agents does not matter
        if "value" in outputs:  # not every model has one
            self.value.merge(outputs["value"])

    async def on_episode(self, episode: list[bray.State], done: bool) -> None:
        """
        Args:
            episode: the states of the last ticks, at most `episode_length` of them.
            done: the session is over; the list may be empty then.
        """
        for state in episode:
            if "dist" in state.outputs:
                p = probabilities(state.outputs["dist"])
                bray.merge("agent/entropy", -(p * np.log(p + 1e-9)).sum())


def probabilities(dist: np.ndarray) -> np.ndarray:
    p = np.exp(dist - dist.max())
    return p / p.sum()
