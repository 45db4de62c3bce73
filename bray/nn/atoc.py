"""Agents of a team that choose when to talk, and with whom (ATOC, Jiang and Lu 2018).   B games, N agents, H numbers of
a thought, K members of a group."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from bray.errors import ConfigError
from bray.nn.config import ModelConfig
from bray.nn.encoders import Features, make_encoder
from bray.nn.layers import MLP, activation, linear
from bray.nn.recurrent import Recurrent
from bray.nn.teams import member_spec, members
from bray.spec import EnvSpec


class Thoughts(NamedTuple):
    old: Tensor
    """What each agent makes of its own observation, `[B, N, H]`."""
    new: Tensor
    """The same where an agent is in no group, else what its groups made of it."""
    attention: Tensor
    """Logit `[B, N]` of wanting to talk; above 0 an agent is an initiator."""
    group: Tensor
    """`[B, N, K]`: whom each would talk with, itself first, then those whose thoughts are nearest."""


class TalkingAgents(nn.Module):
    """Observations to thoughts, thoughts to actions, and between them groups that talk: obs `{"obs": [B, N, ...]}` ->
    {"mu": [B, N * D]}, or {"dist": [B, N * A]} for choices. One network for all agents."""

    numbers: Tensor

    def __init__(self, spec: EnvSpec, config: ModelConfig, ids: bool, thought_size: int, group_size: int):
        super().__init__()
        self.agents, self.ids = len(spec.team), ids
        if config.use_lstm or config.custom_model is not None:
            raise ConfigError("ATOC has a network of its own, without memory: leave out use_lstm and custom_model")
        if not 2 <= group_size <= self.agents:
            raise ConfigError(f"group_size: a group has 2 to {self.agents} members in {spec.id}, got {group_size}")
        if thought_size % 2:
            raise ConfigError(
                f"thought_size: one half is made from each side of a group, so it is even; got {thought_size}"
            )
        member = member_spec(spec, ids)
        self.group_size, self.output = group_size, "dist" if spec.layout.discrete else "mu"
        self.encoder = make_encoder(member.observation, config)
        self.act = activation(config.fcnet_activation)
        self.thought = linear(self.encoder.out_features, thought_size, init=config.init)
        self.attention = nn.Sequential(
            linear(thought_size, 32, init=config.init), nn.ReLU(), linear(32, 1, 0.01, config.init)
        )
        ahead, back = (Recurrent(_Same(thought_size), "lstm", thought_size // 2) for _ in range(2))
        self.ahead, self.back = ahead, back
        size = spec.action.n[0] if spec.layout.discrete else spec.layout.size // self.agents
        self.body = linear(2 * thought_size, thought_size, init=config.init)
        self.head = linear(thought_size, size, 0.01, config.init)
        self.register_buffer("numbers", torch.arange(self.agents), persistent=False)

    def forward(self, obs: Any) -> dict[str, Tensor]:
        thoughts = self.think(obs)
        return self.decide(thoughts.old, thoughts.new)

    def think(self, obs: Any) -> Thoughts:
        """Groups talk one after the other, in the order of their initiators, so that who is in two passes on what it
        heard in the first."""
        old = self.act(self.thought(self.encoder(members(obs, self.numbers if self.ids else None))))
        old = old.unflatten(0, (-1, self.agents))
        attention = self.attention(old.detach()).squeeze(-1)  # learnt from what talking brings, not by the actor
        group, new = self.groups(old), old
        for i in range(self.agents):
            index = group[:, i].unsqueeze(-1).expand(-1, -1, old.shape[-1])
            before = new.gather(1, index)
            talks = (attention[:, i] > 0.0).view(-1, 1, 1)
            new = new.scatter(1, index, torch.where(talks, self.talk(before), before))
        return Thoughts(old, new, attention, group)

    @torch.no_grad()
    def groups(self, thoughts: Tensor) -> Tensor:
        """Of each agent its group `[B, N, K]`."""
        far = (thoughts.unsqueeze(2) - thoughts.unsqueeze(1)).square().sum(-1)
        own = torch.eye(self.agents, device=far.device)
        return (far + 1.0 - 2.0 * own).topk(self.group_size, largest=False).indices  # none is nearer than oneself

    def talk(self, thoughts: Tensor) -> Tensor:
        """Those of a group `[B, K, H]`, integrated: an LSTM from each side."""
        halves, nothing = [], torch.zeros_like(thoughts[:, 0, : thoughts.shape[-1] // 2])
        for cell, order in ((self.ahead, 1), (self.back, -1)):
            state, out = {"h": nothing, "c": nothing}, []
            for x in thoughts.unbind(1)[::order]:
                heard, state = cell(x, state)
                out.append(heard)
            halves.append(torch.stack(out[::order], 1))
        return torch.cat(halves, -1)

    def decide(self, old: Tensor, new: Tensor) -> dict[str, Tensor]:
        """Actions of the agents `[B, N, H]`, from what each thought itself and what it thinks now."""
        out = self.head(self.act(self.body(torch.cat([old, new], -1)))).flatten(1)
        return {self.output: out if self.output == "dist" else torch.tanh(out)}


class OwnCritic(nn.Module):
    """The value of what an agent does by what it sees alone: (obs, actions `[B, N, D]`) -> `[N, B]`. One network for
    all agents; choices come as one-hot vectors, or what stands in for them."""

    numbers: Tensor

    def __init__(self, spec: EnvSpec, config: ModelConfig, ids: bool):
        super().__init__()
        self.agents, self.ids = len(spec.team), ids
        self.own = Features(member_spec(spec, ids).observation, config)
        size = (spec.layout.num_params if spec.layout.discrete else spec.layout.size) // self.agents
        self.body = MLP(
            self.own.out_features + size, config.fcnet_hiddens, config.fcnet_activation, config.layer_norm, config.init
        )
        self.head = linear(self.body.out_features, 1, 1.0, config.init)
        self.register_buffer("numbers", torch.arange(self.agents), persistent=False)

    def forward(self, obs: Any, action: Tensor) -> Tensor:
        own = self.own(members(obs, self.numbers if self.ids else None))
        q = self.head(self.body(torch.cat([own, action.flatten(0, 1)], -1)))
        return q.view(-1, self.agents).t()


class _Same(nn.Identity):
    """In place of an encoder."""

    def __init__(self, size: int):
        super().__init__()
        self.out_features = size
