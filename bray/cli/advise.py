"""What `bray algos --for ENV` looks at: a short random play, and what is known of each algorithm."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from bray import act
from bray.algos import ALGORITHMS, get_algo, make_experience, refusal
from bray.config.runfile import preset, scores
from bray.data.experience import Dataset, Replay
from bray.data.rollouts import Rollouts
from bray.diagnosis.advise import Candidate, Facts
from bray.envs.build import Builder
from bray.envs.config import EnvConfig
from bray.envs.make import make_vec
from bray.envs.table import ALL_ONE, Seating
from bray.envs.vector import VecEnv
from bray.errors import BrayError
from bray.nn.catalog import ModelConfig
from bray.spec import EnvSpec, Space
from bray.train.evaluate import eval_config, play
from bray.train.games import ActingPolicy, play_games

EXPLORING = {"rnd": "rnd=1", "noisy": "noisy=true"}
"""Options of an algorithm that explore where chance does not find the reward, and how to switch them on."""
REPLAYED = ("replay", "sequences")
"""Kinds of experience that are learnt from more than once."""
_EPISODES, _STEPS = 8, 5_000  # of random play; it ends with the first of them


class Kind(NamedTuple):
    """Agents that see and do the same."""

    agents: tuple[str, ...]
    """Empty where the environment has one."""
    spec: EnvSpec
    seen: Facts


def look_at(config: EnvConfig, seed: int = 0) -> list[Kind]:
    """Play a few episodes at random: spaces and facts, of a game of several agents those of each kind of agents."""
    times: list[float] = []

    def on_step(_: Any) -> None:
        times.append(time.perf_counter())

    seating = _by_kind(config)
    with make_vec(eval_config(config, _EPISODES), seed=seed, seating=seating) as env:
        if sides := env.spec.sides:
            players = {
                name: ActingPolicy(_Uniform(side.spec, _EPISODES * side.seats), _at_random(side.spec))
                for name, side in sides.items()
            }
            matches = play_games(env, players, _EPISODES, seed, act.SAMPLE, on_step, _STEPS)
            found = []
            for name, side in sides.items():
                agents = tuple(agent for agent, kind in seating.mapping.items() if kind == name)
                returns = tuple(match.returns[agent] for match in matches for agent in agents)
                found.append(Kind(agents, side.spec, Facts(_rate(env, times), returns)))
            return found
        policy, engine = _at_random(env.spec), _Uniform(env.spec, env.num_envs)
        ended = play(env, engine, policy, _EPISODES, seed, mode=act.SAMPLE, on_step=on_step, most_steps=_STEPS)
        return [Kind((), env.spec, Facts(_rate(env, times), tuple(r for r, _ in ended)))]


def _by_kind(config: EnvConfig) -> Seating:
    """A seat for each kind of agents, by the name of its first one: those who see or do something else cannot share a
    policy."""
    build = Builder.of(config)
    game = build.agents() if build.may_have_agents else None
    if game is None:
        return ALL_ONE
    first: dict[tuple[Space, Space], str] = {}
    of = {}
    for agent in game.possible_agents:
        spaces = game.observation_space(agent), game.action_space(agent)
        of[agent] = first.setdefault((Space.from_gym(spaces[0]), Space.from_gym(spaces[1])), agent)
    if not build.source.single:
        game.close()
    return Seating(tuple(first.values()), of)


def _at_random(spec: EnvSpec) -> act.Policy:
    return act.Policy(spec.layout, act.make_rule("dist"))


def _rate(env: VecEnv, times: list[float]) -> float:
    """Steps of environments in a second, by when each step of all of them had come."""
    return env.num_envs / float(np.median(np.diff(times))) if len(times) > 1 else 0.0  # the first step compiles


class _Uniform:
    """In place of a Model: all choices alike, numbers around the middle of their range."""

    def __init__(self, spec: EnvSpec, rows: int):
        self._outputs = {"dist": np.zeros((rows, spec.layout.num_params), np.float32)}

    def forward(self, *inputs: Any) -> dict[str, np.ndarray]:
        return self._outputs


def candidates(spec: EnvSpec, game: bool = False) -> Iterator[Candidate]:
    """The algorithms that take the spaces of an environment, and what is known of each. `game`: of several agents; then
    presets may join them into a team."""
    for name in ALGORITHMS:
        algo = get_algo(name)
        if preset(name, spec.id) is None and (refusal(algo, spec) or (game and not _learns_in_games(algo, spec))):
            continue
        if (kind := learns_from(algo, spec)) == "dataset":
            continue  # an environment is not enough
        option = next((o for o in EXPLORING if hasattr(algo.Config(), o)), "")
        switch = "" if option and getattr(algo.Config(), option) else EXPLORING.get(option, "")
        has_preset = preset(name, spec.id) is not None
        found = tuple(
            s
            for s in scores()
            if (s["run"], s["env"]) == (name, spec.id)
            and not s["must"].endswith("below")
            and "data" not in s.get("config", {})
        )
        yield Candidate(name, kind in REPLAYED, option, switch, has_preset, found)


def _learns_in_games(algo: Any, spec: EnvSpec) -> bool:
    """Whether an algorithm learns from rows of single agents, and has what else it needs."""
    try:
        algo.make_model(algo.Config(), spec, ModelConfig())
    except BrayError:
        return False
    return isinstance(make_experience(algo, algo.Config(), spec, ModelConfig()), (Rollouts, Replay))


def learns_from(algo: Any, spec: EnvSpec) -> str:
    """The kind of its experience."""
    made = make_experience(algo, algo.Config(), spec, ModelConfig())
    return "dataset" if isinstance(made, Dataset) else type(made).__name__.lower()
