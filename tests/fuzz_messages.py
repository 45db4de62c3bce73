"""What the fuzzer of a game service sends: requests that are right, nearly right, broken, slow and cut short."""

from __future__ import annotations

import itertools
import random
import struct
from collections.abc import Callable
from dataclasses import dataclass

from bray.serving.protocol import ERROR_MARK, pack_request

TOKEN = b"right"
MAX_BODY, MAX_HEADER = 32 << 10, 16 << 10


@dataclass
class Case:
    """Bytes for one connection, and what is known about the replies."""

    pieces: list[bytes]
    messages: int = 1
    expects: list[str] | None = None
    """ok or the error code of each reply, in order; None: whatever is documented."""
    end: str = "half"
    """What the client does then. half: says that it has no more to send; drop: resets the connection without listening;
    none: waits until it has all replies, or, where the last one ends the connection, until the server closes."""
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


_serials = itertools.count(1)


def name(rng: random.Random) -> bytes:
    """A session that nobody else uses."""
    return b"f%d-%d" % (next(_serials), rng.getrandbits(20))


def first_name() -> None:
    """Begin with the first name again."""
    global _serials
    _serials = itertools.count(1)


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
