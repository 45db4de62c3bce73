"""Framed TCP: six int64, then session, step_kind, key, token and body. Many sessions may share one connection."""

from __future__ import annotations

from time import perf_counter

from bray.serving.connection import MAX_OUTSTANDING, SLOW, Connection, Front
from bray.serving.http import HttpConnection
from bray.serving.protocol import ERROR_MARK, KINDS, MAX_NAME, REPLY_HEAD, REQUEST_HEAD, Refusal, malformed, show
from bray.serving.request import Request

_HEAD = REQUEST_HEAD.size


class TcpRequest(Request):
    __slots__ = ("connection", "time")

    def __init__(self, kind: int, session: bytes, key: bytes, body: bytes, connection: TcpConnection, time: int):
        self.kind, self.session, self.key, self.body = kind, session, key, body
        self.arrived = perf_counter()
        self.connection, self.time = connection, time
        connection.front.held += len(body)

    def reply(self, status: int, body: bytes) -> None:
        self.connection.front.held -= len(self.body)
        self.connection.reply(self.session, self.time, status, body)


class TcpConnection(Connection):
    """One client. A session's replies come in the order of its requests, those of different sessions as they are
    ready."""

    __slots__ = ("_checked", "_frame", "_skips", "_wanted")

    def __init__(self, front: Front):
        super().__init__(front)
        self._frame = bytearray()  # one that is not complete
        self._wanted = _HEAD  # bytes of it after which to look again: its head, its names, all of it
        self._skips = 0  # bytes of a refused frame that are thrown away
        self._checked = False  # whether the token of the frame that is not complete is known to be good

    @property
    def new(self) -> bool:
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._drop_frame()

    # --- frames -------------------------------------------------------------------------------------------------------

    def feed(self, data: bytes) -> None:
        at = 0
        while at < len(data) and not self.ended:
            at, _ = self.feed_part(data, at)

    def feed_part(self, data: bytes, at: int) -> tuple[int, int]:
        if self._skips:
            taken = min(self._skips, len(data) - at)
            self._skips -= taken
            if not self._skips:
                self.receiving_since = None
            return at + taken, 0
        if not self._frame:
            used = self._look(data, at)
            if used:
                return at + used, 1
        taken = min(self._wanted - len(self._frame), len(data) - at)
        at += taken
        if not self._keep(data[at - taken : at]):
            self._skips -= taken
        elif len(self._frame) == self._wanted and self._look(bytes(self._frame), 0):
            self._drop_frame()
            return at, 1
        return at, 0

    def _look(self, data: bytes, at: int) -> int:
        """Handle the frame that begins there; returns how many bytes it took, or 0 when more must be there first
        (`_wanted`). One that is refused is answered as soon as its names are there; the rest of it is thrown away."""
        size = len(data) - at
        if size < _HEAD:
            self._wanted = _HEAD
            return 0
        session, kind, key, token, body, time = REQUEST_HEAD.unpack_from(data, at)
        broken = self._broken(session, kind, key, token, body)
        if broken is not None:
            self._break(time, broken)
            return size
        a = at + _HEAD
        b = a + session
        c = b + kind
        d = c + key
        e = d + token
        if size < e - at:
            self._wanted = e - at
            return 0
        self._wanted = e - at + body
        if size < self._wanted:
            refusal = self._refusal(data[b:c], data[d:e], 0)
            if refusal is None:
                self._checked = True
                return 0
            self._skips = self._wanted - size
            self.receiving_since = self.receiving_since or perf_counter()
        else:
            refusal = self._refusal(data[b:c], data[d:e], body)
        if refusal is not None:
            self._refuse(data[a:b], time, refusal)
            return min(size, self._wanted)
        end: int = e + body
        self._request(TcpRequest(KINDS[data[b:c]], data[a:b], data[c:d], data[e:end], self, time))
        return end - at

    def _broken(self, session: int, kind: int, key: int, token: int, body: int) -> Refusal | None:
        """Why a head with these lengths cannot be one."""
        if not (0 <= session <= MAX_NAME and 0 <= kind <= MAX_NAME and 0 <= key <= MAX_NAME and 0 <= token <= MAX_NAME):
            names = "lengths of session, step_kind, key and token"
            return malformed(f"{names} are 0 to {MAX_NAME}, got {(session, kind, key, token)}")
        limit = self.front.config.max_body
        if not 0 <= body <= limit:
            return Refusal(413, "too_large", f"a body has 0 to {limit} bytes, this one says {body}")
        return None

    def _refusal(self, kind: bytes, token: bytes, body: int) -> Refusal | None:
        front = self.front
        if not self._checked:
            refusal = front.access.refusal(token, self.address)
            if refusal is not None:
                return refusal
        if kind not in KINDS:
            expected = "expected step_kind start, tick, end, stop or auto"
            return Refusal(400, "bad_kind", f"{expected}, got {show(kind)}")
        if front.held - len(self._frame) + body > front.config.max_bodies:
            return front.no_room()
        return None

    def _request(self, request: TcpRequest) -> None:
        self.outstanding += 1
        self._checked = False
        if self.front.access.marks:
            self.front.access.mark(request, b"", self.address)
        if self.carried is not None:
            self.carry(request)
        self.sessions.handle(request)
        if self.outstanding >= MAX_OUTSTANDING:
            self.pause()

    # --- a frame that is not complete ---------------------------------------------------------------------------------

    def _keep(self, data: bytes) -> bool:
        """Add to the frame; False when there is no room for it, and the frame was refused."""
        front = self.front
        if front.held + len(data) > front.config.max_bodies and len(self._frame) >= _HEAD:
            session, *_, time = REQUEST_HEAD.unpack_from(self._frame)
            self._skips = self._wanted - len(self._frame)
            self._refuse(bytes(self._frame[_HEAD : _HEAD + session]), time, front.no_room())
            self._drop_frame()
            return False
        self.receiving_since = self.receiving_since or perf_counter()
        self._frame += data
        front.held += len(data)
        return True

    def _drop_frame(self) -> None:
        self.front.held -= len(self._frame)
        self._frame = bytearray()
        self._checked = False
        if not self._skips:
            self.receiving_since = None

    # --- refusals -----------------------------------------------------------------------------------------------------

    def _refuse(self, session: bytes, time: int, refusal: Refusal) -> None:
        self.front.unknown += 1
        self.outstanding += 1
        self.reply(session, time, refusal.status, refusal.body)

    def _break(self, time: int, refusal: Refusal) -> None:
        """A frame that cannot be one: where the next begins is not known, so the connection ends."""
        self.ended = True
        self._drop_frame()
        self._refuse(b"", time, refusal)

    def too_slow(self) -> None:
        if self._skips:  # it has its answer
            self.transport.abort()
        else:
            self._break(0, SLOW)

    # --- replies ------------------------------------------------------------------------------------------------------

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
                self.close()
            elif self.ended:
                self.linger()


class FirstByte(Connection):
    """A connection that has said nothing yet. HTTP begins with a letter (or an empty line), a frame with the zero bytes
    of a length."""

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
