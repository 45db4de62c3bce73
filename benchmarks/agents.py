"""python -m benchmarks.agents [crowd | wrapped]: what games of several agents cost.

crowd     2, 8, 32 and 128 agents in 16 games: CPU of a decision and peak memory, each in a process of its own
wrapped   PPO on 16 CartPoles, plain, and two each in 8 games, in turns of both: CPU of a step of an
          agent with learning
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from gymnasium import spaces

import bray
from bray.envs.multi_agent import ALL, Agents, MultiAgentEnv, StepOfAgents

GAMES, WARM, ROUNDS = 16, 3, 12
SETTINGS: dict[str, Any] = {"num_envs": 8, "rollout_length": 128, "epochs": 4, "minibatches": 4, "seed": 0}


class Crowd(MultiAgentEnv):
    """Agents that see eight numbers, choose one of four, and all act at every step of 50."""

    def __init__(self, agents: int = 2) -> None:
        self.possible_agents = [f"agent_{i}" for i in range(agents)]
        self.observation_spaces = dict.fromkeys(self.possible_agents, spaces.Box(-1.0, 1.0, (8,), np.float32))
        self.action_spaces = dict.fromkeys(self.possible_agents, spaces.Discrete(4))
        self._seen = dict.fromkeys(self.possible_agents, np.zeros(8, np.float32))
        self._paid = dict.fromkeys(self.possible_agents, 1.0)
        self._t = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Agents, Agents]:
        self._t = 0
        return self._seen, {}

    def step(self, actions: Agents) -> StepOfAgents:
        self._t += 1
        return self._seen, self._paid, {ALL: self._t == 50}, {ALL: False}, {}


class Carts(MultiAgentEnv):
    """CartPoles in one game that has no end: a pole that falls stands again in the step after."""

    def __init__(self, agents: int = 2) -> None:
        self._carts = {f"cart_{i}": gym.make("CartPole-v1").unwrapped for i in range(agents)}
        self.possible_agents = list(self._carts)
        cart = self._carts["cart_0"]
        self.observation_spaces = dict.fromkeys(self._carts, cart.observation_space)
        self.action_spaces = dict.fromkeys(self._carts, cart.action_space)
        self._steps = dict.fromkeys(self._carts, 0)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Agents, Agents]:
        self._steps = dict.fromkeys(self._carts, 0)
        seeds = {name: None if seed is None else seed + i for i, name in enumerate(self._carts)}
        return {name: cart.reset(seed=seeds[name])[0] for name, cart in self._carts.items()}, {}

    def step(self, actions: Agents) -> StepOfAgents:
        obs, paid, fallen, cut = {}, {}, {ALL: False}, {ALL: False}
        for name, cart in self._carts.items():
            if name not in actions:
                obs[name], self._steps[name] = cart.reset()[0], 0
                continue
            obs[name], paid[name], fallen[name], _, _ = cart.step(actions[name])
            self._steps[name] += 1
            cut[name] = self._steps[name] == 500
        return obs, paid, fallen, cut, {}


def crowd(agents: int) -> dict[str, Any]:
    """Playing alone: rollouts are thrown away."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as path:
        made = {"env_config": {"agents": agents}, "num_envs": GAMES, "rollout_length": 64}
        with bray.Experiment("PPO", Crowd, path=path, **made) as exp:
            source = exp.training.sources[0]
            before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            for _ in range(WARM):
                source.gather()
            steps, start = source.agent_steps, time.process_time()
            for _ in range(ROUNDS):
                source.gather()
            spent = time.process_time() - start
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    us = round(1e6 * spent / (source.agent_steps - steps), 2)
    return {"agents": agents, "us_per_decision": us, "grown_mb": round((peak - before) / 1024, 1)}


def wrapped(turns: int = 5) -> dict[str, Any]:
    """A step of an agent as a share of the plain one's, medians of turns."""
    torch.set_num_threads(1)
    costs: dict[str, list[float]] = {"plain": [], "game": []}
    with tempfile.TemporaryDirectory() as path:
        plain = bray.Experiment(
            "PPO", "CartPole-v1", path=f"{path}/p", **SETTINGS | {"num_envs": 16}, vector="inprocess"
        )
        game = bray.Experiment("PPO", Carts, path=f"{path}/g", **SETTINGS)
        with plain, game:
            for turn in range(turns + 1):
                for name, exp, key in (("plain", plain, "env_steps"), ("game", game, "agent_steps")):
                    totals = exp.training.totals
                    before, start = getattr(totals, key), time.process_time()
                    for _ in range(3):
                        exp.training.iterate()
                    if turn:
                        costs[name].append((time.process_time() - start) / (getattr(totals, key) - before))
    us = {name: round(1e6 * float(np.median(found)), 1) for name, found in costs.items()}
    return {**us, "speed_of_plain": round(us["plain"] / us["game"], 2)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("case", choices=["crowd", "wrapped"])
    parser.add_argument("--agents", type=int)
    args = parser.parse_args()
    if args.case == "wrapped":
        print(json.dumps(wrapped()))
    elif args.agents:
        print(json.dumps(crowd(args.agents)))
    else:
        for agents in (2, 8, 32, 128):
            subprocess.run([sys.executable, "-m", "benchmarks.agents", "crowd", "--agents", str(agents)], check=True)


if __name__ == "__main__":
    main()
