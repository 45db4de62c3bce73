"""Training from live games: they call an HTTP service, a Policy answers, and what happens in them is learnt from, all
in one process.

The service runs in a thread with its own copy of the weights; the driver learns in the main one. A game that is played
faster than is learnt loses its oldest rows, unless it may wait.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import json
import logging
import math
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from torch import nn

from bray import tree
from bray.act import Clock, Policy, standard_normals
from bray.act.feed import Latest, Weights
from bray.data.experience import Counts, Experience
from bray.data.piece import DEFAULT, Piece
from bray.data.rollouts import Rollouts
from bray.diagnosis.divergence import not_finite
from bray.envs.build import agent_spec
from bray.envs.config import EnvConfig
from bray.envs.rewards import RewardTransform
from bray.envs.spaces import usable
from bray.errors import ConfigError
from bray.inference.host import ModelHost, Promise
from bray.inference.torch_engine import TorchEngine, is_recurrent
from bray.metrics.spent import Laps
from bray.rl.draws import use_compiled_draws
from bray.serving.access import with_environment
from bray.serving.background import BackgroundServer
from bray.serving.policy_actor import BasePolicyAgent, PolicyActor
from bray.serving.server import Server
from bray.serving.values import MAX_JSON, body_limit, masked_spec
from bray.spec import EnvSpec, parse_space
from bray.train.agent import ActingModel
from bray.train.config import DataConfig, LiveConfig, RunConfig
from bray.train.device import resolve_device
from bray.train.fair import USUAL, FairQueue, GameReturns, Places, RewardLimit, Taken, Votes, add_up
from bray.train.goals import LIVE_SCORE
from bray.train.local import initial_state, make_side
from bray.train.offline import mix_files
from bray.train.side import Side
from bray.train.source import Source
from bray.train.steady import SteadyDriver

logger = logging.getLogger("bray")

ID = "live"
"""The environment's name of a run whose games call."""
COLUMNS = 8
"""Rollouts of live games have this many times `rollout_length` rows, or `env.num_envs` times where that is more."""
PIECE = 32
"""Ticks of a game that are learnt from together, at most."""
_PUBLISH_EVERY = 0.02  # seconds: a learner of small steps makes hundreds of versions in that time
_NAMES = 10_000


def live_spec(live: LiveConfig, env: EnvConfig) -> EnvSpec:
    """What the games send and want: by `obs` and `actions`, by a file, or by an environment's spaces."""
    given = [live.obs is not None or live.actions is not None, live.spec is not None, env.id not in ("", ID)]
    if sum(given) != 1:
        raise ConfigError(
            "live games: say what they send in one way: obs= and actions= (--obs 'float32[6]' --actions 3), "
            "spec=FILE.json (--spec), or an environment whose spaces they have (--env module:Class); got "
            f"{sum(given)} of the three"
        )
    if given[2]:
        return agent_spec(env)
    obs, actions = live.obs, live.actions
    if live.spec is not None:
        try:
            said = json.loads(Path(live.spec).read_text())
        except (OSError, ValueError) as e:
            raise ConfigError(f"--spec {live.spec}: expected a JSON file ({e})") from None
        if isinstance(said, dict) and {"observation", "action"} <= said.keys():
            return usable(EnvSpec.from_json({"id": ID, **said}))
        if not isinstance(said, dict) or not {"obs", "actions"} <= said.keys():
            raise ConfigError(
                f'--spec {live.spec}: expected {{"obs": "float32[6]", "actions": 3}}, got {str(said)[:60]}'
            )
        obs, actions = said["obs"], said["actions"]
    if obs is None or actions is None:
        raise ConfigError("live games: both are needed, obs= (--obs 'float32[6]') and actions= (--actions 3)")
    return usable(masked_spec(ID, parse_space(obs), parse_space(actions)))


class LiveSource(Source):
    """Games that call a service in this process."""

    def __init__(
        self,
        side: Side,
        spec: EnvSpec,
        live: LiveConfig,
        env: EnvConfig,
        seed: int,
        news: threading.Condition | None = None,
    ):
        """news: shared by the sources of several sides, which a service of theirs brings pieces"""
        if env.normalize_rewards:
            raise ConfigError(
                "normalize_rewards needs the games side by side; divide the rewards in the game, or use clip_rewards"
            )
        self.live, self.experience, self.side = live, side.experience, side.name
        self.clock = Clock()
        self._latest = Latest(self._send, every=_PUBLISH_EVERY)
        self.queue = FairQueue(_rows_of(side.experience), live.fair)
        """Pieces that the driver has not taken; `_news` is held while it is used."""
        self.places = Places()
        self.votes = Votes()
        self.rewards, self.returns = RewardLimit(live.reward_range, self.votes), GameReturns(self.votes)
        self.score: float | None = None
        """The median over games of their returns, as of the last row."""
        self._names: dict[int, str] = {}  # sessions, by stream
        self._in_batch: dict[int, None] = {}  # games of the batch that is being filled
        self._learnt: list[int] = []  # and of the last one
        self._passed = 0.0  # size of the largest reward that was learnt from
        self._news = news or threading.Condition()
        self.arrived = 0
        """Pieces that have come; `_news` is held while it is used."""
        self.held: dict[asyncio.Future[None], tuple[int, Piece, Counts]] = {}
        """What waits for room in the queue; `_news` is held while it is used."""
        self._closing = False
        self._laps = Laps()
        self._model = copy.deepcopy(side.model).cpu().eval()
        self._buffers = {name for name, _ in self._model.named_buffers()}
        engine = LiveEngine(self._model, side.policy, np.random.default_rng([seed, 3]))
        self.host = ModelHost(ID, engine, weights=_weights(self._model))
        rewards = RewardTransform(env, 1, side.config.gamma)
        self._clipped = rewards.clipped
        memory = initial_state(self._model)
        policy: Policy = copy.copy(side.policy)
        policy.draws = {}  # the engine draws
        self.acting = ActingModel(
            spec,
            policy,
            self.host,
            sink=self,
            initial_state=None if memory is None else tree.map(lambda x: x[0], memory(1)),
            state_every=side.experience.state_every if memory is not None else 1,
            rewards=rewards if rewards.active else None,
            clock=lambda: self.clock,
            seed=[seed, 0],
            strict=True,
            options=live,
        )
        self.server: BackgroundServer | None = None
        self.about: Callable[[], dict[str, Any]] = dict
        """What the page of the games' owner says of training."""

    def open(self) -> None:
        """Begin to answer, if we do not yet."""
        if self.server is not None:
            return
        self.begin()
        config = {"policy": {"model": self.acting}}

        def make_actor(**more: Any) -> PolicyActor:
            return PolicyActor({"policy": BasePolicyAgent}, config, **more)

        self.server = serve_games(make_actor, self.live, [self], lambda: self.about())

    def begin(self) -> None:
        """Be ready to answer, and to take pieces."""
        self._closing = False
        use_compiled_draws()
        self.acting.warm_up()

    @property
    def piece_length(self) -> int:
        """Ticks of a game that are learnt from together."""
        return PIECE if self.experience.piece_length in (None, 1) else min(PIECE, self.experience.piece_length)

    @property
    def port(self) -> int:
        """Where games call; from now on they are answered."""
        self.open()
        assert self.server is not None
        return self.server.port

    @property
    def url(self) -> str:
        """What games are told to call."""
        return f"{'http' if self.live.tls_cert is None else 'https'}://{self.live.host}:{self.port}/step"

    @property
    def admin_port(self) -> int:
        """Where their owner finds /training and /metrics."""
        self.open()
        assert self.server is not None
        return self.server.admin_port

    # --- from the games, in the service's thread ----------------------------------------------------------------------

    async def push(self, piece: Piece, counts: Counts, session: str = "") -> None:
        assert piece.stream is not None
        if len(self._names) > _NAMES:
            self._names.clear()
        self._names[int(piece.stream[0])] = session
        mine = piece if self.side == DEFAULT else replace(piece, side=self.side)
        item = (self.places.game(int(piece.stream[0]), piece.length), mine, counts)
        with self._news:
            if self._closing or self.live.wait_s <= 0 or not self.is_full(item[0], piece.length):
                self._put(item)
                return
            room = asyncio.get_running_loop().create_future()
            self.held[room] = item
        late = False
        try:
            await asyncio.wait_for(room, self.live.wait_s)
        except TimeoutError:
            late = True
        finally:
            with self._news:
                if self.held.pop(room, None) is not None and late:
                    self._put(item)

    def _put(self, item: tuple[int, Piece, Counts]) -> None:
        self.queue.put(*item)
        self.arrived += 1
        self._news.notify()

    def _let_in(self) -> bool:
        """Queue the pieces that wait, as far as there is room; whether there was. The learner's thread does that, under
        the lock under which it makes room: none of them misses it, and none is woken in vain."""
        let = []
        for room, item in list(self.held.items()):
            if self._closing or not self.is_full(item[0], item[1].length):
                del self.held[room]
                self.queue.put(*item)
                let.append(room)
        if let:
            with contextlib.suppress(RuntimeError):  # the service is closed
                let[0].get_loop().call_soon_threadsafe(_wake, let)
        return bool(let)

    def end(self, stream: int) -> None:
        with self._news:
            self.queue.end(self.places.leave(stream))

    def is_full(self, key: int, length: int) -> bool:
        """Whether so many more rows of a game have no room."""
        return self.queue.full(key, length) or (self.queue.waiting > 0 and not self.experience.room())

    @property
    def waiting_rows(self) -> int:
        """Rows of pieces that the driver has not taken."""
        return self.queue.waiting

    # --- to the driver ------------------------------------------------------------------------------------------------

    def gather(self, timeout: float = 0.0) -> tuple[list[Piece], Counts]:
        self.open()
        return self.take(timeout)

    def take(self, timeout: float = 0.0) -> tuple[list[Piece], Counts]:
        """`gather`, of a service that is open."""
        self._latest.flush()
        with self._news:
            self._laps.lap("elsewhere")
            came = self._take()
            if not came:
                self._news.wait(timeout)
                came = self._take()
            self._laps.lap("idle")
        pieces, counts = [], Counts()
        for piece, more, key in came:
            game = key if piece is None else int(piece.stream[0])  # type: ignore[index]
            if piece is not None:
                self.votes.heard(game, piece.length)
                self._in_batch[game] = None
                if self._learns_from(piece, game):
                    pieces.append(piece)
                else:
                    with self._news:
                        self.queue.give_back(key, piece.length)
            if self.live.fair:
                more = more._replace(episodes=tuple(filter(self.rewards.possible, more.episodes)))
            if more.episodes:
                self.returns.add(game, [total for total, _ in more.episodes])
            counts = add_up(counts, more)
        return pieces, counts

    def _take(self) -> list[Taken]:
        came = self.queue.take()
        if self.held and self._let_in() and not came:
            came = self.queue.take()
        return came

    def _learns_from(self, piece: Piece, game: int) -> bool:
        """Whether it is; rewards that most games would not send are cut, in what is replayed too."""
        if not self.live.fair:
            return True
        if not self.rewards.passes(piece, game):
            return False
        if self._passed > USUAL and (limit := self.rewards.now) < self._passed:
            self.experience.change_rewards(lambda reward: np.clip(reward, -limit, limit))
            self._passed = limit
        if self.rewards.size(game) > USUAL:
            self._passed = max(self._passed, float(np.abs(piece.reward).max()))
        return True

    def change_rewards(self) -> None:
        """Rows of a checkpoint may have been played when other rewards were learnt from."""
        self.experience.change_rewards(self._clipped)
        self._passed = math.inf

    def learns(self, piece: Piece, version: int) -> None:
        with self._news:
            self.queue.next_batch()
        self._learnt, self._in_batch = list(self._in_batch), {}

    def suspects(self) -> list[str]:
        """The games of the last batch, those with the largest rewards first."""
        games = sorted(self._learnt or self._in_batch, key=self.rewards.size, reverse=True)
        return [f"{self._names.get(game, '?')!r} (rewards up to {self.rewards.size(game):g})" for game in games]

    def numbers(self) -> dict[str, Any]:
        self.score = self.returns.median
        return {LIVE_SCORE: self.score, **(self.left() if self.live.fair else {})}

    def left(self) -> dict[str, int]:
        """What was not learnt from as it came."""
        return {"live/rows_left_out": self.rewards.left_out, "live/rewards_cut": self.rewards.cut}

    def publish(self, side: str, weights: Callable[[], Weights], clock: Clock) -> None:
        self._latest.publish(weights, clock)
        if not clock.version:
            self._latest.flush()  # what a run begins with is what its first games play with

    def _send(self, weights: Weights, clock: Clock) -> Promise:
        if not_finite(weights, self._buffers):
            nothing: Promise = Promise()
            nothing.set_result(None)
            return nothing  # games keep the last good ones
        sent = self.host.publish_weights(weights, clock.version)
        self.clock = clock
        return sent

    def seconds(self) -> dict[str, float]:
        return {"idle": self._laps.take().get("idle", 0.0)}

    def wait_reason(self) -> str:
        if self.server is None:
            return ""
        games = len(self.server.server.sessions.sessions)
        if not games:
            return f"no game is connected: they call POST {self.url}"
        return f"{games} game{'s are' if games > 1 else ' is'} connected"

    def set_state(self, state: dict[str, Any], clock: Clock) -> bool:
        self._latest.publish(lambda: self.host.get_weights()[0], clock)
        self._latest.flush()  # replies carry the version that the run is at, before there is a new one too
        return False  # games go on by themselves

    def close(self) -> None:
        """End the service: whoever still plays gets an error, nobody waits for the learner any more."""
        with self._news:
            self._closing = True
            self._let_in()
        if self.server is not None:
            self.server.close()
            self.server = None


def serve_games(
    make_actor: Callable[..., PolicyActor],
    live: LiveConfig,
    sources: Sequence[LiveSource],
    about: Callable[[], dict[str, Any]],
) -> BackgroundServer:
    """Answer games with these actors; `about`: of the page of their owner."""
    most = body_limit(sources[0].acting.spec, live.max_json)  # base64 of a large observation
    service = live.service()
    service = with_environment(replace(service, max_body=min(service.max_body, max(MAX_JSON, most))))
    more = {"episode_length": min(source.piece_length for source in sources), "max_json": service.max_body}

    async def page(method: str, path: str, body: bytes) -> tuple[int, str, bytes]:
        return 200, "application/json", json.dumps(about()).encode()

    def prepare(server: Server) -> None:
        server.routes["training"] = page
        server.numbers += [source.acting.numbers for source in sources]

    return BackgroundServer(lambda: make_actor(serialize="json", fallback=live.fallback, **more), service, prepare)


class LiveEngine:
    """A Model for batches of any size, as games come. They are padded to a power of two, so that each size is recorded:
    the torch engine keeps few.

    It returns what the Policy needs for acting and for learning. It draws the Model's random inputs itself: they have
    no batch axis, so they cannot wait in a queue with the observations of other games."""

    def __init__(self, model: nn.Module, policy: Policy, rng: np.random.Generator):
        outputs = tuple(dict.fromkeys((*policy.reads, *policy.keeps)))
        self.engine = TorchEngine(model, None if is_recurrent(model) else outputs)
        self.draws, self.rng = getattr(model, "draws", None) or {}, rng

    def forward(self, *args: Any) -> Any:
        rows = tree.length(args)
        more = (1 << (rows - 1).bit_length()) - rows
        if more:
            args = tree.map(lambda x: np.concatenate([x, np.broadcast_to(x[:1], (more, *x.shape[1:]))]), args)
        if self.draws:
            args = (*args, standard_normals(self.draws, self.rng))
        out = self.engine.forward(*args)
        return tree.map(lambda x: x[:rows], out) if more else out

    def set_weights(self, weights: Mapping[str, np.ndarray]) -> None:
        self.engine.set_weights(weights)


def _wake(held: list[asyncio.Future[None]]) -> None:
    for taken in held:
        if not taken.done():
            taken.set_result(None)


def _rows_of(experience: Experience) -> int:
    """Rows of a rollout; of other experience, four pieces of each column."""
    if isinstance(experience, Rollouts):
        assert experience.piece_length is not None
        return experience.piece_length * (experience.columns or 1)
    return 4 * PIECE * COLUMNS


def _weights(model: Any) -> dict[str, np.ndarray]:
    return {k: v.detach().cpu().numpy() for k, v in model.state_dict().items()}


class Made(Protocol):
    """What a policy is made from: see `bray.train.setup.Setup`."""

    @property
    def algo(self) -> Any: ...

    @property
    def config(self) -> Any: ...


class LiveTraining(SteadyDriver):
    """Algorithms that learn from the games that call, in this process."""

    def __init__(
        self,
        setups: Mapping[str, Made],
        run: RunConfig,
        env: EnvConfig,
        live: LiveConfig,
        data: DataConfig | None = None,
    ):
        """`setups`: of each policy, by name; `data`: files that are learnt from beside the games"""
        self.run_config, self.env_config, self.live = run, env, live
        if run.eval_freq or run.video_freq:
            raise ConfigError("eval_freq, video_freq: live games cannot be evaluated in; leave them out")
        self.device = resolve_device(run.device)
        self.spec = live_spec(live, env)
        sides = {name: self._side(name, setup) for name, setup in setups.items()}
        if data is not None:
            if len(sides) > 1 or run.self_play is not None:
                raise ConfigError("--data-share beside live games is for one policy without self_play: leave it out")
            mix_files(next(iter(sides.values())).experience, run, env, data, self.spec)
        self.source = self._play(sides)
        super().__init__(list(sides.values()), [self.source])
        self.source.about = self.about

    def _side(self, name: str, setup: Made) -> Side:
        c = setup.config
        side = make_side(setup.algo, c["run"], self.spec, c["model"], c["algo"])
        side.name = name
        _fit(side.experience, self.live, self.env_config, is_recurrent(side.model))
        return side

    def _play(self, sides: Mapping[str, Side]) -> Any:
        """Where their games come from."""
        (side,) = sides.values()
        return LiveSource(side, self.spec, self.live, self.env_config, self.run_config.seed)

    depends_on_timing = "the games are live"

    def describe(self) -> str:
        return f"live games on port {self.source.port}"

    def about(self) -> dict[str, Any]:
        """For the admin port's /training."""
        return {
            "learner": self.trouble or "learns",
            "env_steps_total": self.totals.env_steps,
            "learner_steps_total": self.steps,
            "episode_return_mean": self.totals.episodes.return_mean,
            "episodes_total": self.totals.episodes.total,
            LIVE_SCORE: self.source.score,
            "rows_dropped": self.totals.dropped,
            **{key.removeprefix("live/"): count for key, count in self.source.left().items()},
            "updates_undone": self.updates_undone,
            "updates": self.experience.when_due(),
            "waiting": self.reason_to_wait() or None,
        }

    def suspects(self) -> list[str]:
        return self.source.suspects()

    def set_weights(self, weights: Mapping[str, Any]) -> None:
        super().set_weights(weights)
        self.show_weights()

    def show_weights(self) -> None:
        for side in self.sides.values():
            self.source.publish(side.name, side.weights_now, self.clock_of(side))

    def check_rows(self) -> None:
        left_out = sum(side.experience.leave_out(self.live.reward_range) for side in self.sides.values())
        if left_out:
            logger.warning(
                "%d rows of the saved replay are left out: they are not finite, or their reward is beyond "
                "reward_range=%g",
                left_out,
                self.live.reward_range,
            )
        self.source.change_rewards()


def _fit(experience: Experience, live: LiveConfig, env: EnvConfig, recurrent: bool) -> None:
    """Size a rollout, and refuse what live games cannot bring."""
    experience.check_live()
    if isinstance(experience, Rollouts):
        assert experience.piece_length is not None
        rows = live.rows or experience.piece_length * max(COLUMNS, env.num_envs)
        experience.piece_length = min(experience.piece_length, rows)
        experience.columns = max(1, rows // experience.piece_length)
        experience.sized_by = "live.rows"
    elif recurrent:
        raise ConfigError("this algorithm replays single steps and cannot train a memory: set use_lstm=false")
