"""The game protocol as data: kinds of requests, error codes, and the frames of the TCP form. `docs/protocol.md` is its
prose.

A request is (kind, session, key, token, body); a reply is bytes. Both transports, and the sockets between the workers
of one node, carry the same six words.
"""

from __future__ import annotations

import json
import struct

from bray.errors import BrayError

START, TICK, END, AUTO = range(4)
KIND_NAMES = ("start", "tick", "end", "auto")
KINDS = {b"start": START, b"tick": TICK, b"end": END, b"stop": END, b"auto": AUTO, b"": AUTO}
"""What clients write, as the number used inside. `stop` is what newer clients say for `end`; nothing at all means
`auto`."""

MAX_NAME = 512
"""Bytes of a session, a key or a token."""

REASONS = {
    200: "OK",
    400: "Bad Request",
    401: "Unauthorized",
    403: "Forbidden",
    404: "Not Found",
    405: "Method Not Allowed",
    408: "Request Timeout",
    409: "Conflict",
    413: "Content Too Large",
    429: "Too Many Requests",
    431: "Request Header Fields Too Large",
    500: "Internal Server Error",
    503: "Service Unavailable",
    504: "Gateway Timeout",
}


class Refusal(BrayError):
    """A request that is answered with an error. The code is for programs, the message for people."""

    def __init__(self, status: int, code: str, message: str):
        super().__init__(message)
        self.status, self.code, self.message = status, code, message

    @property
    def body(self) -> bytes:
        return json.dumps({"error": self.code, "message": self.message}, ensure_ascii=True).encode()


def malformed(message: str) -> Refusal:
    return Refusal(400, "malformed", message)


def no_session(session: bytes) -> Refusal:
    return Refusal(
        404,
        "no_session",
        f"session {show(session)} is unknown here: it was never started, it ended, or it was lost. Start it again.",
    )


def bad_name(session: bytes) -> Refusal | None:
    """Why no session can have this name."""
    if not session:
        return malformed("a start needs a session: any name that is unique among the running games")
    try:
        session.decode()
    except UnicodeDecodeError:
        return malformed(f"expected a session name in UTF-8, got {show(session)}")
    return None


def show(name: bytes) -> str:
    """A name from the network, fit for a message or a log line."""
    text = name[:64].decode("utf-8", "backslashreplace")
    return repr(text) if len(name) <= 64 else repr(text) + "..."


# --- framed TCP -------------------------------------------------------------------------------------------------------

REQUEST_HEAD = struct.Struct(">6q")
"""Lengths of session, step_kind, key, token and body, then the client's `time`; the five byte strings follow."""
REPLY_HEAD = struct.Struct(">3q")
"""Lengths of session and body, then the request's `time`; session and body follow."""
ERROR_MARK = b"\0BRAYERR"
"""The first bytes of the body of an error reply; the JSON error object follows."""


def pack_request(
    kind: bytes, session: bytes, body: bytes = b"", key: bytes = b"", token: bytes = b"", time: int = 0
) -> bytes:
    head = REQUEST_HEAD.pack(len(session), len(kind), len(key), len(token), len(body), time)
    return b"".join((head, session, kind, key, token, body))
