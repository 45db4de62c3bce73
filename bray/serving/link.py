"""Framed messages between processes: a unix socket on one machine, TCP between machines. Nothing is ever unpickled.

    frame = number u64 | length u32 | kind u8 | 3 bytes 0 | body        little endian

The first frame of a connection is the token. A request has a number and is answered by one reply or one error with that
number; number 0 is a message that wants no answer. What is sent in one turn of the loop leaves in one write. Unix
sockets are abstract unless a path is given: they vanish with their process, however it ends.
"""

from __future__ import annotations

import asyncio
import functools
import hmac
import itertools
import logging
import os
import socket
import struct
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from bray import errors
from bray.errors import BrayError, DataError, LinkLost, RemoteError, Unreachable
from bray.limited_log import LimitedLog

logger = logging.getLogger("bray.link")

_HEAD = struct.Struct("<QIB3x")
_pack_head, _unpack_head = _HEAD.pack, _HEAD.unpack_from
_HELLO, _REPLY, _ERROR = 253, 254, 255
MAX_BODY = 1 << 30
_LARGE = 1 << 16  # pieces from this size on are written as they are; smaller ones are joined first
_HIGH_WATER = 1 << 22  # bytes that may wait in a connection before `drain` waits
_MAX_TOKEN = 1024
CONNECT_TIMEOUT = 5.0
GREETING_S = 5.0
"""Seconds for a new connection to send the token."""
MAX_STRANGERS = 64
"""Connections of one listener that have not sent the token; one more closes the oldest, since those that know the token
send it at once."""
_limited = LimitedLog(logger)
_KEEPALIVE = {"TCP_KEEPIDLE": 3, "TCP_KEEPINTVL": 2, "TCP_KEEPCNT": 3, "TCP_USER_TIMEOUT": 9000}

Piece = bytes | bytearray | memoryview
Handle = Callable[["Link", int, int, memoryview], None]
"""Called on the loop for each message: (link, kind, number, body). The body may be kept."""


class Address(NamedTuple):
    """Where a Listener is found; it may be sent anywhere in the session."""

    machine: str
    unix: str
    host: str
    port: int


@functools.cache
def machine_id() -> str:
    """What two processes share when a unix socket joins them: the running system and its network namespace."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}-{os.stat('/proc/self/ns/net').st_ino}"


class Link(asyncio.Protocol):
    """One connection, either side of it. All methods belong on its loop."""

    def __init__(
        self, token: bytes, handle: Handle | None, lost: Callable[[Link], None] | None, listener: Listener | None = None
    ):
        self._token, self._handle, self._lost = token, handle, lost
        self._listener = listener  # None: this is the side that connects, which sends the token
        self._known = listener is None
        self._greeting: asyncio.TimerHandle | None = None  # closes a connection that does not send the token
        self._transport: Any = None
        self._waiting: dict[int, asyncio.Future[memoryview]] = {}
        self._numbers = itertools.count(1)
        self._out: list[Piece] = []
        self._chunks: deque[bytes] = deque()
        self._have = self._needs = 0
        self._writable: asyncio.Future[None] | None = None
        self._error = ""  # why it is closed, where we know
        self.closed = False
        self.data: Any = None  # of whoever handles this link
        self.asked: dict[int, Any] = {}
        """What `ask` was given and is not answered, by number."""
        self.replied: Callable[[Any, Any], None] | None = None
        """Called with what `ask` was given and the answer; None in place of an error."""
        self.as_bytes = False
        """Whether bodies are handed out as bytes: faster where they are small and cut into parts."""

    # --- sending ------------------------------------------------------------------------------------------------------

    def request(self, kind: int, *pieces: Piece) -> asyncio.Future[memoryview]:
        """Send a message and await its answer: a body, or the error that the other side had."""
        future: asyncio.Future[memoryview] = self._loop.create_future()
        if self.closed:
            future.set_exception(LinkLost(self._error or "the connection is closed"))
            return future
        number = next(self._numbers)
        self._send(number, kind, pieces)
        self._waiting[number] = future
        return future

    def ask(self, what: Any, kind: int, *pieces: Piece) -> None:
        """`request` without a future: `what` goes to `replied` with the answer. Whoever asks looks after `asked` when
        the link is lost."""
        number = next(self._numbers)
        self._send(number, kind, pieces)
        self.asked[number] = what

    def post(self, kind: int, *pieces: Piece) -> None:
        """Send a message that has no answer. Raises LinkLost when the connection is known to be gone."""
        if self.closed:
            raise LinkLost(self._error or "the connection is closed")
        self._send(0, kind, pieces)

    def reply(self, number: int, *pieces: Piece) -> None:
        """Answer a request; nothing happens where the asker is gone, or wanted no answer."""
        if number and not self.closed:
            self._send(number, _REPLY, pieces)

    def fail(self, number: int, error: BaseException) -> None:
        """Answer a request with an error. A BrayError arrives as one of its class."""
        if number and not self.closed:
            body = msgspec.msgpack.encode((type(error).__name__, str(error)))
            self._send(number, _ERROR, (body,))
        elif not number:
            logger.error("a message without a number failed", exc_info=error)

    async def drain(self) -> None:
        """Wait while the other side is slow to read."""
        if self._writable is not None:
            await self._writable

    def close(self) -> None:
        if self._transport is not None:
            self._flush()
            self._transport.close()

    def abort(self) -> None:
        """Close without sending what waits."""
        if self._transport is not None:
            self._transport.abort()

    def enable_keepalive(self) -> None:
        """Let the kernel notice within about ten seconds that the machine at the other end of a TCP connection is
        gone."""
        sock = self._transport.get_extra_info("socket")
        if sock is not None and sock.family != socket.AF_UNIX:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for option, value in _KEEPALIVE.items():
                if hasattr(socket, option):
                    sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)

    def _send(self, number: int, kind: int, pieces: tuple[Piece, ...]) -> None:
        length = sum(map(len, pieces)) if len(pieces) != 1 else len(pieces[0])
        if length > MAX_BODY:
            raise DataError(f"a message of {length} bytes; the most is {MAX_BODY}: send it in parts")
        out = self._out
        if not out:
            self._loop.call_soon(self._flush)
        if length < _LARGE:
            out += (_pack_head(number, length, kind), *pieces)
            return
        out.append(_pack_head(number, length, kind))
        for piece in pieces:
            if len(piece) < _LARGE:
                out.append(piece)
            else:
                self._flush()
                out = self._out  # what comes after this piece; the flush that is due will send it
                if self._transport is not None:
                    self._transport.write(piece)

    def _flush(self) -> None:
        if self._out:
            data, self._out = (b"".join(self._out), [])
            if not self.closed:
                self._transport.write(data)

    # --- receiving ----------------------------------------------------------------------------------------------------

    def connection_made(self, transport: Any) -> None:
        self._loop = asyncio.get_running_loop()
        self._transport = transport
        transport.set_write_buffer_limits(high=_HIGH_WATER)
        if self._listener is None:
            self._send(0, _HELLO, (self._token,))
        else:
            self._greeting = self._loop.call_later(GREETING_S, self.abort)
            self._listener.connected(self)

    def pause_writing(self) -> None:
        self._writable = self._loop.create_future()

    def resume_writing(self) -> None:
        if self._writable is not None:
            self._writable.set_result(None)
            self._writable = None

    def data_received(self, data: bytes) -> None:
        if self._chunks:
            self._chunks.append(data)
            self._have += len(data)
            if self._have < self._needs:
                return
            data = b"".join(self._chunks)
            self._chunks.clear()
        view: Any = data if self.as_bytes else memoryview(data)
        at, end = 0, len(data)
        size, needs = _HEAD.size, _HEAD.size
        known, handle, asked = self._known, self._handle, self.asked
        while (start := at + size) <= end:
            number, length, kind = _unpack_head(data, at)
            if length > MAX_BODY or (not known and (kind != _HELLO or length > _MAX_TOKEN)):
                self._refuse("a frame that is not of this protocol")
                return
            if start + length > end:
                needs = size + length
                break
            at = start + length
            body = view[start:at]
            if number in asked and kind == _REPLY:
                assert self.replied is not None
                self.replied(asked.pop(number), body)
                continue
            if kind < _HELLO:
                assert handle is not None
                try:
                    handle(self, kind, number, body)
                except Exception as e:
                    self.fail(number, e)
            else:
                self._answered(kind, number, body)
                known = self._known
            if self.closed:
                return
        if at < end:
            self._chunks.append(data[at:] if at else data)
            self._have, self._needs = end - at, needs

    def _answered(self, kind: int, number: int, body: memoryview) -> None:
        if kind == _HELLO:
            self._greeted(bytes(body))
            return
        future = self._waiting.pop(number, None)
        if future is None:
            if number in self.asked and self.replied is not None:
                self.replied(self.asked.pop(number), None)
        elif future.done():  # cancelled meanwhile
            return
        elif kind == _REPLY:
            future.set_result(body)
        else:
            future.set_exception(_read_error(body))

    def _greeted(self, token: bytes) -> None:
        if self._listener is None or self._known:
            self._refuse("a token that nobody asked for")
        elif not hmac.compare_digest(token, self._token):
            self._refuse("a wrong token")
        else:
            self._known = True
            self._stop_greeting()
            self._listener.greeted(self)

    def _stop_greeting(self) -> None:
        if self._greeting is not None:
            self._greeting.cancel()
            self._greeting = None

    def _refuse(self, why: str) -> None:
        _limited.warning(why, "a connection sent %s and is closed", why)
        self._error = f"the connection was closed because of {why}"
        self.closed = True
        self._transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self.closed = True
        self._stop_greeting()
        self.resume_writing()
        self._chunks.clear()
        if self._listener is not None:
            self._listener.gone(self)
        waiting, self._waiting = self._waiting, {}
        why = self._error or "the connection ended before the answer came: the other process has died or was stopped"
        for future in waiting.values():
            if not future.done():
                future.set_exception(LinkLost(why))
        if self._lost is not None and self._known:
            self._lost(self)


def _read_error(body: memoryview) -> BaseException:
    try:
        name, message = msgspec.msgpack.decode(body, type=tuple[str, str])
    except msgspec.MsgspecError:
        return RemoteError("the other process failed and its error could not be read")
    kind = getattr(errors, name, None)
    if isinstance(kind, type) and issubclass(kind, BrayError):
        error = kind.__new__(kind)
        error.args = (message,)
        return error
    return RemoteError(f"{name}: {message}")


class Listener:
    """Takes connections; each message of each goes to `handle`."""

    def __init__(self, handle: Handle, token: bytes, lost: Callable[[Link], None] | None = None):
        self._handle, self._token, self._lost = handle, token, lost
        self._servers: list[Any] = []
        self._strangers: dict[Link, None] = {}  # that have not sent the token, oldest first
        self.links: set[Link] = set()
        """Those that have sent it."""
        self.address: Address

    async def start(self, name: str, host: str = "127.0.0.1") -> Address:
        """Listen on an abstract unix socket, and on any free TCP port of `host`."""
        path = f"\0bray-{os.getpid()}-{os.urandom(6).hex()}-{name}"[:100]
        await self.start_unix(path)
        await self.start_tcp(host)
        self.address = self.address._replace(unix=path)
        return self.address

    async def start_tcp(self, host: str, port: int = 0) -> None:
        """Listen on TCP alone."""
        server = await asyncio.get_running_loop().create_server(self._make, host, port)
        self._servers.append(server)
        self.address = Address(machine_id(), "", host, server.sockets[0].getsockname()[1])

    async def start_unix(self, path: str) -> None:
        """Listen on a unix socket alone."""
        unix = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        unix.bind(path)
        self._servers.append(await asyncio.get_running_loop().create_unix_server(self._make, sock=unix))
        self.address = Address(machine_id(), path, "", 0)

    def _make(self) -> Link:
        return Link(self._token, self._handle, self._lost, self)

    # called by its links

    def connected(self, link: Link) -> None:
        self._strangers[link] = None
        if len(self._strangers) > MAX_STRANGERS:
            oldest = next(iter(self._strangers))
            del self._strangers[oldest]
            oldest.abort()
            _limited.warning(
                "strangers", "more than %d connections have not sent the token: the oldest are closed", MAX_STRANGERS
            )

    def greeted(self, link: Link) -> None:
        self._strangers.pop(link, None)
        self.links.add(link)

    def gone(self, link: Link) -> None:
        self._strangers.pop(link, None)
        self.links.discard(link)

    async def close(self) -> None:
        for server in self._servers:
            server.close()
        for link in [*self.links, *self._strangers]:
            link.close()
        self._servers.clear()


async def connect(
    address: Address,
    token: bytes,
    handle: Handle | None = None,
    lost: Callable[[Link], None] | None = None,
    unix: bool = True,
    timeout: float = CONNECT_TIMEOUT,
) -> Link:
    """A Link to a Listener, by its unix socket where that is on this machine (and `unix` is not False)."""
    loop = asyncio.get_running_loop()
    link = Link(token, handle, lost)
    try:
        async with asyncio.timeout(timeout):
            if unix and address.machine == machine_id():
                sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
                sock.setblocking(False)
                try:
                    await loop.sock_connect(sock, address.unix)
                    await loop.create_unix_connection(lambda: link, sock=sock)
                except BaseException:
                    sock.close()
                    raise
            else:
                await loop.create_connection(lambda: link, address.host, address.port)
    except (OSError, TimeoutError) as e:
        where = address.unix.lstrip("\0") if unix else f"{address.host}:{address.port}"
        raise Unreachable(f"no connection to {where}: {e or 'no answer in time'}") from None
    return link
