"""The game client: one session, one connection, plain blocking calls."""

from __future__ import annotations

import socket
import time
from collections.abc import Coroutine
from contextlib import nullcontext
from types import TracebackType
from typing import Any

from .session import GameSession, Ticket, Where, ended, lost, remaining
from .wire import Reply, bad_reply, reply_parser


class Client(GameSession):
    """Plays one game against a Bray service.

    ```python
    with bray.Client("127.0.0.1", 8000) as client:
        client.start()
        action = client.tick({"obs": [0.1, 0.2]})["action"]
        client.end()
    ```

    `data` may be bytes (sent as they are, the reply is bytes), a str (sent as UTF-8, the reply is bytes), a protobuf
    message (`tick(message, output)` fills the message `output`), or a dict or list (sent as JSON, and the reply is
    parsed as JSON; an empty reply is None).

    `timeout` bounds each call in seconds, waiting and retries included. At most `retries` further attempts are made,
    with growing pauses, when nothing was executed: no connection, 503, and 429 at `start` or `step`. A request that was
    sent but not answered is repeated only where the call says `idempotent=True`; else it raises ConnectionLost.

    `session` fixes the session's name; without it every `start` makes a new one. `token` is checked by services that
    have one; `key` reaches the Actor unread. `tcp=True` speaks the framed protocol instead of HTTP. `tls=True` connects
    with TLS and checks the certificate against those that the system trusts; `tls="ca.pem"` trusts that file instead,
    and an `ssl.SSLContext` is used as it is. A session secret, of services that give one at `start`, is sent by itself.

    A client belongs to one thread at a time. It connects when first used, and again when the connection is gone.
    """

    def _connect(self) -> None:
        self._transport, self._turn = _Socket(self.host, self.port, self.tcp, self._tls), nullcontext()

    def _run(self, call: Coroutine[Any, Any, Any]) -> Any:
        try:
            call.send(None)  # to its end: our transport never suspends
        except StopIteration as done:
            return done.value

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._run(self._leave(error))


class _Socket:
    """A blocking connection. Its coroutines never suspend."""

    def __init__(self, host: str, port: int, tcp: bool, tls: Any = None):
        self.host, self.port, self.tcp, self._tls = host, port, tcp, tls
        self._sock: socket.socket | None = None
        self._replies = reply_parser(tcp)
        self._time = 0

    def next_time(self) -> int:
        self._time += 1
        return self._time

    async def sleep(self, seconds: float) -> None:
        time.sleep(seconds)

    def close(self) -> None:
        if self._sock is not None:
            self._sock.close()
            self._sock = None

    async def ask(self, message: bytes, ticket: Ticket, deadline: float, where: Where) -> Reply:
        sent = answered = False
        try:
            sock = self._connection(deadline)
            try:
                sock.sendall(message)
                sent = True
            except TimeoutError:
                raise
            except OSError:  # a ConnectionError, or what TLS makes of it
                # A server that refuses a large body answers and closes before all of it was sent.
                deadline = min(deadline, time.monotonic() + 1.0)
                sock.settimeout(remaining(deadline))
            reply = self._receive(sock, deadline)
            if reply is None:
                raise lost(sent, None, where())
            about_connection = reply.failed and not reply.session
            if self.tcp and (reply.session, reply.time) != ticket and not about_connection:
                raise bad_reply(f"expected the reply to request {ticket[1]}, got {reply.time} of {reply.session!r}")
            answered = reply.keep
            return reply
        except OSError as failure:
            raise lost(sent, failure, where()) from None
        finally:
            # After anything but a whole reply (Ctrl-C included), a late one would pass for the next tick's.
            if not answered:
                self.close()

    def _connection(self, deadline: float) -> socket.socket:
        if self._sock is not None and ended(self._sock):
            self.close()  # the server closed it while it was idle, or sent what nobody asked for
        if self._sock is None:
            self._sock = socket.create_connection((self.host, self.port), remaining(deadline))
            self._sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if self._tls is not None:
                self._sock = self._tls.wrap_socket(self._sock, server_hostname=self.host)
            self._replies = reply_parser(self.tcp)
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
