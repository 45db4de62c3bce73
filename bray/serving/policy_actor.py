"""A policy plays game sessions, wherever it does: `bray serve`, `bray train --live`, a launch file in both its modes.

A game sends `{"obs": ...}` at every tick, maybe with `reward`, `terminated`, `truncated` and `action_mask`, and gets
`{"action": ..., "version": ...}`. PolicyActor is its session, BasePolicyAgent the agent in it that decides, with a
model:

    a ServedModel               from the files of a run; its engine forwards and acts for a whole batch
    a `train.agent.ActingModel` forwards in this process or another one, with weights that change, and acts here

Where the agent is the only one and nobody learns from it or looks on, as in `bray serve`, a tick makes no State.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import math
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import msgspec
import numpy as np

from bray import tree
from bray.act.asking import is_asked, with_return
from bray.errors import BrayError, ConfigError, DataError, UnknownName, did_you_mean
from bray.inference.batcher import own_error
from bray.serving.actor import FAILURES
from bray.serving.agent import After, Agent, AgentActor, State
from bray.serving.model import ServedModel, Version
from bray.serving.protocol import END, START, TICK, Refusal, malformed
from bray.serving.record import Recording
from bray.serving.values import TooMuchText, plain, reader

_SHOWN = 1 << 12  # bytes of a tick that is decoded only to say what is wrong with it
_LARGEST = float(np.finfo(np.float32).max)  # of a reward: learners count in float32


class TickMessage(msgspec.Struct):
    """What a game sends each tick."""

    obs: msgspec.Raw
    """As it is written: it is read by the model's space."""
    reward: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    """Of the previous action; who does not learn does not read it."""
    terminated: bool | int | float | None = False
    truncated: bool | int | float | None = False
    """The observation is its episode's last; the next tick starts another."""
    action_mask: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET


class _StrictMessage(TickMessage, forbid_unknown_fields=True):
    """Of who learns: the reward is read with the rest, in one pass."""

    reward: float | int | str | bool | msgspec.UnsetType | None = msgspec.UNSET  # type: ignore[assignment]


class Opening(msgspec.Struct):
    """What a game may say at the start of a session (an empty body says nothing)."""

    model: str | None = None
    version: int | None = None
    rating: float | None = None
    target_return: float | None = None


_KEYS = TickMessage.__struct_fields__
_MALFORMED = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
_read_tick = msgspec.json.Decoder(TickMessage).decode
_read_strictly = msgspec.json.Decoder(_StrictMessage).decode
_read_reward = msgspec.json.Decoder(float | int | str | bool | None).decode
_read_opening = msgspec.json.Decoder(Opening).decode
_write = msgspec.json.Encoder(enc_hook=plain).encode


class Observed(NamedTuple):
    """What a game said in a tick, not checked yet."""

    obs: Any
    reward: Any
    terminated: bool
    truncated: bool
    mask: Any = None


class DecisionRows(NamedTuple):
    """A Decision, row by row."""

    action: list[Any]
    extras: list[dict[str, Any]]
    outputs: list[dict[str, Any]]
    carry: Any
    """A batch, not rows."""
    version: int


class Rows(Protocol):
    """What is made of the ticks of a session: see `train.agent.SessionRows`."""

    async def add(self, states: list[State], done: bool) -> None: ...


# --- who decides ------------------------------------------------------------------------------------------------------


class BasePolicyAgent(Agent):
    """Plays with a Policy and the newest weights of a model; in training, what happens becomes rows.

    Override `observe` and `answer` for a game that speaks otherwise. Every State of an episode then has the fields
    `obs`, `reward`, `terminated`, `truncated`, `first`, `outputs` (of the model), `extras` and `action` (of the
    Policy), and `version` (of the weights).
    """

    late_input = True
    last: Any = None
    """The last action."""
    mask: Any = None
    """The legal choices of the last tick; None where all are."""

    def __init__(self, name: str, config: Any, state: State):
        super().__init__(name, config, state)
        self.model = self.find_model(name, config)
        self.rows = self.make_rows()
        served = isinstance(self.model, ServedModel)
        self.asked = ServedSession(self.model, state.session) if served else self.model
        self.memory = self.beginning = self.model.initial_state
        self._first = True

    @staticmethod
    def find_model(name: str, config: Any) -> Any:
        """What this session shares with the others; `config[name]` is the agent's section."""
        return config[name]["model"]

    def make_rows(self) -> Rows | None:
        """What learns from this session, or counts its episodes; None = nobody."""
        rows: Rows | None = self.model.make_rows()
        return rows

    def observe(self, state: State) -> tuple[Any, ...]:
        """(observation, reward of the previous action, terminated, truncated) of a tick, and maybe a mask of legal
        choices. The observation may be lists or arrays, or JSON that is not decoded yet."""
        tick = self._read(state)
        reward = None if tick.reward is msgspec.UNSET else tick.reward
        if reward is None and self.model.learns and not self._first:
            raise DataError("expected the reward of the previous action, got none")
        ends = _flag("terminated", tick.terminated), _flag("truncated", tick.truncated)
        return Observed(tick.obs, 0.0 if reward is None else reward, *ends, tick.action_mask)

    def _read(self, state: State) -> TickMessage:
        """A tick by its struct; one that others have decoded, or that does not fit, by way of `state.input`."""
        data, strict = state.unread(), self.model.strict
        if data is not None:
            try:
                if strict:
                    return _read_strictly(data)
                tick = _read_tick(data)
                if tick.reward is not msgspec.UNSET:
                    tick.reward = _read_reward(tick.reward)
                return tick
            except (ValueError, RecursionError) as e:
                if len(data) > _SHOWN:  # else it is told below; decoded, it may be thirty times as large
                    raise DataError(f'expected {{"obs": ...}}, got {len(data)} bytes that are not: {e}') from None
        found = state.input
        if not isinstance(found, Mapping) or "obs" not in found:
            raise DataError(
                f'expected {{"obs": ..., "reward": ..., "terminated": ..., "truncated": ...}}, got {found!r:.60}'
            )
        unknown = [str(key) for key in found if key not in _KEYS] if strict else ()
        if unknown:
            raise DataError(
                f"expected a tick of {', '.join(_KEYS)}, got {unknown[0][:40]!r} too.{did_you_mean(unknown[0], _KEYS)}"
            )
        return TickMessage(**{key: found[key] for key in _KEYS if key in found})

    def answer(self, state: State, action: Any) -> None:
        """Tell the game what to do; `action` is one action of the environment's space."""
        state.output["action"] = plain(action)
        state.output["version"] = state.version

    def on_tick(self, state: Any) -> Awaitable[None]:
        # no coroutine, which would need a task for every tick
        try:
            seen = self.observe(state)
            if type(seen) is not Observed:  # an observe of a user's own
                seen = Observed(*seen)
            if not self.model.warm:
                return self._first_tick(state, seen)
            return self._ask(state, seen, *self.model.observations.read(seen.obs, seen.mask))
        except DataError as e:
            raise _refusal(e) from None

    async def _first_tick(self, state: Any, seen: Observed) -> None:
        """Compiled code is loaded when it is first used, which takes a second: in a thread, so that the loop goes
        on."""
        try:
            obs, mask = await asyncio.to_thread(self.model.observations.read, seen.obs, seen.mask)
            asking = self._ask(state, seen, obs, mask)
        except DataError as e:
            raise _refusal(e) from None
        await asking

    def _ask(self, state: Any, seen: Observed, obs: Any, mask: np.ndarray | None) -> asyncio.Future[None]:
        """Have this tick decided on, together with those of other games; then `decided` is called."""
        reward = _number(seen.reward, self.model.reward_range)
        if mask is not None and self.model.learns and not self.model.observations.in_obs:
            raise DataError(
                "action_mask came beside obs, but there is none in the observation space, so what is learnt would "
                "ignore it: add action_mask to the (Dict) observation space"
            )
        first, self._first = self._first, seen.terminated or seen.truncated
        if first:
            self.memory = self.beginning
        state.obs, state.mask, state.reward, state.first = obs, mask, reward, first
        state.terminated, state.truncated = seen.terminated, seen.truncated
        if self.memory is not None:
            state.memory = self.memory = with_return(self.memory, None, reward)
        self.mask = mask
        return self.asked.ask(self, state)

    def decided(self, state: Any, rows: DecisionRows, i: int) -> None:
        """What was decided for this tick is row i."""
        if self.memory is not None:
            # of the type that it began with, whatever came back; and a copy: a row would keep its whole batch alive
            self.memory = tree.map(lambda a, x: np.array(x[i], a.dtype), self.memory, rows.carry)
        state.outputs, state.version = rows.outputs[i], rows.version
        state.extras, state.action = rows.extras[i], rows.action[i]
        self.last = state.action
        self.answer(state, state.action)

    async def on_episode(self, episode: list[State], done: bool) -> None:
        if self.rows is not None:
            await self.rows.add(episode, done)

    # --- where nobody else looks at a tick ----------------------------------------------------------------------------

    @property
    def alone(self) -> bool:
        """Whether the reply is all that is wanted of this agent."""
        return self.rows is None and type(self) is BasePolicyAgent and isinstance(self.asked, ServedSession)

    async def reply(self, data: bytes) -> bytes:
        """A tick without a State. Microseconds count here."""
        model = self.model
        observations = model.observations
        try:
            message = _read_tick(data)
            obs, mask = observations.read(message.obs, message.action_mask)
            if type(message.reward) is msgspec.Raw and is_asked(self.memory):
                reward = _number(_read_reward(message.reward) or 0.0, model.reward_range)
                self.memory = with_return(self.memory, None, reward)
        except _MALFORMED as e:
            raise malformed(f'expected a JSON object {{"obs": ...}}, got {_short(data)} ({e})') from None
        except DataError as e:
            raise _refusal(e) from None
        version = self.asked.version
        asked = (obs,) if not observations.masked else (obs, observations.all_legal if mask is None else mask)
        if self.memory is None:
            out = await version.submit(*asked)
        else:
            out = await version.submit(*asked, self.memory)
            over = message.terminated or message.truncated  # the next tick starts an episode, and remembers nothing
            # a row of the batch would keep the whole batch alive
            self.memory = self.beginning if over else tree.map(np.copy, out["state"])
        action = self.last = out["action"]
        if type(action) is np.int64:
            return b'{"action":%d,"version":%d}' % (action, version.step)
        return _write({"action": action, "version": version.step})

    # --- where it is too late -----------------------------------------------------------------------------------------

    def fall_back(self, state: Any, wish: Any, unseen: bool) -> None:
        """Answer a tick whose deadline has passed. `unseen`: its turn has not come yet, so nobody has read its mask."""
        model = self.model
        if unseen:
            self.mask = None
            with contextlib.suppress(DataError, Refusal):
                seen = Observed(*self.observe(state))
                self.mask = model.observations.read(seen.obs, seen.mask)[1]
        if wish == "last" and self.last is not None:
            action = self.last
        else:
            action = model.random_action(self.mask) if wish in ("last", "random") else wish
            action = reader(model.spec.action, "fallback")(action)
        state.version, state.action = self.asked.step, action
        self.answer(state, action)


def tell(future: asyncio.Future[None], agent: BasePolicyAgent, state: Any, rows: DecisionRows, i: int) -> None:
    """Give an agent what was decided for its tick; the future is then done."""
    try:
        agent.decided(state, rows, i)
    except StopIteration as e:  # which no future takes
        future.set_exception(RuntimeError(f"agent {agent.name!r} raised {e!r}"))
    except FAILURES as e:
        future.set_exception(e)
    else:
        future.set_result(None)


class ServedSession:
    """The questions of one session to a ServedModel. They go to a version one by one; its batcher puts those of many
    sessions together."""

    def __init__(self, model: ServedModel, session: str):
        self.model, self.chosen = model, -1
        digest = hashlib.blake2b(session.encode(), digest_size=8).digest()
        self.place = int.from_bytes(digest, "big") / 2**64
        """In [0, 1), by its name: which version's share it falls into."""

    def choose(self, version: int) -> None:
        if version not in self.model.versions:
            raise malformed(f"expected one of the versions {sorted(self.model.versions)}, got {version}")
        self.chosen = version

    @property
    def version(self) -> Version:
        """The version that the game chose while it is served, else by the session's share."""
        model = self.model
        if self.chosen in model.versions:
            return model.versions[self.chosen]
        shares = model.shares
        if len(shares) > 1:
            at = self.place * sum(share.share for share in shares)
            for share in shares:
                at -= share.share
                if at < 0:
                    return share.version
        return shares[-1].version

    @property
    def step(self) -> int:
        return self.version.step

    def ask(self, agent: BasePolicyAgent, state: Any) -> asyncio.Future[None]:
        """Fill the State with what is decided, by `agent.decided`."""
        observations, version = self.model.observations, self.version
        asked = [state.obs]
        if observations.masked:
            asked.append(observations.all_legal if state.mask is None else state.mask)
        if self.model.initial_state is not None:
            asked.append(state.memory)
        return _Answer(agent, state, version.step, version.submit(*asked))


class _Answer(After[None]):
    """Done when the State is filled. Whoever cancels it leaves the queue of the model."""

    def __init__(self, agent: BasePolicyAgent, state: Any, step: int, deciding: asyncio.Future[Any]):
        self._agent, self._tick, self._step = agent, state, step
        super().__init__(deciding)

    def _ran(self, deciding: asyncio.Future[Any]) -> None:
        if self.done():
            return
        if deciding.cancelled():
            self.cancel()
            return
        error = deciding.exception()
        if error is not None:
            self.set_exception(own_error(error))
            return
        row = deciding.result()
        carry = tree.map(lambda x: x[None], row["state"]) if "state" in row else None
        rows = DecisionRows([row["action"]], [row["extras"]], [row["outputs"]], carry, self._step)
        tell(self, self._agent, self._tick, rows, 0)


# --- the session ------------------------------------------------------------------------------------------------------


class PolicyActor(AgentActor):
    """A game session played by policies, and by other agents beside them.

    At its start a game may choose the model and the version that answer it: `{"model": NAME, "version": STEP}`, or how
    strong its player is to be: `{"rating": 1200}`, or which return it is to play for: `{"target_return": 200}`. Ticks
    that are late are answered all the same, and sessions are
    recorded, where that is wanted.
    """

    def __init__(
        self,
        agents: Mapping[str, type],
        config: Any = None,
        *,
        fallback: Any = None,
        record: str | None = None,
        find_model: Callable[[str | None], ServedModel] | None = None,
        **kwargs: Any,
    ):
        """
        fallback, record   as DeployConfig says
        find_model  the model of a name, None = the first one: games choose among models, and the agents have no config.
                    The reply to a start then says what plays.
        kwargs      as AgentActor's
        """
        super().__init__(agents, config, **kwargs)
        self._wish, self._record, self._find_model = fallback, record, find_model
        self._recording: Recording | None = None
        self._alone: BasePolicyAgent | None = None
        self._data = b""  # of the tick that runs, or ran last
        if fallback is not None and any(issubclass(cls, BasePolicyAgent) for cls in agents.values()):
            self.fallback = self._fallback  # only where it is wanted: having the method replaces the error

    def start(self, session: str, data: bytes) -> bytes | Awaitable[bytes | None] | None:  # type: ignore[override]
        opening = self._opening(data)
        if opening.version is not None and opening.rating is not None:
            raise malformed("expected a version or a rating, got both: each says who plays")
        if self._find_model is not None:
            try:
                model = self._find_model(opening.model)
            except UnknownName as e:
                raise malformed(str(e)) from None
            self._config = {name: {"model": model} for name in self._classes}
        self.begin(session, data)
        players = [agent for _, agent in self._agents if isinstance(agent, BasePolicyAgent)]
        for agent in players:
            if opening.target_return is not None and isinstance(agent.asked, ServedSession):
                try:
                    agent.memory = agent.beginning = agent.asked.model.asked_for(opening.target_return)
                except ConfigError as e:
                    raise malformed(str(e)) from None
            named = isinstance(agent.asked, ServedSession) and opening.model in (None, agent.model.name)
            if named and opening.version is not None:
                agent.asked.choose(opening.version)
            elif named and opening.rating is not None:
                return self._start_rated(session, data, agent.asked, opening)
        return self._started(session, data, players, {})

    async def _start_rated(self, session: str, data: bytes, asked: ServedSession, opening: Opening) -> bytes | None:
        assert opening.rating is not None
        try:
            model, step, rating = await asked.model.nearest(opening.rating, own=opening.model is not None)
        except BrayError as e:
            raise malformed(str(e)) from None
        if model is not asked.model:  # another player of its league: the session begins with that
            self._config = {name: {"model": model} for name in self._classes}
            self.begin(session, data)
        players = [agent for _, agent in self._agents if isinstance(agent, BasePolicyAgent)]
        next(a.asked for a in players if isinstance(a.asked, ServedSession) and a.asked.model is model).chosen = step
        return self._started(session, data, players, {"rating": rating})

    def _started(
        self, session: str, data: bytes, players: list[BasePolicyAgent], more: Mapping[str, Any]
    ) -> bytes | None:
        self._alone = players[0] if len(self._agents) == 1 and players and players[0].alone else None
        asked = players[0].asked if players else None
        if not isinstance(asked, ServedSession):
            return None
        about = {"model": asked.model.name, "version": asked.step, **more}
        reply = None if self._find_model is None else _write(about)
        if self._record is not None and session:  # else a stateless request
            about = {"run": str(asked.model.run.path.resolve()), **about}
            self._recording = Recording(Path(self._record), session, about)
            self._recording.add(START, data, reply or b"")
        return reply

    def _opening(self, data: bytes) -> Opening:
        try:
            return _read_opening(data) if data else Opening()
        except _MALFORMED as e:
            if self._find_model is None:
                return Opening()  # it is for the agents
            raise malformed(
                "expected an empty body or a JSON object with model and version or rating, or target_return, got "
                f"{_short(data)} ({e})"
            ) from None

    def tick(self, data: bytes) -> bytes | Awaitable[bytes]:
        self._data = data
        reply = super().tick(data) if self._alone is None else self._alone.reply(data)
        return reply if self._recording is None else self._record_tick(data, reply)

    async def _record_tick(self, data: bytes, reply: bytes | Awaitable[bytes]) -> bytes:
        reply = reply if isinstance(reply, bytes) else await reply
        if self._recording is not None:
            self._recording.add(TICK, data, reply)
        return reply

    def end(self, data: bytes) -> bytes | Awaitable[None]:  # type: ignore[override]
        recording, self._recording = self._recording, None
        if recording is not None:
            recording.add(END, data, b"")
            recording.close()
        if self._alone is None:
            return super().end(data)
        return b"{}"

    def lost(self) -> Any:
        return self.end(b"")

    def _fallback(self, data: bytes) -> bytes:
        """The reply that policies give with the action that was wished for; agents of another kind have no part in
        it."""
        state = self.new_state(data, max(0, self._ticks - 1))
        for _, agent in self._agents:
            if isinstance(agent, BasePolicyAgent):
                agent.fall_back(state, self._wish, data is not self._data or agent is self._alone)
        if isinstance(state.output, dict):
            state.output["fallback"] = True
        return self._codec.encode(state.output)


def _refusal(error: DataError) -> Refusal:
    return Refusal(413, "too_large", str(error)) if isinstance(error, TooMuchText) else malformed(str(error))


def _number(reward: Any, largest: float) -> float:
    if type(reward) is float and abs(reward) <= largest and largest <= _LARGEST:
        return reward
    try:
        number = math.nan if isinstance(reward, (str, bool)) else float(reward)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not abs(number) <= _LARGEST:
        raise DataError(f"expected reward to be a finite number (of float32), got {reward!r:.60}")
    if abs(number) > largest:
        raise DataError(
            f"expected reward to be a number from {-largest:g} to {largest:g}, got {reward!r:.60}. A game whose "
            "rewards are larger divides them; reward_range is the bound"
        )
    return number


def _flag(name: str, value: Any) -> bool:
    if value is True or value is False:
        return value
    if value is None or (type(value) in (int, float) and value in (0, 1)):
        return bool(value)
    raise DataError(f"expected {name} to be true or false, got {value!r:.60}")


def _short(data: bytes) -> str:
    return repr(data[:60].decode("utf-8", "replace")) + ("..." if len(data) > 60 else "")
