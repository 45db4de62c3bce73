"""A magnet: a policy that the learnt one is drawn towards (Sokota et al. 2023, "A Unified Approach to Reinforcement
Learning, Quantal Response Equilibria, and Two-Player Zero-Sum Games"). An option of algorithms, no algorithm itself.

In self-play the best answer to a player changes with the player, and policy gradients go round the equilibrium. The
penalty `magnet_coef` KL(pi, magnet) makes the game's gradient point inwards: the last policy, not the average one,
comes to the equilibrium of the game with that penalty, and to the game's own as the weight falls.

A policy that goes on from demonstrations forgets them while its value function knows nothing yet. Drawn to the policy
that it started with, by a weight that falls to 0, it keeps to them first and betters them later (Schmitt et al. 2018,
"Kickstarting Deep Reinforcement Learning").
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
    """The penalty of each row, and the copy of the policy that it is measured from, where there is one."""

    def __init__(self, learner: base.Learner, optimizer: Optimizer):
        c = learner.config
        self.layout, self.coef = learner.layout, learner.scheduled("magnet_coef")
        if c.magnet != "uniform" and is_recurrent(learner.model):
            raise ConfigError(
                f"magnet={c.magnet} does not go with a memory (use_lstm=true, or a custom_model that returns a state), "
                "whose states the copy does not know: use magnet=uniform"
            )
        kind = {"uniform": None, "slow": Target, "start": Start}[c.magnet]
        self.other = kind and kind(learner.model, optimizer, c.magnet_tau)

    def kl(self, dist: Tensor, batch: dict[str, Any], draws: tuple[Tensor, ...]) -> Tensor:
        """KL(pi, magnet) of each row whose head is `dist`, over the legal choices."""
        other = torch.zeros_like(dist)
        if self.other is not None:
            with torch.no_grad():
                other = rows.actor_critic(self.other.module, batch, draws, ("dist",))["dist"]
        kl: Tensor = distributions.kl(self.layout, dist, other, batch.get("mask"))
        return kl

    def follow(self) -> None:
        """A slow copy moves towards the policy; called after each update."""
        if self.other is not None:
            self.other.follow()


class Start(Target):
    """The policy that a run starts with: weights come once, from elsewhere or from a checkpoint, and stay."""

    given = False

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        super().load_state_dict(state)
        self.given = True

    def follow(self) -> None:
        if not self.given:
            raise ConfigError(
                "magnet=start keeps to the policy that a run starts with, and this one starts with none: name it with "
                "--init-from RUN_DIR, or use magnet=slow"
            )


def make_magnet(learner: base.Learner, optimizer: Optimizer) -> tuple[Magnet | None, dict[str, Any]]:
    """What `magnet_coef` in a Learner's Config asks for, and what checkpoints hold of it."""
    if not learner.config.magnet_coef:
        return None, {}
    magnet = Magnet(learner, optimizer)
    return magnet, {} if magnet.other is None else {"magnet": magnet.other}
