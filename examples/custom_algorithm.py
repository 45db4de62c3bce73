"""An algorithm of your own: REINFORCE with a value baseline (Williams 1992), without touching the package.

`python examples/custom_algorithm.py`, or `bray train --run examples.custom_algorithm:Reinforce --env CartPole-v1 num_envs=8`
"""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bray import act, distributions
from bray.algos import base
from bray.data import Piece, Rollouts
from bray.nn import catalog
from bray.optim import Optimizer


@dataclass(frozen=True)
class Config:
    rollout_length: int = 128
    """Steps that each environment takes between two updates."""
    lr: float = 3e-3
    """Learning rate of Adam."""
    gamma: float = 0.99
    """Discount per step."""
    entropy_coef: float = 0.01
    """Weight of the entropy bonus."""


def make_model(config: Config, spec: Any, model: Any) -> torch.nn.Module:
    return catalog.make_model("actor_critic", spec, model)  # obs -> {"dist": [B, P], "value": [B]}


def experience(config: Config, spec: Any, model: Any) -> Rollouts:
    return Rollouts(config.rollout_length)  # each row once; Replay draws them again and again


class Policy(act.Policy):
    """Beside the environment: outputs of the Model into actions, here drawn from its distribution."""

    keeps = ("value",)  # outputs that `prepare` wants to see again

    def __init__(self, config: Config, spec: Any):
        super().__init__(spec.layout, act.make_rule("dist"))


class Learner(base.Learner):
    """Pieces of trajectory in, better weights out."""

    def build(self) -> dict[str, Any]:
        self.optimizer = Optimizer(self.model.parameters(), self.config.lr, max_grad_norm=0.5)
        return {"optimizer": self.optimizer}  # what checkpoints hold

    def prepare(self, t: Piece) -> dict[str, np.ndarray]:
        """Rows with the return that followed; where the rollout or a time limit cuts it off, the value stands for the rest."""
        value, target = t.outputs["value"], np.empty_like(t.reward)
        future = value[-1]
        for k in reversed(range(t.length)):
            rest = np.where(t.terminated[k], 0.0, np.where(t.truncated[k], value[k + 1], future))
            target[k] = future = t.reward[k] + self.config.gamma * rest
        weight = t.valid.astype(np.float32)  # a row after an episode's end is no decision
        rows = {"obs": t.obs[:-1], "action": t.action, "target": target, "value": value[:-1], "weight": weight}
        return {k: x.reshape(-1, *x.shape[2:]) for k, x in rows.items()}

    def update(self, batch: dict[str, np.ndarray], clock: act.Clock) -> base.Update:
        values = self._step(base.to_torch(batch, self.device))  # `gradient_step`, recorded
        self.steps += 1
        return base.Update(("policy_loss", "value_loss", "entropy"), values)

    def gradient_step(self, b: dict[str, torch.Tensor]) -> torch.Tensor:
        weight = b["weight"] / b["weight"].sum()
        advantage = b["target"] - b["value"]
        advantage = advantage - torch.dot(weight, advantage)
        advantage = advantage / (torch.dot(weight, advantage.square()).sqrt() + 1e-8)
        outputs = self.model(b["obs"])
        logp, entropy = distributions.log_prob_entropy(self.layout, outputs["dist"], b["action"], None)
        losses = torch.stack([-logp * advantage, (outputs["value"] - b["target"]).square(), entropy])
        policy_loss, value_loss, entropy = means = torch.mv(losses, weight)
        self.optimizer.step(policy_loss + 0.5 * value_loss - self.config.entropy_coef * entropy)
        return means.detach()


class Reinforce:
    """REINFORCE: policy gradient on observed returns, with a value baseline."""

    Config, Policy, Learner = Config, Policy, Learner
    make_model, experience = staticmethod(make_model), staticmethod(experience)


if __name__ == "__main__":
    from bray.cli.main import main

    sys.path.insert(0, str(Path(__file__).parents[1]))
    what = ["--run", "examples.custom_algorithm:Reinforce", "--env", "CartPole-v1", "num_envs=8"]
    sys.exit(main(["train", *what, "--stop", '{"episode_return_mean": 150}', *sys.argv[1:]]))
