"""What is wrong with a game of several agents: `bray check-env` plays it at random and names agent and step."""

from __future__ import annotations

import copy
import traceback
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from bray import tree
from bray.envs.missing import what_is_missing
from bray.envs.multi_agent import ALL, Agents, MultiAgentEnv, answered, ended
from bray.envs.spaces import BadValue, BatchCheck, empty_batch, spec_from_gym, writer
from bray.envs.vector import episode_seed
from bray.errors import BrayError
from bray.spec import ACTION_MASK, ActionLayout, EnvSpec

Say = Callable[[str, str], None]
Stop = Callable[[str], None]


class AgentsCheck:
    """Plays a game, and tells `say(severity, message)`; `stop(message)` is an error after which nothing is played."""

    def __init__(self, env: MultiAgentEnv, say: Say, stop: Stop, seed: int):
        self.env, self.say, self.stop, self.seed = env, say, stop, seed
        self.ended = False
        """Whether an episode came to its end."""
        self._where = "reset"
        self._rng = np.random.default_rng(seed)
        self._specs: dict[str, EnvSpec] = {}

    def play(self, steps: int) -> list[Any]:
        """Play `steps` random steps; returns what happened, to be compared with a second time."""
        self._read_spaces()
        trace: list[Any] = []
        episode, t = 0, 0
        acting, out = self._begin(episode)
        for _ in range(steps):
            actions = {a: random_action(self._specs[a].layout, out[a], self._rng) for a in acting}
            t += 1
            self._where = f"episode {episode}, step {t}"
            result = self._call(f"step({actions})", partial(self.env.step, actions))
            acting, over = self._after(result, set(acting))
            out = result[0]
            trace.append(copy.deepcopy(result[:4]))
            if over:
                episode, t, self.ended = episode + 1, 0, True
                acting, out = self._begin(episode)
        return trace

    def _read_spaces(self) -> None:
        env = self.env
        agents = getattr(env, "possible_agents", None)
        if not agents:
            self.stop("it has no possible_agents: set it in __init__, the names of all agents that may ever play")
        for agent in env.possible_agents:
            try:
                spaces = env.observation_space(agent), env.action_space(agent)
                spec = spec_from_gym("", *spaces, None, {})
            except KeyError as e:
                self.stop(
                    f"agent {agent!r} has no space ({e}): set observation_spaces and action_spaces for all agents"
                )
            except BrayError as e:
                self.stop(f"agent {agent!r}: {e}")
            self._specs[agent] = spec
        self._writers = {a: writer(s.observation, True, lambda what: None) for a, s in self._specs.items()}
        self._checks = {a: BatchCheck(s.observation, s.layout) for a, s in self._specs.items()}

    def _call(self, what: str, call: Callable[[], Any]) -> Any:
        try:
            return call()
        except BrayError as e:
            self.stop(f"{self._where}: {e}")
        except Exception as e:
            missing = what_is_missing(e)
            trace = "".join(traceback.format_exception(e)).rstrip()
            self.stop(f"{what}: it needs {missing}" if missing else f"{self._where}: {what} raised:\n{trace}")

    def _begin(self, episode: int) -> tuple[list[str], Agents]:
        self._where = f"episode {episode}, reset"
        seed = episode_seed(self.seed, 0, episode)
        out = self._call(f"reset(seed={seed})", lambda: self.env.reset(seed=seed))
        self._call("reset", lambda: answered("reset", out, type(self.env).__name__))
        self._dead: dict[str, str] = {}
        self._observed(out[0], set())
        if not out[0]:
            self.stop(f"{self._where}: nobody has an observation, so nobody can act")
        self._state()
        return list(out[0]), out[0]

    def _observed(self, obs: Agents, ends: set[str]) -> None:
        playing = getattr(self.env, "agents", None)
        for agent, value in obs.items():
            if agent not in self._specs:
                self.stop(
                    f"{self._where}: an observation for agent {agent!r}, who is not in possible_agents "
                    f"{list(self._specs)}"
                )
            if playing is not None and agent not in playing and agent not in ends:
                self.stop(
                    f"{self._where}: agent {agent!r} has an observation and would act out of turn: `agents`, who are "
                    f"in the game now, are {list(playing)}"
                )
            batch = empty_batch(self._specs[agent].observation, 1)
            try:
                self._writers[agent](batch, 0, value)
            except BadValue as e:
                self.stop(f"{self._where}, agent {agent!r}: {e}")
            found = self._checks[agent].first_bad(batch)
            if found is None and agent not in ends:
                found = self._checks[agent].first_blocked(batch)
            if found is not None:
                self.stop(f"{self._where}, agent {agent!r}: {found[1]}")

    def _after(self, result: Any, acted: set[str]) -> tuple[list[str], bool]:
        """Look at what `step` returned; who acts next, and whether the game is over."""
        who = type(self.env).__name__
        obs, rewards, terminateds, truncateds, _ = self._call("step", lambda: answered("step", result, who))
        for name, flags in (("terminateds", terminateds), ("truncateds", truncateds)):
            if ALL not in flags:
                self.stop(
                    f"{self._where}: {name} has no {ALL!r}, which says whether the game is over: add {ALL!r}: False "
                    f"until it is; got {flags}"
                )
        ends = {a for a in {**terminateds, **truncateds} if a != ALL and ended(a, terminateds, truncateds)}
        for agent, reward in rewards.items():
            if agent not in self._specs:
                self.stop(f"{self._where}: a reward for agent {agent!r}, who is not in possible_agents")
            if np.size(reward) != 1 or not np.isfinite(np.asarray(reward, float)).all():
                self.stop(f"{self._where}, agent {agent!r}: the reward is a finite number, got {reward!r}")
            if agent in self._dead and agent not in obs and float(np.asarray(reward).reshape(())):
                self.stop(
                    f"{self._where}: a reward of {reward} for agent {agent!r}, who ended at {self._dead[agent]}: what "
                    "the dead get, nobody can learn from; pay it before or with the end"
                )
        over = ended(ALL, terminateds, truncateds)
        self._observed(obs, set(self._specs) if over else ends)
        for agent in ends:
            if agent in self._dead and agent not in obs:
                self.say("info", f"{self._where}: agent {agent!r} ends again, it ended at {self._dead[agent]} already")
            self._dead.setdefault(agent, self._where)
        acting = [agent for agent in obs if agent not in ends]
        for agent in acting:
            if agent in self._dead:
                del self._dead[agent]
        if not over and not acting:
            self.stop(f"{self._where}: nobody who is in the game has an observation, and {ALL!r} is False")
        self._state()
        return acting, over

    def _state(self) -> None:
        space = self.env.global_state_space
        if space is None:
            return
        state = self._call("global_state()", self.env.global_state)
        if np.shape(state) != space.shape or not space.contains(np.asarray(state, space.dtype)):
            self.stop(f"{self._where}: global_state() is not in global_state_space {space}, got {str(state)[:80]}")


def same_play(first: list[Any], second: list[Any]) -> int | None:
    """The first step in which two plays differ; None where they do not."""
    for t, (a, b) in enumerate(zip(first, second, strict=False)):
        same = all(x.keys() == y.keys() for x, y in zip(a, b, strict=True))
        if not same or not all(tree.equal(x, y) for x, y in zip(map(_arrays, a), map(_arrays, b), strict=True)):
            return t
    return None


def _arrays(values: Agents) -> Any:
    return tree.map(np.asarray, values)


def random_action(layout: ActionLayout, obs: Any, rng: np.random.Generator) -> Any:
    """A random action; where there is a mask and all parts are discrete, a legal one."""
    action = layout.space.sample(rng)
    if layout.discrete and isinstance(obs, dict) and ACTION_MASK in obs:
        mask = layout.mask(tree.map(lambda x: np.asarray(x)[None], obs))
        if mask is not None:
            flat, at = [], 0
            for part in layout.parts:
                flat.append(rng.choice(np.flatnonzero(mask[0, at : at + part.n])))
                at += part.n
            chosen = np.array(flat[0] if layout.single else flat, np.int64)[None]
            action = tree.index(layout.to_env(chosen), 0)
    return action
