"""The game client: one session, one connection, plain blocking calls."""

from __future__ import annotations

import contextlib
import select
import socket
import time
from types import TracebackType
from typing import Any

from .errors import ClientError
from .rules import Attempts, Settings, lost, remaining
from .wire import (
    AUTO,
    END,
    START,
    TICK,
    HttpReplies,
    Reply,
    TcpReplies,
    bad_reply,
    decode,
    encode,
    http_request,
    reply_error,
    tcp_request,
)


class Client(Settings):
    """Plays one game against a Bray service.

    ```python
    with bray.Client("127.0.0.1", 8000) as client:
        client.start()
        action = client.tick({"obs": [0.1, 0.2]})["action"]
        client.end()
    ```

    `data` may be bytes (sent as they are, the reply is bytes), a str (sent as UTF-8, the reply is bytes), or a dict or
    list (sent as JSON, and the reply is parsed as JSON; an empty reply is None).

    `timeout` bounds each call in seconds, waiting and retries included. At most `retries` further attempts are made,
    with growing pauses, when nothing was executed: no connection, 503, and 429 at `start` or `step`. A request that was
    sent but not answered is repeated only where the call says `idempotent=True`; else it raises ConnectionLost.

    `session` fixes the session's name; without it every `start` makes a new one. `token` is checked by services that
    have one; `key` reaches the Actor unread. `tcp=True` speaks the framed protocol instead of HTTP.

    A client belongs to one thread at a time. It connects when first used, and again when the connection is gone.
    """

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
        retries: int = 5,
    ):
        super().__init__(host, port, timeout, session, token, key, retries)
        self.tcp = tcp
        self._sock: socket.socket | None = None
        self._replies: TcpReplies | HttpReplies = TcpReplies() if tcp else HttpReplies()
        self._time = 0

    def start(self, game: str = "", agent: str = "", data: Any = b"") -> Any:
        """Start a session and return the Actor's answer. Its name is `game`, or `game-agent-name` with an agent."""
        self._name(game, agent)
        answer = self._request(START, data)
        self._started = True
        return answer

    def tick(self, data: Any, *, idempotent: bool = False) -> Any:
        """One decision: send the state of the game, get the Actor's answer."""
        self._need_session()
        return self._request(TICK, data, idempotent)

    _tick = tick

    def end(self, data: Any = b"") -> Any:
        """End the session and return the Actor's last answer."""
        self._need_session()
        self._started = False
        return self._request(END, data)

    stop = end

    def step(self, data: Any, *, idempotent: bool = False) -> Any:
        """A decision without a session: a pooled Actor starts, ticks and ends in one."""
        return self._request(AUTO, data, idempotent)

    def close(self) -> None:
        """Close the connection. The session lives on until it is ended or expires."""
        if self._sock is not None:
            self._sock.close()
            self._sock = None

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if self._started and error is None:
                self.end()
            elif self._started:
                # Free the slot if that is quickly done; the error in flight is the one to show.
                with contextlib.suppress(ClientError):
                    self._request(END, b"", timeout=min(self.timeout, 1.0))
        finally:
            self.close()

    def _request(self, kind: bytes, data: Any, idempotent: bool = False, timeout: float | None = None) -> Any:
        body, as_json = encode(data)
        attempts = Attempts(kind, timeout or self.timeout, self.retries, idempotent)
        while True:
            try:
                return decode(self._exchange(kind, body, attempts.deadline), as_json)
            except ClientError as error:
                pause = attempts.pause(error)
            time.sleep(pause)

    def _exchange(self, kind: bytes, body: bytes, deadline: float) -> bytes:
        """One request and its reply, over the open connection or a new one."""
        sent = answered = False
        session = b"" if kind is AUTO else self._session
        self._time += 1
        if self.tcp:
            message = tcp_request(session, kind, self._key, self._token, body, self._time)
        else:
            message = http_request(self._host, session, kind, self._key, self._token, body)
        try:
            sock = self._connection(deadline)
            try:
                sock.sendall(message)
                sent = True
            except ConnectionError:
                # A server that refuses a large body answers and closes before all of it was sent.
                deadline = min(deadline, time.monotonic() + 1.0)
                sock.settimeout(remaining(deadline))
            reply = self._receive(sock, deadline)
            if reply is None:
                raise lost(sent, None, self._where)
            error = reply_error(reply, self._where) if reply.failed else None
            if self.tcp and (reply.session, reply.time) != (session, self._time) and not (error and not reply.session):
                raise bad_reply(f"expected the reply to request {self._time}, got {reply.time} of {reply.session!r}")
            answered = reply.keep
        except OSError as failure:
            raise lost(sent, failure, self._where) from None
        finally:
            # After anything but a whole reply (Ctrl-C included), a late one would pass for the next tick's.
            if not answered:
                self.close()
        if error:
            raise error
        return reply.body

    def _connection(self, deadline: float) -> socket.socket:
        if self._sock is not None and readable(self._sock):
            self.close()  # the server closed it while it was idle, or sent what nobody asked for
        if self._sock is None:
            self._sock = socket.create_connection((self.host, self.port), remaining(deadline))
            self._sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._replies = TcpReplies() if self.tcp else HttpReplies()
        self._sock.settimeout(remaining(deadline))
        return self._sock

    def _receive(self, sock: socket.socket, deadline: float) -> Reply | None:
        """The reply, or None where the connection ended before it was whole."""
        while True:
            try:
                data = sock.recv(1 << 16)
            except ConnectionError:
                return None
            if not data:
                return self._replies.eof()
            replies = self._replies.feed(data)
            if replies:
                return replies[0]
            sock.settimeout(remaining(deadline))


def readable(sock: socket.socket) -> bool:
    """Whether bytes, or the end of the connection, wait to be read."""
    if hasattr(select, "poll"):
        poll = select.poll()
        poll.register(sock, select.POLLIN)
        return bool(poll.poll(0))
    return bool(select.select([sock], [], [], 0)[0])
