"""A training on games of several agents, in this process: one side for each policy, and the games that all play in."""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from bray.act import GREEDY, TRAINED
from bray.algos import algo_name
from bray.data.experience import Replay
from bray.data.rollouts import Rollouts
from bray.envs.config import EnvConfig
from bray.envs.make import make_vec
from bray.envs.missing import warn_once
from bray.envs.rewards import RewardTransform
from bray.envs.table import DEFAULT, Seating
from bray.envs.vector import VecEnv
from bray.errors import ConfigError
from bray.metrics.rows import side_key
from bray.train.acting import acting_engine, initial_state
from bray.train.config import RunConfig
from bray.train.device import resolve_device
from bray.train.driver import Driver
from bray.train.evaluate import EVAL_SEED, LONGEST, eval_config, summarize
from bray.train.local import make_side
from bray.train.setup import Setup
from bray.train.side import Side
from bray.train.table import Match, SeatRollout, TableSource

logger = logging.getLogger("bray")


def seating_of(run: RunConfig) -> Seating:
    """Which policies there are, and whose agents."""
    return Seating(tuple(run.policies) or (DEFAULT,), run.policy_mapping)


class GameTraining(Driver):
    """Algorithms that learn from the games that they play with each other."""

    def __init__(self, setups: Mapping[str, Setup], run: RunConfig, env: EnvConfig, learn: Sequence[str] | None = None):
        """`setups`: of each policy, by name. `learn`: names of those that do; None: all."""
        self.run_config, self.env_config = run, env
        self.device = resolve_device(run.device)
        _check(run, setups)
        self.seating = Seating(tuple(setups), run.policy_mapping)
        self.env = make_vec(env, seed=run.seed, seating=self.seating)
        try:
            self.agents = self.env.spec.agents
            seats = {name: self._seat(i, name, s, learn) for i, (name, s) in enumerate(setups.items())}
        except BaseException:
            self.env.close()
            raise
        sides = [side for side, _ in seats.values()]
        self.spec = sides[0].spec
        source = TableSource(self.env, {name: seat for name, (_, seat) in seats.items()}, self.agents)
        super().__init__(sides, [source])
        source.reset(run.seed)

    def _seat(self, i: int, name: str, setup: Setup, learn: Sequence[str] | None) -> tuple[Side, SeatRollout]:
        c, env = setup.config, self.env
        side_spec = env.spec.sides[name]
        run, games, seats = c["run"], env.num_envs, env.num_envs * side_spec.seats
        side = make_side(setup.algo, run, side_spec.spec, c["model"], c["algo"], learns=learn is None or name in learn)
        side.name = name
        experience = side.experience
        if side.iterate is not None or not isinstance(experience, (Rollouts, Replay)):
            raise ConfigError(
                f"{algo_name(setup.algo)} learns from whole episodes of one agent, and {env.spec.id} is a game of "
                f"several: PPO, A2C, IMPALA, DQN, SAC and their like learn from it; env.teams={{team: [...]}} makes "
                "the agents one"
            )
        rows = experience.piece_length or 1
        if isinstance(experience, Rollouts):
            share = (
                1 if len(env.spec.sides) == 1 or not callable(self.seating.rule(self.agents)) else len(env.spec.sides)
            )
            experience.columns = max(1, round(seats / share))
        side.policy.seat(0, seats, seats)
        rewards = RewardTransform(self.env_config, seats, getattr(side.config, "gamma", 1.0))
        seat = SeatRollout(
            name,
            side_spec,
            games,
            acting_engine(side.model, side.policy, run.record),
            side.policy,
            np.random.default_rng([run.seed, i]),
            rewards=rewards if rewards.active else None,
            initial_state=initial_state(side.model),
            rows=rows if side.learner is not None else None,
            replays=isinstance(experience, Replay),
            state_every=experience.state_every,
            record=run.record,
        )
        return side, seat

    depends_on_timing = ""

    def describe(self) -> str:
        n, agents = self.env.num_envs, len(self.agents)
        return f"{n} game{'s' if n > 1 else ''} of {agents} agents"

    def evaluate(self, episodes: int | None = None) -> dict[str, Any]:
        """Greedy games on seeds that are the same in every run, all sides as they are now."""
        players = {name: Player.of(side, self.run_config.record) for name, side in self.sides.items()}
        return evaluate_games(players, self.env_config, self.seating, episodes or self.run_config.eval_episodes)


def _check(run: RunConfig, setups: Mapping[str, Setup]) -> None:
    if run.workers:
        raise ConfigError(
            f"run.num_workers={run.workers}: games of several agents are played in this process; set num_workers=0, "
            "and env.vector=subprocess where a game is slow"
        )
    for name, setup in setups.items():
        own, common = setup.config["env"], {"clip_rewards", "normalize_rewards"}
        first = next(iter(setups.values())).config["env"]
        for field in dataclasses.fields(EnvConfig):
            if field.name not in common and getattr(own, field.name) != getattr(first, field.name):
                raise ConfigError(
                    f"run.policies.{name}: env.{field.name} is of the game that all policies play in: set it for all"
                )


@dataclasses.dataclass
class Player:
    """Who plays a side, where nobody learns."""

    engine: Any
    policy: Any
    initial_state: Any = None

    @staticmethod
    def of(side: Side, record: Any = True) -> Player:
        return Player(acting_engine(side.model, side.policy, record), side.policy, initial_state(side.model))


def play_games(
    env: VecEnv,
    players: Mapping[str, Player],
    games: int,
    seed: int,
    mode: str = GREEDY,
    on_step: Any = None,
    most_steps: int | None = None,
) -> list[Match]:
    """Play whole games, each environment its share, so that short ones are not preferred. With `most_steps` those that
    end within so many steps. `on_step(source)` is called at the first observations and after each step."""
    seats = {}
    for i, (name, side) in enumerate(env.spec.sides.items()):
        p = players[name]
        rng = np.random.default_rng([seed, i])
        seat = SeatRollout(name, side, env.num_envs, p.engine, p.policy, rng, mode=mode, initial_state=p.initial_state)
        seat.set_clock(TRAINED)
        seats[name] = seat
    source = TableSource(env, seats, env.spec.agents)
    source.reset(seed)
    share = [games // env.num_envs + (b < games % env.num_envs) for b in range(env.num_envs)]
    done: list[list[Match]] = [[] for _ in share]
    on_step = on_step or (lambda source: None)
    on_step(source)
    while any(len(d) < s for d, s in zip(done, share, strict=True)):
        if most_steps is not None and source.env_steps >= most_steps:
            break
        source.step()
        on_step(source)
        for match in source.matches:
            if len(done[match.game]) < share[match.game]:
                done[match.game].append(match)
        for b in source.longer_than(LONGEST):
            warn_once(
                logger,
                f"a game was cut after {LONGEST:,} steps and is left out: env.max_episode_steps=N gives games an end",
            )
            share[b] = len(done[b])
    return [match for d in done for match in d]


def evaluate_games(players: Mapping[str, Player], env: EnvConfig, seating: Seating, games: int) -> dict[str, Any]:
    """Greedy games: the sum of all agents' returns, and each agent's and side's mean."""
    with make_vec(eval_config(env, min(games, 16)), seed=EVAL_SEED, seating=seating) as envs:
        return summarize_games(play_games(envs, players, games, EVAL_SEED))


def summarize_games(matches: Sequence[Match]) -> dict[str, Any]:
    """`eval/return_mean` is of the sum over agents; `eval/agent/NAME` and `side/NAME/eval/return_mean` are means."""
    if not matches:
        return {"eval/episodes": 0, "eval/return_mean": math.nan}
    result = summarize([(m.total, m.length) for m in matches])
    for agent in dict.fromkeys(a for m in matches for a in m.returns):
        result[f"eval/agent/{agent}"] = _mean(m.returns[agent] for m in matches if agent in m.returns)
    for side in dict.fromkeys(s for m in matches for s in m.players.values()):
        if side != DEFAULT:
            mine = [[r for a, r in m.returns.items() if m.players[a] == side] for m in matches]
            result[side_key(side, "eval/return_mean")] = _mean(_mean(one) for one in mine if one)
    return result


def _mean(values: Iterable[float]) -> float:
    found = list(values)
    return math.fsum(found) / len(found) if found else math.nan
