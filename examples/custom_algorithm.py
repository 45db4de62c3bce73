"""An algorithm of your own: REINFORCE with a value baseline (Williams 1992), without touching the package.

`python examples/custom_algorithm.py`, or `bray train --run examples.custom_algorithm:Reinforce --env CartPole-v1 num_envs=8`
"""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch

from bray.algos.base import Update, load_learner, save_learner, to_torch
from bray.nn import catalog, distributions
from bray.optim import Optimizer
from bray.rl import act


@dataclass(frozen=True)
class Config:
    on_policy: ClassVar[bool] = True

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


class Policy:
    """Beside the environment: outputs of the Model into actions, rollouts into samples."""

    act_outputs, keep_outputs = ("dist",), ("value",)

    def __init__(self, config: Config, spec: Any, max_seq_len: int | None = None):
        self.config, self.layout = config, spec.layout

    def act(self, outputs: Any, obs: Any, rng: np.random.Generator | None, step: int) -> Any:
        action, _ = act.sample(self.layout, outputs["dist"], rng, self.layout.mask(obs))
        return self.layout.to_env(action), {"action": action}

    def samples(self, t: Any) -> dict[str, np.ndarray]:
        """Rows with the return that followed; where the rollout or a time limit cuts it off, the value stands for the rest."""
        value, target = t.outputs["value"], np.empty_like(t.reward)
        future = value[-1]
        for k in reversed(range(len(t.reward))):
            rest = np.where(t.terminated[k], 0.0, np.where(t.truncated[k], value[k + 1], future))
            target[k] = future = t.reward[k] + self.config.gamma * rest
        rows = {"obs": t.obs[:-1], "action": t.extras["action"], "target": target, "value": value[:-1]}
        return {k: x[t.valid] for k, x in rows.items()}  # a row after an episode's end is no decision


class Learner:
    """Samples in, better weights out."""

    def __init__(self, config: Config, spec: Any, model: Any, model_config: Any, seed: int = 0, record: bool = True):
        self.config, self.layout, self.model = config, spec.layout, model
        self.optimizer = Optimizer(model.parameters(), config.lr, max_grad_norm=0.5)
        self.rng, self.steps = np.random.default_rng(seed), 0

    def update(self, batch: dict[str, np.ndarray], env_steps: int = 0) -> Update:
        b = to_torch(batch, next(self.model.parameters()).device)
        advantage = b["target"] - b["value"]
        advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
        outputs = self.model(b["obs"])
        logp, entropy = distributions.log_prob_entropy(self.layout, outputs["dist"], b["action"], None)
        policy_loss, value_loss = -(logp * advantage).mean(), (outputs["value"] - b["target"]).square().mean()
        self.optimizer.step(policy_loss + 0.5 * value_loss - self.config.entropy_coef * entropy.mean())
        self.steps += 1
        values = torch.stack([policy_loss, value_loss, entropy.mean()]).detach().cpu()
        return Update(("policy_loss", "value_loss", "entropy"), values)

    def state_dict(self) -> dict[str, Any]:
        return save_learner(self)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        load_learner(self, state)


class Reinforce:
    """REINFORCE: policy gradient on observed returns, with a value baseline."""

    Config, Policy, Learner, make_model = Config, Policy, Learner, staticmethod(make_model)


if __name__ == "__main__":
    from bray.cli.main import main

    sys.path.insert(0, str(Path(__file__).parents[1]))
    what = ["--run", "examples.custom_algorithm:Reinforce", "--env", "CartPole-v1", "num_envs=8"]
    sys.exit(main(["train", *what, "--stop", '{"episode_return_mean": 150}', *sys.argv[1:]]))
