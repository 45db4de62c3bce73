"""A magnet: a policy that the learnt one is drawn towards (Sokota et al. 2023, "A Unified Approach to Reinforcement
Learning, Quantal Response Equilibria, and Two-Player Zero-Sum Games"). An option of algorithms, no algorithm itself.

In self-play the best answer to a player changes with the player, and policy gradients go round the equilibrium. The
penalty `magnet_coef` KL(pi, magnet) makes the game's gradient point inwards: the last policy, not the average one,
comes to the equilibrium of the game with that penalty, and to the game's own as the weight falls.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from bray import distributions
from bray.algos import base, rows
from bray.errors import ConfigError
from bray.inference.torch_engine import is_recurrent
from bray.optim import Optimizer
from bray.target import Target


class Magnet:
    """The penalty of each row, and the slow copy that it is measured from, where there is one."""

    def __init__(self, learner: base.Learner, optimizer: Optimizer):
        c = learner.config
        self.layout, self.coef = learner.layout, learner.scheduled("magnet_coef")
        if c.magnet == "slow" and is_recurrent(learner.model):
            raise ConfigError(
                "magnet=slow does not go with a memory (use_lstm=true, or a custom_model that returns a state), whose "
                "states the copy does not know: use magnet=uniform"
            )
        self.slow = Target(learner.model, optimizer, c.magnet_tau) if c.magnet == "slow" else None

    def kl(self, dist: Tensor, batch: dict[str, Any], draws: tuple[Tensor, ...]) -> Tensor:
        """KL(pi, magnet) of each row whose head is `dist`, over the legal choices."""
        other = torch.zeros_like(dist)
        if self.slow is not None:
            with torch.no_grad():
                other = rows.actor_critic(self.slow.module, batch, draws, ("dist",))["dist"]
        kl: Tensor = distributions.kl(self.layout, dist, other, batch.get("mask"))
        return kl

    def follow(self) -> None:
        """The slow copy moves towards the policy; called after each update."""
        if self.slow is not None:
            self.slow.follow()


def make_magnet(learner: base.Learner, optimizer: Optimizer) -> tuple[Magnet | None, dict[str, Any]]:
    """What `magnet_coef` in a Learner's Config asks for, and what checkpoints hold of it."""
    if not learner.config.magnet_coef:
        return None, {}
    magnet = Magnet(learner, optimizer)
    return magnet, {} if magnet.slow is None else {"magnet": magnet.slow}
