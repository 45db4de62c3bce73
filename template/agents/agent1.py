"""The agent that decides. It acts and makes samples with the algorithm's own Policy (`bray.PolicyAgent`); what is
written here is how this game speaks. A game whose ticks are `{"obs", "reward", "terminated", "truncated"}` in JSON
needs no method at all."""

from __future__ import annotations

from typing import Any

import numpy as np

import bray


class Agent1(bray.PolicyAgent):
    """Understands JSON (`serialize: json`) and the messages of tick.proto (`serialize: proto`)."""

    def observe(self, state: bray.State) -> tuple[Any, float, bool, bool]:
        """
        Returns:
            The observation; the reward of the previous action; whether the episode is over (terminated), or was cut
            (truncated).
        """
        tick = state.input
        if isinstance(tick, dict):
            return super().observe(state)
        obs = np.frombuffer(tick.obs, np.uint8).reshape(self.config["network"]["state_space"])
        return obs, tick.reward, tick.terminated, tick.truncated

    def answer(self, state: bray.State, action: Any) -> None:
        if isinstance(state.output, dict):
            super().answer(state, action)
        else:
            state.output.action = int(action)
