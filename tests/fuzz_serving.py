"""Sends a game service what no client should send, for as long as it is told, and looks whether anybody else notices.

    python -m tests.fuzz_serving --count 100000 --seed 0 [--tcp] [--workers 2]

Well-behaved games tick all the while and must never see an error. After each batch: every reply was a documented one (and the expected
one, where what was sent leaves no doubt), no session is left that cannot be ended, nothing is pending, and the connections are gone.
The service runs on the fuzzer's own event loop, or with --workers in processes of its own. Prints what was sent and what came back.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import logging
import random
import re
import struct
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from bray.serving.config import ServiceConfig
from bray.serving.protocol import ERROR_MARK, REPLY_HEAD, pack_request
from bray.serving.server import Server
from bray.serving.workers import run_loop

TOKEN = b"right"
MAX_BODY, MAX_HEADER = 32 << 10, 16 << 10
CONFIG: dict[str, Any] = {
    "port": 0,
    "admin_port": 0,
    "actors_per_worker": 5000,
    "tokens": (TOKEN.decode(),),
    "max_body": MAX_BODY,
    "max_header": MAX_HEADER,
    "request_timeout_s": 2.0,
}
BATCH = 2000  # cases between two looks at the service
AT_ONCE = 48  # connections
SLOW_AT_ONCE = 16  # slow writers, each of which takes request_timeout_s

CODES = {
    400: {"malformed", "bad_kind"},
    401: {"bad_token"},
    404: {"no_session", "no_path"},
    405: {"bad_method", None},  # nothing in reply to HEAD
    408: {"slow_request"},
    409: {"session_exists"},
    413: {"too_large"},
    429: {"no_free_slot"},
    431: {"header_too_large"},
    500: {"actor_error"},
    503: {"overloaded", "draining"},
    504: {"tick_timeout"},
}
REPLY_HEADERS = {b"content-type", b"content-length", b"connection", b"retry-after"}


class Counted:
    """Answers the nth tick with n and its bytes; knows which of its kind are in a session."""

    open: ClassVar[Counter[str]] = Counter()

    async def start(self, session, data):
        Counted.open[session] += 1
        self.session, self.ticks = session, 0

    async def tick(self, data):
        self.ticks += 1
        if len(data) % 3 == 0:
            await asyncio.sleep(0)  # so that requests overtake each other
        return b"%d:" % self.ticks + data

    async def end(self, data):
        self.lost()

    def lost(self):
        Counted.open[self.session] -= 1


# --- what is sent ---------------------------------------------------------------------------------------------------------


@dataclass
class Case:
    """Bytes for one connection, and what is known about the replies."""

    pieces: list[bytes]
    messages: int = 1
    expects: list[str] | None = None
    """ok or the error code of each reply, in order; None: whatever is documented."""
    end: str = "half"
    """What the client does then. half: says that it has no more to send; drop: resets the connection without listening; none: waits until
    it has all replies, or, where the last one ends the connection, until the server closes."""
    slow: bool = False
    kind: str = ""


Maker = Callable[[random.Random], Case]
HTTP: dict[str, tuple[float, Maker]] = {}
TCP: dict[str, tuple[float, Maker]] = {}
CLOSING = {"malformed", "too_large", "header_too_large", "slow_request"}
"""Refusals that end the connection, where they do not come from the session table."""


def http(name: str, weight: float = 1.0) -> Callable[[Maker], Maker]:
    return lambda make: HTTP.setdefault(name, (weight, make))[1]


def tcp(name: str, weight: float = 1.0) -> Callable[[Maker], Maker]:
    return lambda make: TCP.setdefault(name, (weight, make))[1]


def step(
    kind: bytes | None = b"tick",
    session: bytes | None = b"nobody",
    body: bytes = b"",
    *more: bytes,
    first: bytes = b"POST /step HTTP/1.1",
    token: bytes = TOKEN,
    length: bool = True,
) -> bytes:
    lines = [first, b"Host: fuzz", b"token: " + token]
    if session is not None:
        lines.append(b"session: " + session)
    if kind is not None:
        lines.append(b"step_kind: " + kind)
    lines += more
    if length:
        lines.append(b"Content-Length: %d" % len(body))
    return b"\r\n".join(lines) + b"\r\n\r\n" + body


_serial = 0


def name(rng: random.Random) -> bytes:
    """A session that nobody else uses."""
    global _serial
    _serial += 1
    return b"f%d-%d" % (_serial, rng.getrandbits(20))


def noise(rng: random.Random, least: int, most: int) -> bytes:
    return rng.randbytes(rng.randint(least, most))


def any_request(rng: random.Random) -> bytes:
    kind = rng.choice([b"start", b"tick", b"end", b"stop", b"auto"])
    return step(kind, name(rng), noise(rng, 0, 200), b"key: k%d" % rng.getrandbits(9))


def any_frame(rng: random.Random) -> bytes:
    kind = rng.choice([b"start", b"tick", b"end", b"stop", b"auto", b""])
    return pack_request(kind, name(rng), noise(rng, 0, 200), b"k", TOKEN, rng.getrandbits(40))


def flipped(rng: random.Random, data: bytes) -> bytes:
    out = bytearray(data)
    for _ in range(rng.choice([1, 1, 1, 2, 3, 8])):
        at = rng.randrange(len(out))
        how = rng.random()
        if how < 0.5:
            out[at] ^= 1 << rng.randrange(8)
        elif how < 0.7:
            out[at] = rng.randrange(256)
        elif how < 0.85:
            del out[at]
        else:
            out.insert(at, rng.randrange(256))
    return bytes(out) or b"\0"


def cut(rng: random.Random, data: bytes) -> list[bytes]:
    places = sorted(rng.randrange(1, len(data)) for _ in range(rng.randint(1, 12)))
    return [data[a:b] for a, b in zip([0, *places], [*places, len(data)], strict=True) if a < b]


def wrong_order(rng: random.Random) -> tuple[list[tuple[bytes, bytes]], list[str]]:
    """start, tick and end of one session as they come, and what each gets. The session is over in the end."""
    session, is_open = name(rng), False
    steps, expects = [], []
    for _ in range(rng.randint(2, 10)):
        kind = rng.choice([b"start", b"start", b"tick", b"tick", b"end", b"stop"])
        steps.append((kind, session))
        if kind == b"start":
            expects.append("session_exists" if is_open else "ok")
            is_open = True
        else:
            expects.append("ok" if is_open else "no_session")
            is_open = is_open and kind == b"tick"
    if is_open:
        steps.append((b"end", session))
        expects.append("ok")
    return steps, expects


@http("random bytes")
def _(rng):
    return Case([noise(rng, 1, 400)])


@http("flipped bytes", 4)
def _(rng):
    return Case([flipped(rng, any_request(rng))])


@http("flipped bytes in a batch", 1)
def _(rng):
    n = rng.randint(2, 8)
    return Case([flipped(rng, b"".join(any_request(rng) for _ in range(n)))], n)


@http("bad lengths", 2)
def _(rng):
    value = rng.choice(
        [b"-1", b"-%d" % rng.getrandbits(70), b"+5", b"0x10", b"5 5", b"5,5", b"", b"1e3", b"\xb2", b"5\0"]
    )
    twice = rng.random() < 0.2
    lines = [b"Content-Length: 5", b"Content-Length: 5"] if twice else [b"Content-Length: " + value]
    return Case([step(b"tick", b"x", b"hello", *lines, length=False)], expects=["malformed"], end="none")


@http("huge lengths", 1)
def _(rng):
    size = rng.choice([MAX_BODY + 1, 1 << 31, 1 << 32, (1 << 63) - 1, (1 << 64) - 1])
    if rng.random() < 0.3:
        size = (1 << 64) + rng.getrandbits(80)
        return Case([step(length=False)[:-2] + b"Content-Length: %d\r\n\r\n" % size], expects=["malformed"], end="none")
    return Case([step(length=False)[:-2] + b"Content-Length: %d\r\n\r\n" % size], expects=["too_large"], end="none")


@http("truncated, then closed", 2)
def _(rng):
    data = any_request(rng)
    return Case([data[: rng.randrange(1, len(data))]], end=rng.choice(["half", "drop"]))


@http("split at random places", 2)
def _(rng):
    steps, expects = wrong_order(rng)
    return Case(cut(rng, b"".join(step(k, s, b"x") for k, s in steps)), len(steps), expects, "none")


@http("wrong order", 3)
def _(rng):
    steps, expects = wrong_order(rng)
    return Case([step(k, s, noise(rng, 0, 50)) for k, s in steps], len(steps), expects, "none")


@http("unknown session", 1)
def _(rng):
    return Case([step(rng.choice([b"tick", b"end"]), name(rng), b"x")], expects=["no_session"], end="none")


@http("unknown kind", 1)
def _(rng):
    kind = rng.choice([b"tock", b"starts", b"start start", b"\xff\xfe", b"0", b"null", b"a" * 400])
    return Case([step(kind, name(rng))], expects=["bad_kind"], end="none")


@http("wrong token", 1)
def _(rng):
    token = rng.choice([b"", b"wrong", b"righ", b"rightt", b"RIGHT", b"\xff", b"x" * 2000])
    return Case([step(b"start", name(rng), token=token)], expects=["bad_token"], end="none")


@http("wrong path or method", 1)
def _(rng):
    first, expect = rng.choice(
        [
            (b"POST / HTTP/1.1", "no_path"),
            (b"POST /step/ HTTP/1.1", "no_path"),
            (b"POST /../step HTTP/1.1", "no_path"),
            (b"POST /%73tep HTTP/1.1", "no_path"),
            (b"POST //step HTTP/1.1", "no_path"),
            (b"POST http://x/step HTTP/1.1", "no_path"),
            (b"OPTIONS * HTTP/1.1", "no_path"),
            (b"GET /step HTTP/1.1", "bad_method"),
            (b"PUT /step?x HTTP/1.1", "bad_method"),
            (b"DELETE /step HTTP/1.1", "bad_method"),
            (b"get /step HTTP/1.1", "malformed"),
            (b"POST /step HTTP/9.9", "malformed"),
            (b"POST /step FTP/1.1", "malformed"),
            (b"POST /st ep HTTP/1.1", "malformed"),
        ]
    )
    return Case([step(first=first)], expects=[expect], end="none")


@http("batch with a bad one inside", 2)
def _(rng):
    before, after = rng.randint(0, 5), rng.randint(0, 5)
    bad, code = rng.choice(
        [
            (noise(rng, 30, 60).replace(b"\r", b"x").replace(b"\n", b"x").join((b"\0", b"\r\n\r\n")), "malformed"),
            (step(b"tick", b"x", b"", b"Transfer-Encoding: chunked"), "malformed"),
            (step(b"bad kind"), "bad_kind"),
            (step(first=b"POST /elsewhere HTTP/1.1"), "no_path"),
            (step(token=b"wrong"), "bad_token"),
            (step(b"start", b"\xff\xff"), "malformed in UTF-8"),
            (step(length=False)[:-2] + b"Content-Length: 99999\r\n\r\n", "too_large"),
            (step(b"tick", b"x", b"", b"X: " + b"y" * 40000), "header_too_large"),
        ]
    )
    good = [step(b"auto", None, b"x")] * before
    rest = [step(b"tick", name(rng))] * after
    expects = ["ok"] * before + [code.split()[0]] + ["no_session"] * (0 if code in CLOSING else after)
    data = b"".join([*good, bad, *rest])
    pieces = cut(rng, data) if rng.random() < 0.3 else [data]
    return Case(pieces, before + after + 1, expects, "none" if code in CLOSING or not expects else "half wait")


@http("header garbage", 3)
def _(rng):
    bad, expects = rng.choice(
        [
            (b"X\0Y: z", ["malformed"]),
            (b"X: a\0b", ["malformed"]),
            (b"X : y", ["malformed"]),
            (b": y", ["malformed"]),
            (b"no colon", ["malformed"]),
            (b" folded: y", ["malformed"]),
            (b"X: a\rb", ["malformed"]),
            (b"X: a\nY: b", None),
            (b"X\xff: y", ["malformed"]),
            (b"X: " + bytes(range(128, 256)), ["ok"]),
            (b"X:" + b" " * 2000 + b"y", ["ok"]),
            (b"X:", ["ok"]),
            (b"\x01\x02: y", ["malformed"]),
            (noise(rng, 5, 80), None),
        ]
    )
    data = step(b"auto", name(rng), b"body", bad)
    return Case([data], expects=expects, end="half" if expects is None else "none")


@http("duplicate headers", 1)
def _(rng):
    what, expects = rng.choice(
        [
            (b"session: other", "malformed"),
            (b"step_kind: tick", "no_session"),
            (b"step-kind: tick", "no_session"),
            (b"game_id: other", "malformed"),
            (b"key: other", "no_session"),
            (b"token: " + TOKEN, "no_session"),
        ]
    )
    return Case([step(b"tick", name(rng), b"x", what)], expects=[expects], end="half")


@http("very long headers", 1)
def _(rng):
    long = rng.randint(2 * MAX_HEADER, 4 * MAX_HEADER)  # in pieces up to twice the limit may pass
    how = rng.randrange(4)
    if how == 0:
        data = step(b"tick", b"x", b"", b"X: " + b"y" * long)
    elif how == 1:
        data = step(b"tick", b"x", b"", *[b"X-%d: yyyyyyyyyy" % i for i in range(long // 10)])
    elif how == 2:
        data = step(first=b"POST /" + b"y" * long + b" HTTP/1.1")
    else:
        data = step(b"tick", b"x", b"", b"Y" * long + b": x")
    return Case(cut(rng, data) if rng.random() < 0.5 else [data], expects=["header_too_large"], end="none")


@http("long and odd session names", 3)
def _(rng):
    odd, expects = rng.choice(
        [
            (b"n" * rng.randint(513, 9000), ["malformed"]),
            (b"a\r\nSet-Cookie: x=1", ["no_session"]),
            (b"a\r\nX: y\r\n\r\nHTTP/1.1 200 OK", ["no_session", "malformed"]),
            (b'"}{\\"', ["no_session"]),
            (b"%s%n%x{0}{session}", ["no_session"]),
            (b"../../etc/passwd", ["no_session"]),
            (b"\xf0\x9f\x98\x80", ["no_session"]),
            (b"\xff\xfe\xfd", ["no_session"]),
            (b"a\tb", ["no_session"]),
            (b"\x7f", None),
            (b"\x1b[31m", None),
        ]
    )
    if expects == ["no_session", "malformed"]:  # what follows the name is the beginning of another request
        expects = None
    return Case([step(b"tick", odd, b"")], expects=expects, end="half" if expects is None else "none")


@http("oversized bodies", 1)
def _(rng):
    size = MAX_BODY + rng.randint(1, 20000)
    if rng.random() < 0.5:
        return Case([step(b"auto", None, b"z" * size)], expects=["too_large"], end="none")
    data, left = step(b"auto", None, b"", b"Transfer-Encoding: chunked", length=False), size
    while left:
        n = min(left, rng.choice([7, 1000, 5000]))
        data += b"%x\r\n" % n + b"z" * n + b"\r\n"
        left -= n
    return Case([data + b"0\r\n\r\n"], expects=["too_large"], end="none")


@http("largest body", 0.3)
def _(rng):
    return Case([step(b"auto", None, b"z" * MAX_BODY)], expects=["ok"], end="none")


@http("chunk garbage", 2)
def _(rng):
    head = step(b"auto", name(rng), b"", b"Transfer-Encoding: chunked", length=False)
    rest, expects = rng.choice(
        [
            (b"zz\r\nabc\r\n0\r\n\r\n", ["malformed"]),
            (b"-1\r\nabc\r\n0\r\n\r\n", ["malformed"]),
            (b"f" * 30 + b"\r\nabc\r\n0\r\n\r\n", ["malformed"]),
            (b"3\r\nabcdef\r\n0\r\n\r\n", ["malformed"]),
            (b"\r\n", ["malformed"]),
            (b"3;" + b"x" * 3000 + b"\r\nabc\r\n0\r\n\r\n", ["ok"]),
            (b"3\r\nabc\r\n0\r\nX: y\r\nsession: other\r\nstep_kind: bad\r\ntoken: wrong\r\n\r\n", ["ok"]),
            (b"".join(b"1\r\nx\r\n" for _ in range(500)) + b"0\r\n\r\n", ["ok"]),
            (b"3\r\nabc\r\n0\r\nX: " + b"y" * 20, None),
            (noise(rng, 3, 40), None),
        ]
    )
    data = head + rest
    pieces = cut(rng, data) if rng.random() < 0.3 else [data]
    return Case(pieces, expects=expects, end="half" if expects is None else "none")


@http("endless trailer", 0.2)
def _(rng):
    head = step(b"auto", None, b"", b"Transfer-Encoding: chunked", length=False) + b"3\r\nabc\r\n0\r\nX: "
    return Case([head, *[b"y" * 60_000] * 8], expects=["header_too_large"], end="none")


@http("smuggling", 2)
def _(rng):
    inner = step(b"start", b"smuggled")
    te = rng.choice(
        [
            b"Transfer-Encoding: chunked",
            b"Transfer-Encoding: xchunked",
            b"Transfer-Encoding: identity",
            b"Transfer-Encoding: chunked, identity",
            b"Transfer-Encoding: chunked\r\nTransfer-Encoding: identity",
            b"Transfer-Encoding: identity\r\nTransfer-Encoding: chunked",
            b"Transfer-Encoding : chunked",
            b"Transfer-Encoding:\x0bchunked",
            b"Transfer-Encoding: chunked\x00",
            b"Transfer_Encoding: chunked",
            b"X: y\nTransfer-Encoding: chunked",
        ]
    )
    if te.startswith(b"Transfer_"):  # another header altogether: the inner request is a body
        return Case([step(b"auto", None, inner, te)], expects=["ok"], end="none")
    body = b"0\r\n\r\n" + inner
    return Case([step(b"auto", None, body, te)], expects=["malformed"], end="none")


@http("Expect", 1)
def _(rng):
    value = rng.choice([b"100-continue", b"100-Continue", b"200-ok", b"", b"100-continue, 100-continue"])
    data = step(b"auto", None, b"body", b"Expect: " + value)
    return Case(cut(rng, data) if rng.random() < 0.5 else [data], expects=["ok"], end="none")


@http("HTTP/1.0 and 0.9", 1)
def _(rng):
    if rng.random() < 0.2:
        return Case([b"POST /step\r\nContent-Length: 2\r\n\r\nhi"], expects=["bad_token"], end="none")
    keep = rng.random() < 0.5
    more = [b"Connection: keep-alive"] if keep else []
    data = step(b"auto", None, b"x", *more, first=b"POST /step HTTP/1.0")
    return Case([data * 3], 3, ["ok"] * (3 if keep else 1), "none" if keep else "closes")


@http("HTTP/2, upgrades, TLS, frames", 1)
def _(rng):
    hello = b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + noise(rng, 32, 200)
    upgrade = [b"Connection: Upgrade, HTTP2-Settings", b"Upgrade: h2c", b"HTTP2-Settings: AAMAAABkAAQAAP__"]
    data, expects = rng.choice(
        [
            (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\x12\4\0\0\0\0\0" + noise(rng, 18, 18), ["malformed"]),
            (hello, ["malformed"]),
            (pack_request(b"start", b"x", token=TOKEN), ["malformed"]),
            (step(b"auto", None, b"x", *upgrade) * 2, ["ok"] * 2),
            (step(b"auto", None, b"", b"Connection: Upgrade", b"Upgrade: websocket") * 2, ["ok"] * 2),
            (b"CONNECT x:80 HTTP/1.1\r\n\r\n" + step(b"tick", b"x"), ["no_path", "no_session"]),
        ]
    )
    return Case([data], len(expects), expects, "none")


@http("slow writers", 0.3)
def _(rng):
    data = any_request(rng)
    at = rng.randrange(5, len(data) - 1)
    return Case([data[:at], data[at : at + 1]], expects=["slow_request"], end="none", slow=True)


# framed TCP


def header(rng: random.Random, **lengths: int) -> bytes:
    """The head of a frame, with some lengths changed."""
    sizes = {"session": 1, "kind": 4, "key": 0, "token": 5, "body": 0, "time": rng.getrandbits(30)} | lengths
    return struct.pack(">6q", *sizes.values())


def frames(steps: list[tuple[bytes, bytes]], body: bytes = b"x") -> bytes:
    return b"".join(pack_request(k, s, body, b"", TOKEN, i) for i, (k, s) in enumerate(steps))


def rare(rng: random.Random) -> int:
    return rng.choice(
        [513, 1 << 15, 1 << 31, 1 << 32, 1 << 62, (1 << 63) - 1, -1, -(1 << 63), -rng.getrandbits(40) - 1]
    )


@tcp("random bytes")
def _(rng):
    return Case([bytes([rng.choice([0, 1, 0x16, 0x7F, 0x80, 0xFF])]) + noise(rng, 0, 400)])


@tcp("flipped bytes", 4)
def _(rng):
    return Case([flipped(rng, any_frame(rng))])


@tcp("flipped bytes in a batch", 2)
def _(rng):
    n = rng.randint(2, 8)
    return Case([flipped(rng, b"".join(any_frame(rng) for _ in range(n)))], n)


@tcp("bad and huge lengths", 4)
def _(rng):
    what = rng.choice(["session", "kind", "key", "token"])
    return Case([header(rng, **{what: rare(rng)}) + noise(rng, 0, 100)], expects=["malformed"], end="none")


@tcp("bad and huge bodies", 2)
def _(rng):
    size = rng.choice([MAX_BODY + 1, rare(rng)])
    if 0 <= size <= MAX_BODY:
        size = -1
    return Case([header(rng, body=size) + noise(rng, 0, 100)], expects=["too_large"], end="none")


@tcp("all lengths garbage", 1)
def _(rng):
    return Case([b"\xff" + noise(rng, 47, 200)], expects=["malformed"], end="none")


@tcp("truncated, then closed", 2)
def _(rng):
    data = any_frame(rng)
    return Case([data[: rng.randrange(1, len(data))]], end=rng.choice(["half", "drop"]))


@tcp("split at random places", 2)
def _(rng):
    steps, expects = wrong_order(rng)
    return Case(cut(rng, frames(steps)), len(steps), expects, "none")


@tcp("wrong order", 3)
def _(rng):
    steps, expects = wrong_order(rng)
    return Case([frames(steps, noise(rng, 0, 50))], len(steps), expects, "none")


@tcp("unknown session", 1)
def _(rng):
    return Case([frames([(rng.choice([b"tick", b"end"]), name(rng))])], expects=["no_session"], end="none")


@tcp("unknown kind", 1)
def _(rng):
    kind = rng.choice([b"tock", b"START", b"start ", b"\0", b"\xff" * 512, b"k" * 512])
    return Case([frames([(kind, name(rng))])], expects=["bad_kind"], end="none")


@tcp("wrong token", 1)
def _(rng):
    token = rng.choice([b"", b"wrong", b"righ", b"right\0", b"\xff" * 512])
    return Case([pack_request(b"start", name(rng), b"", b"", token)], expects=["bad_token"], end="none")


@tcp("odd session names", 2)
def _(rng):
    odd, kind, expect = rng.choice(
        [
            (b"", b"start", "malformed"),
            (b"\xff\xfe", b"start", "malformed"),
            (b"\xff\xfe", b"tick", "no_session"),
            (b"\0" * 512, b"tick", "no_session"),
            (b'"}{\\"\r\n\r\n', b"tick", "no_session"),
            (b"%s%n{0}", b"end", "no_session"),
            (ERROR_MARK, b"tick", "no_session"),
        ]
    )
    return Case([frames([(kind, odd)])], expects=[expect], end="none")


@tcp("batch with a bad one inside", 2)
def _(rng):
    before, after = rng.randint(0, 5), rng.randint(0, 5)
    bad, code, ends = rng.choice(
        [
            (header(rng, session=-1, time=before), "malformed", True),
            (header(rng, body=1 << 40, time=before), "too_large", True),
            (pack_request(b"bad kind", b"x", b"", b"", TOKEN, before), "bad_kind", False),
            (pack_request(b"tick", b"x", b"", b"", b"wrong", before), "bad_token", False),
            (pack_request(b"start", b"\xff", b"", b"", TOKEN, before), "malformed", False),
        ]
    )
    good = [pack_request(b"auto", b"", b"x", b"", TOKEN, i) for i in range(before)]
    rest = [pack_request(b"tick", name(rng), b"", b"", TOKEN, before + 1 + i) for i in range(after)]
    expects = ["ok"] * before + [code] + ["no_session"] * (0 if ends else after)
    data = b"".join([*good, bad, *rest])
    pieces = cut(rng, data) if rng.random() < 0.3 else [data]
    return Case(pieces, before + after + 1, expects, "none" if ends else "half wait")


@tcp("oversized and largest bodies", 0.5)
def _(rng):
    if rng.random() < 0.5:
        return Case([pack_request(b"auto", b"", b"z" * MAX_BODY, b"", TOKEN)], expects=["ok"], end="none")
    return Case([pack_request(b"auto", b"", b"z" * (MAX_BODY + 1), b"", TOKEN)], expects=["too_large"], end="none")


@tcp("empty frames", 0.5)
def _(rng):
    n = rng.randint(1, 20)
    return Case([bytes(48) * n], n, ["bad_token"] * n, "none")


@tcp("TLS", 0.5)
def _(rng):
    return Case(
        [b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + noise(rng, 64, 200)], expects=["malformed"], end="none"
    )


@tcp("slow writers", 0.3)
def _(rng):
    data = any_frame(rng)
    at = rng.randrange(1, len(data) - 1)
    return Case([data[:at], data[at : at + 1]], expects=["slow_request"], end="none", slow=True)


# --- what comes back ------------------------------------------------------------------------------------------------------


class Wrong(Exception):
    """The service did what it must not."""


_STATUS = re.compile(rb"HTTP/1\.1 (\d\d\d) [A-Z][A-Za-z ]*\Z")


def http_replies(data: bytes) -> tuple[list[str], bytes]:
    """ok or the error code of each complete reply, and what is left."""
    out = []
    while b"\r\n\r\n" in data:
        head, rest = data.split(b"\r\n\r\n", 1)
        first, *lines = head.split(b"\r\n")
        match = _STATUS.match(first)
        if match is None:
            raise Wrong(f"not a status line: {first!r}")
        status = int(match[1])
        if status == 100:
            data = rest
            continue
        headers = dict(line.lower().split(b": ", 1) for line in lines)
        if set(headers) - REPLY_HEADERS or len(headers) != len(lines):
            raise Wrong(f"headers that are not ours: {head!r}")
        size = int(headers[b"content-length"])
        if len(rest) < size:
            break
        body, data = rest[:size], rest[size:]
        out.append("ok" if status == 200 else error_code(status, body))
    return out, data


def error_code(status: int | None, body: bytes) -> str:
    error = json.loads(body) if body else {"error": None, "message": ""}
    if set(error) != {"error", "message"}:
        raise Wrong(f"not an error object: {body!r}")
    code = error["error"]
    if status is None:
        if code not in set().union(*CODES.values()):
            raise Wrong(f"not a documented code: {code}")
    elif code not in CODES.get(status, set()):
        raise Wrong(f"not a documented status and code: {status} {code}")
    return code or f"{status} without a body"


def tcp_replies(data: bytes) -> tuple[list[str], bytes]:
    """The same for frames, in the order of the requests (their `time`)."""
    out = []
    while len(data) >= REPLY_HEAD.size:
        session, size, when = REPLY_HEAD.unpack_from(data)
        if not (0 <= session <= 512 and 0 <= size <= 2 * MAX_BODY):
            raise Wrong(f"lengths {session}, {size} in a reply")
        whole = REPLY_HEAD.size + session + size
        if len(data) < whole:
            break
        body, data = data[REPLY_HEAD.size + session : whole], data[whole:]
        is_error = body.startswith(ERROR_MARK)
        out.append((when, error_code(None, body[len(ERROR_MARK) :]) if is_error else "ok"))
    return [code for _, code in sorted(out, key=lambda x: x[0])], data


class Client(asyncio.Protocol):
    """One connection of the fuzzer."""

    def __init__(self) -> None:
        self.transport: Any = None
        self.buffer = bytearray()
        self.over = False
        self.news = asyncio.Event()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self.buffer += data
        self.news.set()

    def eof_received(self) -> bool:
        self.over = True
        self.news.set()
        return True

    def connection_lost(self, exc: Exception | None) -> None:
        self.over = True
        self.news.set()

    def write(self, data: bytes) -> None:
        if not self.transport.is_closing():
            self.transport.write(data)

    async def wait(self, timeout: float) -> None:
        self.news.clear()
        await asyncio.wait_for(self.news.wait(), timeout)


# --- the services ---------------------------------------------------------------------------------------------------------


class Here:
    """A service on this event loop, which can be looked into."""

    def __init__(self, use_tcp: bool):
        self.server = Server(Counted, ServiceConfig(use_tcp=use_tcp, **CONFIG))

    async def __aenter__(self):
        Counted.open.clear()
        await self.server.start()
        self.port, self.admin_port = self.server.port, self.server.admin_port
        return self

    async def __aexit__(self, *exc):
        await self.server.close()

    async def check(self, fuzz: Fuzz) -> None:
        server, table = self.server, self.server.sessions
        good = {game.name for game in fuzz.games}
        for stray in [s for s in table.sessions if s not in good]:  # a flipped byte left a start as it was
            reply = await fuzz.end(stray)
            if reply != "ok":
                raise Wrong(f"session {stray!r} cannot be ended: {reply}")
        connections = len(fuzz.games) + fuzz.slow
        deadline = time.monotonic() + 10
        while time.monotonic() < deadline:
            await asyncio.sleep(0.01)
            # the games do not stop for us: what they have under way is theirs
            others = [r for r in table.running if r.session not in good]
            if not others and len(server.front.open) <= len(fuzz.games) + fuzz.slow:
                break
        else:
            raise Wrong(f"{len(others)} requests pending, {len(server.front.open)} connections, expected {connections}")
        if set(table.sessions) != good or table.lent or table.free != table.config.actors_per_worker - len(good):
            raise Wrong(
                f"sessions {set(table.sessions) ^ good} were left; {table.free} slots are free, {table.lent} lent"
            )
        if {s.encode() for s, n in Counted.open.items() if n} != good:
            raise Wrong(f"Actors and the table disagree about {Counted.open}")
        Counted.open = +Counted.open


SERVICE = """
import logging, sys
from bray.serving.config import ServiceConfig
from bray.serving.workers import serve
from tests.fuzz_serving import Counted
logging.basicConfig(level="WARNING", stream=sys.stderr)
sys.exit(serve(Counted, ServiceConfig(**eval(sys.argv[1])), on_ready=lambda port, admin: print(port, admin, flush=True)))
"""


class Elsewhere:
    """A service of several processes, known by its numbers alone. What the fuzzer started and never ended runs out of time there."""

    def __init__(self, use_tcp: bool, workers: int):
        self.config = CONFIG | {"use_tcp": use_tcp, "workers": workers, "idle_timeout_s": 1.0}

    async def __aenter__(self):
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115
        self._process = subprocess.Popen(
            [sys.executable, "-c", SERVICE, repr(self.config)],
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            cwd=Path(__file__).parent.parent,
        )
        self.port, self.admin_port = map(int, self._process.stdout.readline().split())
        return self

    async def __aexit__(self, *exc):
        self._process.terminate()
        try:
            code = self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            raise
        self._process.stdout.close()
        with self._log:
            self._log.seek(0)
            lines = self._log.read().splitlines()
        log = "\n".join(line for line in lines if "bray.serving.audit" not in line)  # a line a minute
        if exc[0] is None and (log or code):
            raise Wrong(f"the service ended with {code} and logged:\n{log[:2000]}")

    async def check(self, fuzz: Fuzz) -> None:
        deadline = time.monotonic() + 15
        loop = asyncio.get_running_loop()
        while True:
            numbers = await loop.run_in_executor(None, self._numbers)
            found = numbers["bray_sessions"], numbers["bray_connections"]
            want = len(fuzz.games), len(fuzz.games) + fuzz.slow
            # pending ones are the games' own
            if found == want and numbers["bray_pending"] <= len(fuzz.games):
                return
            if time.monotonic() > deadline:
                raise Wrong(f"sessions and connections are {found}, expected {want}; {numbers['bray_pending']} pending")
            await asyncio.sleep(0.1)

    def _numbers(self) -> dict[str, float]:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.admin_port}/metrics", timeout=10) as reply:
            lines = reply.read().decode().splitlines()
        return {k: float(v) for k, v in (x.rsplit(" ", 1) for x in lines if not x.startswith("#"))}


# --- the games that must not notice ---------------------------------------------------------------------------------------


@dataclass
class Game:
    """A client as it should be. It ticks until it is told to stop."""

    port: int
    name: bytes
    use_tcp: bool
    rng: random.Random
    ticks: int = 0

    async def play(self, over: asyncio.Event, playing: asyncio.Event) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        try:
            await self._ask(reader, writer, b"start", b"")
            playing.set()
            while not over.is_set():
                body = noise(self.rng, 0, 300)
                self.ticks += 1
                reply = await self._ask(reader, writer, b"tick", body)
                if reply != b"%d:" % self.ticks + body:
                    raise Wrong(f"game {self.name!r} got {reply[:100]!r} in reply to tick {self.ticks}")
                await asyncio.sleep(0.002)
            await self._ask(reader, writer, b"end", b"")
        finally:
            playing.set()
            writer.close()

    async def _ask(self, reader, writer, kind: bytes, body: bytes) -> bytes:
        if self.use_tcp:
            writer.write(pack_request(kind, self.name, body, b"", TOKEN, self.ticks))
            session, size, when = REPLY_HEAD.unpack(await reader.readexactly(REPLY_HEAD.size))
            if await reader.readexactly(session) != self.name or when != self.ticks:
                raise Wrong(f"game {self.name!r} got another one's reply")
            return await reader.readexactly(size)
        writer.write(step(kind, self.name, body))
        head = await reader.readuntil(b"\r\n\r\n")
        if not head.startswith(b"HTTP/1.1 200 OK\r\n"):
            raise Wrong(f"game {self.name!r} got {head!r} in reply to {kind!r}")
        return await reader.readexactly(int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0]))


# --- the fuzzer -----------------------------------------------------------------------------------------------------------


class _Records(logging.Handler):
    """Nothing that a client sends is worth a line in the log, let alone a traceback. (The audit log has a line a minute.)"""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        # a machine that is busy with something else may stop us all for a moment
        if "stood still" not in record.getMessage() and record.name != "bray.serving.audit":
            self.lines.append(self.format(record))


@dataclass
class Fuzz:
    count: int
    seed: int = 0
    use_tcp: bool = False
    workers: int = 0
    """0: on this event loop."""
    seconds: float | None = None
    """Send no more after this long."""
    sent: Counter[str] = field(default_factory=Counter)
    replies: dict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    slow: int = 0
    """Slow writers that are connected."""

    async def run(self) -> Fuzz:
        global _serial
        _serial = 0  # the same names for the same seed
        records = _Records()
        logging.getLogger().addHandler(records)
        self.games: list[Game] = []
        began = time.monotonic()
        try:
            async with Elsewhere(self.use_tcp, self.workers) if self.workers else Here(self.use_tcp) as service:
                self.service = service
                over, tasks = asyncio.Event(), []
                for i in range(12):
                    rng = random.Random(f"game {self.seed} {i}")
                    game = Game(service.port, b"good %d" % i, self.use_tcp and i % 2 == 0, rng)
                    self.games.append(game)
                    playing = asyncio.Event()
                    tasks.append(asyncio.create_task(game.play(over, playing)))
                    await playing.wait()
                try:
                    await self._send_all(began, tasks)
                finally:
                    over.set()
                    done = await asyncio.gather(*tasks, return_exceptions=True)
                for error in done:
                    if error is not None:
                        raise error
                self.ticks = sum(game.ticks for game in self.games)
                self.games = []
                await service.check(self)
        finally:
            logging.getLogger().removeHandler(records)
        if records.lines:
            raise Wrong("the service logged:\n" + "\n".join(records.lines[:20]))
        self.took = time.monotonic() - began
        return self

    async def _send_all(self, began: float, games: list[asyncio.Task[None]]) -> None:
        kinds = TCP if self.use_tcp else HTTP
        names, weights = list(kinds), [w for w, _ in kinds.values()]
        rng = random.Random(self.seed)
        slow: set[asyncio.Task[None]] = set()
        while self.messages < self.count and (self.seconds is None or time.monotonic() - began < self.seconds):
            cases = []
            room = self.count - self.messages
            while len(cases) < BATCH and room > 0:
                kind = rng.choices(names, weights)[0]
                case = kinds[kind][1](rng)
                case.kind = kind
                cases.append(case)
                room -= case.messages
            cases.reverse()

            async def work(cases: list[Case] = cases) -> None:
                while cases:
                    case = cases.pop()
                    if not case.slow:
                        await self._send(case)
                    elif len(slow) < SLOW_AT_ONCE:
                        task = asyncio.create_task(self._send(case))
                        slow.add(task)
                        task.add_done_callback(slow.discard)

            await asyncio.gather(*(work() for _ in range(AT_ONCE)), self._send_admin(random.Random(rng.random())))
            await self.service.check(self)
            for game in games:
                if game.done():
                    game.result()
                    raise Wrong("a game ended before its time")
        await asyncio.gather(*slow)

    @property
    def messages(self) -> int:
        return sum(self.sent.values())

    async def _send(self, case: Case) -> None:
        loop = asyncio.get_running_loop()
        # a first byte that was flipped may turn a frame into HTTP
        is_http = not self.use_tcp or case.pieces[0][:1].isalpha() or case.pieces[0][0] in b"\r\n"
        parse = http_replies if is_http else tcp_replies
        self.slow += case.slow
        _, client = await loop.create_connection(Client, "127.0.0.1", self.service.port)
        self.sent[case.kind] += case.messages
        try:
            for i, piece in enumerate(case.pieces):
                if i:
                    await asyncio.sleep(0.001 if i % 5 == 0 else 0)
                client.write(piece)
            if case.end == "drop":
                client.transport.abort()
                return
            if case.end == "half":
                client.transport.write_eof()
            n = len(case.expects) if case.expects is not None else 1 << 30
            closes = case.end == "closes" or (case.end == "none" and bool(case.expects) and case.expects[-1] in CLOSING)
            closes = closes and not self._of_the_table(case)
            async with asyncio.timeout(20.0):
                while not client.over:
                    if not closes and len(parse(bytes(client.buffer))[0]) >= n:
                        break
                    await client.wait(20.0)
            replies, rest = parse(bytes(client.buffer))
            if rest:
                raise Wrong(f"{case.kind}: half a reply {rest[:100]!r} to {case.pieces!r}")
            if case.expects is not None and replies != case.expects:
                raise Wrong(f"{case.kind}: expected {case.expects}, got {replies} in reply to {case.pieces!r}"[:800])
            self.replies[case.kind].update(replies or ["none"])
        except TimeoutError:
            raise Wrong(
                f"{case.kind}: no end of the replies {bytes(client.buffer)[:300]!r} to {case.pieces!r}"[:800]
            ) from None
        finally:
            client.transport.abort()
            self.slow -= case.slow

    @staticmethod
    def _of_the_table(case: Case) -> bool:
        """A name that is refused as malformed leaves the connection as it is."""
        return case.kind in ("long and odd session names", "odd session names")

    async def _send_admin(self, rng: random.Random) -> None:
        for _ in range(20):
            reader, writer = await asyncio.open_connection("127.0.0.1", self.service.admin_port)
            writer.write(
                rng.choice(
                    [
                        noise(rng, 1, 300),
                        flipped(rng, b"GET /metrics HTTP/1.1\r\n\r\n"),
                        b"GET /healthz HTTP/1.1\r\n\r\n",
                    ]
                )
            )
            writer.write_eof()
            reply = await asyncio.wait_for(reader.read(), 20)
            if not re.match(rb"HTTP/1\.1 (200|400|403|404|405) ", reply):
                raise Wrong(f"the admin port said {reply[:200]!r}")
            writer.close()

    async def end(self, session: bytes) -> str:
        """End a session that a message of ours has started."""
        _, client = await asyncio.get_running_loop().create_connection(Client, "127.0.0.1", self.service.port)
        try:
            client.write(pack_request(b"end", session, b"", b"", TOKEN) if self.use_tcp else step(b"end", session))
            async with asyncio.timeout(10.0):
                while not client.over:
                    replies, _ = (tcp_replies if self.use_tcp else http_replies)(bytes(client.buffer))
                    if replies:
                        return replies[0]
                    await client.wait(10.0)
            return "closed"
        finally:
            client.transport.abort()

    def table(self) -> str:
        lines = [f"{'what was sent':34} {'messages':>8}  replies"]
        for kind in sorted(self.sent):
            replies = ", ".join(f"{code} {n}" for code, n in self.replies[kind].most_common())
            lines.append(f"{kind:34} {self.sent[kind]:8}  {replies or 'not awaited'}")
        total = sum(self.replies.values(), Counter())
        replies = ", ".join(f"{code} {n}" for code, n in total.most_common())
        lines.append(f"{'all':34} {self.messages:8}  {replies}")
        lines.append(f"{self.ticks} ticks of 12 other games without an error; {self.took:.1f} s, seed {self.seed}")
        return "\n".join(lines)


def fuzz(count: int, seed: int = 0, use_tcp: bool = False, workers: int = 0, seconds: float | None = None) -> Fuzz:
    result: Fuzz = run_loop(Fuzz(count, seed, use_tcp, workers, seconds).run())
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=20_000, help="messages")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tcp", action="store_true", help="framed TCP in place of HTTP")
    parser.add_argument("--workers", type=int, default=0, help="a service of so many processes")
    parser.add_argument("--seconds", type=float, help="send no more after this long")
    args = parser.parse_args()
    with contextlib.suppress(KeyboardInterrupt):
        print(fuzz(args.count, args.seed, args.tcp, args.workers, args.seconds).table())


if __name__ == "__main__":
    main()
