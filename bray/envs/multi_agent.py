"""Games of several agents: `MultiAgentEnv`, and whatever has its shape (RLlib's, PettingZoo's) made into one."""

from __future__ import annotations

import copy
import inspect
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from bray.envs.compat import convert_space
from bray.errors import ConfigError, EnvError

ALL = "__all__"
"""The key of `terminateds` and `truncateds` that speaks of the whole game."""
_OF_AGENTS = {"MultiAgentEnv", "ParallelEnv", "AECEnv"}
"""Base classes of games of several agents, by name: ours, RLlib's, PettingZoo's."""
Agents = dict[str, Any]
StepOfAgents = tuple[Agents, Agents, Agents, Agents, Agents]
_ANSWERS = {
    "reset": "(observations, infos), two dicts by agent",
    "step": "(observations, rewards, terminateds, truncateds, infos), five dicts by agent",
}


class MultiAgentEnv(ABC):
    """A game of several agents. What it takes and gives are dicts by the agents' names.

    Who has an observation and has not ended decides next: all of them where agents act at once, one where they take
    turns. `step` gets the actions of exactly these.

    An agent ends where `terminateds` or `truncateds` says so. It may have a last observation then, and gets no reward
    afterwards. It is back as soon as it has an observation again. `__all__` in both says whether the game is over.

    `global_state_space` declares a state of the whole game, which `global_state()` gives after `reset` and each `step`:
    for critics and mixers, never for those who act.
    """

    possible_agents: list[str]
    """All that may ever play."""
    observation_spaces: Mapping[str, Any]
    action_spaces: Mapping[str, Any]
    global_state_space: Any = None
    metadata: Mapping[str, Any] = {}
    render_mode: str | None = None

    @abstractmethod
    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Agents, Agents]:
        """Observations of those who decide first, and infos."""

    @abstractmethod
    def step(self, actions: Agents) -> StepOfAgents:
        """Observations, rewards (left out: 0), terminateds, truncateds and infos (may be empty)."""

    def observation_space(self, agent: str) -> Any:
        return _declared(self, "observation_spaces", agent)

    def action_space(self, agent: str) -> Any:
        return _declared(self, "action_spaces", agent)

    def global_state(self) -> Any:
        """Of now, a member of `global_state_space`."""
        raise EnvError(f"{type(self).__name__} declares global_state_space: define global_state(self) too")

    def clone(self) -> MultiAgentEnv:
        """A copy that goes its own way, as it is now, for those who search the game."""
        raise ConfigError(
            f"{type(self).__name__} cannot be searched: define clone(self), which returns a copy of the game as it is"
        )

    def render(self) -> Any:
        return None

    def close(self) -> None:  # noqa: B027  most games hold nothing
        """Free windows and memory."""


class AroundAgents(MultiAgentEnv):
    """A game made of another one, `env`, whose state and pictures are that one's."""

    env: MultiAgentEnv

    def global_state(self) -> Any:
        return self.env.global_state()

    def render(self) -> Any:
        return self.env.render()

    def close(self) -> None:
        self.env.close()


class AdaptedAgents(MultiAgentEnv):
    """An environment of dicts by agent that is not ours: RLlib's `MultiAgentEnv` of any age, PettingZoo's
    `ParallelEnv`.

    Names that are no strings become such. Old ones without `truncateds` or infos of `reset` are completed. PettingZoo
    has no `__all__`: its games are over when no agent is left.
    """

    def __init__(self, env: Any):
        self.env = env
        self._has_all = "MultiAgentEnv" in _classes(env)
        parameters = inspect.signature(env.reset).parameters
        any_keyword = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
        self._reset_takes = {k for k in ("seed", "options") if k in parameters or any_keyword}
        self._names = {str(agent): agent for agent in self._find_agents()}
        self.possible_agents = list(self._names)
        spaces = {
            kind: {name: convert_space(self._space(kind, agent)) for name, agent in self._names.items()}
            for kind in ("observation", "action")
        }
        self.observation_spaces, self.action_spaces = spaces["observation"], spaces["action"]
        self.global_state_space = next(
            (s for k in ("global_state_space", "state_space") if (s := getattr(env, k, None)) is not None), None
        )
        self.metadata = getattr(env, "metadata", None) or {}
        self.render_mode = getattr(env, "render_mode", None)

    def _find_agents(self) -> Iterable[Any]:
        """The agents, by whichever attribute says so; where none does, those of a first reset."""
        for name in ("possible_agents", "get_agent_ids", "_agent_ids", "agents"):
            found = getattr(self.env, name, None)
            found = found() if callable(found) else found
            if isinstance(found, (list, tuple)) and found:
                return found
            if isinstance(found, (set, frozenset)) and found:
                return sorted(found, key=str)
        return sorted(self._reset({})[0], key=str)

    def _space(self, kind: str, agent: Any) -> Any:
        """Of an agent: from a dict of spaces, from a method, or one that all share."""
        env = self.env
        one = getattr(env, f"{kind}_space", None)
        if callable(one) and not hasattr(one, "sample"):
            return one(agent)
        by_agent = getattr(env, f"{kind}_spaces", None)
        if isinstance(by_agent, Mapping) and agent in by_agent:
            return by_agent[agent]
        members = getattr(one, "spaces", None)
        if isinstance(members, Mapping) and (agent in members or str(agent) in members):
            return members[agent] if agent in members else members[str(agent)]
        return _declared(env, f"{kind}_spaces", agent) if one is None else one

    def _reset(self, given: dict[str, Any]) -> tuple[Any, Any]:
        out = self.env.reset(**{k: v for k, v in given.items() if k in self._reset_takes and v is not None})
        return (out[0], out[1] or {}) if isinstance(out, tuple) and len(out) == 2 else (out, {})

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Agents, Agents]:
        if seed is not None and "seed" not in self._reset_takes and callable(seeder := getattr(self.env, "seed", None)):
            seeder(seed)
        obs, infos = self._reset({"seed": seed, "options": options})
        return _by_name(obs), _by_name(infos)

    def step(self, actions: Agents) -> StepOfAgents:
        out = self.env.step({self._names[name]: action for name, action in actions.items()})
        if not isinstance(out, tuple) or len(out) not in (4, 5):
            got = f"{len(out)} values" if isinstance(out, tuple) else type(out).__name__
            raise EnvError(
                f"{type(self.env).__name__}.step returns (observations, rewards, terminateds, truncateds, infos), got "
                f"{got}"
            )
        obs, rewards, terminateds, *rest, infos = (_by_name(x) for x in out)
        truncateds = rest[0] if rest else {ALL: False}
        if not self._has_all:
            ended = {a for flags in (terminateds, truncateds) for a, is_so in flags.items() if is_so}
            over = not getattr(self.env, "agents", True) or ended >= terminateds.keys()
            cut = over and bool(terminateds) and not all(terminateds.values())
            terminateds, truncateds = {**terminateds, ALL: over and not cut}, {**truncateds, ALL: cut}
        return obs, rewards, terminateds, truncateds, infos

    @property
    def agents(self) -> list[str] | None:
        """Who is in the game now, where the environment says so."""
        now = getattr(self.env, "agents", None)
        return None if now is None else [str(agent) for agent in now]

    def global_state(self) -> Any:
        state = getattr(self.env, "global_state", None) or self.env.state
        return state()

    def clone(self) -> MultiAgentEnv:
        return _around_clone(self)

    def render(self) -> Any:
        return self.env.render() if hasattr(self.env, "render") else None

    def close(self) -> None:
        if callable(close := getattr(self.env, "close", None)):
            close()


class TurnsOfAgents(MultiAgentEnv):
    """A game of PettingZoo in which agents act one after another (`AECEnv`).

    An observation is of the agent whose turn it is, and the last one of those that end. Rewards are those of the step,
    not PettingZoo's sums since an agent's last turn. The steps in which ended agents are taken out are made here."""

    def __init__(self, env: Any):
        self.env = env
        self.possible_agents = list(map(str, env.possible_agents))
        self.observation_spaces = {a: convert_space(env.observation_space(a)) for a in self.possible_agents}
        self.action_spaces = {a: convert_space(env.action_space(a)) for a in self.possible_agents}
        self.global_state_space = getattr(env, "state_space", None)
        self.metadata = getattr(env, "metadata", None) or {}
        self.render_mode = getattr(env, "render_mode", None)

    @property
    def agents(self) -> list[str]:
        return list(self.env.agents)

    def _infos(self, agents: Iterable[str]) -> Agents:
        return {a: self.env.infos.get(a, {}) for a in agents}

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Agents, Agents]:
        self.env.reset(seed=seed, options=options)
        first = self.env.agent_selection
        return {first: self.env.observe(first)}, self._infos([first])

    def step(self, actions: Agents) -> StepOfAgents:
        env = self.env
        before = set(env.agents)
        env.step(actions[env.agent_selection])
        rewards = {a: float(r) for a, r in env.rewards.items() if a in before}
        terminateds = {a: bool(env.terminations[a]) for a in env.agents}
        truncateds = {a: bool(env.truncations[a]) for a in env.agents}
        ended = [a for a in env.agents if terminateds[a] or truncateds[a]]
        obs = {a: env.observe(a) for a in ended}
        infos = self._infos(env.agents)
        while env.agents and (env.terminations[env.agent_selection] or env.truncations[env.agent_selection]):
            env.step(None)
        if env.agents:
            obs[env.agent_selection] = env.observe(env.agent_selection)
        cut = not env.agents and any(truncateds.values())
        terminateds[ALL], truncateds[ALL] = not env.agents and not cut, cut
        return obs, rewards, terminateds, truncateds, infos

    def global_state(self) -> Any:
        return self.env.state()

    def clone(self) -> MultiAgentEnv:
        return _around_clone(self)

    def render(self) -> Any:
        return self.env.render()

    def close(self) -> None:
        self.env.close()


def _around_clone(adapted: Any) -> MultiAgentEnv:
    """What `adapted` is, around a clone of its environment."""
    if not callable(getattr(adapted.env, "clone", None)):
        raise ConfigError(
            f"{type(adapted.env).__name__} cannot be searched: define clone(self), which returns a copy of the game as "
            "it is"
        )
    other = copy.copy(adapted)
    other.env = adapted.env.clone()
    return other


def adapt_agents(env: Any) -> MultiAgentEnv | None:
    """`env` as a MultiAgentEnv where several agents play it, by its class or its attributes; None where one does."""
    if isinstance(env, MultiAgentEnv):
        if not getattr(env, "possible_agents", None):
            raise EnvError(f"{type(env).__name__} does not say who plays: set possible_agents = [agent, ...]")
        return env
    classes = _classes(env)
    if "AECEnv" in classes or (hasattr(env, "agent_selection") and hasattr(env, "possible_agents")):
        return TurnsOfAgents(env)
    if classes & _OF_AGENTS or hasattr(env, "possible_agents"):
        return AdaptedAgents(env)
    return None


def may_be_of_agents(kind: type) -> bool:
    """Whether objects of a class may be games of several agents: not those of Gymnasium's `Env` that say nothing of
    agents."""
    names = {c.__name__ for c in kind.__mro__}
    return bool(names & _OF_AGENTS) or hasattr(kind, "possible_agents") or "Env" not in names


def ended(agent: str, terminateds: Agents, truncateds: Agents) -> bool:
    """Whether a step ended an agent."""
    return bool(terminateds.get(agent)) or bool(truncateds.get(agent))


def answered(call: str, answer: Any, who: str) -> Any:
    """What `reset` or `step` of a game returned, in the form that it has to have."""
    count = 2 if call == "reset" else 5
    if isinstance(answer, tuple) and len(answer) == count and all(isinstance(x, (dict, Mapping)) for x in answer):
        return answer
    kinds = [type(x).__name__ for x in answer] if isinstance(answer, tuple) else []
    got = f"{len(kinds)} values: {', '.join(kinds)}" if kinds else "None" if answer is None else type(answer).__name__
    raise EnvError(f"{who}: {call} returns {_ANSWERS[call]}, got {got}")


def game_over(terminateds: Agents, truncateds: Agents, who: str) -> bool:
    """Whether a step ended the game; `who` returned it."""
    if ALL not in terminateds and ALL not in truncateds:
        raise EnvError(
            f"{who}: terminateds and truncateds have no {ALL!r}, which says whether the game is over: return "
            f"{{..., {ALL!r}: False}} until it is; got {terminateds}"
        )
    return ended(ALL, terminateds, truncateds)


def _declared(env: Any, key: str, agent: Any) -> Any:
    """The space of an agent that the environment has in a dict of this name."""
    try:
        return getattr(env, key)[agent]
    except (AttributeError, KeyError, TypeError):
        raise EnvError(
            f"{type(env).__name__} does not say the {key.removesuffix('_spaces')} space of agent {str(agent)!r}: set "
            f"{key} = {{agent: space}}"
        ) from None


def _classes(env: Any) -> set[str]:
    return {c.__name__ for c in type(env).__mro__}


def _by_name(values: Any) -> Agents:
    if not isinstance(values, Mapping):
        raise EnvError(f"an environment of several agents gives dicts by agent, got {type(values).__name__} {values!r}")
    return {str(agent): value for agent, value in values.items()}


def as_float(reward: Any, agent: str) -> float:
    try:
        return float(np.asarray(reward).reshape(()))
    except (TypeError, ValueError):
        raise EnvError(f"agent {agent!r}: its reward is {reward!r}, expected a number") from None
