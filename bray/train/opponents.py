"""Opponents by name: what evaluations of self-play are against."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from bray import tree
from bray.act import SAMPLE, Policy
from bray.act.rules import make_rule
from bray.errors import ConfigError, UnknownName
from bray.named import load_named
from bray.spec import EnvSpec
from bray.train.acting import ActingPolicy
from bray.train.table import SeatRollout

RANDOM, FIRST = "random", "first"


class Blank:
    """An engine whose outputs know nothing: drawn from, they give legal actions, all alike."""

    def __init__(self, spec: EnvSpec):
        self._width = spec.layout.num_params

    def forward(self, obs: Any, *rest: Any) -> dict[str, np.ndarray]:
        return {"dist": np.zeros((tree.length(obs), self._width), np.float32)}


class BotSeats(SeatRollout):
    """Seats of a function of the user, `function(obs, rng) -> action`, which is asked for each that acts."""

    def __init__(self, *args: Any, function: Callable[..., Any], **more: Any):
        super().__init__(*args, **more)
        self._function = function

    def decide(self) -> Any:
        who, seen = np.flatnonzero(self.acts).tolist(), self.seen
        actions = tree.map(np.array, super().decide())
        for i in who:
            try:
                action = self._function(tree.map(lambda x, i=i: x[i], seen), self.rng)
            except Exception as e:
                trace = "".join(traceback.format_exception(e)).rstrip()
                raise ConfigError(
                    f"{trace}\nthe opponent {self._function!r} raised {type(e).__name__}: it is called with (obs, "
                    "rng), what one agent sees and a numpy Generator, and returns its action"
                ) from e
            tree.map(lambda to, x, i=i: to.__setitem__(i, x), actions, action)
        return actions


def load_opponent(name: str, spec: EnvSpec) -> ActingPolicy:
    """`random`, or `module:function`; in a game with these spaces."""
    anybody = ActingPolicy(Blank(spec), Policy(spec.layout, make_rule("dist")), mode=SAMPLE)
    if name == RANDOM:
        return anybody
    if ":" not in name:
        raise UnknownName("opponent", name, (RANDOM, FIRST), "or module:function, or the directory of a run")
    function = load_named(name, "opponent", "run.self_play.opponents", {})
    if not callable(function):
        raise ConfigError(f"run.self_play.opponents: {name} is no function of (obs, rng)")
    return replace(anybody, seats=partial(BotSeats, function=function))
