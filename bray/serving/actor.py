"""The Actor: one stateful game session, whatever the game."""

from __future__ import annotations

from collections.abc import Awaitable

FAILURES = (Exception, SystemExit, KeyboardInterrupt)
"""What the code of a game may raise: an error of its own session, never the end of the worker that runs it."""


class Actor:
    """One game session. Objects are reused: `start` must put everything back to the beginning.

    Methods may be plain or `async`. A plain one runs on the event loop and must be quick; one that waits (for a model,
    another service) is `async`, or returns a future, which takes no task. Each returns the bytes of its reply (text is
    sent as UTF-8, with a warning); `start` and `end` may return nothing, which is answered with `Game Started` and
    `Game Stopped`. `stop` is accepted in place of `end`.

    Two more methods are called where a class has them: `fallback(data) -> bytes` answers a tick whose deadline has
    passed, and `lost()` is told that its session ended without an `end` (the client was silent for too long).
    """

    key: bytes = b""
    """The `key` of the request that is being answered, as the client sent it."""

    def start(self, session: str, data: bytes) -> bytes | Awaitable[bytes | None] | None:
        raise NotImplementedError(f"{type(self).__name__} has no method start(session, data)")

    def tick(self, data: bytes) -> bytes | Awaitable[bytes]:
        raise NotImplementedError(f"{type(self).__name__} has no method tick(data)")

    def end(self, data: bytes) -> bytes | Awaitable[bytes | None] | None:
        raise NotImplementedError(f"{type(self).__name__} has no method end(data)")
