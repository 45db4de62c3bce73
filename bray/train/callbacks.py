"""Callbacks: the user's own code at the events of a training, and the episodes that it is told of."""

from __future__ import annotations

import json
import logging
import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bray import tree
from bray.errors import ConfigError, UnknownName
from bray.named import load_named
from bray.train.awaited import Awaited

logger = logging.getLogger("bray")

WINDOW = 100  # episodes, as for `episode_return_mean`


class Episode:
    """An episode that is being played, as callbacks see it."""

    def __init__(self, rollout: Any, number: int, env_index: int):
        self._rollout, self.id, self._at = rollout, number, env_index
        self.worker_index = rollout.worker_index
        """From 1; 0 is the process that learns. `id` and `env_index` count within a worker."""
        self.env_index = rollout.numbers_from + env_index
        self.length, self.total_reward = int(rollout.lengths[env_index]), float(rollout.returns[env_index])
        """Steps and rewards so far, before any change to rewards that the config asks for."""
        self.user_data: dict[str, Any] = {}
        """Whatever the callbacks want to remember until the episode ends."""
        self.custom_metrics: dict[str, float] = {}
        """Numbers of this episode; rows hold `custom_metrics/NAME_mean`, `_min` and `_max` of the last 100 episodes."""
        self.action: Any = None
        self.reward: Any = 0.0
        self.info: dict[str, Any] = {}
        self.terminated = self.truncated = False

    @property
    def obs(self) -> Any:
        """The newest observation."""
        return tree.index(self._rollout.obs, self._at)

    @property
    def env(self) -> Any:
        """The environment itself, where it runs in this process (`env.vector=inprocess`)."""
        return self._rollout.env.users_env(self._at)

    def played(self, step: Any, reward: Any, infos: Any) -> None:
        """A step of all environments has been carried out."""
        b = self._at
        self.length += 1
        self.reward = float(reward[b])
        self.total_reward += self.reward
        self.action, self.info = tree.index(step.action, b), infos[b] if infos else {}
        self.terminated, self.truncated = bool(step.terminated[b]), bool(step.truncated[b])

    def __repr__(self) -> str:
        where = f" of worker {self.worker_index}" if self.worker_index else ""
        return (
            f"<Episode {self.id} of environment {self.env_index}{where}, {self.length} steps, return "
            f"{self.total_reward:g}>"
        )


class Callbacks:
    """Override what you need; the rest costs nothing. An error in one ends the training, which is saved first. With
    `num_workers` each worker has a copy of the object for its episodes: what they leave in `self` stays there, and
    numbers for the rows go by `episode.custom_metrics`."""

    def on_train_start(self, experiment: Any) -> None:
        """Before the first iteration of `train`, and after `set_state`: the place to tell the environments what a
        curriculum has come to."""

    def on_episode_start(self, episode: Episode) -> None:
        """Before the first action. After a resume it is called for the episodes that go on, too: `episode.length` is
        above 0, and their `custom_metrics`, which would tell of a part only, are left out of the rows."""

    def on_episode_step(self, episode: Episode) -> None:
        """After each step; `episode.obs`, `.action`, `.reward`, `.info` are the newest."""

    def on_episode_end(self, episode: Episode) -> None:
        """After the last step; `episode.terminated` or `.truncated` says how it ended."""

    def on_train_result(self, experiment: Any, row: dict[str, Any]) -> None:
        """After each iteration, before its row is written: numbers may be added to it. `experiment.request_stop()` ends
        the training, `experiment.foreach_env(fn)` reaches every environment before its next step."""

    def on_evaluate(self, experiment: Any, result: dict[str, Any]) -> None:
        """After an evaluation (`eval_freq`), with its numbers, which may be changed."""

    def on_checkpoint(self, experiment: Any, path: Path) -> None:
        """After a checkpoint was written to this directory."""

    def get_state(self) -> dict[str, Any]:
        """What a checkpoint is to hold of this object: plain data, as JSON has it."""
        return {}

    def set_state(self, state: dict[str, Any]) -> None:
        """After a resume: what `get_state` said when the checkpoint was written. Not called where that was nothing."""


class EarlyStopping(Callbacks):
    """End the training when `metric` has not become better in `patience` rows that have it; `-KEY`: smaller is
    better."""

    def __init__(self, metric: str = "episode_return_mean", patience: int = 20, min_delta: float = 0.0):
        if patience < 1:
            raise ConfigError(f"EarlyStopping: patience is a whole number above 0, got {patience}")
        self.metric, self.patience, self.min_delta = metric, patience, min_delta
        self.best, self.waited = -math.inf, 0
        self._awaited = Awaited(metric.removeprefix("-"), "EarlyStopping: metric")

    def on_train_result(self, experiment: Any, row: dict[str, Any]) -> None:
        self._awaited.look(row, bool(experiment.config["run"].eval_freq))
        value = row.get(self._awaited.key)
        if value is None:
            return
        value = -value if self.metric.startswith("-") else value
        if value > self.best + self.min_delta:
            self.best, self.waited = value, 0
            return
        self.waited += 1
        if self.waited >= self.patience:
            experiment.request_stop()

    def get_state(self) -> dict[str, Any]:
        return {"best": self.best, "waited": self.waited}

    def set_state(self, state: dict[str, Any]) -> None:
        self.best, self.waited = float(state["best"]), int(state["waited"])


EVENTS = tuple(name for name in vars(Callbacks) if name.startswith("on_"))


class Functions(Callbacks):
    """Plain functions as callbacks, by the names of their events."""

    def __init__(self, functions: Mapping[str, Any]):
        for event, function in functions.items():
            if event not in EVENTS:
                raise UnknownName("event of callbacks", str(event), EVENTS)
            function = _load(function) if isinstance(function, str) else function
            if not callable(function) or isinstance(function, type):
                raise ConfigError(
                    f"callbacks: {event}: expected a function or its name `module:function`, got {function!r}"
                )
            setattr(self, event, function)


def make_callbacks(*given: Any) -> CallbackList:
    """Callbacks from objects, classes, functions, names (`module:Class`, `module:function`), dicts {name, **arguments}
    and dicts {event: function}; each argument is one of these, a list, or None."""
    listed = [some if isinstance(some, (list, tuple)) else [some] for some in given if some is not None]
    return CallbackList([_make(one) for some in listed for one in some])


def _load(name: str) -> Any:
    return load_named(name, "callbacks", "run.callbacks", {"EarlyStopping": EarlyStopping})


def _make(given: Any) -> Callbacks:
    arguments: dict[str, Any] = {}
    if isinstance(given, dict):
        if given and "name" not in given:
            return Functions(given)
        arguments = {k: v for k, v in given.items() if k != "name"}
        given = given.get("name", {})
    made = _load(given) if isinstance(given, str) else given
    if isinstance(made, type) and issubclass(made, Callbacks):
        try:
            return made(**arguments)
        except TypeError as e:
            raise ConfigError(f"callbacks: {made.__name__} does not take {arguments or 'no arguments'}: {e}") from e
    if isinstance(made, Callbacks):
        return made
    if not callable(made) or isinstance(made, type):
        raise ConfigError(
            "callbacks: expected bray.Callbacks (an object, a class, or `module:Class`), a function of (experiment, "
            f"row), or a dict of functions by event ({', '.join(EVENTS)}), got {made!r}"
        )
    called = getattr(made, "__name__", "")
    return Functions({called if called in EVENTS else "on_train_result": made})


class CallbackList(Callbacks):
    """Several as one, and what they count."""

    def __init__(self, callbacks: Sequence[Callbacks]):
        self.callbacks = list(callbacks)

    def on_train_start(self, experiment: Any) -> None:
        for one in self.callbacks:
            one.on_train_start(experiment)

    def on_train_result(self, experiment: Any, row: dict[str, Any]) -> None:
        for one in self.callbacks:
            one.on_train_result(experiment, row)

    def on_evaluate(self, experiment: Any, result: dict[str, Any]) -> None:
        for one in self.callbacks:
            one.on_evaluate(experiment, result)

    def on_checkpoint(self, experiment: Any, path: Path) -> None:
        for one in self.callbacks:
            one.on_checkpoint(experiment, path)

    def get_state(self) -> dict[str, Any]:
        """By the name of the class, for each of its objects in their order."""
        states: dict[str, Any] = {}
        for one in self.callbacks:
            state, name = one.get_state(), type(one).__name__
            if wrong := _not_plain(state) if isinstance(state, dict) else type(state).__name__:
                raise ConfigError(
                    f"callbacks: {name}.get_state() returns a dict of what JSON can hold (numbers, text, None, lists, "
                    f"dicts by text), got {wrong}: make it one of these, as by int(x) or x.tolist()"
                )
            states.setdefault(name, []).append(state)
        return {name: mine for name, mine in states.items() if any(mine)}

    def set_state(self, state: dict[str, Any]) -> None:
        left = {name: list(mine) for name, mine in state.items()}
        for one in self.callbacks:
            if (mine := left.get(type(one).__name__)) and (saved := mine.pop(0)):
                one.set_state(saved)
        if lost := sorted(name for name, mine in left.items() if any(mine)):
            logger.warning(
                "the checkpoint has a state of callbacks that this training does not have (%s): it is dropped. To "
                "keep it, give the same callbacks to `train`",
                ", ".join(lost),
            )

    def _asking(self, event: str) -> list[Any]:
        own = [
            c for c in self.callbacks if event in vars(c) or getattr(type(c), event) is not getattr(Callbacks, event)
        ]
        return [getattr(c, event) for c in own]

    def of_episodes(self) -> CallbackList:
        """Those that have a callback of episodes."""
        return CallbackList([c for c in self.callbacks if CallbackList([c]).watches])

    @property
    def watches(self) -> bool:
        """Whether one of them has a callback of episodes."""
        return any(self._asking(f"on_episode_{event}") for event in ("start", "step", "end"))

    def of_two_places(self) -> list[str]:
        """The classes that have callbacks of episodes and of results: with workers these are not called on one
        object."""
        results = ("on_train_result", "on_evaluate", "on_checkpoint")
        both = [c for c in self.of_episodes().callbacks if any(CallbackList([c])._asking(event) for event in results)]
        return sorted({type(c).__name__ for c in both})

    def watch(self, kind: Any = Episode) -> EpisodeWatch | None:
        """What a Rollout reports its steps to; None where no callback asks for them."""
        if not self.watches:
            return None
        start, step, end = (self._asking(f"on_episode_{e}") for e in ("start", "step", "end"))
        return EpisodeWatch(start, step, end, kind)


def _not_plain(value: Any, where: str = "") -> str:
    """What JSON could not hold, and where; empty where it can hold all."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return ""
    if not isinstance(value, (dict, list)):
        return f"{type(value).__name__} at {where}"
    if isinstance(value, dict) and (odd := [key for key in value if not isinstance(key, str)]):
        return f"the key {odd[0]!r} at {where or 'the top'}"
    parts = value.items() if isinstance(value, dict) else enumerate(value)
    return next((wrong for key, part in parts if (wrong := _not_plain(part, f"{where}[{key!r}]"))), "")


class EpisodeWatch:
    """Follows the episodes of a Rollout and calls for each start, step and end."""

    def __init__(self, on_start: list[Any], on_step: list[Any], on_end: list[Any], kind: Any = Episode):
        """kind: of the objects that callbacks are given"""
        self._on_start, self._on_step, self._on_end, self._kind = on_start, on_step, on_end, kind
        self._episodes: dict[int, Episode] = {}
        self._begun_before: set[int] = set()
        self._number = 0
        self.ended: list[dict[str, float]] = []
        """`custom_metrics` of the episodes that ended since this list was last emptied."""

    def before_step(self, rollout: Any) -> None:
        for b in np.flatnonzero(~rollout.env.dead & ~rollout.env.waiting).tolist():
            if b not in self._episodes:
                episode = self._episodes[b] = self._kind(rollout, self._number, b)
                self._number += 1
                if episode.length:
                    self._begun_before.add(b)
                for call in self._on_start:
                    call(episode)

    def after_step(self, rollout: Any, step: Any, reward: Any, infos: Any) -> None:
        for b in np.flatnonzero(step.valid).tolist():
            episode = self._episodes[b]
            episode.played(step, reward, infos)
            for call in self._on_step:
                call(episode)
            if rollout.env.dead[b]:
                for call in self._on_end:
                    call(episode)
                del self._episodes[b]
                if b not in self._begun_before:
                    self.ended.append(_numbers(episode.custom_metrics))
                self._begun_before.discard(b)


def _numbers(metrics: Mapping[str, Any]) -> dict[str, float]:
    numbers = {}
    for name, value in metrics.items():
        try:
            numbers[str(name)] = float(value)
        except (TypeError, ValueError, OverflowError) as e:
            got = "one that is too large for a float" if isinstance(e, OverflowError) else f"{value!r}"
            raise ConfigError(
                f"custom_metrics[{name!r}] that a callback gave an episode: expected a number, got {got}"
            ) from None
    return numbers


class EpisodeMetrics:
    """`custom_metrics` of the last 100 episodes that have them."""

    def __init__(self) -> None:
        self._metrics: dict[str, deque[float]] = {}

    def add(self, ended: Iterable[Mapping[str, float]]) -> None:
        for metrics in ended:
            for name, value in metrics.items():
                self._metrics.setdefault(name, deque(maxlen=WINDOW)).append(value)

    def get_state(self) -> str:
        return json.dumps([[name, list(values)] for name, values in self._metrics.items()])

    def set_state(self, state: str) -> None:
        self._metrics = {name: deque(map(float, values), WINDOW) for name, values in json.loads(state)}

    def row(self) -> dict[str, float]:
        """`custom_metrics/NAME_mean`, `_min`, `_max`."""
        out: dict[str, float] = {}
        for name, values in self._metrics.items():
            out |= {f"custom_metrics/{name}_mean": math.fsum(values) / len(values)}
            out |= {f"custom_metrics/{name}_min": min(values), f"custom_metrics/{name}_max": max(values)}
        return out
