"""python -m benchmarks.learning.games [carts | nim | rivals | levels] [--seeds 0 1 2]: policies that learn in one game.

carts     four CartPoles in one game, two policies for two of them each: the mean length of an agent's last 100 episodes
          (goal: 450 within 400,000 decisions)
nim       Nim of ten sticks, a policy for each player, paid at the end only: games that the first player wins against
          one that plays perfectly, and games that the second wins where the first begins at random (goal: all that can
          be won)
rivals    two CartPoles in one game, one learnt by PPO and one by DQN (goal: both above 150 within 100,000 decisions)
levels    `examples/hierarchy.py`: a top level that sets goals and a low level that walks to them; the return of the top
          level in 100 greedy games (the most is 0.90; goal: 0.85 within 200,000 decisions of both)
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

import bray
from benchmarks.agents import Carts
from bray.envs.agent_games import Nim
from examples.hierarchy import LEVELS, SETTINGS, Rooms

CARTS = {
    "rollout_length": 128,
    "epochs": 8,
    "minibatches": 8,
    "lr": {"kind": "linear", "start": 1e-3, "end": 1e-4, "steps": 100_000},
    "entropy_coef": 0.0,
}
DQN = {
    "lr": 1e-3,
    "batch_size": 64,
    "replay_size": 50_000,
    "train_every": 2,
    "n_step": 3,
    "tau": 0.01,
    "epsilon": {"kind": "linear", "start": 1.0, "end": 0.04, "steps": 8_000},
}
RELU = {"fcnet_hiddens": [128, 128], "fcnet_activation": "relu"}
"""All of these are those of the presets for CartPole."""


def lengths(policy: Callable[[Any], Any], episodes: int = 20) -> float:
    """Of episodes of one CartPole that this policy plays alone."""
    game, total = Carts(1), 0
    for episode in range(episodes):
        obs, over = game.reset(seed=1_000 + episode)[0], False
        while not over:
            obs, _, fallen, cut, _ = game.step({"cart_0": policy(obs["cart_0"])})
            total, over = total + 1, fallen["cart_0"] or cut["cart_0"]
    return total / episodes


def carts(seed: int, path: str) -> dict[str, Any]:
    made = {
        "policies": {"one": {"config": CARTS}, "two": {"config": CARTS}},
        "num_envs": 4,
        "env_config": {"agents": 4},
    }
    mapping = {"cart_[01]": "one", "cart_[23]": "two"}
    with bray.Experiment("PPO", Carts, path=path, seed=seed, policy_mapping=mapping, **made) as exp:
        row = exp.fit({"env_steps_total": 100_000}, progress=False)
    found = {name: lengths(of(f"{path}/models/{name}")) for name in ("one", "two")}
    return {"greedy_length": found, "agent_steps": row["agent_steps_total"], "passed": min(found.values()) >= 450}


def rivals(seed: int, path: str) -> dict[str, Any]:
    policies = {"ppo": {"run": "PPO", "config": CARTS}, "dqn": {"run": "DQN", "config": DQN, "model": RELU}}
    made = {"policies": policies, "policy_mapping": {"cart_0": "ppo", "cart_1": "dqn"}, "num_envs": 8}
    with bray.Experiment(env=Carts, path=path, seed=seed, **made) as exp:
        row = exp.fit({"env_steps_total": 100_000}, progress=False)
    found = {name: lengths(of(f"{path}/models/{name}")) for name in policies}
    return {"greedy_length": found, "agent_steps": row["agent_steps_total"], "passed": min(found.values()) > 150}


def nim(seed: int, path: str) -> dict[str, Any]:
    config = {"rollout_length": 64, "epochs": 4, "minibatches": 8, "lr": 1e-3, "gamma": 1.0}
    made = {"policies": {"first": {"config": config}, "second": {"config": config}}, "num_envs": 16}
    with bray.Experiment("PPO", Nim, path=path, seed=seed, env_config={"sticks": 10}, **made) as exp:
        exp.fit({"env_steps_total": 100_000}, progress=False)
    rng = np.random.default_rng(seed)
    first, second = (of(f"{path}/models/{name}") for name in ("first", "second"))
    wins = sum(winner(first, perfect(rng)) == "first" for _ in range(50))
    lost = won = 0
    for _ in range(200):  # the second player can win where the first leaves no multiple of four
        opening = int(rng.integers(3))
        could = (10 - 1 - opening) % 4 != 0
        won += (
            could
            and winner(lambda seen, move=opening: move if seen["obs"][10] else perfect(rng)(seen), second) == "second"
        )
        lost += could
    return {
        "first_beats_perfect": wins / 50,
        "second_wins_what_it_can": won / lost,
        "passed": wins == 50 and won == lost,
    }


def of(run: str) -> Callable[[Any], Any]:
    return bray.Experiment.load(run).policy


def perfect(rng: np.random.Generator) -> Callable[[Any], int]:
    """Leaves a multiple of four where it can, else takes at random."""

    def choose(seen: Any) -> int:
        left = int(np.argmax(seen["obs"]))
        return left % 4 - 1 if left % 4 else int(rng.integers(min(3, left)))

    return choose


def winner(first: Callable[[Any], Any], second: Callable[[Any], Any]) -> str:
    game, players = Nim(10), {"first": first, "second": second}
    obs, _ = game.reset()
    while True:
        (agent,) = obs
        obs, rewards, ends, _, _ = game.step({agent: int(players[agent](obs[agent]))})
        if ends["__all__"]:
            return max(rewards, key=lambda player: rewards[player])


def levels(seed: int, path: str) -> dict[str, Any]:
    with bray.Experiment("PPO", Rooms, policies=LEVELS, path=path, seed=seed, **SETTINGS) as exp:
        row = exp.fit({"env_steps_total": 200_000}, progress=False)
        found = exp.evaluate(100)
    top, low = (round(found[f"eval/agent/{name}"], 3) for name in ("top", "low"))
    return {"top": top, "low": low, "agent_steps": row["agent_steps_total"], "passed": top >= 0.85}


CASES = {"carts": carts, "nim": nim, "rivals": rivals, "levels": levels}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", choices=[*CASES, []], default=[], metavar="CASE")
    parser.add_argument("--seeds", type=int, nargs="*", default=[0, 1, 2])
    args = parser.parse_args()
    torch.set_num_threads(1)
    for name in args.cases or CASES:
        for seed in args.seeds:
            start = time.process_time()
            with tempfile.TemporaryDirectory() as path:
                found = CASES[name](seed, f"{path}/run")
            print(
                json.dumps({"case": name, "seed": seed, **found, "cpu_s": round(time.process_time() - start)}),
                flush=True,
            )


if __name__ == "__main__":
    main()
