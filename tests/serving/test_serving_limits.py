"""What one connection and one request may cost the service: bytes kept, requests per turn of the loop, time in
silence."""

import asyncio
import contextlib
import gc
import json
import time
import tracemalloc
import urllib.request

import pytest

from bray.serving import server as server_module
from bray.serving.protocol import malformed, pack_request
from tests.serving_for_tests import Echo, Plain, Wire, http_request, on_loop, running

MB = 1 << 20


@pytest.fixture(params=["http", "tcp"])
def tcp(request):
    return request.param == "tcp"


def request(tcp, kind, session, body=b"", token=""):
    if tcp:
        return pack_request(kind.encode(), session.encode(), body, b"", token.encode())
    return http_request(kind, session, body, **({"token": token} if token else {}))


def answer(wire, tcp):
    """(whether it went well, what it said)"""
    if tcp:
        body = wire.frame()[1]
        return (False, body["error"]) if isinstance(body, dict) else (True, body)
    status, _, body = wire.response()
    return (True, body) if status == 200 else (False, json.loads(body)["error"])


def until(condition, seconds=10.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.01)


def held(server):
    return on_loop(server, lambda: server.front.held)


# --- bodies -----------------------------------------------------------------------------------------------------------


def test_a_wrong_token_is_refused_before_its_body_is_there(tcp):
    with running(use_tcp=tcp, tokens=("right",)) as server, Wire(server.port, timeout=5) as wire:
        whole = request(tcp, "start", "g", b"x" * 60_000, "wrong")
        wire.send(whole[:20_000])
        assert answer(wire, tcp) == (False, "bad_token")
        assert held(server) == 0
        wire.send(whole[20_000:])  # thrown away: the connection goes on
        wire.send(request(tcp, "start", "g", b"x", "right"))
        assert answer(wire, tcp) == (True, b"started g")


def test_wrong_tokens_cannot_fill_the_memory(tcp):
    with running(use_tcp=tcp, tokens=("right",)) as server, contextlib.ExitStack() as stack:
        whole = request(tcp, "start", "g", b"x" * MB, "wrong")
        wires = [stack.enter_context(Wire(server.port, timeout=5)) for _ in range(20)]
        for wire in wires:
            wire.send(whole[:-1])
        assert [answer(wire, tcp) for wire in wires] == [(False, "bad_token")] * 20
        assert held(server) == 0


def test_a_wrong_token_with_a_large_body_costs_the_connection():
    with running(tokens=("right",)) as server, Wire(server.port, timeout=5) as wire:
        wire.send(http_request("start", "g", b"x" * 8 * MB, token="wrong")[: 2 * MB])
        status, headers, _ = wire.response()
        assert (status, headers["connection"]) == (401, "close")
        assert wire.closed()
    with running(tokens=("right",)) as server, Wire(server.port, timeout=5) as wire:
        wire.send(http_request("start", "g", length=False, Transfer_Encoding="chunked", token="wrong"))
        assert wire.response()[0] == 401
        with contextlib.suppress(OSError):
            wire.send(b"10000\r\n" + b"x" * 0x10000 + b"\r\n1\r\nx\r\n")
        assert wire.closed()


@pytest.mark.parametrize("wrong", [{"path": "/other"}, {"method": "PUT"}, {"step_kind": "jump"}])
def test_a_head_that_is_wrong_is_refused_before_its_body_is_there(wrong):
    with running() as server, Wire(server.port, timeout=5) as wire:
        whole = http_request(None, "g", b"x" * 60_000, **wrong)
        wire.send(whole[:-1])
        assert wire.response()[0] in (400, 404, 405)
        assert held(server) == 0
        wire.send(whole[-1:])
        assert wire.step("start", "g")[0] == 200


def test_bodies_share_one_budget_while_they_arrive(tcp):
    with running(use_tcp=tcp, max_bodies=3 * MB) as server, contextlib.ExitStack() as stack:
        whole = request(tcp, "auto", "g", b"x" * MB)
        wires = [stack.enter_context(Wire(server.port, timeout=5)) for _ in range(3)]
        for wire in wires[:2]:
            wire.send(whole[:-100])
        until(lambda: held(server) > 2 * MB - 1000)
        small = stack.enter_context(Wire(server.port))
        small.send(request(tcp, "auto", "g", b"small"))
        assert answer(small, tcp) == (True, b"small")
        wires[2].send(request(tcp, "auto", "g", b"x" * 2 * MB)[:-1])
        assert answer(wires[2], tcp) == (False, "overloaded")
        assert held(server) <= 3 * MB
        for wire in wires[:2]:
            wire.send(whole[-100:])
            assert answer(wire, tcp) == (True, b"x" * MB)
        until(lambda: held(server) == 0)
        small.send(whole)
        assert answer(small, tcp) == (True, b"x" * MB)


class Waits(Echo):
    """Answers when it may."""

    async def tick(self, data):
        while not Waits.may:
            await asyncio.sleep(0.005)
        return data[:10]


def test_bodies_of_ticks_that_are_being_answered_count_too(tcp):
    Waits.may = False
    with running(Waits, use_tcp=tcp, max_bodies=3 * MB // 2) as server, contextlib.ExitStack() as stack:
        wires = [stack.enter_context(Wire(server.port, timeout=5)) for _ in range(3)]
        wires[0].send(request(tcp, "auto", "", b"x" * MB))
        until(lambda: held(server) == MB)
        wires[1].send(request(tcp, "auto", "", b"y" * MB))
        assert answer(wires[1], tcp) == (False, "overloaded")
        Waits.may = True
        assert answer(wires[0], tcp) == (True, b"x" * 10)
        until(lambda: held(server) == 0)
        wires[2].send(request(tcp, "auto", "", b"y" * MB))
        assert answer(wires[2], tcp) == (True, b"y" * 10)


def test_the_bytes_of_bodies_are_on_the_metrics_page():
    with running() as server, Wire(server.port) as wire:
        wire.send(http_request("start", "g", b"x" * 5000)[:-1])
        until(lambda: on_loop(server, lambda: server.all_numbers()["bray_body_bytes"]) == 4999)


@contextlib.contextmanager
def growth(most):
    """What is allocated meanwhile and still there at the end is less than this many bytes, without a garbage
    collector."""
    gc.collect()
    gc.disable()
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    try:
        yield
        until(lambda: tracemalloc.get_traced_memory()[0] - before < most, seconds=3)
    finally:
        tracemalloc.stop()
        gc.enable()


def test_nothing_of_a_connection_that_is_gone_is_kept(tcp):
    whole = request(tcp, "auto", "", b"x" * MB)
    with running(use_tcp=tcp) as server:
        with growth(2 * MB):
            for cut in (len(whole), len(whole) - 1):
                for _ in range(8):
                    with Wire(server.port) as wire:
                        wire.send(whole[:cut])
                        if cut == len(whole):
                            assert answer(wire, tcp)[0]
            until(lambda: not on_loop(server, lambda: server.front.open))
        assert held(server) == 0


def test_a_connection_that_waits_keeps_no_body(tcp):
    whole = request(tcp, "auto", "", b"x" * MB)
    with running(use_tcp=tcp) as server, contextlib.ExitStack() as stack, growth(2 * MB):
        for _ in range(8):
            wire = stack.enter_context(Wire(server.port))
            wire.send(whole)
            assert answer(wire, tcp)[0]
            wire.buffer = b""


class Refuses(Echo):
    async def tick(self, data):
        decoded = [data[i:] for i in range(3)]
        try:
            raise ValueError(len(decoded))
        except ValueError as e:
            raise malformed(str(e)) from None


def test_a_refused_stateless_request_leaves_nothing_behind(tcp):
    whole = request(tcp, "auto", "", b"x" * MB)
    with running(Refuses, use_tcp=tcp) as server, Wire(server.port) as wire, growth(2 * MB):
        for _ in range(8):
            wire.send(whole)
            assert answer(wire, tcp) == (False, "malformed")


def test_a_body_in_a_million_pieces_is_kept_as_bytes(tcp):
    """Each piece as an object of its own would be forty times as large."""
    body = b"x" * 3000
    whole = request(tcp, "auto", "", body)
    with running(use_tcp=tcp) as server, Wire(server.port) as wire:
        for i in range(len(whole) - 1):
            wire.send(whole[i : i + 1])
        until(lambda: held(server) >= 2999)
        assert held(server) < 3200
        wire.send(whole[-1:])
        assert answer(wire, tcp) == (True, body)


# --- turns ------------------------------------------------------------------------------------------------------------


class Turns(Plain):
    """Knows in which turn of the loop each tick came."""

    ticks_of: dict
    now = 0

    def tick(self, data):
        Turns.ticks_of[Turns.now] = Turns.ticks_of.get(Turns.now, 0) + 1
        return data


@pytest.mark.parametrize("uvloop", [True, False])
def test_a_client_that_pipelines_has_its_share_of_a_turn(tcp, uvloop):
    Turns.ticks_of = {}
    with running(Turns, uvloop=uvloop, use_tcp=tcp) as server, Wire(server.port) as wire:
        loop = server.sessions.loop

        def count():
            Turns.now += 1
            loop.call_soon(count)

        on_loop(server, count)
        wire.send(request(tcp, "start", "g"))
        assert answer(wire, tcp)[0]
        n = 3000
        wire.send(request(tcp, "tick", "g", b"x") * n)
        for _ in range(n):
            assert answer(wire, tcp) == (True, b"x")
    assert sum(Turns.ticks_of.values()) == n
    assert max(Turns.ticks_of.values()) <= 32


def test_a_client_that_pipelines_has_so_many_requests_at_work(tcp):
    Waits.may = False
    with running(Waits, use_tcp=tcp, max_pending=10_000, actors_per_worker=1000) as server, Wire(server.port) as wire:
        wire.send(request(tcp, "auto", "", b"x") * 500)
        until(lambda: on_loop(server, lambda: len(server.sessions.running)) == 128)
        assert [on_loop(server, lambda: len(server.sessions.running)) for _ in range(20)] == [128] * 20
        Waits.may = True
        assert [answer(wire, tcp) for _ in range(500)] == [(True, b"x")] * 500


def test_large_bodies_behind_each_other(tcp):
    with running(use_tcp=tcp) as server, Wire(server.port) as wire:
        bodies = [bytes([65 + i]) * n for i, n in enumerate((5, 511, 513, 70_000, 300_000, 1, 262_144, 0, 2_000_000))]
        wire.send(b"".join(request(tcp, "auto", "", body) for body in bodies))
        assert [answer(wire, tcp)[1] for _ in bodies] == bodies


def test_chunked_bodies_behind_each_other():
    head = http_request("auto", "", length=False, Transfer_Encoding="chunked")
    piece = b"ab\r\n\r\ncd" * 500
    chunked = head + (b"%x\r\n%b\r\n" % (len(piece), piece)) * 3 + b"0\r\n\r\n"
    with running() as server, Wire(server.port) as wire:
        wire.send(chunked * 20)
        assert [wire.response()[2] for _ in range(20)] == [piece * 3] * 20


# --- silence ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("use_tcp", [False, True])
def test_a_connection_that_says_nothing_is_closed(use_tcp):
    with running(use_tcp=use_tcp) as server, Wire(server.port) as silent, Wire(server.port) as client:
        assert client.step("start", "g")[0] == 200
        until(lambda: on_loop(server, lambda: len(server.front.open)) == 2)
        now = time.perf_counter()
        on_loop(server, lambda: server.front.sweep(now + 29))
        assert on_loop(server, lambda: len(server.front.open)) == 2
        on_loop(server, lambda: server.front.sweep(now + 31))
        assert silent.closed()
        assert client.step("tick", "g", b"x") == (200, b"x")  # it has said something, and has five minutes
        on_loop(server, lambda: server.front.sweep(now + 301))
        assert client.closed()


def test_a_refused_client_that_goes_on_sending_for_ever_is_closed(tcp):
    with running(use_tcp=tcp, tokens=("right",)) as server, Wire(server.port) as wire:
        wire.send(request(tcp, "auto", "", b"x" * 60_000, "wrong")[:1000])
        assert answer(wire, tcp) == (False, "bad_token")
        on_loop(server, lambda: server.front.sweep(time.perf_counter() + 31))
        assert wire.closed()


def test_silent_connections_do_not_keep_probes_from_the_admin_port(monkeypatch):
    monkeypatch.setattr(server_module, "MAX_ADMIN", 4)
    with running() as server, contextlib.ExitStack() as open_:
        silent = [open_.enter_context(Wire(server.admin_port)) for _ in range(10)]
        assert urllib.request.urlopen(f"http://127.0.0.1:{server.admin_port}/healthz", timeout=10).status == 200
        for wire in silent[:6]:
            with contextlib.suppress(ConnectionError):  # closed, and the others are not
                assert wire.sock.recv(1) == b""
        silent[-1].sock.settimeout(0.1)
        with pytest.raises(TimeoutError):
            silent[-1].sock.recv(1)
