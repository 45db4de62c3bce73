"""Games of which a search learns that some settings do not work."""

import os

from gymnasium.envs.classic_control import CartPoleEnv


class Fragile(CartPoleEnv):
    """`fault`: what it does at its 30th step."""

    def __init__(self, fault=None, once=None):
        super().__init__()
        self.fault, self.once, self.steps = fault, once, 0

    def step(self, action):
        self.steps += 1
        if self.steps >= 30 and self.fault == "raise":
            raise RuntimeError("the game fell over")
        if self.steps >= 30 and self.fault == "die":
            os._exit(7)
        return super().step(action)
