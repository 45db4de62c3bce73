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
from bray.train.mcts import SearchSeats
from bray.train.table import SeatRollout, TableSource

RANDOM, FIRST, SPIEL, ALONE = "random", "first", "openspiel:", "mcts"
SEARCH: dict[str, float] = {"simulations": 500, "c": 2.0}
"""Settings of `mcts`."""


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
    """`random`, `mcts`, `openspiel:BOT` or `module:function`; in a game with these spaces."""
    anybody = ActingPolicy(Blank(spec), Policy(spec.layout, make_rule("dist")), mode=SAMPLE)
    if name == RANDOM:
        return anybody
    if name.startswith(SPIEL):
        return replace(anybody, seats=partial(SpielBotSeats, bot=name.removeprefix(SPIEL)))
    if name.partition("(")[0] == ALONE:
        if spec.action.kind != "discrete":
            raise ConfigError(f"{name} searches games with one number as an action, and here it is {spec.action}")
        return replace(anybody, seats=partial(SearchSeats, **_search_settings(name)))
    if ":" not in name:
        raise UnknownName(
            "opponent", name, (RANDOM, FIRST, ALONE), "or openspiel:BOT, module:function, a run directory, model.onnx"
        )
    function = load_named(name, "opponent", "run.self_play.opponents", {})
    if not callable(function):
        raise ConfigError(f"run.self_play.opponents: {name} is no function of (obs, rng)")
    return replace(anybody, seats=partial(BotSeats, function=function))


def _search_settings(name: str) -> dict[str, Any]:
    """Of `mcts(simulations=500,c=2.0)`, or any part of it."""
    settings: dict[str, Any] = dict(SEARCH)
    inside = name.removeprefix(ALONE)
    for text in inside.removeprefix("(").removesuffix(")").split(",") if inside not in ("", "()") else ():
        key, _, given = (part.strip() for part in text.partition("="))
        if key not in SEARCH:
            raise UnknownName("setting", key, SEARCH, "of mcts")
        try:
            settings[key] = type(SEARCH[key])(given)
        except ValueError:
            settings[key] = 0
    if (inside and not (inside.startswith("(") and inside.endswith(")"))) or min(settings.values()) <= 0:
        raise ConfigError(f"{name}: expected mcts, or mcts(simulations=500,c=2.0) with numbers above 0")
    return settings
