"""Networks of teams (`env.teams`): one network for all agents, critics that see all of them, and what mixes their
values into one."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from bray import tree
from bray.nn.catalog import make_model
from bray.nn.config import ModelConfig
from bray.nn.encoders import Features
from bray.nn.layers import MLP, Towers, linear
from bray.rl.mixing import monotonic_mix
from bray.rl.transforms import one_hot
from bray.spec import GLOBAL_STATE, EnvSpec, Space


def state_key(spec: EnvSpec) -> str:
    """The observation key of what critics and mixers of a team see: the global state where the game declares one, else
    the observations of all agents."""
    return "obs" if spec.global_state is None else GLOBAL_STATE


def state_space(spec: EnvSpec) -> Space:
    """Its space."""
    return spec.global_state or dict(spec.observation.items)["obs"]


def member_spec(spec: EnvSpec, ids: bool) -> EnvSpec:
    """What one agent of a team sees and chooses: `{"obs"}`, with `ids` also its number `agent`, and a Discrete or a
    Box."""
    parts = {"obs": _of_member(dict(spec.observation.items)["obs"])}
    if ids:
        parts["agent"] = Space("discrete", (), "int64", n=(len(spec.team),), start=(0,))
    discrete = spec.action.kind == "multi_discrete"
    chooses = Space("discrete", (), "int64", n=spec.action.n[:1], start=(0,)) if discrete else _of_member(spec.action)
    return EnvSpec(spec.id, Space("dict", parts=tuple(parts.values()), names=tuple(parts)), chooses)


def _of_member(team: Space) -> Space:
    """Of a Box `[N, ...]` the part of one agent: all have the same."""
    size = math.prod(team.shape[1:])
    low, high = (bound[:size] if isinstance(bound, tuple) else bound for bound in (team.low, team.high))
    return replace(team, shape=team.shape[1:], low=low, high=high)


def members(obs: Any, numbers: Tensor | None) -> dict[str, Tensor]:
    """What a team sees, `{"obs": [B, N, ...]}`, as rows of single agents; with their `numbers [N]` where they are told
    them."""
    team = obs["obs"]
    told = {} if numbers is None else {"agent": numbers.expand(team.shape[0], -1).reshape(-1)}
    return {"obs": team.flatten(0, 1), **told}


class SharedAgent(nn.Module):
    """One network for all N agents of a team: obs `{"obs": [B, N, ...]}` -> `{"q": [B, N, A]}`, or of a policy what the
    team's action is chosen by: {"dist": [B, N * A]} or {"mu": [B, N * D]}. With a memory each agent has its own state,
    `[B, N, size]`. `ids`: each agent is told its number, so that they may play different parts."""

    numbers: Tensor

    def __init__(
        self,
        spec: EnvSpec,
        config: ModelConfig,
        ids: bool = True,
        kind: str = "q",
        memory: bool = True,
        **options: Any,
    ):
        """`kind` and `options` as in `make_model`; `memory`: whether the algorithm trains agents that have one."""
        super().__init__()
        self.net = make_model(kind, member_spec(spec, ids), config, memory=memory, **options)
        self.agents, self.ids = len(spec.team), ids
        self.recurrent = bool(getattr(self.net, "recurrent", hasattr(self.net, "initial_state")))
        self.register_buffer("numbers", torch.arange(self.agents), persistent=False)

    def _members(self, obs: Any) -> dict[str, Tensor]:
        return members(obs, self.numbers if self.ids else None)

    def _together(self, rows: Any) -> Any:
        return tree.map(lambda x: x.unflatten(0, (-1, self.agents)), rows)

    def _of_team(self, out: dict[str, Any]) -> dict[str, Any]:
        """Outputs of single agents as those of the team; a policy's in the order of the team's action."""
        return {k: self._together(x) if k in ("q", "state") else self._together(x).flatten(1) for k, x in out.items()}

    def forward(self, obs: Any, state: Any = None) -> dict[str, Any]:
        rows = self._members(obs)
        if not self.recurrent:
            return self._of_team(self.net(rows))
        return self._of_team(self.net(rows, tree.map(lambda x: x.flatten(0, 1), state)))

    def initial_state(self, batch_size: int) -> Any:
        """Zeros for each agent of `batch_size` games."""
        return self._together(self.net.initial_state(batch_size * self.agents)) if self.recurrent else {}  # type: ignore[operator]

    def unroll(self, obs: Any, state: Any, first: Tensor) -> dict[str, Any]:
        """obs `[T, B, ...]`, the state before row 0, `first [T, B]` -> outputs `[T, B, ...]` and the last state."""
        steps, agents = first.shape[0], self.agents
        rows = tree.map(lambda x: x.unflatten(0, (steps, -1)), self._members({"obs": obs["obs"].flatten(0, 1)}))
        flat = tree.map(lambda x: x.flatten(0, 1), state)
        out = dict(self.net.unroll(rows, flat, first.repeat_interleave(agents, 1)))  # type: ignore[operator]
        last = self._together(out.pop("state"))
        rows_of_team = self._of_team({k: x.flatten(0, 1) for k, x in out.items()})
        return {k: x.unflatten(0, first.shape) for k, x in rows_of_team.items()} | {"state": last}


class TeamCritics(nn.Module):
    """A critic for each of N agents, which see the state of the game and the actions of all: (obs, actions
    `[B, N, D]`) -> `[N, B]` (Lowe et al. 2017). Choices come as one-hot vectors, or what stands in for them. Actions
    `[N, B, N, D]` are of each critic its own."""

    def __init__(self, spec: EnvSpec, config: ModelConfig):
        super().__init__()
        self.agents, self.state = len(spec.team), StateFeatures(spec, config)
        size = spec.layout.num_params if spec.layout.discrete else spec.layout.size
        self.towers = Towers(
            self.agents,
            self.state.out_features + size,
            config.fcnet_hiddens,
            config.fcnet_activation,
            config.layer_norm,
            config.init,
            out=1,
        )

    def forward(self, obs: Any, action: Tensor) -> Tensor:
        state, action = self.state(obs), action.flatten(-2)
        if action.ndim == 3:
            state = state.expand(self.agents, *state.shape)
        return self.towers(torch.cat([state, action], -1)).squeeze(2)


class CounterfactualCritic(nn.Module):
    """Of each agent the values of all its choices where the others do what they did: (obs, actions `[B, N]`) ->
    `[B, N, A]` (Foerster et al. 2018). One network for all agents; what an agent did itself is no part of its input."""

    def __init__(self, spec: EnvSpec, config: ModelConfig):
        super().__init__()
        self.agents, self.choices = len(spec.team), spec.action.n[0]
        self.state = StateFeatures(spec, config)
        plain = replace(config, entities=None, custom_preprocessor=None)
        self.own = Features(member_spec(spec, ids=False).observation, plain)
        size = self.state.out_features + self.own.out_features + self.agents * (self.choices + 1)
        self.body = MLP(size, config.fcnet_hiddens, config.fcnet_activation, config.layer_norm, config.init)
        self.head = linear(self.body.out_features, self.choices, 1.0, config.init)

    def inputs(self, obs: Any, action: Tensor) -> Tensor:
        """`[B, N, F]`: the state of the game, what the agent observes, what the others did, its number."""
        state, games = self.state(obs), len(action)
        own = self.own({"obs": obs["obs"].flatten(0, 1)}).unflatten(0, (-1, self.agents))
        numbers = torch.eye(self.agents, device=own.device)
        others = one_hot(action, self.choices).unsqueeze(1) * (1.0 - numbers).unsqueeze(-1)  # [B, agent, other, A]
        state, numbers = (x.expand(games, self.agents, -1) for x in (state.unsqueeze(1), numbers))
        return torch.cat([state, own, others.flatten(2), numbers], -1)

    def forward(self, obs: Any, action: Tensor) -> Tensor:
        return self.head(self.body(self.inputs(obs, action)))


class StateFeatures(nn.Module):
    """What critics see of the game, as `[B, F]`: `state_key` of the observation, flat."""

    def __init__(self, spec: EnvSpec, config: ModelConfig):
        super().__init__()
        self.key, space = state_key(spec), state_space(spec)
        self.flat = space.kind == "box"
        if self.flat:
            space = replace(space, shape=(math.prod(space.shape),))
        plain = replace(config, entities=None, custom_preprocessor=None)  # these are of what an agent sees
        self.features = Features(Space("dict", parts=(space,), names=(self.key,)), plain)
        self.out_features = self.features.out_features

    def forward(self, obs: Any) -> Tensor:
        state = obs[self.key]
        return self.features({self.key: state.flatten(1) if self.flat else state})


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
