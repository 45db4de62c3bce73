"""Framed links between processes: requests, errors, lost connections, strangers."""

import asyncio
import contextlib
import gc
import os
import random
import socket
import struct
import time

import pytest

from bray.cluster import io
from bray.errors import DataError, LinkLost, RemoteError, Unreachable
from bray.serving import link as link_module
from bray.serving.link import Address, Listener, connect, machine_id

TOKEN = b"0123456789abcdef"
ECHO, BAD, ODD, SILENT, SLOW = 1, 2, 3, 4, 5


def handle(link, kind, number, body):
    if kind == ECHO:
        link.reply(number, body)
    elif kind == BAD:
        raise DataError("these bytes are no tree")
    elif kind == ODD:
        raise ZeroDivisionError("by zero")
    elif kind == SLOW:
        asyncio.get_running_loop().call_later(0.05, link.reply, number, b"late")


@pytest.fixture
def listener():
    made = Listener(handle, TOKEN)
    io.run(made.start("test"))
    yield made
    io.run(made.close())


both = pytest.mark.parametrize("unix", [True, False], ids=["unix", "tcp"])


def talk(listener, unix, what, **kwargs):
    """Run `what(link)` on the io loop."""

    async def run():
        link = await connect(listener.address, TOKEN, unix=unix, **kwargs)
        try:
            return await what(link)
        finally:
            link.close()

    return io.run(run(), timeout=30)


@both
def test_requests_are_answered(listener, unix):
    async def ask(link):
        replies = await asyncio.gather(*[link.request(ECHO, b"a%d" % i, b"-b") for i in range(100)])
        return [bytes(r) for r in replies]

    assert talk(listener, unix, ask) == [b"a%d-b" % i for i in range(100)]


@both
def test_large_and_small_bodies_keep_their_order(listener, unix):
    bodies = [os.urandom(n) for n in (0, 1, 70_000, 5, 3_000_000, 17, 65_536, 65_535)]

    async def ask(link):
        return [bytes(r) for r in await asyncio.gather(*[link.request(ECHO, b"", b) for b in bodies])]

    assert talk(listener, unix, ask) == bodies


def test_an_answer_that_takes_long_does_not_hold_up_others(listener):
    async def ask(link):
        slow, quick = link.request(SLOW), link.request(ECHO, b"x")
        await quick
        assert not slow.done()
        return bytes(await slow)

    assert talk(listener, True, ask) == b"late"


def test_errors_keep_their_class(listener):
    async def ask(link):
        with pytest.raises(DataError, match="these bytes are no tree"):
            await link.request(BAD)
        with pytest.raises(RemoteError, match="ZeroDivisionError: by zero"):
            await link.request(ODD)
        return bytes(await link.request(ECHO, b"still here"))

    assert talk(listener, True, ask) == b"still here"


def test_a_lost_link_fails_all_that_wait(listener):
    gone = []

    async def ask(link):
        waiting = [link.request(SILENT) for _ in range(3)]
        await link.request(ECHO, b"x")
        (theirs,) = listener.links
        theirs.close()
        results = await asyncio.gather(*waiting, return_exceptions=True)
        assert all(isinstance(r, LinkLost) for r in results)
        with pytest.raises(LinkLost):
            await link.request(ECHO)
        with pytest.raises(LinkLost):
            link.post(ECHO)
        assert gone == [link]

    talk(listener, True, ask, lost=gone.append)
    assert not listener.links


def test_nobody_there():
    nobody = Address(machine_id(), "\0bray-nobody", "127.0.0.1", 1)
    for unix in (True, False):
        with pytest.raises(Unreachable, match="no connection to"):
            io.run(connect(nobody, TOKEN, unix=unix))


def test_a_wrong_token_is_refused(listener):
    async def run():
        link = await connect(listener.address, b"x" * 16)
        with pytest.raises(LinkLost):
            await link.request(ECHO, b"secret?")

    io.run(run(), timeout=10)
    assert not listener.links


def test_strangers_are_refused_and_harm_nobody(listener):
    """Random bytes, a huge length, a request before the token, half a frame."""
    rng = random.Random(0)
    head = struct.Struct("<QIB3x")
    attacks = [rng.randbytes(rng.randrange(1, 2000)) for _ in range(200)]
    attacks += [
        head.pack(1, 1 << 31, 253),
        head.pack(1, 3, ECHO) + b"abc",
        head.pack(0, 2000, 253) + bytes(2000),
        b"\0" * 7,
    ]
    for attack in attacks:
        with socket.create_connection((listener.address.host, listener.address.port), timeout=5) as s:
            s.sendall(attack)
    assert talk(listener, True, lambda link: link.request(ECHO, b"fine")) == b"fine"
    deadline = time.monotonic() + 5
    while listener.links and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not listener.links


def strangers(listener, n):
    where = (listener.address.host, listener.address.port)
    return [socket.create_connection(where, timeout=10) for _ in range(n)]


def ended(sock):
    with contextlib.suppress(ConnectionResetError):
        return sock.recv(1) == b""
    return True


def links_in_memory():
    return sum(type(x) is link_module.Link for x in gc.get_objects())


def test_silent_strangers_are_few_and_leave_nothing_behind(listener, caplog):
    before = links_in_memory()
    silent = strangers(listener, 100)
    for sock in silent[:30]:
        sock.send(b"\0" * 10)  # half a frame
    assert all(ended(sock) for sock in silent[: 100 - link_module.MAX_STRANGERS])
    assert talk(listener, False, lambda link: link.request(ECHO, b"fine")) == b"fine"
    deadline = time.monotonic() + 10
    while listener.links and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not listener.links
    for sock in silent:
        sock.close()
    while links_in_memory() > before and time.monotonic() < deadline:
        time.sleep(0.1)
    assert links_in_memory() <= before
    assert len([r for r in caplog.records if "have not sent the token" in r.getMessage()]) <= 1


def test_a_stranger_that_says_nothing_is_closed(listener, monkeypatch):
    monkeypatch.setattr(link_module, "GREETING_S", 0.1)
    (silent,) = strangers(listener, 1)
    (partial,) = strangers(listener, 1)
    partial.send(struct.pack("<QIB3x", 0, 16, 253) + b"0123")
    assert ended(silent)
    assert ended(partial)


def test_nobody_hears_of_the_end_of_a_stranger():
    lost = []

    async def open_one():
        made = Listener(handle, TOKEN, lost.append)
        await made.start("test")
        return made

    listener = io.run(open_one())
    (sock,) = strangers(listener, 1)
    sock.close()
    talk(listener, False, lambda link: link.request(ECHO, b"x"))
    deadline = time.monotonic() + 10
    while not lost and time.monotonic() < deadline:
        time.sleep(0.01)
    assert len(lost) == 1
    io.run(listener.close())


def test_drain_waits_for_a_slow_reader(listener):
    async def ask(link):
        for _ in range(40):
            link.post(SILENT, bytes(1 << 20))
        await asyncio.wait_for(link.drain(), 10)
        return bytes(await link.request(ECHO, b"after"))

    assert talk(listener, False, ask) == b"after"


def test_a_body_that_is_too_large_is_refused_here(listener, monkeypatch):
    monkeypatch.setattr(link_module, "MAX_BODY", 1000)

    async def ask(link):
        with pytest.raises(DataError, match="send it in parts"):
            link.post(ECHO, bytes(1001))
        return bytes(await link.request(ECHO, bytes(1000)))

    assert talk(listener, True, ask) == bytes(1000)
