"""HTTP/1.1 for `POST /step` on httptools' parser: everything between the parser and the session table. `tcp.py` is the
other transport."""

from __future__ import annotations

import logging
from collections import deque
from time import perf_counter
from typing import Any

import httptools

from bray.serving.connection import MAX_OUTSTANDING, SLOW, SMALL, Connection, Front
from bray.serving.protocol import KINDS, MAX_NAME, REASONS, START, Refusal, malformed, show
from bray.serving.request import Request

logger = logging.getLogger("bray.serving")

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
SPELLINGS: dict[bytes, int] = dict(_HEADERS)  # as clients spell them: a request's ten headers must not cost ten lower()
_lookup = SPELLINGS.get
_OK = b"HTTP/1.1 200 OK\r\nContent-Type: application/octet-stream\r\nContent-Length: %d\r\n\r\n%b"
_SKIPPED = 64 << 10  # bytes of a refused request's body that are read for the sake of the connection
_LARGE = 64 << 10  # a reply above this is not copied behind its head
_TWO_SESSIONS = b"two sessions in one head" * 32  # stands for two that differ; longer than a name may be


def _header(name: bytes) -> int:
    found = _HEADERS.get(name.lower(), _OTHER)
    if len(SPELLINGS) < 4096 and len(name) <= 64:
        SPELLINGS[name] = found
    return found


class HttpRequest(Request):
    __slots__ = ("close", "connection", "response")

    def __init__(self, kind: int, session: bytes, key: bytes, body: bytes, connection: HttpConnection, close: bool):
        self.kind, self.session, self.key, self.body = kind, session, key, body
        self.arrived = perf_counter()
        self.connection, self.close = connection, close
        self.response: tuple[int, bytes] | None = None

    def reply(self, status: int, body: bytes) -> None:
        self.connection.front.held -= len(self.body)
        self.body = b""  # replies leave in order: this one may wait for those before it
        self.connection.reply(self, status, body)


class HttpConnection(Connection):
    """One client. Requests may be pipelined; replies leave in the order of the requests."""

    __slots__ = (
        "_asks",
        "_body",
        "_chunk_at",
        "_chunks",
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
        "_number",
        "_old",
        "_queue",
        "_secret",
        "_session",
        "_size",
        "_skips",
        "_tail",
        "_token",
        "_url",
        "parser",
    )

    def __init__(self, front: Front):
        super().__init__(front)
        self.parser: Any = httptools.HttpRequestParser(self)
        self._first: HttpRequest | None = None  # the oldest request whose reply has not left
        self._queue: deque[HttpRequest] | None = None  # those behind it; an empty one is a third of an idle connection
        self._last: HttpRequest | None = None  # refused before it was complete
        self._old: bool | None = None  # whether this client speaks HTTP/1.0, told from its first request
        self._in_head = False
        self._max_header = front.config.max_header
        self._begin()

    def _begin(self) -> None:
        self._url = self._session = self._kind = self._key = self._token = self._length = b""
        self._body = self._secret = self._forwarded = self._tail = b""
        self._chunks: bytearray | None = None
        self._fields: tuple[bytes, bytes] | None = None  # session and key of a chunked request, as its head said
        self._size = self._head = self._asks = 0
        self._skips = False  # refused by its head: its body is thrown away

    @property
    def new(self) -> bool:
        return self._old is None

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._drop_body()
        # The parser holds this connection, and so does every request: nothing of a client that is gone may wait for the
        # garbage collector.
        self.parser = self._first = self._queue = self._last = None

    # --- what the parser tells ----------------------------------------------------------------------------------------

    def feed_part(self, data: bytes, at: int) -> tuple[int, int]:
        in_body = self.receiving_since is not None and not self._in_head and self._length.isdigit()
        if in_body and (left := int(self._length) - self._size) > 0:
            self.feed(memoryview(data)[at : at + left])
            return at + left, 0
        end = data.find(b"\r\n\r\n", at, at + SMALL) + 4
        if end < 4:
            end = at + SMALL
        self.feed(data[at:end])
        return end, 1

    def feed(self, data: bytes | memoryview) -> None:
        if self._in_head and self._head and self._chunks is None and self._ends_too_late(data):
            self._too_long()
            return
        rest: Any = data
        while True:
            try:
                self.parser.feed_data(rest)
            except httptools.HttpParserUpgrade as e:
                rest = self._without_upgrade() + rest[e.args[0] :]
                self.parser = httptools.HttpRequestParser(self)
                if rest and not self.ended:
                    continue
            except httptools.HttpParserCallbackError as e:
                logger.error("a request could not be handled", exc_info=e.__context__ or e)
                self.transport.abort()
            except httptools.HttpParserError as e:
                if not self.ended:
                    self._refuse(malformed(f"not HTTP: {e.__cause__ or e}"))
            break
        if self._in_head and not self.ended:
            self._count(bytes(data))

    def _without_upgrade(self) -> bytes:
        """HTTP/2 or websockets are offered and not taken. The parser then believes that the body is the other
        protocol's, so it gets the head once more, without the offer."""
        if self._asks != _AGAIN:
            return b""  # CONNECT, which has been refused
        self.ended = False
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
        self._tail = (self._tail + data)[-3:]
        if self._head > self._max_header:
            self._too_long()

    def _ends_too_late(self, data: bytes | memoryview) -> bool:
        """Whether a head that goes on in these bytes is longer than one may be. Asked before they are parsed: the
        request might be answered."""
        joined = self._tail + bytes(data)
        end = joined.find(b"\r\n\r\n") + 4 - len(self._tail)
        return self._head + (end if end > 0 else len(data)) > self._max_header

    def on_message_begin(self) -> None:
        if not self.ended:
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
            if not what:
                return
        if what == _SESSION:
            # the same one twice is a proxy's doing, which writes what an older client calls game_id as session too
            self._session = _TWO_SESSIONS if self._session and self._session != value else value
        elif what == _KIND:
            self._kind = value
        elif what == _KEY:
            self._key = value
        elif what == _TOKEN:
            self._token = value
        elif what in (_LENGTH, _CODING):
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
        if self.ended:
            return
        if self._asks == _UPGRADE and self.parser.should_upgrade():
            self.ended, self._asks = True, _AGAIN
            return
        # refused before the body is sent, not after; and not a byte of it is kept
        refusal = self._check_head()
        if refusal is not None:
            self._skip(refusal)
        elif self._length.isdigit() and int(self._length) > self.front.config.max_body:
            self._too_large(int(self._length))
        # behind replies that have not left it would be taken for one of them; a client sends its body without it, a
        # little later
        elif self._asks == _EXPECT and self._first is None:
            self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def on_body(self, body: bytes) -> None:
        self._size += len(body)
        front = self.front
        if self._skips or self.ended:
            if self._skips and self._size > _SKIPPED:  # in chunks
                self.transport.abort()
            return
        if self._size > front.config.max_body:
            self._too_large(self._size)
            return
        if front.held + len(body) > front.config.max_bodies:
            self._skip(front.no_room())
            return
        front.held += len(body)
        if not self._body:
            self._body = body
        elif self._chunks is None:
            self._chunks = bytearray(body)
        else:
            self._chunks += body

    def _drop_body(self) -> None:
        """Give up what is there of a body that is still arriving."""
        self.front.held -= len(self._body) + len(self._chunks or b"")
        self._body, self._chunks = b"", None

    def on_chunk_header(self) -> None:
        if self._chunks is None:
            self._chunks = bytearray()
            self._fields = (self._session, self._key)
        # The last chunk has no bytes: what follows it is a trailer, and as long as a client likes.
        self._in_head, self._head, self._chunk_at = True, 0, self._size

    def on_chunk_complete(self) -> None:
        self._in_head = False

    def _in_pieces(self, chunks: bytearray) -> bytes:
        """The body of a request that came in several pieces. A trailer changes nothing of what its head said."""
        if self._fields is not None:
            self._session, self._key = self._fields
        return self._body + chunks

    def on_message_complete(self) -> None:
        self.receiving_since = None
        if self.ended or self._skips:
            return
        keep = self.parser.should_keep_alive()
        body = self._body if self._chunks is None else self._in_pieces(self._chunks)
        self._body, self._chunks = b"", None  # it is the request's now
        request = HttpRequest(self._number, self._session, self._key, body, self, not keep)
        if self._first is None:
            self._first = request
        else:
            self._line_up(request)
        self.outstanding += 1
        if not keep:
            self.ended = True
        if self.front.access.marks:
            self.front.access.mark(request, self._secret, self._client())
        if self.carried is not None:
            self.carry(request)
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

    def _check_head(self) -> Refusal | None:
        """What is wrong with a request, as far as its head tells."""
        url = self._url
        if url != b"/step" and url.split(b"?", 1)[0] != b"/step":
            return Refusal(404, "no_path", f"there is no {show(url)} here: games POST to /step")
        if self.parser.get_method() != b"POST":
            method = self.parser.get_method().decode("ascii", "replace")
            return Refusal(405, "bad_method", f"expected POST /step, got {method}")
        refusal = self.front.access.refusal(self._token, self._client())
        if refusal is not None:
            return refusal
        number = KINDS.get(self._kind, -1)
        if number < 0:
            number = KINDS.get(self._kind.strip().lower(), -1)
            if number < 0:
                expected = "expected step_kind start, tick, end, stop or auto"
                return Refusal(400, "bad_kind", f"{expected}, got {show(self._kind)}")
        self._number = number
        if len(self._session) > MAX_NAME or len(self._key) > MAX_NAME:
            if self._session == _TWO_SESSIONS:
                return malformed("expected one session (or game_id) header, got two that differ")
            return malformed(f"a session and a key have at most {MAX_NAME} bytes")
        return None

    # --- refusals -----------------------------------------------------------------------------------------------------

    def _skip(self, refusal: Refusal) -> None:
        """Answer the request that is arriving; its body is read and thrown away, unless that is not worth the
        connection."""
        large = self._length.isdigit() and int(self._length) > _SKIPPED
        if large or self._asks == _EXPECT or not self.parser.should_keep_alive():
            self._refuse(refusal)
            return
        self.front.unknown += 1
        self._drop_body()
        self._skips = True
        self.outstanding += 1
        request = HttpRequest(0, b"", b"", b"", self, False)
        self._line_up(request)
        self.reply(request, refusal.status, b"" if self.parser.get_method() == b"HEAD" else refusal.body)

    def _refuse(self, refusal: Refusal) -> None:
        """Answer the request that is arriving and take no more: where it ends is not known."""
        self.front.unknown += 1
        self._drop_body()
        self.ended = True
        self._in_head = False
        self.receiving_since = None
        self._last = HttpRequest(0, b"", b"", b"", self, True)
        self._line_up(self._last)
        self.outstanding += 1
        head = self.parser is not None and self.parser.get_method() == b"HEAD"
        self.reply(self._last, refusal.status, b"" if head else refusal.body)

    def _too_large(self, size: int) -> None:
        self._refuse(
            Refusal(413, "too_large", f"a body has at most {self.front.config.max_body} bytes, this one {size} or more")
        )

    def _too_long(self) -> None:
        self._refuse(Refusal(431, "header_too_large", f"headers have at most {self.front.config.max_header} bytes"))

    def too_slow(self) -> None:
        if self._skips:  # it has its answer
            self.transport.abort()
        else:
            self._refuse(SLOW)

    def turn_away(self, refusal: Refusal) -> None:
        self._refuse(refusal)

    # --- replies ------------------------------------------------------------------------------------------------------

    def reply(self, request: HttpRequest, status: int, body: bytes) -> None:
        if self.transport is None:
            return  # the client is gone
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
            return  # it went while the replies before this one were written
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
            self.close()
