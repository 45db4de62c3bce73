"""Environments stepped one after another in this process. The subprocess form runs the same code in each of its
workers."""

from __future__ import annotations

import logging
import math
import traceback
from collections.abc import Callable
from typing import Any

import numpy as np

from bray import tree
from bray.envs.build import Builder
from bray.envs.missing import warn_once, what_is_missing
from bray.envs.replayed_calls import ReplayedCalls
from bray.envs.spaces import BadValue, caster, empty_batch, gatherer, splitter, writer
from bray.envs.table import Game, check_of
from bray.envs.vector import LIFE_LOST, Infos, StepResult, VecEnv, episode_seed
from bray.errors import BrayError, ConfigError, EnvError, StoppedBySignal
from bray.spec import EnvSpec, Space
from bray.tree import NestedArray

log = logging.getLogger("bray.envs")

FORM = "episodes"
REPLAY_LIMIT = 100_000
"""Actions of an episode kept for exact resume. A longer episode starts anew after a resume."""


class InProcessVecEnv(VecEnv):
    """All environments of a config; in a worker process those with the given `numbers`.

    A worker tells failures to `on_failure`, and leaves counting them and checking values to its parent."""

    form = FORM

    def __init__(
        self,
        build: Builder,
        seed: int,
        spec: EnvSpec | None = None,
        numbers: range | None = None,
        on_failure: Callable[[str], None] | None = None,
    ):
        numbers = range(build.config.num_envs) if numbers is None else numbers
        self.num_envs, self.first, self._build, self._seed = len(numbers), numbers.start, build, seed
        self._on_failure, self._max_restarts = on_failure, build.config.max_restarts
        made = [build(i) for i in numbers]
        self._envs: list[Any] = [env for env, _ in made]
        self._limits = [_or_never(limit) for _, limit in made]
        self._require_same_spaces()
        self.spec = spec or build.spec_of(*made[0])
        self._require_same_agents()
        self._tables: NestedArray = empty_batch(self.spec.given, self.num_envs) if self.spec.sides else None
        for i in range(self.num_envs if self.spec.sides else 0):
            self._seat(i)
        observation, action = self.spec.given, self.spec.action
        self._gather, self._write = gatherer(observation), writer(observation, build.config.check, self._on_cast)
        self._check = None
        if build.config.check and on_failure is None:
            self._check = check_of(self.spec, build.source.keeps_bounds)
        self._cast, self._split = caster(action, self.num_envs), splitter(action)
        self._steps: list[Callable[[Any], Any]] = [env.step for env in self._envs]
        self._counts = [0] * self.num_envs
        self.episodes = [-1] * self.num_envs
        self._set_dead([False] * self.num_envs)
        self._last: NestedArray = None
        self._log: list[NestedArray] = []  # one batch of actions per step, for exact resume
        self._log_start = 0  # the number of the step that is first in the log
        self._starts = [0] * self.num_envs  # the step at which each environment's episode began
        self._lost = [False] * self.num_envs  # the log no longer reaches back to there
        self._trim_at = 1024
        self._calls = ReplayedCalls()

    def _require_same_spaces(self) -> None:
        a = self._envs[0]
        for i, b in enumerate(self._envs):
            for kind in ("observation_space", "action_space"):
                if Space.from_gym(getattr(a, kind)) != Space.from_gym(getattr(b, kind)):
                    raise EnvError(
                        f"{self._build.name}: environments of one batch need one {kind}, number {self.first} has "
                        f"{getattr(a, kind)}, number {self.first + i} has {getattr(b, kind)}"
                    )

    def _require_same_agents(self) -> None:
        for i, env in enumerate(self._envs if self.spec.sides else ()):
            if (agents := tuple(env.env.possible_agents)) != self.spec.agents:
                raise EnvError(
                    f"{self._build.name}: environments of one batch need the same possible_agents, number 0 has "
                    f"{', '.join(self.spec.agents)}, number {self.first + i} has {', '.join(agents)}"
                )

    def _seat(self, i: int) -> None:
        """A table writes what is seen to its row of one batch."""
        self._envs[i].show_in(tree.map(lambda x: x[i, ...], self._tables))

    def _set_dead(self, dead: list[bool]) -> None:
        self._dead, self.dead = dead, np.array(dead, bool)

    # --- stepping -----------------------------------------------------------------------------------------------------

    def reset(self, seed: int | None = None) -> NestedArray:
        if seed is not None:
            self._seed = seed
            self.episodes = [-1] * self.num_envs
        self._last = obs = self._batch([self._begin(i)[0] for i in range(self.num_envs)])
        self._set_dead([False] * self.num_envs)
        self._check_values(obs)
        return obs

    def step(self, actions: NestedArray) -> StepResult:
        if self._last is None:
            raise EnvError(f"{self._build.name}: reset comes before the first step")
        batch = self._cast(actions)
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
        for action in self._split(batch):
            i += 1
            if was_dead[i]:
                rows[i], info = self._begin(i)
            else:
                try:
                    rows[i], reward[i], done, cut, info = self._steps[i](action)
                except (Exception, SystemExit) as e:
                    self._failed(i, e)
                    rows[i], reward[i] = tree.index(self._last, i), 0.0
                    done, cut, info = False, True, {}
                counts[i] = count = counts[i] + 1
                if count >= limits[i]:
                    cut = True
                if done or cut:
                    terminated[i], truncated[i] = bool(done), bool(cut)  # an array of one is a flag too
                    dead = dead or [False] * n
                    dead[i] = bool(cut) or not (info or {}).get(LIFE_LOST)
            if info:
                infos = infos or [{} for _ in range(n)]
                infos[i] = info
        obs, rewards = self._batch(rows), self._rewards(reward)
        self._check_values(obs, rewards, dead)
        self._last = obs
        if dead is None:  # the usual case: arrays of lists would cost more than they need
            self._dead, self.dead = [False] * n, np.zeros(n, bool)
            return obs, rewards, np.zeros(n, bool), np.zeros(n, bool), infos
        self._set_dead(dead)
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
                ob, info = self._reset(i)
            except (Exception, SystemExit) as e:
                self._failed(i, e)
                continue
            self._steps[i] = env.step  # AnyApi may have put the environment's own method there
            return ob, info

    def take_over(self, episodes: list[int], begin: list[bool]) -> NestedArray:
        """Stand in for environments that are gone: episodes ended where `begin` is False and start now where it is
        True.

        Returns the observations; those of ended episodes are zero."""
        self.episodes = list(episodes)
        self._set_dead([not b for b in begin])
        self._last = self._empty()
        for leaf in tree.leaves(self._last):
            leaf[...] = 0
        for i in np.flatnonzero(begin).tolist():
            self._write(self._last, i, self._begin(i)[0])
        return self._last

    def _empty(self) -> NestedArray:
        return empty_batch(self.spec.given, self.num_envs)

    def _batch(self, rows: list[Any]) -> NestedArray:
        """One tree of arrays `[B, ...]` of the observations; one that does not fit its space is told or cast."""
        if self._tables is not None:
            return tree.map(lambda x: x.copy(), self._tables)
        obs = self._gather(rows)
        if obs is None:
            obs = self._empty()
            for i, row in enumerate(rows):
                try:
                    self._write(obs, i, row)
                except BadValue as e:
                    raise self._bad(i, str(e)) from None
        return obs

    def _on_cast(self, what: str) -> None:
        """From now on `_gather` casts: the slow way through `_write` is for the first time only."""
        self._gather = gatherer(self.spec.given, cast=True)
        if self.first == 0:  # one worker process speaks for all
            warn_once(log, f"{self._build.name}: {what}.")

    def _reset(self, i: int) -> tuple[Any, dict[str, Any]]:
        """Begin the episode of environment i that `episodes` says, by its seed."""
        before = max(0, self._build.worker_index - 1)  # workers are numbered from 1: they play what one process would
        number, env = before * self._build.config.num_envs + self.first + i, self._envs[i]
        seed = episode_seed(self._seed, number, self.episodes[i])
        if self.spec.sides:
            env.at = Game(number, self.episodes[i], seed)
        first: tuple[Any, dict[str, Any]] = env.reset(seed=seed)
        return first

    def _rewards(self, reward: list[Any]) -> np.ndarray:
        """float32[B]; an array of one number is a number too."""
        try:
            out = np.array(reward)
            if out.dtype.kind in "fiub" and out.size == self.num_envs:  # with float32 asked for, "1" is 1 and None nan
                return out.astype(np.float32, copy=False).reshape(-1)
        except (TypeError, ValueError):
            pass
        for i, r in enumerate(reward):
            if np.size(r) != 1 or not isinstance(r, (int, float, np.generic, np.ndarray)):
                raise self._bad(i, f"the reward is a number, got {type(r).__name__} {r!r}: return float(...)")
        return np.array([np.asarray(r).item() for r in reward], np.float32)

    # --- what goes wrong ----------------------------------------------------------------------------------------------

    def _where(self, i: int) -> str:
        return f"{self._build.name}, environment {self.first + i}, episode {self.episodes[i]}, step {self._counts[i]}"

    def _failed(self, i: int, error: BaseException) -> None:
        """Environment i raised: count it, tell, rebuild it; give up beyond the limit."""
        if isinstance(error, BrayError | StoppedBySignal):
            raise error
        # What is missing would not be there after a restart either.
        if isinstance(error, Exception) and (what := what_is_missing(error)) is not None:
            raise ConfigError(f"{self._where(i)}: it needs {what}") from error
        trace = "".join(traceback.format_exception(error)).rstrip()
        report = f"{trace}\n{self._where(i)}: it raised {type(error).__name__}"
        if self._on_failure is not None:
            self._on_failure(report)
        else:
            self._count_restart(report)
        old = self._envs[i]
        self._envs[i], limit = self._build(self.first + i)
        if self._tables is not None:
            self._seat(i)
            if self._last is not None:
                self._write(self._tables, i, tree.index(self._last, i))
        if self._envs[i].unwrapped is not old.unwrapped:  # one object given by the user is used on
            try:
                old.close()
            except Exception as e:  # it is being thrown away
                log.warning("%s: closing it raised %s: %s", self._where(i), type(e).__name__, e)
        self._limits[i] = _or_never(limit)
        self._steps[i] = self._envs[i].step
        for fn in self._calls:
            fn(self.users_env(i))

    # --- exact resume -------------------------------------------------------------------------------------------------

    def _trim(self) -> None:
        """Forget actions of finished episodes, and of those too long to be replayed."""
        now = self._log_start + len(self._log)
        for i, start in enumerate(self._starts):
            if now - start > REPLAY_LIMIT:
                self._lost[i], self._starts[i] = True, now
        drop = min(self._starts) - self._log_start
        if drop > 0:
            del self._log[:drop]
            self._log_start += drop
        self._trim_at = max(1024, 2 * len(self._log))

    def get_state(self) -> dict[str, Any]:
        arrays, rows = [], []
        self.exact = not any(lost and not dead for lost, dead in zip(self._lost, self._dead, strict=True))
        for i, dead in enumerate(self._dead):
            own = None if dead else _own_state(self._envs[i])
            taken = [] if dead or own is not None else self._log[self._starts[i] - self._log_start :]
            entry: dict[str, Any] = {"obs": tree.map(np.array, tree.index(self._last, i))}
            if taken:
                entry["actions"] = tree.stack([tree.index(a, i) for a in taken])
            if own is not None:
                entry["state"] = own
            arrays.append(entry)
            rows.append({"episode": self.episodes[i], "steps": self._counts[i], "dead": dead, "lost": self._lost[i]})
        return episodes_state(arrays, rows, self._seed, self.restarts)

    def set_state(self, state: dict[str, Any]) -> NestedArray:
        arrays, json = self._read_state(state)
        self._seed, self.restarts = int(json["seed"]), int(json["restarts"])
        self.episodes = [int(r["episode"]) for r in json["envs"]]
        self._set_dead([bool(r["dead"]) for r in json["envs"]])
        obs = tree.stack([entry["obs"] for entry in arrays["envs"]])
        self._log, self._log_start = [], 0
        histories: list[list[NestedArray]] = []
        fresh: list[int] = []
        for i, (row, entry) in enumerate(zip(json["envs"], arrays["envs"], strict=True)):
            self._counts[i] = int(row["steps"])
            histories.append(tree.split(entry["actions"]) if "actions" in entry else [])
            if self._dead[i]:
                continue
            why = "its episode was too long to be replayed" if row["lost"] else self._restore(i, entry, histories[i])
            if why is not None:
                log.warning("%s: cannot go on exactly (%s); a new episode starts there.", self._where(i), why)
                fresh.append(i)
        self.exact = not fresh
        self._rebuild_log(histories)
        for i in fresh:
            self._write(obs, i, self._begin(i)[0])
        self._last = obs
        return tree.map(np.copy, obs)

    def _restore(self, i: int, entry: dict[str, Any], actions: list[NestedArray]) -> str | None:
        """Bring environment i to where it was; the reason where that fails."""
        env = self._envs[i]
        try:
            ob, _ = self._reset(i)
            if "state" in entry:
                env.set_state(tree.map(lambda x: x.item() if np.ndim(x) == 0 else np.array(x), entry["state"]))
                self._steps[i] = env.step
                return None
            for a in self._split(tree.stack(actions)) if actions else ():
                ob, _, done, cut, info = env.step(a)
                if (done and not (info or {}).get(LIFE_LOST)) or cut:
                    return "its episode ended early when its actions were replayed"
            self._steps[i] = env.step
            replayed = self._empty()
            self._write(replayed, i, ob)
        except BadValue as e:
            return str(e)
        except Exception as e:
            log.warning("%s", "".join(traceback.format_exception(e)).rstrip())
            return f"it raised {type(e).__name__} when its actions were replayed"
        if not tree.equal(tree.index(replayed, i), entry["obs"]):
            return "replaying its actions gave another observation: it is not deterministic under reset(seed=...)"
        return None

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

    def foreach_env(self, fn: Callable[[Any], Any]) -> list[Any]:
        self._calls.add(fn, fn)
        return [fn(self.users_env(i)) for i in range(self.num_envs)]

    def users_env(self, i: int) -> Any:
        env = self._envs[i]
        while type(env).__module__.startswith(("bray.", "gymnasium.wrappers.")) and hasattr(env, "env"):
            env = env.env
        return env

    def render(self) -> np.ndarray | None:
        return self._envs[0].render()

    def close(self) -> None:
        for env in self._envs:
            env.close()


def episodes_state(arrays: list[Any], rows: list[dict[str, Any]], seed: int, restarts: int) -> dict[str, Any]:
    """The state of environments that are restored one by one, from an entry of `arrays` and of `rows` each."""
    json = {"form": FORM, "num_envs": len(rows), "seed": seed, "restarts": restarts, "envs": rows}
    return {"arrays": {"envs": arrays}, "json": json}


def _or_never(limit: int | None) -> float:
    return math.inf if limit is None else limit


def _own_state(env: Any) -> NestedArray | None:
    """What an environment's own `get_state` gives, when it has one (with `set_state`) and it is a tree of numbers."""
    if not (callable(get := getattr(env, "get_state", None)) and callable(getattr(env, "set_state", None))):
        return None
    try:
        state = tree.map(np.asarray, get())
    except Exception as e:  # saving a run does not depend on it
        log.warning("get_state of %s raised %s (%s): its actions are replayed instead.", env, type(e).__name__, e)
        return None
    wrong = [path for path, leaf in tree.paths(state) if leaf.dtype.kind not in "biufc"]
    if wrong:
        warn_once(log, f"get_state of {env} holds more than numbers ({wrong}): its actions are replayed instead.")
        return None
    return tree.map(np.array, state)
