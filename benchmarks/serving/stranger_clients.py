"""Who calls in `benchmarks.serving.strangers`: what they say, strangers who know what they must be told, and games that
play properly."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import random
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from typing import Any

import numpy as np

from bray.serving.protocol import ERROR_MARK, REPLY_HEAD, pack_request

TOKEN = "right-token"
DOCUMENTED = {400, 401, 403, 404, 405, 408, 409, 413, 429, 431, 503, 504}
WORTH_A_RETRY = {404, 503, 504}
"""Answers that a game may get while workers are killed and stopped."""
OK = {200}
MESSAGE_TIMEOUT_S = 40.0

# --- what is said -----------------------------------------------------------------------------------------------------


def observation(rng: random.Random) -> dict[str, Any]:
    """A proper one, as JSON values."""
    mask = [rng.randint(0, 1) for _ in range(5)]
    mask[rng.randrange(5)] = 1
    picture: Any = [[[rng.randrange(256) for _ in range(8)] for _ in range(8)]]
    if rng.random() < 0.5:
        raw = np.array(picture, np.uint8).tobytes()
        picture = {"base64": base64.b64encode(raw).decode(), "dtype": "uint8", "shape": [1, 8, 8]}
    return {
        "map": [[round(rng.random(), 3) for _ in range(3)] for _ in range(3)],
        "kind": rng.randrange(5),
        "flags": [rng.randint(0, 1) for _ in range(4)],
        "picture": picture,
        "action_mask": mask,
    }


WRONG: list[Callable[[random.Random], Any]] = [
    lambda r: None,
    lambda r: r.choice(["", "x" * 3000, "1", "1_0", "nan", "\x00", "\U0001f600" * 80]),
    lambda r: r.choice([True, -1, 1e308, -1e400, 2**63, 2**200, 5, 0.5]),
    lambda r: [],
    lambda r: [["a" * 200, "b"] * r.choice([1, 50])],
    lambda r: {"a": [1] * r.choice([1, 1000])},
    lambda r: {
        "base64": "A" * r.choice([1, 4, 4000]),
        "dtype": r.choice(["uint8", "O", "float99", 3]),
        "shape": [2**40, 2**40],
    },
    lambda r: {"base64": 3, "dtype": "float32"},
    lambda r: json.loads("[" * 60 + "]" * 60),
]
"""Values that are right nowhere."""


def spoiled(rng: random.Random) -> bytes:
    """A tick's body with one thing wrong: a value, a name, the nesting, or bytes of the text."""
    body: dict[str, Any] = {"obs": observation(rng)}
    how = rng.randrange(6)
    if how == 0:
        body["obs"][rng.choice(["map", "flags", "picture", "kind"])] = rng.choice(WRONG)(rng)
    elif how == 1:
        del body["obs"][rng.choice(["map", "flags", "picture", "kind"])]
    elif how == 2:
        body["obs"] = rng.choice(WRONG)(rng)
    elif how == 3:
        body["obs"]["map"][rng.randrange(3)] = rng.choice(WRONG)(rng)
    elif how == 4:
        return b"[" * rng.choice([10, 5000]) + json.dumps(body).encode()
    else:
        text = json.dumps(body).encode()
        return text[: rng.randrange(len(text))]
    return json.dumps(body).encode()


def mutated(rng: random.Random, data: bytes) -> bytes:
    out = bytearray(data)
    for _ in range(rng.randint(1, 6)):
        at = rng.randrange(len(out)) if out else 0
        how = rng.randrange(4)
        if how == 0 and out:
            out[at] ^= 1 << rng.randrange(8)
        elif how == 1:
            del out[at : at + rng.randint(1, 30)]
        elif how == 2:
            out[at:at] = out[at : at + rng.randint(1, 60)]
        else:
            out[at:at] = rng.choice([b"\r\n", b"\0", b"\xff" * 8, b"0" * 40, b": ", b"Content-Length: 99999999\r\n"])
    return bytes(out)


def http(kind: str, session: str, body: bytes, secret: str = "", token: str = TOKEN) -> bytes:
    lines = ["POST /step HTTP/1.1", "Host: a", f"session: {session}", f"step_kind: {kind}", f"token: {token}"]
    if secret:
        lines.append(f"session_secret: {secret}")
    return "\r\n".join([*lines, f"Content-Length: {len(body)}", "", ""]).encode() + body


class Reply:
    def __init__(self, status: int, body: bytes, secret: str = ""):
        self.status, self.body, self.secret = status, body, secret

    def fault(self) -> str | None:
        """Why no request may be answered like this; None = it may."""
        if self.status == 200:
            return None
        if self.status not in DOCUMENTED:
            return f"status {self.status}: {self.body[:200]!r}"
        try:
            error = json.loads(self.body) if self.body else {"error": "", "message": ""}  # HEAD has no body
            return None if {"error", "message"} <= error.keys() else f"an error without code: {error}"
        except ValueError:
            return f"an error that is no JSON: {self.body[:200]!r}"


async def read_http(reader: asyncio.StreamReader) -> Reply:
    while True:
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        status = int(head[0].split(" ", 2)[1])
        fields = {k.strip().lower(): v.strip() for k, _, v in (line.partition(":") for line in head[1:])}
        if status != 100:
            body = await reader.readexactly(int(fields.get("content-length", "0")))
            return Reply(status, body, fields.get("session_secret", ""))


_STATUS = {
    "malformed": 400, "bad_kind": 400, "bad_token": 401, "no_session": 404, "session_exists": 409, "too_large": 413,
    "no_free_slot": 429, "too_many": 429, "overloaded": 503, "draining": 503, "tick_timeout": 504, "bad_secret": 401,
}  # fmt: skip


async def read_tcp(reader: asyncio.StreamReader) -> Reply:
    session, length, _ = REPLY_HEAD.unpack(await reader.readexactly(REPLY_HEAD.size))
    body = (await reader.readexactly(session + length))[session:]
    if not body.startswith(ERROR_MARK):
        return Reply(200, body)
    body = body[len(ERROR_MARK) :]
    return Reply(_STATUS.get(json.loads(body)["error"], 500), body)


# --- who says it ------------------------------------------------------------------------------------------------------


class Place:
    """The service under test, what is known of it and what went wrong."""

    def __init__(self, port: int, secrets: bool, tcp: bool, disturb: bool, pace: float = 0.0):
        """pace: seconds between two messages of one client"""
        self.port, self.secrets, self.tcp, self.disturb, self.pace = port, secrets, tcp, disturb, pace
        self.sent: Counter[str] = Counter()
        self.statuses: Counter[int] = Counter()
        self.wrong: list[str] = []
        self.ticks: list[float] = []
        self.restarts = 0
        self.names: list[str] = []
        """Sessions of the games: known to everybody."""
        self.over = False

    @property
    def messages(self) -> int:
        return sum(self.sent.values())

    def blame(self, what: str) -> None:
        if len(self.wrong) < 50:
            self.wrong.append(what)
            print(f"WRONG: {what}", file=sys.stderr, flush=True)

    @contextlib.asynccontextmanager
    async def connection(self) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        try:
            yield reader, writer
        finally:
            writer.transport.abort()


class Stranger:
    """Knows which of its own sessions run, so it knows what it must be told."""

    def __init__(self, place: Place, number: int, seed: int):
        self.place, self.number, self.rng = place, number, random.Random(f"{seed}-{number}")
        self.running: dict[str, str] = {}
        """Its sessions and their secrets."""

    async def live(self) -> None:
        while not self.place.over:
            await asyncio.sleep(self.place.pace)
            try:
                if self.number % 3 == 2:
                    await self._rude()
                else:
                    await self._polite(tcp=self.place.tcp and self.rng.random() < 0.3)
            except (ConnectionError, asyncio.IncompleteReadError, OSError):
                self.place.sent["connection lost"] += 1
                if not self.place.disturb:
                    self.place.blame("a connection of a stranger who kept to the protocol was lost")
                await asyncio.sleep(0.05)
        await self._leave()

    async def _leave(self) -> None:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            async with self.place.connection() as (reader, writer):
                for session, secret in self.running.items():
                    writer.write(http("end", session, b"", secret))
                    await asyncio.wait_for(read_http(reader), MESSAGE_TIMEOUT_S)

    async def _polite(self, tcp: bool) -> None:
        rng = self.rng
        async with self.place.connection() as (reader, writer):
            for _ in range(rng.randint(5, 60)):
                what, kind, session, body, secret, token, allowed = self._message()
                self.place.sent[what] += 1
                if tcp:
                    writer.write(pack_request(kind.encode(), session.encode(), body, token=token.encode()))
                else:
                    writer.write(http(kind, session, body, secret, token))
                read = read_tcp if tcp else read_http
                reply = await asyncio.wait_for(read(reader), MESSAGE_TIMEOUT_S)
                self.place.statuses[reply.status] += 1
                self._check(what, reply, allowed)
                self._follow(kind, session, reply)
                await asyncio.sleep(self.place.pace)
                if reply.status == 413 or (tcp and reply.status in (400, 401) and what != "spoiled tick"):
                    return  # what ends a connection

    def _message(self) -> tuple[str, str, str, bytes, str, str, set[int]]:
        """(name, step_kind, session, body, secret, token, statuses that may answer it)."""
        rng, mine = self.rng, list(self.running)
        fresh = f"stranger-{self.number}-{rng.randrange(1 << 40)}"
        good = json.dumps({"obs": observation(rng)}).encode()
        full = {200, 429}
        p = rng.random()
        if p < 0.08 or not mine:
            return "start", "start", fresh, b"", "", TOKEN, full
        own = rng.choice(mine)
        secret = self.running[own]
        if p < 0.45:
            return "tick", "tick", own, good, secret, TOKEN, OK
        if p < 0.70:
            return "spoiled tick", "tick", own, spoiled(rng), secret, TOKEN, {200, 400}
        if p < 0.75:
            return "tick of nobody", "tick", fresh, good, "", TOKEN, {404, 401, 403}
        if p < 0.79:
            gone = full if self.place.disturb else set()  # a killed worker took the session with it
            return "start again", "start", own, b"", secret, TOKEN, {409} | gone
        if p < 0.84 and self.place.secrets and self.place.names:
            victim, kind = rng.choice(self.place.names), rng.choice(["tick", "end", "stop", "start"])
            guess = rng.choice(["", secret, "0" * 32])
            return f"{kind} of a game", kind, victim, good, guess, TOKEN, {401, 403, 404, 409}
        if p < 0.88:
            return "wrong token", "tick", own, good, secret, rng.choice(["", "wrong", TOKEN + "x", "é"]), {401}
        if p < 0.91:
            return "auto", "auto", "", good, "", TOKEN, full
        if p < 0.93:
            return "wrong kind", rng.choice(["tock", "START!", "9"]), own, good, secret, TOKEN, {400}
        return "end", rng.choice(["end", "stop"]), own, b"", secret, TOKEN, OK

    def _check(self, what: str, reply: Reply, allowed: set[int]) -> None:
        if self.place.disturb and reply.status in WORTH_A_RETRY:
            return
        fault = reply.fault()
        if fault is None and reply.status not in allowed | {503}:
            fault = f"status {reply.status}, expected one of {sorted(allowed)}: {reply.body[:200]!r}"
        if fault:
            self.place.blame(f"{what}: {fault}")

    def _follow(self, kind: str, session: str, reply: Reply) -> None:
        if session in self.place.names:
            return
        if reply.status == 200 and kind == "start":
            self.running[session] = reply.secret
        elif session in self.running and (reply.status == 404 or (reply.status == 200 and kind in ("end", "stop"))):
            del self.running[session]

    async def _rude(self) -> None:
        """Bytes that hardly anybody would send, many requests at once, and an end at any moment."""
        rng, place = self.rng, self.place
        count = rng.choice([1, 1, 3, 40])
        data = b"".join(
            http(*rng.choice([("auto", "", spoiled(rng)), ("tick", "nobody", b"{}"), ("tock", "x", b"")]))
            for _ in range(count)
        )
        what = rng.choice(["mutated", "pipelined", "cut", "drip", "framed noise", "lying length"])
        place.sent[what] += count
        if what == "mutated":
            data = mutated(rng, data)
        elif what == "cut":
            data = data[: rng.randrange(len(data))]
        elif what == "framed noise":
            data = mutated(rng, pack_request(b"tick", b"nobody", b"x" * rng.randrange(300)))
        elif what == "lying length":
            lie = str(rng.choice([0, 5, 10**6, 10**9, 2**63, -1])).encode()
            data = data.replace(b"Content-Length: ", b"Content-Length: " + lie, 1)
        try:
            async with place.connection() as (reader, writer):
                if what == "drip":
                    for i in range(0, min(len(data), 40)):
                        writer.write(data[i : i + 1])
                        await asyncio.sleep(0)
                else:
                    writer.write(data)
                if rng.random() < 0.3:
                    return  # without listening
                if writer.can_write_eof():
                    writer.write_eof()
                while True:
                    reply = await asyncio.wait_for(read_http(reader), MESSAGE_TIMEOUT_S)
                    place.statuses[reply.status] += 1
                    if fault := reply.fault():
                        place.blame(f"{what}: {fault}")
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.LimitOverrunError, ValueError, IndexError):
            return  # the end of the connection, or a reply that is framed TCP's


class Game:
    """Plays properly, and knows what the policy says when asked alone."""

    def __init__(self, place: Place, number: int, seed: int, policy: Any):
        self.place, self.rng, self.policy = place, random.Random(f"game-{seed}-{number}"), policy
        self.name, self.secret = f"game-{number}", ""
        place.names.append(self.name)

    async def play(self) -> None:
        while not self.place.over:
            try:
                async with self.place.connection() as (reader, writer):
                    await self._session(reader, writer)
            except (ConnectionError, asyncio.IncompleteReadError, OSError):
                self._lost("its connection was lost")
                await asyncio.sleep(0.1)

    def _lost(self, what: str) -> None:
        self.place.restarts += 1
        if not self.place.disturb:
            self.place.blame(f"{self.name}: {what}")

    async def _ask(self, reader: Any, writer: Any, kind: str, body: bytes = b"") -> Reply:
        writer.write(http(kind, self.name, body, self.secret))
        return await asyncio.wait_for(read_http(reader), MESSAGE_TIMEOUT_S)

    async def _session(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        reply = await self._ask(reader, writer, "start")
        if reply.status == 409:  # its session still runs: only its connection was lost
            pass
        elif reply.status != 200:
            self._lost(f"start was answered with {reply.status} {reply.body[:100]!r}")
            await asyncio.sleep(0.2)
            return
        else:
            self.secret = reply.secret
        while not self.place.over:
            obs = observation(self.rng)
            before = time.perf_counter()
            reply = await self._ask(reader, writer, "tick", json.dumps({"obs": obs}).encode())
            self.place.ticks.append(time.perf_counter() - before)
            if reply.status != 200:
                self._lost(f"a tick was answered with {reply.status} {reply.body[:100]!r}")
                return
            action, expected = json.loads(reply.body)["action"], self.policy(obs)
            if action != expected:
                self.place.blame(f"{self.name}: action {action}, the policy alone says {expected}")
            await asyncio.sleep(0.02)
        await self._ask(reader, writer, "end")
