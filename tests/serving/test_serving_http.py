"""The game service over HTTP, byte by byte."""

import asyncio
import json
import re
import threading
import time
import urllib.error
import urllib.request

import pytest

from bray.client import Client
from tests.serving_for_tests import Echo, Fallback, Gated, Orders, Plain, Wire, http_request, on_loop, running, until


@pytest.fixture(params=[True, False], ids=["uvloop", "asyncio"])
def either(request):
    return request.param


def code(reply):
    return json.loads(reply)["error"]


def test_a_game_from_start_to_end(either):
    for actor in (Echo, Plain):
        with running(actor, uvloop=either) as server, Wire(server.port) as wire:
            assert wire.step("start", "g")[0] == 200
            for i in range(5):
                assert wire.step("tick", "g", b"%d" % i) == (200, b"%d" % i)
            assert wire.step("stop" if actor is Plain else "end", "g") == (200, b"5 ticks")
            status, reply = wire.step("tick", "g")
            assert status == 404
            assert code(reply) == "no_session"


def test_an_actor_is_reused_and_started_anew():
    with running(actors_per_worker=1) as server, Wire(server.port) as wire:
        for i in range(3):
            assert wire.step("start", f"g{i}") == (200, b"started g%d" % i)
            status, reply = wire.step("start", "other")
            assert (status, code(reply)) == (429, "no_free_slot")
            assert wire.step("tick", f"g{i}", b"x") == (200, b"x")
            assert wire.step("end", f"g{i}") == (200, b"1 ticks")
        assert server.sessions.actors_made == 1


def test_names_of_headers():
    with running() as server, Wire(server.port) as wire:
        wire.send(b"POST /step HTTP/1.1\r\nGame_Id: old\r\nSTEP_KIND: start\r\nContent-Length: 0\r\n\r\n")
        assert wire.response()[0] == 200
        wire.send(b"POST /step?x=1 HTTP/1.1\r\nSESSION: old\r\nstep-kind: TICK\r\nContent-Length: 2\r\n\r\nhi")
        assert wire.response()[2] == b"hi"


def test_stateless_requests():
    with running(Orders, actors_per_worker=1) as server, Wire(server.port) as wire:
        for kind in ("auto", None, ""):
            assert wire.step(kind, None, b"x") == (200, b"1:x")
        assert wire.step("auto", None, b"raise")[0] == 500
        assert wire.step("auto", None, b"text") == (200, b"text")
        assert wire.step("auto", "named", b"y") == (200, b"1:y")
        assert wire.step("start", "holds the only slot")[0] == 200
        assert wire.step("auto", None, b"x")[0] == 429
        assert on_loop(server, lambda: server.sessions.free) == 0


def test_split_at_every_byte():
    request = http_request("tick", "g", b"hello")
    with running() as server, Wire(server.port) as wire:
        wire.step("start", "g")
        for i in range(1, len(request), 7):
            wire.send(request[:i])
            time.sleep(0.001)
            wire.send(request[i:])
            assert wire.response()[2] == b"hello"
        for i in range(len(request)):
            wire.send(request[i : i + 1])
        assert wire.response()[2] == b"hello"


def test_pipelined_replies_come_in_order(either):
    with running(Orders, uvloop=either, max_pending_per_session=300) as server, Wire(server.port) as wire:
        for name in ("slow", "fast"):
            wire.step("start", name)
        batch = http_request("tick", "slow", b"sleep 0.2") + b"".join(
            http_request("tick", "fast", b"%d" % i) for i in range(300)
        )
        wire.send(batch + http_request("nonsense", "fast") + http_request("tick", "slow", b"last"))
        assert wire.response()[2] == b"1:sleep 0.2"
        for i in range(300):
            assert wire.response()[2] == b"%d:%d" % (i + 1, i)
        assert wire.response()[0] == 400
        assert wire.response()[2] == b"2:last"


def send_in_turn(server, wires, sessions):
    """A tick for each of these sessions, each sent when the service has taken the one before."""
    for i, (wire, session) in enumerate(zip(wires, sessions, strict=True)):
        wire.send(http_request("tick", session))
        until(lambda i=i: len(server.sessions.running) == i + 1)


def test_one_tick_of_a_session_at_a_time_in_order():
    actor = Gated(threading.Event())
    with running(lambda: actor) as server, Wire(server.port) as wire:
        wire.step("start", "g")
        others = [Wire(server.port) for _ in range(5)]
        send_in_turn(server, others, "ggggg")
        assert actor.inside == 1  # the others wait
        actor.opened.set()
        assert [other.response()[2] for other in others] == [b"1", b"2", b"3", b"4", b"5"]
        assert actor.most == 1
        for other in others:
            other.sock.close()


def test_end_and_start_behind_each_other():
    """A client that sends the next game's start right behind the end is in order; one that starts twice is not."""
    with running(Orders) as server, Wire(server.port) as wire:
        wire.step("start", "g")
        wire.send(
            http_request("tick", "g", b"sleep 0.1")
            + http_request("end", "g")
            + http_request("start", "g")
            + http_request("tick", "g", b"new")
        )
        assert [wire.response()[2] for _ in range(4)] == [b"1:sleep 0.1", b"bye", b"Game Started", b"1:new"]
        status, reply = wire.step("start", "g")
        assert (status, code(reply)) == (409, "session_exists")


def test_chunked_bodies():
    with running() as server, Wire(server.port) as wire:
        wire.step("start", "g")
        wire.send(http_request("tick", "g", length=False, Transfer_Encoding="chunked"))
        wire.send(b"3\r\nabc\r\n").send(b"5;name=value\r\ndefgh\r\n0\r\n\r\n")
        assert wire.response()[2] == b"abcdefgh"


def test_expect_100_continue():
    with running(max_body=1000) as server, Wire(server.port) as wire:
        wire.step("start", "g")
        wire.send(http_request("tick", "g", b"body", Expect="100-continue")[:-4])
        assert wire.response()[0] == 100
        wire.send(b"body")
        assert wire.response()[2] == b"body"
        wire.send(b"POST /step HTTP/1.1\r\nExpect: 100-continue\r\nContent-Length: 5000\r\n\r\n")
        assert wire.response()[0] == 413  # at once, without having asked for the body


def test_http_10_and_close():
    with running() as server:
        with Wire(server.port) as wire:
            wire.send(http_request("start", "g", version="1.0"))
            status, headers, _ = wire.response()
            assert (status, headers["connection"]) == (200, "close")
            assert wire.closed()
        with Wire(server.port) as wire:
            for _ in range(2):
                wire.send(http_request("tick", "g", b"x", version="1.0", Connection="keep-alive"))
                status, headers, body = wire.response()
                assert (status, headers.get("connection"), body) == (200, "keep-alive", b"x")
        with Wire(server.port) as wire:
            wire.send(http_request("tick", "g", b"x", Connection="close"))
            status, headers, _ = wire.response()
            assert (status, headers["connection"]) == (200, "close")
            assert wire.closed()


def test_an_upgrade_is_answered_in_http_11():
    with running() as server, Wire(server.port) as wire:
        wire.send(http_request("start", "g", Connection="Upgrade", Upgrade="h2c"))
        assert wire.response()[0] == 200


@pytest.mark.parametrize(
    ("request_bytes", "status", "error"),
    [
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", 400, "malformed"),
        (b"nonsense\r\n\r\n", 400, "malformed"),
        (b"POST /step HTTP/1.1\r\nContent-Length: -5\r\n\r\n", 400, "malformed"),
        (b"POST /step HTTP/1.1\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n", 400, "malformed"),
        (b"POST /step HTTP/1.1\r\nContent-Length: 99999999999999999999999999\r\n\r\n", 400, "malformed"),
        (b"POST /step HTTP/1.1\r\nContent-Length: 200000\r\n\r\n", 413, "too_large"),
        (b"POST /step HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n40000\r\n" + b"x" * 0x40000, 413, "too_large"),
        (b"POST /step HTTP/1.1\r\nX: " + b"y" * 20000 + b"\r\n\r\n", 431, "header_too_large"),
        (b"POST /step HTTP/1.1\r\nX: " + b"y" * 20000, 431, "header_too_large"),
        (b"POST /" + b"y" * 20000, 431, "header_too_large"),
    ],
)
def test_refusals_that_end_the_connection(request_bytes, status, error):
    with running(max_body=100_000) as server, Wire(server.port) as wire:
        wire.send(request_bytes)
        got, headers, body = wire.response()
        assert (got, code(body), headers["connection"]) == (status, error, "close")
        assert wire.closed()
        with Wire(server.port) as other:
            assert other.step("start", "g")[0] == 200


@pytest.mark.parametrize(
    ("request_bytes", "status", "error"),
    [
        (http_request("tock", "g"), 400, "bad_kind"),
        (http_request("start", ""), 400, "malformed"),
        (http_request("start", "g" * 600), 400, "malformed"),
        (
            b"POST /step HTTP/1.1\r\nsession: \xff\xfe\r\nstep_kind: start\r\nContent-Length: 0\r\n\r\n",
            400,
            "malformed",
        ),
        (http_request("tick", "unknown"), 404, "no_session"),
        (http_request("end", "unknown"), 404, "no_session"),
        (http_request("tick", "g", path="/other"), 404, "no_path"),
        (http_request("tick", "g", method="GET"), 405, "bad_method"),
    ],
)
def test_refusals_after_which_the_connection_goes_on(request_bytes, status, error):
    with running() as server, Wire(server.port) as wire:
        for _ in range(2):
            wire.send(request_bytes)
            got, headers, body = wire.response()
            assert (got, code(body)) == (status, error)
            assert "connection" not in headers
        assert wire.step("start", "fine")[0] == 200


def test_tokens():
    with running(tokens=("secret", "other")) as server, Wire(server.port) as wire:
        for headers in ({}, {"token": "wrong"}, {"token": ""}, {"token": "secre"}):
            status, reply = wire.step("start", "g", **headers)
            assert (status, code(reply)) == (401, "bad_token")
            assert b"secret" not in reply
        assert wire.step("start", "g", token="other")[0] == 200
        assert wire.step("tick", "unknown", token="wrong")[0] == 401  # nothing revealed of which sessions exist


def test_the_key_reaches_the_actor():
    with running(Orders) as server, Wire(server.port) as wire:
        wire.step("start", "g")
        assert wire.step("tick", "g", b"key", key="k1") == (200, b"k1")
        assert wire.step("tick", "g", b"key") == (200, b"")


def test_an_actor_that_fails_harms_its_own_session_only(caplog):
    with running(Orders) as server, Wire(server.port) as wire:
        wire.step("start", "bad")
        wire.step("start", "good")
        for body in (b"raise", b"none"):
            status, reply = wire.step("tick", "bad", body)
            assert (status, code(reply)) == (500, "actor_error")
            assert b"4711" not in reply
            assert wire.step("tick", "good", b"x")[0] == 200
        assert "told to raise, secret 4711" in caplog.text
        assert "Traceback" in caplog.text
        assert "expected tick to return bytes, got NoneType" in caplog.text
        assert wire.step("tick", "bad", b"array x") == (200, b"x")
        assert wire.step("start", "third", b"raise")[0] == 500
        assert wire.step("tick", "third")[0] == 404
        assert wire.step("end", "bad", b"raise")[0] == 500
        assert wire.step("tick", "bad")[0] == 404
        assert on_loop(server, lambda: list(server.sessions.sessions)) == [b"good"]


def test_text_that_an_actor_returns_is_sent_as_utf8_with_one_warning(caplog):
    class Talks(Echo):
        def start(self, session, data):
            return "hällo"

        def tick(self, data):
            return data.decode()

    with running(Talks) as server, Wire(server.port) as wire:
        assert wire.step("start", "g") == (200, "hällo".encode())
        for _ in range(3):
            assert wire.step("tick", "g", "ü".encode()) == (200, "ü".encode())
    said = [r.getMessage() for r in caplog.records if "returns text" in r.getMessage()]
    assert [text.split()[0] for text in said] == ["Talks.start", "Talks.tick"]


def test_a_start_and_an_end_always_have_a_reply():
    """Clients of older services wait for ever for an empty one over TCP."""

    class Silent:
        def start(self, session, data):
            pass

        async def tick(self, data):
            return b""

        async def end(self, data):
            pass

    with running(Silent) as server, Wire(server.port) as wire:
        assert wire.step("start", "g") == (200, b"Game Started")
        assert wire.step("tick", "g", b"x") == (200, b"")
        assert wire.step("end", "g") == (200, b"Game Stopped")
        with Client("127.0.0.1", server.port) as client:
            assert client.start(data={"map": 1}) is None  # JSON was sent, and there is none to return
            assert client.end({"score": 1}) is None


def test_two_sessions_in_one_request_are_refused():
    with running() as server, Wire(server.port) as wire:
        for second in (b"session: b", b"Session: b", b"game_id: b"):
            wire.send(
                b"POST /step HTTP/1.1\r\nsession: a\r\nstep_kind: start\r\n%b\r\nContent-Length: 0\r\n\r\n" % second
            )
            status, _, body = wire.response()
            assert (status, code(body)) == (400, "malformed")
            assert b"got two that differ" in body
        assert wire.step("start", "a")[0] == 200  # the connection goes on, and nothing was started
        wire.send(b"POST /step HTTP/1.1\r\ngame_id: a\r\nsession: a\r\nstep_kind: tick\r\nContent-Length: 1\r\n\r\nx")
        assert wire.response()[2] == b"x"


@pytest.mark.parametrize("piece", [1, 7, 300, 512])
def test_the_limit_of_headers_holds_however_they_are_sent(piece):
    def request(more):
        head = b"POST /step HTTP/1.1\r\nstep_kind: auto\r\nContent-Length: 1\r\nfiller: "
        return head + b"x" * (more - len(head) - 4) + b"\r\n\r\n!"

    for size, expected in ((1000, 200), (1100, 431)):
        with running(max_header=1024) as server, Wire(server.port) as wire:
            sent = request(size)
            for i in range(0, len(sent), piece):
                if piece > 7:
                    time.sleep(0.002)
                wire.send(sent[i : i + piece])
            assert wire.response()[0] == expected


def test_a_tick_that_takes_too_long(either):
    with (
        running(Orders, uvloop=either, tick_timeout_s=0.2) as server,
        Wire(server.port) as wire,
        Wire(server.port) as other,
    ):
        wire.step("start", "g")
        other.step("start", "h")
        wire.send(http_request("tick", "g", b"sleep 60"))
        assert other.step("tick", "h", b"x")[0] == 200
        status, _, reply = wire.response()
        assert (status, code(reply)) == (504, "tick_timeout")
        assert wire.step("tick", "g", b"x") == (200, b"1:x")  # the session lives, and the tick was cancelled
        status, reply = wire.step("start", "never", b"hang")
        assert status == 504
        assert wire.step("tick", "never")[0] == 404
        assert not on_loop(server, lambda: server.sessions.running)


class Futures(Orders):
    """Orders without coroutines."""

    def tick(self, data):
        return asyncio.ensure_future(super().tick(data))


def test_an_actor_may_return_futures(either):
    with running(Futures, uvloop=either, tick_timeout_s=0.2) as server, Wire(server.port) as wire:
        wire.step("start", "g")
        assert wire.step("tick", "g", b"x") == (200, b"1:x")
        assert wire.step("tick", "g", b"array abc") == (200, b"abc")
        assert wire.step("tick", "g", b"raise")[0] == 500
        assert wire.step("tick", "g", b"text") == (200, b"text")
        status, reply = wire.step("tick", "g", b"sleep 60")
        assert (status, code(reply)) == (504, "tick_timeout")
        assert wire.step("tick", "g", b"y") == (200, b"2:y")
        assert wire.step("auto", None, b"z") == (200, b"1:z")
        assert not on_loop(server, lambda: server.sessions.running)


def test_a_fallback_instead_of_a_timeout():
    with running(Fallback, tick_timeout_s=0.2) as server, Wire(server.port) as wire:
        wire.step("start", "g")
        assert wire.step("tick", "g", b"sleep 60") == (200, b"fallback for sleep 60")
        assert wire.step("tick", "g", b"x") == (200, b"1:x")


def test_a_tick_that_ignores_its_cancellation_is_given_up(caplog):
    with running(Orders, tick_timeout_s=0.2) as server, Wire(server.port) as wire:
        wire.step("start", "g")
        assert wire.step("tick", "g", b"stubborn 1.0")[0] == 504
        time.sleep(0.6)
        assert wire.step("tick", "g", b"x")[0] == 404
        assert "ignored its cancellation" in caplog.text
        assert wire.step("start", "g")[0] == 200
        time.sleep(0.5)  # the old tick ends now, and must not touch the new session
        assert wire.step("tick", "g", b"x") == (200, b"1:x")


def test_a_blocked_loop_is_named(caplog):
    with running(Orders, blocked_after_s=0.1) as server, Wire(server.port) as wire:
        wire.step("start", "the blocker")
        for _ in range(100):  # a machine that stalls may not let the watchdog look in time
            assert wire.step("tick", "the blocker", b"block 0.4")[0] == 200
            if "stood still" in caplog.text:
                break
        assert "stood still" in caplog.text
        assert "Orders (session 'the blocker')" in caplog.text
        assert "time.sleep" in caplog.text
        assert re.search(r"serving_for_tests\.py:\d+ in tick", caplog.text)


def test_a_blocked_loop_is_logged_once_per_place_and_counted_each_time(caplog):
    with running(Orders, blocked_after_s=0.05) as server, Wire(server.port) as wire:
        wire.step("start", "g")
        counted = blocked = 0
        while counted < 3 and blocked < 100:  # as above
            assert wire.step("tick", "g", b"block 0.3")[0] == 200
            blocked += 1
            metrics = on_loop(server, lambda: server.admin("GET", "/metrics", b""))[2].decode()
            counted = int(re.search(r"bray_loop_blocked_total (\d+)", metrics)[1])
    assert 3 == counted <= blocked  # never twice for one
    assert sum("stood still" in r.getMessage() for r in caplog.records) == 1


def test_a_loop_that_waits_for_the_machine_is_no_error(caplog):
    """A trainer in the same process, or a busy machine, holds it up: no code of the game's owner is to blame."""
    with running(Orders, blocked_after_s=0.05) as server, Wire(server.port) as wire:
        wire.step("start", "g")
        on_loop(server, lambda: time.sleep(0.3))
        assert wire.step("tick", "g", b"x")[0] == 200
    assert "stood still" not in caplog.text


def test_idle_sessions_end():
    lost = []

    class Told(Echo):
        def lost(self):
            lost.append(self.session)

    with running(Told, idle_timeout_s=3.0) as server, Wire(server.port) as wire:
        wire.step("start", "idle")
        wire.step("start", "busy")
        until(lambda: wire.step("tick", "busy")[0] != 200 or lost)
        assert wire.step("tick", "busy")[0] == 200
        assert wire.step("tick", "idle")[0] == 404
        assert lost == ["idle"]
        assert on_loop(server, lambda: server.sessions.free) == 99


@pytest.mark.parametrize("tcp", [False, True])
def test_sessions_of_a_closed_connection_may_be_ended_early(tcp):
    def ask(wire, kind, session):
        return wire.ask(kind.encode(), session.encode())[0] if tcp else wire.step(kind, session)

    def names(server):
        return sorted(on_loop(server, lambda: [name.decode() for name in server.sessions.sessions]))

    with running(Orders, use_tcp=tcp, disconnect_timeout_s=3.0) as server, Wire(server.port) as stays:
        ask(stays, "start", "stays")
        with Wire(server.port) as wire:
            if not tcp:  # a client that says that it closes has not crashed
                wire.send(http_request("start", "closes").replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n"))
                assert wire.response()[0] == 200
        with Wire(server.port) as moves, Wire(server.port) as crashes:
            ask(moves, "start", "moves")
            ask(crashes, "start", "ended")
            ask(crashes, "end", "ended")
            ask(crashes, "start", "crashed")
            ask(crashes, "tick", "crashed")
        ask(stays, "tick", "moves")  # it goes on over another connection
        until(lambda: "crashed" not in names(server))
        assert names(server) == ([] if tcp else ["closes"]) + ["moves", "stays"]
        assert server.sessions.expired == 1


def test_a_session_outlives_its_connection_unless_the_service_is_told_otherwise():
    with running(Orders) as server:
        with Wire(server.port) as wire:
            wire.step("start", "g")
        with Wire(server.port) as wire:
            assert wire.step("tick", "g", b"x") == (200, b"1:x")


def test_too_many_requests_at_once_are_refused_at_once():
    opened = threading.Event()
    limits = {"max_pending": 4, "max_pending_per_session": 2}
    with running(lambda: Gated(opened), **limits) as server, Wire(server.port) as wire:
        for name in "abcdef":
            wire.step("start", name)
        wires = [Wire(server.port) for _ in range(6)]
        send_in_turn(server, wires[:4], "abcd")
        for name, each in zip("ef", wires[4:], strict=True):
            each.send(http_request("tick", name))
        refused = [each.response() for each in wires[4:]]  # while the gate is closed
        assert [(s, code(b), h["retry-after"]) for s, h, b in refused] == [(503, "overloaded", "1")] * 2
        opened.set()
        assert [each.response()[0] for each in wires[:4]] == [200] * 4
        opened.clear()
        many = [Wire(server.port) for _ in range(4)]
        send_in_turn(server, many[:3], "aaa")
        many[3].send(http_request("tick", "a"))
        assert many[3].response()[0] == 503
        opened.set()
        assert [each.response()[0] for each in many[:3]] == [200] * 3
        for each in wires + many:
            each.sock.close()


def test_a_client_that_goes_away_during_a_tick():
    with running(Orders) as server, Wire(server.port) as wire:
        wire.step("start", "g")
        with Wire(server.port) as gone:
            gone.send(http_request("tick", "g", b"sleep 0.2"))
            time.sleep(0.05)
        assert wire.step("tick", "g", b"x") == (200, b"2:x")


def test_slow_writers_and_silent_connections_are_closed():
    with running(request_timeout_s=0.3, keep_alive_s=0.5) as server:
        with Wire(server.port) as wire:
            wire.send(b"POST /step HTTP/1.1\r\nContent-Length: 10\r\n\r\nabc")
            status, _, body = wire.response()
            assert (status, code(body)) == (408, "slow_request")
            assert wire.closed()
        with Wire(server.port) as wire:
            assert wire.closed()
        assert not on_loop(server, lambda: server.front.open)


def test_a_client_that_does_not_read_holds_nobody_up():
    limits = {"max_pending_per_session": 1000, "max_pending": 10_000, "request_timeout_s": 600}
    with running(**limits) as server, Wire(server.port) as wire:
        wire.step("start", "greedy")
        wire.step("start", "other")
        with Wire(server.port) as greedy:
            greedy.sock.setblocking(False)
            request = http_request("tick", "greedy", b"x" * 50_000)
            sent = 0
            for _ in range(2000):
                try:
                    sent += greedy.sock.send(request[sent % len(request) :])  # what is left of one
                except BlockingIOError:
                    time.sleep(0.001)
            assert sent < 2000 * len(request)  # it was made to wait
            assert wire.step("tick", "other", b"x") == (200, b"x")


def test_connections_are_limited():
    with running(max_connections=3) as server:
        wires = [Wire(server.port) for _ in range(3)]
        assert wires[2].step("start", "g")[0] == 200
        with Wire(server.port) as fourth:
            assert fourth.closed()
        for wire in wires:
            wire.sock.close()


def test_drain():
    with running(Orders, drain_timeout_s=60) as server, Wire(server.port) as wire, Wire(server.port) as other:
        wire.step("start", "g")
        wire.send(http_request("tick", "g", b"sleep 0.3"))
        until(lambda: server.sessions.running)
        done = []
        on_loop(server, lambda: done.append(server.sessions.loop.create_task(server.drain())))
        status, reply = other.step("start", "new")
        assert (status, code(reply)) == (503, "draining")
        with pytest.raises(urllib.error.HTTPError, match="503"):
            urllib.request.urlopen(f"http://127.0.0.1:{server.admin_port}/readyz")
        assert wire.response()[2] == b"1:sleep 0.3"
        assert wire.step("tick", "g", b"x")[0] == 200
        assert not done[0].done()
        assert wire.step("end", "g")[0] == 200
        until(done[0].done)  # long before its time is over


def test_admin():
    with running(Orders) as server, Wire(server.port) as wire:
        wire.step("start", "g")
        wire.step("tick", "g", b"raise")
        for _ in range(3):
            wire.step("tick", "g", b"x")

        def get(path):
            with urllib.request.urlopen(f"http://127.0.0.1:{server.admin_port}{path}", timeout=5) as reply:
                return reply.read().decode()

        assert get("/healthz") == "ok\n"
        assert get("/readyz") == "ready\n"
        assert json.loads(get("/version"))["bray"]
        lines = get("/metrics").splitlines()
        assert 'bray_requests_total{kind="tick",status="200"} 3' in lines
        assert 'bray_requests_total{kind="tick",status="500"} 1' in lines
        assert "bray_tick_seconds_count 4" in lines
        assert 'bray_tick_seconds_bucket{le="+Inf"} 4' in lines
        assert "bray_sessions 1" in lines
        assert len([x for x in lines if x.startswith("# TYPE bray_requests_total")]) == 1
        with pytest.raises(urllib.error.HTTPError, match="404"):
            get("/secret")
        with Wire(server.admin_port) as raw:
            raw.send(b"\0\1garbage\r\n\r\n")
            assert raw.response()[0] in (400, 405)


def test_a_port_that_is_taken():
    import socket

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(Exception, match="cannot listen on"), running(port=taken.getsockname()[1]):
            pass


def test_garbage_behind_a_slow_request_waits_for_its_reply():
    with running(Orders) as server, Wire(server.port) as wire:
        wire.step("start", "g")
        wire.send(http_request("tick", "g", b"sleep 0.2") + b"garbage\r\n\r\n")
        assert wire.response()[2] == b"1:sleep 0.2"
        status, headers, _ = wire.response()
        assert (status, headers["connection"]) == (400, "close")
        assert wire.closed()
