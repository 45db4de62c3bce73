"""A league in live games: each agent of a game has a session of its own, and is answered by the player that the league
names.

    start   of the session <match>-agent-<agent>          a job is drawn for the first one of a match;
                                                          the reply: {"match": 7, "player": "main@400", "version": 400}
    ticks   as of any live game                           those of players that learn become rows of theirs
    end     {"returns": {"x": 1.0, "o": -1.0}}            the reply: {"counts": true}, or false and why; null as long
                                                          as other sessions of this match go on

The service's thread draws, and threads of its own read weights and write results; the driver's freezes snapshots. They
take turns at the league.
"""

from __future__ import annotations

import asyncio
import copy
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from bray import tree
from bray.act import SAMPLE, Clock
from bray.data.experience import Batch, Counts
from bray.data.piece import DEFAULT, Piece
from bray.envs.build import env_spec
from bray.envs.config import EnvConfig
from bray.errors import ConfigError, DataError, UnknownName
from bray.inference.host import ModelHost
from bray.inference.torch_engine import load_weights
from bray.league import Job, Matches, PlayerRef
from bray.league.matches import Verdict
from bray.metrics.rows import side_key
from bray.rundir import RunDir
from bray.serving.background import BackgroundServer
from bray.serving.policy_actor import BasePolicyAgent, PolicyActor
from bray.serving.protocol import malformed
from bray.serving.state import parse_session
from bray.spec import EnvSpec
from bray.train.acting import initial_state
from bray.train.agent import ActingModel
from bray.train.config import LiveConfig, RunConfig
from bray.train.games import check_league
from bray.train.goals import LIVE_SCORE
from bray.train.live import ID, LiveEngine, LiveSource, LiveTraining, serve_games
from bray.train.self_play import RunLeague
from bray.train.side import Side
from bray.train.source import Source

AGENT = "policy"
"""What the agent of a session is called in the service."""


def live_agents(live: LiveConfig, env: EnvConfig) -> tuple[str, ...]:
    """Those of the game: by `agents`, or of an environment of several."""
    agents = live.agents if env.id in ("", ID) else env_spec(env).agents
    if len(set(agents)) < 2:
        raise ConfigError(
            "a league in live games needs the names of the game's agents, at least two: agents=[x, o] beside obs= and "
            f"actions=, or an environment of several agents (--env module:Class); got {list(agents)}"
        )
    return tuple(agents)


class LiveLeague(RunLeague):
    """The league of a run whose games call. Any thread may ask it."""

    def __init__(self, sides: Mapping[str, Side], agents: Sequence[str], run: RunConfig):
        super().__init__(sides, agents, run)
        self.lock = threading.RLock()

    def find(self, ref: PlayerRef) -> Any:
        return self.snapshots[ref.side].weights(ref.step or 0)

    def void(self, job: Job, why: str) -> None:
        self.league.void(job.id, why)

    def freeze_first(self, env_steps: int) -> None:
        with self.lock:
            super().freeze_first(env_steps)

    def freeze(self, name: str, clock: Clock) -> bool:
        with self.lock:
            return super().freeze(name, clock)

    def keep_in(self, directory: RunDir) -> None:
        with self.lock:
            super().keep_in(directory)

    def numbers(self) -> dict[str, float]:
        with self.lock:
            return super().numbers() | {"league/refused": sum(self.league.refused.values())}

    def get_state(self) -> dict[str, Any]:
        with self.lock:
            return super().get_state()

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Games have gone on since the checkpoint: all their results count."""
        with self.lock:
            self.restart(state)


class Players:
    """Who answers for a player: of one that learns its source's model, of a snapshot a copy, of which so many that were
    asked for last are kept. Sessions keep theirs."""

    def __init__(self, parts: Mapping[str, LiveSource], sides: Mapping[str, Side], league: LiveLeague, seed: int):
        self._parts, self._league, self._seed = parts, league, seed
        self._models = {
            name: (copy.deepcopy(side.model).cpu().eval(), copy.copy(side.policy)) for name, side in sides.items()
        }
        self._kept: OrderedDict[PlayerRef, ActingModel] = OrderedDict()
        self._made = 0

    def acting(self, ref: PlayerRef) -> ActingModel:
        if ref.step is None:
            return self._parts[ref.side].acting
        if ref not in self._kept:
            self._kept[ref] = self._make(ref, self._league.find(ref))
            if len(self._kept) > self._league.config.pool + 1:
                self._kept.popitem(last=False)
        self._kept.move_to_end(ref)
        return self._kept[ref]

    def _make(self, ref: PlayerRef, weights: Mapping[str, np.ndarray]) -> ActingModel:
        part, (made, policy) = self._parts[ref.side], self._models[ref.side]
        model, policy = copy.deepcopy(made), copy.copy(policy)
        load_weights(model, weights)
        self._made += 1
        seed = [self._seed, 4, self._made]
        engine = LiveEngine(model, policy, np.random.default_rng(seed))
        policy.draws = {}  # the engine draws
        memory = initial_state(model)
        return ActingModel(
            part.acting.spec,
            policy,
            ModelHost(str(ref), engine, ref.step or 0),
            mode=SAMPLE,
            initial_state=None if memory is None else tree.map(lambda x: x[0], memory(1)),
            seed=seed,
            strict=True,
            options=part.live,
        )


class LeagueGames(Source):
    """Games of the players of a league, each agent of which calls a service in this process."""

    def __init__(
        self,
        sides: Mapping[str, Side],
        spec: EnvSpec,
        agents: Sequence[str],
        live: LiveConfig,
        env: EnvConfig,
        run: RunConfig,
    ):
        self.live = live
        self.league = LiveLeague(sides, agents, run)
        self.matches = Matches(self.league, agents)
        self._news = threading.Condition()
        self.parts = {
            name: LiveSource(side, spec, live, env, run.seed + i, self._news)
            for i, (name, side) in enumerate(sides.items())
        }
        self._first = next(iter(self.parts.values()))
        self._players = Players(self.parts, sides, self.league, run.seed)
        self._env_steps = 0
        self.learning = self._first.side
        """The side that is being updated."""
        self.about: Callable[[], dict[str, Any]] = dict

    def open(self) -> None:
        """Begin to answer, if we do not yet."""
        if self._first.server is not None:
            return
        self.league.freeze_first(self._env_steps)
        for part in self.parts.values():
            part.begin()
        make_actor = _maker(self)
        self._first.server = serve_games(make_actor, self.live, list(self.parts.values()), lambda: self.about())

    @property
    def port(self) -> int:
        """Where games call; from now on they are answered."""
        self.open()
        return self._first.port

    @property
    def url(self) -> str:
        self.open()
        return self._first.url

    @property
    def admin_port(self) -> int:
        self.open()
        return self._first.admin_port

    @property
    def server(self) -> BackgroundServer | None:
        return self._first.server

    @property
    def score(self) -> float | None:
        return self._first.score

    # --- from the games -----------------------------------------------------------------------------------------------

    def join(self, match: str, agent: str) -> tuple[int, PlayerRef, ActingModel]:
        """Of a session that starts: the number of its match, its player, and who answers."""
        with self.league.lock:
            number, ref = self.matches.join(match, agent)
            try:
                return number, ref, self._players.acting(ref)
            except BaseException:
                self.matches.leave(match, agent)
                raise

    def leave(self, match: str, agent: str, returns: Mapping[str, float] | None, ticks: int) -> Verdict:
        with self.league.lock:
            return self.matches.leave(match, agent, returns, ticks)

    # --- to the driver ------------------------------------------------------------------------------------------------

    def gather(self, timeout: float = 0.0) -> tuple[list[Piece], Counts]:
        self.open()
        with self._news:
            seen = self._arrived()
        came = self._take()
        if not came[0] and timeout > 0.0:
            with self._news:
                if self._arrived() == seen:
                    self._news.wait(timeout)
            pieces, counts = self._take()
            came = pieces, _sum([came[1], counts])
        self._env_steps += came[1].env_steps
        return came

    def _arrived(self) -> int:
        return sum(part.arrived for part in self.parts.values())

    def _take(self) -> tuple[list[Piece], Counts]:
        taken = [part.take() for part in self.parts.values()]
        return [piece for pieces, _ in taken for piece in pieces], _sum([counts for _, counts in taken])

    def learns(self, piece: Piece, version: int) -> None:
        self.parts[self.learning].learns(piece, version)

    def suspects(self) -> list[str]:
        return self.parts[self.learning].suspects()

    def change_rewards(self) -> None:
        for part in self.parts.values():
            part.change_rewards()

    def publish(self, side: str, weights: Any, clock: Clock) -> None:
        self.parts[side].publish(side, weights, clock)

    def numbers(self) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for name, part in self.parts.items():
            one = part.numbers()
            found |= one if name == DEFAULT else {side_key(name, key): value for key, value in one.items()}
        return {LIVE_SCORE: self.score, **found, **self.league.numbers(), "league/playing": len(self.matches)}

    def left(self) -> dict[str, int]:
        of = [part.left() for part in self.parts.values()]
        return {key: sum(one[key] for one in of) for key in of[0]}

    def seconds(self) -> dict[str, float]:
        return self._first.seconds()

    def wait_reason(self) -> str:
        return self._first.wait_reason()

    def get_state(self, midway: bool = False) -> dict[str, Any]:
        return {"arrays": {}, "json": {"league": self.league.get_state()}}

    def set_state(self, state: dict[str, Any], clock: Clock) -> bool:
        self.league.set_state(state["json"]["league"])
        self._env_steps = clock.env_steps
        return False  # games go on by themselves

    def close(self) -> None:
        for part in reversed(self.parts.values()):  # the first one has the server
            part.close()
        self.league.close()


def _sum(counts: Sequence[Counts]) -> Counts:
    total = Counts()
    for one in counts:
        total = Counts(
            total.env_steps + one.env_steps,
            (*total.episodes, *one.episodes),
            total.dropped + one.dropped,
            total.agent_steps + one.agent_steps,
        )
    return total


class LiveLeagueTraining(LiveTraining):
    """Players of a league that learn from the games that call, in this process."""

    source: LeagueGames

    def _play(self, sides: Mapping[str, Side]) -> LeagueGames:
        run = self.run_config
        check_league(run)
        if run.workers:
            raise ConfigError(f"games that call are played elsewhere: leave num_workers={run.workers} out")
        agents = live_agents(self.live, self.env_config)
        return LeagueGames(sides, self.spec, agents, self.live, self.env_config, run)

    def _learn_from(self, side: Side, batch: Batch) -> None:
        self.source.learning = side.name
        super()._learn_from(side, batch)
        if self.update is not None and self.source.league.freeze(side.name, self.clock_of(side)):
            self.changed(side)
            self.source.publish(side.name, side.weights_now, self.clock_of(side))

    def keep_in(self, directory: RunDir) -> None:
        self.source.league.keep_in(directory)

    def set_state(self, state: dict[str, Any], weights: Mapping[str, Any], replay_dir: Any = None) -> bool:
        exact = super().set_state(state, weights, replay_dir)
        for side in self.sides.values():
            self.source.parts[side.name].set_state({}, self.clock_of(side))
        return exact


# --- sessions ---------------------------------------------------------------------------------------------------------


class MatchEnd(msgspec.Struct):
    """What a session of a match says at its end."""

    returns: Any = None


_read_end = msgspec.json.Decoder(MatchEnd).decode
_write = msgspec.json.Encoder().encode


class MatchAgent(BasePolicyAgent):
    """A session is one match."""

    def on_tick(self, state: Any) -> Any:
        if self._first and self.last is not None:
            raise malformed("this match is over: end its session with its returns, and start one for the next match")
        return super().on_tick(state)


class MatchActor(PolicyActor):
    """The session of one agent of a match."""

    def __init__(self, games: LeagueGames, **more: Any):
        super().__init__({AGENT: MatchAgent}, None, **more)
        self._games = games
        self._seat: tuple[str, str] | None = None

    async def start(self, session: str, data: bytes) -> bytes:  # type: ignore[override]
        self._seat, seat = None, parse_session(session)
        if not seat[1]:
            raise malformed(
                "expected a session named <match>-agent-<agent>: each agent of a match of a league has one, and the "
                f"agents of this game are {', '.join(self._games.matches.agents)}"
            )
        joining = asyncio.ensure_future(asyncio.to_thread(self._games.join, *seat))
        try:
            number, ref, model = await asyncio.shield(joining)
        except asyncio.CancelledError:  # it took too long, and goes on all the same
            joining.add_done_callback(lambda joined: joined.exception() or self._games.leave(*seat, None, 0))
            raise
        except (DataError, UnknownName) as e:
            raise malformed(str(e)) from None
        self._seat, self._config = seat, {AGENT: {"model": model}}
        try:
            self.begin(session, data)
        except BaseException:
            self._leave(None)
            raise
        return _write({"match": number, "player": str(ref), "version": model.step})

    async def end(self, data: bytes) -> bytes:  # type: ignore[override]
        returns = refusal = None
        try:
            said = _read_end(data).returns if data else None
            returns = None if said is None else self._games.matches.returns(said)
        except (ValueError, RecursionError) as e:
            refusal = malformed(f'expected {{"returns": {{AGENT: NUMBER, ...}}}} or nothing, got {data[:60]!r} ({e})')
        except DataError as e:
            refusal = malformed(str(e))
        try:
            await self.handle_end()
        finally:
            verdict = await asyncio.to_thread(self._leave, returns)
        if refusal is not None:
            raise refusal
        return _write({"counts": verdict.counts, **({"why": verdict.why} if verdict.why else {})})

    async def handle_end(self) -> None:
        """What is left of the game's rows goes to whoever learns."""
        ending = super().end(b"")
        if not isinstance(ending, bytes):
            await ending

    async def lost(self) -> None:
        if self._seat is not None:
            try:
                await self.handle_end()
            finally:
                await asyncio.to_thread(self._leave, None)

    def _leave(self, returns: Mapping[str, float] | None) -> Verdict:
        seat, self._seat = self._seat, None
        return Verdict(None) if seat is None else self._games.leave(*seat, returns, self._ticks)


def _maker(games: LeagueGames) -> Callable[..., MatchActor]:
    def make_actor(**more: Any) -> MatchActor:
        return MatchActor(games, **more)

    return make_actor
