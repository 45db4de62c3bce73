"""How much is read of a client, and when: its share of a turn of the loop, and back-pressure from requests and replies
that wait."""

from __future__ import annotations

import asyncio
from time import perf_counter
from typing import Any

MAX_OUTSTANDING = 128
"""Requests of one connection that are not answered; with more, reading waits."""
TURN_REQUESTS, TURN_S = 32, 0.001
"""What one connection may take of a turn of the loop, in requests and in seconds; what it has sent beyond that waits
for the next."""
SMALL = 512
"""Bytes that hold no more requests than one turn may: the shortest has 18."""
_FULL_READ = 256 << 10  # bytes of the largest single read; uvloop reads on at once after one


class TurnReader(asyncio.Protocol):
    """A connection that is read in turns with the others. `outstanding` counts its requests that are not answered."""

    __slots__ = ("_loop", "ended", "front", "outstanding", "paused", "stuck_since", "transport", "turn_due", "unread")

    def __init__(self, front: Any, loop: asyncio.AbstractEventLoop):
        self.front, self._loop = front, loop
        self.transport: Any = None
        self.outstanding = 0
        self.ended = False  # no more requests are taken from this connection
        self.paused = False  # whether reading waits
        self.stuck_since: float | None = None  # the client does not read its replies
        self.unread = b""  # read from the socket and not looked at yet
        self.turn_due = False

    def connection_lost(self, exc: Exception | None) -> None:
        self.transport = None
        self.unread = b""

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
            self._loop.call_soon(self._turn)

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
