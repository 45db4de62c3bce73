"""What can go wrong for a game client.

ClientError            the server answered with an error; `.status`, `.code` and `.message` say which
├── SessionLost        404: the session is unknown, ended, expired, or its worker died; call `start` again
├── ConnectFailed      the request did not leave whole: nothing was executed
└── ConnectionLost     the request left and no reply came: nobody knows whether it was executed

`.status` is 0 where no server answered; `.code` is then `connect_failed`, `connection_lost`, `timeout`, `bad_reply` or
`not_started`.
"""

from __future__ import annotations


class ClientError(Exception):
    """A request that was not answered with 200."""

    def __init__(self, status: int, code: str, message: str, retry_after: float | None = None):
        super().__init__(status, code, message, retry_after)
        self.status, self.code, self.message, self.retry_after = status, code, message, retry_after

    def __str__(self) -> str:
        return f"{self.status} {self.code}: {self.message}" if self.status else f"{self.code}: {self.message}"


class SessionLost(ClientError):
    """The server does not know this session (any more): `start` a new one."""


class ConnectFailed(ClientError):
    """The request could not be sent whole, so nothing was executed."""


class ConnectionLost(ClientError):
    """The request was sent and no reply came back. It may or may not have been executed."""
