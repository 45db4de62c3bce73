"""ATOC: actors of a team that learn when to talk, and with whom (Jiang and Lu 2018).   B batch, N agents, K members of
a group.

An agent makes a thought of what it sees. Who wants to talk, by its attention unit, gathers those whose thoughts are
nearest; an LSTM from both sides makes new thoughts of the group's, and each acts by its own and its new one. Actors
climb a critic as DDPG's do; the attention unit learns how much the group gains by talking.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bray.algos import maddpg, qmix
from bray.config.declare import Amount, Count
from bray.data.experience import Replay
from bray.nn.atoc import OwnCritic, TalkingAgents, Thoughts
from bray.nn.catalog import ModelConfig
from bray.spec import EnvSpec

DEFAULTS, Policy = maddpg.DEFAULTS, maddpg.Policy
"""Acts as MADDPG."""


@dataclass(frozen=True)
class Config(maddpg.TeamConfig):
    thought_size: Count = 64
    """Numbers of a thought, an even count."""
    group_size: Count = 2
    """Members of a group, with its initiator."""
    attention_coef: Amount = 1.0
    """Weight of the attention unit's loss beside the actor's."""


def make_model(config: Config, spec: EnvSpec, model: ModelConfig) -> nn.Module:
    qmix.check_team(spec, "box")
    return TalkingAgents(spec, model, config.agent_ids, config.thought_size, config.group_size)


def experience(config: Config, spec: EnvSpec, model: ModelConfig) -> Replay:
    return maddpg.experience(config, spec, model)


class Learner(maddpg.Learner):
    """In the trainer: MADDPG's, with a critic that sees what one agent sees, and an attention unit to teach."""

    config: Config
    model: TalkingAgents

    def make_critic(self) -> nn.Module:
        return OwnCritic(self.spec, self.model_config, self.config.agent_ids)

    def norm_weight(self, alive: Any) -> Any:
        return alive

    def actor_step(self, batch: dict[str, Any]) -> dict[str, Tensor]:
        thoughts = self.model.think(batch["obs"])
        outputs = self.model.decide(thoughts.old, thoughts.new)
        mine = self.actions(outputs, batch.get("mask"), batch.get("noise"), 0)
        actor_loss = -self.of_alive(self.critic(batch["obs"], mine), batch) + self.penalty(outputs, batch)
        gain = self.gains(batch, thoughts)
        attention_loss = self.attention_loss(gain, thoughts.attention, batch["alive"])
        self.optimizer.step(actor_loss + self.config.attention_coef * attention_loss)
        initiators = (thoughts.attention > 0.0).float()
        return {
            "actor_loss": actor_loss,
            "attention_loss": attention_loss,
            "gain": self.of_alive(gain.t(), batch),
            "initiators": self.of_alive(initiators.t(), batch),
        }

    @torch.no_grad()
    def gains(self, batch: dict[str, Any], thoughts: Thoughts) -> Tensor:
        """What the members of each agent's group would gain by talking, a mean over them: `[B, N]`. As if nobody else
        talked, and whether it wants to or not: an agent that keeps silent learns what it misses."""
        alone = self.worth(batch, thoughts.old, thoughts.old)
        gains = []
        for i in range(len(self.spec.team)):
            group = thoughts.group[:, i]
            index = group.unsqueeze(-1).expand(-1, -1, thoughts.old.shape[-1])
            new = thoughts.old.scatter(1, index, self.model.talk(thoughts.old.gather(1, index)))
            gains.append((self.worth(batch, thoughts.old, new) - alone).gather(1, group).mean(1))
        return torch.stack(gains, 1)

    def worth(self, batch: dict[str, Any], old: Tensor, new: Tensor) -> Tensor:
        """The critic's values `[B, N]` of what agents with these thoughts do, by the same draws."""
        action = self.actions(self.model.decide(old, new), batch.get("mask"), batch.get("noise"), 0)
        q: Tensor = self.critic(batch["obs"], action).t()
        return q

    def attention_loss(self, gain: Tensor, attention: Tensor, alive: Tensor) -> Tensor:
        """The cross entropy of the attention to the gains, which are scaled to 0 ... 1 over the batch."""
        low, high = (gain.masked_fill(~alive, bound) for bound in (torch.inf, -torch.inf))
        least = low.min()
        goal = ((gain - least) / (high.max() - least).clamp(min=1e-8)).clamp(0.0, 1.0)
        loss = F.binary_cross_entropy_with_logits(attention, goal, reduction="none")
        return self.of_alive(loss.t(), {"alive": alive})
