"""What the two transports share: a connection's life, its limits, and back-pressure."""

from __future__ import annotations

import asyncio
import hmac
import logging
import resource
from time import perf_counter
from typing import Any

from bray.serving.config import ServiceConfig
from bray.serving.protocol import Refusal
from bray.serving.sessions import Sessions

logger = logging.getLogger("bray.serving")

HIGH_WATER = 256 << 10
"""Bytes of replies that a client has not read; above that its requests are not read either."""
LINGER_S = 1.0
"""How long a refused client may go on sending."""
MAX_OUTSTANDING = 128
"""Requests of one connection that are not answered; with more, reading waits."""


class Front:
    """The open connections of one worker."""

    def __init__(self, sessions: Sessions, config: ServiceConfig):
        self.sessions, self.config = sessions, config
        self.open: dict[Connection, None] = {}
        self.accepted = self.refused = self.bytes_in = self.bytes_out = 0
        self.unknown = 0  # requests refused before they could be told apart: malformed, too large, wrong token
        self._tokens = [t.encode() for t in config.tokens]
        self.closing = False
        # Clients must not take the last files: Actors, the other workers and the admin port need some.
        files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        self.max_open = config.max_connections if files < 0 else min(config.max_connections, files * 3 // 4)
        if self.max_open < config.max_connections:
            logger.info(
                "this process may open %d files: it takes %d connections, not %d; `ulimit -n` allows more",
                files,
                self.max_open,
                config.max_connections,
            )

    def allowed(self, token: bytes) -> bool:
        """Whether a token is one of ours, in a time that says nothing of how near it is."""
        good = False
        for known in self._tokens:
            good |= hmac.compare_digest(token, known)
        return good or not self._tokens

    def sweep(self) -> None:
        """Close connections that take too long to send, to read, or to come back."""
        now = perf_counter()
        for connection in list(self.open):
            connection.check(now)

    async def close(self) -> None:
        """Close every connection once its replies are written."""
        self.closing = True
        for connection in list(self.open):
            connection.shut()
        for _ in range(100):
            if not self.open:
                return
            await asyncio.sleep(0.02)
        for connection in list(self.open):
            if connection.transport is not None:
                connection.transport.abort()


BAD_TOKEN = Refusal(401, "bad_token", "this service needs a valid token")


class Connection(asyncio.Protocol):
    """One client. `outstanding` counts its requests that are not answered."""

    __slots__ = (
        "front",
        "idle_since",
        "lingers_since",
        "outstanding",
        "paused",
        "receiving_since",
        "sessions",
        "stuck_since",
        "transport",
    )

    def __init__(self, front: Front):
        self.front, self.sessions = front, front.sessions
        self.transport: Any = None
        self.outstanding = 0
        self.paused = False  # whether reading waits
        self.receiving_since: float | None = None  # a request has begun and is not complete
        self.stuck_since: float | None = None  # the client does not read its replies
        self.lingers_since: float | None = None  # refused: what still arrives is thrown away
        self.idle_since = perf_counter()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport
        if len(self.front.open) >= self.front.max_open or self.front.closing:
            self.front.refused += 1
            self.transport.abort()
            return
        self.front.accepted += 1
        self.front.open[self] = None
        self.transport.set_write_buffer_limits(high=HIGH_WATER)

    def connection_lost(self, exc: Exception | None) -> None:
        self.transport = None
        self.front.open.pop(self, None)

    def pause_writing(self) -> None:
        self.stuck_since = perf_counter()
        self.pause()

    def resume_writing(self) -> None:
        self.stuck_since = None
        self.resume()

    def pause(self) -> None:
        if not self.paused and self.transport is not None and not self.transport.is_closing():
            self.paused = True
            self.transport.pause_reading()

    def resume(self) -> None:
        if (
            self.paused
            and self.stuck_since is None
            and self.outstanding < MAX_OUTSTANDING
            and self.transport is not None
        ):
            self.paused = False
            if not self.transport.is_closing():
                self.transport.resume_reading()

    def answered(self) -> None:
        self.outstanding -= 1
        if self.paused:
            self.resume()
        if not self.outstanding:
            self.idle_since = perf_counter()

    def check(self, now: float) -> None:
        config = self.front.config
        if self.transport is None:
            return
        if self.lingers_since is not None:
            if now - self.lingers_since > LINGER_S:
                self.transport.abort()
        elif self.stuck_since is not None and now - self.stuck_since > config.request_timeout_s:
            self.transport.abort()
        elif self.receiving_since is not None and not self.paused:
            if now - self.receiving_since > config.request_timeout_s:
                self.too_slow()
        elif not self.outstanding and now - self.idle_since > config.keep_alive_s:
            if self.transport.is_closing():  # a client that has not read its last reply in all that time
                self.transport.abort()
            else:
                self.transport.close()

    def linger(self) -> None:
        """Say that this was the last reply, and read on for a little: closing on unread bytes would reset the connection, and the
        client would never see why."""
        self.lingers_since = perf_counter()
        if self.transport is not None and not self.transport.is_closing():
            self.resume()
            if self.transport.can_write_eof():
                self.transport.write_eof()

    def too_slow(self) -> None:
        raise NotImplementedError

    def shut(self) -> None:
        """Close when nothing is outstanding (the service ends)."""
        if self.transport is not None and not self.outstanding:
            self.transport.close()


SLOW = Refusal(408, "slow_request", "the request did not arrive in time")
