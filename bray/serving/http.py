"""A client's connection: its life, limits and back-pressure, and HTTP/1.1 for `POST /step` on httptools' parser. `tcp.py` is the other transport.

Everything between the parser and the session table is here.
"""

from __future__ import annotations

import asyncio
import logging
import resource
from collections import deque
from time import perf_counter
from typing import Any

import httptools

from bray.serving.config import ServiceConfig
from bray.serving.protocol import KINDS, MAX_NAME, REASONS, START, Refusal, malformed, show
from bray.serving.sessions import Request, Sessions

logger = logging.getLogger("bray.serving")

HIGH_WATER = 256 << 10
"""Bytes of replies that a client has not read; above that its requests are not read either."""
LINGER_S = 1.0
"""How long a refused client may go on sending."""
MAX_OUTSTANDING = 128
"""Requests of one connection that are not answered; with more, reading waits."""
SLOW = Refusal(408, "slow_request", "the request did not arrive in time")


class Front:
    """The open connections of one worker."""

    def __init__(self, sessions: Sessions, config: ServiceConfig):
        self.sessions, self.config = sessions, config
        self.open: dict[Connection, None] = {}
        self.accepted = self.refused = self.bytes_in = self.bytes_out = 0
        self.unknown = 0  # requests refused before they could be told apart: malformed, too large, wrong token
        self.access = sessions.access
        self.closing = False
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

    def sweep(self) -> None:
        """Close connections that take too long to send, to read, or to come back."""
        now = perf_counter()
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
    """One client. `outstanding` counts its requests that are not answered."""

    __slots__ = (
        "address",
        "front",
        "idle_since",
        "lingers_since",
        "outstanding",
        "paused",
        "receiving_since",
        "sessions",
        "stuck_since",
        "transport",
    )

    def __init__(self, front: Front):
        self.front, self.sessions = front, front.sessions
        self.transport: Any = None
        self.address = ""  # what the client is counted by; nothing where it was turned away
        self.outstanding = 0
        self.paused = False  # whether reading waits
        self.receiving_since: float | None = None  # a request has begun and is not complete
        self.stuck_since: float | None = None  # the client does not read its replies
        self.lingers_since: float | None = None  # refused: what still arrives is thrown away
        self.idle_since = perf_counter()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
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
        self.front.open.pop(self, None)
        self.front.access.leave(self.address)

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
        if (
            self.paused
            and self.stuck_since is None
            and self.outstanding < MAX_OUTSTANDING
            and self.transport is not None
        ):
            self.paused = False
            if not self.transport.is_closing():
                self.transport.resume_reading()

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
        elif not self.outstanding and now - self.idle_since > config.keep_alive_s:
            if self.transport.is_closing():  # a client that has not read its last reply in all that time
                self.transport.abort()
            else:
                self.transport.close()

    def linger(self) -> None:
        """Say that this was the last reply, and read on for a little: closing on unread bytes would reset the connection, and the
        client would never see why."""
        self.lingers_since = perf_counter()
        if self.transport is not None and not self.transport.is_closing():
            self.resume()
            if self.transport.can_write_eof():
                self.transport.write_eof()

    def too_slow(self) -> None:
        raise NotImplementedError

    def shut(self) -> None:
        """Close when nothing is outstanding (the service ends)."""
        if self.transport is not None and not self.outstanding:
            self.transport.close()


# --- HTTP -------------------------------------------------------------------------------------------------------------------

_OTHER, _SESSION, _KIND, _KEY, _TOKEN, _LENGTH, _CODING, _EXPECT, _UPGRADE, _AGAIN, _SECRET, _FORWARDED = range(12)
_HEADERS = {
    b"session": _SESSION,
    b"game_id": _SESSION,  # older clients
    b"step_kind": _KIND,
    b"step-kind": _KIND,  # what is left of step_kind behind proxies that drop underscores
    b"key": _KEY,
    b"token": _TOKEN,
    b"session_secret": _SECRET,
    b"session-secret": _SECRET,
    b"x-forwarded-for": _FORWARDED,
    b"content-length": _LENGTH,
    b"transfer-encoding": _CODING,
    b"expect": _EXPECT,
    b"upgrade": _UPGRADE,
}
_seen: dict[bytes, int] = dict(_HEADERS)  # as clients spell them: a request's ten headers must not cost ten lower()
_lookup = _seen.get
_OK = b"HTTP/1.1 200 OK\r\nContent-Type: application/octet-stream\r\nContent-Length: %d\r\n\r\n%b"
_LARGE = 64 << 10  # a reply above this is not copied behind its head


def _header(name: bytes) -> int:
    found = _HEADERS.get(name.lower(), _OTHER)
    if len(_seen) < 4096 and len(name) <= 64:
        _seen[name] = found
    return found


class HttpRequest(Request):
    __slots__ = ("close", "connection", "response")

    def __init__(self, kind: int, session: bytes, key: bytes, body: bytes, connection: HttpConnection, close: bool):
        self.kind, self.session, self.key, self.body = kind, session, key, body
        self.arrived = perf_counter()
        self.connection, self.close = connection, close
        self.response: tuple[int, bytes] | None = None

    def reply(self, status: int, body: bytes) -> None:
        self.connection.reply(self, status, body)


class HttpConnection(Connection):
    """One client. Requests may be pipelined; replies leave in the order of the requests."""

    __slots__ = (
        "_asks",
        "_body",
        "_chunk_at",
        "_chunks",
        "_closed",
        "_counting",
        "_fields",
        "_first",
        "_forwarded",
        "_head",
        "_in_head",
        "_key",
        "_kind",
        "_last",
        "_length",
        "_max_header",
        "_old",
        "_queue",
        "_secret",
        "_session",
        "_size",
        "_token",
        "_url",
        "parser",
    )

    def __init__(self, front: Front):
        super().__init__(front)
        self.parser = httptools.HttpRequestParser(self)
        self._first: HttpRequest | None = None  # the oldest request whose reply has not left
        self._queue: deque[HttpRequest] | None = None  # those behind it; an empty one is a third of an idle connection
        self._closed = False  # no more requests are taken from this connection
        self._last: HttpRequest | None = None  # refused before it was complete
        self._old: bool | None = None  # whether this client speaks HTTP/1.0, told from its first request
        self._in_head = self._counting = False
        self._max_header = front.config.max_header
        self._fields: tuple[bytes, bytes, bytes, bytes] | None = None  # of a chunked request, as its head said
        self._begin()

    def _begin(self) -> None:
        self._url = self._session = self._kind = self._key = self._token = self._length = b""
        self._body = self._secret = self._forwarded = b""
        self._chunks: bytearray | None = None
        self._size = self._head = self._asks = 0

    # --- what the parser tells ----------------------------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        if self._closed:
            return
        self.front.bytes_in += len(data)
        self._counting = len(data) > self._max_header  # a shorter piece cannot hold headers that are too long
        rest = data
        while True:
            try:
                self.parser.feed_data(rest)
            except httptools.HttpParserUpgrade as e:
                rest = self._without_upgrade() + rest[e.args[0] :]
                self.parser = httptools.HttpRequestParser(self)
                if rest and not self._closed:
                    continue
            except httptools.HttpParserCallbackError as e:
                logger.error("a request could not be handled", exc_info=e.__context__ or e)
                self.transport.abort()
            except httptools.HttpParserError as e:
                if not self._closed:
                    self._refuse(malformed(f"not HTTP: {e.__cause__ or e}"))
            break
        if self._in_head and not self._closed:
            self._count(data)

    def _without_upgrade(self) -> bytes:
        """HTTP/2 or websockets are offered and not taken. The parser then believes that the body is the other protocol's, so it gets
        the head once more, without the offer."""
        if self._asks != _AGAIN:
            return b""  # CONNECT, which has been refused
        self._closed = False
        first = b"%b %b HTTP/%b" % (self.parser.get_method(), self._url, self.parser.get_http_version().encode())
        lines = [first, b"session: " + self._session, b"key: " + self._key, b"token: " + self._token]
        lines += [
            b"step_kind: " + self._kind,
            b"session_secret: " + self._secret,
            b"x-forwarded-for: " + self._forwarded,
        ]
        if self._length:
            lines.append((b"content-length: " if self._length.isdigit() else b"transfer-encoding: ") + self._length)
        return b"\r\n".join([*lines, b"", b""])

    def _count(self, data: bytes) -> None:
        """A head, or the trailer of a chunked body, goes on behind these bytes: is it too long already?"""
        if self._chunks is None:
            # of its first piece only what follows the requests before it
            self._head += len(data) if self._head else len(data) - data.rfind(self._url)
        elif self._size == self._chunk_at:  # else these are bytes of a chunk, which have their own limit
            self._head += len(data) if self._head else 1
        if self._head > self._max_header:
            self._too_long()

    def on_message_begin(self) -> None:
        if not self._closed:
            self._begin()
            self._in_head = True
            self.receiving_since = perf_counter()

    def on_url(self, url: bytes) -> None:
        self._url = self._url + url if self._url else url

    def on_header(self, name: bytes, value: bytes) -> None:
        what = _lookup(name)
        if not what:
            if what is None:
                what = _header(name)
            if self._counting:
                self._size += len(name) + len(value) + 4
            if not what:
                return
        if what == _SESSION:
            self._session = value
        elif what == _KIND:
            self._kind = value
        elif what == _KEY:
            self._key = value
        elif what == _TOKEN:
            self._token = value
        elif what == _LENGTH:
            self._length = value
            # refused before it is sent, not after
            if value.isdigit() and len(value) <= 20 and int(value) > self.front.config.max_body and not self._closed:
                self._too_large(int(value))
        elif what == _CODING:
            self._length = value
        elif what == _SECRET:
            self._secret = value
        elif what == _FORWARDED and self._chunks is None:  # a trailer is the client's own, whoever passes it on
            self._forwarded = value
        elif what == _UPGRADE or value.lower() == b"100-continue":
            self._asks = max(self._asks, what)

    def on_headers_complete(self) -> None:
        self._in_head = False
        if self._old is None:
            self._old = self.parser.get_http_version() == "1.0"
        if self._size + len(self._url) > self._max_header and not self._closed:
            self._too_long()
        self._size = 0
        if self._asks and not self._closed:
            if self._asks == _UPGRADE and self.parser.should_upgrade():
                self._closed, self._asks = True, _AGAIN
            # behind replies that have not left it would be taken for one of them; a client sends its body without it, a little later
            elif self._asks == _EXPECT and self._first is None:
                self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def on_body(self, body: bytes) -> None:
        self._size += len(body)
        if self._size > self.front.config.max_body:
            if not self._closed:
                self._too_large(self._size)
        elif not self._body:
            self._body = body
        elif self._chunks is None:
            self._chunks = bytearray(body)
        else:
            self._chunks += body

    def on_chunk_header(self) -> None:
        if self._chunks is None:
            self._chunks = bytearray()
            self._fields = (self._session, self._kind, self._key, self._token)
        # The last chunk has no bytes: what follows it is a trailer, and as long as a client likes.
        self._in_head, self._head, self._chunk_at = True, 0, self._size

    def on_chunk_complete(self) -> None:
        self._in_head = False

    def _in_pieces(self, chunks: bytearray) -> bytes:
        """The body of a request that came in several pieces. A trailer changes nothing of what its head said."""
        if self._fields is not None:
            (self._session, self._kind, self._key, self._token), self._fields = self._fields, None
        return self._body + chunks

    def on_message_complete(self) -> None:
        self.receiving_since = None
        if self._closed:
            return
        parser = self.parser
        keep = parser.should_keep_alive()
        body = self._body if self._chunks is None else self._in_pieces(self._chunks)
        request = HttpRequest(KINDS.get(self._kind, -1), self._session, self._key, body, self, not keep)
        if self._first is None:
            self._first = request
        else:
            self._line_up(request)
        self.outstanding += 1
        if not keep:
            self._closed = True
        refusal = self._check(request)
        if refusal is not None:
            self.front.unknown += 1
            self.reply(request, refusal.status, b"" if parser.get_method() == b"HEAD" else refusal.body)
            return
        if self.front.access.marks:
            self.front.access.mark(request, self._secret, self._client())
        self.sessions.handle(request)
        if self.outstanding >= MAX_OUTSTANDING:
            self.pause()

    def _client(self) -> str:
        """What this request is counted by."""
        return self.front.access.proxies.client(self.address, self._forwarded) if self._forwarded else self.address

    def _line_up(self, request: HttpRequest) -> None:
        if self._first is None:
            self._first = request
        else:
            self._queue = self._queue or deque()
            self._queue.append(request)

    def _check(self, request: HttpRequest) -> Refusal | None:
        url = self._url
        if url != b"/step" and url.split(b"?", 1)[0] != b"/step":
            return Refusal(404, "no_path", f"there is no {show(url)} here: games POST to /step")
        if self.parser.get_method() != b"POST":
            method = self.parser.get_method().decode("ascii", "replace")
            return Refusal(405, "bad_method", f"expected POST /step, got {method}")
        refusal = self.front.access.refusal(self._token, self._client())
        if refusal is not None:
            return refusal
        if request.kind < 0:
            kind = KINDS.get(self._kind.strip().lower())
            if kind is None:
                return Refusal(
                    400, "bad_kind", f"expected step_kind start, tick, end, stop or auto, got {show(self._kind)}"
                )
            request.kind = kind
        if len(request.session) > MAX_NAME or len(request.key) > MAX_NAME:
            return malformed(f"a session and a key have at most {MAX_NAME} bytes")
        return None

    # --- refusals that end the connection -----------------------------------------------------------------------------

    def _refuse(self, refusal: Refusal) -> None:
        """Answer the request that is arriving and take no more: where it ends is not known."""
        self.front.unknown += 1
        self._closed = True
        self._in_head = False
        self.receiving_since = None
        self._last = HttpRequest(0, b"", b"", b"", self, True)
        self._line_up(self._last)
        self.outstanding += 1
        self.reply(self._last, refusal.status, refusal.body)

    def _too_large(self, size: int) -> None:
        self._refuse(
            Refusal(413, "too_large", f"a body has at most {self.front.config.max_body} bytes, this one {size} or more")
        )

    def _too_long(self) -> None:
        self._refuse(Refusal(431, "header_too_large", f"headers have at most {self.front.config.max_header} bytes"))

    def too_slow(self) -> None:
        self._refuse(SLOW)

    def turn_away(self, refusal: Refusal) -> None:
        self._refuse(refusal)

    def shut(self) -> None:
        self._closed = True
        super().shut()

    # --- replies ------------------------------------------------------------------------------------------------------

    def reply(self, request: HttpRequest, status: int, body: bytes) -> None:
        if request is self._first and not self._queue:
            self._first = None
            self._write(request, status, body)
        else:
            request.response = (status, body)
            while (first := self._first) is not None and first.response is not None:
                self._first = self._queue.popleft() if self._queue else None
                self._write(first, *first.response)

    def _write(self, request: HttpRequest, status: int, body: bytes) -> None:
        transport = self.transport
        self.answered()
        if transport is None:
            return  # the client is gone
        close = request.close or (self.front.closing and not self.outstanding)
        secret = b"" if status != 200 or request.kind != START else getattr(request, "secret", b"")
        if status == 200 and not close and not self._old and not secret and len(body) < _LARGE:
            data = _OK % (len(body), body)
            self.front.bytes_out += len(data)
            transport.write(data)
            return
        kind = "application/octet-stream" if status == 200 else "application/json"
        lines = [
            f"HTTP/1.1 {status} {REASONS.get(status, 'Error')}",
            f"Content-Type: {kind}",
            f"Content-Length: {len(body)}",
        ]
        if status in (429, 503):
            lines.append("Retry-After: 1")
        if secret:
            lines.append(f"session_secret: {secret.decode()}")
        if close:
            lines.append("Connection: close")
        elif self._old:
            lines.append("Connection: keep-alive")
        head = "\r\n".join([*lines, "", ""]).encode()
        self.front.bytes_out += len(head) + len(body)
        transport.write(head)
        transport.write(body)
        if request is self._last:
            self.linger()
        elif close:
            transport.close()
