"""python -m benchmarks.agents [crowd | wrapped | peers]: what games of several agents cost.

crowd     2, 8, 32 and 128 agents in 16 games: CPU of a decision and peak memory, each in a process of its own
wrapped   PPO on 16 CartPoles, plain, and two each in 8 games, in turns of both: CPU of a step of an
          agent with learning
peers     shared PPO on 64 games of simple_spread in turns with Tianshou's and RLlib's (`--peer`: a Python that has
          them), each in a process of one thread: a decision with learning, less what the environments take themselves
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from gymnasium import spaces

import bray
from bray.envs.multi_agent import ALL, Agents, MultiAgentEnv, StepOfAgents

GAMES, WARM, ROUNDS = 16, 3, 12
PEERS = Path(__file__).parent / "peers"
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


def spread() -> None:
    """Our side of `peers`: a process like those of `peers/tianshou_spread.py` and `peers/rllib_spread.py`."""
    sys.path.insert(0, str(PEERS))
    import cases
    import spread

    made = {
        "num_envs": spread.GAMES,
        "vector": "inprocess",
        "rollout_length": spread.STEPS,
        "minibatches": spread.GAMES * spread.STEPS * spread.AGENTS // spread.MINIBATCH,
        "epochs": cases.EPOCHS,
        "lr": cases.LEARNING_RATE,
        "gamma": cases.GAMMA,
        "lambda_": cases.GAE_LAMBDA,
        "clip": cases.CLIP,
        "entropy_coef": cases.ENTROPY_COEF,
        "value_coef": cases.VALUE_COEF,
        "max_grad_norm": cases.MAX_GRAD_NORM,
        "fcnet_hiddens": [64, 64],
        "fcnet_activation": "tanh",
    }
    with tempfile.TemporaryDirectory() as path, bray.Experiment("PPO", spread.make_parallel, path=path, **made) as exp:
        turns = spread.Turns()
        while True:
            turns.tick(exp.training.iterate()["episode_return_mean"])


def peers(peer: str, seconds: float, turns: int) -> dict[str, Any]:
    """Microseconds of a decision with learning, less those of the environments: medians of turns after the first."""
    commands = {
        "bray": [sys.executable, "-m", "benchmarks.agents", "spread"],
        "tianshou": [peer, str(PEERS / "tianshou_spread.py")],
        "rllib": [peer, str(PEERS / "rllib_spread.py")],
    }
    alone = os.environ | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "env": alone}
    sides: dict[str, Any] = {}
    found: dict[str, dict[str, list[float]]] = {name: {} for name in commands}
    for turn in range(turns + 1):
        for name, words in commands.items():
            if turn == 0:
                sides[name] = subprocess.Popen(words, **pipes)
            side = sides[name]
            print(seconds, file=side.stdin, flush=True)
            if not (line := side.stdout.readline()):
                raise SystemExit(f"{name}: the process ended by itself: {' '.join(words)}")
            print(json.dumps({"side": name, "turn": turn, **(got := json.loads(line))}), flush=True)
            for clock in ("cpu", "wall"):
                each = 1e6 / got["decisions"]
                own = got[f"env_{clock}"]
                if turn:
                    found[name].setdefault(f"{clock}_us", []).append(each * (got[clock] - own))
                    found[name].setdefault(f"env_{clock}_us", []).append(each * own)
    for side in sides.values():
        side.stdin.close()
        side.wait()
    medians = {name: {k: round(statistics.median(v), 1) for k, v in of.items()} for name, of in found.items()}
    fastest = {clock: min(medians[name][clock] for name in sides if name != "bray") for clock in ("cpu_us", "wall_us")}
    return {**medians, **{f"share_{clock}": round(medians["bray"][clock] / us, 3) for clock, us in fastest.items()}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("case", choices=["crowd", "wrapped", "peers", "spread"])
    parser.add_argument("--agents", type=int)
    parser.add_argument("--peer", default=str(PEERS.parents[1] / ".venv-peers" / "bin" / "python"))
    parser.add_argument("--seconds", type=float, default=5.0, help="of CPU time, of a turn of `peers`")
    parser.add_argument("--turns", type=int, default=5)
    args = parser.parse_args()
    if args.case == "spread":
        spread()
    elif args.case == "peers":
        print(json.dumps(peers(args.peer, args.seconds, args.turns)))
    elif args.case == "wrapped":
        print(json.dumps(wrapped()))
    elif args.agents:
        print(json.dumps(crowd(args.agents)))
    else:
        for agents in (2, 8, 32, 128):
            subprocess.run([sys.executable, "-m", "benchmarks.agents", "crowd", "--agents", str(agents)], check=True)


if __name__ == "__main__":
    main()
