"""Agents: the decision makers inside an Actor. They share a State per tick, and see the States of an episode together.

A tick: the game's bytes become `state.input`; `on_tick` of all agents runs concurrently; `state.output` is the reply.
An episode: every `episode_length` ticks, and at the end of the session, `on_episode` of all agents gets the States, in
the background, while the game goes on.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import logging
import sys
from collections.abc import Awaitable, Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from bray.errors import ConfigError, WaitError
from bray.limited_log import LimitedLog
from bray.serving.actor import FAILURES, Actor
from bray.serving.episodes import pack_state, write_episode
from bray.serving.messages import MAX_JSON, json_too_large, make_codec
from bray.serving.protocol import malformed
from bray.serving.state import Crew, State, parse_session, running_agent

__all__ = ["Agent", "AgentActor", "State"]

T = TypeVar("T")
logger = logging.getLogger("bray.serving")
_limited = LimitedLog(logger)

MAX_BACKLOG = 2
"""Episodes of an actor that may wait for `on_episode`. With more, a tick's reply waits too: memory stays bounded."""

# Compresses and writes the files of all actors. Its thread starts when it is first used.
_writer = ThreadPoolExecutor(1, "bray-episodes")

_numbers: Iterator[int] = itertools.count()  # of actors
_free: list[int] = []  # numbers of actors that are gone


def number_actors(first: int, slots: int) -> None:
    """Give the AgentActors of this process the numbers of one worker among many: `first` and the `slots - 1` after it.
    Actors beyond that (one that hangs keeps its number) get numbers that no other worker has either."""
    global _numbers
    _numbers = (turn * 1_000_000 + first + i for turn in itertools.count() for i in range(slots))


class Agent:
    """A decision maker. One is made for every session, at its start. Its methods may be `async` or plain; a plain
    `on_tick` may return a future.

    `state` is there before the first tick: it has `session`, `game`, `agent`, `actor`, and as `input` the bytes of the
    start.
    """

    late_input = False
    """Whether `state.input` may be decoded only when it is read, if at all: faster for an agent that reads
    `state.unread()` by itself. A message that is malformed is then refused only by who reads it."""
    watches = False
    """Whether it only looks on (numbers, records, pictures). Its errors, in `__init__` too, are logged once per
    session: the tick is answered by the others, joins the episode, and the session goes on. Only agents that wait for a
    field of it get its error."""

    def __init__(self, name: str, config: Any, state: State):
        self.name, self.config = name, config

    @classmethod
    def before_sessions(cls, name: str, config: Any) -> Any:
        """Load what takes long (a network, a map), and keep it where sessions find it: in the class, or in a function
        with a cache. Called for every Actor that is made; a launched service makes the first one of each process before
        its port opens. What is returned lives as long as the Actor."""

    def on_tick(self, state: State) -> Awaitable[None] | None:
        """Decide: read `state.input` (and what other agents set, with `await state.wait(field)`), fill `state.output`,
        and set as fields of the state whatever other agents or the episode need."""
        raise NotImplementedError(f"{type(self).__name__} has no method on_tick(state)")

    async def on_episode(self, episode: list[State], done: bool) -> None:
        """Learn from the States of the last ticks, at most `episode_length` of them. `done`: the session is over; the
        list is then empty where the last tick filled an episode. It is not called for a session without a tick. The
        game goes on meanwhile; the episodes of a session come one after the other."""


class AgentActor(Actor):
    """An Actor made of agents.

    A tick is answered when all agents are done with it. If an agent raises, the others still finish, the client gets
    the error, and the session goes on; that tick's State is in no episode. An error in `on_episode` is logged and stops
    nothing, nor does any error of an agent that only watches (`Agent.watches`).
    """

    _number: int | None = None  # to be given back when this actor is gone
    _agents: list[tuple[str, Any]]
    _learners: list[tuple[str, Any]]  # those with an on_episode of their own
    _states: list[State]  # of the episode so far
    _watchers: set[str]  # agents that only watch
    _unmade: tuple[str, Exception] | None  # the first of them that could not be made, and why
    _said: set[str]  # agents whose failure is in the log, once per session

    def __init__(
        self,
        agents: Mapping[str, type],
        config: Any = None,
        episode_length: int | None = 128,
        episode_save_interval: int | None = None,
        serialize: str | None = None,
        tick_input_proto: Any = None,
        tick_output_proto: Any = None,
        save_dir: Path | str | None = None,
        keep: int = 100,
        actor: int | None = None,
        max_json: int = MAX_JSON,
        seats: Mapping[str, Collection[str]] | None = None,
    ):
        """
        Args:
            agents: the class of each agent, by name.
            config: handed to the agents; `config[name]` is an agent's own section.
            episode_length: ticks of an episode; None = as long as the session.
            episode_save_interval: save the first episode of this actor and every so many after it; None = save none.
            serialize: "json", "proto" or None (bytes).
            tick_input_proto, tick_output_proto: the messages of "proto", named as `message_class` says.
            save_dir: the run directory; files go to its `episodes/`.
            keep: how many episode files of this actor are kept, the newest ones.
            actor: the number of this slot; None = the smallest that no other AgentActor of this process has.
            max_json: bytes of a tick that is JSON; more is refused with 413.
            seats: of agents that are for some agents of the game alone, whose sessions those are. Where there are such,
                a session that none of them is for is refused.
        """
        if not agents:
            raise ConfigError("an AgentActor needs agents: expected {name: AgentClass}, got none")
        for name, cls in agents.items():
            if not callable(getattr(cls, "on_tick", None)):
                raise ConfigError(f"agent {name!r}: expected a class with a method on_tick(state), got {cls!r}")
        _check_count("keep", keep)
        if episode_length is not None:
            _check_count("episode_length", episode_length)
        if episode_save_interval is not None:
            _check_count("episode_save_interval", episode_save_interval)
            if save_dir is None:
                raise ConfigError("episode_save_interval is set: say where to save the episodes (save_dir)")
        if actor is None:
            actor = self._number = heapq.heappop(_free) if _free else next(_numbers)
        self.actor = actor
        self._classes, self._config, self._seats = agents, config, seats or {}
        codec = self._codec = make_codec(serialize, tick_input_proto, tick_output_proto)
        late = serialize == "json" and all(getattr(cls, "late_input", False) for cls in agents.values())
        self._decode = codec.decode if late else None
        self._max_body = max_json if serialize == "json" else sys.maxsize
        self._episode_length, self._save_interval, self._keep = episode_length, episode_save_interval, keep
        self._directory = None if save_dir is None else Path(save_dir) / "episodes"
        self._episodes = 0  # of this actor, in all its sessions
        self._background: dict[asyncio.Task[None], None] = {}  # episodes that are being handled, in order
        self._session = self._game = self._agent = ""
        self._ticks, self._collects = 0, False
        self._forget()
        self._shared = [self._before_sessions(name, cls) for name, cls in agents.items()]

    def _before_sessions(self, name: str, cls: Any) -> Any:
        try:
            shared = cls.before_sessions(name, self._config) if hasattr(cls, "before_sessions") else None
            if asyncio.iscoroutine(shared):
                shared.close()
                raise ConfigError("expected a class method that is not async: nobody waits for it")
            return shared
        except Exception as e:
            e.add_note(f"agent {name!r}: {cls.__qualname__}.before_sessions(name, config) raised")
            if getattr(cls, "watches", False) is not True:
                raise
            self._say_once(name, e)

    def __del__(self) -> None:
        if self._number is not None:
            heapq.heappush(_free, self._number)

    # --- a session ----------------------------------------------------------------------------------------------------

    async def start(self, session: str, data: bytes) -> None:
        self.begin(session, data)

    def begin(self, session: str, data: bytes) -> None:
        """Make the agents of a session."""
        self._forget()
        self._session = session
        self._game, self._agent = parse_session(session)
        self._ticks = 0
        state = State(session, self.actor, 0, data)
        if self._seats and not any(self._agent in seats for seats in self._seats.values()):
            known = ", ".join(dict.fromkeys(seat for seats in self._seats.values() for seat in seats))
            raise malformed(f"expected a session named <game>-agent-<agent> of {known}, got the agent {self._agent!r}")
        for name, cls in self._classes.items():
            if self._agent not in self._seats.get(name, (self._agent,)):
                continue
            watches = getattr(cls, "watches", False) is True
            try:
                self._agents.append((name, cls(name, self._config, state)))
            except Exception as e:
                e.add_note(f"agent {name!r} could not be made: {cls.__qualname__}(name, config, state) raised")
                if not watches:
                    raise
                self._say_once(name, e)
                self._unmade = self._unmade or (name, e)
            else:
                if watches:
                    self._watchers.add(name)
        if not self._agents:
            assert self._unmade is not None
            raise self._unmade[1]  # nobody is left to answer
        self._learners = [(name, agent) for name, agent in self._agents if _learns(agent)]
        self._collects = bool(self._learners) or self._save_interval is not None

    def tick(self, data: bytes) -> bytes | Awaitable[bytes]:
        if len(data) > self._max_body:
            raise json_too_large(len(data), self._max_body)
        state = self.new_state(data, self._ticks)
        self._ticks += 1
        if self._watchers or self._unmade is not None:
            state._crew = Crew((name for name, _ in self._agents), self._unmade)
            return self._tick_together(state)
        if len(self._agents) > 1:
            return self._tick_together(state)
        name, agent = self._agents[0]
        try:
            running = agent.on_tick(state)
        except Exception as e:
            e.add_note(f"raised by agent {name!r}")
            raise
        if running is None:
            return self._answer(state)  # a plain method: neither we nor the server need a task
        if asyncio.isfuture(running):
            reply = _Reply(running)  # nor here
            reply.actor, reply.agent, reply.state = self, name, state
            return reply
        if hasattr(running, "__await__"):
            return self._tick_alone(name, running, state)
        return self._answer(state)

    def new_state(self, data: bytes, tick: int) -> State:
        """The State of a tick, as the agents find it."""
        input = self._codec.decode(data) if self._decode is None else data
        state = State(self._session, self.actor, tick, input, self._game, self._agent, self._decode)
        output = self._codec.new_output()
        if output is not None:
            state.output = output
        return state

    async def end(self, data: bytes) -> None:
        """When this returns, the last episode has been handled, and saved if it was due."""
        learners, states = self._learners if self._ticks else [], self._states
        self._forget()
        previous = next(reversed(self._background), None)
        await self._handle(self._session, learners, states, True, previous, self._due(states))

    async def lost(self) -> None:
        """The game went away without an end. To the agents the session is over all the same."""
        await self.end(b"")

    def _forget(self) -> None:
        self._agents, self._learners, self._states = [], [], []
        self._watchers, self._unmade, self._said = set(), None, set()

    # --- a tick -------------------------------------------------------------------------------------------------------

    async def _tick_alone(self, name: str, running: Awaitable[Any], state: State) -> bytes:
        try:
            await _finish(name, running)
        except Exception as e:
            e.add_note(f"raised by agent {name!r}")
            raise
        reply = self._answer(state)
        return reply if isinstance(reply, bytes) else await reply

    async def _tick_together(self, state: State) -> bytes:
        errors: list[Exception] = []
        (first, agent), *others = self._agents
        loop = asyncio.get_running_loop()
        tasks = [loop.create_task(self._run(name, other, state, errors)) for name, other in others]
        try:
            # Here, before the tasks: the others mostly wait for the first one.
            await self._run(first, agent, state, errors)
            for task in tasks:
                await task
        except asyncio.CancelledError:
            for task in tasks:
                task.cancel()
            if tasks:
                await asyncio.wait(tasks)  # no agent goes on with this tick while the next one runs
            raise
        state._crew = None  # an episode need not keep it
        if errors:
            for error in errors[1:]:
                if not (isinstance(error, WaitError) and error.__cause__ is errors[0]):
                    cause = ("another", type(error), str(error))
                    _limited.error(cause, "session %r: another agent failed too", state.session, exc_info=error)
            raise errors[0]
        reply = self._answer(state)
        return reply if isinstance(reply, bytes) else await reply

    async def _run(self, name: str, agent: Any, state: State, errors: list[Exception]) -> None:
        """One of several agents in one tick: its error is told to the agents that wait for it, and kept unless it only
        watches."""
        crew: Crew | None = getattr(state, "_crew", None)
        try:
            running = agent.on_tick(state)
            if hasattr(running, "__await__"):
                await _finish(name, running)
        except Exception as e:
            e.add_note(f"raised by agent {name!r}")  # the error keeps its type, which decides what the client is told
            if name not in self._watchers:
                errors.append(e)
                state._fail(name, e)
            elif (
                e.__cause__ is None or e.__cause__ not in errors
            ):  # else it waited for an agent whose error is told anyway
                self._say_once(name, e)
                assert crew is not None
                crew.failure = crew.failure or (name, e)
        if crew is not None:
            crew.at_work.discard(name)
            state._fail_if_nobody_works(crew)

    def _say_once(self, name: str, error: Exception) -> None:
        """Log the error of an agent that watches: the first one of a session, since the next ticks mostly bring the
        same."""
        if name not in self._said:
            self._said.add(name)
            logger.error(
                "session %r: agent %r, which only watches, failed; the game goes on, and no more of its errors are "
                "logged in this session",
                self._session, name, exc_info=error,
            )  # fmt: skip

    def _answer(self, state: State) -> bytes | Awaitable[bytes]:
        """The reply. The State joins the episode, and an episode that is full is handed over."""
        if "output" not in vars(state):
            names = ", ".join(name for name, _ in self._agents)
            raise TypeError(f"expected an agent to set state.output to bytes (serialize is null), none of {names} did")
        reply = self._codec.encode(state.output)
        if self._collects:
            self._states.append(state)
            if len(self._states) == self._episode_length:
                states, self._states = self._states, []
                previous = next(reversed(self._background), None)
                handling = self._handle(self._session, self._learners, states, False, previous, self._due(states))
                task = asyncio.get_running_loop().create_task(handling)
                self._background[task] = None
                task.add_done_callback(self._background.pop)
                if len(self._background) > MAX_BACKLOG:
                    return self._hold(reply)
        return reply

    async def _hold(self, reply: bytes) -> bytes:
        await asyncio.wait(self._background, return_when=asyncio.FIRST_COMPLETED)
        return reply

    # --- an episode ---------------------------------------------------------------------------------------------------

    def _due(self, states: list[State]) -> bool:
        """Count an episode; whether it is to be saved."""
        if not states:
            return False
        number = self._episodes
        self._episodes += 1
        return self._save_interval is not None and number % self._save_interval == 0

    async def _handle(
        self,
        session: str,
        learners: list[tuple[str, Any]],
        states: list[State],
        done: bool,
        previous: asyncio.Task[None] | None,
        save: bool,
    ) -> None:
        """Hand an episode to the agents, after the one before it, and save it if it is due."""
        try:
            if previous is not None:
                await asyncio.wait({previous})
            if len(learners) == 1:
                await _learn(*learners[0], states, done, session)
            elif learners:
                await asyncio.gather(*(_learn(name, agent, states, done, session) for name, agent in learners))
            if save:
                await self._save(states, session)
        except asyncio.CancelledError:  # an end that took too long: nothing of its session goes on
            if previous is not None:
                previous.cancel()
            raise

    async def _save(self, states: list[State], session: str) -> None:
        """Save an episode. Errors are logged: the game goes on."""
        assert self._directory is not None
        try:
            packed = []
            for state in states:  # here and not in the thread, where an agent could change the State at the same moment
                packed.append(pack_state(state))
                await asyncio.sleep(0)
            loop = asyncio.get_running_loop()
            await loop.run_in_executor(_writer, write_episode, self._directory, session, self.actor, packed, self._keep)
        except Exception as e:
            cause = (self._directory, type(e), getattr(e, "errno", None))
            _limited.error(cause, "session %r: an episode could not be saved", session, exc_info=True)


class After(asyncio.Future[T]):
    """What is made of another future, by `_ran`. Whoever cancels it cancels what it waits for."""

    def __init__(self, running: asyncio.Future[Any]):
        super().__init__(loop=running.get_loop())
        self._running = running
        running.add_done_callback(self._ran)

    def cancel(self, msg: Any = None) -> bool:
        self._running.cancel()
        return super().cancel(msg)

    def _ran(self, running: asyncio.Future[Any]) -> None:
        raise NotImplementedError


class _Reply(After[bytes]):
    """The reply to a tick whose only agent has returned a future. Its attributes are set by whoever makes it, which is
    quicker than an `__init__` above that of `After`."""

    actor: AgentActor
    agent: str
    state: State

    def _ran(self, running: asyncio.Future[Any]) -> None:
        if self.done():
            return
        try:
            if running.cancelled():
                raise _was_cancelled(self.agent)
            running.result()
            reply = self.actor._answer(self.state)
        except FAILURES as e:
            e.add_note(f"raised by agent {self.agent!r}")
            self.set_exception(e)
            del self  # the error's traceback holds this frame, and we hold the error
            return
        if isinstance(reply, bytes):
            self.set_result(reply)
        else:
            self._running = asyncio.ensure_future(reply)
            self._running.add_done_callback(self._held)

    def _held(self, reply: asyncio.Future[bytes]) -> None:
        if reply.cancelled():
            self.cancel()
        elif not self.done():
            self.set_result(reply.result())


async def _learn(name: str, agent: Any, states: list[State], done: bool, session: str) -> None:
    try:
        running = agent.on_episode(list(states), done)  # a list of its own: what one takes out the others still have
        if hasattr(running, "__await__"):
            await _finish(name, running)
    except Exception as e:
        _limited.error(
            (name, type(e), str(e)), "session %r: on_episode of agent %r failed", session, name, exc_info=True
        )


async def _finish(agent: str, running: Awaitable[Any]) -> None:
    """Let an agent's method run to its end."""
    running_agent.set(agent)
    try:
        await running
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise
        raise _was_cancelled(agent) from None


def _was_cancelled(agent: str) -> RuntimeError:
    """Nobody cancelled the agent: to the server it would look like a tick that ran out of time."""
    return RuntimeError(f"agent {agent!r} awaited something that was cancelled")


def _learns(agent: Any) -> bool:
    return getattr(type(agent), "on_episode", None) not in (None, Agent.on_episode)


def _check_count(key: str, value: Any) -> None:
    if type(value) is not int or value < 1:
        raise ConfigError(f"{key}: expected a whole number from 1, got {value!r}")
