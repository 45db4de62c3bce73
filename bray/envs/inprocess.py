"""Environments stepped one after another in this process. The subprocess form runs the same code in each of its workers."""

from __future__ import annotations

import logging
import math
import traceback
from collections.abc import Callable
from typing import Any

import gymnasium as gym
import numpy as np

from bray import tree
from bray.envs.vector import (
    LIFE_LOST,
    Actions,
    BadValue,
    BatchCheck,
    Infos,
    StepResult,
    VecEnv,
    allocator,
    check_state,
    episode_seed,
    gatherer,
    writer,
)
from bray.errors import BrayError, EnvError
from bray.spec import EnvSpec, Space
from bray.tree import NestedArray

log = logging.getLogger("bray.envs")

Build = Callable[[int], tuple[gym.Env, int | None]]
"""Environment `i` (its number in the whole VecEnv) and the steps after which its episodes are truncated, or None."""

FORM = "episodes"
_REPLAY_LIMIT = 100_000
"""Actions of an episode kept for exact resume. A longer episode starts anew after a resume."""


class InProcessVecEnv(VecEnv):
    """See the module. `first` is the number of the first environment, `seed_offset` is added to numbers in episode seeds."""

    def __init__(
        self,
        build: Build,
        num_envs: int,
        spec: EnvSpec | None = None,
        *,
        name: str = "env",
        seed: int = 0,
        first: int = 0,
        seed_offset: int = 0,
        check: bool = True,
        check_values: bool | None = None,
        max_restarts: float = 0,
        on_failure: Callable[[int, str], None] | None = None,
        preprocessing: dict[str, Any] | None = None,
    ):
        self.num_envs, self.name, self.first = num_envs, name, first
        self._build, self._seed, self._seed_offset = build, seed, seed_offset
        self._max_restarts, self._on_failure = max_restarts, on_failure
        made = [build(first + i) for i in range(num_envs)]
        self._envs: list[Any] = [env for env, _ in made]
        self._limits: list[float] = [math.inf if limit is None else limit for _, limit in made]
        self._require_same_spaces()
        self.spec = spec or spec_of(self._envs[0], name, made[0][1], preprocessing)
        self._alloc = allocator(self.spec.observation, num_envs)
        self._gather = gatherer(self.spec.observation)
        self._write = writer(self.spec.observation, strict=check)
        check_values = check if check_values is None else check_values
        self._check = BatchCheck(self.spec.observation, num_envs) if check_values else None
        self._actions = Actions(self.spec.action, num_envs)
        self._steps: list[Callable[[Any], Any]] = [env.step for env in self._envs]
        self._counts = [0] * num_envs
        self.episodes = [-1] * num_envs
        self.dead = np.zeros(num_envs, bool)
        self._dead = [False] * num_envs
        self._last: NestedArray = None
        self._log: list[NestedArray] = []  # one batch of actions per step, for exact resume
        self._log_start = 0  # the number of the step that is first in the log
        self._starts = [0] * num_envs  # the step at which each environment's episode began
        self._lost = [False] * num_envs  # the log no longer reaches back to there
        self._trim_at = 1024

    def _require_same_spaces(self) -> None:
        a = self._envs[0]
        for i, b in enumerate(self._envs):
            for kind in ("observation_space", "action_space"):
                if Space.from_gym(getattr(a, kind)) != Space.from_gym(getattr(b, kind)):
                    raise EnvError(
                        f"{self.name}: environments of one batch need one {kind}, number {self.first} has "
                        f"{getattr(a, kind)}, number {self.first + i} has {getattr(b, kind)}"
                    )

    # --- stepping -----------------------------------------------------------------------------------------------------

    def reset(self, seed: int | None = None) -> NestedArray:
        if seed is not None:
            self._seed = seed
            self.episodes = [-1] * self.num_envs
        obs = self._batch([self._begin(i)[0] for i in range(self.num_envs)])
        self._dead = [False] * self.num_envs
        self.dead = np.zeros(self.num_envs, bool)
        self._last = obs
        self._check_values(obs, None)
        return obs

    def step(self, actions: NestedArray) -> StepResult:
        if self._last is None:
            raise EnvError(f"{self.name}: reset comes before the first step")
        batch = self._actions.cast(actions)
        self._log.append(batch)
        if len(self._log) > self._trim_at:
            self._trim()
        n = self.num_envs
        rows: list[Any] = [None] * n
        reward: list[Any] = [0.0] * n
        terminated: list[Any] = [False] * n
        truncated: list[Any] = [False] * n
        infos: Infos = None
        counts, limits, was_dead, dead = self._counts, self._limits, self._dead, None
        i = -1
        for action in self._actions.rows(batch):
            i += 1
            if was_dead[i]:
                rows[i], info = self._begin(i)
            else:
                try:
                    rows[i], reward[i], done, cut, info = self._steps[i](action)
                except Exception as e:
                    self._failed(i, e)
                    rows[i], reward[i] = tree.index(self._last, i), 0.0
                    done, cut, info = False, True, {}
                counts[i] = count = counts[i] + 1
                if count >= limits[i]:
                    cut = True
                if done or cut:
                    terminated[i], truncated[i] = done, cut
                    dead = dead or [False] * n
                    dead[i] = bool(cut) or not info.get(LIFE_LOST)
            if info:
                infos = infos or [{} for _ in range(n)]
                infos[i] = info
        obs = self._batch(rows)
        rewards = self._rewards(reward)
        if self._check is not None and not (self._check.ok(obs) and math.isfinite(rewards.dot(rewards))):
            self._check_values(obs, rewards)
        self._last = obs
        if dead is None:
            self._dead = [False] * n
            self.dead = np.zeros(n, bool)
            return obs, rewards, np.zeros(n, bool), np.zeros(n, bool), infos
        self._dead = dead
        self.dead = np.array(dead, bool)
        return obs, rewards, np.array(terminated, bool), np.array(truncated, bool), infos

    def _begin(self, i: int) -> tuple[Any, dict[str, Any]]:
        """Start the next episode of environment i; its first observation and info."""
        while True:
            self.episodes[i] += 1
            self._counts[i] = 0
            self._starts[i] = self._log_start + len(self._log)
            self._lost[i] = False
            env = self._envs[i]
            try:
                ob, info = env.reset(seed=self._episode_seed(i))
            except Exception as e:
                self._failed(i, e)
                continue
            self._steps[i] = env.step  # AnyApi may have put the environment's own method there
            return ob, info

    def take_over(self, episodes: list[int], begin: list[bool]) -> list[tuple[int, Any]]:
        """Stand in for environments that are gone: episodes ended where `begin` is False and start now where it is True.

        Returns (environment, first observation) of those that started."""
        self.episodes = list(episodes)
        self._dead = [not b for b in begin]
        self.dead = np.array(self._dead, bool)
        self._last = self._alloc()
        for leaf in tree.leaves(self._last):
            leaf[...] = 0
        started = [(i, self._begin(i)[0]) for i, b in enumerate(begin) if b]
        for i, ob in started:
            self._write(self._last, i, ob)
        return [(i, tree.index(self._last, i)) for i, _ in started]

    def _batch(self, rows: list[Any]) -> NestedArray:
        """One tree of arrays `[B, ...]` of the observations; one that does not fit its space is told or cast."""
        obs = self._gather(rows)
        if obs is None:
            obs = self._alloc()
            for i, row in enumerate(rows):
                try:
                    self._write(obs, i, row)
                except BadValue as e:
                    raise self._bad(i, str(e)) from None
        return obs

    def _episode_seed(self, i: int) -> int:
        return episode_seed(self._seed, self._seed_offset + self.first + i, self.episodes[i])

    def _rewards(self, reward: list[Any]) -> np.ndarray:
        try:
            out = np.array(reward, np.float32)
            if out.ndim == 1:
                return out
        except (TypeError, ValueError):
            pass
        for i, r in enumerate(reward):
            if np.shape(r) != () or not isinstance(r, (int, float, np.generic, np.ndarray)):
                raise self._bad(i, f"the reward is a number, got {type(r).__name__} {r!r}: return float(...)")
        return np.array([float(r) for r in reward], np.float32)

    # --- what goes wrong ----------------------------------------------------------------------------------------------

    def _where(self, i: int) -> str:
        return f"{self.name}, environment {self.first + i}, episode {self.episodes[i]}, step {self._counts[i]}"

    def _bad(self, i: int, what: str) -> EnvError:
        return EnvError(
            f"{self._where(i)}: {what}. Correct the environment, or set env.check=false to go on regardless."
        )

    def _check_values(self, obs: NestedArray, rewards: np.ndarray | None) -> None:
        if self._check is None:
            return
        if not self._check.ok(obs):
            i, what = self._check.explain(obs)
            raise self._bad(i, what)
        if rewards is not None and not np.isfinite(rewards).all():
            i = int(np.flatnonzero(~np.isfinite(rewards))[0])
            raise self._bad(i, f"the reward is {rewards[i]}")

    def _failed(self, i: int, error: Exception) -> None:
        """Environment i raised: count it, tell, rebuild it; give up beyond the limit."""
        if isinstance(error, BrayError):
            raise error
        trace = "".join(traceback.format_exception(error)).rstrip()
        self.restarts += 1
        report = f"{trace}\n{self._where(i)}: it raised {type(error).__name__}"
        if self._on_failure is not None:
            self._on_failure(self.first + i, report)
        elif self.restarts > self._max_restarts:
            raise give_up(report, self._max_restarts) from error
        else:
            log.warning("%s. Rebuilt (%d of at most %g).", report, self.restarts, self._max_restarts)
        old = self._envs[i]
        self._envs[i], limit = self._build(self.first + i)
        if self._envs[i].unwrapped is not old.unwrapped:  # one object given by the user is used on
            try:
                old.close()
            except Exception as e:  # it is being thrown away
                log.warning("%s: closing it raised %s: %s", self._where(i), type(e).__name__, e)
        self._limits[i] = math.inf if limit is None else limit
        self._steps[i] = self._envs[i].step

    # --- exact resume -------------------------------------------------------------------------------------------------

    def _trim(self) -> None:
        """Forget actions of finished episodes, and of those too long to be replayed."""
        now = self._log_start + len(self._log)
        for i, start in enumerate(self._starts):
            if now - start > _REPLAY_LIMIT:
                self._lost[i], self._starts[i] = True, now
        drop = min(self._starts) - self._log_start
        if drop > 0:
            del self._log[:drop]
            self._log_start += drop
        self._trim_at = max(1024, 2 * len(self._log))

    def get_state(self) -> dict[str, Any]:
        arrays, rows = [], []
        self.exact = not any(lost and not dead for lost, dead in zip(self._lost, self._dead, strict=True))
        for i in range(self.num_envs):
            own = None if self._dead[i] else _own_state(self._envs[i])
            taken = [] if self._dead[i] or own is not None else self._log[self._starts[i] - self._log_start :]
            entry: dict[str, Any] = {"obs": tree.map(lambda x, i=i: np.array(x[i]), self._last)}
            if taken:
                entry["actions"] = tree.stack([tree.index(a, i) for a in taken])
            if own is not None:
                entry["state"] = own
            arrays.append(entry)
            rows.append(
                {"episode": self.episodes[i], "steps": self._counts[i], "dead": self._dead[i], "lost": self._lost[i]}
            )
        json = {"form": FORM, "num_envs": self.num_envs, "seed": self._seed, "restarts": self.restarts, "envs": rows}
        return {"arrays": {"envs": arrays}, "json": json}

    def set_state(self, state: dict[str, Any]) -> NestedArray:
        arrays, json = check_state(state, FORM, self.num_envs)
        self._seed, self.restarts, self.exact = int(json["seed"]), int(json["restarts"]), True
        self.episodes = [int(r["episode"]) for r in json["envs"]]
        self._dead = [bool(r["dead"]) for r in json["envs"]]
        obs = self._alloc()
        self._log, self._log_start = [], 0
        histories: list[list[NestedArray]] = []
        fresh: list[int] = []
        for i, (row, entry) in enumerate(zip(json["envs"], arrays["envs"], strict=True)):
            for to, given in zip(tree.leaves(obs), tree.leaves(entry["obs"]), strict=True):
                to[i] = given
            self._counts[i] = int(row["steps"])
            actions = tree.split(entry["actions"]) if "actions" in entry else []
            why = None
            if not self._dead[i]:
                why = (
                    "its episode was too long to be replayed" if row["lost"] else self._restore(i, entry, actions, obs)
                )
            if why is not None:
                self.exact = False
                log.warning("%s: cannot go on exactly (%s); a new episode starts there.", self._where(i), why)
                fresh.append(i)
            histories.append(actions)
        self._rebuild_log(histories)
        for i in fresh:
            self._write(obs, i, self._begin(i)[0])
        self.dead = np.array(self._dead, bool)
        self._last = obs
        return tree.map(np.copy, obs)

    def _restore(self, i: int, entry: dict[str, Any], actions: list[NestedArray], obs: NestedArray) -> str | None:
        """Bring environment i to where it was; the reason where that fails."""
        env = self._envs[i]
        try:
            ob, _ = env.reset(seed=self._episode_seed(i))
            if "state" in entry:
                env.set_state(tree.map(lambda x: x.item() if np.ndim(x) == 0 else np.array(x), entry["state"]))
                self._steps[i] = env.step
                return None
            for a in self._actions_of(actions):
                ob, _, done, cut, info = env.step(a)
                if (done and not info.get(LIFE_LOST)) or cut:
                    return "its episode ended early when its actions were replayed"
            self._steps[i] = env.step
            replayed = self._alloc()
            self._write(replayed, i, ob)
        except BadValue as e:
            return str(e)
        except Exception as e:
            log.warning("%s", "".join(traceback.format_exception(e)).rstrip())
            return f"it raised {type(e).__name__} when its actions were replayed"
        if not tree.equal(tree.index(replayed, i), tree.index(obs, i)):
            return "replaying its actions gave another observation: it is not deterministic under reset(seed=...)"
        return None

    def _actions_of(self, history: list[NestedArray]) -> list[Any]:
        if not history:
            return []
        return Actions(self.spec.action, len(history)).rows(tree.stack(history))

    def _rebuild_log(self, histories: list[list[NestedArray]]) -> None:
        """One batch per step again; shorter episodes begin later, what lies before them is never read."""
        length = max(len(h) for h in histories)
        self._starts = [length - len(h) for h in histories]
        self._lost = [False] * self.num_envs
        filler = next((h[0] for h in histories if h), None)
        for t in range(length):
            rows = [h[t - s] if t >= s else filler for h, s in zip(histories, self._starts, strict=True)]
            self._log.append(tree.stack(rows))

    # --- the rest -----------------------------------------------------------------------------------------------------

    def render(self) -> np.ndarray | None:
        return self._envs[0].render()

    def close(self) -> None:
        for env in self._envs:
            env.close()


def give_up(report: str, max_restarts: float) -> EnvError:
    """The error after too many failures: the user's traceback first."""
    return EnvError(
        f"{report}. env.max_restarts={max_restarts:g} rebuilds are used up: correct the environment, or allow more."
    )


def spec_of(env: Any, name: str, limit: int | None, preprocessing: dict[str, Any] | None = None) -> EnvSpec:
    """The EnvSpec of one built environment."""
    return EnvSpec(
        name,
        Space.from_gym(env.observation_space),
        Space.from_gym(env.action_space),
        max_episode_steps=limit,
        preprocessing=preprocessing or {},
    )


def _own_state(env: Any) -> NestedArray | None:
    """What an environment's own `get_state` gives, when it has one (with `set_state`) and it is a tree of numbers."""
    if not (callable(get := getattr(env, "get_state", None)) and callable(getattr(env, "set_state", None))):
        return None
    state = tree.map(np.asarray, get())
    wrong = [path for path, leaf in tree.paths(state) if leaf.dtype.kind not in "biufc"]
    if wrong:
        log.warning("get_state of %s holds more than numbers (%s): its actions are replayed instead.", env, wrong)
        return None
    return tree.map(np.array, state)
