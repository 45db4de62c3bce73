"""bray.AsyncClient: the rules of bray.Client, many sessions at once, and one connection for all of them."""

import asyncio
import gc
import time
import warnings

import pytest

import bray
from bray.client import AsyncClient, AsyncConnection, ClientError, ConnectFailed, ConnectionLost, SessionLost
from tests.client_servers import SERVERS, BrayServer
from tests.server_for_tests import Server

BOTH = pytest.mark.parametrize("tcp", [False, True], ids=["http", "tcp"])


@pytest.fixture(params=SERVERS)
def server(request):
    with SERVERS[request.param]() as server:
        yield server


@pytest.fixture
def strict():
    with Server() as server:
        yield server


def client(server, tcp=False, **settings):
    return AsyncClient("127.0.0.1", server.port, **({"timeout": 10} | settings), tcp=tcp)


def run(coroutine):
    """Run to the end; a connection or a future's error that nobody looked at fails the test."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", ResourceWarning)
        complaints = []

        async def main():
            asyncio.get_running_loop().set_exception_handler(lambda _, context: complaints.append(context["message"]))
            result = await coroutine
            await asyncio.sleep(0)
            gc.collect()
            return result

        result = asyncio.run(asyncio.wait_for(main(), 60))
    assert complaints == []
    return result


@BOTH
def test_a_game(server, tcp):
    async def game():
        async with bray.AsyncClient("127.0.0.1", server.port, tcp=tcp) as c:
            assert await c.start("match", "red") == b"started match-agent-red"
            for body in (b"", b"x", bytes(range(256)), b"y" * 300_000):
                assert await c.tick(body) == body
            assert await c.tick({"a": [1]}) == {"a": [1]}
            assert await c.step(b"stateless") == b"stateless"
            assert await c.stop() == b"ended"

    run(game())
    assert server.executed[0] == ("start", "match-agent-red", b"")


@BOTH
def test_a_game_on_uvloop(strict, tcp):
    uvloop = pytest.importorskip("uvloop")

    async def game():
        async with client(strict, tcp, retries=0) as c:
            await c.start()
            assert await c.tick(b"x" * 200_000) == b"x" * 200_000
            strict.hang_up()
            time.sleep(0.05)
            assert await c.tick(b"on") == b"on"
            assert await c.end() == b"ended"

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(asyncio.wait_for(game(), 30))


@BOTH
def test_calls_of_one_client_keep_their_order(server, tcp):
    async def game():
        async with client(server, tcp) as c:
            await c.start("one")
            replies = await asyncio.gather(*(c.tick(b"%d" % i) for i in range(50)))
            assert replies == [b"%d" % i for i in range(50)]

    run(game())
    assert [x[2] for x in server.executed if x[0] == "tick"] == [b"%d" % i for i in range(50)]


def test_many_sessions_share_one_connection(server):
    async def play(game, n):
        await game.start()
        for i in range(20):
            assert await game.tick(b"%d/%d" % (n, i)) == b"%d/%d" % (n, i)
        assert await game.end() == b"ended"

    async def games():
        async with AsyncConnection("127.0.0.1", server.port, 20) as connection:
            await asyncio.gather(*(play(connection.session(), n) for n in range(100)))
            await asyncio.gather(*(connection.session().step(b"%d" % n) for n in range(50)))

    run(games())
    assert len([x for x in server.executed if x[0] == "end"]) >= 100
    if isinstance(server, Server):
        assert server.connections == 1


def test_replies_out_of_order(strict):
    async def games():
        async with AsyncConnection("127.0.0.1", strict.port, 10) as connection:
            a, b = connection.session("a"), connection.session("b")
            await a.start()
            await b.start()
            strict.tell("hold", "ok")
            first = asyncio.create_task(a.tick(b"first"))
            while strict.requests < 3:
                await asyncio.sleep(0.01)
            assert await b.tick(b"second") == b"second"  # its reply comes before that of `first`
            assert await first == b"first"

    run(games())


def test_slow_session_does_not_hold_up_the_others():
    class Slow:
        def start(self, session, data):
            self.session = session

        async def tick(self, data):
            await asyncio.sleep(float(data))
            return data

        def end(self, data):
            pass

    async def games(port):
        async with AsyncConnection("127.0.0.1", port, 10) as connection:
            slow, quick = connection.session("slow"), connection.session("quick")
            await slow.start()
            await quick.start()
            order = []

            async def tick(game, data):
                order.append(await game.tick(data))

            task = asyncio.create_task(tick(slow, b"0.5"))
            await asyncio.sleep(0.05)
            await tick(quick, b"0.01")
            await task
            assert order == [b"0.01", b"0.5"]

    with BrayServer() as server:
        server.server.sessions.make_actor = Slow
        run(games(server.port))


@BOTH
def test_errors(server, tcp):
    async def game():
        async with client(server, tcp, session="gone") as c, client(server, tcp) as other:
            with pytest.raises(SessionLost) as e:
                await c.tick(b"x")
            assert (e.value.status, e.value.code) == (404, "no_session")
            await c.start()
            with pytest.raises(ClientError) as e:
                await other.start("gone")
            assert (e.value.status, e.value.code) == (409, "session_exists")
            with pytest.raises(ClientError, match="call start"):
                await AsyncClient().tick(b"x")

    run(game())


@BOTH
@pytest.mark.parametrize("order", ["overloaded", "full"])
def test_refusals_are_tried_again(strict, tcp, order):
    async def game():
        async with client(strict, tcp) as c:
            strict.tell(order, order)
            await c.start()
            strict.tell("overloaded:1")
            began = time.monotonic()
            await c.tick(b"x")
            assert tcp or time.monotonic() - began >= 1.0

    run(game())
    assert strict.requests == 6
    assert strict.connections == 1


@BOTH
@pytest.mark.parametrize("fault", ["cut", "half", "garbage", "wrong_length", "negative"])
def test_lost_replies(strict, tcp, fault):
    async def game():
        async with client(strict, tcp) as c:
            await c.start()
            strict.tell(fault)
            with pytest.raises(ConnectionLost):
                await c.tick(b"1")
            assert await c.tick(b"2") == b"2"
            strict.tell(fault)
            assert await c.tick(b"3", idempotent=True) == b"3"

    run(game())
    assert [x[2] for x in strict.executed if x[0] == "tick"] == [b"1", b"2", b"3", b"3"]


def test_a_broken_connection_reaches_everybody_on_it(strict):
    async def games():
        async with AsyncConnection("127.0.0.1", strict.port, 10) as connection:
            sessions = [connection.session(f"s{i}") for i in range(5)]
            for s in sessions:
                await s.start()
            strict.tell("hold", "hold", "hold", "hold", "cut")
            results = await asyncio.gather(*(s.tick(b"x") for s in sessions), return_exceptions=True)
            assert [type(r) for r in results] == [ConnectionLost] * 5
            strict.held.clear()
            assert await asyncio.gather(*(s.tick(b"y") for s in sessions)) == [b"y"] * 5

    run(games())
    assert strict.connections == 2


@BOTH
def test_timeout(strict, tcp):
    async def game():
        async with client(strict, tcp, timeout=0.3) as c:
            await c.start()
            strict.tell("slow:1")
            with pytest.raises(ConnectionLost) as e:
                await c.tick(b"late")
            assert e.value.code == "timeout"
            c.timeout = 10
            assert await c.tick(b"next") == b"next"  # the late reply is not taken for this one's

    run(game())
    assert strict.connections == (1 if tcp else 2)


@BOTH
def test_cancelled_call_does_not_shift_the_replies(strict, tcp):
    async def game():
        async with client(strict, tcp) as c:
            await c.start()
            strict.tell("slow:0.3")
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(c.tick(b"1"), 0.05)
            assert await c.tick(b"2") == b"2"

    run(game())


@BOTH
def test_idle_connection_that_the_server_closed_is_reopened(strict, tcp):
    async def game():
        async with client(strict, tcp, retries=0) as c:
            await c.start()
            strict.hang_up()
            time.sleep(0.05)  # the loop stands still: it cannot have seen the end of the connection
            assert await c.tick(b"1") == b"1"
            strict.hang_up()
            await asyncio.sleep(0.05)
            assert await c.tick(b"2") == b"2"

    run(game())
    assert [x[2] for x in strict.executed] == [b"", b"1", b"2", b""]


@BOTH
def test_nobody_listens(tcp):
    with Server() as server:
        pass
    with pytest.raises(ConnectFailed, match="Is the service running") as e:
        run(client(server, tcp, retries=1).start())
    assert e.value.code == "connect_failed"


@BOTH
def test_end_on_leaving_the_block(server, tcp):
    async def game():
        async with client(server, tcp) as c:
            await c.start("a")
        with pytest.raises(ZeroDivisionError):  # noqa: PT012
            async with client(server, tcp) as c:
                await c.start("b")
                raise ZeroDivisionError

    run(game())
    assert [x[:2] for x in server.executed] == [("start", "a"), ("end", "a"), ("start", "b"), ("end", "b")]


def test_framing_error_is_told(strict):
    async def game():
        async with client(strict, tcp=True) as c:
            await c.start()
            with pytest.raises(ClientError) as e:
                await c.tick(b"x" * (2 << 20))
            assert e.value.code in ("too_large", "connection_lost")
            assert await c.tick(b"on") == b"on"

    run(game())


@pytest.mark.parametrize("form", ["continue", "chunked", "drip", "until_close", "close", "answer_and_close"])
def test_other_forms_of_http_replies(strict, form):
    async def game():
        async with client(strict) as c:
            await c.start()
            for _ in range(2):
                strict.tell(form)
                assert await c.tick(b"body") == b"body"
                while form == "answer_and_close" and strict.open:
                    await asyncio.sleep(0.01)

    run(game())
