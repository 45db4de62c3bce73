"""Actors and a real server in a thread, for tests over real sockets."""

import asyncio
import contextlib
import json
import socket
import time

from bray.serving.background import BackgroundServer
from bray.serving.config import ServiceConfig
from bray.serving.protocol import ERROR_MARK, REPLY_HEAD, pack_request


class Echo:
    """Answers a tick with its own bytes, start and end with what they are."""

    async def start(self, session, data):
        self.session, self.ticks = session, 0
        return b"started " + session.encode()

    async def tick(self, data):
        self.ticks += 1
        return data

    async def end(self, data):
        return b"%d ticks" % self.ticks


class Plain:
    """The same without `async`, with `stop` for `end`."""

    def start(self, session, data):
        self.ticks = 0

    def tick(self, data):
        self.ticks += 1
        return data

    def stop(self, data):
        return b"%d ticks" % self.ticks


class Orders:
    """Does what a tick's body says."""

    key = b""

    async def start(self, session, data):
        if data == b"raise":
            raise RuntimeError("told to raise at start")
        if data == b"hang":
            await asyncio.sleep(3600)
        self.done = []
        return None

    async def tick(self, data):
        word, _, rest = data.partition(b" ")
        if word == b"raise":
            raise RuntimeError("told to raise, secret 4711")
        if word == b"none":
            return None
        if word == b"text":
            return "text"
        if word == b"array":
            return bytearray(rest)
        if word == b"sleep":
            await asyncio.sleep(float(rest))
        if word == b"stubborn":
            end = time.monotonic() + float(rest)
            while time.monotonic() < end:
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.sleep(0.05)
        if word == b"block":
            time.sleep(float(rest))
        if word == b"key":
            return self.key
        self.done.append(data)
        return b"%d:" % len(self.done) + data

    async def end(self, data):
        if data == b"raise":
            raise RuntimeError("told to raise at the end")
        return b"bye"


class Gated(Orders):
    """Ticks wait at a gate that the test opens."""

    def __init__(self, opened):
        self.opened = opened
        self.inside = self.most = 0

    async def start(self, session, data):
        self.ticks = 0

    async def tick(self, data):
        self.inside += 1
        self.most = max(self.most, self.inside)
        while not self.opened.is_set():
            await asyncio.sleep(0.005)
        self.inside -= 1
        self.ticks += 1
        return b"%d" % self.ticks


class Fallback(Orders):
    def fallback(self, data):
        return b"fallback for " + data


def running(make_actor=Echo, uvloop=True, **config):
    """A server on free ports in a thread of its own; ends with everything closed."""
    config = ServiceConfig(**({"port": 0, "admin_port": 0, "actors_per_worker": 100} | config))
    return Running(make_actor, config, fast=uvloop)


class Running(BackgroundServer):
    def __enter__(self):
        return self.server


def until(condition, seconds=60.0):
    """Wait for something that must come."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not come"
        time.sleep(0.01)


def on_loop(server, function):
    """Run a function in the server's own thread and give back what it returns."""

    async def call():
        result = function()
        return await result if asyncio.iscoroutine(result) else result

    return asyncio.run_coroutine_threadsafe(call(), server.sessions.loop).result(20)


class Wire:
    """A client that sends exactly the bytes it is told."""

    def __init__(self, port, timeout=10.0):
        self.sock = socket.create_connection(("127.0.0.1", port), timeout=timeout)
        self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.buffer = b""

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        self.sock.close()

    def send(self, data):
        self.sock.sendall(data)
        return self

    def _more(self):
        data = self.sock.recv(1 << 16)
        if not data:
            raise EOFError(f"closed after {self.buffer!r}")
        self.buffer += data

    def take(self, n):
        while len(self.buffer) < n:
            self._more()
        out, self.buffer = self.buffer[:n], self.buffer[n:]
        return out

    # HTTP
    def response(self):
        """(status, headers, body) of the next reply."""
        while b"\r\n\r\n" not in self.buffer:
            self._more()
        head, self.buffer = self.buffer.split(b"\r\n\r\n", 1)
        first, *lines = head.decode().split("\r\n")
        headers = {k.lower(): v.strip() for k, _, v in (x.partition(":") for x in lines)}
        return int(first.split()[1]), headers, self.take(int(headers.get("content-length", 0)))

    def step(self, kind, session, body=b"", **headers):
        self.send(http_request(kind, session, body, **headers))
        status, _, reply = self.response()
        return status, reply

    # TCP
    def ask(self, kind, session, body=b"", key=b"", token=b"", time=0):
        self.send(pack_request(kind, session, body, key, token, time))
        return self.frame()

    def frame(self):
        """(session, body, time) of the next reply; an error's body is its JSON object."""
        n, m, time = REPLY_HEAD.unpack(self.take(REPLY_HEAD.size))
        session, body = self.take(n), self.take(m)
        return session, (json.loads(body[len(ERROR_MARK) :]) if body.startswith(ERROR_MARK) else body), time

    def closed(self):
        """Whether the server closes this connection (whatever it still says)."""
        try:
            while self.sock.recv(1 << 16):
                pass
        except ConnectionResetError:
            pass
        return True


def http_request(kind=None, session=None, body=b"", path="/step", method="POST", version="1.1", length=True, **headers):
    lines = [f"{method} {path} HTTP/{version}", "Host: test"]
    if session is not None:
        lines.append(f"session: {session}")
    if kind is not None:
        lines.append(f"step_kind: {kind}")
    lines += [f"{k.replace('_', '-')}: {v}" for k, v in headers.items()]
    if length:
        lines.append(f"Content-Length: {len(body)}")
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body
