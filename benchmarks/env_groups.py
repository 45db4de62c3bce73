"""python -m benchmarks.env_groups: environments of a worker in one group and in two, with central inference.

Environments sleep, and so does the Model: it takes time and no core, as one on a GPU does. Environment steps per second
of the quickest of 4 rounds, 2 workers with 4 environments each; nothing is learnt. A row takes S + F in one group (S: a
step of all environments of a worker, F: a forward), and at best the longer of S and 2 F in two: the gain is largest,
1.5, where a forward takes half as long as a worker's step.
"""

from __future__ import annotations

import json
import time
from typing import Any

import gymnasium as gym
import numpy as np
from torch import Tensor, nn

import bray

ROWS = 16


class Sleepy(gym.Env):
    observation_space = gym.spaces.Box(-1, 1, (64,), np.float32)
    action_space = gym.spaces.Discrete(4)

    def __init__(self, ms: float):
        self.seconds, self.steps = ms / 1e3, 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.steps = 0
        return self._look(), {}

    def _look(self) -> np.ndarray:
        return self.np_random.uniform(-1, 1, 64).astype(np.float32)

    def step(self, action: Any) -> Any:
        time.sleep(self.seconds)
        self.steps += 1
        return self._look(), 0.0, False, self.steps >= 100, {}


class Far(nn.Module):
    """A network somewhere else."""

    def __init__(self, spec: Any, config: Any, ms: float):
        super().__init__()
        self.seconds, self.layer = ms / 1e3, nn.Linear(64, 5)

    def forward(self, obs: Tensor) -> dict[str, Tensor]:
        time.sleep(self.seconds)
        y = self.layer(obs)
        return {"dist": y[:, :4], "value": y[:, 4]}


def steps_per_s(env_ms: float, forward_ms: float, config: dict[str, Any]) -> float:
    exp = bray.Experiment(
        run="PPO",
        env="benchmarks.env_groups:Sleepy",
        use_preset=False,
        config={
            "env_config": {"ms": env_ms},
            "custom_model": "benchmarks.env_groups:Far",
            "custom_options": {"ms": forward_ms},
            "vector": "inprocess",
            "num_envs": 4,
            "num_workers": 2,
            "rollout_length": ROWS,
            "record": False,
            **config,
        },
    )
    source, times = exp.training.sources[0], []
    for _ in range(5):
        start = time.perf_counter()
        source.gather()
        times.append(time.perf_counter() - start)
    exp.close()
    return ROWS * 8 / min(times[1:])


def main() -> None:
    for env_ms, forward_ms in ((5.0, 4.0), (5.0, 8.0)):
        line: dict[str, float] = {"env_ms": env_ms, "forward_ms": forward_ms}
        line["worker"] = round(steps_per_s(env_ms, forward_ms, {}))
        for groups in (1, 2):
            central = {"inference": "central", "env_groups": groups}
            line[f"central, groups={groups}"] = round(steps_per_s(env_ms, forward_ms, central))
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
