"""VDN: Q-learning for a team, whose value is the sum of its agents' (Sunehag et al. 2018).

QMIX with a sum in place of its mixer: nothing to learn beside the agents, and no state of the game; what agents are
worth together and not apart, it cannot say.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from bray.algos import qmix
from bray.nn.teams import SumMixer

make_model, experience, Policy = qmix.make_model, qmix.experience, qmix.Policy


@dataclass(frozen=True)
class Config(qmix.TeamConfig):
    """As QMIX, without a mixer."""


class Learner(qmix.Learner):
    """QMIX's, with a sum."""

    normalizes = False

    def make_mixer(self) -> nn.Module:
        return SumMixer()
