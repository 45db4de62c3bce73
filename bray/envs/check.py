"""`check_env`: plays a few episodes of a user's environment and says what is wrong with it and what to do."""

from __future__ import annotations

import copy
import inspect
import time
import traceback
from dataclasses import dataclass
from typing import Any

import gymnasium as gym
import numpy as np

from bray import tree
from bray.envs.build import Builder, of_tensors
from bray.envs.check_agents import AgentsCheck, random_action, same_play
from bray.envs.compat import AnyApi
from bray.envs.config import EnvConfig
from bray.envs.missing import what_is_missing
from bray.envs.observations import text_entries
from bray.envs.spaces import BadValue, BatchCheck, empty_batch, leaves, spec_from_gym, writer
from bray.envs.vector import episode_seed
from bray.errors import BrayError
from bray.spec import ActionLayout, Space


@dataclass(frozen=True)
class Finding:
    """One thing the check has to say."""

    severity: str
    """error: training would stop or learn wrongly; warning: it may; info: for the record."""
    message: str

    def __str__(self) -> str:
        return f"{self.severity}: {self.message}"


_DIFFERS = (
    "two runs with the same seed and actions differ at step {}: draw all randomness from reset's seed "
    "(self.np_random); until then resumed runs start new episodes (exact: false)"
)


class _Stop(Exception):
    """Nothing more can be checked."""


class _Checker:
    def __init__(self, config: EnvConfig, steps: int, seed: int):
        self.config, self.steps, self.seed = config, steps, seed
        self.single = False
        self.step_ms = 0.0
        self.findings: list[Finding] = []

    def say(self, severity: str, message: str) -> None:
        finding = Finding(severity, message)
        if finding not in self.findings:
            self.findings.append(finding)

    def stop(self, message: str) -> None:
        self.say("error", message)
        raise _Stop

    def run(self) -> list[Finding]:
        try:
            if self._tensors() or self._several():
                return self.findings
            env, limit = self._make()
            observation, layout = self._spaces(env)
            try:
                first = self._play(env, observation, layout, limit)
            finally:
                if not self.single:
                    env.close()
            if not self.single:
                self._deterministic(observation, layout, first)
        except _Stop:
            pass
        return self.findings

    def _tensors(self) -> bool:
        """Whether it is an environment of tensors, which is then played."""
        try:
            build = Builder.of(self.config)
            if of_tensors(build.source) or self.config.vector == "device":
                from bray.envs.check_tensors import check_tensors

                for severity, message in check_tensors(self.config, build, self.steps, self.seed):
                    self.say(severity, message)
                return True
        except BrayError as e:
            self.stop(str(e))
        return False

    def _several(self) -> bool:
        """Play a game of several agents as it is, twice. True where nothing is left to check: with `env.teams` what is
        joined is looked at too."""
        plays = []
        for again in range(2):
            env = self._made(lambda build: build.agents())
            if env is None:
                return False
            check = AgentsCheck(env, self.say if not again else lambda *_: None, self.stop, self.seed)
            try:
                plays.append(check.play(self.steps))
            finally:
                if not self.single:
                    env.close()
            if self.single:
                break
        if len(plays) == 2 and (t := same_play(*plays)) is not None:
            self.say("warning", _DIFFERS.format(t))
        if not check.ended:
            self.say("warning", f"no episode ended in {self.steps} random steps: the game should end, or truncate")
        return not self.config.teams

    def _make(self) -> tuple[gym.Env, int | None]:
        made: tuple[gym.Env, int | None] = self._made(lambda build: build())
        return made

    def _made(self, make: Any) -> Any:
        try:
            build = Builder.of(self.config)
            self.single, self.step_ms = build.source.single, build.source.step_ms or 0.0
            return make(build)
        except BrayError as e:
            self.stop(str(e))
        except Exception as e:
            self.stop(_raised("making it", e))
        raise _Stop

    def _spaces(self, env: gym.Env) -> tuple[Space, ActionLayout]:
        for kind in ("observation_space", "action_space"):
            if getattr(env, kind, None) is None:
                self.stop(f"it has no {kind}: set it in __init__")
        try:
            spec = spec_from_gym("", env.observation_space, env.action_space, None, {})
        except BrayError as e:
            self.stop(str(e))
        for name, _, space in leaves(spec.observation):
            if space.kind == "box" and space.dtype == "float64":
                self.say("info", f"{name} is float64; models compute in float32, which is half the memory")
        for name, _, space in leaves(spec.action, "action"):
            if space.kind == "box" and not all(np.isfinite(b).all() for b in space.bounds()):
                self.say(
                    "warning", f"{name} is an unbounded Box: give it finite low and high, so that actions can be scaled"
                )
        return spec.observation, spec.layout

    def _reset(self, env: gym.Env, seed: int) -> Any:
        try:
            out = env.reset(seed=seed)
        except Exception as e:
            self.stop(_raised(f"reset(seed={seed})", e))
        if not isinstance(out, tuple) or len(out) != 2 or not isinstance(out[1], dict):
            self.stop(f"reset returns (observation, info dict), got {_kind(out)}")
        return out[0]

    def _play(self, env: gym.Env, space: Space, layout: ActionLayout, limit: int | None) -> list[Any]:
        """Random play; returns what happened, to be compared with a second run."""
        self._interface(env)
        write = writer(space, True, lambda what: self.say("warning", f"{what} at every step, which costs time"))
        check, batch, times = BatchCheck(space, layout), empty_batch(space, 1), []
        rng = np.random.default_rng(self.seed)
        trace: list[Any] = []
        held: tuple[Any, Any] | None = None
        episode, length, ended = 0, 0, False
        obs = self._reset(env, episode_seed(self.seed, 0, 0))
        for t in range(self.steps + 1):
            self._observation(obs, write, check, batch, f"episode {episode}, step {length}")
            if held is not None and not tree.equal(held[0], held[1]):
                self.say(
                    "warning",
                    "step returns an array that the environment overwrites later (aliasing): return a copy "
                    "(obs.copy()), else what others keep of it changes under their hands",
                )
            held = (obs, copy.deepcopy(obs))
            if t == self.steps:
                break
            action = random_action(layout, obs, rng)
            began = time.perf_counter()
            try:
                out = env.step(action)
            except Exception as e:
                self.stop(_raised(f"step({action!r}) at episode {episode}, step {length}", e))
            times.append(time.perf_counter() - began)
            if not isinstance(out, tuple) or len(out) != 5:
                self.stop(f"step returns (obs, reward, terminated, truncated, info), got {_kind(out)}")
            obs, reward, terminated, truncated, info = out
            self._signals(reward, terminated, truncated, info)
            length += 1
            trace.append(
                (copy.deepcopy(obs), float(np.asarray(reward).reshape(-1)[0]), bool(terminated), bool(truncated))
            )
            if terminated or truncated or (limit is not None and length >= limit):
                episode, length, ended = episode + 1, 0, True
                held = None
                obs = self._reset(env, episode_seed(self.seed, 0, episode))
        self._speed(float(np.median(times)) * 1e3)
        if not ended and limit is None:
            self.say(
                "warning",
                f"no episode ended in {self.steps} random steps and there is no time limit: set max_episode_steps",
            )
        return trace

    def _speed(self, ms: float) -> None:
        """`env.vector=auto` does not measure; this does, and says what to declare."""
        if ms > 1.0 and not self.step_ms and not self.single:
            self.say(
                "info",
                f"a step takes about {ms:.1f} ms. To step several environments on several cores set "
                f'env.vector=subprocess, or let auto choose that: metadata = {{"step_ms": {ms:.0f}}} in its class',
            )

    def _interface(self, env: gym.Env) -> None:
        inner = env
        while isinstance(inner, gym.Wrapper):
            inner = inner.env
        for name, length in text_entries(inner.observation_space).items():
            key = name.removeprefix("observation['").removesuffix("']")
            if key not in self.config.drop_obs:
                self.say(
                    "info",
                    f"{name} is a text: it is given to the agent as uint8[{length}], the codes of its characters; "
                    f"env.drop_obs=[{key}] leaves it out",
                )
        if not isinstance(inner, AnyApi):
            return
        user = inner.env
        if not isinstance(user, gym.Env):
            self.say("info", f"{type(user).__name__} is not a gymnasium.Env; it is adapted")
        try:
            parameters = inspect.signature(user.reset).parameters
        except (TypeError, ValueError):
            return
        if "seed" in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
            return
        if callable(getattr(user, "seed", None)):
            self.say("info", "reset does not take `seed`; its method `seed` is called before each reset")
        else:
            self.say(
                "warning",
                "reset does not take `seed`: define reset(self, *, seed=None, options=None) and draw all randomness "
                "from it, else runs cannot be repeated or resumed exactly",
            )

    def _observation(self, obs: Any, write: Any, check: BatchCheck, batch: Any, where: str) -> None:
        try:
            write(batch, 0, obs)
        except BadValue as e:
            self.stop(f"{where}: {e}")
        if (found := check.first_bad(batch)) is not None:
            self.stop(
                f"{where}: {found[1]}. Correct it; an environment that you cannot edit trains with env.check=false"
            )
        if (found := check.first_blocked(batch)) is not None:
            self.stop(f"{where}: {found[1]}")

    def _signals(self, reward: Any, terminated: Any, truncated: Any, info: Any) -> None:
        if np.size(reward) != 1 or not isinstance(reward, (int, float, np.number, np.ndarray)):
            self.stop(f"the reward is a number, got {_kind(reward)}: return float(reward)")
        if np.shape(reward) != ():
            self.say("info", f"the reward is an array of shape {np.shape(reward)}; it is taken as a number")
        if not np.isfinite(reward).all():
            self.stop(f"the reward is {reward}")
        for name, value in (("terminated", terminated), ("truncated", truncated)):
            if not isinstance(value, (bool, np.bool_)):
                self.say("warning", f"{name} is a bool, got {_kind(value)}: return bool({name})")
        if info is None:
            self.say("warning", "info is a dict, got None: return {}")
        elif not isinstance(info, dict):
            self.stop(f"info is a dict, got {_kind(info)}")

    def _deterministic(self, space: Space, layout: ActionLayout, first: list[Any]) -> None:
        """The same seed and actions must give the same episodes: exact resume depends on it."""
        again = _Checker(self.config, self.steps, self.seed)
        env, limit = again._make()
        second = again._play(env, space, layout, limit)
        env.close()
        for t, (a, b) in enumerate(zip(first, second, strict=False)):
            if not tree.equal(a[0], b[0]) or a[1:] != b[1:]:
                self.say("warning", _DIFFERS.format(t))
                return


def check_env(config: EnvConfig, steps: int = 200, seed: int = 0) -> list[Finding]:
    """Play `steps` random steps twice and report: spaces, signatures, types, bounds, aliasing, determinism, action
    masks.

    An empty list is a clean bill; an error means that training would stop or learn something wrong.
    """
    return _Checker(config, steps, seed).run()


def _raised(what: str, error: Exception) -> str:
    """One sentence where something is missing on this machine, else the traceback."""
    if (missing := what_is_missing(error)) is not None:
        return f"{what}: it needs {missing}"
    return f"{what} raised:\n{''.join(traceback.format_exception(error)).rstrip()}"


def _kind(value: Any) -> str:
    if isinstance(value, tuple):
        return f"a tuple of {len(value)}"
    return f"{type(value).__name__} {str(value)[:80]}"
