"""A client's connection: how much is read of it and when, its life and its limits, whatever it speaks (`http.py`,
`tcp.py`)."""

from __future__ import annotations

import asyncio
import logging
import resource
from time import perf_counter
from typing import Any

from bray.serving.config import ServiceConfig
from bray.serving.protocol import AUTO, END, Refusal
from bray.serving.request import Request
from bray.serving.sessions import Sessions

logger = logging.getLogger("bray.serving")

HIGH_WATER = 256 << 10
"""Bytes of replies that a client has not read; above that its requests are not read either."""
_MOST_CARRIED = 4096  # sessions of one connection that are remembered
MAX_OUTSTANDING = 128
"""Requests of one connection that are not answered; with more, reading waits."""
TURN_REQUESTS, TURN_S = 32, 0.001
"""What one connection may take of a turn of the loop, in requests and in seconds; what it has sent beyond that waits
for the next."""
SMALL = 512
"""Bytes that hold no more requests than one turn may: the shortest has 18."""
_FULL_READ = 256 << 10  # bytes of the largest single read; uvloop reads on at once after one
LINGER_S = 1.0
"""How long a refused client may go on sending."""
SLOW = Refusal(408, "slow_request", "the request did not arrive in time")


class Front:
    """The open connections of one worker."""

    def __init__(self, sessions: Sessions, config: ServiceConfig):
        self.sessions, self.config = sessions, config
        self.open: dict[Connection, None] = {}
        self.accepted = self.refused = self.bytes_in = self.bytes_out = 0
        self.unknown = 0  # requests refused before they could be told apart: malformed, too large, wrong token
        self.held = 0
        """Bytes of bodies that are arriving or being answered."""
        self.access = sessions.access
        self.closing = False
        self.frees_early = config.disconnect_timeout_s is not None
        """Whether sessions end soon after their connection."""
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

    def no_room(self) -> Refusal:
        most = self.config.max_bodies >> 20
        return Refusal(503, "overloaded", f"this worker holds bodies of {most} MiB already: try again later")

    def sweep(self, now: float | None = None) -> None:
        """Close connections that take too long to send, to read, or to come back."""
        now = perf_counter() if now is None else now
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


class Connection(asyncio.Protocol):
    """One client, who is read in turns with the others."""

    __slots__ = (
        "address", "carried", "ended", "front", "idle_since", "lingers_since", "outstanding", "paused",
        "receiving_since", "sessions", "stuck_since", "transport", "turn_due", "unread",
    )  # fmt: skip

    def __init__(self, front: Front):
        self.front, self.sessions = front, front.sessions
        self.transport: Any = None
        self.outstanding = 0  # requests that are not answered
        self.ended = False  # no more requests are taken from this connection
        self.paused = False  # whether reading waits
        self.stuck_since: float | None = None  # the client does not read its replies
        self.unread = b""  # read from the socket and not looked at yet
        self.turn_due = False
        self.address = ""  # what the client is counted by; nothing where it was turned away
        self.receiving_since: float | None = None  # a request has begun and is not complete
        self.lingers_since: float | None = None  # refused: what still arrives is thrown away
        self.idle_since = perf_counter()
        # Sessions whose requests came here, where their end depends on this connection; None: it does not.
        self.carried: dict[bytes, None] | None = {} if front.frees_early else None

    def connection_made(self, transport: Any) -> None:
        self.transport = transport
        if len(self.front.open) >= self.front.max_open or self.front.closing:
            self.front.refused += 1
            self.transport.abort()
            return
        address = self.front.access.client(transport)
        refusal = self.front.access.admit(address)
        self.front.open[self] = None
        self.transport.set_write_buffer_limits(high=HIGH_WATER)
        if refusal is None:
            self.front.accepted += 1
            self.address = address
        else:
            self.front.refused += 1
            if len(self.front.open) <= self.front.max_open // 2:
                self.turn_away(refusal)
            else:  # the word that it gets keeps it open for a moment: a flood must not fill the places of others
                self.transport.abort()

    def turn_away(self, refusal: Refusal) -> None:
        """A client that has too many connections."""
        self.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self.transport = None
        self.unread = b""
        self.front.open.pop(self, None)
        self.front.access.leave(self.address)
        for session in self.carried or ():
            self.sessions.disconnected(session)

    # --- what arrives -------------------------------------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        if self.ended:
            return
        self.front.bytes_in += len(data)
        if len(data) <= SMALL and not self.unread:
            self.feed(data)
        else:
            self.unread += data
            if not self.turn_due:
                self._turn()

    def feed(self, data: bytes) -> None:
        """Handle these bytes."""
        raise NotImplementedError

    def feed_part(self, data: bytes, at: int) -> tuple[int, int]:
        """Handle the bytes from `at` on, to the end of a request or of a part of one; returns where the rest begins,
        and how many requests there were."""
        raise NotImplementedError

    def _turn(self) -> None:
        """Handle as much of what was read as one connection may in a turn of the loop."""
        self.turn_due = False
        data, at, requests = self.unread, 0, 0
        until = perf_counter() + TURN_S
        while at < len(data) and requests < TURN_REQUESTS and not self.ended and self._may_take():
            at, more = self.feed_part(data, at)
            requests += more
            if perf_counter() > until:
                break
        self.unread = b"" if self.ended or self.transport is None else data[at:]
        if self.unread or len(data) >= _FULL_READ:
            self.pause()
            if self._may_take():
                self._turn_again()
        else:
            self.resume()

    def _turn_again(self) -> None:
        if not self.turn_due:
            self.turn_due = True
            self.sessions.loop.call_soon(self._turn)

    # --- back-pressure ------------------------------------------------------------------------------------------------

    def _may_take(self) -> bool:
        return self.stuck_since is None and self.outstanding < MAX_OUTSTANDING and self.transport is not None

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
        if not self.paused or self.turn_due or not self._may_take():
            return
        if self.unread:
            self._turn_again()
            return
        self.paused = False
        if not self.transport.is_closing():
            self.transport.resume_reading()

    # --- its life -----------------------------------------------------------------------------------------------------

    def carry(self, request: Request) -> None:
        """Remember that this connection carries a session; one that ends is forgotten."""
        assert self.carried is not None
        if request.kind == END:
            self.carried.pop(request.session, None)
        elif request.kind != AUTO:
            self.carried[request.session] = None
            if len(self.carried) > _MOST_CARRIED:
                self.carried.pop(next(iter(self.carried)))

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
        elif not self.outstanding and now - self.idle_since > self._may_be_silent():
            if self.transport.is_closing():  # a client that has not read its last reply in all that time
                self.transport.abort()
            else:
                self.close()

    def close(self) -> None:
        """The service closes the connection itself: that says nothing of the client."""
        self.carried = None
        self.transport.close()

    def linger(self) -> None:
        """Say that this was the last reply, and read on for a little: closing on unread bytes would reset the
        connection, and the client would never see why."""
        self.lingers_since = perf_counter()
        if self.transport is not None and not self.transport.is_closing():
            self.resume()
            if self.transport.can_write_eof():
                self.transport.write_eof()

    def _may_be_silent(self) -> float:
        config = self.front.config
        return min(config.keep_alive_s, config.first_request_s) if self.new else config.keep_alive_s

    @property
    def new(self) -> bool:
        """Whether no request has come yet."""
        return True

    def too_slow(self) -> None:
        raise NotImplementedError

    def shut(self) -> None:
        """Take no more requests; close when nothing is outstanding (the service ends)."""
        self.ended = True
        if self.transport is not None and not self.outstanding:
            self.close()
