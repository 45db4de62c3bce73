"""An algorithm of your own: REINFORCE with a value baseline (Williams 1992), without touching the package.

`python examples/custom_algorithm.py`, or `bray train --run examples.custom_algorithm:Reinforce --env CartPole-v1
num_envs=8`
"""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bray import act, distributions, tree
from bray.algos import base
from bray.data import Piece, Rollouts
from bray.nn import catalog
from bray.optim import Optimizer
from bray.rl import returns


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

    def build(self) -> dict[str, Any]:  # returns what checkpoints hold
        self.optimizer = Optimizer(self.model.parameters(), self.config.lr, max_grad_norm=0.5)
        return {"optimizer": self.optimizer}

    def prepare(self, t: Piece) -> dict[str, Any]:
        """Rows with the return that followed; where the rollout or a time limit cuts it off, the value stands for the
        rest."""
        value, target = t.outputs["value"], np.empty_like(t.reward)
        future = value[-1]
        for k in reversed(range(t.length)):
            rest = np.where(t.terminated[k], 0.0, np.where(t.truncated[k], value[k + 1], future))
            target[k] = future = t.reward[k] + self.config.gamma * rest
        advantage = returns.standardize(target - value[:-1], t.valid)
        weight = t.valid.astype(np.float32)  # a row after an episode's end is no decision
        rows = {"obs": t.obs, "action": t.action, "advantage": advantage, "target": target, "weight": weight}
        rows = tree.map(lambda x: x[: t.length].reshape(-1, *x.shape[2:]), rows)  # obs: one more row, maybe a Dict
        mask = self.layout.mask(rows["obs"])  # which choices were legal; None where all are
        return rows if mask is None else {**rows, "mask": mask}

    def update(self, batch: dict[str, Any], clock: act.Clock) -> base.Update:
        self.steps += 1
        return self._step(base.to_torch(batch, self.device))  # `gradient_step`, recorded

    def gradient_step(self, b: dict[str, Any]) -> base.Update:
        weight = b["weight"] / b["weight"].sum()
        outputs = self.model(b["obs"])
        logp, entropy = distributions.log_prob_entropy(self.layout, outputs["dist"], b["action"], b.get("mask"))
        policy_loss, value_loss = -logp * b["advantage"], (outputs["value"] - b["target"]).square()
        self.optimizer.step(torch.dot(weight, policy_loss + 0.5 * value_loss - self.config.entropy_coef * entropy))
        return base.Update.of({"policy_loss": policy_loss, "value_loss": value_loss, "entropy": entropy}, weight)


class Reinforce:
    """REINFORCE: policy gradient on observed returns, with a value baseline."""

    Config, Policy, Learner = Config, Policy, Learner
    make_model, experience = staticmethod(make_model), staticmethod(experience)


if __name__ == "__main__":
    from bray.cli.main import main

    sys.path.insert(0, str(Path(__file__).parents[1]))
    what = ["train", "--run", "examples.custom_algorithm:Reinforce", "--env", "CartPole-v1", "num_envs=8"]
    sys.exit(main([*what, "--stop", '{"episode_return_mean": 150}', *sys.argv[1:]]))
