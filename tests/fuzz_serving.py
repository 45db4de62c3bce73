"""Sends a game service what no client should send, for as long as it is told, and looks whether anybody else notices.

    python -m tests.fuzz_serving --count 100000 --seed 0 [--tcp] [--workers 2]

Well-behaved games tick all the while and must never see an error. After each batch: every reply was a documented one
(and the expected one, where what was sent leaves no doubt), no session is left that cannot be ended, nothing is
pending, and the connections are gone.
The service runs on the fuzzer's own event loop, or with --workers in processes of its own. Prints what was sent and
what came back.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import logging
import random
import re
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from bray.serving.config import ServiceConfig
from bray.serving.protocol import ERROR_MARK, REPLY_HEAD, pack_request
from bray.serving.server import Server
from bray.serving.workers import run_loop
from tests.fuzz_messages import (
    CLOSING,
    HTTP,
    MAX_BODY,
    MAX_HEADER,
    TCP,
    TOKEN,
    Case,
    first_name,
    flipped,
    noise,
    step,
)

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
PATIENCE_S = 60.0  # for what is at once there on a machine that does nothing else

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


class Written(Counted):
    """One in another process: who is in a session is a line each in a file."""

    file: ClassVar[Any] = None

    async def start(self, session, data):
        self._write(session, 1)
        await super().start(session, data)

    def lost(self):
        self._write(self.session, -1)
        super().lost()

    def _write(self, session: str, change: int) -> None:
        Written.file.write(json.dumps([session, change]) + "\n")


# --- what comes back --------------------------------------------------------------------------------------------------


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


# --- the services -----------------------------------------------------------------------------------------------------


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
        deadline = time.monotonic() + PATIENCE_S
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
from tests.fuzz_serving import Written
logging.basicConfig(level="WARNING", stream=sys.stderr)
Written.file = open(sys.argv[2], "a", buffering=1)  # each line at once, behind those of the other workers
config = ServiceConfig(**eval(sys.argv[1]))
sys.exit(serve(Written, config, on_ready=lambda port, admin: print(port, admin, flush=True)))
"""


class Elsewhere:
    """A service of several processes, known by its numbers and by what its Actors write."""

    def __init__(self, use_tcp: bool, workers: int):
        self.config = CONFIG | {"use_tcp": use_tcp, "workers": workers}

    async def __aenter__(self):
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115
        self._sessions = tempfile.NamedTemporaryFile("r")  # noqa: SIM115
        self._open: Counter[str] = Counter()
        self._process = subprocess.Popen(
            [sys.executable, "-c", SERVICE, repr(self.config), self._sessions.name],
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
        self._sessions.close()
        with self._log:
            self._log.seek(0)
            lines = self._log.read().splitlines()
        log = "\n".join(line for line in lines if "bray.serving.audit" not in line)  # a line a minute
        if exc[0] is None and (log or code):
            raise Wrong(f"the service ended with {code} and logged:\n{log[:2000]}")

    async def check(self, fuzz: Fuzz) -> None:
        deadline = time.monotonic() + PATIENCE_S
        loop = asyncio.get_running_loop()
        good = {game.name for game in fuzz.games}
        while True:
            for session, change in map(json.loads, self._sessions):
                self._open[session] += change
            # a flipped byte left a start as it was; what cannot be ended is still there at the next look
            for stray in [s.encode() for s, n in self._open.items() if n]:
                if stray not in good:
                    await fuzz.end(stray)
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
        with urllib.request.urlopen(f"http://127.0.0.1:{self.admin_port}/metrics", timeout=PATIENCE_S) as reply:
            lines = reply.read().decode().splitlines()
        return {k: float(v) for k, v in (x.rsplit(" ", 1) for x in lines if not x.startswith("#"))}


# --- the games that must not notice -----------------------------------------------------------------------------------


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


# --- the fuzzer -------------------------------------------------------------------------------------------------------


class _Records(logging.Handler):
    """Nothing that a client sends is worth a line in the log, let alone a traceback. (The audit log has a line a
    minute.)"""

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
    """Begin no other batch after this long."""
    sent: Counter[str] = field(default_factory=Counter)
    replies: dict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    slow: int = 0
    """Slow writers that are connected."""

    async def run(self) -> Fuzz:
        first_name()  # the same names for the same seed
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
                    await self._send_all(tasks)
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

    async def _send_all(self, games: list[asyncio.Task[None]]) -> None:
        kinds = TCP if self.use_tcp else HTTP
        names, weights = list(kinds), [w for w, _ in kinds.values()]
        rng = random.Random(self.seed)
        slow: set[asyncio.Task[None]] = set()
        end = None if self.seconds is None else time.monotonic() + self.seconds
        while self.messages < self.count and not (self.messages and end and time.monotonic() > end):
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
            for game in games:
                if game.done():
                    game.result()
                    raise Wrong("a game ended before its time")
            await self.service.check(self)
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
        began = time.monotonic()
        try:
            for i, piece in enumerate(case.pieces):
                if i:
                    await asyncio.sleep(0.001 if i % 5 == 0 else 0)
                client.write(piece)
            # a machine that is busy with something else makes us a slow writer
            too_late = time.monotonic() - began > CONFIG["request_timeout_s"] / 2 and not case.slow
            if case.end == "drop":
                client.transport.abort()
                return
            if case.end == "half":
                client.transport.write_eof()
            n = len(case.expects) if case.expects is not None else 1 << 30
            closes = case.end == "closes" or (case.end == "none" and bool(case.expects) and case.expects[-1] in CLOSING)
            closes = closes and not self._of_the_table(case)
            async with asyncio.timeout(PATIENCE_S):
                while not client.over:
                    if not closes and len(parse(bytes(client.buffer))[0]) >= n:
                        break
                    await client.wait(PATIENCE_S)
            replies, rest = parse(bytes(client.buffer))
            if rest:
                raise Wrong(f"{case.kind}: half a reply {rest[:100]!r} to {case.pieces!r}")
            if case.expects is not None and replies != case.expects and not (too_late and "slow_request" in replies):
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
            reply = await asyncio.wait_for(reader.read(), PATIENCE_S)
            if not re.match(rb"HTTP/1\.1 (200|400|403|404|405) ", reply):
                raise Wrong(f"the admin port said {reply[:200]!r}")
            writer.close()

    async def end(self, session: bytes) -> str:
        """End a session that a message of ours has started."""
        _, client = await asyncio.get_running_loop().create_connection(Client, "127.0.0.1", self.service.port)
        try:
            client.write(pack_request(b"end", session, b"", b"", TOKEN) if self.use_tcp else step(b"end", session))
            async with asyncio.timeout(PATIENCE_S):
                while not client.over:
                    replies, _ = (tcp_replies if self.use_tcp else http_replies)(bytes(client.buffer))
                    if replies:
                        return replies[0]
                    await client.wait(PATIENCE_S)
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
    parser.add_argument("--seconds", type=float, help="begin no other batch after this long")
    args = parser.parse_args()
    with contextlib.suppress(KeyboardInterrupt):
        print(fuzz(args.count, args.seed, args.tcp, args.workers, args.seconds).table())


if __name__ == "__main__":
    main()
