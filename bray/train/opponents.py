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
from bray.envs.outside_games import SpielEnv, make_bot
from bray.errors import ConfigError, UnknownName
from bray.named import load_named
from bray.spec import EnvSpec
from bray.train.acting import ActingPolicy
from bray.train.table import SeatRollout, TableSource

RANDOM, FIRST, SPIEL = "random", "first", "openspiel:"


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


class SpielBotSeats(SeatRollout):
    """Seats of a bot of OpenSpiel, which looks at the state of the game. Each game has one of its own."""

    table: TableSource
    """Where it plays."""

    def __init__(self, *args: Any, bot: str, **more: Any):
        super().__init__(*args, **more)
        self._bot = bot
        self._bots: list[Any] = [None] * self.num_seats

    def decide(self) -> Any:
        actions = tree.map(np.array, super().decide())
        agents, states = self.table.obs[self.name]["agent"].reshape(-1), self.table.foreach_env(_state_of)
        for i in np.flatnonzero(self.acts).tolist():
            state = states[i * self.games // self.num_seats]
            if self.first[i]:
                seed = int(self.rng.integers(1 << 31))
                self._bots[i] = make_bot(self._bot, state.get_game(), int(agents[i]), seed)
            actions[i] = self._bots[i].step(state)
        return actions


def _state_of(env: Any) -> Any:
    if not isinstance(env, SpielEnv):
        raise ConfigError(f"a bot of OpenSpiel plays games of OpenSpiel, and this one is {type(env).__name__}")
    return env.state


def load_opponent(name: str, spec: EnvSpec) -> ActingPolicy:
    """`random`, `openspiel:BOT` or `module:function`; in a game with these spaces."""
    anybody = ActingPolicy(Blank(spec), Policy(spec.layout, make_rule("dist")), mode=SAMPLE)
    if name == RANDOM:
        return anybody
    if name.startswith(SPIEL):
        return replace(anybody, seats=partial(SpielBotSeats, bot=name.removeprefix(SPIEL)))
    if ":" not in name:
        raise UnknownName(
            "opponent", name, (RANDOM, FIRST), "or openspiel:BOT, module:function, a run directory, model.onnx"
        )
    function = load_named(name, "opponent", "run.self_play.opponents", {})
    if not callable(function):
        raise ConfigError(f"run.self_play.opponents: {name} is no function of (obs, rng)")
    return replace(anybody, seats=partial(BotSeats, function=function))
