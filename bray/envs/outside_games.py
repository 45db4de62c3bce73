"""Games of several agents from packages, by name: `pettingzoo:mpe2.simple_spread_v3`, `openspiel:kuhn_poker`."""

from __future__ import annotations

import importlib
import importlib.util
import pkgutil
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from gymnasium import spaces

from bray.envs.missing import what_is_missing
from bray.envs.multi_agent import ALL, Agents, MultiAgentEnv, StepOfAgents
from bray.errors import ConfigError, UnknownName, how_to_install
from bray.spec import ACTION_MASK


@dataclass(frozen=True)
class PettingZoo:
    """Makes the games of a module of PettingZoo (`classic.connect_four_v3`) or of a package like it
    (`mpe2.simple_spread_v3`): the form in which agents act at once, where there is one."""

    path: str

    def __call__(self, render_mode: str | None = None, **arguments: Any) -> Any:
        if importlib.util.find_spec("pettingzoo") is None:
            raise ConfigError(f"pettingzoo:{self.path} needs the package pettingzoo: {how_to_install('multiagent')}")
        module = self._module()
        extra = {} if render_mode is None else {"render_mode": render_mode}
        make = getattr(module, "parallel_env", None) or getattr(module, "env", None)
        if make is None:
            games = ", ".join(_games_of(module)) or "none"
            raise ConfigError(
                f"pettingzoo:{self.path}: the module {module.__name__} has neither parallel_env nor env; games in it: "
                f"{games}"
            )
        return make(**{**arguments, **extra})

    def _module(self) -> Any:
        package = self.path.partition(".")[0]
        within = importlib.util.find_spec(f"pettingzoo.{package}") is not None
        name = f"pettingzoo.{self.path}" if within else self.path
        try:
            return importlib.import_module(name)
        except ImportError as e:
            folder, _, game = name.rpartition(".")
            if isinstance(e, ModuleNotFoundError) and e.name == name and folder:  # its folder is there
                games = _games_of(importlib.import_module(folder))
                raise UnknownName("game", game, games, f"of pettingzoo:{self.path}") from None
            need = f"it needs {what_is_missing(e)}" if what_is_missing(e) else str(e)
            raise ConfigError(f"pettingzoo:{self.path}: cannot import {name}: {need}") from e


def _games_of(package: Any) -> list[str]:
    """Modules of a package that are games: their names end with a version."""
    found = pkgutil.iter_modules(getattr(package, "__path__", []))
    return [module.name for module in found if re.search(r"_v\d+$", module.name)]


@dataclass(frozen=True)
class OpenSpiel:
    """Makes a game of OpenSpiel by its name there; arguments are the game's parameters."""

    name: str

    def __call__(self, **parameters: Any) -> MultiAgentEnv:
        if importlib.util.find_spec("pyspiel") is None:
            raise ConfigError(f"openspiel:{self.name} needs the package open_spiel: {how_to_install('multiagent')}")
        import pyspiel

        if (name := self.name.partition("(")[0]) not in (known := pyspiel.registered_names()):
            raise UnknownName("game of OpenSpiel", name, known)
        try:
            game = pyspiel.load_game(self.name, parameters) if parameters else pyspiel.load_game(self.name)
        except pyspiel.SpielError as e:
            raise ConfigError(f"openspiel:{self.name}: {e}") from None
        return SpielEnv(game)


class SpielEnv(MultiAgentEnv):
    """A game of OpenSpiel: turn-based ones ask one player, simultaneous ones all. What chance does is drawn here, from
    the seed of `reset`. A player sees the information state as numbers, or where the game has none the observation,
    and the mask of legal actions."""

    def __init__(self, game: Any):
        self.game = game
        kind = game.get_type()
        self.possible_agents = [f"player_{i}" for i in range(game.num_players())]
        self._remembers = kind.provides_information_state_tensor
        if not self._remembers and not kind.provides_observation_tensor:
            raise ConfigError(f"openspiel:{kind.short_name} gives its players no numbers to see, so none can learn it")
        shape = game.information_state_tensor_shape() if self._remembers else game.observation_tensor_shape()
        actions = game.num_distinct_actions()
        seen = spaces.Dict(
            {
                "obs": spaces.Box(-np.inf, np.inf, tuple(shape), np.float32),
                ACTION_MASK: spaces.Box(0, 1, (actions,), np.int8),
            }
        )
        self.observation_spaces = dict.fromkeys(self.possible_agents, seen)
        self.action_spaces = dict.fromkeys(self.possible_agents, spaces.Discrete(actions))
        self._shape, self.state = tuple(shape), game.new_initial_state()
        self.max_moves: int = game.max_game_length()
        wrong = {
            "chance": kind.chance_mode.name != "DETERMINISTIC",
            "hidden information": kind.information.name != "PERFECT_INFORMATION",
            "players who act at once": kind.dynamics.name != "SEQUENTIAL",
            "players of whom one does not win what the other loses": kind.utility.name != "ZERO_SUM",
        }
        self._unsearchable = " and ".join(what for what, so in wrong.items() if so)
        self._rng = np.random.default_rng()

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Agents, Agents]:
        if seed is not None:
            self._rng = np.random.default_rng(seed)
        self.state = self.game.new_initial_state()
        self._draw()
        return self._asked(), {}

    def step(self, actions: Agents) -> StepOfAgents:
        state = self.state
        if state.is_simultaneous_node():
            legal = range(len(self.possible_agents))
            state.apply_actions([int(actions.get(self.possible_agents[i], 0)) for i in legal])
        else:
            state.apply_action(int(actions[self.possible_agents[state.current_player()]]))
        rewards = np.array(state.rewards())
        self._draw()
        over = state.is_terminal()
        if over and not np.array_equal(state.rewards(), rewards):
            rewards = rewards + state.rewards()  # chance ended it
        obs = {a: self.seen(state, i) for i, a in enumerate(self.possible_agents)} if over else self._asked()
        ends = dict.fromkeys([*self.possible_agents, ALL], over)
        return obs, dict(zip(self.possible_agents, rewards.tolist(), strict=True)), ends, {ALL: False}, {}

    def clone(self) -> MultiAgentEnv:
        if self._unsearchable:
            raise ConfigError(
                f"openspiel:{self.game.get_type().short_name} cannot be searched: it has {self._unsearchable}"
            )
        other: SpielEnv = object.__new__(type(self))
        other.__dict__.update(self.__dict__)
        other.state = self.state.clone()
        return other

    def _draw(self) -> None:
        """What chance does, until a player decides."""
        while self.state.is_chance_node():
            outcomes, odds = zip(*self.state.chance_outcomes(), strict=True)
            self.state.apply_action(outcomes[int(self._rng.choice(len(outcomes), p=np.array(odds) / sum(odds)))])

    def _asked(self) -> Agents:
        state = self.state
        if state.is_simultaneous_node():
            asked = [i for i in range(len(self.possible_agents)) if state.legal_actions(i)]
        else:
            asked = [state.current_player()]
        return {self.possible_agents[i]: self.seen(state, i) for i in asked}

    def seen(self, state: Any, player: int) -> dict[str, np.ndarray]:
        """What a player sees of a state of the game."""
        tensor = state.information_state_tensor(player) if self._remembers else state.observation_tensor(player)
        mask = np.zeros(self.game.num_distinct_actions(), np.int8)
        mask[state.legal_actions(player) if not state.is_terminal() else []] = 1
        return {"obs": np.array(tensor, np.float32).reshape(self._shape), ACTION_MASK: mask}


MCTS: dict[str, Any] = {"max_simulations": 100, "rollouts": 1, "uct_c": 2.0, "solve": True}
"""Settings of `openspiel:mcts`."""


def make_bot(name: str, game: Any, player: int, seed: int) -> Any:
    """A bot of OpenSpiel for one seat of one game: `mcts(max_simulations=500)`, or one that it has registered."""
    import pyspiel

    kind, opening, _ = name.partition("(")
    known = ["mcts", *pyspiel.registered_bots()]
    if kind not in known:
        raise UnknownName("bot of OpenSpiel", kind, known)
    try:
        given = dict(pyspiel.game_parameters_from_string(name)) if opening else {}
        given.pop("name", None)
        if kind != "mcts":
            return pyspiel.load_bot(kind, game, player, ({"seed": seed} if kind == "uniform_random" else {}) | given)
        if unknown := [key for key in given if key not in MCTS]:
            raise UnknownName("setting", unknown[0], MCTS, "of openspiel:mcts")
        asked = MCTS | given
        evaluator = pyspiel.RandomRolloutEvaluator(asked["rollouts"], seed)
        return pyspiel.MCTSBot(
            game, evaluator, asked["uct_c"], asked["max_simulations"], 1000, asked["solve"], seed, verbose=False
        )
    except (pyspiel.SpielError, TypeError) as e:
        why = str(e).strip().splitlines()[0]
        raise ConfigError(f"openspiel:{name} is no bot for {game}: {why}") from None


_MAKERS: dict[str, Callable[[str], Any]] = {"pettingzoo": PettingZoo, "openspiel": OpenSpiel}


def outside_game(name: str) -> Any:
    """What makes the game that `name` means; None for names of other kinds."""
    package, _, rest = name.partition(":")
    if package not in _MAKERS or package == name:
        return None
    if not rest:
        raise ConfigError(f"{name} names no game: pettingzoo:mpe2.simple_spread_v3 and openspiel:kuhn_poker do")
    return _MAKERS[package](rest)
