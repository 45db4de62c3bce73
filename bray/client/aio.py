"""The same client for asyncio. Over TCP many sessions can share one connection."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from types import TracebackType
from typing import Any

from .client import readable
from .errors import ClientError, ConnectionLost
from .rules import Attempts, Settings, lost, remaining
from .wire import (
    AUTO,
    END,
    START,
    TICK,
    HttpReplies,
    Reply,
    TcpReplies,
    decode,
    encode,
    http_request,
    reply_error,
    tcp_request,
)


class _Link(asyncio.Protocol):
    """One open connection and the requests that wait for its replies, by session and time."""

    def __init__(self, tcp: bool):
        self.tcp = tcp
        self.waiting: dict[tuple[bytes, int], asyncio.Future[Reply]] = {}
        self._replies: TcpReplies | HttpReplies = TcpReplies() if tcp else HttpReplies()

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
        return bool(self.waiting) or not readable(self.transport.get_extra_info("socket"))

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


class _Route:
    """Opens the connection when it is needed, and again when it is gone."""

    def __init__(self, host: str, port: int, tcp: bool):
        self.host, self.port, self.tcp = host, port, tcp
        self._link: _Link | None = None
        self._opening = asyncio.Lock()
        self._time = 0

    async def link(self, deadline: float) -> _Link:
        async with self._opening:
            if self._link is not None and self._link.usable():
                return self._link
            self.close()
            opening = asyncio.get_running_loop().create_connection(lambda: _Link(self.tcp), self.host, self.port)
            transport, link = await asyncio.wait_for(opening, remaining(deadline))
            sock: socket.socket = transport.get_extra_info("socket")
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._link = link
            return link

    def next_time(self) -> int:
        self._time += 1
        return self._time

    def close(self) -> None:
        if self._link is not None:
            self._link.transport.close()
            self._link = None


class AsyncClient(Settings):
    """`bray.Client` for asyncio: the same names and rules, each call is awaited.

    ```python
    async with bray.AsyncClient("127.0.0.1", 8000) as client:
        await client.start()
        reply = await client.tick(b"...")
    ```

    Calls of one client run one after the other, in the order they were made. It belongs to one event loop.
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
        self._route = _Route(host, self.port, tcp)
        self._shared = False
        self._turn = asyncio.Lock()

    async def start(self, game: str = "", agent: str = "", data: Any = b"") -> Any:
        """Start a session and return the Actor's answer. Its name is `game`, or `game-agent-name` with an agent."""
        self._name(game, agent)
        answer = await self._request(START, data)
        self._started = True
        return answer

    async def tick(self, data: Any, *, idempotent: bool = False) -> Any:
        """One decision: send the state of the game, get the Actor's answer."""
        self._need_session()
        return await self._request(TICK, data, idempotent)

    async def end(self, data: Any = b"") -> Any:
        """End the session and return the Actor's last answer."""
        self._need_session()
        self._started = False
        return await self._request(END, data)

    stop = end

    async def step(self, data: Any, *, idempotent: bool = False) -> Any:
        """A decision without a session: a pooled Actor starts, ticks and ends in one."""
        return await self._request(AUTO, data, idempotent)

    async def close(self) -> None:
        """Close the connection, unless it is shared. The session lives on until it is ended or expires."""
        if not self._shared:
            self._route.close()

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if self._started and error is None:
                await self.end()
            elif self._started:
                # Free the slot if that is quickly done; the error in flight is the one to show.
                with contextlib.suppress(ClientError):
                    await self._request(END, b"", timeout=min(self.timeout, 1.0))
        finally:
            await self.close()

    async def _request(self, kind: bytes, data: Any, idempotent: bool = False, timeout: float | None = None) -> Any:
        body, as_json = encode(data)
        session = b"" if kind is AUTO else self._session
        attempts = Attempts(kind, timeout or self.timeout, self.retries, idempotent)
        async with self._turn:
            while True:
                try:
                    return decode(await self._exchange(kind, session, body, attempts.deadline), as_json)
                except ClientError as error:
                    pause = attempts.pause(error)
                await asyncio.sleep(pause)

    async def _exchange(self, kind: bytes, session: bytes, body: bytes, deadline: float) -> bytes:
        """One request and its reply, over the open connection or a new one."""
        try:
            link = await self._route.link(deadline)
        except OSError as failure:  # TimeoutError is one
            raise lost(False, failure, self._where) from None
        if self.tcp:
            where = (session, self._route.next_time())
            message = tcp_request(session, kind, self._key, self._token, body, where[1])
        else:
            where = (b"", 0)
            message = http_request(self._host, session, kind, self._key, self._token, body)
        future = asyncio.get_running_loop().create_future()
        link.waiting[where] = future
        link.transport.write(message)
        try:
            async with asyncio.timeout(remaining(deadline)):
                reply = await future
        except TimeoutError as failure:
            raise lost(True, failure, self._where) from None
        finally:
            # Given up (timed out or cancelled): over TCP a late reply finds nobody, over HTTP it would be taken for the next.
            if link.waiting.pop(where, None) is not None and not self.tcp:
                link.transport.abort()
        if reply.failed:
            raise reply_error(reply, self._where)
        return reply.body


class AsyncConnection:
    """One TCP connection for many sessions; replies may come back in any order.

    ```python
    async with AsyncConnection("127.0.0.1", 8000) as connection:
        games = [connection.session() for _ in range(100)]
        await asyncio.gather(*(game.start() for game in games))
    ```
    """

    def __init__(self, host: str = "127.0.0.1", port: int = 8000, timeout: float = 60, *, retries: int = 5):
        self.host, self.port, self.timeout, self.retries = host, port, timeout, retries
        self._route = _Route(host, port, tcp=True)

    def session(
        self, session: str | None = None, *, token: str | bytes | None = None, key: str | bytes | None = None
    ) -> AsyncClient:
        """A client that plays one session over this connection."""
        client = AsyncClient(
            self.host,
            self.port,
            self.timeout,
            session=session,
            token=token,
            key=key,
            tcp=True,
            retries=self.retries,
        )
        client._route, client._shared = self._route, True
        return client

    async def close(self) -> None:
        """Close the connection. The sessions live on until they are ended or expire."""
        self._route.close()

    async def __aenter__(self) -> AsyncConnection:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()
