"""Bray's side of a training case: python -m benchmarks.ours CASE --seconds N prints one JSON line, like the scripts in
peers/.

Hyper-parameters are those of peers/cases.py; the path is the one `bray train` takes (bray.train.local.LocalTraining),
nothing is special-cased.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
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
DQN_CARTPOLE = {
    "env": "CartPole-v1",
    "num_envs": 1,
    "fcnet_hiddens": [120, 84],
    "fcnet_activation": "relu",
    **DQN,
}
C51 = {"double": True, "num_atoms": 51, "v_min": 0.0, "v_max": 100.0}
SAC = {
    "num_envs": 1,
    "fcnet_hiddens": [256, 256],
    "fcnet_activation": "relu",
    "lr": 3e-4,
    "critic_lr": 3e-4,
    "batch_size": 256,
    "replay_size": 1_000_000,
    "learning_starts": 500,
}
PENDULUM = {"env": "Pendulum-v1", **SAC}

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
    "a2c-cartpole": {
        "run": "A2C",
        "env": "CartPole-v1",
        "num_envs": 8,
        "rollout_length": 5,
        "lr": 7e-4,
        "optimizer": "rmsprop",
        "lambda_": 1.0,
        "entropy_coef": 0.01,
    },
    "pg-cartpole": {
        "run": "PG",
        "env": "CartPole-v1",
        "num_envs": 8,
        "batch_size": 1_000,
        "lr": 3e-3,
        "baseline": False,
        "max_grad_norm": None,
    },
    "pqn-cartpole": {
        "run": "PQN",
        "env": "CartPole-v1",
        "num_envs": 8,
        "fcnet_hiddens": [120, 84],
        "rollout_length": 128,
        "epochs": 4,
        "minibatches": 4,
        "lr": 2.5e-4,
        "lambda_": 0.65,
        "epsilon": DQN["epsilon"],
        "max_grad_norm": 10.0,
    },
    "dqn-cartpole": {"run": "DQN", **DQN_CARTPOLE},
    "qrdqn-cartpole": {"run": "QR-DQN", **DQN_CARTPOLE, "num_quantiles": 50},
    "c51-cartpole": {"run": "C51", **DQN_CARTPOLE, **C51},
    "iqn-cartpole": {"run": "IQN", **DQN_CARTPOLE, "double": True, "num_fractions": 8, "acting_fractions": 32},
    "rainbow-cartpole": {
        "run": "Rainbow",
        **DQN_CARTPOLE,
        **C51,
        "n_step": 3,
        "priority_alpha": 0.5,
        "priority_beta": 0.4,
    },
    "r2d2-cartpole": {
        "run": "R2D2",
        **DQN_CARTPOLE,
        "double": True,
        "fcnet_hiddens": [64],
        "fcnet_activation": "none",
        "lstm_cell_size": 64,
        "batch_size": 32,
        "sequence_length": 16,
        "burn_in": 0,
        "rescale": False,
        "n_step": 1,
        "dueling": False,
        "prioritized": False,
    },
    "ars-cartpole": {"run": "ARS", "env": "CartPole-v1", "num_envs": 32, "lr": 0.03, "sigma": 0.05, "top": 0.5},
    "es-cartpole": {
        "run": "ES",
        "env": "CartPole-v1",
        "num_envs": 32,
        "fcnet_hiddens": [32, 32],
        "fcnet_activation": "relu",
        "lr": 0.03,
        "sigma": 0.05,
    },
    "sac-discrete-cartpole": {
        **SAC,
        "run": "SAC-Discrete",
        "env": "CartPole-v1",
        "alpha_lr": 3e-4,
        "entropy_scale": 0.7,
    },
    "sac-pendulum": {**PENDULUM, "run": "SAC", "alpha_lr": 3e-4},
    "td3-pendulum": {**PENDULUM, "run": "TD3"},
    "ddpg-pendulum": {**PENDULUM, "run": "DDPG"},
    "crossq-pendulum": {**PENDULUM, "run": "CrossQ", "alpha_lr": 3e-4, "critic_hiddens": [256, 256]},
}

GENERATIONS = ("ars-cartpole", "es-cartpole")
"""Here only the steps of episodes that an update learnt from count, because the peer plays no others. CartPole pays 1 a
step."""


def __getattr__(name: str) -> Any:
    """`Custom`: the peers' residual trunk with our two heads; made when asked for, because importing torch takes a
    second."""
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


def count_learnt(learner: Any) -> Callable[[], int]:
    """How many steps the episodes had that updates learnt from so far."""
    update, total = learner.update, 0

    def counting(batch: Any, clock: Any) -> Any:
        nonlocal total
        total += int(batch["return"].sum())
        return update(batch, clock)

    learner.update = counting
    return lambda: total


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
    learnt = count_learnt(training.learner) if args.case in GENERATIONS else None
    start, cpu = time.perf_counter(), 0.0
    steps, rows = 0, []
    warm = False
    while True:
        row = training.iterate()
        now = time.perf_counter()
        done = learnt() if learnt else row["env_steps_total"]
        if not warm:
            if now - start >= 2.0 and training.learner.steps:
                warm, start, cpu, steps = True, now, time.process_time(), done
            continue
        rows.append(row)
        if now - start >= args.seconds:
            break
    cpu = time.process_time() - cpu
    import torch

    seconds = now - start
    line = {
        "peer": "bray",
        "version": bray.__version__,
        "case": args.case,
        "env_steps_per_second": round((done - steps) / seconds, 1),
        "env_steps": done - steps,
        "seconds": round(seconds, 2),
        "cpu_seconds": round(cpu, 2),
        "threads": torch.get_num_threads(),
        "peak_rss_mb": peak_rss_mb(),
        "mean_return": row["episode_return_mean"] and round(row["episode_return_mean"], 1),
        "perf_ms": {k[5:]: round(sum(r[k] for r in rows) / len(rows), 2) for k in rows[0] if k.startswith("perf/")},
    }
    print(json.dumps(line), flush=True)
    exp.close()


if __name__ == "__main__":
    main()
