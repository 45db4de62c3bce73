"""PPO with another surrogate: SPO (Xie et al. 2024) draws the ratio back to one where PPO clips it.

`python examples/own_surrogate.py`, or `bray train --run examples.own_surrogate:SPO --env CartPole-v1`
"""

import sys
from pathlib import Path

from torch import Tensor

from bray.algos import ppo


class SPO(ppo.Learner):
    """PPO with the surrogate of SPO: r A - |A| (r - 1)^2 / (2 clip)."""

    def policy_loss(self, ratio: Tensor, advantage: Tensor) -> Tensor:
        penalty = advantage.abs() * (ratio - 1.0).square() / (2.0 * self.config.clip)
        return penalty - ratio * advantage


if __name__ == "__main__":
    from bray.cli.main import main

    sys.path.insert(0, str(Path(__file__).parents[1]))
    what = ["train", "--run", "examples.own_surrogate:SPO", "--env", "CartPole-v1"]
    sys.exit(main([*what, "--stop", '{"episode_return_mean": 150}', *sys.argv[1:]]))
