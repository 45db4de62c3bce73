"""What goes wrong at a game service, and who notices: bad bytes, bad Actors, too much load, killed workers, no more
files."""

import asyncio
import contextlib
import json
import logging
import os
import random
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path

import pytest

from bray.errors import Overloaded
from bray.serving import http
from bray.serving.protocol import pack_request
from tests.fuzz_serving import fuzz
from tests.serving.test_serving_workers import metrics
from tests.serving_for_tests import Echo, Orders, Plain, Wire, http_request, on_loop, running, until

ROOT = Path(__file__).parents[2]


@pytest.fixture(params=[True, False], ids=["uvloop", "asyncio"])
def either(request):
    return request.param


def code(reply):
    return json.loads(reply)["error"]


# --- malformed messages -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("use_tcp", [False, True], ids=["http", "tcp"])
def test_ten_thousand_malformed_messages(use_tcp):
    result = fuzz(10_000, seed=1, use_tcp=use_tcp, seconds=12.0)
    assert result.messages > 1000  # all of them on a machine that does nothing else
    assert result.ticks > 0
    total = sum(result.replies.values(), Counter())
    wanted = {"ok", "malformed", "bad_kind", "bad_token", "no_session", "session_exists", "too_large", "slow_request"}
    assert wanted <= set(total)


def test_malformed_messages_at_two_workers():
    assert fuzz(2000, seed=2, workers=2).messages >= 1000


@pytest.mark.slow
@pytest.mark.parametrize("use_tcp", [False, True], ids=["http", "tcp"])
def test_a_hundred_thousand_malformed_messages(use_tcp):
    result = fuzz(100_000, seed=0, use_tcp=use_tcp)
    print(result.table())
    assert result.messages >= 100_000
    assert sum(result.replies.values(), Counter())["ok"] < 50_000  # the others were refused, or were no requests at all


def test_the_head_of_a_pipelined_request_may_be_split():
    """What came before it in the same piece is not part of its headers."""
    with running(max_header=2000) as server, Wire(server.port) as wire:
        wire.step("start", "g")
        last = http_request("tick", "g", b"last")
        wire.send(http_request("tick", "g", b"x" * 900) * 20 + last[:30])
        for _ in range(20):
            assert wire.response()[0] == 200
        wire.send(last[30:])
        assert wire.response()[2] == b"last"
        wire.send(http_request("tick", "g", b"x" * 900) + b"POST /step HTTP/1.1\r\nX: " + b"y" * 1900)
        assert wire.response()[0] == 200
        wire.send(b"y" * 1900)
        assert wire.response()[0] == 431


def test_a_trailer_changes_nothing():
    head = http_request("tick", "a", length=False, Transfer_Encoding="chunked")
    with running(Orders) as server, Wire(server.port) as wire:
        wire.step("start", "a")
        wire.step("start", "b")
        wire.send(head + b"3\r\nabc\r\n0\r\nsession: b\r\nstep_kind: end\r\nkey: k\r\n\r\n")
        assert wire.response()[2] == b"1:abc"
        assert wire.step("tick", "b", b"x") == (200, b"1:x")
        assert wire.step("tick", "a", b"key") == (200, b"")


def test_a_trailer_without_an_end_is_refused():
    head = http_request("tick", "a", length=False, Transfer_Encoding="chunked")
    with running() as server, Wire(server.port) as wire:
        wire.send(head + b"3\r\nabc\r\n0\r\nX: ")
        with contextlib.suppress(ConnectionError):
            for _ in range(100):
                wire.send(b"y" * 100_000)
        assert wire.response()[0] == 431
        assert wire.closed()


def test_a_chunk_that_comes_in_pieces_is_not_a_trailer():
    head = http_request("tick", "a", length=False, Transfer_Encoding="chunked")
    with running(max_header=2000) as server, Wire(server.port) as wire:
        wire.step("start", "a")
        for pause in (0.05, 0.0):
            wire.send(head + b"2710\r\n")
            for _ in range(10):
                time.sleep(pause)
                wire.send(b"y" * 1000)
            wire.send(b"\r\n1\r\nz\r\n0\r\nX: y\r\n\r\n")
            assert wire.response()[2] == b"y" * 10_000 + b"z"


@pytest.mark.parametrize("chunked", [False, True])
def test_an_upgrade_that_is_not_taken_costs_nothing(chunked):
    """Some HTTP clients offer HTTP/2 with every first request, whose body is still HTTP/1.1."""
    offer = {"Connection": "Upgrade, HTTP2-Settings", "Upgrade": "h2c", "HTTP2_Settings": "AAMAAABkAAQAAP"}
    with running(Orders) as server, Wire(server.port) as wire:
        wire.send(http_request("start", "g", **offer))
        assert wire.response()[0] == 200
        if chunked:
            request = http_request("tick", "g", length=False, key="k", Transfer_Encoding="chunked", **offer)
            request += b"2\r\nhi\r\n0\r\n\r\n"
        else:
            request = http_request("tick", "g", b"hi", key="k", **offer)
        for i in range(1, len(request)):
            wire.send(request[:i])
            if i % 20 == 0:
                time.sleep(0.001)
            wire.send(request[i:])
            assert wire.response()[2] == b"%d:hi" % i
        wire.send(request * 50 + http_request("tick", "g", b"key", key="last"))
        for _ in range(50):
            assert wire.response()[2].endswith(b":hi")
        assert wire.response()[2] == b"last"
        wire.send(http_request("tick", "g", b"x" * 10, Content_Length=99_999_999, length=False, **offer))
        assert wire.response()[0] == 413
        assert wire.closed()


def test_head_gets_no_body():
    with running() as server, Wire(server.port) as wire:
        wire.send(b"HEAD /step HTTP/1.1\r\n\r\nHEAD / HTTP/1.1\r\n\r\n" + http_request("start", "g"))
        assert [wire.response()[::2] for _ in range(3)] == [(405, b""), (404, b""), (200, b"started g")]


def test_a_length_of_twenty_digits_is_refused_before_the_body():
    with running() as server, Wire(server.port) as wire:
        wire.send(b"POST /step HTTP/1.1\r\nContent-Length: 18446744073709551615\r\n\r\n")
        assert wire.response()[0] == 413


def test_names_of_headers_that_are_kept_are_few_and_short():
    with running() as server, Wire(server.port) as wire:
        wire.send(http_request("tick", "g", **{"A" * 3000: "x"}))
        assert wire.response()[0] == 404
        assert max(map(len, http.SPELLINGS)) <= 64


def test_a_start_behind_an_end_comes_before_what_arrives_later():
    """end, start and tick of one session over several pieces: the tick belongs to the new game, whenever it arrives."""

    class Slow(Echo):
        async def end(self, data):
            await asyncio.sleep(0)
            time.sleep(0.02)  # so that the tick is there in the very moment in which the end is done

    with running(Slow, use_tcp=True) as server, Wire(server.port) as wire:
        wire.ask(b"start", b"g")
        for _ in range(10):
            wire.send(pack_request(b"end", b"g", time=1) + pack_request(b"start", b"g", time=2))
            time.sleep(0.01)
            wire.send(pack_request(b"tick", b"g", b"new", time=3))
            assert [wire.frame()[1:] for _ in range(3)] == [(b"Game Stopped", 1), (b"started g", 2), (b"new", 3)]


def test_a_thousand_connections_come_and_go():
    with running(use_tcp=True) as server, Wire(server.port) as wire:
        wire.step("start", "g")
        rng = random.Random(0)
        for i in range(1000):
            sock = socket.create_connection(("127.0.0.1", server.port), timeout=10)
            how = rng.randrange(4)
            if how == 1:
                sock.send(b"\0" * rng.randrange(1, 60))
            elif how == 2:
                sock.send(http_request("tick", "g", b"")[: rng.randrange(1, 80)])
            elif how == 3:  # a reset in place of an end
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
            sock.close()
            if i % 50 == 0:
                assert wire.step("tick", "g", b"x") == (200, b"x")
        until(lambda: on_loop(server, lambda: len(server.front.open)) == 1)
        assert on_loop(server, lambda: server.front.accepted) > 500  # those that were reset at once may never be seen


def test_a_client_that_never_reads_is_let_go():
    """What it has not read is too little to stop the service from reading its requests, and too much for its socket."""
    with running(keep_alive_s=1.0) as server, Wire(server.port) as wire:
        wire.step("start", "g")
        wire.sock.close()
        with Wire(server.port) as greedy:
            greedy.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)

            def unread():
                return max((c.transport.get_write_buffer_size() for c in server.front.open), default=0)

            while not on_loop(server, unread):
                greedy.send(http_request("tick", "g", b"x" * 60_000))
                time.sleep(0.002)
            assert on_loop(server, unread) < 256 << 10
            until(lambda: not on_loop(server, lambda: server.front.open))


def test_a_service_whose_admin_port_is_taken_leaves_its_other_port_free():
    with socket.socket() as taken, socket.socket() as free:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        free.close()
        with pytest.raises(Exception, match="cannot listen on"):
            running(port=port, admin_port=taken.getsockname()[1])
        with running(port=port) as server, Wire(server.port) as wire:
            assert wire.step("start", "g")[0] == 200
        with socket.socket() as again:
            again.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            again.bind(("127.0.0.1", port))
            again.listen()


# --- Actors -----------------------------------------------------------------------------------------------------------

ERRORS = {
    "exit": lambda: sys.exit(3),
    "interrupt": lambda: signal.default_int_handler(),
    "cancelled": lambda: (_ for _ in ()).throw(asyncio.CancelledError()),
    "error": lambda: 1 // 0,
}


class Fails(Orders):
    """Fails where and how its session's name says: "start exit", "tick cancelled", "late exit"."""

    async def start(self, session, data):
        self.where, _, self.how = session.partition(" ")
        self.maybe_fail("start")
        return await super().start(session, data)

    def maybe_fail(self, where):
        if self.where == where:
            ERRORS[self.how]()

    async def tick(self, data):
        if self.where == "late":
            await asyncio.sleep(0.01)
            ERRORS[self.how]()
        self.maybe_fail("tick")
        return await super().tick(data)

    async def end(self, data):
        self.maybe_fail("end")
        return b"bye"


class PlainFails(Plain):
    def start(self, session, data):
        self.where, _, self.how = session.partition(" ")
        self.maybe_fail("start")

    maybe_fail = Fails.maybe_fail

    def tick(self, data):
        self.maybe_fail("tick")
        self.maybe_fail("late")
        return data

    def stop(self, data):
        self.maybe_fail("end")
        return b"bye"


@pytest.mark.parametrize("how", ERRORS)
@pytest.mark.parametrize("actor", [Fails, PlainFails])
def test_nothing_that_an_actor_raises_ends_the_worker(actor, how, either, caplog):
    with running(actor, uvloop=either) as server, Wire(server.port) as wire, Wire(server.port) as other:
        assert other.step("start", "good")[0] == 200
        for where, expected in {
            "start": [500, 404, 404],
            "tick": [200, 500, 200],
            "late": [200, 500, 200],
            "end": [200, 200, 500],
        }.items():
            name = f"{where} {how}"
            replies = [wire.step(kind, name, b"x") for kind in ("start", "tick", "end")]
            assert [status for status, _ in replies] == expected
            assert {code(body) for status, body in replies if status == 500} == {"actor_error"}
            asked = (where, actor) != ("end", PlainFails)  # its `stop` is not called for a request without a session
            assert wire.step("auto", name, b"x")[0] == (500 if asked else 200)
            assert other.step("tick", "good", b"x")[0] == 200
        assert on_loop(server, lambda: [server.sessions.free, server.sessions.lent]) == [99, 0]
        assert not on_loop(server, lambda: server.sessions.running)
        assert other.step("end", "good")[0] == 200
    assert f"{actor.__name__}.tick failed" in caplog.text


def test_an_actor_that_cannot_be_made(caplog):
    broken = ["exit"]

    class Broken(Echo):
        def __init__(self):
            if broken:
                ERRORS[broken[0]]()

    with running(Broken, actors_per_worker=1) as server, Wire(server.port) as wire:
        for how in ("exit", "error", "interrupt"):
            broken[:] = [how]
            for kind in ("start", "auto"):
                status, reply = wire.step(kind, "g")
                assert (status, code(reply)) == (500, "actor_error")
        assert "making an Actor failed" in caplog.text
        broken.clear()
        assert wire.step("start", "g")[0] == 200
        assert wire.step("end", "g")[0] == 200


def test_an_actor_whose_making_blocks_the_loop_is_named(caplog):
    class Heavy(Echo):
        def __init__(self):
            time.sleep(0.4)

    with running(Heavy, blocked_after_s=0.1) as server, Wire(server.port) as wire:
        assert wire.step("start", "the first")[0] == 200
        assert "stood still" in caplog.text
        assert "the making of an Actor (session 'the first')" in caplog.text


def test_fallback_and_lost_may_fail_too(either, caplog):
    class Bad(Orders):
        def fallback(self, data):
            ERRORS["exit"]()

        def lost(self):
            ERRORS["exit"]()

    class BadLater(Bad):
        async def lost(self):
            await asyncio.sleep(0.01)
            ERRORS["interrupt"]()

    for actor in (Bad, BadLater):
        with (
            running(actor, uvloop=either, tick_timeout_s=0.2, idle_timeout_s=0.5) as server,
            Wire(server.port) as wire,
        ):
            wire.step("start", "g")
            wire.step("start", "idle")
            assert wire.step("tick", "g", b"sleep 60")[0] == 504
            while on_loop(server, lambda: b"idle" in server.sessions.sessions):
                assert wire.step("tick", "g", b"x")[0] == 200
        assert f"{actor.__name__}.fallback failed" in caplog.text
        until(lambda actor=actor: f"{actor.__name__}.lost failed" in caplog.text)


def test_the_end_of_a_service_waits_for_actors_that_are_told():
    done = []

    class Saves(Echo):
        async def lost(self):
            await asyncio.sleep(0.3)
            done.append(self.session)

    with running(Saves) as server, Wire(server.port) as wire:
        wire.step("start", "a")
        wire.step("start", "b")
    assert sorted(done) == ["a", "b"]


def test_an_actor_that_shuts_the_executor_and_leaves_tasks_behind(either, caplog):
    """They go on, or fail, without anybody else; and the service ends in spite of them."""

    class Untidy(Orders):
        async def tick(self, data):
            loop = asyncio.get_running_loop()
            if data == b"executor":
                await loop.run_in_executor(None, int)
                await loop.shutdown_default_executor()
            elif data == b"stop":
                loop.stop()
            elif data == b"tasks":
                self.tasks = [loop.create_task(asyncio.sleep(3600)) for _ in range(1000)]
                self.tasks += [loop.create_task(super(Untidy, self).tick(b"stubborn 3600")) for _ in range(10)]
                self.tasks.append(loop.create_task(self.exit()))
                self.tasks[-1].add_done_callback(lambda task: task.exception())
                for task in self.tasks:
                    task._log_destroy_pending = False  # that they are left is what this is about
            return b"done"

        async def exit(self):
            raise SystemExit(3)

    started = time.monotonic()
    with running(Untidy, uvloop=either) as server, Wire(server.port) as wire, Wire(server.port) as other:
        other.step("start", "good")
        wire.step("start", "bad")
        for what in (b"executor", b"tasks", b"stop"):
            assert wire.step("tick", "bad", what) == (200, b"done")
            for _ in range(3):
                assert other.step("tick", "good") == (200, b"done")
    assert time.monotonic() - started < 30
    assert "it goes on" in caplog.text


def test_a_stateless_request_that_ignores_its_cancellation_gives_its_slot_back(caplog):
    over = threading.Event()

    class Stubborn(Echo):
        async def tick(self, data):
            while data == b"stubborn" and not over.is_set():
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.sleep(0.01)
            return data

    with running(Stubborn, tick_timeout_s=0.2, actors_per_worker=1) as server, Wire(server.port) as wire:
        assert wire.step("auto", None, b"stubborn")[0] == 504
        assert wire.step("auto", None, b"x")[0] == 429
        until(lambda: wire.step("auto", None, b"x")[0] == 200)
        assert "ignored its cancellation" in caplog.text
        over.set()  # it ends now, and must not give back a second slot
        time.sleep(0.2)
        assert on_loop(server, lambda: [server.sessions.lent, server.sessions.free]) == [0, 1]


def test_what_is_told_after_a_deadline():
    with running(Orders, tick_timeout_s=0.2) as server, Wire(server.port) as wire:
        assert b"the session is over" in wire.step("start", "never", b"hang")[1]
        wire.step("start", "g")
        assert b"the session goes on" in wire.step("tick", "g", b"sleep 60")[1]


def test_an_actor_may_return_its_own_kind_of_bytes():
    class Bytes(bytes):
        pass

    class Odd(Echo):
        async def tick(self, data):
            return Bytes(data)

    with running(Odd) as server, Wire(server.port) as wire:
        wire.step("start", "g")
        assert wire.step("tick", "g", b"x") == (200, b"x")


@pytest.mark.parametrize("use_tcp", [False, True], ids=["http", "tcp"])
def test_a_huge_reply_to_a_client_that_does_not_read(use_tcp):
    class Huge(Echo):
        async def tick(self, data):
            return bytes(50_000_000) if data == b"huge" else data

    with running(Huge, use_tcp=use_tcp, request_timeout_s=1.0) as server, Wire(server.port) as wire:
        wire.step("start", "huge")
        wire.step("start", "other")
        with Wire(server.port) as greedy:
            if use_tcp:
                greedy.send(pack_request(b"tick", b"huge", b"huge"))
            else:
                greedy.send(http_request("tick", "huge", b"huge"))
            until(lambda: on_loop(server, lambda: any(c.stuck_since for c in server.front.open)))
            for _ in range(50):
                assert wire.step("tick", "other", b"x") == (200, b"x")
            until(lambda: on_loop(server, lambda: len(server.front.open)) == 1)
            assert received(greedy.sock, 50_000_000) < 50_000_000
        with Wire(server.port) as patient:  # the session is none the worse for it
            patient.send(http_request("tick", "huge", b"huge"))
            assert received(patient.sock, 50_000_000) >= 50_000_000


def received(sock, most):
    """How many bytes come, up to the end of the connection or this many."""
    buffer, total = bytearray(1 << 20), 0
    with contextlib.suppress(ConnectionError):
        while total < most and (n := sock.recv_into(buffer)):
            total += n
    return total


# --- tokens -----------------------------------------------------------------------------------------------------------


def test_a_wrong_token_learns_nothing(caplog):
    """The same reply whatever is asked: for a session that runs, one that does not, a kind that does not exist."""
    caplog.set_level(logging.DEBUG)
    with running(tokens=("s3cret-token",), use_tcp=True) as server, Wire(server.port) as wire, Wire(server.port) as tcp:
        assert wire.step("start", "running", token="s3cret-token")[0] == 200
        replies, frames = set(), set()
        for token in ("", "wrong", "s3cret-toke", "s3cret-token ".strip()[:-1] + "x"):
            for kind in ("start", "tick", "end", "auto", "nonsense", ""):
                for session in ("running", "unknown", "", "n" * 900):
                    wire.send(http_request(kind, session, b"x", token=token))
                    status, headers, body = wire.response()
                    replies.add((status, tuple(sorted(headers.items())), body))
                    if len(session) <= 512:
                        _, error, _ = tcp.ask(kind.encode(), session.encode(), b"x", token=token.encode())
                        frames.add(json.dumps(error))
        assert len(replies) == 1
        assert len(frames) == 1
        ((status, _, body),) = replies
        assert (status, code(body)) == (401, "bad_token")
        assert "running" not in body.decode()
        assert wire.step("tick", "running", b"x", token="s3cret-token") == (200, b"x")
        with Wire(server.admin_port) as admin:
            assert b"s3cret" not in admin.send(b"GET /metrics HTTP/1.1\r\n\r\n").response()[2]
    assert "s3cret" not in caplog.text


# --- too much load ----------------------------------------------------------------------------------------------------

TICK_S = 0.01


class OneAtATime:
    """What can be asked a hundred times a second, with a queue of eight."""

    def __init__(self):
        self.queue = self.longest = 0
        self.lock = asyncio.Lock()

    async def ask(self, bounded):
        if bounded and self.queue >= 8:
            raise Overloaded("the model's queue is full")
        self.queue += 1
        self.longest = max(self.longest, self.queue)
        try:
            async with self.lock:
                await asyncio.sleep(TICK_S)
        finally:
            self.queue -= 1


@pytest.mark.parametrize("bounded_by", ["the model", "the service"])
def test_three_times_what_can_be_answered(bounded_by):
    model = []

    class Asks(Echo):
        async def tick(self, data):
            model[:] = model or [OneAtATime()]
            await model[0].ask(bounded_by == "the model")
            return data

    limit = {} if bounded_by == "the model" else {"max_pending": 8}
    with running(Asks, **limit) as server:
        wires = [Wire(server.port) for _ in range(30)]
        for i, wire in enumerate(wires):
            assert wire.step("start", f"s{i}")[0] == 200
        answered: dict[int, list[int]] = {200: [], 503: []}
        began = time.monotonic()

        def play(i):
            """Ten ticks a second, on time or late."""
            for n in range(1, 20):
                time.sleep(max(0.0, began + i / 300 + n / 10 - time.monotonic()))
                wires[i].send(http_request("tick", f"s{i}", b"x"))
                status, headers, body = wires[i].response()
                answered[status].append(i)
                if status == 503:
                    assert code(body) == "overloaded"
                    assert headers["retry-after"] == "1"

        threads = [threading.Thread(target=play, args=(i,)) for i in range(30)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        lasted = time.monotonic() - began
        for wire in wires:
            wire.sock.close()
        accepted, refused = len(answered[200]), len(answered[503])
        assert accepted + refused == 30 * 19
        assert accepted > 40  # the overload does not stop the service
        assert accepted <= 1.1 * lasted / TICK_S
        assert refused > 0
        assert model[0].longest <= 8  # nobody waits for the excess
        assert not on_loop(server, lambda: server.sessions.running)


# --- no more files ----------------------------------------------------------------------------------------------------

FEW_FILES = """
import logging, resource, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (100, 100))
logging.basicConfig(level="INFO", stream=sys.stderr)
from bray.serving.background import BackgroundServer
from bray.serving.config import ServiceConfig
from tests.serving_for_tests import Echo
class Hoards(Echo):
    files = []
    async def tick(self, data):
        if data == b"hoard":
            try:
                while True:
                    self.files.append(open("/dev/null"))
            except OSError:
                pass
        if data == b"free":
            self.files.clear()
        return data
with BackgroundServer(Hoards, ServiceConfig(port=0, admin_port=0), fast=sys.argv[1] == "True") as server:
    print(server.port, server.admin_port, flush=True)
    sys.stdin.read()
"""


def test_without_files_a_worker_survives_and_serves_again(either, tmp_path):
    with (tmp_path / "log").open("w") as log:  # not a pipe: asyncio's own loop has much to say
        process = subprocess.Popen(
            [sys.executable, "-c", FEW_FILES, str(either)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            cwd=ROOT,
        )
    try:
        port, admin = map(int, process.stdout.readline().split())

        def connections():
            with contextlib.suppress(OSError):
                return metrics(admin)["bray_connections"]

        with Wire(port) as wire:
            wire.step("start", "g")
            many = [socket.create_connection(("127.0.0.1", port), timeout=5) for _ in range(300)]
            until(lambda: connections() == "75", 30)  # clients do not get the last files
            assert wire.step("tick", "g", b"x") == (200, b"x")
            assert wire.step("tick", "g", b"hoard") == (200, b"hoard")  # an Actor may
            more = [socket.create_connection(("127.0.0.1", port), timeout=5) for _ in range(50)]
            assert wire.step("tick", "g", b"x") == (200, b"x")
            for sock in many + more:
                sock.close()
            assert wire.step("tick", "g", b"free") == (200, b"free")

            def answers():
                with contextlib.suppress(EOFError, OSError), Wire(port, timeout=2) as new:
                    return new.step("tick", "g", b"y") == (200, b"y")

            until(answers, 20)
            until(lambda: connections() == "1", 20)
        process.stdin.close()
        assert process.wait(10) == 0
        assert "it takes 75 connections" in (tmp_path / "log").read_text()
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


# --- several workers --------------------------------------------------------------------------------------------------

SERVICE = """
import asyncio, logging, os, sys, time
from bray.serving.config import ServiceConfig
from bray.serving.workers import serve

done = os.open(sys.argv[2], os.O_WRONLY | os.O_CREAT | os.O_APPEND)

class Who:
    async def start(self, session, data):
        self.session, self.ticks = session, 0
        return b"%d" % os.getpid()
    async def tick(self, data):
        if data[:1] == b"s":
            await asyncio.sleep(0.01)
        if data == b"forever":
            while True:
                time.sleep(1.0)
        self.ticks += 1
        os.write(done, f"{self.session} {self.ticks}\\n".encode())
        return b"%d %d " % (os.getpid(), self.ticks) + data[:1] + b"%d" % len(data)
    async def end(self, data):
        return b"bye"

logging.basicConfig(level="INFO", stream=sys.stderr)
config = ServiceConfig(port=0, admin_port=0, use_tcp=True, workers=2, **eval(sys.argv[1]))
sys.exit(serve(Who, config, on_ready=lambda port, admin: print(port, admin, flush=True)))
"""


@contextlib.contextmanager
def two_workers(tmp_path, **config):
    with (tmp_path / "log").open("w") as log:
        process = subprocess.Popen(
            [sys.executable, "-c", SERVICE, repr({"drain_timeout_s": 0.2} | config), str(tmp_path / "done")],
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            cwd=ROOT,
        )
    try:
        process.port, process.admin = map(int, process.stdout.readline().split())
        yield process
    finally:
        process.kill()
        process.communicate()


@contextlib.contextmanager
def wires_to(service, n):
    """Connections, some of them to either worker."""
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(Wire(service.port, timeout=30)) for _ in range(n)]


class Player:
    """A game that goes on whatever happens: it connects again, starts again, and remembers what it saw."""

    def __init__(self, port, name):
        self.port, self.name = port, name
        self.owner = 0
        self.statuses = Counter()
        self.answered = self.reconnected = self.restarted = 0
        self.over = False
        self.reader = self.writer = None

    def close(self):
        if self.writer is not None:
            self.writer.close()
        self.writer = None

    async def ask(self, kind, body=b""):
        if self.writer is None:
            self.reader, self.writer = await asyncio.open_connection("127.0.0.1", self.port)
        self.writer.write(http_request(kind, self.name, body))
        head = await self.reader.readuntil(b"\r\n\r\n")
        size = int(re.search(rb"content-length: (\d+)", head.lower())[1])
        body = await self.reader.readexactly(size)
        self.statuses[kind, int(head.split()[1]), self.owner] += 1
        return int(head.split()[1]), body

    async def play(self, body=b"s", give_up=()):
        """Tick until told otherwise, or until a reply's code is one of these."""
        kind = "start"
        while not self.over:
            try:
                status, reply = await asyncio.wait_for(self.ask(kind, body if kind == "tick" else b""), 20)
            except (OSError, asyncio.IncompleteReadError):
                self.close()
                self.reconnected += 1
                if "lost" in give_up:
                    return
                await asyncio.sleep(0.02)
                continue
            if status == 200 and kind == "start":
                self.owner, kind = int(reply), "tick"
            elif status == 200:
                self.answered += 1
                assert int(reply.split()[0]) == self.owner
                await asyncio.sleep(0.005)
            elif code(reply) in give_up:
                self.close()
                return
            elif status == 404:
                kind = "start"
                self.restarted += 1
            else:
                assert status in (409, 429, 503), reply
                if status == 409:  # its start was answered by a worker that died before it could say so
                    kind = "tick"
                await asyncio.sleep(0.05)
        self.close()


def test_kill_9_under_load(tmp_path):
    with two_workers(tmp_path, actors_per_worker=100) as service:

        async def main():
            players = [Player(service.port, f"s{i}") for i in range(200)]
            tasks = [asyncio.create_task(p.play()) for p in players]
            async with asyncio.timeout(30):
                while not all(p.answered >= 3 for p in players):
                    await asyncio.sleep(0.02)
            owners = Counter(p.owner for p in players)
            assert sorted(owners.values()) == [100, 100]
            dead, alive = owners
            lost = [p for p in players if p.owner == dead]
            kept = [p for p in players if p.owner == alive]
            before = {p.name: p.answered for p in players}
            os.kill(dead, signal.SIGKILL)
            async with asyncio.timeout(30):  # all of them play on, the lost ones in a new game
                while not all(p.answered >= before[p.name] + 5 and p.owner != dead for p in players):
                    await asyncio.sleep(0.02)
            for p in players:
                p.over = True
            await asyncio.gather(*tasks)
            return dead, alive, lost, kept

        dead, alive, lost, kept = asyncio.run(main())
        for p in kept:  # a connection that ended at the dead worker, and no error
            assert p.owner == alive
            assert p.restarted == 0
            assert {status for kind, status, _ in p.statuses if kind == "tick"} == {200}
        assert all(p.restarted >= 1 for p in lost)
        assert all(status in (200, 404) for p in lost for kind, status, _ in p.statuses if kind == "tick")
        owners = {p.owner for p in lost + kept}
        assert len(owners) == 2
        assert dead not in owners
        numbers = metrics(service.admin)
        assert (numbers["bray_workers"], numbers["bray_sessions"]) == ("2", "200")
        assert numbers["bray_slots_free"] == "0"
        assert service.poll() is None


def test_sigterm_under_load_loses_no_tick(tmp_path):
    """Every tick that an Actor has answered reaches its client, whichever worker that client is connected to."""
    with two_workers(tmp_path, actors_per_worker=40, drain_timeout_s=0.5) as service:

        async def main():
            players = [Player(service.port, f"s{i}") for i in range(60)]
            tasks = [asyncio.create_task(p.play(give_up=("draining", "lost"))) for p in players]
            async with asyncio.timeout(30):
                while not all(p.answered >= 3 for p in players):
                    await asyncio.sleep(0.02)
            service.send_signal(signal.SIGTERM)
            await asyncio.sleep(0.2)  # the time that running sessions are given
            before = sum(p.answered for p in players)
            async with asyncio.timeout(30):
                await asyncio.gather(*tasks)
            return players, before

        players, before = asyncio.run(main())
        began = time.monotonic()
        assert service.wait(20) == 0
        assert time.monotonic() - began < 15
        done = Counter(line.split()[0] for line in (tmp_path / "done").read_text().splitlines())
        assert done == {p.name: p.answered for p in players}
        assert sum(done.values()) > before > 0
        assert all(status in (200, 503) for p in players for _, status, _ in p.statuses)


def test_a_worker_that_does_not_hear_the_signal_is_killed(tmp_path):
    with two_workers(tmp_path, actors_per_worker=10) as service:
        with Wire(service.port) as wire:
            wire.step("start", "g")
            wire.send(http_request("tick", "g", b"forever"))
            time.sleep(0.2)
            service.send_signal(signal.SIGTERM)
            time.sleep(0.2)
            assert service.poll() is None
            service.send_signal(signal.SIGTERM)
            assert service.wait(20) == 0
            assert "1 workers have not ended in time: they are killed" in (tmp_path / "log").read_text()


def test_a_slow_tick_outlives_the_worker_that_passed_it_on(tmp_path):
    """One worker has no session and could go; a client of the other's session is connected to it."""
    with two_workers(tmp_path, actors_per_worker=10, drain_timeout_s=8.0) as service, wires_to(service, 12) as wires:
        owner = int(wires[0].step("start", "g")[1])
        assert all(int(w.step("tick", "g", b"x")[1].split()[0]) == owner for w in wires)
        service.send_signal(signal.SIGTERM)
        time.sleep(3.0)
        for wire in wires:
            assert wire.step("tick", "g", b"x")[0] == 200
        assert wires[5].step("end", "g") == (200, b"bye")
        assert service.wait(20) == 0


def test_large_bodies_pass_between_workers(tmp_path):
    with two_workers(tmp_path, actors_per_worker=10) as service, wires_to(service, 8) as wires:
        wires[0].step("start", "g")
        for i, wire in enumerate(wires):
            size = 1 + i * 2_000_000
            status, reply = wire.step("tick", "g", b"x" * size)
            assert (status, reply.split()[2]) == (200, b"x%d" % size)
        # end and start behind each other, at whichever worker
        for wire in wires:
            wire.send(http_request("end", "g") + http_request("start", "g") + http_request("tick", "g", b"x"))
            assert wire.response()[2] == b"bye"
            owner = wire.response()[2]
            assert wire.response()[2] == owner + b" 1 x1"
            assert wire.step("start", "g")[0] == 409


# --- memory -----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_ten_thousand_idle_sessions_and_a_million_ticks():
    from benchmarks.serving import soak

    for own_connections in (False, True):
        assert soak.idle_sessions(10_000, own_connections)["mb"] < 40
    rows = list(soak.ticks(1_000_000))
    assert rows[-1]["ticks"] >= 1_000_000
    assert rows[-1]["rss_mb"] - rows[2]["rss_mb"] < 4  # flat after the first 200,000
