"""The bytes of the game protocol (docs/protocol.md), without sockets.

Requests are built here, replies are read here from whatever pieces arrive; the two clients only move bytes.
"""

from __future__ import annotations

import json
import struct
from typing import Any, NamedTuple

from .errors import ClientError, ConnectionLost, SessionLost

START, TICK, END, AUTO = b"start", b"tick", b"end", b"auto"

ERROR_MARK = b"\0BRAYERR"
"""First bytes of the body of an error reply over TCP; the JSON error object follows."""

STATUS = {
    "malformed": 400,
    "bad_kind": 400,
    "bad_token": 401,
    "bad_secret": 403,
    "no_session": 404,
    "no_path": 404,
    "bad_method": 405,
    "slow_request": 408,
    "session_exists": 409,
    "too_large": 413,
    "no_free_slot": 429,
    "too_many_connections": 429,
    "too_many_requests": 429,
    "too_many_sessions": 429,
    "header_too_large": 431,
    "actor_error": 500,
    "overloaded": 503,
    "draining": 503,
    "tick_timeout": 504,
}
"""A TCP error carries its code only; this is the HTTP status of each."""

MAX_HEAD = 64 * 1024
MAX_REPLY = 1 << 30

_REQUEST = struct.Struct(">6q")
_REPLY = struct.Struct(">3q")


class Reply(NamedTuple):
    """One reply of a server. `session` and `time` are what TCP echoes; `status` is 0 there."""

    body: bytes
    status: int = 0
    retry_after: float | None = None
    keep: bool = True
    session: bytes = b""
    time: int = 0
    secret: bytes = b""
    """What further requests of a session must carry; the reply to a `start` has it, of services that want one."""

    @property
    def failed(self) -> bool:
        """Whether this is an error of the protocol."""
        if self.status:
            return not 200 <= self.status < 300
        return self.body.startswith(ERROR_MARK)


def http_request(
    host: bytes, session: bytes, kind: bytes, key: bytes, token: bytes, body: bytes, secret: bytes = b""
) -> bytes:
    """The bytes of one `POST /step`."""
    parts = [b"POST /step HTTP/1.1\r\nHost: ", host, b"\r\nstep_kind: ", kind]
    if session:
        parts += [b"\r\nsession: ", session]
    if key:
        parts += [b"\r\nkey: ", key]
    if token:
        parts += [b"\r\ntoken: ", token]
    if secret:
        parts += [b"\r\nsession_secret: ", secret]
    parts += [b"\r\nContent-Length: %d\r\n\r\n" % len(body), body]
    return b"".join(parts)


def tcp_request(session: bytes, kind: bytes, key: bytes, token: bytes, body: bytes, time: int) -> bytes:
    """The bytes of one framed request. The reply repeats `time`."""
    head = _REQUEST.pack(len(session), len(kind), len(key), len(token), len(body), time)
    return b"".join((head, session, kind, key, token, body))


class TcpReplies:
    """Reads framed replies."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._need = _REPLY.size

    def feed(self, data: bytes) -> list[Reply]:
        """The replies that are whole now."""
        self._buffer += data
        if len(self._buffer) < self._need:
            return []
        replies = []
        view, at, end = bytes(self._buffer), 0, len(self._buffer)
        while True:
            self._need = _REPLY.size
            if end - at < self._need:
                break
            session_size, body_size, time = _REPLY.unpack_from(view, at)
            if not (0 <= session_size <= MAX_HEAD and 0 <= body_size <= MAX_REPLY):
                raise bad_reply(_tcp_hint(view[at : at + 5], session_size, body_size))
            self._need += session_size + body_size
            if end - at < self._need:
                break
            body_at = at + _REPLY.size + session_size
            at += self._need
            replies.append(Reply(view[body_at:at], session=view[body_at - session_size : body_at], time=time))
        del self._buffer[:at]
        return replies

    def eof(self) -> Reply | None:
        """A framed reply never ends by closing."""
        return None


def _tcp_hint(start: bytes, session_size: int, body_size: int) -> str:
    if start == b"HTTP/":
        return "expected a framed TCP reply, got HTTP: use tcp=False, or switch use_tcp on in the service"
    return f"expected the lengths of a framed reply, got {session_size} and {body_size}"


class HttpReplies:
    """Reads HTTP/1.x replies: by Content-Length, chunked, or until the connection closes."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._head: Reply | None = None
        self._length: int | None = None  # None: chunked or until close
        self._chunks: list[bytes] | None = None

    def feed(self, data: bytes) -> list[Reply]:
        """The reply, if it is whole now. One request is under way at a time, so there is one at most."""
        self._buffer += data
        while self._head is None:
            end = self._buffer.find(b"\r\n\r\n")
            if end < 0:
                if len(self._buffer) > MAX_HEAD or not b"HTTP/1.".startswith(self._buffer[:7]):
                    raise bad_reply(f"expected an HTTP/1.x reply, got {bytes(self._buffer[:40])!r}")
                return []
            self._read_head(bytes(self._buffer[:end]))
            del self._buffer[: end + 4]
        body = self._read_body()
        return [] if body is None else [self._finish(body)]

    def eof(self) -> Reply | None:
        """The reply that the end of the connection completes, if it does."""
        if self._head is None or self._length is not None or self._chunks is not None:
            return None
        return self._finish(bytes(self._buffer))

    def _finish(self, body: bytes) -> Reply:
        assert self._head is not None
        # Bytes that nobody asked for: the connection is out of step and must not be used again.
        keep = self._head.keep and not self._buffer
        reply = self._head._replace(body=body, keep=keep)
        self._head = self._chunks = self._length = None
        self._buffer.clear()
        return reply

    def _read_head(self, head: bytes) -> None:
        first, *lines = head.lower().split(b"\r\n")
        version, _, rest = first.partition(b" ")
        if not (version.startswith(b"http/1.") and rest[:3].isdigit()):
            raise bad_reply(f"expected an HTTP/1.x status line, got {head[:80]!r}")
        status = int(rest[:3])
        if 100 <= status < 200:
            return
        self._length, self._chunks, keep, retry_after, secret = None, None, version != b"http/1.0", None, b""
        for line in lines:
            name, _, value = line.partition(b":")
            value = value.strip()
            if name == b"content-length":
                if not value.isdigit() or int(value) > MAX_REPLY:
                    raise bad_reply(f"expected a Content-Length up to {MAX_REPLY}, got {value[:40]!r}")
                self._length = int(value)
            elif name == b"transfer-encoding" and value == b"chunked":
                self._chunks = []
            elif name == b"connection":
                keep = value == b"keep-alive" or (keep and value != b"close")
            elif name == b"retry-after" and value.isdigit():
                retry_after = float(value)
            elif name in (b"session_secret", b"session-secret"):
                secret = value
        if self._chunks is not None:
            self._length = None
        elif status in (204, 304):
            self._length = 0
        elif self._length is None:
            keep = False
        self._head = Reply(b"", status, retry_after, keep, secret=secret)

    def _read_body(self) -> bytes | None:
        if self._chunks is not None:
            return self._read_chunks()
        if self._length is None:
            if len(self._buffer) > MAX_REPLY:
                raise bad_reply(f"expected a reply of at most {MAX_REPLY} bytes, got more")
            return None
        if len(self._buffer) < self._length:
            return None
        body = bytes(self._buffer[: self._length])
        del self._buffer[: self._length]
        return body

    def _read_chunks(self) -> bytes | None:
        assert self._chunks is not None
        while True:
            end = self._buffer.find(b"\r\n")
            if end < 0:
                if len(self._buffer) > MAX_HEAD:
                    raise bad_reply("expected the size of a chunk, got a line without an end")
                return None
            line = bytes(self._buffer[:end])
            if self._chunks and not self._chunks[-1]:  # the trailer: lines until an empty one
                del self._buffer[: end + 2]
                if not line:
                    return b"".join(self._chunks)
                continue
            try:
                size = int(line.partition(b";")[0], 16)
            except ValueError:
                size = -1
            if not 0 <= size <= MAX_REPLY:
                raise bad_reply(f"expected the size of a chunk, got {line[:40]!r}")
            if size and len(self._buffer) < end + 2 + size + 2:
                return None
            self._chunks.append(bytes(self._buffer[end + 2 : end + 2 + size]))
            del self._buffer[: end + 2 + (size + 2 if size else 0)]


def reply_parser(tcp: bool) -> TcpReplies | HttpReplies:
    """What reads the replies of one connection."""
    return TcpReplies() if tcp else HttpReplies()


def reply_error(reply: Reply, where: str) -> ClientError:
    """The error that a failed reply carries."""
    status = reply.status
    if status:
        code, message = _error_object(reply.body)
        code = code or f"http_{status}"
    else:
        code, message = _error_object(reply.body[len(ERROR_MARK) :])
        status = STATUS.get(code, 500)
    message = f"{message} ({where})"
    if status == 404 and code != "no_path":
        return SessionLost(status, code, f"{message}; start the session again")
    return ClientError(status, code, message, reply.retry_after)


def _error_object(body: bytes) -> tuple[str, str]:
    """Code and message of the JSON error object; of something else (a proxy's page) its first words."""
    try:
        error = json.loads(body)
        return str(error["error"]), str(error.get("message", ""))
    except (ValueError, TypeError, KeyError, AttributeError):
        return "", body[:200].decode("utf-8", "replace")


def bad_reply(message: str) -> ConnectionLost:
    """A reply that cannot be read: what became of the request is not known."""
    return ConnectionLost(0, "bad_reply", message)


def encode(data: Any) -> tuple[bytes, bool]:
    """The body for `data`, and whether the reply is to be parsed as JSON."""
    if isinstance(data, bytes):
        return data, False
    if isinstance(data, (dict, list)):
        return json.dumps(data, separators=(",", ":")).encode(), True
    if isinstance(data, str):
        return data.encode(), False
    if isinstance(data, (bytearray, memoryview)):
        return bytes(data), False
    if hasattr(data, "SerializeToString"):
        return data.SerializeToString(), False
    raise TypeError(
        f"expected bytes, str, a protobuf message, or a dict or list to send as JSON; got {type(data).__name__}"
    )


_NOTHING = (b"", b"Game Started", b"Game Stopped")  # the last two: to a start and an end that the Actor did not answer


def decode(body: bytes, as_json: bool) -> Any:
    """The body as bytes, or as what its JSON says; None where an Actor returned nothing."""
    if not as_json:
        return body
    try:
        return None if body in _NOTHING else json.loads(body)
    except ValueError:
        raise ClientError(
            200, "bad_reply", f"a dict or list was sent, so JSON was expected; got {body[:80]!r}. Send bytes instead"
        ) from None
