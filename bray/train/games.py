"""A training on games of several agents, in this process: one side for each policy, and the games that all play in."""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from bray import tree
from bray.act import GREEDY
from bray.algos import algo_name
from bray.data.experience import Replay
from bray.data.rollouts import Rollouts
from bray.envs.build import env_spec
from bray.envs.config import EnvConfig
from bray.envs.make import make_vec
from bray.envs.missing import warn_once
from bray.envs.registry import sent
from bray.envs.rewards import RewardTransform
from bray.envs.table import DEFAULT, Game, Seating
from bray.envs.vector import VecEnv
from bray.errors import ConfigError
from bray.league import PlayerRef, Rating
from bray.metrics.rows import side_key
from bray.nn.catalog import example_obs
from bray.rundir import RunDir
from bray.spec import EnvSpec, SideSpec
from bray.train.acting import ActingPolicy, acting_engine, initial_state, player_of
from bray.train.callbacks import CallbackList
from bray.train.central import CentralServer, CentralServers
from bray.train.config import RunConfig
from bray.train.device import resolve_device
from bray.train.driver import Driver
from bray.train.evaluate import EVAL_SEED, LONGEST, eval_config, summarize
from bray.train.game_workers import GameWorkers, versions_of, weights_of
from bray.train.local import check_inference, make_side
from bray.train.matches import LeagueSeats, Snapshots
from bray.train.mcts import SearchSeats
from bray.train.opponents import FIRST, SpielBotSeats, load_opponent
from bray.train.policies import encoder_owners, owners_first
from bray.train.processes import Processes
from bray.train.sampler import GamePlan, SidePlan
from bray.train.self_play import LeagueSource, LeagueWorkers, RunLeague, SentLeague
from bray.train.setup import Setup
from bray.train.side import Side
from bray.train.table import Match, SeatRollout, TableSource, outcome, shares
from bray.train.workers import Home

logger = logging.getLogger("bray")


def seating_of(run: RunConfig) -> Seating:
    """Which policies there are, and whose agents. In a league any may decide for any agent: all sit at one side."""
    if run.self_play is not None:
        return Seating()
    return Seating(tuple(run.policies) or (DEFAULT,), run.policy_mapping)


def side_of(run: RunConfig, policy: str) -> str:
    """At which side of the table a policy sits."""
    return policy if run.self_play is None else DEFAULT


def _rows(side: Side) -> int | None:
    """Of a piece of this side; None where nobody learns from them."""
    return None if side.learner is None else side.experience.piece_length or 1


class GameTraining(Driver):
    """Algorithms that learn from the games that they play with each other."""

    def __init__(
        self,
        setups: Mapping[str, Setup],
        run: RunConfig,
        env: EnvConfig,
        learn: Sequence[str] | None = None,
        home: Callable[[], Home] | None = None,
        opponent_of: Callable[[str, EnvSpec], ActingPolicy] = load_opponent,
    ):
        """`setups`: of each policy, by name. `learn`: names of those that do; None: all. `home` makes the place where
        workers live; None = processes of this machine. `opponent_of`: who plays by a name in evaluations of
        self-play."""
        self.run_config, self.env_config, self.opponent_of = run, env, opponent_of
        self.league: RunLeague | None = None
        """Who plays whom, where policies play against each other and their snapshots."""
        self.device = resolve_device(run.device)
        _check(run, env)
        self.seating, self._home = seating_of(run), home
        self.central: CentralServers | None = None
        self.env = None if run.workers else make_vec(env, seed=run.seed, seating=self.seating)
        try:
            game = env_spec(env, self.seating) if self.env is None else self.env.spec
            self.agents, self.game_id = game.agents, game.id
            self.games = env.num_envs * max(1, run.workers)
            of_side = {name: game.sides[side_of(run, name)] for name in setups}
            self._seats_of = {name: side.seats for name, side in of_side.items()}
            made: dict[str, Side] = {}
            owners = encoder_owners(run.policies)
            for n in owners_first(setups, owners):
                reads = made[owners[n]].model if n in owners else None
                made[n] = self._side(n, setups[n], of_side[n], learn is None or n in learn, reads)
            sides = {n: made[n] for n in setups}
            source = self._play_in_workers(setups, sides, home) if self.env is None else self._play_here(sides)
        except BaseException:
            if self.env is not None:
                self.env.close()
            if self.central is not None:
                self.central.close()
            raise
        self.spec = next(iter(sides.values())).spec
        super().__init__(list(sides.values()), [source])

    def _side(self, name: str, setup: Setup, game: SideSpec, learns: bool, reads: Any) -> Side:
        c, seats = setup.config, self.games * game.seats
        try:
            side = make_side(setup.algo, c["run"], game.spec, c["model"], c["algo"], learns=learns, reads=reads)
        except ConfigError as e:
            if reads is None:
                raise
            raise ConfigError(f"policy {name}, share_encoder: {e}") from None
        side.name, experience = name, side.experience
        if side.iterate is not None or not isinstance(experience, (Rollouts, Replay)):
            raise ConfigError(
                f"{algo_name(setup.algo)} learns from whole episodes of one agent, and {self.game_id} is a game of "
                "several: PPO, A2C, IMPALA, DQN, SAC and their like learn from it; env.teams={team: [...]} makes the "
                "agents one"
            )
        if isinstance(experience, Rollouts):
            experience.columns = max(1, round(seats * self._share_of_seats(game)))
        return side

    def _share_of_seats(self, game: SideSpec) -> float:
        """How many of the seats of a side it has at a time, on average."""
        if (own := self.run_config.self_play) is not None:  # against snapshots, one seat of a game learns
            return (own.newest + (1.0 - own.newest) / game.seats) / max(1, len(self.run_config.policies))
        return 1.0 / len(self.seating.policies) if callable(self.seating.rule(self.agents)) else 1.0

    def _play_here(self, sides: Mapping[str, Side]) -> TableSource:
        run, env = self.run_config, self.env
        assert env is not None
        source: TableSource
        if run.self_play is None:
            source = TableSource(env, {n: self._seats(i, s) for i, (n, s) in enumerate(sides.items())}, self.agents)
        else:
            league = self.league = RunLeague(sides, self.agents, run)
            seats = {n: self._seats(i, s, league.snapshots[n]) for i, (n, s) in enumerate(sides.items())}
            source = LeagueSource(env, seats, self.agents, league)
        source.reset(run.seed)
        return source

    def _seats(self, i: int, side: Side, snapshots: Snapshots | None = None) -> Any:
        run, env = self.run_config, self.env
        assert env is not None
        game = env.spec.sides[side_of(run, side.name)]
        n = env.num_envs * game.seats
        side.policy.seat(0, n, n)
        rewards = RewardTransform(self.env_config, n, getattr(side.config, "gamma", 1.0))
        return (SeatRollout if snapshots is None else partial(LeagueSeats, snapshots=snapshots))(
            side.name,
            game,
            env.num_envs,
            acting_engine(side.model, side.policy, run.record),
            side.policy,
            np.random.default_rng([run.seed, i]),
            rewards=rewards if rewards.active else None,
            initial_state=initial_state(side.model),
            rows=_rows(side),
            replays=isinstance(side.experience, Replay),
            state_every=side.experience.state_every,
            record=run.record,
        )

    def keep_in(self, directory: RunDir) -> None:
        """Where results and snapshots of self-play are written."""
        if self.league is not None:
            self.league.keep_in(directory)

    def _play_in_workers(
        self, setups: Mapping[str, Setup], sides: Mapping[str, Side], home: Callable[[], Home] | None
    ) -> GameWorkers:
        run, env, plans = self.run_config, self.env_config, {}
        for name, side in sides.items():
            c, replays = setups[name].config, isinstance(side.experience, Replay)
            every = side.experience.state_every
            plans[name] = SidePlan(setups[name].algo, c["model"], c["algo"], _rows(side), replays, every)
        plan = GamePlan(None, run, sent(env), None, None, 0, 0, 1, sides=plans, seating=self.seating)
        learning = [side.experience for side in sides.values() if side.learner is not None]
        asynchronous = bool(learning) and all(experience.asynchronous for experience in learning)
        self.central = self._inference_for(sides)
        told = partial(weights_of if self.central is None else versions_of, sides)
        at_home = Processes(told(), self.central) if home is None else home()
        if run.self_play is None:
            return GameWorkers(plan, at_home, sides, told, asynchronous)
        self.league = league = SentLeague(sides, self.agents, run)
        return LeagueWorkers(plan, at_home, sides, told, asynchronous, league=league)

    def _inference_for(self, sides: Mapping[str, Side]) -> CentralServers | None:
        run = self.run_config
        if run.inference != "central":
            return None
        servers = {}
        for name, side in sides.items():
            obs = tree.map(lambda x: x.numpy(), example_obs(side.spec.observation, 1))
            rows = self.env_config.num_envs * self._seats_of[name]
            servers[name] = CentralServer(side.model, side.policy, obs, run.workers, [rows], run.record)
        return CentralServers(servers)

    def close(self) -> None:
        super().close()
        if self.central is not None:
            self.central.close()

    @property
    def depends_on_timing(self) -> str:
        """Why, in words; empty where it does not."""
        if all(source.exact for source in self.sources):
            return ""
        return f"num_workers={self.run_config.workers}, which play while the learner learns"

    def describe(self) -> str:
        n, workers = self.env_config.num_envs, self.run_config.workers
        games = f"{n} game{'s' if n > 1 else ''} of {len(self.agents)} agents"
        where = "" if self._home is None else f" on {self.run_config.cluster or 'ray'}"
        return f"{workers} worker{'s' if workers > 1 else ''}{where} with {games} each" if workers else games

    def evaluate(self, episodes: int | None = None) -> dict[str, Any]:
        """Greedy games on seeds that are the same in every run, all sides as they are now. In a league each player
        against the opponents; `eval/return_mean` is that of the first one."""
        record, episodes = self.run_config.record, episodes or self.run_config.eval_episodes
        players = {name: player_of(side.model, side.policy, record) for name, side in self.sides.items()}
        if self.league is None:
            return evaluate_games(players, self.env_config, self.seating, episodes)
        opponents = {}
        for name in self.league.config.opponents:
            opponents[name] = self.league.first() if name == FIRST else self.opponent_of(name, self.side.spec)
        found: dict[str, Any] = {}
        for name, player in players.items():
            rate = partial(self.league.rate, PlayerRef(name))
            one = play_opponents(player, opponents, self.env_config, self.agents, episodes, rate)
            found |= one if name == DEFAULT else {side_key(name, key): value for key, value in one.items()}
            found.setdefault("eval/return_mean", one["eval/return_mean"])
        return found


def _check(run: RunConfig, env: EnvConfig) -> None:
    if run.self_play is not None:
        check_league(run)
    if run.workers and env.normalize_rewards:
        raise ConfigError("env.normalize_rewards of games of several agents needs num_workers=0: leave one of them out")
    check_inference(run)
    if (run.env_groups or 1) > 1:
        raise ConfigError("run.env_groups is for environments of one agent: leave it out of a game of several")
    for name, policy in run.policies.items():
        if isinstance(policy, Mapping) and (own := policy.get("env")):
            raise ConfigError(
                f"run.policies.{name}: env.{next(iter(own))} is of the game that all policies play in: set it for all"
            )


def check_league(run: RunConfig) -> None:
    """Refuse what does not go with a league."""
    if len(run.policies) == 1:
        raise ConfigError(
            "run.self_play: a league has several policies, and one plays itself without them: leave policies out"
        )
    for key in ("policy_mapping", "policies_to_train"):
        if getattr(run, key) is not None:
            raise ConfigError(
                f"run.{key}: in a league any player may decide for any agent, and all learn: leave {key} out"
            )
    if owners := encoder_owners(run.policies):
        raise ConfigError(
            f"run.policies.{next(iter(owners))}.share_encoder: players of a league have weights of their own: leave "
            "share_encoder out"
        )


def play_games(
    env: VecEnv,
    players: Mapping[str, ActingPolicy],
    games: int,
    seed: int,
    mode: str = GREEDY,
    on_step: Any = None,
    most_steps: int | None = None,
    callbacks: CallbackList | None = None,
) -> list[Match]:
    """Play whole games, each environment its share, so that short ones are not preferred. With `most_steps` those that
    end within so many steps. `on_step(source)` is called at the first observations and after each step; `callbacks` of
    episodes are told of every game."""
    seats = {}
    for i, (name, side) in enumerate(env.spec.sides.items()):
        p = players[name]
        rng = np.random.default_rng([seed, i])
        sits, how = p.seats or SeatRollout, p.mode or mode
        seats[name] = sits(name, side, env.num_envs, p.engine, p.policy, rng, mode=how, initial_state=p.initial_state)
    source = TableSource(env, seats, env.spec.agents)
    for seat in seats.values():
        if isinstance(seat, (SpielBotSeats, SearchSeats)):  # they look at the games
            seat.table = source
    source.watch(callbacks or CallbackList([]))
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


def evaluate_games(players: Mapping[str, ActingPolicy], env: EnvConfig, seating: Seating, games: int) -> dict[str, Any]:
    """Greedy games: the sum of all agents' returns, and each agent's and side's mean."""
    with make_vec(eval_config(env, min(games, 16)), seed=EVAL_SEED, seating=seating) as envs:
        return summarize_games(play_games(envs, players, games, EVAL_SEED))


@dataclasses.dataclass(frozen=True)
class InTurns:
    """A mapping: of one game after the other, one policy decides for another agent, and the other policy for the
    rest."""

    agents: Sequence[str]
    one: str
    rest: str

    def __call__(self, agent: str, game: Game) -> str:
        return self.one if self.agents.index(agent) == (game.env + game.episode) % len(self.agents) else self.rest


def play_two(
    one: ActingPolicy,
    other: ActingPolicy,
    env: EnvConfig,
    agents: Sequence[str],
    games: int,
    seed: int = EVAL_SEED,
    mode: str = GREEDY,
) -> list[tuple[Match, str]]:
    """Games of two players, who change seats after each, with the agent that the first one was. Of more agents, the
    other player decides for all the rest."""
    seating = Seating(("one", "other"), InTurns(agents, "one", "other"))
    with make_vec(eval_config(env, min(games, 16)), seed=seed, seating=seating) as envs:
        matches = play_games(envs, {"one": one, "other": other}, games, seed, mode)
    return [(m, next(agent for agent, name in m.players.items() if name == "one")) for m in matches]


def play_opponents(
    me: ActingPolicy,
    opponents: Mapping[str, ActingPolicy],
    env: EnvConfig,
    agents: Sequence[str],
    games: int,
    rate: Callable[[str, Sequence[int]], Rating],
) -> dict[str, Any]:
    """Games against each: how often they are won, drawn and lost (`eval/NAME/win`), how strong that says it is, and the
    mean return of all."""
    found: dict[str, Any] = {}
    played: list[tuple[float, int]] = []
    for name, other in opponents.items():
        matches = play_two(me, other, env, agents, games)
        played += [(match.returns[mine], match.length) for match, mine in matches]
        outcomes = [outcome(match, (mine,)) for match, mine in matches]
        rating = rate(name, outcomes)
        found |= shares(f"eval/{name}", outcomes) | {f"eval/{name}/rating": rating.elo}
        found[f"eval/{name}/rating_ci95"] = rating.half
    return (summarize(played) if played else {"eval/episodes": 0, "eval/return_mean": math.nan}) | found


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
