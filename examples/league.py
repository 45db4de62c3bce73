"""A league on an environment of one's own: three players learn rock, paper, scissors in which rock pays double."""

import numpy as np
from gymnasium import spaces

import bray

PAYS = np.array([[0, -1, 2], [1, 0, -1], [-2, 1, 0]])


class Hands(bray.MultiAgentEnv):
    possible_agents = ("left", "right")
    observation_spaces = dict.fromkeys(possible_agents, spaces.Box(0, 1, (1,), np.float32))
    action_spaces = dict.fromkeys(possible_agents, spaces.Discrete(3))

    def reset(self, *, seed=None, options=None):
        return dict.fromkeys(self.possible_agents, np.ones(1, np.float32)), {}

    def step(self, actions):
        paid = float(PAYS[actions["left"], actions["right"]])
        return self.reset()[0], {"left": paid, "right": -paid}, {"__all__": True}, {"__all__": False}, {}


if __name__ == "__main__":
    players = {name: {"player": kind} for name, kind in {"main": "main", "hunter": "main_exploiter"}.items()}
    players["second"] = {"player": {"kind": "main", "snapshot_every": 1500}, "config": {"entropy_coef": 0.05}}
    exp = bray.Experiment("PPO", Hands, num_envs=8, self_play={"snapshot_every": 1000}, policies=players)
    exp.fit({"env_steps_total": 10_000})
    print(f"who is how strong: bray league {exp.path}")
