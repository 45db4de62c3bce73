"""CartPole-v1 with its state split into a Dict observation of positions and velocities; nothing else changes."""

import gymnasium as gym


class DictCartPole(gym.ObservationWrapper):
    """Observation: `position` = (cart position, pole angle), `velocity` = (cart velocity, pole angular velocity)."""

    def __init__(self, env: gym.Env):
        super().__init__(env)
        box = env.observation_space
        self.observation_space = gym.spaces.Dict(
            position=gym.spaces.Box(box.low[0::2], box.high[0::2]),
            velocity=gym.spaces.Box(box.low[1::2], box.high[1::2]),
        )

    def observation(self, observation):
        return {"position": observation[0::2], "velocity": observation[1::2]}


def make() -> gym.Env:
    return DictCartPole(gym.make("CartPole-v1"))
