"""Framed TCP: six int64, then session, step_kind, key, token and body. Many sessions may share one connection."""

from __future__ import annotations

from time import perf_counter

from bray.serving.http import MAX_OUTSTANDING, SLOW, Connection, Front, HttpConnection
from bray.serving.protocol import ERROR_MARK, KINDS, MAX_NAME, REPLY_HEAD, REQUEST_HEAD, Refusal, malformed, show
from bray.serving.sessions import Request

_HEAD = REQUEST_HEAD.size


class TcpRequest(Request):
    __slots__ = ("connection", "time")

    def __init__(self, kind: int, session: bytes, key: bytes, body: bytes, connection: TcpConnection, time: int):
        self.kind, self.session, self.key, self.body = kind, session, key, body
        self.arrived = perf_counter()
        self.connection, self.time = connection, time

    def reply(self, status: int, body: bytes) -> None:
        self.connection.reply(self.session, self.time, status, body)


class TcpConnection(Connection):
    """One client. A session's replies come in the order of its requests, those of different sessions as they are ready."""

    __slots__ = ("_broken", "_parts", "_size", "_wanted")

    def __init__(self, front: Front):
        super().__init__(front)
        self._parts: list[bytes] = []  # of a frame that is not complete
        self._size = 0
        self._wanted = _HEAD
        self._broken = False

    def data_received(self, data: bytes) -> None:
        if self._broken:
            return
        self.front.bytes_in += len(data)
        if self._parts:
            self._parts.append(data)
            self._size += len(data)
            if self._size < self._wanted:
                return
            data = b"".join(self._parts)
            self._parts.clear()
        at = self._frames(data)
        if at < len(data) and not self._broken:
            rest = data[at:] if at else data
            self._parts, self._size = [rest], len(rest)
            if self.receiving_since is None or at:
                self.receiving_since = perf_counter()
        else:
            self.receiving_since = None

    def _frames(self, data: bytes) -> int:
        """Handle the complete frames in these bytes; returns where the rest begins."""
        at, end = 0, len(data)
        while end - at >= _HEAD and not self._broken:
            session, kind, key, token, body, time = REQUEST_HEAD.unpack_from(data, at)
            if not (
                0 <= session <= MAX_NAME and 0 <= kind <= MAX_NAME and 0 <= key <= MAX_NAME and 0 <= token <= MAX_NAME
            ):
                self._break(
                    time,
                    malformed(
                        f"lengths of session, step_kind, key and token are 0 to {MAX_NAME}, got {(session, kind, key, token)}"
                    ),
                )
                return end
            if not 0 <= body <= self.front.config.max_body:
                limit = self.front.config.max_body
                self._break(time, Refusal(413, "too_large", f"a body has 0 to {limit} bytes, this one says {body}"))
                return end
            whole = _HEAD + session + kind + key + token + body
            if end - at < whole:
                self._wanted = whole
                return at
            a = at + _HEAD
            b = a + session
            c = b + kind
            d = c + key
            e = d + token
            at += whole
            self._request(data[b:c], data[a:b], data[c:d], data[d:e], data[e:at], time)
        self._wanted = _HEAD
        return at

    def _request(self, kind: bytes, session: bytes, key: bytes, token: bytes, body: bytes, time: int) -> None:
        number = KINDS.get(kind, -1)
        request = TcpRequest(number, session, key, body, self, time)
        self.outstanding += 1
        refusal = self.front.access.refusal(token, self.address)
        if refusal is not None:
            self.front.unknown += 1
            request.reply(refusal.status, refusal.body)
        elif number < 0:
            self.front.unknown += 1
            request.reply(
                400,
                Refusal(400, "bad_kind", f"expected step_kind start, tick, end, stop or auto, got {show(kind)}").body,
            )
        else:
            if self.front.access.marks:
                self.front.access.mark(request, b"", self.address)
            self.sessions.handle(request)
            if self.outstanding >= MAX_OUTSTANDING:
                self.pause()

    def _break(self, time: int, refusal: Refusal) -> None:
        """A frame that cannot be one: where the next begins is not known, so the connection ends."""
        self.front.unknown += 1
        self._broken = True
        self.receiving_since = None
        self.outstanding += 1
        self.reply(b"", time, refusal.status, refusal.body)

    def too_slow(self) -> None:
        self._break(0, SLOW)

    def shut(self) -> None:
        self._broken = True
        super().shut()

    def reply(self, session: bytes, time: int, status: int, body: bytes) -> None:
        self.answered()
        if self.transport is None:
            return  # the client is gone
        if status != 200:
            body = ERROR_MARK + body
        data = REPLY_HEAD.pack(len(session), len(body), time) + session + body
        self.front.bytes_out += len(data)
        self.transport.write(data)
        if not self.outstanding:
            if self.front.closing:
                self.transport.close()
            elif self._broken:
                self.linger()


class FirstByte(Connection):
    """A connection that has said nothing yet. HTTP begins with a letter (or an empty line), a frame with the zero bytes of a length."""

    __slots__ = ()

    def data_received(self, data: bytes) -> None:
        del self.front.open[self]
        self.front.accepted -= 1
        self.front.access.leave(self.address)  # the next line but two takes it again
        protocol = HttpConnection(self.front) if data[:1].isalpha() or data[0] in b"\r\n" else TcpConnection(self.front)
        self.transport.set_protocol(protocol)
        protocol.connection_made(self.transport)
        protocol.data_received(data)

    def too_slow(self) -> None:
        self.transport.close()
