"""The session table of one worker: which Actor answers whom, one request of a session at a time, in order, and none
forever.

A transport makes a `Request` and calls `Sessions.handle`; sooner or later `request.reply(status, body)` is called,
exactly once. The table knows nothing of sockets.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
import traceback
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Awaitable, Callable
from functools import partial
from itertools import takewhile
from time import perf_counter
from types import CoroutineType
from typing import Any

from bray.errors import Overloaded
from bray.limited_log import LimitedLog
from bray.serving.access import BAD_SECRET, Access
from bray.serving.actor import FAILURES, Actor
from bray.serving.config import ServiceConfig
from bray.serving.protocol import AUTO, END, KIND_NAMES, START, TICK, Refusal, bad_name, no_session, show
from bray.serving.request import Gateway, Request, Session, end_of

logger = logging.getLogger("bray.serving")

LATENCY_BOUNDS = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
"""Upper bounds of the latency histogram, in seconds; one more bucket holds the rest."""
_LOGGED_PER_MINUTE = 20  # tracebacks; an Actor that fails at every tick must not fill the disk
_DEFAULT_REPLIES = {START: b"Game Started", END: b"Game Stopped"}
"""Clients of older services wait for ever for an empty reply over TCP."""


class Sessions:
    """The table. `gateway` is set by whoever runs several workers."""

    def __init__(self, make_actor: Callable[[], Any], config: ServiceConfig):
        self.make_actor, self.config = make_actor, config
        self.access = Access(config)
        self.loop = asyncio.get_running_loop()
        self.gateway = Gateway()
        self.sessions: dict[bytes, Session] = {}
        self.running: dict[Request, Session] = {}  # every request that was accepted and not answered, oldest first
        self.pool: list[Any] = []
        self.lent = 0  # slots taken by stateless requests
        self.draining = False
        self.counts: list[Counter[int]] = [Counter() for _ in KIND_NAMES]  # by kind, then status
        self.latency = [0] * (len(LATENCY_BOUNDS) + 1)  # of answered ticks
        self.latency_sum = 0.0
        self.started = self.expired = self.actors_made = 0
        self._calling: Session | Request | None = None  # whose Actor is being called, or for whom one is being made
        self._logged = 0
        self._limited = LimitedLog(logger)
        self._warned: set[tuple[type, str]] = set()  # classes and methods that return text
        self._stuck: dict[Session, None] = {}
        self._losing: set[asyncio.Task[None]] = set()
        self._limit = config.max_pending  # 0 once nothing new is taken
        self._timers: dict[Callable[[], None], asyncio.TimerHandle] = {}
        self._every(max(0.01, min(0.25, config.tick_timeout_s / 10)), self._end_late_ticks)
        self._every(max(0.05, min(5.0, config.idle_timeout_s / 10)), self._end_idle_sessions)
        self._every(60.0, self._forget_logged)

    # --- a request ----------------------------------------------------------------------------------------------------

    def handle(self, request: Request) -> None:
        """Answer a request now or later, here or elsewhere."""
        if len(self.running) >= self._limit:
            self.refuse(request, self._over_limit())
            return
        kind = request.kind
        session = self.sessions.get(request.session)
        if kind == AUTO:
            self._begin(request)
        elif session is None:
            if kind == START:
                self._begin(request)
            elif not self.gateway.forward(request):
                self.refuse(request, no_session(request.session))
        elif kind == START and not session.ending:
            self.exists(request)
        elif session.secret is not None and kind != START and not self.access.knows(session.secret, request):
            self.refuse(request, BAD_SECRET)
        elif session.request is None and not session.waiting:
            self.running[request] = session
            self._run(session, request)
        else:
            self._wait_for_turn(session, request)

    def _wait_for_turn(self, session: Session, request: Request) -> None:
        if session.waiting is None:
            session.waiting = deque()
        n = len(session.waiting)
        if n >= self.config.max_pending_per_session:
            busy = f"{n} requests of session {show(session.name)} wait for their turn"
            self.refuse(request, Refusal(503, "overloaded", busy))
        else:
            self.running[request] = session
            session.waiting.append(request)

    def refuse(self, request: Request, refusal: Refusal) -> None:
        self.counts[request.kind][refusal.status] += 1
        request.reply(refusal.status, refusal.body)

    def _over_limit(self) -> Refusal:
        if not self._limit:
            return Refusal(503, "draining", "this service is shutting down")
        return Refusal(503, "overloaded", f"{len(self.running)} requests are being answered: try again later")

    def exists(self, request: Request) -> None:
        why = f"session {show(request.session)} is running: end it first"
        self.refuse(request, Refusal(409, "session_exists", why))

    def _begin(self, request: Request) -> None:
        """A session, or a stateless request."""
        refusal = bad_name(request.session) if request.kind == START else None
        if self.draining:
            refusal = Refusal(503, "draining", "this service is shutting down and takes no new sessions")
        if refusal is not None:
            self.refuse(request, refusal)
        elif request.kind == AUTO:
            if self.free > 0 or not self.gateway.spill(request):
                self.auto_here(request)
        elif self.gateway.place(request):
            self.begin_here(request)

    def begin_here(self, request: Request) -> None:
        """Start a session in this worker; its place in the table of all workers is taken already."""
        session = self._new_session(request)
        if session is not None:
            if self.access.secrets:
                session.secret = request.secret
            self.sessions[request.session] = session
            self.started += 1
            self.running[request] = session
            self._run(session, request)
        else:
            self.gateway.release(request.session)

    @property
    def free(self) -> int:
        return self.config.actors_per_worker - len(self.sessions) - self.lent

    def _new_session(self, request: Request) -> Session | None:
        address = getattr(request, "address", "")
        if self.free > 0:
            refusal = self.access.slot_refusal(address)
        else:
            slots = self.config.actors_per_worker * self.config.workers
            refusal = Refusal(429, "no_free_slot", f"all {slots} slots of this service are taken")
        if refusal is not None:
            self.refuse(request, refusal)
            return None
        self._calling = request
        try:
            if not self.pool:
                self.pool.append(self.make_actor())
                self.actors_made += 1
            session = Session(request.session, self.pool.pop())
            session.address = address
            return session
        except FAILURES as e:
            self.access.free_slot(address)
            self._log_error("making an Actor failed", request, e)
            why = "the Actor could not be made; the service's log has the reason"
            self.refuse(request, Refusal(500, "actor_error", why))
            return None
        finally:
            self._calling = None

    def _run(self, session: Session, request: Request) -> None:
        session.request, self._calling = request, session
        kind = request.kind
        try:
            if request.key or session.keyed:
                session.actor.key, session.keyed = request.key, True
            if kind == TICK:
                reply = session.tick(request.body)
            elif kind == START:
                reply = session.start(request.session.decode(), request.body)
            else:
                reply = session.finish(request.body)
        except (*FAILURES, asyncio.CancelledError) as e:
            self._failed(session, request, e)
            return
        finally:
            self._calling = None
        if type(reply) is bytes:
            self._finish(session, request, 200, reply)
        elif asyncio.isfuture(reply):  # no task for it
            session.task = reply
            reply.add_done_callback(partial(self._replied, session, request))
        elif type(reply) is CoroutineType or inspect.isawaitable(reply):
            session.task = self.loop.create_task(self._wait(session, request, reply))
        else:
            self._odd_reply(session, request, reply)

    async def _wait(self, session: Session, request: Request, reply: Awaitable[Any]) -> None:
        try:
            body = await reply
        except (*FAILURES, asyncio.CancelledError) as e:
            self._raised(session, request, e)
        else:
            self._returned(session, request, body)

    def _replied(self, session: Session, request: Request, reply: asyncio.Future[Any]) -> None:
        error = asyncio.CancelledError() if reply.cancelled() else reply.exception()
        if error is None:
            self._returned(session, request, reply.result())
        else:
            self._raised(session, request, error)

    def _returned(self, session: Session, request: Request, body: Any) -> None:
        if type(body) is bytes:
            self._finish(session, request, 200, body)
        else:
            self._odd_reply(session, request, body)

    def _raised(self, session: Session, request: Request, error: BaseException) -> None:
        if isinstance(error, asyncio.CancelledError) and request not in self.running:
            self._finish(session, request, 504, b"")  # whoever cancelled it has answered
        else:  # else what it waited for was cancelled
            self._failed(session, request, error)

    def _odd_reply(self, session: Session, request: Request, reply: Any) -> None:
        """A reply that is not bytes. A start and an end need not return anything."""
        if reply is None and request.kind in _DEFAULT_REPLIES:
            self._finish(session, request, 200, _DEFAULT_REPLIES[request.kind])
            return
        try:
            body = session.as_bytes(self._warned, KIND_NAMES[request.kind], reply)
        except TypeError as e:
            self._failed(session, request, e)
        else:
            self._finish(session, request, 200, body)

    def _failed(self, session: Session, request: Request, error: BaseException) -> None:
        refusal = self._refusal(session, request, error)
        self._finish(session, request, refusal.status, refusal.body)

    def _refusal(self, session: Session, request: Request, error: BaseException) -> Refusal:
        """The client learns that it failed; the traceback is for the log."""
        if isinstance(error, Refusal):  # without its traceback, whose frames hold the body
            return Refusal(error.status, error.code, error.message)
        if isinstance(error, Overloaded):
            return Refusal(503, "overloaded", str(error))
        self._log_error(f"{type(session.actor).__name__}.{KIND_NAMES[request.kind]} failed", request, error)
        return Refusal(500, "actor_error", "the Actor raised an error; the service's log has it")

    def _finish(self, session: Session, request: Request, status: int, body: bytes) -> None:
        """Answer, then let the session's next request go on."""
        kind = request.kind
        now = perf_counter()
        if self.running.pop(request, None) is not None:  # else its deadline passed and it has been answered
            request.reply(status, body)
            self.counts[kind][status] += 1
            if kind == TICK:
                took = now - request.arrived
                self.latency[bisect_left(LATENCY_BOUNDS, took)] += 1
                self.latency_sum += took
        session.request = session.task = None
        session.last = now
        if session.cancelled_at is not None:
            session.cancelled_at = None
            self._stuck.pop(session, None)
        if kind == END or (kind == START and status != 200):
            self._remove(session, reuse=status == 200)
        elif session.waiting:
            self.loop.call_soon(self._next, session)

    def _next(self, session: Session) -> None:
        if session.request is None and session.waiting and self.sessions.get(session.name) is session:
            request = session.waiting.popleft()
            session.waiting = session.waiting or None
            self._run(session, request)

    def _remove(self, session: Session, reuse: bool) -> None:
        """A session is over. What still waits for it is looked at anew: a start begins the next one, the rest gets
        404."""
        if self.sessions.get(session.name) is not session:
            return
        del self.sessions[session.name]
        self.access.free_slot(session.address)
        self.gateway.release(session.name)
        if reuse:
            self.pool.append(session.actor)
        # Now and not a little later: what arrives in between must not come before them.
        while session.waiting:
            request = session.waiting.popleft()
            if self.running.pop(request, None) is not None:
                self.handle(request)

    # --- stateless requests -------------------------------------------------------------------------------------------

    def auto_here(self, request: Request) -> None:
        session = self._new_session(request)
        if session is not None:
            self._lend(+1)
            self.running[request] = session
            session.request = request
            session.task = self.loop.create_task(self._auto(session, request))

    async def _auto(self, session: Session, request: Request) -> None:
        """start, tick and end in one; the Actor goes back to the pool. One that has only a tick is asked for no more,
        and a `stop` is not an `end` here: services that knew it by that name never called it for such requests."""
        status, body, reuse = 504, b"", False
        try:
            session.actor.key = request.key
            kind = type(session.actor)
            if getattr(kind, "start", None) is not Actor.start:
                await _value(session.start(request.session.decode("utf-8", "replace"), b""))
            answer = await _value(session.tick(request.body))
            if end_of(kind) == "end" and getattr(kind, "end", None) is not Actor.end:
                await _value(session.finish(b""))
            status, body, reuse = 200, session.as_bytes(self._warned, "tick", answer), True
        except (*FAILURES, asyncio.CancelledError) as e:
            if request in self.running:  # else its deadline passed, and it has been answered
                refusal = self._refusal(session, request, e)
                status, body = refusal.status, refusal.body
        if session.request is not None:  # else it was given up
            self._lend(-1)
            self.access.free_slot(session.address)
        if reuse:
            self.pool.append(session.actor)
        if self.running.pop(request, None) is not None:
            request.reply(status, body)
            self.counts[AUTO][status] += 1
        self._stuck.pop(session, None)

    def _lend(self, actors: int) -> None:
        self.lent += actors
        self.gateway.lent(self.lent)

    # --- time ---------------------------------------------------------------------------------------------------------

    def _every(self, seconds: float, what: Callable[[], None]) -> None:
        def again() -> None:
            self._timers[what] = self.loop.call_later(seconds, again)
            what()

        self._timers[what] = self.loop.call_later(seconds, again)

    def _end_late_ticks(self) -> None:
        now = perf_counter()
        until = now - self.config.tick_timeout_s
        for request, session in list(takewhile(lambda running: running[0].arrived <= until, self.running.items())):
            self._end_late(request, session, now)
        for session in [s for s in self._stuck if now - (s.cancelled_at or now) > self.config.tick_timeout_s]:
            kind = type(session.actor).__name__
            why = "session %s: %s ignored its cancellation; the session is given up"
            self._limited.error(("ignored", kind), why, show(session.name), kind)
            del self._stuck[session]
            if self.sessions.get(session.name) is session:
                self._remove(session, reuse=False)
            else:  # a stateless request
                session.request = None
                self._lend(-1)
                self.access.free_slot(session.address)

    def _end_late(self, request: Request, session: Session, now: float) -> None:
        if self.running.pop(request, None) is None:
            return
        status, body = self._late_reply(request, session)
        self.counts[request.kind][status] += 1
        request.reply(status, body)
        if session.request is not request:
            if session.waiting is not None:
                with contextlib.suppress(ValueError):
                    session.waiting.remove(request)
        elif session.task is not None:
            session.cancelled_at = now
            self._stuck[session] = None
            session.task.cancel()

    def _late_reply(self, request: Request, session: Session) -> tuple[int, bytes]:
        fallback = getattr(session.actor, "fallback", None)
        if fallback is not None and request.kind in (TICK, AUTO):
            self._calling = session
            try:
                return 200, session.as_bytes(self._warned, "fallback", fallback(request.body))
            except FAILURES as e:
                self._log_error(f"{type(session.actor).__name__}.fallback failed", request, e)
            finally:
                self._calling = None
        limit = self.config.tick_timeout_s
        then = "the session goes on" if request.kind == TICK else "the session is over"
        return 504, Refusal(504, "tick_timeout", f"no answer within {limit:g} s; it was cancelled, {then}").body

    def _end_idle_sessions(self) -> None:
        before = perf_counter() - self.config.idle_timeout_s
        for session in [s for s in self.sessions.values() if s.request is None and not s.waiting and s.last < before]:
            self.expired += 1
            self.lose(session)

    def disconnected(self, name: bytes) -> None:
        """A connection that carried requests of a session has closed: end the session, unless it goes on over another
        one in time."""
        session, wait = self.sessions.get(name), self.config.disconnect_timeout_s
        if session is None:
            self.gateway.disconnected(name)
        elif session.request is not None:  # it counts from its last answer
            self.loop.call_later(0.1, self.disconnected, name)
        elif wait is not None:
            self.loop.call_later(wait, self._end_if_silent_since, session, session.last)

    def _end_if_silent_since(self, session: Session, last: float) -> None:
        if self.sessions.get(session.name) is session and session.request is None and session.last == last:
            self.expired += 1
            self.lose(session)

    def lose(self, session: Session) -> None:
        """End a session that nobody will end."""
        if hasattr(session.actor, "lost"):
            task = self.loop.create_task(self._tell(session))
            self._losing.add(task)
            task.add_done_callback(self._losing.discard)
        self._remove(session, reuse=False)

    async def _tell(self, session: Session) -> None:
        try:
            await _value(session.actor.lost())
        except FAILURES as e:
            kind = type(session.actor).__name__
            what = "session %s: %s.lost failed"
            self._limited.error(("lost", kind, type(e)), what, show(session.name), kind, exc_info=True)

    # --- the end ------------------------------------------------------------------------------------------------------

    async def drain(self, timeout: float) -> None:
        """Refuse new sessions until every session has ended or the time is over; then refuse everything, and return
        when what was accepted is answered."""
        self.draining = True
        # sessions of other workers too: their clients' connections may end here
        await self._wait_while(lambda: bool(self.sessions) or self.gateway.running() > 0, timeout)
        self._limit = 0
        await self._wait_while(lambda: bool(self.running) or not self.gateway.idle(), self.config.tick_timeout_s)

    async def _wait_while(self, busy: Callable[[], bool], timeout: float) -> None:
        until = self.loop.time() + timeout
        while busy() and self.loop.time() < until:
            await asyncio.sleep(0.02)

    async def close(self) -> None:
        self.draining, self._limit = True, 0
        for timer in self._timers.values():
            timer.cancel()
        for session in list(self.sessions.values()):
            self.lose(session)
        tasks = [s.task for s in self.running.values() if s.task is not None]
        for request in list(self.running):
            self.running.pop(request)
            # not 503, which says that nothing was done: this one may have been, in part
            self.refuse(request, Refusal(504, "tick_timeout", "this service was shut down before the answer was there"))
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=1.0)
        if self._losing:  # Actors that still save what their sessions did
            await asyncio.wait(self._losing, timeout=self.config.tick_timeout_s)

    def whose_code_runs(self) -> str | None:
        """The Actor (and session) that the event loop is busy with, None where there is none: asked from another
        thread."""
        task = asyncio.current_task(self.loop)
        running = (s for s in list(self.running.values()) if task is not None and s.task is task)
        caller = next(running, self._calling)
        if isinstance(caller, Session):
            return f"{type(caller.actor).__name__} (session {show(caller.name)})"
        return None if caller is None else f"the making of an Actor (session {show(caller.session)})"

    # --- the log ------------------------------------------------------------------------------------------------------

    def _log_error(self, what: str, request: Request, error: BaseException | None = None) -> None:
        self._logged += 1
        if self._logged <= _LOGGED_PER_MINUTE:
            text = "".join(traceback.format_exception(error)) if error is not None else traceback.format_exc()
            logger.error("session %s: %s\n%s", show(request.session), what, text.rstrip())

    def _forget_logged(self) -> None:
        if self._logged > _LOGGED_PER_MINUTE:
            logger.error("%d more errors of Actors in the last minute", self._logged - _LOGGED_PER_MINUTE)
        self._logged = 0


async def _value(x: Any) -> Any:
    return await x if inspect.isawaitable(x) else x
