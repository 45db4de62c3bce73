"""The State: what the agents of one actor share during one tick."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from contextvars import ContextVar
from typing import Any

from bray.errors import WaitError, did_you_mean

logger = logging.getLogger("bray.serving")

WAIT_TIMEOUT = 10.0
"""Seconds that `state.wait` waits unless told otherwise."""

running_agent: ContextVar[str] = ContextVar("running_agent")
"""The name of the agent whose code runs, for error messages."""


def parse_session(session: str) -> tuple[str, str]:
    """(game, agent) of a session. Clients that play several agents of one game say `<game>-agent-<agent>`. Any other
    session is a game with one nameless agent: the whole name is the game, and the agent is ''."""
    game, _, agent = session.partition("-agent-")
    return game, agent


class Crew:
    """Who works on a tick, where some agents only watch: the failure of such a one is told only to those who wait for
    its fields."""

    __slots__ = ("at_work", "failure")

    def __init__(self, names: Iterable[str], failure: tuple[str, Exception] | None = None):
        self.at_work = set(names)
        """Agents that are neither done nor waiting for a field."""
        self.failure = failure
        """The first agent that watches and has failed, and its error."""


class State:
    """One tick of one session. It starts with these fields, and agents add what they like as attributes. A field may be
    set again; the last value counts.

        session, game, agent    the session's name, and the two parts of a name like `<game>-agent-<agent>`
        actor                   a small number: the slot that plays this session
        tick                    0 for the first tick of the session
        input                   what the game sent: parsed JSON, a message, or bytes
        output                  the reply: a dict or a message to fill; bytes are there once an agent has set them
    """

    # `vars(state)` is the fields and nothing else. `_failure` and `_waiters` are filled only while an agent waits,
    # `_crew` only where there are agents that watch.
    __slots__ = ("__dict__", "__weakref__", "_crew", "_data", "_decode", "_failure", "_waiters")
    input: Any
    output: Any
    _waiters: dict[str, list[asyncio.Future[None]]]
    _failure: tuple[str, Exception] | None
    _crew: Crew | None

    def __init__(
        self,
        session: str = "",
        actor: int = 0,
        tick: int = 0,
        input: Any = None,
        game: str | None = None,
        agent: str | None = None,
        decode: Callable[[bytes], Any] | None = None,
    ):
        """`decode`: what turns `input` into what it is, when somebody first reads it."""
        if game is None or agent is None:
            game, agent = parse_session(session)
        self.session = session
        self.game = game
        self.agent = agent
        self.actor = actor
        self.tick = tick
        if decode is None:
            self.input = input
        else:
            self._data, self._decode = input, decode

    def unread(self) -> bytes | None:
        """What the game sent, as long as nobody has read `input`: for an agent that can do without the ordinary
        decoding."""
        return None if "input" in self.__dict__ else self._data

    async def wait(self, field: str, timeout: float | None = WAIT_TIMEOUT) -> Any:
        """The value of a field, as soon as an agent has set it. WaitError after `timeout` seconds (None: no limit),
        and at once when another agent failed, since its fields will not come."""
        fields = self.__dict__
        if field in fields or field == "input":
            return getattr(self, field)
        if type(self) is State:
            self._watch()
        failure = self._failure
        if failure is None:
            loop = asyncio.get_running_loop()
            woken = loop.create_future()
            self._waiters.setdefault(field, []).append(woken)
            timer = None if timeout is None else loop.call_later(timeout, _wake, woken)
            crew = getattr(self, "_crew", None)
            try:
                if crew is not None:
                    crew.at_work.discard(running_agent.get(""))
                    self._fail_if_nobody_works(crew)
                await woken
            except asyncio.CancelledError:
                logger.warning("%s when it was cancelled. %s", self._wanted(field), self._there(field))
                raise
            finally:
                if timer is not None:
                    timer.cancel()
                if crew is not None:
                    crew.at_work.add(running_agent.get(""))
                failure = self._failure
                self._forget(field, woken)
        if field in fields:
            return fields[field]
        if failure is not None:
            raise WaitError(f"{self._wanted(field)}, but agent {failure[0]!r} failed: {failure[1]!r}") from failure[1]
        raise WaitError(f"{self._wanted(field)} for {timeout:g} s, but no agent set it. {self._there(field)}")

    def _fail(self, agent: str, error: Exception) -> None:
        """An agent failed: whoever waits for a field, now or later, fails with it. The first failure counts."""
        if type(self) is State:
            self._watch()
        if self._failure is None:
            self._failure = (agent, error)
        for waiting in self._waiters.values():
            for woken in waiting:
                _wake(woken)

    def _fail_if_nobody_works(self, crew: Crew) -> None:
        """An agent that watches has failed, and all others are done or wait: what they wait for would have come from
        it."""
        if crew.failure is not None and not crew.at_work and type(self) is not State:
            self._fail(*crew.failure)

    def _watch(self) -> None:
        # A State is made at every tick, and with a __setattr__ of our own each field would take several times as long
        # to set. So only a State that an agent waits for has one.
        self._waiters, self._failure = {}, None
        self.__class__ = _Watched

    def _forget(self, field: str, woken: asyncio.Future[None]) -> None:
        """Nobody waits with this future any more. The last one to go leaves a plain State behind."""
        waiting = self._waiters[field]
        waiting.remove(woken)
        if not waiting:
            del self._waiters[field]
        if not self._waiters and self._failure is None:
            self.__class__ = State
            del self._waiters, self._failure

    def _wanted(self, field: str) -> str:
        name = running_agent.get("")
        agent = f"agent {name!r}" if name else "an agent"
        return f"{agent} waited for state.{field} in tick {self.tick} of session {self.session!r}"

    def _there(self, field: str) -> str:
        hint = did_you_mean(field, self.__dict__)
        return f"Fields that are there: {', '.join(self.__dict__)}." + (hint if "Did you mean" in hint else "")

    def __getattr__(self, name: str) -> Any:
        if name == "input":
            self.input = self._decode(self._data)
            return self.input
        if name.startswith("_"):  # whoever asks for special methods wants no advice
            raise AttributeError(name)
        there = ", ".join(self.__dict__)
        raise AttributeError(
            f"state has no field {name!r}, only {there}. If another agent sets it: await state.wait({name!r})"
        )

    def __repr__(self) -> str:
        return f"<State {self.__dict__}>"


class _Watched(State):
    """A State with agents that wait for its fields."""

    __slots__ = ()

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        for woken in self._waiters.get(name, ()):
            _wake(woken)


def _wake(woken: asyncio.Future[None]) -> None:
    if not woken.done():
        woken.set_result(None)
