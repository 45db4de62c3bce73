"""Bray's side of a training case: python -m benchmarks.ours CASE --seconds N prints one JSON line, like the scripts in peers/.

Hyper-parameters are those of peers/cases.py; the path is the one `bray train` takes (bray.train.local.LocalTraining), nothing is special-cased.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

PEERS = Path(__file__).parent / "peers"
sys.path.insert(0, str(PEERS))  # the environment and the module that peers use too

PPO = {
    "rollout_length": 128,
    "epochs": 4,
    "minibatches": 4,
    "lr": 2.5e-4,
    "gamma": 0.99,
    "lambda_": 0.95,
    "clip": 0.2,
    "entropy_coef": 0.01,
    "value_coef": 0.5,
    "max_grad_norm": 0.5,
}
DQN = {
    "lr": 2.5e-4,
    "batch_size": 128,
    "replay_size": 10_000,
    "train_every": 10,
    "target_period": 50,  # every 500 env steps
    "learning_starts": 1_000,
    "epsilon": {"kind": "linear", "start": 1.0, "end": 0.05, "steps": 2_000},
    "double": False,
    "max_grad_norm": None,
}
PENDULUM = {
    "env": "Pendulum-v1",
    "num_envs": 1,
    "fcnet_hiddens": [256, 256],
    "fcnet_activation": "relu",
    "lr": 3e-4,
    "critic_lr": 3e-4,
    "batch_size": 256,
    "replay_size": 1_000_000,
    "learning_starts": 500,
}

CASES: dict[str, dict[str, Any]] = {
    "ppo-cartpole": {"run": "PPO", "env": "CartPole-v1", "num_envs": 8, **PPO},
    "ppo-acrobot": {"run": "PPO", "env": "Acrobot-v1", "num_envs": 8, **PPO},
    "ppo-cartpole-256relu": {
        "run": "PPO",
        "env": "CartPole-v1",
        "num_envs": 8,
        "fcnet_hiddens": [256, 256],
        "fcnet_activation": "relu",
        **PPO,
    },
    "ppo-dict-lstm": {
        "run": "PPO",
        "env": "dict_env:make",
        "num_envs": 8,
        "fcnet_hiddens": [64],
        "use_lstm": True,
        "lstm_cell_size": 64,
        **PPO,
    },
    "ppo-custom-module": {
        "run": "PPO",
        "env": "CartPole-v1",
        "num_envs": 8,
        "custom_model": "benchmarks.ours:Custom",
        **PPO,
    },
    "ppo-pong": {"run": "PPO", "env": "ALE/Pong-v5", "num_envs": 8, "clip_rewards": True, "threads": 2, **PPO},
    "ppo-pong-bf16": {
        "run": "PPO",
        "env": "ALE/Pong-v5",
        "num_envs": 8,
        "clip_rewards": True,
        "threads": 2,
        "precision": "bfloat16",
        **PPO,
    },
    "dqn-cartpole": {
        "run": "DQN",
        "env": "CartPole-v1",
        "num_envs": 1,
        "fcnet_hiddens": [120, 84],
        "fcnet_activation": "relu",
        **DQN,
    },
    "sac-pendulum": {**PENDULUM, "run": "SAC", "alpha_lr": 3e-4},
    "td3-pendulum": {**PENDULUM, "run": "TD3"},
    "ddpg-pendulum": {**PENDULUM, "run": "DDPG"},
    "crossq-pendulum": {**PENDULUM, "run": "CrossQ", "alpha_lr": 3e-4, "critic_hiddens": [256, 256]},
}


def __getattr__(name: str) -> Any:
    """`Custom`: the peers' residual trunk with our two heads; made when asked for, because importing torch takes a second."""
    if name != "Custom":
        raise AttributeError(name)
    import custom_module
    from torch import nn

    class Custom(nn.Module):
        def __init__(self, spec: Any, config: Any):
            super().__init__()
            self.trunk = custom_module.ResidualMLP()
            self.policy = nn.Linear(64, spec.layout.num_params)
            self.value = nn.Linear(64, 1)

        def forward(self, obs: Any) -> dict[str, Any]:
            x = self.trunk(obs)
            return {"dist": self.policy(x), "value": self.value(x).squeeze(1)}

    globals()["Custom"] = Custom
    return Custom


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("case", choices=list(CASES))
    parser.add_argument("--seconds", type=float, default=15.0)
    args = parser.parse_args()
    from common import peak_rss_mb

    import bray
    from bray.experiment import Experiment

    exp = Experiment(**CASES[args.case], use_preset=False, seed=1)
    training = exp.training
    start, cpu = time.perf_counter(), 0.0
    steps, rows = 0, []
    warm = False
    while True:
        row = training.iterate()
        now = time.perf_counter()
        if not warm:
            if now - start >= 2.0 and training.learner.steps:
                warm, start, steps, cpu = True, now, row["env_steps_total"], time.process_time()
            continue
        rows.append(row)
        if now - start >= args.seconds:
            break
    import torch

    seconds = now - start
    line = {
        "peer": "bray",
        "version": bray.__version__,
        "case": args.case,
        "env_steps_per_second": round((row["env_steps_total"] - steps) / seconds, 1),
        "env_steps": row["env_steps_total"] - steps,
        "seconds": round(seconds, 2),
        "cpu_seconds": round(time.process_time() - cpu, 2),
        "threads": torch.get_num_threads(),
        "peak_rss_mb": peak_rss_mb(),
        "mean_return": row["episode_return_mean"] and round(row["episode_return_mean"], 1),
        "perf_ms": {k[5:]: round(sum(r[k] for r in rows) / len(rows), 2) for k in rows[0] if k.startswith("perf/")},
    }
    print(json.dumps(line), flush=True)
    exp.close()


if __name__ == "__main__":
    main()
