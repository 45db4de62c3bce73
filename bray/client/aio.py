"""The same client for asyncio. Over TCP many sessions can share one connection."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Coroutine
from types import TracebackType
from typing import Any

from .errors import ClientError, ConnectionLost
from .session import GameSession, Ticket, Where, lost, readable, remaining, tls_context
from .wire import Reply, reply_error, reply_parser


class AsyncClient(GameSession):
    """`bray.Client` for asyncio: the same names and rules, each call is awaited.

    ```python
    async with bray.AsyncClient("127.0.0.1", 8000) as client:
        await client.start()
        reply = await client.tick(b"...")
    ```

    Calls of one client run one after the other, in the order they were made. It belongs to one event loop.
    """

    _shared = False
    """Whether others use the same connection."""

    def _connect(self) -> None:
        self._transport, self._turn = _Route(self.host, self.port, self.tcp, self._tls), asyncio.Lock()

    def _run(self, call: Coroutine[Any, Any, Any]) -> Any:
        return call

    async def _close(self) -> None:
        if not self._shared:
            await super()._close()

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._leave(error)


class AsyncConnection:
    """One TCP connection for many sessions; replies may come back in any order.

    ```python
    async with AsyncConnection("127.0.0.1", 8000) as connection:
        games = [connection.session() for _ in range(100)]
        await asyncio.gather(*(game.start() for game in games))
    ```
    """

    def __init__(
        self, host: str = "127.0.0.1", port: int = 8000, timeout: float = 60, *, tls: Any = False, retries: int = 5
    ):
        self.host, self.port, self.timeout, self.retries = host, port, timeout, retries
        self._route = _Route(host, port, tcp=True, tls=tls_context(tls))

    def session(
        self, session: str | None = None, *, token: str | bytes | None = None, key: str | bytes | None = None
    ) -> AsyncClient:
        """A client that plays one session over this connection."""
        client = AsyncClient(
            self.host, self.port, self.timeout, session=session, token=token, key=key, tcp=True, retries=self.retries
        )
        client._transport, client._shared = self._route, True
        return client

    async def close(self) -> None:
        """Close the connection. The sessions live on until they are ended or expire."""
        self._route.close()

    async def __aenter__(self) -> AsyncConnection:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()


class _Route:
    """An asyncio connection, perhaps of several clients."""

    def __init__(self, host: str, port: int, tcp: bool, tls: Any = None):
        self.host, self.port, self.tcp, self._tls = host, port, tcp, tls
        self._link: _Link | None = None
        self._opening = asyncio.Lock()
        self._time = 0

    def next_time(self) -> int:
        self._time += 1
        return self._time

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    def close(self) -> None:
        if self._link is not None:
            self._link.transport.close()
            self._link = None

    async def ask(self, message: bytes, ticket: Ticket, deadline: float, where: Where) -> Reply:
        try:
            link = await self._open(deadline)
        except OSError as failure:  # TimeoutError is one
            raise lost(False, failure, where()) from None
        future = asyncio.get_running_loop().create_future()
        link.waiting[ticket] = future
        link.transport.write(message)
        try:
            async with asyncio.timeout(remaining(deadline)):
                return await future
        except TimeoutError as failure:
            raise lost(True, failure, where()) from None
        finally:
            # Given up (timed out or cancelled): over TCP a late reply finds nobody, over HTTP it would be taken for the
            # next.
            if link.waiting.pop(ticket, None) is not None and not self.tcp:
                link.transport.abort()

    async def _open(self, deadline: float) -> _Link:
        async with self._opening:
            if self._tls is not None:
                await asyncio.sleep(0)  # the loop reads what has come: the end of the connection, or TLS' own messages
            if self._link is not None and self._link.usable():
                return self._link
            self.close()
            opening = asyncio.get_running_loop().create_connection(
                lambda: _Link(self.tcp, self._tls is not None), self.host, self.port, ssl=self._tls
            )
            transport, link = await asyncio.wait_for(opening, remaining(deadline))
            sock: socket.socket = transport.get_extra_info("socket")
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._link = link
            return link


class _Link(asyncio.Protocol):
    """One open connection and the requests that wait for its replies."""

    def __init__(self, tcp: bool, tls: bool):
        self._tls = tls
        self.waiting: dict[Ticket, asyncio.Future[Reply]] = {}
        self._replies = reply_parser(tcp)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport: asyncio.Transport = transport  # type: ignore[assignment]

    def data_received(self, data: bytes) -> None:
        try:
            replies = self._replies.feed(data)
        except ConnectionLost as error:
            return self.fail(error)
        for reply in replies:
            self._hand_over(reply)

    def eof_received(self) -> None:
        reply = self._replies.eof()
        if reply:
            self._hand_over(reply)

    def connection_lost(self, error: Exception | None) -> None:
        self.fail(lost(True, error, "the connection broke"))

    def usable(self) -> bool:
        """Whether a request may be sent: the server has not closed the idle connection."""
        if self.transport.is_closing():
            return False
        return bool(self.waiting) or self._tls or not readable(self.transport.get_extra_info("socket"))

    def fail(self, error: ClientError) -> None:
        """Give up the connection; all who wait get the error."""
        waiting, self.waiting = self.waiting, {}
        for future in waiting.values():
            if not future.done():
                future.set_exception(error)
        self.transport.abort()

    def _hand_over(self, reply: Reply) -> None:
        future = self.waiting.pop((reply.session, reply.time), None)
        if future is None:
            # Either the reply to a request that was given up (drop it), or the server's last word on a framing error.
            if reply.failed and not reply.session:
                self.fail(reply_error(reply, "the connection"))
            return
        if not future.done():
            future.set_result(reply)
        if not reply.keep:
            self.transport.close()
