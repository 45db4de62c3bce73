"""The game service over framed TCP, and both protocols on one port."""

import struct
import time

import pytest

from bray.serving.protocol import pack_request
from tests.serving_for_tests import Echo, Orders, Wire, on_loop, running


def test_a_game_from_start_to_end():
    with running(use_tcp=True) as server, Wire(server.port) as wire:
        assert wire.ask(b"start", b"g", time=7) == (b"g", b"started g", 7)
        for i in range(5):
            assert wire.ask(b"tick", b"g", b"%d" % i, time=-i) == (b"g", b"%d" % i, -i)
        assert wire.ask(b"stop", b"g") == (b"g", b"5 ticks", 0)
        assert wire.ask(b"tick", b"g")[1]["error"] == "no_session"
        assert wire.ask(b"", b"", b"stateless")[1] == b"stateless"


def test_both_protocols_on_one_port():
    with running(use_tcp=True) as server, Wire(server.port) as tcp, Wire(server.port) as http:
        assert tcp.ask(b"start", b"g")[1] == b"started g"
        assert http.step("tick", "g", b"x") == (200, b"x")
        assert tcp.ask(b"tick", b"g", b"y")[1] == b"y"
        assert http.step("end", "g") == (200, b"2 ticks")


def test_without_tcp_a_frame_is_not_http():
    with running(use_tcp=False) as server, Wire(server.port) as wire:
        wire.send(pack_request(b"start", b"g"))
        assert wire.response()[0] == 400


def test_many_sessions_share_a_connection_and_overtake_each_other():
    with running(Orders, use_tcp=True) as server, Wire(server.port) as wire:
        for name in (b"slow", b"fast"):
            wire.ask(b"start", name)
        wire.send(
            pack_request(b"tick", b"slow", b"sleep 0.3", time=1)
            + pack_request(b"tick", b"slow", b"second", time=2)
            + pack_request(b"tick", b"fast", b"x", time=3)
        )
        assert wire.frame() == (b"fast", b"1:x", 3)
        assert wire.frame() == (b"slow", b"1:sleep 0.3", 1)
        assert wire.frame() == (b"slow", b"2:second", 2)


def test_split_at_every_byte_and_many_at_once():
    request = pack_request(b"tick", b"g", b"hello", b"key", b"", 5)
    with running(use_tcp=True, max_pending_per_session=500) as server, Wire(server.port) as wire:
        wire.ask(b"start", b"g")
        for i in range(1, len(request)):
            wire.send(request[:i])
            time.sleep(0.0005)
            wire.send(request[i:])
            assert wire.frame() == (b"g", b"hello", 5)
        wire.send(request * 300 + request[:30])
        for _ in range(300):
            assert wire.frame() == (b"g", b"hello", 5)
        wire.send(request[30:])
        assert wire.frame() == (b"g", b"hello", 5)
        big = bytes(range(256)) * 4096
        assert wire.ask(b"tick", b"g", big)[1] == big


@pytest.mark.parametrize(
    ("frame", "error"),
    [
        (struct.pack(">6q", -1, 4, 0, 0, 0, 9), "malformed"),
        (struct.pack(">6q", 1 << 40, 4, 0, 0, 0, 9), "malformed"),
        (struct.pack(">6q", 1, 4, 0, 1 << 62, 0, 9), "malformed"),
        (struct.pack(">6q", 1, 4, 0, 0, -7, 9), "too_large"),
        (struct.pack(">6q", 1, 4, 0, 0, 1 << 40, 9), "too_large"),
        (b"\xff" * 48, "malformed"),
    ],
)
def test_lengths_that_cannot_be_end_the_connection(frame, error):
    with running(use_tcp=True) as server, Wire(server.port) as wire, Wire(server.port) as other:
        other.ask(b"start", b"g")
        wire.send(frame)
        session, body, _ = wire.frame()
        assert session == b""
        assert body["error"] == error
        assert wire.closed()
        assert other.ask(b"tick", b"g", b"x")[1] == b"x"


def test_errors_are_normal_replies():
    with running(Orders, use_tcp=True, tokens=("t",)) as server, Wire(server.port) as wire:
        assert wire.ask(b"start", b"g", token=b"x")[1]["error"] == "bad_token"
        wire.ask(b"start", b"g", token=b"t")
        assert wire.ask(b"tock", b"g", token=b"t")[1]["error"] == "bad_kind"
        assert wire.ask(b"start", b"g", token=b"t")[1]["error"] == "session_exists"
        assert wire.ask(b"tick", b"g", b"raise", token=b"t")[1]["error"] == "actor_error"
        assert wire.ask(b"tick", b"g", b"key", b"the key", b"t")[1] == b"the key"


def test_a_frame_that_does_not_end():
    with running(Echo, use_tcp=True, request_timeout_s=0.3) as server, Wire(server.port) as wire:
        wire.send(pack_request(b"tick", b"g", b"x" * 100)[:-1])
        assert wire.frame()[1]["error"] == "slow_request"
        assert wire.closed()
        wire.sock.close()
        time.sleep(0.1)
        assert not on_loop(server, lambda: server.front.open)


def test_a_broken_frame_behind_a_slow_request():
    with running(Orders, use_tcp=True) as server, Wire(server.port) as wire:
        wire.ask(b"start", b"g")
        wire.send(pack_request(b"tick", b"g", b"sleep 0.2") + b"\xff" * 48)
        assert wire.frame()[1]["error"] == "malformed"
        assert wire.frame()[1] == b"1:sleep 0.2"
        assert wire.closed()
