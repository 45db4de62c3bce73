"""What both clients share: a session's calls, how it gets its name, and when a request may be sent again.

The calls are written once, as coroutines over a transport. The asyncio client lets its caller await them; the blocking
client's transport never suspends, so that it can run them to their end at once.
"""

from __future__ import annotations

import random
import re
import select
import socket
import time
import uuid
from collections.abc import Callable, Coroutine
from contextlib import AbstractAsyncContextManager, suppress
from typing import Any, Protocol

from .errors import ClientError, ConnectFailed, ConnectionLost
from .wire import AUTO, END, START, TICK, Reply, decode, encode, http_request, reply_error, tcp_request

_CONTROL = re.compile(rb"[\x00-\x1f\x7f]")
Ticket = tuple[bytes, int]
"""What a reply is told by: the session and the time that TCP echoes."""

Where = Callable[[], str]
"""Which session at which service, for errors."""


class Transport(Protocol):
    """A connection that is opened when it is needed, and again when it is gone."""

    def next_time(self) -> int: ...
    async def ask(self, message: bytes, ticket: Ticket, deadline: float, where: Where) -> Reply:
        """One request and its reply; ClientError where there is none."""
        ...

    async def sleep(self, seconds: float) -> None: ...
    def close(self) -> None: ...


class GameSession:
    """One session of a game: `start`, `tick`, `end`, or `step` without a session."""

    _transport: Transport
    _turn: AbstractAsyncContextManager[Any]
    """Held while a request is under way: requests of one session go one after the other."""

    def __init__(
        self,
        host: str = "127.0.0.1",
        port: int = 8000,
        timeout: float = 60,
        *,
        session: str | None = None,
        token: str | bytes | None = None,
        key: str | bytes | None = None,
        tcp: bool = False,
        tls: Any = False,
        retries: int = 5,
        **old: Any,
    ):
        for name in old:
            raise TypeError(f"{type(self).__name__}: there is no {name}=" + _OLD.get(name, ""))
        if not timeout > 0:
            raise ValueError(f"timeout: expected seconds > 0, got {timeout!r}")
        if retries < 0:
            raise ValueError(f"retries: expected 0 or more, got {retries!r}")
        self.host, self.port, self.timeout, self.retries, self.tcp = host, int(port), float(timeout), retries, tcp
        self.session = self._fixed = session or ""
        self._token, self._key = _field("token", token), _field("key", key)
        self._session = _field("session", session)
        self._host = (f"[{host}]:{port}" if ":" in host else f"{host}:{port}").encode()
        self._started = False
        self._secret = b""
        self._tls = tls_context(tls)
        self._connect()

    def _connect(self) -> None:
        """Set `_transport` (nothing is opened yet) and `_turn`."""
        raise NotImplementedError

    def start(self, game: str = "", agent: str = "", data: Any = b"") -> Any:
        """Start a session and return the Actor's answer. Its name is `game`, or `game-agent-name` with an agent."""
        return self._run(self._start(game, agent, data))

    def tick(self, data: Any, output: Any = None, *, idempotent: bool = False) -> Any:
        """One decision: send the state of the game, get the Actor's answer. `output`: a protobuf message that is filled
        with it."""
        return self._run(self._in_session(TICK, data, idempotent, output))

    _tick = tick

    def end(self, data: Any = b"") -> Any:
        """End the session and return the Actor's last answer."""
        return self._run(self._in_session(END, data))

    stop = end

    def step(self, data: Any, output: Any = None, *, idempotent: bool = False) -> Any:
        """A decision without a session: a pooled Actor starts, ticks and ends in one."""
        return self._run(self._request(AUTO, data, idempotent, output=output))

    def close(self) -> Any:
        """Close the connection, unless it is shared. The session lives on until it is ended or expires."""
        return self._run(self._close())

    def _run(self, call: Coroutine[Any, Any, Any]) -> Any:
        """What the user gets of a call: its result, or something to await."""
        raise NotImplementedError

    # --- the calls

    async def _start(self, game: str, agent: str, data: Any) -> Any:
        name = self._fixed
        if game or agent or not name:
            game = game or str(uuid.uuid4())
            name = f"{game}-agent-{agent}" if agent else game
        self._session, self.session, self._secret = _field("session", name), name, b""
        answer = await self._request(START, data)
        self._started = True
        return answer

    async def _in_session(self, kind: bytes, data: Any, idempotent: bool = False, output: Any = None) -> Any:
        if not self._session:
            raise ClientError(0, "not_started", "expected a session, there is none: call start() first")
        self._started = self._started and kind is not END
        return await self._request(kind, data, idempotent, output=output)

    async def _leave(self, error: BaseException | None) -> None:
        """The end of a `with` block."""
        try:
            if self._started and error is None:
                await self._in_session(END, b"")
            elif self._started:
                # Free the slot if that is quickly done; the error in flight is the one to show.
                with suppress(ClientError):
                    await self._request(END, b"", timeout=min(self.timeout, 1.0))
        finally:
            await self._close()

    async def _close(self) -> None:
        self._transport.close()

    async def _request(
        self, kind: bytes, data: Any, idempotent: bool = False, timeout: float | None = None, output: Any = None
    ) -> Any:
        body, as_json = encode(data)
        attempts = _Attempts(kind, timeout or self.timeout, self.retries, idempotent)
        async with self._turn:
            while True:
                try:
                    reply = await self._exchange(kind, body, attempts.deadline)
                    return decode(reply, as_json) if output is None else _fill(output, reply)
                except ClientError as error:
                    pause = attempts.pause(error)
                await self._transport.sleep(pause)

    async def _exchange(self, kind: bytes, body: bytes, deadline: float) -> bytes:
        """One request and its reply, over the open connection or a new one."""
        session = b"" if kind is AUTO else self._session
        ticket = (b"", 0)
        if self.tcp:
            ticket = (session, self._transport.next_time())
            message = tcp_request(session, kind, self._key, self._token, body, ticket[1])
        else:
            secret = b"" if kind is AUTO else self._secret
            message = http_request(self._host, session, kind, self._key, self._token, body, secret)
        reply = await self._transport.ask(message, ticket, deadline, self._where)
        if reply.failed:
            raise reply_error(reply, self._where())
        if kind is START:
            self._secret = reply.secret
        return reply.body

    def _where(self) -> str:
        return f"session {self.session!r} at {self.host}:{self.port}"


_OLD = {
    "actor": ", which played without a service: call the methods of your Actor, or serve it with bray.RemoteActor",
    "secret": ": `token=` is what a service checks",
}
"""Arguments of the first Bray's client."""


def _fill(output: Any, reply: bytes) -> Any:
    """A protobuf message, with what came."""
    output.ParseFromString(reply)
    return output


def _field(name: str, value: str | bytes | None) -> bytes:
    data = value.encode() if isinstance(value, str) else value or b""
    if _CONTROL.search(data) or data != data.strip():
        raise ValueError(f"{name}: expected text without control characters or blanks around it, got {value!r}")
    return data


class _Attempts:
    """When one request may be sent again, within its timeout."""

    def __init__(self, kind: bytes, timeout: float, retries: int, idempotent: bool):
        self.deadline = time.monotonic() + timeout
        self._kind, self._left, self._idempotent = kind, retries, idempotent
        self._pause = 0.05

    def pause(self, error: ClientError) -> float:
        """Seconds to wait before the next attempt. Where there may be none, raises the error."""
        self._left -= 1
        # The upper half is random, so that a thousand games do not come back in the same millisecond.
        wait = self._pause * random.uniform(0.5, 1.0) + (error.retry_after or 0.0)
        self._pause = min(2 * self._pause, 2.0)
        if self._left < 0 or not self._harmless(error) or time.monotonic() + wait >= self.deadline:
            raise error
        return wait

    def _harmless(self, error: ClientError) -> bool:
        """Whether sending again cannot execute the request twice (or may)."""
        if isinstance(error, ConnectFailed):
            return error.code != "bad_certificate"
        if error.status == 503:
            return True
        if error.status == 429:
            return self._kind in (START, AUTO)
        return isinstance(error, ConnectionLost) and self._idempotent


# --- for transports


def tls_context(tls: Any) -> Any:
    """What connections are wrapped in, or None: `tls` is False, True (certificates that the system trusts), the path of
    a certificate to trust instead, or an ssl.SSLContext."""
    if not tls:
        return None
    import ssl

    if isinstance(tls, ssl.SSLContext):
        return tls
    return ssl.create_default_context(cafile=None if tls is True else str(tls))


def remaining(deadline: float) -> float:
    """Seconds left, at least a millisecond: 0 would mean "do not wait at all" to a socket."""
    return max(deadline - time.monotonic(), 0.001)


def readable(sock: socket.socket) -> bool:
    """Whether bytes, or the end of the connection, wait to be read: an idle connection with either is of no use."""
    if hasattr(select, "poll"):
        poll = select.poll()
        poll.register(sock, select.POLLIN)
        return bool(poll.poll(0))
    return bool(select.select([sock], [], [], 0)[0])


def ended(sock: socket.socket) -> bool:
    """Whether an idle connection has ended, or has bytes that nobody asked for."""
    if not hasattr(sock, "pending"):
        return readable(sock)
    import ssl

    if not sock.pending() and not readable(sock):
        return False
    sock.settimeout(0)  # TLS 1.3 has messages of its own, which only reading tells from the end
    try:
        sock.recv(1)
    except ssl.SSLWantReadError:
        return False
    except OSError:
        pass
    return True


def lost(sent: bool, error: BaseException | None, where: str) -> ClientError:
    """The error for a connection that failed, by how far the request got."""
    timed_out = isinstance(error, TimeoutError)
    reason = "no reply within the timeout" if timed_out else str(error or "the server closed the connection")
    if sent:
        code = "timeout" if timed_out else "connection_lost"
        return ConnectionLost(0, code, f"{reason} ({where}). The request was sent; it may have been executed")
    if type(error).__name__ == "SSLCertVerificationError":
        why = f"the service's certificate is not trusted: {reason} ({where}). tls= may name a certificate to trust"
        return ConnectFailed(0, "bad_certificate", why)
    code = "timeout" if timed_out else "connect_failed"
    return ConnectFailed(0, code, f"{reason} ({where}). Nothing was executed. Is the service running there?")
