"""What both clients share: their settings, how a session gets its name, and when a request may be sent again."""

from __future__ import annotations

import random
import re
import time
import uuid

from .errors import ClientError, ConnectFailed, ConnectionLost
from .wire import AUTO, START

_CONTROL = re.compile(rb"[\x00-\x1f\x7f]")


class Settings:
    """Where the service is, and who we are to it."""

    def __init__(
        self,
        host: str,
        port: int,
        timeout: float,
        session: str | None,
        token: str | bytes | None,
        key: str | bytes | None,
        retries: int,
    ):
        if not timeout > 0:
            raise ValueError(f"timeout: expected seconds > 0, got {timeout!r}")
        if retries < 0:
            raise ValueError(f"retries: expected 0 or more, got {retries!r}")
        self.host, self.port, self.timeout, self.retries = host, int(port), float(timeout), retries
        self.session = self._fixed = session or ""
        self._token, self._key = _field("token", token), _field("key", key)
        self._session = _field("session", session)
        self._host = (f"[{host}]:{port}" if ":" in host else f"{host}:{port}").encode()
        self._started = False

    def _name(self, game: str, agent: str) -> None:
        """Settle the session's name: `game`, or `game-agent-name`; a new unique game where none is given."""
        name = self._fixed
        if game or agent or not name:
            game = game or str(uuid.uuid4())
            name = f"{game}-agent-{agent}" if agent else game
        self._session = _field("session", name)
        self.session = name

    def _need_session(self) -> None:
        if not self._session:
            raise ClientError(0, "not_started", "expected a session, there is none: call start() first")

    @property
    def _where(self) -> str:
        return f"session {self.session!r} at {self.host}:{self.port}"


def _field(name: str, value: str | bytes | None) -> bytes:
    data = value.encode() if isinstance(value, str) else value or b""
    if _CONTROL.search(data) or data != data.strip():
        raise ValueError(f"{name}: expected text without control characters or blanks around it, got {value!r}")
    return data


class Attempts:
    """When one request may be sent again, within its timeout."""

    def __init__(self, kind: bytes, timeout: float, retries: int, idempotent: bool):
        self.deadline = time.monotonic() + timeout
        self._kind, self._left, self._idempotent = kind, retries, idempotent
        self._pause = 0.05

    def pause(self, error: ClientError) -> float:
        """Seconds to wait before the next attempt. Where there may be none, raises the error."""
        self._left -= 1
        # The upper half is random, so that a thousand games do not come back in the same millisecond.
        wait = self._pause * random.uniform(0.5, 1.0)
        if error.retry_after is not None:
            wait += error.retry_after
        self._pause = min(2 * self._pause, 2.0)
        if self._left < 0 or not self._harmless(error) or time.monotonic() + wait >= self.deadline:
            raise error
        return wait

    def _harmless(self, error: ClientError) -> bool:
        """Whether sending again cannot execute the request twice (or may)."""
        if isinstance(error, ConnectFailed) or error.status == 503:
            return True
        if error.status == 429:
            return self._kind in (START, AUTO)
        return isinstance(error, ConnectionLost) and self._idempotent


def remaining(deadline: float) -> float:
    """Seconds left, at least a millisecond: 0 would mean "do not wait at all" to a socket."""
    return max(deadline - time.monotonic(), 0.001)


def lost(sent: bool, error: BaseException | None, where: str) -> ClientError:
    """The error for a connection that failed, by how far the request got."""
    timed_out = isinstance(error, TimeoutError)
    reason = "no reply within the timeout" if timed_out else str(error or "the server closed the connection")
    if sent:
        code = "timeout" if timed_out else "connection_lost"
        return ConnectionLost(0, code, f"{reason} ({where}). The request was sent; it may have been executed")
    code = "timeout" if timed_out else "connect_failed"
    return ConnectFailed(0, code, f"{reason} ({where}). Nothing was executed. Is the service running there?")
