"""HTTP/1.1 for `POST /step`, on httptools' parser. Everything between the parser and the session table is here."""

from __future__ import annotations

import logging
from collections import deque
from time import perf_counter

import httptools

from bray.serving.connections import BAD_TOKEN, MAX_OUTSTANDING, SLOW, Connection, Front
from bray.serving.protocol import KINDS, MAX_NAME, REASONS, Refusal, malformed, show
from bray.serving.sessions import Request

logger = logging.getLogger("bray.serving")

_OTHER, _SESSION, _KIND, _KEY, _TOKEN, _LENGTH, _EXPECT = range(7)
_HEADERS = {
    b"session": _SESSION,
    b"game_id": _SESSION,  # older clients
    b"step_kind": _KIND,
    b"step-kind": _KIND,  # what is left of step_kind behind proxies that drop underscores
    b"key": _KEY,
    b"token": _TOKEN,
    b"content-length": _LENGTH,
    b"expect": _EXPECT,
}
_seen: dict[bytes, int] = dict(_HEADERS)  # as clients spell them: a request's ten headers must not cost ten lower()
_OK = b"HTTP/1.1 200 OK\r\nContent-Type: application/octet-stream\r\nContent-Length: %d\r\n\r\n%b"
_LARGE = 64 << 10  # a reply above this is not copied behind its head


def _header(name: bytes) -> int:
    found = _HEADERS.get(name.lower(), _OTHER)
    if len(_seen) < 4096:
        _seen[bytes(name)] = found
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
        "_body",
        "_chunks",
        "_closed",
        "_expects",
        "_head",
        "_in_head",
        "_key",
        "_kind",
        "_old",
        "_queue",
        "_session",
        "_size",
        "_token",
        "_url",
        "parser",
    )

    def __init__(self, front: Front):
        super().__init__(front)
        self.parser = httptools.HttpRequestParser(self)
        self._queue: deque[HttpRequest] = deque()  # requests whose replies have not left
        self._closed = False  # no more requests are taken from this connection
        self._old: bool | None = None  # whether this client speaks HTTP/1.0, told from its first request
        self._in_head = False
        self._begin()

    def _begin(self) -> None:
        self._url = self._session = self._kind = self._key = self._token = b""
        self._body = b""
        self._chunks: list[bytes] | None = None
        self._size = self._head = 0
        self._expects = False

    # --- what the parser tells ----------------------------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        if self._closed:
            return
        self.front.bytes_in += len(data)
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            self._closed = True  # HTTP/2, websockets: this request is answered, the other protocol is not spoken
        except httptools.HttpParserCallbackError as e:
            logger.error("a request could not be handled", exc_info=e.__context__ or e)
            self.transport.abort()
        except httptools.HttpParserError as e:
            if not self._closed:
                self._refuse(malformed(f"not HTTP: {e.__cause__ or e}"))
        if self._in_head and not self._closed:
            self._head += len(data)
            if self._head > self.front.config.max_header:
                self._too_long()

    def on_message_begin(self) -> None:
        if not self._closed:
            self._begin()
            self._in_head = True
            self.receiving_since = perf_counter()

    def on_url(self, url: bytes) -> None:
        self._url = self._url + url if self._url else url

    def on_header(self, name: bytes, value: bytes) -> None:
        self._size += len(name) + len(value) + 4
        what = _seen.get(name)
        if what is None:
            what = _header(name)
        if what == _OTHER:
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
            # refused before it is sent, not after
            if value.isdigit() and len(value) < 20 and int(value) > self.front.config.max_body and not self._closed:
                self._too_large(int(value))
        else:
            self._expects = value.lower() == b"100-continue"

    def on_headers_complete(self) -> None:
        self._in_head = False
        if self._old is None:
            self._old = self.parser.get_http_version() == "1.0"
        if self._size + len(self._url) > self.front.config.max_header and not self._closed:
            self._too_long()
        self._size = 0
        # behind replies that have not left it would be taken for one of them; a client sends its body without it, a little later
        if self._expects and not self._closed and not self._queue:
            self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def on_body(self, body: bytes) -> None:
        self._size += len(body)
        if self._size > self.front.config.max_body:
            if not self._closed:
                self._too_large(self._size)
        elif not self._body:
            self._body = body
        elif self._chunks is None:
            self._chunks = [self._body, body]
        else:
            self._chunks.append(body)

    def on_message_complete(self) -> None:
        self.receiving_since = None
        if self._closed:
            return
        parser = self.parser
        keep = parser.should_keep_alive()
        body = self._body if self._chunks is None else b"".join(self._chunks)
        request = HttpRequest(KINDS.get(self._kind, -1), self._session, self._key, body, self, not keep)
        self._queue.append(request)
        self.outstanding += 1
        if not keep:
            self._closed = True
        refusal = self._check(request)
        if refusal is not None:
            self.front.unknown += 1
            self.reply(request, refusal.status, refusal.body)
            return
        self.sessions.handle(request)
        if self.outstanding >= MAX_OUTSTANDING:
            self.pause()

    def _check(self, request: HttpRequest) -> Refusal | None:
        url = self._url
        if url != b"/step" and url.split(b"?", 1)[0] != b"/step":
            return Refusal(404, "no_path", f"there is no {show(url)} here: games POST to /step")
        if self.parser.get_method() != b"POST":
            method = self.parser.get_method().decode("ascii", "replace")
            return Refusal(405, "bad_method", f"expected POST /step, got {method}")
        if not self.front.allowed(self._token):
            return BAD_TOKEN
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
        request = HttpRequest(0, b"", b"", b"", self, False)
        self._queue.append(request)
        self.outstanding += 1
        self.reply(request, refusal.status, refusal.body)
        self.linger()

    def _too_large(self, size: int) -> None:
        self._refuse(
            Refusal(413, "too_large", f"a body has at most {self.front.config.max_body} bytes, this one {size} or more")
        )

    def _too_long(self) -> None:
        self._refuse(Refusal(431, "header_too_large", f"headers have at most {self.front.config.max_header} bytes"))

    def too_slow(self) -> None:
        self._refuse(SLOW)

    def shut(self) -> None:
        self._closed = True
        super().shut()

    # --- replies ------------------------------------------------------------------------------------------------------

    def reply(self, request: HttpRequest, status: int, body: bytes) -> None:
        queue = self._queue
        if queue and queue[0] is request and len(queue) == 1:
            queue.popleft()
            self._write(request, status, body)
        else:
            request.response = (status, body)
            while queue and queue[0].response is not None:
                first = queue.popleft()
                self._write(first, *first.response)  # type: ignore[misc]

    def _write(self, request: HttpRequest, status: int, body: bytes) -> None:
        transport = self.transport
        self.answered()
        if transport is None:
            return  # the client is gone
        close = request.close or (self.front.closing and not self.outstanding)
        if status == 200 and not close and not self._old and len(body) < _LARGE:
            data = _OK % (len(body), body)
            self.front.bytes_out += len(data)
            transport.write(data)
            return
        kind = "application/octet-stream" if status == 200 else "application/json"
        lines = [f"HTTP/1.1 {status} {REASONS[status]}", f"Content-Type: {kind}", f"Content-Length: {len(body)}"]
        if status == 503:
            lines.append("Retry-After: 1")
        if close or self._closed:
            lines.append("Connection: close")
        elif self._old:
            lines.append("Connection: keep-alive")
        head = "\r\n".join([*lines, "", ""]).encode()
        self.front.bytes_out += len(head) + len(body)
        transport.write(head)
        transport.write(body)
        if close:
            transport.close()
