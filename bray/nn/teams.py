"""Networks of teams (`env.teams`): one network for all agents, and what mixes their values into one."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from bray import tree
from bray.nn.catalog import make_model
from bray.nn.config import ModelConfig
from bray.rl.mixing import monotonic_mix
from bray.spec import EnvSpec, Space


def member_spec(spec: EnvSpec, ids: bool) -> EnvSpec:
    """What one agent of a team sees and chooses: `{"obs"}`, with `ids` also its number `agent`, and a Discrete."""
    team, agents = dict(spec.observation.items)["obs"], len(spec.team)
    size = math.prod(team.shape[1:])
    low, high = (bound[:size] if isinstance(bound, tuple) else bound for bound in (team.low, team.high))
    parts = {"obs": replace(team, shape=team.shape[1:], low=low, high=high)}
    if ids:
        parts["agent"] = Space("discrete", (), "int64", n=(agents,), start=(0,))
    choices = Space("discrete", (), "int64", n=spec.action.n[:1], start=(0,))
    return EnvSpec(spec.id, Space("dict", parts=tuple(parts.values()), names=tuple(parts)), choices)


class SharedAgent(nn.Module):
    """One Q network for all N agents of a team: obs `{"obs": [B, N, ...]}` -> {"q": [B, N, A]}. With a memory each
    agent has its own state, `[B, N, size]`. `ids`: each agent is told its number, so that they may play different
    parts."""

    numbers: Tensor

    def __init__(self, spec: EnvSpec, config: ModelConfig, ids: bool = True, **options: Any):
        super().__init__()
        self.net = make_model("q", member_spec(spec, ids), config, memory=True, **options)
        self.agents, self.ids = len(spec.team), ids
        self.recurrent = bool(getattr(self.net, "recurrent", hasattr(self.net, "initial_state")))
        self.register_buffer("numbers", torch.arange(self.agents), persistent=False)

    def _members(self, team: Tensor) -> dict[str, Tensor]:
        """`[B, N, ...]` as rows of single agents."""
        rows = {"obs": team.flatten(0, 1)}
        if self.ids:
            rows["agent"] = self.numbers.expand(team.shape[0], -1).reshape(-1)
        return rows

    def _together(self, rows: Any) -> Any:
        return tree.map(lambda x: x.unflatten(0, (-1, self.agents)), rows)

    def forward(self, obs: Any, state: Any = None) -> dict[str, Any]:
        rows = self._members(obs["obs"])
        if not self.recurrent:
            return {"q": self._together(self.net(rows)["q"])}
        out = self.net(rows, tree.map(lambda x: x.flatten(0, 1), state))
        return {"q": self._together(out["q"]), "state": self._together(out["state"])}

    def initial_state(self, batch_size: int) -> Any:
        """Zeros for each agent of `batch_size` games."""
        return self._together(self.net.initial_state(batch_size * self.agents)) if self.recurrent else {}  # type: ignore[operator]

    def unroll(self, obs: Any, state: Any, first: Tensor) -> dict[str, Any]:
        """obs `[T, B, ...]`, the state before row 0, `first [T, B]` -> outputs `[T, B, ...]` and the last state."""
        steps, agents = first.shape[0], self.agents
        rows = tree.map(lambda x: x.unflatten(0, (steps, -1)), self._members(obs["obs"].flatten(0, 1)))
        flat = tree.map(lambda x: x.flatten(0, 1), state)
        out = self.net.unroll(rows, flat, first.repeat_interleave(agents, 1))  # type: ignore[operator]
        return {"q": out["q"].unflatten(1, (-1, agents)), "state": self._together(out["state"])}


class SumMixer(nn.Module):
    """The value of a team is the sum of its agents' (Sunehag et al. 2018)."""

    def forward(self, q: Tensor, state: Tensor) -> Tensor:
        return q.sum(-1)


class MonotonicMixer(nn.Module):
    """The value of a team from its agents' `q [..., N]` and the state of the game `[..., S]`: `monotonic_mix` by
    weights that small networks make of the state (Rashid et al. 2018). They begin as PyTorch's layers do: orthogonal
    ones mix by weights many times as large."""

    def __init__(self, state_size: int, agents: int, width: int = 32, hyper_width: int = 64):
        super().__init__()

        def net(hidden: int, out: int) -> nn.Sequential:
            return nn.Sequential(nn.Linear(state_size, hidden), nn.ReLU(), nn.Linear(hidden, out))

        self.agents, self.width = agents, width
        self.w1, self.w2 = net(hyper_width, agents * width), net(hyper_width, width)
        self.b1, self.b2 = nn.Linear(state_size, width), net(width, 1)

    def forward(self, q: Tensor, state: Tensor) -> Tensor:
        w1 = self.w1(state).unflatten(-1, (self.agents, self.width))
        return monotonic_mix(q, w1, self.b1(state), self.w2(state), self.b2(state).squeeze(-1))
